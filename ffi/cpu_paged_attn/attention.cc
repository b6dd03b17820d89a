#include "ffi/cpu_paged_attn/attention.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace neojax {
namespace {

constexpr float kLn2 = 0.693147181f;

// Weighs `num_parts` partial results of one head, [H] out, max and sum each,
// by their share of the whole. Fixed order: the result does not depend on
// which thread was last.
void MergeParts(const Plan& plan, const Split& split, int head_in_group,
                int group, int head_dim, float* out, float* max, float* sum) {
  auto max_of = [&](int i) {
    return plan.part(split.first_part + i) + group * head_dim + head_in_group;
  };
  *max = *max_of(0);
  for (int i = 1; i < split.num_parts; ++i) *max = std::max(*max, *max_of(i));
  *sum = 0;
  std::fill(out, out + head_dim, 0.0f);
  for (int i = 0; i < split.num_parts; ++i) {
    float weight = std::exp2(*max_of(i) - *max);
    *sum += weight * max_of(i)[group];
    const float* part =
        plan.part(split.first_part + i) + head_in_group * head_dim;
    for (int d = 0; d < head_dim; ++d) out[d] += weight * part[d];
  }
}

class Job {
 public:
  Job(HostKVCache& cache, const KernelTable& kernels,
      const AttentionParams& params, const Plan& plan,
      const AttentionCall& call)
      : cache_(cache),
        shape_(cache.shape()),
        kernel_(shape_.dtype == Dtype::kFloat32    ? kernels.float32
                : shape_.dtype == Dtype::kBFloat16 ? kernels.bfloat16
                                                   : kernels.float16),
        params_(params),
        plan_(plan),
        call_(call),
        group_(params.num_q_heads / shape_.num_kv_heads),
        row_elements_(int64_t{params.num_q_heads + 2 * shape_.num_kv_heads} *
                      shape_.head_dim) {}

  // `next`, if not null, is what this thread will probably work on next.
  void RunItem(const Item& item, const Item* next) const {
    if (item.is_last && call_.append) Append(item.row, item.head);
    const int head_dim = shape_.head_dim;
    alignas(64) float q[kMaxGroup * kMaxHeadDim];
    alignas(64) float out[kMaxGroup * kMaxHeadDim];
    float max[kMaxGroup], sum[kMaxGroup];

    AttendArgs args;
    args.q = q;
    args.base = cache_.HeadBase(call_.layer, item.head);
    args.table = plan_.blocks(item);
    args.block_bytes = shape_.block_bytes();
    args.tile_bytes = shape_.tile_bytes();
    args.tiles_per_block = shape_.tiles_per_block();
    args.begin = item.begin;
    args.end = item.end;
    const bool has_next = next != nullptr;
    args.next_base =
        has_next ? cache_.HeadBase(call_.layer, next->head) : nullptr;
    args.next_table = has_next ? plan_.blocks(*next) : nullptr;
    args.next_begin = has_next ? next->begin : 0;
    args.next_end = has_next ? next->end : 0;
    args.head_dim = head_dim;
    args.scale = params_.scale;
    args.softcap = params_.softcap;
    for (int first = 0; first < group_; first += kMaxGroup) {
      args.group = std::min<int>(kMaxGroup, group_ - first);
      const int64_t head = int64_t{item.head} * group_ + first;
      WithType(call_.dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        ConvertElements(q,
                        static_cast<const T*>(call_.rows) +
                            item.row * row_elements_ + head * head_dim,
                        int64_t{args.group} * head_dim);
      });
      if (item.part >= 0) {
        float* part = plan_.part(item.part);
        args.out = part + first * head_dim;
        args.max = part + group_ * head_dim + first;
        args.sum = args.max + group_;
        kernel_(args);
      } else {
        args.out = out;
        args.max = max;
        args.sum = sum;
        kernel_(args);
        for (int g = 0; g < args.group; ++g) {
          Emit(item.row, static_cast<int>(head) + g, out + g * head_dim, max[g],
               sum[g]);
        }
      }
    }
    if (item.split >= 0 && plan_.FinishPart(item.split)) {
      for (int g = 0; g < group_; ++g) {
        MergeParts(plan_, plan_.split(item.split), g, group_, head_dim, out,
                   max, sum);
        Emit(item.row, item.head * group_ + g, out, max[0], sum[0]);
      }
    }
  }

 private:
  void Append(int row, int head) const {
    int position = plan_.context_len(row) - 1;
    const char* rows = static_cast<const char*>(call_.rows);
    int64_t k = row * row_elements_ +
                int64_t{params_.num_q_heads + head} * shape_.head_dim;
    int64_t v = k + int64_t{shape_.num_kv_heads} * shape_.head_dim;
    int size = ElementSize(call_.dtype);
    cache_.WriteToken(call_.layer,
                      plan_.table(row)[position / shape_.block_size],
                      position % shape_.block_size, head, rows + k * size,
                      rows + v * size, call_.dtype);
  }

  void Emit(int row, int head, const float* out, float max, float sum) const {
    const int64_t at = int64_t{row} * params_.num_q_heads + head;
    const int head_dim = shape_.head_dim;
    const float by = 1.0f / sum;
    WithType(call_.dtype, [&](auto* type) {
      auto* to = static_cast<decltype(type)>(call_.out) + at * head_dim;
      for (int d = 0; d < head_dim; ++d) Assign(to + d, out[d] * by);
    });
    if (call_.lse != nullptr) call_.lse[at] = max * kLn2 + std::log(sum);
  }

  HostKVCache& cache_;
  const CacheShape& shape_;
  const AttendFn kernel_;
  const AttentionParams& params_;
  const Plan& plan_;
  const AttentionCall& call_;
  const int group_;
  const int64_t row_elements_;
};

}  // namespace

void CheckParams(const CacheShape& shape, const AttentionParams& params) {
  if (params.num_q_heads < 1 || params.num_q_heads % shape.num_kv_heads != 0) {
    throw std::invalid_argument("num_q_heads must be a multiple of the " +
                                std::to_string(shape.num_kv_heads) +
                                " kv heads, got " +
                                std::to_string(params.num_q_heads));
  }
  if (!std::isfinite(params.scale)) {
    throw std::invalid_argument("scale must be finite");
  }
  if (!(params.softcap >= 0) || !std::isfinite(params.softcap)) {
    throw std::invalid_argument("softcap must be 0 (none) or positive");
  }
}

void Attend(HostKVCache& cache, WorkerPool& pool, const KernelTable& kernels,
            const AttentionParams& params, const Plan& plan,
            const AttentionCall& call) {
  Job job(cache, kernels, params, plan, call);
  int counts[kMaxNodes];
  for (int node = 0; node < plan.num_nodes(); ++node) {
    counts[node] = plan.num_items(node, call.num_rows);
  }
  auto item = [&](int i) {
    int node = 0;
    for (; i >= counts[node]; ++node) i -= counts[node];
    return &plan.items(node)[i];
  };
  pool.ForEach(counts, plan.num_nodes(), [&](int i, int next) {
    job.RunItem(*item(i), next < 0 ? nullptr : item(next));
  });
}

void Store(HostKVCache& cache, WorkerPool& pool, const AttentionParams& params,
           const Plan& plan, int layer, int num_chunks, const void* rows,
           Dtype dtype) {
  const CacheShape& shape = cache.shape();
  const int size = ElementSize(dtype);
  const int64_t row_heads = params.num_q_heads + 2 * shape.num_kv_heads;
  pool.ForEach(num_chunks * shape.num_kv_heads, [&](int i, int) {
    const int head = i % shape.num_kv_heads;
    const Chunk& chunk = plan.chunk(i / shape.num_kv_heads);
    const int32_t* table = plan.chunk_table(i / shape.num_kv_heads);
    for (int t = 0; t < chunk.num_tokens; ++t) {
      const char* k =
          static_cast<const char*>(rows) +
          ((chunk.row_offset + t) * row_heads + params.num_q_heads + head) *
              shape.head_dim * size;
      const char* v = k + int64_t{shape.num_kv_heads} * shape.head_dim * size;
      int position = chunk.start + t;
      cache.WriteToken(layer, table[position / shape.block_size],
                       position % shape.block_size, head, k, v, dtype);
    }
  });
}

void Fetch(const HostKVCache& cache, WorkerPool& pool, const Plan& plan,
           int layer, int num_chunks, void* k_scratch, void* v_scratch,
           Dtype dtype) {
  const CacheShape& shape = cache.shape();
  const int size = ElementSize(dtype);
  pool.ForEach(num_chunks * shape.num_kv_heads, [&](int i, int) {
    const int head = i % shape.num_kv_heads;
    const Chunk& chunk = plan.chunk(i / shape.num_kv_heads);
    const int32_t* table = plan.chunk_table(i / shape.num_kv_heads);
    for (int position = 0; position < chunk.start; ++position) {
      int64_t at =
          ((int64_t{chunk.scratch_slot} + position) * shape.num_kv_heads +
           head) *
          shape.head_dim * size;
      cache.ReadToken(layer, table[position / shape.block_size],
                      position % shape.block_size, head,
                      static_cast<char*>(k_scratch) + at,
                      static_cast<char*>(v_scratch) + at, dtype);
    }
  });
}

}  // namespace neojax
