// Whole blocks between a device and the arena. Every wait here is for
// something that XLA's stream has launched before, so none can be circular.
#include <algorithm>

#include "ffi/cpu_paged_attn/cuda_lane.h"

namespace neojax {
namespace {

std::string Text(int64_t value) { return std::to_string(value); }

int64_t HdrBytes(const BlockMove& move) {
  return (kBlockIds + move.num_blocks) * sizeof(int32_t);
}

}  // namespace

Error CudaLane::CheckMove(const BlockMove& move) const {
  const int64_t bytes =
      int64_t{move.num_layers} * move.num_blocks * lane_.shape().block_bytes();
  if (bytes <= options_.swap_bytes) return {};
  return Text(move.num_blocks) + " blocks of " + Text(move.num_layers) +
         " layers take " + Text(bytes) +
         " bytes; the lane was made for swap_bytes=" +
         Text(options_.swap_bytes);
}

Error CudaLane::LaunchMove(CudaStream stream, SwapPiece& piece,
                           const BlockMove& move, DevicePtr hdr) {
  const uint32_t number = ++piece.launched;
  Error error = Copy(stream, piece.device_in, hdr, HdrBytes(move));
  if (error.empty()) {
    error = CopyDown(stream, hdrs_down_, piece, number,
                     std::max<int64_t>(0, HdrBytes(move) - kHeaderBytes));
  }
  return error;
}

Error CudaLane::QueueMove(Error error, SwapPiece& piece, uint32_t number,
                          HostLane::Job job) {
  if (swaps_ == nullptr) {
    return Queue(std::move(error), piece, number, std::move(job));
  }
  if (error.empty() && !swaps_->Enqueue(job.run)) error = "the lane is closed";
  if (!error.empty()) piece.done->store(number, std::memory_order_release);
  return error;
}

Error CudaLane::SwapOut(CudaStream stream, const BlockMove& move, DevicePtr hdr,
                        DevicePtr blocks) {
  Error error = CheckMove(move);
  if (!error.empty()) return error;
  std::lock_guard<std::mutex> lock(launch_mutex_);
  error = Usable();
  if (!error.empty()) return error;
  SwapPiece& piece = swaps_out_.at(swaps_out_.launched);
  // Room in the ring: the device waits for it, not this thread.
  const uint32_t before = piece.launched;
  if (report_.memory_operations) {
    error = Await(stream, piece, before);
  } else if (!Poll(*piece.done, before, WatchdogNs())) {
    error = "the ring of swaps has had no room for too long";
  }
  if (error.empty()) {
    error = Copy(stream, piece.blocks, blocks,
                 int64_t{move.num_layers} * move.num_blocks *
                     lane_.shape().block_bytes());
  }
  if (!error.empty()) return error;
  error = LaunchMove(stream, piece, move, hdr);
  const uint32_t number = piece.launched;
  const uint32_t swaps_out = swaps_out_.launched++;
  return QueueMove(
      std::move(error), piece, number,
      {HostLane::kChunks,
       [this, &piece, number, move, swaps_out, stores = StoresLaunched()] {
         RunMove(piece, number, move, /*out=*/true, stores, swaps_out);
       }});
}

Error CudaLane::StartSwapIn(CudaStream stream, const BlockMove& move,
                            DevicePtr hdr) {
  Error error = CheckMove(move);
  if (!error.empty()) return error;
  std::lock_guard<std::mutex> lock(launch_mutex_);
  error = Usable();
  if (!error.empty()) return error;
  if (swaps_in_.launched - swaps_in_joined_ >= kNumSwapPieces) {
    return Text(kNumSwapPieces) +
           " swaps in are started and not joined; join one first";
  }
  // The piece is free: the join before has copied it on XLA's stream.
  SwapPiece& piece = swaps_in_.at(swaps_in_.launched);
  error = LaunchMove(stream, piece, move, hdr);
  const uint32_t number = piece.launched;
  if (error.empty() && report_.memory_operations) {
    error = Await(swaps_wait_, piece, number);
    if (error.empty()) {
      error =
          Call("cuEventRecord", driver_.EventRecord(piece.out, swaps_wait_));
    }
  }
  error = QueueMove(
      std::move(error), piece, number,
      {HostLane::kChunks,
       [this, &piece, number, move, swaps_out = swaps_out_.launched,
        stores = StoresLaunched()] {
         RunMove(piece, number, move, /*out=*/false, stores, swaps_out);
       }});
  if (error.empty()) ++swaps_in_.launched;
  return error;
}

Error CudaLane::JoinSwapIn(CudaStream stream, const BlockMove& move,
                           DevicePtr blocks) {
  Error error = CheckMove(move);
  if (!error.empty()) return error;
  std::lock_guard<std::mutex> lock(launch_mutex_);
  error = Usable();
  if (!error.empty()) return error;
  if (swaps_in_joined_ == swaps_in_.launched) return "no swap in is started";
  SwapPiece& piece = swaps_in_.at(swaps_in_joined_++);
  if (report_.memory_operations) {
    error = Call("cuStreamWaitEvent",
                 driver_.StreamWaitEvent(stream, piece.out, 0));
  } else if (!Poll(*piece.done, piece.launched, WatchdogNs())) {
    // As for a fetch: a host function that waited would hold up the copies.
    error = "the swap in has not been done for too long";
  }
  if (!error.empty()) return error;
  return Copy(
      stream, blocks, piece.blocks,
      int64_t{move.num_layers} * move.num_blocks * lane_.shape().block_bytes());
}

uint32_t CudaLane::num_swaps_out() {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  return swaps_out_.launched;
}

bool CudaLane::AwaitSwapsOut(uint32_t count) {
  // One stream carries them, so the last one's end is all others' too.
  if (count == 0) return true;
  const uint32_t last = count - 1;
  return Poll(*swaps_out_.at(last).done, SwapRing::UseOf(last));
}

void CudaLane::RunMove(SwapPiece& piece, uint32_t number, const BlockMove& move,
                       bool out, const StoresBefore& stores,
                       uint32_t swaps_out) {
  const char* name = out ? "swap out" : "swap in";
  CudaStream stream = out ? swaps_down_ : swaps_up_;
  bool announced = false;
  if (Arrived(piece, number, name)) {
    swapping_ = true;
    const auto* hdr = reinterpret_cast<const int32_t*>(piece.pinned_in);
    Error error = lane_.CheckBlocks(move, hdr);
    const bool has_blocks = error.empty() && hdr[1] > 0;
    if (has_blocks) error = lane_.BeginMove();
    // A block may have had another owner, whose stores are under way yet.
    for (int i = 0; has_blocks && i < kNumPieces; ++i) AwaitStore(i, stores);
    if (has_blocks && !out) AwaitSwapsOut(swaps_out);
    if (has_blocks && error.empty()) {
      error = CopyMove(piece, move, out);
      lane_.CountMove(out, int64_t{move.num_layers} * hdr[1]);
    }
    // Behind earlier calls' copies even where this one has none.
    if (report_.memory_operations) {
      Error refusal =
          Call("cuStreamWriteValue32",
               driver_.StreamWriteValue32(stream, piece.done_at, number, 0));
      announced = refusal.empty();
      if (error.empty()) error = refusal;
    }
    if (!announced) {
      CudaResult result = PollStream(stream, WatchdogNs());
      if (error.empty()) error = Call("the copies of a swap", result);
    }
    if (!error.empty()) lane_.KeepError(std::string(name) + ": " + error);
  }
  swapping_ = false;
  if (!announced) piece.done->store(number, std::memory_order_release);
}

Error CudaLane::CopyMove(SwapPiece& piece, const BlockMove& move, bool out) {
  const auto* hdr = reinterpret_cast<const int32_t*>(piece.pinned_in);
  const int32_t* ids = hdr + kBlockIds;
  const int n = hdr[1];
  const int64_t block_bytes = lane_.shape().block_bytes();
  CudaStream stream = out ? swaps_down_ : swaps_up_;
  auto copy = [&](char* here, int64_t at, int64_t bytes) {
    return out ? Call(
                     "cuMemcpyDtoHAsync",
                     driver_.MemcpyDtoH(here, piece.blocks + at, bytes, stream))
               : Call("cuMemcpyHtoDAsync",
                      driver_.MemcpyHtoD(piece.blocks + at, here, bytes,
                                         stream));
  };
  if (piece.staging != nullptr && !out) {
    lane_.CopyBlocks(move, hdr, piece.staging, out);
  }
  Error error;
  for (int layer = 0; error.empty() && layer < move.num_layers; ++layer) {
    const int64_t first = int64_t{layer} * move.num_blocks;
    if (piece.staging != nullptr) {
      error = copy(piece.staging + first * block_bytes, first * block_bytes,
                   n * block_bytes);
      continue;
    }
    // Neighbours in one copy: a block alone is too small for the link.
    for (int begin = 0, end; error.empty() && begin < n; begin = end) {
      end = begin + 1;
      while (end < n && ids[end] == ids[end - 1] + 1) ++end;
      char* run = lane_.cache().Block(hdr[0] + layer, ids[begin]);
      const int64_t bytes = (end - begin) * block_bytes;
      for (int64_t done = 0, some; error.empty() && done < bytes;
           done += some) {
        some = std::min(bytes - done, resources_->BytesOfPiece(run + done));
        error = copy(run + done, (first + begin) * block_bytes + done, some);
      }
    }
  }
  if (piece.staging != nullptr && out && error.empty()) {
    error = Call("the copies of a swap", PollStream(stream, WatchdogNs()));
    if (error.empty()) lane_.CopyBlocks(move, hdr, piece.staging, out);
  }
  return error;
}

}  // namespace neojax
