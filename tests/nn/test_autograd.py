"""The registered operators: right against float64 autograd, well behaved under torch's own checks, clear in error."""

import functools
import subprocess
import sys
import threading
import time

import layer_checks
import pytest
import torch
import torch.nn.functional as F
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
    output_and_gradients,
    plain_torch,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from typed import loosely

from harness.nn import autograd, layers, on_max
from harness.nn.layernorm_ops import FORWARD

fused_layernorm_linear = loosely(layers.fused_layernorm_linear)

# Rounding, in float32, of rows of deviation 0.02 is what the limits here are for.
make_inputs = functools.partial(layer_checks.make_inputs, deviation=0.02)


# ---- Right values -------------------------------------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.parametrize("algorithm", autograd.ALGORITHMS)
def test_agrees_with_autograd(algorithm):
    inputs = make_inputs()
    grad_output = torch.randn(*ROWS, O, generator=torch.Generator().manual_seed(1)) + 1

    def function(*tensors):
        return fused_layernorm_linear(*tensors, algorithm=algorithm)

    assert_as_good_as_torch(function, inputs, grad_output)


@pytest.mark.compiles
def test_sixteen_bits_are_as_exact_as_torch():
    inputs = make_inputs(torch.bfloat16)
    grad_output = torch.randn(*ROWS, O, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert_as_good_as_torch(fused_layernorm_linear, inputs, grad_output)


@pytest.mark.compiles
def test_gradcheck():
    """Finite differences in float64, with the absent biases too."""
    inputs = make_inputs(torch.float64, rows=(4,))
    assert torch.autograd.gradcheck(fused_layernorm_linear, inputs)
    x, _, _, linear_weight, _ = inputs
    assert torch.autograd.gradcheck(
        lambda x, W: fused_layernorm_linear(x, None, None, W, None), (x, linear_weight)
    )


@pytest.mark.compiles
@pytest.mark.parametrize("needed", NAMES)
@pytest.mark.parametrize("others", [False, True], ids=["alone", "all but"])
def test_gradients_only_where_needed(needed, others):
    inputs = make_inputs(requires_grad=False)
    for name, tensor in zip(NAMES, inputs, strict=True):
        tensor.requires_grad_((name == needed) != others)
    assert_only_needed_gradients(inputs)


@pytest.mark.compiles
@pytest.mark.parametrize("grad_output", GRAD_OUTPUTS.values(), ids=GRAD_OUTPUTS.keys())
def test_grad_output_of_any_strides(grad_output):
    assert not grad_output.is_contiguous()
    assert_as_good_as_torch(fused_layernorm_linear, make_inputs(), grad_output)


@pytest.mark.compiles
def test_inputs_of_any_strides():
    x, ln_weight, ln_bias, linear_weight, linear_bias = make_inputs(requires_grad=False)
    strided = (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        ln_weight.repeat_interleave(2)[::2],
        ln_bias[0].expand(H),
        linear_weight.t().contiguous().t(),
        linear_bias.flip(0),
    )
    assert not any(tensor.is_contiguous() for tensor in strided[:4])
    assert_near(fused_layernorm_linear(*strided), plain_torch(*strided))


@pytest.mark.compiles
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_pass_through_as_in_torch(value):
    inputs = make_inputs()
    with torch.no_grad():
        inputs[0][1, 2, 3] = value
    grad_output = torch.ones(*ROWS, O)
    got = output_and_gradients(fused_layernorm_linear, inputs, grad_output)
    expected = output_and_gradients(plain_torch, inputs, grad_output)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert not got[0][1, 2].isfinite().any() and got[0][0].isfinite().all()


@pytest.mark.compiles
def test_one_column_has_a_gradient_of_exactly_zero():
    """Of the layer's own algorithm: what rounding took from dln * gamma must not come back 316 times as large."""
    dx = output_and_gradients(fused_layernorm_linear, make_inputs(torch.float32, rows=(50,), H=1))[1]
    assert torch.equal(dx, torch.zeros_like(dx))


@pytest.mark.compiles
def test_statistics_do_not_lose_a_large_mean():
    """Around 1000, E[x^2] - mean^2 in float32 is wrong by several hundredths of a variance of 1."""
    inputs = make_inputs(requires_grad=False)
    inputs[0] = 1000 + torch.randn(*ROWS, H, generator=torch.Generator().manual_seed(2))
    truth = plain_torch(*[tensor.double() for tensor in inputs])
    assert (fused_layernorm_linear(*inputs) - truth).abs().max() < 1e-3 * truth.abs().max()


# ---- What is kept -------------------------------------------------------------------------------------------


def saved_by(function, inputs):
    """The tensors that autograd keeps between the forward and the backward pass of `function`."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        function(*inputs)
    return kept


def is_normalised(tensor, inputs):
    """Whether a tensor holds x_hat or the LayerNorm output."""
    x, ln_weight, ln_bias = (inputs[i].detach() for i in range(3))
    x_hat = F.layer_norm(x, (H,), eps=EPS)
    return tensor.numel() == x_hat.numel() and any(
        torch.allclose(tensor.detach().view_as(x_hat), normalised, atol=1e-4)
        for normalised in (x_hat, x_hat * ln_weight, x_hat * ln_weight + ln_bias)
    )


@pytest.mark.compiles
def test_no_normalised_tensor_is_saved():
    inputs = make_inputs()
    assert any(is_normalised(tensor, inputs) for tensor in saved_by(plain_torch, inputs)), (
        "the check sees nothing"
    )
    kept = saved_by(fused_layernorm_linear, inputs)
    assert not any(is_normalised(tensor, inputs) for tensor in kept)
    given = {tensor.data_ptr() for tensor in inputs[:4]}
    own = [tensor for tensor in kept if tensor.data_ptr() not in given]
    assert len(kept) == 5 and [tuple(tensor.shape) for tensor in own] == [(2, *ROWS)]


# ---- Torch's own checks -------------------------------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.parametrize("biases", [True, False], ids=["all", "no biases"])
def test_opcheck_forward(biases):
    inputs = make_inputs() if biases else [*make_inputs()[:2], None, make_inputs()[3], None]
    torch.library.opcheck(autograd.layernorm_linear, (*inputs, EPS, "unfused"))


@pytest.mark.compiles
def test_opcheck_forward_strided():
    inputs = make_inputs(requires_grad=False)
    inputs[0] = inputs[0].transpose(0, 1).requires_grad_()
    torch.library.opcheck(autograd.layernorm_linear, (*inputs, EPS, "unfused"))


@pytest.mark.compiles
@pytest.mark.parametrize("wanted", [15, 14, 13, 3, 12])
def test_opcheck_backward(wanted):
    x, ln_weight, ln_bias, linear_weight, linear_bias = make_inputs(requires_grad=False)
    _, statistics = autograd.layernorm_linear(
        x, ln_weight, ln_bias, linear_weight, linear_bias, EPS, "unfused"
    )
    grad_output = torch.randn(*ROWS, O)
    arguments = (grad_output, x, statistics, ln_weight, ln_bias, linear_weight, wanted, "unfused")
    torch.library.opcheck(autograd.layernorm_linear_backward, arguments)


@pytest.mark.compiles
@pytest.mark.parametrize("algorithm", ["unfused", "fast"])
def test_a_weight_that_lies_transposed_has_such_a_gradient(algorithm):
    """GPT-2's weights lie as [in, out]; what the operator says of strides under torch.compile is what it does."""
    inputs = make_inputs()
    inputs[3] = inputs[3].detach().t().contiguous().t().requires_grad_()
    assert_as_good_as_torch(lambda *tensors: fused_layernorm_linear(*tensors, algorithm=algorithm), inputs)
    output, statistics = autograd.layernorm_linear(*inputs, EPS, algorithm)
    dW = torch.autograd.grad(output.sum(), inputs[3])[0]
    assert dW.stride() == inputs[3].stride()
    torch.library.opcheck(autograd.layernorm_linear, (*inputs, EPS, algorithm))
    detached = [tensor.detach() for tensor in (torch.ones_like(output), inputs[0], statistics, *inputs[1:4])]
    torch.library.opcheck(autograd.layernorm_linear_backward, (*detached, 3, algorithm))


@pytest.mark.compiles
def test_statistics_are_float32_and_not_differentiable():
    inputs = make_inputs(torch.bfloat16)
    output, statistics = autograd.layernorm_linear(*inputs, EPS, "unfused")
    assert output.requires_grad and not statistics.requires_grad
    assert statistics.dtype == torch.float32 and statistics.shape == (2, *ROWS)
    x = inputs[0].detach().double()
    rstd = (x.var(-1, correction=0) + EPS).rsqrt()
    torch.testing.assert_close(statistics.double(), torch.stack([x.mean(-1), rstd]), rtol=1e-5, atol=1e-6)


def test_shapes_without_memory():
    inputs = [tensor.detach().to("meta") for tensor in make_inputs()]
    assert fused_layernorm_linear(*inputs).shape == (*ROWS, O)


# ---- Errors -------------------------------------------------------------------------------------------------


def replace(name, change):
    """Good inputs with one changed."""
    inputs = make_inputs(requires_grad=False)
    index = NAMES.index(name)
    inputs[index] = change(inputs[index])
    return inputs


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("x", lambda t: t.long(), TypeError, "x: expected float32, float64, bfloat16, float16, got int64"),
        ("x", lambda t: t.cfloat(), TypeError, "x: expected float32, .* got complex64"),
        (
            "x",
            lambda t: t[0, 0, 0],
            ValueError,
            r"x: expected at least one dimension, \[..., H\], got a scalar",
        ),
        ("x", lambda t: t[..., :0], ValueError, r"x: expected H >= 1, .* got shape \[3, 5, 0\]"),
        ("ln_weight", lambda t: t.double(), TypeError, "ln_weight: expected float32, .* got float64"),
        ("ln_weight", lambda t: t[:-1], ValueError, "ln_weight: expected 7 elements, .* of x, got 6"),
        ("ln_weight", lambda t: t[None], ValueError, r"ln_weight: expected a vector, got shape \[1, 7\]"),
        ("ln_bias", lambda t: t.half(), TypeError, "ln_bias: expected float32, .* got float16"),
        ("ln_bias", lambda t: torch.cat([t, t]), ValueError, "ln_bias: expected 7 elements, .* got 14"),
        (
            "ln_bias",
            lambda t: t.to("meta"),
            ValueError,
            "ln_bias: expected it on cpu, as x, got meta",
        ),
        ("linear_weight", lambda t: t[0], ValueError, r"linear_weight: expected \[O, H\], got shape \[7\]"),
        (
            "linear_weight",
            lambda t: t.t(),
            ValueError,
            r"linear_weight: expected shape \[O, 7\], .* got \[7, 6\]",
        ),
        (
            "linear_weight",
            lambda t: t[:0],
            ValueError,
            r"linear_weight: expected O >= 1 rows, got shape \[0, 7\]",
        ),
        ("linear_bias", lambda t: t[:-1], ValueError, "linear_bias: expected 6 elements, .* got 5"),
        ("linear_bias", lambda t: t.bfloat16(), TypeError, "linear_bias: expected float32, .* got bfloat16"),
    ],
)
def test_bad_input(name, change, error, message):
    with pytest.raises(error, match=message) as caught:
        fused_layernorm_linear(*replace(name, change))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", [1.0, 2.0], "x: expected a torch tensor, got list"),
        ("x", None, "x: expected a torch tensor, got NoneType"),
        ("ln_bias", 0.0, "ln_bias: expected a torch tensor, got float"),
        ("linear_weight", None, "linear_weight: expected a torch tensor, got NoneType"),
        ("x", torch.eye(7).to_sparse(), "x: expected a dense tensor, got a sparse_coo one"),
        ("x", torch.nested.nested_tensor([torch.ones(2, 7), torch.ones(3, 7)]), "x: .* got a nested one"),
        ("linear_weight", torch.ones(6, 7).to_sparse_csr(), "linear_weight: .* got a sparse_csr one"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning", "ignore:Sparse:UserWarning")
def test_not_a_tensor(name, value, message):
    with pytest.raises(TypeError, match=message):
        fused_layernorm_linear(*replace(name, lambda tensor: value))


@pytest.mark.parametrize("eps", [None, "1e-5", True])
def test_eps_that_is_no_number(eps):
    with pytest.raises(TypeError, match=f"eps: expected a number, got {type(eps).__name__}"):
        fused_layernorm_linear(*make_inputs(), eps)


def test_unknown_algorithm():
    with pytest.raises(
        ValueError, match="algorithm: expected 'unfused' or 'fused' or 'fast' or 'pairs', got 'fastest'"
    ):
        fused_layernorm_linear(*make_inputs(), algorithm="fastest")


def test_device_without_a_kernel():
    with FakeTensorMode():
        inputs = [torch.empty(tensor.shape, device="mps") for tensor in make_inputs()]
        with pytest.raises(NotImplementedError, match=r"x: expected a tensor on a CPU or .* got one on mps"):
            fused_layernorm_linear(*inputs)


def test_a_gpu_that_max_does_not_see():
    with pytest.raises(RuntimeError, match=r"the tensors are on cuda:99, but MAX sees \d+ GPUs"):
        on_max.max_device(torch.device("cuda", 99))


@pytest.mark.compiles
def test_double_backward_is_refused():
    inputs = make_inputs()
    (dx,) = torch.autograd.grad(fused_layernorm_linear(*inputs).square().sum(), inputs[:1], create_graph=True)
    expected = torch.autograd.grad(plain_torch(*inputs).square().sum(), inputs[:1])[0]
    assert_near(dx.detach(), expected)
    with pytest.raises(NotImplementedError, match="fused_layernorm_linear has no double backward"):
        dx.sum().backward()


def test_capture_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        on_max.refuse_capture("attention")


# ---- Threads ------------------------------------------------------------------------------------------------


def in_threads(count, work):
    """Runs work(i) in threads that start together; returns what was raised."""
    raised = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_several_threads_compile_once(monkeypatch):
    compiled = []

    def slow_load(*arguments):
        time.sleep(0.05)
        compiled.append(arguments)
        return {FORWARD.name: object()}

    monkeypatch.setattr(autograd.GRAPHS, "loaded", {})
    monkeypatch.setattr(on_max, "load_each", slow_load)
    found = []
    raised = in_threads(
        8,
        lambda i: found.append(
            autograd.GRAPHS.programs(torch.float32, torch.device("cpu"), algorithm="unfused")[FORWARD.name]
        ),
    )
    assert not raised and len(compiled) == 1 and len(found) == 8 and len(set(map(id, found))) == 1


@pytest.mark.compiles
def test_several_threads_compute_at_once():
    def work(seed):
        for repeat in range(10):
            inputs = make_inputs(rows=(1 + 7 * seed + repeat,), seed=seed)
            grad_output = torch.full((inputs[0].shape[0], O), float(seed + 1))
            got = output_and_gradients(fused_layernorm_linear, inputs, grad_output)
            expected = output_and_gradients(plain_torch, inputs, grad_output)
            for ours, theirs in zip(got, expected, strict=True):
                assert_near(ours, theirs)

    assert in_threads(6, work) == []


# ---- Imports ------------------------------------------------------------------------------------------------


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_harness_loads_neither_torch_nor_max():
    result = run_python(
        "import sys, harness; assert not {'torch', 'numpy', 'max'} & set(sys.modules); "
        "assert 'LayerNormLinear' in dir(harness)"
    )
    assert result.returncode == 0, result.stderr


def test_unknown_name_in_harness():
    import harness

    assert harness.fused_layernorm_linear is fused_layernorm_linear
    with pytest.raises(AttributeError, match="module 'harness' has no attribute 'nothing'"):
        harness.nothing  # noqa: B018


def test_import_changes_no_setting_of_torch():
    """The whole of torch's global state that its getters show, before and after, and no configuration module is loaded.

    What is not loaded, torch.compile with its settings, nobody has set; loading it would take most of the test's time.
    """
    result = run_python(
        """
import os, sys, torch

def state():
    getters = (
        torch.get_default_dtype, torch.get_default_device, torch.get_num_threads, torch.get_num_interop_threads,
        torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.are_deterministic_algorithms_enabled,
        torch.get_float32_matmul_precision, torch.is_anomaly_enabled, torch.get_rng_state().sum().item,
        torch.backends.cuda.matmul.__dict__.copy, torch.backends.cudnn.is_available,
        os.environ.copy,
    )
    flags = {name: getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "allow_tf32")}
    return [getter() for getter in getters] + [flags, torch.backends.cuda.matmul.allow_tf32]

before = state()
import harness
harness.LayerNormLinear(4, 4, device="meta")
after = state()
assert before == after, [pair for pair in zip(before, after) if pair[0] != pair[1]]
settings = {f"torch.{name}.config" for name in ("_dynamo", "_inductor", "_functorch")}
assert not settings & set(sys.modules), "compare their get_config_copy() too"
"""
    )
    assert result.returncode == 0, result.stderr


# ---- GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", autograd.ALGORITHMS)
def test_gpu_agrees_with_autograd(algorithm):
    inputs = make_inputs(device="cuda")
    grad_output = torch.randn(*ROWS, O, device="cuda")

    def function(*tensors):
        return fused_layernorm_linear(*tensors, algorithm=algorithm)

    assert_as_good_as_torch(function, inputs, grad_output)


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", autograd.ALGORITHMS)
def test_gpu_any_stream(algorithm):
    """Inputs rewritten on a side stream just before each call, results read there just after.

    A long kernel goes first in the stream, so that a call that does not wait for it reads the old values.
    """
    side = torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    sources = [make_inputs(rows=(512,), seed=seed, device="cuda", requires_grad=False) for seed in range(20)]
    grad_output = torch.randn(512, O, device="cuda")
    expected = [output_and_gradients(plain_torch, source, grad_output) for source in sources]
    leaves = [torch.zeros_like(tensor).requires_grad_() for tensor in sources[0]]
    torch.cuda.synchronize()
    got = []
    with torch.cuda.stream(side):
        for source in sources:
            busy = busy @ busy * 1e-4
            with torch.no_grad():
                for leaf, tensor in zip(leaves, source, strict=True):
                    leaf.copy_(tensor)
            output = fused_layernorm_linear(*leaves, algorithm=algorithm)
            got.append([output.detach() * 1, *torch.autograd.grad(output, leaves, grad_output)])
    torch.cuda.synchronize()
    for ours, theirs in zip(got, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_near(a, b)


@pytest.mark.gpu
def test_gpu_capture_is_refused():
    """Of a MAX graph; the extension module's launches can be captured."""
    inputs = make_inputs(device="cuda", requires_grad=False)
    fused_layernorm_linear(*inputs, algorithm="unfused")
    refused = pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        fused_layernorm_linear(*inputs, algorithm="unfused")


@pytest.mark.gpu
def test_gpu_and_cpu_tensors_do_not_mix():
    inputs = make_inputs(device="cuda")
    inputs[4] = inputs[4].detach().cpu()
    with pytest.raises(ValueError, match=r"linear_bias: expected it on cuda:0, as x, got cpu"):
        fused_layernorm_linear(*inputs)
