// One step's host work: which tokens, in which blocks, cut into items.
#ifndef NEOJAX_CPU_PAGED_ATTN_PLAN_H_
#define NEOJAX_CPU_PAGED_ATTN_PLAN_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ffi/cpu_paged_attn/arena.h"

namespace neojax {

// A piece of work for one thread: some of one sequence's tokens, one head.
struct Item {
  int row;         // sequence
  int head;        // kv head
  int begin, end;  // tokens of the table below
  int64_t table;   // where in Plan::blocks the sequence's blocks start; with
                   // several NUMA nodes, those of its blocks that are on one
  int part;        // index into the partial results; -1: the range is whole
  int split;       // index into Plan::splits; -1: the range is whole
  bool is_last;    // holds the newest token
};

// A (sequence, kv head) cut into several items.
struct Split {
  int first_part;
  int num_parts;
};

// Tokens that a prefill chunk brings, and where they go.
struct Chunk {
  int row_offset;    // first row in the stored array
  int num_tokens;    // rows
  int start;         // position of the first token in its sequence
  int scratch_slot;  // where `fetch` puts tokens [0, start)
};

struct Table {
  const int32_t* data;  // [B, W], row major
  int rows, width;
};

class Plan {
 public:
  // Copies and checks. Throws std::invalid_argument naming the argument. The
  // cut depends on the lengths only, so results do not depend on the number
  // of threads. `window` > 0: attend to the last `window` tokens only.
  // `num_nodes`: the arena's; no item has blocks of two.
  Plan(const CacheShape& shape, int num_q_heads, const int32_t* context_lens,
       Table tables, int window, const int32_t* chunks, Table chunk_tables,
       int num_nodes = 1);

  int num_rows() const { return static_cast<int>(context_lens_.size()); }
  int num_chunks() const { return static_cast<int>(chunks_.size()); }
  int context_len(int row) const { return context_lens_[row]; }
  const int32_t* table(int row) const {
    return tables_.data() + int64_t{row} * width_;
  }
  const Chunk& chunk(int i) const { return chunks_[i]; }
  const int32_t* chunk_table(int i) const {
    return chunk_tables_.data() + int64_t{i} * chunk_width_;
  }

  // Items by node. Those of the first n rows are the first num_items(node, n).
  int num_nodes() const { return static_cast<int>(nodes_.size()); }
  const std::vector<Item>& items(int node) const { return nodes_[node].items; }
  int num_items(int node, int rows) const {
    return nodes_[node].items_before_row[rows];
  }
  const int32_t* blocks(const Item& item) const {
    return blocks_.data() + item.table;
  }
  const Split& split(int i) const { return splits_[i]; }

  // Partial results, [parts, G, H + 2]: H of out, then max and sum.
  float* part(int i) const { return parts_.get() + i * part_floats_; }
  // True for the caller that completes the split; it is then reset.
  bool FinishPart(int split) const;

 private:
  struct Node {
    std::vector<Item> items;
    std::vector<int> items_before_row = {0};
  };
  // A row's blocks that are on one node, and the tokens of them that count.
  struct Stretch {
    int node;
    int64_t table;
    int begin, end;
    bool is_last;
    int tiles() const { return (end + 15) / 16 - begin / 16; }
  };
  std::vector<Stretch> Stretches(const CacheShape& shape, int row, int begin);
  void AddItems(const CacheShape& shape, int row,
                const std::vector<Stretch>& stretches, int64_t item_tiles);

  std::vector<int32_t> context_lens_, tables_, chunk_tables_;
  std::vector<int32_t> blocks_;  // the tables, a row's blocks sorted by node
  int width_ = 0, chunk_width_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<Node> nodes_;
  std::vector<Split> splits_;
  int num_parts_ = 0;
  int64_t part_floats_ = 0;
  std::unique_ptr<float[]> parts_;
  std::unique_ptr<std::atomic<int>[]> finished_;
};

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_PLAN_H_
