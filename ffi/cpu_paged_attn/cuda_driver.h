// The CUDA driver's functions that the lane calls, as a table: the real one
// comes from libcuda.so.1 at run time, so nothing here needs a CUDA toolkit or
// a GPU to build, and tests bring a driver of their own.
#ifndef NEOJAX_CPU_PAGED_ATTN_CUDA_DRIVER_H_
#define NEOJAX_CPU_PAGED_ATTN_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>

namespace neojax {

// Names and layouts of cuda.h (CUDA 11.7 and later).
using CudaStream = void*;
using CudaEvent = void*;
using CudaContext = void*;
using CudaDevice = int;
using DevicePtr = unsigned long long;
using CudaResult = int;

constexpr CudaResult kCudaSuccess = 0;
constexpr CudaResult kCudaNotReady = 600;
constexpr CudaResult kCudaAlreadyRegistered = 712;
constexpr unsigned kCudaStreamNonBlocking = 1;
constexpr unsigned kCudaEventDisableTiming = 2;
constexpr unsigned kCudaHostPortable = 1;
constexpr unsigned kCudaHostDeviceMap = 2;
constexpr unsigned kCudaWaitGeq = 0;  // (int32)(*address - value) >= 0
constexpr unsigned kCudaMemoryTypeDevice = 2;

struct CudaMemcpy2D {
  size_t src_x_bytes, src_y;
  unsigned src_type;
  const void* src_host;
  DevicePtr src_device;
  void* src_array;
  size_t src_pitch;
  size_t dst_x_bytes, dst_y;
  unsigned dst_type;
  void* dst_host;
  DevicePtr dst_device;
  void* dst_array;
  size_t dst_pitch;
  size_t width_bytes, height;
};

// X(member, symbol, arguments...)
#define NEOJAX_CUDA_FUNCTIONS(X)                                              \
  X(DeviceGetCount, "cuDeviceGetCount", int*)                                 \
  X(DeviceGet, "cuDeviceGet", CudaDevice*, int)                               \
  X(PrimaryCtxRetain, "cuDevicePrimaryCtxRetain", CudaContext*, CudaDevice)   \
  X(PrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", CudaDevice)            \
  X(CtxPushCurrent, "cuCtxPushCurrent_v2", CudaContext)                       \
  X(CtxPopCurrent, "cuCtxPopCurrent_v2", CudaContext*)                        \
  X(CtxSetCurrent, "cuCtxSetCurrent", CudaContext)                            \
  X(StreamCreate, "cuStreamCreate", CudaStream*, unsigned)                    \
  X(StreamDestroy, "cuStreamDestroy_v2", CudaStream)                          \
  X(StreamQuery, "cuStreamQuery", CudaStream)                                 \
  X(StreamWaitEvent, "cuStreamWaitEvent", CudaStream, CudaEvent, unsigned)    \
  X(EventCreate, "cuEventCreate", CudaEvent*, unsigned)                       \
  X(EventDestroy, "cuEventDestroy_v2", CudaEvent)                             \
  X(EventRecord, "cuEventRecord", CudaEvent, CudaStream)                      \
  X(EventQuery, "cuEventQuery", CudaEvent)                                    \
  X(MemAlloc, "cuMemAlloc_v2", DevicePtr*, size_t)                            \
  X(MemFree, "cuMemFree_v2", DevicePtr)                                       \
  X(MemHostAlloc, "cuMemHostAlloc", void**, size_t, unsigned)                 \
  X(MemFreeHost, "cuMemFreeHost", void*)                                      \
  X(MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", DevicePtr*,      \
    void*, unsigned)                                                          \
  X(MemHostRegister, "cuMemHostRegister_v2", void*, size_t, unsigned)         \
  X(MemHostUnregister, "cuMemHostUnregister", void*)                          \
  X(MemcpyDtoD, "cuMemcpyDtoDAsync_v2", DevicePtr, DevicePtr, size_t,         \
    CudaStream)                                                               \
  X(MemcpyDtoH, "cuMemcpyDtoHAsync_v2", void*, DevicePtr, size_t, CudaStream) \
  X(MemcpyHtoD, "cuMemcpyHtoDAsync_v2", DevicePtr, const void*, size_t,       \
    CudaStream)                                                               \
  X(Memcpy2D, "cuMemcpy2DAsync_v2", const CudaMemcpy2D*, CudaStream)          \
  X(LaunchHostFunc, "cuLaunchHostFunc", CudaStream, void (*)(void*), void*)   \
  X(GetErrorName, "cuGetErrorName", CudaResult, const char**)

// Stream memory operations; null where the driver is too old for them.
#define NEOJAX_CUDA_MEMORY_OPERATIONS(X)                                  \
  X(StreamWriteValue32, "cuStreamWriteValue32_v2", CudaStream, DevicePtr, \
    uint32_t, unsigned)                                                   \
  X(StreamWaitValue32, "cuStreamWaitValue32_v2", CudaStream, DevicePtr,   \
    uint32_t, unsigned)

struct CudaDriver {
#define NEOJAX_MEMBER(member, symbol, ...) CudaResult (*member)(__VA_ARGS__);
  NEOJAX_CUDA_FUNCTIONS(NEOJAX_MEMBER)
  NEOJAX_CUDA_MEMORY_OPERATIONS(NEOJAX_MEMBER)
#undef NEOJAX_MEMBER
};

// The machine's driver, loaded and initialised once; null without libcuda, one
// of its functions, or a device.
const CudaDriver* LoadedCudaDriver();

// Devices that this process sees; 0 without a driver.
int CudaDeviceCount();

}  // namespace neojax

#endif  // NEOJAX_CPU_PAGED_ATTN_CUDA_DRIVER_H_
