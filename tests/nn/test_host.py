"""The layers' operators where they cannot be had: PyTorch's own operations, one warning on a GPU, and the reason in `explain`."""

import ctypes
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.errors import BadUse
from harness.nn import LinearCrossEntropy, host, linear_cross_entropy
from harness.toolchain import libraries

GIVEN = (torch.ones(2, 3), torch.ones(4, 3), torch.tensor([1, 3]))


@pytest.fixture
def for_cpu(monkeypatch, tmp_path):
    """Nothing is loaded or built, and the operators are for CPU tensors."""
    monkeypatch.setattr(host, "_loaded", {})
    monkeypatch.setattr(host, "_reasons", {})
    monkeypatch.setattr(host, "DEVICE", "cpu")
    monkeypatch.setenv(libraries.VARIABLE, str(tmp_path))


def no_warning(function):
    """Call a function that warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function()


def test_without_a_compiler_pytorch_computes_after_one_warning(for_cpu, monkeypatch):
    monkeypatch.setattr(libraries, "find_compiler", lambda: None)
    words = r"cross_entropy: PyTorch's own operations run on this GPU: no C\+\+ compiler .*install g\+\+, or set CXX"
    with pytest.warns(RuntimeWarning, match=words):
        loss = linear_cross_entropy(*GIVEN)
    assert torch.equal(no_warning(lambda: linear_cross_entropy(*GIVEN)), loss)
    torch.testing.assert_close(loss, torch.tensor(4.0).log())
    explained = LinearCrossEntropy(3, 4).explain(GIVEN[0])
    assert explained["rows"].startswith("PyTorch's operations: no C++ compiler")


def test_amd_s_gpus_have_pytorch_s_operations(for_cpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.warns(RuntimeWarning, match="the kernels are for GPUs of NVIDIA"):
        linear_cross_entropy(*GIVEN)


def test_kernels_that_cannot_be_built_are_warned_of_once(for_cpu, monkeypatch):
    """As the C++ asks for them: from any thread, and it takes no exception."""

    def broken(layer, part, index):
        raise libraries.EnvironmentProblem("the compiler is away")

    monkeypatch.setattr(host, "loaded_part", broken)
    buffer = ctypes.create_string_buffer(100)
    words = r"attention \(float16\): PyTorch's own operations run on this GPU: the compiler is away"
    with pytest.warns(RuntimeWarning, match=words):
        assert host.locate(b"attention", b"float16", 0, ctypes.addressof(buffer), 100) == 0
    monkeypatch.setattr(host, "loaded_part", lambda layer, part, index: "/a/library.so")
    assert host.locate(b"attention", b"float16", 0, ctypes.addressof(buffer), 100) == 1
    assert buffer.value == b"/a/library.so"
    with pytest.warns(RuntimeWarning, match="the path is too long: /a/library.so"):
        assert host.locate(b"attention", b"float16", 0, ctypes.addressof(buffer), 5) == 0


def test_without_a_gpu_nothing_is_built(monkeypatch):
    """Tensors of a GPU may be there all the same, as fake ones, and others have no kernels: nobody is warned."""
    monkeypatch.setattr(host, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(host, "operator", None)
    with FakeTensorMode():
        for device in ("cuda", "cpu", "meta"):
            given = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in GIVEN]
            assert no_warning(lambda given=given: linear_cross_entropy(*given)).device.type == device
    assert host.missing("cross_entropy", "float32", torch.device("cuda")) == "there is no GPU"
    assert host.missing("cross_entropy", "float32", torch.device("cpu")) == "there are no kernels for cpu"


def test_a_compiled_model_asks_while_it_is_traced(monkeypatch):
    calls = []
    monkeypatch.setattr(host, "DEVICE", "cpu")
    monkeypatch.setattr(host, "_loaded", {})
    monkeypatch.setattr(host, "_load", lambda layer: bool(calls.append(layer)))
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(*GIVEN), torch.tensor(4.0).log())
    assert calls == ["cross_entropy"]


def test_what_build_ext_builds():
    operators = len(host.layers())
    names = [library.name for library in host.select_libraries([], ["sm_80", "sm_90a"], [None])]
    assert len(names) == operators + 2 * sum(len(host.PARTS[layer]) for layer in host.layers())
    one = host.select_libraries(["cross_entropy/float16"], ["sm_90a"], [None])
    assert [library.name.partition("_torch")[0] for library in one] == [
        "cross_entropy",
        "cross_entropy_float16_sm_90a",
    ]
    with pytest.raises(BadUse, match=r"unknown layer 'p22'; there is .*cross_entropy"):
        host.select_libraries(["p22"], [], [])
    with pytest.raises(BadUse, match="cross_entropy has no part 'int8'; there is bfloat16, "):
        host.select_libraries(["cross_entropy/int8"], [], [])
