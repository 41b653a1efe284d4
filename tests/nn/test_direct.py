"""The direct way from torch tensors to the extension module: what it passes, allocates, keeps, and when it steps aside.

No test needs a GPU: `direct_module.py` stands in for the built module.
"""

import copy
import threading
import warnings

import pytest
import torch
from direct_module import DTYPES, TorchModule, bits, sequential
from layer_checks import (
    EPS,
    GRAD_OUTPUTS,
    NAMES,
    ROWS,
    H,
    O,
    assert_as_good_as_torch,
    assert_near,
    assert_only_needed_gradients,
    layer_from,
    make_inputs,
    output_and_gradients,
    plain_torch,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typed import loosely, present

from harness.errors import EnvironmentProblem
from harness.nn import autograd, extension_kernels, layernorm_direct, layers
from harness.toolchain import extension

fused_layernorm_linear = loosely(layers.fused_layernorm_linear)
layernorm_linear_directly = loosely(layers.layernorm_linear_directly)
# ---- What is passed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS, (4,), (1, 1), (), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_agrees_with_autograd(module, no_operator, dtype, rows):
    assert_as_good_as_torch(fused_layernorm_linear, make_inputs(dtype, rows))
    kind = layernorm_direct.KINDS[dtype]
    assert module.calls == [("forward", kind), ("backward", kind, 15)]


def test_the_first_call_goes_the_way_of_the_second(module, no_operator, monkeypatch):
    """It opens the module itself, once; not for arguments that are wrong."""
    table, opened = layernorm_direct.kernels.table, []
    (kernels,) = table.values()
    monkeypatch.setattr(layernorm_direct.kernels, "open", lambda device: opened.append(device) or kernels)
    table.clear()
    inputs = make_inputs()
    with pytest.raises(ValueError, match="ln_bias: expected 7 elements"):
        fused_layernorm_linear(*inputs[:2], torch.ones(H + 1), *inputs[3:])
    assert opened == []
    outputs = [fused_layernorm_linear(*inputs) for _ in range(2)]
    assert opened == [torch.device("cpu")] and module.calls == [("forward", 0)] * 2
    assert [type(output.grad_fn).__name__ for output in outputs] == ["DirectLayerNormLinearBackward"] * 2


def test_without_grad_nothing_is_kept(module, no_operator):
    inputs = make_inputs()
    expected = plain_torch(*inputs)
    with torch.no_grad():
        output = fused_layernorm_linear(*inputs)
    assert not output.requires_grad
    assert_near(output, expected.detach())
    frozen = fused_layernorm_linear(*make_inputs(requires_grad=False))
    assert not frozen.requires_grad and torch.equal(frozen, output)
    assert module.calls == [("forward", 0)] * 2


@pytest.mark.parametrize("needed", NAMES)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "all but"])
def test_gradients_only_where_needed(module, no_operator, needed, others):
    inputs = make_inputs(requires_grad=False)
    for name, tensor in zip(NAMES, inputs, strict=True):
        tensor.requires_grad_((name == needed) != others)
    assert_only_needed_gradients(inputs)
    assert module.calls[-1] == ("backward", 0, bits(inputs))


@pytest.mark.parametrize(
    "absent", [("ln_weight",), ("ln_bias",), ("linear_bias",), ("ln_weight", "ln_bias", "linear_bias")]
)
def test_absent_parameters(module, no_operator, absent):
    def function(*tensors):
        given = [None if name in absent else tensor for name, tensor in zip(NAMES, tensors, strict=True)]
        return fused_layernorm_linear(*given)

    inputs = make_inputs()
    given = [None if name in absent else tensor for name, tensor in zip(NAMES, inputs, strict=True)]
    assert_near(function(*inputs), plain_torch(*given))
    leaves = [tensor for tensor in given if tensor is not None]
    got = torch.autograd.grad(function(*inputs).square().sum(), leaves)
    expected = torch.autograd.grad(plain_torch(*given).square().sum(), leaves)
    for ours, theirs in zip(got, expected, strict=True):
        assert_near(ours, theirs)


@pytest.mark.parametrize("grad_output", GRAD_OUTPUTS.values(), ids=GRAD_OUTPUTS.keys())
def test_grad_output_of_any_strides(module, no_operator, grad_output):
    assert not grad_output.is_contiguous()
    assert_as_good_as_torch(fused_layernorm_linear, make_inputs(), grad_output)


def test_inputs_of_any_strides(module, no_operator):
    x, ln_weight, ln_bias, linear_weight, linear_bias = make_inputs()
    strided = (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        ln_weight.repeat_interleave(2)[::2],
        ln_bias[0].expand(H),
        linear_weight.t().contiguous().t(),
        linear_bias.flip(0),
    )
    assert not any(tensor.is_contiguous() for tensor in strided[:4])
    leaves = (x, ln_weight, ln_bias, linear_weight, linear_bias)
    got, expected = fused_layernorm_linear(*strided), plain_torch(*strided)
    assert_near(got, expected)
    pairs = zip(
        torch.autograd.grad(got.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    )
    for ours, theirs in pairs:
        assert_near(ours, theirs)


@pytest.mark.parametrize("rows", [(0,), (2, 0, 3)])
def test_zero_rows_launch_nothing(module, no_operator, rows):
    output, *gradients = output_and_gradients(fused_layernorm_linear, make_inputs(rows=rows))
    assert output.shape == (*rows, O) and gradients[0].shape == (*rows, H)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
    assert module.calls == []


def test_scratch_is_counted_again_for_unaligned_tensors(module, monkeypatch):
    """Kernels may need more for tensors whose addresses rule out wide loads; those are counted call by call."""
    counted = []
    kernels = present(layernorm_direct.kernels.table[-1])
    for name in ("launch_forward", "launch_backward"):
        launch = getattr(kernels, name)

        def spy(*arguments, launch=launch, name=name):
            if arguments[0] == 0:
                counted.append(
                    (name, arguments[-5] % layernorm_direct.VECTOR, arguments[-1] % layernorm_direct.VECTOR)
                )
            return launch(*arguments)

        monkeypatch.setattr(kernels, name, spy)
    base = torch.randn(1 + 4 * H)
    inputs = make_inputs(rows=(4,), requires_grad=False)
    for _ in range(2):
        fused_layernorm_linear(*inputs)
    assert counted == [("launch_forward", 0, 0)]
    inputs[0] = base[1:].view(4, H).requires_grad_()
    expected = plain_torch(*inputs)
    output = fused_layernorm_linear(*inputs)
    assert_near(output, expected)
    assert counted[1:] == [("launch_forward", 4, inputs[4].data_ptr() % 16)]
    output.backward(torch.ones_like(output))
    assert [name for name, *_ in counted[2:]] == ["launch_backward", "launch_backward"]


def test_a_call_with_other_sizes_plans_anew(module, no_operator):
    for rows, width, outputs in (
        ((2, 3), 7, 6),
        ((3, 2), 7, 6),
        ((6,), 7, 6),
        ((2, 3), 6, 7),
        ((2, 3), 7, 6),
    ):
        inputs = make_inputs(rows=rows, H=width, O=outputs)
        got = output_and_gradients(fused_layernorm_linear, inputs)
        for ours, theirs in zip(got, output_and_gradients(plain_torch, inputs), strict=True):
            assert_near(ours, theirs)


def test_eps_is_passed_on(module, no_operator):
    inputs = make_inputs()
    assert_near(fused_layernorm_linear(*inputs, 0.5), plain_torch(*inputs, eps=0.5))
    assert (fused_layernorm_linear(*inputs, 0.5) - plain_torch(*inputs)).abs().max() > 0.01


def test_tf32_follows_torch_s_flag_at_each_call(module, no_operator):
    inputs = make_inputs()
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        output = fused_layernorm_linear(*inputs)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        output.sum().backward()
        fused_layernorm_linear(*inputs)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        fused_layernorm_linear(*make_inputs(torch.bfloat16))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert module.calls == [("forward", 1), ("backward", 0, 15), ("forward", 0), ("forward", 2)]


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_tf32_follows_the_older_flag_too(precision):
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.set_float32_matmul_precision(precision)
        assert layernorm_direct.kind_of(torch.float32) == (1 if precision == "high" else 0)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_gradcheck(module, no_operator):
    inputs = make_inputs(torch.float64, rows=(4,))
    assert torch.autograd.gradcheck(fused_layernorm_linear, inputs)


def test_same_bits_every_time(module):
    inputs = make_inputs()
    first = output_and_gradients(fused_layernorm_linear, inputs)
    for _ in range(5):
        again = output_and_gradients(fused_layernorm_linear, inputs)
        assert all(map(torch.equal, first, again))


def negated(tensor):
    """A view that negates, as autograd makes one of the gradient of an imaginary part."""
    view = torch.complex(tensor.detach(), tensor.detach()).conj().imag
    assert view.is_neg()
    return view


def test_views_that_negate_are_read_as_what_they_stand_for(module):
    """One element has no gaps, for which a view would be copied."""
    given = make_inputs(rows=(1,), H=1, O=1)
    for place in range(5):
        inputs = [negated(tensor) if place == i else tensor for i, tensor in enumerate(given)]
        ours, theirs = fused_layernorm_linear(*inputs), plain_torch(*inputs)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        grad = negated(torch.ones_like(ours))
        for got, expected in zip(
            torch.autograd.grad(ours, wanted, grad), torch.autograd.grad(theirs, wanted, grad), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert layernorm_linear_directly(*given, EPS) is not None
    assert layernorm_linear_directly(negated(given[0]), *given[1:], EPS) is None


# ---- What is kept -------------------------------------------------------------------------------------------


def test_five_tensors_are_saved_and_only_the_statistics_are_new(module, no_operator):
    inputs = make_inputs()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        fused_layernorm_linear(*inputs)
    given = {tensor.data_ptr() for tensor in inputs[:4]}
    own = [tensor for tensor in kept if tensor.data_ptr() not in given]
    assert len(kept) == 5 and [(tuple(tensor.shape), tensor.dtype) for tensor in own] == [
        ((2, *ROWS), torch.float32)
    ]


def saved_bytes(function, inputs):
    """What autograd keeps for the backward pass, without the parameters, each memory once."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.update({tensor.data_ptr(): tensor.nbytes}) or tensor, lambda tensor: tensor
    ):
        output = function(*inputs)
    output.sum().backward()
    return sum(kept[address] for address in kept.keys() - {tensor.data_ptr() for tensor in inputs[1:]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_half_of_what_torch_saves(module, dtype):
    inputs = make_inputs(dtype, (64,), H=256, O=256)
    assert saved_bytes(fused_layernorm_linear, inputs) <= 0.55 * saved_bytes(plain_torch, inputs)


def test_saved_tensors_may_come_back_strided(module, no_operator):
    """A hook may pack a tensor any way it likes."""
    inputs = make_inputs()
    expected = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), inputs)

    def unpack(tensor):
        return tensor.detach().repeat_interleave(2, -1)[..., ::2]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        got = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), inputs)
    assert all(map(torch.equal, got, expected))


def test_a_saved_weight_may_come_back_column_by_column(module, no_operator):
    """The plan says how it lay; the kernels read rows."""
    inputs = make_inputs()
    expected = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), inputs)

    def unpack(tensor):
        return tensor.detach().t().contiguous().t() if tensor.shape == (O, H) else tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        got = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), inputs)
    assert all(map(torch.equal, got, expected))


def test_changing_a_saved_tensor_in_place_is_an_error(module, no_operator):
    inputs = make_inputs()
    output = fused_layernorm_linear(*inputs)
    with torch.no_grad():
        inputs[3].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_double_backward_is_refused(module):
    inputs = make_inputs()
    (dx,) = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), inputs[:1], create_graph=True)
    expected = torch.autograd.grad(plain_torch(*inputs).square().sum(), inputs[:1])[0]
    assert_near(dx.detach(), expected)
    with pytest.raises(NotImplementedError, match="fused_layernorm_linear has no double backward"):
        dx.sum().backward()


def test_out_of_memory_says_how_much(module, monkeypatch):
    def no_room(size, strides, dtype):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    inputs = make_inputs()
    output = fused_layernorm_linear(*inputs)
    monkeypatch.setattr(layernorm_direct, "empty_strided", no_room)
    scratch = TorchModule.needed(None, 15, H)
    results = 15 * O * 4 + 2 * 15 * 4
    with pytest.raises(
        torch.OutOfMemoryError,
        match=rf"forward pass over 15 rows, 7 -> 6 in float32, needed {results + scratch:,} bytes of GPU memory: "
        rf"{results:,} for results and {scratch:,} for scratch\. CUDA out of memory",
    ):
        fused_layernorm_linear(*inputs)
    scratch = TorchModule.needed(15, 15, H)
    results = 4 * (15 * H + 2 * H + O * H + O)
    with pytest.raises(torch.OutOfMemoryError, match=f"backward pass .* needed {results + scratch:,} bytes"):
        output.sum().backward()


# ---- The layer and torch's modes ----------------------------------------------------------------------------


def test_layer(module, no_operator):
    reference = sequential()
    layer = layer_from(copy.deepcopy(reference))
    assert layer.algorithm == "fast"
    x, y = (make_inputs()[0] for _ in range(2))
    layer(x).square().sum().backward()
    reference(y).square().sum().backward()
    assert_near(x.grad, y.grad)
    for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert_near(mine.grad, theirs.grad)


def test_layer_with_a_parametrized_weight(module, no_operator):
    """A parametrized weight is computed on access, and is no parameter of its module any more."""
    reference = sequential()
    nn.utils.parametrizations.weight_norm(reference[1])
    layer = layer_from(copy.deepcopy(reference))
    x = make_inputs()[0]
    assert_near(layer(x), reference(x))


def test_autocast_goes_the_direct_way(module, no_operator):
    inputs = make_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = fused_layernorm_linear(*inputs)
    assert output.dtype == torch.bfloat16 and module.calls == [("forward", 2)]
    output.sum().backward()
    assert all(present(tensor.grad).dtype == torch.float32 for tensor in inputs)


def test_inference_mode(module, no_operator):
    inputs = make_inputs()
    with torch.inference_mode():
        output = fused_layernorm_linear(*inputs)
    assert output.is_inference()
    assert_near(output, plain_torch(*inputs).detach())


class Subclass(torch.Tensor):
    """Any subclass: its operators may mean something else."""


@pytest.mark.parametrize("name", NAMES)
def test_subclasses_go_through_the_operator(module, monkeypatch, name):
    inputs = make_inputs(requires_grad=False)
    index = NAMES.index(name)
    inputs[index] = inputs[index].as_subclass(Subclass)
    monkeypatch.setattr(layers, "apply_directly", None)
    assert layernorm_linear_directly(*inputs, EPS) is None


def test_modes_go_through_the_operator(module):
    with FakeTensorMode():
        assert layernorm_linear_directly(*make_inputs(requires_grad=False), EPS) is None


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("x", lambda t: t.long(), TypeError, "x: expected float32, float64, bfloat16, float16, got int64"),
        ("x", lambda t: t[0, 0, 0], ValueError, "x: expected at least one dimension"),
        ("x", lambda t: t[..., :0], ValueError, "x: expected H >= 1"),
        ("ln_weight", lambda t: t.double(), TypeError, "ln_weight: expected float32, .* got float64"),
        ("ln_bias", lambda t: t[:-1], ValueError, "ln_bias: expected 7 elements, .* of x, got 6"),
        (
            "linear_weight",
            lambda t: t.t(),
            ValueError,
            r"linear_weight: expected shape \[O, 7\], .* got \[7, 6\]",
        ),
        ("linear_weight", lambda t: None, TypeError, "linear_weight: expected a torch tensor, got NoneType"),
        ("linear_bias", lambda t: t[None], ValueError, r"linear_bias: expected a vector, got shape \[1, 6\]"),
        ("linear_bias", lambda t: 0.0, TypeError, "linear_bias: expected a torch tensor, got float"),
    ],
)
def test_bad_input(module, name, change, error, message):
    inputs = make_inputs(requires_grad=False)
    index = NAMES.index(name)
    inputs[index] = change(inputs[index])
    with pytest.raises(error, match=message):
        fused_layernorm_linear(*inputs)
    assert module.calls == []


def test_sizes_beyond_32_bits(module):
    many = torch.empty(1).expand(2**31, 1)
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"rows: the kernels take at most 2,147,483,647, got 2,147,483,648"):
        fused_layernorm_linear(many, one, one, one[None], one)


# ---- The registered operators over the module ---------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.parametrize("wanted", [15, 14, 13, 3, 12])
def test_opcheck(module, wanted):
    inputs = make_inputs()
    torch.library.opcheck(autograd.layernorm_linear, (*inputs, EPS, "fast"))
    x, ln_weight, ln_bias, linear_weight, _ = (tensor.detach() for tensor in inputs)
    _, statistics = autograd.layernorm_linear(*inputs, EPS, "fast")
    arguments = (torch.randn(*ROWS, O), x, statistics, ln_weight, ln_bias, linear_weight, wanted, "fast")
    torch.library.opcheck(autograd.layernorm_linear_backward, arguments)
    assert module.calls


@pytest.mark.compiles
def test_compiled_graphs_call_the_operator(module):
    torch._dynamo.reset()
    layer = layer_from(sequential())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 4, 9):
        x, y = (make_inputs(rows=(2, rows))[0] for _ in range(2))
        compiled(x).square().sum().backward()
        sequential()(y).square().sum().backward()
        assert_near(x.grad, y.grad)
    assert module.calls == [("forward", 0), ("backward", 0, 15)] * 3
    torch._dynamo.reset()


# ---- Finding the module -------------------------------------------------------------------------------------

GPU = torch.device("cuda", 0)


@pytest.fixture
def empty_table(monkeypatch):
    monkeypatch.setattr(layernorm_direct.kernels, "table", {})
    monkeypatch.setattr(extension_kernels, "capability", lambda device: (9, 0))
    monkeypatch.setattr(extension, "architecture", lambda device: "sm_90a")


def test_no_module_for_other_devices(empty_table):
    assert (
        layernorm_direct.kernels(torch.device("cpu")) is None
        and layernorm_direct.kernels(torch.device("meta")) is None
    )
    assert layernorm_direct.kernels.table == {}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EnvironmentProblem("no linker here"), "no linker here"),
        (ImportError("bad file"), "ImportError: bad file"),
    ],
)
def test_without_a_module_one_warning_says_why(empty_table, monkeypatch, error, words):
    def fail(architecture, layer):
        raise error

    monkeypatch.setattr(extension, "build", fail)
    with pytest.warns(
        RuntimeWarning, match=f"MAX graph of its unfused kernels on cuda:0, which is slower .*: {words}"
    ):
        assert layernorm_direct.kernels(GPU) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layernorm_direct.kernels(GPU) is None


def test_a_driver_that_refuses_the_kernels_is_a_warning(empty_table, monkeypatch, tmp_path):
    def refuse(kernels):
        raise Exception("CUDA_ERROR_UNSUPPORTED_PTX_VERSION")

    monkeypatch.setattr(
        extension, "build", lambda architecture, layer: extension.Built(tmp_path, architecture, 0.0)
    )
    monkeypatch.setattr(extension, "load", lambda path, layer: TorchModule())
    monkeypatch.setattr(layernorm_direct.LayerNormKernels, "probe", refuse)
    with pytest.warns(
        RuntimeWarning, match="there is no extension module: Exception: CUDA_ERROR_UNSUPPORTED_PTX"
    ):
        assert layernorm_direct.kernels(GPU) is None


def test_an_old_gpu_gets_the_unfused_kernels(empty_table, monkeypatch):
    monkeypatch.setattr(extension_kernels, "capability", lambda device: (7, 5))
    monkeypatch.setattr(extension, "architecture", lambda device: extension.nvidia_architecture((7, 5)))
    with pytest.warns(RuntimeWarning, match=r"unfused kernels on cuda:0.*want sm_80 or newer, not sm_75"):
        assert layernorm_direct.kernels(GPU) is None


def test_several_threads_open_a_gpu_once(empty_table, monkeypatch, tmp_path):
    built = []
    stand_in = TorchModule()
    monkeypatch.setattr(
        extension,
        "build",
        lambda architecture, layer: (
            built.append(architecture) or extension.Built(tmp_path, architecture, 0.0)
        ),
    )
    monkeypatch.setattr(extension, "load", lambda path, layer: stand_in)
    monkeypatch.setattr(layernorm_direct.LayerNormKernels, "probe", lambda kernels: built.append("tried"))
    found = []
    threads = [threading.Thread(target=lambda: found.append(layernorm_direct.kernels(GPU))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == ["sm_90a", "tried"] and len(found) == 8 and len(set(map(id, found))) == 1
    assert found[0].gpu == 22 and stand_in.index == 0
