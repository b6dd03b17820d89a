// Attention of a plan's rows over one layer of the arena, on the pool.
#ifndef NEOJAX_CPU_PAGED_ATTN_ATTENTION_H_
#define NEOJAX_CPU_PAGED_ATTN_ATTENTION_H_

#include "ffi/cpu_paged_attn/arena.h"
#include "ffi/cpu_paged_attn/kernel.h"
#include "ffi/cpu_paged_attn/plan.h"

namespace neojax {

struct AttentionParams {
  int num_q_heads;  // N, a multiple of K
  float scale;
  float softcap = 0.0f;  // 0: none
};

// Throws std::invalid_argument naming the field.
void CheckParams(const CacheShape& shape, const AttentionParams& params);

struct AttentionCall {
  const void* rows;  // [num_rows, (N + 2K) * H]: q, k, v of each sequence
  Dtype dtype;       // of rows and out
  int layer;
  int num_rows;  // n: the plan's first n sequences
  bool append;   // store k, v at position context_len - 1 first
  void* out;     // [num_rows, N * H]
  float* lse;    // [num_rows, N] natural log-sum-exp of the logits, or null
};

// Arguments have been checked. Does not throw, does not allocate.
void Attend(HostKVCache& cache, WorkerPool& pool, const KernelTable& kernels,
            const AttentionParams& params, const Plan& plan,
            const AttentionCall& call);

// Writes k, v of the first `num_chunks` chunks' rows to the arena.
void Store(HostKVCache& cache, WorkerPool& pool, const AttentionParams& params,
           const Plan& plan, int layer, int num_chunks, const void* rows,
           Dtype dtype);

// Copies tokens [0, start) of the first `num_chunks` chunks' sequences to
// scratch arrays [S, K, H] at scratch_slot.
void Fetch(const HostKVCache& cache, WorkerPool& pool, const Plan& plan,
           int layer, int num_chunks, void* k_scratch, void* v_scratch,
           Dtype dtype);

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_ATTENTION_H_
