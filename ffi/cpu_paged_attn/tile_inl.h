// What is done with the tiles of a strip: scores of the query heads, and the
// weighted sum of V. Written once over a vector type `I`; everything is in an
// anonymous namespace, so that each including file has its own, compiled for
// its own instruction set.
#ifndef NEOJAX_CPU_PAGED_ATTN_TILE_INL_H_
#define NEOJAX_CPU_PAGED_ATTN_TILE_INL_H_

#include <cstdint>

#include "ffi/cpu_paged_attn/kernel.h"

// For loops over sums: left rolled, they would keep their sums in memory.
#define NEOJAX_UNROLL _Pragma("GCC unroll 32")

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
//   W, Spread    one pack of weights in all lanes
//   MulAdd       acc + x . w, over the pack

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
  using W = F;
  static W Spread(const Weight* w) { return I::Set(*w); }
  static F MulAdd(X x, W w, F acc) { return I::Fma(x, w, acc); }
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
  using W = X;
  static W Spread(const Weight* w) {
    return {I::Set(w->w[0]), I::Set(w->w[1])};
  }
  static F MulAdd(const X& x, const W& w, F acc) {
    acc = I::Fma(x.even, w.even, acc);
    return I::Fma(x.odd, w.odd, acc);
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
  return I::Scale(p, n);
}

// To the second-level cache: a strip and its successor would not both fit the
// first.
inline void Prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Whether the registers hold the sums of kHeads heads and `vecs` vectors, the
// vectors, and one head's weights. A single head's weights stay, so that its
// vectors need not: they come and go one by one.
template <class I, class Kv>
constexpr bool Fits(int heads, int vecs) {
  constexpr int kX = sizeof(typename Kv::X) / sizeof(typename I::F);
  return heads * vecs + kX * (heads > 1 ? vecs + 1 : 2) <= I::kRegisters - 2;
}

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
  constexpr int kLoads = kTiles * kVecs;
  constexpr int kTogether = kHeads > 1 ? kLoads : 1;
  constexpr int kRow = kTileTokens * Kv::kPack;  // elements
  constexpr int kRowBytes =
      kRow * static_cast<int>(sizeof(typename Kv::Element));
  // A multiply-add takes about four cycles and two start in each: few sums
  // need to be kept as several each, to keep both pipes busy.
  constexpr int kSums = kHeads * kLoads;
  constexpr int kChains = kSums >= 8 ? 1 : kSums >= 4 ? 2 : 4;
  const int packs = head_dim / Kv::kPack;  // a multiple of 4
  F acc[kChains][kHeads][kLoads] = {};
  for (int d = 0; d < packs; d += kChains) {
    NEOJAX_UNROLL
    for (int c = 0; c < kChains; ++c) {
      const int at = (d + c) * kRow;
      if (kRowBytes >= 64 || (d + c) % 2 == 0) {
        for (int i = 0; i < kTiles; ++i) Prefetch(next[i] + at);
      }
      NEOJAX_UNROLL
      for (int first = 0; first < kLoads; first += kTogether) {
        typename Kv::X x[kTogether];
        NEOJAX_UNROLL
        for (int n = 0; n < kTogether; ++n) {
          const int vec = (first + n) % kVecs;
          x[n] = Kv::template Load<false>(k[(first + n) / kVecs] + at +
                                          vec * I::kLanes * Kv::kPack);
        }
        NEOJAX_UNROLL
        for (int g = 0; g < kHeads; ++g) {
          const auto w = Kv::Spread(q + g * packs + d + c);
          NEOJAX_UNROLL
          for (int n = 0; n < kTogether; ++n) {
            F& sum = acc[c][g][first + n];
            sum = Kv::MulAdd(x[n], w, sum);
          }
        }
      }
    }
  }
  NEOJAX_UNROLL
  for (int g = 0; g < kHeads; ++g) {
    NEOJAX_UNROLL
    for (int n = 0; n < kLoads; ++n) {
      F sum = acc[0][g][n];
      for (int c = 1; c < kChains; ++c) sum = I::Add(sum, acc[c][g][n]);
      I::Store(scores + g * kStripTokens + n * I::kLanes, sum);
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
  // Of a row, in each step. As many bytes of the next tile are asked for, from
  // its first on: in the order of use, in which the rest of a row comes after
  // all other rows, memory gives a tenth less.
  constexpr int kStep = kPart ? 8 * Kv::kPack : kVecs * kVec;  // elements
  constexpr int kLine = 64 / static_cast<int>(sizeof(typename Kv::Element));
  const int before = d * kTileTokens;
  constexpr int kTogether = kHeads > 1 ? kVecs : 1;
  F acc[kHeads][kVecs];
  NEOJAX_UNROLL
  for (int g = 0; g < kHeads; ++g) {
    F by = I::Set(decay[g]);
    NEOJAX_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      const float* at = out + g * head_dim + d + j * I::kLanes;
      acc[g][j] = I::Mul(I::template Load<kPart>(at), by);
    }
  }
  for (int t = 0; t < kPacks; ++t) {
    const int row = (t * head_dim + d) * Kv::kPack;
    // Unrolled, the loads of all tiles would be moved up and spilt.
#pragma GCC unroll 1
    for (int i = 0; i < kTiles; ++i) {
      NEOJAX_UNROLL
      for (int line = 0; line < kStep; line += kLine) {
        Prefetch(next[i] + before + t * kStep + line);
      }
      NEOJAX_UNROLL
      for (int first = 0; first < kVecs; first += kTogether) {
        typename Kv::X x[kTogether];
        NEOJAX_UNROLL
        for (int n = 0; n < kTogether; ++n) {
          x[n] = Kv::template Load<kPart>(v[i] + row + (first + n) * kVec);
        }
        NEOJAX_UNROLL
        for (int g = 0; g < kHeads; ++g) {
          const auto w =
              Kv::Spread(p + g * (kStripTokens / Kv::kPack) + i * kPacks + t);
          NEOJAX_UNROLL
          for (int n = 0; n < kTogether; ++n) {
            F& sum = acc[g][first + n];
            sum = Kv::MulAdd(x[n], w, sum);
          }
        }
      }
    }
  }
  NEOJAX_UNROLL
  for (int g = 0; g < kHeads; ++g) {
    NEOJAX_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      I::template StorePart<kPart>(out + g * head_dim + d + j * I::kLanes,
                                   acc[g][j]);
    }
  }
}

// Dims [d, head_dim), kVecs vectors at a time, then half as many.
template <class I, class Kv, int kHeads, int kVecs, int kTiles>
void WeighFrom(const typename Kv::Element* const* v,
               const typename Kv::Element* const* next,
               const typename Kv::Weight* p, const float* decay, int head_dim,
               int d, float* out) {
  for (; d + kVecs * I::kLanes <= head_dim; d += kVecs * I::kLanes) {
    WeighBlock<I, Kv, kHeads, kVecs, kTiles, false>(v, next, p, decay, head_dim,
                                                    d, out);
  }
  if constexpr (kVecs > 1) {
    WeighFrom<I, Kv, kHeads, kVecs / 2, kTiles>(v, next, p, decay, head_dim, d,
                                                out);
  } else if constexpr (I::kLanes > 8) {
    if (d < head_dim) {
      WeighBlock<I, Kv, kHeads, 1, kTiles, true>(v, next, p, decay, head_dim, d,
                                                 out);
    }
  }
}

template <class I, class Kv, int kHeads, int kTiles, int kDim>
void Weigh(const typename Kv::Element* const* v,
           const typename Kv::Element* const* next,
           const typename Kv::Weight* p, const float* decay, int head_dim,
           float* out) {
  // As many sums as there are registers for, and not more than there are dims.
  constexpr int kMost = Fits<I, Kv>(kHeads, 8)   ? 8
                        : Fits<I, Kv>(kHeads, 4) ? 4
                        : Fits<I, Kv>(kHeads, 2) ? 2
                                                 : 1;
  constexpr int kVecs =
      kDim > 0 && kMost * I::kLanes > kDim ? kDim / I::kLanes : kMost;
  WeighFrom<I, Kv, kHeads, kVecs, kTiles>(v, next, p, decay,
                                          kDim > 0 ? kDim : head_dim, 0, out);
}

}  // namespace
}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_TILE_INL_H_
