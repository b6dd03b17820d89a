// What the dispatcher does with bytes that came from the device, and the
// watchdog over it.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "ffi/cpu_paged_attn/cuda_lane.h"

namespace neojax {
namespace {

std::string Text(int64_t value) { return std::to_string(value); }

void SleepUs(int64_t us) {
  timespec left{0, us * 1000};
  nanosleep(&left, nullptr);
}

// Calls fn(token) for each of `count` tokens on the pool's threads. Some at a
// time: one is too little to hand over.
template <class Fn>
void ForEachToken(WorkerPool& pool, int64_t count, const Fn& fn) {
  constexpr int64_t kBatch = 16;
  pool.ForEach(static_cast<int>((count + kBatch - 1) / kBatch),
               [&](int i, int) {
                 const int64_t end = std::min(count, (i + 1) * kBatch);
                 for (int64_t token = i * kBatch; token < end; ++token)
                   fn(token);
               });
}

}  // namespace

Hdr CudaLane::LoadHdr(const Trip& trip) {
  Hdr hdr;
  std::memcpy(&hdr, trip.pinned_in, sizeof hdr);
  return hdr;
}

bool CudaLane::GivenUp() const {
  int64_t deadline = close_deadline_ns_;
  return broken_ || (deadline != 0 && NowNs() > deadline);
}

bool CudaLane::Poll(const std::atomic<uint32_t>& flag, uint32_t number,
                    int64_t timeout_ns) const {
  auto reached = [&] {
    uint32_t value = flag.load(std::memory_order_acquire);
    return static_cast<int32_t>(value - number) >= 0;
  };
  const int64_t start = NowNs();
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (reached()) return true;
      CpuRelax();
    }
    if (GivenUp()) return reached();
    int64_t waited = NowNs() - start;
    if (timeout_ns >= 0 && waited > timeout_ns) return reached();
    // The device cannot wake a thread: beyond the time worth spinning, look
    // again every so often, rarer when it takes long.
    if (waited >= lane_.pool().SpinNs()) SleepUs(waited < 50000000 ? 20 : 200);
  }
}

CudaResult CudaLane::PollStream(CudaStream stream, int64_t timeout_ns) const {
  const int64_t start = NowNs();
  for (;;) {
    CudaResult result = driver_.StreamQuery(stream);
    if (result != kCudaNotReady || NowNs() - start > timeout_ns) return result;
    SleepUs(50);
  }
}

CudaResult CudaLane::PollEvent(CudaEvent event) const {
  const int64_t start = NowNs();
  for (;;) {
    CudaResult result = driver_.EventQuery(event);
    if (result != kCudaNotReady || GivenUp()) return result;
    if (NowNs() - start >= lane_.pool().SpinNs()) SleepUs(20);
  }
}

void CudaLane::MakeCurrent() const {
  thread_local CudaContext current = nullptr;
  if (current == resources_->context()) return;
  current = resources_->context();
  driver_.CtxSetCurrent(current);
}

bool CudaLane::Arrived(Trip& trip, uint32_t number, const std::string& who) {
  MakeCurrent();
  if (Poll(*trip.arrived, number)) return true;
  lane_.KeepError(who + ": its bytes have not come from the device");
  return false;
}

void CudaLane::RunStart(int channel, Slot& slot, uint32_t number, Dtype dtype,
                        int64_t num_rows, uint32_t swaps_out) {
  if (Arrived(slot, number, "start on channel " + Text(channel))) {
    computing_ = true;
    if (lane_.IsFirstJobOf(LoadHdr(slot))) AwaitSwapsOut(swaps_out);
    lane_.AttendArrived(channel, LoadHdr(slot), slot.pinned_in + kHeaderBytes,
                        dtype, num_rows, slot.pinned_out, &slot.dirty);
  }
  computing_ = false;
  slot.done->store(number, std::memory_order_release);
}

void CudaLane::RunStore(Trip& piece, uint32_t number, Dtype dtype,
                        int64_t begin, int64_t count, int64_t num_rows,
                        uint32_t swaps_out) {
  if (Arrived(piece, number, "store")) {
    computing_ = true;
    const Hdr hdr = LoadHdr(piece);
    if (lane_.IsFirstJobOf(hdr)) AwaitSwapsOut(swaps_out);
    std::shared_ptr<const Plan> plan;
    Error error = lane_.ChunksToStore(hdr, num_rows, &plan);
    if (!error.empty()) lane_.KeepError("store: " + error);
    if (error.empty() && hdr.n > 0) lane_.SleepDelay();
    const CacheShape& shape = lane_.shape();
    const int64_t head_bytes = int64_t{shape.head_dim} * ElementSize(dtype);
    for (int i = 0; error.empty() && i < hdr.n; ++i) {
      const Chunk& chunk = plan->chunk(i);
      const int32_t* table = plan->chunk_table(i);
      const int64_t from = std::max<int64_t>(chunk.row_offset, begin);
      const int64_t to = std::min<int64_t>(
          int64_t{chunk.row_offset} + chunk.num_tokens, begin + count);
      if (from >= to) continue;
      ForEachToken(lane_.pool(), to - from, [&](int64_t t) {
        const int64_t row = from + t;
        const auto position =
            static_cast<int>(chunk.start + row - chunk.row_offset);
        const char* k = piece.pinned_in + kHeaderBytes +
                        (row - begin) * 2 * shape.num_kv_heads * head_bytes;
        const char* v = k + shape.num_kv_heads * head_bytes;
        for (int head = 0; head < shape.num_kv_heads; ++head) {
          lane_.cache().WriteToken(
              hdr.layer, table[position / shape.block_size],
              position % shape.block_size, head, k + head * head_bytes,
              v + head * head_bytes, dtype);
        }
      });
    }
    if (begin + count >= num_rows) lane_.FinishStore(hdr);
  }
  computing_ = false;
  piece.done->store(number, std::memory_order_release);
}

bool CudaLane::AwaitStore(int piece, const StoresBefore& stores) const {
  return stores[piece] == 0 || Poll(*ring_[piece].done, stores[piece]);
}

CudaLane::StoresBefore CudaLane::StoresLaunched() const {
  StoresBefore stores;
  for (int i = 0; i < kNumPieces; ++i) stores[i] = ring_[i].launched;
  return stores;
}

void CudaLane::Watch() {
  MakeCurrent();
  const int64_t limit_ns = WatchdogNs();
  const auto period = std::chrono::nanoseconds(
      std::max<int64_t>(1000000, std::min<int64_t>(limit_ns / 4, 1000000000)));
  int64_t reported = 0;
  auto check = [&](const std::string& name, int64_t since, bool computing) {
    if (since == 0 || since <= reported || NowNs() - since < limit_ns) return;
    reported = since;
    const std::string late =
        name + " has not advanced for " + Text(limit_ns / 1000000000) + " s: ";
    CudaResult state = driver_.StreamQuery(down_);
    if (computing) {
      Break(late + "its job does not end; its result is void");
    } else if (state != kCudaSuccess && state != kCudaNotReady) {
      Break(late + "the device is lost: " +
            CudaErrorText(driver_, "cuStreamQuery", state));
    } else {
      lane_.KeepError(late + "its bytes have not come from the device");
    }
  };
  std::unique_lock<std::mutex> lock(watch_mutex_);
  while (!watch_.wait_for(lock, period, [&] { return watch_ends_; })) {
    HostLane::Running job = lane_.running();
    check(job.channel == HostLane::kChunks ? "a store or fetch"
                                           : "channel " + Text(job.channel),
          job.since_ns, computing_);
    if (fetches_ != nullptr) {
      check("a fetch", fetches_->running_since_ns(), fetching_);
      check("a swap", swaps_->running_since_ns(), swapping_);
    }
  }
}

void CudaLane::Break(const Error& error) {
  lane_.KeepError(error);
  broken_ = true;
  // A launch in progress sees `broken_` at the latest when it waits.
  std::lock_guard<std::mutex> lock(launch_mutex_);
  ReleaseAll();
}

void CudaLane::ReleaseAll() {
  auto release = [](Trip& trip) {
    trip.done->store(trip.launched, std::memory_order_release);
  };
  for (Channel& channel : channels_) {
    for (Slot& slot : channel.slots) release(slot);
  }
  for (Trip& piece : ring_) release(piece);
  for (SwapRing* ring : {&swaps_out_, &swaps_in_}) {
    for (Trip& piece : ring->pieces) {
      if (piece.done != nullptr) release(piece);
    }
  }
  for (Trip& prefix : prefixes_) release(prefix);
}

}  // namespace neojax
