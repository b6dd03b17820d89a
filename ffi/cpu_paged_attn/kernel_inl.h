// Flash-decoding over 16-token tiles, written once over a vector type `I`.
//
// A strip of up to four tiles is taken at a time: scores of all query heads
// of the group, one step of the online softmax, then the weighted sum of V.
// A strip's K and V come from memory once and are read again, for further
// blocks of heads, from the first-level cache. Everything is in an anonymous
// namespace: each including file has its own, compiled for its own
// instruction set.
#ifndef NEOJAX_CPU_PAGED_ATTN_KERNEL_INL_H_
#define NEOJAX_CPU_PAGED_ATTN_KERNEL_INL_H_

#include <cstdint>
#include <cstring>

#include "ffi/cpu_paged_attn/kernel.h"

namespace neojax {
namespace {

enum : int { kStripTiles = 4, kStripTokens = kStripTiles * kTileTokens };
constexpr float kLog2E = 1.44269504f;

// K [H][16], V [16][H] of `E`: one element a token and dim.
template <class I, class E>
struct Plain {
  using Element = E;
  static constexpr int kPack = 1;  // neighbours along the summed axis
  static void Load(const E* p, typename I::F (&x)[kPack]) { x[0] = I::Load(p); }
};

// K [H/2][16][2], V [8][H][2]: the two summed neighbours share 32 bits.
template <class I>
struct Paired {
  using Element = uint16_t;
  static constexpr int kPack = 2;
  static void Load(const uint16_t* p, typename I::F (&x)[kPack]) {
    I::LoadPairs(p, x[0], x[1]);
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

// scores[g][0..16) = q_g . k over one tile, for kHeads heads.
template <class I, class Kv, int kHeads>
void Scores(const typename Kv::Element* k, const float* q, int head_dim,
            float* scores) {
  using F = typename I::F;
  constexpr int kVecs = kTileTokens / I::kLanes;
  F acc[kHeads][kVecs];
  for (int g = 0; g < kHeads; ++g) {
    for (int j = 0; j < kVecs; ++j) acc[g][j] = I::Set(0.0f);
  }
  for (int d = 0; d < head_dim; d += Kv::kPack) {
    for (int j = 0; j < kVecs; ++j) {
      F x[Kv::kPack];
      Kv::Load(k + d * kTileTokens + j * I::kLanes * Kv::kPack, x);
      for (int g = 0; g < kHeads; ++g) {
        for (int c = 0; c < Kv::kPack; ++c) {
          acc[g][j] = I::Fma(x[c], I::Set(q[g * head_dim + d + c]), acc[g][j]);
        }
      }
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int j = 0; j < kVecs; ++j) {
      I::Store(scores + g * kStripTokens + j * I::kLanes, acc[g][j]);
    }
  }
}

// out[g][d..) = out * decay[g] + sum over the strip of p[g][t] * v[t][d..),
// for kHeads heads and kVecs vectors of dims.
template <class I, class Kv, int kHeads, int kVecs>
void WeighBlock(const typename Kv::Element* const* v, int num_tiles,
                const float* p, const float* decay, int head_dim, int d,
                float* out) {
  using F = typename I::F;
  F acc[kHeads][kVecs];
  for (int g = 0; g < kHeads; ++g) {
    F by = I::Set(decay[g]);
    for (int j = 0; j < kVecs; ++j) {
      acc[g][j] = I::Mul(I::Load(out + g * head_dim + d + j * I::kLanes), by);
    }
  }
  for (int tile = 0; tile < num_tiles; ++tile) {
    const float* tile_p = p + tile * kTileTokens;
    const typename Kv::Element* row = v[tile] + d * Kv::kPack;
    for (int t = 0; t < kTileTokens; t += Kv::kPack) {
      F x[kVecs][Kv::kPack];
      for (int j = 0; j < kVecs; ++j) {
        Kv::Load(row + j * I::kLanes * Kv::kPack, x[j]);
      }
      row += head_dim * Kv::kPack;
      for (int g = 0; g < kHeads; ++g) {
        for (int c = 0; c < Kv::kPack; ++c) {
          F weight = I::Set(tile_p[g * kStripTokens + t + c]);
          for (int j = 0; j < kVecs; ++j) {
            acc[g][j] = I::Fma(x[j][c], weight, acc[g][j]);
          }
        }
      }
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    for (int j = 0; j < kVecs; ++j) {
      I::Store(out + g * head_dim + d + j * I::kLanes, acc[g][j]);
    }
  }
}

template <class I, class Kv, int kHeads>
void Weigh(const typename Kv::Element* const* v, int num_tiles, const float* p,
           const float* decay, int head_dim, float* out) {
  int d = 0;
  for (; d + 2 * I::kLanes <= head_dim; d += 2 * I::kLanes) {
    WeighBlock<I, Kv, kHeads, 2>(v, num_tiles, p, decay, head_dim, d, out);
  }
  for (; d < head_dim; d += I::kLanes) {
    WeighBlock<I, Kv, kHeads, 1>(v, num_tiles, p, decay, head_dim, d, out);
  }
}

// Calls fn<kHeads>(first head) over blocks of I::kHeads heads and the rest.
template <class I, template <int> class Fn, class... Args>
void ForHeads(int group, Args... args) {
  int g = 0;
  for (; g + I::kHeads <= group; g += I::kHeads) {
    Fn<I::kHeads>::Call(g, args...);
  }
  switch (group - g) {
    case 3:
      Fn<3>::Call(g, args...);
      break;
    case 2:
      Fn<2>::Call(g, args...);
      break;
    case 1:
      Fn<1>::Call(g, args...);
      break;
    default:
      break;
  }
}

template <class I, class Kv>
struct Attention {
  static_assert(I::kHeads <= 4, "ForHeads handles rests up to 3");
  using Element = typename Kv::Element;

  template <int kHeads>
  struct ScoresOf {
    static void Call(int g, const Element* k, const float* q, int head_dim,
                     float* scores) {
      Scores<I, Kv, kHeads>(k, q + g * head_dim, head_dim,
                            scores + g * kStripTokens);
    }
  };
  template <int kHeads>
  struct WeighOf {
    static void Call(int g, const Element* const* v, int num_tiles,
                     const float* p, const float* decay, int head_dim,
                     float* out) {
      Weigh<I, Kv, kHeads>(v, num_tiles, p + g * kStripTokens, decay + g,
                           head_dim, out + g * head_dim);
    }
  };

  // Logits of one head's strip in base 2, `first` and `last` being the valid
  // tokens; then x becomes exp2(x - max) and max, sum and decay are updated.
  static void Softmax(const AttendArgs& a, float* x, int num_tokens, int first,
                      int last, float* max, float* sum, float* decay) {
    using F = typename I::F;
    if (a.softcap > 0.0f) {
      // c * tanh(y / c) with tanh(z) = 1 - 2 / (1 + e^2z), |z| kept small
      // enough for the exponential; both signs through -|z|.
      F by = I::Set(2.0f * kLog2E * a.scale / a.softcap);
      F cap = I::Set(a.softcap * kLog2E);
      for (int t = 0; t < num_tokens; t += I::kLanes) {
        F z = I::Mul(I::Load(x + t), by);
        F e = Exp2<I>(I::Min(z, I::Sub(I::Set(0.0f), z)));
        F tanh = I::Div(I::Sub(I::Set(1.0f), e), I::Add(I::Set(1.0f), e));
        I::Store(x + t, I::Mul(I::CopySign(tanh, z), cap));
      }
    } else {
      F by = I::Set(a.scale * kLog2E);
      for (int t = 0; t < num_tokens; t += I::kLanes) {
        I::Store(x + t, I::Mul(I::Load(x + t), by));
      }
    }
    for (int t = 0; t < first; ++t) x[t] = -__builtin_inff();
    for (int t = last; t < num_tokens; ++t) x[t] = -__builtin_inff();
    F top = I::Load(x);
    for (int t = I::kLanes; t < num_tokens; t += I::kLanes) {
      top = I::Max(top, I::Load(x + t));
    }
    float new_max = I::HorizontalMax(top);
    if (!(new_max > *max)) new_max = *max;
    *decay = __builtin_exp2f(*max - new_max);
    *max = new_max;
    F shift = I::Set(new_max);
    F total = I::Set(0.0f);
    for (int t = 0; t < num_tokens; t += I::kLanes) {
      F p = Exp2<I>(I::Sub(I::Load(x + t), shift));
      I::Store(x + t, p);
      total = I::Add(total, p);
    }
    *sum = *sum * *decay + I::HorizontalSum(total);
  }

  static void Run(const AttendArgs& a) {
    alignas(64) float p[kMaxGroup * kStripTokens];
    alignas(64) Element clean_v[2][kTileTokens * kMaxHeadDim];
    float decay[kMaxGroup];
    const int head_dim = a.head_dim;
    for (int g = 0; g < a.group; ++g) {
      a.max[g] = -__builtin_inff();
      a.sum[g] = 0.0f;
    }
    std::memset(a.out, 0, sizeof(float) * a.group * head_dim);

    const int last_tile = (a.end + kTileTokens - 1) / kTileTokens;
    for (int tile = a.begin / kTileTokens; tile < last_tile;
         tile += kStripTiles) {
      int num_tiles = last_tile - tile;
      if (num_tiles > kStripTiles) num_tiles = kStripTiles;
      const Element* v[kStripTiles];
      int num_clean = 0;
      for (int i = 0; i < num_tiles; ++i) {
        int in_block = (tile + i) % a.tiles_per_block;
        int64_t block = a.table[(tile + i) / a.tiles_per_block];
        const Element* k = reinterpret_cast<const Element*>(
            a.base + block * a.block_bytes + in_block * a.tile_bytes);
        ForHeads<I, ScoresOf>(a.group, k, a.q, head_dim, p + i * kTileTokens);
        v[i] = k + kTileTokens * head_dim;
        int first = a.begin - (tile + i) * kTileTokens;
        int last = a.end - (tile + i) * kTileTokens;
        if (first > 0 || last < kTileTokens) {
          // Slots that hold no token may hold NaN, and 0 * NaN is NaN.
          v[i] = CleanV(v[i], head_dim, first, last, clean_v[num_clean++]);
        }
      }
      int first = a.begin - tile * kTileTokens;
      int last = a.end - tile * kTileTokens;
      int num_tokens = num_tiles * kTileTokens;
      if (first < 0) first = 0;
      if (last > num_tokens) last = num_tokens;
      for (int g = 0; g < a.group; ++g) {
        Softmax(a, p + g * kStripTokens, num_tokens, first, last, a.max + g,
                a.sum + g, decay + g);
      }
      ForHeads<I, WeighOf>(a.group, v, num_tiles, p, decay, head_dim, a.out);
    }
  }

  // A copy of a V tile in which tokens outside [first, last) are zero.
  static const Element* CleanV(const Element* v, int head_dim, int first,
                               int last, Element* copy) {
    constexpr int kPack = Kv::kPack;
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
