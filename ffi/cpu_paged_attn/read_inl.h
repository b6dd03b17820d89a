// Loops that only read: what the kernels are compared with.
#ifndef NEOJAX_CPU_PAGED_ATTN_READ_INL_H_
#define NEOJAX_CPU_PAGED_ATTN_READ_INL_H_

#include <cstdint>

#include "ffi/cpu_paged_attn/kernel_inl.h"

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

// Bytes [begin, end) of `num_tiles` tiles, `piece` bytes of each in turn.
template <class I>
typename I::F ReadStrip(const float* const* tiles, const float* const* next,
                        int num_tiles, int64_t begin, int64_t end, int piece,
                        typename I::F sum) {
  constexpr int kLine = 16;  // floats
  for (int64_t at = begin / 4; at < end / 4; at += piece / 4) {
    for (int i = 0; i < num_tiles; ++i) {
      for (int64_t line = at; line < at + piece / 4; line += kLine) {
        Prefetch(next[i] + line);
        for (int j = 0; j < kLine; j += I::kLanes) {
          sum = I::Add(sum, I::template Load<false>(tiles[i] + line + j));
        }
      }
    }
  }
  return sum;
}

// K a line of each tile in turn, V 256 bytes: as it is with four heads.
template <class I>
void ReadTiles(const AttendArgs& a) {
  const float* tiles[kStripTiles];
  const float* next[kStripTiles];
  typename I::F sum = I::Set(0.0f);
  const int last_tile = (a.end + kTileTokens - 1) / kTileTokens;
  for (int tile = a.begin / kTileTokens; tile < last_tile;
       tile += kStripTiles) {
    const int num_tiles =
        last_tile - tile < kStripTiles ? last_tile - tile : kStripTiles;
    Attention<I, Plain<I, float>>::FindTiles(a, tile, last_tile, tiles, next);
    const int64_t half = a.tile_bytes / 2;
    sum = ReadStrip<I>(tiles, next, num_tiles, 0, half, 64, sum);
    sum = ReadStrip<I>(tiles, next, num_tiles, half, a.tile_bytes, 256, sum);
  }
  // What was read must be used, or the loop could go.
  const float none = I::HorizontalSum(sum) == 1.0f ? 1e-30f : 0.0f;
  for (int i = 0; i < a.group * a.head_dim; ++i) a.out[i] = none;
  for (int g = 0; g < a.group; ++g) {
    a.max[g] = 0.0f;
    a.sum[g] = 1.0f;
  }
}

}  // namespace
}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_READ_INL_H_
