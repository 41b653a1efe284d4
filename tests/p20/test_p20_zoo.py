"""The checkers of puzzle 20 are checked: each wrong answer of its zoo is rejected by its gate and by the name of its mistake.

The wrong kernels are recorded together; those in Python are judged as they are.
"""

import pytest
from marks import chosen

from harness.check import zoo
from harness.check.checker import Checker, make_checker
from harness.devices.recorder import Order, record_many
from harness.learner.work import Work
from harness.puzzles.p20.spec import PUZZLE
from harness.spec.rungs import MojoRung
from harness.toolchain import roots

WRONG = zoo.load("p20")
KERNELS = [wrong for wrong in WRONG if isinstance(wrong.of_rung, MojoRung)]
PYTHON = [wrong for wrong in WRONG if wrong not in KERNELS]
USUAL = ("hard values", "odd sizes", "1 x 129", "3 x 257", "expanded", "huge logits")


def cases_for(kernel):
    """The cases that a wrong kernel is judged by: those that it needs, where it says so, else the usual ones."""
    return [case for case in PUZZLE.cases(None) if case.name in (kernel.cases or USUAL)]


def variant_of(kernel):
    """The variant whose kernels hold the mistake."""
    return next(gate.variant for gate in PUZZLE.kernel_gates if gate.id == kernel.gate)


@pytest.fixture(scope="module")
def checker(request):
    """One of each dtype for its wrong kernels; the chosen ones are recorded together."""
    orders = [
        Order(
            each.package(),
            tuple(dict.fromkeys(case.dims for case in cases_for(each))),
            (variant_of(each),),
            small_grid=True,
            dtype=each.dtype,
        )
        for each in chosen(request, "kernel")
    ]
    record_many(orders, "p20")
    return {dtype: Checker(PUZZLE, dtype=dtype) for dtype in {each.dtype for each in KERNELS}}


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_is_rejected_for_the_right_reason(kernel, checker):
    gates = [gate.id for gate in PUZZLE.kernel_gates if gate.variant == variant_of(kernel)]
    results = {r.gate.id: r for r in checker[kernel.dtype].check(kernel.package(), gates, cases_for(kernel))}
    wrong = {id for id, result in results.items() if result.state == "wrong"}
    named = results[kernel.gate]
    assert wrong == {kernel.gate, *kernel.also}, "\n".join(named.diagnosis)
    assert not kernel.mistake or named.mistake == kernel.mistake, "\n".join(named.diagnosis)


@pytest.fixture(scope="module")
def checkers():
    """The checker of each rung in Python."""
    return {rung.id: make_checker(Work(PUZZLE, rung, roots.solutions())) for rung in PUZZLE.rungs}


@pytest.mark.parametrize("wrong", PYTHON, ids=lambda wrong: wrong.name)
def test_a_wrong_answer_in_python_is_rejected_for_the_right_reason(wrong, checkers):
    results = {r.gate.id: r for r in checkers[wrong.rung].check(wrong.target())}
    named = results[wrong.gate]
    assert named.state == "wrong" and named.mistake == wrong.mistake, "\n".join(named.diagnosis)
    rejected = {id for id, result in results.items() if result.state == "wrong"}
    assert rejected == {wrong.gate, *wrong.also}, {id: results[id].diagnosis for id in rejected}


def test_the_zoo_has_a_wrong_answer_for_every_gate():
    assert {wrong.gate for wrong in WRONG} == {gate.id for gate in PUZZLE.gates}
    assert len(KERNELS) >= 16 and len(PYTHON) >= 24
    assert all(wrong.story and len(wrong.story.splitlines()) == 1 for wrong in WRONG)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("is_none", "the gradient of a gradient penalty is 0 where it should be 0.082, and nothing says so"),
        ("of_dy_alone", "the gradient of a gradient penalty is 0.027 where it should be -0.052, and nothing says so"),
        ("without_words", "a second derivative is refused, and no word says what is refused"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_second_derivative(name, words):
    wrong = next(each for each in PYTHON if each.name == f"register_second_{name}")
    checker = make_checker(Work(PUZZLE, wrong.of_rung, roots.solutions()))
    (result,) = checker.check(wrong.target(), [wrong.gate])
    assert result.diagnosis[0] == f"second_derivative: {words}"


def test_a_second_derivative_may_be_right():
    """PyTorch's own softmax has one: a gate that asks for a refusal would refuse it."""
    from harness.puzzles.p20.registration import RawKernels, Registered, second_derivative

    assert second_derivative(Registered(lambda x: x.softmax(-1), RawKernels(), "none")) is None
