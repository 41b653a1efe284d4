// LayerNorm + Linear: y = linear(layer_norm(x)), by this project's row kernels and by its own or PyTorch's matmuls, as
// selected in harness/nn/kernels/layernorm_linear/plan.mojo.
#include "host.h"

using namespace workbook;

namespace {
// Bits of the gradients to compute: dW, db, dx, and dgamma with dbeta.
constexpr int64_t WEIGHT = 1, BIAS = 2, INPUT = 4, NORM = 8;
// Further bits for the Mojo library: dln is passed in; ln_out is needed for the matmul dW; both, with few rows and dx
// separate from dln, so that one launch computes the rest; ln_out is needed transposed; use few partial sums.
constexpr int64_t DLN_GIVEN = 16, LN_OUT_TAKEN = 32, FEW_ROWS = 64, TRANSPOSED = 128, FEW_SHARES = 256;
// Bits of the options: float32 as split float16 (bit 0); least memory; use the matmuls in the bits from ABOVE on, for
// measurements and tests.
constexpr int64_t LEAST = 2, GIVEN = 4, ABOVE = 3;
enum Gemm : int64_t { OWN, TORCH, PADDED };

constexpr int64_t LONGEST = (int64_t(1) << 31) - 1, WIDEST = 1 << 20;  // maximum rows and O, and H, of the kernels
constexpr int64_t MOST_FEW_ROWS = 64;  // with more rows, adding columns row by row takes longer than a launch
constexpr int64_t MANY_SUMS = 1 << 19;  // minimum elements of dY for its column sums to get a separate stream
constexpr int64_t ALIGNED_ELEMENTS = 8;  // 16-bit elements in a 16-byte vector
// Minimum multiply-adds, and elements of dW, for dW in TF32 to read ln_out transposed: Hopper's tensor cores need both
// factors contiguous along the inner dimension, and cuBLAS transposes others first.
constexpr int64_t ALONG_SUMS_FROM = int64_t(1) << 33, ALONG_SUMS_ELEMENTS = 1 << 21;

Library of_bfloat16("layernorm_linear", "bfloat16"), of_float16("layernorm_linear", "float16"),
    of_float32("layernorm_linear", "float32"), of_bfloat16_mixed("layernorm_linear", "bfloat16_mixed"),
    of_float16_mixed("layernorm_linear", "float16_mixed");

// Returns the library for the dtype of x, gamma and beta and the dtype of the matmul; null if there is none.
Library* library_for(at::ScalarType x, at::ScalarType matmul) {
  if (matmul == at::kFloat) return x == matmul ? &of_float32 : nullptr;
  if (matmul != at::kBFloat16 && matmul != at::kHalf) return nullptr;
  if (x == matmul) return matmul == at::kHalf ? &of_float16 : &of_bfloat16;
  if (x == at::kFloat) return matmul == at::kHalf ? &of_float16_mixed : &of_bfloat16_mixed;
  return nullptr;
}

struct Inputs {
  const Tensor& x;
  const Optional &gamma, &beta;
  const Tensor& W;
  const Optional& bias;
};

// Returns whether a matrix is the transpose of a contiguous one; then it is not copied.
bool is_transposed(const Tensor& W) { return !W.is_contiguous() && W.dim() == 2 && W.t().is_contiguous(); }

// Returns whether the kernels support these shapes and dtypes.
bool fits(const Inputs& in) {
  auto& [x, gamma, beta, W, bias] = in;
  auto strided = [&](const Tensor& t) { return t.device() == x.device() && t.layout() == at::kStrided; };
  if (x.dim() < 1 || W.dim() != 2 || !strided(x) || !strided(W)) return false;
  if (!library_for(x.scalar_type(), W.scalar_type())) return false;
  auto H = W.sym_size(1), O = W.sym_size(0);
  auto vector = [&](const Optional& p, const c10::SymInt& n, at::ScalarType type) {
    return !p || !p->defined() || (p->dim() == 1 && strided(*p) && p->sym_size(0) == n && p->scalar_type() == type);
  };
  return x.sym_sizes().back() == H && H >= 1 && H <= WIDEST && O >= 1 && O <= LONGEST - ALIGNED_ELEMENTS &&
         x.sym_numel() >= 1 && x.sym_numel() / H <= LONGEST && vector(gamma, H, x.scalar_type()) && vector(beta, H, x.scalar_type()) &&
         vector(bias, O, W.scalar_type());
}

// ---- One call -----------------------------------------------------------------------------------------------

// The part of a call that both passes share.
struct Call {
  int64_t rows, H, O, options;
  at::ScalarType x_type, type;  // dtypes: of x, gamma and beta; of everything else
  c10::Device device;
  bool transposed;  // whether W is stored as [H, O], as in GPT-2; then dW is too
  Library* library;
  int64_t bits;  // the selected matmuls, as plan.mojo packs them
  Gemm output, dln, dW;
  bool two_streams;  // whether the backward pass computes dW on a separate stream
  int64_t room;  // elements that dW's memory needs if a copy of W is stored there first

  Call(const Inputs& in, int64_t options, std::optional<bool> captured = {})
      : options(options), x_type(in.x.scalar_type()), type(in.W.scalar_type()), device(in.x.device()) {
    TORCH_CHECK(fits(in), "layernorm_linear: the kernels do not take tensors of these shapes and dtypes");
    H = in.W.size(1), O = in.W.size(0), rows = in.x.numel() / H;
    transposed = is_transposed(in.W);
    library = library_for(x_type, type);
    bool capturing = captured ? *captured : is_capturing(device);
    bits = options & GIVEN ? options >> ABOVE
                           : library->ask("workbook_layernorm_linear_plan", device,
                                          {rows, H, O, transposed, options, capturing}).first;
    output = Gemm(bits & 3), dln = Gemm(bits >> 2 & 3), dW = Gemm(bits >> 4 & 3);
    two_streams = bits >> 6 & 1, room = bits >> 8;
  }
};

Tensor or_filled(const Optional& given, int64_t n, at::ScalarType type, double value) {
  if (given && given->defined()) return given->contiguous();
  return workbook::empty({n}, type).fill_(value);
}

// ---- Forward ------------------------------------------------------------------------------------------------

Two forward_device(const Tensor& x_, const Optional& gamma, const Optional& beta, const Tensor& W_,
                   const Optional& bias, double eps, int64_t options) {
  c10::DeviceGuard guard(x_.device());
  BelowAutograd below;
  prepare_cublas(x_.device());
  Call call({x_, gamma, beta, W_, bias}, options);
  auto [rows, H, O] = std::tuple(call.rows, call.H, call.O);
  Tensor x = x_.contiguous(), W = call.transposed ? W_ : W_.contiguous();
  Tensor g = or_filled(gamma, H, call.x_type, 1), b = or_filled(beta, H, call.x_type, 0);
  c10::SmallVector<int64_t, 6> sizes(x_.sizes().begin(), x_.sizes().end());
  sizes.back() = O;
  Tensor statistics = workbook::empty({2, rows}, at::kFloat);
  int64_t mean = address(statistics), rstd = mean + 4 * rows;
  if (call.output == OWN) {
    Tensor c = or_filled(bias, O, call.type, 0), y = workbook::empty(sizes, call.type);
    call.library->launch("workbook_layernorm_linear_forward", call.device,
                         {0, 0, 0, 0, rows, H, O, bits(eps), address(y), mean, rstd, address(x), address(g),
                          address(b), address(W), address(c)});
    return {y, statistics};
  }
  int64_t unit = call.output == PADDED ? ALIGNED_ELEMENTS : 1;
  int64_t stride = (H + unit - 1) / unit * unit, columns = (O + unit - 1) / unit * unit;
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
  return {y.resize_(sizes), statistics};  // not a view of the product: the caller may change y in place
}

Two forward_meta(const Tensor& x, const Optional&, const Optional&, const Tensor& W, const Optional&, double,
                 int64_t) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  auto rows = x.sym_numel() / sizes.back();
  sizes.back() = W.sym_size(0);
  return {at::empty_symint(sizes, W.options()), at::empty_symint({2, rows}, x.options().dtype(at::kFloat))};
}

// ---- Backward -----------------------------------------------------------------------------------------------

struct Gradients {
  Tensor dx, dgamma, dbeta, dW, db;
};

// The tensors of a backward pass, which are contiguous except a transposed W, and the methods to compute it.
struct Pass {
  Call& call;
  Tensor dy, x, statistics, g, b, W;

  static bool splits(int64_t wanted) { return wanted & WEIGHT && wanted & (INPUT | NORM); }

  // Computes the gradients; in the least memory if that option is set or an allocation fails.
  Gradients run(int64_t wanted) {
    if (call.options & LEAST) return splits(wanted) ? weight_first(wanted) : at_once(wanted | FEW_SHARES);
    try {
      return at_once(wanted);
    } catch (const c10::OutOfMemoryError&) {
      if (!splits(wanted)) throw;
    }
    return weight_first(wanted);
  }

  // Computes dW and then the rest: ln_out is freed before dln is allocated.
  Gradients weight_first(int64_t wanted) {
    Tensor dW = at_once(WEIGHT | FEW_SHARES).dW;
    auto found = at_once((wanted & ~WEIGHT) | FEW_SHARES);
    found.dW = dW;
    return found;
  }

  Gradients at_once(int64_t wanted) {
    if (call.two_streams && splits(wanted)) return on_two_streams(wanted);
    if (call.dln != OWN || call.dW != OWN) return with_torch_matmul(wanted);
    Gradients found;
    if (wanted & INPUT) found.dx = workbook::empty(x.sizes(), call.x_type);
    if (wanted & WEIGHT) {
      found.dW = workbook::empty({std::max(call.room, call.O * call.H)}, call.type);
      found.dW.unsafeGetTensorImpl()->set_sizes_contiguous({call.O, call.H});
    }
    launch(wanted, found);
    return found;
  }

  // Launches the Mojo library's part of a backward pass; the caller passes dln and ln_out if `wanted` has those bits.
  void launch(int64_t wanted, Gradients& into, const Tensor& dln = {}, const Tensor& ln_out = {}) {
    auto vector = [](int64_t n, at::ScalarType type) { return workbook::empty({n}, type); };
    if (wanted & NORM) into.dgamma = vector(call.H, call.x_type), into.dbeta = vector(call.H, call.x_type);
    if (wanted & BIAS && !into.db.defined()) into.db = vector(call.O, call.type);
    auto mean = address(statistics), rstd = mean + 4 * call.rows;
    call.library->launch("workbook_layernorm_linear_backward", call.device,
                         {0, 0, 0, 0, call.rows, call.H, call.O, wanted, address(into.dx), address(into.dgamma),
                          address(into.dbeta), address(into.dW), address(into.db), address(dy), address(x), mean, rstd,
                          address(g), address(b), address(W), address(dln), address(ln_out)});
  }

  // Computes one matmul or both with PyTorch.
  Gradients with_torch_matmul(int64_t wanted) {
    auto [rows, H, O] = std::tuple(call.rows, call.H, call.O);
    Tensor rows_of_dy = dy.view({rows, O}), dln, ln_out;
    Gradients found;
    int64_t parts = wanted;
    if (call.dln != OWN && wanted & (INPUT | NORM)) {
      dln = at::mm(rows_of_dy, W);
      parts |= DLN_GIVEN;
    }
    bool own_dW = call.dW == OWN && wanted & WEIGHT;
    bool few = rows <= std::min(MOST_FEW_ROWS, O) && parts & DLN_GIVEN && !own_dW && !(parts & FEW_SHARES);
    if (few) parts |= FEW_ROWS;
    if (wanted & INPUT) {
      // dx overwrites dln if the dtypes are equal, except for few rows, where one launch reads dln and writes dx. A
      // separate dx does not raise the peak, since dW is allocated after dln is freed.
      bool over = dln.defined() && !few && call.x_type == call.type;
      found.dx = over ? dln : workbook::empty({rows, H}, call.x_type);
    }
    if (own_dW) {
      found.dW = workbook::empty({O, H}, call.type);
    } else if (wanted & WEIGHT) {
      bool turned = !few && reads_along_sums();
      ln_out = turned ? workbook::empty({H, rows}, call.type).t() : workbook::empty({rows, H}, call.type);
      parts = (parts & ~WEIGHT) | LN_OUT_TAKEN | (turned ? TRANSPOSED : 0);
    }
    launch(parts, found, dln, ln_out);
    dln.reset();
    if (ln_out.defined())
      found.dW = call.transposed ? at::mm(ln_out.t(), rows_of_dy).t() : at::mm(rows_of_dy.t(), ln_out);
    if (found.dx.defined()) found.dx.unsafeGetTensorImpl()->set_sizes_contiguous(x.sizes());
    return found;
  }

  bool reads_along_sums() const {
    int64_t elements = call.H * call.O;
    return elements >= ALONG_SUMS_ELEMENTS && call.rows * elements >= ALONG_SUMS_FROM && call.rows % 4 == 0 &&
           call.type == at::kFloat &&
           at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
               at::Float32Precision::TF32;
  }

  // Computes dW, from a separate ln_out, on a second stream; and if dY is large, its column sums on a third one,
  // unless this project's matmul computes them. Memory that several streams use is allocated on the current stream and
  // lives until they join.
  Gradients on_two_streams(int64_t wanted) {
    SideStreams streams(call.device);
    bool db_apart = wanted & BIAS && call.dln != OWN && call.rows * call.O >= MANY_SUMS;
    Gradients side{{}, {}, {}, workbook::empty({call.O, call.H}, call.type), {}};
    Tensor ln_out;
    if (db_apart) side.db = workbook::empty({call.O}, call.type);
    if (call.dW != OWN) ln_out = workbook::empty({call.rows, call.H}, call.type);
    streams.run([&] {
      launch(call.dW == OWN ? WEIGHT : LN_OUT_TAKEN, side, {}, ln_out);
      if (call.dW != OWN) at::mm_out(side.dW, dy.view({call.rows, call.O}).t(), ln_out);
    });
    if (db_apart) streams.run([&] { launch(BIAS, side); });
    auto found = with_torch_matmul(wanted & ~(WEIGHT | (db_apart ? BIAS : 0)));
    streams.join();
    found.dW = side.dW;
    if (db_apart) found.db = side.db;
    return found;
  }
};

// Returns dx, dgamma, dbeta, dW and db.
Five backward_device(const Tensor& dy, const Tensor& x, const Tensor& statistics, const Optional& gamma,
                     const Optional& beta, const Tensor& W, int64_t wanted, int64_t options) {
  c10::DeviceGuard guard(x.device());
  BelowAutograd below;
  prepare_cublas(x.device());
  Call call({x, gamma, beta, W, {}}, options);
  TORCH_CHECK(dy.scalar_type() == call.type && dy.numel() == call.rows * call.O, "grad: expected ", call.rows,
              " rows of ", call.O, " in the dtype of weight");
  Tensor g = or_filled(gamma, call.H, call.x_type, 1), b = or_filled(beta, call.H, call.x_type, 0);
  Pass pass{call, dy.contiguous(), x.contiguous(), statistics.contiguous(), g, b, call.transposed ? W : W.contiguous()};
  auto found = pass.run(wanted);
  return {or_empty(found.dx, call.type), or_empty(found.dgamma, call.type), or_empty(found.dbeta, call.type),
          or_empty(found.dW, call.type), or_empty(found.db, call.type)};
}

Five backward_meta(const Tensor&, const Tensor& x, const Tensor&, const Optional&, const Optional&, const Tensor& W,
                   int64_t wanted, int64_t) {
  auto H = W.sym_size(1), O = W.sym_size(0);
  auto result = [&](int64_t bit, const Tensor& like, at::SymIntArrayRef sizes) {
    return meta_result(wanted & bit, sizes, wanted & bit ? like.options() : W.options());
  };
  bool transposed = wanted & WEIGHT && is_transposed(W);
  Tensor dW = transposed ? result(WEIGHT, W, {H, O}).t() : result(WEIGHT, W, {O, H});
  return {result(INPUT, x, x.sym_sizes()), result(NORM, x, {H}), result(NORM, x, {H}), dW, result(BIAS, W, {O})};
}

// ---- The operator -------------------------------------------------------------------------------------------

// Computes with PyTorch's own operations, which have all derivatives. Under autocast (`mixed`) the LayerNorm is
// computed in float32 and rounded once.
Tensor with_torch(const Inputs& in, double eps, bool mixed) {
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
    auto any = [&](int64_t inputs, int64_t gradient) { return needed & inputs ? gradient : 0; };
    int64_t wanted = any(1, INPUT) | any(2 | 4, NORM) | any(8, WEIGHT) | any(16, BIAS);
    auto [dx, dg, db, dW, dc] = op.call(grads[0], saved[0], saved[1], optional(saved[2]), optional(saved[3]), saved[4],
                                        wanted, numbers.integers[0]);
    return {dx, dg, db, dW, dc};
  }

  static std::pair<variable_list, variable_list> by_torch(const variable_list& saved, const Numbers& numbers,
                                                          int64_t needed) {
    variable_list in{saved[0], saved[2], saved[3], saved[4], {}};
    if (needed & 16) in[4] = at::zeros_symint({in[3].sym_size(0)}, in[3].options()).requires_grad_();
    auto y = with_torch({in[0], optional(in[1]), optional(in[2]), in[3], optional(in[4])}, numbers.reals[0],
                        numbers.integers[1]);
    return {in, {y}};
  }
};

bool runs_kernels(const Inputs& in) {
  return fits(in) && library_for(in.x.scalar_type(), in.W.scalar_type())->available(in.x.device());
}

Tensor call_operator(const Inputs& in, double eps, int64_t options, bool mixed) {
  auto& [x, g, b, W, c] = in;
  bool first_order = !in_transform() && !has_tangent(x, g, b, W, c);
  bool same_dtype = mixed || x.scalar_type() == W.scalar_type();
  if (!first_order || !same_dtype || !runs_kernels(in)) return with_torch(in, eps, mixed);
  static auto op = find_operator<decltype(forward_device)>("mojo_workbook::layernorm_linear_forward");
  auto [y, statistics] = below_autograd(op, x, g, b, W, c, eps, options);
  if (torch::autograd::compute_requires_grad(x, g, b, W, c))
    record<Operator>({y}, {x, statistics, g, b, W}, {{options, mixed}, {eps}}, x, g, b, W, c);
  return y;
}

// Calls `run` with the inputs and whether autocast has cast them: the LayerNorm's to float32 and the matmul's to
// autocast's dtype, as for PyTorch's own layers. If x, gamma and beta have that dtype already, they are not cast,
// since the kernels read it and compute in float32.
template <class Run>
auto in_autocast(const Inputs& in, Run run) {
  if (!at::autocast::is_autocast_enabled(DEVICE)) return run(in, false);
  c10::impl::ExcludeDispatchKeyGuard without(at::autocast_dispatch_keyset);
  auto type = at::autocast::get_autocast_dtype(DEVICE);
  auto narrow = [&](const Optional& t) { return !t || !t->defined() || t->scalar_type() == type; };
  auto norm = narrow(in.x) && narrow(in.gamma) && narrow(in.beta) ? type : at::kFloat;
  return run({autocast_to(norm, in.x), autocast_to(norm, in.gamma), autocast_to(norm, in.beta),
              autocast_to(type, in.W), autocast_to(type, in.bias)}, true);
}

Tensor layernorm_linear(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c,
                        double eps, int64_t options) {
  return in_autocast({x, g, b, W, c},
                     [&](const Inputs& in, bool mixed) { return call_operator(in, eps, options, mixed); });
}

// Returns the selected matmuls as plan.mojo packs them, or -1 if PyTorch's own operations run.
int64_t plan(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c,
             int64_t options, bool captured) {
  return in_autocast({x, g, b, W, c}, [&](const Inputs& in, bool) {
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
        " Tensor weight, int wanted, int options=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", {tag});
  m.def("layernorm_linear_plan" TENSORS "int options, bool captured) -> int", plan);
}
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_AUTOCAST, m) {
  m.impl("layernorm_linear", layernorm_linear);
  m.impl("layernorm_linear_plan", plan);
}
WORKBOOK_LEAF("layernorm_linear_forward", forward_device, forward_meta)
WORKBOOK_LEAF("layernorm_linear_backward", backward_device, backward_meta)
