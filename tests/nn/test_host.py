"""Fallback of the layers without operators: PyTorch runs, one warning on a GPU, and a reason in `explain`."""

import ctypes
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.errors import UsageError
from harness.nn import LinearCrossEntropy, host, linear_cross_entropy
from harness.toolchain import libraries

ARGUMENTS = (torch.ones(2, 3), torch.ones(4, 3), torch.tensor([1, 3]))


@pytest.fixture
def cpu_operators(monkeypatch, tmp_path):
    """Select operators for CPU tensors, from an empty cache."""
    monkeypatch.setattr(host, "_loaded", {})
    monkeypatch.setattr(host, "_load_errors", {})
    monkeypatch.setattr(host, "DEVICE", "cpu")
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path))


def call_without_warnings(function):
    """Call a function and turn warnings into errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function()


def test_missing_compiler_warns_once_and_uses_pytorch(cpu_operators, monkeypatch):
    monkeypatch.setattr(libraries, "find_compiler", lambda: None)
    message = r"cross_entropy: PyTorch's own operations run on this GPU: no C\+\+ compiler .*install g\+\+, or set CXX"
    with pytest.warns(RuntimeWarning, match=message):
        loss = linear_cross_entropy(*ARGUMENTS)
    assert torch.equal(call_without_warnings(lambda: linear_cross_entropy(*ARGUMENTS)), loss)
    torch.testing.assert_close(loss, torch.tensor(4.0).log())
    explanation = LinearCrossEntropy(3, 4).explain(ARGUMENTS[0])
    assert explanation["rows"].startswith("PyTorch's operations: no C++ compiler")


def test_amd_gpus_use_pytorch(cpu_operators, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.warns(RuntimeWarning, match="the kernels are for GPUs of NVIDIA"):
        linear_cross_entropy(*ARGUMENTS)


def test_failed_kernel_load_warns_once(cpu_operators, monkeypatch):
    """C++ calls `open_part` from any thread and cannot handle Python exceptions."""
    handles = (ctypes.c_void_p * 1)()

    def assert_warns(message):
        with pytest.warns(RuntimeWarning, match=rf"attention \(float16\): PyTorch's own .*GPU: {message}"):
            assert host.open_part(b"attention", b"float16", 0, handles) == -1

    def fail_to_load(layer, part, index):
        raise libraries.EnvironmentProblem("the compiler is away")

    def no_context(index, message, capacity):
        message.value = b"there is no context"
        return 0

    monkeypatch.setattr(host, "load_part", fail_to_load)
    assert_warns("the compiler is away")
    monkeypatch.setattr(host, "load_part", lambda *_: ctypes.CDLL(None))
    assert_warns("AttributeError: .*workbook_open")
    monkeypatch.setattr(host, "OpenGPUFunction", lambda function: no_context)
    assert_warns("there is no context")
    monkeypatch.setattr(host, "OpenGPUFunction", lambda function: lambda *_: 7)
    assert host.open_part(b"attention", b"float16", 0, handles) == 7
    assert handles[0] == ctypes.CDLL(None)._handle
    handles[0] = 1
    assert_warns("another architecture's kernels are in use")


def test_no_library_is_built_without_a_gpu(monkeypatch):
    """Fake GPU tensors and tensors on other devices cause no warning."""
    monkeypatch.setattr(host, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host, "get_operator_library", None)
    with FakeTensorMode():
        for device in ("cuda", "cpu", "meta"):
            arguments = [torch.empty(t.shape, dtype=t.dtype, device=device) for t in ARGUMENTS]
            loss = call_without_warnings(lambda arguments=arguments: linear_cross_entropy(*arguments))
            assert loss.device.type == device
    assert host.explain_missing_kernels("cross_entropy", "float32", torch.device("cuda")) == "there is no GPU"
    assert (
        host.explain_missing_kernels("cross_entropy", "float32", torch.device("cpu"))
        == "there are no kernels for cpu"
    )


def test_operator_is_loaded_while_tracing(monkeypatch):
    calls = []
    monkeypatch.setattr(host, "DEVICE", "cpu")
    monkeypatch.setattr(host, "_loaded", {})
    monkeypatch.setattr(host, "_load", lambda layer: bool(calls.append(layer)))
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(*ARGUMENTS), torch.tensor(4.0).log())
    assert calls == ["cross_entropy"]


def test_build_ext_selects_libraries():
    operators = len(host.list_layers())
    names = [library.name for library in host.select_libraries([], ["sm_80", "sm_90a"], [None])]
    assert len(names) == operators + 2 * sum(len(host.PARTS[layer]) for layer in host.list_layers())
    selected = host.select_libraries(["cross_entropy/float16"], ["sm_90a"], [None])
    assert [library.name.partition("_torch")[0] for library in selected] == [
        "cross_entropy",
        "cross_entropy_float16_sm_90a",
    ]
    with pytest.raises(UsageError, match=r"unknown layer 'p22'; there is .*cross_entropy"):
        host.select_libraries(["p22"], [], [])
    with pytest.raises(UsageError, match="cross_entropy has no part 'int8'; there is bfloat16, "):
        host.select_libraries(["cross_entropy/int8"], [], [])
