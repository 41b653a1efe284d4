"""GPT-2's sizes with LayerNormLinear, with the attention, in plain PyTorch, and in plain PyTorch moved: who starts how, and what parts."""

import csv
import dataclasses
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from book.measure import gpt2_training, side_by_side
from book.measure.character_model import CharacterModel, plain_pair
from book.measure.gpt2_training import BOTH, CONTROL, GPT2, models
from book.measure.side_by_side import OURS, PLAIN
from harness import nn as layers
from harness.nn.layers import LayerNormLinear

TEXT = "A kernel is written once and run in three places; its gradient is checked in all of them.\n" * 3
SMALL = {"layers": 2, "width": 32, "heads": 2, "context": 16, "batch": 4}


@pytest.fixture
def chapters(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.md").write_text(TEXT)
    return tmp_path / "src"


def gpt2(**changes):
    """GPT-2 at sizes that a test can train."""
    return dataclasses.replace(GPT2, **(SMALL | changes))


@pytest.fixture
def trained(chapters, tmp_path, monkeypatch):
    """Trains at small sizes; exit code and rows."""

    def call(*arguments: object):
        sizes = [word for name, size in SMALL.items() for word in (f"--{name}", str(size))]
        file = tmp_path / "steps.csv"
        monkeypatch.setattr(sys, "argv", ["gpt2_training", str(file), *sizes, *map(str, arguments)])
        code = gpt2_training.main(chapters)
        return code, list(csv.DictReader(file.open()))

    return call


def test_the_defaults_are_the_sizes_of_gpt2_small():
    """12 layers of width 768 with 12 heads hold 85.1 million parameters beside the embeddings."""
    default = GPT2
    with torch.device("meta"):
        model = CharacterModel(256, default.context, default.width, default.heads, default.layers, plain_pair)
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    width = 768
    assert blocks == 12 * (12 * width**2 + 13 * width) == 85_054_464
    assert (default.context, default.batch, default.steps) == (1024, 8, 200)


def test_all_start_alike_but_the_moved_one():
    states = {name: one.state_dict() for name, one in models(gpt2(), False).items()}
    moved = 0
    for name, value in states[PLAIN].items():
        assert torch.equal(value, states[OURS][name])
        assert torch.allclose(value, states[CONTROL][name], rtol=1.2e-7, atol=0)
        moved += int((value != states[CONTROL][name]).sum())
    assert moved > 1000


def test_ours_replaces_every_layernorm_and_linear():
    model = side_by_side.make_model(gpt2(layers=3), LayerNormLinear)
    assert sum(isinstance(module, LayerNormLinear) for module in model.modules()) == 2 * 3 + 1
    inside = {
        id(child)
        for module in model.modules()
        if isinstance(module, LayerNormLinear)
        for child in module.children()
    }
    assert all(id(module) in inside for module in model.modules() if isinstance(module, nn.LayerNorm))


def test_models_start_equal_and_leave_the_random_state_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    ours, theirs = (side_by_side.make_model(gpt2(), pair) for pair in (LayerNormLinear, plain_pair))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in ours.state_dict().items())


def test_the_model_is_causal():
    model = CharacterModel(10, 8, 16, 2, 1, plain_pair).eval()
    characters = torch.randint(10, (1, 8))
    changed = characters.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 10
    before, after = model(characters), model(changed)
    assert torch.allclose(before[0, :5], after[0, :5], atol=1e-6)
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_batches_are_excerpts_and_their_next_bytes(chapters):
    given, wanted = next(side_by_side.batches(chapters, gpt2()))
    assert given.shape == wanted.shape == (4, 16) and given.dtype == torch.int64
    for row, following in zip(given, wanted, strict=True):
        assert torch.equal(row[1:], following[:-1])
        assert bytes(row.tolist()).decode() in TEXT
    again, _ = next(side_by_side.batches(chapters, gpt2()))
    assert torch.equal(given, again)


def test_curves_agree_and_the_rows_hold_every_step(trained, monkeypatch):
    attended = []

    def attention(*tensors, **options):
        attended.append(tensors[0].shape)
        return layers.attention(*tensors, **options)

    monkeypatch.setattr(gpt2_training, "attention", attention)
    code, rows = trained("--steps", 30, "--attention")
    assert code == 0 and len(rows) == 120
    losses = {(row["model"], int(row["step"])): float(row["loss"]) for row in rows}
    for step in range(30):
        for name in (OURS, BOTH):
            assert losses[name, step] == pytest.approx(losses[PLAIN, step], rel=1e-4)
    assert len(attended) >= 30 * SMALL["layers"], "one model attends by the layer at every step"
    assert losses[PLAIN, 29] < losses[PLAIN, 0] - 0.3, "nothing was learnt"
    assert all(float(row["step_us"]) > 0 and row["precision"] == "float32" for row in rows)


def test_a_wrong_gradient_is_found_by_the_control(trained, monkeypatch):
    """A layer that is right forward and whose gradient has the wrong sign."""

    class Wrong(LayerNormLinear):
        def forward(self, x):
            y = super().forward(x)
            return 2 * y.detach() - y

    monkeypatch.setattr(gpt2_training, "LayerNormLinear", Wrong)
    assert trained("--steps", 20)[0] == 1


def test_a_wrong_attention_is_found(trained, monkeypatch):
    """Whatever LayerNormLinear does."""

    def wrong(query, key, value, is_causal):
        right = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
        return 2 * right.detach() - right

    monkeypatch.setattr(gpt2_training, "attention", wrong)
    assert trained("--steps", 20, "--attention")[0] == 1


def test_curves_are_compared_by_windows_and_with_the_control():
    flat = [2.0] * 25
    assert side_by_side.windows([1.0] * 10 + [3.0] * 10 + [5.0]) == [1.0, 3.0, 5.0]
    assert side_by_side.furthest(flat, flat) == 0
    late = [2.0] * 20 + [2.2] * 5
    assert side_by_side.furthest(late, flat) == pytest.approx(0.1)
    assert side_by_side.furthest([*flat[:-1], float("nan")], flat) == float("inf")
    assert gpt2_training.tolerance(0.01, torch.bfloat16) == pytest.approx(0.04 + 2**-10)
    assert gpt2_training.tolerance(0.0, torch.float32) < 1e-6
    assert math.isnan(gpt2_training.tolerance(math.inf, torch.float32)), (
        "training that ends in NaN shows nothing"
    )
