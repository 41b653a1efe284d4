"""Puzzle 20's rungs: correct solutions pass, wrong ones are diagnosed."""

import pytest
from changed_solutions import write_edited_solution
from typed import unwrap

from harness.check import zoo
from harness.check.checker import load_checker
from harness.learner.exercise import Exercise
from harness.puzzles.p20.spec import OPS, PUZZLE, cases, compute_with_autograd, inputs
from harness.toolchain import roots

METHODS = """\
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(~(x <= 0))
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, dy):
        return {}"""
IGNORES_DY = METHODS.format("ctx.saved_tensors[0].to(dy.dtype)")
DOUBLES_GRADIENT = METHODS.format("2 * torch.where(ctx.saved_tensors[0], dy, 0)")
SAVED_ON_CTX = METHODS.format("torch.where(ctx.y <= 0, 0, dy)").replace(
    "save_for_backward(~(x <= 0))", "y = x.clamp(min=0)"
)
MODIFIES_INPUT = METHODS.format("torch.where(ctx.saved_tensors[0], dy, 0)").replace("x.clamp(", "x.clamp_(")


def check_edited(rung_id, gate, tmp_path, *edits, **bodies):
    """Check one gate of a rung's solution after edits and replaced blanks; return its result."""
    checker = load_checker(Exercise(PUZZLE, PUZZLE.find_rung(rung_id), roots.get_solutions()))
    return checker.check(write_edited_solution(PUZZLE, rung_id, tmp_path, *edits, **bodies), [gate])[0]


def test_each_registration_line_is_required(tmp_path):
    """Empty each blank except the first: the operators still run, and the failing check is reported."""
    empty_bodies = {"save": "def setup_context(ctx, inputs, output): pass"}
    empty_names = {
        "fake": "schema", "save": "memory", "gradient": "gradient", "second": "second_derivative",
        "autocast": "autocast", "vmap": "batched",
    }  # fmt: skip
    for gate, check in empty_names.items():
        body = f"    {empty_bodies.get(gate, 'backward = None')}"
        result = check_edited("register", gate, tmp_path, **{gate: body})
        assert (result.state, result.mistake) == ("wrong", check) and check in result.diagnosis[0], gate


@pytest.mark.parametrize(
    ("rung", "blank", "body", "message"),
    [
        ("derive", "edges", "    return 3", "edges returns int, expected a dict of numbers"),
        ("derive", "edges", "    return {}", "edges has no 'x->a'"),
        ("derive", "backward", "    return {**d, 'y': 1}", "has no 'c'"),
        ("derive", "backward", "    return d['y']", "KeyError: 'y'"),
        (
            "derive",
            "backward",
            "    c = d['c->y']\n    x = c * (d['x->a'] + d['x->b'])\n    return {'y': 1, 'c': c, 'a': c, 'b': c, 'x': x}",
            "along other edges (x->a 2, x->b 3, a->c 5, b->c 7, c->y 11): backward: a is 11, expected 55",
        ),
        ("derive", "edges", "    return {'x->b': 2.0, 'a->c': 1.0, 'b->c': 1.0, 'c->y': 3.0, 'x->a': v['x']}",
         "x->a is 2, expected 4"),
        ("derive", "backward", "    return {'y': 1, 'c': 3, 'b': 3, 'a': 3, 'x': 12}",
         "arrives through a alone"),
        ("torch", "relu_input", "    pass", "forward"),
        ("torch", "layernorm", "        dx, dweight, dbias = dy, dy.sum(0), dy.sum(0)",
         "the gradient of x is wrong"),
        ("torch", "layernorm", "        dx = dy @ dy", "functions.py:"),
        ("torch", "relu_bits", IGNORES_DY, "it is the gradient of the output's sum: dy is not used"),
        ("torch", "relu_mask", DOUBLES_GRADIENT, "every element is 2 times what it should be"),
        ("torch", "relu_output", SAVED_ON_CTX, "ctx.y holds a tensor that save_for_backward should keep"),
        ("register", "define", "    return None", "register() returns NoneType, expected the operator"),
    ],
)  # fmt: skip
def test_wrong_answers_are_diagnosed(rung, blank, body, message, tmp_path):
    result = check_edited(rung, blank, tmp_path, **{blank: body})
    assert result.state == "wrong" and message in "\n".join(result.diagnosis), result.diagnosis


SECOND_DERIVATIVE = """\
    def refuse(ctx, grad):
        {}

    softmax_backward.register_autograd(refuse)"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('softmax has no second derivative')", ""),
        ("raise RuntimeError", "a second derivative raises an error without a message"),
        (
            "return grad @ grad.reshape(-1), None",
            "a second derivative raises torch's error, not yours: ",
        ),
    ],
    ids=["refused", "without a message", "another error"],
)
def test_any_error_counts_as_a_missing_second_derivative(body, message, tmp_path):
    result = check_edited("register", "second", tmp_path, second=SECOND_DERIVATIVE.format(body))
    assert result.state == ("wrong" if message else "correct") and message in "\n".join(result.diagnosis)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("is_none", "the gradient of a gradient penalty is 0, expected 0.082, and there is no error"),
        ("of_dy_alone", "the gradient of a gradient penalty is 0.027, expected -0.052, and there is no error"),
        ("without_words", "a second derivative raises an error without a message"),
    ],
)  # fmt: skip
def test_second_derivative_messages(name, message):
    wrong = next(bug for bug in zoo.load_wrong_solutions("p20") if bug.name == f"register_second_{name}")
    checker = load_checker(Exercise(PUZZLE, wrong.target_rung, roots.get_solutions()))
    (result,) = checker.check(wrong.build_target(), [wrong.gate])
    assert result.diagnosis[0] == f"second_derivative: {message}"


def test_correct_second_derivative_passes():
    """The gate accepts operators with a second derivative, such as PyTorch's softmax."""
    from harness.puzzles.p20.registration import RawKernels, RegisteredOp, second_derivative

    assert second_derivative(RegisteredOp(lambda x: x.softmax(-1), RawKernels())) is None


def test_in_place_modification_is_reported_once(tmp_path):
    result = check_edited("torch", "relu_mask", tmp_path, relu_mask=MODIFIES_INPUT)
    assert result.mistake == "inputs_unchanged" and len(result.diagnosis) == 1
    assert result.diagnosis[0].startswith("inputs_unchanged: an input is changed in place: later reads of it")


def test_missing_class_and_empty_register_are_reported(tmp_path):
    renamed = ("class LayerNorm(Function)", "class Layer_norm(Function)")
    result = check_edited("torch", "layernorm", tmp_path, renamed)
    assert result.diagnosis == ["the file defines no class LayerNorm(torch.autograd.Function)"]
    result = check_edited("register", "define", tmp_path, ("    return softmax\n", ""))
    assert "register() returns NoneType, expected the operator" in result.diagnosis[0]


# ---- Kernels ------------------------------------------------------------------------------------------------


def test_reference_does_not_depend_on_column_order():
    """In float64 all column orders of the baseline agree up to rounding."""
    import torch

    tensors = {name: torch.tensor(array) for name, array in inputs(cases()[2], "float64", 0).items()}
    first = compute_with_autograd(tensors)
    flipped = compute_with_autograd({name: tensor.flip(-1) for name, tensor in tensors.items()})
    for name in first:
        result = flipped[name] if name in ("mean", "rstd") else flipped[name].flip(-1)
        torch.testing.assert_close(first[name], result, equal_nan=True)


@pytest.mark.slow
@pytest.mark.compiles
def test_kernels_are_correct_through_the_command_line(command_line):
    result = command_line("p20", "--backward", "--solution", "--device", "virtual")
    assert result.code == 0, result.out + result.err
    reports = [f"   - Virtual GPU Backward ({variant}):  ✅ CORRECT" for variant in PUZZLE.variants]
    assert {*reports} <= {*result.lines} and "not compared" not in result.out
    assert "   ours:          292 (relu 4, softmax 128, layernorm 160)" in result.lines


def test_ledger_matches_the_ops():
    """Saved bytes are written by one call and read by the next."""
    ledger = unwrap(PUZZLE.make_ledger)((6, 40), "bfloat16")
    assert ledger.our_saved == {"relu": 32, "softmax": 480, "layernorm": 480 + 48}
    assert ledger.eager_saved["relu"] == 480
    assert {call.name for call in OPS} == {call.op.name for call in PUZZLE.calls}


def test_softmax_gradient_formula_matches_autograd():
    """Compare the page's explicit sum with autograd and central differences."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x, dP = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    P = x.softmax(-1)
    C = range(6)
    formula = torch.stack([P[:, c] * (dP[:, c] - sum(dP[:, k] * P[:, k] for k in C)) for c in C], -1)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(formula, torch.autograd.grad(leaf.softmax(-1), leaf, dP)[0])
    step = 1e-6 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    slope = (((x + step).softmax(-1) - (x - step).softmax(-1)) * dP).sum() / 2
    torch.testing.assert_close((formula * step).sum(), slope, rtol=1e-5, atol=1e-12)


# ---- Diagnoses -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edge", "lines"),
    [
        (
            'v["x"]',
            [
                "at x = 2: edges: x->a is 2, expected 4",
                "that is x itself, at every x: the edge carries the derivative of x^2",
            ],
        ),
        (
            "2",
            [
                "at x = 2: edges: x->a is 2, expected 4",
                "that is the same number at every x: the slope of x^2 depends on x",
            ],
        ),
        ('3 * v["x"]', ["at x = 2: edges: x->a is 6, expected 4"]),
    ],
)
def test_wrong_edge_case_is_reported(edge, lines, tmp_path):
    result = check_edited("derive", "edges", tmp_path, ('"x->a": 2 * v["x"]', f'"x->a": {edge}'))
    assert result.diagnosis == lines


def test_swapped_kernel_arguments_are_reported(tmp_path):
    result = check_edited(
        "register", "gradient", tmp_path, ("return softmax_backward(dy, y)", "return softmax_backward(y, dy)")
    )
    assert result.diagnosis == [
        "gradient: the gradient is dy * (y - sum(dy * y)): y and dy are swapped in the call of the kernel",
        "   in a model: the loss may still go down, but not along its gradient",
    ]


def test_uncallable_operator_is_not_reported_as_wrong_values(tmp_path):
    result = check_edited("register", "define", tmp_path, ("softmax(x: Tensor)", "softmax(x)"))
    assert (
        result.state == "wrong"
        and "must have a type annotation" in result.diagnosis[0]
        and len(result.diagnosis) == 1
    )


def test_gradcheck_error_is_one_line(tmp_path):
    result = check_edited("register", "gradient", tmp_path, ("return softmax_", "return 2 * softmax_"))
    assert result.diagnosis[0] == (
        "gradient: gradcheck in float64: Jacobian mismatch for output 0 with respect to input 0"
    )
    assert len(result.diagnosis) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "g.mean(-1, keepdim=True) - x_hat * (g * x_hat).mean(-1, keepdim=True))",
            "g.mean() - x_hat * (g * x_hat).mean())",
            "   your grad_layernorm equals the reference with c1 and c2 taken over the whole tensor, not over each row, to ",
        ),
        (
            "dweight = (dy * x_hat).sum(leading) if leading else dy * x_hat",
            "dweight = (g * x_hat).sum(leading) if leading else g * x_hat",
            "   your grad_weight equals the reference with the weight multiplied in: the weight's gradient uses dy, not "
            "dy * weight, to ",
        ),
    ],
)
def test_wrong_layernorm_in_pytorch_is_diagnosed(old, new, message, tmp_path):
    result = check_edited("torch", "layernorm", tmp_path, (old, new))
    assert result.diagnosis[0].startswith("at odd sizes") and result.diagnosis[-1].startswith(message), (
        result.diagnosis
    )


def test_sum_over_empty_axes_is_reported(tmp_path):
    new = "dbias = dy.sum(leading)"
    result = check_edited("torch", "layernorm", tmp_path, (f"{new} if leading else dy", new))
    assert "; `.sum(())` sums over all axes" in result.diagnosis[0], result.diagnosis
