// Attention: softmax(scale q k^T + mask) v, with dropout and for sequences of unequal lengths. The Mojo library's part
// `plan` selects the kernels (harness/nn/kernels/attention/choice.mojo); PyTorch's own operations compute other calls.
#include "host.h"

using namespace workbook;

namespace {
using c10::SymInt;

constexpr int64_t CHUNK = 8;  // elements in 16 bytes, to which the kernels' rows are aligned
constexpr int64_t EVERY_KEY = (int64_t(1) << 31) - (1 << 20);  // the diagonal without a causal mask
constexpr int64_t ONE = 65536;  // probabilities are kept with a frequency of `kept` / ONE
constexpr int64_t PORTABLE = 1, LENGTHS = 2, BACKWARD = 4, MASK_GRADIENT = 8;  // kernels to select, added
enum Part : int64_t { BASIC, MASK, PORTABLE_PART, DROPOUT, VARLEN };  // of the library, as in choice.mojo

Library plan("attention", "plan");
Library of_bfloat16[] = {{"attention", "bfloat16"}, {"attention", "bfloat16_mask"}, {"attention", "bfloat16_portable"},
                         {"attention", "bfloat16_dropout"}, {"attention", "bfloat16_varlen"}};
Library of_float16[] = {{"attention", "float16"}, {"attention", "float16_mask"}, {"attention", "float16_portable"},
                        {"attention", "float16_dropout"}, {"attention", "float16_varlen"}};

std::atomic<bool> portable{false};  // use the kernels for every GPU on a Hopper too: for comparisons

bool has_kernels(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// The options of a call.
struct Options {
  double scale;
  int64_t diagonal;  // a query sees so many keys past its own position
  int64_t mask_block;  // an element of the mask is for so many queries and keys
  int64_t kept;

  explicit Options(const Numbers& numbers)
      : scale(numbers.reals[0]), diagonal(numbers.integers[0]), mask_block(numbers.integers[1]),
        kept(numbers.integers[2]) {}
  Options(std::optional<double> scale_, const Tensor& query, std::optional<SymInt> diagonal_, int64_t mask_block = 1,
          double dropout_p = 0)
      : scale(scale_ ? *scale_ : 1 / std::sqrt(double(query.sym_size(-1).guard_int(__FILE__, __LINE__)))),
        diagonal(diagonal_ ? diagonal_->guard_int(__FILE__, __LINE__) : EVERY_KEY), mask_block(mask_block),
        kept(ONE - std::llround(dropout_p * double(ONE))) {}
  Numbers numbers() const { return {{diagonal, mask_block, kept}, {scale}}; }
};

// The tensors of a call [B, heads, length, d]; a mask to add, offsets of sequences, and dropout's random state.
struct Inputs {
  Tensor q, k, v;
  Optional mask, offsets, state;
};

// ---- Calls of the Mojo library ------------------------------------------------------------------------------

int64_t known(const SymInt& size) { return size.maybe_as_int().value_or(1); }  // 1 if a graph is traced without it

// Returns the stride of an axis; for a single element, one that the kernels support.
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
  at::ScalarType type;
  c10::Device device;

  Call(const Inputs& in, const Options& options, Roles more = {})
      : words(ALL, 0), type(in.q.scalar_type()), device(in.q.device()) {
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

  // Selects the kernels, and returns why no faster ones; `how` is LENGTHS, BACKWARD and MASK_GRADIENT, added.
  std::pair<int64_t, std::string> choice(int64_t how) {
    words[WHAT] = how | (portable ? PORTABLE : 0);
    return plan.ask("workbook_attention_plan", device, words);
  }

  Library& library(int64_t part) { return (type == at::kHalf ? of_float16 : of_bfloat16)[part]; }

  // Launches the kernels that are selected for a pass, from their part of the library or the given one.
  void launch(const char* name, int64_t how, std::optional<Part> part = {}) {
    auto [chosen, reason] = choice(how);
    TORCH_CHECK(chosen, "mojo_workbook: attention has no kernel: ", reason);
    words[WHAT] = chosen % CHUNK;
    library(part.value_or(Part(chosen / CHUNK))).launch(name, device, words);
  }
};

int64_t how(const Inputs& in) { return in.offsets ? LENGTHS : 0; }

// Returns the tensor, or a copy if the kernels cannot read it: rows must be contiguous and begin at multiples of 16
// bytes, and no element may be several.
Tensor aligned(const Tensor& t) {
  bool fits = (t.size(3) == 1 || t.stride(3) == 1) && address(t) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis)
    fits = fits && (t.size(axis) == 1 || (t.stride(axis) > 0 && t.stride(axis) % CHUNK == 0));
  return fits ? t : t.clone(at::MemoryFormat::Contiguous);
}
Optional contiguous(const Optional& t) { return t ? Optional(t->contiguous()) : t; }

// Returns the strides of a dense result [B, N, S, d]: heads within rows, as models split them, stay so, and joining
// them needs no copy.
template <class Int>
std::array<Int, 4> dense_strides(at::ArrayRef<Int> size, bool heads_last) {
  if (heads_last) return {size[1] * size[2] * size[3], size[3], size[1] * size[3], Int(1)};
  return {size[1] * size[2] * size[3], size[2] * size[3], size[3], Int(1)};
}

Tensor result_like(const Tensor& t) {
  return empty_strided(t.sizes(), dense_strides<int64_t>(t.sizes(), t.stride(1) < t.stride(2)), t.scalar_type());
}

Tensor meta_result(const Tensor& t) {
  auto strides = dense_strides<SymInt>(t.sym_sizes(), t.sym_stride(1) < t.sym_stride(2));
  return at::empty_strided_symint(t.sym_sizes(), strides, t.options());
}

// ---- The leaf operators -------------------------------------------------------------------------------------

bool is_empty(const Tensor& q, const Tensor& k) { return !q.numel() || !k.numel(); }

Two forward_device(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask, const Optional& offsets,
                   const Optional& state, double scale, int64_t diagonal, int64_t mask_block, int64_t kept) {
  c10::DeviceGuard guard(q.device());
  BelowAutograd below;
  Tensor out = result_like(q), lse = workbook::empty(q.sizes().slice(0, 3), at::kFloat);
  if (is_empty(q, k) || offsets) out.zero_(), lse.fill_(-INFINITY);  // for rows of no sequence
  if (is_empty(q, k)) return {out, lse};
  Inputs in{aligned(q), aligned(k), aligned(v), mask, offsets, state};
  Options options(Numbers{{diagonal, mask_block, kept}, {scale}});
  Call(in, options, {{Call::OUT, out}, {Call::LSE, lse}}).launch("workbook_attention_forward", how(in));
  return {out, lse};
}

Two forward_meta(const Tensor& q, const Tensor&, const Tensor&, const Optional&, const Optional&, const Optional&,
                 double, SymInt, int64_t, int64_t) {
  return {meta_result(q), at::empty_symint(q.sym_sizes().slice(0, 3), q.options().dtype(at::kFloat))};
}

// The backward pass from the output and the gradient of lse, or from the delta of whole rows if the call is a part.
Three backward_device(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Optional& out,
                      const Tensor& lse, const Optional& delta, const Optional& grad_lse, const Optional& mask,
                      const Optional& offsets, const Optional& state, double scale, int64_t diagonal,
                      int64_t mask_block, int64_t kept) {
  c10::DeviceGuard guard(q.device());
  BelowAutograd below;
  Tensor dq = result_like(q), dk = result_like(k), dv = result_like(v);
  if (is_empty(q, k) || offsets) dq.zero_(), dk.zero_(), dv.zero_();
  if (is_empty(q, k)) return {dq, dk, dv};
  Inputs in{aligned(q), aligned(k), aligned(v), mask, offsets, state};
  Options options(Numbers{{diagonal, mask_block, kept}, {scale}});
  Tensor dO = aligned(grad_out), L = lse.contiguous();
  Optional O = out ? aligned(*out) : out, D = contiguous(delta), dL = contiguous(grad_lse);
  Call call(in, options, {{Call::OUT, O}, {Call::LSE, L}, {Call::GRAD_OUT, dO}, {Call::DELTA, D}, {Call::GRAD_LSE, dL},
                          {Call::GRAD_QUERY, dq}, {Call::GRAD_KEY, dk}, {Call::GRAD_VALUE, dv}});
  call.launch("workbook_attention_backward", BACKWARD | how(in));
  return {dq, dk, dv};
}

Three backward_meta(const Tensor&, const Tensor& q, const Tensor& k, const Tensor& v, const Optional&, const Tensor&,
                    const Optional&, const Optional&, const Optional&, const Optional&, const Optional&, double, SymInt,
                    int64_t, int64_t) {
  return {meta_result(q), meta_result(k), meta_result(v)};
}

// The gradient of a mask, in its own shape.
Tensor mask_backward_device(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Tensor& out, const Tensor& lse, const Optional& grad_lse, const Tensor& mask,
                            double scale, int64_t diagonal) {
  c10::DeviceGuard guard(q.device());
  BelowAutograd below;
  if (is_empty(q, k)) return at::zeros_like(mask, at::MemoryFormat::Contiguous);
  Tensor gradient = at::empty_like(mask, at::MemoryFormat::Contiguous);
  Tensor dO = aligned(grad_out), O = aligned(out), L = lse.contiguous();
  Optional dL = contiguous(grad_lse);
  Inputs in{aligned(q), aligned(k), aligned(v), mask.contiguous(), {}, {}};
  Call call(in, Options(Numbers{{diagonal, 1, ONE}, {scale}}),
            {{Call::OUT, O}, {Call::LSE, L}, {Call::GRAD_OUT, dO}, {Call::GRAD_LSE, dL},
             {Call::GRAD_MASK, gradient}});
  call.launch("workbook_attention_mask_gradient", BACKWARD | MASK_GRADIENT, MASK);
  return gradient;
}

Tensor mask_backward_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                          const Optional&, const Tensor& mask, double, SymInt) {
  return at::empty_symint(mask.sym_sizes(), mask.options());
}

// ---- PyTorch's own operations -------------------------------------------------------------------------------

// Returns the factors of the probabilities, [B, N, S, T], that the kernels draw (dropout.mojo): Philox4x32 of seven
// rounds on int64 words of 32 bits.
Tensor dropout_factors(const Tensor& state, at::IntArrayRef size, int64_t kept) {
  constexpr int64_t WORD = 0xFFFFFFFF;
  auto B = size[0], N = size[1], S = size[2], T = size[3], queries = (S + 31) / 32 * 4, keys = (T + 15) / 16 * 4;
  auto count = [&](int64_t n) { return at::arange(n, state.options()); };
  auto low = [](const Tensor& t) { return t.bitwise_and(WORD); };
  auto high = [&](const Tensor& t) { return low(t.bitwise_right_shift(32)); };
  Tensor bit = count(32).view({32, 1, 1, 1}), numbers = at::zeros({}, state.options());
  for (int64_t draw = 0; draw < 4; ++draw) {
    Tensor c[4] = {count(keys) * 4 + draw, count(queries).unsqueeze(1), count(B * N).view({-1, 1, 1}), low(state[1])};
    Tensor key0 = low(state[0]), key1 = high(state[0]);
    for (int round = 0; round < 7; ++round) {
      Tensor first = c[0] * 0xD2511F53, second = c[2] * 0xCD9E8D57;
      c[0] = high(second) ^ c[1] ^ key0, c[1] = low(second);
      c[2] = high(first) ^ c[3] ^ key1, c[3] = low(first);
      key0 = low(key0 + 0x9E3779B9), key1 = low(key1 + 0xBB67AE85);
    }
    for (int64_t word = 0; word < 4; ++word)
      numbers = numbers + c[word].bitwise_right_shift(bit).bitwise_and(1).bitwise_left_shift(4 * draw + word);
  }
  // The bits: query and query + 1, 16s of the 32, key and key + 1, 8s of the 16 queries, 8s of the 16 keys.
  numbers = numbers.reshape({2, 2, 2, 2, 2, B * N, queries / 4, 4, keys / 4, 4}).permute({5, 6, 1, 3, 7, 0, 8, 4, 9, 2});
  auto all = numbers.reshape({B, N, queries * 8, keys * 4}).slice(2, 0, S).slice(3, 0, T);
  return all.lt(kept).to(at::kFloat) * (kept ? double(ONE) / double(kept) : 0.0);
}

// Returns a tensor in the accumulation dtype, with a head for each of query's.
Tensor widened(const Tensor& t, const Tensor& query) {
  Tensor sums = t.to(wide(query.scalar_type()));
  auto N = query.sym_size(1), G = t.sym_size(1);
  return G == N ? sums : sums.repeat_interleave_symint(N / G, 1);
}

// Returns the scores [B, N, S, T], -inf if a query does not see a key.
Tensor masked_scores(const Inputs& in, const Options& o) {
  auto S = in.q.sym_size(2), T = in.k.sym_size(2);
  Tensor scores = at::matmul(widened(in.q, in.q) * o.scale, widened(in.k, in.q).mT());
  if (in.mask) {
    Tensor mask = *in.mask;
    for (int axis = 2; o.mask_block > 1 && axis < 4; ++axis)
      if (mask.size(axis) > 1)
        mask = mask.repeat_interleave(o.mask_block, axis).slice_symint(axis, 0, axis == 2 ? S : T);
    scores = scores + mask;
  }
  if (o.diagonal == EVERY_KEY) return scores;
  auto range = [&](const SymInt& n) { return at::arange(at::Scalar(n), in.q.options().dtype(at::kLong)); };
  return scores.masked_fill(range(T).gt(range(S).unsqueeze(1) + o.diagonal), -INFINITY);
}

// Computes output and lse with all scores in memory and every derivative. The maximum and the logarithm of the sum are
// added only for lse.
Two by_formula(const Inputs& in, const Options& o) {
  auto dtype = in.q.scalar_type();
  Tensor scores = masked_scores(in, o), V = widened(in.v, in.q);
  if (in.k.sym_size(2) == 0) return {at::matmul(scores, V).to(dtype), scores.sum(-1) - INFINITY};
  Tensor largest = scores.detach().amax(-1, true);
  largest = largest.masked_fill(largest == -INFINITY, 0);  // of a row that sees no key
  Tensor P = (scores - largest).exp(), total = P.sum(-1, true), none = total == 0;
  total = total.masked_fill(none, 1);
  P = P / total;
  Tensor lse = (largest + total.log()).masked_fill(none, -INFINITY).squeeze(-1);
  if (in.state) P = P * dropout_factors(*in.state, P.sizes(), o.kept);
  return {at::matmul(P, V).to(dtype), lse};
}

// Computes the gradients from lse and delta of whole rows.
Three backward_by_formula(const Tensor& grad_out, const Inputs& in, const Tensor& lse, const Tensor& delta,
                          const Options& o) {
  Tensor shift = lse.masked_fill(lse == -INFINITY, 0).masked_fill(lse == INFINITY, NAN).unsqueeze(-1);
  Tensor P = (masked_scores(in, o) - shift).exp(), dO = widened(grad_out, in.q);
  Tensor dS = P * (at::matmul(dO, widened(in.v, in.q).mT()) - delta.unsqueeze(-1)) * o.scale;
  auto narrowed = [](Tensor gradient, const Tensor& like) {
    auto N = gradient.sym_size(1), G = like.sym_size(1);
    return (N == G ? gradient : gradient.unflatten_symint(1, {G, -1}).sum(2)).to(like.scalar_type());
  };
  return {narrowed(at::matmul(dS, widened(in.k, in.q)), in.q), narrowed(at::matmul(dS.mT(), widened(in.q, in.q)), in.k),
          narrowed(at::matmul(P.mT(), dO), in.v)};
}

// The same, for offsets sequence by sequence, [1, N, total, d]; the host reads the offsets.
Two formula(const Inputs& in, const Options& o) {
  if (!in.offsets) return by_formula(in, o);
  Tensor offsets = in.offsets->cpu();
  std::vector<Tensor> parts;
  auto at_ = [&](int of, int64_t i) { return offsets[of][i].item<int64_t>(); };
  int64_t end = 0;
  auto skip = [&](int64_t until) {  // rows of no sequence, or of one without keys
    parts.push_back(at::zeros({1, in.q.size(1), until - end, in.q.size(3)}, in.q.options()));
    end = until;
  };
  for (int64_t i = 0; i + 1 < offsets.size(1); ++i) {
    skip(at_(0, i));
    auto rows = [&](const Tensor& t, int of) { return t.slice(2, at_(of, i), at_(of, i + 1)); };
    if (at_(1, i) == at_(1, i + 1)) {
      skip(at_(0, i + 1));
      continue;
    }
    parts.push_back(std::get<0>(by_formula({rows(in.q, 0), rows(in.k, 1), rows(in.v, 1), {}, {}, {}}, o)));
    end = at_(0, i + 1);
  }
  skip(in.q.size(2));
  return {at::cat(parts, 2), Tensor()};
}

// PyTorch's attention, which adds the mask.
Tensor with_torch(Inputs in, double dropout_p, const Options& o) {
  auto& [q, k, v, mask, offsets, state] = in;
  // PyTorch's fused kernels multiply the -inf of a causal mask by the scale; so only its absolute value is theirs.
  double scale = std::abs(o.scale);
  if (o.scale <= 0) q = o.scale < 0 ? -q : q * 0;
  if (scale == 0) scale = 1;
  auto S = q.sym_size(2), T = k.sym_size(2);
  if (o.diagonal != 0 && o.diagonal != EVERY_KEY)
    mask = at::ones_symint({1, 1, S, T}, q.options().dtype(at::kBool)).tril(o.diagonal);
  // They need an element of the mask for each key, contiguous, and rows that begin at multiples of 16 bytes.
  if (mask && mask->sym_size(3) != T)
    mask = mask->expand_symint({mask->sym_size(0), mask->sym_size(1), mask->sym_size(2), T}).contiguous();
  auto begin = [](const Tensor& t, bool rows) {
    auto bytes = int64_t(t.element_size());
    bool at_16 = known(t.sym_storage_offset()) * bytes % 16 == 0;
    for (int axis = 0; rows && axis < 3; ++axis) at_16 = at_16 && known(t.sym_stride(axis)) * bytes % 16 == 0;
    return at_16 && (!rows || known(t.sym_stride(3)) == 1) ? t : t.clone(at::MemoryFormat::Contiguous);
  };
  if (!q.is_cpu()) q = begin(q, true), k = begin(k, true), v = begin(v, true);
  if (!q.is_cpu() && mask) mask = begin(*mask, false);
  bool gqa = q.sym_size(1) != k.sym_size(1);
  return at::scaled_dot_product_attention(q, k, v, mask, dropout_p, o.diagonal == 0, scale, gqa);
}

// ---- Autograd -----------------------------------------------------------------------------------------------

// Saves query, key, value, out, lse, mask, offsets and state.
struct Operator {
  static constexpr auto NAME = "AttentionBackward";
  static constexpr size_t INPUTS = 4, SAVED = 8;
  static constexpr int64_t OUTPUTS = 1 << 3 | 1 << 4;

  static variable_list gradients(const variable_list& grads, const variable_list& saved, const Numbers& numbers,
                                 int64_t needed) {
    static auto backward = find_operator<decltype(backward_meta)>("mojo_workbook::attention_backward");
    static auto mask_backward = find_operator<decltype(mask_backward_meta)>("mojo_workbook::attention_mask_backward");
    auto &Q = saved[0], &K = saved[1], &V = saved[2], &O = saved[3], &L = saved[4];
    Tensor dO = grads[0].defined() ? grads[0] : at::zeros_like(O);
    auto dL = optional(grads[1]), mask = optional(saved[5]);
    Options o(numbers);
    variable_list found(INPUTS);
    if (needed & 7)
      std::tie(found[0], found[1], found[2]) =
          backward.call(dO, Q, K, V, O, L, {}, dL, mask, optional(saved[6]), optional(saved[7]), o.scale, o.diagonal,
                        o.mask_block, o.kept);
    if (needed & 8) found[3] = mask_backward.call(dO, Q, K, V, O, L, dL, *mask, o.scale, o.diagonal);
    return found;
  }

  static std::pair<variable_list, variable_list> by_torch(const variable_list& saved, const Numbers& numbers, int64_t) {
    Inputs in{saved[0], saved[1], saved[2], optional(saved[5]), optional(saved[6]), optional(saved[7])};
    auto [out, lse] = formula(in, Options(numbers));
    return {{in.q, in.k, in.v, saved[5]}, {out, lse}};
  }
};

Two with_kernels(const Inputs& in, const Options& o) {
  static auto op = find_operator<decltype(forward_meta)>("mojo_workbook::attention_forward");
  auto [out, lse] = [&] {
    at::AutoDispatchBelowADInplaceOrView below;
    return op.call(in.q, in.k, in.v, in.mask, in.offsets, in.state, o.scale, o.diagonal, o.mask_block, o.kept);
  }();
  if (torch::autograd::compute_requires_grad(in.q, in.k, in.v, in.mask))
    record<Operator>({out, lse}, {in.q, in.k, in.v, out, lse, in.mask, in.offsets, in.state}, o.numbers(), in.q, in.k,
                     in.v, in.mask);
  return {out, lse};
}

// Returns why the kernels do not compute a call, nothing if they do, in both passes if a gradient is needed.
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
    auto [chosen, reason] = call.choice(pass | how(in));
    if (!chosen) return reason;
    if (!call.library(chosen / CHUNK).available(device) || (of_mask && !call.library(MASK).available(device)))
      return "there is no library for this GPU";
  }
  return {};
}

Two with_kernels_or_formula(const Inputs& in, const Options& o) {
  return unsupported(in, o) ? formula(in, o) : with_kernels(in, o);
}

// ---- The arguments, with four axes --------------------------------------------------------------------------

// Query [B, N, S, d], key and value [B, G, T, d], the mask [B or 1, N or 1, S or 1, T or 1], the leading axes [..., N]
// and the columns of value.
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
    // As numbers to add, 0 if true and else -inf, in rows that begin at multiples of 16 bytes.
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

// Folds all leading axes but the heads into one batch, and pads both head dimensions to the same whole chunks: zeros
// after query and key leave the scores as they are, those after value are columns of the output that unfold cuts off.
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
  if (mask_block > 1) folded.mask = mask;
  else if (mask) {
    auto scores = folded.lead;
    scores.push_back(query.sym_size(-2)), scores.push_back(key.sym_size(-2));
    folded.mask = four_axes(*mask, scores, query.scalar_type());
  }
  return folded;
}

// Raises for arguments that do not fit; harness/nn/attention_arguments.py says which.
void check(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask, bool enable_gqa) {
  auto similar = [&](const Tensor& t) { return t.layout() == at::kStrided && t.device() == query.device(); };
  auto type = query.scalar_type();
  bool fits = at::isFloatingType(type);
  for (auto* t : {&query, &key, &value})
    fits = fits && similar(*t) && t->dim() >= (enable_gqa ? 3 : 2) && t->scalar_type() == type;
  fits = fits && key.sym_size(-1) == query.sym_size(-1) && value.sym_size(-2) == key.sym_size(-2) &&
         key.sym_size(-1) >= 1 && value.sym_size(-1) >= 1;
  if (fits && enable_gqa) {
    auto N = query.sym_size(-3), G = key.sym_size(-3);
    fits = value.sym_size(-3) == G && G > 0 && N % G == 0;
  }
  if (mask) fits = fits && similar(*mask) && (mask->scalar_type() == at::kBool || mask->scalar_type() == type);
  TORCH_CHECK_VALUE(fits, "attention: axes, sizes, dtypes or devices do not fit");
}

// ---- The operators ------------------------------------------------------------------------------------------

// A query sees the keys up to `diagonal` past its own position, all without one.
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
  return in.unfold(every_derivative && !drops ? std::get<0>(formula(in, o)) : with_torch(in, drops ? dropout_p : 0, o));
}

// Returns the output and lse [..., N, S]; without dropout. An element of the mask may be for a block of queries and keys.
Two attention_with_lse(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask,
                       std::optional<SymInt> diagonal, std::optional<double> scale, bool enable_gqa,
                       int64_t mask_block) {
  check(query, key, value, attn_mask, enable_gqa);
  auto in = fold(query, key, value, attn_mask, enable_gqa, mask_block);
  auto [out, lse] = with_kernels_or_formula(in, Options(scale, query, diagonal, mask_block));
  return {in.unfold(out), in.unfold_rows(lse, {query.sym_size(-2)})};
}

// Returns the gradients of tensors [B, heads, length, d], from the output, or from the delta of whole rows.
Three attention_gradients(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v,
                          const Optional& out, const Tensor& lse, const Optional& delta, const Optional& mask,
                          std::optional<SymInt> diagonal, std::optional<double> scale, int64_t mask_block) {
  Options o(scale, q, diagonal, mask_block);
  Inputs in{q, k, v, mask, {}, {}};
  bool differentiated = torch::autograd::compute_requires_grad(grad_out, q, k, v, out, lse, delta, mask) ||
                        has_tangent(grad_out, out, lse, delta);
  if (!differentiated && !unsupported(in, o, true)) {
    static auto op = find_operator<decltype(backward_meta)>("mojo_workbook::attention_backward");
    return op.call(grad_out, q, k, v, out, lse, delta, {}, mask, {}, {}, o.scale, o.diagonal, mask_block, ONE);
  }
  auto rows = delta ? *delta : (widened(grad_out, q) * widened(*out, q)).sum(-1);
  return backward_by_formula(grad_out, in, lse, rows, o);
}

// Computes sequences that are concatenated: [total, heads, d], with int32 offsets [2, sequences + 1] of queries and keys.
Tensor attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& offsets,
                        std::optional<SymInt> diagonal, std::optional<double> scale) {
  auto heads_first = [](const Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
  auto in = fold(heads_first(query), heads_first(key), heads_first(value), {}, true);
  in.offsets = offsets;
  auto out = std::get<0>(with_kernels_or_formula(in, Options(scale, query, diagonal)));
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

void attention_portable(bool on) { portable = on; }

}  // namespace

#define QKV "(Tensor query, Tensor key, Tensor value, "
#define GRAD_QKV "(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
#define OPTIONS "float scale, SymInt diagonal, int mask_block, int kept)"
TORCH_LIBRARY_FRAGMENT(mojo_workbook, m) {
  at::Tag tag = at::Tag::pt2_compliant_tag;
  m.def("attention" QKV "Tensor? attn_mask=None, float dropout_p=0.0, SymInt? diagonal=None, float? scale=None,"
        " bool enable_gqa=False) -> Tensor", {tag});
  m.def("attention_with_lse" QKV "Tensor? attn_mask=None, SymInt? diagonal=None, float? scale=None,"
        " bool enable_gqa=False, int mask_block=1) -> (Tensor, Tensor)", {tag});
  m.def("attention_gradients" GRAD_QKV "Tensor? out, Tensor lse, Tensor? delta, Tensor? attn_mask, SymInt? diagonal,"
        " float? scale, int mask_block) -> (Tensor, Tensor, Tensor)", {tag});
  m.def("attention_varlen" QKV "Tensor offsets, SymInt? diagonal=None, float? scale=None) -> Tensor", {tag});
  m.def("attention_explain" QKV "Tensor? attn_mask=None, float dropout_p=0.0, float? scale=None,"
        " bool enable_gqa=False, int mask_block=1) -> str");
  m.def("attention_portable(bool on) -> ()", attention_portable);
  m.def("attention_forward" QKV "Tensor? attn_mask, Tensor? offsets, Tensor? state, " OPTIONS " -> (Tensor, Tensor)",
        {tag});
  m.def("attention_backward" GRAD_QKV "Tensor? out, Tensor lse, Tensor? delta, Tensor? grad_lse, Tensor? attn_mask,"
        " Tensor? offsets, Tensor? state, " OPTIONS " -> (Tensor, Tensor, Tensor)", {tag});
  m.def("attention_mask_backward" GRAD_QKV "Tensor out, Tensor lse, Tensor? grad_lse, Tensor attn_mask, float scale,"
        " SymInt diagonal) -> Tensor", {tag});
}
WORKBOOK_COMPOSITE("attention", attention, UnderAutocast<attention>::call)
WORKBOOK_COMPOSITE("attention_with_lse", attention_with_lse, UnderAutocast<attention_with_lse>::call)
WORKBOOK_COMPOSITE("attention_varlen", attention_varlen, UnderAutocast<attention_varlen>::call)
WORKBOOK_LEAF("attention_forward", forward_device, forward_meta)
WORKBOOK_LEAF("attention_backward", backward_device, backward_meta)
WORKBOOK_LEAF("attention_mask_backward", mask_backward_device, mask_backward_meta)
TORCH_LIBRARY_IMPL(mojo_workbook, CompositeImplicitAutograd, m) {
  m.impl("attention_gradients", attention_gradients);
  m.impl("attention_explain", attention_explain);
}
