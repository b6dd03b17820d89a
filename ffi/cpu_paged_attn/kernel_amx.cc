// Kernels for AMX with BF16: a tile multiply takes all heads of a group at
// once. The rest of the work is AVX-512's.
#include "ffi/cpu_paged_attn/avx512bf16_inl.h"

namespace neojax {
namespace {

using Vectors = Attention<Avx512, PairedBf16>;

// Tile registers; macros, because the intrinsics paste them into assembly.
// Sums have a row a head; queries and weights too; K has 16 rows of pairs of
// dims and V 8 of pairs of tokens.
#define SUM0 0
#define SUM1 1
#define SUM2 2
#define SUM3 3
#define QUERY 4
#define K 5
#define WEIGHTS 6
#define V 7

enum : int { kMaxRows = 16 };

// The intrinsics do not tell the compiler which memory they read.
void FinishStores() { asm volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

void Configure(int group) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.rows[tile] = static_cast<uint8_t>(group);
    config.row_bytes[tile] = 64;
  }
  config.rows[K] = 16;
  config.rows[V] = 8;
  config.row_bytes[WEIGHTS] = 32;
  FinishStores();
  _tile_loadconfig(&config);
}

// Asks for lines [line, line + count) of four tiles, a line of each in turn:
// memory gives more to several streams than to one.
void PrefetchLines(const uint16_t* const* tiles, int line, int count) {
  for (int i = 0; i < count; ++i) {
    for (int tile = 0; tile < kStripTiles; ++tile) {
      Prefetch(tiles[tile] + (line + i) * 32);
    }
  }
}

// x[g][0..64) = q_g . k over four tiles.
void StripScores(const uint16_t* const* k, const uint16_t* const* next,
                 const uint32_t* q, int head_dim, float* x) {
  FinishStores();
  _tile_zero(SUM0);
  _tile_zero(SUM1);
  _tile_zero(SUM2);
  _tile_zero(SUM3);
  for (int d = 0; d < head_dim; d += 32) {
    const int at = d * kTileTokens;
    const int line = d / 2;
    _tile_loadd(QUERY, q + d / 2, head_dim * 2);
    _tile_loadd(K, k[0] + at, 64);
    PrefetchLines(next, line, 4);
    _tile_dpbf16ps(SUM0, QUERY, K);
    _tile_loadd(K, k[1] + at, 64);
    PrefetchLines(next, line + 4, 4);
    _tile_dpbf16ps(SUM1, QUERY, K);
    _tile_loadd(K, k[2] + at, 64);
    PrefetchLines(next, line + 8, 4);
    _tile_dpbf16ps(SUM2, QUERY, K);
    _tile_loadd(K, k[3] + at, 64);
    PrefetchLines(next, line + 12, 4);
    _tile_dpbf16ps(SUM3, QUERY, K);
  }
  constexpr int kStride = kStripTokens * 4;
  _tile_stored(SUM0, x, kStride);
  _tile_stored(SUM1, x + 16, kStride);
  _tile_stored(SUM2, x + 32, kStride);
  _tile_stored(SUM3, x + 48, kStride);
}

// out[g][0..H) += p_g . v over `num_tiles` tiles.
void StripSums(const uint16_t* const* v, const uint16_t* const* next,
               int num_tiles, const uint32_t* p, int head_dim, float* out) {
  FinishStores();
  const int row = head_dim * 2;  // elements of a row of V
  for (int d = 0; d < head_dim; d += 64) {
    float* at_out = out + d;
    const bool wide = d + 64 <= head_dim;
    _tile_loadd(SUM0, at_out, head_dim * 4);
    _tile_loadd(SUM1, at_out + 16, head_dim * 4);
    if (wide) {
      _tile_loadd(SUM2, at_out + 32, head_dim * 4);
      _tile_loadd(SUM3, at_out + 48, head_dim * 4);
    }
    for (int i = 0; i < num_tiles; ++i) {
      const uint16_t* at = v[i] + d * 2;
      // A tile of V has head_dim / 2 lines; this step asks for its share.
      const int line = d / 2 + i * 8;
      _tile_loadd(WEIGHTS, p + i * (kTileTokens / 2), kStripTokens * 2);
      _tile_loadd(V, at, row * 2);
      PrefetchLines(next, line, 2);
      _tile_dpbf16ps(SUM0, WEIGHTS, V);
      _tile_loadd(V, at + 32, row * 2);
      PrefetchLines(next, line + 2, 2);
      _tile_dpbf16ps(SUM1, WEIGHTS, V);
      if (!wide) continue;
      _tile_loadd(V, at + 64, row * 2);
      PrefetchLines(next, line + 4, 2);
      _tile_dpbf16ps(SUM2, WEIGHTS, V);
      _tile_loadd(V, at + 96, row * 2);
      PrefetchLines(next, line + 6, 2);
      _tile_dpbf16ps(SUM3, WEIGHTS, V);
    }
    _tile_stored(SUM0, at_out, head_dim * 4);
    _tile_stored(SUM1, at_out + 16, head_dim * 4);
    if (!wide) continue;
    _tile_stored(SUM2, at_out + 32, head_dim * 4);
    _tile_stored(SUM3, at_out + 48, head_dim * 4);
  }
  FinishStores();
}

void Run(const AttendArgs& a) {
  // Below, a tile is so empty that vectors are as fast.
  constexpr int kMinRows = 2;
  if (a.group < kMinRows || a.group > kMaxRows || a.head_dim % 32 != 0) {
    return kAvx512Bf16Kernels.bfloat16(a);
  }
  alignas(64) float x[kMaxRows * kStripTokens];
  alignas(64) uint32_t packed_p[kMaxRows * kStripTokens / 2];
  alignas(64) uint32_t packed_q[kMaxRows * kMaxHeadDim / 2];
  alignas(64) float sums[kMaxRows * Avx512::kLanes] = {};
  alignas(64) uint16_t clean_v[2][kTileTokens * kMaxHeadDim];
  float decay[kMaxRows];
  const int group = a.group;
  const int head_dim = a.head_dim;
  for (int g = 0; g < group; ++g) {
    a.max[g] = -__builtin_inff();
  }
  std::memset(a.out, 0, sizeof(float) * group * head_dim);
  PairedBf16::PackWeights(a.q, packed_q, group * head_dim);
  Configure(group);

  const int last_tile = (a.end + kTileTokens - 1) / kTileTokens;
  for (int tile = a.begin / kTileTokens; tile < last_tile;
       tile += kStripTiles) {
    const int num_tiles =
        last_tile - tile < kStripTiles ? last_tile - tile : kStripTiles;
    const uint16_t* k[kStripTiles];
    const uint16_t* v[kStripTiles];
    const uint16_t* next_k[kStripTiles];
    const uint16_t* next_v[kStripTiles];
    Vectors::FindTiles(a, tile, last_tile, k, next_k);
    for (int i = 0; i < kStripTiles; ++i) {
      v[i] = k[i] + kTileTokens * head_dim;
      next_v[i] = next_k[i] + kTileTokens * head_dim;
    }
    StripScores(k, next_k, packed_q, head_dim, x);
    int first = a.begin - tile * kTileTokens;
    int last = a.end - tile * kTileTokens;
    const int num_tokens = num_tiles * kTileTokens;
    if (first < 0) first = 0;
    if (last > num_tokens) last = num_tokens;
    // Slots that hold no token may hold NaN, and 0 * NaN is NaN.
    if (first > 0) {
      v[0] = Vectors::CleanV(v[0], head_dim, first, last, clean_v[0]);
    }
    if (last < num_tokens) {
      const int before = num_tokens - kTileTokens;
      v[num_tiles - 1] = Vectors::CleanV(v[num_tiles - 1], head_dim, 0,
                                         last - before, clean_v[1]);
    }
    const bool decays =
        Vectors::Softmax(a, group, x, num_tokens, first, last, decay, sums);
    PairedBf16::PackWeights(x, packed_p, group * kStripTokens);
    for (int g = 0; decays && g < group; ++g) {
      if (decay[g] == 1.0f) continue;
      for (int d = 0; d < head_dim; d += 16) {
        float* out = a.out + g * head_dim + d;
        Avx512::Store(
            out, Avx512::Mul(Avx512::Load<false>(out), Avx512::Set(decay[g])));
      }
    }
    StripSums(v, next_v, num_tiles, packed_p, head_dim, a.out);
  }
  for (int g = 0; g < group; ++g) {
    a.sum[g] =
        Avx512::HorizontalSum(Avx512::Load<false>(sums + g * Avx512::kLanes));
  }
  // Unused tiles make no work for a switch of threads.
  _tile_release();
}

}  // namespace

const KernelTable kAmxKernels = {"amx",   nullptr, &Run,
                                 nullptr, nullptr, nullptr};

}  // namespace neojax
