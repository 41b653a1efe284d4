// Attention: softmax(scale q k^T + mask) v, with dropout and for sequences of unequal lengths. The Mojo library's part
// `plan` selects the kernels (harness/nn/kernels/attention/choice.mojo); PyTorch's operations compute other calls.
#include "host.h"

using namespace workbook;

namespace {
using c10::SymInt;

constexpr int64_t CHUNK = 8;  // elements in 16 bytes, to which the kernels' rows are aligned
constexpr int64_t EVERY_KEY = (int64_t(1) << 31) - (1 << 20);  // the diagonal without a causal mask
constexpr int64_t ONE = 65536;  // a probability is kept with a chance of `kept` / ONE
constexpr int64_t PORTABLE = 1, LENGTHS = 2, BACKWARD = 4, MASK_GRADIENT = 8;  // bits of a kernel selection
constexpr int64_t QKV = 7, OF_MASK = 8;  // bits of the gradients to compute: query, key or value; mask
enum Part : int64_t { BASIC, MASK, PORTABLE_PART, DROPOUT, VARLEN };  // parts of the library, as in choice.mojo

Library plan("attention", "plan");
Library of_bfloat16[] = {{"attention", "bfloat16"}, {"attention", "bfloat16_mask"}, {"attention", "bfloat16_portable"},
                         {"attention", "bfloat16_dropout"}, {"attention", "bfloat16_varlen"}};
Library of_float16[] = {{"attention", "float16"}, {"attention", "float16_mask"}, {"attention", "float16_portable"},
                        {"attention", "float16_dropout"}, {"attention", "float16_varlen"}};

std::atomic<bool> portable{false};  // use the kernels for every GPU on Hopper too, for comparisons

bool has_kernels(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// The options of a call.
struct Options {
  double scale;
  int64_t diagonal;  // a query sees this many keys past its own position
  int64_t mask_block;  // an element of the mask applies to this many queries and keys
  int64_t kept;

  Options(double scale, std::optional<int64_t> diagonal, int64_t mask_block, int64_t kept)
      : scale(scale), diagonal(diagonal.value_or(EVERY_KEY)), mask_block(mask_block), kept(kept) {}
  explicit Options(const Numbers& numbers)
      : Options(numbers.reals[0], numbers.integers[0], numbers.integers[1], numbers.integers[2]) {}
  Options(std::optional<double> scale_, const Tensor& query, std::optional<SymInt> diagonal_, int64_t mask_block = 1,
          double dropout_p = 0)
      : scale(scale_ ? *scale_ : 1 / std::sqrt(double(query.sym_size(-1).guard_int(__FILE__, __LINE__)))),
        diagonal(diagonal_ ? diagonal_->guard_int(__FILE__, __LINE__) : EVERY_KEY), mask_block(mask_block),
        kept(ONE - std::llround(dropout_p * double(ONE))) {}
  Numbers numbers() const { return {{diagonal, mask_block, kept}, {scale}}; }
  std::optional<SymInt> causal() const { return diagonal == EVERY_KEY ? std::nullopt : std::optional<SymInt>(diagonal); }
};

// The tensors of a call, [B, heads, length, d]; an additive mask, offsets of sequences, and dropout's random state.
struct Inputs {
  Tensor q, k, v;
  Optional mask, offsets, state;
};

// ---- Calls of the Mojo library ------------------------------------------------------------------------------

int64_t known(const SymInt& size) { return size.maybe_as_int().value_or(1); }  // 1 if tracing leaves it unknown

// Returns the stride of an axis; for an axis of size 1, any stride that the kernels support.
int64_t step(const Tensor& t, int64_t axis) {
  if (known(t.sym_size(axis)) > 1) return known(t.sym_stride(axis));
  return CHUNK * ((known(t.sym_size(3)) + CHUNK - 1) / CHUNK);
}

// The words of a call, in the order of call.mojo.
struct Call {
  static constexpr size_t WHAT = 4, SIZES = 5, SCALE = 17, KEPT = 18, STATE = 19, ADDRESSES = 20, STRIDES = 33, ALL = 57;
  enum Role : size_t {
    OUT, LSE, QUERY, KEY, VALUE, READ, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_OUT, DELTA, GRAD_LSE, GRAD_MASK
  };
  using Roles = std::initializer_list<std::pair<Role, Optional>>;

  Words words;
  int64_t lengths;
  at::ScalarType type;
  c10::Device device;

  Call(const Inputs& in, const Options& options, Roles more = {})
      : words(ALL, 0), lengths(in.offsets ? LENGTHS : 0), type(in.q.scalar_type()), device(in.q.device()) {
    auto S = known(in.q.sym_size(2)), T = known(in.k.sym_size(2));
    auto B = known(in.q.sym_size(0)), N = known(in.q.sym_size(1)), G = known(in.k.sym_size(1));
    int64_t sizes[] = {B, N, G, S, T, known(in.q.sym_size(3)), std::clamp(options.diagonal, -S, T)};
    std::copy(std::begin(sizes), std::end(sizes), words.begin() + SIZES);
    words[SCALE] = bits(options.scale), words[KEPT] = options.kept;
    put(QUERY, in.q), put(KEY, in.k), put(VALUE, in.v);
    if (in.offsets) words[SIZES + 11] = in.offsets->size(1) - 1, put(READ, *in.offsets);
    if (in.state) words[STATE] = data(*in.state);
    for (int axis = 0; in.mask && axis < 4; ++axis)
      words[SIZES + 7 + axis] = known(in.mask->sym_size(axis)) == 1 ? 0 : known(in.mask->sym_stride(axis));
    if (in.mask) words[SIZES + 11] = options.mask_block, put(READ, *in.mask);
    for (auto& [role, tensor] : more)
      if (tensor) put(role, *tensor);
  }

  static int64_t data(const Tensor& t) { return t.has_storage() && t.storage().data() ? address(t) : 0; }

  void put(Role role, const Tensor& t) {
    words[ADDRESSES + role] = data(t);
    constexpr Role strided[] = {QUERY, KEY, VALUE, OUT, GRAD_OUT, GRAD_QUERY, GRAD_KEY, GRAD_VALUE};
    auto found = std::find(std::begin(strided), std::end(strided), role);
    for (int axis = 0; found != std::end(strided) && axis < 3; ++axis)
      words[STRIDES + 3 * (found - strided) + axis] = step(t, axis);
  }

  // Selects the kernels, and returns why not faster ones; `how` has the bits BACKWARD and MASK_GRADIENT.
  std::pair<int64_t, std::string> choice(int64_t how) {
    words[WHAT] = how | lengths | (portable ? PORTABLE : 0);
    return plan.ask("workbook_attention_plan", device, words);
  }

  Library& library(int64_t part) { return (type == at::kHalf ? of_float16 : of_bfloat16)[part]; }

  // Launches the kernels that are selected for a pass, from their part of the library or from `part`.
  void launch(const char* name, int64_t how, std::optional<Part> part = {}) {
    auto [chosen, reason] = choice(how);
    TORCH_CHECK(chosen, "mojo_workbook: attention has no kernel: ", reason);
    words[WHAT] = chosen % CHUNK;
    library(part.value_or(Part(chosen / CHUNK))).launch(name, device, words);
  }
};

// Returns the tensor, or a copy if the kernels cannot read it: rows must be contiguous and begin at multiples of 16
// bytes, and no axis may be broadcast.
Tensor aligned(const Tensor& t) {
  bool fits = (t.size(3) == 1 || t.stride(3) == 1) && address(t) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis)
    fits = fits && (t.size(axis) == 1 || (t.stride(axis) > 0 && t.stride(axis) % CHUNK == 0));
  return fits ? t : t.clone(at::MemoryFormat::Contiguous);
}
Optional contiguous(const Optional& t) { return t ? Optional(t->contiguous()) : t; }

// Returns the strides of a dense result [B, N, S, d]. If heads are within rows, as models split them, they stay there,
// so that joining the heads needs no copy.
template <class Int>
std::array<Int, 4> dense_strides(at::ArrayRef<Int> size, bool heads_last) {
  if (heads_last) return {size[1] * size[2] * size[3], size[3], size[1] * size[3], Int(1)};
  return {size[1] * size[2] * size[3], size[2] * size[3], size[3], Int(1)};
}

Tensor result_like(const Tensor& t) {
  return empty_strided(t.sizes(), dense_strides<int64_t>(t.sizes(), t.stride(1) < t.stride(2)), t.scalar_type());
}

Tensor meta_like(const Tensor& t) {
  auto strides = dense_strides<SymInt>(t.sym_sizes(), t.sym_stride(1) < t.sym_stride(2));
  return at::empty_strided_symint(t.sym_sizes(), strides, t.options());
}

// ---- The leaf operators -------------------------------------------------------------------------------------

bool is_empty(const Tensor& q, const Tensor& k) { return !q.numel() || !k.numel(); }

Two forward_device(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask, const Optional& offsets,
                   const Optional& state, double scale, std::optional<int64_t> diagonal, int64_t mask_block,
                   int64_t kept) {
  c10::DeviceGuard guard(q.device());
  BelowAutograd below;
  Tensor out = result_like(q), lse = workbook::empty(q.sizes().slice(0, 3), at::kFloat);
  if (is_empty(q, k) || offsets) out.zero_(), lse.fill_(-INFINITY);  // for rows outside every sequence
  if (is_empty(q, k)) return {out, lse};
  Inputs in{aligned(q), aligned(k), aligned(v), mask, offsets, state};
  Options options(scale, diagonal, mask_block, kept);
  Call(in, options, {{Call::OUT, out}, {Call::LSE, lse}}).launch("workbook_attention_forward", 0);
  return {out, lse};
}

Two forward_meta(const Tensor& q, const Tensor&, const Tensor&, const Optional&, const Optional&, const Optional&,
                 double, std::optional<SymInt>, int64_t, int64_t) {
  return {meta_like(q), at::empty_symint(q.sym_sizes().slice(0, 3), q.options().dtype(at::kFloat))};
}

// The backward pass from the output and the gradient of lse, or from delta of whole rows if the call covers only some
// of the keys. Returns the gradients of query, key, value and mask (in the mask's shape), empty if not needed.
Four backward_device(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Optional& out,
                     const Tensor& lse, const Optional& delta, const Optional& grad_lse, const Optional& mask,
                     const Optional& offsets, const Optional& state, double scale, std::optional<int64_t> diagonal,
                     int64_t mask_block, int64_t kept, int64_t wanted) {
  c10::DeviceGuard guard(q.device());
  BelowAutograd below;
  auto type = q.scalar_type();
  Tensor dq, dk, dv, of_mask;
  if (wanted & QKV) dq = result_like(q), dk = result_like(k), dv = result_like(v);
  if (wanted & OF_MASK) of_mask = at::empty_like(*mask, at::MemoryFormat::Contiguous);
  Four found = {or_empty(dq, type), or_empty(dk, type), or_empty(dv, type), or_empty(of_mask, type)};
  if (is_empty(q, k) || offsets) std::apply([](auto&... gradient) { (gradient.zero_(), ...); }, found);
  if (is_empty(q, k)) return found;
  Inputs in{aligned(q), aligned(k), aligned(v), mask, offsets, state};
  Options options(scale, diagonal, mask_block, kept);
  Tensor dO = aligned(grad_out), L = lse.contiguous();
  Optional O = out ? aligned(*out) : out, D = contiguous(delta), dL = contiguous(grad_lse);
  Call::Roles read{{Call::OUT, O}, {Call::LSE, L}, {Call::GRAD_OUT, dO}, {Call::DELTA, D}, {Call::GRAD_LSE, dL}};
  if (wanted & QKV) {
    Call call(in, options, read);
    call.put(Call::GRAD_QUERY, dq), call.put(Call::GRAD_KEY, dk), call.put(Call::GRAD_VALUE, dv);
    call.launch("workbook_attention_backward", BACKWARD);
  }
  if (wanted & OF_MASK) {
    in.mask = mask->contiguous();
    Call call(in, options, read);
    call.put(Call::GRAD_MASK, of_mask);
    call.launch("workbook_attention_mask_gradient", BACKWARD | MASK_GRADIENT, MASK);
  }
  return found;
}

Four backward_meta(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v, const Optional&, const Tensor&,
                   const Optional&, const Optional&, const Optional& mask, const Optional&, const Optional&, double,
                   std::optional<SymInt>, int64_t, int64_t, int64_t wanted) {
  auto made = [&](const Tensor& t) { return wanted & QKV ? meta_like(t) : at::empty({0}, t.options()); };
  return {made(q), made(k), made(v), meta_result(wanted & OF_MASK, mask ? mask->sym_sizes() : q.sym_sizes(), q.options())};
}

// ---- Autograd -----------------------------------------------------------------------------------------------

// PyTorch's own operations, which have every derivative; harness/nn/attention_formula.py registers them.
Two formula(const Inputs& in, const Options& o) {
  static auto op = find_operator<decltype(forward_meta)>("mojo_workbook::attention_by_formula");
  return op.call(in.q, in.k, in.v, in.mask, in.offsets, in.state, o.scale, o.causal(), o.mask_block, o.kept);
}

// Saves query, key, value, out, lse, mask, offsets and state.
struct Operator {
  static constexpr auto NAME = "AttentionBackward";
  static constexpr size_t INPUTS = 4, SAVED = 8;
  static constexpr int64_t OUTPUTS = 1 << 3 | 1 << 4;

  static variable_list gradients(const variable_list& grads, const variable_list& saved, const Numbers& numbers,
                                 int64_t needed) {
    static auto backward = find_operator<decltype(backward_meta)>("mojo_workbook::attention_backward");
    Tensor dO = grads[0].defined() ? grads[0] : at::zeros_like(saved[3]);
    Options o(numbers);
    auto [dq, dk, dv, of_mask] = backward.call(
        dO, saved[0], saved[1], saved[2], saved[3], saved[4], {}, optional(grads[1]), optional(saved[5]),
        optional(saved[6]), optional(saved[7]), o.scale, o.causal(), o.mask_block, o.kept, needed);
    return {dq, dk, dv, of_mask};
  }

  static std::pair<variable_list, variable_list> by_torch(const variable_list& saved, const Numbers& numbers, int64_t) {
    Inputs in{saved[0], saved[1], saved[2], optional(saved[5]), optional(saved[6]), optional(saved[7])};
    auto [out, lse] = formula(in, Options(numbers));
    return {{in.q, in.k, in.v, saved[5]}, {out, lse}};
  }
};

Two with_kernels(const Inputs& in, const Options& o) {
  static auto op = find_operator<decltype(forward_meta)>("mojo_workbook::attention_forward");
  auto [out, lse] = below_autograd(op, in.q, in.k, in.v, in.mask, in.offsets, in.state, o.scale, o.causal(),
                                   o.mask_block, o.kept);
  if (torch::autograd::compute_requires_grad(in.q, in.k, in.v, in.mask))
    record<Operator>({out, lse}, {in.q, in.k, in.v, out, lse, in.mask, in.offsets, in.state}, o.numbers(), in.q, in.k,
                     in.v, in.mask);
  return {out, lse};
}

// Returns why the kernels do not support a call, in both passes if a gradient is needed, or nothing if they do.
std::optional<std::string> unsupported(const Inputs& in, const Options& o, bool backward = false) {
  if (in_transform()) return "within a transform of torch.func";
  if (has_tangent(in.q, in.k, in.v, in.mask)) return "in forward mode";
  auto type = in.q.scalar_type();
  if (!has_kernels(type))
    return c10::str("query is of ", c10::toString(type), "; the kernels are for bfloat16 and float16");
  auto device = in.q.device();
  if (!plan.available(device)) return c10::str("there are no kernels for ", device);
  Call call(in, o);
  bool recorded = torch::autograd::compute_requires_grad(in.q, in.k, in.v, in.mask);
  bool of_mask = in.mask && recorded && in.mask->requires_grad();
  for (int64_t pass : {int64_t(0), BACKWARD | (of_mask ? MASK_GRADIENT : 0)}) {
    if (pass && !backward && !recorded) break;
    auto [chosen, reason] = call.choice(pass);
    if (!chosen) return reason;
    if (!call.library(chosen / CHUNK).available(device) || (of_mask && !call.library(MASK).available(device)))
      return "there is no library for this GPU";
  }
  return {};
}

// ---- Arguments with four axes ---------------------------------------------------------------------------

// Query [B, N, S, d], key and value [B, G, T, d], the mask [B or 1, N or 1, S or 1, T or 1], the caller's leading axes
// [..., N], and the columns of value.
struct Folded : Inputs {
  c10::SymDimVector lead;
  SymInt columns;

  // Returns an output with the caller's axes and columns.
  Tensor unfold(const Tensor& out) const {
    bool padded = out.sym_size(3) != columns;
    if (!padded && lead.size() == 2) return out;
    return unfold_rows(padded ? out.slice_symint(3, 0, columns) : out, {out.sym_size(2), columns});
  }
  Tensor unfold_rows(const Tensor& rows, std::initializer_list<SymInt> last) const {
    auto shape = lead;
    shape.append(last.begin(), last.end());
    return rows.reshape_symint(shape);
  }
};

SymInt whole_chunks(const SymInt& n) { return (n + (CHUNK - 1)) / CHUNK * CHUNK; }

Tensor padded(const Tensor& t, const SymInt& width) {
  return t.sym_size(-1) == width ? t : at::constant_pad_nd_symint(t, {0, width - t.sym_size(-1)});
}

Tensor four_axes(Tensor mask, c10::SymDimVector scores, at::ScalarType type) {
  if (mask.scalar_type() == at::kBool) {
    // Convert to an additive mask, 0 for true and -inf for false, with rows that begin at multiples of 16 bytes.
    auto T = mask.sym_size(-1);
    Tensor rows = T == 1 ? mask : padded(mask, whole_chunks(T));
    mask = rows.to(type, false, false, at::MemoryFormat::Contiguous).log_().slice_symint(-1, 0, T);
  }
  while (mask.dim() < std::max<int64_t>(4, int64_t(scores.size()))) mask = mask.unsqueeze(0);
  if (mask.dim() == 4) return mask;
  c10::SymDimVector sizes(mask.sym_sizes().begin(), mask.sym_sizes().end());
  std::copy(scores.begin(), scores.end() - 3, sizes.begin());
  return mask.expand_symint(sizes).flatten(0, -4);
}

// Folds all leading axes but the heads into one batch, and pads both head dimensions to the same whole chunks. Zeros
// after query and key do not change the scores; zeros after value become output columns that unfold cuts off.
Folded fold(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask, bool enable_gqa,
            int64_t mask_block = 1) {
  size_t last = enable_gqa ? 3 : 2;
  auto leading = [&](const Tensor& t) { return t.sym_sizes().slice(0, t.dim() - last); };
  auto batch = at::infer_size_symdimvector(at::infer_size_symdimvector(leading(query), leading(key)), leading(value));
  auto columns = value.sym_size(-1);
  auto width = query.sym_size(-1) > columns ? query.sym_size(-1) : columns;
  if (has_kernels(query.scalar_type())) width = whole_chunks(width);
  auto four = [&](const Tensor& given) {
    Tensor t = padded(given, width);
    c10::SymDimVector sizes(batch);
    sizes.insert(sizes.end(), t.sym_sizes().end() - last, t.sym_sizes().end());
    if (t.sym_sizes() != at::SymIntArrayRef(sizes)) t = t.expand_symint(sizes);
    while (t.dim() < 4) t = t.unsqueeze(0);
    return t.dim() == 4 ? t : t.flatten(0, -4);
  };
  Folded folded{{four(query), four(key), four(value), {}, {}, {}}, batch, columns};
  if (enable_gqa) folded.lead.push_back(query.sym_size(-3));
  folded.mask = mask;
  if (mask && mask_block == 1) {
    auto scores = folded.lead;
    scores.push_back(query.sym_size(-2)), scores.push_back(key.sym_size(-2));
    folded.mask = four_axes(*mask, scores, query.scalar_type());
  }
  return folded;
}

// Raises for arguments that do not match; harness/nn/attention_arguments.py lists the conditions.
void check(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask, bool enable_gqa) {
  auto type = query.scalar_type();
  auto similar = [&](const Tensor& t) { return t.layout() == at::kStrided && t.device() == query.device(); };
  auto alike = [&](const Tensor& t) { return similar(t) && t.dim() >= (enable_gqa ? 3 : 2) && t.scalar_type() == type; };
  bool fits = at::isFloatingType(type) && alike(query) && alike(key) && alike(value) &&
              key.sym_size(-1) == query.sym_size(-1) && value.sym_size(-2) == key.sym_size(-2) &&
              key.sym_size(-1) >= 1 && value.sym_size(-1) >= 1;
  if (fits && enable_gqa) {
    auto N = query.sym_size(-3), G = key.sym_size(-3);
    fits = value.sym_size(-3) == G && G > 0 && N % G == 0;
  }
  if (mask) fits = fits && similar(*mask) && (mask->scalar_type() == at::kBool || mask->scalar_type() == type);
  TORCH_CHECK_VALUE(fits, "attention: axes, sizes, dtypes or devices do not fit");
}

// ---- The operators ------------------------------------------------------------------------------------------

// A query sees the keys up to `diagonal` past its own position; without `diagonal`, all keys.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask,
                 double dropout_p, std::optional<SymInt> diagonal, std::optional<double> scale, bool enable_gqa) {
  check(query, key, value, attn_mask, enable_gqa);
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, "dropout_p: expected a probability from 0 to 1");
  auto in = fold(query, key, value, attn_mask, enable_gqa);
  Options o(scale, query, diagonal, 1, dropout_p);
  bool drops = o.kept != ONE;
  if (!unsupported(in, o)) {
    if (drops) in.state = at::randint(int64_t(1) << 62, {2}, query.options().dtype(at::kLong));
    return in.unfold(std::get<0>(with_kernels(in, o)));
  }
  bool every_derivative = in_transform() || has_tangent(in.q, in.k, in.v, in.mask);
  if (every_derivative && !drops) return in.unfold(std::get<0>(formula(in, o)));
  static auto by_torch = find_operator<decltype(attention)>("mojo_workbook::attention_by_torch");
  bool gqa = in.q.sym_size(1) != in.k.sym_size(1);
  return in.unfold(by_torch.call(in.q, in.k, in.v, in.mask, drops ? dropout_p : 0, diagonal, o.scale, gqa));
}

// Returns the output and lse [..., N, S], without dropout. An element of the mask may be for a block of both.
Two attention_with_lse(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask,
                       std::optional<SymInt> diagonal, std::optional<double> scale, bool enable_gqa,
                       int64_t mask_block) {
  check(query, key, value, attn_mask, enable_gqa);
  auto in = fold(query, key, value, attn_mask, enable_gqa, mask_block);
  Options o(scale, query, diagonal, mask_block);
  auto [out, lse] = unsupported(in, o) ? formula(in, o) : with_kernels(in, o);
  return {in.unfold(out), in.unfold_rows(lse, {query.sym_size(-2)})};
}

// Returns the gradients of tensors [B, heads, length, d] from the output or from delta of whole rows.
Three attention_gradients(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Optional& out, const Tensor& lse, const Optional& delta, const Optional& mask,
                          std::optional<SymInt> diagonal, std::optional<double> scale, int64_t mask_block) {
  Options o(scale, q, diagonal, mask_block);
  bool differentiated = torch::autograd::compute_requires_grad(grad_out, q, k, v, out, lse, delta, mask) ||
                        has_tangent(grad_out, out, lse, delta);
  if (differentiated || unsupported({q, k, v, mask, {}, {}}, o, true)) {
    static auto op = find_operator<decltype(attention_gradients)>("mojo_workbook::attention_gradients_by_formula");
    return op.call(grad_out, q, k, v, out, lse, delta, mask, diagonal, o.scale, mask_block);
  }
  static auto op = find_operator<decltype(backward_meta)>("mojo_workbook::attention_backward");
  auto [dq, dk, dv, of_mask] = op.call(grad_out, q, k, v, out, lse, delta, {}, mask, {}, {}, o.scale, diagonal,
                                       mask_block, ONE, QKV);
  return {dq, dk, dv};
}

// Computes sequences that are concatenated: [total, heads, d], with int32 offsets [2, sequences + 1] of queries and keys.
Tensor attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& offsets,
                        std::optional<SymInt> diagonal, std::optional<double> scale) {
  auto heads_first = [](const Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
  auto in = fold(heads_first(query), heads_first(key), heads_first(value), {}, true);
  in.offsets = offsets;
  Options o(scale, query, diagonal);
  auto [out, lse] = unsupported(in, o) ? formula(in, o) : with_kernels(in, o);
  return out.slice_symint(3, 0, in.columns).squeeze(0).transpose(0, 1);
}

// Returns in one line which kernels a call runs, and why.
std::string attention_explain(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask,
                              double dropout_p, std::optional<double> scale, bool enable_gqa, int64_t mask_block) {
  auto in = fold(query, key, value, attn_mask, enable_gqa, mask_block);
  Options o(scale, query, {}, mask_block, dropout_p);
  if (auto cause = unsupported(in, o)) return "PyTorch's own operations: " + *cause;
  auto [kernel, reason] = Call(in, o).choice(BACKWARD);
  return std::string(kernel % CHUNK <= 2 ? "wgmma" : "mma.sync") + (reason.empty() ? "" : ": " + reason);
}
}  // namespace

#define QKV "(Tensor query, Tensor key, Tensor value, "
#define GRAD_QKV "(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
#define OPTIONS "float scale, SymInt? diagonal, int mask_block, int kept"
#define OF_FORWARD QKV "Tensor? attn_mask, Tensor? offsets, Tensor? state, " OPTIONS ") -> (Tensor, Tensor)"
#define OF_GRADIENTS GRAD_QKV "Tensor? out, Tensor lse, Tensor? delta, Tensor? attn_mask, SymInt? diagonal," \
    " float? scale, int mask_block) -> (Tensor, Tensor, Tensor)"
TORCH_LIBRARY_FRAGMENT(mojo_workbook, m) {
  at::Tag tag = at::Tag::pt2_compliant_tag;
  m.def("attention" QKV "Tensor? attn_mask=None, float dropout_p=0.0, SymInt? diagonal=None, float? scale=None,"
        " bool enable_gqa=False) -> Tensor", attention, {tag});
  m.def("attention_by_torch" QKV "Tensor? attn_mask, float dropout_p, SymInt? diagonal, float? scale,"
        " bool enable_gqa) -> Tensor", {tag});  // a default would not be passed to Python
  m.def("attention_with_lse" QKV "Tensor? attn_mask=None, SymInt? diagonal=None, float? scale=None,"
        " bool enable_gqa=False, int mask_block=1) -> (Tensor, Tensor)", attention_with_lse, {tag});
  m.def("attention_gradients" OF_GRADIENTS, attention_gradients, {tag});
  m.def("attention_gradients_by_formula" OF_GRADIENTS, {tag});
  m.def("attention_by_formula" OF_FORWARD, {tag});
  m.def("attention_varlen" QKV "Tensor offsets, SymInt? diagonal=None, float? scale=None) -> Tensor",
        attention_varlen, {tag});
  m.def("attention_explain" QKV "Tensor? attn_mask=None, float dropout_p=0.0, float? scale=None,"
        " bool enable_gqa=False, int mask_block=1) -> str", attention_explain);
  m.def("attention_portable(bool on) -> ()", [](bool on) { portable = on; });
  m.def("attention_forward" OF_FORWARD, {tag});
  m.def("attention_backward" GRAD_QKV "Tensor? out, Tensor lse, Tensor? delta, Tensor? grad_lse, Tensor? attn_mask,"
        " Tensor? offsets, Tensor? state, " OPTIONS ", int wanted) -> (Tensor, Tensor, Tensor, Tensor)", {tag});
}
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_AUTOCAST, m) {
  m.impl("attention", UnderAutocast<attention>::call);
  m.impl("attention_with_lse", UnderAutocast<attention_with_lse>::call);
  m.impl("attention_varlen", UnderAutocast<attention_varlen>::call);
}
WORKBOOK_LEAF("attention_forward", forward_device, forward_meta)
WORKBOOK_LEAF("attention_backward", backward_device, backward_meta)
