// Two lanes over arenas of their own, one for each platform, that are given
// the same work: the CPU's is what the CUDA half must agree with.
#ifndef NEOJAX_CPU_PAGED_ATTN_TESTS_CUDA_RIG_H_
#define NEOJAX_CPU_PAGED_ATTN_TESTS_CUDA_RIG_H_

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/cpu_paged_attn/cuda_lane.h"
#include "ffi/cpu_paged_attn/tests/check.h"
#include "ffi/cpu_paged_attn/tests/fake_cuda.h"

namespace neojax {

constexpr int kHeads = 6, kKvHeads = 2, kHeadDim = 8, kLayers = 3;
constexpr int kRowElements = (kHeads + 2 * kKvHeads) * kHeadDim;
constexpr int kOutElements = kHeads * kHeadDim;
// The channel behind the two.
constexpr int kDeep = 2, kDeepSlots = 5;
constexpr float kPoison = 1e30f;

using Floats = std::vector<float>;

inline Floats Random(int64_t count, uint32_t seed) {
  Floats values(count);
  uint32_t x = seed * 2654435761u + 1;
  for (float& value : values) {
    x = x * 1664525 + 1013904223;
    value = static_cast<float>(x >> 8) / (1 << 23) - 1.0f;
  }
  return values;
}

inline CudaOptions SmallCuda() {
  CudaOptions options;
  // Three tokens a piece.
  options.staging_bytes = 8 * 3 * 2 * kKvHeads * kHeadDim * sizeof(float);
  options.close_seconds = 2;
  return options;
}

// What a start is given: the hdr's bytes, and behind them the rows.
inline Floats Message(const Floats& rows, Hdr hdr) {
  Floats message(kHeaderBytes / sizeof(float));
  std::memcpy(message.data(), &hdr, sizeof hdr);
  message.insert(message.end(), rows.begin(), rows.end());
  return message;
}

struct Rig {
  explicit Rig(const FakeCudaOptions& fake = {},
               const CudaOptions& cuda_options = SmallCuda(),
               double watchdog_seconds = 20)
      : driver(FakeCuda(fake)),
        twin(HostLane::Create(MakeCache(), pool, Options())),
        cache(MakeCache()),
        lane(HostLane::Create(cache, pool, Options(watchdog_seconds), driver,
                              cuda_options)),
        stream(FakeStream()) {}
  ~Rig() {
    lane->Close();
    twin->Close();
    FakeDestroy(stream);
  }
  std::shared_ptr<HostKVCache> MakeCache() {
    auto made = std::make_shared<HostKVCache>(
        CacheShape{kLayers, 12, kKvHeads, kHeadDim, 16, Dtype::kFloat32}, pool);
    made->Fill(0);
    return made;
  }
  static LaneOptions Options(double watchdog_seconds = 20) {
    return {kHeads, 2, 5, 0.35f, 0.0f, 4, "", watchdog_seconds, kDeepSlots, 4};
  }
  CudaLane& cuda() { return *lane->cuda(); }

  // Both lanes get the plan, once the last use of the entry has ended.
  void SetPlan(int index, std::vector<int32_t> lens, int uses,
               std::vector<int32_t> chunks = {}) {
    const int rows = static_cast<int>(lens.size());
    const int num_chunks = static_cast<int>(chunks.size() / 4);
    std::vector<int32_t> tables, chunk_tables;
    for (int row = 0; row < rows; ++row) {
      tables.insert(tables.end(), {(row * 5 + 3) % 12, (row * 5 + 4) % 12});
    }
    for (int i = 0; i < num_chunks; ++i) {
      chunk_tables.insert(chunk_tables.end(),
                          {(i * 5 + 3) % 12, (i * 5 + 4) % 12});
    }
    while (lane->PlanInUse(index)) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    for (HostLane* each : {lane.get(), twin.get()}) {
      each->SetPlan(index, lens.data(), {tables.data(), rows, 2}, 0,
                    chunks.data(), {chunk_tables.data(), num_chunks, 2}, uses);
    }
  }

  // A buffer on the device that a kernel fills now and, reused for something
  // else, overwrites after the launches up to Spoil.
  template <class T>
  T* Upload(const std::vector<T>& values) {
    auto data = std::make_shared<std::vector<T>>(values.size());
    T* at = data->data();
    FakeLaunch(stream, [data, values] { *data = values; });
    Keep(data);
    spoil.push_back(
        [data] { std::memset(data->data(), 0x7b, data->size() * sizeof(T)); });
    return at;
  }
  void Spoil() {
    for (auto& kernel : spoil) FakeLaunch(stream, kernel);
    spoil.clear();
  }
  void Keep(std::shared_ptr<void> data) { kept.push_back(std::move(data)); }

  void Start(int channel, const Floats& rows, Hdr hdr) {
    const int n = static_cast<int>(rows.size() / kRowElements);
    DevicePtr at = AsDevice(Upload(Message(rows, hdr)));
    CHECK(cuda().Start(stream, channel, at, Dtype::kFloat32, n) == "");
    Spoil();
    int32_t ticket;
    CHECK(twin->Start(channel, rows.data(), Dtype::kFloat32, n, hdr, &ticket) ==
          "");
    tickets[channel].push_back(ticket);
  }
  // Compared at the end: nothing here waits for the device.
  void Join(int channel, int num_rows) {
    Floats want(num_rows * kOutElements);
    CHECK(twin->Join(channel, tickets[channel].front(), want.data(),
                     Dtype::kFloat32, num_rows) == "");
    tickets[channel].pop_front();
    auto out = std::make_shared<Floats>(want.size(), kPoison);
    CHECK(cuda().Join(stream, channel, AsDevice(out->data()), Dtype::kFloat32,
                      num_rows) == "");
    auto seen = std::make_shared<Floats>();
    FakeLaunch(stream, [out, seen] { *seen = *out; });
    wanted.push_back(std::move(want));
    got.push_back(std::move(seen));
  }
  void Store(const Floats& rows, Hdr hdr) {
    const int n = static_cast<int>(rows.size() / kRowElements);
    DevicePtr at = AsDevice(Upload(rows));
    DevicePtr hdr_at = AsDevice(Upload<int32_t>({hdr.plan, hdr.layer, hdr.n}));
    CHECK(cuda().StoreRows(stream, at, Dtype::kFloat32, n, hdr_at) == "");
    Spoil();
    CHECK(twin->StoreRows(rows.data(), Dtype::kFloat32, n, hdr) == "");
  }
  // A fetch on its way: scratches as the CPU half leaves them, and the
  // device's.
  struct Fetched {
    Hdr hdr;
    int num_slots;
    std::array<Floats, 2> want;
    std::array<std::shared_ptr<Floats>, 2> at;
  };
  Fetched StartFetch(int num_slots, Hdr hdr) {
    const int64_t count = int64_t{num_slots} * kKvHeads * kHeadDim;
    Fetched f{hdr, num_slots, {Random(count, 5), Random(count, 6)}, {}};
    for (int i : {0, 1}) f.at[i] = std::make_shared<Floats>(f.want[i]);
    DevicePtr hdr_at = AsDevice(Upload<int32_t>({hdr.plan, hdr.layer, hdr.n}));
    CHECK(cuda().StartFetch(stream, hdr_at, AsDevice(f.at[0]->data()),
                            AsDevice(f.at[1]->data()), Dtype::kFloat32,
                            num_slots) == "");
    Spoil();
    return f;
  }
  void JoinFetch(Fetched f) {
    CHECK(cuda().JoinFetch(stream, AsDevice(f.at[0]->data()),
                           AsDevice(f.at[1]->data())) == "");
    CHECK(twin->FetchTokens(f.hdr, f.want[0].data(), f.want[1].data(),
                            Dtype::kFloat32, f.num_slots) == "");
    for (int i : {0, 1}) {
      auto seen = std::make_shared<Floats>();
      FakeLaunch(stream, [at = f.at[i], seen] {
        *seen = *at;
        std::fill(at->begin(), at->end(), kPoison);
      });
      wanted.push_back(f.want[i]);
      got.push_back(std::move(seen));
    }
  }
  void Fetch(int num_slots, Hdr hdr) { JoinFetch(StartFetch(num_slots, hdr)); }
  void Compare() {
    FakeSynchronize(stream);
    for (size_t i = 0; i < wanted.size(); ++i) CHECK(*got[i] == wanted[i]);
    wanted.clear();
    got.clear();
    kept.clear();
    CHECK(lane->error() == "");
    CHECK(twin->error() == "");
  }

  std::shared_ptr<WorkerPool> pool = std::make_shared<WorkerPool>(2);
  const CudaDriver& driver;
  std::shared_ptr<HostLane> twin;
  std::shared_ptr<HostKVCache> cache;
  std::shared_ptr<HostLane> lane;
  CudaStream stream;
  std::deque<int32_t> tickets[3];
  std::vector<Floats> wanted;
  std::vector<std::shared_ptr<Floats>> got;
  std::vector<std::function<void()>> spoil;
  std::vector<std::shared_ptr<void>> kept;
};

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_TESTS_CUDA_RIG_H_
