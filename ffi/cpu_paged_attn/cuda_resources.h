// What a lane owns on a device: the retained primary context, streams, events,
// device and pinned memory, and registrations of the host's own memory.
#ifndef NEOJAX_CPU_PAGED_ATTN_CUDA_RESOURCES_H_
#define NEOJAX_CPU_PAGED_ATTN_CUDA_RESOURCES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/cpu_paged_attn/cuda_driver.h"

namespace neojax {

// "cuEventRecord: CUDA_ERROR_INVALID_HANDLE (400)"
std::string CudaErrorText(const CudaDriver& driver, const char* call,
                          CudaResult result);

// Every function throws std::runtime_error with the driver's words and, where
// memory ran out, how much was asked for.
class CudaResources {
 public:
  // Retains the device's primary context: the one that XLA works in.
  CudaResources(const CudaDriver& driver, int device);
  // Frees everything, if the context still takes calls.
  ~CudaResources();
  CudaResources(const CudaResources&) = delete;
  CudaResources& operator=(const CudaResources&) = delete;

  CudaContext context() const { return context_; }
  CudaStream NewStream();
  CudaEvent NewEvent();
  DevicePtr NewDevice(int64_t bytes);
  char* NewPinned(int64_t bytes);
  DevicePtr OnDevice(void* pinned);

  // Pins memory that is mapped already, a piece at a time. Returns how many
  // bytes the driver took; *refusal says why not all.
  int64_t Register(char* data, int64_t bytes, int64_t piece_bytes,
                   std::string* refusal);
  // From there to the end of the pinned piece that it is in: the driver refuses
  // copies that reach into the next one.
  int64_t BytesOfPiece(const char* at) const;

  int64_t device_bytes() const { return device_bytes_; }
  int64_t pinned_bytes() const { return pinned_bytes_; }

  // Leaves everything to the end of the process: the device still uses it.
  void Leak() { leaked_ = true; }

 private:
  void Free();

  const CudaDriver& driver_;
  CudaDevice device_ = 0;
  CudaContext context_ = nullptr;
  bool leaked_ = false;
  int64_t device_bytes_ = 0, pinned_bytes_ = 0;
  std::vector<CudaStream> streams_;
  std::vector<CudaEvent> events_;
  std::vector<DevicePtr> device_memory_;
  std::vector<void*> pinned_memory_;
  std::vector<void*> registered_;
  const char* registered_data_ = nullptr;
  int64_t piece_bytes_ = 0;
};

// Makes a context current in this thread for as long as it lives.
class CudaContextScope {
 public:
  CudaContextScope(const CudaDriver& driver, CudaContext context)
      : driver_(driver),
        pushed_(driver.CtxPushCurrent(context) == kCudaSuccess) {}
  ~CudaContextScope() {
    CudaContext popped;
    if (pushed_) driver_.CtxPopCurrent(&popped);
  }
  CudaContextScope(const CudaContextScope&) = delete;
  CudaContextScope& operator=(const CudaContextScope&) = delete;

 private:
  const CudaDriver& driver_;
  const bool pushed_;
};

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_CUDA_RESOURCES_H_
