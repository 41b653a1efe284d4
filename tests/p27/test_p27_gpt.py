"""GPT-2's manual training step: autograd and AdamW match, training learns and is reproducible."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from book.measure import step_by_hand
from harness.errors import UsageError
from harness.puzzles.p27 import compare_gpt, step_parts, train, train_gpt
from harness.puzzles.p27.gpt import SIZES, State
from harness.puzzles.p27.gpt_autograd import AutogradTrainer
from harness.puzzles.p27.gpt_step import GraphedTrainer, ManualPass, ManualTrainer
from harness.puzzles.p27.training import draw_excerpts

CPU = torch.device("cpu")
SMALL = replace(SIZES["tiny"], layers=2, width=32, vocabulary=256, context=24, batch=3)
UNALIGNED = replace(SIZES["tiny"], layers=1, width=20, heads=5, vocabulary=37, context=7, batch=2)


def read_excerpts(text, count: int) -> list[torch.Tensor]:
    """Return the first training batches of SMALL."""
    return [excerpt for _, excerpt in zip(range(count), draw_excerpts(SMALL, 5, text), strict=False)]


@pytest.mark.compiles
@pytest.mark.parametrize("sizes", [SMALL, UNALIGNED])
def test_step_values_match_autograd(sizes):
    rows = compare_gpt.compare(sizes, 3, CPU)
    assert all(ok for *_, ok in rows)
    missing = {name for name, text, _ in rows if text == compare_gpt.NOT_COMPUTED}
    names = {name for name, *_ in rows} - missing
    assert names >= {
        "block0.join, its output",
        "the output",
        "the gradient of token",
        "the gradient of position",
    }
    assert missing <= {name for i in range(2) for name in list_fused_values(i)}


def list_fused_values(i: int) -> set[str]:
    """Return values that are fused into other operations: LayerNorm outputs and the logits' gradient."""
    modules = {f"block{i}.{part}" for part in ("qkv", "widen")}
    outputs = {f"block{i}.{norm}, its output" for norm in ("ln_1", "ln_2")}
    return outputs | {f"the gradient of what {part} is given" for part in (*modules, "loss")}


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("part", "replacement", "failure"),
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
        (
            "compute_token_gradient",
            lambda table, head_grad, dx, tokens: table.copy_(head_grad),
            "the gradient of token",
        ),
        ("add_with_sums", lambda stream, branch: stream.sum(0), "the gradient of block1.join.bias"),
        ("gelu", lambda x: x, "block0.gelu, its output"),
    ],
)
def test_wrong_operation_is_the_first_failure(part, replacement, failure, monkeypatch):
    monkeypatch.setattr(step_parts, part, replacement)
    assert next(name for name, _, ok in compare_gpt.compare(SMALL, 3, CPU) if not ok) == failure


@pytest.mark.parametrize("size", [1e-4, 10.0])
def test_adamw_with_clipping_matches_pytorch(size):
    """Take two steps with gradients below or above the clipping threshold."""
    state = State.initialize(UNALIGNED, 1, CPU)
    generator = torch.Generator().manual_seed(2)
    leaves = {name: t.clone().requires_grad_() for name, t in state.parameters.items()}
    groups = [[t for t in leaves.values() if (t.dim() > 1) is matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": 0.1 * (1 - i)} for i, group in enumerate(groups)],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    by_hand = ManualTrainer(state)
    for number in (1, 2):
        for name, leaf in leaves.items():
            leaf.grad = gradient = size * torch.randn(leaf.shape, generator=generator)
            by_hand.grads[name].copy_(gradient)
        torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        optimizer.step()
        by_hand.set_step_inputs(number, 0.01)
        by_hand.update()
    for name, leaf in leaves.items():
        torch.testing.assert_close(by_hand.p[name], leaf.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.compiles
def test_manual_step_trains_like_autograd_and_is_reproducible(text):
    runs = []
    for kind in (ManualTrainer, ManualTrainer, AutogradTrainer):
        trained = kind(State.initialize(SMALL, 7, CPU))
        losses = [train_gpt.run_step(trained, excerpt, 3e-3) for excerpt in read_excerpts(text, 25)]
        runs.append((losses, trained.state.master))
    assert runs[0][0][0] > 5.4 and runs[0][0][-1] < 4.2  # log 256 is 5.55
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] == pytest.approx(runs[2][0], rel=2e-4)


def test_token_table_gradient_is_reproducible():
    """Tokens repeat often, and there are enough for several CPU threads."""
    dx, tokens, head_gradient = torch.randn(2048, 96), torch.randint(9, (2048,)), torch.randn(9, 96)
    table = torch.empty(9, 96)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        gradients = [
            step_parts.compute_token_gradient(table, head_gradient.clone(), dx, tokens).clone()
            for _ in range(20)
        ]
    finally:
        torch.set_num_threads(num_threads)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    one_hot = torch.nn.functional.one_hot(tokens).double()
    torch.testing.assert_close(table.double(), head_gradient + one_hot.T @ dx.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.compiles
def test_gradients_do_not_depend_on_uninitialized_memory():
    sizes = replace(UNALIGNED, layers=3)
    trained = ManualTrainer(State.initialize(sizes, 1, CPU))
    excerpt = torch.randint(sizes.vocabulary, (sizes.batch, sizes.context + 1))
    single_pass = ManualPass(sizes, trained.p)
    single_pass.forward(excerpt[:, :-1], excerpt[:, 1:])
    grads = single_pass.backward()
    for _ in range(2):
        trained.gradients.fill_(torch.nan)
        trained.compute_gradients(excerpt)
        for name, gradient in grads.items():
            assert torch.equal(trained.grads[name], gradient), name
        assert len(trained.padding) > 3 and not any(gap.any() for gap in trained.padding)


class LargestTensorRecorder(TorchDispatchMode):
    """Records the size in bytes of the largest tensor, except for those in `ignored` storages."""

    def __init__(self, *ignored: torch.Tensor):
        super().__init__()
        self.ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.ignored:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.compiles
def test_logits_are_not_stored(text):
    trained = ManualTrainer(State.initialize(SMALL, 7, CPU))
    with LargestTensorRecorder(trained.working, trained.gradients) as largest:
        trained.compute_gradients(read_excerpts(text, 1)[0])
    tokens = SMALL.batch * SMALL.context
    assert largest.bytes == 4 * tokens * 4 * SMALL.width < 4 * tokens * SMALL.vocabulary


@pytest.mark.compiles
def test_autograd_in_manual_step_is_rejected(text, monkeypatch):
    def call_autograd(x, dy):
        leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            return x, torch.autograd.grad(step_parts.gelu(leaf), leaf, dy)[0]

    monkeypatch.setattr(step_parts, "gelu_backward", call_autograd)
    with pytest.raises(RuntimeError, match="autograd is called"):
        train_gpt.run_step(ManualTrainer(State.initialize(SMALL, 7, CPU)), read_excerpts(text, 1)[0], 1e-3)


def test_state_is_contiguous_and_decays_only_matrices():
    state = State.initialize(UNALIGNED, 1, CPU)
    ranges = sorted((start, shape.numel(), len(shape)) for start, shape in state.layout.entries.values())
    assert all(start % 16 == 0 for start, *_ in ranges)
    assert all(start + size <= next_start for (start, size, _), (next_start, *_) in pairwise(ranges))
    assert {rank for start, _, rank in ranges if start < state.layout.num_decayed} == {2}
    assert {rank for start, _, rank in ranges if start >= state.layout.num_decayed} == {1}


# ---- Commands ---------------------------------------------------------------------------------------------------


@pytest.fixture
def smaller_tiny_model(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", SMALL)


@pytest.mark.compiles
def test_compare_prints_all_values(command_line, smaller_tiny_model):
    result = command_line("p27", "--compare", "--size", "tiny", "--device", "cpu")
    assert result.code == 0 and result.lines[-1] == "✅ every value is autograd's"
    status = {line.split("  ")[0]: line.split()[-1] for line in result.lines}
    assert status["the gradient of token"] == status["block1.attention, its output"] == "ok"


@pytest.mark.compiles
def test_compare_exits_with_1_if_a_value_is_wrong(command_line, smaller_tiny_model, monkeypatch):
    monkeypatch.setattr(step_parts, "gelu", lambda x: x * torch.nan)
    result = command_line("p27", "--compare", "--size", "tiny", "--device", "cpu")
    assert result.code == 1 and result.lines[-1].endswith("the first is block0.gelu, its output")


@pytest.mark.compiles
@pytest.mark.parametrize("by", ["hand", "autograd"])
def test_size_trains_plots_and_samples(by, command_line, smaller_tiny_model):
    result = command_line("p27", "--train", "--size", "tiny", "--device", "cpu", "--steps", "2", "--by", by)
    assert result.code == 0, result.err
    assert result.lines[0].startswith("2 blocks of 32 channels, 3")
    assert result.lines[0].endswith("3 x 24 bytes of the book at every step, on cpu")
    assert f"o by {by}" in result.lines[1]
    assert result.lines[result.lines.index("it writes:") + 1].startswith("   The gradient ")


@pytest.mark.compiles
def test_training_stops_at_the_time_limit(text):
    flags = train.make_parser().parse_args(
        ["--size", "tiny", "--device", "cpu", "--by", "hand", "--seconds", "1e-9"]
    )
    losses = train_gpt.train(Console(quiet=True), flags, text, 1, SMALL)
    assert len(losses) == 1


@pytest.mark.compiles
def test_nonfinite_loss_stops_training(text, monkeypatch):
    flags = train.make_parser().parse_args(["--size", "tiny", "--device", "cpu", "--by", "hand"])
    monkeypatch.setattr(step_parts, "gelu", lambda x: x * torch.nan)
    with pytest.raises(UsageError, match="the loss of step 1 is nan"):
        train_gpt.train(Console(quiet=True), flags, text, 1, SMALL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train", "--by", "autograd"), "--by: only with --size"),
        (("--compare", "--device", "cpu"), "--device: only with --size"),
        (("--train", "--size", "tiny", "--device", "gpu"), "--device gpu: torch sees no GPU here"),
        (("--train", "--size", "tiny", "--steps", "0"), "--steps 0: must be at least 1"),
    ],
)
def test_invalid_option_combinations_are_reported(arguments, message, command_line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = command_line("p27", *arguments)
    assert result.code == 2 and message in result.err


def test_lower_bound_is_six_flops_per_weight_and_token():
    state = State.initialize(SMALL, 1, CPU)
    matrix_sizes = [t.numel() for name, t in state.parameters.items() if t.dim() == 2 and name != "position"]
    lower_bounds = step_by_hand.floors(SMALL, 2.0, 1.0)
    assert lower_bounds["products"] == 6 * sum(matrix_sizes) * SMALL.tokens / 2
    count = sum(t.numel() for t in state.parameters.values())
    assert (
        lower_bounds["AdamW and the norm"] == 30 * count
    )  # three of 4 bytes read and written, 2 written, 2 read twice


@pytest.mark.gpu
def test_gpu_graphed_step_is_reproducible(text):
    runs = []
    for kind in (ManualTrainer, GraphedTrainer, GraphedTrainer):
        state = State.initialize(SMALL, 7, torch.device("cuda:0"))
        stepper = kind(state)
        losses = [train_gpt.run_step(stepper, excerpt.cuda(), 3e-3) for excerpt in read_excerpts(text, 12)]
        runs.append((losses, state))
    (by_hand_losses, by_hand), (losses, graphed), (losses_again, graphed_again) = runs
    assert (
        losses == losses_again and torch.equal(graphed.master, graphed_again.master) and graphed.steps == 12
    )
    assert losses[-1] < losses[0] and torch.allclose(
        torch.tensor(losses), torch.tensor(by_hand_losses), atol=0.05
    )
    relative_difference = (graphed.master - by_hand.master).norm() / by_hand.master.norm()
    assert relative_difference < 0.02


# ---- State files ------------------------------------------------------------------------------------------------


def train_steps(text, stepper_class, state, first, count):
    """Train SMALL for some steps from a state; return the losses."""
    stepper = stepper_class(state)
    return [
        train_gpt.run_step(stepper, excerpt, 3e-3) for excerpt in read_excerpts(text, first + count)[first:]
    ]


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("writer", "reader"), [(ManualTrainer, AutogradTrainer), (AutogradTrainer, ManualTrainer)]
)
def test_saved_state_is_interchangeable(writer, reader, text, tmp_path):
    state = State.initialize(SMALL, 7, CPU)
    train_steps(text, writer, state, 0, 5)
    state.save(tmp_path / "state.pt")
    loaded_state = State.load(tmp_path / "state.pt", SMALL, CPU)
    assert loaded_state.steps == 5
    for name in ("master", "mean", "square"):
        assert (
            torch.equal(getattr(loaded_state, name), getattr(state, name))
            and getattr(loaded_state, name).any()
        )
    expected = train_steps(text, writer, state, 5, 5)
    assert train_steps(text, reader, loaded_state, 5, 5) == pytest.approx(expected, rel=2e-4)
    assert loaded_state.steps == 10


@pytest.mark.compiles
def test_resumed_run_is_bit_equal(command_line, smaller_tiny_model, tmp_path):
    full_run, first_half, second_half = (tmp_path / name for name in ("whole.pt", "half.pt", "rest.pt"))
    command = ("p27", "--train", "--size", "tiny", "--device", "cpu")
    for arguments in (
        ("--steps", "4", "--save", str(full_run)),
        ("--steps", "2", "--save", str(first_half)),
        ("--steps", "2", "--load", str(first_half), "--save", str(second_half)),
    ):
        assert command_line(*command, *arguments).code == 0
    uninterrupted, resumed = (State.load(path, SMALL, CPU) for path in (full_run, second_half))
    assert uninterrupted.steps == resumed.steps == 4 and torch.equal(uninterrupted.master, resumed.master)
    comparison = command_line(
        "p27", "--compare", "--size", "tiny", "--device", "cpu", "--load", str(second_half)
    )
    assert comparison.code == 0 and comparison.lines[-1] == "✅ every value is autograd's"


@pytest.mark.compiles
def test_losses_and_parameter_hash_are_reported(command_line, smaller_tiny_model, tmp_path):
    command = ("p27", "--train", "--size", "tiny", "--device", "cpu", "--steps", "3")
    reports = []
    for name, seed in (("one", "5"), ("again", "5"), ("other", "6")):
        result = command_line(*command, "--seed", seed, "--csv", str(tmp_path / name))
        (line,) = (line for line in result.lines if "bits are" in line)
        reports.append((line.split()[-1], (tmp_path / name).read_text()))
    assert reports[0] == reports[1] and reports[0][0] != reports[2][0] and reports[0][1] != reports[2][1]
    header, *rows = reports[0][1].splitlines()
    assert header == "step,loss" and [row.split(",")[0] for row in rows] == ["1", "2", "3"]
    assert all(5 < float(row.split(",")[1]) < 6 for row in rows)
    result = command_line(*command, "--csv", str(tmp_path / "no" / "file"))
    assert result.code == 2 and "file: No such file or directory" in result.err
    assert "--csv: only with --size" in command_line("p27", "--train", "--csv", "x").err


def test_save_and_load_errors_are_reported(command_line, smaller_tiny_model, tmp_path):
    state, invalid_file = tmp_path / "state.pt", tmp_path / "junk.pt"
    State.initialize(UNALIGNED, 1, CPU).save(state)
    invalid_file.write_text("no state")
    with pytest.raises(UsageError, match=r"--save .*: No such file or directory"):
        State.initialize(UNALIGNED, 1, CPU).save(tmp_path / "nowhere" / "state.pt")
    result = command_line("p27", "--train", "--size", "tiny", "--save", str(tmp_path / "no" / "state.pt"))
    assert result.code == 2 and not any("it writes" in line for line in result.lines)
    for path, message in (
        (tmp_path / "none.pt", "No such file or directory"),
        (invalid_file, "no state file of p27 --train --save"),
        (state, "holds Sizes(layers=1, width=20"),
    ):
        result = command_line("p27", "--train", "--size", "tiny", "--device", "cpu", "--load", str(path))
        assert result.code == 2 and message in result.err, result.err
    assert "--load: only with --size" in command_line("p27", "--compare", "--load", str(state)).err
    assert "--save: only with --size" in command_line("p27", "--train", "--save", str(state)).err
