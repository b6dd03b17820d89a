// Timings of the kernels and of the memory they read.
#ifndef NEOJAX_CPU_PAGED_ATTN_BENCH_H_
#define NEOJAX_CPU_PAGED_ATTN_BENCH_H_

#include <vector>

#include "ffi/cpu_paged_attn/attention.h"

namespace neojax {

// Seconds to read the whole arena once with every thread of the pool, as
// KernelTable::read does with these `streams` and `ahead`.
double TimeRead(const HostKVCache& cache, WorkerPool& pool,
                const KernelTable& kernels, int streams, int ahead);

// Seconds of each of `num_calls` calls, on layer 0, 1, ... in turn. The pool
// is armed meanwhile; with `asleep`, it is not, and its threads fall asleep
// before each call. With `read_only` the kernels only read the tiles.
std::vector<double> TimeAttend(HostKVCache& cache, WorkerPool& pool,
                               const KernelTable& kernels,
                               const AttentionParams& params, const Plan& plan,
                               const void* rows, Dtype dtype, int num_calls,
                               bool asleep, bool read_only);

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_BENCH_H_
