#include "ffi/cpu_paged_attn/lane.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "ffi/cpu_paged_attn/cuda_lane.h"

namespace neojax {
namespace {

// Never destroyed: lanes may outlive static objects at exit.
struct Registry {
  struct Entry {
    HostLane* lane = nullptr;  // null: the id is free
    std::weak_ptr<HostLane> weak;
  };
  std::mutex mutex;
  std::vector<Entry> entries;
  static Registry& Get() {
    static Registry* registry = new Registry;
    return *registry;
  }
};

std::string Text(int64_t value) { return std::to_string(value); }

LaneOptions Checked(LaneOptions options) {
  auto at_least_one = [](const char* name, int value) {
    if (value < 1) {
      throw std::invalid_argument(std::string(name) +
                                  " must be at least 1, got " + Text(value));
    }
  };
  at_least_one("num_channels", options.num_channels);
  at_least_one("max_rows", options.max_rows);
  at_least_one("num_plans", options.num_plans);
  if (options.deep_slots != 0) {
    at_least_one("deep_slots", options.deep_slots);
    at_least_one("deep_rows", options.deep_rows);
  }
  return options;
}

}  // namespace

std::shared_ptr<HostLane> HostLane::Create(std::shared_ptr<HostKVCache> cache,
                                           std::shared_ptr<WorkerPool> pool,
                                           LaneOptions options) {
  std::shared_ptr<HostLane> lane(
      new HostLane(std::move(cache), std::move(pool), std::move(options)));
  lane->Register(lane);
  return lane;
}

std::shared_ptr<HostLane> HostLane::Create(std::shared_ptr<HostKVCache> cache,
                                           std::shared_ptr<WorkerPool> pool,
                                           LaneOptions options,
                                           const CudaDriver& driver,
                                           const CudaOptions& cuda) {
  std::shared_ptr<HostLane> lane(
      new HostLane(std::move(cache), std::move(pool), std::move(options)));
  lane->cuda_ = std::make_unique<CudaLane>(*lane, driver, cuda);
  lane->Register(lane);
  return lane;
}

void HostLane::Register(const std::shared_ptr<HostLane>& self) {
  Registry& registry = Registry::Get();
  std::lock_guard<std::mutex> lock(registry.mutex);
  size_t id = 0;
  auto& entries = registry.entries;
  while (id < entries.size() && entries[id].lane != nullptr) ++id;
  if (id == entries.size()) entries.emplace_back();
  entries[id] = {this, self};
  id_ = static_cast<int>(id);
}

std::shared_ptr<HostLane> HostLane::Find(int64_t id) {
  Registry& registry = Registry::Get();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (id < 0 || id >= static_cast<int64_t>(registry.entries.size())) return {};
  return registry.entries[id].weak.lock();
}

HostLane::HostLane(std::shared_ptr<HostKVCache> cache,
                   std::shared_ptr<WorkerPool> pool, LaneOptions options)
    : cache_(std::move(cache)),
      pool_(std::move(pool)),
      options_(Checked(std::move(options))),
      params_{options_.num_q_heads, options_.scale, options_.softcap},
      kernels_(KernelsFor(options_.isa)),
      channels_(options_.total_channels()),
      plans_(options_.num_plans) {
  CheckParams(shape(), params_);
  const int64_t out_elements = int64_t{options_.num_q_heads} * shape().head_dim;
  for (size_t c = 0; c < channels_.size(); ++c) {
    const int64_t rows = options_.rows(c);
    channels_[c].slots = std::vector<Slot>(options_.slots(c));
    for (Slot& slot : channels_[c].slots) {
      slot.channel = static_cast<int>(c);
      slot.in.reset(new char[rows * row_elements() * sizeof(float)]);
      slot.out.reset(new char[rows * out_elements * sizeof(float)]);
    }
  }
  dispatcher_ = std::thread([this] { Dispatch(); });
}

HostLane::~HostLane() { Close(); }

void HostLane::Close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  if (cuda_ != nullptr) cuda_->BeginClose();
  work_.Post();
  dispatcher_.join();
  if (cuda_ != nullptr) cuda_->Close();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Entry& entry : plans_) {
      if (entry.uses > 0) pool_->Arm(-1);
      entry = {};
    }
  }
  Registry& registry = Registry::Get();
  std::lock_guard<std::mutex> lock(registry.mutex);
  if (id_ >= 0) registry.entries[id_] = {};
}

void HostLane::SetPlan(int index, const int32_t* context_lens, Table tables,
                       int window, const int32_t* chunks, Table chunk_tables,
                       int uses) {
  if (index < 0 || index >= options_.num_plans) {
    throw std::invalid_argument(
        "index must be below num_plans=" + Text(options_.num_plans) + ", got " +
        Text(index));
  }
  if (uses < 0) {
    throw std::invalid_argument("uses must be 0 or more, got " + Text(uses));
  }
  if (tables.rows > options_.max_rows) {
    throw std::invalid_argument(
        "context_lens has " + Text(tables.rows) +
        " rows; the lane has max_rows=" + Text(options_.max_rows));
  }
  auto plan = std::make_shared<const Plan>(shape(), options_.num_q_heads,
                                           context_lens, tables, window, chunks,
                                           chunk_tables, cache_->num_nodes());
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) throw std::logic_error("the lane is closed");
  Entry& entry = plans_[index];
  if (entry.uses > 0) {
    throw std::logic_error("plan " + Text(index) + " still has " +
                           Text(entry.uses) +
                           " joins or stores outstanding; wait for them, take "
                           "another index, or drain()");
  }
  entry = {std::move(plan), uses, /*has_begun=*/false};
  if (uses > 0) pool_->Arm(1);
}

bool HostLane::PlanInUse(int index) const {
  if (index < 0 || index >= options_.num_plans) {
    throw std::invalid_argument(
        "index must be below num_plans=" + Text(options_.num_plans) + ", got " +
        Text(index));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return plans_[index].uses > 0;
}

void HostLane::ReleaseUse(int plan) {
  // A warm-up may name any plan, or none.
  if (plan < 0 || plan >= options_.num_plans) return;
  Entry& entry = plans_[plan];
  if (entry.uses > 0 && --entry.uses == 0) pool_->Arm(-1);
}

Error HostLane::Start(int64_t channel, const void* rows, Dtype dtype,
                      int64_t num_rows, Hdr hdr, int32_t* ticket) {
  if (channel < 0 || channel >= options_.total_channels()) {
    return "channel is " + Text(channel) + "; the lane has " +
           Text(options_.total_channels());
  }
  if (num_rows > options_.rows(channel)) {
    return "rows has " + Text(num_rows) + " rows; channel " + Text(channel) +
           " takes " + Text(options_.rows(channel));
  }
  Slot* slot;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return "lane " + Text(id_) + " is closed";
    Channel& c = channels_[channel];
    std::shared_ptr<const Plan> plan;
    Error error = FindRows(hdr, num_rows, &plan);
    if (!error.empty()) return error;
    slot = &c.slots[c.starts % c.slots.size()];
    if (slot->busy) {
      return "channel " + Text(channel) + " has all its " +
             Text(c.slots.size()) +
             " slots started and not joined; join one first";
    }
    slot->busy = true;
    slot->ticket = static_cast<int32_t>(c.starts++ & 0x7fffffff);
    slot->hdr = hdr;
    slot->num_rows = num_rows;
    slot->dtype = dtype;
    slot->plan = std::move(plan);
    slot->done.Reset();
    ++counters_.starts;
    ++starting_;
    *ticket = slot->ticket;
  }
  // `done` keeps join away from the slot, `busy` the next start.
  std::memcpy(slot->in.get(), rows,
              hdr.n * row_elements() * ElementSize(dtype));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    --starting_;
    queue_.push_back({slot->channel, [this, slot] {
                        if (slot->hdr.n > 0) {
                          RunJob(slot->channel, slot->hdr, *slot->plan,
                                 slot->in.get(), slot->dtype, slot->out.get());
                        }
                        slot->done.Post();
                      }});
  }
  work_.Post();
  return {};
}

Error HostLane::Join(int64_t channel, int32_t ticket, void* out, Dtype dtype,
                     int64_t num_rows) {
  if (channel < 0 || channel >= options_.total_channels()) {
    return "channel is " + Text(channel) + "; the lane has " +
           Text(options_.total_channels());
  }
  Slot* slot;
  uint32_t generation;
  Hdr hdr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Channel& c = channels_[channel];
    slot = &c.slots[c.joins % c.slots.size()];
    if (!slot->busy) {
      return "channel " + Text(channel) + " has no job started";
    }
    if (slot->ticket != ticket) {
      return "ticket is " + Text(ticket) + "; the oldest job of channel " +
             Text(channel) + " has " + Text(slot->ticket) +
             ": joins must follow the order of starts";
    }
    if (slot->dtype != dtype) {
      return std::string("out is ") + DtypeName(dtype) + "; rows were " +
             DtypeName(slot->dtype);
    }
    if (slot->num_rows != num_rows) {
      return "out has " + Text(num_rows) + " rows; start had " +
             Text(slot->num_rows);
    }
    generation = generation_;
    hdr = slot->hdr;
  }
  if (!slot->done.Wait(pool_->SpinNs(),
                       static_cast<int64_t>(1e9 * options_.watchdog_seconds))) {
    return "channel " + Text(channel) + " has not advanced for " +
           Text(static_cast<int64_t>(options_.watchdog_seconds)) +
           " s: its job of plan " + Text(hdr.plan) + ", layer " +
           Text(hdr.layer) + " does not end";
  }
  const int64_t row_bytes =
      int64_t{options_.num_q_heads} * shape().head_dim * ElementSize(dtype);
  const int64_t filled = hdr.n * row_bytes;
  std::memcpy(out, slot->out.get(), filled);
  std::memset(static_cast<char*>(out) + filled, 0,
              num_rows * row_bytes - filled);
  std::lock_guard<std::mutex> lock(mutex_);
  if (generation != generation_) {
    return "channel " + Text(channel) + " was drained while join waited";
  }
  slot->busy = false;
  slot->plan.reset();
  ++channels_[channel].joins;
  ++counters_.joins;
  ReleaseUse(hdr.plan);
  return {};
}

Error HostLane::StoreRows(const void* rows, Dtype dtype, int64_t num_rows,
                          Hdr hdr) {
  std::shared_ptr<const Plan> plan;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return "lane " + Text(id_) + " is closed";
  }
  Error error = ChunksToStore(hdr, num_rows, &plan);
  if (!error.empty()) return error;
  if (plan != nullptr) {
    Store(*cache_, *pool_, params_, *plan, hdr.layer, hdr.n, rows, dtype);
  }
  FinishStore(hdr);
  return {};
}

Error HostLane::FetchTokens(Hdr hdr, void* k, void* v, Dtype dtype,
                            int64_t num_slots) {
  std::shared_ptr<const Plan> plan;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return "lane " + Text(id_) + " is closed";
  }
  Error error = ChunksToFetch(hdr, num_slots, &plan);
  if (!error.empty()) return error;
  if (plan != nullptr) {
    Fetch(*cache_, *pool_, *plan, hdr.layer, hdr.n, k, v, dtype);
  }
  CountFetch();
  return {};
}

void HostLane::CountFetch() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counters_.fetches;
}

void HostLane::CountTieCopy() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counters_.tie_copies;
}

void HostLane::CountStart() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counters_.starts;
}

void HostLane::CountJoin() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counters_.joins;
}

Error HostLane::Enqueue(Job job) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return "lane " + Text(id_) + " is closed";
    queue_.push_back(std::move(job));
  }
  work_.Post();
  return {};
}

HostLane::Running HostLane::running() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return running_;
}

void HostLane::Dispatch() {
  pool_->Bind(0);
  for (;;) {
    work_.Wait(pool_->SpinNs());
    work_.Reset();
    for (;;) {
      Job job;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        running_ = {};
        if (queue_.empty()) {
          idle_.notify_all();
          if (closed_ && starting_ == 0) return;
          break;
        }
        job = std::move(queue_.front());
        running_ = {job.channel, NowNs()};
        queue_.pop_front();
      }
      job.run();
    }
  }
}

std::vector<int> HostLane::Drain(double timeout_seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto idle = [&] {
    return starting_ == 0 && queue_.empty() && running_.since_ns == 0;
  };
  if (!idle_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                      idle)) {
    std::vector<int> stuck;
    if (running_.since_ns != 0) stuck.push_back(running_.channel);
    for (const Job& job : queue_) stuck.push_back(job.channel);
    std::sort(stuck.begin(), stuck.end());
    stuck.erase(std::unique(stuck.begin(), stuck.end()), stuck.end());
    return stuck;
  }
  ++generation_;
  for (Channel& channel : channels_) {
    channel.starts = channel.joins = 0;
    for (Slot& slot : channel.slots) {
      slot.busy = false;
      slot.plan.reset();
    }
  }
  for (Entry& entry : plans_) {
    if (entry.uses > 0) pool_->Arm(-1);
    entry.uses = 0;
  }
  lock.unlock();
  return cuda_ == nullptr ? std::vector<int>{} : cuda_->Drain(timeout_seconds);
}

Error HostLane::error() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void HostLane::KeepError(const Error& error) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_.empty()) error_ = error;
}

void HostLane::ClearError() {
  std::lock_guard<std::mutex> lock(mutex_);
  error_.clear();
}

void HostLane::SetDelay(int64_t ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  delay_ns_ = ns;
}

void HostLane::FailNextJob(std::string text) {
  std::lock_guard<std::mutex> lock(mutex_);
  fail_next_ = std::move(text);
}

void HostLane::Record(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (on) intervals_.clear();
  record_ = on;
}

std::vector<std::array<int64_t, 5>> HostLane::Intervals() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return intervals_;
}

LaneCounters HostLane::counters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counters_;
}

}  // namespace neojax
