#include "ffi/cpu_paged_attn/tests/fake_cuda.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "ffi/cpu_paged_attn/tests/check.h"

namespace neojax {
namespace {

constexpr CudaResult kInvalid = 1;
constexpr CudaResult kNotSupported = 801;
constexpr CudaResult kLaunchFailed = 719;

// What an event stood for when it was recorded.
struct Record {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  void Set() {
    std::lock_guard<std::mutex> lock(mutex);
    done = true;
    changed.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return done; });
  }
  bool IsDone() {
    std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
};

struct Event {
  std::mutex mutex;
  std::shared_ptr<Record> record;
};

std::atomic<int> max_delay_us{0};

class Stream {
 public:
  Stream() : thread_([this] { Run(); }) {}
  ~Stream() {
    Push({});
    thread_.join();
  }
  void Push(std::function<void()> operation) {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(operation));
    changed_.notify_all();
  }
  bool IsIdle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty();
  }
  void Synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return queue_.empty(); });
  }

 private:
  void Run() {
    uint32_t random = 12345 + static_cast<uint32_t>(next_seed_++ * 77777);
    for (;;) {
      std::function<void()> operation;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !queue_.empty(); });
        operation = queue_.front();
      }
      if (!operation) return;
      random = random * 1664525 + 1013904223;
      int most = max_delay_us;
      if (most > 0 && random % 4 == 0) {
        std::this_thread::sleep_for(
            std::chrono::microseconds((random >> 8) % most));
      }
      operation();
      operation = {};
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.pop_front();
      changed_.notify_all();
    }
  }

  static std::atomic<int> next_seed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;  // front: in progress
  std::thread thread_;
};

std::atomic<int> Stream::next_seed_{0};

struct State {
  std::mutex mutex;
  FakeCudaOptions options;
  int calls_of_fail = 0;
  bool lost = false;
  std::set<void*> live;
  std::map<const char*, size_t> registered;  // bytes of each piece
  int contexts = 0;
  // As in the driver: host functions of all streams share one thread.
  std::unique_ptr<Stream> host_functions;
};

State& Fake() {
  static State* state = new State;
  return *state;
}

thread_local int current_contexts = 0;

// The result of a call of the function `name`, if it is to fail.
CudaResult Outcome(const char* name) {
  State& fake = Fake();
  std::lock_guard<std::mutex> lock(fake.mutex);
  if (fake.lost) return kLaunchFailed;
  if (fake.options.fail == name &&
      fake.calls_of_fail++ == fake.options.fail_after) {
    fake.lost = fake.options.fail_all_after;
    return kLaunchFailed;
  }
  return kCudaSuccess;
}

template <class T>
CudaResult Made(T* made) {
  std::lock_guard<std::mutex> lock(Fake().mutex);
  Fake().live.insert(made);
  return kCudaSuccess;
}

CudaResult Gone(void* made) {
  std::lock_guard<std::mutex> lock(Fake().mutex);
  return Fake().live.erase(made) == 1 ? kCudaSuccess : kInvalid;
}

CudaResult Push(const char* name, CudaStream stream,
                std::function<void()> operation) {
  CudaResult result = Outcome(name);
  if (result == kCudaSuccess) {
    static_cast<Stream*>(stream)->Push(std::move(operation));
  }
  return result;
}

uint32_t* Word(DevicePtr at) { return reinterpret_cast<uint32_t*>(at); }

// As the driver does, a copy that is pinned in part, or in two pieces.
bool CrossesPieces(const void* host, size_t bytes) {
  const char* at = static_cast<const char*>(host);
  State& fake = Fake();
  std::lock_guard<std::mutex> lock(fake.mutex);
  for (const auto& [begin, size] : fake.registered) {
    const bool overlaps = at < begin + size && begin < at + bytes;
    if (overlaps && (at < begin || at + bytes > begin + size)) return true;
  }
  return false;
}

CudaResult Move(const char* name, void* to, const void* from, size_t bytes,
                CudaStream stream) {
  if (CrossesPieces(to, bytes) || CrossesPieces(from, bytes)) return kInvalid;
  return Push(name, stream, [=] { std::memcpy(to, from, bytes); });
}

CudaDriver Table() {
  CudaDriver d{};
  d.DeviceGetCount = [](int* count) {
    *count = 1;
    return Outcome("DeviceGetCount");
  };
  d.DeviceGet = [](CudaDevice* device, int ordinal) {
    *device = ordinal;
    return Outcome("DeviceGet");
  };
  d.PrimaryCtxRetain = [](CudaContext* context, CudaDevice) {
    *context = &Fake();
    std::lock_guard<std::mutex> lock(Fake().mutex);
    ++Fake().contexts;
    return kCudaSuccess;
  };
  d.PrimaryCtxRelease = [](CudaDevice) {
    std::lock_guard<std::mutex> lock(Fake().mutex);
    --Fake().contexts;
    return kCudaSuccess;
  };
  d.CtxPushCurrent = [](CudaContext) {
    ++current_contexts;
    return kCudaSuccess;
  };
  d.CtxPopCurrent = [](CudaContext*) {
    --current_contexts;
    return kCudaSuccess;
  };
  d.CtxSetCurrent = [](CudaContext) {
    current_contexts = 1;
    return kCudaSuccess;
  };
  d.StreamCreate = [](CudaStream* stream, unsigned) {
    CHECK(current_contexts > 0);
    CudaResult result = Outcome("StreamCreate");
    if (result != kCudaSuccess) return result;
    *stream = new Stream;
    return Made(*stream);
  };
  d.StreamDestroy = [](CudaStream stream) {
    CudaResult result = Gone(stream);
    if (result == kCudaSuccess) delete static_cast<Stream*>(stream);
    return result;
  };
  d.StreamQuery = [](CudaStream stream) {
    CHECK(current_contexts > 0);
    CudaResult result = Outcome("StreamQuery");
    if (result != kCudaSuccess) return result;
    return static_cast<Stream*>(stream)->IsIdle() ? kCudaSuccess
                                                  : kCudaNotReady;
  };
  d.StreamWaitEvent = [](CudaStream stream, CudaEvent event, unsigned) {
    auto* e = static_cast<Event*>(event);
    std::shared_ptr<Record> record;
    {
      std::lock_guard<std::mutex> lock(e->mutex);
      record = e->record;
    }
    return Push("StreamWaitEvent", stream, [record] {
      if (record != nullptr) record->Wait();
    });
  };
  d.EventCreate = [](CudaEvent* event, unsigned) {
    CudaResult result = Outcome("EventCreate");
    if (result != kCudaSuccess) return result;
    *event = new Event;
    return Made(*event);
  };
  d.EventDestroy = [](CudaEvent event) {
    CudaResult result = Gone(event);
    if (result == kCudaSuccess) delete static_cast<Event*>(event);
    return result;
  };
  d.EventRecord = [](CudaEvent event, CudaStream stream) {
    auto* e = static_cast<Event*>(event);
    auto record = std::make_shared<Record>();
    CudaResult result =
        Push("EventRecord", stream, [record] { record->Set(); });
    std::lock_guard<std::mutex> lock(e->mutex);
    if (result == kCudaSuccess) e->record = record;
    return result;
  };
  d.EventQuery = [](CudaEvent event) {
    CudaResult result = Outcome("EventQuery");
    if (result != kCudaSuccess) return result;
    auto* e = static_cast<Event*>(event);
    std::lock_guard<std::mutex> lock(e->mutex);
    bool done = e->record == nullptr || e->record->IsDone();
    return done ? kCudaSuccess : kCudaNotReady;
  };
  d.MemAlloc = [](DevicePtr* data, size_t bytes) {
    CHECK(current_contexts > 0);
    CudaResult result = Outcome("MemAlloc");
    if (result != kCudaSuccess) return result;
    char* memory = new char[bytes];
    *data = AsDevice(memory);
    return Made(memory);
  };
  d.MemFree = [](DevicePtr data) {
    char* memory = reinterpret_cast<char*>(data);
    CudaResult result = Gone(memory);
    if (result == kCudaSuccess) delete[] memory;
    return result;
  };
  d.MemHostAlloc = [](void** data, size_t bytes, unsigned) {
    CudaResult result = Outcome("MemHostAlloc");
    if (result != kCudaSuccess) return result;
    *data = ::operator new(bytes, std::align_val_t{4096});
    return Made(*data);
  };
  d.MemFreeHost = [](void* data) {
    CudaResult result = Gone(data);
    if (result == kCudaSuccess) {
      ::operator delete(data, std::align_val_t{4096});
    }
    return result;
  };
  d.MemHostGetDevicePointer = [](DevicePtr* device, void* data, unsigned) {
    *device = AsDevice(data);
    return Outcome("MemHostGetDevicePointer");
  };
  d.MemHostRegister = [](void* data, size_t bytes, unsigned) {
    std::lock_guard<std::mutex> lock(Fake().mutex);
    if (!Fake().options.registers) return kNotSupported;
    return Fake().registered.emplace(static_cast<char*>(data), bytes).second
               ? kCudaSuccess
               : kCudaAlreadyRegistered;
  };
  d.MemHostUnregister = [](void* data) {
    std::lock_guard<std::mutex> lock(Fake().mutex);
    return Fake().registered.erase(static_cast<char*>(data)) == 1 ? kCudaSuccess
                                                                  : kInvalid;
  };
  d.MemcpyDtoD = [](DevicePtr to, DevicePtr from, size_t bytes,
                    CudaStream stream) {
    return Move("MemcpyDtoD", reinterpret_cast<void*>(to),
                reinterpret_cast<const void*>(from), bytes, stream);
  };
  d.MemcpyDtoH = [](void* to, DevicePtr from, size_t bytes, CudaStream stream) {
    return Move("MemcpyDtoH", to, reinterpret_cast<const void*>(from), bytes,
                stream);
  };
  d.MemcpyHtoD = [](DevicePtr to, const void* from, size_t bytes,
                    CudaStream stream) {
    return Move("MemcpyHtoD", reinterpret_cast<void*>(to), from, bytes, stream);
  };
  d.Memcpy2D = [](const CudaMemcpy2D* copy, CudaStream stream) {
    CHECK(copy->src_type == kCudaMemoryTypeDevice);
    CHECK(copy->dst_type == kCudaMemoryTypeDevice);
    CHECK(copy->src_pitch >= copy->width_bytes);
    return Push("Memcpy2D", stream, [c = *copy] {
      for (size_t row = 0; row < c.height; ++row) {
        std::memcpy(reinterpret_cast<char*>(c.dst_device) + row * c.dst_pitch,
                    reinterpret_cast<char*>(c.src_device) + row * c.src_pitch,
                    c.width_bytes);
      }
    });
  };
  d.LaunchHostFunc = [](CudaStream stream, void (*fn)(void*), void* data) {
    return Push("LaunchHostFunc", stream, [fn, data] {
      auto record = std::make_shared<Record>();
      Fake().host_functions->Push([fn, data, record] {
        fn(data);
        record->Set();
      });
      record->Wait();
    });
  };
  d.GetErrorName = [](CudaResult result, const char** name) {
    *name = result == kLaunchFailed   ? "CUDA_ERROR_LAUNCH_FAILED"
            : result == kNotSupported ? "CUDA_ERROR_NOT_SUPPORTED"
                                      : "CUDA_ERROR_INVALID_VALUE";
    return kCudaSuccess;
  };
  d.StreamWriteValue32 = [](CudaStream stream, DevicePtr at, uint32_t value,
                            unsigned) {
    if (!Fake().options.memory_operations) return kNotSupported;
    return Push("StreamWriteValue32", stream,
                [=] { __atomic_store_n(Word(at), value, __ATOMIC_RELEASE); });
  };
  d.StreamWaitValue32 = [](CudaStream stream, DevicePtr at, uint32_t value,
                           unsigned flags) {
    CHECK(flags == kCudaWaitGeq);
    if (!Fake().options.memory_operations) return kNotSupported;
    const bool holds = Fake().options.waits_hold;
    return Push("StreamWaitValue32", stream, [=] {
      while (holds &&
             static_cast<int32_t>(__atomic_load_n(Word(at), __ATOMIC_ACQUIRE) -
                                  value) < 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(5));
      }
    });
  };
  return d;
}

}  // namespace

const CudaDriver& FakeCuda(const FakeCudaOptions& options) {
  static const CudaDriver table = Table();
  State& fake = Fake();
  std::lock_guard<std::mutex> lock(fake.mutex);
  fake.options = options;
  fake.calls_of_fail = 0;
  fake.lost = false;
  if (fake.host_functions == nullptr) {
    fake.host_functions = std::make_unique<Stream>();
  }
  max_delay_us = options.max_delay_us;
  return table;
}

CudaStream FakeStream() { return new Stream; }

void FakeDestroy(CudaStream stream) { delete static_cast<Stream*>(stream); }

void FakeLaunch(CudaStream stream, std::function<void()> kernel) {
  static_cast<Stream*>(stream)->Push(std::move(kernel));
}

void FakeSynchronize(CudaStream stream) {
  static_cast<Stream*>(stream)->Synchronize();
}

int FakeLive() {
  std::lock_guard<std::mutex> lock(Fake().mutex);
  return static_cast<int>(Fake().live.size()) + Fake().contexts;
}

int FakeRegistered() {
  std::lock_guard<std::mutex> lock(Fake().mutex);
  return static_cast<int>(Fake().registered.size());
}

}  // namespace neojax
