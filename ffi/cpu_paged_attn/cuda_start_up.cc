// What a lane takes from its device before the first program, and what it
// finds out about the driver.
#include <new>
#include <utility>

#include "ffi/cpu_paged_attn/cuda_lane.h"

namespace neojax {
namespace {

// A flag of its own cache line: the device writes one, a thread the other.
constexpr int64_t kFlagBytes = 64;

// A driver that takes the operations but does not carry them out is found out
// within this time.
constexpr int64_t kTrialNs = 1000000000;
// A wait that holds this long holds.
constexpr int64_t kHoldNs = 20000000;

}  // namespace

CudaLane::CudaLane(HostLane& lane, const CudaDriver& driver,
                   CudaOptions options)
    : lane_(lane), driver_(driver), options_(std::move(options)) {
  resources_ = std::make_unique<CudaResources>(driver_, options_.device);
  CudaContextScope scope(driver_, resources_->context());
  report_.device = options_.device;
  const CacheShape& shape = lane_.shape();
  const LaneOptions& lane_options = lane_.options();

  const int num_trips = 2 * lane_options.num_channels +
                        lane_options.deep_slots + kNumPieces + kNumFetches +
                        2 * kNumSwapPieces;
  flags_ = resources_->NewPinned(2 * kFlagBytes * num_trips);
  channels_ = std::vector<Channel>(lane_options.total_channels());
  for (size_t c = 0; c < channels_.size(); ++c) {
    const int64_t rows = lane_options.rows(c);
    const int64_t in_bytes = rows * lane_.row_elements() * sizeof(float);
    const int64_t out_bytes = rows * lane_options.num_q_heads * shape.head_dim *
                              int64_t{sizeof(float)};
    channels_[c].slots = std::vector<Slot>(lane_options.slots(c));
    for (Slot& slot : channels_[c].slots) {
      MakeTrip(&slot, in_bytes);
      slot.device_out = resources_->NewDevice(out_bytes);
      slot.pinned_out = resources_->NewPinned(out_bytes);
      slot.dirty = out_bytes;
    }
  }
  const int64_t token_bytes =
      int64_t{2} * shape.num_kv_heads * shape.head_dim * sizeof(float);
  piece_bytes_ = std::max(token_bytes, options_.staging_bytes / kNumPieces);
  for (Trip& piece : ring_) MakeTrip(&piece, piece_bytes_);
  fetch_piece_bytes_ =
      std::max(token_bytes, std::min(piece_bytes_, kFetchPieceBytes));
  for (FetchPiece& piece : fetch_pieces_) {
    piece.data = resources_->NewPinned(fetch_piece_bytes_);
    piece.copied = resources_->NewEvent();
  }
  for (Prefix& prefix : prefixes_) MakeTrip(&prefix, 0);
  MakeStreams();
  RegisterArena();
  MakeSwapRings();
  report_.device_bytes = resources_->device_bytes();
  report_.pinned_bytes = resources_->pinned_bytes();
  watchdog_ = std::thread([this] { Watch(); });
}

CudaLane::~CudaLane() { Close(); }

void CudaLane::MakeTrip(Trip* trip, int64_t in_bytes) {
  auto flag = [this](DevicePtr* at) {
    char* data = flags_ + kFlagBytes * num_flags_++;
    *at = resources_->OnDevice(data);
    return new (data) std::atomic<uint32_t>(0);
  };
  trip->arrived = flag(&trip->arrived_at);
  trip->done = flag(&trip->done_at);
  trip->in = resources_->NewEvent();
  trip->out = resources_->NewEvent();
  trip->device_in = resources_->NewDevice(kHeaderBytes + in_bytes);
  trip->pinned_in = resources_->NewPinned(kHeaderBytes + in_bytes);
}

void CudaLane::MakeStreams() {
  down_ = resources_->NewStream();
  up_ = resources_->NewStream();
  std::string refusal;
  report_.memory_operations = TryMemoryOperations(&refusal);
  if (report_.memory_operations) {
    chunks_down_ = resources_->NewStream();
    chunks_up_ = resources_->NewStream();
    hdrs_down_ = resources_->NewStream();
    swaps_wait_ = resources_->NewStream();
    fetches_ = std::make_unique<JobQueue>();
    swaps_ = std::make_unique<JobQueue>();
  } else {
    report_.notes.push_back(
        "stream memory operations do not work here (" + refusal +
        "): host functions carry the flags, which costs twice as much a hop");
    // Host functions of all streams share one thread of the driver, and one
    // that waits for a job must not stand before one that brings it its
    // bytes: one stream puts them in launch order. A new one, because the
    // trial may have left the first two waiting.
    down_ = up_ = chunks_down_ = chunks_up_ = hdrs_down_ = swaps_wait_ =
        resources_->NewStream();
  }
  copy_ = resources_->NewStream();
  swaps_down_ = resources_->NewStream();
  swaps_up_ = resources_->NewStream();
}

bool CudaLane::TryMemoryOperations(std::string* refusal) {
  if (!options_.memory_operations) {
    *refusal = "switched off";
    return false;
  }
  if (driver_.StreamWriteValue32 == nullptr ||
      driver_.StreamWaitValue32 == nullptr) {
    *refusal = "the driver has none";
    return false;
  }
  auto happens = [](int64_t limit_ns, auto done) {
    const int64_t start = NowNs();
    while (!done()) {
      if (NowNs() - start > limit_ns) return false;
      CpuRelax();
    }
    return true;
  };
  Trip& trip = prefixes_[0];
  for (int trial = 0; trial < 4; ++trial) {
    const uint32_t number = ++trip.launched;
    const int64_t start = NowNs();
    Error error =
        Call("cuStreamWriteValue32",
             driver_.StreamWriteValue32(down_, trip.arrived_at, number, 0));
    if (error.empty()) {
      error = Call(
          "cuStreamWaitValue32",
          driver_.StreamWaitValue32(up_, trip.done_at, number, kCudaWaitGeq));
    }
    if (error.empty()) {
      error = Call("cuEventRecord", driver_.EventRecord(trip.out, up_));
    }
    if (error.empty() &&
        !happens(kTrialNs, [&] { return trip.arrived->load() == number; })) {
      error = "cuStreamWriteValue32 wrote nothing";
    }
    // Once is enough to see that it holds; the later trials are timed.
    if (error.empty() && trial == 0 && happens(kHoldNs, [&] {
          return driver_.EventQuery(trip.out) == kCudaSuccess;
        })) {
      error = "cuStreamWaitValue32 did not wait";
    }
    trip.done->store(number, std::memory_order_release);
    if (error.empty() && !happens(kTrialNs, [&] {
          return driver_.EventQuery(trip.out) != kCudaNotReady;
        })) {
      error = "cuStreamWaitValue32 does not end";
    }
    if (!error.empty()) {
      *refusal = error;
      return false;
    }
    // The first one warms up.
    const double us = (NowNs() - start) * 1e-3;
    if (trial == 1 || us < report_.round_trip_us) report_.round_trip_us = us;
  }
  return true;
}

void CudaLane::RegisterArena() {
  if (!options_.register_arena) return;
  std::string refusal;
  const int64_t bytes = lane_.shape().num_bytes();
  const int64_t start = NowNs();
  report_.registered_bytes = resources_->Register(
      lane_.cache().HeadBase(0, 0), bytes, options_.register_bytes, &refusal);
  report_.register_seconds = (NowNs() - start) * 1e-9;
  if (report_.registered_bytes < bytes) {
    report_.notes.push_back(
        "the driver pinned " + std::to_string(report_.registered_bytes) +
        " of " + std::to_string(bytes) + " bytes of the host KV cache (" +
        refusal + "); the rest goes through staging");
  }
}

void CudaLane::MakeSwapRings() {
  if (options_.swap_bytes == 0) return;
  const int64_t max_blocks = options_.swap_bytes / lane_.shape().block_bytes();
  const bool is_pinned = report_.registered_bytes == lane_.shape().num_bytes();
  for (SwapRing* ring : {&swaps_out_, &swaps_in_}) {
    for (SwapPiece& piece : ring->pieces) {
      MakeTrip(&piece, (kBlockIds + max_blocks) * sizeof(int32_t));
      piece.blocks = resources_->NewDevice(options_.swap_bytes);
      if (!is_pinned) {
        piece.staging = resources_->NewPinned(options_.swap_bytes);
      }
    }
  }
}

}  // namespace neojax
