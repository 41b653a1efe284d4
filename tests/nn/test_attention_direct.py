"""Attention through its extension module: what the module is handed, which calls go there, and what is said where there is none.

The module here writes down its arguments; the kernels behind the real one are checked in tests/p23.
"""

import random
import re
import warnings
from collections import Counter
from contextlib import nullcontext
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from typed import loosely, present, three

from harness.errors import EnvironmentProblem
from harness.nn import (
    attention,
    attention_autograd,
    attention_direct,
    attention_plan,
    attention_varlen,
    extension_kernels,
)
from harness.nn.attention_plan import EVERY_KEY
from harness.toolchain import extension

VARLEN = {"varlen_forward", "varlen_backward"}
"""What attention of unequal lengths calls alone,"""
DROPOUT = {"dropout_forward", "dropout_backward"}
"""and with dropout."""
KINDS = (torch.bfloat16, torch.float16, torch.float32)
CPU_INDEX = -1
"""What torch calls the device of a tensor on the CPU: the GPU of these tests."""


class Module(ModuleType):
    """Writes down every call."""

    def __init__(self):
        super().__init__("workbook_p23")
        self.calls = []

    def open(self, index):
        return 7

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, arguments)) or 0


@pytest.fixture
def module(monkeypatch):
    """A module on the CPU, in the place of a GPU's."""
    stand_in = Module()
    kernels = attention_direct.AttentionKernels(stand_in, torch.device("cpu"))
    for file in (attention_direct, extension_kernels):
        monkeypatch.setattr(file, "current_device", lambda: CPU_INDEX)
    for file in (extension_kernels, attention_plan):
        monkeypatch.setattr(file, "current_stream", lambda index: 99)
        monkeypatch.setattr(
            file,
            "empty_strided",
            lambda size, strides, dtype: torch.zeros(size, dtype=dtype).as_strided(size, strides),
        )
    monkeypatch.setattr(extension_kernels, "DEVICE", "cpu")
    monkeypatch.setattr(attention_direct.kernels, "table", {CPU_INDEX: kernels})
    return stand_in


def leaves(dtype=torch.bfloat16, S=9, T=9, N=4, G=4, d=64):
    """Query, key and value as a model makes them: heads inside of rows."""
    return three(
        torch.randn(2, length, heads, d).to(dtype).transpose(1, 2).requires_grad_()
        for length, heads in ((S, N), (T, G), (T, G))
    )


def expected_counts():
    """How many arguments each function of the module wants."""
    text = (extension.sources("attention")[0]).read_text()
    calls = re.findall(r'call\["(\w+)", ([\d +]+)\]', text)
    return {name: sum(int(number) for number in sizes.split("+")) for name, sizes in calls}


def counts(module):
    """How many arguments each call had."""
    return {name: len(arguments) for name, arguments in module.calls}


def test_both_ways_hand_over_as_many_arguments_as_the_module_wants(module):
    tensors = leaves()
    own = VARLEN | DROPOUT
    wanted = {name: count for name, count in expected_counts().items() if name not in own}
    attention(*tensors, is_causal=True).sum().backward()
    direct = counts(module)
    module.calls.clear()
    mask = torch.zeros(9, 9, dtype=torch.bfloat16, requires_grad=True)
    output, lse = attention_autograd.attention_with_lse(*tensors, mask)
    (output.sum() + lse.sum()).backward()
    assert mask.grad is not None and mask.grad.shape == (9, 9)
    assert counts(module).keys() >= {"delta", "backward"}, "the gradient of lse"
    assert direct.keys() == {"forward", "gradients"} and direct.items() <= wanted.items()
    assert {**direct, **counts(module)} == wanted


def test_unequal_lengths_hand_over_as_many_arguments_as_the_module_wants(module):
    """Heads lie within rows, gradients and output too; three elements are padded to a chunk."""
    query, key, value = (torch.zeros(9, 4, d, dtype=torch.bfloat16).requires_grad_() for d in (3, 3, 3))
    offsets = torch.tensor([0, 5, 9], dtype=torch.int32)
    attention_varlen(query, key, value, offsets, offsets, is_causal=True).sum().backward()
    wanted = expected_counts()
    assert counts(module).keys() == VARLEN | {"delta"} and counts(module).items() <= wanted.items()
    (_, forward), _, (_, backward) = module.calls
    sizes = (1, 4, 4, 9, 9, 8, 0, 0, 0, 0, 0, 2)
    assert forward[6:18] == backward[6:18] == sizes
    # There is one batch, and so nothing to its stride.
    assert forward[26::3] == (8,) * 4 and forward[27::3] == (32,) * 4
    assert backward[30::3] == (8,) * 7 and backward[31::3] == (32,) * 7


def test_dropout_hands_over_as_many_arguments_as_the_module_wants(module):
    """The state's address and how many of 65,536 are kept come last; three elements are padded to a chunk; rows begin with one."""
    query, key, value = leaves(d=3, G=2)
    mask = torch.zeros(9, dtype=torch.bfloat16)
    attention(query, key, value, mask, 0.25, enable_gqa=True).sum().backward()
    wanted = expected_counts()
    assert counts(module).keys() == DROPOUT and counts(module).items() <= wanted.items()
    (_, counted), (_, forward), (_, counted_too), (_, backward) = module.calls
    assert not any(counted[:4]) and not any(counted_too[:4]), "how much scratch memory it wants"
    sizes = (2, 4, 2, 9, 9, 8, EVERY_KEY, 0, 0, 0, 1, 1)
    assert forward[6:18] == backward[6:18] == sizes and forward[18] == backward[18] == 1 / 3**0.5
    assert forward[-2:] == backward[-2:] and forward[-1] == 49152
    assert all(stride % 8 == 0 for stride in (*forward[25:37], *backward[29:53]))
    assert forward[24] == backward[28] == mask.data_ptr()


def test_a_plain_call_goes_past_the_dispatcher_with_the_same_arguments(module):
    tensors = leaves(T=12, G=2)
    output = attention(*tensors, is_causal=True, enable_gqa=True, scale=0.3)
    assert "Direct" in type(output.grad_fn).__name__
    (name, direct), *rest = module.calls
    module.calls.clear()
    attention_autograd.attention_with_lse(*tensors, is_causal=True, enable_gqa=True, scale=0.3)
    ((_, operator),) = module.calls
    addresses = slice(19, 25)
    apart = [index for index, pair in enumerate(zip(direct, operator, strict=True)) if pair[0] != pair[1]]
    assert name == "forward" and not rest and set(apart) <= {19, 20, 24}, "output, lse and the absent mask"
    assert direct[addresses][2:5] == tuple(tensor.data_ptr() for tensor in tensors)
    assert direct[4:19] == (2, 0, 2, 4, 2, 9, 12, 64, 0, 0, 0, 0, 0, 0, 0.3)
    assert direct[25:34] == (2304, 64, 256, 1536, 64, 128, 1536, 64, 128)
    assert direct[34:] == (2304, 64, 256)


def test_the_first_call_goes_the_way_of_the_second(module, monkeypatch):
    """It opens the module itself, once; not for arguments that are wrong."""
    table, opened = attention_direct.kernels.table, []
    (kernels,) = table.values()
    monkeypatch.setattr(attention_direct.kernels, "open", lambda device: opened.append(device) or kernels)
    table.clear()
    query, key, value = leaves()
    with pytest.raises(TypeError, match="key: expected bfloat16"):
        attention(query, key.half(), value)
    assert opened == []
    outputs = [attention(query, key, value) for _ in range(2)]
    assert opened == [torch.device("cpu")] and [name for name, _ in module.calls] == ["forward"] * 2
    assert [type(output.grad_fn).__name__ for output in outputs] == ["DirectAttentionBackward"] * 2


@pytest.mark.parametrize("masked", [False, True])
def test_heads_side_by_side_stay_so_and_contiguous_tensors_too(module, masked):
    """As PyTorch's attention: joining the heads of the output, or the gradients of separate Linear layers, copies nothing."""
    mask = torch.zeros(9, 9, dtype=torch.bfloat16) if masked else None
    for tensors in (leaves(), three(tensor.detach().contiguous().requires_grad_() for tensor in leaves())):
        inside = tensors[0].stride(1) < tensors[0].stride(2)
        output = attention(*tensors, mask)
        gradients = torch.autograd.grad(output.sum(), tensors)
        for result in (output, *gradients):
            assert result.transpose(1, 2).is_contiguous() == inside and result.is_contiguous() != inside
        assert [name for name, _ in module.calls] == ["forward", "gradients"]
        written = module.calls[-1][1][-12:]
        assert {written[at : at + 3] for at in range(0, len(written), 3)} == {result.stride()[:3]}
        module.calls.clear()


def test_other_dtypes_and_devices_get_contiguous_results(module, monkeypatch):
    assert attention_direct.empty_in_order(leaves(torch.float32)[0]).is_contiguous()
    query = leaves()[0]
    assert not attention_direct.empty_in_order(query).is_contiguous()
    monkeypatch.setattr(extension_kernels, "DEVICE", "cuda")
    assert attention_direct.empty_in_order(query).is_contiguous()


def test_an_output_in_another_order_is_read_at_its_own_strides(module):
    query, key, value = three(tensor.detach() for tensor in leaves())
    output, lse = attention_autograd.attention_with_lse(query, key, value)
    attention_autograd.attention_backward(output, query, key, value, output, lse)
    attention_autograd.attention_backward(output, query, key, value, output.contiguous(), lse)
    names = [name for name, _ in module.calls]
    assert names == ["forward", "gradients", "delta", "backward"]
    assert module.calls[2][1][-3:] == output.contiguous().stride()[:3]


def test_only_wanted_gradients_are_returned(module):
    query, key, value = leaves()
    key = key.detach()
    attention(query, key, value).sum().backward()
    assert query.grad is not None and value.grad is not None and key.grad is None


def test_the_second_derivative_is_refused_on_the_direct_way_too(module):
    tensors = leaves()
    (gradient,) = torch.autograd.grad(attention(*tensors).sum(), tensors[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="attention has no double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": torch.float64},
        {"dtype": torch.float32},
        {"d": 264},
        {"d": 0},
        {"S": 0},
        {"T": 0},
        {"G": 2},
    ],
    ids=str,
)
def test_what_the_direct_way_leaves_to_the_operator(module, arguments):
    assert attention_direct.attention_directly(*leaves(**arguments), None, False, None, False) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_scale_that_is_no_number_is_refused_on_the_direct_way_too(module, dtype):
    with pytest.raises(TypeError, match="scale: expected"):
        loosely(attention)(*leaves(dtype), scale="0.5")
    assert not module.calls


def test_modes_and_subclasses_and_other_ranks_are_left_to_the_operator(module):
    query, key, value = leaves()

    class Sub(torch.Tensor):
        pass

    call = attention_direct.attention_directly
    assert call(query, key, value, None, False, None, False) is not None
    assert call(query.as_subclass(Sub), key, value, None, False, None, False) is None
    assert call(query[0], key[0], value[0], None, False, None, False) is None
    assert call(query.mT.contiguous().mT, key, value, None, False, None, False) is None
    assert call(query, key.half(), value, None, False, None, False) is None
    with torch.autocast("cpu"):
        assert call(query, key, value, None, False, None, False) is None


def is_direct(output):
    """Whether a result, or what it is a view of, was computed past the dispatcher."""
    names, node = [], output.grad_fn
    while node is not None:
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return "DirectAttentionBackward" in names


def test_a_masked_call_goes_past_the_dispatcher_where_the_mask_needs_no_gradient(module):
    tensors, mask = leaves(S=9, T=16), torch.ones(9, 16, dtype=torch.bool)
    for given in (mask, mask.float().to(torch.bfloat16)):
        output = attention(*tensors, given)
        assert is_direct(output)
        (gradient,) = torch.autograd.grad(output.sum(), tensors[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match="attention has no double backward"):
            gradient.sum().backward()
    needs = given.requires_grad_()
    assert not is_direct(attention(*tensors, needs))
    with torch.autocast("cpu", torch.bfloat16):
        narrowed = attention(*three(tensor.float() for tensor in tensors), mask)
    assert narrowed.dtype == torch.bfloat16 and is_direct(narrowed)


def test_a_mask_of_four_axes_that_fits_goes_the_shortest_way(module, monkeypatch):
    """Every other is looked at, and said to be wrong where it is."""
    dtype = torch.bfloat16
    tensors = leaves(T=12)
    fitting = [(2, 4, 9, 12), (2, 1, 1, 12), (1, 1, 9, 12), (1, 4, 9, 1)]
    expected = [attention(*tensors, torch.zeros(sizes, dtype=dtype)) for sizes in fitting]
    assert all(map(is_direct, expected))
    with pytest.raises(ValueError, match=r"attn_mask: shape \[2, 4, 9, 11\] does not broadcast"):
        attention(*tensors, torch.zeros(2, 4, 9, 11, dtype=dtype))
    monkeypatch.setattr(attention_autograd, "prepared", Mock(side_effect=InterruptedError))
    for sizes in fitting:
        attention(*tensors, torch.zeros(sizes, dtype=dtype)).sum().backward()
    mask = torch.zeros(fitting[0], dtype=dtype)
    for other in (
        mask[0, 0],
        mask.double(),
        mask.bool(),
        mask[..., :3],
        mask.to_sparse(),
        mask.requires_grad_(),
    ):
        with pytest.raises(InterruptedError):
            attention(*tensors, other)
    with pytest.raises(InterruptedError):
        attention(*tensors, mask.detach(), is_causal=True)


def test_a_mask_is_handed_over_at_its_own_strides(module):
    mask = torch.zeros(9, 9, dtype=torch.bfloat16).t()
    attention(*leaves(), mask).sum().backward()
    calls = dict(module.calls)
    forward, backward = calls["forward"], calls["gradients"]
    assert len(calls) == 2 and forward[13:18] == backward[13:18] == (0, 0, 1, 9, 1)
    assert forward[24] == backward[28] == mask.data_ptr()
    attention(*leaves())
    *_, (_, arguments) = module.calls
    assert arguments[13:18] == (0, 0, 0, 0, 0), "no mask: its blocks have size 0"


def test_the_portable_kernels_are_asked_for_by_number_and_only_meanwhile(module):
    with attention_direct.portable_kernels():
        output = attention(*leaves())
    output.sum().backward()
    attention(*leaves())
    assert [arguments[5] for name, arguments in module.calls if name != "delta"] == [1, 1, 0]


def test_float32_is_pytorch_s_own(module):
    """Both passes, and what the operators give of it; on every GPU."""
    attention(*leaves(torch.float32)).sum().backward()
    output, lse = attention_autograd.attention_with_lse(*leaves(torch.float32))
    (output.sum() + lse.sum()).backward()
    assert not module.calls


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_saved_tensors_may_come_back_in_another_order(module, masked):
    """As from `save_on_cpu`, which leaves gaps out: heads that were cut from one product have some."""
    cut = torch.randn(2, 9, 3, 4, 64).bfloat16().unbind(2)
    tensors = three(tensor.transpose(1, 2).detach().requires_grad_() for tensor in cut)
    mask = torch.zeros(9, 18, dtype=torch.bfloat16)[:, ::2] if masked else None
    unpacked = {}

    def unpack(tensor):
        order = (0, 2, 1, 3) if tensor.dim() == 4 else (1, 2, 0)
        back = [order.index(axis) for axis in range(tensor.dim())]
        other = tensor.detach().permute(order).contiguous().permute(back)
        unpacked[other.data_ptr()] = other
        return other

    for read_back in (lambda tensor: tensor, unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, read_back):
            output = attention(*tensors, mask)
        assert is_direct(output)
        module.calls.clear()
        torch.autograd.grad(output.sum(), tensors)
    name, arguments = module.calls[-1]
    assert arguments[13:18] == ((0, 0, 9, 1, 1) if masked else (0, 0, 0, 0, 0))
    handed = [unpacked.get(address) for address in arguments[23:26]]
    assert name == "backward", "which takes an output and lse in any order"
    strides = [stride for tensor in handed for stride in present(tensor).stride()[:3]]
    assert strides == [2304, 64, 256] * 3 == [*arguments[29:38]]


@pytest.mark.parametrize("kind", ["lengths", "dropout"])
def test_saved_tensors_of_other_attentions_may_come_back_strided(module, monkeypatch, kind):
    """Their kernels read rows of neighbours that begin at multiples of 16 bytes, and numbers without gaps."""
    tensors = leaves()
    offsets = torch.tensor([0, 5, 9], dtype=torch.int32)
    given = three(each[0].transpose(0, 1) for each in tensors) if kind == "lengths" else tensors
    call = {
        "lengths": lambda: attention_varlen(*given, offsets, offsets),
        "dropout": lambda: attention(*given, None, 0.25),
    }[kind]
    seen = []
    monkeypatch.setattr(
        attention_direct.AttentionKernels, "call", lambda *arguments, **options: seen.append(arguments)
    )
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor, lambda tensor: tensor.detach().repeat_interleave(2, -1)[..., ::2]
    ):
        output = call()
    torch.autograd.grad(output.sum(), tensors)
    backward = [argument for argument in seen[-1] if isinstance(argument, torch.Tensor)]
    wide = [tensor for tensor in backward if tensor.dim() == 4 and tensor.shape[-1] == 64]
    assert len(wide) >= 4 and all(attention_direct.in_chunks(tensor) for tensor in wide)
    assert all(tensor.is_contiguous() for tensor in backward if tensor.dim() < 3 or tensor.shape[-1] != 64)


def test_elements_apart_are_copied_into_the_order_that_a_traced_result_has(module):
    tensors = three(
        torch.randn(2, 9, 4, 128).to(torch.bfloat16)[..., ::2].transpose(1, 2).requires_grad_() for _ in "qkv"
    )
    output = attention(*tensors)
    gradients = torch.autograd.grad(output.sum(), tensors)
    for result, like in zip((output, *gradients), (tensors[0], *tensors), strict=True):
        assert result.stride() == attention_direct.empty_in_order(like).stride() == (2304, 64, 256, 1)


def test_views_that_negate_are_never_handed_over_as_they_lie(module, monkeypatch):
    """As autograd makes one of the gradient of an imaginary part."""

    def negated(tensor):
        view = torch.complex(tensor, tensor).conj().imag
        assert view.is_neg()
        return view

    query, key, value = leaves(torch.float16)
    assert is_direct(attention(query, key, value))
    assert not is_direct(attention(negated(query), key, value))
    seen = []
    plain = attention_direct.backward_of
    monkeypatch.setattr(
        attention_direct,
        "backward_of",
        lambda plan, kernels, grad, *rest: seen.append(grad.is_neg()) or plain(plan, kernels, grad, *rest),
    )
    output = attention(query, key, value)
    output.backward(negated(torch.ones_like(output)))
    assert seen == [False]


def test_without_a_module_one_warning_says_why(monkeypatch):
    def refuse(*arguments, **more):
        raise EnvironmentProblem("no room")

    monkeypatch.setattr(extension, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(extension, "build", refuse)
    monkeypatch.setattr(attention_direct.kernels, "table", {})
    device = torch.device("cuda", 3)
    with pytest.warns(RuntimeWarning, match="PyTorch's own operations on cuda:3.*module: no room"):
        assert attention_direct.kernels(device) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attention_direct.kernels(device) is None
    assert attention_direct.kernels(torch.device("cpu")) is None


def test_explain_says_which_kernels_and_which_way(monkeypatch):
    dtype = torch.bfloat16

    def Query(d):
        return torch.zeros(1, 1, 8, d, dtype=dtype)

    explain = loosely(attention_direct.explain)
    torchs = "PyTorch's own scaled_dot_product_attention: "
    assert explain(torch.zeros(1, 1, 8, 8)) == (torchs + "query is on cpu; the kernels are for NVIDIA's GPUs")
    monkeypatch.setattr(attention_direct, "kernels", lambda device: object())
    monkeypatch.setattr(extension_kernels, "DEVICE", "cpu")
    monkeypatch.setattr(attention_direct, "is_hopper", lambda device: True)
    wgmma = "wgmma, through the extension module"
    qkv = torch.zeros(1, 8, 3, 4, 64, dtype=dtype).transpose(1, 3).unbind(2)
    asked = loosely(attention).explain
    assert asked(*qkv) == asked(*qkv, is_causal=True) == wgmma
    assert asked(*(t.float() for t in qkv)) == (
        torchs + "query is of float32; the kernels are for bfloat16 and float16"
    )
    assert explain(Query(64)) == wgmma
    with attention_direct.portable_kernels():
        assert explain(Query(64)).startswith("mma.sync")
    assert explain(Query(128)).startswith("wgmma")
    assert explain(Query(65)).startswith("mma.sync")
    assert explain(Query(256)).startswith("wgmma")
    assert explain(Query(129)).startswith("mma.sync")
    mask = torch.zeros(8, 16, dtype=torch.bfloat16)
    assert (
        explain(Query(64), attn_mask=mask)
        == explain(Query(128), attn_mask=mask[:, :1].bool().expand(8, 3))
        == wgmma
    )
    for query, given, cause in [
        (
            Query(136),
            mask,
            "there is attn_mask, and query has heads of 136 elements; backward wgmma then takes up to 128",
        ),
        (Query(64), mask[:, :1], "attn_mask is one number for all keys"),
        (Query(64), mask[:, 1:9], "the rows of attn_mask do not begin at multiples of 16 bytes"),
        (Query(64), mask.t(), "the rows of attn_mask do not begin at multiples of 16 bytes"),
    ]:
        assert explain(query, attn_mask=given) == f"mma.sync, through the extension module: {cause}"
    inside = torch.zeros(2, 8, 3, 64, dtype=dtype).transpose(1, 2)
    for call, cause in [
        ({"scale": -0.5}, "scale is -0.5, not above 0"),
        ({"blocks": 16}, "an element of the mask is a block of 16 queries and keys"),
        ({"key": inside[..., 1:57]}, "the rows of key do not begin at multiples of 16 bytes"),
        ({"value": inside[:, :1].expand(2, 3, 8, 64)}, "value has elements that stand for several"),
        ({"key": Query(64).expand(1, 65536, 8, 64)}, "key has a batch or heads above 65,535"),
    ]:
        assert explain(Query(64), **call) == f"mma.sync, through the extension module: {cause}"
    assert explain(inside, dropout_p=0.1, scale=0.0).endswith("scale is 0.0, not above 0")
    long = torch.zeros(1, 1, 1, 64, dtype=dtype).expand(1, 8, 2**15 + 1, 64)
    assert explain(long, dropout_p=0.1, key=long).endswith("dropout would take more than a GiB")
    assert explain(long[:, :, 1:], dropout_p=0.1, key=long[:, :, 1:]) == wgmma
    assert explain(Query(264)) == torchs + "query has heads of 264 elements; the kernels take up to 256"
    assert explain(Query(136), dropout_p=0.1) == (
        torchs + "query has heads of 136 elements; with dropout the kernels take up to 128"
    )
    learned = mask.float().requires_grad_()
    assert explain(Query(136), attn_mask=learned) == (
        torchs
        + "attn_mask needs a gradient, and query has heads of 136 elements; for that they take up to 128"
    )
    assert explain(Query(64), attn_mask=learned, dropout_p=0.1) == (
        torchs + "attn_mask needs a gradient; with dropout the kernels make none"
    )
    monkeypatch.setattr(attention_direct, "kernels", lambda device: None)
    assert explain(Query(64)) == torchs + "there is no extension module for this GPU"


@pytest.mark.parametrize(
    ("arguments", "shape", "cause"),
    [
        ({}, (9, 9), None),
        ({}, (9, 1), "attn_mask needs a gradient, and is one number for all keys"),
        ({"d": 60}, (9, 9), "query has heads of 60 elements, no multiple of 8"),
        (
            {"d": 136},
            (9, 9),
            "attn_mask needs a gradient, and query has heads of 136 elements; for that they take up to 128",
        ),
    ],
    ids=str,
)
def test_which_gradients_of_masks_the_kernels_make(arguments, shape, cause):
    query, _, _ = leaves(**arguments)
    assert attention_direct.without_mask_gradient(query, torch.zeros(shape)) == cause


def test_explain_names_the_road_that_calls_take(module, monkeypatch):
    """Of two hundred drawn calls: PyTorch's own, or the module, and there the kernels with dropout or those
    without. tests/p23 compares which kernels the module launches.
    """
    draw, counts, own = random.Random(0), Counter(), []
    monkeypatch.setattr(attention_autograd, "torchs_own", lambda query, *rest: own.append(0) or query)
    for _ in range(200):
        dtype, hopper, d = draw.choice(KINDS), draw.random() < 0.5, draw.choice([8, 20, 128, 136, 256])
        monkeypatch.setattr(attention_direct, "is_hopper", lambda device, hopper=hopper: hopper)
        tensors = leaves(dtype, T=16, d=d)
        mask = draw.choice([None, torch.ones(9, 16, dtype=dtype), torch.ones(9, 1, dtype=dtype)])
        if mask is not None and draw.random() < 0.3:
            mask.requires_grad_()
        options = {"dropout_p": draw.choice([0.0, 0.0, 0.5]), "scale": draw.choice([None, 0.5, 0.0, -1.0])}
        with draw.choice([nullcontext, attention_direct.portable_kernels])():
            said = attention_direct.explain(
                tensors[0], attn_mask=mask, **options, key=tensors[1], value=tensors[2]
            )
            module.calls.clear()
            own.clear()
            attention(*tensors, mask, **options)
        names = {name for name, _ in module.calls}
        if "PyTorch's own" in said:
            road = "PyTorch"
            assert own and not names
        else:
            road = "dropout" if options["dropout_p"] else "16 bits"
            assert names == {"dropout_forward" if options["dropout_p"] else "forward"} and not own, said
        counts[road] += 1
    assert min(counts.values()) >= 5 and len(counts) == 3, counts
