#include "ffi/cpu_paged_attn/worker_pool.h"

#include <pthread.h>
#include <sched.h>

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
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (!cpus.empty()) sched_getaffinity(0, sizeof allowed, &allowed);
  for (int cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &allowed)) {
      throw std::invalid_argument("cpus: core " + std::to_string(cpu) +
                                  " is not one this process may use");
    }
  }
  return num_threads;
}

}  // namespace

bool BindThisThread(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
  CPU_SET(cpu, &set);
  return pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
}

WorkerPool::WorkerPool(int num_threads, std::vector<int> cpus)
    : num_threads_(CheckedNumThreads(num_threads, cpus)),
      cpus_(std::move(cpus)),
      may_spin_(UsableCores() >= 4),
      items_(new Items[num_threads_]) {
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

void WorkerPool::Work(int worker, Helper* self) {
  if (!cpus_.empty()) BindThisThread(cpus_[worker]);
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

void WorkerPool::ForEach(int count, const std::function<void(int, int)>& fn) {
  std::lock_guard<std::mutex> lock(run_mutex_);
  const int num_workers =
      std::min(count, 1 + static_cast<int>(helpers_.size()));
  for (int worker = 0; worker < num_workers; ++worker) {
    uint64_t begin = int64_t{count} * worker / num_workers;
    uint64_t end = int64_t{count} * (worker + 1) / num_workers;
    items_[worker].range.store(begin << 32 | end, std::memory_order_relaxed);
  }
  RunLocked(num_workers, [&](int worker) {
    int next = -1;
    for (int i; (i = items_[worker].TakeFirst(&next)) >= 0;) fn(i, next);
    for (int other = 1; other < num_workers; ++other) {
      Items& from = items_[(worker + other) % num_workers];
      for (int i; (i = from.TakeLast()) >= 0;) fn(i, -1);
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
