// Pairs of bfloat16 multiplied and added by one instruction.
#ifndef NEOJAX_CPU_PAGED_ATTN_AVX512BF16_INL_H_
#define NEOJAX_CPU_PAGED_ATTN_AVX512BF16_INL_H_

#include "ffi/cpu_paged_attn/avx512_inl.h"

namespace neojax {
namespace {

// As Paired, with weights rounded to bfloat16: exact for a bfloat16 query, an
// error of 2^-9 on each of softmax's results.
struct PairedBf16 {
  using Element = uint16_t;
  using F = __m512;
  using X = __m512i;
  using Weight = uint32_t;
  static constexpr int kPack = 2;

  template <bool kPart>
  static X Load(const uint16_t* p) {
    return Avx512::LoadWords<kPart>(p);
  }
  using W = __m512i;
  static W Spread(const Weight* w) {
    return _mm512_set1_epi32(static_cast<int>(*w));
  }
  static F MulAdd(X x, W pair, F acc) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(x),
                            reinterpret_cast<__m512bh>(pair));
  }
  // `count` is a multiple of 8.
  static void PackWeights(const float* from, Weight* to, int count) {
    for (int i = 0; i < count; i += 16) {
      __mmask16 mask = count - i >= 16 ? 0xffff : 0xff;
      __m256bh pairs =
          _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + i));
      _mm256_mask_storeu_epi32(to + i / 2, mask == 0xffff ? 0xff : 0x0f,
                               reinterpret_cast<__m256i>(pairs));
    }
  }
};

}  // namespace
}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_AVX512BF16_INL_H_
