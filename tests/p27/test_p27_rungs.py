"""Puzzle 27 as a learner meets it: what is said of right and wrong answers of the rungs in Python."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from changed_solutions import write_changed

from harness.check import zoo
from harness.check.checker import make_checker
from harness.check.python_files import load
from harness.learner.work import Work
from harness.puzzles.p27.autograd import parameters
from harness.puzzles.p27.running import excerpt, no_autograd
from harness.puzzles.p27.spec import PUZZLE, cases, inputs
from harness.toolchain import roots

RUNGS = [rung for rung in PUZZLE.rungs if rung is not PUZZLE.mojo_rung]
"""Those in Python; the kernels have `test_p27_kernels.py`."""
SOLUTIONS = roots.solutions() / "p27"


@pytest.fixture(scope="module")
def checkers():
    """One for each rung."""
    return {rung.id: make_checker(Work(PUZZLE, rung, roots.solutions())) for rung in RUNGS}


# ---- What judges is judged ----------------------------------------------------------------------------------


def autograd(v) -> dict[str, torch.Tensor]:
    """What PyTorch's own functions make of the NumPy rung's inputs."""
    import torch.nn.functional as F

    t = {name: torch.from_numpy(np.asarray(v[name])) for name in v}
    floats = {name: t[name].clone().requires_grad_() for name in ("x", "W", "A", "logits")}
    _, T, C = t["x"].shape
    V = int(t["V"])

    def gradients(output, grad, *wanted):
        return torch.autograd.grad(output, wanted, grad)

    x, W, A, logits = floats.values()
    loss = F.cross_entropy(
        logits.flatten(0, 1), t["targets"].flatten(), label_smoothing=float(t["smoothing"])
    )
    results = {"loss": loss.detach(), "grad_logits": gradients(loss, None, logits)[0]}
    results["grad_gelu"] = gradients(F.gelu(x, approximate="tanh"), t["dx"], x)[0]
    bias = torch.zeros(len(W), dtype=x.dtype, requires_grad=True)
    linear = gradients(F.linear(x, W, bias), t["dy"], x, W, bias)
    results |= dict(zip(("grad_x", "grad_W", "grad_b"), linear, strict=True))
    token, position = (torch.zeros(n, C, dtype=x.dtype, requires_grad=True) for n in (V, T))
    tables = gradients(F.embedding(t["tokens"], token) + position, t["dx"], token, position)
    results |= dict(zip(("grad_token", "grad_position"), tables, strict=True))
    results["grad_stream"] = gradients(x + x @ A.T, t["dx"], x)[0]
    both = (F.embedding(t["tokens"], token) * t["dx"]).sum() + (
        (x.detach() @ token.T) * results["grad_logits"]
    ).sum()
    return results | {"grad_tied": gradients(both, None, token)[0]}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_derivation_is_autograd_s(case):
    arrays = inputs(case, "float64", 0)
    v, exact = PUZZLE.derive(arrays, {}), PUZZLE.exact(arrays)
    for name, right in autograd(arrays).items():
        for got in (getattr(v, name), exact[name].astype(np.float64)):
            np.testing.assert_allclose(got, right.numpy(), rtol=1e-9, atol=1e-11, err_msg=name)


def test_the_tape_s_gradients_are_finite_differences():
    """Of every parameter of the whole model, along a random direction, with no autograd anywhere."""
    tape = load(SOLUTIONS / "tape.py")
    p = parameters(layers=2, width=8, vocabulary=7, context=6, seed=1)
    tokens, targets = excerpt(2, 5, 7, 1)
    grads = {name: torch.zeros_like(t) for name, t in p.items()}
    kept = tape["Tape"]()
    tape["forward"](tokens, targets, kept, p)
    tape["backward"](kept, p, grads)
    generator, step = torch.Generator().manual_seed(2), 1e-5
    for name, tensor in p.items():
        along = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        up, down = (
            tape["forward"](tokens, targets, tape["Tape"](), p | {name: tensor + sign * step * along})
            for sign in (1, -1)
        )
        slope = (up - down) / (2 * step)
        torch.testing.assert_close((grads[name] * along).sum(), slope, rtol=1e-6, atol=1e-8)


RETURN = "        return dy * (0.5 * (1 + tanh)"
SIZE = "storages[storage.data_ptr()] = storage.nbytes()"
FACTOR = "grad *= ({} / (norm + 1e-6)).clamp(max=1)"
BY_NAME = "        with torch.enable_grad():\n            u = x.clone().requires_grad_()\n            u.sin().sum().backward()\n"
CALLED = "RuntimeError: autograd is called: this gradient is yours to write"
RETURNED = "backward() returns no tensor: the gradient of its input is wanted"
FORWARD = "        return 0.5 * x * (1 + torch.tanh(Gelu"


@pytest.mark.parametrize(
    ("gate", "old", "new", "mistake", "words"),
    [
        ("clip", FACTOR.format("limit"), FACTOR.format("1.0"), "times-a-constant", "exactly 0.333333 times what"),
        ("clip", "    return norm\n", "    return norm.clamp(max=limit)\n", "norm-afterwards", "as they are afterwards"),
        ("clip", "    return norm\n", "    return 1.0\n", "wrong-values", "clip() returns no tensor: the norm is wanted"),
        ("adamw", "mean.lerp_(g, 1 - betas[0])", "mean.lerp_(g, 0.1)", "wrong-values", "mean of g["),
        ("step", "moments, number, rate)", "moments, number, 0.01)", "wrong-values", "after step 2 is wrong"),
        ("step", "    return loss\n", "    return 1.0\n", "wrong-values", "step() returns no tensor"),
        ("tape", SIZE, SIZE.replace("data_ptr", "nbytes"), "wrong-values", "one size the tape says 96 bytes, and holds 192"),
        ("tape", SIZE, "storages[id(tensor), len(storages)] = tensor.numel()", "elements-counted",
         "of a tensor of 24 floats the tape says 24 bytes, and holds 96"),
        ("gelu", FORWARD, FORWARD.replace("return ", ""), "nothing-returned", "forward() returns no tensor"),
        ("gelu", RETURN, f"        torch.func.vjp(torch.sin, x)[1](dy)\n{RETURN}", "autograd-called", CALLED),
        ("gelu", RETURN, f"        torch.autograd.grad(x, x)\n{RETURN}", "autograd-called", CALLED),
        ("gelu", RETURN, BY_NAME + RETURN, "autograd-called", CALLED),
        ("gelu", "slope = Gelu.SCALE", "slope = Gelu.NONE", "raises", "AttributeError"),
        ("gelu", RETURN, RETURN.replace("return ", ""), "nothing-returned", RETURNED),
        ("gelu", "        tanh = torch.tanh(Gelu", "        x += 0 * x + 1\n        tanh = torch.tanh(Gelu", "input-written",
         "the pass has changed its input"),
        ("gelu", RETURN, "        return dy[0] * (0.5 * (1 + tanh)[0]", "wrong-values", ""),
    ],
)  # fmt: skip
def test_what_else_may_be_wrong_is_said(gate, old, new, mistake, words, checkers, tmp_path):
    (result,) = checkers["tape"].check(write_changed(PUZZLE, "tape", tmp_path, (old, new)), [gate])
    assert (result.state, result.mistake) == ("wrong", mistake), result.diagnosis
    assert words in result.diagnosis[0], result.diagnosis


LEARNER_S = tomllib.loads((Path(__file__).parent / "learner_mistakes.toml").read_text("utf-8"))
IN_PYTHON = [
    pytest.param(rung, gate, entry, id=f"{rung}-{gate}-{name}")
    for rung, gates in LEARNER_S.items()
    if rung != "mojo"
    for gate, entries in gates.items()
    for name, entry in entries.items()
]


@pytest.mark.parametrize(("rung", "gate", "entry"), IN_PYTHON)
def test_a_mistake_that_a_learner_has_tried_is_rejected_and_named(rung, gate, entry, checkers, tmp_path):
    (result,) = checkers[rung].check(write_changed(PUZZLE, rung, tmp_path, *entry["edits"]), [gate])
    assert result.state == "wrong"
    assert result.mistake == entry.get("mistake", result.mistake), result.diagnosis
    assert entry.get("said", "") in result.diagnosis[0]
    assert not any("no known mistake" in line for line in result.diagnosis), result.diagnosis


def test_autograd_works_again_after_it_was_out_of_reach():
    x = torch.ones(3, requires_grad=True)
    with no_autograd(), pytest.raises(RuntimeError, match="yours to write"):
        torch.autograd.grad(x.sin().sum(), x)
    assert torch.equal(torch.autograd.grad(x.square().sum(), x)[0], torch.full((3,), 2.0))


def test_the_first_wrong_tensor_from_the_loss_backwards_is_named(checkers):
    wrong = next(each for each in zoo.load("p27") if each.name == "block_first_residual")
    (result,) = checkers["tape"].check(wrong.target(), ["model"])
    assert "from the loss backwards: the gradient of what block1 is given is wrong" in result.diagnosis[0]


def test_a_gate_whose_part_is_wrong_says_which_to_mend_first(checkers):
    wrong = next(each for each in zoo.load("p27") if each.name == "layernorm_mean_fixed")
    *_, model = checkers["tape"].check(wrong.target(), ["layernorm", "block", "model"])
    assert model.diagnosis == ["computed from layernorm, which is wrong: fix that first"]


def test_parts_that_are_right_in_another_way_are_right(checkers, tmp_path):
    taken = "        q, k, v, P = tape.take(name)"
    split = "        qkv, P = tape.take(name)\n        q, k, v = split_heads(qkv, 3)"
    kept = ("tape.keep(name, q, k, v, P)", "tape.keep(name, qkv, P)")
    path = write_changed(PUZZLE, "tape", tmp_path, kept, (taken, split))
    (result,) = checkers["tape"].check(path, ["attention"])
    assert result.state == "correct", result.diagnosis


def test_the_bar_of_live_bytes_is_the_file_s_own_run(checkers, tmp_path):
    (right,) = checkers["tape"].check(SOLUTIONS / "tape.py", ["model"])
    held = {line[:15].strip(): float(line[15:24]) for line in right.picture[1:]}
    peak = [line for line in right.picture if line.endswith("peak")]
    assert len(peak) == 1 and peak[0].startswith("loss ")
    assert list(held)[-1] == "embedding back" and held["embedding back"] == 0
    # Of 4 x 32 tokens, 32 channels, 4 heads, in float32: both LayerNorms, the inputs of four products, GELU's, qkv, P.
    floats = 4 * 32 * (2 * (32 + 2) + 3 * 32 + 32 + 128 + 3 * 32 + 128) + 4 * 4 * 32 * 32
    shared = 4 * 32 * 96  # what is kept of one storage by two parts
    assert held["block1"] - held["block0"] <= 4 * floats / 1024
    assert held["block1"] - held["block0"] == held["block2"] - held["block1"] >= 4 * (floats - shared) / 1024
