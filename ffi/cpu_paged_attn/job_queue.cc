#include "ffi/cpu_paged_attn/job_queue.h"

#include <chrono>
#include <utility>

#include "ffi/cpu_paged_attn/signal.h"

namespace neojax {

JobQueue::JobQueue() : thread_([this] { Run(); }) {}

JobQueue::~JobQueue() { Close(); }

bool JobQueue::Enqueue(Job job) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return false;
  queue_.push_back(std::move(job));
  changed_.notify_all();
  return true;
}

bool JobQueue::WaitIdle(int64_t timeout_ns) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] {
    return queue_.empty() && running_since_ns_ == 0;
  });
}

int64_t JobQueue::running_since_ns() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return running_since_ns_;
}

void JobQueue::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void JobQueue::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Job job = std::move(queue_.front());
    queue_.pop_front();
    running_since_ns_ = NowNs();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
    running_since_ns_ = 0;
    changed_.notify_all();
  }
}

}  // namespace neojax
