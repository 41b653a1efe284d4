"""What puzzle 20 says of second derivatives."""

import pytest

from harness.check import zoo
from harness.check.checker import make_checker
from harness.learner.work import Work
from harness.puzzles.p20.spec import PUZZLE
from harness.toolchain import roots

WRONG = zoo.load("p20")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("is_none", "the gradient of a gradient penalty is 0 where it should be 0.082, and nothing says so"),
        ("of_dy_alone", "the gradient of a gradient penalty is 0.027 where it should be -0.052, and nothing says so"),
        ("without_words", "a second derivative is refused, and no word says what is refused"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_second_derivative(name, words):
    wrong = next(each for each in WRONG if each.name == f"register_second_{name}")
    checker = make_checker(Work(PUZZLE, wrong.of_rung, roots.solutions()))
    (result,) = checker.check(wrong.target(), [wrong.gate])
    assert result.diagnosis[0] == f"second_derivative: {words}"


def test_a_second_derivative_may_be_right():
    """PyTorch's own softmax has one: a gate that asks for a refusal would refuse it."""
    from harness.puzzles.p20.registration import RawKernels, Registered, second_derivative

    assert second_derivative(Registered(lambda x: x.softmax(-1), RawKernels(), "none")) is None
