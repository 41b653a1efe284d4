// Attention: softmax(scale q k^T + mask) v, with dropout and for sequences of unequal lengths. Which kernels a call takes is asked of
// the Mojo library's part `plan` (harness/nn/kernels/attention/choice.mojo); what none takes, PyTorch's own operations compute.
#include "host.h"

#include <torch/csrc/dynamo/compiled_autograd.h>

using namespace workbook;

namespace {
using c10::SymInt;

constexpr int64_t CHUNK = 8;                                     // 16 bytes, in which rows begin and end for the kernels
constexpr int64_t EVERY_KEY = (int64_t(1) << 31) - (1 << 20);    // the diagonal of a query that sees all keys
constexpr int64_t ONE = 65536;                                   // a probability is kept in steps of 1 / ONE
constexpr int64_t PORTABLE = 1, LENGTHS = 2, BACKWARD = 4, MASK_GRADIENT = 8;  // what is asked of the plan, added
enum Part : int64_t { PLAIN, MASK, PORTABLE_PART, DROPOUT, VARLEN };           // of the library, as choice.mojo numbers them

Library plan("attention", "plan");
Library of_bfloat16[] = {{"attention", "bfloat16"}, {"attention", "bfloat16_mask"}, {"attention", "bfloat16_portable"},
                         {"attention", "bfloat16_dropout"}, {"attention", "bfloat16_varlen"}};
Library of_float16[] = {{"attention", "float16"}, {"attention", "float16_mask"}, {"attention", "float16_portable"},
                        {"attention", "float16_dropout"}, {"attention", "float16_varlen"}};

std::atomic<bool> portable{false};  // whether kernels for every GPU run on a Hopper too: for comparisons

bool has_kernels(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

// What a call computes, beside its tensors.
struct Options {
  double scale;
  int64_t diagonal;    // how many keys further than its own place a query sees
  int64_t mask_block;  // an element of the mask stands for so many queries and keys
  int64_t kept;        // so many of ONE probabilities are kept
};

// The tensors beside query, key and value: a mask that is added, the offsets of sequences, the state that dropout draws from.
struct Beside {
  Optional mask, offsets, state;
};

// ---- Calls of the Mojo library -------------------------------------------------------------------------------------

int64_t known(const SymInt& size) { return size.maybe_as_int().value_or(1); }  // 1 where it is not known while a graph is traced

// How far apart the places along an axis are; of one place, as far as the kernels like.
int64_t step(const Tensor& t, int64_t axis) {
  return known(t.sym_size(axis)) == 1 ? CHUNK * ((known(t.sym_size(3)) + CHUNK - 1) / CHUNK) : known(t.sym_stride(axis));
}

// The words of a call, in the order of call.mojo. Tensors are [B, heads, length, d].
struct Call {
  enum : size_t { WHAT = 4, SIZES = 5, SCALE = 17, KEPT = 18, STATE = 19, ADDRESSES = 20, STRIDES = 33, ALL = 57 };
  enum Tensors : size_t { OUT, LSE, QUERY, KEY, VALUE, READ, GRAD_QUERY, GRAD_KEY, GRAD_VALUE, GRAD_OUT, DELTA, GRAD_LSE, GRAD_MASK };

  std::array<int64_t, ALL> words{};
  at::ScalarType type;
  c10::Device device;

  Call(const Tensor& q, const Tensor& k, const Tensor& v, const Beside& beside, const Options& options)
      : type(q.scalar_type()), device(q.device()) {
    auto S = known(q.sym_size(2)), T = known(k.sym_size(2));
    std::array<int64_t, 7> sizes{known(q.sym_size(0)), known(q.sym_size(1)), known(k.sym_size(1)), S, T, known(q.sym_size(3)),
                                 std::clamp(options.diagonal, -S, T)};
    std::copy(sizes.begin(), sizes.end(), words.begin() + SIZES);
    words[SCALE] = bits(options.scale), words[KEPT] = options.kept;
    put(QUERY, q), put(KEY, k), put(VALUE, v);
    if (beside.offsets) words[SIZES + 11] = beside.offsets->size(1) - 1, put(READ, *beside.offsets);
    if (beside.state) words[STATE] = place(*beside.state);
    if (!beside.mask) return;
    for (int axis = 0; axis < 4; ++axis)
      words[SIZES + 7 + axis] = known(beside.mask->sym_size(axis)) == 1 ? 0 : known(beside.mask->sym_stride(axis));
    words[SIZES + 11] = options.mask_block;
    put(READ, *beside.mask);
  }

  static int64_t place(const Tensor& t) { return t.defined() && t.has_storage() && t.storage().data() ? address(t) : 0; }

  Call& put(Tensors which, const Tensor& t) {
    words[ADDRESSES + which] = place(t);
    constexpr int strided[] = {QUERY, KEY, VALUE, OUT, GRAD_OUT, GRAD_QUERY, GRAD_KEY, GRAD_VALUE};
    auto found = std::find(std::begin(strided), std::end(strided), int(which));
    if (t.defined() && found != std::end(strided))
      for (int axis = 0; axis < 3; ++axis) words[STRIDES + 3 * (found - strided) + axis] = step(t, axis);
    return *this;
  }

  // Asks for the kernels, and what keeps the call from faster ones. `how` is LENGTHS, BACKWARD and MASK_GRADIENT, added.
  std::pair<int64_t, std::string> choice(int64_t how) {
    words[WHAT] = how | (portable ? PORTABLE : 0);
    return plan.ask_why("workbook_attention_plan", words, device);
  }

  Library& library(Part part) { return (type == at::kHalf ? of_float16 : of_bfloat16)[part]; }

  // Launches a pass by the kernels that are chosen for it, of the part that has them or of another one.
  void launch(const char* name, int64_t how, std::optional<Part> of = {}) {
    auto [chosen, reason] = choice(how);
    TORCH_CHECK(chosen, "mojo_workbook: attention has no kernel: ", reason);
    words[WHAT] = chosen % CHUNK;
    library(of.value_or(Part(chosen / CHUNK))).launch(name, words, device);
  }
};

int64_t asked(const Beside& beside) { return beside.offsets ? LENGTHS : 0; }

// Returns the tensor, or a copy that lies as the kernels read: neighbours in a row, rows that begin at multiples of 16 bytes, and no
// element that stands for several.
Tensor aligned(const Tensor& t) {
  bool lies = (t.size(3) == 1 || t.stride(3) == 1) && address(t) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis) lies = lies && (t.size(axis) == 1 || (t.stride(axis) > 0 && t.stride(axis) % CHUNK == 0));
  return lies ? t : t.clone(at::MemoryFormat::Contiguous);
}

// Returns the strides of a result [B, N, S, d] without gaps: where a tensor has the heads of a row side by side, as models split them,
// the result has them so too, and joining them copies nothing.
template <class Int>
std::array<Int, 4> dense_strides(const Tensor& like, at::ArrayRef<Int> size, bool heads_last) {
  if (heads_last) return {size[1] * size[2] * size[3], size[3], size[1] * size[3], Int(1)};
  return {size[1] * size[2] * size[3], size[2] * size[3], size[3], Int(1)};
}

Tensor result_like(const Tensor& t) {
  return empty_strided(t.sizes(), dense_strides<int64_t>(t, t.sizes(), t.stride(1) < t.stride(2)), t.scalar_type());
}

Tensor meta_result(const Tensor& t) {
  auto strides = dense_strides<SymInt>(t, t.sym_sizes(), t.sym_stride(1) < t.sym_stride(2));
  return at::empty_strided_symint(t.sym_sizes(), strides, t.options());
}

// ---- The leaf operators --------------------------------------------------------------------------------------------

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

bool is_empty(const Tensor& q, const Tensor& k) { return !q.numel() || !k.numel(); }

Two forward_device(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask, const Optional& offsets,
                   const Optional& state, double scale, int64_t diagonal, int64_t mask_block, int64_t kept) {
  c10::DeviceGuard guard(query.device());
  Plain plain;
  Tensor out = result_like(query), lse = workbook::empty(query.sizes().slice(0, 3), at::kFloat);
  bool none = is_empty(query, key);
  if (none || offsets) out.zero_(), lse.fill_(-INFINITY);  // of rows of no sequence
  if (none) return {out, lse};
  Beside beside{mask, offsets, state};
  Tensor q = aligned(query), k = aligned(key), v = aligned(value);
  Call(q, k, v, beside, {scale, diagonal, mask_block, kept})
      .put(Call::OUT, out)
      .put(Call::LSE, lse)
      .launch("workbook_attention_forward", asked(beside));
  return {out, lse};
}

Two forward_meta(const Tensor& query, const Tensor&, const Tensor&, const Optional&, const Optional&, const Optional&, double,
                 SymInt, int64_t, int64_t) {
  return {meta_result(query), at::empty_symint(query.sym_sizes().slice(0, 3), query.options().dtype(at::kFloat))};
}

// The backward pass: from the output and the gradient of lse, or from delta, which is of whole rows, where the call is a part of them.
Three backward_device(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Optional& out,
                      const Tensor& lse, const Optional& delta, const Optional& grad_lse, const Optional& mask,
                      const Optional& offsets, const Optional& state, double scale, int64_t diagonal, int64_t mask_block,
                      int64_t kept) {
  c10::DeviceGuard guard(query.device());
  Plain plain;
  Tensor dq = result_like(query), dk = result_like(key), dv = result_like(value);
  bool none = is_empty(query, key);
  if (none || offsets) dq.zero_(), dk.zero_(), dv.zero_();
  if (none) return {dq, dk, dv};
  Beside beside{mask, offsets, state};
  Tensor q = aligned(query), k = aligned(key), v = aligned(value), dO = aligned(grad_out), L = lse.contiguous();
  Tensor O = out ? aligned(*out) : Tensor(), D = delta ? delta->contiguous() : Tensor();
  Tensor dL = grad_lse ? grad_lse->contiguous() : Tensor();
  Call(q, k, v, beside, {scale, diagonal, mask_block, kept})
      .put(Call::OUT, O)
      .put(Call::LSE, L)
      .put(Call::GRAD_OUT, dO)
      .put(Call::DELTA, D)
      .put(Call::GRAD_LSE, dL)
      .put(Call::GRAD_QUERY, dq)
      .put(Call::GRAD_KEY, dk)
      .put(Call::GRAD_VALUE, dv)
      .launch("workbook_attention_backward", BACKWARD | asked(beside));
  return {dq, dk, dv};
}

Three backward_meta(const Tensor&, const Tensor& query, const Tensor& key, const Tensor& value, const Optional&, const Tensor&,
                    const Optional&, const Optional&, const Optional&, const Optional&, const Optional&, double, SymInt,
                    int64_t, int64_t) {
  return {meta_result(query), meta_result(key), meta_result(value)};
}

// The gradient of a mask, in its own shape.
Tensor mask_backward_device(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out,
                            const Tensor& lse, const Optional& grad_lse, const Tensor& mask_, double scale, int64_t diagonal) {
  c10::DeviceGuard guard(query.device());
  Plain plain;
  if (is_empty(query, key)) return at::zeros_like(mask_, at::MemoryFormat::Contiguous);
  Tensor q = aligned(query), k = aligned(key), v = aligned(value), dO = aligned(grad_out), O = aligned(out), L = lse.contiguous();
  Tensor mask = mask_.contiguous(), dL = grad_lse ? grad_lse->contiguous() : Tensor(), gradient = at::empty_like(mask);
  Call(q, k, v, {mask, {}, {}}, {scale, diagonal, 1, ONE})
      .put(Call::OUT, O)
      .put(Call::LSE, L)
      .put(Call::GRAD_OUT, dO)
      .put(Call::GRAD_LSE, dL)
      .put(Call::GRAD_MASK, gradient)
      .launch("workbook_attention_mask_gradient", BACKWARD | MASK_GRADIENT, MASK);
  return gradient;
}

Tensor mask_backward_meta(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Optional&,
                          const Tensor& mask, double, SymInt) {
  return at::empty_symint(mask.sym_sizes(), mask.options());
}

template <class Signature>
auto leaf(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Two forward(const Tensor& q, const Tensor& k, const Tensor& v, const Beside& beside, const Options& o) {
  static auto op = leaf<decltype(forward_meta)>("mojo_workbook::attention_forward");
  at::AutoDispatchBelowADInplaceOrView below;
  return op.call(q, k, v, beside.mask, beside.offsets, beside.state, o.scale, o.diagonal, o.mask_block, o.kept);
}

// ---- PyTorch's own operations --------------------------------------------------------------------------------------

// Returns what probabilities with dropout are multiplied by, [B, N, S, T]: the kernels' draws (fast_dropout.mojo), by Philox4x32 of
// seven rounds on int64 words of 32 bits.
Tensor kept_ones(const Tensor& state, at::IntArrayRef size, int64_t kept) {
  constexpr int64_t WORD = 0xFFFFFFFF;
  auto B = size[0], N = size[1], S = size[2], T = size[3], queries = (S + 31) / 32 * 4, keys = (T + 15) / 16 * 4;
  auto count = [&](int64_t n) { return at::arange(n, state.options()); };
  auto low = [](const Tensor& t) { return t.bitwise_and(WORD); };
  auto high = [&](const Tensor& t) { return low(t.bitwise_right_shift(32)); };
  Tensor bit = count(32).view({32, 1, 1, 1}), numbers = at::zeros({}, state.options());
  for (int64_t draw = 0; draw < 4; ++draw) {
    Tensor c[4] = {count(keys) * 4 + draw, count(queries).unsqueeze(1), count(B * N).view({-1, 1, 1}), low(state[1])};
    Tensor key0 = low(state[0]), key1 = high(state[0]);
    for (int turn = 0; turn < 7; ++turn) {
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
  auto whole = numbers.reshape({B, N, queries * 8, keys * 4}).slice(2, 0, S).slice(3, 0, T);
  return whole.lt(kept).to(at::kFloat) * (kept ? double(ONE) / double(kept) : 0.0);
}

Tensor widened(const Tensor& t, const Tensor& query) {  // in the type of sums, with a head for each of query's
  auto wide = t.to(query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  return t.sym_size(1) == query.sym_size(1) ? wide : wide.repeat_interleave_symint(query.sym_size(1) / t.sym_size(1), 1);
}

// Returns the scores [B, N, S, T], -inf where a query does not see a key.
Tensor masked_scores(const Tensor& query, const Tensor& key, const Beside& beside, const Options& o) {
  auto S = query.sym_size(2), T = key.sym_size(2);
  Tensor scores = at::matmul(widened(query, query) * o.scale, widened(key, query).mT());
  if (beside.mask) {
    Tensor mask = *beside.mask;
    for (int axis = 2; o.mask_block > 1 && axis < 4; ++axis)
      if (mask.size(axis) > 1) mask = mask.repeat_interleave(o.mask_block, axis).slice_symint(axis, 0, axis == 2 ? S : T);
    scores = scores + mask;
  }
  if (o.diagonal != EVERY_KEY) {
    auto at = [&](const SymInt& n) { return at::arange(at::Scalar(n), query.options().dtype(at::kLong)); };
    scores = scores.masked_fill(at(T).gt(at(S).unsqueeze(1) + o.diagonal), -INFINITY);
  }
  return scores;
}

// Computes output and lse by the formula, with all scores in memory and every derivative. The largest score and the logarithm of the
// sum stay apart.
Two by_formula(const Tensor& query, const Tensor& key, const Tensor& value, const Beside& beside, const Options& o) {
  Tensor scores = masked_scores(query, key, beside, o), V = widened(value, query);
  if (key.sym_size(2) == 0)
    return {at::matmul(scores, V).to(query.scalar_type()), scores.sum(-1) - INFINITY};
  Tensor largest = scores.detach().amax(-1, true);
  largest = largest.masked_fill(largest == -INFINITY, 0);  // of a row that sees no key
  Tensor P = (scores - largest).exp(), total = P.sum(-1, true), none = total == 0;
  total = total.masked_fill(none, 1);
  P = P / total;
  Tensor lse = (largest + total.log()).masked_fill(none, -INFINITY).squeeze(-1);
  if (beside.state) P = P * kept_ones(*beside.state, P.sizes(), o.kept);
  return {at::matmul(P, V).to(query.scalar_type()), lse};
}

// Computes the gradients by the formula, from lse and delta of whole rows.
Three backward_by_formula(const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& lse,
                          const Tensor& delta, const Beside& beside, const Options& o) {
  Tensor shift = lse.masked_fill(lse == -INFINITY, 0).masked_fill(lse == INFINITY, NAN).unsqueeze(-1), dO = widened(grad_out, query);
  Tensor P = (masked_scores(query, key, beside, o) - shift).exp();
  Tensor dS = P * (at::matmul(dO, widened(value, query).mT()) - delta.unsqueeze(-1)) * o.scale;
  auto of = [](Tensor gradient, const Tensor& own) {
    if (gradient.sym_size(1) != own.sym_size(1)) gradient = gradient.unflatten_symint(1, {own.sym_size(1), -1}).sum(2);
    return gradient.to(own.scalar_type());
  };
  return {of(at::matmul(dS, widened(key, query)), query), of(at::matmul(dS.mT(), widened(query, query)), key),
          of(at::matmul(P.mT(), dO), value)};
}

// Sequence by sequence, [1, N, total, d]; the host reads the offsets.
Two formula(const Tensor& query, const Tensor& key, const Tensor& value, const Beside& beside, const Options& o) {
  if (!beside.offsets) return by_formula(query, key, value, beside, o);
  Tensor offsets = beside.offsets->cpu();
  std::vector<Tensor> parts;
  auto at_ = [&](int of, int64_t i) { return offsets.select(0, of).select(0, i).item<int64_t>(); };
  int64_t end = 0;
  auto skip = [&](int64_t until) {  // rows of no sequence, or of one without keys
    parts.push_back(at::zeros({1, query.size(1), until - end, query.size(3)}, query.options()));
    end = until;
  };
  for (int64_t i = 0; i + 1 < offsets.size(1); ++i) {
    skip(at_(0, i));
    auto rows = [&](const Tensor& t, int of) { return t.slice(2, at_(of, i), at_(of, i + 1)); };
    if (at_(1, i) == at_(1, i + 1)) {
      skip(at_(0, i + 1));
      continue;
    }
    parts.push_back(std::get<0>(by_formula(rows(query, 0), rows(key, 1), rows(value, 1), {}, o)));
    end = at_(0, i + 1);
  }
  skip(query.size(2));
  return {at::cat(parts, 2), Tensor()};
}

// PyTorch's attention of query [B, N, S, d], key and value [B, G, T, d], and a mask that is added.
Tensor with_torch(Tensor q, Tensor k, Tensor v, Optional mask, double dropout_p, double scale, int64_t diagonal) {
  // PyTorch's fused kernels multiply a triangle's -inf by the scale, which makes infinity or NaN of it. A sign is exact.
  if (scale <= 0) q = scale < 0 ? -q : q * 0, scale = scale < 0 ? -scale : 1;
  auto S = q.sym_size(2), T = k.sym_size(2);
  if (diagonal != 0 && diagonal != EVERY_KEY) mask = at::ones_symint({1, 1, S, T}, q.options().dtype(at::kBool)).tril(diagonal);
  // They want an element of the mask for each key, side by side, and rows that begin at multiples of 16 bytes.
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
  return at::scaled_dot_product_attention(q, k, v, mask, dropout_p, diagonal == 0, scale, q.sym_size(1) != k.sym_size(1));
}

// ---- Autograd ------------------------------------------------------------------------------------------------------

struct AttentionBackward : Node {
  SavedVariable q, k, v, out, lse, mask, offsets, state;
  Options options;

  std::string name() const override { return "AttentionBackward"; }
  std::array<SavedVariable*, 8> saved() { return {&q, &k, &v, &out, &lse, &mask, &offsets, &state}; }
  void release_variables() override {
    for (auto* each : saved()) each->reset_data();
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (auto* each : const_cast<AttentionBackward*>(this)->saved()) args.collect(*each, each == &out || each == &lse);
    args.collect(options.scale), args.collect(options.diagonal), args.collect(options.mask_block), args.collect(options.kept);
  }
  variable_list apply_with_saved(const variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& swapped) override {
    for (auto* each : saved()) swapped.before(*each);
    auto found = apply(variable_list(grads));
    for (auto* each : saved()) swapped.after(*each);
    return found;
  }

  variable_list apply(variable_list&& grads) override {
    variable_list found(4);
    if (!grads[0].defined() && !grads[1].defined()) return found;
    bool needed[4];
    for (int i = 0; i < 4; ++i) needed[i] = task_should_compute_output(i);
    auto self = itself(this);
    Tensor Q = q.unpack(), K = k.unpack(), V = v.unpack(), O = out.unpack(self), L = lse.unpack(self);
    Beside beside{optional(mask.unpack()), optional(offsets.unpack()), optional(state.unpack())};
    if (c10::GradMode::is_enabled()) return differentiable(grads, {Q, K, V}, beside, needed);
    at::AutoDispatchBelowADInplaceOrView below;
    static auto backward = leaf<decltype(backward_meta)>("mojo_workbook::attention_backward");
    static auto mask_backward = leaf<decltype(mask_backward_meta)>("mojo_workbook::attention_mask_backward");
    Tensor dO = grads[0].defined() ? grads[0] : at::zeros_like(O);
    auto& [scale, diagonal, block, kept] = options;
    if (needed[0] || needed[1] || needed[2]) {
      auto [dq, dk, dv] = backward.call(dO, Q, K, V, O, L, {}, optional(grads[1]), beside.mask, beside.offsets, beside.state, scale,
                                        diagonal, block, kept);
      Tensor* all[3] = {&dq, &dk, &dv};
      for (int i = 0; i < 3; ++i)
        if (needed[i]) found[i] = std::move(*all[i]);
    }
    if (needed[3]) found[3] = mask_backward.call(dO, Q, K, V, O, L, optional(grads[1]), *beside.mask, scale, diagonal);
    return found;
  }

  // create_graph: the gradients by PyTorch's own operations, so that they can be differentiated again.
  variable_list differentiable(const variable_list& grads, variable_list in, const Beside& beside, const bool* needed) {
    auto [y, sums] = formula(in[0], in[1], in[2], beside, options);
    in.push_back(beside.mask.value_or(Tensor()));
    variable_list from, given, wanted, found(4);
    if (grads[0].defined()) from.push_back(y), given.push_back(grads[0]);
    if (grads[1].defined()) from.push_back(sums), given.push_back(grads[1]);
    for (int i = 0; i < 4; ++i)
      if (needed[i]) wanted.push_back(in[i]);
    auto made = torch::autograd::grad(from, wanted, given, true, true, true);
    for (int i = 0, j = 0; i < 4; ++i)
      if (needed[i]) found[i] = made[j++];
    return found;
  }
};

Two recorded(const Tensor& q, const Tensor& k, const Tensor& v, const Beside& beside, const Options& options) {
  if (!torch::autograd::compute_requires_grad(q, k, v, beside.mask)) return forward(q, k, v, beside, options);
  auto node = make_node<AttentionBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(q, k, v, beside.mask));
  auto [out, lse] = forward(q, k, v, beside, options);
  torch::autograd::set_history(out, node);
  torch::autograd::set_history(lse, node);
  node->q = SavedVariable(q, false), node->k = SavedVariable(k, false), node->v = SavedVariable(v, false);
  node->out = SavedVariable(out, true), node->lse = SavedVariable(lse, true), node->mask = SavedVariable(beside.mask, false);
  node->offsets = SavedVariable(beside.offsets, false), node->state = SavedVariable(beside.state, false);
  node->options = options;
  return {out, lse};
}

// Returns why kernels do not compute a call of these tensors, [B, heads, length, d]; nothing where they do, in both passes where a
// gradient is needed.
std::optional<std::string> left_to_torch(const Tensor& q, const Tensor& k, const Tensor& v, const Beside& beside, const Options& o,
                                         bool backward = false) {
  if (in_transform()) return "within a transform of torch.func";
  if (has_tangent(q, k, v, beside.mask)) return "in forward mode";
  auto type = q.scalar_type();
  if (!has_kernels(type)) return c10::str("query is of ", c10::toString(type), "; the kernels are for bfloat16 and float16");
  if (!plan.available(q.device())) return c10::str("there are no kernels for ", q.device());
  Call call(q, k, v, beside, o);
  bool recorded = torch::autograd::compute_requires_grad(q, k, v, beside.mask);
  bool of_mask = beside.mask && recorded && beside.mask->requires_grad();
  backward = backward || recorded;
  for (int64_t how : {int64_t(0), BACKWARD | (of_mask ? MASK_GRADIENT : 0)}) {
    if (how && !backward) break;
    auto [chosen, reason] = call.choice(how | asked(beside));
    if (!chosen) return reason;
    auto& library = call.library(Part(chosen / CHUNK));
    if (!library.available(q.device()) || (of_mask && !call.library(MASK).available(q.device()))) return "there is no library for this GPU";
  }
  return {};
}

// ---- The arguments, with four axes ---------------------------------------------------------------------------------

// Query [B, N, S, d], key and value [B, G, T, d], the mask [B or 1, N or 1, S or 1, T or 1], and the leading axes [..., N].
struct Folded {
  Tensor q, k, v;
  Optional mask;
  c10::SymDimVector lead;

  // Returns the first d columns of an output, with the caller's axes.
  Tensor unfold(const Tensor& out, const SymInt& d) const {
    auto shape = lead;
    shape.push_back(out.sym_size(2));
    bool whole = out.sym_size(3) == d;
    if (whole && lead.size() == 2) return out;
    shape.push_back(d);
    return (whole ? out : out.slice_symint(3, 0, d)).reshape_symint(shape);
  }
};

Tensor padded(const Tensor& t, const SymInt& width) {
  return t.sym_size(-1) == width ? t : at::constant_pad_nd_symint(t, {0, width - t.sym_size(-1)});
}

// Returns a mask of bool as numbers to add, in rows that begin at multiples of 16 bytes: 0 where it is true, else -inf.
Tensor as_numbers(const Tensor& mask, at::ScalarType type) {
  auto length = mask.sym_size(-1);
  Tensor whole = length == 1 ? mask : padded(mask, (length + (CHUNK - 1)) / CHUNK * CHUNK);
  return whole.to(type, false, false, at::MemoryFormat::Contiguous).log_().slice_symint(-1, 0, length);
}

Tensor four_axes(Tensor mask, const Folded& folded, const SymInt& S, const SymInt& T, at::ScalarType type) {
  auto scores = folded.lead;
  scores.push_back(S), scores.push_back(T);
  if (mask.scalar_type() == at::kBool) mask = as_numbers(mask, type);
  while (mask.dim() < std::max<int64_t>(4, int64_t(scores.size()))) mask = mask.unsqueeze(0);
  if (mask.dim() == 4) return mask;
  c10::SymDimVector sizes(mask.sym_sizes().begin(), mask.sym_sizes().end());
  std::copy(scores.begin(), scores.end() - 3, sizes.begin());
  return mask.expand_symint(sizes).flatten(0, -4);
}

// Makes one batch of all leading axes but the heads, and one head dimension of two, in whole chunks for the kernels: zeros behind query
// and key leave the scores as they are, those behind value are columns of the output that are cut off.
Folded fold(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask, bool enable_gqa) {
  size_t last = enable_gqa ? 3 : 2;
  auto leading = [&](const Tensor& t) { return t.sym_sizes().slice(0, t.dim() - last); };
  auto batch = at::infer_size_symdimvector(at::infer_size_symdimvector(leading(query), leading(key)), leading(value));
  auto width = query.sym_size(-1) > value.sym_size(-1) ? query.sym_size(-1) : value.sym_size(-1);
  if (has_kernels(query.scalar_type())) width = (width + (CHUNK - 1)) / CHUNK * CHUNK;
  auto four = [&](const Tensor& given) {
    Tensor t = padded(given, width);
    c10::SymDimVector sizes(batch);
    sizes.insert(sizes.end(), t.sym_sizes().end() - last, t.sym_sizes().end());
    if (t.sym_sizes() != at::SymIntArrayRef(sizes)) t = t.expand_symint(sizes);
    if (t.dim() == 2) return t.unsqueeze(0).unsqueeze(0);
    if (t.dim() == 3) return t.unsqueeze(0);
    return t.dim() == 4 ? t : t.flatten(0, -4);
  };
  Folded folded{four(query), four(key), four(value), {}, batch};
  if (enable_gqa) folded.lead.push_back(query.sym_size(-3));
  if (mask) folded.mask = four_axes(*mask, folded, query.sym_size(-2), key.sym_size(-2), query.scalar_type());
  return folded;
}

// Raises for what no attention can be made of; harness/nn/attention.py says what is wrong in words of its own.
void check(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& mask, bool enable_gqa) {
  int64_t least = enable_gqa ? 3 : 2;
  for (auto* t : {&query, &key, &value}) {
    TORCH_CHECK_VALUE(t->dim() >= least && t->layout() == at::kStrided && t->device() == query.device(), "attention: axes or devices");
    TORCH_CHECK_TYPE(t->scalar_type() == query.scalar_type() && at::isFloatingType(t->scalar_type()), "attention: dtypes");
  }
  auto d = query.sym_size(-1), dv = value.sym_size(-1), T = key.sym_size(-2);
  TORCH_CHECK_VALUE(key.sym_size(-1) == d && value.sym_size(-2) == T && d >= 1 && dv >= 1, "attention: sizes");
  if (enable_gqa) {
    auto N = query.sym_size(-3), G = key.sym_size(-3);
    TORCH_CHECK_VALUE(value.sym_size(-3) == G && G > 0 && N % G == 0, "attention: heads");
  }
  if (!mask) return;
  TORCH_CHECK_TYPE(mask->scalar_type() == at::kBool || mask->scalar_type() == query.scalar_type(), "attn_mask: dtype");
  TORCH_CHECK_VALUE(mask->device() == query.device() && mask->layout() == at::kStrided, "attn_mask: device or layout");
}

double factor(std::optional<double> scale, const Tensor& query) {
  return scale ? *scale : 1 / std::sqrt(double(query.sym_size(-1).guard_int(__FILE__, __LINE__)));
}

// ---- The operators -------------------------------------------------------------------------------------------------

// `diagonal` is how many keys past its own place a query sees; all where there is none.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask, double dropout_p,
                 std::optional<SymInt> diagonal, std::optional<double> scale, bool enable_gqa) {
  check(query, key, value, attn_mask, enable_gqa);
  TORCH_CHECK_VALUE(dropout_p >= 0 && dropout_p <= 1, "dropout_p: expected a probability from 0 to 1");
  auto folded = fold(query, key, value, attn_mask, enable_gqa);
  auto& [q, k, v, mask, lead] = folded;
  Options o{factor(scale, query), diagonal ? diagonal->guard_int(__FILE__, __LINE__) : EVERY_KEY, 1,
            ONE - std::llround(dropout_p * double(ONE))};
  auto left = left_to_torch(q, k, v, {mask, {}, {}}, o);
  Tensor out;
  if (left && (in_transform() || has_tangent(q, k, v, mask)) && o.kept == ONE) {
    out = std::get<0>(formula(q, k, v, {mask, {}, {}}, o));
  } else if (left) {
    out = with_torch(q, k, v, mask, o.kept == ONE ? 0.0 : dropout_p, o.scale, o.diagonal);
  } else {
    Optional state;
    if (o.kept != ONE) state = at::randint(int64_t(1) << 62, {2}, query.options().dtype(at::kLong));
    out = std::get<0>(recorded(q, k, v, {mask, {}, state}, o));
  }
  return folded.unfold(out, value.sym_size(-1));
}

// The same with lse [..., N, S], without dropout; an element of the mask may stand for a block of queries and keys.
Two attention_with_lse(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask,
                       std::optional<SymInt> diagonal, std::optional<double> scale, bool enable_gqa, int64_t mask_block) {
  check(query, key, value, attn_mask, enable_gqa);
  bool blocks = mask_block > 1;
  auto folded = fold(query, key, value, blocks ? Optional() : attn_mask, enable_gqa);
  auto& [q, k, v, mask, lead] = folded;
  if (blocks) mask = attn_mask;
  Options o{factor(scale, query), diagonal ? diagonal->guard_int(__FILE__, __LINE__) : EVERY_KEY, mask_block, ONE};
  Beside beside{mask, {}, {}};
  auto [out, lse] = left_to_torch(q, k, v, beside, o) ? formula(q, k, v, beside, o) : recorded(q, k, v, beside, o);
  auto shape = lead;
  shape.push_back(query.sym_size(-2));
  return {folded.unfold(out, value.sym_size(-1)), lse.reshape_symint(shape)};
}

// The gradients of query, key and value [B, heads, length, d], from the output, or from delta of whole rows.
Three attention_gradients(const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Optional& out,
                          const Tensor& lse, const Optional& delta, const Optional& mask, std::optional<SymInt> diagonal,
                          std::optional<double> scale, int64_t mask_block) {
  Options o{factor(scale, q), diagonal ? diagonal->guard_int(__FILE__, __LINE__) : EVERY_KEY, mask_block, ONE};
  Beside beside{mask, {}, {}};
  bool differentiated = torch::autograd::compute_requires_grad(grad_out, q, k, v, out, lse, delta, mask) ||
                        has_tangent(grad_out, out, lse, delta);
  if (!differentiated && !left_to_torch(q, k, v, beside, o, true)) {
    static auto op = leaf<decltype(backward_meta)>("mojo_workbook::attention_backward");
    return op.call(grad_out, q, k, v, out, lse, delta, {}, mask, {}, {}, o.scale, o.diagonal, mask_block, ONE);
  }
  auto rows = delta ? *delta : (widened(grad_out, q) * widened(*out, q)).sum(-1);
  return backward_by_formula(grad_out, q, k, v, lse, rows, beside, o);
}

// Sequences one after another: [total, heads, d], and int32 offsets [2, sequences + 1] of queries and of keys.
Tensor attention_varlen(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& offsets,
                        std::optional<SymInt> diagonal, std::optional<double> scale) {
  auto heads_first = [](const Tensor& t) { return t.transpose(0, 1).unsqueeze(0); };
  auto folded = fold(heads_first(query), heads_first(key), heads_first(value), {}, true);
  auto& [q, k, v, mask, lead] = folded;
  Options o{factor(scale, query), diagonal ? diagonal->guard_int(__FILE__, __LINE__) : EVERY_KEY, 1, ONE};
  Beside beside{{}, offsets, {}};
  auto [out, lse] = left_to_torch(q, k, v, beside, o) ? formula(q, k, v, beside, o) : recorded(q, k, v, beside, o);
  return out.slice_symint(3, 0, value.sym_size(-1)).squeeze(0).transpose(0, 1);
}

// Returns which kernels a call takes, and why, in one line.
std::string attention_explain(const Tensor& query, const Tensor& key, const Tensor& value, const Optional& attn_mask,
                              double dropout_p, std::optional<double> scale, bool enable_gqa, int64_t mask_block) {
  auto folded = fold(query, key, value, mask_block > 1 ? Optional() : attn_mask, enable_gqa);
  auto& [q, k, v, mask, lead] = folded;
  if (mask_block > 1) mask = attn_mask;
  Options o{factor(scale, query), EVERY_KEY, mask_block, ONE - std::llround(dropout_p * double(ONE))};
  if (auto cause = left_to_torch(q, k, v, {mask, {}, {}}, o)) return "PyTorch's own operations: " + *cause;
  Call call(q, k, v, {mask, {}, {}}, o);
  auto [kernel, reason] = call.choice(BACKWARD);
  return std::string(kernel % CHUNK <= 2 ? "wgmma" : "mma.sync") + (reason.empty() ? "" : ": " + reason);
}

void attention_portable(bool on) { portable = on; }

Optional in_autocast(const Optional& t) { return t && t->scalar_type() != at::kBool ? Optional(in_autocast_dtype(*t)) : t; }

Tensor attention_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask, double p,
                          std::optional<SymInt> diagonal, std::optional<double> scale, bool gqa) {
  c10::impl::ExcludeDispatchKeyGuard without(at::autocast_dispatch_keyset);
  return attention(in_autocast_dtype(q), in_autocast_dtype(k), in_autocast_dtype(v), in_autocast(mask), p, diagonal, scale, gqa);
}

Two with_lse_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask, std::optional<SymInt> diagonal,
                      std::optional<double> scale, bool gqa, int64_t block) {
  c10::impl::ExcludeDispatchKeyGuard without(at::autocast_dispatch_keyset);
  auto to = [](const Tensor& t) { return in_autocast_dtype(t); };
  return attention_with_lse(to(q), to(k), to(v), in_autocast(mask), diagonal, scale, gqa, block);
}

Tensor varlen_autocast(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& offsets, std::optional<SymInt> diagonal,
                       std::optional<double> scale) {
  c10::impl::ExcludeDispatchKeyGuard without(at::autocast_dispatch_keyset);
  return attention_varlen(in_autocast_dtype(q), in_autocast_dtype(k), in_autocast_dtype(v), offsets, diagonal, scale);
}
}  // namespace

TORCH_LIBRARY_FRAGMENT(mojo_workbook, m) {
  at::Tag tag = at::Tag::pt2_compliant_tag;
  m.def("attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, SymInt? diagonal=None,"
        " float? scale=None, bool enable_gqa=False) -> Tensor", {tag});
  m.def("attention_with_lse(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, SymInt? diagonal=None,"
        " float? scale=None, bool enable_gqa=False, int mask_block=1) -> (Tensor, Tensor)", {tag});
  m.def("attention_gradients(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? out, Tensor lse, Tensor? delta,"
        " Tensor? attn_mask, SymInt? diagonal, float? scale, int mask_block) -> (Tensor, Tensor, Tensor)", {tag});
  m.def("attention_varlen(Tensor query, Tensor key, Tensor value, Tensor offsets, SymInt? diagonal=None, float? scale=None)"
        " -> Tensor", {tag});
  m.def("attention_explain(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0,"
        " float? scale=None, bool enable_gqa=False, int mask_block=1) -> str");
  m.def("attention_portable(bool on) -> ()", attention_portable);
  m.def("attention_forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? offsets, Tensor? state, float scale,"
        " SymInt diagonal, int mask_block, int kept) -> (Tensor, Tensor)", {tag});
  m.def("attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? out, Tensor lse, Tensor? delta,"
        " Tensor? grad_lse, Tensor? attn_mask, Tensor? offsets, Tensor? state, float scale, SymInt diagonal, int mask_block,"
        " int kept) -> (Tensor, Tensor, Tensor)", {tag});
  m.def("attention_mask_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,"
        " Tensor? grad_lse, Tensor attn_mask, float scale, SymInt diagonal) -> Tensor", {tag});
}
TORCH_LIBRARY_IMPL(mojo_workbook, CompositeImplicitAutograd, m) {
  m.impl("attention", attention);
  m.impl("attention_with_lse", attention_with_lse);
  m.impl("attention_gradients", attention_gradients);
  m.impl("attention_varlen", attention_varlen);
  m.impl("attention_explain", attention_explain);
}
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_AUTOCAST, m) {
  m.impl("attention", attention_autocast);
  m.impl("attention_with_lse", with_lse_autocast);
  m.impl("attention_varlen", varlen_autocast);
}
TORCH_LIBRARY_IMPL(mojo_workbook, WORKBOOK_DEVICE, m) {
  m.impl("attention_forward", forward_device);
  m.impl("attention_backward", backward_device);
  m.impl("attention_mask_backward", mask_backward_device);
}
TORCH_LIBRARY_IMPL(mojo_workbook, Meta, m) {
  m.impl("attention_forward", forward_meta);
  m.impl("attention_backward", backward_meta);
  m.impl("attention_mask_backward", mask_backward_meta);
}
TORCH_LIBRARY_IMPL(mojo_workbook, Autograd, m) {
  for (auto* name : {"attention_forward", "attention_backward", "attention_mask_backward"})
    m.impl(name, torch::autograd::autogradNotImplementedFallback());
}
