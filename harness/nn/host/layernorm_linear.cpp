// LayerNorm + Linear: y = linear(layer_norm(x)). This project's row kernels, with products of its own or
// PyTorch's between them, as the table of the Mojo library says
// (harness/nn/kernels/layernorm_linear/plan.mojo).
#include "host.h"

#include <torch/csrc/dynamo/compiled_autograd.h>

using namespace workbook;

namespace {
// Gradients that are wanted, added: dW, db, dx, and dgamma with dbeta.
constexpr int64_t WEIGHT = 1, BIAS = 2, INPUT = 4, NORM = 8;
// Beside these for the library: dln has been multiplied; ln_out is wanted for the product dW; with both, that
// rows are few and dx apart from dln, so that one launch makes all the rest; ln_out is wanted transposed;
// sums over rows have few shares.
constexpr int64_t DLN_GIVEN = 16, LN_OUT_TAKEN = 32, FEW_ROWS = 64, TRANSPOSED = 128, FEW_SHARES = 256;
// How a call is computed, added: float32 by pairs of float16; with the least memory; with the products that
// the bits above name, as measurements and tests want it.
constexpr int64_t LEAST = 2, GIVEN = 4, ABOVE = 3;
enum Who : int64_t { OWN, LIBRARY, PADDED };

constexpr int64_t LONGEST = (int64_t(1) << 31) - 1,
                  WIDEST = 1 << 20;  // rows and O, and H, that the kernels' grids hold
constexpr int64_t MOST_FEW_ROWS = 64;  // of more rows, adding columns row by row takes longer than a launch
constexpr int64_t MANY_SUMS =
    1 << 19;  // elements of dY from which on summing its columns is a branch of its own
constexpr int64_t ALIGNED_ELEMENTS =
    8;  // rows of 16-bit elements are whole vectors where they are a multiple of so many
// Multiply-adds, and elements of dW, from which on dW in TF32 reads ln_out transposed: Hopper's tensor cores
// read both factors along the sum, and the library turns those that lie otherwise as it goes
// (book/records/tf32.csv).
constexpr int64_t ALONG_SUMS_FROM = int64_t(1) << 33, ALONG_SUMS_ELEMENTS = 1 << 21;

Library of_bfloat16("layernorm_linear", "bfloat16"), of_float16("layernorm_linear", "float16"),
    of_float32("layernorm_linear", "float32"), of_bfloat16_mixed("layernorm_linear", "bfloat16_mixed"),
    of_float16_mixed("layernorm_linear", "float16_mixed");

// Returns the library for the dtypes of x with gamma and beta, and of the product; none where there is none.
Library* library_for(at::ScalarType x, at::ScalarType product) {
  if (product == at::kFloat) return x == product ? &of_float32 : nullptr;
  if (product != at::kBFloat16 && product != at::kHalf) return nullptr;
  if (x == product) return product == at::kHalf ? &of_float16 : &of_bfloat16;
  if (x == at::kFloat) return product == at::kHalf ? &of_float16_mixed : &of_bfloat16_mixed;
  return nullptr;
}

int64_t padded(int64_t width) { return (width + ALIGNED_ELEMENTS - 1) / ALIGNED_ELEMENTS * ALIGNED_ELEMENTS; }

// Returns whether a matrix is the transpose of one that lies row by row: a copy would cost what a product
// may.
bool lies_transposed(const Tensor& W) { return !W.is_contiguous() && W.dim() == 2 && W.t().is_contiguous(); }

// Returns whether the kernels can compute tensors of these shapes and dtypes.
bool fits(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c) {
  auto strided = [&](const Tensor& t) { return t.device() == x.device() && t.layout() == at::kStrided; };
  if (x.dim() < 1 || W.dim() != 2 || !strided(x) || !strided(W) ||
      !library_for(x.scalar_type(), W.scalar_type()))
    return false;
  auto H = W.sym_size(1), O = W.sym_size(0);
  auto vector = [&](const Optional& p, const c10::SymInt& n, at::ScalarType type) {
    return !p || !p->defined() ||
           (p->dim() == 1 && strided(*p) && p->sym_size(0) == n && p->scalar_type() == type);
  };
  return x.sym_sizes().back() == H && H >= 1 && H <= WIDEST && O >= 1 && O <= LONGEST - ALIGNED_ELEMENTS &&
         x.sym_numel() / H <= LONGEST && vector(g, H, x.scalar_type()) && vector(b, H, x.scalar_type()) &&
         vector(c, O, W.scalar_type());
}

// ---- One call ---------------------------------------------------------------------------------------------

// What both passes of a call have in common.
struct Call {
  int64_t rows, H, O, options;
  at::ScalarType x_type, type;  // of x, gamma and beta; of all else
  c10::Device device;
  bool transposed;  // whether W lies as [H, O], as in GPT-2; then so does dW
  Library& library;
  int64_t bits;  // the choice of products, as plan.mojo packs it
  Who output, dln, dW;
  bool forked;  // whether dW is a branch of its own in the backward pass
  int64_t room;  // elements that the memory of dW needs where a copy of W comes there first

  Call(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c,
       int64_t options, bool captured)
      : rows((checked(x, g, b, W, c), x.numel() / x.size(-1))),
        H(x.size(-1)),
        O(W.size(0)),
        options(options),
        x_type(x.scalar_type()),
        type(W.scalar_type()),
        device(x.device()),
        transposed(lies_transposed(W)),
        library(*library_for(x_type, type)),
        bits(options & GIVEN
                 ? options >> ABOVE
                 : library.ask("workbook_layernorm_linear_plan",
                               std::array<int64_t, 6>{rows, H, O, transposed, options, captured}, device)),
        output(Who(bits & 3)),
        dln(Who(bits >> 2 & 3)),
        dW(Who(bits >> 4 & 3)),
        forked(bits >> 6 & 1),
        room(bits >> 8) {}

  Call(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c,
       int64_t options)
      : Call(x, g, b, W, c, options, is_capturing(x.device())) {}

  static void checked(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W,
                      const Optional& c) {
    TORCH_CHECK(fits(x, g, b, W, c),
                "layernorm_linear: the kernels do not take tensors of these shapes and dtypes");
  }
};

Tensor or_filled(const Optional& given, int64_t n, at::ScalarType type, double value) {
  if (given && given->defined()) return given->contiguous();
  return workbook::empty({n}, type).fill_(value);
}

// Returns a copy of a matrix with zeros below and to the right.
Tensor with_padding(const Tensor& matrix, int64_t rows, int64_t columns) {
  return at::constant_pad_nd(matrix, {0, columns - matrix.size(1), 0, rows - matrix.size(0)});
}

// ---- Forward ----------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> forward_device(const Tensor& x_, const Optional& gamma, const Optional& beta,
                                          const Tensor& W_, const Optional& bias, double eps,
                                          int64_t options) {
  c10::DeviceGuard guard(x_.device());
  Plain plain;
  prepare_products(x_.device());
  Call call(x_, gamma, beta, W_, bias, options);
  auto [rows, H, O] = std::tuple(call.rows, call.H, call.O);
  Tensor x = x_.contiguous(), W = call.transposed ? W_ : W_.contiguous();
  Tensor g = or_filled(gamma, H, call.x_type, 1), b = or_filled(beta, H, call.x_type, 0);
  c10::SmallVector<int64_t, 6> sizes(x_.sizes().begin(), x_.sizes().end());
  sizes.back() = O;
  Tensor statistics = workbook::empty({2, rows}, at::kFloat), y;
  int64_t mean = address(statistics), rstd = mean + 4 * rows;
  if (call.output == OWN || !rows) {
    Tensor c = or_filled(bias, O, call.type, 0);
    y = workbook::empty(sizes, call.type);
    std::array<int64_t, 16> words{0,          0,          0,          0,         rows, H,
                                  O,          bits(eps),  address(y), mean,      rstd, address(x),
                                  address(g), address(b), address(W), address(c)};
    if (rows) call.library.launch("workbook_layernorm_linear_forward", words, call.device);
    return {y, statistics};
  }
  bool pads = call.output == PADDED;
  int64_t stride = pads ? padded(H) : H, columns = pads ? padded(O) : O;
  Tensor ln_out = workbook::empty({rows, stride}, call.type);
  std::array<int64_t, 15> words{
      0,    0,    0,          0,          rows,       H,     O, bits(eps), address(ln_out),
      mean, rstd, address(x), address(g), address(b), stride};
  call.library.launch("workbook_layernorm_linear_rows", words, call.device);
  Optional c = bias;
  if (pads) {
    W = with_padding(W, columns, stride);
    if (c && c->defined()) c = at::constant_pad_nd(*c, {0, columns - O});
  }
  y = at::linear(ln_out, W, c);
  if (columns != O) y = y.narrow(1, 0, O).clone(at::MemoryFormat::Contiguous);
  return {y.resize_(sizes), statistics};  // no view of the product: what is returned may be changed in place
}

std::tuple<Tensor, Tensor> forward_meta(const Tensor& x, const Optional&, const Optional&, const Tensor& W,
                                        const Optional&, double, int64_t) {
  c10::SymDimVector sizes(x.sym_sizes().begin(), x.sym_sizes().end());
  auto rows = x.sym_numel() / sizes.back();
  sizes.back() = W.sym_size(0);
  return {at::empty_symint(sizes, W.options()), at::empty_symint({2, rows}, x.options().dtype(at::kFloat))};
}

// ---- Backward ---------------------------------------------------------------------------------------------

struct Gradients {
  Tensor dx, dgamma, dbeta, dW, db;
};

// The tensors of a backward pass, which are contiguous but for W where it lies transposed, and the ways to
// compute it.
struct Pass {
  Call& call;
  Tensor dy, x, statistics, g, b, W;

  static bool splits(int64_t wanted) { return wanted & WEIGHT && wanted & (INPUT | NORM); }

  // Returns the gradients, in the least memory where that is asked for or there is no room otherwise.
  Gradients run(int64_t wanted) {
    if (call.options & LEAST) return splits(wanted) ? weight_first(wanted) : at_once(wanted | FEW_SHARES);
    try {
      return at_once(wanted);
    } catch (const c10::OutOfMemoryError&) {
      if (!splits(wanted)) throw;
    }
    return weight_first(wanted);
  }

  // Makes dW, and then the rest: ln_out is given back before dln is made.
  Gradients weight_first(int64_t wanted) {
    Tensor dW = at_once(WEIGHT | FEW_SHARES).dW;
    auto found = at_once((wanted & ~WEIGHT) | FEW_SHARES);
    found.dW = dW;
    return found;
  }

  Gradients at_once(int64_t wanted) {
    if (call.forked && splits(wanted)) return on_branches(wanted);
    if (call.dln != OWN || call.dW != OWN) return with_library(wanted);
    Gradients found;
    if (wanted & INPUT) found.dx = workbook::empty(x.sizes(), call.x_type);
    if (wanted & WEIGHT) {
      found.dW = workbook::empty({std::max(call.room, call.O * call.H)}, call.type);
      found.dW.unsafeGetTensorImpl()->set_sizes_contiguous({call.O, call.H});
    }
    launch(wanted, found);
    return found;
  }

  // Launches what the library makes of a backward pass. dln and ln_out are the caller's where `wanted` says
  // so.
  void launch(int64_t wanted, Gradients& into, const Tensor& dln = {}, const Tensor& ln_out = {}) {
    if (wanted & NORM)
      into.dgamma = workbook::empty({call.H}, call.x_type),
      into.dbeta = workbook::empty({call.H}, call.x_type);
    if (wanted & BIAS && !into.db.defined()) into.db = workbook::empty({call.O}, call.type);
    auto mean = address(statistics);
    std::array<int64_t, 22> words{0,
                                  0,
                                  0,
                                  0,
                                  call.rows,
                                  call.H,
                                  call.O,
                                  wanted,
                                  address(into.dx),
                                  address(into.dgamma),
                                  address(into.dbeta),
                                  address(into.dW),
                                  address(into.db),
                                  address(dy),
                                  address(x),
                                  mean,
                                  mean + 4 * call.rows,
                                  address(g),
                                  address(b),
                                  address(W),
                                  address(dln),
                                  address(ln_out)};
    call.library.launch("workbook_layernorm_linear_backward", words, call.device);
  }

  // One product or both are PyTorch's.
  Gradients with_library(int64_t wanted) {
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
      // Over dln where that has its dtype; but one launch for few rows reads dln while it writes dx. That
      // takes no more memory at the peak than dW, which comes when dln is gone.
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
    bool large =
        elements >= ALONG_SUMS_ELEMENTS && call.rows * elements >= ALONG_SUMS_FROM && call.rows % 4 == 0;
    return large && call.type == at::kFloat &&
           at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
               at::Float32Precision::TF32;
  }

  // dW, from an ln_out of its own, beside all the rest; and beside both the sum of many columns of dY, where
  // no product of this project makes it on its way. What more than one branch uses is of the current stream's
  // memory, and kept until they have met.
  Gradients on_branches(int64_t wanted) {
    Branches branches(call.device);
    bool apart = wanted & BIAS && call.dln != OWN && call.rows * call.O >= MANY_SUMS;
    Gradients beside{{}, {}, {}, workbook::empty({call.O, call.H}, call.type), {}};
    Tensor ln_out;
    if (apart) beside.db = workbook::empty({call.O}, call.type);
    if (call.dW != OWN) ln_out = workbook::empty({call.rows, call.H}, call.type);
    branches.start();
    if (call.dW == OWN) {
      launch(WEIGHT, beside);
    } else {
      launch(LN_OUT_TAKEN, beside, {}, ln_out);
      at::mm_out(beside.dW, dy.view({call.rows, call.O}).t(), ln_out);
    }
    if (apart) {
      branches.start();
      launch(BIAS, beside);
    }
    branches.back();
    auto found = with_library(wanted & ~(WEIGHT | (apart ? BIAS : 0)));
    branches.meet();
    found.dW = beside.dW;
    if (apart) found.db = beside.db;
    return found;
  }
};

using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // dx, dgamma, dbeta, dW, db

Five backward_device(const Tensor& dy, const Tensor& x, const Tensor& statistics, const Optional& gamma,
                     const Optional& beta, const Tensor& W, int64_t wanted, int64_t options) {
  c10::DeviceGuard guard(x.device());
  Plain plain;
  prepare_products(x.device());
  Call call(x, gamma, beta, W, {}, options);
  TORCH_CHECK(dy.scalar_type() == call.type && dy.numel() == call.rows * call.O, "grad: expected ", call.rows,
              " rows of ", call.O, " in the dtype of weight");
  Pass pass{call,
            dy.contiguous(),
            x.contiguous(),
            statistics.contiguous(),
            or_filled(gamma, call.H, call.x_type, 1),
            or_filled(beta, call.H, call.x_type, 0),
            call.transposed ? W : W.contiguous()};
  Gradients found;
  if (call.rows) {
    found = pass.run(wanted);
  } else {
    if (wanted & INPUT) found.dx = at::zeros_like(pass.x);
    if (wanted & NORM) found.dgamma = at::zeros_like(pass.g), found.dbeta = at::zeros_like(pass.b);
    if (wanted & WEIGHT) found.dW = at::zeros_like(W);
    if (wanted & BIAS) found.db = at::zeros({call.O}, W.options());
  }
  for (auto* each : {&found.dx, &found.dgamma, &found.dbeta, &found.dW, &found.db}) {
    if (!each->defined()) *each = workbook::empty({0}, call.type);
  }
  return {found.dx, found.dgamma, found.dbeta, found.dW, found.db};
}

Five backward_meta(const Tensor&, const Tensor& x, const Tensor&, const Optional&, const Optional&,
                   const Tensor& W, int64_t wanted, int64_t) {
  auto H = W.sym_size(1), O = W.sym_size(0);
  auto made = [&](int64_t bit, const Tensor& like, at::SymIntArrayRef sizes) {
    return wanted & bit ? at::empty_symint(sizes, like.options()) : at::empty_symint({0}, W.options());
  };
  bool transposed = wanted & WEIGHT && lies_transposed(W);
  Tensor dW = transposed ? at::empty_symint({H, O}, W.options()).t() : made(WEIGHT, W, {O, H});
  return {made(INPUT, x, x.sym_sizes()), made(NORM, x, {H}), made(NORM, x, {H}), dW, made(BIAS, W, {O})};
}

// ---- The operator -----------------------------------------------------------------------------------------

auto& forward_op() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("mojo_workbook::layernorm_linear_forward", "")
                       .typed<decltype(forward_device)>();
  return op;
}
auto& backward_op() {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("mojo_workbook::layernorm_linear_backward", "")
                       .typed<decltype(backward_device)>();
  return op;
}

// Computes by PyTorch's own operations, which have every derivative. Autocast's LayerNorm is in float32, and
// rounded once.
Tensor with_torch(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c,
                  double eps, bool mixed) {
  auto ln_out = at::layer_norm_symint(x, {W.sym_size(1)}, g, b, eps);
  if (mixed && ln_out.scalar_type() == at::kFloat) ln_out = ln_out.to(W.scalar_type());
  return at::linear(ln_out, W, c);
}

struct LayerNormLinearBackward : Node {
  SavedVariable x, statistics, g, b, W;
  double eps;
  int64_t options;
  bool biased, mixed;

  std::string name() const override { return "LayerNormLinearBackward"; }
  void release_variables() override {
    for (auto* each : {&x, &statistics, &g, &b, &W}) each->reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return variable_list(5);
    if (c10::GradMode::is_enabled()) return differentiable(grads[0], kept(), needed());
    return gradients(grads[0], kept(), needed(), options);
  }

  // Returns x, the statistics, gamma, beta and W.
  variable_list kept() const { return {x.unpack(), statistics.unpack(), g.unpack(), b.unpack(), W.unpack()}; }

  // Returns which inputs need a gradient, a bit for each.
  int64_t needed() {
    int64_t bits = 0;
    for (int i = 0; i < 5; ++i) bits |= int64_t(task_should_compute_output(i)) << i;
    return bits;
  }

  static variable_list gradients(const Tensor& dy, const variable_list& kept, int64_t needed,
                                 int64_t options) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto any = [&](int64_t bits, int64_t part) { return needed & bits ? part : 0; };
    int64_t wanted = any(1, INPUT) | any(2 | 4, NORM) | any(8, WEIGHT) | any(16, BIAS);
    auto [dx, dg, db, dW, dc] = backward_op().call(dy, kept[0], kept[1], optional(kept[2]), optional(kept[3]),
                                                   kept[4], wanted, options);
    variable_list found{dx, dg, db, dW, dc};
    for (int i = 0; i < 5; ++i)
      if (!(needed >> i & 1)) found[i].reset();
    return found;
  }

  // create_graph: the gradients by PyTorch's own operations, so that they can be differentiated again.
  variable_list differentiable(const Tensor& dy, const variable_list& kept, int64_t needed) {
    variable_list in{kept[0], kept[2], kept[3], kept[4], {}}, asked, out(5);
    if (biased) in[4] = at::zeros_symint({in[3].sym_size(0)}, in[3].options()).requires_grad_();
    auto y = with_torch(in[0], optional(in[1]), optional(in[2]), in[3], optional(in[4]), eps, mixed);
    for (int i = 0; i < 5; ++i)
      if (needed >> i & 1) asked.push_back(in[i]);
    auto found = torch::autograd::grad({y}, asked, {dy}, true, true, true);
    for (int i = 0, j = 0; i < 5; ++i)
      if (needed >> i & 1) out[i] = found[j++];
    return out;
  }

  // Compiled autograd: the backward operator becomes a call of the graph that it traces.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (auto* each : {&x, &statistics, &g, &b, &W}) args.collect(*each, false);
    args.collect(options);
  }

  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    SavedVariable* all[] = {&x, &statistics, &g, &b, &W};
    for (auto* each : all) saved.before(*each);
    auto tensors = kept();
    std::vector<c10::IValue> given(tensors.begin(), tensors.end());
    std::vector<at::TypePtr> types(given.size(), at::TensorType::get());
    for (int64_t number : {needed(), options})
      given.emplace_back(number), types.emplace_back(at::IntType::get());
    auto run = [](const variable_list& grads, const std::vector<c10::IValue>& given) {
      variable_list kept;
      for (int i = 0; i < 5; ++i) kept.push_back(given[i].toTensor());
      return grads[0].defined() ? gradients(grads[0], kept, given[5].toInt(), given[6].toInt())
                                : variable_list(5);
    };
    auto metadata =
        torch::dynamo::autograd::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::
            pack(torch::dynamo::autograd::get_input_metadata(next_edges()));
    auto& python = torch::dynamo::autograd::getPyCompilerInterface();
    auto name_of_run = python->bind_function(saved.get_py_compiler(), name(), run, types, true, true);
    auto found = python->call_function(saved.get_py_compiler(), "apply_functional", name_of_run, grads, given,
                                       metadata);
    for (auto* each : all) saved.after(*each);
    return found;
  }
};

Tensor layernorm_linear(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W,
                        const Optional& c, double eps, int64_t options, bool mixed) {
  bool own = fits(x, g, b, W, c) && (mixed || x.scalar_type() == W.scalar_type()) && !in_transform() &&
             !has_tangent(x, g, b, W, c) &&
             library_for(x.scalar_type(), W.scalar_type())->available(x.device());
  if (!own) return with_torch(x, g, b, W, c, eps, mixed);
  auto forward = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return forward_op().call(x, g, b, W, c, eps, options);
  };
  if (!torch::autograd::compute_requires_grad(x, g, b, W, c)) return std::get<0>(forward());
  auto node = make_node<LayerNormLinearBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, g, b, W, c));
  auto [y, statistics] = forward();
  torch::autograd::set_history(y, node);
  node->x = SavedVariable(x, false), node->statistics = SavedVariable(statistics, false);
  node->g = SavedVariable(g, false), node->b = SavedVariable(b, false), node->W = SavedVariable(W, false);
  node->eps = eps, node->options = options, node->biased = c && c->defined(), node->mixed = mixed;
  return y;
}

Tensor plain_call(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c,
                  double eps, int64_t options) {
  return layernorm_linear(x, g, b, W, c, eps, options, false);
}

// Returns the choice of products in bits (plan.mojo), or -1 where PyTorch's own operations run.
int64_t plan(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W, const Optional& c,
             int64_t options, bool captured) {
  bool own = fits(x, g, b, W, c) && library_for(x.scalar_type(), W.scalar_type())->available(x.device());
  return own ? Call(x, g, b, W, c, options, captured).bits : -1;
}

// Calls a function under autocast with arguments as PyTorch's own layers cast them: the LayerNorm's to
// float32, the product's to autocast's dtype. Where x, gamma and beta have that dtype already, kernels that
// read it and compute in float32 do the same.
template <class Run>
auto in_autocast(Run run, const Tensor& x, const Optional& g, const Optional& b, const Tensor& W,
                 const Optional& c) {
  c10::impl::ExcludeDispatchKeyGuard without(at::autocast_dispatch_keyset);
  auto type = at::autocast::get_autocast_dtype(DEVICE);
  auto in = [&](at::ScalarType to, const Optional& t) {
    return t && t->defined() ? Optional(at::autocast::cached_cast(to, *t, DEVICE)) : t;
  };
  auto narrow = [&](const Optional& t) { return !t || !t->defined() || t->scalar_type() == type; };
  auto norm = narrow(x) && narrow(g) && narrow(b) ? type : at::kFloat;
  return run(*in(norm, x), in(norm, g), in(norm, b), *in(type, W), in(type, c));
}

Tensor call_in_autocast(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W,
                        const Optional& c, double eps, int64_t options) {
  auto run = [&](auto&&... tensors) { return layernorm_linear(tensors..., eps, options, true); };
  return in_autocast(run, x, g, b, W, c);
}

int64_t plan_in_autocast(const Tensor& x, const Optional& g, const Optional& b, const Tensor& W,
                         const Optional& c, int64_t options, bool captured) {
  auto run = [&](auto&&... tensors) { return plan(tensors..., options, captured); };
  return in_autocast(run, x, g, b, W, c);
}
}  // namespace

#define ARGUMENTS \
  "(Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor weight, Tensor? bias, float eps, int options=0)"
TORCH_LIBRARY_FRAGMENT(mojo_workbook, m) {
  m.def("layernorm_linear" ARGUMENTS " -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("layernorm_linear_forward" ARGUMENTS " -> (Tensor, Tensor)", {at::Tag::pt2_compliant_tag});
  m.def(
      "layernorm_linear_backward(Tensor grad, Tensor x, Tensor statistics, Tensor? ln_weight, Tensor? "
      "ln_bias, Tensor weight, "
      "int wanted, int options=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "layernorm_linear_plan(Tensor x, Tensor? ln_weight, Tensor? ln_bias, Tensor weight, Tensor? bias, int "
      "options, "
      "bool captured) -> int");
}
TORCH_LIBRARY_IMPL(mojo_workbook, CompositeImplicitAutograd, m) {
  m.impl("layernorm_linear", plain_call);
  m.impl("layernorm_linear_plan", plan);
}
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_AUTOCAST, m) {
  m.impl("layernorm_linear", call_in_autocast);
  m.impl("layernorm_linear_plan", plan_in_autocast);
}
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_DEVICE, m) {
  m.impl("layernorm_linear_forward", forward_device);
  m.impl("layernorm_linear_backward", backward_device);
}
TORCH_LIBRARY_IMPL(mojo_workbook, Meta, m) {
  m.impl("layernorm_linear_forward", forward_meta);
  m.impl("layernorm_linear_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(mojo_workbook, Autograd, m) {
  m.impl("layernorm_linear_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("layernorm_linear_backward", torch::autograd::autogradNotImplementedFallback());
}
