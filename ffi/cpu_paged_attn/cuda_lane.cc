#include "ffi/cpu_paged_attn/cuda_lane.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace neojax {
namespace {

std::string Text(int64_t value) { return std::to_string(value); }

// What a host function gets; it frees it.
struct HostCall {
  CudaLane* lane;
  void* trip;
  uint32_t number;
};

}  // namespace

Error CudaLane::Usable() const {
  if (close_deadline_ns_ != 0) return "the lane is closed";
  if (broken_) {
    Error error = lane_.error();
    return "the lane gave its device up; drain it" +
           (error.empty() ? "" : ": " + error);
  }
  return {};
}

Error CudaLane::Call(const char* name, CudaResult result) const {
  return result == kCudaSuccess ? Error()
                                : CudaErrorText(driver_, name, result);
}

void CudaLane::SetArrived(void* call) {
  std::unique_ptr<HostCall> c(static_cast<HostCall*>(call));
  static_cast<Trip*>(c->trip)->arrived->store(c->number,
                                              std::memory_order_release);
}

void CudaLane::AwaitDone(void* call) {
  std::unique_ptr<HostCall> c(static_cast<HostCall*>(call));
  c->lane->Poll(*static_cast<Trip*>(c->trip)->done, c->number);
}

Error CudaLane::Announce(CudaStream stream, Trip& trip, uint32_t number) {
  if (report_.memory_operations) {
    return Call("cuStreamWriteValue32",
                driver_.StreamWriteValue32(stream, trip.arrived_at, number, 0));
  }
  auto call = std::make_unique<HostCall>(HostCall{this, &trip, number});
  Error error = Call("cuLaunchHostFunc",
                     driver_.LaunchHostFunc(stream, &SetArrived, call.get()));
  if (error.empty()) call.release();
  return error;
}

Error CudaLane::Await(CudaStream stream, Trip& trip, uint32_t number) {
  if (report_.memory_operations) {
    return Call(
        "cuStreamWaitValue32",
        driver_.StreamWaitValue32(stream, trip.done_at, number, kCudaWaitGeq));
  }
  auto call = std::make_unique<HostCall>(HostCall{this, &trip, number});
  Error error = Call("cuLaunchHostFunc",
                     driver_.LaunchHostFunc(stream, &AwaitDone, call.get()));
  if (error.empty()) call.release();
  return error;
}

Error CudaLane::CopyDown(CudaStream stream, CudaStream down, Trip& trip,
                         uint32_t number, int64_t bytes) {
  Error error = Call("cuEventRecord", driver_.EventRecord(trip.in, stream));
  if (error.empty()) {
    error =
        Call("cuStreamWaitEvent", driver_.StreamWaitEvent(down, trip.in, 0));
  }
  if (error.empty()) {
    error = Call("cuMemcpyDtoHAsync",
                 driver_.MemcpyDtoH(trip.pinned_in, trip.device_in,
                                    kHeaderBytes + bytes, down));
  }
  return error.empty() ? Announce(down, trip, number) : error;
}

Error CudaLane::Queue(Error error, Trip& trip, uint32_t number,
                      HostLane::Job job) {
  if (error.empty()) error = lane_.Enqueue(std::move(job));
  if (!error.empty()) trip.done->store(number, std::memory_order_release);
  return error;
}

Error CudaLane::Start(CudaStream stream, int64_t channel, DevicePtr message,
                      Dtype dtype, int64_t num_rows) {
  const LaneOptions& options = lane_.options();
  if (channel < 0 || channel >= options.total_channels()) {
    return "channel is " + Text(channel) + "; the lane has " +
           Text(options.total_channels());
  }
  if (num_rows > options.rows(channel)) {
    return "rows has " + Text(num_rows) + " rows; channel " + Text(channel) +
           " takes " + Text(options.rows(channel));
  }
  std::lock_guard<std::mutex> lock(launch_mutex_);
  Error error = Usable();
  if (!error.empty()) return error;
  Channel& c = channels_[channel];
  Slot& slot = c.slots[c.starts % c.slots.size()];
  if (slot.busy) {
    return "channel " + Text(channel) + " has all its " + Text(c.slots.size()) +
           " slots started and not joined; join one first";
  }
  const int size = ElementSize(dtype);
  const int64_t in_bytes = num_rows * lane_.row_elements() * size;
  const int64_t out_bytes =
      num_rows * options.num_q_heads * lane_.shape().head_dim * size;
  const uint32_t number = ++slot.launched;
  error = Copy(stream, slot.device_in, message, kHeaderBytes + in_bytes);
  if (error.empty()) error = CopyDown(stream, down_, slot, number, in_bytes);
  if (error.empty()) error = Await(up_, slot, number);
  if (error.empty()) {
    error = Call(
        "cuMemcpyHtoDAsync",
        driver_.MemcpyHtoD(slot.device_out, slot.pinned_out, out_bytes, up_));
  }
  if (error.empty()) {
    error = Call("cuEventRecord", driver_.EventRecord(slot.out, up_));
  }
  const int name = static_cast<int>(channel);
  error = Queue(std::move(error), slot, number,
                {name, [this, name, &slot, number, dtype, num_rows,
                        swaps_out = swaps_out_.launched] {
                   RunStart(name, slot, number, dtype, num_rows, swaps_out);
                 }});
  if (!error.empty()) return error;
  slot.busy = true;
  slot.dtype = dtype;
  slot.num_rows = num_rows;
  ++c.starts;
  lane_.CountStart();
  return {};
}

Error CudaLane::Join(CudaStream stream, int64_t channel, DevicePtr out,
                     Dtype dtype, int64_t num_rows) {
  const LaneOptions& options = lane_.options();
  if (channel < 0 || channel >= options.total_channels()) {
    return "channel is " + Text(channel) + "; the lane has " +
           Text(options.total_channels());
  }
  std::lock_guard<std::mutex> lock(launch_mutex_);
  Error error = Usable();
  if (!error.empty()) return error;
  Channel& c = channels_[channel];
  Slot& slot = c.slots[c.joins % c.slots.size()];
  if (!slot.busy) return "channel " + Text(channel) + " has no job started";
  if (slot.dtype != dtype) {
    return std::string("out is ") + DtypeName(dtype) + "; rows were " +
           DtypeName(slot.dtype);
  }
  if (slot.num_rows != num_rows) {
    return "out has " + Text(num_rows) + " rows; start had " +
           Text(slot.num_rows);
  }
  error =
      Call("cuStreamWaitEvent", driver_.StreamWaitEvent(stream, slot.out, 0));
  if (error.empty()) {
    error = Copy(stream, out, slot.device_out,
                 num_rows * options.num_q_heads * lane_.shape().head_dim *
                     ElementSize(dtype));
  }
  slot.busy = false;
  ++c.joins;
  lane_.CountJoin();
  return error;
}

Error CudaLane::StoreRows(CudaStream stream, DevicePtr rows, Dtype dtype,
                          int64_t num_rows, DevicePtr hdr) {
  const CacheShape& shape = lane_.shape();
  const int64_t head_bytes = int64_t{shape.head_dim} * ElementSize(dtype);
  const int64_t row_bytes = lane_.row_elements() * ElementSize(dtype);
  // k and v lie side by side at the end of a row: only they are moved.
  const int64_t kv_bytes = 2 * shape.num_kv_heads * head_bytes;
  const int64_t piece_rows = piece_bytes_ / kv_bytes;
  std::lock_guard<std::mutex> lock(launch_mutex_);
  Error error = Usable();
  // Also without rows: the plan waits for its last store.
  int64_t begin = 0;
  do {
    const int64_t count = std::min(piece_rows, num_rows - begin);
    Trip& piece = ring_[next_piece_++ % kNumPieces];
    if (error.empty() && !Poll(*piece.done, piece.launched, WatchdogNs())) {
      error = Usable();
      if (error.empty())
        error = "the staging ring has had no room for too long";
    }
    if (!error.empty()) return error;
    const uint32_t number = ++piece.launched;
    error = Copy(stream, piece.device_in, hdr, sizeof(Hdr));
    if (error.empty() && count > 0) {
      CudaMemcpy2D copy{};
      copy.src_type = copy.dst_type = kCudaMemoryTypeDevice;
      copy.src_device = rows + begin * row_bytes + row_bytes - kv_bytes;
      copy.src_pitch = row_bytes;
      copy.dst_device = piece.device_in + kHeaderBytes;
      copy.dst_pitch = copy.width_bytes = kv_bytes;
      copy.height = count;
      error = Call("cuMemcpy2DAsync", driver_.Memcpy2D(&copy, stream));
    }
    if (error.empty()) {
      error = CopyDown(stream, chunks_down_, piece, number, count * kv_bytes);
    }
    error = Queue(
        std::move(error), piece, number,
        {HostLane::kChunks, [this, &piece, number, dtype, begin, count,
                             num_rows, swaps_out = swaps_out_.launched] {
           RunStore(piece, number, dtype, begin, count, num_rows, swaps_out);
         }});
    begin += count;
  } while (error.empty() && begin < num_rows);
  return error;
}

Error CudaLane::Copy(CudaStream stream, DevicePtr to, DevicePtr from,
                     int64_t bytes) {
  if (bytes == 0) return {};
  return Call("cuMemcpyDtoDAsync", driver_.MemcpyDtoD(to, from, bytes, stream));
}

std::vector<int> CudaLane::Drain(double timeout_seconds) {
  const auto timeout_ns = static_cast<int64_t>(timeout_seconds * 1e9);
  for (JobQueue* queue : {fetches_.get(), swaps_.get()}) {
    if (queue != nullptr && !queue->WaitIdle(timeout_ns)) {
      return {HostLane::kChunks};
    }
  }
  std::lock_guard<std::mutex> lock(launch_mutex_);
  CudaContextScope scope(driver_, resources_->context());
  bool lost = false;
  for (CudaStream stream : AllStreams()) {
    CudaResult result = PollStream(stream, timeout_ns);
    if (result == kCudaNotReady) return {HostLane::kChunks};
    lost = lost || result != kCudaSuccess;
  }
  for (Channel& channel : channels_) {
    channel.starts = channel.joins = 0;
    for (Slot& slot : channel.slots) slot.busy = false;
  }
  swaps_in_joined_ = swaps_in_.launched;
  for (Prefix& prefix : prefixes_) prefix.busy = false;
  // A late job ends; a lost device does not come back.
  broken_ = lost;
  return {};
}

void CudaLane::BeginClose() {
  close_deadline_ns_ =
      NowNs() + static_cast<int64_t>(options_.close_seconds * 1e9);
}

void CudaLane::Close() {
  {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    if (watch_ends_) return;
    watch_ends_ = true;
  }
  for (JobQueue* queue : {fetches_.get(), swaps_.get()}) {
    if (queue != nullptr) queue->Close();
  }
  watch_.notify_all();
  if (watchdog_.joinable()) watchdog_.join();
  std::lock_guard<std::mutex> lock(launch_mutex_);
  ReleaseAll();
  {
    CudaContextScope scope(driver_, resources_->context());
    const auto timeout_ns = static_cast<int64_t>(options_.close_seconds * 1e9);
    for (CudaStream stream : AllStreams()) {
      if (PollStream(stream, timeout_ns) == kCudaNotReady) resources_->Leak();
    }
  }
  resources_.reset();
}

}  // namespace neojax
