// Code shared by the layers' operators: Mojo libraries, launches, memory, and the conditions for using PyTorch's own
// operations instead. It needs no CUDA headers, because the kernels are launched by C functions of Mojo libraries.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
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

// Tests build the operators for CPU tensors, whose memory the virtual GPU accesses (tests/nn/pinned.cpp).
#ifndef WORKBOOK_DEVICE
#define WORKBOOK_DEVICE CUDA
#endif
#define WORKBOOK_CONCAT_(a, b) a##b
#define WORKBOOK_CONCAT(a, b) WORKBOOK_CONCAT_(a, b)
#define WORKBOOK_AUTOCAST WORKBOOK_CONCAT(Autocast, WORKBOOK_DEVICE)

namespace workbook {
using at::Tensor;
using Optional = std::optional<Tensor>;
using Tensors2 = std::tuple<Tensor, Tensor>;
using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors5 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr auto DEVICE = c10::DeviceType::WORKBOOK_DEVICE;
constexpr auto KEY = c10::DispatchKey::WORKBOOK_DEVICE;

// ---- Streams ------------------------------------------------------------------------------------------------

// Returns the driver's handle of the current stream.
inline int64_t current_stream(c10::Device device) {
  if (device.is_cpu()) return 0;
  return reinterpret_cast<int64_t>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
}

// Returns a function of the CUDA driver, or null if there is no driver.
template <class F>
F driver_function(const char* name) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  return driver ? reinterpret_cast<F>(dlsym(driver, name)) : nullptr;
}

// Returns whether a CUDA graph is capturing the current stream. Tests on CPU tensors set an environment variable.
inline bool is_capturing(c10::Device device) {
  if (device.is_cpu()) return std::getenv("WORKBOOK_CAPTURING") != nullptr;
  static auto get_status = driver_function<int (*)(int64_t, int*)>("cuStreamIsCapturing");
  int status = 0;
  return get_status && get_status(current_stream(device), &status) == 0 && status == 1;
}

// Runs this thread's first matmul on a GPU, in which PyTorch creates a cuBLAS handle. During a capture this is allowed
// only in relaxed mode and on a stream that is not being captured.
inline void prepare_cublas(c10::Device device) {
  static thread_local std::array<bool, 64> ready{};
  size_t index = device.index();
  if (device.is_cpu() || index >= ready.size() || ready[index]) return;
  static auto exchange_mode = driver_function<int (*)(int*)>("cuThreadExchangeStreamCaptureMode");
  c10::StreamGuard side(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  int mode = 2;  // relaxed; the first exchange stores the previous mode here
  if (exchange_mode) exchange_mode(&mode);
  {
    auto one = at::ones({8, 8}, at::device(device).dtype(at::kHalf));
    at::mm(one, one);
  }
  if (exchange_mode) exchange_mode(&mode);
  ready[index] = true;
}

// Additional streams for branches of a CUDA graph. Tests on CPU tensors have only one stream.
class SideStreams {
 public:
  explicit SideStreams(c10::Device device) : device(device), guard(device.type()), main(guard.getStream(device)) {}

  // Calls a function on another stream, which first waits for the main stream.
  template <class Function>
  void run(Function function) {
    if (device.is_cpu()) return function();
    auto side = main;
    while (side == main || std::count(sides.begin(), sides.end(), side)) side = guard.getStreamFromGlobalPool(device);
    wait(side, main);
    sides.push_back(side);
    c10::StreamGuard current(side);
    function();
  }

  // Makes the main stream wait for all side streams.
  void join() {
    for (auto side : sides) wait(main, side);
  }

 private:
  void wait(c10::Stream waiting, c10::Stream other) {
    c10::Event event(device.type());
    event.record(other);
    event.block(waiting);
  }

  c10::Device device;
  c10::impl::VirtualGuardImpl guard;
  c10::Stream main;
  std::vector<c10::Stream> sides;
};

// ---- Mojo libraries -----------------------------------------------------------------------------------------

// A function of a Mojo library: takes arguments as 64-bit words; returns the size of the workspace in bytes (or another
// result), or -1 and an error message.
using Function = int64_t (*)(const int64_t* words, char* message, int64_t capacity);
using Words = c10::SmallVector<int64_t, 64>;
// Opens the library "layer/part" for a GPU, built if necessary; returns the library's handle of the GPU and writes the
// dlopen handle, or warns and returns NONE. Set by harness/nn/host/__init__.py.
using Open = int64_t (*)(const char* layer, const char* part, int64_t index, void** dl_handle);
static Open open_library = nullptr;

// The Mojo library with a layer's kernels for one part, a dtype and optionally a feature. It is built and opened on its
// first use on a device; a failure is not retried.
class Library {
 public:
  Library(const char* layer, const char* part) : layer(layer), part(part) {}

  bool available(c10::Device device) { return find(device) > 0; }

  // Calls a function that launches nothing, such as kernel selection; returns its result and message.
  std::pair<int64_t, std::string> query(const char* name, c10::Device device, const Words& words) {
    return handle(device), call(name, words);
  }

  // Launches kernels on the current stream. Sets words 0 to 3: GPU, stream, workspace and its size in bytes.
  void launch(const char* name, c10::Device device, Words words) {
    auto gpu = handle(device);
    std::lock_guard<std::mutex> guard(launch_mutex);  // the Mojo side keeps a list of loaded kernels
    words[0] = 0;  // without a GPU, the function only computes the size of the workspace
    words[3] = call(name, words).first;
    auto workspace = words[3] ? c10::GetAllocator(DEVICE)->allocate(words[3]) : c10::DataPtr();
    words[0] = gpu;
    words[1] = current_stream(device);
    words[2] = reinterpret_cast<int64_t>(workspace.get());
    call(name, words);
  }

 private:
  static constexpr int64_t MAX_GPUS = 64, UNKNOWN = 0, NONE = -1;

  const char *layer, *part;
  void* dl_handle = nullptr;
  std::mutex open_mutex, launch_mutex;
  std::array<std::atomic<int64_t>, MAX_GPUS> gpus{};  // UNKNOWN, NONE, or the library's handle to the GPU
  std::map<const char*, Function> functions;

  int64_t find(c10::Device device) {
    auto index = std::max<int>(device.index(), 0);  // CPU tensors, in tests, have no index
    if (device.type() != DEVICE || index >= MAX_GPUS) return NONE;
    auto handle = gpus[index].load(std::memory_order_acquire);
    if (handle != UNKNOWN) return handle;
    std::lock_guard<std::mutex> guard(open_mutex);
    if (gpus[index].load() == UNKNOWN)
      gpus[index].store(open_library ? open_library(layer, part, index, &dl_handle) : NONE, std::memory_order_release);
    return gpus[index].load();
  }

  int64_t handle(c10::Device device) {
    auto gpu = find(device);
    TORCH_CHECK(gpu > 0, "mojo_workbook: no kernels for ", layer, " (", part, ") on ", device);
    return gpu;
  }

  std::pair<int64_t, std::string> call(const char* name, const Words& words) {
    Function function;
    {
      std::lock_guard<std::mutex> guard(open_mutex);
      auto& entry = functions[name];
      if (!entry) entry = reinterpret_cast<Function>(dlsym(dl_handle, name));
      function = entry;
    }
    TORCH_CHECK(function, "mojo_workbook: the library of ", layer, " (", part, ") lacks ", name);
    char message[1024] = "";
    auto result = function(words.data(), message, sizeof message);
    TORCH_CHECK(result >= 0, "mojo_workbook: ", message);
    return {result, message};
  }
};

// ---- Tensors ------------------------------------------------------------------------------------------------

inline int64_t address(const Tensor& t) { return t.defined() ? reinterpret_cast<int64_t>(t.const_data_ptr()) : 0; }
inline int64_t bits(double value) { return std::bit_cast<int64_t>(value); }
inline Optional optional(const Tensor& t) { return t.defined() ? Optional(t) : Optional(); }
inline at::ScalarType accumulation_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? dtype : at::kFloat; }

// Returns uninitialised memory from PyTorch's caching allocator, without the dispatcher.
inline Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, c10::GetAllocator(DEVICE), c10::DispatchKeySet(KEY), dtype, std::nullopt);
}
inline Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(DEVICE), c10::DispatchKeySet(KEY), dtype);
}

// Results that are not requested are empty tensors.
inline Tensor or_empty(const Tensor& t, at::ScalarType dtype) { return t.defined() ? t : empty({0}, dtype); }
inline Tensor meta_result(bool requested, c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
  return requested ? at::empty_symint(sizes, options) : at::empty({0}, options);
}

// ---- Dispatch -----------------------------------------------------------------------------------------------

// Returns a registered operator, to be called through the dispatcher.
template <class Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Calls an operator below autograd; OperatorNode differentiates it.
template <class Operator, class... Arguments>
auto call_below_autograd(const Operator& op, Arguments&&... arguments) {
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(std::forward<Arguments>(arguments)...);
}

// Returns whether a transform of torch.func (grad, vmap, jvp, ...) is active. FrontMode is excluded while a transform
// decomposes an operator. Without a kernel for FuncTorchBatchedDecomposition, vmap loops over the batch.
inline bool in_transform() {
  using c10::DispatchKey;
  auto keys = {DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode,
               DispatchKey::FuncTorchVmapMode};
  return std::any_of(keys.begin(), keys.end(), c10::impl::tls_is_dispatch_key_included);
}

// Returns whether any tensor has a forward-mode tangent.
template <class... T>
bool has_tangent(const T&... tensors) {
  return (torch::autograd::isFwGradDefined(Optional(tensors)) || ...);
}

// Disables autograd and autocast for PyTorch's operations within an operator.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard without{at::autocast_dispatch_keyset};
};

// Casts a floating-point tensor to autocast's dtype; a parameter is cast only once in an autocast region.
inline Tensor autocast_to(at::ScalarType dtype, const Tensor& t) { return at::autocast::cached_cast(dtype, t, DEVICE); }
inline Optional autocast_to(at::ScalarType dtype, const Optional& t) { return t ? autocast_to(dtype, *t) : t; }
template <class T>
const T& autocast_to(at::ScalarType, const T& option) { return option; }

// Wraps a function that requires its tensors in autocast's dtype.
template <auto function>
struct AutocastWrapper;
template <class Result, class... Arguments, Result (*function)(Arguments...)>
struct AutocastWrapper<function> {
  static Result call(Arguments... arguments) {
    c10::impl::ExcludeDispatchKeyGuard without(at::autocast_dispatch_keyset);
    return function(autocast_to(at::autocast::get_autocast_dtype(DEVICE), arguments)...);
  }
};

// ---- Autograd -----------------------------------------------------------------------------------------------

using NodePtr = decltype(torch::autograd::Edge::function);  // a shared_ptr in torch 2.11, an intrusive_ptr in 2.15

// The non-tensor arguments of a backward pass.
struct Numbers { std::vector<int64_t> integers; std::vector<double> reals; };

// The autograd node of an operator. `Op` defines NAME, the numbers of gradients (INPUTS) and of saved tensors (SAVED),
// OUTPUTS with a bit for each saved tensor that is an output, and two static functions: `gradients` computes the
// gradients in `needed`, a bit for each input, with the kernels; `recompute_with_torch` returns the inputs, and the
// outputs recomputed by PyTorch, for create_graph.
template <class Op>
struct OperatorNode : Node {
  std::vector<SavedVariable> saved;
  Numbers numbers;

  std::string name() const override { return Op::NAME; }
  void release_variables() override {
    for (auto& variable : saved) variable.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    auto tensors = unpack();
    if (!c10::GradMode::is_enabled()) return gradients(grads, tensors, numbers, needed());
    auto [inputs, outputs] = Op::recompute_with_torch(tensors, numbers, needed());
    variable_list outputs_with_grad, grad_outputs, inputs_with_grad, results(Op::INPUTS);
    for (size_t i = 0; i < outputs.size(); ++i)
      if (grads[i].defined()) outputs_with_grad.push_back(outputs[i]), grad_outputs.push_back(grads[i]);
    for (size_t i = 0; i < Op::INPUTS; ++i) if (needed() >> i & 1) inputs_with_grad.push_back(inputs[i]);
    if (outputs_with_grad.empty()) return results;
    auto computed_grads = torch::autograd::grad(outputs_with_grad, inputs_with_grad, grad_outputs, true, true, true);
    for (size_t i = 0, next = 0; i < Op::INPUTS; ++i) if (needed() >> i & 1) results[i] = computed_grads[next++];
    return results;
  }

  // Compiled autograd traces `gradients` as one function of tensors and numbers.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (size_t i = 0; i < Op::SAVED; ++i) args.collect(saved[i], Op::OUTPUTS >> i & 1);
    args.collect(numbers.integers), args.collect(numbers.reals);
  }
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swapped) override {
    using namespace torch::dynamo::autograd;
    using Metadata = std::vector<std::optional<torch::autograd::InputMetadata>>;
    for (auto& variable : saved) swapped.before(variable);
    auto tensors = unpack();
    std::vector<c10::IValue> arguments(tensors.begin(), tensors.end());
    std::vector<at::TypePtr> types(Op::SAVED, at::TensorType::get());
    arguments.insert(arguments.end(), {numbers.integers, numbers.reals, needed()});
    types.insert(types.end(), {at::ListType::ofInts(), at::ListType::ofFloats(), at::IntType::get()});
    auto run = [](const variable_list& grads, const std::vector<c10::IValue>& arguments) {
      variable_list tensors;
      for (size_t i = 0; i < Op::SAVED; ++i) tensors.push_back(arguments[i].toTensor());
      auto* rest = &arguments[Op::SAVED];
      return gradients(grads, tensors, {rest[0].toIntVector(), rest[1].toDoubleVector()}, rest[2].toInt());
    };
    auto metadata = IValuePacker<Metadata>::pack(get_input_metadata(next_edges()));
    auto& python = getPyCompilerInterface();
    auto* compiler = swapped.get_py_compiler();
    auto function = python->bind_function(compiler, name(), run, types, true, true);
    auto results = python->call_function(compiler, "apply_functional", function, grads, arguments, metadata);
    for (auto& variable : saved) swapped.after(variable);
    return results;
  }

 private:
  variable_list unpack() {
    variable_list tensors;
    for (auto& variable : saved) tensors.push_back(variable.unpack(getptr()));
    return tensors;
  }

  int64_t needed() {
    int64_t bits = 0;
    for (size_t i = 0; i < Op::INPUTS; ++i) bits |= int64_t(task_should_compute_output(i)) << i;
    return bits;
  }

  static variable_list gradients(const variable_list& grads, const variable_list& tensors, const Numbers& numbers,
                                 int64_t needed) {
    if (std::none_of(grads.begin(), grads.end(), [](auto& grad) { return grad.defined(); }))
      return variable_list(Op::INPUTS);
    at::AutoDispatchBelowADInplaceOrView below;
    auto results = Op::gradients(grads, tensors, numbers, needed);
    for (size_t i = 0; i < Op::INPUTS; ++i) if (!(needed >> i & 1)) results[i].reset();
    return results;
  }
};

// Records a call for the backward pass: creates the node of its outputs, with edges to its inputs and saved tensors.
template <class Op, class... Input>
void record(const variable_list& outputs, const std::vector<Optional>& saved, Numbers numbers, const Input&... inputs) {
  auto node = [] {
    using T = OperatorNode<Op>;
    if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>)
      return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
    else return c10::make_intrusive<T>();
  }();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  for (auto& output : outputs) torch::autograd::set_history(output, node);
  for (size_t i = 0; i < saved.size(); ++i) node->saved.emplace_back(saved[i], Op::OUTPUTS >> i & 1);
  node->numbers = std::move(numbers);
}
}  // namespace workbook

// Registers an operator that launches kernels; only OperatorNode differentiates it.
#define WORKBOOK_LEAF(name, device, meta)                                                                     \
  TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_DEVICE, m) { m.impl(name, device); }                             \
  TORCH_LIBRARY_IMPL(mojo_workbook, Meta, m) { m.impl(name, meta); }                                          \
  TORCH_LIBRARY_IMPL(mojo_workbook, Autograd, m) { m.impl(name, torch::autograd::autogradNotImplementedFallback()); }

// Called by harness/nn/host/__init__.py after loading.
extern "C" __attribute__((visibility("default"))) void workbook_set_open(workbook::Open function) {
  workbook::open_library = function;
}
