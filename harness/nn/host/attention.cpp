// Attention: softmax(scale q k^T + mask) v, with dropout, also for packed sequences. The Mojo library's part `plan`
// selects the kernels (harness/nn/kernels/attention/choice.mojo); PyTorch's operations compute unsupported calls.
#include "host.h"

using namespace workbook;

namespace {
using c10::SymInt;

constexpr int64_t CHUNK = 8;  // elements in 16 bytes, the alignment of the kernels' rows
constexpr int64_t NO_DIAGONAL = (int64_t(1) << 31) - (1 << 20);  // the diagonal without a causal mask
constexpr int64_t KEEP_ONE = 65536;  // dropout keeps a probability with frequency `keep_threshold` / KEEP_ONE
constexpr int64_t PORTABLE = 1, LENGTHS = 2, BACKWARD = 4, MASK_GRADIENT = 8;  // flags for the kernel selection
constexpr int64_t QKV = 7, ATTN_MASK = 8;  // bits of the requested gradients: query, key or value; mask
enum Part : int64_t { BASIC, MASK, PORTABLE_PART, DROPOUT, VARLEN };  // parts of the library, as in choice.mojo

Library plan("attention", "plan");
Library bfloat16_libraries[] = {{"attention", "bfloat16"}, {"attention", "bfloat16_mask"},
    {"attention", "bfloat16_portable"}, {"attention", "bfloat16_dropout"}, {"attention", "bfloat16_varlen"}};
Library float16_libraries[] = {{"attention", "float16"}, {"attention", "float16_mask"},
    {"attention", "float16_portable"}, {"attention", "float16_dropout"}, {"attention", "float16_varlen"}};

std::atomic<bool> portable{false};  // whether to use the portable kernels also on Hopper, for comparisons

bool has_kernels(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// The options of a call.
struct Options {
  double scale;
  int64_t diagonal;  // query s attends to keys up to s + diagonal
  int64_t mask_block;  // an element of the mask applies to this many queries and keys
  int64_t keep_threshold;

  Options(double scale, std::optional<int64_t> diagonal, int64_t mask_block, int64_t keep_threshold)
      : scale(scale), diagonal(diagonal.value_or(NO_DIAGONAL)), mask_block(mask_block),
        keep_threshold(keep_threshold) {}
  explicit Options(const Numbers& numbers)
      : Options(numbers.reals[0], numbers.integers[0], numbers.integers[1], numbers.integers[2]) {}
  Options(std::optional<double> scale_, const Tensor& query, std::optional<SymInt> diagonal_, int64_t mask_block = 1,
          double dropout_p = 0)
      : scale(scale_ ? *scale_ : 1 / std::sqrt(double(query.sym_size(-1).guard_int(__FILE__, __LINE__)))),
        diagonal(diagonal_ ? diagonal_->guard_int(__FILE__, __LINE__) : NO_DIAGONAL), mask_block(mask_block),
        keep_threshold(KEEP_ONE - std::llround(dropout_p * double(KEEP_ONE))) {}
  Numbers numbers() const { return {{diagonal, mask_block, keep_threshold}, {scale}}; }
  std::optional<SymInt> causal() const {
    return diagonal == NO_DIAGONAL ? std::nullopt : std::optional<SymInt>(diagonal);
  }
};

// The tensors of a call, [B, heads, length, d]; an additive mask, the offsets of sequences, the state of dropout.
struct Inputs { Tensor q, k, v; Optional mask, offsets, state; };

// ---- Calls of the Mojo library ------------------------------------------------------------------------------

// Returns the size, or 1 if it is symbolic.
int64_t size_or_one(const SymInt& size) { return size.maybe_as_int().value_or(1); }

// Returns the stride of an axis; for an axis of size 1, any stride that the kernels support.
int64_t kernel_stride(const Tensor& t, int64_t axis) {
  if (size_or_one(t.sym_size(axis)) > 1) return size_or_one(t.sym_stride(axis));
  return CHUNK * ((size_or_one(t.sym_size(3)) + CHUNK - 1) / CHUNK);
}

// The arguments of a call as 64-bit words, in the order of call.mojo.
struct Call {
  static constexpr size_t SELECTION = 4, SIZES = 5, SCALE = 17, KEEP_THRESHOLD = 18, STATE = 19, ADDRESSES = 20,
                          STRIDES = 33, WORD_COUNT = 57;
  enum Role : size_t {
    OUT, LSE, QUERY, KEY, VALUE, MASK_OR_OFFSETS, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_OUT, DELTA, GRAD_LSE, GRAD_MASK
  };
  using Roles = std::initializer_list<std::pair<Role, Optional>>;

  Words words;
  int64_t lengths;
  at::ScalarType type;
  c10::Device device;

  Call(const Inputs& in, const Options& options, Roles extra_tensors = {})
      : words(WORD_COUNT, 0), lengths(in.offsets ? LENGTHS : 0), type(in.q.scalar_type()), device(in.q.device()) {
    auto S = size_or_one(in.q.sym_size(2)), T = size_or_one(in.k.sym_size(2));
    auto B = size_or_one(in.q.sym_size(0)), N = size_or_one(in.q.sym_size(1)), G = size_or_one(in.k.sym_size(1));
    int64_t sizes[] = {B, N, G, S, T, size_or_one(in.q.sym_size(3)), std::clamp(options.diagonal, -S, T)};
    std::copy(std::begin(sizes), std::end(sizes), words.begin() + SIZES);
    words[SCALE] = bits(options.scale), words[KEEP_THRESHOLD] = options.keep_threshold;
    set_tensor(QUERY, in.q), set_tensor(KEY, in.k), set_tensor(VALUE, in.v);
    if (in.offsets) words[SIZES + 11] = in.offsets->size(1) - 1, set_tensor(MASK_OR_OFFSETS, *in.offsets);
    if (in.state) words[STATE] = data(*in.state);
    for (int axis = 0; in.mask && axis < 4; ++axis)
      words[SIZES + 7 + axis] = size_or_one(in.mask->sym_size(axis)) == 1 ? 0 : size_or_one(in.mask->sym_stride(axis));
    if (in.mask) words[SIZES + 11] = options.mask_block, set_tensor(MASK_OR_OFFSETS, *in.mask);
    for (auto& [role, tensor] : extra_tensors) if (tensor) set_tensor(role, *tensor);
  }

  static int64_t data(const Tensor& t) { return t.has_storage() && t.storage().data() ? address(t) : 0; }

  void set_tensor(Role role, const Tensor& t) {
    words[ADDRESSES + role] = data(t);
    constexpr Role strided[] = {QUERY, KEY, VALUE, OUT, GRAD_OUT, GRAD_QUERY, GRAD_KEY, GRAD_VALUE};
    auto position = std::find(std::begin(strided), std::end(strided), role);
    for (int axis = 0; position != std::end(strided) && axis < 3; ++axis)
      words[STRIDES + 3 * (position - strided) + axis] = kernel_stride(t, axis);
  }

  // Returns the selected kernels, and why faster ones do not support the call. Flags: BACKWARD, MASK_GRADIENT.
  std::pair<int64_t, std::string> select_kernels(int64_t flags) {
    words[SELECTION] = flags | lengths | (portable ? PORTABLE : 0);
    return plan.query("workbook_attention_plan", device, words);
  }

  Library& library(int64_t part) { return (type == at::kHalf ? float16_libraries : bfloat16_libraries)[part]; }

  // Launches the kernels selected for a pass, from their part of the library or from `part`.
  void launch(const char* name, int64_t flags, std::optional<Part> part = {}) {
    auto [selection, reason] = select_kernels(flags);
    TORCH_CHECK(selection, "mojo_workbook: attention has no kernel: ", reason);
    words[SELECTION] = selection % CHUNK;
    library(part.value_or(Part(selection / CHUNK))).launch(name, device, words);
  }
};

// Returns the tensor, or a copy unless rows are contiguous and aligned to 16 bytes, and no axis is broadcast.
Tensor align_rows(const Tensor& t) {
  bool is_aligned = (t.size(3) == 1 || t.stride(3) == 1) && address(t) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis)
    is_aligned = is_aligned && (t.size(axis) == 1 || (t.stride(axis) > 0 && t.stride(axis) % CHUNK == 0));
  return is_aligned ? t : t.clone(at::MemoryFormat::Contiguous);
}
Optional contiguous(const Optional& t) { return t ? Optional(t->contiguous()) : t; }

// Returns strides for [B, N, S, d]: contiguous, or with `heads_last` as [B, S, N, d], to merge heads without a copy.
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

Tensors2 forward_device(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask,
                        const Optional& offsets, const Optional& state, double scale, std::optional<int64_t> diagonal,
                        int64_t mask_block, int64_t keep_threshold) {
  c10::DeviceGuard guard(q.device());
  BelowAutograd below;
  Tensor out = result_like(q), lse = workbook::empty(q.sizes().slice(0, 3), at::kFloat);
  if (is_empty(q, k) || offsets) out.zero_(), lse.fill_(-INFINITY);  // for rows outside of all sequences
  if (is_empty(q, k)) return {out, lse};
  Inputs in{align_rows(q), align_rows(k), align_rows(v), mask, offsets, state};
  Options options(scale, diagonal, mask_block, keep_threshold);
  Call(in, options, {{Call::OUT, out}, {Call::LSE, lse}}).launch("workbook_attention_forward", 0);
  return {out, lse};
}

Tensors2 forward_meta(const Tensor& q, const Tensor&, const Tensor&, const Optional&, const Optional&, const Optional&,
                 double, std::optional<SymInt>, int64_t, int64_t) {
  return {meta_like(q), at::empty_symint(q.sym_sizes().slice(0, 3), q.options().dtype(at::kFloat))};
}

// The backward pass from the output and the gradient of lse, or from delta of entire rows if the call has only a part
// of the keys. Returns the gradients of query, key, value and mask (in the mask's shape), empty if not requested.
Tensors4 backward_device(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Optional& out,
                     const Tensor& lse, const Optional& delta, const Optional& grad_lse, const Optional& mask,
                     const Optional& offsets, const Optional& state, double scale, std::optional<int64_t> diagonal,
                     int64_t mask_block, int64_t keep_threshold, int64_t requested) {
  c10::DeviceGuard guard(q.device());
  BelowAutograd below;
  auto type = q.scalar_type();
  Tensor dq, dk, dv, grad_mask;
  if (requested & QKV) dq = result_like(q), dk = result_like(k), dv = result_like(v);
  if (requested & ATTN_MASK) grad_mask = at::empty_like(*mask, at::MemoryFormat::Contiguous);
  Tensors4 grads = {or_empty(dq, type), or_empty(dk, type), or_empty(dv, type), or_empty(grad_mask, type)};
  if (is_empty(q, k) || offsets) std::apply([](auto&... gradient) { (gradient.zero_(), ...); }, grads);
  if (is_empty(q, k)) return grads;
  Inputs in{align_rows(q), align_rows(k), align_rows(v), mask, offsets, state};
  Options options(scale, diagonal, mask_block, keep_threshold);
  Tensor dO = align_rows(grad_out), L = lse.contiguous();
  Optional O = out ? align_rows(*out) : out, D = contiguous(delta), dL = contiguous(grad_lse);
  Call::Roles inputs{{Call::OUT, O}, {Call::LSE, L}, {Call::GRAD_OUT, dO}, {Call::DELTA, D}, {Call::GRAD_LSE, dL}};
  if (requested & QKV) {
    Call call(in, options, inputs);
    call.set_tensor(Call::GRAD_QUERY, dq), call.set_tensor(Call::GRAD_KEY, dk), call.set_tensor(Call::GRAD_VALUE, dv);
    call.launch("workbook_attention_backward", BACKWARD);
  }
  if (requested & ATTN_MASK) {
    in.mask = mask->contiguous();
    Call call(in, options, inputs);
    call.set_tensor(Call::GRAD_MASK, grad_mask);
    call.launch("workbook_attention_mask_gradient", BACKWARD | MASK_GRADIENT, MASK);
  }
  return grads;
}

Tensors4 backward_meta(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v, const Optional&, const Tensor&,
                   const Optional&, const Optional&, const Optional& mask, const Optional&, const Optional&, double,
                   std::optional<SymInt>, int64_t, int64_t, int64_t requested) {
  auto empty_or_meta = [&](const Tensor& t) { return requested & QKV ? meta_like(t) : at::empty({0}, t.options()); };
  return {empty_or_meta(q), empty_or_meta(k), empty_or_meta(v),
          meta_result(requested & ATTN_MASK, mask ? mask->sym_sizes() : q.sym_sizes(), q.options())};
}

// ---- Autograd -----------------------------------------------------------------------------------------------

// Calls PyTorch's own operations, which have all derivatives; registered by harness/nn/attention_formula.py.
Tensors2 call_formula(const Inputs& in, const Options& o) {
  static auto op = find_operator<decltype(forward_meta)>("mojo_workbook::attention_by_formula");
  return op.call(in.q, in.k, in.v, in.mask, in.offsets, in.state, o.scale, o.causal(), o.mask_block, o.keep_threshold);
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
    auto [dq, dk, dv, grad_mask] = backward.call(
        dO, saved[0], saved[1], saved[2], saved[3], saved[4], {}, optional(grads[1]), optional(saved[5]),
        optional(saved[6]), optional(saved[7]), o.scale, o.causal(), o.mask_block, o.keep_threshold, needed);
    return {dq, dk, dv, grad_mask};
  }

  static std::pair<variable_list, variable_list> recompute_with_torch(const variable_list& saved,
                                                                      const Numbers& numbers, int64_t) {
    Inputs in{saved[0], saved[1], saved[2], optional(saved[5]), optional(saved[6]), optional(saved[7])};
    auto [out, lse] = call_formula(in, Options(numbers));
    return {{in.q, in.k, in.v, saved[5]}, {out, lse}};
  }
};

Tensors2 call_kernels(const Inputs& in, const Options& o) {
  static auto op = find_operator<decltype(forward_meta)>("mojo_workbook::attention_forward");
  auto [out, lse] = call_below_autograd(op, in.q, in.k, in.v, in.mask, in.offsets, in.state, o.scale, o.causal(),
                                   o.mask_block, o.keep_threshold);
  if (torch::autograd::compute_requires_grad(in.q, in.k, in.v, in.mask))
    record<Operator>({out, lse}, {in.q, in.k, in.v, out, lse, in.mask, in.offsets, in.state}, o.numbers(), in.q, in.k,
                     in.v, in.mask);
  return {out, lse};
}

// Returns the reason why the kernels do not support a call, including its backward pass if a gradient is required.
std::optional<std::string> find_unsupported(const Inputs& in, const Options& o, bool backward = false) {
  if (in_transform()) return "within a transform of torch.func";
  if (has_tangent(in.q, in.k, in.v, in.mask)) return "in forward mode";
  auto type = in.q.scalar_type();
  if (!has_kernels(type))
    return c10::str("query is of ", c10::toString(type), "; the kernels are for bfloat16 and float16");
  auto device = in.q.device();
  if (!plan.available(device)) return c10::str("there are no kernels for ", device);
  Call call(in, o);
  bool requires_grad = torch::autograd::compute_requires_grad(in.q, in.k, in.v, in.mask);
  bool grad_mask = in.mask && requires_grad && in.mask->requires_grad();
  for (int64_t pass_flags : {int64_t(0), BACKWARD | (grad_mask ? MASK_GRADIENT : 0)}) {
    if (pass_flags && !backward && !requires_grad) break;
    auto [selection, reason] = call.select_kernels(pass_flags);
    if (!selection) return reason;
    if (!call.library(selection / CHUNK).available(device) || (grad_mask && !call.library(MASK).available(device)))
      return "there is no library for this GPU";
  }
  return {};
}

// ---- Arguments with four axes ---------------------------------------------------------------------------

// Query [B, N, S, d], key and value [B, G, T, d], mask (B, N, S, T or 1 each); the caller's [..., N] and value's d.
struct Folded : Inputs {
  c10::SymDimVector leading_axes;
  SymInt columns;

  // Returns the output with the caller's axes and number of columns.
  Tensor unfold(const Tensor& out) const {
    bool is_padded = out.sym_size(3) != columns;
    if (!is_padded && leading_axes.size() == 2) return out;
    return unfold_rows(is_padded ? out.slice_symint(3, 0, columns) : out, {out.sym_size(2), columns});
  }
  Tensor unfold_rows(const Tensor& rows, std::initializer_list<SymInt> last_axes) const {
    auto shape = leading_axes;
    shape.append(last_axes.begin(), last_axes.end());
    return rows.reshape_symint(shape);
  }
};

SymInt round_up_to_chunk(const SymInt& n) { return (n + (CHUNK - 1)) / CHUNK * CHUNK; }

Tensor pad_last_axis(const Tensor& t, const SymInt& width) {
  return t.sym_size(-1) == width ? t : at::constant_pad_nd_symint(t, {0, width - t.sym_size(-1)});
}

Tensor to_four_axes(Tensor mask, c10::SymDimVector scores, at::ScalarType type) {
  if (mask.scalar_type() == at::kBool) {
    // Convert to an additive mask, 0 for true and -inf for false, with rows aligned to 16 bytes.
    auto T = mask.sym_size(-1);
    Tensor rows = T == 1 ? mask : pad_last_axis(mask, round_up_to_chunk(T));
    mask = rows.to(type, false, false, at::MemoryFormat::Contiguous).log_().slice_symint(-1, 0, T);
  }
  while (mask.dim() < std::max<int64_t>(4, int64_t(scores.size()))) mask = mask.unsqueeze(0);
  if (mask.dim() == 4) return mask;
  c10::SymDimVector sizes(mask.sym_sizes().begin(), mask.sym_sizes().end());
  std::copy(scores.begin(), scores.end() - 3, sizes.begin());
  return mask.expand_symint(sizes).flatten(0, -4);
}

// Folds all leading axes except the heads into one batch axis, and pads both head dimensions to the same multiple of a
// chunk. Padding query and key does not change the scores; padding value adds output columns that unfold removes.
Folded fold(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask, bool enable_gqa,
            int64_t mask_block = 1) {
  size_t last_axes = enable_gqa ? 3 : 2;
  auto leading = [&](const Tensor& t) { return t.sym_sizes().slice(0, t.dim() - last_axes); };
  auto batch = at::infer_size_symdimvector(at::infer_size_symdimvector(leading(query), leading(key)), leading(value));
  auto columns = value.sym_size(-1);
  auto width = query.sym_size(-1) > columns ? query.sym_size(-1) : columns;
  if (has_kernels(query.scalar_type())) width = round_up_to_chunk(width);
  auto fold_tensor = [&](const Tensor& tensor) {
    Tensor t = pad_last_axis(tensor, width);
    c10::SymDimVector sizes(batch);
    sizes.insert(sizes.end(), t.sym_sizes().end() - last_axes, t.sym_sizes().end());
    if (t.sym_sizes() != at::SymIntArrayRef(sizes)) t = t.expand_symint(sizes);
    while (t.dim() < 4) t = t.unsqueeze(0);
    return t.dim() == 4 ? t : t.flatten(0, -4);
  };
  Folded folded{{fold_tensor(query), fold_tensor(key), fold_tensor(value), {}, {}, {}}, batch, columns};
  if (enable_gqa) folded.leading_axes.push_back(query.sym_size(-3));
  folded.mask = mask;
  if (mask && mask_block == 1) {
    auto scores = folded.leading_axes;
    scores.push_back(query.sym_size(-2)), scores.push_back(key.sym_size(-2));
    folded.mask = to_four_axes(*mask, scores, query.scalar_type());
  }
  return folded;
}

// Raises for mismatched arguments; harness/nn/attention_arguments.py has an error message for each condition.
void check(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask, bool enable_gqa) {
  auto type = query.scalar_type();
  auto on_query_device = [&](const Tensor& t) { return t.layout() == at::kStrided && t.device() == query.device(); };
  auto matches_query = [&](const Tensor& t) {
    return on_query_device(t) && t.dim() >= (enable_gqa ? 3 : 2) && t.scalar_type() == type;
  };
  bool match = at::isFloatingType(type) && matches_query(query) && matches_query(key) && matches_query(value) &&
               key.sym_size(-1) == query.sym_size(-1) && value.sym_size(-2) == key.sym_size(-2) &&
               key.sym_size(-1) >= 1 && value.sym_size(-1) >= 1;
  if (match && enable_gqa) {
    auto N = query.sym_size(-3), G = key.sym_size(-3);
    match = value.sym_size(-3) == G && G > 0 && N % G == 0;
  }
  if (mask)
    match = match && on_query_device(*mask) && (mask->scalar_type() == at::kBool || mask->scalar_type() == type);
  TORCH_CHECK_VALUE(match, "attention: axes, sizes, dtypes or devices do not fit");
}

// ---- The operators ------------------------------------------------------------------------------------------

// Query s attends to keys up to s + diagonal; without `diagonal`, to all keys.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask,
                 double dropout_p, std::optional<SymInt> diagonal, std::optional<double> scale, bool enable_gqa) {
  check(query, key, value, attn_mask, enable_gqa);
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, "dropout_p: expected a probability from 0 to 1");
  auto in = fold(query, key, value, attn_mask, enable_gqa);
  Options o(scale, query, diagonal, 1, dropout_p);
  bool has_dropout = o.keep_threshold != KEEP_ONE;
  if (!find_unsupported(in, o)) {
    if (has_dropout) in.state = at::randint(int64_t(1) << 62, {2}, query.options().dtype(at::kLong));
    return in.unfold(std::get<0>(call_kernels(in, o)));
  }
  bool needs_all_derivatives = in_transform() || has_tangent(in.q, in.k, in.v, in.mask);
  if (needs_all_derivatives && !has_dropout) return in.unfold(std::get<0>(call_formula(in, o)));
  static auto torch_op = find_operator<decltype(attention)>("mojo_workbook::attention_by_torch");
  bool gqa = in.q.sym_size(1) != in.k.sym_size(1);
  return in.unfold(torch_op.call(in.q, in.k, in.v, in.mask, has_dropout ? dropout_p : 0, diagonal, o.scale, gqa));
}

// Returns the output and lse [..., N, S], without dropout. Each mask element may apply to a block of queries and keys.
Tensors2 attention_with_lse(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask,
                       std::optional<SymInt> diagonal, std::optional<double> scale, bool enable_gqa,
                       int64_t mask_block) {
  check(query, key, value, attn_mask, enable_gqa);
  auto in = fold(query, key, value, attn_mask, enable_gqa, mask_block);
  Options o(scale, query, diagonal, mask_block);
  auto [out, lse] = find_unsupported(in, o) ? call_formula(in, o) : call_kernels(in, o);
  return {in.unfold(out), in.unfold_rows(lse, {query.sym_size(-2)})};
}

// Returns the gradients of tensors [B, heads, length, d] from the output or from delta of entire rows.
Tensors3 attention_gradients(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Optional& out, const Tensor& lse, const Optional& delta, const Optional& mask,
                          std::optional<SymInt> diagonal, std::optional<double> scale, int64_t mask_block) {
  Options o(scale, q, diagonal, mask_block);
  bool requires_grad = torch::autograd::compute_requires_grad(grad_out, q, k, v, out, lse, delta, mask) ||
                        has_tangent(grad_out, out, lse, delta);
  if (requires_grad || find_unsupported({q, k, v, mask, {}, {}}, o, true)) {
    static auto op = find_operator<decltype(attention_gradients)>("mojo_workbook::attention_gradients_by_formula");
    return op.call(grad_out, q, k, v, out, lse, delta, mask, diagonal, o.scale, mask_block);
  }
  static auto op = find_operator<decltype(backward_meta)>("mojo_workbook::attention_backward");
  auto [dq, dk, dv, grad_mask] = op.call(grad_out, q, k, v, out, lse, delta, {}, mask, {}, {}, o.scale, diagonal,
                                       mask_block, KEEP_ONE, QKV);
  return {dq, dk, dv};
}

// Computes concatenated sequences [total, heads, d] with int32 offsets [2, sequences + 1] of queries and keys.
Tensor attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& offsets,
                        std::optional<SymInt> diagonal, std::optional<double> scale) {
  auto heads_first = [](const Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
  auto in = fold(heads_first(query), heads_first(key), heads_first(value), {}, true);
  in.offsets = offsets;
  Options o(scale, query, diagonal);
  auto [out, lse] = find_unsupported(in, o) ? call_formula(in, o) : call_kernels(in, o);
  return out.slice_symint(3, 0, in.columns).squeeze(0).transpose(0, 1);
}

// Describes in one line which kernels a call runs, and why.
std::string attention_explain(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask,
                              double dropout_p, std::optional<double> scale, bool enable_gqa, int64_t mask_block) {
  auto in = fold(query, key, value, attn_mask, enable_gqa, mask_block);
  Options o(scale, query, {}, mask_block, dropout_p);
  if (auto reason = find_unsupported(in, o)) return "PyTorch's own operations: " + *reason;
  auto [kernel, reason] = Call(in, o).select_kernels(BACKWARD);
  return std::string(kernel % CHUNK <= 2 ? "wgmma" : "mma.sync") + (reason.empty() ? "" : ": " + reason);
}
}  // namespace

#define QKV "(Tensor query, Tensor key, Tensor value, "
#define GRAD_QKV "(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
#define OPTIONS "float scale, SymInt? diagonal, int mask_block, int keep_threshold"
#define FORWARD_SCHEMA QKV "Tensor? attn_mask, Tensor? offsets, Tensor? state, " OPTIONS ") -> (Tensor, Tensor)"
#define GRADIENTS_SCHEMA GRAD_QKV "Tensor? out, Tensor lse, Tensor? delta, Tensor? attn_mask, SymInt? diagonal," \
    " float? scale, int mask_block) -> (Tensor, Tensor, Tensor)"
TORCH_LIBRARY_FRAGMENT(mojo_workbook, m) {
  at::Tag tag = at::Tag::pt2_compliant_tag;
  m.def("attention" QKV "Tensor? attn_mask=None, float dropout_p=0.0, SymInt? diagonal=None, float? scale=None,"
        " bool enable_gqa=False) -> Tensor", attention, {tag});
  m.def("attention_by_torch" QKV "Tensor? attn_mask, float dropout_p, SymInt? diagonal, float? scale,"
        " bool enable_gqa) -> Tensor", {tag});  // a default would not be passed to Python
  m.def("attention_with_lse" QKV "Tensor? attn_mask=None, SymInt? diagonal=None, float? scale=None,"
        " bool enable_gqa=False, int mask_block=1) -> (Tensor, Tensor)", attention_with_lse, {tag});
  m.def("attention_gradients" GRADIENTS_SCHEMA, attention_gradients, {tag});
  m.def("attention_gradients_by_formula" GRADIENTS_SCHEMA, {tag});
  m.def("attention_by_formula" FORWARD_SCHEMA, {tag});
  m.def("attention_varlen" QKV "Tensor offsets, SymInt? diagonal=None, float? scale=None) -> Tensor",
        attention_varlen, {tag});
  m.def("attention_explain" QKV "Tensor? attn_mask=None, float dropout_p=0.0, float? scale=None,"
        " bool enable_gqa=False, int mask_block=1) -> str", attention_explain);
  m.def("attention_portable(bool on) -> ()", [](bool on) { portable = on; });
  m.def("attention_forward" FORWARD_SCHEMA, {tag});
  m.def("attention_backward" GRAD_QKV "Tensor? out, Tensor lse, Tensor? delta, Tensor? grad_lse, Tensor? attn_mask,"
        " Tensor? offsets, Tensor? state, " OPTIONS ", int requested) -> (Tensor, Tensor, Tensor, Tensor)", {tag});
}
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_AUTOCAST, m) {
  m.impl("attention", AutocastWrapper<attention>::call);
  m.impl("attention_with_lse", AutocastWrapper<attention_with_lse>::call);
  m.impl("attention_varlen", AutocastWrapper<attention_varlen>::call);
}
WORKBOOK_LEAF("attention_forward", forward_device, forward_meta)
WORKBOOK_LEAF("attention_backward", backward_device, backward_meta)
