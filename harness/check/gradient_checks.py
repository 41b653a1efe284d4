"""Check one differentiable PyTorch function, each check in another respect.

Every check takes a `Subject`, a function and its PyTorch reference, and returns None or a line about what is
wrong and what it would do to a model. Some are strong, others are weak checks in common use: a table of both
shows which check catches which mistake. All run on the CPU, on seeded inputs.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.check.gradients import (
    CANCELLED,
    TOLERANCE,
    Distance,
    Function,
    Incoming,
    Subject,
    dtype_name,
    furthest,
    gradients,
    gradients_or_none,
    leaves,
    off,
    outputs_of,
    pulled_back,
    random_like,
    saved_by_autograd,
    second_gradients,
)
from harness.check.measured import FACTOR, UNITS, ReferenceRaised, compare, wide

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that a function of any floating-point dtype is tried in, in addition to float64."""
FAR = 800.0
"""An input for which exp overflows in float64, and underflows at its negative."""
Check = Callable[[Subject], str | None]


def guard(check: Check) -> Check:
    """Turn an exception of the function into the check's result."""

    @functools.wraps(check)
    def run(subject: Subject) -> str | None:
        try:
            return check(subject)
        except ReferenceRaised:
            raise
        except Exception as error:
            words = " ".join(str(error).split())
            return f"{type(error).__name__}: {words[:300]}"

    return run


ECHOES = ("modified by an inplace operation", "has been modified inplace", "used in an in-place operation")
"""Parts of autograd's messages about a change that `inputs_unchanged` reports."""


def without_echoes(lines: dict[str, str]) -> dict[str, str]:
    """Remove results that only repeat, in autograd's words, that something is changed in place."""
    if inputs_unchanged.__name__ not in lines:
        return lines
    return {name: line for name, line in lines.items() if not any(echo in line for echo in ECHOES)}


def in_calls(name: str, *kinds: tuple[str, dict[str, Any]], measured: bool = False) -> Check:
    """Return a check of some kinds of call: what to say, and what `compare` takes."""

    def check(subject: Subject) -> str | None:
        subject = measure(subject) if measured else subject
        return next((line for words, call in kinds if (line := off(compare(subject, **call), words))), None)

    check.__name__ = name
    return guard(check)


def measure(subject: Subject) -> Subject:
    """Return a subject whose limits are measured by PyTorch's own errors, for dtypes and numbers that no fixed limit suits."""
    return replace(subject, measured=True, subgradients=False)


@guard
def forward(subject: Subject) -> str | None:
    """Check that the result is PyTorch's, at several sizes."""
    for sizes in subject.sizes:
        got = outputs_of(subject.function, subject.inputs(sizes))
        expected = outputs_of(subject.reference, subject.inputs(sizes))
        error = furthest([t.detach() for t in got], [t.detach() for t in expected])
        if error > TOLERANCE:
            return f"the forward pass itself is wrong, by {error:.1e} ({sizes} sizes)"
    return None


def constant_factor(got: Tensor, expected: Tensor, inputs: list[Tensor]) -> str:
    """Return the constant factor of a gradient, with the sizes of an input that it equals; "" if it is not
    constant."""
    large = expected.abs() > CANCELLED
    ratios = (got / expected)[large]
    if (got[~large].abs() > CANCELLED).any():
        return ""
    if ratios.numel() < 2 or not torch.allclose(ratios, ratios[0].expand_as(ratios), rtol=1e-6):
        return ""
    times = ratios[0].item()
    words = f"every element is {times:.4g} times what it should be"
    for shape in dict.fromkeys(t.shape for t in inputs):
        for first, last in itertools.combinations(range(len(shape) + 1), 2):
            count = math.prod(shape[first:last])
            product = " * ".join(str(size) for size in shape[first:last])
            if count > 1 and math.isclose(max(times, 1 / times) if times > 0 else 0, count, rel_tol=1e-6):
                return f"{words}: {product}{'' if times > 1 else ' in the divisor'}, as in an input of shape {list(shape)}"
    return words


@guard
def against_autograd(subject: Subject) -> str | None:
    """Check that the gradients are PyTorch's, in float64, at several sizes, for random gradients coming in."""
    for sizes in subject.sizes:
        inputs = subject.inputs(sizes)
        got = gradients(subject.function, inputs, random_like)
        expected = gradients(subject.reference, subject.inputs(sizes), random_like)
        if words := off(furthest(got, expected), f"gradients at {sizes} sizes"):
            pairs = [(g, e) for g, e in zip(got, expected, strict=True) if furthest([g], [e]) > TOLERANCE]
            factors = {constant_factor(g, e, inputs) for g, e in pairs if g.shape == e.shape}
            return f"{words}; {factors.pop()}" if len(factors) == 1 and "" not in factors else words
    return None


@guard
def gradcheck_float64(subject: Subject) -> str | None:
    """Run torch.autograd.gradcheck in float64: every element by finite differences."""
    inputs = subject.inputs("odd")
    return None if torch.autograd.gradcheck(subject.function, inputs) else "gradcheck fails"


@guard
def gradcheck_float32(subject: Subject) -> str | None:
    """Run gradcheck in float32, with the tolerances that make it pass for correct functions."""
    inputs = subject.inputs("odd", dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input #. requires gradient and is not a double")
        torch.autograd.gradcheck(subject.function, inputs, eps=1e-2, atol=5e-2, rtol=5e-2)
    return None


@guard
def allclose_on_ones(subject: Subject) -> str | None:
    """Run allclose at 1e-4 after loss = sum of the output, on inputs of ones, as many tutorials do."""
    ones = [torch.ones_like(t) if t.is_floating_point() else t for t in subject.make("odd", 0)]
    pairs: list[list[Tensor]] = []
    for function in (subject.function, subject.reference):
        inputs = [
            t.clone().float().requires_grad_(t.is_floating_point()) if t.is_floating_point() else t
            for t in ones
        ]
        pairs.append(gradients(function, inputs, lambda out: [torch.ones_like(t) for t in out]))
    close = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*pairs, strict=True))
    return None if close else "differs by more than 1e-4"


square_shapes = in_calls("square_shapes", ("gradients at square sizes", {"sizes": "square"}))
"""The gradients where all sizes are equal: a swapped axis fits everywhere."""


@guard
def random_directions(subject: Subject) -> str | None:
    """Compare central differences of a random scalar of the outputs along random directions, in float64."""
    return next(filter(None, (wrong_slope(subject, seed) for seed in range(3))), None)


def wrong_slope(subject: Subject, seed: int, step: float = 1e-6) -> str | None:
    """Compare a gradient with a central difference along a random direction, and report a mismatch."""
    inputs = subject.inputs("odd", seed)
    results = outputs_of(subject.function, inputs)
    asking = [t.requires_grad for t in results]  # inputs without a gradient are not part of the slope
    incoming = random_like(tuple(t for t in results if t.requires_grad), seed)
    directions = random_like(tuple(leaves(inputs)), 100 + seed)
    grads = gradients(subject.function, inputs, lambda out: incoming[: len(out)])
    slope = float(sum((g.detach() * d).sum() for g, d in zip(grads, directions, strict=True)))

    def along(sign: float) -> float:
        moving = iter(directions)
        moved = [t + sign * step * next(moving) if t.requires_grad else t for t in inputs]
        with torch.no_grad():
            every = zip(outputs_of(subject.function, moved), asking, strict=True)
            outputs = [t for t, asks in every if asks]
        return float(sum((o * i).sum() for o, i in zip(outputs, incoming, strict=True)))

    difference = (along(1.0) - along(-1.0)) / (2 * step)
    if abs(slope - difference) <= 1e-5 * max(1.0, abs(difference)):
        return None
    return f"the slope along a random direction is {difference:.6g}, the gradient says {slope:.6g}"


def expand_one(out: tuple[Tensor, ...]) -> list[Tensor]:
    """Return gradients with stride 0, as `out.sum().backward()` passes them."""
    return [t.new_tensor(1.25).expand(t.shape) for t in out]


expanded_gradient = in_calls(
    "expanded_gradient",
    ("an expanded gradient, as from sum(), is read as if it were contiguous", {"incoming": expand_one}),
)


def transpose(t: Tensor) -> Tensor:
    """Return the same numbers with the strides of a transpose."""
    return t.mT.contiguous().mT if t.dim() > 1 else t


def slice_rows(t: Tensor) -> Tensor:
    """Return the same numbers as a slice of longer rows: the last stride is still 1."""
    return torch.cat((t, t[..., :1]), -1)[..., : t.shape[-1]] if t.dim() else t


def exchange_axes(t: Tensor) -> Tensor:
    """Return the same numbers with the strides of the two first of three axes exchanged."""
    return t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t


LAYOUTS = {
    "transposed": transpose,
    "a slice of longer rows": slice_rows,
    "with leading axes exchanged": exchange_axes,
}
"""Layouts of tensors that are not contiguous."""


def relaid(
    lay: Callable[[Tensor], Tensor], chosen: Sequence[int] | None = None
) -> Callable[[list[Tensor]], list[Tensor]]:
    """Return a function that gives inputs, or the chosen ones, another layout."""
    return lambda inputs: [
        lay(t.detach()).requires_grad_(t.requires_grad) if chosen is None or i in chosen else t
        for i, t in enumerate(inputs)
    ]


def lay_out(lay: Callable[[Tensor], Tensor]) -> Incoming:
    """Return what hands in random gradients in another layout."""
    return lambda out: [lay(g) for g in random_like(out)]


strided_gradient = in_calls("strided_gradient", *(
    (f"a gradient that is not contiguous is read as if it were ({words})", {"incoming": lay_out(lay)})
    for words, lay in LAYOUTS.items()
))  # fmt: skip
"""A gradient as from a transpose or a slice after the function."""
strided_inputs = in_calls("strided_inputs", *(
    (f"an input that is not contiguous is read as if it were ({words})", {"change": relaid(lay)})
    for words, lay in LAYOUTS.items()
))  # fmt: skip
"""Inputs as from a transpose or a slice before the function."""
FEW = 4
"""With up to this many inputs every subset that requires a gradient is tried; with more, each one and all
but each one."""


@guard
def frozen_inputs(subject: Subject) -> str | None:
    """Check the gradients where only some of the inputs need one, as with frozen layers."""
    count = len(leaves(subject.inputs()))
    sizes = range(1, count) if count <= FEW else (1, count - 1)
    for kept in itertools.chain.from_iterable(itertools.combinations(range(count), some) for some in sizes):

        def frozen(inputs: list[Tensor], kept: tuple[int, ...] = kept) -> list[Tensor]:
            for i, leaf in enumerate(leaves(inputs)):
                leaf.requires_grad_(i in kept)
            return inputs

        inputs = subject.inputs()
        which = [subject.name_of_input(i) for i, t in enumerate(inputs) if t.requires_grad]
        called = " and ".join(which[i] for i in kept)
        if not subject.names:
            called = f"input{'s' * (len(kept) > 1)} {' and '.join(map(str, kept))}"
        error = compare(subject, change=frozen)
        if words := off(
            error, f"with only {called} asking for a gradient (the others frozen), a gradient is wrong"
        ):
            return words
    return None


@guard
def two_calls(subject: Subject) -> str | None:
    """Check the backward pass of the first of two forward passes: it must use what its own call saved."""
    error = compare(subject, between=lambda inputs, outputs: subject.function(*subject.inputs(seed=1)))
    return off(error, "a second call changes what the first one saved")


@guard
def under_checkpoint(subject: Subject) -> str | None:
    """Check a forward pass that runs again in the backward pass, as under torch.utils.checkpoint."""
    from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

    def again(function: Function) -> Function:
        return lambda *tensors: checkpoint(function, *tensors, use_reentrant=False)

    error = compare(
        subject, around=again, between=lambda inputs, outputs: subject.function(*subject.inputs(seed=1))
    )
    return off(error, "under checkpoint the gradients differ")


@guard
def inputs_unchanged(subject: Subject) -> str | None:
    """Check that neither pass writes to an input, to the incoming gradient, or to a returned tensor."""
    inputs = subject.inputs()
    before = [t.detach().clone() for t in inputs]
    outputs = outputs_of(subject.function, inputs)
    shown = [t.detach().clone() for t in outputs]
    asking = tuple(t for t in outputs if t.requires_grad)
    incoming = random_like(asking)
    arguments = [t.clone() for t in incoming]
    torch.autograd.grad(asking, leaves(inputs), incoming, allow_unused=True)
    for what, now, then in (
        ("an input", inputs, before),
        ("its result", outputs, shown),
        ("the gradient coming in", incoming, arguments),
    ):
        if not all(torch.equal(a.detach(), b) for a, b in zip(now, then, strict=True)):
            return f"{what} is changed in place: later reads of it, autograd's too, get wrong numbers"
    return None


def twice(outputs: Sequence[Tensor], inputs: list[Tensor], incoming: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of a second backward pass on one graph."""
    gradients_or_none(outputs, leaves(inputs), incoming, retain_graph=True)
    return pulled_back(outputs, inputs, incoming)


second_backward = in_calls(
    "second_backward",
    ("a second backward pass of the same call differs: the first changes what is kept", {"pull": twice}),
)
"""A second backward pass on one graph, as with retain_graph."""


@guard
def written_between(subject: Subject) -> str | None:
    """Check that autograd refuses, or the gradients are correct, if inputs and results are overwritten
    before the backward pass."""

    def overwrite(inputs: list[Tensor], outputs: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for tensor in (*inputs, *outputs):
                tensor.zero_()

    try:
        error = compare(subject, between=overwrite)
    except RuntimeError as error:
        if any(echo in str(error) for echo in ECHOES):
            return None
        raise
    return off(
        error,
        "a write to an input or a result after the call changes the gradients without an error "
        "(what save_for_backward keeps is watched, what ctx holds otherwise is not)",
    )


@guard
def second_derivatives(subject: Subject) -> str | None:
    """Check that the gradients can be differentiated again, as for a gradient penalty, with PyTorch's result;
    or that this is refused."""
    try:
        distance = second_distance(subject)
    except RuntimeError:
        return None  # once_differentiable and the like: an error, not a wrong number
    return off(
        distance,
        "the gradient of a gradient is wrong, without an error (saved tensors that are neither inputs nor outputs count as constants)",
    )


def second_distance(subject: Subject) -> Distance:
    """Compare gradients of gradients. Raises RuntimeError if the function has none."""
    inputs = subject.inputs()
    grads = second_gradients(subject.function, inputs)
    names = [subject.name_of_input(i) for i, t in enumerate(inputs) if t.requires_grad]
    names += ["what comes in"] * (len(grads) - len(names))
    if not subject.measured:
        return furthest(grads, second_gradients(subject.reference, subject.inputs()), names=names)
    truth = second_gradients(subject.reference, wide(subject.inputs()))  # `inputs` may have been written to
    own = furthest(second_gradients(subject.reference, subject.inputs()), truth)
    distance = furthest(grads, truth, names=names)
    distance.limit = max(distance.limit, FACTOR * own + UNITS * torch.finfo(subject.dtypes[0]).eps)
    return distance


@guard
def differentiable_outputs(subject: Subject) -> str | None:
    """Check that the same outputs require a gradient as PyTorch's; a loss of one that does not would train
    on zeros."""
    ours = outputs_of(subject.function, subject.inputs())
    theirs = outputs_of(subject.reference, subject.inputs())
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one.requires_grad != other.requires_grad:
            has, should = ("a", "none") if one.requires_grad else ("no", "one")
            return f"output {number} has {has} gradient for autograd and should have {should}: mark_non_differentiable"
    return None


@guard
def repeat_runs(subject: Subject) -> str | None:
    """Check that ten runs on the same inputs give the same bits."""
    runs = [gradients(subject.function, subject.inputs(), random_like) for _ in range(10)]
    same = all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
    return None if same else "the same inputs give different gradients"


def put_number(number: float, every: int = 3) -> Callable[[Tensor], Tensor]:
    """Return an edit that sets every `every`-th element to a number."""
    return lambda t: torch.where(
        torch.arange(t.numel(), device=t.device).view(t.shape) % every == 0, number, t
    )


at_zero = in_calls("at_zero", ("where an input is exactly 0", {"edit": put_number(0.0)}))
"""Exact zeros among the inputs: PyTorch's gradient there."""


def send_infinity(part: Callable[[Tensor], Tensor]) -> Incoming:
    """Return incoming gradients of which a part is infinite."""

    def incoming(out: tuple[Tensor, ...]) -> list[Tensor]:
        each = random_like(out)
        for gradient in each:
            if gradient.dim():
                part(gradient).fill_(torch.inf)
        return each

    return incoming


infinite_gradient = in_calls(
    "infinite_gradient",
    (
        "infinity coming in reaches gradients that PyTorch keeps finite (infinity times 0 is NaN)",
        {"incoming": send_infinity(lambda gradient: gradient[:1])},
    ),
    measured=True,
)
"""An infinite gradient for a part of the result: where PyTorch's is finite, so is this one, and the same."""


far_from_zero = in_calls("far_from_zero", *(
    (f"with inputs near {far:g}, where exp is {exp}", {"edit": functools.partial(torch.add, other=far), "least": 1.0})
    for far, exp in ((FAR, "infinite"), (-FAR, "0"))
))  # fmt: skip
"""Inputs so far from 0 that exp of them is infinite or 0; errors are relative to 1 where gradients are small."""


def put_no_numbers(t: Tensor) -> Tensor:
    """Return numbers with NaN, both infinities and -0 in the first places."""
    special = t.new_tensor([torch.nan, torch.inf, -torch.inf, -0.0])[: t.numel()]
    return torch.cat((special, t.flatten()[len(special) :])).view(t.shape)


at_no_numbers = in_calls(
    "at_no_numbers",
    ("where an input is NaN or infinite (infinity times 0 is NaN)", {"edit": put_no_numbers}),
    (
        "where an input is NaN and what comes in infinite (NaN > 0 is false, and infinity times 0 is NaN)",
        {"edit": put_no_numbers, "incoming": send_infinity(lambda gradient: gradient.view(-1)[1::2])},
    ),
    measured=True,
)
many_rows_bfloat16 = in_calls(
    "many_rows_bfloat16",
    ("in bfloat16 over many rows", {"sizes": "tall", "dtype": torch.bfloat16, "steady": True}),
    measured=True,
)


@guard
def narrow_dtypes(subject: Subject) -> str | None:
    """Check float32, bfloat16 and float16 at several sizes."""
    measured = measure(subject)
    for dtype, sizes in itertools.product(DTYPES, subject.sizes):
        floor = UNITS * torch.finfo(dtype).eps
        error = compare(measured, sizes, dtype=dtype, steady=True, floor=floor)
        if line := off(error, f"in {dtype_name(dtype)} at {sizes} sizes"):
            return line
    return None


def saved_bytes(function: Function, inputs: list[Tensor]) -> tuple[int, list[str]]:
    """Return the bytes that autograd saves for the backward pass of one call, each storage once, and a line
    for each tensor.

    Saved inputs count too: they cannot be freed.
    """
    _, tensors = saved_by_autograd(lambda: function(*inputs))
    lines = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}, {t.nbytes} bytes" for t in tensors]
    return sum(t.nbytes for t in tensors), lines


@guard
def memory_saved(subject: Subject) -> str | None:
    """Check that no more bytes are saved for the backward pass than the ledger says, by saved_tensors_hooks."""
    if subject.saved is None:
        return None
    inputs = subject.inputs("deep" if "deep" in subject.sizes else "odd", dtype=torch.float32)
    count, lines = saved_bytes(subject.function, inputs)
    expected = subject.saved(*inputs)
    if count == expected:
        return None
    return f"{count} bytes are kept ({'; '.join(lines) or 'nothing'}), the ledger says {expected}"


@guard
def held_by_ctx(subject: Subject) -> str | None:
    """Check that tensors are saved by save_for_backward, where hooks and the ledger see them, and not as
    attributes of ctx."""
    outputs = outputs_of(subject.function, subject.inputs())
    hidden = hidden_tensors(next(t for t in outputs if t.requires_grad))
    if not hidden:
        return None
    return f"ctx.{hidden[0]} holds a tensor that save_for_backward should keep: no hook sees it, and it is freed late"


def hidden_tensors(output: Tensor) -> list[str]:
    """Return the attributes of the ctx of a result that hold tensors."""
    held = getattr(output.grad_fn, "__dict__", {})
    return [name for name, value in held.items() if isinstance(value, Tensor)]
