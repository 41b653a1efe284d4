// LayerNorm + Linear: y = linear(layer_norm(x)), with Mojo kernels for the LayerNorm, and either Mojo's or PyTorch's
// matmuls, as selected by harness/nn/kernels/layernorm_linear/plan.mojo.
#include "host.h"

using namespace workbook;

namespace {
// Bits of the requested gradients: dW, db, dx, and dgamma with dbeta.
constexpr int64_t WEIGHT = 1, BIAS = 2, INPUT = 4, NORM = 8;
// Further bits for the Mojo library:
constexpr int64_t DLN_COMPUTED = 16, LN_OUT_REQUESTED = 32;  // dln is an argument; ln_out is returned for the matmul dW
constexpr int64_t FEW_ROWS = 64;  // both, and one launch computes everything else; dx must not share memory with dln
constexpr int64_t TRANSPOSED = 128, FEW_PARTIALS = 256;  // ln_out is stored transposed; use few partial sums
// Bits of the options: use the least memory; use the plan in the bits from PLAN_SHIFT on, for measurements and tests.
// Bit 0 (float32 as split float16) is read only by the plan.
constexpr int64_t LEAST_MEMORY = 2, FORCED_PLAN = 4, PLAN_SHIFT = 3;
enum Gemm : int64_t { MOJO, TORCH, PADDED };

constexpr int64_t MAX_ROWS = (int64_t(1) << 31) - 1, MAX_WIDTH = 1 << 20;  // limits of the kernels: rows and O; H
constexpr int64_t MAX_SMALL_ROWS = 64;  // with more rows, summing columns row by row takes longer than a launch
constexpr int64_t MIN_BIAS_STREAM_ELEMENTS = 1 << 19;  // minimum elements of dY for a separate stream for db
constexpr int64_t ALIGNED_ELEMENTS = 8;  // 16-bit elements in a 16-byte vector
// Minimum multiply-adds, and elements of dW, from which dW in TF32 reads a transposed ln_out: Hopper's tensor cores
// require operands that are contiguous along the inner dimension, and cuBLAS first transposes others.
constexpr int64_t MIN_TRANSPOSED_FMAS = int64_t(1) << 33, MIN_TRANSPOSED_ELEMENTS = 1 << 21;

Library bfloat16_library("layernorm_linear", "bfloat16"), float16_library("layernorm_linear", "float16"),
    float32_library("layernorm_linear", "float32"), bfloat16_mixed_library("layernorm_linear", "bfloat16_mixed"),
    float16_mixed_library("layernorm_linear", "float16_mixed");

// Returns the library for the dtype of x, gamma and beta and the dtype of the matmul; null if there is none.
Library* library_for(at::ScalarType x, at::ScalarType matmul) {
  if (matmul == at::kFloat) return x == matmul ? &float32_library : nullptr;
  if (matmul != at::kBFloat16 && matmul != at::kHalf) return nullptr;
  if (x == matmul) return matmul == at::kHalf ? &float16_library : &bfloat16_library;
  if (x == at::kFloat) return matmul == at::kHalf ? &float16_mixed_library : &bfloat16_mixed_library;
  return nullptr;
}

struct Inputs {
  const Tensor& x;
  const Optional &gamma, &beta;
  const Tensor& W;
  const Optional& bias;
};

// Returns whether a matrix is the transpose of a contiguous one; then it need not be copied.
bool is_transposed(const Tensor& W) { return !W.is_contiguous() && W.dim() == 2 && W.t().is_contiguous(); }

// Returns whether the kernels support these shapes and dtypes.
bool kernels_support(const Inputs& in) {
  auto& [x, gamma, beta, W, bias] = in;
  auto strided = [&](const Tensor& t) { return t.device() == x.device() && t.layout() == at::kStrided; };
  if (x.dim() < 1 || W.dim() != 2 || !strided(x) || !strided(W)) return false;
  if (!library_for(x.scalar_type(), W.scalar_type())) return false;
  auto H = W.sym_size(1), O = W.sym_size(0);
  auto vector = [&](const Optional& p, const c10::SymInt& n, at::ScalarType type) {
    return !p || !p->defined() || (p->dim() == 1 && strided(*p) && p->sym_size(0) == n && p->scalar_type() == type);
  };
  return x.sym_sizes().back() == H && H >= 1 && H <= MAX_WIDTH && O >= 1 && O <= MAX_ROWS - ALIGNED_ELEMENTS &&
         x.sym_numel() >= 1 && x.sym_numel() / H <= MAX_ROWS && vector(gamma, H, x.scalar_type()) &&
         vector(beta, H, x.scalar_type()) && vector(bias, O, W.scalar_type());
}

// ---- One call -----------------------------------------------------------------------------------------------

// The sizes, dtypes and selected matmuls of a call, for both passes.
struct Call {
  int64_t rows, H, O, options;
  at::ScalarType x_type, type;  // dtype of x, gamma and beta; dtype of all other tensors
  c10::Device device;
  bool transposed;  // whether W, and therefore dW, is stored as [H, O], as in GPT-2
  Library* library;
  int64_t bits;  // the selected matmuls, as encoded by plan.mojo
  Gemm output, dln, dW;
  bool two_streams;  // whether the backward pass computes dW on a separate stream
  int64_t dW_elements;  // elements of dW's buffer if it first contains a copy of W

  Call(const Inputs& in, int64_t options, std::optional<bool> captured = {})
      : options(options), x_type(in.x.scalar_type()), type(in.W.scalar_type()), device(in.x.device()) {
    TORCH_CHECK(kernels_support(in), "layernorm_linear: the kernels do not support tensors of these shapes and dtypes");
    H = in.W.size(1), O = in.W.size(0), rows = in.x.numel() / H;
    transposed = is_transposed(in.W);
    library = library_for(x_type, type);
    bool capturing = captured ? *captured : is_capturing(device);
    bits = options & FORCED_PLAN ? options >> PLAN_SHIFT
                           : library->query("workbook_layernorm_linear_plan", device,
                                          {rows, H, O, transposed, options, capturing}).first;
    output = Gemm(bits & 3), dln = Gemm(bits >> 2 & 3), dW = Gemm(bits >> 4 & 3);
    two_streams = bits >> 6 & 1, dW_elements = bits >> 8;
  }
};

Tensor contiguous_or_full(const Optional& tensor, int64_t n, at::ScalarType type, double value) {
  if (tensor && tensor->defined()) return tensor->contiguous();
  return workbook::empty({n}, type).fill_(value);
}

// ---- Forward ------------------------------------------------------------------------------------------------

Tensors2 forward_device(const Tensor& x_, const Optional& gamma, const Optional& beta, const Tensor& W_,
                   const Optional& bias, double eps, int64_t options) {
  c10::DeviceGuard guard(x_.device());
  BelowAutograd below;
  prepare_cublas(x_.device());
  Call call({x_, gamma, beta, W_, bias}, options);
  auto [rows, H, O] = std::tuple(call.rows, call.H, call.O);
  Tensor x = x_.contiguous(), W = call.transposed ? W_ : W_.contiguous();
  Tensor g = contiguous_or_full(gamma, H, call.x_type, 1), b = contiguous_or_full(beta, H, call.x_type, 0);
  c10::SmallVector<int64_t, 6> sizes(x_.sizes().begin(), x_.sizes().end());
  sizes.back() = O;
  Tensor statistics = workbook::empty({2, rows}, at::kFloat);
  int64_t mean = address(statistics), rstd = mean + 4 * rows;
  if (call.output == MOJO) {
    Tensor c = contiguous_or_full(bias, O, call.type, 0), y = workbook::empty(sizes, call.type);
    call.library->launch("workbook_layernorm_linear_forward", call.device,
                         {0, 0, 0, 0, rows, H, O, bits(eps), address(y), mean, rstd, address(x), address(g),
                          address(b), address(W), address(c)});
    return {y, statistics};
  }
  int64_t alignment = call.output == PADDED ? ALIGNED_ELEMENTS : 1;
  int64_t stride = (H + alignment - 1) / alignment * alignment, columns = (O + alignment - 1) / alignment * alignment;
  Tensor ln_out = workbook::empty({rows, stride}, call.type);
  call.library->launch("workbook_layernorm_linear_rows", call.device,
                       {0, 0, 0, 0, rows, H, O, bits(eps), address(ln_out), mean, rstd, address(x), address(g),
                        address(b), stride});
  Optional c = bias;
  if (call.output == PADDED) {
    W = at::constant_pad_nd(W, {0, stride - H, 0, columns - O});
    if (c && c->defined()) c = at::constant_pad_nd(*c, {0, columns - O});
  }
  Tensor y = at::linear(ln_out, W, c);
  if (columns != O) y = y.narrow(1, 0, O).clone(at::MemoryFormat::Contiguous);
  return {y.resize_(sizes), statistics};  // not a view, because the caller may modify y in place
}

Tensors2 forward_meta(const Tensor& x, const Optional&, const Optional&, const Tensor& W, const Optional&, double,
                 int64_t) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  auto rows = x.sym_numel() / sizes.back();
  sizes.back() = W.sym_size(0);
  return {at::empty_symint(sizes, W.options()), at::empty_symint({2, rows}, x.options().dtype(at::kFloat))};
}

// ---- Backward -----------------------------------------------------------------------------------------------

struct Gradients { Tensor dx, dgamma, dbeta, dW, db; };

// A backward pass: its tensors, which are contiguous except for a transposed W, and its algorithms.
struct Pass {
  Call& call;
  Tensor dy, x, statistics, g, b, W;

  static bool can_split(int64_t requested) { return requested & WEIGHT && requested & (INPUT | NORM); }

  // Computes the gradients, with the least memory if this option is set or an allocation fails.
  Gradients run(int64_t requested) {
    if (call.options & LEAST_MEMORY)
      return can_split(requested) ? compute_weight_first(requested) : compute_all(requested | FEW_PARTIALS);
    try {
      return compute_all(requested);
    } catch (const c10::OutOfMemoryError&) {
      if (!can_split(requested)) throw;
    }
    return compute_weight_first(requested);
  }

  // Computes dW first, so that ln_out is freed before dln is allocated.
  Gradients compute_weight_first(int64_t requested) {
    Tensor dW = compute_all(WEIGHT | FEW_PARTIALS).dW;
    auto grads = compute_all((requested & ~WEIGHT) | FEW_PARTIALS);
    grads.dW = dW;
    return grads;
  }

  Gradients compute_all(int64_t requested) {
    if (call.two_streams && can_split(requested)) return compute_on_two_streams(requested);
    if (call.dln != MOJO || call.dW != MOJO) return compute_with_torch_matmul(requested);
    Gradients grads;
    if (requested & INPUT) grads.dx = workbook::empty(x.sizes(), call.x_type);
    if (requested & WEIGHT) {
      grads.dW = workbook::empty({std::max(call.dW_elements, call.O * call.H)}, call.type);
      grads.dW.unsafeGetTensorImpl()->set_sizes_contiguous({call.O, call.H});
    }
    launch(requested, grads);
    return grads;
  }

  // Launches the Mojo kernels of a backward pass; `requested` determines whether dln and ln_out are required.
  void launch(int64_t requested, Gradients& grads, const Tensor& dln = {}, const Tensor& ln_out = {}) {
    auto vector = [](int64_t n, at::ScalarType type) { return workbook::empty({n}, type); };
    if (requested & NORM) grads.dgamma = vector(call.H, call.x_type), grads.dbeta = vector(call.H, call.x_type);
    if (requested & BIAS && !grads.db.defined()) grads.db = vector(call.O, call.type);
    auto mean = address(statistics), rstd = mean + 4 * call.rows;
    call.library->launch("workbook_layernorm_linear_backward", call.device,
                         {0, 0, 0, 0, call.rows, call.H, call.O, requested, address(grads.dx), address(grads.dgamma),
                          address(grads.dbeta), address(grads.dW), address(grads.db), address(dy), address(x), mean,
                          rstd, address(g), address(b), address(W), address(dln), address(ln_out)});
  }

  // Computes one or both matmuls with PyTorch.
  Gradients compute_with_torch_matmul(int64_t requested) {
    auto [rows, H, O] = std::tuple(call.rows, call.H, call.O);
    Tensor dy_rows = dy.view({rows, O}), dln, ln_out;
    Gradients grads;
    int64_t flags = requested;
    if (call.dln != MOJO && requested & (INPUT | NORM)) {
      dln = at::mm(dy_rows, W);
      flags |= DLN_COMPUTED;
    }
    bool mojo_dW = call.dW == MOJO && requested & WEIGHT;
    bool few_rows = rows <= std::min(MAX_SMALL_ROWS, O) && flags & DLN_COMPUTED && !mojo_dW && !(flags & FEW_PARTIALS);
    if (few_rows) flags |= FEW_ROWS;
    if (requested & INPUT) {
      // dx overwrites dln if the dtypes are equal, except for few rows, for which one launch reads dln and writes dx. A
      // separate dx does not increase the peak, because dW is allocated after dln is freed.
      bool overwrites_dln = dln.defined() && !few_rows && call.x_type == call.type;
      grads.dx = overwrites_dln ? dln : workbook::empty({rows, H}, call.x_type);
    }
    if (mojo_dW) {
      grads.dW = workbook::empty({O, H}, call.type);
    } else if (requested & WEIGHT) {
      bool transposed_ln_out = !few_rows && prefers_transposed_ln_out();
      ln_out = transposed_ln_out ? workbook::empty({H, rows}, call.type).t() : workbook::empty({rows, H}, call.type);
      flags = (flags & ~WEIGHT) | LN_OUT_REQUESTED | (transposed_ln_out ? TRANSPOSED : 0);
    }
    launch(flags, grads, dln, ln_out);
    dln.reset();
    if (ln_out.defined()) grads.dW = call.transposed ? at::mm(ln_out.t(), dy_rows).t() : at::mm(dy_rows.t(), ln_out);
    if (grads.dx.defined()) grads.dx.unsafeGetTensorImpl()->set_sizes_contiguous(x.sizes());
    return grads;
  }

  bool prefers_transposed_ln_out() const {
    int64_t elements = call.H * call.O;
    return elements >= MIN_TRANSPOSED_ELEMENTS && call.rows * elements >= MIN_TRANSPOSED_FMAS && call.rows % 4 == 0 &&
           call.type == at::kFloat &&
           at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
               at::Float32Precision::TF32;
  }

  // Computes dW from a separate ln_out on a second stream, and db of a large dY on a third unless the Mojo matmul does
  // it. Memory that several streams use is allocated on the current stream and freed after they have joined.
  Gradients compute_on_two_streams(int64_t requested) {
    SideStreams streams(call.device);
    bool separate_db = requested & BIAS && call.dln != MOJO && call.rows * call.O >= MIN_BIAS_STREAM_ELEMENTS;
    Gradients side_grads{{}, {}, {}, workbook::empty({call.O, call.H}, call.type), {}};
    Tensor ln_out;
    if (separate_db) side_grads.db = workbook::empty({call.O}, call.type);
    if (call.dW != MOJO) ln_out = workbook::empty({call.rows, call.H}, call.type);
    streams.run([&] {
      launch(call.dW == MOJO ? WEIGHT : LN_OUT_REQUESTED, side_grads, {}, ln_out);
      if (call.dW != MOJO) at::mm_out(side_grads.dW, dy.view({call.rows, call.O}).t(), ln_out);
    });
    if (separate_db) streams.run([&] { launch(BIAS, side_grads); });
    auto grads = compute_with_torch_matmul(requested & ~(WEIGHT | (separate_db ? BIAS : 0)));
    streams.join();
    grads.dW = side_grads.dW;
    if (separate_db) grads.db = side_grads.db;
    return grads;
  }
};

// Returns dx, dgamma, dbeta, dW and db.
Tensors5 backward_device(const Tensor& dy, const Tensor& x, const Tensor& statistics, const Optional& gamma,
                     const Optional& beta, const Tensor& W, int64_t requested, int64_t options) {
  c10::DeviceGuard guard(x.device());
  BelowAutograd below;
  prepare_cublas(x.device());
  Call call({x, gamma, beta, W, {}}, options);
  TORCH_CHECK(dy.scalar_type() == call.type && dy.numel() == call.rows * call.O, "grad: expected ", call.rows,
              " rows of ", call.O, " in the dtype of weight");
  Tensor g = contiguous_or_full(gamma, call.H, call.x_type, 1), b = contiguous_or_full(beta, call.H, call.x_type, 0);
  Pass pass{call, dy.contiguous(), x.contiguous(), statistics.contiguous(), g, b, call.transposed ? W : W.contiguous()};
  auto grads = pass.run(requested);
  return {or_empty(grads.dx, call.type), or_empty(grads.dgamma, call.type), or_empty(grads.dbeta, call.type),
          or_empty(grads.dW, call.type), or_empty(grads.db, call.type)};
}

Tensors5 backward_meta(const Tensor&, const Tensor& x, const Tensor&, const Optional&, const Optional&, const Tensor& W,
                   int64_t requested, int64_t) {
  auto H = W.sym_size(1), O = W.sym_size(0);
  auto result = [&](int64_t bit, const Tensor& like, at::SymIntArrayRef sizes) {
    return meta_result(requested & bit, sizes, requested & bit ? like.options() : W.options());
  };
  bool transposed = requested & WEIGHT && is_transposed(W);
  Tensor dW = transposed ? result(WEIGHT, W, {H, O}).t() : result(WEIGHT, W, {O, H});
  return {result(INPUT, x, x.sym_sizes()), result(NORM, x, {H}), result(NORM, x, {H}), dW, result(BIAS, W, {O})};
}

// ---- The operator -------------------------------------------------------------------------------------------

// Calls PyTorch's own operations, which have all derivatives; `mixed` computes the LayerNorm in float32, for autocast.
Tensor call_torch(const Inputs& in, double eps, bool mixed) {
  auto ln_out = at::layer_norm_symint(in.x, {in.W.sym_size(1)}, in.gamma, in.beta, eps);
  if (mixed && ln_out.scalar_type() == at::kFloat) ln_out = ln_out.to(in.W.scalar_type());
  return at::linear(ln_out, in.W, in.bias);
}

// Saves x, the statistics, gamma, beta and W; the numbers are `options`, `mixed` and eps.
struct Operator {
  static constexpr auto NAME = "LayerNormLinearBackward";
  static constexpr size_t INPUTS = 5, SAVED = 5;
  static constexpr int64_t OUTPUTS = 0;

  static variable_list gradients(const variable_list& grads, const variable_list& saved, const Numbers& numbers,
                                 int64_t needed) {
    static auto op = find_operator<decltype(backward_device)>("mojo_workbook::layernorm_linear_backward");
    auto select_bit = [&](int64_t inputs, int64_t gradient) { return needed & inputs ? gradient : 0; };
    int64_t requested = select_bit(1, INPUT) | select_bit(2 | 4, NORM) | select_bit(8, WEIGHT) | select_bit(16, BIAS);
    auto [dx, dg, db, dW, dc] = op.call(grads[0], saved[0], saved[1], optional(saved[2]), optional(saved[3]), saved[4],
                                        requested, numbers.integers[0]);
    return {dx, dg, db, dW, dc};
  }

  static std::pair<variable_list, variable_list> recompute_with_torch(const variable_list& saved,
                                                                      const Numbers& numbers, int64_t needed) {
    variable_list in{saved[0], saved[2], saved[3], saved[4], {}};
    if (needed & 16) in[4] = at::zeros_symint({in[3].sym_size(0)}, in[3].options()).requires_grad_();
    auto y = call_torch({in[0], optional(in[1]), optional(in[2]), in[3], optional(in[4])}, numbers.reals[0],
                        numbers.integers[1]);
    return {in, {y}};
  }
};

bool runs_kernels(const Inputs& in) {
  return kernels_support(in) && library_for(in.x.scalar_type(), in.W.scalar_type())->available(in.x.device());
}

Tensor call_operator(const Inputs& in, double eps, int64_t options, bool mixed) {
  auto& [x, g, b, W, c] = in;
  bool first_order = !in_transform() && !has_tangent(x, g, b, W, c);
  bool same_dtype = mixed || x.scalar_type() == W.scalar_type();
  if (!first_order || !same_dtype || !runs_kernels(in)) return call_torch(in, eps, mixed);
  static auto op = find_operator<decltype(forward_device)>("mojo_workbook::layernorm_linear_forward");
  auto [y, statistics] = call_below_autograd(op, x, g, b, W, c, eps, options);
  if (torch::autograd::compute_requires_grad(x, g, b, W, c))
    record<Operator>({y}, {x, statistics, g, b, W}, {{options, mixed}, {eps}}, x, g, b, W, c);
  return y;
}

// Calls `run` with the inputs and whether autocast has cast them: the LayerNorm's to float32 and the matmul's to
// autocast's dtype, as for PyTorch's own layers. If x, gamma and beta already have that dtype, they are not cast,
// because the kernels convert them to float32 themselves.
template <class Run>
auto apply_autocast(const Inputs& in, Run run) {
  if (!at::autocast::is_autocast_enabled(DEVICE)) return run(in, false);
  c10::impl::ExcludeDispatchKeyGuard without(at::autocast_dispatch_keyset);
  auto type = at::autocast::get_autocast_dtype(DEVICE);
  auto has_autocast_dtype = [&](const Optional& t) { return !t || !t->defined() || t->scalar_type() == type; };
  bool no_cast = has_autocast_dtype(in.x) && has_autocast_dtype(in.gamma) && has_autocast_dtype(in.beta);
  auto norm = no_cast ? type : at::kFloat;
  return run({autocast_to(norm, in.x), autocast_to(norm, in.gamma), autocast_to(norm, in.beta),
              autocast_to(type, in.W), autocast_to(type, in.bias)}, true);
}

Tensor layernorm_linear(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c,
                        double eps, int64_t options) {
  return apply_autocast({x, g, b, W, c},
                     [&](const Inputs& in, bool mixed) { return call_operator(in, eps, options, mixed); });
}

// Returns the selected matmuls as encoded by plan.mojo, or -1 if PyTorch's own operations run.
int64_t plan(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c,
             int64_t options, bool captured) {
  return apply_autocast({x, g, b, W, c}, [&](const Inputs& in, bool) {
    return runs_kernels(in) ? Call(in, options, captured).bits : int64_t(-1);
  });
}
}  // namespace

#define TENSORS "(Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor weight, Tensor? bias, "
TORCH_LIBRARY_FRAGMENT(mojo_workbook, m) {
  at::Tag tag = at::Tag::pt2_compliant_tag;
  m.def("layernorm_linear" TENSORS "float eps, int options=0) -> Tensor", layernorm_linear, {tag});
  m.def("layernorm_linear_forward" TENSORS "float eps, int options=0) -> (Tensor, Tensor)", {tag});
  m.def("layernorm_linear_backward(Tensor grad, Tensor x, Tensor statistics, Tensor? ln_weight, Tensor? ln_bias,"
        " Tensor weight, int requested, int options=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", {tag});
  m.def("layernorm_linear_plan" TENSORS "int options, bool captured) -> int", plan);
}
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_AUTOCAST, m) {
  m.impl("layernorm_linear", layernorm_linear);
  m.impl("layernorm_linear_plan", plan);
}
WORKBOOK_LEAF("layernorm_linear_forward", forward_device, forward_meta)
WORKBOOK_LEAF("layernorm_linear_backward", backward_device, backward_meta)
