// Prefills to the arena and back to scratch through the CUDA half of the lane,
// over a driver of streams without a GPU: a prefix that is fetched ahead must
// be what the CPU half fetches, and hold nothing up.
#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "ffi/cpu_paged_attn/cuda_lane.h"
#include "ffi/cpu_paged_attn/tests/check.h"
#include "ffi/cpu_paged_attn/tests/cuda_rig.h"
#include "ffi/cpu_paged_attn/tests/fake_cuda.h"

namespace neojax {
namespace {

void TestPrefillsReachTheArenaAndComeBack(bool memory_operations,
                                          int64_t job_delay_us) {
  FakeCudaOptions fake;
  fake.memory_operations = memory_operations;
  fake.max_delay_us = 200;
  Rig rig(fake);
  rig.lane->SetDelay(job_delay_us * 1000);
  // Two sequences in two chunks each; the ring holds 24 tokens, a store brings
  // 31, so the launches wait for room.
  for (int step = 0; step < 2; ++step) {
    const int plan = step;
    rig.SetPlan(plan, {}, kLayers,
                step == 0 ? std::vector<int32_t>{2, 16, 0, 0, 18, 13, 0, 0}
                          : std::vector<int32_t>{0, 11, 16, 1, 11, 9, 13, 20});
    // A layer ahead, the last one of nothing.
    Rig::Fetched ahead = rig.StartFetch(40, {plan, 0, 2});
    for (int layer = 0; layer < kLayers; ++layer) {
      const int following = layer + 1;
      Rig::Fetched fetched = std::exchange(
          ahead,
          rig.StartFetch(40, {plan, following, following < kLayers ? 2 : 0}));
      rig.JoinFetch(fetched);
      rig.Store(Random(31 * kRowElements, 100 + 10 * step + layer),
                {plan, layer, 2});
    }
    rig.JoinFetch(ahead);
  }
  // Their first decode, launched right behind.
  rig.SetPlan(2, {28, 23}, kLayers);
  for (int layer = 0; layer < kLayers; ++layer) {
    rig.Start(0, Random(2 * kRowElements, 300 + layer), {2, layer, 2});
    rig.Join(0, 2);
  }
  rig.Compare();
  CHECK(rig.lane->counters().stores == 2 * kLayers);
  CHECK(rig.lane->counters().fetches == 2 * (kLayers + 1));
  // No chunks: no work, but still a use of the plan.
  rig.SetPlan(3, {}, 1, {0, 4, 0, 0});
  rig.Store(Random(31 * kRowElements, 1), {3, 0, 0});
  rig.Fetch(10, {3, 0, 0});
  rig.Compare();
  while (rig.lane->PlanInUse(3)) std::this_thread::yield();
}

void TestAFetchDoesNotWaitForItsOwnLayersStore() {
  Rig rig;
  rig.SetPlan(0, {}, 2, {0, 8, 0, 0});
  rig.lane->SetDelay(1000000000);
  auto begin = std::chrono::steady_clock::now();
  Rig::Fetched fetched = rig.StartFetch(10, {0, 0, 1});
  rig.Store(Random(8 * kRowElements, 1), {0, 0, 1});
  rig.JoinFetch(fetched);
  FakeSynchronize(rig.stream);
  CHECK(std::chrono::steady_clock::now() - begin <
        std::chrono::milliseconds(800));
  // The next chunk's does wait for it.
  rig.SetPlan(1, {}, 1, {0, 8, 8, 0});
  rig.Store(Random(8 * kRowElements, 2), {1, 0, 1});
  rig.Fetch(10, {1, 0, 1});
  rig.Compare();
}

void TestAFetchRunsBesideWhatIsLaunchedBeforeItsJoin(bool memory_operations) {
  FakeCudaOptions fake;
  fake.memory_operations = memory_operations;
  Rig rig(fake);
  rig.SetPlan(0, {}, 1, {0, 16, 0, 0});
  rig.Store(Random(16 * kRowElements, 1), {0, 0, 1});
  rig.SetPlan(1, {}, 1, {0, 4, 16, 0});
  FakeSynchronize(rig.stream);
  CHECK(rig.lane->Drain(10).empty());
  rig.lane->SetDelay(300000000);
  auto begin = std::chrono::steady_clock::now();
  Rig::Fetched fetched = rig.StartFetch(20, {1, 0, 1});
  FakeLaunch(rig.stream, [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  });
  rig.JoinFetch(fetched);
  rig.Compare();
  CHECK(std::chrono::steady_clock::now() - begin <
        std::chrono::milliseconds(550));
}

void TestAFetchDoesNotWaitForAttention() {
  Rig rig;
  rig.SetPlan(0, {}, 1, {0, 16, 0, 0});
  rig.Store(Random(16 * kRowElements, 1), {0, 0, 1});
  FakeSynchronize(rig.stream);
  CHECK(rig.lane->Drain(10).empty());
  rig.SetPlan(1, {}, 1, {0, 4, 16, 0});
  std::atomic<bool> attends{false}, ends{false};
  std::thread attention([&] {
    rig.lane->pool().Run(1, [&](int) {
      attends = true;
      while (!ends) std::this_thread::yield();
    });
  });
  while (!attends) std::this_thread::yield();
  Rig::Fetched fetched = rig.StartFetch(20, {1, 0, 1});
  CHECK(rig.cuda().JoinFetch(rig.stream, AsDevice(fetched.at[0]->data()),
                             AsDevice(fetched.at[1]->data())) == "");
  FakeSynchronize(rig.stream);  // for ever, if it did
  ends = true;
  attention.join();
  CHECK(rig.twin->FetchTokens(fetched.hdr, fetched.want[0].data(),
                              fetched.want[1].data(), Dtype::kFloat32,
                              20) == "");
  for (int i : {0, 1}) CHECK(*fetched.at[i] == fetched.want[i]);
}

void TestAJoinOfAFetchTakesTheScratchThatWasStarted() {
  Rig rig;
  rig.SetPlan(0, {}, 100, {0, 16, 0, 0});
  rig.Store(Random(16 * kRowElements, 1), {0, 0, 1});
  rig.SetPlan(1, {}, 100, {0, 4, 16, 0});
  const std::string refusal =
      "no fetch is started into this scratch; it must be passed from start to "
      "join in place";
  auto join = [&](const Rig::Fetched& k, const Rig::Fetched& v) {
    return rig.cuda().JoinFetch(rig.stream, AsDevice(k.at[0]->data()),
                                AsDevice(v.at[1]->data()));
  };
  Rig::Fetched a = rig.StartFetch(20, {1, 0, 1});
  Rig::Fetched b = rig.StartFetch(20, {1, 0, 1});
  CHECK(join(a, b) == refusal);
  rig.JoinFetch(a);
  CHECK(join(a, a) == refusal);
  rig.JoinFetch(b);
  // One that nobody joins ends with the next into the same scratch.
  Rig::Fetched late = rig.StartFetch(20, {1, 0, 1});
  std::array<int32_t, 3> hdr{1, 0, 1};
  CHECK(rig.cuda().StartFetch(
            rig.stream, AsDevice(hdr.data()), AsDevice(late.at[0]->data()),
            AsDevice(late.at[1]->data()), Dtype::kFloat32, 20) == "");
  rig.JoinFetch(late);
  rig.Compare();
  // And with a drain.
  Rig::Fetched drained = rig.StartFetch(20, {1, 0, 1});
  FakeSynchronize(rig.stream);
  CHECK(rig.lane->Drain(10).empty());
  CHECK(join(drained, drained) == refusal);
  // Distinct memory for each of many, as after a recovery.
  for (int i = 0; i < 6; ++i) rig.Fetch(20, {1, 0, 1});
  rig.Compare();
}

void TestTheWatchdogFreesTheDeviceFromALateFetch() {
  Rig rig({}, SmallCuda(), /*watchdog_seconds=*/0.05);
  rig.SetPlan(0, {}, 100, {0, 4, 16, 0});
  rig.lane->SetDelay(2000000000);
  Floats k(320), v(320);
  std::array<int32_t, 3> hdr{0, 0, 1};
  auto begin = std::chrono::steady_clock::now();
  CHECK(rig.cuda().StartFetch(rig.stream, AsDevice(hdr.data()),
                              AsDevice(k.data()), AsDevice(v.data()),
                              Dtype::kFloat32, 20) == "");
  CHECK(rig.cuda().JoinFetch(rig.stream, AsDevice(k.data()),
                             AsDevice(v.data())) == "");
  FakeSynchronize(rig.stream);
  CHECK(std::chrono::steady_clock::now() - begin <
        std::chrono::milliseconds(1500));
  CHECK(rig.lane->error() ==
        "a fetch has not advanced for 0 s: its job does not end; its result is "
        "void");
  CHECK(rig.lane->Drain(10).empty());
}

}  // namespace
}  // namespace neojax

int main() {
  using namespace neojax;
  for (bool memory_operations : {true, false}) {
    TestPrefillsReachTheArenaAndComeBack(memory_operations, 0);
    TestPrefillsReachTheArenaAndComeBack(memory_operations, 2000);
  }
  TestAFetchDoesNotWaitForItsOwnLayersStore();
  TestAFetchRunsBesideWhatIsLaunchedBeforeItsJoin(true);
  TestAFetchRunsBesideWhatIsLaunchedBeforeItsJoin(false);
  TestAFetchDoesNotWaitForAttention();
  TestAJoinOfAFetchTakesTheScratchThatWasStarted();
  // The device takes void results while the late job still writes them.
#ifndef __SANITIZE_THREAD__
  TestTheWatchdogFreesTheDeviceFromALateFetch();
#endif
}
