"""The demonstrations run, say what they found by their exit code, and explain themselves where they cannot run."""

import dataclasses
import math
import re

import pytest
import torch
from typed import printed, stand_in, text_console

from harness import cli
from harness.bench import loss_curves
from harness.errors import BadUse
from harness.nn.layers import LayerNormLinear
from harness.puzzles.p22 import demo, demo_simple, training
from harness.puzzles.p22.demo_model import CharacterModel, plain_pair
from harness.puzzles.p22.training import OURS, PLAIN, Trainee

TEXT = "A kernel is written once and run in three places; its gradient is checked in all of them.\n" * 3


@pytest.fixture
def chapters(tmp_path):
    folder = tmp_path / "src" / "puzzle_22"
    folder.mkdir(parents=True)
    (folder / "one.md").write_text(TEXT)
    return tmp_path / "src"


@pytest.fixture(autouse=True)
def compiled_together(request):
    """For every test that trains: the layer's graphs."""
    if request.node.get_closest_marker("compiler"):
        request.getfixturevalue("layer_graphs")


def small(**changes):
    """The demo with a few things changed."""
    return dataclasses.replace(demo.SMALL, **changes)


@pytest.mark.compiler
def test_demo_trains_both_models_alike(chapters):
    console = text_console()
    assert demo.run(console, ["--steps", "6"], chapters) == 0
    text = printed(console)
    assert f"{len(TEXT):,} characters" in text and "Trained 6 steps" in text
    assert "o LayerNormLinear   x plain PyTorch" in text and "final difference" in text
    assert "the curves agree" in text and "\x1b" not in text


@pytest.mark.compiler
def test_losses_fall_and_agree_step_by_step(chapters):
    """Independent of the report."""
    options = small(steps=8)
    text = training.read_text(chapters, options)
    pairs = {OURS: LayerNormLinear, PLAIN: plain_pair}
    models = {name: training.make_model(options, text.vocabulary, pair) for name, pair in pairs.items()}
    trainees = training.make_trainees(options, models)
    training.train(text_console(), options, trainees, text.tokens)
    ours, theirs = trainees[OURS].losses, trainees[PLAIN].losses
    assert ours == pytest.approx(theirs, rel=1e-4) and ours[-1] < ours[0] - 0.5


def test_models_start_equal_and_leave_the_random_state_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    ours, theirs = (training.make_model(small(), 20, pair) for pair in (LayerNormLinear, plain_pair))
    assert torch.equal(torch.get_rng_state(), state)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
    assert sum(isinstance(module, LayerNormLinear) for module in ours.modules()) == 2 * small().layers + 1


def test_the_model_is_causal():
    model = CharacterModel(10, 8, 16, 2, 1, plain_pair).eval()
    characters = torch.randint(10, (1, 8))
    changed = characters.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 10
    before, after = model(characters), model(changed)
    assert torch.allclose(before[0, :5], after[0, :5], atol=1e-6) and not torch.allclose(
        before[0, 5:], after[0, 5:]
    )


@pytest.mark.compiler
def test_a_wrong_gradient_is_found(chapters, monkeypatch):
    """A pair whose gradient is the right one halved and negated: the curves part, and the exit code says so."""

    class Wrong(LayerNormLinear):
        def forward(self, x):
            y = super().forward(x)
            return y.detach() * 1.5 - y * 0.5

    monkeypatch.setattr(demo, "LayerNormLinear", Wrong)
    console = text_console()
    assert demo.run(console, ["--steps", "20"], chapters) == 1
    assert "the curves part: a gradient is wrong" in printed(console)


@pytest.mark.compiler
def test_demo_stops_at_the_time_limit(chapters):
    console = text_console()
    assert demo.demonstrate(console, small(steps=1000, seconds=0.0), chapters) == 0
    assert "Trained 1 steps" in printed(console)
    assert "stopped early at the time limit (1000 were planned)" in printed(console)


def test_no_chapters(tmp_path):
    with pytest.raises(
        BadUse, match=r"trained on is the workbook's chapters, and there is no Markdown file under .*nowhere"
    ):
        demo.run(text_console(), [], chapters=tmp_path / "nowhere")


def test_too_little_text(tmp_path):
    (tmp_path / "short.md").write_text("short")
    with pytest.raises(BadUse, match=r"needs more than 33 characters of text, .* holds 5"):
        demo.run(text_console(), [], chapters=tmp_path)


def test_plot_shows_both_curves():
    falling = [4.0 - step / 50 for step in range(100)]
    rows = loss_curves.plot({"ours": falling, "theirs": [4.0] * 100}, width=40, height=5)
    assert "o ours" in rows[0] and "x theirs" in rows[0]
    assert "4.00" in rows[1] and "xxxx" in rows[1] and "*" in rows[1]
    assert "2.0" in rows[5] and rows[5].rstrip().endswith("o")
    assert "step 100" in rows[6] and max(map(len, rows)) < 80


def test_plot_of_nan_and_constant_losses():
    rows = loss_curves.plot({"ours": [math.nan] * 4, "theirs": [1.0] * 4})
    assert not any("o" in row for row in rows[1:-1]) and any("xxxx" in row for row in rows)


def test_a_loss_of_nan_is_wrong():
    trainees = {name: stand_in(Trainee, losses=[loss]) for name, loss in ((OURS, math.nan), (PLAIN, 1.0))}
    assert not demo.verdict(trainees, small(), 0.0)[1]


@pytest.mark.compiler
def test_demo_simple(capsys, monkeypatch, solution, public_ops):
    """Its library is the one whose loading the tests of the public ops try."""
    monkeypatch.setattr("max.experimental.torch.CustomOpLibrary", {solution.path: public_ops}.__getitem__)
    assert cli.main(["p22", "--demo-simple"]) == 0
    text = capsys.readouterr().out
    assert text.count("✅") == 6 and "❌" not in text
    assert "forward " in text and "backward " in text and " us" in text


def test_compare_finds_a_wrong_tensor():
    console = text_console()
    right = torch.arange(4.0)
    assert demo_simple.compare(console, {"a": right, "b": right}, {"a": right, "b": right}) == 0
    assert demo_simple.compare(console, {"a": right, "b": right + 0.1}, {"a": right, "b": right}) == 1
    assert demo_simple.compare(console, {"a": right * torch.nan}, {"a": right}) == 1
    assert "b              differs from autograd by 1.00e-01 ❌" in printed(console)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--width", "30", "--heads", "4"], "--width 30: must be divisible by --heads 4"),
        (["--context", "9000"], "an excerpt needs more than 9001 characters"),
    ],
)
def test_bad_use_names_the_flag(chapters, arguments, message):
    with pytest.raises(BadUse, match=re.escape(message)):
        demo.run(text_console(), arguments, chapters)


def test_the_command_line_hands_the_rest_to_the_demonstration(command_line):
    assert "--batch" in command_line("p22", "--demo", "--help").out
    refused = command_line("p22", "--demo", "--steps", "0")
    assert refused.code == 2 and refused.err == "error: --steps 0: must be at least 1\n"
