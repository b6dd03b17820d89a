#include "ffi/cpu_paged_attn/plan.h"

#include <algorithm>
#include <stdexcept>

namespace neojax {
namespace {

// A plan is cut into about this many items: enough to balance some tens of
// threads, few enough that an item is worth its hand-over.
constexpr int64_t kTargetItems = 256;
constexpr int64_t kMinItemTiles = 4;
constexpr int64_t kMaxItemTiles = 32;

[[noreturn]] void Refuse(const std::string& text) {
  throw std::invalid_argument(text);
}

// Blocks [0, num_tokens) of one row of a table must lie in the arena.
void CheckTable(const CacheShape& shape, const char* name, int row,
                const int32_t* table, int width, int64_t num_tokens) {
  int64_t needed = (num_tokens + shape.block_size - 1) / shape.block_size;
  if (needed > width) {
    Refuse(std::string(name) + "[" + std::to_string(row) + "] has " +
           std::to_string(width) + " blocks of " +
           std::to_string(shape.block_size) + " tokens; " +
           std::to_string(num_tokens) + " tokens need " +
           std::to_string(needed));
  }
  for (int64_t i = 0; i < needed; ++i) {
    if (table[i] < 0 || table[i] >= shape.num_blocks) {
      Refuse(std::string(name) + "[" + std::to_string(row) + ", " +
             std::to_string(i) + "] is block " + std::to_string(table[i]) +
             "; the arena has blocks 0 to " +
             std::to_string(shape.num_blocks - 1));
    }
  }
}

}  // namespace

Plan::Plan(const CacheShape& shape, int num_q_heads,
           const int32_t* context_lens, Table tables, int window,
           const int32_t* chunks, Table chunk_tables)
    : context_lens_(context_lens, context_lens + tables.rows),
      tables_(tables.data,
              tables.data + static_cast<int64_t>(tables.rows) * tables.width),
      chunk_tables_(
          chunk_tables.data,
          chunk_tables.data +
              static_cast<int64_t>(chunk_tables.rows) * chunk_tables.width),
      width_(tables.width),
      chunk_width_(chunk_tables.width) {
  int64_t total_tiles = 0;
  for (int row = 0; row < num_rows(); ++row) {
    int len = context_lens_[row];
    if (len < 1) {
      Refuse("context_lens[" + std::to_string(row) +
             "] must be at least 1, got " + std::to_string(len));
    }
    CheckTable(shape, "tables", row, table(row), width_, len);
    int begin = window > 0 ? std::max(0, len - window) : 0;
    total_tiles += (len + 15) / 16 - begin / 16;
  }
  for (int i = 0; i < chunk_tables.rows; ++i) {
    Chunk c{chunks[4 * i], chunks[4 * i + 1], chunks[4 * i + 2],
            chunks[4 * i + 3]};
    if (c.row_offset < 0 || c.num_tokens < 0 || c.start < 0 ||
        c.scratch_slot < 0) {
      Refuse("chunks[" + std::to_string(i) + "] has a negative entry");
    }
    CheckTable(shape, "chunk_tables", i, chunk_table(i), chunk_width_,
               int64_t{c.start} + c.num_tokens);
    chunks_.push_back(c);
  }

  const int64_t item_tiles =
      std::clamp(total_tiles * shape.num_kv_heads / kTargetItems, kMinItemTiles,
                 kMaxItemTiles);
  int num_parts = 0;
  items_before_row_.push_back(0);
  for (int row = 0; row < num_rows(); ++row) {
    const int len = context_lens_[row];
    const int begin = window > 0 ? std::max(0, len - window) : 0;
    const int first_tile = begin / 16;
    const int tiles = (len + 15) / 16 - first_tile;
    const int pieces = static_cast<int>((tiles + item_tiles - 1) / item_tiles);
    // Heads of one range are neighbours in memory, so they follow each other.
    const int first_split = static_cast<int>(splits_.size());
    for (int head = 0; pieces > 1 && head < shape.num_kv_heads; ++head) {
      splits_.push_back({num_parts, pieces});
      num_parts += pieces;
    }
    auto tile_at = [&](int piece) {
      return first_tile + static_cast<int>(int64_t{tiles} * piece / pieces);
    };
    for (int i = 0; i < pieces; ++i) {
      const bool is_last = i == pieces - 1;
      const int from = std::max(begin, tile_at(i) * 16);
      const int to = is_last ? len : tile_at(i + 1) * 16;
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const int split = pieces > 1 ? first_split + head : -1;
        const int part = pieces > 1 ? splits_[split].first_part + i : -1;
        items_.push_back({row, head, from, to, part, split, is_last});
      }
    }
    items_before_row_.push_back(static_cast<int>(items_.size()));
  }
  part_floats_ =
      int64_t{num_q_heads / shape.num_kv_heads} * (shape.head_dim + 2);
  // A cache line apart, so that threads do not share one.
  part_floats_ = (part_floats_ + 15) / 16 * 16;
  parts_.reset(new float[num_parts * part_floats_]);
  finished_.reset(new std::atomic<int>[splits_.size()]());
}

bool Plan::FinishPart(int split) const {
  std::atomic<int>& count = finished_[split];
  if (count.fetch_add(1, std::memory_order_acq_rel) + 1 <
      splits_[split].num_parts) {
    return false;
  }
  count.store(0, std::memory_order_relaxed);
  return true;
}

}  // namespace neojax
