"""`check_backward` rejects what is wrong by the try that the record names, accuses nobody who is right, and says which, where and what."""

import csv
import doctest

import pytest
import torch
import torch.nn.functional as F
from faults import faults
from right_cases import functions, layers, public
from torch import Tensor
from zoo_cases import Asked, wrong_ops

import harness.testing
from harness.testing import TRIES, check_backward
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
    assert FOUND.keys() == WRONG.keys() and len(WRONG) >= 46 + 9 + 2 + 7 + 20


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_is_rejected_by_the_try_that_the_record_names(name):
    report = tried(WRONG[name], only=[FOUND[name]["check_backward"]])
    assert [each.name for each in report.wrong] == [FOUND[name]["check_backward"]], report
    assert report.mistake == FOUND[name]["named"]


@pytest.mark.parametrize("asked", RIGHT, ids=lambda asked: asked.name)
def test_a_right_one_is_not_accused(asked):
    tried(asked, leave_out=SLOW).raise_if_wrong()


@pytest.mark.slow
@pytest.mark.parametrize("right", [layers, functions, public])
def test_a_right_one_is_not_accused_by_what_takes_long(right):
    for asked in right():
        report = tried(asked, only=SLOW)
        assert report.ok, (asked.name, report)


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

    assert report_on(refuses).wrong[0].said == "it raises ValueError: never"


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


def test_what_cannot_be_asked_is_refused():
    with pytest.raises(ValueError, match="there is no try nonsense; there are plain, "):
        report_on(Scale.apply, only=["nonsense"])
    with pytest.raises(ValueError, match="the reference raises RuntimeError"):
        report_on(Scale.apply, {"x": ("N", "H"), "w": ("K",)})
    assert report_on(lambda x, w: 3).wrong[0].said == (
        "it raises TypeError: the function returns int, expected a tensor or several"
    )


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


def test_a_lost_context_ends_the_tries(monkeypatch):
    words = iter(["", "device-side assert triggered"])
    monkeypatch.setattr(harness.testing, "find_lost_context", lambda device: next(words))
    report = report_on(Scale.apply)
    assert [each.name for each in report.tries] == ["plain", "written to"]
    assert report.wrong[0].said == "the CUDA context is lost: device-side assert triggered"
