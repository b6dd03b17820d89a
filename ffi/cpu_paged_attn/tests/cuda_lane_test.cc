// The CUDA half of the lane over a driver of streams without a GPU: what
// programs get must be, bit for bit, what the CPU half gives, however late
// copies and jobs are; and nothing that fails may leave a stream waiting.
#include "ffi/cpu_paged_attn/cuda_lane.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "ffi/cpu_paged_attn/tests/check.h"
#include "ffi/cpu_paged_attn/tests/cuda_rig.h"
#include "ffi/cpu_paged_attn/tests/fake_cuda.h"

namespace neojax {
namespace {

// A step as the runner launches it: two sub-batches through all layers, the
// second's attention under the first's stage.
void RunSteps(Rig& rig, int steps) {
  uint32_t seed = 1;
  for (int step = 0; step < steps; ++step) {
    const int plan = step % 4;
    rig.SetPlan(plan, {1 + step, 20 - step % 3, 7 + step}, 2 * kLayers);
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int channel = 0; channel < 2; ++channel) {
        const int rows = 3 + channel;  // channel 1 has a padding row
        rig.Start(channel, Random(rows * kRowElements, seed++),
                  {plan, layer, channel == 0 && step % 5 == 4 ? 0 : 3});
        if (channel == 1) rig.Join(0, 3);
      }
      rig.Join(1, 4);
    }
  }
}

void TestStepsGiveWhatTheCpuGives(bool memory_operations, int device_delay_us,
                                  int64_t job_delay_us, int steps) {
  FakeCudaOptions fake;
  fake.memory_operations = memory_operations;
  fake.max_delay_us = device_delay_us;
  Rig rig(fake);
  CHECK(rig.cuda().report().memory_operations == memory_operations);
  CHECK(rig.cuda().report().notes.size() == (memory_operations ? 0 : 1));
  rig.lane->SetDelay(job_delay_us * 1000);
  RunSteps(rig, steps);
  rig.Compare();
  CHECK(rig.lane->Drain(10).empty());
  RunSteps(rig, 2);
  rig.Compare();
  CHECK(rig.lane->counters().starts == rig.twin->counters().starts);
  CHECK(rig.lane->counters().joins == rig.twin->counters().joins);
  CHECK(rig.lane->counters().jobs == rig.twin->counters().jobs);
}

void TestTwoJobsOfAChannelMayBeInFlight() {
  FakeCudaOptions fake;
  fake.max_delay_us = 300;
  Rig rig(fake);
  rig.SetPlan(0, {5, 9, 30}, 1000);
  for (int i = 0; i < 60; ++i) {
    for (int channel = 0; channel < 2; ++channel) {
      if (i > 1) rig.Join(channel, 3);
      rig.Start(channel, Random(3 * kRowElements, i * 2 + channel),
                {0, i % kLayers, 3});
    }
  }
  rig.Compare();
}

void TestADeepChannelIsAQueueBesideTheOthers() {
  FakeCudaOptions fake;
  fake.max_delay_us = 300;
  Rig rig(fake);
  rig.SetPlan(0, {5, 9, 30}, 1000);
  for (int i = 0; i < 60; ++i) {
    if (i >= kDeepSlots) rig.Join(kDeep, 3);
    rig.Start(kDeep, Random(3 * kRowElements, i), {0, i % kLayers, 3});
    if (i % 3 == 0) {
      rig.Start(0, Random(3 * kRowElements, 1000 + i), {0, i % kLayers, 3});
      rig.Join(0, 3);
    }
  }
  rig.Compare();
}

void TestPaddingIsZeroWhateverTheRowsBefore() {
  Rig rig;
  // Rows of a bucket, and how many of them there are; a slot serves every
  // second one.
  const int sizes[][2] = {{5, 5}, {5, 5}, {5, 1}, {5, 1}, {3, 3}, {3, 3},
                          {5, 2}, {5, 4}, {2, 0}, {2, 0}, {5, 0}, {5, 3}};
  int step = 0;
  for (const auto& [num_rows, n] : sizes) {
    const int plan = step % 4;
    rig.SetPlan(plan, {5, 9, 30, 2, 17}, 1);
    rig.Start(0, Random(num_rows * kRowElements, step++), {plan, 1, n});
    rig.Join(0, num_rows);
  }
  rig.Compare();
}

void TestAWrongHdrIsTheLanesErrorAndZeros() {
  Rig rig;
  rig.SetPlan(0, {3}, 100, {0, 8, 4, 0});
  auto run = [&](Hdr hdr) {
    Floats message = Message(Random(kRowElements, 1), hdr);
    Floats out(kOutElements, kPoison);
    CHECK(rig.cuda().Start(rig.stream, 0, AsDevice(message.data()),
                           Dtype::kFloat32, 1) == "");
    CHECK(rig.cuda().Join(rig.stream, 0, AsDevice(out.data()), Dtype::kFloat32,
                          1) == "");
    FakeSynchronize(rig.stream);
    for (float value : out) CHECK(value == 0.0f);
    Error error = rig.lane->error();
    rig.lane->ClearError();
    return error;
  };
  CHECK(run({0, 0, 2}) == "start on channel 0: hdr[2] is n=2; rows has 1");
  CHECK(run({0, 9, 1}) ==
        "start on channel 0: hdr[1] is layer 9; the arena has 3");
  CHECK(run({1, 0, 1}) == "start on channel 0: hdr[0]: plan 1 is not set");
  CHECK(run({-7, 0, 1}) ==
        "start on channel 0: hdr[0] is plan -7; the lane has 4");
  CHECK(run({0, 0, -1}) == "start on channel 0: hdr[2] is n=-1; rows has 1");
  rig.lane->FailNextJob("broken");
  CHECK(run({0, 1, 1}) == "broken (channel 0, plan 0, layer 1)");

  Floats rows = Random(7 * kRowElements, 2), k(40), v(40);
  int32_t header[3] = {0, 0, 1};
  CHECK(rig.cuda().StoreRows(rig.stream, AsDevice(rows.data()), Dtype::kFloat32,
                             7, AsDevice(header)) == "");
  FakeSynchronize(rig.stream);
  CHECK(rig.lane->Drain(10).empty());
  CHECK(rig.lane->error() ==
        "store: rows has 7 rows; chunk 0 of plan 0 needs rows 0 to 7");
  rig.lane->ClearError();
  header[2] = 2;
  CHECK(rig.cuda().StartFetch(rig.stream, AsDevice(header), AsDevice(k.data()),
                              AsDevice(v.data()), Dtype::kFloat32, 2) == "");
  CHECK(rig.cuda().JoinFetch(rig.stream, AsDevice(k.data()),
                             AsDevice(v.data())) == "");
  FakeSynchronize(rig.stream);
  CHECK(rig.lane->error() == "fetch: hdr[2] is 2 chunks; plan 0 has 1");
}

void TestMisuseIsRefusedAtTheLaunch() {
  Rig rig;
  rig.SetPlan(0, {3}, 100);
  Floats message = Message(Random(6 * kRowElements, 1), {0, 0, 1});
  Floats out(kOutElements);
  auto start = [&](int channel, int num_rows) {
    return rig.cuda().Start(rig.stream, channel, AsDevice(message.data()),
                            Dtype::kFloat32, num_rows);
  };
  auto join = [&](int channel, Dtype dtype, int num_rows) {
    return rig.cuda().Join(rig.stream, channel, AsDevice(out.data()), dtype,
                           num_rows);
  };
  CHECK(start(3, 1) == "channel is 3; the lane has 3");
  CHECK(start(0, 6) == "rows has 6 rows; channel 0 takes 5");
  CHECK(join(0, Dtype::kFloat32, 1) == "channel 0 has no job started");
  CHECK(start(0, 1) == "");
  CHECK(start(0, 1) == "");
  CHECK(start(0, 1).find("all its 2 slots started") != Error::npos);
  CHECK(join(0, Dtype::kBFloat16, 1) == "out is bfloat16; rows were float32");
  CHECK(join(0, Dtype::kFloat32, 2) == "out has 2 rows; start had 1");
  CHECK(rig.lane->Drain(5).empty());
  CHECK(join(0, Dtype::kFloat32, 1) == "channel 0 has no job started");
  rig.lane->Close();
  CHECK(start(0, 1) == "the lane is closed");
}

void TestADriverThatRefusesIsAnErrorAndNoWait() {
  // What start, join, store and fetch call; each once with an error in turn.
  for (const char* name :
       {"MemcpyDtoD", "EventRecord", "StreamWaitEvent", "MemcpyDtoH",
        "StreamWriteValue32", "StreamWaitValue32", "MemcpyHtoD", "Memcpy2D"}) {
    for (int after = 0; after < 8; ++after) {
      Rig rig;
      rig.SetPlan(0, {3}, 100, {0, 4, 4, 0});
      FakeCudaOptions fake;
      fake.fail = name;
      fake.fail_after = after;
      FakeCuda(fake);
      Floats rows = Random(4 * kRowElements, 1), out(kOutElements), k(160),
             v(160);
      int32_t header[3] = {0, 0, 1};
      int failures = 0;
      auto count = [&](const Error& error) {
        if (error.empty()) return;
        CHECK(error.find("CUDA_ERROR_LAUNCH_FAILED (719)") != Error::npos);
        ++failures;
      };
      Floats message = Message(rows, {0, 0, 1});
      Error error = rig.cuda().Start(rig.stream, 0, AsDevice(message.data()),
                                     Dtype::kFloat32, 1);
      count(error);
      if (error.empty()) {
        count(rig.cuda().Join(rig.stream, 0, AsDevice(out.data()),
                              Dtype::kFloat32, 1));
      }
      count(rig.cuda().StoreRows(rig.stream, AsDevice(rows.data()),
                                 Dtype::kFloat32, 4, AsDevice(header)));
      error = rig.cuda().StartFetch(rig.stream, AsDevice(header),
                                    AsDevice(k.data()), AsDevice(v.data()),
                                    Dtype::kFloat32, 10);
      count(error);
      if (error.empty()) {
        count(rig.cuda().JoinFetch(rig.stream, AsDevice(k.data()),
                                   AsDevice(v.data())));
      }
      FakeSynchronize(rig.stream);
      CHECK(rig.lane->Drain(10).empty());
      if (!rig.lane->error().empty()) ++failures;
      CHECK(failures <= 1);
      if (after == 0) CHECK(failures == 1);
      // Still of use, once drained.
      FakeCuda({});
      rig.lane->ClearError();
      rig.SetPlan(1, {3, 4}, 1);
      rig.Start(1, Random(2 * kRowElements, 9), {1, 1, 2});
      rig.Join(1, 2);
      rig.Compare();
    }
  }
}

void TestALostDeviceEndsInErrorsNotInWaits() {
  Rig rig({}, SmallCuda(), /*watchdog_seconds=*/0.1);
  rig.SetPlan(0, {3}, 100);
  Floats message = Message(Random(kRowElements, 1), {0, 0, 1});
  Floats out(kOutElements);
  // The device stops before the rows are there and then every call fails.
  std::atomic<bool> stopped{true};
  FakeLaunch(rig.stream, [&] {
    while (stopped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  CHECK(rig.cuda().Start(rig.stream, 0, AsDevice(message.data()),
                         Dtype::kFloat32, 1) == "");
  FakeCudaOptions fake;
  fake.fail = "StreamQuery";
  fake.fail_all_after = true;
  FakeCuda(fake);
  CHECK(rig.lane->Drain(10).empty());
  CHECK(rig.lane->error().find("channel 0 has not advanced for 0 s: the device "
                               "is lost: cuStreamQuery: CUDA_ERROR_LAUNCH") ==
        0);
  Error error =
      rig.cuda().Join(rig.stream, 0, AsDevice(out.data()), Dtype::kFloat32, 1);
  CHECK(error.find("the lane gave its device up") == 0);
  stopped = false;
  FakeSynchronize(rig.stream);
  FakeCuda({});
}

void TestTheWatchdogNamesALateChannelAndFreesTheDevice() {
  Rig rig({}, SmallCuda(), /*watchdog_seconds=*/0.05);
  rig.SetPlan(0, {3}, 100);
  rig.lane->SetDelay(2000000000);
  Floats message = Message(Random(kRowElements, 1), {0, 0, 1});
  Floats out(kOutElements);
  auto begin = std::chrono::steady_clock::now();
  CHECK(rig.cuda().Start(rig.stream, 1, AsDevice(message.data()),
                         Dtype::kFloat32, 1) == "");
  CHECK(rig.cuda().Join(rig.stream, 1, AsDevice(out.data()), Dtype::kFloat32,
                        1) == "");
  FakeSynchronize(rig.stream);
  CHECK(std::chrono::steady_clock::now() - begin <
        std::chrono::milliseconds(1500));
  CHECK(rig.lane->error() ==
        "channel 1 has not advanced for 0 s: its job does not end; its result "
        "is void");
  CHECK(rig.cuda().Start(rig.stream, 1, AsDevice(message.data()),
                         Dtype::kFloat32, 1) != "");
  // The job ends at last: the lane works again.
  CHECK(rig.lane->Drain(10).empty());
  CHECK(rig.twin->Drain(10).empty());
  rig.lane->SetDelay(0);
  rig.lane->ClearError();
  rig.SetPlan(0, {3}, 1);
  rig.Start(1, Random(kRowElements, 4), {0, 2, 1});
  rig.Join(1, 1);
  rig.Compare();

  // A device that is merely late is named too, and keeps its job.
  rig.SetPlan(0, {3}, 1);
  FakeLaunch(rig.stream, [] {
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
  });
  rig.Start(0, Random(kRowElements, 5), {0, 1, 1});
  rig.Join(0, 1);
  FakeSynchronize(rig.stream);
  CHECK(rig.lane->error() ==
        "channel 0 has not advanced for 0 s: its bytes have not come from the "
        "device");
  rig.lane->ClearError();
  rig.Compare();
}

void TestCloseEndsWithJobsWhoseBytesNeverCome() {
  const int live = FakeLive();
  std::atomic<bool> stopped{true};
  CudaOptions options = SmallCuda();
  options.close_seconds = 0.1;
  Rig rig({}, options);
  Floats message = Message(Random(kRowElements, 1), {0, 0, 0});
  FakeLaunch(rig.stream, [&] {
    while (stopped) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  for (int channel = 0; channel < 2; ++channel) {
    CHECK(rig.cuda().Start(rig.stream, channel, AsDevice(message.data()),
                           Dtype::kFloat32, 1) == "");
  }
  rig.lane->Close();
  CHECK(rig.lane->error() ==
        "start on channel 0: its bytes have not come from the device");
  // The device may still write: its memory stays.
  CHECK(FakeLive() > live);
  stopped = false;
  FakeSynchronize(rig.stream);
}

void TestWhatAStartTakesIsGivenBack() {
  const int live = FakeLive(), registered = FakeRegistered();
  auto make = [](const FakeCudaOptions& fake,
                 CudaOptions options = SmallCuda()) {
    Rig rig(fake, options);
    return rig.cuda().report();
  };
  CudaReport report = make({});
  CHECK(report.memory_operations);
  CHECK(report.round_trip_us > 0);
  CHECK(report.registered_bytes ==
        int64_t{kLayers} * 12 * kKvHeads * 2 * 16 * kHeadDim * 4);
  CHECK(report.device_bytes > 0 && report.pinned_bytes > report.device_bytes);
  CHECK(report.notes.empty());

  FakeCudaOptions fake;
  fake.registers = false;
  report = make(fake);
  CHECK(report.registered_bytes == 0);
  CHECK(report.notes[0].find("cuMemHostRegister: CUDA_ERROR_NOT_SUPPORTED") !=
        std::string::npos);
  fake = {};
  fake.waits_hold = false;
  report = make(fake);
  CHECK(!report.memory_operations);
  CHECK(report.notes[0].find("cuStreamWaitValue32 did not wait") !=
        std::string::npos);
  fake = {};
  fake.memory_operations = false;
  report = make(fake);
  CHECK(report.notes[0].find("CUDA_ERROR_NOT_SUPPORTED (801)") !=
        std::string::npos);
  CHECK(FakeLive() == live);

  for (const char* name : {"StreamCreate", "EventCreate", "MemAlloc",
                           "MemHostAlloc", "MemHostGetDevicePointer"}) {
    fake = {};
    fake.fail = name;
    fake.fail_after = 2;
    CheckThrows("CUDA_ERROR_LAUNCH_FAILED", [&] { make(fake); });
    CHECK(FakeLive() == live);
  }
  CudaOptions options = SmallCuda();
  options.device = 3;
  CheckThrows("cuda_device is 3; this process sees 1 devices",
              [&] { make({}, options); });
  CHECK(FakeLive() == live);
  CHECK(FakeRegistered() == registered);
}

}  // namespace
}  // namespace neojax

int main() {
  using namespace neojax;
  TestWhatAStartTakesIsGivenBack();
  for (bool memory_operations : {true, false}) {
    TestStepsGiveWhatTheCpuGives(memory_operations, 0, 0, 20);
    TestStepsGiveWhatTheCpuGives(memory_operations, 400, 0, 10);
    TestStepsGiveWhatTheCpuGives(memory_operations, 50, 300, 10);
    TestStepsGiveWhatTheCpuGives(memory_operations, 0, 5000, 4);
  }
  TestTwoJobsOfAChannelMayBeInFlight();
  TestADeepChannelIsAQueueBesideTheOthers();
  TestPaddingIsZeroWhateverTheRowsBefore();
  TestAWrongHdrIsTheLanesErrorAndZeros();
  TestMisuseIsRefusedAtTheLaunch();
  TestADriverThatRefusesIsAnErrorAndNoWait();
  TestALostDeviceEndsInErrorsNotInWaits();
  // The device takes void results while the late job still writes them.
#ifndef __SANITIZE_THREAD__
  TestTheWatchdogNamesALateChannelAndFreesTheDevice();
#endif
  TestCloseEndsWithJobsWhoseBytesNeverCome();
}
