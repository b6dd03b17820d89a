// Flash-decoding over 16-token tiles, written once over a vector type `I`.
//
// A strip of a few tiles is taken at a time: scores of all query heads of the
// group, one step of the online softmax, then the weighted sum of V. A
// strip's K and V come from memory once; further blocks of heads read them
// from the first-level cache. While a strip is worked on, the lines of the
// next one are asked for: blocks are scattered, so the hardware's prefetcher
// would start anew with every tile. Everything is in an anonymous namespace:
// each including file has its own, compiled for its own instruction set.
#ifndef NEOJAX_CPU_PAGED_ATTN_KERNEL_INL_H_
#define NEOJAX_CPU_PAGED_ATTN_KERNEL_INL_H_

#include <cstdint>
#include <cstring>

#include "ffi/cpu_paged_attn/kernel.h"
#include "ffi/cpu_paged_attn/tile_inl.h"

namespace neojax {
namespace {

template <class I, class Kv>
struct Attention {
  using Element = typename Kv::Element;
  using Weight = typename Kv::Weight;
  static constexpr int kPack = Kv::kPack;
  // Packs of a strip's tokens.
  static constexpr int kStripPacks = kStripTokens / kPack;

  template <int kValue>
  struct Constant {
    static constexpr int value = kValue;
  };

  // Calls fn(first head, number of heads as a constant) over blocks of
  // I::kHeads heads and the rest.
  template <class Fn>
  static void ForHeads(int group, Fn fn) {
    int g = 0;
    for (; g + I::kHeads <= group; g += I::kHeads) {
      fn(g, Constant<I::kHeads>());
    }
    CallRest<I::kHeads - 1>(g, group - g, fn);
  }
  template <int kHeads, class Fn>
  static void CallRest(int g, int rest, Fn fn) {
    if constexpr (kHeads > 0) {
      if (rest == kHeads) return fn(g, Constant<kHeads>());
      CallRest<kHeads - 1>(g, rest, fn);
    }
  }

  // Turns one head's scores of a strip into logits in base 2; tokens outside
  // [first, last) become minus infinity. Returns the largest of each lane.
  static typename I::F Logits(const AttendArgs& a, float* x, int num_tokens,
                              int first, int last) {
    using F = typename I::F;
    F top = I::Set(-__builtin_inff());
    if (a.softcap > 0.0f) {
      // c * tanh(y / c), by e^-2|z| because of the exponential's range.
      F by = I::Set(2.0f * kLog2E * a.scale / a.softcap);
      F cap = I::Set(a.softcap * kLog2E);
      for (int t = 0; t < num_tokens; t += I::kLanes) {
        F z = I::Mul(I::template Load<false>(x + t), by);
        F e = Exp2<I>(I::Min(z, I::Sub(I::Set(0.0f), z)));
        F tanh = I::Div(I::Sub(I::Set(1.0f), e), I::Add(I::Set(1.0f), e));
        F y = I::Mul(I::CopySign(tanh, z), cap);
        I::Store(x + t, y);
        top = I::Max(top, y);
      }
    } else {
      F by = I::Set(a.scale * kLog2E);
      for (int t = 0; t < num_tokens; t += I::kLanes) {
        F y = I::Mul(I::template Load<false>(x + t), by);
        I::Store(x + t, y);
        top = I::Max(top, y);
      }
    }
    if (first > 0 || last < num_tokens) {
      for (int t = 0; t < first; ++t) x[t] = -__builtin_inff();
      for (int t = last; t < num_tokens; ++t) x[t] = -__builtin_inff();
      top = I::template Load<false>(x);
      for (int t = I::kLanes; t < num_tokens; t += I::kLanes) {
        top = I::Max(top, I::template Load<false>(x + t));
      }
    }
    return top;
  }

  // One step of the online softmax over a strip's scores x [G, kStripTokens]:
  // x becomes exp2(logit - max); a.max and sums [G, kLanes] are brought up to
  // date, and decay[g] is what earlier sums are worth now. A new maximum is
  // rare once some tokens are seen: only then are the lanes compared. Returns
  // whether any decay is not 1.
  static bool Softmax(const AttendArgs& a, int group, float* x, int num_tokens,
                      int first, int last, float* decay, float* sums) {
    using F = typename I::F;
    bool decays = false;
    for (int g = 0; g < group; ++g) {
      float* row = x + g * kStripTokens;
      F top = Logits(a, row, num_tokens, first, last);
      decay[g] = 1.0f;
      if (I::AnyAbove(top, a.max[g])) {
        const float max = I::HorizontalMax(top);
        float lanes[I::kLanes];
        I::Store(lanes, Exp2<I>(I::Set(a.max[g] - max)));
        decay[g] = lanes[0];
        a.max[g] = max;
        decays = true;
      }
      F shift = I::Set(a.max[g]);
      F total = I::Set(0.0f);
      for (int t = 0; t < num_tokens; t += I::kLanes) {
        F p = Exp2<I>(I::Sub(I::template Load<false>(row + t), shift));
        I::Store(row + t, p);
        total = I::Add(total, p);
      }
      float* sum = sums + g * I::kLanes;
      I::Store(sum,
               I::Fma(I::template Load<false>(sum), I::Set(decay[g]), total));
    }
    return decays;
  }

  static const Element* TileAt(const AttendArgs& a, const char* base,
                               const int32_t* table, int tile) {
    int in_block = 0;
    int block = tile;
    if (a.tiles_per_block > 1) {
      in_block = tile % a.tiles_per_block;
      block = tile / a.tiles_per_block;
    }
    return reinterpret_cast<const Element*>(
        base + table[block] * a.block_bytes + in_block * a.tile_bytes);
  }

  // The K tiles of the strip that starts at `tile`, and those to ask for
  // meanwhile: the strip after it, at the end the caller's next, and if there
  // is none, what is in the cache anyway. A strip cut short repeats its last.
  static void FindTiles(const AttendArgs& a, int tile, int last_tile,
                        const Element** k, const Element** next) {
    const int after = tile + kStripTiles;
    const int next_first = a.next_begin / kTileTokens;
    const int next_last = (a.next_end + kTileTokens - 1) / kTileTokens;
    for (int i = 0; i < kStripTiles; ++i) {
      k[i] = tile + i < last_tile ? TileAt(a, a.base, a.table, tile + i)
                                  : k[i - 1];
      if (after + i < last_tile) {
        next[i] = TileAt(a, a.base, a.table, after + i);
      } else if (after >= last_tile && next_first + i < next_last) {
        next[i] = TileAt(a, a.next_base, a.next_table, next_first + i);
      } else {
        next[i] = k[i];
      }
    }
  }

  // kDim: the head dim if known, else 0.
  template <int kDim>
  static void RunFor(const AttendArgs& a) {
    alignas(64) float x[kMaxGroup * kStripTokens];
    alignas(64) Weight packed_p[kMaxGroup * kStripPacks];
    alignas(64) Weight packed_q[kMaxGroup * kMaxHeadDim / kPack];
    alignas(64) Element clean_v[2][kTileTokens * kMaxHeadDim];
    alignas(64) float sums[kMaxGroup * I::kLanes] = {};
    float decay[kMaxGroup];
    float ones[kMaxGroup];
    const int group = a.group;
    const int head_dim = kDim > 0 ? kDim : a.head_dim;
    for (int g = 0; g < group; ++g) {
      a.max[g] = -__builtin_inff();
      ones[g] = 1.0f;
    }
    std::memset(a.out, 0, sizeof(float) * group * head_dim);
    const Weight* q = Pack(a.q, packed_q, group * head_dim);

    const int last_tile = (a.end + kTileTokens - 1) / kTileTokens;
    for (int tile = a.begin / kTileTokens; tile < last_tile;
         tile += kStripTiles) {
      const int num_tiles =
          last_tile - tile < kStripTiles ? last_tile - tile : kStripTiles;
      const Element* k[kStripTiles];
      const Element* v[kStripTiles];
      const Element* next_k[kStripTiles];
      const Element* next_v[kStripTiles];
      FindTiles(a, tile, last_tile, k, next_k);
      for (int i = 0; i < kStripTiles; ++i) {
        v[i] = k[i] + kTileTokens * head_dim;
        next_v[i] = next_k[i] + kTileTokens * head_dim;
      }
      ForHeads(group, [&](int g, auto heads) {
        constexpr int kHeads = heads.value;
        // Tiles at once, as there are registers for their sums.
        constexpr int kVecs = kTileTokens / I::kLanes;
        constexpr int kTiles = Fits<I, Kv>(kHeads, kVecs * 4)   ? 4
                               : Fits<I, Kv>(kHeads, kVecs * 2) ? 2
                                                                : 1;
        int i = 0;
        for (; i + kTiles <= num_tiles; i += kTiles) {
          Scores<I, Kv, kHeads, kTiles, kDim>(
              k + i, g == 0 ? next_k + i : k + i, q + g * (head_dim / kPack),
              head_dim, x + g * kStripTokens + i * kTileTokens);
        }
        for (; i < num_tiles; ++i) {
          Scores<I, Kv, kHeads, 1, kDim>(
              k + i, g == 0 ? next_k + i : k + i, q + g * (head_dim / kPack),
              head_dim, x + g * kStripTokens + i * kTileTokens);
        }
      });
      int first = a.begin - tile * kTileTokens;
      int last = a.end - tile * kTileTokens;
      const int num_tokens = num_tiles * kTileTokens;
      if (first < 0) first = 0;
      if (last > num_tokens) last = num_tokens;
      // Slots that hold no token may hold NaN, and 0 * NaN is NaN.
      if (first > 0) v[0] = CleanV(v[0], head_dim, first, last, clean_v[0]);
      if (last < num_tokens) {
        const int before = num_tokens - kTileTokens;
        v[num_tiles - 1] =
            CleanV(v[num_tiles - 1], head_dim, 0, last - before, clean_v[1]);
      }
      if (num_tokens == kStripTokens) {
        Softmax(a, group, x, kStripTokens, first, last, decay, sums);
      } else {
        Softmax(a, group, x, num_tokens, first, last, decay, sums);
      }
      const Weight* p = Pack(x, packed_p, group * kStripTokens);
      ForHeads(group, [&](int g, auto heads) {
        const Element* const* next = g == 0 ? next_v : v;
        const Weight* head_p = p + g * kStripPacks;
        float* out = a.out + g * head_dim;
        if (num_tiles == kStripTiles) {
          Weigh<I, Kv, heads.value, kStripTiles, kDim>(
              v, next, head_p, decay + g, head_dim, out);
          return;
        }
        for (int i = 0; i < num_tiles; ++i) {
          Weigh<I, Kv, heads.value, 1, kDim>(
              v + i, next + i, head_p + i * (kTileTokens / kPack),
              i == 0 ? decay + g : ones + g, head_dim, out);
        }
      });
    }
    for (int g = 0; g < group; ++g) {
      a.sum[g] =
          I::HorizontalSum(I::template Load<false>(sums + g * I::kLanes));
    }
  }

  static void Run(const AttendArgs& a) {
    if constexpr (I::kLanes >= 8) {
      if (a.head_dim == 128) return RunFor<128>(a);
      if (a.head_dim == 64) return RunFor<64>(a);
    }
    RunFor<0>(a);
  }

  // `count` floats as weights; where weights are floats, the floats.
  static const Weight* Pack(const float* from, Weight* to, int count) {
    if constexpr (sizeof(Weight) == kPack * sizeof(float)) {
      (void)to;
      (void)count;
      return reinterpret_cast<const Weight*>(from);
    } else {
      Kv::PackWeights(from, to, count);
      return to;
    }
  }

  // A copy of a V tile in which tokens outside [first, last) are zero.
  static const Element* CleanV(const Element* v, int head_dim, int first,
                               int last, Element* copy) {
    for (int t = 0; t < kTileTokens; ++t) {
      bool keep = t >= first && t < last;
      const Element* from = v + t / kPack * head_dim * kPack + t % kPack;
      Element* to = copy + t / kPack * head_dim * kPack + t % kPack;
      for (int d = 0; d < head_dim; ++d) {
        to[d * kPack] = keep ? from[d * kPack] : Element(0);
      }
    }
    return copy;
  }
};

}  // namespace
}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_KERNEL_INL_H_
