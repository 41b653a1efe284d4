// Makes CPU tensors usable as GPU tensors on the virtual GPU: their memory becomes pinned host memory, which kernels read and
// write with every access checked. Loaded by tests under `vgpu exec`, together with operators built with WORKBOOK_DEVICE=CPU.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {
int64_t held = 0, most = 0;  // bytes of live tensors, and their maximum

void* driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  TORCH_CHECK(library, "no CUDA driver: ", dlerror());
  void* function = dlsym(library, name);
  TORCH_CHECK(function, "the CUDA driver lacks ", name);
  return function;
}

std::mutex counting;
std::unordered_map<void*, int64_t> sizes;

void count(void* memory, int64_t bytes) {
  std::lock_guard<std::mutex> guard(counting);
  sizes[memory] = bytes;
  held += bytes;
  most = std::max(most, held);
}

void release(void* memory) {
  static auto give_back = reinterpret_cast<int (*)(void*)>(driver("cuMemFreeHost"));
  if (!memory) return;
  {
    std::lock_guard<std::mutex> guard(counting);
    held -= sizes[memory];
    sizes.erase(memory);
  }
  give_back(memory);
}

struct Pinned : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    static auto take = reinterpret_cast<int (*)(void**, size_t, unsigned)>(driver("cuMemHostAlloc"));
    void* memory = nullptr;
    if (bytes) {
      TORCH_CHECK(take(&memory, bytes, 0) == 0, "no pinned memory for ", bytes, " bytes");
      count(memory, static_cast<int64_t>(bytes));
    }
    return {memory, memory, release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned;

const int installed = (c10::SetAllocator(c10::kCPU, &pinned, 255), 0);
}  // namespace

// Resets the maximum and returns the live bytes.
extern "C" __attribute__((visibility("default"))) int64_t pinned_begin() { return most = held; }

// Returns the maximum of live bytes since then.
extern "C" __attribute__((visibility("default"))) int64_t pinned_most() { return most; }
