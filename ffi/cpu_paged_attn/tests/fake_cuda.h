// A CUDA driver without a GPU: streams are threads with in-order queues, device
// memory is the heap. Everything takes a random while, so that what is not
// ordered shows, above all under the thread sanitizer.
#ifndef NEOJAX_CPU_PAGED_ATTN_TESTS_FAKE_CUDA_H_
#define NEOJAX_CPU_PAGED_ATTN_TESTS_FAKE_CUDA_H_

#include <cstdint>
#include <functional>
#include <string>

#include "ffi/cpu_paged_attn/cuda_driver.h"

namespace neojax {

struct FakeCudaOptions {
  int max_delay_us = 0;  // before each operation of a stream, at random
  bool memory_operations = true;  // false: refused
  bool waits_hold = true;         // false: waiting for a value does nothing
  bool registers = true;          // false: cuMemHostRegister is refused
  // The call of this member of CudaDriver fails, after `fail_after` that do
  // not; once, or (a lost device) from then on like every other.
  std::string fail;
  int fail_after = 0;
  bool fail_all_after = false;
};

// The table to give a lane. Resets the options and the counts.
const CudaDriver& FakeCuda(const FakeCudaOptions& options = {});

// A stream that stands for XLA's; ends with FakeDestroy.
CudaStream FakeStream();
void FakeDestroy(CudaStream stream);
// Queues a kernel.
void FakeLaunch(CudaStream stream, std::function<void()> kernel);
void FakeSynchronize(CudaStream stream);

// What has been made and not freed: streams, events, allocations, contexts.
int FakeLive();
// Pieces of host memory that are registered.
int FakeRegistered();

inline DevicePtr AsDevice(const void* data) {
  return reinterpret_cast<DevicePtr>(data);
}

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_TESTS_FAKE_CUDA_H_
