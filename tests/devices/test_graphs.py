"""Graphs of op calls: their inputs, their cache, and what a graph that does not compile says."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from max.driver import CPU
from max.engine import CompiledModel, InferenceSession
from max.graph import BufferType, DeviceRef, Module, TensorType
from typed import stand_in

from harness.check.reference import Reference
from harness.devices import graphs
from harness.devices.graphs import argument_types
from harness.devices.targets import cpu
from harness.errors import CompileFailed, EnvironmentProblem
from harness.puzzles.p22 import spec as p22
from harness.spec.ops import ACCUM, Argument, Call, OpSpec, Scalar
from harness.toolchain import cache
from harness.toolchain.cache import keep
from harness.toolchain.packages import OpPackage

ROOT = Path(__file__).resolve().parents[2]
MATRIX = Argument(("rows", "columns"))
SCALE = OpSpec(
    "scale",
    writes={"y": MATRIX},
    reads={"x": MATRIX},
    scalars={"eps": Scalar(1e-5), "steps": Scalar(3, "int32")},
)
SUMS = OpSpec("sums", writes={"total": Argument(("rows", 2), ACCUM)}, reads={"y": MATRIX})
PICK = OpSpec(
    "pick",
    writes={"picked": MATRIX, "kept": Argument(("rows",), "bool")},
    reads={"x": MATRIX, "order": Argument(("rows",), "int32"), "scales": Argument(("rows",), "float32")},
)
CPU_REF = DeviceRef.CPU()


def test_what_a_call_writes_is_a_buffer_and_what_it_reads_a_tensor():
    types = argument_types((Call(SCALE, (), "a"), Call(SUMS, (), "a")), "bfloat16", CPU_REF)
    assert list(types) == ["a.y", "a.total", "x", "eps", "steps"]
    assert isinstance(types["a.y"], BufferType) and isinstance(types["x"], TensorType)


def test_arguments_have_dtypes_of_their_own():
    types = argument_types((Call(PICK),), "bfloat16", CPU_REF)
    names = {"x": "bfloat16", "picked": "bfloat16", "order": "int32", "kept": "bool", "scales": "float32"}
    assert {name: types[name].dtype for name in names} == {n: graphs.DTYPES[d] for n, d in names.items()}


def test_sums_and_scalars_have_dtypes_of_their_own():
    types = argument_types((Call(SCALE), Call(SUMS)), "bfloat16", CPU_REF)
    assert types["y"].dtype == graphs.DTYPES["bfloat16"]
    assert types["total"].dtype == graphs.DTYPES["float32"]
    assert types["eps"].dtype == graphs.DTYPES["float64"] and types["eps"].rank == 0
    assert types["steps"].dtype == graphs.DTYPES["int32"] and types["steps"].rank == 0
    wide = argument_types((Call(SUMS),), "float64", CPU_REF)
    assert wide["total"].dtype == graphs.DTYPES["float64"]


def test_named_sizes_are_symbols_and_numbers_are_fixed():
    shape = argument_types((Call(SUMS),), "float32", CPU_REF)["total"].shape
    assert str(shape[0]) == "rows" and int(shape[1]) == 2


def test_a_shared_input_appears_once_and_prefixes_keep_outputs_apart(puzzle):
    types = argument_types(puzzle.calls, "float32", CPU_REF)
    assert "input" in types and "fused.output" in types and "unfused.output" in types
    assert "mean" not in types, "the backward pass reads what the forward pass of its variant wrote"
    assert sum(name.endswith("grad_output") for name in types) == 1


@pytest.mark.compiles
def test_a_missing_op_is_named(solution):
    call = Call(replace(p22.FORWARD, name="layernorm_linear_nowhere"), (("algorithm", "fused"),))
    with pytest.raises(CompileFailed, match="registers no op 'layernorm_linear_nowhere'") as raised:
        graphs.build("g", solution, (call,), "float32", CPU_REF)
    assert str(solution.path) in str(raised.value) and raised.value.exit_code == 4


# ---- The cache ----------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_a_second_load_is_cached_and_compiles_nothing(puzzle, solution, program):
    program("float32")
    told = []
    calls = puzzle.calls_of(puzzle.default_variants)
    again = graphs.load(solution, calls, "float32", CPU(), on_compile=lambda: told.append(1))
    assert again.cached and not told
    assert again.arguments == program("float32").arguments


@pytest.mark.compiles
def test_a_graph_has_its_plain_name_whatever_key_it_was_first_compiled_under(puzzle, solution, program):
    """Another kind of device is another key; MAX, which sees the same graph, answers with the first one's names."""
    assert graphs.plain_names({"g0123_forward": 1, "gabcd_back_ward": 2}) == {"forward": 1, "back_ward": 2}
    first, calls = program("float32"), puzzle.calls_of(puzzle.compiled_with(puzzle.default_variants))
    again = graphs.load(solution, calls, "float32", CPU(), kind="the same again")
    assert again.arguments == first.arguments
    case, inputs = puzzle.cases(None)[0], Reference(puzzle, "float32", 0).inputs(puzzle.cases(None)[0])
    mine, theirs = (graphs.execute(puzzle, each, cpu(), inputs, case.dims) for each in (again, first))
    assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)


class Stopped(Exception):
    """Raised in place of a compile."""


def is_cached(package, calls, dtype="float32", kind="") -> bool:
    """Whether a load would find a compiled graph; it stops before it compiles one."""

    def stop():
        raise Stopped

    try:
        return graphs.load(package, calls, dtype, CPU(), kind=kind, on_compile=stop).cached
    except Stopped:
        return False


@pytest.mark.compiles
def test_everything_that_changes_the_code_changes_the_key(puzzle, solution, program, copied_package):
    program("float32")
    calls = puzzle.calls_of(puzzle.default_variants)
    assert is_cached(solution, calls)
    assert is_cached(OpPackage(copied_package.path), calls), "the place of a package does not matter"
    assert not is_cached(solution, calls[::-1])
    assert not is_cached(solution, calls, kind="virtual")
    copied_package.replace("comptime TILE = 16", "comptime TILE = 8")
    assert not is_cached(OpPackage(copied_package.path), calls)


@pytest.mark.compiles
def test_a_graph_that_was_compiled_with_others_is_found_by_who_asks_for_it_alone(
    puzzle, solution, cpu_graphs, monkeypatch
):
    calls, together = puzzle.calls_of(puzzle.default_variants), cpu_graphs()
    case, inputs = puzzle.cases(None)[0], Reference(puzzle, "float64", 3).inputs(puzzle.cases(None)[0])
    told = []
    alone = graphs.load(solution, calls, "float64", CPU(), on_compile=lambda: told.append(1))
    assert alone.cached and not told
    mine, theirs = (
        graphs.execute(puzzle, program, cpu(), inputs, case.dims) for program in (alone, together["float64"])
    )
    assert mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)
    assert not is_cached(solution, calls, "float64", kind="another"), "of that kind none was compiled"
    monkeypatch.setattr(graphs, "read_cached", lambda path: None)
    assert not is_cached(solution, calls, "float64"), "the unit is gone"


@pytest.mark.compiles
def test_another_processor_does_not_get_this_one_s_code(puzzle, solution, program, monkeypatch):
    program("float32")
    calls = puzzle.calls_of(puzzle.default_variants)
    assert is_cached(solution, calls)
    monkeypatch.setattr(graphs, "host_identity", lambda: "another processor")
    assert not is_cached(solution, calls)


def test_a_damaged_cache_file_is_thrown_away(tmp_path):
    damaged = tmp_path / "x.mef"
    keep(damaged, lambda staged: staged.write_bytes(b"not a graph"), "no graph")
    assert graphs.read_cached(damaged) is None
    assert not damaged.exists()
    assert graphs.read_cached(tmp_path / "missing.mef") is None


def test_a_cache_that_cannot_be_written_is_an_environment_problem(puzzle, solution, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(EnvironmentProblem, match="cannot make the cache folder"):
        graphs.load(solution, puzzle.calls, "float32", CPU())


# ---- Errors of a compile ------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_an_error_that_only_the_graph_shows_is_located(copied_package):
    """A comptime assert of a kernel: the package compiles by itself, the graph that instantiates it does not."""
    said = "algorithm must be 'unfused' or 'fused'"
    source = copied_package.path / "passes.mojo"
    assert source.read_text().count(f'comptime assert is_algorithm(algorithm), "{said}"') == 2
    call = Call(p22.FORWARD, (("algorithm", "neither"),), "x")
    with pytest.raises(CompileFailed) as raised:
        graphs.load(OpPackage(copied_package.path), (call,), "float32", CPU())
    text = str(raised.value)
    assert "does not compile" in text and said in text
    assert ".mojo:" in text, "file and line"
    assert len(text.splitlines()) == 2 and len(raised.value.details) > len(text)


class PrintingSession(InferenceSession):
    """A session whose compile prints to the process's standard error and returns a graph."""

    def __init__(self, text: bytes):
        self.text = text
        self.compiled = stand_in(CompiledModel)

    def compile(self, graph, **options):
        os.write(2, self.text)
        return self.compiled


@pytest.mark.compiles
def test_an_error_that_max_prints_and_passes_over_is_an_error(solution):
    text = b"warning: slow\nerror: <unknown>:0:0: in function f: unsupported atomic synchronization scope\n"
    with pytest.raises(CompileFailed, match="unsupported atomic synchronization scope") as raised:
        graphs.compile_graph(PrintingSession(text), Module(), solution)
    assert "warning: slow" in raised.value.details


@pytest.mark.compiles
def test_a_warning_is_no_error(solution):
    session = PrintingSession(b"a.mojo:1:2: warning: no error here\n")
    assert graphs.compile_graph(session, Module(), solution) is session.compiled


def test_captured_stderr_keeps_what_native_code_writes(capfd):
    with graphs.captured_stderr() as captured:
        os.write(2, b"from below\n")
    os.write(2, b"after\n")
    assert captured.text == "from below\n"
    assert capfd.readouterr().err == "after\n"


def test_captured_stderr_is_shared_by_threads_that_overlap(capfd):
    inside, leave = threading.Event(), threading.Event()
    texts = {}

    def other():
        with graphs.captured_stderr() as captured:
            os.write(2, b"other\n")
            inside.set()
            leave.wait(10)
        texts["other"] = captured.text

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with graphs.captured_stderr() as captured:
        os.write(2, b"mine\n")
    leave.set()
    thread.join()
    os.write(2, b"after\n")
    assert captured.text == texts["other"] == "other\nmine\n"
    assert capfd.readouterr().err == "after\n"


def test_captured_stderr_gives_it_back_after_an_exception(capfd):
    with pytest.raises(ZeroDivisionError), graphs.captured_stderr():
        raise ZeroDivisionError
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_importing_the_graphs_does_not_import_torch():
    code = "import sys, harness.devices.graphs, harness.check.runs; print('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert finished.stdout == "False\n"


def test_on_the_cpu_a_buffer_shares_the_tensor_s_memory():
    tensor = torch.zeros(3)
    buffer = graphs.to_device(tensor, CPU())
    tensor[1] = 7
    assert buffer.to_numpy()[1] == 7
    assert graphs.to_device(buffer, CPU()) is buffer
