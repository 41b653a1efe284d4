// A linear layer with cross-entropy that never stores all logits: PyTorch multiplies, chunk of rows by chunk, and one launch makes
// losses and gradient of a chunk's rows, where the logits were.
//
// Where the loss is one number, its gradients are a multiple of ones that are known in the forward pass already, which makes them.
// Where every row has a loss of its own, the backward pass computes the logits again.
#include "host.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

namespace {
using namespace workbook;
using at::Reduction::Mean, at::Reduction::None;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t INPUT = 1, WEIGHT = 2, BIAS = 4;  // gradients that are wanted
constexpr int64_t STAYS_WIDE = 8;  // the gradient of weight stays in the dtype of sums, if it was added up over chunks
constexpr int64_t VECTOR_BYTES = 16;  // the kernels load so many at a time
constexpr int64_t MOST_CLASSES = (int64_t{1} << 31) - 4096;  // the kernels count a row's classes in 32 bits
constexpr int64_t MOST_ROWS = (int64_t{1} << 31) - 1;  // of a chunk: a block each
constexpr int64_t CHUNK = 2048;  // fewer rows would add to the sum of dW so often that it takes as long as products
constexpr int64_t STEP = 128;  // a product's tiles are as high
constexpr int64_t NARROWED_FIRST = int64_t{1} << 18;  // elements of a sum that are narrowed by way of a copy

// ---- What is computed ----------------------------------------------------------------------------------------------

// How rows become a loss. The operators take it as lists of integers and of numbers.
struct Loss {
  int64_t ignored, reduction, chunk_rows;
  double smoothing, z, cap;  // a cap of 0 is none

  Loss(at::IntArrayRef integers, at::ArrayRef<double> numbers)
      : ignored(integers[0]), reduction(integers[1]), chunk_rows(integers[2]),
        smoothing(numbers[0]), z(numbers[1]), cap(numbers[2]) {}
  std::vector<int64_t> integers() const { return {ignored, reduction, chunk_rows}; }
  std::vector<double> numbers() const { return {smoothing, z, cap}; }
};

at::ScalarType wide(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

// Returns how many rows a chunk has: chunks are as equal as STEP lets them be.
int64_t rows_of_a_chunk(int64_t rows) {
  auto over = [](int64_t a, int64_t b) { return std::max<int64_t>(1, (a + b - 1) / b); };
  return over(over(rows, over(rows, CHUNK)), STEP) * STEP;
}

Library* kernels(at::ScalarType dtype) {
  static Library bfloat16("cross_entropy", "bfloat16"), float16("cross_entropy", "float16");
  static Library float32("cross_entropy", "float32"), float64("cross_entropy", "float64");
  switch (dtype) {
    case at::kBFloat16: return &bfloat16;
    case at::kHalf: return &float16;
    case at::kFloat: return &float32;
    case at::kDouble: return &float64;
    default: return nullptr;
  }
}

// Makes the losses of a chunk's rows and, where they are wanted, the gradients in the place of the logits.
void launch_rows(const Tensor& logits, const Tensor& losses, const Tensor& target, const Tensor& scales, const Loss& loss,
                 bool gradients) {
  std::array<int64_t, 17> words{
      0, 0, 0, 0, logits.size(0), logits.size(1), logits.stride(0), scales.size(0) > 1, gradients, loss.ignored,
      bits(loss.smoothing), bits(loss.z), bits(loss.cap), address(logits), address(losses), address(target), address(scales)};
  kernels(logits.scalar_type())->launch("workbook_cross_entropy_rows", words, logits.device());
}

// Multiplies a tensor in place by one number of the GPU's; where that is 1, nothing is read or written.
void launch_scale(const Tensor& values, const Tensor& factor) {
  std::array<int64_t, 7> words{0, 0, 0, 0, values.numel(), address(values), address(factor)};
  kernels(values.scalar_type())->launch("workbook_cross_entropy_scale", words, values.device());
}

// Calls `some` with the classes in one piece, or with those that are whole vectors apart from the few that are left: the library
// falls to a fifth of its speed where a matrix has rows that are no whole vectors, as GPT-2's 50,257 classes.
template <class F>
void in_whole_vectors(int64_t classes, const Tensor& like, F some) {
  auto width = VECTOR_BYTES / like.element_size();
  auto whole = like.element_size() == 2 ? classes / width * width : classes;
  if (whole) some(0, whole);
  if (whole < classes) some(whole, classes);
}

// sums += a b, where the sums may be wider than the factors; the `first` is written.
void add_product(Tensor sums, const Tensor& a, const Tensor& b, bool first) {
  int beta = first ? 0 : 1;
  auto dtype = sums.scalar_type();
  if (a.scalar_type() == dtype) at::addmm_out(sums, sums, a, b, beta);
  else if (a.is_cuda()) at::addmm_out(sums, sums, a, b, dtype, beta);  // the library adds to the wide sums itself
  else at::addmm_out(sums, sums, a.to(dtype), b.to(dtype), beta);
}

// dW while the products of chunks are added up. A narrow gradient needs no room beside its wide sum: the sum's first rows lie in the
// gradient's own memory, and are narrowed there in the end.
class WeightSum {
 public:
  WeightSum(const Tensor& weight, bool chunked, bool narrow) {
    auto dtype = weight.scalar_type(), sums = chunked ? wide(dtype) : dtype;
    auto V = weight.size(0), H = weight.size(1);
    dW = empty({V, H}, narrow ? dtype : sums);
    pieces = {dW};
    if (dW.scalar_type() == sums) return;
    auto bytes = static_cast<int64_t>(c10::elementSize(sums));
    auto rows = V * dW.element_size() / bytes / STEP * STEP;
    auto own = dW.view(-1).view(at::kByte).slice(0, 0, rows * H * bytes).view(sums).view({rows, H});
    pieces = {own, empty({V - rows, H}, sums)};
  }

  // Adds dlogits^T x; the `first` is written.
  void add(const Tensor& dlogits, const Tensor& x, bool first) {
    int64_t begin = 0;
    for (auto& piece : pieces) {
      in_whole_vectors(piece.size(0), x, [&](int64_t from, int64_t to) {
        add_product(piece.slice(0, from, to), dlogits.slice(1, begin + from, begin + to).t(), x, first);
      });
      begin += piece.size(0);
    }
  }

  // Returns dW; to be asked for once.
  Tensor gradient() {
    if (pieces.size() == 1) return dW;
    auto values = pieces[0].view(-1), narrowed = dW.view(-1);
    auto done = std::min(values.numel(), NARROWED_FIRST);
    narrowed.slice(0, 0, done).copy_(values.slice(0, 0, done).clone());
    while (done < values.numel()) {
      // These are written where no value lies that is still to be read: they take half the bytes.
      auto end = std::min(2 * done, values.numel());
      narrowed.slice(0, done, end).copy_(values.slice(0, done, end));
      done = end;
    }
    dW.slice(0, pieces[0].size(0)).copy_(pieces[1]);
    return dW;
  }

 private:
  Tensor dW;
  std::vector<Tensor> pieces;
};

struct Made {
  Tensor losses, dx, dW, db;
};

// Losses and gradients of input [rows, H] and target [rows]; a row's gradient is multiplied by its scale, [rows] or one for all.
Made compute(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target, const Tensor& scales,
             const Loss& loss, int64_t wanted) {
  auto dtype = input.scalar_type();
  auto rows = input.size(0), H = input.size(1), V = weight.size(0);
  auto chunk = std::min(loss.chunk_rows ? loss.chunk_rows : rows_of_a_chunk(rows), MOST_ROWS);
  Made made{empty({rows}, wide(dtype))};
  if (wanted & INPUT) made.dx = empty({rows, H}, dtype);
  if (wanted & BIAS) made.db = empty({V}, wide(dtype)).zero_();
  std::optional<WeightSum> sum;
  // With fewer features than rows in a chunk, dW has room where the logits were.
  if (wanted & WEIGHT) sum.emplace(weight, rows > chunk, !(wanted & STAYS_WIDE) && H > chunk);
  auto width = VECTOR_BYTES / weight.element_size();
  auto buffer = empty({std::min(rows, chunk), (V + width - 1) / width * width}, dtype);
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    auto end = std::min(begin + chunk, rows);
    auto x = input.slice(0, begin, end), logits = buffer.slice(0, 0, end - begin).slice(1, 0, V);
    in_whole_vectors(V, input, [&](int64_t from, int64_t to) {
      auto out = logits.slice(1, from, to), W = weight.slice(0, from, to).t();
      if (bias) at::addmm_out(out, bias->slice(0, from, to), x, W);
      else at::mm_out(out, x, W);
    });
    auto own_scales = scales.size(0) > 1 ? scales.slice(0, begin, end) : scales;
    launch_rows(logits, made.losses.slice(0, begin, end), target.slice(0, begin, end), own_scales, loss, wanted);
    if (made.dx.defined()) {
      in_whole_vectors(V, input, [&](int64_t from, int64_t to) {
        add_product(made.dx.slice(0, begin, end), logits.slice(1, from, to), weight.slice(0, from, to), from == 0);
      });
    }
    if (sum) sum->add(logits, x, begin == 0);
    if (made.db.defined()) made.db.add_(logits.sum(0, false, wide(dtype)));
  }
  if (sum) made.dW = rows ? sum->gradient() : empty(weight.sizes(), dtype).zero_();
  return made;
}

// ---- The two leaf operators ----------------------------------------------------------------------------------------

// Whether the gradients of the mean are multiplied by 1 / count last, and the gradient of weight waits in float32: in float16 a
// scaler's factor keeps them from being 0.
bool divides_late(const Tensor& input, const Loss& loss) {
  return loss.reduction == Mean && input.scalar_type() == at::kHalf;
}

Three filled(const Tensor& like, const Tensor& dx, const Tensor& dW, const Tensor& db) {
  auto or_none = [&](const Tensor& t) { return t.defined() ? t : empty({0}, like.scalar_type()); };
  return {or_none(dx), or_none(dW), or_none(db)};
}

// Returns the loss; dx, dW and db for a loss whose gradient is 1, empty where they are not wanted or made by the backward pass; and
// what they are still to be multiplied by, if anything.
Five forward(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target, at::IntArrayRef integers,
             at::ArrayRef<double> numbers, int64_t wanted) {
  c10::DeviceGuard guard(input.device());
  Loss loss(integers, numbers);
  auto dtype = input.scalar_type();
  auto rows = target.reshape(-1).contiguous();
  Tensor scales, count, late;
  if (loss.reduction == Mean) {
    count = rows.ne(loss.ignored).sum().to(wide(dtype));
    scales = count.reciprocal().reshape(1);
    if (divides_late(input, loss)) late = scales.reshape({}), scales = Tensor();
  }
  if (!scales.defined()) scales = empty({1}, wide(dtype)).fill_(1);
  auto flat = input.reshape({rows.numel(), input.size(-1)});
  auto flags = wanted | (late.defined() ? STAYS_WIDE : 0);
  auto made = compute(flat, weight, bias, rows, scales, loss, loss.reduction == None || !wanted ? 0 : flags);
  auto waits = late.defined() ? wide(dtype) : dtype;
  if (made.dx.defined()) made.dx = made.dx.view(input.sizes());
  if (made.dW.defined() && !(wanted & STAYS_WIDE)) made.dW = made.dW.to(waits);
  if (made.db.defined()) made.db = made.db.to(waits);
  auto [dx, dW, db] = filled(input, made.dx, made.dW, made.db);
  if (!late.defined()) late = empty({0}, wide(dtype));
  if (loss.reduction == None) return {made.losses.view(target.sizes()), dx, dW, db, late};
  auto total = made.losses.sum();
  return {loss.reduction == Mean ? total / count : total, dx, dW, db, late};
}

Five forward_meta(const Tensor& input, const Tensor& weight, const Optional&, const Tensor& target, at::IntArrayRef integers,
                  at::ArrayRef<double> numbers, int64_t wanted) {
  Loss loss(integers, numbers);
  auto narrow = input.options(), sums = narrow.dtype(wide(input.scalar_type()));
  auto waits = divides_late(input, loss) ? sums : narrow;
  auto bits = loss.reduction == None ? 0 : wanted;
  auto made = [&](bool there, c10::SymIntArrayRef sizes, const at::TensorOptions& options) {
    return there ? at::empty_symint(sizes, options) : at::empty_symint({0}, narrow);
  };
  auto late = at::empty_symint(divides_late(input, loss) ? c10::SymDimVector{} : c10::SymDimVector{0}, sums);
  auto value = at::empty_symint(loss.reduction == None ? target.sym_sizes() : c10::SymIntArrayRef{}, sums);
  return {value, made(bits & INPUT, input.sym_sizes(), narrow), made(bits & WEIGHT, weight.sym_sizes(), waits),
          made(bits & BIAS, {weight.sym_size(0)}, waits), late};
}

// Returns dx, dW and db from the gradients of the rows' losses; those that are not wanted are empty.
Three backward(const Tensor& grad, const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target,
               at::IntArrayRef integers, at::ArrayRef<double> numbers, int64_t wanted) {
  c10::DeviceGuard guard(input.device());
  Loss loss(integers, numbers);
  auto rows = target.reshape(-1).contiguous();
  auto scales = grad.reshape(-1).contiguous();
  auto made = compute(input.reshape({rows.numel(), input.size(-1)}), weight, bias, rows, scales, loss, wanted);
  for (auto* each : {&made.dW, &made.db}) if (each->defined()) *each = each->to(input.scalar_type());
  if (made.dx.defined()) made.dx = made.dx.view(input.sizes());
  return filled(input, made.dx, made.dW, made.db);
}

Three backward_meta(const Tensor&, const Tensor& input, const Tensor& weight, const Optional&, const Tensor&, at::IntArrayRef,
                    at::ArrayRef<double>, int64_t wanted) {
  auto made = [&](bool there, c10::SymIntArrayRef sizes) {
    return there ? at::empty_symint(sizes, input.options()) : at::empty_symint({0}, input.options());
  };
  return {made(wanted & INPUT, input.sym_sizes()), made(wanted & WEIGHT, weight.sym_sizes()),
          made(wanted & BIAS, {weight.sym_size(0)})};
}

template <class F>
auto leaf(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}
auto& forward_op() {
  static auto op = leaf<decltype(forward)>("mojo_workbook::linear_cross_entropy_forward");
  return op;
}
auto& backward_op() {
  static auto op = leaf<decltype(backward)>("mojo_workbook::linear_cross_entropy_backward");
  return op;
}

// ---- The operator that models call ---------------------------------------------------------------------------------

// PyTorch's own operations, with all their derivatives.
Tensor with_torch(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target, const Loss& loss) {
  auto logits = at::linear(input, weight, bias);
  logits = logits.to(wide(logits.scalar_type()));
  if (loss.cap) logits = (logits / loss.cap).tanh() * loss.cap;
  logits = logits.reshape_symint({target.sym_numel(), logits.sym_size(-1)});
  auto rows = target.reshape(-1);
  auto value = at::cross_entropy_loss_symint(logits, rows, {}, loss.reduction, loss.ignored, loss.smoothing);
  if (loss.z) {
    auto counted = rows.ne(loss.ignored);
    auto squares = at::where(counted, logits.logsumexp(1).square(), 0) * loss.z;
    value = value + (loss.reduction == None   ? squares
                     : loss.reduction == Mean ? squares.sum() / counted.sum()
                                              : squares.sum());
  }
  return loss.reduction == None ? value.reshape_symint(target.sym_sizes()) : value;
}

bool suits(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target) {
  auto fits = [&](const Tensor& t) { return t.scalar_type() == input.scalar_type() && t.device() == input.device(); };
  if (input.device().type() != DEVICE || input.dim() < 1 || weight.dim() != 2 || !fits(weight)) return false;
  if (target.scalar_type() != at::kLong || target.device() != input.device()) return false;
  if (weight.sym_size(1) != input.sym_size(-1) || weight.sym_size(0) < 1 || weight.sym_size(0) > MOST_CLASSES) return false;
  if (target.sym_sizes() != input.sym_sizes().slice(0, input.dim() - 1)) return false;
  if (bias && !(fits(*bias) && bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0))) return false;
  if (in_transform() || has_tangent(input, weight, bias)) return false;
  auto* library = kernels(input.scalar_type());
  return library && library->available(input.device());
}

// Whether the kernels may write into a tensor that only this file knows: nobody watches or traces what happens to it.
bool is_plain(const Tensor& t) {
  return !t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::Functionalize})) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() && t.device().type() == DEVICE && !t.is_meta();
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  using Context = torch::autograd::AutogradContext;

  static Tensor forward(Context* ctx, const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target,
                        std::vector<int64_t> integers, std::vector<double> numbers, int64_t wanted) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [loss, dx, dW, db, late] = forward_op().call(input, weight, bias, target, integers, numbers, wanted);
    variable_list saved{input, weight, bias.value_or(Tensor()), target};
    if (integers[1] != None) saved.insert(saved.end(), {dx, dW, db, late});
    ctx->save_for_backward(saved);
    ctx->saved_data["integers"] = integers, ctx->saved_data["numbers"] = numbers, ctx->saved_data["wanted"] = wanted;
    return loss;
  }

  static variable_list backward(Context* ctx, variable_list grads) {
    variable_list found(7);  // an argument of forward each
    if (!grads[0].defined()) return found;
    auto saved = ctx->get_saved_variables();
    auto integers = ctx->saved_data["integers"].toIntVector();
    auto numbers = ctx->saved_data["numbers"].toDoubleVector();
    auto wanted = ctx->saved_data["wanted"].toInt();
    if (c10::GradMode::is_enabled()) {
      again(grads[0], saved, Loss(integers, numbers), wanted, found);
      return found;
    }
    at::AutoDispatchBelowADInplaceOrView below;
    auto made = gradients(grads[0], saved, integers, numbers, wanted);
    for (int i = 0; i < 3; ++i) if (wanted & (1 << i)) found[i] = made[i];
    return found;
  }

  // dx, dW and db. What the forward pass has made is written over where the graph is not kept.
  static variable_list gradients(const Tensor& grad, const variable_list& saved, at::IntArrayRef integers,
                                 at::ArrayRef<double> numbers, int64_t wanted) {
    if (integers[1] == None) {
      auto [dx, dW, db] =
          backward_op().call(grad, saved[0], saved[1], optional(saved[2]), saved[3], integers, numbers, wanted);
      return {dx, dW, db};
    }
    variable_list made(saved.begin() + 4, saved.end());
    auto dtype = saved[0].scalar_type();
    auto factor = made[3].numel() ? grad * made[3] : grad.resolve_neg();
    auto in_place = !torch::autograd::get_current_graph_task_keep_graph() && is_plain(grad);
    auto suits_kernel = [&](const Tensor& t) {  // a hook may have moved it
      return t.scalar_type() == dtype && is_plain(t) && t.is_contiguous() && address(t) % VECTOR_BYTES == 0;
    };
    for (int i = 0; i < 3; ++i) {
      if (!(wanted & (1 << i))) continue;
      if (in_place && suits_kernel(made[i])) launch_scale(made[i], factor);
      else made[i] = (made[i].to(factor.scalar_type()) * factor).to(dtype);
    }
    return made;
  }

  // The gradients as a graph of their own, through PyTorch's derivatives.
  static void again(const Tensor& grad, const variable_list& saved, const Loss& loss, int64_t wanted, variable_list& found) {
    auto value = with_torch(saved[0], saved[1], optional(saved[2]), saved[3], loss);
    variable_list asked;
    for (int i = 0; i < 3; ++i) if (wanted & (1 << i)) asked.push_back(saved[i]);
    auto made = torch::autograd::grad({value}, asked, {grad}, true, true, true);
    for (int i = 0, next = 0; i < 3; ++i) if (wanted & (1 << i)) found[i] = made[next++];
  }
};

Tensor linear_cross_entropy(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target,
                            int64_t ignore_index, double label_smoothing, int64_t reduction, double z_loss, double softcap,
                            int64_t chunk_rows) {
  std::vector<int64_t> integers{ignore_index, reduction, chunk_rows};
  std::vector<double> numbers{label_smoothing, z_loss, softcap};
  if (!suits(input, weight, bias, target)) return with_torch(input, weight, bias, target, Loss(integers, numbers));
  if (!torch::autograd::compute_requires_grad(input, weight, bias)) {
    at::AutoDispatchBelowADInplaceOrView below;
    return std::get<0>(forward_op().call(input, weight, bias, target, integers, numbers, 0));
  }
  int64_t wanted = (input.requires_grad() ? INPUT : 0) | (weight.requires_grad() ? WEIGHT : 0) |
                   (bias && bias->requires_grad() ? BIAS : 0);
  return LinearCrossEntropy::apply(input, weight, bias, target, integers, numbers, wanted);
}

Tensor in_autocast(const Tensor& input, const Tensor& weight, const Optional& bias, const Tensor& target, int64_t ignore_index,
                   double label_smoothing, int64_t reduction, double z_loss, double softcap, int64_t chunk_rows) {
  c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKeySet(c10::DispatchKey::WORKBOOK_AUTOCAST));
  return linear_cross_entropy(in_autocast_dtype(input), in_autocast_dtype(weight),
                              bias ? Optional(in_autocast_dtype(*bias)) : bias, target, ignore_index, label_smoothing, reduction,
                              z_loss, softcap, chunk_rows);
}
}  // namespace

#define TENSORS "Tensor input, Tensor weight, Tensor? bias, Tensor target"
#define OPTIONS "int[] integers, float[] numbers, int wanted"

TORCH_LIBRARY_FRAGMENT(mojo_workbook, m) {
  m.def("linear_cross_entropy(" TENSORS ", int ignore_index=-100, float label_smoothing=0.0, int reduction=1, float z_loss=0.0, "
        "float softcap=0.0, int chunk_rows=0) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("linear_cross_entropy_forward(" TENSORS ", " OPTIONS ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
  m.def("linear_cross_entropy_backward(Tensor grad, " TENSORS ", " OPTIONS ") -> (Tensor, Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
  m.def("linear_cross_entropy_chunk_rows(int rows) -> int", rows_of_a_chunk);
}
TORCH_LIBRARY_IMPL(mojo_workbook, CompositeImplicitAutograd, m) { m.impl("linear_cross_entropy", linear_cross_entropy); }
TORCH_LIBRARY_IMPL(mojo_workbook, FuncTorchBatchedDecomposition, m) { m.impl("linear_cross_entropy", linear_cross_entropy); }
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_AUTOCAST, m) { m.impl("linear_cross_entropy", in_autocast); }
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_DEVICE, m) {
  m.impl("linear_cross_entropy_forward", forward);
  m.impl("linear_cross_entropy_backward", backward);
}
TORCH_LIBRARY_IMPL(mojo_workbook, Meta, m) {
  m.impl("linear_cross_entropy_forward", forward_meta);
  m.impl("linear_cross_entropy_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(mojo_workbook, Autograd, m) {
  for (auto* name : {"linear_cross_entropy_forward", "linear_cross_entropy_backward"}) {
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
  }
}
