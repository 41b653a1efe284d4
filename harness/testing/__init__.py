"""`check_backward`: the workbook's checks for anybody's own backward pass.

    from harness.testing import check_backward

    report = check_backward(my_layer, reference=torch_layer, inputs={"x": ("N", "H"), "weight": ("H",)})
    print(report)            # one screen: what is wrong, in which try, where, by how much
    report.raise_if_wrong()  # in a test

From the call to the report: problem.py makes the inputs, tries.py has the tries, `harness/check/measured.py` compares a call with
the reference and measures the limit, report.py is what is printed.
"""

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from harness.check.gradients import DTYPES, Line
from harness.check.measured import ReferenceRaised
from harness.testing.names import named
from harness.testing.problem import Entry, Problem, Refused, is_refusal, make_problem, words_of
from harness.testing.report import Report, Tried
from harness.testing.tries import ALONE, MAY_REFUSE, TRIES, Check, NotHere

__all__ = ["TRIES", "Report", "check_backward"]


def check_backward(
    function: Callable[..., object],
    *,
    reference: Callable[..., object],
    inputs: Mapping[str, Entry],
    dtypes: Sequence[torch.dtype] = DTYPES,
    leave_out: Collection[str] = (),
    only: Collection[str] | None = None,
    allow_refusal: bool | Collection[str] = True,
    subgradients: bool = True,
    saved: Callable[..., int] | None = None,
    device: str = "cpu",
) -> Report:
    """Try a function with a backward pass of its own in many kinds of call, each beside the same call of a reference.

    >>> import torch
    >>> class Scale(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x, weight):
    ...         ctx.save_for_backward(x, weight)
    ...         return x * weight
    ...     @staticmethod
    ...     def backward(ctx, dy):
    ...         x, weight = ctx.saved_tensors
    ...         return dy * weight, (dy * x).mean(0)
    >>> shapes = {"x": ("N", "H"), "weight": ("H",)}
    >>> report = check_backward(Scale.apply, reference=torch.mul, inputs=shapes, only=["plain"])
    >>> print(report.wrong[0].said)
    odd sizes: the gradient of weight at [0]: got 0.702737, expected 2.10821, off by 6.7e-01 of the largest element
    >>> print(report.mistake)
    the gradient of weight is the mean over N, and should be the sum

    Args:
        function: What is checked: a function of tensors, or a module; it returns a tensor or several.
        reference: The same by PyTorch's own differentiable operations; a module where the function is one, with parameters of the
            same names, which then are inputs too. In float64 it is what is right.
        inputs: Name -> a shape of names and numbers, in which one name is one size and `...` any leading axes; or a tensor; or a
            function of (sizes, generator) that makes one, for integers, masks and positive numbers.
        dtypes: Those to try, the widest first. Most tries are in the first that the function takes.
        leave_out: Names of tries that are not made.
        only: Names of those that are; None for all.
        allow_refusal: Whether the function may raise before it has a result, or in which tries it may. In `plain` it must not. What
            is raised in the backward pass is wrong.
        subgradients: Whether at a kink any number between the slopes of both sides is right, not the reference's alone.
        saved: (inputs) -> bytes that may be kept for the backward pass.
        device: Where it runs.

    Raises:
        ValueError: For a try that there is none of, or a reference that does not take the inputs.
    """
    asked = {name for names in (leave_out, only or ()) for name in names}
    if unknown := asked - TRIES.keys():
        raise ValueError(f"there is no try {', '.join(sorted(unknown))}; there are {', '.join(TRIES)}")
    start = time.perf_counter()
    problem = make_problem(function, reference, inputs, dtypes, saved, subgradients, device)
    left_out = {*leave_out, *(name for dtype in DTYPES if dtype not in dtypes for name in [name_of(dtype)])}
    if allow_refusal is False:
        allow_refusal = MAY_REFUSE
    tries: list[Tried] = []
    evidence = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, check in TRIES.items():
            if name in left_out or (only is not None and name not in only):
                continue
            may = name != "plain" and (allow_refusal is True or name in allow_refusal)
            tried, line = one_try(name, check, problem, may)
            if evidence is None and isinstance(line, Line) and line.distance and name != "written between":
                evidence = line.distance.evidence
            tries.append(tried)
            if name == "plain" and line:
                break  # the others would say the same, or what follows from it
    where = f"{name_of(problem.dtypes[0])} on {device}"
    mistake = named(problem, evidence) if evidence else ""
    return Report(tries, where, mistake, tuple(problem.notes), time.perf_counter() - start)


def one_try(name: str, check: Check, problem: Problem, may_refuse: bool) -> tuple[Tried, str | None]:
    """What came of a try, and the line that says what is wrong. Raises ValueError where the reference raises in `plain`."""
    problem.dropped.clear()
    try:
        line = check(problem)
    except NotHere as reason:
        return Tried(name, "not here", str(reason)), None
    except ReferenceRaised as error:
        if name == "plain":
            raise ValueError(str(error)) from error
        return Tried(name, "dropped", str(error)), None
    except Exception as error:
        said = str(error) if isinstance(error, Refused) else words_of(error)
        if may_refuse and is_refusal(error):
            return Tried(name, "refused", said), None
        line = f"it raises {said}" if is_refusal(error) else f"its backward pass raises {said}"
    if line and name not in ALONE and not passes(check, problem):
        return Tried(name, "dropped", "the reference does not pass it either"), None
    if line:
        return Tried(name, "wrong", line), line
    if problem.dropped:
        return Tried(name, "dropped", "; ".join(dict.fromkeys(problem.dropped))), None
    return Tried(name, "right"), None


def passes(check: Check, problem: Problem) -> bool:
    """Whether the reference itself passes a try: where it does not, nothing can be said of the function."""
    itself = replace(problem, function=problem.reference, module=None, dropped=[], notes=[])
    try:
        return not check(itself)
    except NotHere:
        return True
    except Exception:
        return False


def name_of(dtype: torch.dtype) -> str:
    """A dtype as reports call it."""
    return str(dtype).removeprefix("torch.")
