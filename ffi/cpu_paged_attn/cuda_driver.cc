#include "ffi/cpu_paged_attn/cuda_driver.h"

#include <dlfcn.h>

namespace neojax {
namespace {

template <class Fn>
bool Resolve(void* library, const char* symbol, Fn** function) {
  *function = reinterpret_cast<Fn*>(dlsym(library, symbol));
  return *function != nullptr;
}

const CudaDriver* Load() {
  // Never closed: the lanes' threads may call it until the process ends.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  static CudaDriver driver;
  bool complete = true;
#define NEOJAX_RESOLVE(member, symbol, ...) \
  complete = Resolve(library, symbol, &driver.member) && complete;
  NEOJAX_CUDA_FUNCTIONS(NEOJAX_RESOLVE)
#undef NEOJAX_RESOLVE
#define NEOJAX_RESOLVE(member, symbol, ...) \
  Resolve(library, symbol, &driver.member);
  NEOJAX_CUDA_MEMORY_OPERATIONS(NEOJAX_RESOLVE)
#undef NEOJAX_RESOLVE
  CudaResult (*init)(unsigned) = nullptr;
  int count = 0;
  if (!complete || !Resolve(library, "cuInit", &init) ||
      init(0) != kCudaSuccess ||
      driver.DeviceGetCount(&count) != kCudaSuccess || count < 1) {
    return nullptr;
  }
  return &driver;
}

}  // namespace

const CudaDriver* LoadedCudaDriver() {
  static const CudaDriver* const driver = Load();
  return driver;
}

int CudaDeviceCount() {
  int count = 0;
  const CudaDriver* driver = LoadedCudaDriver();
  if (driver == nullptr || driver->DeviceGetCount(&count) != kCudaSuccess) {
    return 0;
  }
  return count;
}

}  // namespace neojax
