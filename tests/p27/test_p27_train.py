"""`p27 --train` and `--compare`: training is reproducible, and gradients match autograd at each step."""

from dataclasses import replace

import pytest
import torch
from typed import unwrap

from harness.check import zoo
from harness.check.python_files import load_module
from harness.errors import UsageError
from harness.puzzles.p27 import compare, train
from harness.puzzles.p27.autograd import Model
from harness.puzzles.p27.running import make_leaves, no_autograd
from harness.puzzles.p27.training import draw_excerpts, plot, read_text
from harness.toolchain import roots

TAPE = roots.get_solutions() / "p27" / "tape.py"
SMALL = replace(train.TINY, layers=2, width=32, context=32, batch=8)


def train_small_model(text, steps: int) -> train.Training:
    module, training = load_module(TAPE), train.Training.initialize(SMALL)
    with no_autograd():
        for _, excerpt in zip(range(steps), draw_excerpts(SMALL, train.SEED, text), strict=False):
            training.step(module, excerpt)
    return training


def test_loss_decreases_and_runs_are_reproducible(text):
    first, second = train_small_model(text, 25), train_small_model(text, 25)
    assert first.losses[0] > 5.4 and first.losses[-1] < 3.5  # log 256 is 5.55, and the text has 20 letters
    assert first.losses == second.losses
    assert all(torch.equal(t, second.p[name]) for name, t in first.p.items())


def test_gradients_match_autograd_at_each_step(text, monkeypatch):
    module, training = load_module(TAPE), train.Training.initialize(SMALL)
    monkeypatch.setitem(
        module, "clip", lambda grads, limit: None
    )  # so that the gradients are compared unclipped
    for _, excerpt in zip(range(5), draw_excerpts(SMALL, train.SEED, text), strict=False):
        leaves = make_leaves({name: t.double() for name, t in training.p.items()})
        loss = Model().loss(excerpt[:, :-1], excerpt[:, 1:], leaves)
        loss.backward()
        training.step(module, excerpt)
        assert training.losses[-1] == pytest.approx(loss.item(), rel=1e-5)
        largest = max(unwrap(t.grad).abs().max().item() for t in leaves.values())
        for name, leaf in leaves.items():
            torch.testing.assert_close(training.grads[name].double(), leaf.grad, rtol=0, atol=2e-5 * largest)


def test_command_trains_plots_and_samples(command_line):
    result = command_line("p27", "--train", "--solution", "--steps", "3")
    assert result.code == 0, result.err
    assert (
        result.lines[0]
        == "3 blocks of 96 channels, 366,432 parameters; 16 x 64 bytes of the book at every step"
    )
    assert "o by hand" in result.lines[1]
    (summary,) = [line for line in result.lines if line.startswith("loss ")]
    assert summary.endswith("in the last ten of 3")
    assert result.lines[result.lines.index("it writes:") + 1].startswith("   The gradient ")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--train", "--steps", "0"), 2, "--steps 0: must be at least 1"),
        (("--train", "--seconds", "-5"), 2, "--seconds -5: must be above 0"),
        (("--train", "--seconds", "nan"), 2, "--seconds nan: must be above 0"),
        (("--train", "--seed", "9" * 23), 2,
         f"--seed {'9' * 23}: must be a whole number from 0 to 2**63 - 1"),
        (("--compare", "--seed", "-1"), 2, "--seed -1: must be a whole number from 0 to 2**63 - 1"),
        (("--train",), 3, "tape, embedding, layernorm, attention"),
        (("--compare",), 3, "still to be written; --solution runs the solution's"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_rejected(arguments, code, message, command_line):
    result = command_line("p27", *arguments)
    assert result.code == code and message in result.err


def test_compare_prints_all_values_and_the_first_wrong_one(command_line, monkeypatch):
    result = command_line("p27", "--compare", "--solution")
    assert result.code == 0 and result.lines[-1] == "✅ every value is autograd's"
    labels = {line.split("  ")[0] for line in result.lines}
    assert labels >= {
        "block0.attention, its output",
        "the gradient of block1.narrow.weight",
        "the gradient of token",
    }
    wrong = next(bug for bug in zoo.load_wrong_solutions("p27") if bug.name == "gelu_first_term")
    monkeypatch.setattr(
        compare, "load_tape", lambda flags: (wrong.build_target(), load_module(wrong.build_target()))
    )
    result = command_line("p27", "--compare")
    assert result.code == 1
    assert result.lines[-1].endswith("the first is the gradient of what block1.gelu is given")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("        return dy * (0.5 * (1 + tanh)", "        raise NotImplementedError  # ",
         "NotImplementedError"),
        ("slope = Gelu.SCALE", "slope = Gelu.NONE",
         "AttributeError: type object 'Gelu' has no attribute 'NONE'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["--train", "--compare"])
def test_exception_is_reported_with_file_and_line(
    command, old, new, message, command_line, monkeypatch, tmp_path
):
    path = tmp_path / "tape.py"
    path.write_text(TAPE.read_text().replace(old, new))
    for module in (train, compare):
        monkeypatch.setattr(module, "load_tape", lambda flags: (path, load_module(path)))
    result = command_line("p27", command)
    assert result.code == 2 and "tape.py:" in result.err and message in result.err, result.err


def test_nonfinite_loss_stops_training(text):
    training = train.Training.initialize(SMALL)
    training.p["token"].fill_(torch.nan)
    excerpt = next(iter(draw_excerpts(SMALL, train.SEED, text)))
    with pytest.raises(UsageError, match="the loss of step 1 is nan: see p27 --gate step"):
        training.step(load_module(TAPE), excerpt)


def test_missing_or_short_text_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no Markdown file"):
        read_text(tmp_path / "nowhere", 8)
    (tmp_path / "short.md").write_text("short")
    with pytest.raises(UsageError, match="more than 9 bytes"):
        read_text(tmp_path, 8)


def test_plotted_curve_decreases():
    rows = plot("by hand", [4.0 - step / 50 for step in range(100)], width=40, height=5)
    assert "3.9" in rows[1] and "o" in rows[1] and "2.0" in rows[5] and rows[5].endswith("o")
    assert "step 100" in rows[6] and max(map(len, rows)) < 80
