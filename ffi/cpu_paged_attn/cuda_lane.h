// The device half of a host lane: what the handlers of the CUDA platform
// enqueue, and the jobs that the lane's dispatcher then runs.
//
// Nothing here waits for the device in a handler, except for room in the ring
// that stores go through. A handler copies its operands into memory of the
// lane on XLA's stream; streams of the lane carry them to pinned memory and
// results back; flags in pinned memory, written and awaited by the streams
// themselves, tell dispatcher and device about each other:
//
//   XLA's stream  rows, hdr -> slot | ...the other sub-batch... | slot -> out
//   down                     D2H, arrived = number                  ^ event
//   dispatcher                 polls arrived; job; done = number    |
//   up                                   awaits done; H2D to slot; event
//
// Stores go the first half of that way, through a ring. A fetch is started a
// layer before XLA's stream waits for it, and served by a thread of its own: it
// needs what was stored before its start, but not the store of its own layer.
// It writes to the caller's scratch itself, because how much is known too late
// for a copy by XLA's stream. The caller passes the scratch from start to join
// in place; a join that gets other memory is refused.
//
// Whole blocks, of requests that change sides, go between device memory of the
// lane and the arena itself where that is pinned: programs pack and unpack
// them, and no thread touches a byte. The first job of a plan waits for the
// blocks that left before it, so that it finds what an earlier step moved.
#ifndef NEOJAX_CPU_PAGED_ATTN_CUDA_LANE_H_
#define NEOJAX_CPU_PAGED_ATTN_CUDA_LANE_H_

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ffi/cpu_paged_attn/cuda_driver.h"
#include "ffi/cpu_paged_attn/cuda_resources.h"
#include "ffi/cpu_paged_attn/job_queue.h"
#include "ffi/cpu_paged_attn/lane.h"

namespace neojax {

struct CudaOptions {
  int device = 0;
  // Of the ring that stores go through, on the device and pinned each. Fetches
  // have pieces of at most that size, pinned only.
  int64_t staging_bytes = int64_t{64} << 20;
  // How long Close waits for a device that still works.
  double close_seconds = 5;
  // False: as if the driver refused them.
  bool memory_operations = true;
  bool register_arena = true;
  // The arena is pinned in pieces: small enough that a limit on locked memory
  // still lets most of it through.
  int64_t register_bytes = int64_t{1} << 30;
  // The largest call that moves whole blocks; 0: none will.
  int64_t swap_bytes = 0;
};

// What was found and taken at the start.
struct CudaReport {
  int device = 0;
  bool memory_operations = false;
  double round_trip_us = 0;  // device to host thread to device, nothing moved
  int64_t device_bytes = 0, pinned_bytes = 0;
  int64_t registered_bytes = 0;  // of the arena
  double register_seconds = 0;
  std::vector<std::string> notes;  // what is worse than it could be, and why
};

class CudaLane {
 public:
  // Throws std::runtime_error. `lane` owns this and outlives it.
  CudaLane(HostLane& lane, const CudaDriver& driver, CudaOptions options);
  ~CudaLane();
  CudaLane(const CudaLane&) = delete;
  CudaLane& operator=(const CudaLane&) = delete;

  const CudaReport& report() const { return report_; }

  // The handlers' part, in the order of the calls of one XLA stream. Pointers
  // are the device's; sizes as in HostLane. A hdr is int32[3] there too, so a
  // wrong one is found by the job: HostLane::error(). A message is a hdr, and
  // from kHeaderBytes on the rows.
  Error Start(CudaStream stream, int64_t channel, DevicePtr message,
              Dtype dtype, int64_t num_rows);
  Error Join(CudaStream stream, int64_t channel, DevicePtr out, Dtype dtype,
             int64_t num_rows);
  Error StoreRows(CudaStream stream, DevicePtr rows, Dtype dtype,
                  int64_t num_rows, DevicePtr hdr);
  // At most kNumFetches scratches may wait for their prefixes. A start that is
  // not joined ends with the next into the same scratch.
  Error StartFetch(CudaStream stream, DevicePtr hdr, DevicePtr k, DevicePtr v,
                   Dtype dtype, int64_t num_slots);
  Error JoinFetch(CudaStream stream, DevicePtr k, DevicePtr v);
  // Whole blocks. At most kNumSwapPieces swaps in may be started and not
  // joined; joins follow the order of starts.
  Error SwapOut(CudaStream stream, const BlockMove& move, DevicePtr hdr,
                DevicePtr blocks);
  Error StartSwapIn(CudaStream stream, const BlockMove& move, DevicePtr hdr);
  Error JoinSwapIn(CudaStream stream, const BlockMove& move, DevicePtr blocks);
  uint32_t num_swaps_out();
  // Until the first `count` swaps out have reached the arena or failed; false
  // if the device is given up.
  bool AwaitSwapsOut(uint32_t count);
  Error Copy(CudaStream stream, DevicePtr to, DevicePtr from, int64_t bytes);

  // After the dispatcher has no jobs: waits for the lane's streams, forgets
  // starts not joined. Otherwise {HostLane::kChunks}.
  std::vector<int> Drain(double timeout_seconds);
  // Jobs whose bytes have not come within close_seconds are given up.
  void BeginClose();
  // After the dispatcher's end: releases whatever waits, frees everything.
  void Close();

 private:
  static constexpr int kNumPieces = 8;
  static constexpr int kNumSwapPieces = 4;
  static constexpr int kNumFetches = 2;
  // Small, so that one is gathered while another is copied.
  static constexpr int64_t kFetchPieceBytes = int64_t{1} << 20;

  // Something the device and the dispatcher pass to and fro, one job at a
  // time. Numbers only grow, so a flag needs no reset.
  struct Trip {
    std::atomic<uint32_t>* arrived = nullptr;  // bytes are in pinned memory
    std::atomic<uint32_t>* done = nullptr;     // the job is done with them
    DevicePtr arrived_at = 0, done_at = 0;
    std::atomic<uint32_t> launched{0};
    CudaEvent in = nullptr, out = nullptr;
    DevicePtr device_in = 0;    // hdr, then from kHeaderBytes on the rows
    char* pinned_in = nullptr;  // likewise
  };
  struct Slot : Trip {
    DevicePtr device_out = 0;
    char* pinned_out = nullptr;
    int64_t dirty = 0;  // bytes of pinned_out, from its start
    bool busy = false;  // started and not joined
    Dtype dtype = Dtype::kFloat32;
    int64_t num_rows = 0;
  };
  struct Channel {
    std::vector<Slot> slots;  // taken in turn
    uint32_t starts = 0, joins = 0;
  };
  // Which store went through each piece last when a fetch was launched.
  using StoresBefore = std::array<uint32_t, kNumPieces>;
  // Blocks on their way, on the device. Its pinned_in is the hdr's alone.
  struct SwapPiece : Trip {
    DevicePtr blocks = 0;
    char* staging = nullptr;  // pinned, where the arena is not
  };
  struct SwapRing {
    std::array<SwapPiece, kNumSwapPieces> pieces;
    uint32_t launched = 0;
    SwapPiece& at(uint32_t number) { return pieces[number % kNumSwapPieces]; }
    // Which use of its piece the call of this number is, from 1 on.
    static uint32_t UseOf(uint32_t number) {
      return number / kNumSwapPieces + 1;
    }
  };
  // A prefix on its way to scratch. Its pinned_in is the hdr's alone.
  struct Prefix : Trip {
    DevicePtr k = 0, v = 0;  // the scratch of the last start
    bool busy = false;       // started and not joined
  };
  // Pinned memory that prefixes go to the device from.
  struct FetchPiece {
    char* data = nullptr;  // k, then v
    CudaEvent copied = nullptr;
    bool used = false;
  };

  // Start-up.
  void MakeTrip(Trip* trip, int64_t in_bytes);
  void MakeStreams();
  bool TryMemoryOperations(std::string* refusal);
  void RegisterArena();
  void MakeSwapRings();

  // Launching; all under launch_mutex_. Each returns the driver's refusal.
  Error Usable() const;
  Error Call(const char* name, CudaResult result) const;
  // Lets the job's thread know when `stream` has come this far.
  Error Announce(CudaStream stream, Trip& trip, uint32_t number);
  // Holds `stream` until the job is done.
  Error Await(CudaStream stream, Trip& trip, uint32_t number);
  // device_in -> pinned_in once `stream` has come this far.
  Error CopyDown(CudaStream stream, CudaStream down, Trip& trip,
                 uint32_t number, int64_t bytes);
  // Queues the job with the dispatcher, or gives the trip up if `error` is set.
  Error Queue(Error error, Trip& trip, uint32_t number, HostLane::Job job);

  // Jobs, on the dispatcher's thread.
  void RunStart(int channel, Slot& slot, uint32_t number, Dtype dtype,
                int64_t num_rows, uint32_t swaps_out);
  void RunStore(Trip& piece, uint32_t number, Dtype dtype, int64_t begin,
                int64_t count, int64_t num_rows, uint32_t swaps_out);
  // The trip of the prefix that was started into this scratch, else the one
  // that has been used least lately.
  Prefix& PrefixOf(DevicePtr k, DevicePtr v);
  // Holds `stream` until a started fetch is done.
  Error AwaitPrefix(CudaStream stream, Prefix& prefix);
  // On a thread of its own where the streams carry the flags.
  void RunFetch(Prefix& prefix, uint32_t number, DevicePtr k, DevicePtr v,
                Dtype dtype, int64_t num_slots, const StoresBefore& stores,
                uint32_t swaps_out);
  // Until every store that was launched before is done.
  bool AwaitStores(const StoresBefore& stores) const;
  bool AwaitStore(int piece, const StoresBefore& stores) const;
  StoresBefore StoresLaunched() const;
  // What all moves of blocks begin with: room in the ring, the hdr's way down.
  Error LaunchMove(CudaStream stream, SwapPiece& piece, const BlockMove& move,
                   DevicePtr hdr);
  Error QueueMove(Error error, SwapPiece& piece, uint32_t number,
                  HostLane::Job job);
  // On the swaps' thread where the streams carry the flags.
  void RunMove(SwapPiece& piece, uint32_t number, const BlockMove& move,
               bool out, const StoresBefore& stores, uint32_t swaps_out);
  Error CopyMove(SwapPiece& piece, const BlockMove& move, bool out);
  Error CheckMove(const BlockMove& move) const;
  // Copies of one fetch; *enqueued says whether the stream has any.
  Error CopyPrefixes(const Plan& plan, Hdr hdr, DevicePtr k, DevicePtr v,
                     Dtype dtype, bool* enqueued);
  // True when the job's bytes came; false if the device is given up.
  bool Arrived(Trip& trip, uint32_t number, const std::string& who);
  void MakeCurrent() const;
  int64_t WatchdogNs() const {
    return static_cast<int64_t>(lane_.options().watchdog_seconds * 1e9);
  }
  std::array<CudaStream, 9> AllStreams() const {
    return {down_,       up_,   chunks_down_, hdrs_down_, chunks_up_,
            swaps_down_, copy_, swaps_up_,    swaps_wait_};
  }
  static Hdr LoadHdr(const Trip& trip);

  // Polls until flag >= number; false if the device is given up or, with
  // timeout_ns >= 0, that passes.
  bool Poll(const std::atomic<uint32_t>& flag, uint32_t number,
            int64_t timeout_ns = -1) const;
  // Polls until everything in `stream` or before `event` is done.
  CudaResult PollStream(CudaStream stream, int64_t timeout_ns) const;
  CudaResult PollEvent(CudaEvent event) const;
  bool GivenUp() const;
  void Watch();
  // Keeps the error, fails later calls and releases everything that waits.
  void Break(const Error& error);
  void ReleaseAll();

  static void SetArrived(void* call);
  static void AwaitDone(void* call);

  HostLane& lane_;
  const CudaDriver& driver_;
  const CudaOptions options_;
  CudaReport report_;
  std::unique_ptr<CudaResources> resources_;
  // Small copies of starts and joins; rows of stores; hdrs of stores, fetches
  // and swaps; waits of fetches and of swaps in; and what the threads
  // themselves enqueue.
  CudaStream down_ = nullptr, up_ = nullptr;
  CudaStream chunks_down_ = nullptr, hdrs_down_ = nullptr;
  CudaStream chunks_up_ = nullptr, swaps_wait_ = nullptr;
  CudaStream copy_ = nullptr, swaps_down_ = nullptr, swaps_up_ = nullptr;
  char* flags_ = nullptr;  // pinned; two lines a trip
  int num_flags_ = 0;
  std::vector<Channel> channels_;
  std::array<Trip, kNumPieces> ring_;
  uint32_t next_piece_ = 0;
  int64_t piece_bytes_ = 0;  // of rows in a piece, at least one
  std::array<Prefix, kNumFetches> prefixes_;
  int last_prefix_ = 0;  // started last
  std::array<FetchPiece, 4> fetch_pieces_;
  uint32_t next_fetch_piece_ = 0;
  int64_t fetch_piece_bytes_ = 0;  // at least one token's
  SwapRing swaps_out_, swaps_in_;
  uint32_t swaps_in_joined_ = 0;

  std::mutex launch_mutex_;
  std::atomic<bool> computing_{false};  // the job's bytes have come
  std::atomic<bool> fetching_{false};   // likewise, of the fetch
  std::atomic<bool> swapping_{false};   // likewise, of the swap
  // Null without memory operations: the dispatcher does their work.
  std::unique_ptr<JobQueue> fetches_, swaps_;
  std::atomic<bool> broken_{false};
  std::atomic<int64_t> close_deadline_ns_{0};  // 0: open

  std::mutex watch_mutex_;
  std::condition_variable watch_;
  bool watch_ends_ = false;
  std::thread watchdog_;
};

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_CUDA_LANE_H_
