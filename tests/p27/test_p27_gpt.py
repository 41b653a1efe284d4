"""GPT-2's manual training step: its values match autograd, AdamW matches PyTorch, runs learn and are reproducible."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from book.measure import step_by_hand
from harness.errors import BadUse
from harness.puzzles.p27 import compare_gpt, step_parts, train, train_gpt
from harness.puzzles.p27.gpt import SIZES, State
from harness.puzzles.p27.gpt_autograd import ByAutograd
from harness.puzzles.p27.gpt_step import ByHand, Graphed, Pass

CPU = torch.device("cpu")
SMALL = replace(SIZES["tiny"], layers=2, width=32, vocabulary=256, context=24, batch=3)
ODD = replace(SIZES["tiny"], layers=1, width=20, heads=5, vocabulary=37, context=7, batch=2)


def read_excerpts(text, count: int) -> list[torch.Tensor]:
    """Return the first excerpts of SMALL."""
    return [each for _, each in zip(range(count), train_gpt.excerpts(SMALL, 5, CPU, text), strict=False)]


@pytest.mark.compiles
@pytest.mark.parametrize("sizes", [SMALL, ODD])
def test_step_values_match_autograd(sizes):
    values = compare_gpt.compare(sizes, 3, CPU)
    assert compare_gpt.list_wrong(values) == []
    names = {value.name for value in values if isinstance(value, compare_gpt.Compared)}
    assert names >= {
        "block0.join, its output",
        "the output",
        "the gradient of token",
        "the gradient of position",
    }
    missing = {value for value in values if isinstance(value, str)}
    assert missing <= {name for i in range(2) for name in list_fused_values(i)}


def list_fused_values(i: int) -> set[str]:
    """Return values that a block does not compute separately: LayerNorm outputs, fused with the products, and the logits."""
    inside = {f"block{i}.{part}" for part in ("qkv", "widen")}
    outputs = {f"block{i}.{norm}, its output" for norm in ("ln_1", "ln_2")}
    return outputs | {f"the gradient of what {part} is given" for part in (*inside, "loss")}


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("part", "wrong", "first"),
    [
        (
            "gelu_backward",
            lambda x, dy: (step_parts.gelu(x), dy),
            "the gradient of what block1.gelu is given",
        ),
        (
            "layernorm_backward",
            lambda dy, x, statistics, weight: (dy, (dy * x).sum(0), dy.sum(0)),
            "the gradient of ln_f.weight",
        ),
        ("token_gradient", lambda table, of_head, dx, tokens: table.copy_(of_head), "the gradient of token"),
        ("add_with_sums", lambda stream, branch: stream.sum(0), "the gradient of block1.join.bias"),
        ("gelu", lambda x: x, "block0.gelu, its output"),
    ],
)
def test_wrong_part_is_the_first_failure(part, wrong, first, monkeypatch):
    monkeypatch.setattr(step_parts, part, wrong)
    values = compare_gpt.compare(SMALL, 3, CPU)
    assert compare_gpt.list_wrong(values)[0] == first
    assert compare_gpt.format_lines(values)[-1].endswith(f"the first is {first}")


@pytest.mark.parametrize("size", [1e-4, 10.0])
def test_adamw_with_clipping_matches_pytorch(size):
    """Two steps, with gradients below the limit or clipped."""
    state = State.begin(ODD, 1, CPU)
    generator = torch.Generator().manual_seed(2)
    leaves = {name: t.clone().requires_grad_() for name, t in state.parameters.items()}
    groups = [[t for t in leaves.values() if (t.dim() > 1) is matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": 0.1 * (1 - i)} for i, group in enumerate(groups)],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    by_hand = ByHand(state)
    for number in (1, 2):
        for name, leaf in leaves.items():
            leaf.grad = gradient = size * torch.randn(leaf.shape, generator=generator)
            by_hand.grads[name].copy_(gradient)
        torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        optimizer.step()
        by_hand.set_inputs(number, 0.01)
        by_hand.update()
    for name, leaf in leaves.items():
        torch.testing.assert_close(by_hand.p[name], leaf.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.compiles
def test_manual_step_trains_like_autograd_and_is_reproducible(text):
    runs = []
    for kind in (ByHand, ByHand, ByAutograd):
        trained = kind(State.begin(SMALL, 7, CPU))
        losses = [train_gpt.run_step(trained, excerpt, 3e-3) for excerpt in read_excerpts(text, 25)]
        runs.append((losses, trained.state.master))
    assert runs[0][0][0] > 5.4 and runs[0][0][-1] < 4.2  # log 256 is 5.55
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] == pytest.approx(runs[2][0], rel=2e-4)


def test_token_table_gradient_is_reproducible():
    """Few tokens occur often, and there are enough for several CPU threads."""
    dx, tokens, of_head = torch.randn(2048, 96), torch.randint(9, (2048,)), torch.randn(9, 96)
    table = torch.empty(9, 96)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        all_of = [step_parts.token_gradient(table, of_head.clone(), dx, tokens).clone() for _ in range(20)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, all_of[0]) for one in all_of)
    hot = torch.nn.functional.one_hot(tokens).double()
    torch.testing.assert_close(table.double(), of_head + hot.T @ dx.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.compiles
def test_gradients_do_not_depend_on_initial_memory():
    sizes = replace(ODD, layers=3)
    trained = ByHand(State.begin(sizes, 1, CPU))
    excerpt = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context + 1))
    alone = Pass(sizes, trained.p)
    alone.forward(excerpt[:, :-1], excerpt[:, 1:])
    grads = alone.backward()
    for _ in range(2):
        trained.gradients.fill_(torch.nan)
        trained.compute_gradients(excerpt)
        for name, gradient in grads.items():
            assert torch.equal(trained.grads[name], gradient), name
        assert len(trained.gaps) > 3 and not any(gap.any() for gap in trained.gaps)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor outside the given memories."""

    def __init__(self, *known: torch.Tensor):
        super().__init__()
        self.known = {each.untyped_storage().data_ptr() for each in known}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.known:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.compiles
def test_logits_are_not_stored(text):
    trained = ByHand(State.begin(SMALL, 7, CPU))
    with Largest(trained.working, trained.gradients) as largest:
        trained.compute_gradients(read_excerpts(text, 1)[0])
    tokens = SMALL.batch * SMALL.context
    assert largest.bytes == 4 * tokens * 4 * SMALL.width < 4 * tokens * SMALL.vocabulary


@pytest.mark.compiles
def test_manual_step_cannot_use_autograd(text, monkeypatch):
    def call_autograd(x, dy):
        leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            return x, torch.autograd.grad(step_parts.gelu(leaf), leaf, dy)[0]

    monkeypatch.setattr(step_parts, "gelu_backward", call_autograd)
    with pytest.raises(RuntimeError, match="autograd is called"):
        train_gpt.run_step(ByHand(State.begin(SMALL, 7, CPU)), read_excerpts(text, 1)[0], 1e-3)


def test_state_is_contiguous_and_decays_only_matrices():
    state = State.begin(ODD, 1, CPU)
    places = sorted((at, shape.numel(), len(shape)) for at, shape in state.pieces.places.values())
    assert all(at % 16 == 0 for at, *_ in places)
    assert all(at + size <= after for (at, size, _), (after, *_) in pairwise(places))
    assert {rank for at, _, rank in places if at < state.pieces.decayed} == {2}
    assert {rank for at, _, rank in places if at >= state.pieces.decayed} == {1}


# ---- Commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Make the commands' tiny model smaller."""
    monkeypatch.setitem(SIZES, "tiny", SMALL)


@pytest.mark.compiles
def test_compare_prints_all_values_of_a_size(command_line, small):
    finished = command_line("p27", "--compare", "--size", "tiny", "--device", "cpu")
    assert finished.code == 0 and finished.lines[-1] == "✅ every value is autograd's"
    said = {line.split("  ")[0]: line.split()[-1] for line in finished.lines}
    assert said["the gradient of token"] == said["block1.attention, its output"] == "ok"


@pytest.mark.compiles
def test_compare_exits_with_1_if_a_value_is_wrong(command_line, small, monkeypatch):
    monkeypatch.setattr(step_parts, "gelu", lambda x: x * torch.nan)
    finished = command_line("p27", "--compare", "--size", "tiny", "--device", "cpu")
    assert finished.code == 1 and finished.lines[-1].endswith("the first is block0.gelu, its output")


@pytest.mark.compiles
@pytest.mark.parametrize("by", ["hand", "autograd"])
def test_size_trains_plots_and_samples(by, command_line, small):
    finished = command_line("p27", "--train", "--size", "tiny", "--device", "cpu", "--steps", "2", "--by", by)
    assert finished.code == 0, finished.err
    assert finished.lines[0].startswith("2 blocks of 32 channels, 3")
    assert finished.lines[0].endswith("3 x 24 bytes of the book at every step, on cpu")
    assert f"o by {by}" in finished.lines[1]
    assert finished.lines[finished.lines.index("it writes:") + 1].startswith("   The gradient ")


@pytest.mark.compiles
def test_training_stops_at_the_time_limit(text):
    flags = train.parser().parse_args(
        ["--size", "tiny", "--device", "cpu", "--by", "hand", "--seconds", "1e-9"]
    )
    losses = train_gpt.train(Console(quiet=True), flags, text, 1, SMALL)
    assert len(losses) == 1


@pytest.mark.compiles
def test_nonfinite_loss_stops_training(text, monkeypatch):
    flags = train.parser().parse_args(["--size", "tiny", "--device", "cpu", "--by", "hand"])
    monkeypatch.setattr(step_parts, "gelu", lambda x: x * torch.nan)
    with pytest.raises(BadUse, match="the loss of step 1 is nan"):
        train_gpt.train(Console(quiet=True), flags, text, 1, SMALL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--train", "--by", "autograd"), "--by: only with --size"),
        (("--compare", "--device", "cpu"), "--device: only with --size"),
        (("--train", "--size", "tiny", "--device", "gpu"), "--device gpu: torch sees no GPU here"),
        (("--train", "--size", "tiny", "--steps", "0"), "--steps 0: must be at least 1"),
    ],
)
def test_unsupported_options_of_a_size_are_reported(arguments, words, command_line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finished = command_line("p27", *arguments)
    assert finished.code == 2 and words in finished.err


def test_floor_is_six_operations_per_weight_and_token():
    state = State.begin(SMALL, 1, CPU)
    multiplied = [t.numel() for name, t in state.parameters.items() if t.dim() == 2 and name != "position"]
    floors = step_by_hand.floors(SMALL, 2.0, 1.0)
    assert floors["products"] == 6 * sum(multiplied) * SMALL.tokens / 2
    count = sum(t.numel() for t in state.parameters.values())
    assert (
        floors["AdamW and the norm"] == 30 * count
    )  # three of 4 bytes read and written, 2 written, 2 read twice


@pytest.mark.gpu
def test_gpu_graphed_step_is_reproducible(text):
    runs = []
    for kind in (ByHand, Graphed, Graphed):
        state = State.begin(SMALL, 7, torch.device("cuda:0"))
        by = kind(state)
        losses = [train_gpt.run_step(by, each.cuda(), 3e-3) for each in read_excerpts(text, 12)]
        runs.append((losses, state))
    (plain, launched), (losses, graphed), (again, twice) = runs
    assert losses == again and torch.equal(graphed.master, twice.master) and graphed.steps == 12
    assert losses[-1] < losses[0] and torch.allclose(torch.tensor(losses), torch.tensor(plain), atol=0.05)
    apart = (graphed.master - launched.master).norm() / launched.master.norm()
    assert apart < 0.02


# ---- State files ------------------------------------------------------------------------------------------------


def train_steps(text, kind, state, first, count):
    """Train SMALL for some steps from a state; return the losses."""
    by = kind(state)
    return [train_gpt.run_step(by, each, 3e-3) for each in read_excerpts(text, first + count)[first:]]


@pytest.mark.compiles
@pytest.mark.parametrize(("writer", "reader"), [(ByHand, ByAutograd), (ByAutograd, ByHand)])
def test_saved_state_is_interchangeable(writer, reader, text, tmp_path):
    state = State.begin(SMALL, 7, CPU)
    train_steps(text, writer, state, 0, 5)
    state.save(tmp_path / "state.pt")
    read = State.load(tmp_path / "state.pt", SMALL, CPU)
    assert read.steps == 5
    for name in ("master", "mean", "square"):
        assert torch.equal(getattr(read, name), getattr(state, name)) and getattr(read, name).any()
    mine = train_steps(text, writer, state, 5, 5)
    assert train_steps(text, reader, read, 5, 5) == pytest.approx(mine, rel=2e-4)
    assert read.steps == 10


@pytest.mark.compiles
def test_resumed_run_is_bit_equal(command_line, small, tmp_path):
    whole, half, rest = (tmp_path / name for name in ("whole.pt", "half.pt", "rest.pt"))
    base = ("p27", "--train", "--size", "tiny", "--device", "cpu")
    for arguments in (
        ("--steps", "4", "--save", str(whole)),
        ("--steps", "2", "--save", str(half)),
        ("--steps", "2", "--load", str(half), "--save", str(rest)),
    ):
        assert command_line(*base, *arguments).code == 0
    one, other = (State.load(path, SMALL, CPU) for path in (whole, rest))
    assert one.steps == other.steps == 4 and torch.equal(one.master, other.master)
    compared = command_line("p27", "--compare", "--size", "tiny", "--device", "cpu", "--load", str(rest))
    assert compared.code == 0 and compared.lines[-1] == "✅ every value is autograd's"


@pytest.mark.compiles
def test_losses_and_parameter_hash_are_reported(command_line, small, tmp_path):
    base = ("p27", "--train", "--size", "tiny", "--device", "cpu", "--steps", "3")
    told = []
    for name, seed in (("one", "5"), ("again", "5"), ("other", "6")):
        finished = command_line(*base, "--seed", seed, "--csv", str(tmp_path / name))
        (line,) = (line for line in finished.lines if "bits are" in line)
        told.append((line.split()[-1], (tmp_path / name).read_text()))
    assert told[0] == told[1] and told[0][0] != told[2][0] and told[0][1] != told[2][1]
    head, *rows = told[0][1].splitlines()
    assert head == "step,loss" and [row.split(",")[0] for row in rows] == ["1", "2", "3"]
    assert all(5 < float(row.split(",")[1]) < 6 for row in rows)
    finished = command_line(*base, "--csv", str(tmp_path / "no" / "file"))
    assert finished.code == 2 and "file: No such file or directory" in finished.err
    assert "--csv: only with --size" in command_line("p27", "--train", "--csv", "x").err


def test_save_and_load_errors_are_reported(command_line, small, tmp_path):
    state, junk = tmp_path / "state.pt", tmp_path / "junk.pt"
    State.begin(ODD, 1, CPU).save(state)
    junk.write_text("no state")
    with pytest.raises(BadUse, match=r"--save .*: No such file or directory"):
        State.begin(ODD, 1, CPU).save(tmp_path / "nowhere" / "state.pt")
    finished = command_line("p27", "--train", "--size", "tiny", "--save", str(tmp_path / "no" / "state.pt"))
    assert finished.code == 2 and not any("it writes" in line for line in finished.lines)
    for path, words in (
        (tmp_path / "none.pt", "No such file or directory"),
        (junk, "no state file of p27 --train --save"),
        (state, "holds Sizes(layers=1, width=20"),
    ):
        finished = command_line("p27", "--train", "--size", "tiny", "--device", "cpu", "--load", str(path))
        assert finished.code == 2 and words in finished.err, finished.err
    assert "--load: only with --size" in command_line("p27", "--compare", "--load", str(state)).err
    assert "--save: only with --size" in command_line("p27", "--train", "--save", str(state)).err
