"""`check_backward`: the workbook's checks for your own backward pass.

problem.py makes the inputs, checks.py defines the checks, `harness/check/call_comparison.py` compares a
call with the reference and measures the tolerance, mistakes.py identifies the mistake, report.py formats the
results.
"""

import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from harness.check.call_comparison import InvalidReference
from harness.check.gradients import DTYPES, Message, describe_error, get_dtype_name
from harness.devices.custom_ops import MojoOps, Worker, finish_all
from harness.testing.checks import CHECKS, MAY_REFUSE, REFERENCE_EXEMPT, Check, NotApplicable, is_accepted
from harness.testing.mistakes import identify_mistake
from harness.testing.problem import AnyFunction, InputSpec, Problem, check_arguments, make_problem, require
from harness.testing.report import CheckResult, Report

__all__ = ["CHECKS", "MojoOps", "Report", "check_backward"]


def check_backward(
    function: AnyFunction,
    *,
    reference: AnyFunction,
    inputs: Mapping[str, InputSpec],
    dtypes: Sequence[torch.dtype] = DTYPES,
    leave_out: Collection[str] = (),
    only: Collection[str] | None = None,
    allow_refusal: bool | Collection[str] = True,
    subgradients: bool = True,
    saved: Callable[..., int] | None = None,
    device: str | torch.device = "cpu",
) -> Report:
    """Compare a function with its own backward pass against a reference, in many kinds of call.

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
    >>> print(report.wrong[0].message)
    odd sizes: the gradient of weight at [0]: got 0.702737, expected 2.10821, off by 6.7e-01 of the largest element
    >>> print(report.mistake)
    the gradient of weight is the mean over N, and should be the sum

    Args:
        function: A function of positional tensors, or a module; it returns one tensor or several.
        reference: The same in PyTorch's own operations, without randomness; in float64 it is the truth. If
            both are modules with the same parameter names, the parameters that are not frozen are inputs too.
        inputs: Name -> a shape of numbers and names (one name is one size, `...` any leading axes), a tensor,
            or a function of (sizes, generator) that makes one: integers, masks, ...; in argument order. Those of
            a floating dtype are expected to have gradients: if one has none, detach it in the reference.
        dtypes: Dtypes to check, widest first. Most checks use the first one that the function accepts.
        leave_out: Names of checks to leave out.
        only: Names of the checks to run; None for all.
        allow_refusal: Whether the forward pass may raise, or the checks in which it may; never in `plain`.
            An exception in the backward pass counts as wrong.
        subgradients: Whether any number between the two one-sided slopes at a kink is accepted.
        saved: (inputs) -> the number of bytes that may be saved for the backward pass.
        device: The device of the tensors.

    Raises:
        ValueError: If an argument is invalid, a check is unknown, or the reference rejects the inputs.
    """
    check_arguments(function, reference, inputs, dtypes, saved)
    may_refuse = CHECKS if allow_refusal is True else MAY_REFUSE if allow_refusal is False else allow_refusal
    only = CHECKS if only is None else only
    selected = select_checks(dtypes, leave_out=leave_out, only=only, allow_refusal=may_refuse)
    start = time.perf_counter()
    finish_all()  # discard findings of earlier functions
    problem = make_problem(function, reference, inputs, dtypes, device, saved, subgradients=subgradients)
    accepted = [dtype for dtype in dtypes if is_accepted(problem, dtype)] or dtypes[:1]
    problem = replace(problem, dtypes=tuple(accepted))
    device_name = "the virtual GPU (sm_90a)" if Worker.workers else device
    where = f"{get_dtype_name(problem.dtypes[0])} on {device_name}"
    results: list[CheckResult] = []
    mistake: str | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in selected:
            if (
                name != "races and memory"
                and results
                and (results[0].name, results[0].state) == ("plain", "wrong")
            ):
                continue  # they would only repeat the error
            result = run_check(name, CHECKS[name], problem, name != "plain" and name in may_refuse)
            if message := find_lost_context(problem.device):
                results.append(CheckResult(name, "wrong", f"the CUDA context is lost: {message}"))
                break  # every further call would raise
            results.append(result)
            line = result.message
            if mistake is None and isinstance(line, Message) and line.call and name != "written between":
                mistake = identify_mistake(problem, line.call)
    finish_all()
    return Report(results, where, mistake or "", tuple(problem.notes), time.perf_counter() - start)


def select_checks(dtypes: Sequence[torch.dtype], **options: Collection[str]) -> list[str]:
    """Return the names of the checks to run. Raises ValueError if one is unknown or none is left."""
    for option, names in options.items():
        is_valid = isinstance(names, Collection) and not isinstance(names, str)
        require(is_valid, option, names, "a list of names of checks")
        if unknown := [str(name) for name in names if name not in [*CHECKS]]:
            raise ValueError(f"there is no check {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    excluded = {*options["leave_out"], *(get_dtype_name(dtype) for dtype in DTYPES if dtype not in dtypes)}
    selected = [name for name in CHECKS if name in options["only"] and name not in excluded]
    if not selected:
        raise ValueError("no check is left: see only, leave_out and dtypes")
    return selected


def run_check(name: str, check: Check, problem: Problem, may_refuse: bool) -> CheckResult:
    """Run one check and return its result. Raises InvalidReference if the reference raises in `plain`."""
    problem.not_compared.clear()
    try:
        line = check(problem)
    except NotApplicable as reason:
        return CheckResult(name, "not here", str(reason))
    except InvalidReference as error:
        if name == "plain":
            raise
        return CheckResult(name, "dropped", str(error))
    except Exception as error:
        attributes, text = vars(error), describe_error(error)
        text += f" ({attributes['call']})" if "call" in attributes else ""
        if may_refuse and "is_refusal" in attributes:
            return CheckResult(name, "refused", text)
        line = f"it raises {text}" if "is_refusal" in attributes else f"its backward pass raises {text}"
    if line and name not in REFERENCE_EXEMPT and problem.function is not problem.reference:
        self_check = replace(problem, function=problem.reference, module=None, not_compared={}, notes=[])
        if run_check(name, check, self_check, may_refuse=False).state == "wrong":
            return CheckResult(name, "dropped", "the reference does not pass it either")
    if not line and problem.not_compared:
        notes = (
            f"{name} (PyTorch's own error is {error:.0e})" for name, error in problem.not_compared.items()
        )
        return CheckResult(name, "dropped", "; ".join(notes))
    return CheckResult(name, "wrong", line) if line else CheckResult(name, "right")


def find_lost_context(device: str) -> str:
    """Return the error that broke the CUDA context, such as a device-side assert; "" if it still works."""
    try:
        torch.cuda.synchronize() if device != "cpu" else None
    except Exception as error:
        return str(error).split("\n")[0]
    return ""
