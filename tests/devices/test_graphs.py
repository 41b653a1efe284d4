"""Graphs of op calls: inputs, caching and compile errors."""

import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from max.driver import CPU
from max.engine import CompiledModel, InferenceSession
from max.graph import BufferType, DeviceRef, Module, TensorType
from typed import make_stub

from harness.check.reference import Reference
from harness.devices import graphs
from harness.devices.graphs import get_argument_types
from harness.devices.targets import make_cpu_target
from harness.errors import CompileFailed
from harness.puzzles.p22 import spec as p22
from harness.spec.ops import ACCUM_DTYPE, Argument, Call, OpSpec, Scalar
from harness.toolchain.packages import OpPackage

ROOT = Path(__file__).resolve().parents[2]
MATRIX = Argument(("rows", "columns"))
SCALE = OpSpec(
    "scale",
    writes={"y": MATRIX},
    reads={"x": MATRIX},
    scalars={"eps": Scalar(1e-5), "steps": Scalar(3, "int32")},
)
SUMS = OpSpec("sums", writes={"total": Argument(("rows", 2), ACCUM_DTYPE)}, reads={"y": MATRIX})
PICK = OpSpec(
    "pick",
    writes={"picked": MATRIX, "mask": Argument(("rows",), "bool")},
    reads={"x": MATRIX, "order": Argument(("rows",), "int32"), "scales": Argument(("rows",), "float32")},
)
CPU_REF = DeviceRef.CPU()


def test_written_arguments_are_buffers_and_others_tensors():
    types = get_argument_types((Call(SCALE, (), "a"), Call(SUMS, (), "a")), "bfloat16", CPU_REF)
    assert list(types) == ["a.y", "a.total", "x", "eps", "steps"]
    assert isinstance(types["a.y"], BufferType) and isinstance(types["x"], TensorType)
    rows, columns = types["a.total"].shape
    assert str(rows) == "rows" and int(columns) == 2, "named sizes are symbols, numbers are fixed"


def test_arguments_have_separate_dtypes():
    types = get_argument_types((Call(PICK), Call(SCALE), Call(SUMS)), "bfloat16", CPU_REF)
    expected = {"x": "bfloat16", "picked": "bfloat16", "order": "int32", "mask": "bool", "scales": "float32"}
    expected |= {"y": "bfloat16", "total": "float32", "eps": "float64", "steps": "int32"}
    assert {name: types[name].dtype for name in expected} == {
        n: graphs.DTYPES[d] for n, d in expected.items()
    }
    assert types["eps"].rank == types["steps"].rank == 0
    wide = get_argument_types((Call(SUMS),), "float64", CPU_REF)
    assert wide["total"].dtype == graphs.DTYPES["float64"]


def test_shared_inputs_are_merged_and_outputs_prefixed(puzzle):
    types = get_argument_types(puzzle.calls, "float32", CPU_REF)
    assert "input" in types and "fused.output" in types and "unfused.output" in types
    assert "mean" not in types, "the backward pass reads the forward pass's output"
    assert sum(name.endswith("grad_output") for name in types) == 1


@pytest.mark.compiles
def test_error_names_the_missing_op(solution):
    call = Call(replace(p22.FORWARD, name="layernorm_linear_nowhere"), (("algorithm", "fused"),))
    with pytest.raises(CompileFailed, match="registers no op 'layernorm_linear_nowhere'") as raised:
        graphs.build_graph("g", solution, (call,), "float32", CPU_REF)
    assert str(solution.path) in str(raised.value) and raised.value.exit_code == 4


@pytest.mark.compiles
def test_argument_names_do_not_depend_on_the_cache_key(puzzle, solution, program):
    """MAX's cache returns the first graph with its argument names, even for another kind of device."""
    assert graphs.strip_prefixes({"g0123_forward": 1, "gabcd_back_ward": 2}) == {"forward": 1, "back_ward": 2}
    first, calls = (
        program("float32"),
        puzzle.list_calls(puzzle.list_compiled_variants(puzzle.default_variants)),
    )
    reloaded = graphs.load(solution, calls, "float32", CPU(), kind="another")
    assert reloaded.arguments == first.arguments
    case, inputs = (
        puzzle.list_cases(None)[0],
        Reference(puzzle, "float32", 0).get_inputs(puzzle.list_cases(None)[0]),
    )
    actual, expected = (
        graphs.execute(puzzle, graph, make_cpu_target(), inputs, case.dims) for graph in (reloaded, first)
    )
    assert all(np.array_equal(actual[name], expected[name]) for name in expected)


class CompileStarted(Exception):
    """Raised in place of a compilation."""


def is_cached(package, calls, dtype="float32", kind="") -> bool:
    """Return whether a compiled graph is cached, without compiling."""

    def raise_started():
        raise CompileStarted

    try:
        return graphs.load(package, calls, dtype, CPU(), kind=kind, on_compile=raise_started).cached
    except CompileStarted:
        return False


@pytest.mark.compiles
def test_any_change_of_code_or_processor_changes_the_key(
    puzzle, solution, program, copied_package, monkeypatch
):
    program("float32")
    calls = puzzle.list_calls(puzzle.default_variants)
    assert is_cached(solution, calls)
    assert is_cached(OpPackage(copied_package.path), calls), "the path of a package does not matter"
    assert not is_cached(solution, calls[::-1])
    assert not is_cached(solution, calls, kind="virtual")
    copied_package.replace("comptime TILE = 16", "comptime TILE = 8")
    assert not is_cached(OpPackage(copied_package.path), calls)
    monkeypatch.setattr(graphs, "get_host_identity", lambda: "another processor")
    assert not is_cached(solution, calls)


@pytest.mark.compiles
def test_graph_compiled_with_others_can_be_loaded_separately(puzzle, solution, cpu_graphs, monkeypatch):
    calls, cpu_programs = puzzle.list_calls(puzzle.default_variants), cpu_graphs()
    case, inputs = (
        puzzle.list_cases(None)[0],
        Reference(puzzle, "float64", 3).get_inputs(puzzle.list_cases(None)[0]),
    )
    compiles = []
    single = graphs.load(solution, calls, "float64", CPU(), on_compile=lambda: compiles.append(1))
    assert single.cached and not compiles
    actual, expected = (
        graphs.execute(puzzle, program, make_cpu_target(), inputs, case.dims)
        for program in (single, cpu_programs["float64"])
    )
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(actual[name], expected[name]) for name in actual)
    assert not is_cached(solution, calls, "float64", kind="another"), "no graph of this kind was compiled"
    monkeypatch.setattr(graphs, "read_cached", lambda path: None)
    assert not is_cached(solution, calls, "float64"), "the shared file is missing"


@pytest.mark.slow
@pytest.mark.compiles
def test_error_of_graph_compilation_is_located(copied_package):
    """A kernel's comptime assert fails only when the graph instantiates it."""
    message = "algorithm must be 'unfused' or 'fused'"
    source = copied_package.path / "passes.mojo"
    assert source.read_text().count(f'comptime assert is_algorithm(algorithm), "{message}"') == 2
    call = Call(p22.FORWARD, (("algorithm", "neither"),), "x")
    with pytest.raises(CompileFailed) as raised:
        graphs.load(OpPackage(copied_package.path), (call,), "float32", CPU())
    text = str(raised.value)
    assert "does not compile" in text and message in text
    assert ".mojo:" in text, "file and line"
    assert len(text.splitlines()) == 2 and len(raised.value.details) > len(text)


class PrintingSession(InferenceSession):
    """Session stub whose compile prints to the process's standard error."""

    def __init__(self, text: bytes):
        self.text = text
        self.compiled = make_stub(CompiledModel)

    def compile(self, graph, **options):
        os.write(2, self.text)
        return self.compiled


@pytest.mark.compiles
def test_printed_error_is_raised_and_printed_warning_is_not(solution):
    session = PrintingSession(b"a.mojo:1:2: warning: no error here\n")
    assert graphs.compile_graph(session, Module(), solution) is session.compiled
    text = b"warning: slow\nerror: <unknown>:0:0: in function f: unsupported atomic synchronization scope\n"
    with pytest.raises(CompileFailed, match="unsupported atomic synchronization scope") as raised:
        graphs.compile_graph(PrintingSession(text), Module(), solution)
    assert "warning: slow" in raised.value.details


class FailingSession(InferenceSession):
    """Session stub whose first `failures` compilations raise MAX's error for a moved cache."""

    def __init__(self, failures: int):
        self.failures, self.compiles = failures, 0
        self.compiled = make_stub(CompiledModel)

    def compile(self, graph, **options):
        self.compiles += 1
        if self.compiles > self.failures:
            return self.compiled
        raise RuntimeError("The graph compiler could not lower LIT to KGEN: No such file or directory")


@pytest.mark.compiles
def test_graph_is_compiled_again_once_if_the_cache_moved(solution):
    session = FailingSession(1)
    assert graphs.compile_graph(session, Module(), solution) is session.compiled
    session = FailingSession(2)
    with pytest.raises(CompileFailed, match="No such file or directory"):
        graphs.compile_graph(session, Module(), solution)
    assert session.compiles == 2


def test_captured_stderr_is_shared_by_concurrent_threads(capfd):
    entered, leave = threading.Event(), threading.Event()
    texts = {}

    def capture_other():
        with graphs.capture_stderr() as captured:
            os.write(2, b"other\n")
            entered.set()
            leave.wait(10)
        texts["other"] = captured.text

    thread = threading.Thread(target=capture_other)
    thread.start()
    entered.wait(10)
    with graphs.capture_stderr() as captured:
        os.write(2, b"mine\n")
    leave.set()
    thread.join()
    os.write(2, b"after\n")
    assert captured.text == texts["other"] == "other\nmine\n"
    assert capfd.readouterr().err == "after\n"


def test_captured_stderr_is_restored_after_an_exception(capfd):
    with pytest.raises(ZeroDivisionError), graphs.capture_stderr():
        raise ZeroDivisionError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_cpu_buffer_shares_the_tensors_memory():
    tensor = torch.zeros(3)
    buffer = graphs.copy_to_device(tensor, CPU())
    tensor[1] = 7
    assert buffer.to_numpy()[1] == 7
    assert graphs.copy_to_device(buffer, CPU()) is buffer
