// Threads that run one job at a time, the caller included.
#ifndef NEOJAX_CPU_PAGED_ATTN_WORKER_POOL_H_
#define NEOJAX_CPU_PAGED_ATTN_WORKER_POOL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "ffi/cpu_paged_attn/signal.h"
#include "ffi/cpu_paged_attn/topology.h"

namespace neojax {

// `num_threads` counts the thread that calls Run, which works too: a pool of
// one starts no thread. Threads sleep on a futex between jobs; on machines
// with at least four usable cores they spin first while the pool is armed,
// because host jobs come some hundred microseconds apart.
class WorkerPool {
 public:
  // num_threads <= 0: DefaultNumThreads(UsableCores()). `cpus`, if not empty,
  // names the core of each thread, the caller's first. `nodes`, if not empty,
  // are the cores of each NUMA node: threads are spread over the nodes, and
  // stay on theirs. Throws std::invalid_argument for a core outside the
  // affinity mask.
  explicit WorkerPool(int num_threads = 0, std::vector<int> cpus = {},
                      std::vector<std::vector<int>> nodes = {});
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int num_threads() const { return num_threads_; }
  // Nodes that have threads; 1 where none are told apart.
  int num_nodes() const { return num_nodes_; }
  int node_of(int worker) const { return node_of_[worker]; }
  // Binds the calling thread as the worker's; to nothing if that may roam.
  void Bind(int worker) const;

  // Calls fn(worker) on min(max_workers, num_threads) threads at once, the
  // caller being worker 0, and returns when all are back. One job at a time:
  // other callers wait. `fn` must not throw. A closed pool runs everything on
  // the caller.
  void Run(int max_workers, const std::function<void(int)>& fn);

  // Calls fn(i, next) once for each i in [0, count). `next` is the item this
  // thread will probably get after i, or -1. Each thread starts with a run of
  // neighbours and, when it has none left, takes from the ends of others'.
  void ForEach(int count, const std::function<void(int, int)>& fn) {
    ForEach(&count, 1, fn);
  }
  // The same over counts[0] + counts[1] + ... items: of these, counts[n] in
  // turn begin on node n, if there are as many counts as nodes.
  void ForEach(const int* counts, int num_counts,
               const std::function<void(int, int)>& fn);
  // Likewise, if no job is in progress; else false, and nothing is called.
  bool TryForEach(int count, const std::function<void(int, int)>& fn);

  // Armed while the sum of deltas is positive.
  void Arm(int delta) { armed_.fetch_add(delta, std::memory_order_relaxed); }

  // How long a thread that waits for work should spin before it sleeps.
  int64_t SpinNs() const {
    return may_spin_ && armed_.load(std::memory_order_relaxed) > 0 ? kSpinNs
                                                                   : 0;
  }

  // Ends the threads after the job in progress. May be called twice.
  void Close();

 private:
  // Bounded, so that an engine that hangs does not burn its cores.
  static constexpr int64_t kSpinNs = 2000000;

  struct alignas(64) Helper {
    Signal go;
    std::thread thread;
  };

  // Items [begin, end) of one thread: begin in the upper half.
  struct alignas(64) Items {
    std::atomic<uint64_t> range{0};
    // Both return -1 when there is none.
    int TakeFirst(int* next);
    int TakeLast();
  };

  void SpreadOverNodes(std::vector<std::vector<int>> nodes);
  void Divide(const int* counts, int num_counts, int num_workers);
  void Work(int worker, Helper* self);
  void RunLocked(int num_workers, const std::function<void(int)>& fn);
  void ForEachLocked(const int* counts, int num_counts,
                     const std::function<void(int, int)>& fn);

  const int num_threads_;
  const std::vector<int> cpus_;
  std::vector<std::vector<int>> nodes_;  // those with threads, or empty
  std::vector<int> node_of_;             // of each thread
  int num_nodes_ = 1;
  const bool may_spin_;
  std::atomic<int> armed_{0};
  std::mutex run_mutex_;  // held by the job in progress
  std::vector<std::unique_ptr<Helper>> helpers_;
  std::unique_ptr<Items[]> items_;                 // one a thread
  const std::function<void(int)>* job_ = nullptr;  // null: exit
  alignas(64) std::atomic<int> pending_{0};
  Signal finished_;
};

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_WORKER_POOL_H_
