// Kernels for NEON with BF16: one instruction multiplies and adds a pair.
#include "ffi/cpu_paged_attn/neon_inl.h"

namespace neojax {
namespace {

// As Paired, with weights rounded to bfloat16: exact for a bfloat16 query, an
// error of 2^-9 on each of softmax's results.
struct PairedNeon {
  using Element = uint16_t;
  using F = float32x4_t;
  using X = bfloat16x8_t;
  using Weight = uint32_t;
  static constexpr int kPack = 2;

  template <bool kPart>
  static X Load(const uint16_t* p) {
    return vreinterpretq_bf16_u16(vld1q_u16(p));
  }
  using W = bfloat16x8_t;
  static W Spread(const Weight* w) {
    return vreinterpretq_bf16_u32(vdupq_n_u32(*w));
  }
  static F MulAdd(X x, W w, F acc) { return vbfdotq_f32(acc, x, w); }
  // `count` is a multiple of 8.
  static void PackWeights(const float* from, Weight* to, int count) {
    for (int i = 0; i < count; i += 4) {
      bfloat16x4_t pairs = vcvt_bf16_f32(vld1q_f32(from + i));
      vst1_u32(to + i / 2, vreinterpret_u32_bf16(pairs));
    }
  }
};

}  // namespace

const KernelTable kNeonBf16Kernels = {
    "neonbf16", nullptr, &Attention<Neon, PairedNeon>::Run,
    nullptr,    nullptr, nullptr,
};

}  // namespace neojax
