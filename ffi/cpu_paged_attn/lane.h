// The host lane: channels of started and joined attention jobs, served in
// launch order by one dispatcher thread.
//
// Knows nothing of XLA: the handlers bring pointers. A slot is the lane's own
// memory, so that no thread here ever touches a buffer of the caller's after
// the call that named it.
#ifndef NEOJAX_CPU_PAGED_ATTN_LANE_H_
#define NEOJAX_CPU_PAGED_ATTN_LANE_H_

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ffi/cpu_paged_attn/arena.h"
#include "ffi/cpu_paged_attn/attention.h"
#include "ffi/cpu_paged_attn/cuda_driver.h"
#include "ffi/cpu_paged_attn/isa.h"
#include "ffi/cpu_paged_attn/plan.h"
#include "ffi/cpu_paged_attn/signal.h"

namespace neojax {

// Empty for success, otherwise a sentence that names the argument.
using Error = std::string;

struct Hdr {
  int32_t plan, layer, n;
};

// What a start is given is one array, so that one copy moves it: the hdr, and
// from here on the rows.
constexpr int64_t kHeaderBytes = 64;

// A call that moves whole blocks of neighbouring layers: room for num_blocks of
// each, [num_layers, num_blocks, block_bytes]. Its hdr, int32[2 + num_blocks],
// is (first layer, n, the arena's blocks); only the first n are moved.
struct BlockMove {
  int num_layers, num_blocks;
};
constexpr int kBlockIds = 2;  // where they begin in the hdr

struct LaneOptions {
  int num_q_heads;
  int num_channels;
  int max_rows;  // most sequences in one start
  float scale;
  float softcap = 0.0f;
  int num_plans = 8;
  std::string isa;  // empty: NEOJAX_CPU_ISA or the fastest
  // A job that has not ended after this long is named and waited for no more.
  double watchdog_seconds = 30;
  // One more channel behind the others, for jobs of which many are in flight:
  // so many slots, of so many sequences each. No slots: no such channel.
  int deep_slots = 0;
  int deep_rows = 0;

  int total_channels() const { return num_channels + (deep_slots > 0); }
  int slots(int64_t channel) const {
    return channel < num_channels ? 2 : deep_slots;
  }
  int rows(int64_t channel) const {
    return channel < num_channels ? max_rows : deep_rows;
  }
};

struct LaneCounters {
  int64_t starts = 0, joins = 0, stores = 0, fetches = 0;
  int64_t jobs = 0;        // with rows
  int64_t rows = 0;        // sequences attended
  int64_t tokens = 0;      // context tokens of those
  int64_t busy_ns = 0;     // dispatcher's time in jobs
  int64_t blocks_out = 0;  // moved to the arena, each layer's counted
  int64_t blocks_in = 0;   // moved from it
  int64_t tie_copies = 0;  // ties that XLA did not pass in place
  int64_t intervals_dropped = 0;
};

class CudaLane;
struct CudaOptions;

class HostLane {
 public:
  // What the dispatcher runs, in the order of Enqueue. `channel` is named when
  // the job is late; kChunks for stores and fetches.
  struct Job {
    int channel;
    std::function<void()> run;  // must not throw
  };
  static constexpr int kChunks = -1;

  // Registers under the lowest free id. With a `driver` the lane serves
  // programs of the CUDA platform instead of the CPU's. Throws
  // std::invalid_argument, and std::runtime_error if the driver refuses.
  static std::shared_ptr<HostLane> Create(std::shared_ptr<HostKVCache> cache,
                                          std::shared_ptr<WorkerPool> pool,
                                          LaneOptions options);
  static std::shared_ptr<HostLane> Create(std::shared_ptr<HostKVCache> cache,
                                          std::shared_ptr<WorkerPool> pool,
                                          LaneOptions options,
                                          const CudaDriver& driver,
                                          const CudaOptions& cuda);
  // The open lane with this id, or null.
  static std::shared_ptr<HostLane> Find(int64_t id);
  ~HostLane();

  int id() const { return id_; }
  CudaLane* cuda() const { return cuda_.get(); }
  HostKVCache& cache() const { return *cache_; }
  WorkerPool& pool() const { return *pool_; }
  const CacheShape& shape() const { return cache_->shape(); }
  const LaneOptions& options() const { return options_; }
  const KernelTable& kernels() const { return kernels_; }
  // Elements of one row, (N + 2K) * H.
  int64_t row_elements() const {
    return int64_t{options_.num_q_heads + 2 * shape().num_kv_heads} *
           shape().head_dim;
  }

  // Replaces an entry of the ring. `uses`: how many joins and stores will
  // name it. Throws std::invalid_argument for bad tables and std::logic_error
  // while earlier uses are outstanding.
  void SetPlan(int index, const int32_t* context_lens, Table tables, int window,
               const int32_t* chunks, Table chunk_tables, int uses);
  bool PlanInUse(int index) const;

  // Copies the first hdr.n of [num_rows, row_elements] rows to the channel's
  // next slot and queues the job. Does not wait.
  Error Start(int64_t channel, const void* rows, Dtype dtype, int64_t num_rows,
              Hdr hdr, int32_t* ticket);
  // Waits for the channel's oldest job and copies its result to
  // out [num_rows, N * H]; rows from hdr.n on are zero.
  Error Join(int64_t channel, int32_t ticket, void* out, Dtype dtype,
             int64_t num_rows);
  // Both return when done.
  Error StoreRows(const void* rows, Dtype dtype, int64_t num_rows, Hdr hdr);
  Error FetchTokens(Hdr hdr, void* k, void* v, Dtype dtype, int64_t num_slots);

  // Whole blocks to the arena, and from it: return when done. Nothing beyond
  // the first n blocks of a layer is read or written.
  Error SwapOut(const BlockMove& move, const int32_t* hdr, const void* blocks);
  Error SwapIn(const BlockMove& move, const int32_t* hdr, void* blocks);

  void CountTieCopy();

  // The rest of this section is for the device half, whose jobs learn their
  // hdr only when it arrives with their bytes.
  Error Enqueue(Job job);
  void CountStart();
  void CountJoin();
  // Runs a started job whose bytes have come: fills out [num_rows, N * H],
  // with zeros if hdr is wrong or the job fails, and releases the plan's use.
  // `dirty` is how much of the memory at `out` may not be zero: a bucket's
  // padding, which is most of it when there are few rows, is cleared once.
  void AttendArrived(int channel, Hdr hdr, const void* rows, Dtype dtype,
                     int64_t num_rows, void* out, int64_t* dirty);
  // The plan whose first hdr.n chunks take part, null for none; or what is
  // wrong with hdr, or with chunks that need more than there are.
  Error ChunksToStore(Hdr hdr, int64_t num_rows,
                      std::shared_ptr<const Plan>* plan) const;
  Error ChunksToFetch(Hdr hdr, int64_t num_slots,
                      std::shared_ptr<const Plan>* plan) const;
  void FinishStore(Hdr hdr);
  // What is wrong with the hdr of a move.
  Error CheckBlocks(const BlockMove& move, const int32_t* hdr) const;
  // The test hooks, for a move with blocks: what it is to fail with.
  Error BeginMove();
  // Between the arena and memory of this machine.
  void CopyBlocks(const BlockMove& move, const int32_t* hdr, char* blocks,
                  bool out);
  void CountMove(bool out, int64_t blocks);
  // True once for every plan set: for the first job that names it.
  bool IsFirstJobOf(Hdr hdr);
  void CountFetch();
  void KeepError(const Error& error);
  void SleepDelay() const;
  // The job in progress: its channel, and since when (0: there is none).
  struct Running {
    int channel = 0;
    int64_t since_ns = 0;
  };
  Running running() const;

  // Waits for all queued jobs, then forgets every start not joined and every
  // outstanding plan use. Otherwise the channels that did not advance.
  std::vector<int> Drain(double timeout_seconds);
  // Runs what is queued, stops the dispatcher and frees the id.
  void Close();

  // First failure of a job since ClearError; the job's rows were zero.
  Error error() const;
  void ClearError();

  // Test hooks: every job first sleeps; the next job fails with this text.
  void SetDelay(int64_t ns);
  void FailNextJob(std::string text);

  // Record (channel, plan, layer, start_ns, end_ns) of each job with rows.
  void Record(bool on);
  std::vector<std::array<int64_t, 5>> Intervals() const;
  LaneCounters counters() const;

 private:
  struct Slot {
    int channel = 0;
    bool busy = false;  // started and not joined
    int32_t ticket = 0;
    Hdr hdr{};
    int64_t num_rows = 0;
    Dtype dtype = Dtype::kFloat32;
    std::shared_ptr<const Plan> plan;
    Signal done;
    std::unique_ptr<char[]> in, out;
  };
  struct Channel {
    std::vector<Slot> slots;  // taken in turn
    uint32_t starts = 0, joins = 0;
  };
  struct Entry {
    std::shared_ptr<const Plan> plan;
    int uses = 0;
    bool has_begun = false;
  };

  HostLane(std::shared_ptr<HostKVCache> cache, std::shared_ptr<WorkerPool> pool,
           LaneOptions options);
  void Register(const std::shared_ptr<HostLane>& self);
  void Dispatch();
  void RunJob(int channel, Hdr hdr, const Plan& plan, const void* rows,
              Dtype dtype, void* out);
  // The plan that a checked hdr names, or an error.
  Error FindPlan(Hdr hdr, std::shared_ptr<const Plan>* plan) const;
  Error FindRows(Hdr hdr, int64_t num_rows,
                 std::shared_ptr<const Plan>* plan) const;
  Error FindChunks(Hdr hdr, std::shared_ptr<const Plan>* plan) const;
  void ReleaseUse(int plan);
  Error Move(const BlockMove& move, const int32_t* hdr, char* blocks, bool out);

  const std::shared_ptr<HostKVCache> cache_;
  const std::shared_ptr<WorkerPool> pool_;
  const LaneOptions options_;
  const AttentionParams params_;
  const KernelTable& kernels_;
  std::unique_ptr<CudaLane> cuda_;
  int id_ = -1;

  mutable std::mutex mutex_;  // all below, except slot contents
  std::vector<Channel> channels_;
  std::vector<Entry> plans_;
  std::deque<Job> queue_;
  int starting_ = 0;  // starts that copy their rows
  Running running_;
  std::condition_variable idle_;  // queue empty and nothing running
  uint32_t generation_ = 0;       // counts drains
  bool closed_ = false;
  Error error_, fail_next_;
  int64_t delay_ns_ = 0;
  bool record_ = false;
  std::vector<std::array<int64_t, 5>> intervals_;
  LaneCounters counters_;

  Signal work_;
  std::thread dispatcher_;
};

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_LANE_H_
