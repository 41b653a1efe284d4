// Linear + cross-entropy without storing all logits: PyTorch's matmuls on chunks of rows, and one launch per chunk
// that overwrites the logits with their gradient and writes the losses.
//
// For a mean or a sum, the forward pass computes the gradients for an incoming gradient of 1, and the backward pass
// scales them. For one loss per row, the backward pass recomputes the logits.
#include "host.h"

#include <torch/csrc/autograd/graph_task.h>

namespace {
using namespace workbook;
using at::Reduction::Mean, at::Reduction::None;

constexpr int64_t INPUT = 1, WEIGHT = 2, BIAS = 4;  // bits of the requested gradients
constexpr int64_t ACCUMULATION_DTYPE = 8;  // return dW in the accumulation dtype if there are several chunks
constexpr int64_t VECTOR_BYTES = 16;  // bytes per load
constexpr int64_t MAX_CLASSES = (int64_t{1} << 31) - 4096, MAX_ROWS = (int64_t{1} << 31) - 1;  // 32-bit indices, blocks
constexpr int64_t CHUNK_ROWS = 2048;  // rows per chunk; with fewer, accumulating dW takes as long as the matmuls
constexpr int64_t TILE_ROWS = 128;  // rows per tile of a matmul
constexpr int64_t FIRST_COPY_ELEMENTS = int64_t{1} << 18;  // elements converted to 16 bits through a temporary copy

// ---- Chunks -------------------------------------------------------------------------------------------------

// The options of a loss, which operators take as a list of integers and a list of reals.
struct Loss : Numbers {
  int64_t ignore_index, reduction, chunk_rows;
  double smoothing, z, cap;  // cap is 0 for none

  explicit Loss(Numbers numbers) : Numbers(std::move(numbers)) {
    ignore_index = integers[0], reduction = integers[1], chunk_rows = integers[2];
    smoothing = reals[0], z = reals[1], cap = reals[2];
  }
  Loss(at::IntArrayRef integers, at::ArrayRef<double> reals) : Loss(Numbers{integers.vec(), reals.vec()}) {}
};

// Returns the rows per chunk, a multiple of TILE_ROWS for which the chunks have nearly equal sizes.
int64_t rows_per_chunk(int64_t rows) {
  auto divide_up = [](int64_t a, int64_t b) { return std::max<int64_t>(1, (a + b - 1) / b); };
  return divide_up(divide_up(rows, divide_up(rows, CHUNK_ROWS)), TILE_ROWS) * TILE_ROWS;
}

Library* kernels(at::ScalarType dtype) {
  constexpr at::ScalarType dtypes[] = {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble};
  static Library libraries[] = {{"cross_entropy", "bfloat16"}, {"cross_entropy", "float16"},
                                {"cross_entropy", "float32"}, {"cross_entropy", "float64"}};
  auto results = std::find(std::begin(dtypes), std::end(dtypes), dtype);
  return results == std::end(dtypes) ? nullptr : &libraries[results - dtypes];
}

// Computes the losses of a chunk's rows and, if needed, overwrites the logits with their gradients.
void launch_rows(const Tensor& logits, const Tensor& losses, const Tensor& target, const Tensor& scales,
                 const Loss& loss, bool gradients) {
  kernels(logits.scalar_type())->launch("workbook_cross_entropy_rows", logits.device(),
      {0, 0, 0, 0, logits.size(0), logits.size(1), logits.stride(0), scales.size(0) > 1, gradients, loss.ignore_index,
       bits(loss.smoothing), bits(loss.z), bits(loss.cap), address(logits), address(losses), address(target),
       address(scales)});
}

// Multiplies a tensor in place by a factor in GPU memory; if it is 1, the tensor is not accessed.
void launch_scale(const Tensor& values, const Tensor& factor) {
  kernels(values.scalar_type())->launch("workbook_cross_entropy_scale", values.device(),
                                        {0, 0, 0, 0, values.numel(), address(values), address(factor)});
}

// Calls `f` with the range of all classes; for 16-bit dtypes with the range of full vectors and then with the remaining
// classes, since cuBLAS has only a fifth of its speed on unaligned rows, such as GPT-2's 50,257 classes.
template <class F>
void for_each_vector_range(int64_t classes, const Tensor& like, F f) {
  auto width = VECTOR_BYTES / like.element_size();
  auto whole = like.element_size() == 2 ? classes / width * width : classes;
  if (whole) f(0, whole);
  if (whole < classes) f(whole, classes);
}

// Computes sums += a b, or sums = a b if `first`; the sums may have a wider dtype.
void accumulate_matmul(Tensor sums, const Tensor& a, const Tensor& b, bool first) {
  int beta = first ? 0 : 1;
  auto dtype = sums.scalar_type();
  if (a.scalar_type() == dtype) at::addmm_out(sums, sums, a, b, beta);
  else if (a.is_cuda()) at::addmm_out(sums, sums, a, b, dtype, beta);  // cuBLAS accumulates into the wide dtype
  else at::addmm_out(sums, sums, a.to(dtype), b.to(dtype), beta);
}

// The sum of dW over chunks. The memory of a 16-bit dW first contains the sums of some rows in float32.
class WeightGradientSum {
 public:
  WeightGradientSum(const Tensor& weight, bool chunked, bool in_weight_dtype) {
    auto dtype = weight.scalar_type(), sums = chunked ? accumulation_dtype(dtype) : dtype;
    auto V = weight.size(0), H = weight.size(1);
    dW = empty({V, H}, in_weight_dtype ? dtype : sums);
    row_sums = {dW};
    if (dW.scalar_type() == sums) return;
    auto bytes = static_cast<int64_t>(c10::elementSize(sums));
    auto rows = V * dW.element_size() / bytes / TILE_ROWS * TILE_ROWS;
    auto head = dW.view(-1).view(at::kByte).slice(0, 0, rows * H * bytes).view(sums).view({rows, H});
    row_sums = {head, empty({V - rows, H}, sums)};
  }

  // Adds dlogits^T x.
  void add(const Tensor& dlogits, const Tensor& x, bool first) {
    int64_t begin = 0;
    for (auto& rows : row_sums) {
      for_each_vector_range(rows.size(0), x, [&](int64_t from, int64_t to) {
        accumulate_matmul(rows.slice(0, from, to), dlogits.slice(1, begin + from, begin + to).t(), x, first);
      });
      begin += rows.size(0);
    }
  }

  // Converts the sums in place and returns dW; may be called once.
  Tensor finish() {
    if (row_sums.size() == 1) return dW;
    auto sums = row_sums[0].view(-1), elements = dW.view(-1);
    auto converted = std::min(sums.numel(), FIRST_COPY_ELEMENTS);
    elements.slice(0, 0, converted).copy_(sums.slice(0, 0, converted).clone());
    while (converted < sums.numel()) {
      // Converted elements have half the bytes, so they overwrite only elements that have been read.
      auto end = std::min(2 * converted, sums.numel());
      elements.slice(0, converted, end).copy_(sums.slice(0, converted, end));
      converted = end;
    }
    dW.slice(0, row_sums[0].size(0)).copy_(row_sums[1]);
    return dW;
  }

 private:
  Tensor dW;
  std::vector<Tensor> row_sums;
};

struct Results { Tensor losses, dx, dW, db; };

// Computes losses and gradients for input [rows, H] and target [rows]; scales [rows] or [1] multiply the gradients.
Results compute(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target,
                const Tensor& scales, const Loss& loss, int64_t requested) {
  auto dtype = input.scalar_type();
  auto rows = input.size(0), H = input.size(1), V = weight.size(0);
  auto chunk = std::min(loss.chunk_rows ? loss.chunk_rows : rows_per_chunk(rows), MAX_ROWS);
  Results results{empty({rows}, accumulation_dtype(dtype))};
  if (requested & INPUT) results.dx = empty({rows, H}, dtype);
  if (requested & BIAS) results.db = empty({V}, accumulation_dtype(dtype)).zero_();
  std::optional<WeightGradientSum> sum;
  // With fewer features than rows in a chunk, the logits' memory is large enough for a 16-bit copy of dW.
  if (requested & WEIGHT) sum.emplace(weight, rows > chunk, !(requested & ACCUMULATION_DTYPE) && H > chunk);
  auto width = VECTOR_BYTES / weight.element_size();
  auto buffer = empty({std::min(rows, chunk), (V + width - 1) / width * width}, dtype);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    auto end = std::min(begin + chunk, rows);
    auto x = input.slice(0, begin, end), logits = buffer.slice(0, 0, end - begin).slice(1, 0, V);
    for_each_vector_range(V, input, [&](int64_t from, int64_t to) {
      auto out = logits.slice(1, from, to), W = weight.slice(0, from, to).t();
      if (bias) at::addmm_out(out, bias->slice(0, from, to), x, W);
      else at::mm_out(out, x, W);
    });
    auto chunk_scales = scales.size(0) > 1 ? scales.slice(0, begin, end) : scales;
    launch_rows(logits, results.losses.slice(0, begin, end), target.slice(0, begin, end), chunk_scales, loss,
                requested);
    if (results.dx.defined())
      for_each_vector_range(V, input, [&](int64_t from, int64_t to) {
        accumulate_matmul(results.dx.slice(0, begin, end), logits.slice(1, from, to), weight.slice(0, from, to),
                          from == 0);
      });
    if (sum) sum->add(logits, x, begin == 0);
    if (results.db.defined()) results.db.add_(logits.sum(0, false, accumulation_dtype(dtype)));
  }
  if (sum) results.dW = rows ? sum->finish() : empty(weight.sizes(), dtype).zero_();
  return results;
}

// ---- The leaf operators -------------------------------------------------------------------------------------

// Returns whether the backward pass applies the mean's factor 1 / count. Until then the gradient of weight is float32,
// since in float16 it would underflow before the factor of a gradient scaler is applied.
bool defers_mean_division(const Tensor& input, const Loss& loss) {
  return loss.reduction == Mean && input.scalar_type() == at::kHalf;
}

// Returns the loss; dx, dW and db for an incoming gradient of 1, empty if not requested or computed in the backward
// pass; and the deferred factor of these gradients, if any.
Tensors5 forward(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target,
             at::IntArrayRef integers, at::ArrayRef<double> reals, int64_t requested) {
  c10::DeviceGuard guard(input.device());
  Loss loss(integers, reals);
  auto dtype = input.scalar_type();
  auto rows = target.reshape(-1).contiguous();
  Tensor scales, count, deferred_scale;
  if (loss.reduction == Mean) {
    count = rows.ne(loss.ignore_index).sum().to(accumulation_dtype(dtype));
    scales = count.reciprocal().reshape(1);
    if (defers_mean_division(input, loss)) deferred_scale = scales.reshape({}), scales = Tensor();
  }
  if (!scales.defined()) scales = empty({1}, accumulation_dtype(dtype)).fill_(1);
  auto x = input.reshape({rows.numel(), input.size(-1)});
  auto flags = requested | (deferred_scale.defined() ? ACCUMULATION_DTYPE : 0);
  auto results = compute(x, weight, bias, rows, scales, loss, loss.reduction == None || !requested ? 0 : flags);
  auto dtype_until_scaled = deferred_scale.defined() ? accumulation_dtype(dtype) : dtype;
  if (results.dx.defined()) results.dx = results.dx.view(input.sizes());
  if (results.dW.defined()) results.dW = results.dW.to(dtype_until_scaled);
  if (results.db.defined()) results.db = results.db.to(dtype_until_scaled);
  auto total = loss.reduction == None ? results.losses.view(target.sizes()) : results.losses.sum();
  return {loss.reduction == Mean ? total / count : total, or_empty(results.dx, dtype), or_empty(results.dW, dtype),
          or_empty(results.db, dtype), or_empty(deferred_scale, accumulation_dtype(dtype))};
}

Tensors5 forward_meta(const Tensor& input, const Tensor& weight, const Optional&, const Tensor& target,
                  at::IntArrayRef integers, at::ArrayRef<double> reals, int64_t requested) {
  Loss loss(integers, reals);
  auto options = input.options(), sums = options.dtype(accumulation_dtype(input.scalar_type()));
  bool deferred_scale = defers_mean_division(input, loss), rows = loss.reduction == None;
  if (rows) requested = 0;
  auto until_scaled = deferred_scale ? sums : options;
  return {meta_result(true, rows ? target.sym_sizes() : c10::SymIntArrayRef{}, sums),
          meta_result(requested & INPUT, input.sym_sizes(), options),
          meta_result(requested & WEIGHT, weight.sym_sizes(), requested & WEIGHT ? until_scaled : options),
          meta_result(requested & BIAS, {weight.sym_size(0)}, requested & BIAS ? until_scaled : options),
          meta_result(deferred_scale, {}, sums)};
}

// Returns dx, dW and db from the gradients of the rows' losses; gradients that are not requested are empty.
Tensors3 backward(const Tensor& grad, const Tensor& input, const Tensor& weight, const Optional& bias,
               const Tensor& target, at::IntArrayRef integers, at::ArrayRef<double> reals, int64_t requested) {
  c10::DeviceGuard guard(input.device());
  auto dtype = input.scalar_type();
  auto rows = target.reshape(-1).contiguous(), scales = grad.reshape(-1).contiguous();
  auto x = input.reshape({rows.numel(), input.size(-1)});
  auto results = compute(x, weight, bias, rows, scales, Loss(integers, reals), requested);
  for (auto* tensor : {&results.dW, &results.db}) if (tensor->defined()) *tensor = tensor->to(dtype);
  if (results.dx.defined()) results.dx = results.dx.view(input.sizes());
  return {or_empty(results.dx, dtype), or_empty(results.dW, dtype), or_empty(results.db, dtype)};
}

Tensors3 backward_meta(const Tensor&, const Tensor& input, const Tensor& weight, const Optional&, const Tensor&,
                    at::IntArrayRef, at::ArrayRef<double>, int64_t requested) {
  auto options = input.options();
  return {meta_result(requested & INPUT, input.sym_sizes(), options),
          meta_result(requested & WEIGHT, weight.sym_sizes(), options),
          meta_result(requested & BIAS, {weight.sym_size(0)}, options)};
}

// ---- The operator -------------------------------------------------------------------------------------------

// Calls PyTorch's own operations, which have all derivatives; registered by harness/nn/cross_entropy.py.
Tensor call_torch(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target,
                  const Loss& l) {
  using Signature = Tensor(const Tensor&, const Tensor&, const Optional&, const Tensor&, int64_t, double, int64_t,
                           double, double, int64_t);
  static auto op = find_operator<Signature>("mojo_workbook::linear_cross_entropy_by_torch");
  return op.call(input, weight, bias, target, l.ignore_index, l.smoothing, l.reduction, l.z, l.cap, l.chunk_rows);
}

bool kernels_support(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target) {
  auto match = [&](const Tensor& t) { return t.scalar_type() == input.scalar_type() && t.device() == input.device(); };
  if (input.device().type() != DEVICE || input.dim() < 1 || weight.dim() != 2 || !match(weight)) return false;
  if (target.scalar_type() != at::kLong || target.device() != input.device()) return false;
  auto V = weight.sym_size(0);
  if (weight.sym_size(1) != input.sym_size(-1) || V < 1 || V > MAX_CLASSES) return false;
  if (target.sym_sizes() != input.sym_sizes().slice(0, input.dim() - 1)) return false;
  if (bias && !(match(*bias) && bias->dim() == 1 && bias->sym_size(0) == V)) return false;
  if (in_transform() || has_tangent(input, weight, bias)) return false;
  auto* library = kernels(input.scalar_type());
  return library && library->available(input.device());
}

// Returns whether a kernel may write to a saved tensor: not a tensor subclass, and not traced by a mode.
bool is_plain(const Tensor& t) {
  return !t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize})) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() && t.device().type() == DEVICE && !t.is_meta();
}

// Saves input, weight, bias, target; also dx, dW, db and their factor if the forward pass has computed them.
struct Operator {
  static constexpr auto NAME = "LinearCrossEntropyBackward";
  static constexpr size_t INPUTS = 3, SAVED = 8;
  static constexpr int64_t OUTPUTS = 0;

  static variable_list gradients(const variable_list& grads, const variable_list& saved, const Numbers& numbers,
                                 int64_t needed) {
    auto& grad = grads[0];
    if (numbers.integers[1] == None) {
      static auto op = find_operator<decltype(backward)>("mojo_workbook::linear_cross_entropy_backward");
      auto [dx, dW, db] = op.call(grad, saved[0], saved[1], optional(saved[2]), saved[3], numbers.integers,
                                  numbers.reals, needed);
      return {dx, dW, db};
    }
    variable_list results(saved.begin() + 4, saved.begin() + 7);
    auto dtype = saved[0].scalar_type();
    auto factor = saved[7].numel() ? grad * saved[7] : grad.resolve_neg();
    auto in_place = !torch::autograd::get_current_graph_task_keep_graph() && is_plain(grad);
    auto can_scale_in_place = [&](const Tensor& t) {  // a saved-tensor hook may have moved it
      return t.scalar_type() == dtype && is_plain(t) && t.is_contiguous() && address(t) % VECTOR_BYTES == 0;
    };
    for (int i = 0; i < 3; ++i) {
      if (!(needed >> i & 1)) continue;
      if (in_place && can_scale_in_place(results[i])) launch_scale(results[i], factor);
      else results[i] = (results[i].to(factor.scalar_type()) * factor).to(dtype);
    }
    return results;
  }

  static std::pair<variable_list, variable_list> recompute_with_torch(const variable_list& saved,
                                                                      const Numbers& numbers, int64_t) {
    variable_list inputs(saved.begin(), saved.begin() + 3);
    return {inputs, {call_torch(saved[0], saved[1], optional(saved[2]), saved[3], Loss(numbers))}};
  }
};

Tensor linear_cross_entropy(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target,
                            int64_t ignore_index, double label_smoothing, int64_t reduction, double z_loss,
                            double softcap, int64_t chunk_rows) {
  Loss loss(Numbers{{ignore_index, reduction, chunk_rows}, {label_smoothing, z_loss, softcap}});
  if (!kernels_support(input, weight, bias, target)) return call_torch(input, weight, bias, target, loss);
  bool requires_grad = torch::autograd::compute_requires_grad(input, weight, bias);
  auto bit_if_needed = [&](const Optional& t, int64_t bit) {
    return requires_grad && t && t->requires_grad() ? bit : 0;
  };
  static auto op = find_operator<decltype(forward)>("mojo_workbook::linear_cross_entropy_forward");
  auto requested = bit_if_needed(input, INPUT) | bit_if_needed(weight, WEIGHT) | bit_if_needed(bias, BIAS);
  auto [value, dx, dW, db, deferred_scale] =
      call_below_autograd(op, input, weight, bias, target, loss.integers, loss.reals, requested);
  if (!requires_grad) return value;
  std::vector<Optional> saved{input, weight, bias, target, {}, {}, {}, {}};
  if (reduction != None) saved[4] = dx, saved[5] = dW, saved[6] = db, saved[7] = deferred_scale;
  record<Operator>({value}, saved, loss, input, weight, bias);
  return value;
}
}  // namespace

#define TENSORS "Tensor input, Tensor weight, Tensor? bias, Tensor target"
#define OPTIONS "int[] integers, float[] reals, int requested"
TORCH_LIBRARY_FRAGMENT(mojo_workbook, m) {
  at::Tag tag = at::Tag::pt2_compliant_tag;
  m.def("linear_cross_entropy(" TENSORS ", int ignore_index=-100, float label_smoothing=0.0, int reduction=1,"
        " float z_loss=0.0, float softcap=0.0, int chunk_rows=0) -> Tensor", linear_cross_entropy, {tag});
  m.def("linear_cross_entropy_by_torch(" TENSORS ", int ignore_index, float label_smoothing, int reduction,"
        " float z_loss, float softcap, int chunk_rows) -> Tensor", {tag});  // a default would not be passed to Python
  m.def("linear_cross_entropy_forward(" TENSORS ", " OPTIONS ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)", {tag});
  m.def("linear_cross_entropy_backward(Tensor grad, " TENSORS ", " OPTIONS ") -> (Tensor, Tensor, Tensor)", {tag});
  m.def("linear_cross_entropy_chunk_rows(int rows) -> int", rows_per_chunk);
}
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_AUTOCAST, m) {
  m.impl("linear_cross_entropy", AutocastWrapper<linear_cross_entropy>::call);
}
WORKBOOK_LEAF("linear_cross_entropy_forward", forward, forward_meta)
WORKBOOK_LEAF("linear_cross_entropy_backward", backward, backward_meta)
TORCH_LIBRARY_IMPL(mojo_workbook, FuncTorchBatchedDecomposition, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy);
}
