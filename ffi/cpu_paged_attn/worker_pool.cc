#include "ffi/cpu_paged_attn/worker_pool.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "ffi/cpu_paged_attn/cpu_count.h"

namespace neojax {
namespace {

int CheckedNumThreads(int num_threads, const std::vector<int>& cpus) {
  if (num_threads > 1024) {
    throw std::invalid_argument("num_threads must be at most 1024, got " +
                                std::to_string(num_threads));
  }
  if (num_threads <= 0) {
    num_threads = cpus.empty() ? DefaultNumThreads(UsableCores())
                               : static_cast<int>(cpus.size());
  }
  if (!cpus.empty() && static_cast<int>(cpus.size()) != num_threads) {
    throw std::invalid_argument(
        "cpus must name one core per thread: " + std::to_string(num_threads) +
        " threads, " + std::to_string(cpus.size()) + " cores");
  }
  for (int cpu : cpus) {
    if (!MayUseCore(cpu)) {
      throw std::invalid_argument("cpus: core " + std::to_string(cpu) +
                                  " is not one this process may use");
    }
  }
  return num_threads;
}

}  // namespace

WorkerPool::WorkerPool(int num_threads, std::vector<int> cpus,
                       std::vector<std::vector<int>> nodes)
    : num_threads_(CheckedNumThreads(num_threads, cpus)),
      cpus_(std::move(cpus)),
      may_spin_(UsableCores() >= 4),
      items_(new Items[num_threads_]) {
  SpreadOverNodes(std::move(nodes));
  try {
    for (int worker = 1; worker < num_threads_; ++worker) {
      helpers_.push_back(std::make_unique<Helper>());
      Helper* self = helpers_.back().get();
      self->thread = std::thread([this, worker, self] { Work(worker, self); });
    }
  } catch (...) {
    if (!helpers_.empty() && !helpers_.back()->thread.joinable()) {
      helpers_.pop_back();
    }
    Close();
    throw;
  }
}

WorkerPool::~WorkerPool() { Close(); }

void WorkerPool::SpreadOverNodes(std::vector<std::vector<int>> nodes) {
  if (nodes.size() > kMaxNodes) {
    throw std::invalid_argument("nodes must be at most " +
                                std::to_string(int{kMaxNodes}) + ", got " +
                                std::to_string(nodes.size()));
  }
  for (const std::vector<int>& cores : nodes) {
    if (cores.empty() || !std::all_of(cores.begin(), cores.end(), MayUseCore)) {
      throw std::invalid_argument(
          "nodes: each must name cores that this process may use");
    }
  }
  node_of_.assign(num_threads_, 0);
  if (nodes.empty()) return;
  std::vector<int> used(nodes.size(), 0);
  for (int worker = 0; worker < num_threads_; ++worker) {
    size_t node = 0;
    if (!cpus_.empty()) {
      while (node + 1 < nodes.size() &&
             std::find(nodes[node].begin(), nodes[node].end(), cpus_[worker]) ==
                 nodes[node].end()) {
        ++node;
      }
    } else {
      // The node with most cores a thread, counting the one to come.
      for (size_t other = 1; other < nodes.size(); ++other) {
        if (nodes[other].size() * (used[node] + 1) >
            nodes[node].size() * (used[other] + 1)) {
          node = other;
        }
      }
    }
    ++used[node];
    node_of_[worker] = static_cast<int>(node);
  }
  std::vector<int> rank(nodes.size(), 0);
  for (size_t node = 0; node < nodes.size(); ++node) {
    rank[node] = static_cast<int>(nodes_.size());
    if (used[node] > 0) nodes_.push_back(std::move(nodes[node]));
  }
  for (int& node : node_of_) node = rank[node];
  num_nodes_ = static_cast<int>(nodes_.size());
}

void WorkerPool::Bind(int worker) const {
  if (!cpus_.empty()) {
    BindThisThread({cpus_[worker]});
  } else if (!nodes_.empty()) {
    BindThisThread(nodes_[node_of_[worker]]);
  }
}

void WorkerPool::Work(int worker, Helper* self) {
  Bind(worker);
  for (;;) {
    self->go.Wait(SpinNs());
    self->go.Reset();
    if (job_ == nullptr) return;
    (*job_)(worker);
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) finished_.Post();
  }
}

void WorkerPool::Run(int max_workers, const std::function<void(int)>& fn) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  RunLocked(std::min(max_workers, 1 + static_cast<int>(helpers_.size())), fn);
}

void WorkerPool::RunLocked(int num_workers,
                           const std::function<void(int)>& fn) {
  const int num_helpers = num_workers - 1;
  if (num_helpers <= 0) {
    fn(0);
    return;
  }
  job_ = &fn;
  pending_.store(num_helpers, std::memory_order_relaxed);
  finished_.Reset();
  for (int i = 0; i < num_helpers; ++i) helpers_[i]->go.Post();
  fn(0);
  finished_.Wait(SpinNs());
}

int WorkerPool::Items::TakeFirst(int* next) {
  uint64_t seen = range.load(std::memory_order_relaxed);
  for (;;) {
    uint32_t begin = seen >> 32, end = static_cast<uint32_t>(seen);
    if (begin >= end) return -1;
    if (range.compare_exchange_weak(seen, seen + (uint64_t{1} << 32),
                                    std::memory_order_relaxed)) {
      *next = begin + 1 < end ? static_cast<int>(begin) + 1 : -1;
      return static_cast<int>(begin);
    }
  }
}

int WorkerPool::Items::TakeLast() {
  uint64_t seen = range.load(std::memory_order_relaxed);
  for (;;) {
    uint32_t begin = seen >> 32, end = static_cast<uint32_t>(seen);
    if (begin >= end) return -1;
    if (range.compare_exchange_weak(seen, seen - 1,
                                    std::memory_order_relaxed)) {
      return static_cast<int>(end) - 1;
    }
  }
}

void WorkerPool::Divide(const int* counts, int num_counts, int num_workers) {
  int workers_on[kMaxNodes] = {};
  for (int worker = 0; worker < num_workers; ++worker) {
    ++workers_on[node_of_[worker]];
  }
  int total = 0;
  bool by_node = num_counts == num_nodes_;
  for (int n = 0; n < num_counts; ++n) {
    total += counts[n];
    by_node = by_node && (counts[n] == 0 || workers_on[n] > 0);
  }
  int first = 0, of_node[kMaxNodes] = {};
  for (int node = 0; node < num_nodes_; ++node) {
    const int count = by_node ? counts[node] : total;
    const int sharers = by_node ? workers_on[node] : num_workers;
    for (int worker = 0; worker < num_workers; ++worker) {
      if (by_node && node_of_[worker] != node) continue;
      const int64_t rank = by_node ? of_node[node]++ : worker;
      const uint64_t begin = first + count * rank / sharers;
      const uint64_t end = first + count * (rank + 1) / sharers;
      items_[worker].range.store(begin << 32 | end, std::memory_order_relaxed);
    }
    if (!by_node) return;
    first += count;
  }
}

void WorkerPool::ForEach(const int* counts, int num_counts,
                         const std::function<void(int, int)>& fn) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  ForEachLocked(counts, num_counts, fn);
}

bool WorkerPool::TryForEach(int count,
                            const std::function<void(int, int)>& fn) {
  std::unique_lock<std::mutex> lock(run_mutex_, std::try_to_lock);
  if (lock) ForEachLocked(&count, 1, fn);
  return lock.owns_lock();
}

void WorkerPool::ForEachLocked(const int* counts, int num_counts,
                               const std::function<void(int, int)>& fn) {
  int total = 0;
  for (int n = 0; n < num_counts; ++n) total += counts[n];
  const int num_workers =
      std::min(total, 1 + static_cast<int>(helpers_.size()));
  Divide(counts, num_counts, num_workers);
  RunLocked(num_workers, [&](int worker) {
    int next = -1;
    for (int i; (i = items_[worker].TakeFirst(&next)) >= 0;) fn(i, next);
    // Those of the own node first.
    for (int pass = 0; pass < (num_nodes_ > 1 ? 2 : 1); ++pass) {
      for (int k = 1; k < num_workers; ++k) {
        const int other = (worker + k) % num_workers;
        const bool is_near = node_of_[other] == node_of_[worker];
        if (num_nodes_ > 1 && is_near != (pass == 0)) continue;
        for (int i; (i = items_[other].TakeLast()) >= 0;) fn(i, -1);
      }
    }
  });
}

void WorkerPool::Close() {
  std::lock_guard<std::mutex> lock(run_mutex_);
  job_ = nullptr;
  for (auto& helper : helpers_) helper->go.Post();
  for (auto& helper : helpers_) helper->thread.join();
  helpers_.clear();
}

}  // namespace neojax
