// A thread that runs jobs in the order in which they were queued.
#ifndef NEOJAX_CPU_PAGED_ATTN_JOB_QUEUE_H_
#define NEOJAX_CPU_PAGED_ATTN_JOB_QUEUE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace neojax {

class JobQueue {
 public:
  using Job = std::function<void()>;  // must not throw

  JobQueue();
  ~JobQueue();
  JobQueue(const JobQueue&) = delete;
  JobQueue& operator=(const JobQueue&) = delete;

  // False once closed: the job is dropped.
  bool Enqueue(Job job);
  // False if jobs are left after this time.
  bool WaitIdle(int64_t timeout_ns);
  // When the job in progress began; 0 without one.
  int64_t running_since_ns() const;
  // Runs what is queued and ends the thread. May be called twice.
  void Close();

 private:
  void Run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  int64_t running_since_ns_ = 0;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_JOB_QUEUE_H_
