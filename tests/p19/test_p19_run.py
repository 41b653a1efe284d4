"""The whole ramp: the solution is right on the CPU through MAX and on the virtual GPU, the ops keep their names and arguments.

The contract of the ops is tested on the CPU graph that the run leaves in the cache.
"""

import json
import subprocess
import sys

import pytest
import torch

from harness.check.ran import of_variant
from harness.check.reference import Reference
from harness.devices import graphs
from harness.devices.targets import cpu
from harness.puzzles.p19.spec import PUZZLE
from harness.toolchain import roots

GATES = [gate.id for gate in PUZZLE.gates]


def harness(*arguments: str) -> subprocess.CompletedProcess:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "harness", *arguments], cwd=roots.CHECKOUT, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def solved(tmp_path_factory, graphs_of_runs):
    """What `p19 --solution` prints and writes, on the CPU and the virtual GPU."""
    target = tmp_path_factory.mktemp("run") / "run.json"
    finished = harness("p19", "--solution", "--json", str(target))
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout, json.loads(target.read_text())


@pytest.mark.compiler
def test_the_solution_is_right_everywhere(solved):
    _, run = solved
    assert [device["device"] for device in run["devices"]] == ["cpu", "virtual"]
    assert run["devices"][0]["cached"], "the tests' own unit of graphs holds it"
    for device in run["devices"]:
        assert list(device["variants"]) == GATES and not [f for f in device["findings"] if f["error"]]
        for name, variant in device["variants"].items():
            assert variant["state"] == "correct", name
            assert len(variant["cases"]) == len(PUZZLE.cases(None))
            quantity = PUZZLE.gates[GATES.index(name)].quantities[0]
            assert all(list(verdicts) == [quantity] for verdicts in variant["cases"].values())


@pytest.mark.compiler
def test_the_report_has_a_section_for_each_device_and_a_line_for_each_kernel(solved):
    lines = solved[0].splitlines()
    for quantity in PUZZLE.forward:
        assert sum(line.startswith(f"   {quantity}: ") and line.endswith(" ✅") for line in lines) == 2, (
            quantity
        )
    assert lines.count("   Overall: ✅ CORRECT") == 2
    assert "   - CPU Forward:  ✅ CORRECT" in lines and "   - Virtual GPU Forward:  ✅ CORRECT" in lines
    assert "   Overall Result: ✅ ALL CORRECT" in lines


OPS = {
    "ramp_map": ("mapped", "vector"),
    "ramp_index": ("shifted", "matrix", "offset"),
    "ramp_cast": ("products", "half_matrix", "half_vector"),
    "ramp_reduce": ("row_sums", "matrix"),
    "ramp_tile": ("mirrored", "vector"),
    "ramp_atomic": ("column_sums", "matrix"),
    "ramp_stages": ("staged_sums", "matrix"),
    "ramp_rmsnorm": ("normalised", "matrix", "weight"),
}
"""The contract, spelled out: every op with its arguments in order."""


def test_the_ops_have_the_names_and_arguments_of_the_contract():
    calls = {call.op.name: (*call.op.writes, *call.op.reads) for call in PUZZLE.calls}
    assert calls == OPS


ALONE = """
import sys
from pathlib import Path
import torch
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, KernelLibrary, TensorType, ops

assert "harness" not in sys.modules
library = KernelLibrary()
library.load_paths([Path(sys.argv[1])])
missing = [name for name in sys.argv[2].split(",") if name not in library]
assert not missing, missing
cpu = DeviceRef.CPU()
types = [BufferType(DType.float32, ["rows", "columns"], device=cpu), TensorType(DType.float32, ["rows", "columns"], device=cpu),
         TensorType(DType.float32, ["columns_of_weight"], device=cpu)]
with Graph("alone", input_types=types, kernel_library=library) as graph:
    y, x, gamma = graph.inputs
    ops.inplace_custom("ramp_rmsnorm", cpu, [y.buffer, x.tensor, gamma.tensor])
    graph.output()
model = InferenceSession(devices=[CPU()]).load(graph)
x, gamma, y = torch.randn(3, 7), torch.randn(7), torch.empty(3, 7)
model.execute(y, x, gamma)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (7,), gamma, 1e-5))
try:
    model.execute(y, x, torch.randn(6))
except Exception as error:
    assert "weight has size 6 along axis 0, expected 7" in str(error), error
else:
    raise SystemExit("a wrong shape was accepted")
print("loaded")
"""


@pytest.mark.compiler
def test_another_program_loads_the_package_alone(tmp_path):
    (tmp_path / "puzzles").symlink_to(roots.CHECKOUT / "solutions")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, "puzzles/p19/op", ",".join(OPS)],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "loaded\n", done.stderr


@pytest.mark.compiler
def test_the_cpu_graph_writes_every_element(solved):
    """The graph that the run has compiled, called once more here: nothing of the poison is left at awkward sizes."""
    from harness.spec.puzzle import Case

    calls = PUZZLE.calls_of(PUZZLE.default_variants)
    program = graphs.load(roots.op_package(roots.solutions(), "p19"), calls, "float32", cpu().device)
    assert program.cached
    case = Case("awkward", "", (97, 5, 129), "hard")
    reference = Reference(PUZZLE, "float32", 3)
    outputs = graphs.execute(PUZZLE, program, cpu(), reference.inputs(case), case.dims)
    for gate in PUZZLE.gates:
        (quantity,) = gate.quantities
        verdicts = reference.compared(case, cpu(), gate.id, of_variant(outputs, gate.id), [quantity])
        assert verdicts[quantity].ok, gate.id
        assert torch.isfinite(outputs[f"{gate.id}.{quantity}"].float()).all()


# ---- The command line, without a compiler ------------------------------------------------------------------


def test_flags_that_the_ramp_has_no_use_for_are_unknown(command_line):
    finished = command_line("p19", "--backward")
    assert finished.code == 2 and "--backward" in finished.err
    assert "--backward" not in command_line("p19", "--help").out
    assert all(f"--{gate}" in command_line("p19", "--help").out for gate in GATES)


def test_list_and_hint_know_the_ramp(command_line):
    listed = command_line("list", "p19").out
    assert "p19  The ramp" in listed and all(gate in listed for gate in GATES)
    for gate in GATES:
        assert f"{gate}-2" in command_line("hint", "p19", f"{gate}-2").out


def test_an_untouched_ramp_is_unsolved(command_line):
    finished = command_line("verify", "p19")
    assert finished.code == 3, finished.out
