// How many cores this process may really use.
#ifndef NEOJAX_CPU_PAGED_ATTN_CPU_COUNT_H_
#define NEOJAX_CPU_PAGED_ATTN_CPU_COUNT_H_

namespace neojax {

// Cores in the affinity mask, capped by the cgroup's CPU quota. At least 1.
int UsableCores();

// Default size of a worker pool: two cores stay free for Python and XLA; with
// fewer than four, one; never less than one thread.
int DefaultNumThreads(int usable_cores);

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_CPU_COUNT_H_
