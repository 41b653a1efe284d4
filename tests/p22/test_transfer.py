"""The last gate's op, RMSNorm + Linear backward: its CPU path is right in every dtype and case, and its name stays."""

import re
from pathlib import Path

import pytest

from harness.check.ran import of_variant
from harness.check.reference import Reference
from harness.devices import graphs
from harness.devices.targets import cpu
from harness.learner import hints
from harness.puzzles.p22 import spec as p22
from harness.spec.puzzle import Case

DTYPES = ("float32", "bfloat16", "float16", "float64")
CASES = [
    *p22.cases(),
    Case("one column", "the two terms cancel", (2, 3, 1, 4), "hard"),
    Case("one of each", "", (1, 1, 1, 1), "hard"),
]


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_path_is_right(cpu_graphs, dtype):
    program = cpu_graphs()[f"rmsnorm_{dtype}"]
    reference = Reference(p22.PUZZLE, dtype, 0)
    for case in CASES:
        outputs = graphs.execute(p22.PUZZLE, program, cpu(), reference.inputs(case), case.dims)
        quantities = list(p22.TRANSFER.writes)
        verdicts = reference.compared(case, cpu(), "rmsnorm", of_variant(outputs, "rmsnorm"), quantities)
        assert list(outputs) == [f"rmsnorm.{quantity}" for quantity in quantities]
        wrong = {quantity: verdict for quantity, verdict in verdicts.items() if not verdict.ok}
        assert not wrong, case.name


def test_the_op_has_the_name_and_arguments_of_the_contract():
    (call,) = p22.PUZZLE.variants["rmsnorm"]
    assert call.op.name == "rmsnorm_linear_train_backward"
    assert list(call.op.writes) == ["rms_grad_input", "grad_rms_weight", "rms_grad_weight"]
    assert list(call.op.reads) == ["grad_output", "input", "ln_weight", "linear_weight"]


def test_a_run_that_names_no_variant_leaves_the_gate_out():
    assert "rmsnorm" not in p22.PUZZLE.default_variants
    assert p22.PUZZLE.kernel_gates[-1].id == "transfer"


def test_the_hints_say_only_where_the_idea_stands():
    ladder = hints.ladder("p22", "transfer")
    assert len(ladder) == 3 and not any(rung.code for rung in ladder)
    book = Path(__file__).absolute().parents[2] / "book" / "src"
    pages = "".join(page.read_text(encoding="utf-8") for page in book.rglob("*.md"))
    for rung in ladder:
        places = re.findall(r'"([^"]+)"', " ".join(rung.text.split()))
        assert places and "=" not in rung.text
        for place in places:
            assert re.search(rf"^#+ {re.escape(place)}$|\[{re.escape(place)}\]", pages, re.M), place
