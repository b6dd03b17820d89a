// What a lane's jobs do: find the plan that their hdr names, attend, keep what
// went wrong.
#include <time.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "ffi/cpu_paged_attn/lane.h"

namespace neojax {
namespace {

constexpr size_t kMaxIntervals = size_t{1} << 20;

std::string Text(int64_t value) { return std::to_string(value); }

}  // namespace

Error HostLane::FindPlan(Hdr hdr, std::shared_ptr<const Plan>* plan) const {
  if (hdr.layer < 0 || hdr.layer >= shape().num_layers) {
    return "hdr[1] is layer " + Text(hdr.layer) + "; the arena has " +
           Text(shape().num_layers);
  }
  if (hdr.plan < 0 || hdr.plan >= options_.num_plans) {
    return "hdr[0] is plan " + Text(hdr.plan) + "; the lane has " +
           Text(options_.num_plans);
  }
  *plan = plans_[hdr.plan].plan;
  if (*plan == nullptr) return "hdr[0]: plan " + Text(hdr.plan) + " is not set";
  return {};
}

Error HostLane::FindRows(Hdr hdr, int64_t num_rows,
                         std::shared_ptr<const Plan>* plan) const {
  if (hdr.n < 0 || hdr.n > num_rows) {
    return "hdr[2] is n=" + Text(hdr.n) + "; rows has " + Text(num_rows);
  }
  if (hdr.n == 0) return {};
  Error error = FindPlan(hdr, plan);
  if (!error.empty()) return error;
  if (hdr.n > (*plan)->num_rows()) {
    return "hdr[2] is n=" + Text(hdr.n) + "; plan " + Text(hdr.plan) + " has " +
           Text((*plan)->num_rows()) + " rows";
  }
  return {};
}

Error HostLane::FindChunks(Hdr hdr, std::shared_ptr<const Plan>* plan) const {
  if (hdr.n < 0) return "hdr[2] is " + Text(hdr.n) + " chunks";
  if (hdr.n == 0) return {};
  std::lock_guard<std::mutex> lock(mutex_);
  Error error = FindPlan(hdr, plan);
  if (!error.empty()) return error;
  if (hdr.n > (*plan)->num_chunks()) {
    return "hdr[2] is " + Text(hdr.n) + " chunks; plan " + Text(hdr.plan) +
           " has " + Text((*plan)->num_chunks());
  }
  return {};
}

Error HostLane::ChunksToStore(Hdr hdr, int64_t num_rows,
                              std::shared_ptr<const Plan>* plan) const {
  Error error = FindChunks(hdr, plan);
  for (int i = 0; error.empty() && i < hdr.n; ++i) {
    const Chunk& chunk = (*plan)->chunk(i);
    if (int64_t{chunk.row_offset} + chunk.num_tokens > num_rows) {
      error = "rows has " + Text(num_rows) + " rows; chunk " + Text(i) +
              " of plan " + Text(hdr.plan) + " needs rows " +
              Text(chunk.row_offset) + " to " +
              Text(int64_t{chunk.row_offset} + chunk.num_tokens - 1);
    }
  }
  return error;
}

Error HostLane::ChunksToFetch(Hdr hdr, int64_t num_slots,
                              std::shared_ptr<const Plan>* plan) const {
  Error error = FindChunks(hdr, plan);
  for (int i = 0; error.empty() && i < hdr.n; ++i) {
    const Chunk& chunk = (*plan)->chunk(i);
    if (int64_t{chunk.scratch_slot} + chunk.start > num_slots) {
      error = "k_scratch has " + Text(num_slots) + " slots; chunk " + Text(i) +
              " of plan " + Text(hdr.plan) + " needs " + Text(chunk.start) +
              " from " + Text(chunk.scratch_slot);
    }
  }
  return error;
}

bool HostLane::IsFirstJobOf(Hdr hdr) {
  if (hdr.n <= 0 || hdr.plan < 0 || hdr.plan >= options_.num_plans)
    return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return !std::exchange(plans_[hdr.plan].has_begun, true);
}

void HostLane::FinishStore(Hdr hdr) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counters_.stores;
  ReleaseUse(hdr.plan);
}

void HostLane::SleepDelay() const {
  int64_t delay_ns;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    delay_ns = delay_ns_;
  }
  if (delay_ns <= 0) return;
  timespec left{delay_ns / 1000000000, delay_ns % 1000000000};
  while (nanosleep(&left, &left) != 0) {
  }
}

void HostLane::AttendArrived(int channel, Hdr hdr, const void* rows,
                             Dtype dtype, int64_t num_rows, void* out,
                             int64_t* dirty) {
  const int64_t row_bytes =
      int64_t{options_.num_q_heads} * shape().head_dim * ElementSize(dtype);
  std::shared_ptr<const Plan> plan;
  Error error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    error = FindRows(hdr, num_rows, &plan);
  }
  if (!error.empty()) {
    KeepError("start on channel " + Text(channel) + ": " + error);
    hdr.n = 0;
  }
  if (hdr.n > 0) RunJob(channel, hdr, *plan, rows, dtype, out);
  const int64_t filled = hdr.n * row_bytes, size = num_rows * row_bytes;
  if (*dirty > filled) {
    std::memset(static_cast<char*>(out) + filled, 0,
                std::min(*dirty, size) - filled);
  }
  if (*dirty <= size) *dirty = filled;
  std::lock_guard<std::mutex> lock(mutex_);
  ReleaseUse(hdr.plan);
}

void HostLane::RunJob(int channel, Hdr hdr, const Plan& plan, const void* rows,
                      Dtype dtype, void* out) {
  Error failure;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure.swap(fail_next_);
  }
  const int64_t start_ns = NowNs();
  SleepDelay();
  try {
    if (!failure.empty()) throw std::runtime_error(failure);
    Attend(*cache_, *pool_, kernels_, params_, plan,
           {rows, dtype, hdr.layer, hdr.n, /*append=*/true, out,
            /*lse=*/nullptr});
  } catch (const std::exception& e) {
    // Rows of a failed job are zero; whoever waits must get something.
    std::memset(out, 0,
                int64_t{hdr.n} * options_.num_q_heads * shape().head_dim *
                    ElementSize(dtype));
    failure = std::string(e.what()) + " (channel " + Text(channel) + ", plan " +
              Text(hdr.plan) + ", layer " + Text(hdr.layer) + ")";
  }
  const int64_t end_ns = NowNs();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure.empty() && error_.empty()) error_ = failure;
  ++counters_.jobs;
  counters_.rows += hdr.n;
  for (int row = 0; row < hdr.n; ++row) {
    counters_.tokens += plan.context_len(row);
  }
  counters_.busy_ns += end_ns - start_ns;
  if (record_) {
    if (intervals_.size() < kMaxIntervals) {
      intervals_.push_back({channel, hdr.plan, hdr.layer, start_ns, end_ns});
    } else {
      ++counters_.intervals_dropped;
    }
  }
}

}  // namespace neojax
