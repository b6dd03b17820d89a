#include "ffi/cpu_paged_attn/plan.h"

#include <algorithm>
#include <stdexcept>

namespace neojax {
namespace {

// A plan is cut into about this many items: enough to balance some tens of
// threads, few enough that an item is worth its hand-over.
constexpr int64_t kTargetItems = 512;
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

const int32_t* Aligned(const char* name, const int32_t* data) {
  const std::string error = CheckAligned(name, data, sizeof *data);
  if (!error.empty()) Refuse(error);
  return data;
}

}  // namespace

Plan::Plan(const CacheShape& shape, int num_q_heads,
           const int32_t* context_lens, Table tables, int window,
           const int32_t* chunks, Table chunk_tables, int num_nodes)
    : context_lens_(Aligned("context_lens", context_lens),
                    context_lens + tables.rows),
      tables_(Aligned("tables", tables.data),
              tables.data + static_cast<int64_t>(tables.rows) * tables.width),
      chunk_tables_(
          Aligned("chunk_tables", chunk_tables.data),
          chunk_tables.data +
              static_cast<int64_t>(chunk_tables.rows) * chunk_tables.width),
      width_(tables.width),
      chunk_width_(chunk_tables.width) {
  Aligned("chunks", chunks);
  int64_t total_tiles = 0;
  std::vector<std::vector<Stretch>> stretches;
  nodes_.resize(num_nodes);
  for (int row = 0; row < num_rows(); ++row) {
    int len = context_lens_[row];
    if (len < 1) {
      Refuse("context_lens[" + std::to_string(row) +
             "] must be at least 1, got " + std::to_string(len));
    }
    CheckTable(shape, "tables", row, table(row), width_, len);
    int begin = window > 0 ? std::max(0, len - window) : 0;
    stretches.push_back(Stretches(shape, row, begin));
    for (const Stretch& s : stretches.back()) total_tiles += s.tiles();
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
  for (int row = 0; row < num_rows(); ++row) {
    AddItems(shape, row, stretches[row], item_tiles);
    for (Node& node : nodes_) {
      node.items_before_row.push_back(static_cast<int>(node.items.size()));
    }
  }
  part_floats_ =
      int64_t{num_q_heads / shape.num_kv_heads} * (shape.head_dim + 2);
  // A cache line apart, so that threads do not share one.
  part_floats_ = (part_floats_ + 15) / 16 * 16;
  parts_.reset(new float[num_parts_ * part_floats_]);
  finished_.reset(new std::atomic<int>[splits_.size()]());
}

std::vector<Plan::Stretch> Plan::Stretches(const CacheShape& shape, int row,
                                           int begin) {
  const int size = shape.block_size;
  const int len = context_lens_[row];
  const int first = begin / size, last = (len - 1) / size;
  std::vector<Stretch> out;
  for (int node = 0; node < num_nodes(); ++node) {
    Stretch s{node, static_cast<int64_t>(blocks_.size()), 0, 0, false};
    for (int i = first; i <= last; ++i) {
      const int block = table(row)[i];
      if (NodeOfBlock(shape, num_nodes(), block) != node) continue;
      if (i == first) s.begin = begin % size;
      s.end += i == last ? len - last * size : size;
      s.is_last = i == last;
      blocks_.push_back(block);
    }
    if (s.end > 0) out.push_back(s);
  }
  return out;
}

void Plan::AddItems(const CacheShape& shape, int row,
                    const std::vector<Stretch>& stretches, int64_t item_tiles) {
  auto pieces_of = [&](const Stretch& s) {
    return static_cast<int>((s.tiles() + item_tiles - 1) / item_tiles);
  };
  int pieces = 0;
  for (const Stretch& s : stretches) pieces += pieces_of(s);
  const int first_split = static_cast<int>(splits_.size());
  for (int head = 0; pieces > 1 && head < shape.num_kv_heads; ++head) {
    splits_.push_back({num_parts_, pieces});
    num_parts_ += pieces;
  }
  int piece = 0;
  for (const Stretch& s : stretches) {
    const int count = pieces_of(s);
    auto tile_at = [&](int i) {
      return s.begin / 16 + static_cast<int>(int64_t{s.tiles()} * i / count);
    };
    for (int i = 0; i < count; ++i, ++piece) {
      const int from = std::max(s.begin, tile_at(i) * 16);
      const int to = i == count - 1 ? s.end : tile_at(i + 1) * 16;
      const bool is_last = s.is_last && i == count - 1;
      // Heads of one range are neighbours in memory, so they follow each other.
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const int split = pieces > 1 ? first_split + head : -1;
        const int part = pieces > 1 ? splits_[split].first_part + piece : -1;
        nodes_[s.node].items.push_back(
            {row, head, from, to, s.table, part, split, is_last});
      }
    }
  }
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
