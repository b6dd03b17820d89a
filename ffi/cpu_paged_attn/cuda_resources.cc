#include "ffi/cpu_paged_attn/cuda_resources.h"

#include <algorithm>
#include <stdexcept>

namespace neojax {
namespace {

void Check(const CudaDriver& driver, const char* call, CudaResult result,
           int64_t bytes = 0) {
  if (result == kCudaSuccess) return;
  std::string text = CudaErrorText(driver, call, result);
  if (bytes > 0) {
    text += " for " + std::to_string(bytes) +
            " bytes of the host lane's slots and staging; lower "
            "gpu_memory_utilization, or max_rows and staging_bytes of the lane";
  }
  throw std::runtime_error(text);
}

}  // namespace

std::string CudaErrorText(const CudaDriver& driver, const char* call,
                          CudaResult result) {
  const char* name = nullptr;
  if (driver.GetErrorName(result, &name) != kCudaSuccess || name == nullptr) {
    name = "unknown error";
  }
  return std::string(call) + ": " + name + " (" + std::to_string(result) + ")";
}

CudaResources::CudaResources(const CudaDriver& driver, int device)
    : driver_(driver) {
  int count = 0;
  Check(driver_, "cuDeviceGetCount", driver_.DeviceGetCount(&count));
  if (device < 0 || device >= count) {
    throw std::runtime_error("cuda_device is " + std::to_string(device) +
                             "; this process sees " + std::to_string(count) +
                             " devices");
  }
  Check(driver_, "cuDeviceGet", driver_.DeviceGet(&device_, device));
  Check(driver_, "cuDevicePrimaryCtxRetain",
        driver_.PrimaryCtxRetain(&context_, device_));
}

CudaResources::~CudaResources() {
  if (!leaked_) Free();
}

void CudaResources::Free() {
  // Results do not matter: at the end of a process, or after a device error,
  // every call fails and there is nothing left to free.
  {
    CudaContextScope scope(driver_, context_);
    for (void* data : registered_) driver_.MemHostUnregister(data);
    for (CudaEvent event : events_) driver_.EventDestroy(event);
    for (CudaStream stream : streams_) driver_.StreamDestroy(stream);
    for (DevicePtr data : device_memory_) driver_.MemFree(data);
    for (void* data : pinned_memory_) driver_.MemFreeHost(data);
  }
  driver_.PrimaryCtxRelease(device_);
}

CudaStream CudaResources::NewStream() {
  CudaStream stream = nullptr;
  Check(driver_, "cuStreamCreate",
        driver_.StreamCreate(&stream, kCudaStreamNonBlocking));
  streams_.push_back(stream);
  return stream;
}

CudaEvent CudaResources::NewEvent() {
  CudaEvent event = nullptr;
  Check(driver_, "cuEventCreate",
        driver_.EventCreate(&event, kCudaEventDisableTiming));
  events_.push_back(event);
  return event;
}

DevicePtr CudaResources::NewDevice(int64_t bytes) {
  DevicePtr data = 0;
  Check(driver_, "cuMemAlloc", driver_.MemAlloc(&data, bytes), bytes);
  device_memory_.push_back(data);
  device_bytes_ += bytes;
  return data;
}

char* CudaResources::NewPinned(int64_t bytes) {
  void* data = nullptr;
  Check(driver_, "cuMemHostAlloc",
        driver_.MemHostAlloc(&data, bytes,
                             kCudaHostPortable | kCudaHostDeviceMap),
        bytes);
  pinned_memory_.push_back(data);
  pinned_bytes_ += bytes;
  return static_cast<char*>(data);
}

DevicePtr CudaResources::OnDevice(void* pinned) {
  DevicePtr data = 0;
  Check(driver_, "cuMemHostGetDevicePointer",
        driver_.MemHostGetDevicePointer(&data, pinned, 0));
  return data;
}

int64_t CudaResources::Register(char* data, int64_t bytes, int64_t piece_bytes,
                                std::string* refusal) {
  registered_data_ = data;
  piece_bytes_ = piece_bytes;
  for (int64_t done = 0; done < bytes; done += piece_bytes) {
    CudaResult result = driver_.MemHostRegister(
        data + done, std::min(piece_bytes, bytes - done), kCudaHostPortable);
    // Another lane over the same arena was first.
    if (result == kCudaAlreadyRegistered) continue;
    if (result != kCudaSuccess) {
      *refusal = CudaErrorText(driver_, "cuMemHostRegister", result);
      return done;
    }
    registered_.push_back(data + done);
  }
  return bytes;
}

int64_t CudaResources::BytesOfPiece(const char* at) const {
  return piece_bytes_ - (at - registered_data_) % piece_bytes_;
}

}  // namespace neojax
