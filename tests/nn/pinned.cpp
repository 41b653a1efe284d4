// Lets CPU tensors stand for those of a GPU on the virtual one: their memory becomes pinned host memory, which its kernels read
// and write with every access checked. Loaded by tests under `vgpu exec`, together with operators built with WORKBOOK_DEVICE=CPU.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstring>

namespace {
void* driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  TORCH_CHECK(library, "no CUDA driver: ", dlerror());
  void* function = dlsym(library, name);
  TORCH_CHECK(function, "the CUDA driver lacks ", name);
  return function;
}

void release(void* memory) {
  static auto give_back = reinterpret_cast<int (*)(void*)>(driver("cuMemFreeHost"));
  if (memory) give_back(memory);
}

struct Pinned : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    static auto take = reinterpret_cast<int (*)(void**, size_t, unsigned)>(driver("cuMemHostAlloc"));
    void* memory = nullptr;
    if (bytes) TORCH_CHECK(take(&memory, bytes, 0) == 0, "no pinned memory for ", bytes, " bytes");
    return {memory, memory, release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned;

const int installed = (c10::SetAllocator(c10::kCPU, &pinned, 255), 0);
}  // namespace
