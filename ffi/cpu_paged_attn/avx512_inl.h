// AVX-512 vectors, shared by the files that use them.
#ifndef NEOJAX_CPU_PAGED_ATTN_AVX512_INL_H_
#define NEOJAX_CPU_PAGED_ATTN_AVX512_INL_H_

#include <immintrin.h>

#include "ffi/cpu_paged_attn/kernel_inl.h"

namespace neojax {
namespace {

struct Avx512 {
  using F = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kHeads = 8;
  static constexpr int kRegisters = 32;
  static constexpr __mmask16 kHalf = 0xff;

  static F Set(float x) { return _mm512_set1_ps(x); }
  template <bool kPart>
  static F Load(const float* p) {
    return kPart ? _mm512_maskz_loadu_ps(kHalf, p) : _mm512_loadu_ps(p);
  }
  template <bool kPart>
  static F Load(const uint16_t* p) {
    const __m128i* half = reinterpret_cast<const __m128i*>(p);
    return _mm512_cvtph_ps(
        kPart ? _mm256_zextsi128_si256(_mm_loadu_si128(half))
              : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  template <bool kPart>
  static __m512i LoadWords(const uint16_t* p) {
    return kPart ? _mm512_maskz_loadu_epi32(kHalf, p) : _mm512_loadu_si512(p);
  }
  template <bool kPart>
  static void LoadPairs(const uint16_t* p, F& even, F& odd) {
    __m512i x = LoadWords<kPart>(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    odd = _mm512_castsi512_ps(
        _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
  template <bool kPart>
  static void StorePart(float* p, F x) {
    if (kPart) {
      _mm512_mask_storeu_ps(p, kHalf, x);
    } else {
      _mm512_storeu_ps(p, x);
    }
  }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  static F Round(F x) {
    return _mm512_roundscale_ps(x,
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  // x * 2^n of a whole n; 0 instead of a subnormal, which would be slow.
  static F Scale(F x, F n) {
    return _mm512_maskz_scalef_ps(
        _mm512_cmp_ps_mask(n, Set(-127.0f), _CMP_GT_OQ), x, n);
  }
  static bool AnyAbove(F x, float y) {
    return _mm512_cmp_ps_mask(x, Set(y), _CMP_GT_OQ) != 0;
  }
  static F CopySign(F x, F sign) {
    // Bit by bit: the sign's where the mask is set, else x's.
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_set1_epi32(static_cast<int>(0x80000000u)),
        _mm512_castps_si512(sign), _mm512_castps_si512(x), 0xca));
  }
  static float HorizontalMax(F x) { return _mm512_reduce_max_ps(x); }
  static float HorizontalSum(F x) { return _mm512_reduce_add_ps(x); }
};

}  // namespace
}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_AVX512_INL_H_
