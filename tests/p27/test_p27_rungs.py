"""Puzzle 27's Python rungs: correct files pass, and mistakes in wrong ones are named."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from changed_solutions import write_edited_solution

from harness.check import zoo
from harness.check.checker import load_checker
from harness.check.python_files import load_module
from harness.learner.exercise import Exercise
from harness.puzzles.p27.autograd import init_parameters
from harness.puzzles.p27.running import make_excerpt, no_autograd
from harness.puzzles.p27.spec import PUZZLE, cases, inputs
from harness.toolchain import roots

RUNGS = [rung for rung in PUZZLE.rungs if rung is not PUZZLE.mojo_rung]
"""Python rungs; test_p27_kernels.py covers the kernels."""
SOLUTIONS = roots.get_solutions() / "p27"


@pytest.fixture(scope="module")
def checkers():
    return {rung.id: load_checker(Exercise(PUZZLE, rung, roots.get_solutions())) for rung in RUNGS}


# ---- The reference ------------------------------------------------------------------------------------------


def compute_with_autograd(v) -> dict[str, torch.Tensor]:
    """Compute PyTorch's results for the NumPy rung's inputs."""
    import torch.nn.functional as F

    t = {name: torch.from_numpy(np.asarray(v[name])) for name in v}
    floats = {name: t[name].clone().requires_grad_() for name in ("x", "W", "A", "logits")}
    _, T, C = t["x"].shape
    V = int(t["V"])

    def differentiate(output, grad, *leaves):
        return torch.autograd.grad(output, leaves, grad)

    x, W, A, logits = floats.values()
    loss = F.cross_entropy(
        logits.flatten(0, 1), t["targets"].flatten(), label_smoothing=float(t["smoothing"])
    )
    results = {"loss": loss.detach(), "grad_logits": differentiate(loss, None, logits)[0]}
    results["grad_gelu"] = differentiate(F.gelu(x, approximate="tanh"), t["dx"], x)[0]
    bias = torch.zeros(len(W), dtype=x.dtype, requires_grad=True)
    linear = differentiate(F.linear(x, W, bias), t["dy"], x, W, bias)
    results |= dict(zip(("grad_x", "grad_W", "grad_b"), linear, strict=True))
    token, position = (torch.zeros(n, C, dtype=x.dtype, requires_grad=True) for n in (V, T))
    tables = differentiate(F.embedding(t["tokens"], token) + position, t["dx"], token, position)
    results |= dict(zip(("grad_token", "grad_position"), tables, strict=True))
    results["grad_stream"] = differentiate(x + x @ A.T, t["dx"], x)[0]
    both = (F.embedding(t["tokens"], token) * t["dx"]).sum() + (
        (x.detach() @ token.T) * results["grad_logits"]
    ).sum()
    return results | {"grad_tied": differentiate(both, None, token)[0]}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_derivation_matches_autograd(case):
    arrays = inputs(case, "float64", 0)
    v, exact = PUZZLE.derive(arrays, {}), PUZZLE.compute_exact(arrays)
    for name, correct in compute_with_autograd(arrays).items():
        for got in (getattr(v, name), exact[name].astype(np.float64)):
            np.testing.assert_allclose(got, correct.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)


def test_tape_gradients_match_finite_differences():
    """Compare along a random direction of each parameter, without autograd."""
    tape = load_module(SOLUTIONS / "tape.py")
    p = init_parameters(layers=2, width=8, vocabulary=7, context=6, seed=1)
    tokens, targets = make_excerpt(2, 5, 7, 1)
    grads = {name: torch.zeros_like(t) for name, t in p.items()}
    saved = tape["Tape"]()
    tape["forward"](tokens, targets, saved, p)
    tape["backward"](saved, p, grads)
    generator, step = torch.Generator().manual_seed(2), 1e-5
    for name, tensor in p.items():
        direction = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        loss_up, loss_down = (
            tape["forward"](tokens, targets, tape["Tape"](), p | {name: tensor + sign * step * direction})
            for sign in (1, -1)
        )
        slope = (loss_up - loss_down) / (2 * step)
        torch.testing.assert_close((grads[name] * direction).sum(), slope, rtol=1e-6, atol=1e-8)


RETURN = "        return dy * (0.5 * (1 + tanh)"
SIZE = "storages[storage.data_ptr()] = storage.nbytes()"
FACTOR = "grad *= ({} / (norm + 1e-6)).clamp(max=1)"
ENABLE_GRAD = "        with torch.enable_grad():\n            u = x.clone().requires_grad_()\n            u.sin().sum().backward()\n"
AUTOGRAD_ERROR = "RuntimeError: autograd is called: this gradient is yours to write"
RETURN_ERROR = "backward() must return a tensor, the gradient of its input"
FORWARD = "        return 0.5 * x * (1 + torch.tanh(Gelu"


@pytest.mark.parametrize(
    ("gate", "old", "new", "mistake", "message"),
    [
        ("clip", FACTOR.format("limit"), FACTOR.format("1.0"), "times-a-constant", "exactly 0.333333 times what"),
        ("clip", "    return norm\n", "    return norm.clamp(max=limit)\n", "norm-afterwards", "return the norm before clipping"),
        ("clip", "    return norm\n", "    return 1.0\n", "wrong-values", "clip() must return a tensor, the norm"),
        ("adamw", "mean.lerp_(g, 1 - betas[0])", "mean.lerp_(g, 0.1)", "wrong-values", "mean of g["),
        ("step", "moments, number, rate)", "moments, number, 0.01)", "wrong-values", "after step 2 is wrong"),
        ("step", "    return loss\n", "    return 1.0\n", "wrong-values", "step() must return a tensor"),
        ("tape", SIZE, SIZE.replace("data_ptr", "nbytes"), "wrong-values", "one size the tape reports 96 bytes, but holds 192"),
        ("tape", SIZE, "storages[id(tensor), len(storages)] = tensor.numel()", "elements-counted",
         "for a tensor of 24 floats the tape reports 24 bytes, but holds 96"),
        ("gelu", FORWARD, FORWARD.replace("return ", ""), "nothing-returned", "forward() must return a tensor"),
        ("gelu", RETURN, f"        torch.func.vjp(torch.sin, x)[1](dy)\n{RETURN}", "autograd-called", AUTOGRAD_ERROR),
        ("gelu", RETURN, f"        torch.autograd.grad(x, x)\n{RETURN}", "autograd-called", AUTOGRAD_ERROR),
        ("gelu", RETURN, ENABLE_GRAD + RETURN, "autograd-called", AUTOGRAD_ERROR),
        ("gelu", "slope = Gelu.SCALE", "slope = Gelu.NONE", "raises", "AttributeError"),
        ("gelu", RETURN, RETURN.replace("return ", ""), "nothing-returned", RETURN_ERROR),
        ("gelu", "        tanh = torch.tanh(Gelu", "        x += 0 * x + 1\n        tanh = torch.tanh(Gelu", "input-written",
         "the pass has changed its input"),
        ("gelu", RETURN, "        return dy[0] * (0.5 * (1 + tanh)[0]", "wrong-values", ""),
    ],
)  # fmt: skip
def test_other_errors_are_reported(gate, old, new, mistake, message, checkers, tmp_path):
    (result,) = checkers["tape"].check(write_edited_solution(PUZZLE, "tape", tmp_path, (old, new)), [gate])
    assert (result.state, result.mistake) == ("wrong", mistake), result.diagnosis
    assert message in result.diagnosis[0], result.diagnosis


LEARNER_MISTAKES = tomllib.loads((Path(__file__).parent / "learner_mistakes.toml").read_text("utf-8"))
IN_PYTHON = [
    pytest.param(rung, gate, entry, id=f"{rung}-{gate}-{name}")
    for rung, gates in LEARNER_MISTAKES.items()
    if rung != "mojo"
    for gate, entries in gates.items()
    for name, entry in entries.items()
]


@pytest.mark.parametrize(("rung", "gate", "entry"), IN_PYTHON)
def test_learner_mistakes_are_rejected_and_named(rung, gate, entry, checkers, tmp_path):
    (result,) = checkers[rung].check(write_edited_solution(PUZZLE, rung, tmp_path, *entry["edits"]), [gate])
    assert result.state == "wrong"
    assert result.mistake == entry.get("mistake", result.mistake), result.diagnosis
    assert entry.get("said", "") in result.diagnosis[0]
    assert not any("no known mistake" in line for line in result.diagnosis), result.diagnosis


def test_autograd_is_restored():
    x = torch.ones(3, requires_grad=True)
    with no_autograd(), pytest.raises(RuntimeError, match="yours to write"):
        torch.autograd.grad(x.sin().sum(), x)
    assert torch.equal(torch.autograd.grad(x.square().sum(), x)[0], torch.full((3,), 2.0))


def test_wrong_tensor_closest_to_the_loss_is_reported(checkers):
    wrong = next(bug for bug in zoo.load_wrong_solutions("p27") if bug.name == "block_first_residual")
    (result,) = checkers["tape"].check(wrong.build_target(), ["model"])
    assert "from the loss backwards: the gradient of what block1 is given is wrong" in result.diagnosis[0]
    assert "tensors are wrong; this is the first" in result.diagnosis[1]


def test_gate_names_the_wrong_part_to_fix_first(checkers):
    wrong = next(bug for bug in zoo.load_wrong_solutions("p27") if bug.name == "layernorm_mean_fixed")
    *_, model = checkers["tape"].check(wrong.build_target(), ["layernorm", "block", "model"])
    assert model.diagnosis == ["computed from layernorm, which is wrong: fix that first"]


def test_different_but_correct_parts_pass(checkers, tmp_path):
    old_line = "        q, k, v, P = tape.take(name)"
    split = "        qkv, P = tape.take(name)\n        q, k, v = split_heads(qkv, 3)"
    saved = ("tape.keep(name, q, k, v, P)", "tape.keep(name, qkv, P)")
    path = write_edited_solution(PUZZLE, "tape", tmp_path, saved, (old_line, split))
    (result,) = checkers["tape"].check(path, ["attention"])
    assert result.state == "correct", result.diagnosis


def test_live_bytes_are_measured_in_the_learners_run(checkers, tmp_path):
    (correct,) = checkers["tape"].check(SOLUTIONS / "tape.py", ["model"])
    live_bytes = {line[:15].strip(): float(line[15:24]) for line in correct.picture[1:]}
    peak = [line for line in correct.picture if line.endswith("peak")]
    assert len(peak) == 1 and peak[0].startswith("loss ")
    assert list(live_bytes)[-1] == "embedding back" and live_bytes["embedding back"] == 0
    # Of 4 x 32 tokens, 32 channels, 4 heads, in float32: both LayerNorms, the inputs of four products, GELU's, qkv, P.
    floats = 4 * 32 * (2 * (32 + 2) + 3 * 32 + 32 + 128 + 3 * 32 + 128) + 4 * 4 * 32 * 32
    shared = 4 * 32 * 96  # saved from one storage by two parts
    assert live_bytes["block1"] - live_bytes["block0"] <= 4 * floats / 1024
    assert (
        live_bytes["block1"] - live_bytes["block0"]
        == live_bytes["block2"] - live_bytes["block1"]
        >= 4 * (floats - shared) / 1024
    )
