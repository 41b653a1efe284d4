"""`check_backward`: the workbook's checks for anybody's own backward pass.

problem.py makes the inputs, tries.py has the tries, `harness/check/measured.py` compares a call with the
reference and measures the limit, names.py names a wrong gradient, report.py prints.
"""

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from harness.check.gradients import DTYPES, Line, dtype_name
from harness.check.measured import ReferenceRaised
from harness.devices.custom_ops import MojoOps, Worker, finish_all
from harness.testing.names import name_mistake
from harness.testing.problem import Entry, Problem, Run, is_refusal, make_problem
from harness.testing.report import Report, Tried
from harness.testing.tries import ALONE, MAY_REFUSE, TRIES, Check, NotHere, report_faults

__all__ = ["TRIES", "MojoOps", "Report", "check_backward"]


def check_backward(
    function: Run,
    *,
    reference: Run,
    inputs: Mapping[str, Entry],
    dtypes: Sequence[torch.dtype] = DTYPES,
    leave_out: Collection[str] = (),
    only: Collection[str] | None = None,
    allow_refusal: bool | Collection[str] = True,
    subgradients: bool = True,
    saved: Callable[..., int] | None = None,
    device: str = "cpu",
) -> Report:
    """Compare a function that has its own backward pass with a reference, in many kinds of call.

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
        function: A function of tensors by position, or a module; it returns a tensor or several.
        reference: The same by PyTorch's own operations; in float64 it is the truth. Where both are modules with parameters of the
            same names, the parameters are inputs too.
        inputs: Name -> a shape of names and numbers, in which one name is one size and `...` any leading axes; or a tensor; or a
            function of (sizes, generator) that makes one, for integers, masks and positive numbers. In the order of the arguments.
        dtypes: Those to try, the widest first. Most tries are in the first that the function takes.
        leave_out: Names of tries to leave out.
        only: Names of the tries to make; None for all.
        allow_refusal: Whether the function may raise before it has a result, or in which tries it may; never in `plain`. An
            exception in the backward pass is wrong.
        subgradients: Whether any number between the slopes of both sides of a kink is right.
        saved: (inputs) -> bytes that may be kept for the backward pass.
        device: Where the tensors are.

    Raises:
        ValueError: For arguments of another kind, an unknown try, or a reference that does not take the inputs.
    """
    if allow_refusal is False:
        allow_refusal = MAY_REFUSE
    for option, names in (("leave_out", leave_out), ("only", only), ("allow_refusal", allow_refusal)):
        if isinstance(names, str):
            raise ValueError(f"{option} is the string {names!r}, and should be a list of names")
        if names and names is not True and (unknown := set(names) - TRIES.keys()):
            raise ValueError(f"there is no try {', '.join(sorted(unknown))}; there are {', '.join(TRIES)}")
    start = time.perf_counter()
    finish_all()  # earlier findings are not this function's
    try:
        problem = make_problem(
            function, reference, inputs, dtypes, device, saved=saved, subgradients=subgradients
        )
    except ReferenceRaised as error:
        raise ValueError(str(error)) from error
    where = f"{dtype_name(problem.dtypes[0])} on {'the virtual GPU (sm_90a)' if Worker.running else device}"
    left_out = {*leave_out, *(dtype_name(dtype) for dtype in DTYPES if dtype not in dtypes)}
    tries: list[Tried] = []
    evidence = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, check in TRIES.items():
            if name in left_out or (only is not None and name not in only):
                continue
            if check is not report_faults and any(
                tried.name == "plain" and tried.state == "wrong" for tried in tries
            ):
                continue  # it would only repeat the error or its consequences
            may = name != "plain" and (allow_refusal is True or name in allow_refusal)
            tried = make_try(name, check, problem, may)
            line = tried.said
            if evidence is None and isinstance(line, Line) and line.distance and name != "written between":
                evidence = line.distance.evidence
            if words := find_lost_context(device):
                tried, evidence = Tried(name, "wrong", f"the CUDA context is lost: {words}"), None
            tries.append(tried)
            if words:
                break  # every further call would raise
    finish_all()
    mistake = name_mistake(problem, evidence) if evidence else ""
    return Report(tries, where, mistake, tuple(problem.notes), time.perf_counter() - start)


def make_try(name: str, check: Check, problem: Problem, may_refuse: bool) -> Tried:
    """Make a try. Raises ValueError if the reference raises in `plain`."""
    problem.dropped.clear()
    try:
        line = check(problem)
    except NotHere as reason:
        return Tried(name, "not here", str(reason))
    except ReferenceRaised as error:
        if name == "plain":
            raise ValueError(str(error)) from error
        return Tried(name, "dropped", str(error))
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        text += f" ({vars(error)['call']})" if "call" in vars(error) else ""
        if may_refuse and is_refusal(error):
            return Tried(name, "refused", text)
        line = f"it raises {text}" if is_refusal(error) else f"its backward pass raises {text}"
    if line and name not in ALONE and not passes(check, problem):
        return Tried(name, "dropped", "the reference does not pass it either")
    if not line and problem.dropped:
        return Tried(name, "dropped", "; ".join(dict.fromkeys(problem.dropped)))
    return Tried(name, "wrong", line) if line else Tried(name, "right")


def find_lost_context(device: str) -> str:
    """Return the error that has ended a GPU's context, as after a device-side assert; "" if it works."""
    try:
        torch.cuda.synchronize() if device != "cpu" else None
    except Exception as error:
        return str(error).split("\n")[0]
    return ""


def passes(check: Check, problem: Problem) -> bool:
    """Check that the reference itself passes a try; otherwise the try says nothing about the function."""
    try:
        return not check(replace(problem, function=problem.reference, module=None, dropped=[], notes=[]))
    except NotHere:
        return True
    except Exception:
        return False
