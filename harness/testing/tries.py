"""The tries of `check_backward` by name: each check returns a line if a function is wrong in one kind of
call.

Most are one comparison with one change. Those shared with puzzle 21 are in
`harness/check/gradient_checks.py`.
"""

import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from harness.check import gradient_checks as checks
from harness.check.gradients import (
    DTYPES,
    Function,
    Incoming,
    dtype_name,
    gradients,
    leaves,
    off,
    outputs_of,
    pulled_back,
    random_like,
)
from harness.check.measured import ReferenceRaised, compare
from harness.devices.custom_ops import finish_all
from harness.testing.problem import LARGE, Problem, bind_parameters, is_refusal, mark_refusal, mark_refusals

COARSE = 1e-6
"""Largest error for inputs so large that every formula loses digits: the check is for NaN and infinity."""
Check = Callable[[Problem], str | None]
Edit = Callable[[Tensor], Tensor]
ORDINARY = attrgetter("sizes")
"""All ordinary kinds of sizes of a problem."""


class NotHere(Exception):
    """This try does not apply to the function or the machine."""


def check_call(problem: Problem, words: str, sizes: str = "odd", **call: Any) -> str | None:
    """Compare one call; `words` say which it is, also where it raises."""
    try:
        return off(compare(problem, sizes, **call), words)
    except Exception as error:
        vars(error).setdefault("call", words)
        raise


def refuse_bad_index(problem: Problem, sizes: str) -> None:
    """Raise ReferenceRaised for an index beside an empty tensor: PyTorch's own kernels read past it, which ends a GPU's context."""
    inputs = problem.inputs(sizes)
    index = any(t.numel() and not t.is_floating_point() and t.dtype != torch.bool for t in inputs)
    if index and any(t.is_floating_point() and not t.numel() for t in inputs):
        raise ReferenceRaised("an index into an empty tensor may end the GPU's context")


def compare_calls(
    words: str,
    *,
    at: Callable[[Problem], Sequence[str]] | None = None,
    dtypes: Callable[[Problem], Sequence[torch.dtype]] = lambda problem: problem.dtypes[:1],
    edit: Edit | None = None,
    alone: bool = False,
    **setting: Any,
) -> Check:
    """Return a try of one kind of call at the sizes `at`, or odd ones; `edit` changes all movable inputs, or the first alone."""

    def check(problem: Problem) -> str | None:
        kinds = at(problem) if at else problem.sizes[:1]
        if not kinds or (edit and not problem.movable):
            raise NotHere("no size has a name" if not kinds else "no input is made here")
        raised: list[Exception] = []
        for sizes, dtype in itertools.product(kinds, dtypes(problem)):
            text = words.format(dtype_name(dtype)) + f" ({sizes})" * bool(at)
            try:
                if problem.device != "cpu" and sizes.startswith("0 "):
                    refuse_bad_index(problem, sizes)
                if line := check_call(problem, text, sizes, dtype=dtype, edit=edit, alone=alone, **setting):
                    return line
            except Exception as error:
                if not (is_refusal(error) or isinstance(error, ReferenceRaised)):
                    raise
                raised.append(error)
        if raised:
            raise raised[0]
        return None

    return check


def any_of(*each: Check) -> Check:
    """Return a try that makes several."""
    return lambda problem: next(filter(None, (check(problem) for check in each)), None)


def list_sizes(size: int, *together: str) -> Callable[[Problem], list[str]]:
    """Return the kinds of sizes in which one name has this size, and those in `together`."""
    return lambda problem: [f"{size} for {name}" for name in (*problem.free, *together) if problem.free]


def check_ordinary(problem: Problem) -> str | None:
    """Compare values and gradients at all ordinary sizes, for a random gradient and for one of ones."""
    ones = lambda out: [torch.ones_like(t) for t in out]  # noqa: E731
    for sizes, (incoming, words) in itertools.product(
        problem.sizes, ((random_like, ""), (ones, ", a gradient of ones"))
    ):
        if line := check_call(problem, f"{sizes} sizes{words}", sizes, incoming=incoming):
            return line
    return None


def move_far(side: float) -> Check:
    """Return a try with inputs so far from 0 that exp of them is infinite, or 0."""
    words = f"with inputs whose exp is {'infinite' if side > 0 else '0'}"
    return compare_calls(
        words, edit=lambda t: t + side * (800 if t.dtype == torch.float64 else 110), least=1.0, floor=COARSE
    )


def check_huge(problem: Problem) -> str | None:
    """Compare at the largest inputs for which the reference is finite in the same dtype."""
    for power in (100, 60, 30, 12, 7):
        scaled: Edit = lambda t, by=2.0**power: t * by  # noqa: E731
        inputs = problem.edit_inputs(problem.inputs(), scaled)
        results = (*outputs_of(problem.reference, inputs), *gradients(problem.reference, inputs, random_like))
        if all(t.isfinite().all() for t in results):
            return compare_calls(f"with inputs about 2^{power}", edit=scaled, floor=COARSE)(problem)
    raise NotHere("the reference is finite for no large input")


def cancel_in_sums(out: tuple[Tensor, ...]) -> list[Tensor]:
    """Return large gradients that nearly cancel in sums over rows."""
    result: list[Tensor] = []
    for g in random_like(out):
        rows = g.reshape(-1, g.shape[-1] if g.dim() else 1)
        half = (len(rows) + 1) // 2
        turned = torch.cat((64 * rows[:half], -64 * rows[:half]))[: len(rows)]
        result.append((turned + rows / 8).reshape(g.shape))
    return result


def list_16_bit_dtypes(problem: Problem) -> list[torch.dtype]:
    """Return the 16-bit dtypes that the function takes."""
    return [dtype for dtype in problem.dtypes if torch.finfo(dtype).bits == 16]


EXPANDED = "one row expanded"
LAYOUTS: dict[str, Edit] = {
    **checks.LAYOUTS,
    "behind an offset, as from chunk": lambda t: torch.cat((t, t))[len(t) :] if t.dim() else t,
    EXPANDED: lambda t: t[:1].expand(t.shape) if t.dim() and len(t) else t,
}
"""Layouts in memory, as transposes, slices, chunks and expand make them."""
INCOMING: dict[str, Incoming] = {
    **{name: checks.lay_out(lay) for name, lay in LAYOUTS.items()},
    "one number, as from sum": checks.expand_one,
}
"""Gradients that are not contiguous."""


def check_layouts(problem: Problem) -> str | None:
    """Compare for inputs that are not contiguous, all of them and each alone."""
    for (name, lay), number in itertools.product(LAYOUTS.items(), (None, *range(len(problem.names)))):
        every = problem.movable or () if name == EXPANDED else range(len(problem.names))
        change = checks.relaid(lay, [i for i in every if number in (None, i)])
        which = "the inputs" if number is None else problem.name_of_input(number)
        if line := check_call(problem, f"for another layout of {which} ({name})", change=change):
            return line
    return None


def accumulate_twice(
    outputs: Sequence[Tensor], inputs: list[Tensor], incoming: Sequence[Tensor]
) -> list[Tensor]:
    """Return half of the gradients that two backward passes add up to."""
    for _ in range(2):
        torch.autograd.backward(outputs, [g.clone() for g in incoming], retain_graph=True)
    return [torch.zeros_like(t) if t.grad is None else t.grad / 2 for t in leaves(inputs)]


def check_alternating_calls(problem: Problem) -> str | None:
    """Compare where other calls, with their backward passes, come between the passes, and before the results are read."""

    changed = False

    def call_others() -> None:
        for sizes in (problem.sizes[-1], problem.sizes[0]):
            gradients(problem.function, problem.inputs(sizes, seed=1), random_like)

    def between(_: list[Tensor], outputs: Sequence[Tensor]) -> None:
        nonlocal changed
        shown = [t.detach().clone() for t in outputs]
        call_others()
        changed = not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(outputs, shown, strict=True))

    def pull(*call: Any) -> list[Tensor]:
        grads = pulled_back(*call)
        call_others()
        return grads

    line = check_call(
        problem, "where other calls come between the passes and after them", between=between, pull=pull
    )
    return "a later call overwrites an earlier result" if changed else line


def check_some_outputs(problem: Problem) -> str | None:
    """Compare for a loss of one output alone: autograd hands in zeros, or None, for the others."""
    outputs = outputs_of(problem.reference, problem.inputs())
    asking = [i for i, t in enumerate(outputs) if t.requires_grad]
    if len(asking) < 2:
        raise NotHere("one output has a gradient")

    def alone(function: Function, number: int) -> Function:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            every = enumerate(outputs_of(function, list(tensors)))
            return tuple(t if i == number else t.detach() for i, t in every)

        return call

    for number in asking:
        one = replace(problem, reference=alone(problem.reference, number))
        around = functools.partial(alone, number=number)
        if line := check_call(one, f"where only output {number} is used", around=around):
            return line
    return None


def run_inside(context: Callable[[], AbstractContextManager[object]]) -> Callable[[Function], Function]:
    """Return a function that runs another inside a context."""

    def around(function: Function) -> Function:
        def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            with context():
                return function(*tensors)

        return call

    return around


def check_compiled(problem: Problem) -> str | None:
    """Compare under torch.compile(fullgraph=True)."""
    torch.compiler.reset()
    inner: Function = getattr(problem.function, "__wrapped__", problem.function)  # all that the compiler sees
    graph = mark_refusals(torch.compile(inner, fullgraph=True, backend="aot_eager"))
    return check_call(problem, "under torch.compile", around=lambda _: graph)


def check_autocast(problem: Problem) -> str | None:
    """Compare in a region of bfloat16 autocast."""
    if torch.float32 not in problem.dtypes:
        raise NotHere("the function does not take float32")
    around = run_inside(lambda: torch.autocast(problem.device, torch.bfloat16))
    words = "under autocast in bfloat16"
    return check_call(problem, words, dtype=torch.float32, around=around, within=torch.bfloat16)


def check_no_grad(problem: Problem) -> str | None:
    """Compare the result under no_grad with that outside."""
    expected = outputs_of(problem.function, problem.inputs())
    with torch.no_grad():
        got = outputs_of(problem.function, problem.inputs())
    pairs = [(a.double(), b.double()) for a, b in zip(got, expected, strict=True)]
    same = all(torch.allclose(a, b, equal_nan=True) for a, b in pairs)
    return None if same else "under no_grad the result is another one"


def check_deepcopy(problem: Problem) -> str | None:
    """Compare a deep copy of a module."""
    if not isinstance(problem.module, torch.nn.Module):
        raise NotHere("the function is not a module")
    module = copy.deepcopy(problem.module)
    call = mark_refusals(bind_parameters(module, [name for name, _ in module.named_parameters()]))
    return check_call(problem, "in a deep copy of the module", around=lambda _: call)


@contextlib.contextmanager
def use_another_stream() -> Iterator[None]:
    """Run on a new stream, after the current one and before what follows on it."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def check_other_stream(problem: Problem) -> str | None:
    """Compare on a stream that is not the default one."""
    if problem.device == "cpu":
        raise NotHere("a CPU has no streams")
    sizes = f"{LARGE} for {problem.free[0]}" if problem.free else "odd"
    return check_call(problem, "on another stream", sizes, around=run_inside(use_another_stream))


def check_second_derivative(problem: Problem) -> str | None:
    """Check that the gradient of a gradient is right, or refused."""
    try:
        return off(
            checks.second_distance(problem),
            "the gradient of a gradient is wrong; @once_differentiable would refuse it",
        )
    except RuntimeError as error:
        mark_refusal(error)
        raise


def need_float64(check: checks.Check) -> Check:
    """Return a check by finite differences, for which float32 is too coarse."""

    def run(problem: Problem) -> str | None:
        if problem.dtypes[0] != torch.float64:
            raise NotHere("the function does not take float64")
        return check(problem)

    return run


def note_repeat(problem: Problem) -> str | None:
    """Note whether two runs give the same bits."""
    runs = [gradients(problem.function, problem.inputs(), random_like) for _ in range(2)]
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*runs, strict=True))
    problem.notes.append("the same bits in two runs" if same else "other bits in a second run")
    return None


def check_memory(problem: Problem) -> str | None:
    """Compare the bytes saved for the backward pass with `saved`; without it note them."""
    if problem.saved:
        return checks.memory_saved.__wrapped__(problem)
    ours, theirs = (checks.saved_bytes(f, problem.inputs())[0] for f in (problem.function, problem.reference))
    problem.notes.append(f"{ours} bytes kept for the backward pass, the reference {theirs}")
    return None


def note_held(problem: Problem) -> str | None:
    """Note tensors that ctx holds without saved-tensor hooks, which may be correct."""
    for output in outputs_of(problem.function, problem.inputs()):
        for name in checks.hidden_tensors(output):
            problem.notes.append(f"ctx.{name} holds a tensor past save_for_backward: no hook sees it")
    return None


def report_faults(_: Problem) -> str | None:
    """Report the virtual GPU's findings in the launches of Mojo ops: races, wrong addresses, reads of
    unwritten memory."""
    if (found := finish_all()) is None:
        raise NotHere("no Mojo op ran on the virtual GPU")
    return "; ".join([*found[:2], *([f"and {len(found) - 2} more"] if found[2:] else [])]) or None


ALONE = ("memory kept", "held by ctx", "races and memory")
"""Tries that the reference need not pass."""
MAY_REFUSE = ("second derivative", "written between")
"""Tries in which a refusal is as good as a right result."""
TRIES: dict[str, Check] = {
    "plain": check_ordinary,
    "written to": checks.inputs_unchanged.__wrapped__,
    "outputs with a gradient": checks.differentiable_outputs.__wrapped__,
    **{dtype_name(d): compare_calls("in {}", at=ORDINARY, dtypes=lambda _, d=d: [d]) for d in DTYPES},
    "means far from 0": compare_calls("with means far from 0", edit=lambda t: t + 30),  # squares lose half of the digits
    "tiny variance": compare_calls("with rows that hardly vary", edit=lambda t: 3 + t * 1e-3, alone=True),
    "ties": compare_calls("with many equal numbers", edit=torch.round),
    "zeros": compare_calls("where an input is exactly 0", edit=checks.put_number(0.0)),
    "negative zero": compare_calls("where an input is -0.0", edit=checks.put_number(-0.0)),
    "far": any_of(move_far(1), move_far(-1)),
    "huge": check_huge,
    "NaN": compare_calls("where an input is NaN", edit=checks.put_number(torch.nan, 7)),
    "infinity": compare_calls("where an input is infinite", edit=checks.put_number(torch.inf, 7)),
    "negative infinity": compare_calls("where an input is -inf", edit=checks.put_number(-torch.inf, 7)),
    "infinite gradient": any_of(*(
        compare_calls("where infinity comes in", incoming=checks.send_infinity(part))
        for part in (lambda g: g.view(-1)[:1], lambda g: g[:1], lambda g: g.view(-1)[::2])
    )),
    "sums that cancel": compare_calls(
        "where sums of {} cancel", at=lambda problem: [*list_sizes(64)(problem)[:1], "odd"][:1],
        dtypes=list_16_bit_dtypes, incoming=cancel_in_sums, steady=True,
    ),
    "following gradient": compare_calls(
        "for a gradient that follows the result",
        incoming=lambda out: [t.detach() + g / 8 for t, g in zip(out, random_like(out), strict=True)],
    ),
    "frozen inputs": checks.frozen_inputs.__wrapped__,
    "layout of inputs": check_layouts,
    "layout of the gradient": any_of(
        *(
            compare_calls(f"for a gradient that is not contiguous ({name})", at=ORDINARY, incoming=incoming)
            for name, incoming in INCOMING.items()
        ),
        *(
            compare_calls(f"where inputs and gradient are not contiguous ({name})", change=checks.relaid(lay), incoming=INCOMING[name])
            for name, lay in LAYOUTS.items() if name != EXPANDED  # inputs keep their numbers
        ),
    ),
    "size 1": compare_calls("where a size is 1", at=list_sizes(1, "all")),
    "larger than a block": compare_calls("at sizes larger than a block", at=list_sizes(LARGE)),
    "thousands of rows": compare_calls(
        "over thousands of rows of {}", at=lambda problem: ["tall"] * bool(problem.free),
        dtypes=lambda problem: [problem.dtypes[0], *list_16_bit_dtypes(problem)[:1]],
        edit=lambda t: t + 2, incoming=lambda out: [g + 2 for g in random_like(out)],
    ),
    "graph used twice": checks.second_backward.__wrapped__,
    "added to existing": compare_calls("where gradients are added to existing ones", pull=accumulate_twice),
    "written between": checks.written_between.__wrapped__,
    "two calls": checks.two_calls.__wrapped__,
    "alternating calls": check_alternating_calls,
    "some outputs": check_some_outputs,
    "checkpoint": checks.under_checkpoint.__wrapped__,
    "save_on_cpu": compare_calls("under save_on_cpu", around=run_inside(torch.autograd.graph.save_on_cpu)),
    "no_grad": check_no_grad,
    "autocast": check_autocast,
    "compile": check_compiled,
    "deepcopy": check_deepcopy,
    "another stream": check_other_stream,
    "size 0": compare_calls("where there is nothing", at=list_sizes(0)),
    "second derivative": check_second_derivative,
    "gradcheck": need_float64(checks.gradcheck_float64.__wrapped__),
    "random directions": need_float64(checks.random_directions.__wrapped__),
    "repeat": note_repeat,
    "memory kept": check_memory,
    "held by ctx": note_held,
    "races and memory": report_faults,
}  # fmt: skip
"""The tries by name, in the order of a report."""
