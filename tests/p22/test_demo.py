"""The demonstrations run, say what they found by their exit code, and explain themselves where they cannot run."""

import io
import math

import pytest
import torch
from rich.console import Console

from harness import cli
from harness.errors import BadUse
from harness.nn.layers import LayerNormLinear
from harness.puzzles.p22 import demo
from harness.puzzles.p22.demo_model import CharacterModel, plain_pair

TEXT = "A kernel is written once and run in three places; its gradient is checked in all of them.\n" * 3


@pytest.fixture
def chapters(tmp_path):
    folder = tmp_path / "src" / "puzzle_22"
    folder.mkdir(parents=True)
    (folder / "one.md").write_text(TEXT)
    return tmp_path / "src"


def plain_console():
    return Console(file=io.StringIO(), width=200, highlight=False, emoji=False)


def test_demo_trains_both_models_alike(chapters):
    console = plain_console()
    assert demo.run(console, chapters=chapters, steps=6) == 0
    text = console.file.getvalue()
    assert f"{len(TEXT):,} characters" in text and "Trained 6 steps" in text
    assert "o LayerNormLinear   x plain PyTorch" in text and "final difference" in text
    assert "the curves agree" in text and "\x1b" not in text


def test_losses_fall_and_agree_step_by_step(chapters):
    """Independent of the report: the same model, batches and optimizer, with either pair."""
    characters = torch.tensor([ord(character) % 64 for character in TEXT])
    models = {"ours": demo.make_model(64, LayerNormLinear), "torch": demo.make_model(64, plain_pair)}
    curves = demo.train(plain_console(), models, characters, 8, math.inf)
    assert curves["ours"] == pytest.approx(curves["torch"], rel=1e-4)
    assert curves["ours"][-1] < curves["ours"][0] - 0.5


def test_models_start_equal_and_leave_the_random_state_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    ours, theirs = demo.make_model(20, LayerNormLinear), demo.make_model(20, plain_pair)
    assert torch.equal(torch.get_rng_state(), state)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())
    assert sum(isinstance(module, LayerNormLinear) for module in ours.modules()) == 2 * demo.BLOCKS + 1


def test_the_model_is_causal():
    model = CharacterModel(10, 8, 16, 2, 1, plain_pair).eval()
    characters = torch.randint(10, (1, 8))
    changed = characters.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 10
    before, after = model(characters), model(changed)
    assert torch.allclose(before[0, :5], after[0, :5], atol=1e-6) and not torch.allclose(
        before[0, 5:], after[0, 5:]
    )


def test_a_wrong_gradient_is_found(chapters, monkeypatch):
    """A pair whose gradient is the right one halved and negated: the curves part, and the exit code says so."""

    class Wrong(LayerNormLinear):
        def forward(self, x):
            y = super().forward(x)
            return y.detach() * 1.5 - y * 0.5

    monkeypatch.setattr(demo, "LayerNormLinear", Wrong)
    console = plain_console()
    assert demo.run(console, chapters=chapters, steps=20) == 1
    assert "the curves part: a gradient is wrong" in console.file.getvalue()


def test_demo_stops_at_the_time_limit(chapters):
    console = plain_console()
    assert demo.run(console, chapters=chapters, steps=1000, limit=0) == 0
    assert "Trained 1 steps" in console.file.getvalue()
    assert "stopped early at the time limit (1000 were planned)" in console.file.getvalue()


def test_no_chapters(tmp_path):
    with pytest.raises(BadUse, match=r"there is no Markdown file under .*: run it in a checkout .* no book"):
        demo.run(plain_console(), chapters=tmp_path / "nowhere")


def test_too_little_text(tmp_path):
    (tmp_path / "short.md").write_text("short")
    with pytest.raises(BadUse, match=r"needs more than 33 characters of text, .* holds 5"):
        demo.run(plain_console(), chapters=tmp_path)


def test_plot_shows_both_curves():
    falling = [4.0 - step / 50 for step in range(100)]
    rows = demo.plot({"ours": falling, "theirs": [4.0] * 100}, width=40, height=5)
    assert "o ours" in rows[0] and "x theirs" in rows[0]
    assert "4.00" in rows[1] and "xxxx" in rows[1] and "*" in rows[1]
    assert "2.0" in rows[5] and rows[5].rstrip().endswith("o")
    assert "step 100" in rows[6] and max(map(len, rows)) < 80


def test_plot_of_nan_and_constant_losses():
    rows = demo.plot({"ours": [math.nan] * 4, "theirs": [1.0] * 4})
    assert not any("o" in row for row in rows[1:-1]) and any("xxxx" in row for row in rows)


def test_a_loss_of_nan_is_wrong():
    console = plain_console()
    assert demo.report(console, {"ours": [math.nan], "theirs": [1.0]}, 1, 0.0) == 1


def test_demo_simple(capsys):
    assert cli.main(["p22", "--demo-simple"]) == 0
    text = capsys.readouterr().out
    assert text.count("✅") == 6 and "❌" not in text
    assert "forward " in text and "backward " in text and " us" in text


def test_compare_finds_a_wrong_tensor():
    console = plain_console()
    right = torch.arange(4.0)
    assert demo.compare(console, {"a": right, "b": right}, {"a": right, "b": right}) == 0
    assert demo.compare(console, {"a": right, "b": right + 0.1}, {"a": right, "b": right}) == 1
    assert demo.compare(console, {"a": right * torch.nan}, {"a": right}) == 1
    assert "b              differs from autograd by 1.00e-01 ❌" in console.file.getvalue()
