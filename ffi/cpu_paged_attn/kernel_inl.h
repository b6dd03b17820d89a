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

namespace neojax {
namespace {

enum : int { kStripTiles = 4, kStripTokens = kStripTiles * kTileTokens };
constexpr float kLog2E = 1.44269504f;

// A storage format says how its elements become vectors of the instruction
// set `I`, and how a vector is multiplied with weights (a query's elements or
// softmax's results) and added up:
//   Element      what a tile holds
//   kPack        elements of one summed axis that lie together
//   X            one loaded vector: I::kLanes lanes of kPack elements
//   Weight       weights of one pack as kept in memory
//   Load<kPart>  loads X; kPart: the first 8 lanes only
//   MulAdd       acc + x . weight, over the pack

// K [H][16], V [16][H] of `E`: one element a token and dim.
template <class I, class E>
struct Plain {
  using Element = E;
  using F = typename I::F;
  using X = F;
  using Weight = float;
  static constexpr int kPack = 1;

  template <bool kPart>
  static X Load(const E* p) {
    return I::template Load<kPart>(p);
  }
  static F MulAdd(X x, const Weight* w, F acc) {
    return I::Fma(x, I::Set(*w), acc);
  }
};

// K [H/2][16][2], V [8][H][2] of bfloat16: two summed neighbours share 32
// bits, and become two vectors of float32.
template <class I>
struct Paired {
  using Element = uint16_t;
  using F = typename I::F;
  struct Weight {
    float w[2];
  };
  struct X {
    F even, odd;
  };
  static constexpr int kPack = 2;

  template <bool kPart>
  static X Load(const uint16_t* p) {
    X x;
    I::template LoadPairs<kPart>(p, x.even, x.odd);
    return x;
  }
  static F MulAdd(const X& x, const Weight* w, F acc) {
    acc = I::Fma(x.even, I::Set(w->w[0]), acc);
    return I::Fma(x.odd, I::Set(w->w[1]), acc);
  }
};

// 2^x for x <= 0, exactly 0 below -127; relative error 2e-7.
template <class I>
typename I::F Exp2(typename I::F x) {
  using F = typename I::F;
  x = I::Max(x, I::Set(-127.0f));
  F n = I::Round(x);
  F f = I::Sub(x, n);
  F p = I::Set(1.5403530e-4f);
  p = I::Fma(p, f, I::Set(1.33335581e-3f));
  p = I::Fma(p, f, I::Set(9.61812911e-3f));
  p = I::Fma(p, f, I::Set(5.55041087e-2f));
  p = I::Fma(p, f, I::Set(2.40226507e-1f));
  p = I::Fma(p, f, I::Set(6.93147181e-1f));
  p = I::Fma(p, f, I::Set(1.0f));
  return I::Mul(p, I::PowerOfTwo(n));
}

// To the second-level cache: a strip and its successor would not both fit the
// first.
inline void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// scores[g][0..16) of kTiles tiles = q_g . k, for kHeads heads. Tiles are read
// side by side, a line of each in turn: memory gives more to several streams
// than to one. `next`: tiles to ask for meanwhile.
template <class I, class Kv, int kHeads, int kTiles, int kDim>
void Scores(const typename Kv::Element* const* k,
            const typename Kv::Element* const* next,
            const typename Kv::Weight* q, int head_dim, float* scores) {
  using F = typename I::F;
  if (kDim > 0) head_dim = kDim;
  constexpr int kVecs = kTileTokens / I::kLanes;
  constexpr int kRow = kTileTokens * Kv::kPack;  // elements
  constexpr int kRowBytes =
      kRow * static_cast<int>(sizeof(typename Kv::Element));
  // A multiply-add takes about four cycles and two start in each: few sums
  // need to be kept as several each, to keep both pipes busy.
  constexpr int kSums = kHeads * kVecs * kTiles;
  constexpr int kChains = kSums >= 8 ? 1 : kSums >= 4 ? 2 : 4;
  const int packs = head_dim / Kv::kPack;  // a multiple of 4
  F acc[kChains][kTiles][kHeads][kVecs];
  for (int c = 0; c < kChains; ++c) {
    for (int i = 0; i < kTiles; ++i) {
      for (int g = 0; g < kHeads; ++g) {
        for (int j = 0; j < kVecs; ++j) acc[c][i][g][j] = I::Set(0.0f);
      }
    }
  }
  for (int d = 0; d < packs; d += kChains) {
    for (int c = 0; c < kChains; ++c) {
      const int at = (d + c) * kRow;
      if (kRowBytes >= 64 || (d + c) % 2 == 0) {
        for (int i = 0; i < kTiles; ++i) Prefetch(next[i] + at);
      }
      for (int i = 0; i < kTiles; ++i) {
        for (int j = 0; j < kVecs; ++j) {
          auto x =
              Kv::template Load<false>(k[i] + at + j * I::kLanes * Kv::kPack);
          for (int g = 0; g < kHeads; ++g) {
            acc[c][i][g][j] =
                Kv::MulAdd(x, q + g * packs + d + c, acc[c][i][g][j]);
          }
        }
      }
    }
  }
  for (int i = 0; i < kTiles; ++i) {
    for (int g = 0; g < kHeads; ++g) {
      for (int j = 0; j < kVecs; ++j) {
        F sum = acc[0][i][g][j];
        for (int c = 1; c < kChains; ++c) sum = I::Add(sum, acc[c][i][g][j]);
        I::Store(scores + g * kStripTokens + i * kTileTokens + j * I::kLanes,
                 sum);
      }
    }
  }
}

// out[g][d..) = out * decay[g] + sum over the strip of p[g][t] * v[t][d..),
// for kHeads heads and kVecs vectors of dims; kPart: of 8 dims only.
template <class I, class Kv, int kHeads, int kVecs, int kTiles, bool kPart>
void WeighBlock(const typename Kv::Element* const* v,
                const typename Kv::Element* const* next,
                const typename Kv::Weight* p, const float* decay, int head_dim,
                int d, float* out) {
  using F = typename I::F;
  constexpr int kPacks = kTileTokens / Kv::kPack;
  constexpr int kVec = I::kLanes * Kv::kPack;  // elements
  constexpr int kVecBytes =
      kVec * static_cast<int>(sizeof(typename Kv::Element));
  F acc[kHeads][kVecs];
  for (int g = 0; g < kHeads; ++g) {
    F by = I::Set(decay[g]);
    for (int j = 0; j < kVecs; ++j) {
      const float* at = out + g * head_dim + d + j * I::kLanes;
      acc[g][j] = I::Mul(I::template Load<kPart>(at), by);
    }
  }
  for (int t = 0; t < kPacks; ++t) {
    const int row = (t * head_dim + d) * Kv::kPack;
    for (int i = 0; i < kTiles; ++i) {
      for (int j = 0; j < kVecs; ++j) {
        if (j * kVecBytes % 64 == 0) Prefetch(next[i] + row + j * kVec);
        auto x = Kv::template Load<kPart>(v[i] + row + j * kVec);
        for (int g = 0; g < kHeads; ++g) {
          acc[g][j] =
              Kv::MulAdd(x, p + g * (kStripTokens / Kv::kPack) + i * kPacks + t,
                         acc[g][j]);
        }
      }
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int j = 0; j < kVecs; ++j) {
      I::template StorePart<kPart>(out + g * head_dim + d + j * I::kLanes,
                                   acc[g][j]);
    }
  }
}

template <class I, class Kv, int kHeads, int kTiles, int kDim>
void Weigh(const typename Kv::Element* const* v,
           const typename Kv::Element* const* next,
           const typename Kv::Weight* p, const float* decay, int head_dim,
           float* out) {
  if (kDim > 0) head_dim = kDim;
  // As many sums as there are registers for.
  constexpr int kVecs = kHeads * 8 <= I::kSums   ? 8
                        : kHeads * 4 <= I::kSums ? 4
                        : kHeads * 2 <= I::kSums ? 2
                                                 : 1;
  int d = 0;
  for (; d + kVecs * I::kLanes <= head_dim; d += kVecs * I::kLanes) {
    WeighBlock<I, Kv, kHeads, kVecs, kTiles, false>(v, next, p, decay, head_dim,
                                                    d, out);
  }
  for (; d + I::kLanes <= head_dim; d += I::kLanes) {
    WeighBlock<I, Kv, kHeads, 1, kTiles, false>(v, next, p, decay, head_dim, d,
                                                out);
  }
  if constexpr (I::kLanes > 8) {
    if (d < head_dim) {
      WeighBlock<I, Kv, kHeads, 1, kTiles, true>(v, next, p, decay, head_dim, d,
                                                 out);
    }
  }
}

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
  // [first, last) become minus infinity. Returns the largest.
  static float Logits(const AttendArgs& a, float* x, int num_tokens, int first,
                      int last) {
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
    return I::HorizontalMax(top);
  }

  // One step of the online softmax over a strip's scores x [G, kStripTokens]:
  // x becomes exp2(logit - max); a.max and a.sum are brought up to date, and
  // decay[g] is what earlier sums are worth now.
  static void Softmax(const AttendArgs& a, int group, float* x, int num_tokens,
                      int first, int last, float* decay) {
    using F = typename I::F;
    for (int g = 0; g < group; ++g) {
      const float old_max = a.max[g];
      float top = Logits(a, x + g * kStripTokens, num_tokens, first, last);
      if (top > a.max[g]) a.max[g] = top;
      decay[g] = old_max - a.max[g];
    }
    for (int g = 0; g < group; g += I::kLanes) {
      I::Store(decay + g, Exp2<I>(I::template Load<false>(decay + g)));
    }
    for (int g = 0; g < group; ++g) {
      float* row = x + g * kStripTokens;
      F shift = I::Set(a.max[g]);
      F total = I::Set(0.0f);
      for (int t = 0; t < num_tokens; t += I::kLanes) {
        F p = Exp2<I>(I::Sub(I::template Load<false>(row + t), shift));
        I::Store(row + t, p);
        total = I::Add(total, p);
      }
      a.sum[g] = a.sum[g] * decay[g] + I::HorizontalSum(total);
    }
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
    alignas(64) float decay[kMaxGroup] = {};
    float ones[kMaxGroup];
    const int group = a.group;
    const int head_dim = kDim > 0 ? kDim : a.head_dim;
    for (int g = 0; g < group; ++g) {
      a.max[g] = -__builtin_inff();
      a.sum[g] = 0.0f;
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
        constexpr int kTiles = kHeads * kVecs * 4 <= I::kSums   ? 4
                               : kHeads * kVecs * 2 <= I::kSums ? 2
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
        Softmax(a, group, x, kStripTokens, first, last, decay);
      } else {
        Softmax(a, group, x, num_tokens, first, last, decay);
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

#endif  // NEOJAX_CPU_PAGED_ATTN_KERNEL_INL_H_
