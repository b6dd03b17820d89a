// The host's KV cache: one mapping that holds every layer's blocks.
#ifndef NEOJAX_CPU_PAGED_ATTN_ARENA_H_
#define NEOJAX_CPU_PAGED_ATTN_ARENA_H_

#include <cstdint>
#include <memory>

#include "ffi/cpu_paged_attn/dtype.h"
#include "ffi/cpu_paged_attn/worker_pool.h"

namespace neojax {

struct CacheShape {
  int num_layers;    // L
  int num_blocks;    // P
  int num_kv_heads;  // K
  int head_dim;      // H, a multiple of 8 up to 256
  int block_size;    // p, a multiple of 16
  Dtype dtype;

  int tiles_per_block() const { return block_size / 16; }
  int64_t tile_bytes() const {
    return int64_t{2} * 16 * head_dim * ElementSize(dtype);
  }
  int64_t head_bytes() const { return tiles_per_block() * tile_bytes(); }
  int64_t block_bytes() const { return num_kv_heads * head_bytes(); }
  int64_t layer_bytes() const { return num_blocks * block_bytes(); }
  int64_t num_bytes() const { return num_layers * layer_bytes(); }
};

// First block of a node's stretch, of `num_nodes`.
inline int FirstBlock(const CacheShape& shape, int num_nodes, int node) {
  return static_cast<int>(int64_t{shape.num_blocks} * node / num_nodes);
}
inline int NodeOfBlock(const CacheShape& shape, int num_nodes, int block) {
  return static_cast<int>(((int64_t{block} + 1) * num_nodes - 1) /
                          shape.num_blocks);
}

// Layout: [L, P, K, p/16] tiles; a tile is 16 tokens of one head, K then V:
//   bfloat16  K [H/2][16][2]  V [8][H][2]   (what vdpbf16ps and AMX eat)
//   float32, float16  K [H][16]  V [16][H]
class HostKVCache {
 public:
  // Maps the arena and touches every page from the pool's threads. Throws
  // std::invalid_argument for a shape no kernel takes, and std::runtime_error
  // with the size reached if the machine does not give that much memory.
  HostKVCache(const CacheShape& shape, std::shared_ptr<WorkerPool> pool);
  ~HostKVCache();
  HostKVCache(const HostKVCache&) = delete;
  HostKVCache& operator=(const HostKVCache&) = delete;

  const CacheShape& shape() const { return shape_; }
  const std::shared_ptr<WorkerPool>& pool() const { return pool_; }
  double touch_seconds() const { return touch_seconds_; }

  // Every layer's blocks lie on the nodes of the pool's threads, one stretch
  // on each, because these threads touch them first.
  int num_nodes() const { return num_nodes_; }

  // First tile of a head in block 0 of a layer.
  char* HeadBase(int layer, int head) const {
    return data_ + layer * shape_.layer_bytes() + head * shape_.head_bytes();
  }

  // All heads of a block, as they lie there: block_bytes() in one piece.
  char* Block(int layer, int block) const {
    return HeadBase(layer, 0) + block * shape_.block_bytes();
  }

  // One token of one head. `k` and `v` are [H] of `dtype`; `slot` is the
  // token's place in the block.
  void WriteToken(int layer, int block, int slot, int head, const void* k,
                  const void* v, Dtype dtype);
  void ReadToken(int layer, int block, int slot, int head, void* k, void* v,
                 Dtype dtype) const;

  // Sets every element to `value`; for tests.
  void Fill(float value);

 private:
  void TouchAll();
  char* Tile(int layer, int block, int slot, int head) const {
    return HeadBase(layer, head) + block * shape_.block_bytes() +
           slot / 16 * shape_.tile_bytes();
  }

  const CacheShape shape_;
  const std::shared_ptr<WorkerPool> pool_;
  const int num_nodes_;
  char* data_ = nullptr;
  double touch_seconds_ = 0;
};

// Throws std::invalid_argument naming the field that no kernel takes.
void CheckShape(const CacheShape& shape);

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_ARENA_H_
