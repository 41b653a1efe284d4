// What the layers' operators share: Mojo libraries, launches, memory, and the conditions under which PyTorch's own
// operations run instead. No CUDA headers: the kernels are C functions of Mojo libraries.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

// Tests build the operators for CPU tensors, whose memory the virtual GPU reads (tests/nn/pinned.cpp).
#ifndef WORKBOOK_DEVICE
#define WORKBOOK_DEVICE CUDA
#endif
#define WORKBOOK_CONCAT_(a, b) a##b
#define WORKBOOK_CONCAT(a, b) WORKBOOK_CONCAT_(a, b)
#define WORKBOOK_AUTOCAST WORKBOOK_CONCAT(Autocast, WORKBOOK_DEVICE)

namespace workbook {
using at::Tensor;
using Optional = std::optional<Tensor>;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr auto DEVICE = c10::DeviceType::WORKBOOK_DEVICE;
constexpr auto KEY = c10::DispatchKey::WORKBOOK_DEVICE;

// ---- Streams -------------------------------------------------------------------------------------------------------

// Returns the driver's handle of the current stream.
inline int64_t current_stream(c10::Device device) {
  if (device.is_cpu()) return 0;
  return reinterpret_cast<int64_t>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

// Returns a function of the CUDA driver, null where there is none.
inline void* driver_function(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? dlsym(driver, name) : nullptr;
}

// Returns whether a CUDA graph captures the current stream. For CPU tensors of tests, whether the environment says so.
inline bool is_capturing(c10::Device device) {
  if (device.is_cpu()) return std::getenv("WORKBOOK_CAPTURING") != nullptr;
  using Ask = int (*)(int64_t stream, int* status);
  static auto ask = reinterpret_cast<Ask>(driver_function("cuStreamIsCapturing"));
  int status = 0;
  return ask && ask(current_stream(device), &status) == 0 && status == 1;
}

// Makes this thread's first product on a GPU, for which PyTorch creates a handle of cuBLAS. A capture allows that only in relaxed mode,
// on a stream that it does not capture; and calls before it may have had no product of PyTorch's.
inline void prepare_products(c10::Device device) {
  static thread_local std::array<bool, 64> ready{};
  size_t index = device.index();
  if (device.is_cpu() || index >= ready.size() || ready[index]) return;
  using Exchange = int (*)(int* mode);
  static auto exchange = reinterpret_cast<Exchange>(driver_function("cuThreadExchangeStreamCaptureMode"));
  c10::impl::VirtualGuardImpl guard(device.type());
  auto stream = guard.exchangeStream(guard.getStreamFromGlobalPool(device));
  int mode = 2;  // relaxed; then the mode before
  if (exchange) exchange(&mode);
  {
    auto one = at::ones({8, 8}, at::device(device).dtype(at::kHalf));
    at::mm(one, one);
  }
  if (exchange) exchange(&mode);
  guard.exchangeStream(stream);
  ready[index] = true;
}

// Branches of a CUDA graph beside the current stream; for CPU tensors of tests all is one stream.
class Branches {
 public:
  explicit Branches(c10::Device device) : device(device), guard(device.type()), main(guard.getStream(device)) {}
  ~Branches() { back(); }

  // Makes a further stream the current one, which begins where the first one is.
  void start() {
    if (device.is_cpu()) return;
    auto is_taken = [&](c10::Stream stream) { return stream == main || std::count(sides.begin(), sides.end(), stream); };
    auto side = guard.getStreamFromGlobalPool(device);
    while (is_taken(side)) side = guard.getStreamFromGlobalPool(device);
    wait(side, main);
    sides.push_back(side);
    guard.exchangeStream(side);
  }

  // Makes the first stream the current one again.
  void back() {
    if (!sides.empty()) guard.exchangeStream(main);
  }

  // Lets the first stream, which is the current one again, wait for all others.
  void meet() {
    back();
    for (auto side : sides) wait(main, side);
  }

 private:
  void wait(c10::Stream waits, c10::Stream other) {
    c10::Event event(device.type());
    event.record(other);
    event.block(waits);
  }

  c10::Device device;
  c10::impl::VirtualGuardImpl guard;
  c10::Stream main;
  std::vector<c10::Stream> sides;
};

// ---- Mojo libraries ------------------------------------------------------------------------------------------------

// A function of a Mojo library: takes 64-bit words, returns bytes of workspace, or -1 and a message.
using Function = int64_t (*)(const int64_t* words, char* message, int64_t capacity);
using Open = int64_t (*)(int64_t index, char* message, int64_t capacity);
// Python's part (harness/nn/host/__init__.py): builds the library "layer/part" for a GPU where it must, and writes its path; returns 0
// where there is none.
using Locate = int64_t (*)(const char* layer, const char* part, int64_t index, char* path, int64_t capacity);

static Locate locate = nullptr;

// One Mojo library: the kernels of a layer for one part, which is a dtype or a feature of a dtype. Built and opened at the first
// question on a device; a library that cannot be had is not asked for again.
class Library {
 public:
  Library(const char* layer, const char* part) : layer(layer), part(part) {}

  // Whether the kernels can run on a device.
  bool available(c10::Device device) { return gpu(device) > 0; }

  // Asks a function that launches nothing, such as the choice of kernels.
  template <size_t N>
  int64_t ask(const char* name, const std::array<int64_t, N>& words, c10::Device device) {
    open_for(device);
    return call(find(name), words.data());
  }

  // Asks as well; returns the answer, and the text that the function has written.
  template <size_t N>
  std::pair<int64_t, std::string> ask_why(const char* name, const std::array<int64_t, N>& words, c10::Device device) {
    TORCH_CHECK(available(device), "mojo_workbook: no kernels for ", layer, " (", part, ") on ", device);
    char message[1024] = "";
    auto result = find(name)(words.data(), message, sizeof message);
    return {result, message};
  }

  // Launches on the current stream; words 0 to 3 are filled in here: GPU, stream, workspace and its bytes.
  template <size_t N>
  void launch(const char* name, std::array<int64_t, N>& words, c10::Device device) {
    auto handle = open_for(device);
    auto function = find(name);
    std::lock_guard<std::mutex> guard(launching);  // the Mojo side keeps a list of loaded kernels
    words[0] = 0;  // no GPU: only counts the workspace
    words[3] = call(function, words.data());
    auto workspace = words[3] ? c10::GetAllocator(DEVICE)->allocate(words[3]) : c10::DataPtr();
    words[0] = handle;
    words[1] = current_stream(device);
    words[2] = reinterpret_cast<int64_t>(workspace.get());
    call(function, words.data());
  }

 private:
  static constexpr int MOST_GPUS = 64;
  static constexpr int64_t UNKNOWN = 0, NONE = -1;

  const char *layer, *part;
  void* opened = nullptr;
  std::string path;  // of what is opened
  std::mutex opening, launching;
  std::array<std::atomic<int64_t>, MOST_GPUS> gpus{};  // UNKNOWN, NONE, or what the library calls the GPU
  std::map<const char*, Function> functions;

  int64_t gpu(c10::Device device) {
    auto index = std::max<int>(device.index(), 0);  // CPU tensors of tests have no index
    if (device.type() != DEVICE || index >= MOST_GPUS) return NONE;
    auto handle = gpus[index].load(std::memory_order_acquire);
    if (handle != UNKNOWN) return handle;
    std::lock_guard<std::mutex> guard(opening);
    if (gpus[index].load() == UNKNOWN) gpus[index].store(open(index), std::memory_order_release);
    return gpus[index].load();
  }

  // Returns what the library calls a GPU, which must have the kernels.
  int64_t open_for(c10::Device device) {
    auto handle = gpu(device);
    TORCH_CHECK(handle > 0, "mojo_workbook: no kernels for ", layer, " (", part, ") on ", device);
    return handle;
  }

  int64_t open(int index) {
    char text[4096] = "";
    if (!locate || !locate(layer, part, index, text, sizeof text)) return NONE;
    if (opened && path != text) return missing("another architecture's kernels are in use");
    path = text;
    if (!opened) opened = dlopen(text, RTLD_NOW | RTLD_LOCAL);
    auto open_gpu = opened ? reinterpret_cast<Open>(dlsym(opened, "workbook_open")) : nullptr;
    if (!open_gpu) return missing(dlerror());
    text[0] = 0;
    auto handle = open_gpu(index, text, sizeof text);
    return handle > 0 ? handle : missing(text);
  }

  // Warns once: PyTorch's own operations run from now on.
  int64_t missing(const char* reason) {
    TORCH_WARN(layer, " (", part, "): PyTorch's own operations run on this GPU: ", reason);
    return NONE;
  }

  Function find(const char* name) {
    std::lock_guard<std::mutex> guard(opening);
    auto& function = functions[name];
    if (!function) function = reinterpret_cast<Function>(dlsym(opened, name));
    TORCH_CHECK(function, "mojo_workbook: the library of ", layer, " (", part, ") lacks ", name);
    return function;
  }

  static int64_t call(Function function, const int64_t* words) {
    char message[1024] = "";
    auto result = function(words, message, sizeof message);
    TORCH_CHECK(result >= 0, "mojo_workbook: ", message);
    return result;
  }

};

// ---- Tensors -------------------------------------------------------------------------------------------------------

inline int64_t address(const Tensor& t) { return t.defined() ? reinterpret_cast<int64_t>(t.const_data_ptr()) : 0; }
inline int64_t bits(double value) { return std::bit_cast<int64_t>(value); }
inline Optional optional(const Tensor& t) { return t.defined() ? Optional(t) : Optional(); }

// Returns uninitialised memory from PyTorch's caching allocator, without a trip through the dispatcher.
inline Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, c10::GetAllocator(DEVICE), c10::DispatchKeySet(KEY), dtype, std::nullopt);
}
inline Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(DEVICE), c10::DispatchKeySet(KEY), dtype);
}

// ---- When PyTorch's own operations run -----------------------------------------------------------------------------

// Returns whether a transform of torch.func (grad, vmap, jvp, ...) is active. Inside of one that takes an operator apart the front mode
// is off. An operator is registered for FuncTorchBatchedDecomposition too: else vmap calls it for one element after the other.
inline bool in_transform() {
  using c10::DispatchKey;
  auto keys = {DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchVmapMode};
  return std::any_of(keys.begin(), keys.end(), c10::impl::tls_is_dispatch_key_included);
}

// Returns whether any tensor carries a forward-mode tangent.
template <class... T>
bool has_tangent(const T&... tensors) {
  auto carries = [](const Optional& t) { return t && t->defined() && torch::autograd::isFwGradDefined(*t); };
  return (carries(tensors) || ...);
}

// Keeps autograd and autocast away from PyTorch's operations that a kernel of an operator calls.
struct Plain {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard without{at::autocast_dispatch_keyset};
};

// ---- Autograd ------------------------------------------------------------------------------------------------------

using NodePtr = decltype(torch::autograd::Edge::function);  // a shared_ptr in torch 2.11, an intrusive_ptr in 2.15

template <class T>
auto make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>();
  }
}

// Returns what a node's own outputs, saved by it, are unpacked for.
template <class Pointer = NodePtr>
Pointer itself(Node* node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return node->getptr();
  } else {
    return Pointer::reclaim_copy(node);
  }
}

// Casts a tensor to autocast's dtype; leaves of the graph that need a gradient are cast once per region.
inline Tensor in_autocast_dtype(const Tensor& t) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(DEVICE), t, DEVICE);
}
}  // namespace workbook

// Called once after loading, by harness/nn/host/__init__.py.
extern "C" __attribute__((visibility("default"))) void workbook_set_locate(workbook::Locate given) {
  workbook::locate = given;
}
