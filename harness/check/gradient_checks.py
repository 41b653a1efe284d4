"""Check one differentiable PyTorch function on the CPU, one property per check.

Every check takes a `Subject` and returns None, or a message about the error and how it would affect a model.
Some are weak checks in common use.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.check.call_comparison import (
    ROUNDING_UNITS,
    TOLERANCE_FACTOR,
    InvalidReference,
    compare,
    to_float64_leaves,
)
from harness.check.gradients import (
    DTYPES,
    MIN_SCALE,
    TOLERANCE,
    Distance,
    Edit,
    Function,
    MakeGradOutputs,
    Subject,
    Tensors,
    are_equal,
    call_autograd_grad,
    compute_gradients,
    compute_outputs,
    compute_second_gradients,
    describe_error,
    get_dtype_name,
    list_leaves,
    measure_distance,
    ones_like,
    random_like,
    record_saved_tensors,
    report_excess,
    run_backward,
)

EXP_LIMIT = 800.0  # exp(EXP_LIMIT) is infinite in float64, exp(-EXP_LIMIT) is 0
Check = Callable[[Subject], str | None]


def catch_errors(check: Check) -> Check:
    """Return a check that reports an exception of the checked function as its result."""

    @functools.wraps(check)
    def run(subject: Subject) -> str | None:
        try:
            return check(subject)
        except InvalidReference:
            raise
        except Exception as error:
            return describe_error(error, 300)

    return run


IN_PLACE_MESSAGES = (
    "modified by an inplace operation", "has been modified inplace", "used in an in-place operation",
)  # fmt: skip
"""Parts of autograd's messages about in-place changes, which `inputs_unchanged` reports already."""


def drop_repeated_messages(lines: dict[str, str]) -> dict[str, str]:
    if inputs_unchanged.__name__ not in lines:
        return lines
    return {
        name: line for name, line in lines.items() if not any(phrase in line for phrase in IN_PLACE_MESSAGES)
    }


def make_check(name: str, *calls: tuple[str, dict[str, Any]]) -> Check:
    """Return a check of several kinds of calls, each a message and the keyword arguments of `compare`."""

    def check(subject: Subject) -> str | None:
        strict = functools.partial(compare, subject, reorder_only=True)
        return next(filter(None, (report_excess(strict(**call), message) for message, call in calls)), None)

    check.__name__ = name
    return catch_errors(check)


@catch_errors
def forward(subject: Subject) -> str | None:
    """Check that the outputs match PyTorch's at several sizes."""
    for sizes in subject.sizes:
        got = compute_outputs(subject.function, subject.inputs(sizes))
        expected = compute_outputs(subject.reference, subject.inputs(sizes))
        error = measure_distance([t.detach() for t in got], [t.detach() for t in expected])
        if error > TOLERANCE:
            return f"the forward pass itself is wrong, by {error:.1e} ({sizes} sizes)"
    return None


def describe_constant_factor(got: Tensor, expected: Tensor, inputs: list[Tensor]) -> str:
    """Describe a gradient's constant factor, and the sizes of an input whose product it is, or return ""."""
    large = expected.abs() > MIN_SCALE
    ratios = (got / expected)[large]
    constant = ratios.numel() > 1 and torch.allclose(ratios, ratios[0].expand_as(ratios), rtol=1e-6)
    if not constant or (got[~large].abs() > MIN_SCALE).any():
        return ""
    ratio = ratios[0].item()
    description = f"every element is {ratio:.4g} times what it should be"
    for shape in dict.fromkeys(t.shape for t in inputs):
        for first, last in itertools.combinations(range(len(shape) + 1), 2):
            count = math.prod(shape[first:last])
            product = " * ".join(str(size) for size in shape[first:last])
            if count > 1 and math.isclose(max(ratio, 1 / ratio) if ratio > 0 else 0, count, rel_tol=1e-6):
                return f"{description}: {product}{'' if ratio > 1 else ' in the divisor'}, as in an input of shape {list(shape)}"
    return description


@catch_errors
def against_autograd(subject: Subject) -> str | None:
    """Check that gradients match PyTorch's in float64, at several sizes, for random incoming gradients."""
    for sizes in subject.sizes:
        inputs = subject.inputs(sizes)
        got = compute_gradients(subject.function, inputs, random_like)
        expected = compute_gradients(subject.reference, subject.inputs(sizes), random_like)
        if message := report_excess(measure_distance(got, expected), f"gradients at {sizes} sizes"):
            pairs = [
                (g, e) for g, e in zip(got, expected, strict=True) if measure_distance([g], [e]) > TOLERANCE
            ]
            factors = {describe_constant_factor(g, e, inputs) for g, e in pairs if g.shape == e.shape}
            return f"{message}; {factors.pop()}" if len(factors) == 1 and "" not in factors else message
    return None


@catch_errors
def gradcheck_float64(subject: Subject) -> str | None:
    """Run torch.autograd.gradcheck in float64, which checks every element by finite differences."""
    inputs = subject.inputs("odd")
    torch.autograd.gradcheck(lambda *tensors: compute_outputs(subject.function, [*tensors]), inputs)
    return None


@catch_errors
def gradcheck_float32(subject: Subject) -> str | None:
    """Run gradcheck in float32, with the tolerances that make it pass for correct functions."""
    inputs = subject.inputs("odd", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input #. requires gradient and is not a double")
        torch.autograd.gradcheck(subject.function, inputs, eps=1e-2, atol=5e-2, rtol=5e-2)
    return None


@catch_errors
def allclose_on_ones(subject: Subject) -> str | None:
    """Compare gradients of the outputs' sum on inputs of ones by allclose at 1e-4, as many tutorials do."""

    def compute_on_ones(function: Function) -> list[Tensor]:
        inputs = subject.edit_inputs(subject.inputs(dtype=torch.float32), torch.ones_like)
        return compute_gradients(function, inputs, ones_like)

    pairs = zip(compute_on_ones(subject.function), compute_on_ones(subject.reference), strict=True)
    close = all(torch.allclose(a, b, atol=1e-4) for a, b in pairs)
    return None if close else "differs by more than 1e-4"


square_shapes = make_check("square_shapes", ("gradients at square sizes", {"sizes": "square"}))
"""Check gradients at equal sizes, where swapped axes go unnoticed."""


@catch_errors
def random_directions(subject: Subject) -> str | None:
    """Check directional derivatives of a random projection of the outputs by central differences."""
    return next(filter(None, (compare_slope(subject, seed) for seed in range(3))), None)


def compare_slope(subject: Subject, seed: int, step: float = 1e-6) -> str | None:
    """Compare a gradient with a central difference along a random direction, and report a mismatch."""
    inputs = subject.inputs("odd", seed)
    results = compute_outputs(subject.function, inputs)
    requires_grad = [t.requires_grad for t in results]  # outputs without a gradient are not part of the slope
    grad_outputs = random_like(tuple(t for t in results if t.requires_grad), seed)
    directions = random_like(tuple(list_leaves(inputs)), 100 + seed)
    grads = compute_gradients(subject.function, inputs, lambda out: grad_outputs[: len(out)])
    slope = float(sum((g.detach() * d).sum() for g, d in zip(grads, directions, strict=True)))

    def evaluate_along(sign: float) -> float:
        remaining = iter(directions)
        perturbed = [t + sign * step * next(remaining) if t.requires_grad else t for t in inputs]
        with torch.no_grad():
            pairs = zip(compute_outputs(subject.function, perturbed), requires_grad, strict=True)
            outputs = [t for t, needs_grad in pairs if needs_grad]
        return float(sum((o * i).sum() for o, i in zip(outputs, grad_outputs, strict=True)))

    difference = (evaluate_along(1.0) - evaluate_along(-1.0)) / (2 * step)
    message = f"the slope along a random direction is {difference:.6g}, the gradient says {slope:.6g}"
    return message if abs(slope - difference) > 1e-5 * max(1.0, abs(difference)) else None


def make_expanded_gradients(out: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.new_tensor(1.25).expand(t.shape) for t in out]


expanded_gradient = make_check("expanded_gradient",
    ("an expanded gradient, as from sum(), is read as if it were contiguous", {"make_grad_outputs": make_expanded_gradients}))  # fmt: skip
"""Check an incoming gradient with stride 0."""
LAYOUTS: dict[str, Edit] = {
    "transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "a slice of longer rows": lambda t: torch.cat((t, t[..., :1]), -1)[..., : t.shape[-1]] if t.dim() else t,
    "with leading axes exchanged": lambda t: (
        t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t
    ),
}
"""Layouts that are not contiguous, although the last stride of a slice is 1."""


def change_layout(
    edit: Edit, selected: Sequence[int] | None = None
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return a function that changes the layout of all inputs, or of the selected ones."""
    return lambda inputs: [
        edit(t.detach()).requires_grad_(t.requires_grad) if selected is None or i in selected else t
        for i, t in enumerate(inputs)
    ]


def make_strided_gradients(edit: Edit) -> MakeGradOutputs:
    """Return a function that creates random incoming gradients in another layout."""
    return lambda out: [edit(g) for g in random_like(out)]


strided_gradient = make_check("strided_gradient", *(
    (f"a gradient that is not contiguous is read as if it were ({name})", {"make_grad_outputs": make_strided_gradients(edit)})
    for name, edit in LAYOUTS.items()
))  # fmt: skip
"""Check incoming gradients as from a transpose or a slice after the function."""
strided_inputs = make_check("strided_inputs", *(
    (f"an input that is not contiguous is read as if it were ({name})", {"transform_inputs": change_layout(edit)})
    for name, edit in LAYOUTS.items()
))  # fmt: skip
"""Check inputs as from a transpose or a slice before the function."""
MAX_INPUTS_FOR_SUBSETS = 4
"""With more inputs, only subsets of one input and of all but one are checked."""


@catch_errors
def frozen_inputs(subject: Subject) -> str | None:
    """Check the gradients when only some inputs require one, as with frozen layers."""
    count = len(list_leaves(subject.inputs()))
    sizes = range(1, count) if count <= MAX_INPUTS_FOR_SUBSETS else (1, count - 1)
    for indices in itertools.chain.from_iterable(
        itertools.combinations(range(count), size) for size in sizes
    ):

        def freeze(inputs: list[Tensor], trainable: tuple[int, ...] = indices) -> list[Tensor]:
            for i, leaf in enumerate(list_leaves(inputs)):
                leaf.requires_grad_(i in trainable)
            return inputs

        all_names = [subject.get_input_name(i) for i, t in enumerate(subject.inputs()) if t.requires_grad]
        input_names = " and ".join(all_names[i] for i in indices)
        message = f"with only {input_names} asking for a gradient (the others frozen), a gradient is wrong"
        if line := report_excess(compare(subject, transform_inputs=freeze), message):
            return line
    return None


@catch_errors
def two_calls(subject: Subject) -> str | None:
    """Check the backward pass of the first of two calls: it must use the tensors that its own call saved."""
    error = compare(subject, between_passes=lambda x, y: subject.function(*subject.inputs(seed=1)))
    return report_excess(error, "a second call changes what the first one saved")


@catch_errors
def under_checkpoint(subject: Subject) -> str | None:
    """Check a forward pass that runs again in the backward pass, as under torch.utils.checkpoint."""
    from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

    def wrap(function: Function) -> Function:
        return lambda *tensors: checkpoint(function, *tensors, use_reentrant=False)

    error = compare(subject, wrap=wrap, between_passes=lambda x, y: subject.function(*subject.inputs(seed=1)))
    return report_excess(error, "under checkpoint the gradients differ")


@catch_errors
def inputs_unchanged(subject: Subject) -> str | None:
    """Check that neither pass writes to an input, to the incoming gradient, or to a returned tensor."""
    inputs = subject.inputs()
    inputs_before = [t.detach().clone() for t in inputs]
    outputs = compute_outputs(subject.function, inputs)
    outputs_before = [t.detach().clone() for t in outputs]
    differentiable = tuple(t for t in outputs if t.requires_grad)
    grad_outputs = random_like(differentiable)
    arguments = [t.clone() for t in grad_outputs]
    torch.autograd.grad(differentiable, list_leaves(inputs), grad_outputs, allow_unused=True)
    for label, current, original in (
        ("an input", inputs, inputs_before),
        ("its result", outputs, outputs_before),
        ("the gradient coming in", grad_outputs, arguments),
    ):
        if not are_equal([t.detach() for t in current], original):
            return f"{label} is changed in place: later reads of it, autograd's too, get wrong numbers"
    return None


def run_backward_twice(outputs: Tensors, inputs: list[Tensor], grad_outputs: Tensors) -> list[Tensor]:
    call_autograd_grad(outputs, list_leaves(inputs), grad_outputs, retain_graph=True)
    return run_backward(outputs, inputs, grad_outputs)


second_backward = make_check("second_backward",
    ("a second backward pass of the same call differs: the first changes what is kept", {"run_backward_pass": run_backward_twice}))  # fmt: skip
"""Check a second backward pass through the same graph, as with retain_graph."""


@catch_errors
def written_between(subject: Subject) -> str | None:
    """Check that writing to inputs and outputs between the passes raises, or has no effect on gradients."""

    def overwrite_tensors(inputs: list[Tensor], outputs: Tensors) -> None:
        with torch.no_grad():
            for tensor in (*inputs, *outputs):
                tensor.zero_()

    try:
        error = compare(subject, between_passes=overwrite_tensors)
    except RuntimeError as error:
        if any(phrase in str(error) for phrase in IN_PLACE_MESSAGES):
            return None
        raise
    return report_excess(
        error,
        "a write to an input or a result after the call changes the gradients without an error "
        "(what save_for_backward keeps is watched, what ctx holds otherwise is not)",
    )


@catch_errors
def second_derivatives(subject: Subject) -> str | None:
    """Check that second derivatives match PyTorch's, or raise an error."""
    qualifier = "without an error (saved tensors that are neither inputs nor outputs count as constants)"
    try:
        distance = compare_second_derivatives(subject)
        return report_excess(distance, f"the gradient of a gradient is wrong, {qualifier}")
    except RuntimeError:
        return None  # once_differentiable and the like: an error, not a wrong number


def compare_second_derivatives(subject: Subject) -> Distance:
    """Compare gradients of gradients. Raises RuntimeError if the function has none."""
    inputs = subject.inputs()
    grads = compute_second_gradients(subject.function, inputs)
    names = [subject.get_input_name(i) for i, t in enumerate(inputs) if t.requires_grad]
    names += ["what comes in"] * (len(grads) - len(names))
    fresh_inputs = to_float64_leaves(subject.inputs())  # the function may have written to `inputs`
    truth = compute_second_gradients(subject.reference, fresh_inputs)
    pytorch_error = measure_distance(compute_second_gradients(subject.reference, subject.inputs()), truth)
    distance = measure_distance(grads, truth, names=names)
    distance.limit = max(
        distance.limit, TOLERANCE_FACTOR * pytorch_error + ROUNDING_UNITS * torch.finfo(subject.dtypes[0]).eps
    )
    return distance


@catch_errors
def differentiable_outputs(subject: Subject) -> str | None:
    """Check that the same outputs require grad as PyTorch's; otherwise a loss may get zero gradients."""
    outputs = compute_outputs(subject.function, subject.inputs())
    expected_outputs = compute_outputs(subject.reference, subject.inputs())
    for number, (our_output, their_output) in enumerate(zip(outputs, expected_outputs, strict=True)):
        if our_output.requires_grad != their_output.requires_grad:
            has, should = ("a", "none") if our_output.requires_grad else ("no", "one")
            return f"output {number} has {has} gradient for autograd and should have {should}: mark_non_differentiable"
    return None


@catch_errors
def repeat_runs(subject: Subject) -> str | None:
    """Check that ten runs on the same inputs are bit-identical."""
    runs = [compute_gradients(subject.function, subject.inputs(), random_like) for _ in range(10)]
    identical = all(are_equal(runs[0], run) for run in runs[1:])
    return None if identical else "the same inputs give different gradients"


def set_every_nth(value: float, step: int = 3) -> Edit:
    return lambda t: torch.where(torch.arange(t.numel()).view(t.shape).to(t.device) % step == 0, value, t)


at_zero = make_check("at_zero", ("where an input is exactly 0", {"edit": set_every_nth(0.0)}))
"""Check that gradients at inputs of exactly 0 match PyTorch's."""


def make_infinite_gradients(select: Edit) -> MakeGradOutputs:
    """Return a function that creates incoming gradients with an infinite part."""

    def make_grad_outputs(out: tuple[Tensor, ...]) -> list[Tensor]:
        gradients = random_like(out)
        for gradient in filter(Tensor.dim, gradients):
            select(gradient).fill_(torch.inf)
        return gradients

    return make_grad_outputs


def make_cancelling_gradients(out: tuple[Tensor, ...]) -> list[Tensor]:
    """Return large incoming gradients that nearly cancel in sums over rows."""

    def cancel(g: Tensor) -> Tensor:
        rows = g.reshape(-1, g.shape[-1] if g.dim() else 1)
        half = 64 * rows[: (len(rows) + 1) // 2]
        return (torch.cat((half, -half))[: len(rows)] + rows / 8).reshape(g.shape)

    return [cancel(g) for g in random_like(out)]


infinite_gradient = make_check("infinite_gradient",
    ("infinity coming in reaches gradients that PyTorch keeps finite (infinity times 0 is NaN)",
        {"make_grad_outputs": make_infinite_gradients(lambda g: g[:1])}))  # fmt: skip
"""Check an infinite gradient for a part of the result: gradients must match where PyTorch's are finite."""
far_from_zero = make_check("far_from_zero", *(
    (f"with inputs near {far:g}, where exp is {exp}", {"edit": functools.partial(torch.add, other=far), "min_scale": 1.0})
    for far, exp in ((EXP_LIMIT, "infinite"), (-EXP_LIMIT, "0"))
))  # fmt: skip
"""Check inputs so far from 0 that their exp is infinite or 0; errors of small gradients are relative to 1."""


def set_nonfinite(t: Tensor) -> Tensor:
    """Return a copy whose first elements are NaN, both infinities and -0."""
    special = t.new_tensor([torch.nan, torch.inf, -torch.inf, -0.0])[: t.numel()]
    return torch.cat((special, t.flatten()[len(special) :])).view(t.shape)


at_no_numbers = make_check("at_no_numbers",
    ("where an input is NaN or infinite (infinity times 0 is NaN)", {"edit": set_nonfinite}),
    ("where an input is NaN and what comes in infinite (NaN > 0 is false, and infinity times 0 is NaN)",
        {"edit": set_nonfinite, "make_grad_outputs": make_infinite_gradients(lambda g: g.view(-1)[1::2])}))  # fmt: skip
many_rows_bfloat16 = make_check("many_rows_bfloat16",
    ("in bfloat16 over many rows", {"sizes": "tall", "dtype": torch.bfloat16, "reorder_only": True}))  # fmt: skip


@catch_errors
def narrow_dtypes(subject: Subject) -> str | None:
    """Check float32, bfloat16 and float16 at several sizes."""
    for dtype, sizes in itertools.product(DTYPES[1:], subject.sizes):
        floor = ROUNDING_UNITS * torch.finfo(dtype).eps
        error = compare(subject, sizes, dtype=dtype, reorder_only=True, floor=floor)
        if line := report_excess(error, f"in {get_dtype_name(dtype)} at {sizes} sizes"):
            return line
    return None


def count_saved_bytes(function: Function, inputs: list[Tensor]) -> tuple[int, list[str]]:
    """Return the bytes that autograd saves for a backward pass, with inputs, and a description per tensor."""
    _, tensors = record_saved_tensors(lambda: function(*inputs))
    lines = [f"{list(t.shape)} {get_dtype_name(t.dtype)}, {t.nbytes} bytes" for t in tensors]
    return sum(t.nbytes for t in tensors), lines


@catch_errors
def memory_saved(subject: Subject) -> str | None:
    """Check the bytes saved for the backward pass, counted by saved_tensors_hooks, against the ledger."""
    if subject.expected_saved_bytes is None:
        return None
    inputs = subject.inputs("deep" if "deep" in subject.sizes else "odd", dtype=torch.float32)
    count, lines = count_saved_bytes(subject.function, inputs)
    expected = subject.expected_saved_bytes(*inputs)
    message = f"{count} bytes are kept ({'; '.join(lines) or 'nothing'}), expected {expected}"
    return None if count == expected else message


@catch_errors
def held_by_ctx(subject: Subject) -> str | None:
    """Check that tensors are saved by save_for_backward, where hooks and the ledger see them, and not on ctx."""
    outputs = compute_outputs(subject.function, subject.inputs())
    attributes = getattr(next(t for t in outputs if t.requires_grad).grad_fn, "__dict__", {})
    attribute = next((name for name, value in attributes.items() if isinstance(value, Tensor)), None)
    message = f"ctx.{attribute} holds a tensor that save_for_backward should keep: no hook sees it, and it is freed late"
    return message if attribute else None
