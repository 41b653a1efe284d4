"""Dropout in `harness.nn.attention`: the draws, both operators beside autograd with the very mask, and what is left to PyTorch.

The kernels are checked in tests/p23 on the virtual GPU, and here, marked, on a real one.
"""

import pytest
import torch
import torch.nn.functional as F
from attention_checks import inputs, output_and_gradients
from typed import three

from harness.nn import attention, attention_direct, attention_dropout, attention_with_lse, extension_kernels
from harness.nn.attention_dropout import ONE, keep_mask, kept_of, philox, rescale
from harness.nn.attention_plan import EVERY_KEY

Tensor = torch.Tensor
KEPT = kept_of(0.1)
DTYPES = (torch.bfloat16, torch.float16)
UNITS = 4
"""How far results may be off, in units of the dtype."""
STATE = torch.tensor([0x243F6A8885A308D3, 0x13198A2E03707344])


@pytest.fixture
def operators(monkeypatch):
    """The operators on the CPU, with the formula in the place of kernels, as a compiled model has it without
    an extension module.
    """
    monkeypatch.setattr(extension_kernels, "DEVICE", "cpu")
    monkeypatch.setattr(attention_direct.kernels, "table", {-1: object()})
    monkeypatch.setattr(attention_dropout, "dropout_kernels", lambda query, key: None)


def masked(query, key, value, keep, *, scale=None, attn_mask=None, is_causal=False, factor=1 / 0.9) -> Tensor:
    """The formula, of probabilities times a mask, for autograd; heads of key and value are repeated."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores + (attn_mask.to(scores.dtype).log() if attn_mask.dtype == torch.bool else attn_mask)
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    return (torch.softmax(scores, -1) * keep * factor) @ value


# ---- The draws ----------------------------------------------------------------------------------------------

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
KNOWN = {
    (0,) * 6: (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
    (0xFFFFFFFF,) * 6: (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    PI: (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
}
"""Known answers of philox4x32 with 7 rounds, published with Random123: counter, then key."""


@pytest.mark.parametrize(("given", "answer"), KNOWN.items(), ids=["zeros", "ones", "pi"])
def test_the_draws_are_philox_s(given, answer):
    words = [torch.tensor(word) for word in given]
    c0, c1, c2, c3, key0, key1 = words
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (key0, key1))) == answer


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_how_many_are_kept_and_that_they_have_nothing_to_do_with_each_other(dropout_p):
    """Within five standard deviations: of all, of each row, column and head, and of pairs of neighbours, rows, heads, blocks and states."""
    kept, size = kept_of(dropout_p), (2, 3, 320, 512)
    keep = keep_mask(STATE, size, kept)
    share = kept / ONE
    assert keep.shape == size and keep.dtype == torch.bool

    def apart(values: Tensor, axes: tuple[int, ...]) -> float:
        """How far the means over axes are from what is expected, in standard deviations."""
        count = values.numel() / values.double().mean(axes).numel()
        spread = (values.double().var() / count) ** 0.5
        return float(((values.double().mean(axes) - values.double().mean()).abs() / spread).max())

    deviation = (share * (1 - share) / keep.numel()) ** 0.5
    assert abs(float(keep.double().mean()) - share) < 5 * deviation
    assert max(apart(keep, (0, 1, 2)), apart(keep, (0, 1, 3)), apart(keep, (2, 3))) < 5
    centred = keep.double() - share
    others = [
        centred.roll(shift, axis)
        for axis, shifts in ((3, (1, 8, 16)), (2, (1, 8, 16, 24, 32)), (1, (1,)), (0, (1,)))
        for shift in shifts
    ]
    for place in range(2):
        state = STATE.clone()
        state[place] += 1
        others.append(keep_mask(state, size, kept).double() - share)
    others.append(keep_mask(STATE + 2**32, size, kept).double() - share)
    of_pairs = share * (1 - share) / keep.numel() ** 0.5
    for number, other in enumerate(others):
        assert abs(float((centred * other).mean())) < 5 * of_pairs, number


def test_a_mask_is_part_of_a_larger_one():
    """Of any sizes: a query and a key draw the same, whatever else there is."""
    whole = keep_mask(STATE, (2, 2, 70, 75), KEPT)
    assert torch.equal(keep_mask(STATE, (1, 2, 33, 17), KEPT), whole[:1, :, :33, :17])


# ---- The operators ------------------------------------------------------------------------------------------

CASES = {
    "plain": ({}, None, {}),
    "causal, shared heads": ({"N": 4, "G": 2, "S": 40, "T": 50}, None, {"is_causal": True, "enable_gqa": True}),
    "a mask of numbers": ({"S": 33, "T": 35}, torch.linspace(-1, 1, 35), {"scale": 0.7}),
    "a mask of bool": ({"S": 5, "T": 20}, torch.arange(20) % 3 > 0, {}),
    "elements of value": ({"d": 6, "dv": 11}, None, {}),
    "no batch of heads": ({"N": 1}, None, {"is_causal": True}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "mask", "options"), CASES.values(), ids=CASES)
def test_output_and_gradients_beside_autograd_with_the_same_mask(
    operators, monkeypatch, dtype, sizes, mask, options
):
    monkeypatch.setattr(attention_dropout, "new_state", lambda device: STATE)
    tensors = inputs(dtype=dtype, **sizes)
    if mask is not None:
        options = options | {"attn_mask": mask if mask.dtype == torch.bool else mask.to(dtype)}
    got = output_and_gradients(attention, tensors, dropout_p=0.1, **options)
    (B, N, S, _), T = tensors[0].shape, tensors[1].shape[2]
    keep = keep_mask(STATE, (B, N, S, T), KEPT)
    assert not keep.all()
    options = {name: each for name, each in options.items() if name != "enable_gqa"}
    exact = output_and_gradients(
        masked, [t.double() for t in tensors], keep=keep.double(), factor=ONE / KEPT, **options
    )
    for ours, truth in zip(got, exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - truth).abs().max() <= UNITS * torch.finfo(dtype).eps * truth.abs().max()


def test_a_seed_says_what_is_drawn_and_each_call_draws_anew(operators):
    tensors = [tensor.bfloat16() for tensor in inputs(S=40, T=40)]

    def two(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        return attention(*tensors, dropout_p=0.5), attention(*tensors, dropout_p=0.5)

    first, again, other = two(0), two(0), two(1)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert not torch.equal(*first) and not torch.equal(first[0], other[0])
    mean = torch.stack([attention(*tensors, dropout_p=0.5) for _ in range(400)]).double().mean(0)
    query, key, value = (tensor.double() for tensor in tensors)
    P = torch.softmax(query @ key.mT / 8**0.5, -1)
    # Of p = 0.5 a term P * v varies by as much as it is.
    deviation = (P.square() @ value.square() / 400).sqrt()
    assert ((mean - P @ value).abs() < 5 * deviation + 1e-3).all()


def test_all_or_nothing(operators):
    tensors = [tensor.bfloat16() for tensor in inputs()]
    nothing = output_and_gradients(attention, tensors, dropout_p=1.0)
    assert not any(each.any() for each in nothing)
    assert kept_of(0.0) == kept_of(1e-9) == ONE and kept_of(1.0) == 0 and rescale(0) == 0


def test_rows_that_see_no_key_and_no_keys_at_all_give_nought(operators):
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    output, grad_query, *_ = output_and_gradients(
        attention, [t.bfloat16() for t in inputs()], attn_mask=mask, dropout_p=0.1
    )
    assert not output[:, :, 2].any() and not grad_query[:, :, 2].any() and output[:, :, 1].any()
    empty = output_and_gradients(attention, [t.bfloat16() for t in inputs(T=0)], dropout_p=0.1)
    assert empty[0].shape == (2, 2, 5, 8) and not empty[0].any() and not empty[1].any()


def test_opcheck():
    tensors = [tensor.requires_grad_() for tensor in inputs(N=4, G=2)]
    drawn = (STATE, 0.3, 2, KEPT)
    torch.library.opcheck(attention_dropout.forward_operator, (*tensors, None, *drawn))
    with torch.no_grad():
        out, lse = attention_dropout.forward_operator(*tensors, None, *drawn)
        plain = [tensor.detach() for tensor in tensors]
    torch.library.opcheck(attention_dropout.backward_operator, (out, *plain, out, lse, None, *drawn))


def test_gradcheck_and_no_second_derivative():
    tensors = [tensor.requires_grad_() for tensor in inputs(dtype=torch.float64, N=4, G=2, S=3, T=4, d=3)]

    def function(query, key, value):
        return attention_dropout.forward_operator(query, key, value, None, STATE, 0.5, EVERY_KEY, ONE // 2)[0]

    assert torch.autograd.gradcheck(function, tensors)
    (gradient,) = torch.autograd.grad(function(*tensors).sum(), tensors[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="attention has no double backward"):
        gradient.sum().backward()


def test_compiles_as_one_graph_and_draws_anew(operators):
    def function(*tensors):
        return attention(*tensors, dropout_p=0.5, is_causal=True)

    tensors = [tensor.bfloat16() for tensor in inputs(S=40, T=40)]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.manual_seed(0)
    first, second = (output_and_gradients(compiled, tensors) for _ in range(2))
    torch.manual_seed(0)
    for ours, eager in zip(first, output_and_gradients(function, tensors), strict=True):
        assert torch.equal(ours, eager)
    assert not torch.equal(first[0], second[0])


def test_a_recomputed_step_draws_the_same(operators):
    """Activation checkpointing runs the forward pass twice, with the generator as it was."""
    tensors = [tensor.bfloat16() for tensor in inputs(S=20, T=20)]

    def checkpointed(*tensors):
        from torch.utils.checkpoint import checkpoint

        return checkpoint(lambda *own: attention(*own, dropout_p=0.5).sin(), *tensors, use_reentrant=False)

    torch.manual_seed(3)
    once = output_and_gradients(lambda *own: attention(*own, dropout_p=0.5).sin(), tensors)
    torch.manual_seed(3)
    for ours, theirs in zip(output_and_gradients(checkpointed, tensors), once, strict=True):
        assert torch.equal(ours, theirs)


# ---- What is left to PyTorch --------------------------------------------------------------------------------

LEFT = {
    "float32": ({}, {}),
    "causal, shared heads": ({"N": 4, "G": 2}, {"is_causal": True, "enable_gqa": True}),
    "scale": ({}, {"scale": 0.3}),
    "a learned mask": ({}, {"attn_mask": torch.linspace(-1, 1, 35).reshape(5, 7).requires_grad_()}),
    "one number for all keys": ({}, {"attn_mask": torch.linspace(-1, 1, 5)[:, None].requires_grad_()}),
    "bool": ({}, {"attn_mask": torch.ones(5, 7, dtype=torch.bool).tril(1)}),
}  # fmt: skip


@pytest.mark.parametrize(("sizes", "options"), LEFT.values(), ids=LEFT)
def test_a_call_without_kernels_is_pytorch_s_own_with_its_draws(sizes, options):
    results = []
    for function in (attention, F.scaled_dot_product_attention):
        torch.manual_seed(5)
        results.append(output_and_gradients(function, inputs(**sizes), dropout_p=0.4, **options))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert not torch.equal(results[0][0], attention(*inputs(**sizes), dropout_p=0.4, **options).detach())


def test_a_causal_mask_from_the_bottom_right_is_left_to_pytorch_as_numbers():
    from torch.nn.attention import bias  # imports all of Dynamo

    tensors = three(inputs())
    triangle = torch.ones(5, 7, dtype=torch.bool).tril(2)
    for mask in (bias.causal_lower_right(5, 7), triangle):
        torch.manual_seed(5)
        output = attention(*tensors, attn_mask=mask, dropout_p=0.4)
        torch.manual_seed(5)
        assert torch.equal(output, F.scaled_dot_product_attention(*tensors, triangle, 0.4))


def test_explain_says_whether_kernels_draw(operators, monkeypatch):
    monkeypatch.setattr(attention_direct, "is_hopper", lambda device: True)
    query = inputs(dtype=torch.bfloat16)[0]
    by = attention_direct.explain
    assert by(query, dropout_p=0.1) == "wgmma, through the extension module"
    assert by(query, attn_mask=torch.ones(1, dtype=torch.bfloat16), dropout_p=0.1) == (
        "mma.sync, through the extension module: attn_mask is one number for all keys"
    )
    assert by(query.float(), dropout_p=0.1).startswith("PyTorch's own scaled_dot_product_attention: ")
    long = torch.empty(1, 2, 2**16 + 1, 8, device="meta", dtype=torch.bfloat16)
    monkeypatch.setattr(extension_kernels, "DEVICE", "meta")
    assert by(long, dropout_p=0.1) == (
        "mma.sync, through the extension module: the draws of dropout would take more than a GiB"
    )


@pytest.mark.parametrize("given", [1.5, -0.1, float("nan")])
def test_what_is_no_probability(given):
    with pytest.raises(ValueError, match=f"dropout_p: expected a probability from 0 to 1, got {given}"):
        attention(*inputs(), dropout_p=given)


@pytest.mark.parametrize("given", ["0.1", True])
def test_what_is_no_number(given):
    with pytest.raises(TypeError, match=f"dropout_p: expected a number, got {type(given).__name__}"):
        attention(*inputs(), dropout_p=given)


def test_with_lse_there_is_no_dropout():
    with pytest.raises(
        NotImplementedError, match=r"dropout_p: attention_with_lse has no dropout, expected 0, got 0\.1"
    ):
        attention_with_lse(*inputs(), dropout_p=0.1)


# ---- On a GPU -----------------------------------------------------------------------------------------------

ON_GPU = [
    ({"S": 130, "T": 130, "d": 64}, {"is_causal": True}),
    ({"S": 200, "T": 77, "d": 40}, {}),
    ({"N": 8, "G": 2, "S": 65, "T": 65, "d": 64}, {"enable_gqa": True, "is_causal": True}),
    ({"S": 140, "T": 200, "d": 128}, {}),
    ({"S": 33, "T": 300, "d": 72}, {"attn_mask": torch.arange(300) < 150}),
    ({"S": 100, "T": 90, "d": 64}, {"attn_mask": torch.linspace(-2, 2, 9000).reshape(100, 90)}),
    ({"S": 20, "T": 30, "d": 17}, {"scale": -0.3}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "options"), ON_GPU, ids=str)
def test_gpu_kernels_beside_autograd_with_the_same_mask(monkeypatch, dtype, sizes, options):
    state = STATE.cuda()
    monkeypatch.setattr(attention_dropout, "new_state", lambda device: state)
    tensors = [tensor.to("cuda") for tensor in inputs(dtype=dtype, **sizes)]
    mask = options.get("attn_mask")
    if mask is not None:
        options = options | {"attn_mask": (mask if mask.dtype == torch.bool else mask.to(dtype)).cuda()}
    got = output_and_gradients(attention, tensors, dropout_p=0.1, **options)
    again = output_and_gradients(attention, tensors, dropout_p=0.1, **options)
    assert all(torch.equal(*pair) for pair in zip(got, again, strict=True))
    (B, N, S, _), T = tensors[0].shape, tensors[1].shape[2]
    keep = keep_mask(state, (B, N, S, T), KEPT).double()
    options = {name: each for name, each in options.items() if name != "enable_gqa"}
    exact = output_and_gradients(
        masked, [t.double() for t in tensors], keep=keep, factor=ONE / KEPT, **options
    )
    for ours, truth in zip(got, exact, strict=True):
        assert (ours.double() - truth).abs().max() <= UNITS * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_gpu_draws_are_the_same_on_every_path(monkeypatch, d):
    """Of equal queries all probabilities are equal: the output is which of the keys, and how many, are kept."""
    state = STATE.cuda()
    monkeypatch.setattr(attention_dropout, "new_state", lambda device: state)
    zeros = torch.zeros(1, 2, 96, d, device="cuda")
    one_each = torch.eye(96, d, device="cuda").repeat(1, 2, 1, 1)

    def kept(dtype: torch.dtype) -> Tensor:
        return attention(zeros.to(dtype), zeros.to(dtype), one_each.to(dtype), dropout_p=0.3) != 0

    each = [kept(dtype) for dtype in DTYPES]
    with attention_direct.portable_kernels():
        each.append(kept(torch.bfloat16))
    mask = keep_mask(state, (1, 2, 96, 96), kept_of(0.3))[..., :d]
    assert all(torch.equal(one[..., : mask.shape[-1]], mask) for one in each)


@pytest.mark.gpu
def test_gpu_share_that_is_kept():
    """Of values of ones the output is the sum of what is kept of a row's probabilities."""
    query, key, value = (torch.ones(2, 4, 1024, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    output = attention(query, key, value, dropout_p=0.3)[..., 0].double()
    rows = output.numel()
    deviation = (0.3 / 0.7 / 1024) ** 0.5
    assert abs(float(output.mean()) - 1) < 5 * deviation / rows**0.5 + 1e-4
    assert 0.9 * deviation < float(output.std()) < 1.1 * deviation


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_graph_draws_anew_in_each_replay_on_a_side_stream_too(dtype):
    tensors = [tensor.to("cuda", dtype).requires_grad_() for tensor in inputs(S=256, T=256, d=64)]

    def step() -> list[Tensor]:
        output = attention(*tensors, dropout_p=0.5, is_causal=True)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), tensors)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.manual_seed(0)
        expected = [[each.clone() for each in step()] for _ in range(2)]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    torch.manual_seed(0)
    got = []
    for _ in range(2):
        graph.replay()
        got.append([each.clone() for each in results])
    assert not torch.equal(got[0][0], got[1][0])
    for ours, theirs in zip(got, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
