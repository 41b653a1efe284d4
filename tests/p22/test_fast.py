"""The fast variant: right on the virtual GPU in every dtype, the same bits in every run, and launched within the limits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.check import tensors
from harness.devices.recorder import RecordedTensor, record
from harness.devices.replay import Replay
from harness.devices.targets import Target
from harness.puzzles.p22.spec import PUZZLE, ledger
from harness.spec.puzzle import Case
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]
VIRTUAL = Target("virtual", None, "virtual GPU (sm_90a)")
QUANTITIES = [*PUZZLE.forward, *PUZZLE.backward]

# B, S, H, O: what the harness's own cases, being small, do not reach.
SEVERAL_TURNS = Case("several turns", "more rows than all blocks hold at a time", (5, 860, 8, 8), "hard")
TWO_WARPS = Case(
    "two warps", "a row that several warps share, and several rows a block", (3, 190, 520, 8), "hard"
)
LONG_ROWS = Case("long rows", "two vectors a thread backward, a large block forward", (1, 3, 4104, 8), "hard")
ONE_COLUMN = Case("one column", "x_hat and the gradient of the input are exactly 0", (2, 9, 1, 4), "hard")
LONGER_ROWS = Case("longer rows", "too long for a block's registers and its sums", (1, 2, 29000, 8), "hard")
TARGETS = {"sm_80": "sm_80", "gfx942": "mi300x", "apple-m4": "apple-m4"}


@pytest.fixture(scope="module")
def recording():
    """dtype -> what the fast variant launches at every size that is tested here."""
    package = roots.op_package(roots.solutions(), PUZZLE.name)
    sizes = {case.dims for case in (*PUZZLE.cases(None), *extra())}
    return lambda dtype: record(package, PUZZLE.name, dtype, sorted(sizes), ["fast"])


def extra() -> list[Case]:
    """The cases above."""
    return [SEVERAL_TURNS, TWO_WARPS, LONG_ROWS, LONGER_ROWS, ONE_COLUMN]


def replayed(recording, case: Case, dtype: str, blocks: str = "natural"):
    """What the fast variant writes in one case, the machine it ran on, and the case's truth."""
    reference = tensors.Reference(PUZZLE, dtype, seed=0)
    player = Replay(recording(dtype), PUZZLE, dtype, blocks=blocks)
    return player.run("fast", case, reference.inputs(case)), player.gpu, reference


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", [*PUZZLE.cases(None), *extra()], ids=lambda case: case.name)
def test_right_on_the_virtual_gpu_without_a_finding(recording, case, dtype):
    outputs, gpu, reference = replayed(recording, case, dtype)
    named = {f"fast.{name}": tensor for name, tensor in outputs.items()}
    verdicts = tensors.judge_variant(PUZZLE, reference, case, VIRTUAL, "fast", named, QUANTITIES)
    assert {name: verdict for name, verdict in verdicts.items() if not verdict.ok} == {}
    assert not gpu.findings, gpu.findings[0].text()


@pytest.mark.compiler
@pytest.mark.parametrize("case", [TWO_WARPS, SEVERAL_TURNS], ids=lambda case: case.name)
def test_the_same_bits_in_whatever_order_the_blocks_run(recording, case):
    natural, gpu, _ = replayed(recording, case, "float32")
    shuffled, _, _ = replayed(recording, case, "float32", blocks="shuffled:5")
    for name in QUANTITIES:
        assert torch.equal(natural[name], shuffled[name]), name
    assert any(launch.grid[0] > 1 for launch in gpu.launches)


@pytest.mark.compiler
def test_one_column_has_a_gradient_of_exactly_zero(recording):
    outputs, _, _ = replayed(recording, ONE_COLUMN, "float32")
    assert not outputs["grad_input"].any()


@pytest.mark.compiler
def test_every_kernel_of_the_rows_is_reached(recording):
    """That the sizes above choose what they are meant to choose."""
    launched = recording("bfloat16")
    names = {case: [event.name for event in launched.cases["fast", case.dims]] for case in extra()}
    assert "ln_backward_rows" in names[SEVERAL_TURNS] and "layernorm_rows" in names[LONG_ROWS]
    assert "ln_backward_any" in names[LONGER_ROWS] and "layernorm_any" in names[LONGER_ROWS]
    assert {"layernorm_rows", "ln_backward_elements"} <= set(names[ONE_COLUMN])
    symbols = {
        event.symbol
        for case in extra()
        for event in launched.cases["fast", case.dims]
        if event.name in ("ln_backward_rows", "layernorm_rows") and case is not ONE_COLUMN
    }
    assert len(symbols) == 4, "one and two vectors a thread backward, small and large blocks forward"


@pytest.mark.compiler
def test_nothing_is_added_with_atomics(recording):
    for ptx in recording("bfloat16").ptx.values():
        assert not re.search(r"\b(atom|red)\.", ptx)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ledger_is_what_the_launches_ask_for(recording, dtype):
    for case in (*PUZZLE.cases(None), *extra()):
        events = recording(dtype).cases["fast", case.dims]
        asked = [e for e in events if isinstance(e, RecordedTensor) and e.scratch]
        parts = ledger(case.dims, dtype).between["fast"]
        partials = sum(e.nbytes for e in asked if e.name.endswith("partials"))
        assert sum(e.nbytes for e in asked) - partials == sum(parts.values()) - parts[PARTIALS], case.name
        assert 0 < partials <= parts[PARTIALS], case.name


PARTIALS = "backward partial sums, at most"


# ---- Other GPUs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=TARGETS)
def launches(request):
    """The words of each line that the launch program prints for a target: launch, kind, rows, H, O, shift, name, ..."""
    package = roots.op_package(roots.solutions(), PUZZLE.name).path
    command = [
        *(str(Path(sys.executable).with_name("mojo")), "run", f"--target-accelerator={request.param}"),
        *("-D", f"TARGET={TARGETS[request.param]}", "-I", str(package.parent)),
        str(ROOT / "tests" / "p22" / "p22_fast_launches.mojo"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    # The compiler may print a target's error and return 0.
    assert done.returncode == 0 and "error" not in done.stderr.lower(), done.stderr
    return [line.split() for line in done.stdout.splitlines() if line.startswith("launch ")], request.param


@pytest.mark.compiler
def test_every_kernel_compiles_and_every_grid_is_within_what_all_targets_allow(launches):
    lines, target = launches
    assert {line[1] for line in lines} == {"float32", "tf32", "bfloat16", "float16", "float64"} - (
        {"float64"} if target == "apple-m4" else set()
    )
    shared_limit = {"sm_80": 163 * 1024, "gfx942": 64 * 1024, "apple-m4": 32 * 1024}[target]
    for line in lines:
        grid_x, grid_y, block_x, block_y, shared, code = map(int, line[7:13])
        assert 1 <= grid_x < 2**31 and 1 <= grid_y <= 65535 and 1 <= block_x * block_y <= 1024, line
        assert 0 <= shared <= shared_limit and code > 500, line


@pytest.mark.compiler
def test_unaligned_and_long_rows_take_kernels_of_their_own(launches):
    lines, _ = launches
    names = {}
    for line in lines:
        names.setdefault((line[1], int(line[3]), int(line[5])), set()).add(line[6])
    for kind in ("float32", "bfloat16"):
        assert {"layernorm_rows", "ln_backward_rows"} <= names[kind, 768, 0], kind
        for sizes in ((37, 0), (768, 1)):
            assert {"layernorm_rows", "ln_backward_elements"} <= names[kind, *sizes], (kind, sizes)
            assert "ln_backward_rows" not in names[kind, *sizes], (kind, sizes)
        assert {"layernorm_any", "ln_backward_any"} <= names[kind, 100000, 0], kind
        assert not {"layernorm_rows", "ln_backward_elements"} & names[kind, 100000, 0], kind


@pytest.mark.compiler
def test_no_rows_leave_only_the_launches_that_write_zeros(launches):
    lines, _ = launches
    assert {line[6] for line in lines if line[2] == "0"} == {
        "finish_sums",
        "grad_weight",
    }


# ---- The command line ---------------------------------------------------------------------------------------


@pytest.mark.compiler
def test_fast_runs_only_when_it_is_asked_for(puzzle, command_line):
    assert puzzle.default_variants == ("fused", "unfused")
    assert puzzle.compiled_with(("fused",)) == ("fused", "unfused"), "one graph serves every default run"
    assert puzzle.compiled_with(("fast",)) == ("fast",)
    assert puzzle.compiled_with(("unfused", "fast")) == ("fused", "unfused", "fast")
    shown = command_line("p22", "--help").out
    assert "--fast" in shown and "default: fused and unfused" in shown


@pytest.mark.compiler
def test_the_command_line_judges_the_fast_variant(command_line):
    finished = command_line("p22", "--solution", "--backward", "--fast", "--device", "cpu")
    assert finished.code == 6 and finished.err == ""
    assert "   - CPU Backward (fast):  ✅ CORRECT" in finished.lines
    assert not any("(unfused)" in line or "CPU Backward:" in line for line in finished.lines)
