#include "ffi/cpu_paged_attn/bench.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace neojax {

double TimeRead(const HostKVCache& cache, WorkerPool& pool,
                const KernelTable& kernels, int streams, int ahead) {
  constexpr int64_t kPiece = int64_t{2} << 20;
  const int64_t bytes = cache.shape().num_bytes();
  const char* data = cache.HeadBase(0, 0);
  std::atomic<int64_t> next{0};
  std::atomic<int> sink{0};
  int64_t start = NowNs();
  pool.Run(pool.num_threads(), [&](int) {
    for (;;) {
      int64_t begin = next.fetch_add(kPiece, std::memory_order_relaxed);
      if (begin >= bytes) return;
      int64_t size = std::min(kPiece, bytes - begin) / 4096 * 4096;
      float sum = kernels.read(data + begin, size, streams, ahead);
      // The sum must be used, or the loop could go.
      if (sum == 1.0f) sink.fetch_add(1, std::memory_order_relaxed);
    }
  });
  return (NowNs() - start) * 1e-9;
}

std::vector<double> TimeAttend(HostKVCache& cache, WorkerPool& pool,
                               const KernelTable& kernels,
                               const AttentionParams& params, const Plan& plan,
                               const void* rows, Dtype dtype, int num_calls,
                               bool asleep, bool read_only) {
  const AttendFn reading = kernels.read_tiles;
  const KernelTable readers = {kernels.name, reading,      reading,
                               reading,      kernels.read, reading};
  std::vector<char> out(int64_t{plan.num_rows()} * params.num_q_heads *
                        cache.shape().head_dim * ElementSize(dtype));
  std::vector<double> seconds;
  if (!asleep) pool.Arm(1);
  for (int i = 0; i < num_calls; ++i) {
    if (asleep) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    int64_t start = NowNs();
    Attend(cache, pool, read_only ? readers : kernels, params, plan,
           {rows, dtype, i % cache.shape().num_layers, plan.num_rows(),
            /*append=*/true, out.data(), /*lse=*/nullptr});
    seconds.push_back((NowNs() - start) * 1e-9);
  }
  if (!asleep) pool.Arm(-1);
  return seconds;
}

}  // namespace neojax
