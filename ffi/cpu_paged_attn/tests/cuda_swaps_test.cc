// Whole blocks through the CUDA half of the lane, over a driver of streams
// without a GPU: what arrives must be what the CPU half moves, however late
// copies and jobs are, and later jobs must find it.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "ffi/cpu_paged_attn/cuda_lane.h"
#include "ffi/cpu_paged_attn/tests/check.h"
#include "ffi/cpu_paged_attn/tests/cuda_rig.h"
#include "ffi/cpu_paged_attn/tests/fake_cuda.h"

namespace neojax {
namespace {

constexpr BlockMove kMove{2, 3};  // two layers, three blocks
constexpr int64_t kBlockElements = 2 * 16 * kKvHeads * kHeadDim;
constexpr int64_t kMoveElements = 2 * 3 * kBlockElements;

CudaOptions WithSwaps() {
  CudaOptions options = SmallCuda();
  options.swap_bytes = kMoveElements * sizeof(float);
  // A block and a half: moves cross from piece to piece, blocks too.
  options.register_bytes = 3 * kBlockElements / 2 * sizeof(float);
  return options;
}

std::vector<int32_t> Header(int layer, std::vector<int32_t> blocks) {
  std::vector<int32_t> hdr{layer, static_cast<int32_t>(blocks.size())};
  hdr.insert(hdr.end(), blocks.begin(), blocks.end());
  hdr.resize(kBlockIds + kMove.num_blocks, -1);
  return hdr;
}

struct SwapRig : Rig {
  explicit SwapRig(const FakeCudaOptions& fake = {},
                   double watchdog_seconds = 20)
      : Rig(fake, WithSwaps(), watchdog_seconds) {}

  void Out(const std::vector<int32_t>& hdr, const Floats& blocks) {
    DevicePtr at = AsDevice(Upload(blocks));
    CHECK(cuda().SwapOut(stream, kMove, AsDevice(Upload(hdr)), at) == "");
    Spoil();
    CHECK(twin->SwapOut(kMove, hdr.data(), blocks.data()) == "");
  }
  void StartIn(const std::vector<int32_t>& hdr) {
    CHECK(cuda().StartSwapIn(stream, kMove, AsDevice(Upload(hdr))) == "");
    Spoil();
    started.push_back(hdr);
  }
  // Compared in its first blocks only: the others are arbitrary.
  void JoinIn() {
    const std::vector<int32_t> hdr = started.front();
    started.pop_front();
    auto out = std::make_shared<Floats>(kMoveElements, kPoison);
    CHECK(cuda().JoinSwapIn(stream, kMove, AsDevice(out->data())) == "");
    Floats want(kMoveElements);
    CHECK(twin->SwapIn(kMove, hdr.data(), want.data()) == "");
    auto seen = std::make_shared<Floats>();
    const int n = hdr[1];
    auto first = [n](const Floats& blocks) {
      Floats some;
      for (int layer = 0; layer < kMove.num_layers; ++layer) {
        auto begin = blocks.begin() + layer * kMove.num_blocks * kBlockElements;
        some.insert(some.end(), begin, begin + n * kBlockElements);
      }
      return some;
    };
    FakeLaunch(stream, [out, seen, first] { *seen = first(*out); });
    wanted.push_back(first(want));
    got.push_back(std::move(seen));
  }
  std::deque<std::vector<int32_t>> started;
};

// A request's blocks come to the arena in one step, are attended to in the
// next, and go back in the one after; rows of another request run meanwhile.
void TestWhatMovesIsFoundAndComesBack(bool memory_operations, bool registers,
                                      int device_delay_us,
                                      int64_t job_delay_us) {
  FakeCudaOptions fake;
  fake.memory_operations = memory_operations;
  fake.registers = registers;
  fake.max_delay_us = device_delay_us;
  SwapRig rig(fake);
  rig.lane->SetDelay(job_delay_us * 1000);
  for (int step = 0; step < 12; ++step) {
    // Row 0's blocks are 3 and 4, row 1's 8 and 9, as SetPlan lays them.
    const int plan = step % 4;
    rig.SetPlan(plan, {20 + step % 3, 17}, kLayers);
    rig.Start(0, Random(3 * kRowElements, 50 * step), {plan, 0, 2});
    for (int layer = 0; layer < kLayers; ++layer) {
      if (layer > 0) {
        rig.Start(0, Random(3 * kRowElements, 50 * step + layer),
                  {plan, layer, 2});
      }
      // Blocks that no row of this step reads: 0, 11 and 6 come and go.
      const int first = layer % 2;
      rig.Out(Header(first, {11, 0}), Random(kMoveElements, step * 9 + layer));
      rig.StartIn(Header(first, {11, 0}));
      rig.StartIn(Header(1 - first, {6}));
      rig.Join(0, 3);
      rig.JoinIn();
      rig.JoinIn();
    }
    // What the next step's rows attend to, behind this step's last job.
    rig.Out(Header(0, {3, 8, 4}), Random(kMoveElements, step * 9 + 7));
    rig.Out(Header(1, {8, 9}), Random(kMoveElements, step * 9 + 8));
    rig.Out(Header(1, {}), Random(kMoveElements, 1));
  }
  rig.Compare();
  rig.cuda().AwaitSwapsOut(rig.cuda().num_swaps_out());
  const LaneCounters counters = rig.lane->counters();
  CHECK(counters.blocks_out == rig.twin->counters().blocks_out);
  CHECK(counters.blocks_in == rig.twin->counters().blocks_in);
  for (int block = 0; block < 12; ++block) {
    for (int layer = 0; layer < kLayers; ++layer) {
      CHECK(std::memcmp(rig.cache->Block(layer, block),
                        rig.twin->cache().Block(layer, block),
                        kBlockElements * sizeof(float)) == 0);
    }
  }
}

// A store of the block's last owner may be under way when the next one moves
// in; and the next one's store follows the move.
void TestStoresAndMovesOfABlockKeepTheirOrder(bool memory_operations) {
  FakeCudaOptions fake;
  fake.memory_operations = memory_operations;
  fake.max_delay_us = 500;
  SwapRig rig(fake);
  for (int step = 0; step < 8; ++step) {
    const int plan = step % 2;
    rig.SetPlan(plan, {}, 1, {0, 16, 0, 0});  // to block 3
    rig.Store(Random(16 * kRowElements, step), {plan, 1, 1});
    rig.StartIn(Header(0, {3}));
    rig.JoinIn();
    rig.Out(Header(0, {3}), Random(kMoveElements, 70 + step));
    rig.SetPlan(2 + plan, {}, 1, {0, 8, 8, 0});
    rig.Store(Random(8 * kRowElements, 40 + step), {2 + plan, 0, 1});
    rig.Fetch(20, {2 + plan, 0, 1});
    rig.StartIn(Header(0, {3}));
    rig.JoinIn();
  }
  rig.Compare();
}

void TestABurstWaitsForRoomInTheRing(bool memory_operations) {
  FakeCudaOptions fake;
  fake.memory_operations = memory_operations;
  SwapRig rig(fake);
  rig.lane->SetDelay(2000000);
  for (int i = 0; i < 24; ++i) {
    rig.Out(Header(i / 12, {i % 12}), Random(kMoveElements, i));
  }
  rig.lane->SetDelay(0);
  for (int i = 0; i < 24; ++i) {
    rig.StartIn(Header(i / 12, {i % 12}));
    if (i >= 3) rig.JoinIn();
  }
  while (!rig.started.empty()) rig.JoinIn();
  rig.Compare();
}

void TestAStepsOwnJobsDoNotWaitForItsMoves() {
  SwapRig rig;
  rig.SetPlan(0, {3}, 2);
  rig.Start(0, Random(kRowElements, 1), {0, 0, 1});
  rig.Join(0, 1);
  FakeSynchronize(rig.stream);
  rig.lane->SetDelay(1500000000);
  rig.Out(Header(0, {7}), Random(kMoveElements, 3));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  rig.lane->SetDelay(0);
  auto begin = std::chrono::steady_clock::now();
  auto waited = [&] {
    FakeSynchronize(rig.stream);
    return std::chrono::steady_clock::now() - begin;
  };
  rig.Start(0, Random(kRowElements, 2), {0, 1, 1});
  rig.Join(0, 1);
  CHECK(waited() < std::chrono::milliseconds(600));
  // The next step's do.
  rig.SetPlan(1, {3}, 1);
  rig.Start(0, Random(kRowElements, 4), {1, 0, 1});
  rig.Join(0, 1);
  CHECK(waited() > std::chrono::milliseconds(600));
  rig.Compare();
}

void TestAWrongMoveIsTheLanesErrorAndNoWait() {
  SwapRig rig;
  Floats blocks(kMoveElements);
  auto run = [&](std::vector<int32_t> hdr, bool out) {
    DevicePtr at = AsDevice(hdr.data());
    if (out) {
      CHECK(rig.cuda().SwapOut(rig.stream, kMove, at,
                               AsDevice(blocks.data())) == "");
    } else {
      CHECK(rig.cuda().StartSwapIn(rig.stream, kMove, at) == "");
      CHECK(rig.cuda().JoinSwapIn(rig.stream, kMove, AsDevice(blocks.data())) ==
            "");
    }
    FakeSynchronize(rig.stream);
    CHECK(rig.lane->Drain(10).empty());
    Error error = rig.lane->error();
    rig.lane->ClearError();
    return error;
  };
  for (bool out : {true, false}) {
    const std::string name = out ? "swap out: " : "swap in: ";
    CHECK(run(Header(2, {1}), out) ==
          name + "hdr[0] is layer 2, the first of 2; the arena has 3");
    CHECK(run({0, 4, 0, 1, 2}, out) ==
          name + "hdr[1] is n=4; there is room for 3 blocks");
    CHECK(run(Header(0, {5, 12}), out) ==
          name + "hdr[3] is block 12; the arena has 12");
    rig.lane->FailNextJob("broken");
    CHECK(run(Header(0, {5}), out) == name + "broken");
    CHECK(run(Header(0, {5}), out) == "");
  }
  const BlockMove large{3, 3};
  Error error = rig.cuda().StartSwapIn(rig.stream, large, 0);
  CHECK(error.find("3 blocks of 3 layers take 18432 bytes; the lane was made "
                   "for swap_bytes=12288") == 0);
  CHECK(rig.cuda().JoinSwapIn(rig.stream, kMove, 0) == "no swap in is started");
  for (int i = 0; i < 4; ++i) rig.StartIn(Header(0, {i}));
  std::vector<int32_t> hdr = Header(0, {1});
  CHECK(rig.cuda()
            .StartSwapIn(rig.stream, kMove, AsDevice(hdr.data()))
            .find("4 swaps in are started and not joined") == 0);
  FakeSynchronize(rig.stream);
  CHECK(rig.lane->Drain(10).empty());
  rig.started.clear();
  rig.StartIn(Header(1, {2, 4}));
  rig.JoinIn();
  rig.Compare();
}

void TestADriverThatRefusesIsAnErrorAndNoWait() {
  for (const char* name :
       {"MemcpyDtoD", "EventRecord", "StreamWaitEvent", "MemcpyDtoH",
        "StreamWriteValue32", "StreamWaitValue32", "MemcpyHtoD"}) {
    for (int after = 0; after < 7; ++after) {
      SwapRig rig;
      FakeCudaOptions fake;
      fake.fail = name;
      fake.fail_after = after;
      FakeCuda(fake);
      Floats blocks = Random(kMoveElements, 1);
      std::vector<int32_t> hdr = Header(0, {5, 6, 9});
      int failures = 0;
      auto count = [&](const Error& error) {
        if (error.empty()) return;
        CHECK(error.find("CUDA_ERROR_LAUNCH_FAILED (719)") != Error::npos);
        ++failures;
      };
      count(rig.cuda().SwapOut(rig.stream, kMove, AsDevice(hdr.data()),
                               AsDevice(blocks.data())));
      Error error =
          rig.cuda().StartSwapIn(rig.stream, kMove, AsDevice(hdr.data()));
      count(error);
      if (error.empty()) {
        count(
            rig.cuda().JoinSwapIn(rig.stream, kMove, AsDevice(blocks.data())));
      }
      FakeSynchronize(rig.stream);
      CHECK(rig.lane->Drain(10).empty());
      if (!rig.lane->error().empty()) ++failures;
      CHECK(failures <= 1);
      if (after == 0) CHECK(failures == 1);
      // Still of use, once drained.
      FakeCuda({});
      rig.lane->ClearError();
      for (int i = 0; i < 6; ++i) {
        rig.Out(Header(0, {i, 7}), Random(kMoveElements, i));
        rig.StartIn(Header(0, {i, 7}));
        rig.JoinIn();
      }
      rig.Compare();
    }
  }
}

void TestTheWatchdogNamesALateSwapAndFreesTheDevice() {
  SwapRig rig({}, /*watchdog_seconds=*/0.05);
  rig.lane->SetDelay(2000000000);
  std::vector<int32_t> hdr = Header(0, {5});
  Floats blocks(kMoveElements);
  auto begin = std::chrono::steady_clock::now();
  CHECK(rig.cuda().StartSwapIn(rig.stream, kMove, AsDevice(hdr.data())) == "");
  CHECK(rig.cuda().JoinSwapIn(rig.stream, kMove, AsDevice(blocks.data())) ==
        "");
  FakeSynchronize(rig.stream);
  CHECK(std::chrono::steady_clock::now() - begin <
        std::chrono::milliseconds(1500));
  CHECK(rig.lane->error() ==
        "a swap has not advanced for 0 s: its job does not end; its result is "
        "void");
  CHECK(rig.lane->Drain(10).empty());
  rig.lane->SetDelay(0);
  rig.lane->ClearError();
  rig.Out(Header(0, {5}), Random(kMoveElements, 1));
  rig.StartIn(Header(0, {5}));
  rig.JoinIn();
  rig.Compare();
}

void TestWhatSwapsTakeIsGivenBack() {
  const int live = FakeLive();
  int64_t pinned = 0;
  for (bool registers : {true, false}) {
    FakeCudaOptions fake;
    fake.registers = registers;
    SwapRig rig(fake);
    CHECK(rig.cuda().report().device_bytes >
          8 * kMoveElements * static_cast<int64_t>(sizeof(float)));
    // Staging for eight calls where the arena is not pinned.
    if (!registers) {
      CHECK(rig.cuda().report().pinned_bytes - pinned ==
            8 * kMoveElements * static_cast<int64_t>(sizeof(float)));
    }
    pinned = rig.cuda().report().pinned_bytes;
  }
  CHECK(FakeLive() == live);
}

}  // namespace
}  // namespace neojax

int main() {
  using namespace neojax;
  TestWhatSwapsTakeIsGivenBack();
  for (bool memory_operations : {true, false}) {
    for (bool registers : {true, false}) {
      TestWhatMovesIsFoundAndComesBack(memory_operations, registers, 0, 0);
      TestWhatMovesIsFoundAndComesBack(memory_operations, registers, 300, 0);
    }
    TestWhatMovesIsFoundAndComesBack(memory_operations, true, 50, 1000);
    TestStoresAndMovesOfABlockKeepTheirOrder(memory_operations);
    TestABurstWaitsForRoomInTheRing(memory_operations);
  }
  TestAStepsOwnJobsDoNotWaitForItsMoves();
  TestAWrongMoveIsTheLanesErrorAndNoWait();
  TestADriverThatRefusesIsAnErrorAndNoWait();
  // The device takes void results while the late job still writes them.
#ifndef __SANITIZE_THREAD__
  TestTheWatchdogNamesALateSwapAndFreesTheDevice();
#endif
}
