"""The tries of `check_backward`: each has a name and a check, and says in a line in what kind of call a function is wrong.

Most are one comparison with something changed: the sizes, the inputs, the gradient coming in, what is called around the
function or between its passes, the dtype. Those of puzzle 21 are in `harness/check/gradient_checks.py`.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from harness.check import gradient_checks as checks
from harness.check.gradients import (
    DTYPES,
    Function,
    Incoming,
    furthest,
    gradients,
    leaves,
    off,
    outputs_of,
    pulled_back,
    random_like,
    second_gradients,
)
from harness.check.measured import FACTOR, UNITS, ReferenceRaised, compare, wide
from harness.testing.problem import LARGE, Problem, Refused, is_refusal, refusing, with_parameters, words_of

COARSE = 1e-6
"""What an error may be where inputs are so large that every formula loses digits: numbers that are none are looked for."""
Check = Callable[[Problem], str | None]
Change = Callable[[list[Tensor]], list[Tensor]]


class NotHere(Exception):
    """A try that this function, or this machine, has no use for."""


def compared(words: str, *, at: Callable[[Problem], Sequence[str]] | None = None, **setting: Any) -> Check:
    """A try that compares one kind of call, at one kind of sizes or several."""

    def check(problem: Problem) -> str | None:
        kinds = at(problem) if at else problem.sizes[:1]
        raised: list[Exception] = [] if kinds else [NotHere("no size has a name")]
        for sizes in kinds:
            try:
                line = off(compare(problem, sizes, **setting), words + (f" ({sizes})" if at else ""))
            except Exception as error:
                if not (is_refusal(error) or isinstance(error, ReferenceRaised)):
                    raise
                raised.append(error)
                continue
            if line:
                return line
        if raised:
            raise raised[0]
        return None

    return check


def first(lines: Iterator[str | None]) -> str | None:
    """The first line that says something."""
    return next(filter(None, lines), None)


def plain(problem: Problem) -> str | None:
    """Values and gradients at all ordinary sizes, for a random gradient and for one of ones."""
    ones = lambda out: [torch.ones_like(t) for t in out]  # noqa: E731
    for sizes in problem.sizes:
        for incoming, words in ((random_like, ""), (ones, ", a gradient of ones")):
            if line := off(compare(problem, sizes, incoming=incoming), f"{sizes} sizes{words}"):
                return line
    return None


# ---- Values -------------------------------------------------------------------------------------------------


def in_dtype(dtype: torch.dtype) -> Check:
    """A try of all ordinary sizes in a dtype."""
    name = str(dtype).removeprefix("torch.")
    check = compared(f"in {name}", at=lambda problem: problem.sizes, dtype=dtype)
    return lambda problem: (
        None if dtype == problem.dtypes[0] else check(problem)
    )  # which is what `plain` is in


def values(words: str, edit: Callable[[Tensor], Tensor], alone: bool = False, **setting: Any) -> Check:
    """A try in which each input that may be changed has other values, or the first alone."""

    def check(problem: Problem) -> str | None:
        if not problem.movable:
            raise NotHere("no input is made here")

        def change(inputs: list[Tensor]) -> list[Tensor]:
            with torch.no_grad():
                for leaf in problem.moved(inputs)[: 1 if alone else None]:
                    leaf.copy_(edit(leaf.detach()))
            return inputs

        return off(compare(problem, change=change, **setting), words)

    return check


def placed(number: float, every: int = 3) -> Callable[[Tensor], Tensor]:
    """An edit that puts a number in some places."""

    def edit(t: Tensor) -> Tensor:
        t = t.clone()
        t.view(-1)[::every] = number
        return t

    return edit


def offset(t: Tensor) -> Tensor:
    """Each element far from 0, where squares lose half of the digits."""
    return t + 30


def flat(t: Tensor) -> Tensor:
    """Rows that hardly vary about a mean far from 0."""
    return 3 + t * 1e-3


def tied(t: Tensor) -> Tensor:
    """Few different numbers."""
    return t.round()


def far(problem: Problem) -> str | None:
    """Inputs so far from 0 that exp of them is infinite or 0."""
    top = 800.0 if problem.dtypes[0] == torch.float64 else 110.0
    return first(
        values(f"with inputs near {to:g}", lambda t, to=to: t + to, least=1.0, floor=COARSE)(problem)
        for to in (top, -top)
    )


def huge(problem: Problem) -> str | None:
    """The largest inputs for which the reference is finite in the same dtype."""
    for power in (100, 60, 30, 12, 7):
        inputs = problem.inputs()
        with torch.no_grad():
            for leaf in problem.moved(inputs):
                leaf *= 2.0**power
        outputs = outputs_of(problem.reference, inputs)
        each = gradients(problem.reference, inputs, random_like)
        if all(t.isfinite().all() for t in (*outputs, *each)):
            return values(f"with inputs about 2^{power}", lambda t, by=2.0**power: t * by, floor=COARSE)(
                problem
            )
    raise NotHere("the reference is finite for no large input")


def infinite_incoming(problem: Problem) -> str | None:
    """Infinity for one element of each output, for its first part, and for every other element: what PyTorch keeps finite stays so."""

    def incoming(out: tuple[Tensor, ...], part: Callable[[Tensor], Tensor]) -> list[Tensor]:
        each = random_like(out)
        for gradient in each:
            if gradient.dim():
                part(gradient).fill_(torch.inf)
        return each

    parts = (lambda g: g.view(-1)[:1], lambda g: g[:1], lambda g: g.view(-1)[::2])
    return first(
        off(compare(problem, incoming=functools.partial(incoming, part=part)), "where infinity comes in")
        for part in parts
    )


def following(out: tuple[Tensor, ...]) -> list[Tensor]:
    """A gradient that follows the activations."""
    return [t.detach() + g / 8 for t, g in zip(out, random_like(out), strict=True)]


def cancelling(out: tuple[Tensor, ...]) -> list[Tensor]:
    """Large gradients that cancel in sums over rows, but for a little."""
    result: list[Tensor] = []
    for g in random_like(out):
        rows = g.reshape(-1, g.shape[-1] if g.dim() else 1)
        half = (len(rows) + 1) // 2
        turned = torch.cat((64 * rows[:half], -64 * rows[:half]))[: len(rows)]
        result.append((turned + rows / 8).reshape(g.shape))
    return result


def sums_that_cancel(problem: Problem) -> str | None:
    """In 16 bits, sums of large terms that all but cancel."""
    for dtype in problem.dtypes:
        if torch.finfo(dtype).bits == 16:
            setting: dict[str, Any] = {"dtype": dtype, "incoming": cancelling, "steady": True}
            kind = f"64 for {problem.free[0]}" if problem.free else "odd"
            if line := off(
                compare(problem, kind, **setting), f"where sums of {dtype} cancel".replace("torch.", "")
            ):
                return line
    return None


def thousands_of_rows(problem: Problem) -> str | None:
    """Sums over thousands of rows, that grow steadily, in the widest dtype and in 16 bits."""
    if not problem.free:
        raise NotHere("no size has a name")
    narrow = [dtype for dtype in problem.dtypes if torch.finfo(dtype).bits == 16][:1]
    grown = lambda out: [g + 2 for g in random_like(out)]  # noqa: E731

    def one(dtype: torch.dtype) -> str | None:
        words = f"over thousands of rows of {dtype}".replace("torch.", "")
        return values(words, lambda t: t + 2, sizes="tall", dtype=dtype, incoming=grown)(problem)

    return first(one(dtype) for dtype in (problem.dtypes[0], *narrow))


# ---- Layouts ------------------------------------------------------------------------------------------------


def expanded(t: Tensor) -> Tensor:
    """One row for all, with stride 0."""
    return t[:1].expand(t.shape) if t.dim() and len(t) else t


def shifted(t: Tensor) -> Tensor:
    """The same numbers behind others, as one of the parts that `torch.cat` hands its gradient on to."""
    return torch.cat((t, t))[len(t) :] if t.dim() else t


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    **checks.LAYOUTS, "behind an offset, as from chunk": shifted, "one row expanded": expanded,
}  # fmt: skip
"""How a tensor lies in memory: as transposes, slices, chunks and expand make it."""


def laid_out(problem: Problem) -> str | None:
    """Inputs that are not contiguous."""
    for (name, lay), number in itertools.product(LAYOUTS.items(), (None, *range(len(problem.names)))):

        def turned(inputs: list[Tensor], lay: Callable[[Tensor], Tensor] = lay, number: int | None = number):
            chosen = [i for i in range(len(inputs)) if number in (None, i)]
            if lay is expanded:  # what was given keeps its numbers
                chosen = [i for i in chosen if i in (problem.movable or ())]
            return [
                lay(t.detach()).requires_grad_(t.requires_grad) if i in chosen else t
                for i, t in enumerate(inputs)
            ]

        which = "the inputs" if number is None else problem.called(number)
        if line := off(compare(problem, change=turned), f"where {which} lies in memory otherwise ({name})"):
            return line
    return None


def incoming_laid_out(problem: Problem) -> str | None:
    """Gradients that come in as a transpose, a slice, cat, chunk, expand and sum hand them back; then inputs laid out alike."""
    ways: dict[str, Incoming] = {
        name: lambda out, lay=lay: [lay(g) for g in random_like(out)] for name, lay in LAYOUTS.items()
    }
    alike: dict[str, Change] = {
        name: lambda inputs, lay=lay: [lay(t.detach()).requires_grad_(t.requires_grad) for t in inputs]
        for name, lay in LAYOUTS.items()
        if lay is not expanded  # inputs keep their numbers
    }
    sum_s: Incoming = lambda out: [t.new_tensor(1.25).expand(t.shape) for t in out]  # noqa: E731
    return first(
        off(compare(problem, sizes, incoming=way), f"for a gradient that is not contiguous ({name})")
        for name, way in {**ways, "one number, as from sum": sum_s}.items()
        for sizes in problem.sizes
    ) or first(
        off(
            compare(problem, change=change, incoming=ways[name]),
            f"where inputs and gradient are not contiguous ({name})",
        )
        for name, change in alike.items()
    )


# ---- Sizes --------------------------------------------------------------------------------------------------


def each_at(size: int, also_all: bool = True) -> Callable[[Problem], list[str]]:
    """A problem -> the kinds of sizes in which one name, or every one, has a size."""
    return lambda problem: [
        *(f"{size} for {name}" for name in problem.free),
        *([f"{size} for all"] if also_all and problem.free else []),
    ]


# ---- What a model does --------------------------------------------------------------------------------------


def accumulated(outputs: Sequence[Tensor], inputs: list[Tensor], incoming: Sequence[Tensor]) -> list[Tensor]:
    """Gradients that are added to existing ones: the same again, so that the sum is twice as much, exactly."""
    for _ in range(2):
        kept = [g.clone() for g in incoming]
        torch.autograd.backward(outputs, kept, retain_graph=True)
    return [torch.zeros_like(t) if t.grad is None else t.grad / 2 for t in leaves(inputs)]


def alternating(problem: Problem) -> str | None:
    """Two calls of other sizes, forward, forward, backward, backward, and back."""

    def other(*_: object) -> None:
        for sizes in (problem.sizes[-1], problem.sizes[0]):
            inputs = problem.inputs(sizes, seed=1)
            outputs = [t for t in outputs_of(problem.function, inputs) if t.requires_grad]
            pulled_back(outputs, inputs, random_like(tuple(outputs)))

    return off(compare(problem, between=other), "where other calls, with their backward passes, come between")


def some_outputs(problem: Problem) -> str | None:
    """A loss of one output alone: autograd hands in zeros, or None, for the others."""
    outputs = outputs_of(problem.reference, problem.inputs())
    asking = [i for i, t in enumerate(outputs) if t.requires_grad]
    if len(asking) < 2:
        raise NotHere("one output has a gradient")

    def alone(number: int, function: Function) -> Function:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            every = outputs_of(function, list(tensors))
            return tuple(t if i == number else t.detach() for i, t in enumerate(every))

        return call

    for number in asking:
        one = replace(problem, reference=alone(number, problem.reference))
        error = compare(one, around=functools.partial(alone, number))
        if line := off(error, f"where only output {number} is used"):
            return line
    return None


def saved_on_cpu(function: Function) -> Function:
    """The forward pass with what is kept moved to the CPU."""

    def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        with torch.autograd.graph.save_on_cpu():
            return function(*tensors)

    return call


def compiled(problem: Problem) -> str | None:
    """Under torch.compile(fullgraph=True)."""
    torch.compiler.reset()
    inner: Function = getattr(
        problem.function, "__wrapped__", problem.function
    )  # the compiler sees nothing else

    def around(_: Function) -> Function:
        graph = torch.compile(inner, fullgraph=True, backend="aot_eager")

        def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            try:
                return graph(*tensors)
            except Exception as error:
                raise Refused(f"{type(error).__name__}: {str(error).split(chr(10))[0][:200]}") from error

        return call

    return off(compare(problem, around=around), "under torch.compile")


def autocast(problem: Problem) -> str | None:
    """In a region of bfloat16 autocast."""

    def around(function: Function) -> Function:
        def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            with torch.autocast(problem.device, torch.bfloat16):
                return function(*tensors)

        return call

    if torch.float32 not in problem.dtypes:
        raise NotHere("the function does not take float32")
    error = compare(problem, dtype=torch.float32, around=around, within=torch.bfloat16)
    return off(error, "under autocast in bfloat16")


def no_grad(problem: Problem) -> str | None:
    """Under no_grad the result is the same."""
    wanted = outputs_of(problem.function, problem.inputs())
    with torch.no_grad():
        got = outputs_of(problem.function, problem.inputs())
    same = all(
        torch.allclose(a.double(), b.double(), equal_nan=True) for a, b in zip(got, wanted, strict=True)
    )
    return None if same else "under no_grad the result is another one"


def copied(problem: Problem) -> str | None:
    """A deep copy of a module computes the same."""
    if not isinstance(problem.module, torch.nn.Module):
        raise NotHere("the function is no module")
    module = copy.deepcopy(problem.module)
    call = refusing(with_parameters(module, [name for name, _ in module.named_parameters()]))
    return off(compare(problem, around=lambda _: call), "of a deep copy")


def other_stream(problem: Problem) -> str | None:
    """On a stream that is not the default one."""
    if problem.device == "cpu":
        raise NotHere("there is no other stream on a CPU")
    stream = torch.cuda.Stream()

    def around(function: Function) -> Function:
        def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs = function(*tensors)
            torch.cuda.current_stream().wait_stream(stream)
            return outputs

        return call

    return off(
        compare(problem, f"{LARGE} for {problem.free[0]}" if problem.free else "odd", around=around),
        "on another stream",
    )


def second_derivative(problem: Problem) -> str | None:
    """The gradient of a gradient is right, or refused."""
    try:
        got = second_gradients(problem.function, problem.inputs())
    except RuntimeError as error:
        raise Refused(words_of(error)) from error
    truth = second_gradients(problem.reference, wide(problem.inputs()))
    own = furthest(second_gradients(problem.reference, problem.inputs()), truth)
    count = len(leaves(problem.inputs()))
    names = [f"the gradient of the gradient of {name}" for name in problem.names[:count]]
    names += ["the gradient of what comes in"] * (len(truth) - count)
    distance = furthest(got, truth, names=names)
    distance.limit = max(distance.limit, FACTOR * own + UNITS * torch.finfo(problem.dtypes[0]).eps)
    return off(distance, "of the gradient of a gradient")


def finite_differences(check: checks.Check) -> Check:
    """A check by finite differences, for which float32 is too coarse."""

    def run(problem: Problem) -> str | None:
        if problem.dtypes[0] != torch.float64:
            raise NotHere("the function does not take float64")
        return raising(check)(problem)

    return run


def repeated(problem: Problem) -> str | None:
    """Whether two runs give the same bits: said, and not demanded."""
    runs = [gradients(problem.function, problem.inputs(), random_like) for _ in range(2)]
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*runs, strict=True))
    problem.notes.append("the same bits in two runs" if same else "other bits in a second run")
    return None


def kept(problem: Problem) -> str | None:
    """Bytes kept for the backward pass: as many as `saved` says; without it, said beside the reference's."""
    if problem.saved:
        return checks.memory_kept.__wrapped__(problem)
    ours, theirs = (checks.kept_bytes(f, problem.inputs())[0] for f in (problem.function, problem.reference))
    problem.notes.append(f"{ours} bytes kept for the backward pass, the reference {theirs}")
    return None


def held(problem: Problem) -> str | None:
    """What ctx holds past the hooks: said, and not demanded, for it may be right."""
    for output in outputs_of(problem.function, problem.inputs()):
        for name, value in getattr(output.grad_fn, "__dict__", {}).items():
            if isinstance(value, Tensor):
                problem.notes.append(f"ctx.{name} holds a tensor past save_for_backward: no hook sees it")
    return None


def raising(check: checks.Check) -> Check:
    """A check of puzzle 21 that raises what the function raises."""
    return check.__wrapped__


ALONE = ("memory kept", "held by ctx")
"""Tries that the reference need not pass."""
MAY_REFUSE = ("second derivative", "written between")
"""Tries in which a refusal is as good as a right result."""
TRIES: dict[str, Check] = {
    "plain": plain,
    "written to": raising(checks.inputs_unchanged),
    "outputs with a gradient": raising(checks.differentiable_outputs),
    **{str(dtype).removeprefix("torch."): in_dtype(dtype) for dtype in DTYPES},
    "means far from 0": values("with means far from 0", offset),
    "tiny variance": values("with rows that hardly vary", flat, alone=True),
    "ties": values("with many equal numbers", tied),
    "zeros": values("where an input is exactly 0", placed(0.0)),
    "negative zero": values("where an input is -0.0", placed(-0.0)),
    "far": far,
    "huge": huge,
    "NaN": values("where an input is NaN", placed(torch.nan, 7)),
    "infinity": values("where an input is infinite", placed(torch.inf, 7)),
    "negative infinity": values("where an input is -inf", placed(-torch.inf, 7)),
    "infinite gradient": infinite_incoming,
    "sums that cancel": sums_that_cancel,
    "following gradient": compared("for a gradient that follows the result", incoming=following),
    "frozen inputs": raising(checks.frozen_inputs),
    "layout of inputs": laid_out,
    "layout of the gradient": incoming_laid_out,
    "size 1": compared("where a size is 1", at=each_at(1)),
    "larger than a block": compared("at sizes larger than a block", at=each_at(LARGE, also_all=False)),
    "thousands of rows": thousands_of_rows,
    "graph used twice": raising(checks.second_backward),
    "added to existing": compared("where gradients are added to existing ones", pull=accumulated),
    "written between": raising(checks.written_between),
    "two calls": raising(checks.two_calls),
    "alternating calls": alternating,
    "some outputs": some_outputs,
    "checkpoint": raising(checks.under_checkpoint),
    "save_on_cpu": compared("under save_on_cpu", around=saved_on_cpu),
    "no_grad": no_grad,
    "autocast": autocast,
    "compile": compiled,
    "deepcopy": copied,
    "another stream": other_stream,
    "size 0": compared("where there is nothing", at=each_at(0, also_all=False)),
    "second derivative": second_derivative,
    "gradcheck": finite_differences(checks.gradcheck_float64),
    "random directions": finite_differences(checks.random_directions),
    "repeat": repeated,
    "memory kept": kept,
    "held by ctx": held,
}
"""Name -> try, in the order in which they are made and told of."""
