// The worker pool and the lane under threads: order, failure, drain, restart.
#include "ffi/cpu_paged_attn/lane.h"

#include <atomic>
#include <chrono>
#include <ctime>
#include <memory>
#include <thread>
#include <vector>

#include "ffi/cpu_paged_attn/cpu_count.h"
#include "ffi/cpu_paged_attn/tests/check.h"

namespace neojax {
namespace {

void TestEveryWorkerRunsEveryJobOnce() {
  for (int num_threads : {1, 2, 5}) {
    WorkerPool pool(num_threads);
    CHECK(pool.num_threads() == num_threads);
    for (int job = 0; job < 2000; ++job) {
      if (job == 500) pool.Arm(1);
      if (job == 1500) pool.Arm(-1);
      std::atomic<int> ran{0};
      int max_workers = 1 + job % 6;
      pool.Run(max_workers, [&](int worker) { ran += 1 << (4 * worker); });
      int expected = 0;
      for (int i = 0; i < std::min(max_workers, num_threads); ++i) {
        expected += 1 << (4 * i);
      }
      CHECK(ran == expected);
    }
    pool.Close();
    pool.Close();
    int ran = 0;
    pool.Run(5, [&](int) { ++ran; });
    CHECK(ran == 1);
  }
}

double ProcessCpuSeconds() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

void TestArmedThreadsThatGetNoJobLeaveTheirCores() {
  WorkerPool pool(4);
  pool.Arm(1);
  pool.Run(4, [](int) {});
  const double before = ProcessCpuSeconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  // Three that span all the while would have taken 0.2 s at least.
  CHECK(ProcessCpuSeconds() - before < 0.1);
  std::atomic<int> ran{0};
  pool.Run(4, [&](int) { ++ran; });
  CHECK(ran == 4);
  pool.Arm(-1);
}

void TestEveryItemIsTakenOnce() {
  WorkerPool pool(4);
  for (int count : {0, 1, 3, 4, 5, 100, 1000}) {
    std::vector<std::atomic<int>> taken(count);
    pool.ForEach(count, [&](int i, int next) {
      ++taken[i];
      CHECK(next == -1 || next == i + 1);
      // One thread dawdles: the others must take its items.
      if (i == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    });
    for (std::atomic<int>& times : taken) CHECK(times == 1);
  }
}

void TestJobsOfSeveralCallersDoNotMix() {
  WorkerPool pool(3);
  std::atomic<int> inside{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        int mine = 0;
        std::atomic<int> total{0};
        pool.Run(3, [&](int worker) {
          if (worker == 0) mine = ++inside;
          ++total;
          if (worker == 0) --inside;
        });
        CHECK(mine == 1);
        CHECK(total == 3);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void TestBadPoolsAreRefused() {
  CheckThrows("cpus: core 100000", [] { WorkerPool(1, {100000}); });
  CheckThrows("cpus must name one core per thread",
              [] { WorkerPool(2, {0, 0, 0}); });
  CheckThrows("num_threads must be at most 1024", [] { WorkerPool(4096); });
  CHECK(UsableCores() >= 1);
  CHECK(DefaultNumThreads(1) == 1);
  CHECK(DefaultNumThreads(2) == 1);
  CHECK(DefaultNumThreads(3) == 2);
  CHECK(DefaultNumThreads(4) == 2);
  CHECK(DefaultNumThreads(16) == 14);
}

struct Rig {
  explicit Rig(double watchdog_seconds = 30)
      : lane(HostLane::Create(
            cache, pool,
            {2, 3, 4, 1.0f, 0.0f, 4, "", watchdog_seconds, 5, 2})) {}
  std::shared_ptr<WorkerPool> pool = std::make_shared<WorkerPool>(2);
  std::shared_ptr<HostKVCache> cache = std::make_shared<HostKVCache>(
      CacheShape{2, 8, 1, 8, 16, Dtype::kFloat32}, pool);
  std::shared_ptr<HostLane> lane;
  std::vector<int32_t> lens = {1, 1};
  std::vector<int32_t> tables = {3, 5};

  void SetPlan(int index, int uses) {
    lane->SetPlan(index, lens.data(), {tables.data(), 2, 1}, 0, nullptr,
                  {nullptr, 0, 0}, uses);
  }
  // A sequence of one token attends to that token only: out is its v.
  std::vector<float> Rows(float v) const {
    std::vector<float> rows(2 * lane->row_elements(), 0.5f);
    for (int row = 0; row < 2; ++row) {
      for (int d = 0; d < 8; ++d) {
        rows[(row + 1) * lane->row_elements() - 8 + d] = v + row;
      }
    }
    return rows;
  }
};

void TestChannelsKeepTheirOrderUnderLoad() {
  Rig rig;
  rig.SetPlan(0, 1000000);
  std::vector<float> out(2 * 16);
  // One thread launches for all channels, as XLA's does; two jobs a channel
  // are in flight.
  std::vector<int32_t> tickets[3];
  for (int i = 0; i < 2000; ++i) {
    for (int channel = 0; channel < 3; ++channel) {
      if (i > 1) {
        CHECK(rig.lane->Join(channel, tickets[channel][i - 2], out.data(),
                             Dtype::kFloat32, 2) == "");
        CHECK(out[0] == 10.0f * (i - 2) + channel);
        CHECK(out[16] == 10.0f * (i - 2) + channel + 1);
      }
      std::vector<float> rows = rig.Rows(10.0f * i + channel);
      tickets[channel].push_back(-1);
      CHECK(rig.lane->Start(channel, rows.data(), Dtype::kFloat32, 2,
                            {0, i % 2, 2}, &tickets[channel].back()) == "");
      CHECK(tickets[channel].back() == i);
    }
  }
  CHECK(rig.lane->PlanInUse(0));
  CHECK(rig.lane->Drain(10).empty());
  CHECK(!rig.lane->PlanInUse(0));
  CHECK(rig.lane->counters().jobs == 6000);
}

void TestADeepChannelIsAQueue() {
  Rig rig;
  rig.SetPlan(0, 1000);
  std::vector<float> out(2 * 16);
  std::vector<int32_t> tickets(40);
  auto start = [&](int i) {
    std::vector<float> rows = rig.Rows(10.0f * i);
    return rig.lane->Start(3, rows.data(), Dtype::kFloat32, 2, {0, i % 2, 2},
                           &tickets[i]);
  };
  for (int i = 0; i < 5; ++i) CHECK(start(i) == "");
  CHECK(start(5).find("all its 5 slots started") != Error::npos);
  for (int i = 0; i < 30; ++i) {
    CHECK(rig.lane->Join(3, tickets[i], out.data(), Dtype::kFloat32, 2) == "");
    CHECK(out[0] == 10.0f * i);
    CHECK(start(i + 5) == "");
  }
  std::vector<float> rows(3 * rig.lane->row_elements());
  CHECK(rig.lane->Start(3, rows.data(), Dtype::kFloat32, 3, {0, 0, 0},
                        &tickets[0]) == "rows has 3 rows; channel 3 takes 2");
}

void TestMisuseIsAnErrorNotAHang() {
  Rig rig;
  std::vector<float> rows = rig.Rows(1), out(32);
  int32_t ticket;
  auto start = [&](int channel, Hdr hdr) {
    return rig.lane->Start(channel, rows.data(), Dtype::kFloat32, 2, hdr,
                           &ticket);
  };
  CHECK(start(0, {0, 0, 1}) == "hdr[0]: plan 0 is not set");
  rig.SetPlan(0, 2);
  CHECK(start(0, {0, 7, 1}) == "hdr[1] is layer 7; the arena has 2");
  CHECK(start(5, {0, 0, 1}) == "channel is 5; the lane has 4");
  CHECK(start(0, {0, 0, 3}) == "hdr[2] is n=3; rows has 2");
  CHECK(start(0, {0, 0, 1}) == "");
  CHECK(start(0, {0, 0, 1}) == "");
  CHECK(start(0, {0, 0, 1}).find("all its 2 slots started") != Error::npos);
  CHECK(rig.lane->Join(0, 1, out.data(), Dtype::kFloat32, 2)
            .find("joins must follow the order of starts") != Error::npos);
  CHECK(rig.lane->Join(0, 0, out.data(), Dtype::kBFloat16, 2) ==
        "out is bfloat16; rows were float32");
  CHECK(rig.lane->Join(0, 0, out.data(), Dtype::kFloat32, 3) ==
        "out has 3 rows; start had 2");
  CheckThrows("plan 0 still has 2", [&] { rig.SetPlan(0, 1); });
  CHECK(rig.lane->Join(0, 0, out.data(), Dtype::kFloat32, 2) == "");
  CHECK(out[0] == 1.0f);
  CHECK(out[16] == 0.0f);
  CHECK(rig.lane->Join(0, 1, out.data(), Dtype::kFloat32, 2) == "");
  rig.lane->FailNextJob("broken");
  CHECK(start(1, {0, 0, 2}) == "");
  CHECK(rig.lane->Join(1, 0, out.data(), Dtype::kFloat32, 2) == "");
  CHECK(out[0] == 0.0f);
  CHECK(rig.lane->error() == "broken (channel 1, plan 0, layer 0)");
  rig.lane->Close();
  CHECK(start(0, {0, 0, 0}).find("is closed") != Error::npos);
}

void TestALateJobIsDrained() {
  Rig rig;
  rig.SetPlan(0, 1);
  rig.lane->SetDelay(1000000000);
  std::vector<float> rows = rig.Rows(1), out(32);
  int32_t ticket;
  CHECK(rig.lane->Start(2, rows.data(), Dtype::kFloat32, 2, {0, 0, 1},
                        &ticket) == "");
  CHECK(rig.lane->Drain(0.005) == std::vector<int>{2});
  std::thread joiner([&] {
    CHECK(rig.lane->Join(2, ticket, out.data(), Dtype::kFloat32, 2) == "");
  });
  joiner.join();
  CHECK(rig.lane->Drain(5).empty());
}

void TestAJobThatDoesNotEndIsNamed() {
  Rig rig(/*watchdog_seconds=*/0.02);
  rig.SetPlan(0, 1);
  rig.lane->SetDelay(1000000000);
  std::vector<float> rows = rig.Rows(1), out(32);
  int32_t ticket;
  CHECK(rig.lane->Start(2, rows.data(), Dtype::kFloat32, 2, {0, 1, 1},
                        &ticket) == "");
  CHECK(rig.lane->Join(2, ticket, out.data(), Dtype::kFloat32, 2) ==
        "channel 2 has not advanced for 0 s: its job of plan 0, layer 1 does "
        "not end");
  // It does after all.
  CHECK(rig.lane->Drain(5).empty());
}

void TestIdsAreReusedAndClosedLanesAreGone() {
  int id;
  {
    Rig rig;
    id = rig.lane->id();
    CHECK(HostLane::Find(id) == rig.lane);
  }
  CHECK(HostLane::Find(id) == nullptr);
  CHECK(HostLane::Find(-1) == nullptr);
  CHECK(HostLane::Find(1000000) == nullptr);
  for (int i = 0; i < 50; ++i) {
    Rig rig;
    CHECK(rig.lane->id() == id);
  }
}

void TestStoreAndFetchCheckTheirRows() {
  Rig rig;
  int32_t chunk[4] = {1, 20, 3, 2};
  int32_t table[2] = {4, 6};
  rig.lane->SetPlan(1, rig.lens.data(), {rig.tables.data(), 2, 1}, 0, chunk,
                    {table, 1, 2}, 1);
  std::vector<float> rows(21 * rig.lane->row_elements());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
  CHECK(rig.lane->StoreRows(rows.data(), Dtype::kFloat32, 20, {1, 0, 1}) ==
        "rows has 20 rows; chunk 0 of plan 1 needs rows 1 to 20");
  CHECK(rig.lane->PlanInUse(1));
  CHECK(rig.lane->StoreRows(rows.data(), Dtype::kFloat32, 21, {1, 0, 1}) == "");
  CHECK(!rig.lane->PlanInUse(1));
  std::vector<float> k(5 * 8, -1.0f), v(5 * 8, -1.0f);
  CHECK(rig.lane->FetchTokens({1, 0, 1}, k.data(), v.data(), Dtype::kFloat32, 4)
            .find("k_scratch has 4 slots; chunk 0 of plan 1 needs 3 from 2") !=
        Error::npos);
  CHECK(rig.lane->FetchTokens({1, 0, 1}, k.data(), v.data(), Dtype::kFloat32,
                              5) == "");
  CHECK(k[0] == -1.0f && k[15] == -1.0f && k[16] == 0.0f);
  float got_k[8], got_v[8];
  rig.cache->ReadToken(0, 6, 22 - 16, 0, got_k, got_v, Dtype::kFloat32);
  CHECK(got_k[0] == rows[20 * rig.lane->row_elements() + 16]);
  CHECK(got_v[7] == rows[21 * rig.lane->row_elements() - 1]);
}

}  // namespace
}  // namespace neojax

int main() {
  neojax::TestEveryWorkerRunsEveryJobOnce();
  neojax::TestArmedThreadsThatGetNoJobLeaveTheirCores();
  neojax::TestEveryItemIsTakenOnce();
  neojax::TestJobsOfSeveralCallersDoNotMix();
  neojax::TestBadPoolsAreRefused();
  neojax::TestChannelsKeepTheirOrderUnderLoad();
  neojax::TestADeepChannelIsAQueue();
  neojax::TestMisuseIsAnErrorNotAHang();
  neojax::TestALateJobIsDrained();
  neojax::TestAJobThatDoesNotEndIsNamed();
  neojax::TestIdsAreReusedAndClosedLanesAreGone();
  neojax::TestStoreAndFetchCheckTheirRows();
}
