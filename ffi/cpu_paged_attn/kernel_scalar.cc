// The kernels that run everywhere: four-lane vectors of the compiler's own,
// which are SSE2 on x86-64, NEON on aarch64 and plain code elsewhere.
#include "ffi/cpu_paged_attn/kernel_inl.h"
#include "ffi/cpu_paged_attn/read_inl.h"

namespace neojax {
namespace {

struct Portable {
  using F = float __attribute__((vector_size(16)));
  using Ints = int32_t __attribute__((vector_size(16)));
  using Words = uint32_t __attribute__((vector_size(16)));
  static constexpr int kLanes = 4;
  static constexpr int kHeads = 2;
  static constexpr int kRegisters = 16;

  template <class To, class From>
  static To Bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "");
    std::memcpy(&to, &from, sizeof to);
    return to;
  }

  static F Set(float x) { return F{x, x, x, x}; }
  template <bool kPart>
  static F Load(const float* p) {
    F x;
    std::memcpy(&x, p, sizeof x);
    return x;
  }
  // float16: shifted into place, the exponent is 112 too small; a multiply
  // also sets subnormals right. Infinities and NaNs get the top exponent.
  template <bool kPart>
  static F Load(const uint16_t* p) {
    Words h = {p[0], p[1], p[2], p[3]};
    F x = Bits<F>((h & 0x7fffu) << 13) * 0x1p112f;
    Words special = Bits<Words>((h & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return Bits<F>(Bits<Words>(x) | special | ((h & 0x8000u) << 16));
  }
  template <bool kPart>
  static void LoadPairs(const uint16_t* p, F& even, F& odd) {
    Words x;
    std::memcpy(&x, p, sizeof x);
    even = Bits<F>(x << 16);
    odd = Bits<F>(x & 0xffff0000u);
  }
  static void Store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
  template <bool kPart>
  static void StorePart(float* p, F x) {
    Store(p, x);
  }
  static F Add(F a, F b) { return a + b; }
  static F Sub(F a, F b) { return a - b; }
  static F Mul(F a, F b) { return a * b; }
  static F Div(F a, F b) { return a / b; }
  static F Fma(F a, F b, F c) { return a * b + c; }
  static F Max(F a, F b) { return a > b ? a : b; }
  static F Min(F a, F b) { return a < b ? a : b; }
  // Adding 1.5 * 2^23 leaves no bit for a fraction; exact for |x| < 2^22.
  static F Round(F x) { return (x + 12582912.0f) - 12582912.0f; }
  // x * 2^n of a whole n
  static F Scale(F x, F n) {
    return x * Bits<F>((__builtin_convertvector(n, Ints) + 127) << 23);
  }
  static bool AnyAbove(F x, float y) {
    Ints above = x > Set(y);
    return (above[0] | above[1] | above[2] | above[3]) != 0;
  }
  static F CopySign(F x, F sign) {
    return Bits<F>((Bits<Words>(x) & 0x7fffffffu) |
                   (Bits<Words>(sign) & 0x80000000u));
  }
  static float HorizontalMax(F x) {
    float a = x[0] > x[1] ? x[0] : x[1];
    float b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
  }
  static float HorizontalSum(F x) { return (x[0] + x[1]) + (x[2] + x[3]); }
};

}  // namespace

const KernelTable kScalarKernels = {
    "scalar",
    &Attention<Portable, Plain<Portable, float>>::Run,
    &Attention<Portable, Paired<Portable>>::Run,
    &Attention<Portable, Plain<Portable, uint16_t>>::Run,
    &Read<Portable>,
    &ReadTiles<Portable>,
};

}  // namespace neojax
