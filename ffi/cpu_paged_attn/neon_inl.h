// NEON vectors, shared by the files that use them.
#ifndef NEOJAX_CPU_PAGED_ATTN_NEON_INL_H_
#define NEOJAX_CPU_PAGED_ATTN_NEON_INL_H_

#include <arm_neon.h>

#include "ffi/cpu_paged_attn/kernel_inl.h"

namespace neojax {
namespace {

struct Neon {
  using F = float32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kHeads = 4;
  static constexpr int kRegisters = 32;

  static F Set(float x) { return vdupq_n_f32(x); }
  template <bool kPart>
  static F Load(const float* p) {
    return vld1q_f32(p);
  }
  template <bool kPart>
  static F Load(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
  }
  template <bool kPart>
  static void LoadPairs(const uint16_t* p, F& even, F& odd) {
    uint32x4_t x = vreinterpretq_u32_u16(vld1q_u16(p));
    even = vreinterpretq_f32_u32(vshlq_n_u32(x, 16));
    odd = vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000u)));
  }
  static void Store(float* p, F x) { vst1q_f32(p, x); }
  template <bool kPart>
  static void StorePart(float* p, F x) {
    vst1q_f32(p, x);
  }
  static F Add(F a, F b) { return vaddq_f32(a, b); }
  static F Sub(F a, F b) { return vsubq_f32(a, b); }
  static F Mul(F a, F b) { return vmulq_f32(a, b); }
  static F Div(F a, F b) { return vdivq_f32(a, b); }
  static F Fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F Max(F a, F b) { return vmaxq_f32(a, b); }
  static F Min(F a, F b) { return vminq_f32(a, b); }
  static F Round(F x) { return vrndnq_f32(x); }
  // x * 2^n of a whole n
  static F Scale(F x, F n) {
    return Mul(x, vreinterpretq_f32_s32(vshlq_n_s32(
                      vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)));
  }
  static bool AnyAbove(F x, float y) {
    return vmaxvq_u32(vcgtq_f32(x, Set(y))) != 0;
  }
  static F CopySign(F x, F sign) {
    return vbslq_f32(vdupq_n_u32(0x80000000u), sign, x);
  }
  static float HorizontalMax(F x) { return vmaxvq_f32(x); }
  static float HorizontalSum(F x) { return vaddvq_f32(x); }
};

}  // namespace
}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_NEON_INL_H_
