// A loop that only reads: what the kernels are compared with.
#ifndef NEOJAX_CPU_PAGED_ATTN_READ_INL_H_
#define NEOJAX_CPU_PAGED_ATTN_READ_INL_H_

#include <cstdint>

namespace neojax {
namespace {

template <class I, int kStreams>
float ReadStreams(const char* data, int64_t bytes, int ahead) {
  using F = typename I::F;
  constexpr int kLineVecs = 64 / (4 * I::kLanes);
  F sum[kStreams][kLineVecs];
  for (int s = 0; s < kStreams; ++s) {
    for (int j = 0; j < kLineVecs; ++j) sum[s][j] = I::Set(0.0f);
  }
  const int64_t each = bytes / kStreams;
  for (int64_t at = 0; at < each; at += 64) {
    for (int s = 0; s < kStreams; ++s) {
      const char* line = data + s * each + at;
      if (ahead > 0) __builtin_prefetch(line + ahead, 0, 3);
      for (int j = 0; j < kLineVecs; ++j) {
        sum[s][j] = I::Add(
            sum[s][j], I::template Load<false>(reinterpret_cast<const float*>(
                           line + j * 4 * I::kLanes)));
      }
    }
  }
  F total = I::Set(0.0f);
  for (int s = 0; s < kStreams; ++s) {
    for (int j = 0; j < kLineVecs; ++j) total = I::Add(total, sum[s][j]);
  }
  return I::HorizontalSum(total);
}

template <class I>
float Read(const char* data, int64_t bytes, int streams, int ahead) {
  switch (streams) {
    case 1:
      return ReadStreams<I, 1>(data, bytes, ahead);
    case 2:
      return ReadStreams<I, 2>(data, bytes, ahead);
    case 4:
      return ReadStreams<I, 4>(data, bytes, ahead);
    default:
      return ReadStreams<I, 8>(data, bytes, ahead);
  }
}

}  // namespace
}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_READ_INL_H_
