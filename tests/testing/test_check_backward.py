"""`check_backward` rejects what is wrong by the try that the record names, accuses nobody who is right, and says which, where and what."""

import csv
import doctest

import pytest
import torch
import torch.nn.functional as F
from faults import faults
from right_cases import functions, integers, layers, public
from torch import Tensor
from zoo_cases import Asked, of_p20, of_p21, of_p23, of_p24, of_register, right_of_p21, targets, wrong_ops

import harness.testing
from harness.check.measured import ReferenceRaised
from harness.puzzles.p21.known import KNOWN
from harness.testing import TRIES, check_backward
from harness.testing.problem import make_problem
from harness.testing.tries import refuse_bad_index
from harness.toolchain import roots

RECORD = roots.CHECKOUT / "book" / "records" / "check_backward.csv"
LINES = [line for line in RECORD.read_text().splitlines() if not line.startswith("#")]
FOUND = {row["wrong"]: row for row in csv.DictReader(LINES)}
WRONG = {asked.name: asked for asked in [*wrong_ops(), *faults()]}
RIGHT = [*layers(), *functions(), *public()]
SLOW = ("compile", "thousands of rows", "larger than a block", "gradcheck")
"""Tries that take long, or load the compiler."""
SHAPES = {"x": ("N", "H"), "w": ("H",)}


def tried(asked: Asked, **more):
    """The report on one of the cases."""
    return check_backward(asked.make(), reference=asked.reference, inputs=asked.inputs, **(asked.more | more))


def test_the_record_is_of_every_wrong_one():
    assert FOUND.keys() == WRONG.keys()
    counts = [len(list(wrong)) for wrong in (of_p21(), of_p20(), of_register(), of_p23(), of_p24(), faults())]
    assert counts == [46, 11, 7, 2, 7, 24], "all that the puzzles have, and reports"


def test_as_many_right_ones_as_were_promised():
    assert len({asked.name for asked in functions()}) >= 40 and len({asked.name for asked in public()}) >= 15
    assert len({asked.name for asked in right_of_p21()}) == 13
    assert {"LayerNormLinear", "attention", "attention_varlen", "linear_cross_entropy"} <= {
        a.name for a in layers()
    }


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_rejected_by_the_try_that_the_record_names(name):
    report = tried(WRONG[name], only=[FOUND[name]["check_backward"]])
    assert [each.name for each in report.wrong] == [FOUND[name]["check_backward"]], report
    assert report.mistake == FOUND[name]["named"]


@pytest.mark.parametrize("asked", RIGHT, ids=lambda asked: asked.name)
def test_a_right_one_is_not_accused(asked):
    tried(asked, leave_out=SLOW).raise_if_wrong()


@pytest.mark.parametrize("asked", right_of_p21(), ids=lambda asked: asked.name)
def test_the_solutions_of_puzzle_21_are_right_at_all_sizes(asked):
    """But for autocast, which the puzzle does not ask for, and a row of infinite scores, of which PyTorch's attention makes 0."""
    infinite = ["infinity", "negative infinity"] * (asked.name == "p21 attention")
    tried(asked, leave_out=[*SLOW, "autocast", *infinite]).raise_if_wrong()


@pytest.mark.slow
@pytest.mark.parametrize("right", [layers, functions, public])
def test_a_right_one_is_not_accused_by_what_takes_long(right):
    for asked in right():
        report = tried(asked, only=SLOW)
        assert report.ok, (asked.name, report)


# ---- Names ---------------------------------------------------------------------------------------------------

WB = {"x": ("N", "H"), "w": ("H",), "b": ("H",)}
OPS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), WB),
    "rms_norm": (lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), SHAPES),
    "linear": (F.linear, {"x": ("N", 5), "w": (5, 5)}),
    "softmax": (lambda x: x.softmax(-1), {"x": ("N", "H")}),
    "log_softmax": (lambda x: x.log_softmax(-1), {"x": ("N", "H")}),
    "attention": (
        F.scaled_dot_product_attention,
        {"q": ("B", "S", 4), "k": ("B", "T", 4), "v": ("B", "T", 4)},
    ),
    "cross_entropy": (
        lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()),
        {"x": ("N", "T", "C"), "t": targets},
    ),
    "gelu": (F.gelu, {"x": ("N", "H")}),
    "silu": (F.silu, {"x": ("N", "H")}),
    "relu": (F.relu, {"x": ("N", "H")}),
    "embedding": (F.embedding, {"i": integers(5, "N", "T"), "w": (5, "H")}),
    "indexing": (lambda w, i: w[i], {"w": (5, "H"), "i": integers(5, "N", "T")}),
}


def with_mistake(op: str, number: int, formula, wrong: str):
    """An op of which the gradient of one input has a mistake."""

    class Mistaken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return OPS[op][0](*tensors)

        @staticmethod
        def backward(ctx, dy):
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in ctx.saved_tensors]
            with torch.enable_grad():
                out = OPS[op][0](*leaves)
            asking = [t for t in leaves if t.requires_grad]
            grads = iter(torch.autograd.grad(out, asking, dy))
            right = [next(grads) if t.requires_grad else None for t in leaves]
            with torch.enable_grad():
                right[number] = formula([t.detach() for t in leaves], dy, wrong)
            return tuple(right)

    return Mistaken.apply


MISTAKES = [
    (number, formula, wrong, words) for number, formula, wrongs in KNOWN for wrong, words in wrongs.items()
]
NAMED_OPS = (
    ["layer_norm"] * 6 + ["rms_norm"] * 3 + ["layer_norm"] * 3 + ["rms_norm"] * 2 + ["linear"] + ["softmax"] * 5
    + ["log_softmax"] * 2 + ["attention"] * 4 + ["cross_entropy"] * 4 + ["gelu", "silu", "relu", "embedding", "indexing"]
)  # fmt: skip


@pytest.mark.parametrize(
    ("op", "mistake"),
    list(zip(NAMED_OPS, MISTAKES, strict=True)),
    ids=lambda value: value if isinstance(value, str) else value[3],
)
def test_each_known_mistake_is_named_and_no_other_fits(op, mistake):
    number, formula, wrong, words = mistake
    reference, inputs = OPS[op]
    report = report_on(with_mistake(op, number, formula, wrong), inputs, reference, only=["plain"])
    assert report.mistake == f"the gradient of {list(inputs)[number]} equals the reference {words}", report


GENERAL = [
    (lambda x, w, dy: (dy.mT * w, dy * x), "the gradient of x is transposed"),
    (lambda x, w, dy: (dy * x, dy * x), "the gradient of x is the gradient of w"),
    (lambda x, w, dy: (dy * w * 3, dy * x), "the gradient of x is 3 times what it should be"),
    (
        lambda x, w, dy: (w.clone(), dy * x),
        "the gradient of x is right for a gradient of ones coming in, not for this one",
    ),
    (lambda x, w, dy: (0 * dy, dy * x), "the gradient of x is 0 everywhere"),
    (lambda x, w, dy: (dy * w + 1, dy * x), ""),
]


@pytest.mark.parametrize(
    ("backward", "name"), GENERAL, ids=lambda value: value if isinstance(value, str) else None
)
def test_general_mistakes_are_named(backward, name):
    symmetric = torch.tensor([[1.0, 2.0, 3.0], [2.0, -1.0, 4.0], [3.0, 4.0, 0.5]])
    inputs = {"x": (3, 3), "w": symmetric}
    wrong = scale(lambda ctx, dy: backward(*ctx.saved_tensors, dy))
    assert report_on(wrong.apply, inputs, only=["plain"]).mistake == name


def test_where_two_names_fit_there_is_none():
    """The gradient of y is that of x transposed."""

    class Exchanged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y, w):
            ctx.save_for_backward(w)
            return (x * w).sum() + (y * w.mT).sum()

        @staticmethod
        def backward(ctx, d):
            (w,) = ctx.saved_tensors
            return d * w.mT, d * w.mT, None

    weight = torch.arange(9).view(3, 3)
    inputs = {"x": (3, 3), "y": (3, 3), "w": lambda sizes, generator: weight}
    report = report_on(
        Exchanged.apply, inputs, lambda x, y, w: (x * w).sum() + (y * w.mT).sum(), only=["plain"]
    )
    assert "the gradient of x" in report.wrong[0].said and report.mistake == ""


# ---- What it says ------------------------------------------------------------------------------------------


def test_the_example_of_the_docstring_runs():
    found = doctest.testmod(harness.testing)
    assert found.attempted and not found.failed


class Scale(torch.autograd.Function):
    """x * w, right."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy * w, (dy * x).flatten(0, -2).sum(0)


def scale(backward) -> type[Scale]:
    """The same with another backward pass."""
    return type("Wrong", (Scale,), {"backward": staticmethod(backward)})


def report_on(function, inputs=SHAPES, reference=torch.mul, **more):
    return check_backward(function, reference=reference, inputs=inputs, **{"leave_out": SLOW, **more})


def test_the_failure_is_the_report():
    wrong = scale(lambda ctx, dy: (dy * ctx.saved_tensors[1] * 2, (dy * ctx.saved_tensors[0]).sum(0)))
    report = report_on(wrong.apply)
    with pytest.raises(AssertionError) as raised:
        report.raise_if_wrong()
    assert str(report) in str(raised.value) and not report.ok
    assert str(report).startswith("WRONG: odd sizes: the gradient of x at [")
    assert "in the try 'plain'" in str(report) and "no other was made" in str(report)
    assert len(str(report).splitlines()) < 40 and max(map(len, str(report).splitlines())) <= 100


def test_a_right_report_says_what_was_tried():
    report = report_on(Scale.apply)
    assert report.ok and "the same bits in two runs" in str(report)
    assert "another stream" not in [each.name for each in report.of("right")], "there is none on a CPU"


def narrow(x, w):
    """Float32 alone."""
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return Scale.apply(x, w)


def test_a_function_for_one_dtype_is_tried_in_it_and_refuses_the_others():
    report = report_on(narrow)
    assert report.ok and report.where.startswith("float32")
    assert {each.name for each in report.of("refused")} == {"float64", "bfloat16", "float16"}
    assert "refused: float64: TypeError: float32 only" in str(report)
    strict = report_on(narrow, allow_refusal=False)
    assert {each.name for each in strict.wrong} == {"float64", "bfloat16", "float16"}
    some = report_on(narrow, allow_refusal=["float64"])
    assert {each.name for each in some.wrong} == {"bfloat16", "float16"}
    assert report_on(narrow, dtypes=[torch.float32], allow_refusal=False).ok


def test_a_plain_call_must_not_be_refused():
    def refuses(x, w):
        raise ValueError("never")

    assert report_on(refuses).wrong[0].said == "it raises ValueError: never (odd sizes)"


def test_what_is_raised_in_the_backward_pass_is_wrong():
    def raises(ctx, dy):
        raise KeyError("mask") if not dy.is_contiguous() else ValueError

    report = report_on(scale(raises).apply)
    assert report.wrong[0].said.startswith("its backward pass raises ValueError")


def test_a_kink_has_two_sides_unless_the_reference_is_asked_for():
    def other(x: Tensor) -> Tensor:
        return torch.where(x < 0, 0.0, x)

    assert report_on(other, {"x": ("N", "H")}, F.relu).ok
    strict = report_on(other, {"x": ("N", "H")}, F.relu, subgradients=False)
    assert "zeros" in [each.name for each in strict.wrong]


def test_a_module_s_parameters_are_inputs():
    class Wrong(torch.nn.Linear):
        def forward(self, input):
            return F.linear(input, self.weight, self.bias.detach())

    report = report_on(Wrong(6, 5), {"x": (..., 6)}, torch.nn.Linear(6, 5))
    assert "the gradient of bias" in report.wrong[0].said
    assert report_on(torch.nn.Linear(6, 5), {"x": (..., 6)}, torch.nn.Linear(6, 5)).ok
    with pytest.raises(ValueError, match=r"the function has parameters \['weight', 'bias'\], the reference"):
        report_on(torch.nn.Linear(6, 5), {"x": (..., 6)}, torch.nn.Linear(6, 5, bias=False))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"only": ["nonsense"]}, "there is no try nonsense; there are plain, "),
        ({"allow_refusal": ["float46"]}, "there is no try float46; there are plain, "),
        ({"only": "plain"}, "only is the string 'plain', and should be a list of names"),
        ({"dtypes": torch.float32}, "dtypes is torch.float32, and should be a list"),
        ({"dtypes": []}, r"dtypes is \[\], and should be a list"),
        (
            {"dtypes": [torch.int32]},
            r"dtypes is \[torch.int32\], and should be a list of floating-point dtypes",
        ),
        (
            {"inputs": {"x": "NH", "w": ("H",)}},
            r"input x is 'NH', and should be a shape such as \('N', 3\), a tensor",
        ),
        ({"inputs": {"x": 3, "w": ("H",)}}, "input x is 3, and should be a shape"),
        ({"inputs": {"x": ("N", 2.5), "w": ("H",)}}, r"input x is \('N', 2.5\), and should be a shape"),
        ({"inputs": SHAPES | {"w": lambda sizes: sizes}}, "the function of input w raises TypeError: "),
        ({"inputs": SHAPES | {"w": lambda sizes, generator: 3}}, "the function of an input returns int"),
        ({"inputs": {"x": ("N", "H"), "w": ("K",)}}, "the reference raises RuntimeError"),
        ({"reference": lambda x, w: (x * w).detach()}, "no output of the reference has a gradient"),
    ],
)
def test_what_cannot_be_asked_is_refused(more, words):
    with pytest.raises(ValueError, match=words):
        report_on(Scale.apply, **more)


def test_what_is_no_tensor_is_wrong():
    assert report_on(lambda x, w: 3).wrong[0].said == (
        "it raises TypeError: the function returns int, expected a tensor or several (odd sizes)"
    )


def test_what_is_raised_says_in_which_call():
    """A sum over the leading axes that is one without them, and an output that nothing flows back to."""
    wrong = scale(lambda ctx, dy: (dy * ctx.saved_tensors[1], (dy * ctx.saved_tensors[0]).sum(0)))
    said = report_on(wrong.apply, {"x": (..., "H"), "w": ("H",)}, only=["plain"]).wrong[0].said
    assert said.startswith("its backward pass raises RuntimeError: ") and said.endswith("(row sizes)")

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return 2 * x, 3 * x

        @staticmethod
        def backward(ctx, d, e):
            return 2 * d + 3 * e

    (some,) = report_on(Both.apply, {"x": ("N",)}, lambda x: (2 * x, 3 * x), only=["some outputs"]).wrong
    assert "NoneType" in some.said and some.said.endswith("(where only output 0 is used)")


def test_buffers_that_calls_share_are_found():
    """A gradient, or a result, in memory that the next call writes to."""
    shared: dict = {}

    def share(t):
        return shared.setdefault((t.shape, t.dtype), t.clone()).copy_(t)

    gradient = scale(lambda ctx, dy: (dy * ctx.saved_tensors[1], share((dy * ctx.saved_tensors[0]).sum(0))))
    (tried,) = report_on(gradient.apply, only=["alternating calls"]).wrong
    assert "before the results are read" in tried.said or "the gradient of w at [" in tried.said
    result = type(
        "Result", (Scale,), {"forward": staticmethod(lambda ctx, x, w: share(Scale.forward(ctx, x, w)))}
    )
    (tried,) = report_on(result.apply, only=["alternating calls"]).wrong
    assert tried.said == "a later call overwrites an earlier result"


def test_a_second_derivative_is_judged_on_the_inputs_as_they_were():
    """The backward pass writes its result over the input."""
    (report,) = tried(WRONG["unslothai/unsloth#5002"], only=["second derivative"]).wrong
    assert report.said.startswith("the gradient of a gradient")


def test_buffers_of_a_module_take_the_dtype_of_the_call():
    modules = [torch.nn.BatchNorm1d(4).eval() for _ in range(2)]
    report = report_on(modules[0], {"x": ("N", 4)}, modules[1], only=["plain", "float64", "bfloat16"])
    assert report.where.startswith("float64") and len(report.of("right")) == 3


def test_a_module_beside_a_function_is_told_what_is_not_checked():
    module = torch.nn.Linear(4, 4)
    report = report_on(
        module, {"x": ("N", 4)}, lambda x: F.linear(x, module.weight.to(x), module.bias.to(x)), only=["plain"]
    )
    assert "the module's parameters are not checked" in str(report)


@pytest.mark.parametrize("name", [name for name in TRIES if name not in SLOW])
def test_a_try_can_be_left_out_and_made_alone(name):
    made = {each.name for each in report_on(Scale.apply, leave_out=[*SLOW, name]).tries}
    assert name not in made
    assert [each.name for each in report_on(Scale.apply, only=[name], leave_out=()).tries] == [name]


def test_pytorch_s_own_error_is_measured_in_other_orders_of_summation():
    """A sum in float32 of numbers that cancel: one order may happen to be exact, and is no limit."""

    def other_order(x):
        return x.flip(0).cumsum(0)[-1]

    large = torch.tensor([1e4, 1.0, -1e4, 1e-3, 3.0, -3.0]).repeat(50)
    report_on(other_order, {"x": large}, lambda x: x.sum(0), dtypes=[torch.float32]).raise_if_wrong()


def test_inputs_and_gradient_that_lie_in_memory_alike_are_tried():
    """A loop over memory that makes the gradient contiguous only where its strides are not those of x."""

    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        coming = (dy if dy.stride() == x.stride() else dy.contiguous()).as_strided((dy.numel(),), (1,))
        return coming.view(dy.shape) * w, (dy * x).flatten(0, -2).sum(0)

    report = report_on(scale(backward).apply)
    assert [each.name for each in report.wrong] == ["layout of the gradient"]
    assert report.wrong[0].said.startswith("where inputs and gradient are not contiguous (transposed)")


def test_an_index_beside_an_empty_tensor_is_not_handed_to_a_gpu():
    """PyTorch's own embedding reads past a table without rows, and its backward pass past one without columns."""
    inputs = {"w": ("V", "H"), "i": lambda s, g: torch.randint(max(s["V"], 1), (s["N"],), generator=g)}
    problem = make_problem(lambda w, i: w[i], lambda w, i: w[i], inputs, [torch.float32], "cpu")
    assert problem.free == ("V", "H", "N")
    for sizes in ("0 for V", "0 for H"):
        with pytest.raises(ReferenceRaised, match="an index into an empty tensor may end the GPU's context"):
            refuse_bad_index(problem, sizes)
    for sizes in ("0 for N", "0 for all"):
        refuse_bad_index(problem, sizes)
    masked = {"x": ("N", "H"), "m": lambda s, g: torch.ones(s["N"], 1, dtype=torch.bool)}
    refuse_bad_index(make_problem(torch.mul, torch.mul, masked, [torch.float32], "cpu"), "0 for H")


def test_a_lost_context_ends_the_tries(monkeypatch):
    words = iter(["", "device-side assert triggered"])
    monkeypatch.setattr(harness.testing, "find_lost_context", lambda device: next(words))
    report = report_on(Scale.apply)
    assert [each.name for each in report.tries] == ["plain", "written to"]
    assert report.wrong[0].said == "the CUDA context is lost: device-side assert triggered"
