// Kernels for AVX2, FMA and F16C.
#include <immintrin.h>

#include "ffi/cpu_paged_attn/kernel_inl.h"
#include "ffi/cpu_paged_attn/read_inl.h"

namespace neojax {
namespace {

struct Avx2 {
  using F = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kHeads = 4;
  static constexpr int kRegisters = 16;

  static F Set(float x) { return _mm256_set1_ps(x); }
  template <bool kPart>
  static F Load(const float* p) {
    return _mm256_loadu_ps(p);
  }
  template <bool kPart>
  static F Load(const uint16_t* p) {
    return _mm256_cvtph_ps(
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  template <bool kPart>
  static void LoadPairs(const uint16_t* p, F& even, F& odd) {
    __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    odd = _mm256_castsi256_ps(
        _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void Store(float* p, F x) { _mm256_storeu_ps(p, x); }
  template <bool kPart>
  static void StorePart(float* p, F x) {
    Store(p, x);
  }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  static F Round(F x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // x * 2^n of a whole n
  static F Scale(F x, F n) {
    return Mul(
        x, _mm256_castsi256_ps(_mm256_slli_epi32(
               _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)),
               23)));
  }
  static bool AnyAbove(F x, float y) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x, Set(y), _CMP_GT_OQ)) != 0;
  }
  static F CopySign(F x, F sign) {
    F bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, x), _mm256_and_ps(bit, sign));
  }
  static float HorizontalMax(F x) {
    __m128 y =
        _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static float HorizontalSum(F x) {
    __m128 y =
        _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
};

}  // namespace

const KernelTable kAvx2Kernels = {
    "avx2",
    &Attention<Avx2, Plain<Avx2, float>>::Run,
    &Attention<Avx2, Paired<Avx2>>::Run,
    &Attention<Avx2, Plain<Avx2, uint16_t>>::Run,
    &Read<Avx2>,
    &ReadTiles<Avx2>,
};

}  // namespace neojax
