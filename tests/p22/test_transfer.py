"""The last gate's op, RMSNorm + Linear backward: public names, opt-in runs, and no CPU path."""

import re
from pathlib import Path

from book.build import reading
from harness.learner import hints
from harness.puzzles.p22 import spec as p22


def test_op_has_its_public_names():
    (call,) = p22.PUZZLE.variants["rmsnorm"]
    assert call.op.name == "rmsnorm_linear_train_backward"
    assert list(call.op.writes) == ["rms_grad_input", "grad_rms_weight", "rms_grad_weight"]
    assert list(call.op.reads) == ["grad_output", "input", "ln_weight", "linear_weight"]


def test_default_run_skips_the_gate():
    assert "rmsnorm" not in p22.PUZZLE.default_variants
    assert p22.PUZZLE.kernel_gates[-1].id == "transfer"


def test_cpu_run_is_rejected(command_line):
    result = command_line("p22", "--rmsnorm", "--backward", "--device", "cpu")
    assert result.code == 2 and result.err.count("\n") == 1 and "--device cpu" in result.err


def test_hints_refer_to_sections_without_formulas():
    ladder = hints.load_ladder("p22", "transfer")
    assert len(ladder) == 3 and not any(rung.code for rung in ladder)
    src = Path(__file__).absolute().parents[2] / "book" / "src"
    track = (src / "introduction.md").read_text(encoding="utf-8").partition("**The expert's track**")[0]
    names = set(re.findall(r"\]\(([\w/]+\.md)", track))
    titles = {title for page, title in reading.pages(src).items() if page in names}
    titles |= {title for name in names for title in re.findall(r"^#+ (.*)$", (src / name).read_text(), re.M)}
    for rung in ladder:
        sections = re.findall(r'"([^"]+)"', " ".join(rung.text.split()))
        assert sections and "=" not in rung.text
        for section in sections:
            assert section in titles, f"{section}: no page or section of the learner's track"
