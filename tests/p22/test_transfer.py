"""The last gate's op, RMSNorm + Linear backward: its name stays, it runs on request, and it has no CPU path."""

import re
from pathlib import Path

from harness.learner import hints
from harness.puzzles.p22 import spec as p22


def test_the_op_has_the_name_and_arguments_of_the_contract():
    (call,) = p22.PUZZLE.variants["rmsnorm"]
    assert call.op.name == "rmsnorm_linear_train_backward"
    assert list(call.op.writes) == ["rms_grad_input", "grad_rms_weight", "rms_grad_weight"]
    assert list(call.op.reads) == ["grad_output", "input", "ln_weight", "linear_weight"]


def test_a_run_that_names_no_variant_leaves_the_gate_out():
    assert "rmsnorm" not in p22.PUZZLE.default_variants
    assert p22.PUZZLE.kernel_gates[-1].id == "transfer"


def test_there_is_no_cpu_path(command_line):
    finished = command_line("p22", "--rmsnorm", "--backward", "--device", "cpu")
    assert finished.code == 2 and finished.err.count("\n") == 1 and "--device cpu" in finished.err


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
