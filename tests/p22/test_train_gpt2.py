"""GPT-2-sized training at small sizes: the same start, the same batches, curves that agree, and one that must not."""

import csv

import pytest
import torch
from torch import nn

from harness.nn.layers import LayerNormLinear
from harness.puzzles.p22 import train_gpt2
from harness.puzzles.p22.train_gpt2 import CONTROL, OURS, PLAIN, Options

SMALL = ["--layers", "2", "--width", "32", "--heads", "2", "--context", "16", "--batch", "4"]
TEXT = "A kernel is written once and run in three places; its gradient is checked in all of them.\n" * 4


@pytest.fixture
def chapters(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "one.md").write_text(TEXT)
    return folder


def small(**changes):
    """Options of a small model on the CPU."""
    sizes = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 4, "precision": "float32"}
    return Options(**(sizes | changes))


def test_the_defaults_are_the_sizes_of_gpt2_small():
    """12 layers of width 768 with 12 heads hold 85.1 million parameters beside the embeddings."""
    default = Options()
    with torch.device("meta"):
        model = train_gpt2.CharacterModel(
            256, default.context, default.width, default.heads, default.layers, train_gpt2.plain_pair
        )
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    width = 768
    assert blocks == 12 * (12 * width**2 + 13 * width) == 85_054_464
    assert (default.context, default.batch, default.steps) == (1024, 8, 200)


def test_all_start_alike_but_the_moved_one():
    models = {name: one.model.state_dict() for name, one in train_gpt2.make_trainees(small()).items()}
    moved = 0
    for name, value in models[PLAIN].items():
        assert torch.equal(value, models[OURS][name])
        assert torch.allclose(value, models[CONTROL][name], rtol=1.2e-7, atol=0)
        moved += int((value != models[CONTROL][name]).sum())
    assert moved > 1000


def test_ours_replaces_every_layernorm_and_linear():
    model = train_gpt2.make_model(small(layers=3), LayerNormLinear)
    assert sum(isinstance(module, LayerNormLinear) for module in model.modules()) == 2 * 3 + 1
    inside = {
        id(child)
        for module in model.modules()
        if isinstance(module, LayerNormLinear)
        for child in module.children()
    }
    assert all(id(module) in inside for module in model.modules() if isinstance(module, nn.LayerNorm))


def test_batches_are_excerpts_and_their_next_bytes(chapters):
    text = train_gpt2.read_text(chapters, 16)
    assert bytes(text.tolist()).decode() == TEXT
    given, wanted = next(train_gpt2.batches(text, small()))
    assert given.shape == wanted.shape == (4, 16) and given.dtype == torch.int64
    for row, following in zip(given, wanted, strict=True):
        assert torch.equal(row[1:], following[:-1])
        assert bytes(row.tolist()).decode() in TEXT
    again, _ = next(train_gpt2.batches(text, small()))
    assert torch.equal(given, again)


def test_curves_agree_and_the_csv_holds_every_step(chapters, tmp_path, capsys):
    target = tmp_path / "steps.csv"
    assert train_gpt2.main([*SMALL, "--steps", "30", "--csv", str(target)], chapters) == 0
    out = capsys.readouterr().out
    assert "the curves agree" in out and "step time, LayerNormLinear / plain PyTorch" in out
    rows = list(csv.DictReader(target.open()))
    assert list(rows[0]) == list(train_gpt2.FIELDS) and len(rows) == 90
    losses = {(row["model"], int(row["step"])): float(row["loss"]) for row in rows}
    for step in range(30):
        assert losses[OURS, step] == pytest.approx(losses[PLAIN, step], rel=1e-4)
    assert losses[PLAIN, 29] < losses[PLAIN, 0] - 0.3, "nothing was learnt"
    assert all(float(row["step_us"]) > 0 and row["precision"] == "float32" for row in rows)


def test_a_wrong_gradient_is_found(chapters, monkeypatch, capsys):
    """A layer that is right forward and whose gradient has the wrong sign."""

    class Wrong(LayerNormLinear):
        def forward(self, x):
            y = super().forward(x)
            return 2 * y.detach() - y

    monkeypatch.setattr(train_gpt2, "LayerNormLinear", Wrong)
    assert train_gpt2.main([*SMALL, "--steps", "20"], chapters) == 1
    assert "the curves part: a gradient is wrong" in capsys.readouterr().out


def test_curves_are_compared_by_windows_and_with_the_control():
    flat = [2.0] * 25
    assert train_gpt2.windows([1.0] * 10 + [3.0] * 10 + [5.0]) == [1.0, 3.0, 5.0]
    assert train_gpt2.furthest(flat, flat) == 0
    late = [2.0] * 20 + [2.2] * 5
    assert train_gpt2.furthest(late, flat) == pytest.approx(0.1)
    assert train_gpt2.furthest([*flat[:-1], float("nan")], flat) == float("inf")
    assert train_gpt2.tolerance(0.01, torch.bfloat16) == pytest.approx(0.04 + 2**-10)
    assert train_gpt2.tolerance(0.0, torch.float32) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--width", "30", "--heads", "4"], "--width 30: must be divisible by --heads 4"),
        (["--csv", "/nonexistent/steps.csv"], "--csv /nonexistent/steps.csv: No such file"),
        (["--precision", "int8"], "invalid choice: 'int8'"),
        (["--context", "9000"], "train_gpt2 needs more than 9001 bytes"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(chapters, capsys, arguments, message):
    base = [] if "--context" in arguments or "--width" in arguments else SMALL
    assert train_gpt2.main([*base, *arguments], chapters) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err


def test_an_interrupt_keeps_the_steps_and_gives_130(chapters, tmp_path, monkeypatch, capsys):
    target = tmp_path / "steps.csv"
    original = train_gpt2.one_step

    def interrupted(trainee, batch, number, *further):
        if number == 3:
            raise KeyboardInterrupt
        original(trainee, batch, number, *further)

    monkeypatch.setattr(train_gpt2, "one_step", interrupted)
    assert train_gpt2.main([*SMALL, "--steps", "9", "--csv", str(target)], chapters) == 130
    assert len(list(csv.DictReader(target.open()))) == 9
    assert "interrupted" in capsys.readouterr().err
