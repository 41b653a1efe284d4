"""The demonstrations run, say what they found by their exit code, and explain themselves where they cannot run."""

import csv
import dataclasses
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typed import printed, stand_in, text_console

from harness import cli
from harness.bench import loss_curves
from harness.errors import BadUse
from harness.nn.layers import LayerNormLinear
from harness.puzzles.p22 import demo, demo_simple, training
from harness.puzzles.p22.demo_model import CharacterModel, plain_pair
from harness.puzzles.p22.training import BOTH, CONTROL, OURS, PLAIN, Trainee

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
    """The small preset with a few things changed."""
    return dataclasses.replace(demo.PRESETS["small"], **changes)


def gpt2(**changes):
    """The gpt2 preset at sizes that a test can train."""
    sizes = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 4}
    return dataclasses.replace(demo.PRESETS["gpt2"], **(sizes | changes))


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
    trainees = training.make_trainees(options, text.vocabulary)
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

    monkeypatch.setattr(training, "LayerNormLinear", Wrong)
    console = text_console()
    assert demo.run(console, ["--steps", "20"], chapters) == 1
    assert "the curves part: a gradient is wrong" in printed(console)


@pytest.mark.compiler
def test_demo_stops_at_the_time_limit(chapters):
    console = text_console()
    assert demo.demonstrate(console, small(steps=1000, seconds=0.0), None, chapters) == 0
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
    assert not demo.verdict_by_tail(trainees, small(), 0.0)[1]


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


# ---- The gpt2 preset ----------------------------------------------------------------------------------------


SMALL = ["gpt2", "--layers", "2", "--width", "32", "--heads", "2", "--context", "16", "--batch", "4"]


def demonstrate(chapters, *arguments):
    """Runs `--demo` with the gpt2 preset at small sizes; exit code and output."""
    console = text_console()
    code = demo.run(console, [*SMALL, *map(str, arguments)], chapters)
    return code, printed(console)


def test_the_defaults_are_the_sizes_of_gpt2_small():
    """12 layers of width 768 with 12 heads hold 85.1 million parameters beside the embeddings."""
    default = demo.PRESETS["gpt2"]
    with torch.device("meta"):
        model = CharacterModel(256, default.context, default.width, default.heads, default.layers, plain_pair)
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    width = 768
    assert blocks == 12 * (12 * width**2 + 13 * width) == 85_054_464
    assert (default.context, default.batch, default.steps) == (1024, 8, 200)


def test_all_start_alike_but_the_moved_one():
    models = {name: one.model.state_dict() for name, one in training.make_trainees(gpt2(), 256).items()}
    moved = 0
    for name, value in models[PLAIN].items():
        assert torch.equal(value, models[OURS][name])
        assert torch.allclose(value, models[CONTROL][name], rtol=1.2e-7, atol=0)
        moved += int((value != models[CONTROL][name]).sum())
    assert moved > 1000


def test_ours_replaces_every_layernorm_and_linear():
    model = training.make_model(gpt2(layers=3), 256, LayerNormLinear)
    assert sum(isinstance(module, LayerNormLinear) for module in model.modules()) == 2 * 3 + 1
    inside = {
        id(child)
        for module in model.modules()
        if isinstance(module, LayerNormLinear)
        for child in module.children()
    }
    assert all(id(module) in inside for module in model.modules() if isinstance(module, nn.LayerNorm))


def test_batches_are_excerpts_and_their_next_bytes(chapters):
    text = training.read_text(chapters, gpt2()).tokens
    assert bytes(text.tolist()).decode() == TEXT
    given, wanted = next(training.batches(text, gpt2()))
    assert given.shape == wanted.shape == (4, 16) and given.dtype == torch.int64
    for row, following in zip(given, wanted, strict=True):
        assert torch.equal(row[1:], following[:-1])
        assert bytes(row.tolist()).decode() in TEXT
    again, _ = next(training.batches(text, gpt2()))
    assert torch.equal(given, again)


@pytest.mark.compiler
@pytest.mark.usefixtures("attention_graphs")
def test_curves_agree_and_the_csv_holds_every_step(chapters, tmp_path):
    target = tmp_path / "steps.csv"
    code, out = demonstrate(chapters, "--steps", 30, "--csv", target, "--attention")
    assert code == 0 and "the curves agree" in out and "step time, LayerNormLinear / plain PyTorch" in out
    assert "step time, LayerNormLinear with attention / plain PyTorch" in out and "tokens/s" in out
    rows = list(csv.DictReader(target.open()))
    assert list(rows[0]) == list(demo.FIELDS) and len(rows) == 120
    losses = {(row["model"], int(row["step"])): float(row["loss"]) for row in rows}
    for step in range(30):
        for name in (OURS, BOTH):
            assert losses[name, step] == pytest.approx(losses[PLAIN, step], rel=1e-4)
    assert any(losses[BOTH, step] != losses[OURS, step] for step in range(30)), "the same model twice"
    assert losses[PLAIN, 29] < losses[PLAIN, 0] - 0.3, "nothing was learnt"
    assert all(float(row["step_us"]) > 0 and row["precision"] == "float32" for row in rows)


@pytest.mark.compiler
def test_a_wrong_gradient_is_found_by_the_control(chapters, monkeypatch):
    """A layer that is right forward and whose gradient has the wrong sign."""

    class Wrong(LayerNormLinear):
        def forward(self, x):
            y = super().forward(x)
            return 2 * y.detach() - y

    monkeypatch.setattr(training, "LayerNormLinear", Wrong)
    code, out = demonstrate(chapters, "--steps", 20)
    assert code == 1 and "the curves part: a gradient is wrong" in out


@pytest.mark.compiler
def test_a_wrong_attention_is_found(chapters, monkeypatch):
    """By both presets, whatever LayerNormLinear does."""

    def wrong(query, key, value, is_causal):
        right = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return 2 * right.detach() - right

    monkeypatch.setattr(training, "attention", wrong)
    code, out = demonstrate(chapters, "--steps", 20, "--attention")
    assert code == 1 and "the curves part: a gradient is wrong" in out
    console = text_console()
    assert demo.run(console, ["--steps", "20", "--attention"], chapters) == 1
    assert "steps with attention)" in printed(console)


def test_curves_are_compared_by_windows_and_with_the_control():
    flat = [2.0] * 25
    assert loss_curves.windows([1.0] * 10 + [3.0] * 10 + [5.0]) == [1.0, 3.0, 5.0]
    assert loss_curves.furthest(flat, flat) == 0
    late = [2.0] * 20 + [2.2] * 5
    assert loss_curves.furthest(late, flat) == pytest.approx(0.1)
    assert loss_curves.furthest([*flat[:-1], float("nan")], flat) == float("inf")
    assert demo.tolerance(0.01, torch.bfloat16) == pytest.approx(0.04 + 2**-10)
    assert demo.tolerance(0.0, torch.float32) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--width", "30", "--heads", "4"], "--width 30: must be divisible by --heads 4"),
        (["--csv", "/nonexistent/steps.csv"], "--csv /nonexistent/steps.csv: No such file"),
        (["--precision", "int8"], "invalid choice: 'int8'"),
        (["--context", "9000"], "an excerpt needs more than 9001 bytes"),
    ],
)
def test_bad_use_names_the_flag(chapters, arguments, message):
    base = ["gpt2"] if "--context" in arguments or "--width" in arguments else SMALL
    with pytest.raises(BadUse, match=re.escape(message)):
        demo.run(text_console(), [*base, *arguments], chapters)


def test_the_command_line_hands_the_rest_to_the_demonstration(command_line):
    assert "--precision" in command_line("p22", "--demo", "--help").out
    refused = command_line("p22", "--demo", "gpt2", "--steps", "0")
    assert refused.code == 2 and refused.err == "error: --steps 0: must be at least 1\n"
    assert command_line("p22", "--demo", "gpt3").code == 2


@pytest.mark.compiler
def test_an_interrupt_keeps_the_steps(chapters, tmp_path, monkeypatch):
    target = tmp_path / "steps.csv"
    original = training.one_step

    def interrupted(trainee, batch, number, *further):
        if number == 3:
            raise KeyboardInterrupt
        original(trainee, batch, number, *further)

    monkeypatch.setattr(training, "one_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demonstrate(chapters, "--steps", 9, "--csv", target)
    assert len(list(csv.DictReader(target.open()))) == 9
