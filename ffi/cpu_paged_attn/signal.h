// One-shot event between two threads: a futex word that costs no system call
// unless the waiter sleeps.
#ifndef NEOJAX_CPU_PAGED_ATTN_SIGNAL_H_
#define NEOJAX_CPU_PAGED_ATTN_SIGNAL_H_

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace neojax {

// CLOCK_MONOTONIC, the clock of Python's time.monotonic_ns.
inline int64_t NowNs() {
  timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return int64_t{1000000000} * ts.tv_sec + ts.tv_nsec;
}

inline void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Signal {
 public:
  // Sets the signal and wakes its waiter. Any thread.
  void Post() {
    if (word_.exchange(kSet, std::memory_order_acq_rel) == kAsleep) {
      syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr,
              nullptr, 0);
    }
  }

  bool IsSet() const { return word_.load(std::memory_order_acquire) == kSet; }

  void Reset() { word_.store(kClear, std::memory_order_release); }

  // Waits until set: spins for `spin_ns`, then sleeps. False if `timeout_ns`
  // (negative: never) passes first.
  bool Wait(int64_t spin_ns, int64_t timeout_ns = -1) {
    if (IsSet()) return true;
    int64_t start = NowNs();
    if (spin_ns > 0) {
      do {
        for (int i = 0; i < 64; ++i) {
          if (IsSet()) return true;
          CpuRelax();
        }
      } while (NowNs() - start < spin_ns);
    }
    for (;;) {
      uint32_t seen = kClear;
      if (!word_.compare_exchange_strong(seen, kAsleep,
                                         std::memory_order_acq_rel) &&
          seen == kSet) {
        return true;
      }
      timespec left{};
      if (timeout_ns >= 0) {
        int64_t ns = timeout_ns - (NowNs() - start);
        if (ns <= 0) return IsSet();
        left.tv_sec = ns / 1000000000;
        left.tv_nsec = ns % 1000000000;
      }
      syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, uint32_t{kAsleep},
              timeout_ns >= 0 ? &left : nullptr, nullptr, 0);
      if (IsSet()) return true;
    }
  }

 private:
  enum : uint32_t { kClear = 0, kSet = 1, kAsleep = 2 };
  std::atomic<uint32_t> word_{kClear};
};

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_SIGNAL_H_
