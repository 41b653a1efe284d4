"""Define the checks of `check_backward`; each returns a message if one kind of call is wrong."""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from harness.check import gradient_checks as checks
from harness.check.call_comparison import InvalidReference, compare
from harness.check.gradients import (
    DTYPES,
    Edit,
    Function,
    MakeGradOutputs,
    Tensors,
    are_equal,
    compute_gradients,
    compute_outputs,
    get_dtype_name,
    list_leaves,
    ones_like,
    random_like,
    report_excess,
    run_backward,
)
from harness.devices.custom_ops import finish_all
from harness.testing.problem import LARGE_SIZE, MODEL_WIDTH, Problem, bind_parameters, mark_refusals

COARSE_FLOOR = 1e-6  # tolerance for inputs so large that any formula loses digits: only NaN and inf matter
LOW_PRECISION_DTYPES = (torch.bfloat16, torch.float16)
Check = Callable[[Problem], str | None]
get_ordinary_sizes = attrgetter("sizes")  # all ordinary kinds of sizes of a problem


class NotApplicable(Exception):
    """This check does not apply to the function or the machine."""


def is_accepted(problem: Problem, dtype: torch.dtype) -> bool:
    try:
        return bool(compute_gradients(problem.function, problem.inputs(dtype=dtype), random_like))
    except Exception:
        return False


def reject_bad_index(problem: Problem, sizes: str) -> None:
    """Raise InvalidReference for indices into an empty tensor, which PyTorch on a GPU reads out of bounds."""
    if problem.device == "cpu" or not sizes.startswith("0 "):
        return
    inputs = problem.inputs(sizes)
    index = any(t.numel() and not t.is_floating_point() and t.dtype != torch.bool for t in inputs)
    if index and any(t.is_floating_point() and not t.numel() for t in inputs):
        raise InvalidReference("an index into an empty tensor may end the GPU's context")


def compare_calls(
    message: str,
    *,
    select_sizes: Callable[[Problem], Sequence[str]] = lambda problem: problem.sizes[:1],
    dtypes: Callable[[Problem], Sequence[torch.dtype]] = lambda problem: problem.dtypes[:1],
    edit: Edit | None = None,
    **options: Any,
) -> Check:
    """Return a check of one kind of call; `message` is a template for {sizes} and {dtype}."""

    def check(problem: Problem) -> str | None:
        all_sizes, all_dtypes = select_sizes(problem), dtypes(problem)
        if not all_sizes or not all_dtypes or (edit and not problem.editable):
            missing = "no input is made here" if all_sizes else "no size has a name"
            raise NotApplicable(missing if all_dtypes else "the function does not take the dtype")
        errors: list[Exception] = []
        for sizes, dtype in itertools.product(all_sizes, all_dtypes):
            text = message.format(sizes=sizes, dtype=get_dtype_name(dtype))
            text += f" in {get_dtype_name(dtype)}" * (dtype != problem.dtypes[0] and "{dtype}" not in message)
            try:
                reject_bad_index(problem, sizes)
                if line := report_excess(compare(problem, sizes, dtype=dtype, edit=edit, **options), text):
                    return line
            except Exception as error:
                vars(error).setdefault("call", text)
                if "is_refusal" not in vars(error) and not isinstance(error, InvalidReference):
                    raise
                errors.append(error)
        if errors:
            raise errors[0]
        return None

    return check


def combine(*members: Check) -> Check:
    return lambda problem: next(filter(None, (check(problem) for check in members)), None)


def list_sizes(size: int, *extra_names: str) -> Callable[[Problem], list[str]]:
    return lambda problem: [
        f"{size} for {name}" for name in (*problem.size_names, *extra_names) if problem.size_names
    ]


def check_ordinary(problem: Problem) -> str | None:
    """Compare values and gradients at all ordinary sizes, for random incoming gradients and for ones."""
    return combine(*(
        compare_calls(f"{sizes} sizes{suffix}", select_sizes=lambda _, sizes=sizes: [sizes], make_grad_outputs=make_gradients)
        for sizes in problem.sizes for make_gradients, suffix in ((random_like, ""), (ones_like, ", a gradient of ones"))
    ))(problem)  # fmt: skip


def check_huge(problem: Problem) -> str | None:
    """Compare at the largest inputs for which the reference is finite in the same dtype."""
    for power in (100, 60, 30, 12, 7):
        scale_up: Edit = lambda t, by=2.0**power: t * by  # noqa: E731
        inputs = problem.edit_inputs(problem.inputs(), scale_up)
        results = [*compute_outputs(problem.reference, inputs)]
        results += compute_gradients(problem.reference, inputs, random_like)
        if all(t.isfinite().all() for t in results):
            return compare_calls(f"with inputs about 2^{power}", edit=scale_up, floor=COARSE_FLOOR)(problem)
    raise NotApplicable("the reference is finite for no large input")


def select_dtypes(*dtypes: torch.dtype) -> Callable[[Problem], list[torch.dtype]]:
    return lambda problem: [dtype for dtype in problem.dtypes if dtype in dtypes]


def select_kernel_dtypes(*others: torch.dtype) -> Callable[[Problem], list[torch.dtype]]:
    """Return a function that picks the dtypes whose kernels may differ: the widest, float32 and `others`."""
    return lambda problem: [d for d in problem.dtypes if d in (problem.dtypes[0], torch.float32, *others)]


EXPANDED = "one row expanded"
LAYOUTS: dict[str, Edit] = {  # as produced by transpose, slicing, chunk and expand
    **checks.LAYOUTS,
    "behind an offset, as from chunk": lambda t: torch.cat((t, t))[len(t) :] if t.dim() else t,
    EXPANDED: lambda t: t[:1].expand(t.shape) if t.dim() and len(t) else t,
}
STRIDED_GRADIENTS: dict[str, MakeGradOutputs] = {  # gradients that are not contiguous
    **{name: checks.make_strided_gradients(layout) for name, layout in LAYOUTS.items()},
    "one number, as from sum": checks.make_expanded_gradients,
}


def check_layouts(problem: Problem) -> str | None:
    """Compare with non-contiguous inputs, all at once and one at a time."""
    for (name, layout), index in itertools.product(LAYOUTS.items(), (None, *range(len(problem.names)))):
        selected = problem.editable or () if name == EXPANDED else range(len(problem.names))
        change = checks.change_layout(layout, [i for i in selected if index in (None, i)])
        label = "the inputs" if index is None else problem.get_input_name(index)
        if line := compare_calls(f"for another layout of {label} ({name})", transform_inputs=change)(problem):
            return line
    return None


def accumulate_twice(outputs: Tensors, inputs: list[Tensor], grad_outputs: Tensors) -> list[Tensor]:
    for _ in range(2):
        torch.autograd.backward(outputs, [g.clone() for g in grad_outputs], retain_graph=True)
    return [torch.zeros_like(t) if t.grad is None else t.grad.to_dense() / 2 for t in list_leaves(inputs)]


def check_alternating_calls(problem: Problem) -> str | None:
    """Compare with other forward and backward calls between the passes and before the results are read."""

    def call_others() -> None:
        for sizes in (problem.sizes[-1], problem.sizes[0]):
            compute_gradients(problem.function, problem.inputs(sizes, seed=1), random_like)

    def run_between_calls(*call: Any) -> list[Tensor]:
        call_others()
        grads = run_backward(*call)
        call_others()
        return grads

    outputs = [t.detach() for t in compute_outputs(problem.function, problem.inputs())]
    copies = [t.clone() for t in outputs]
    call_others()
    if not are_equal(outputs, copies):
        return "a later call overwrites an earlier result"
    label = "where other calls come between the passes and after them"
    return compare_calls(label, run_backward_pass=run_between_calls)(problem)


def run_backward_for_used(outputs: Tensors, inputs: list[Tensor], grad_outputs: Tensors) -> list[Tensor]:
    """Return the gradients of a loss over only the outputs whose incoming gradient is not 0."""
    used = [i for i, g in enumerate(grad_outputs) if g.any()]
    return run_backward([outputs[i] for i in used], inputs, [grad_outputs[i] for i in used])


def check_some_outputs(problem: Problem) -> str | None:
    """Compare with a loss over a single output: autograd passes zeros or None for the others."""
    outputs = compute_outputs(problem.reference, problem.inputs())
    differentiable = [i for i, t in enumerate(outputs) if t.requires_grad]
    if len(differentiable) < 2:
        raise NotApplicable("one output has a gradient")
    return combine(*(
        compare_calls(f"where only output {output_index} is used", run_backward_pass=run_backward_for_used,
                      make_grad_outputs=lambda out, k=k: [g * (i == k) for i, g in enumerate(random_like(out))])
        for k, output_index in enumerate(differentiable)
    ))(problem)  # fmt: skip


def run_inside(context: Callable[[str], AbstractContextManager[object]], function: Function) -> Function:
    def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        with context(tensors[0].device.type):
            return function(*tensors)

    return call


@contextlib.contextmanager
def use_another_stream(device: str) -> Iterator[None]:
    if device == "cpu":
        raise NotApplicable("a CPU has no streams")
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def check_compiled(problem: Problem) -> str | None:
    torch.compiler.reset()
    inner: Function = getattr(problem.function, "__wrapped__", problem.function)  # without our wrapper
    graph = mark_refusals(torch.compile(inner, fullgraph=True, backend="aot_eager"))
    return compare_calls("under torch.compile", wrap=lambda _: graph)(problem)


def check_no_grad(problem: Problem) -> str | None:
    expected = compute_outputs(problem.function, problem.inputs())
    with torch.no_grad():
        got = compute_outputs(problem.function, problem.inputs())
    return None if are_equal(got, expected, 1e-5) else "under no_grad the result is another one"


def check_deepcopy(problem: Problem) -> str | None:
    if not isinstance(problem.module, torch.nn.Module):
        raise NotApplicable("the function is not a module")
    call = mark_refusals(bind_parameters(copy.deepcopy(problem.module), problem.parameters))
    return compare_calls("in a deep copy of the module", wrap=lambda _: call)(problem)


def need_float64(check: checks.Check) -> Check:
    """Return a check by finite differences in float64 only; float32 is too coarse."""

    def run(problem: Problem) -> str | None:
        if torch.float64 not in problem.dtypes:
            raise NotApplicable("the function does not take float64")
        return check(replace(problem, dtypes=(torch.float64,)))

    return run


def note_repeat(problem: Problem) -> None:
    first, second = (compute_gradients(problem.function, problem.inputs(), random_like) for _ in range(2))
    identical = are_equal(first, second)
    problem.notes.append("the same bits in two runs" if identical else "other bits in a second run")


def check_memory(problem: Problem) -> str | None:
    """Note the bytes saved for the backward pass, and compare them with `saved`."""
    functions = problem.function, problem.reference
    num_bytes, reference_bytes = (
        checks.count_saved_bytes(function, problem.inputs())[0] for function in functions
    )
    problem.notes.append(f"{num_bytes} bytes kept for the backward pass, the reference {reference_bytes}")
    return checks.memory_saved.__wrapped__(problem)


def note_ctx_tensors(problem: Problem) -> None:
    """Note a tensor stored on ctx, which saved-tensor hooks miss, although it may be correct."""
    if line := checks.held_by_ctx.__wrapped__(problem):
        problem.notes.append(line)


def report_findings(_: Problem) -> str | None:
    """Report the virtual GPU's findings in Mojo ops: races, wrong addresses, reads of unwritten memory."""
    if (findings := finish_all()) is None:
        raise NotApplicable("no Mojo op ran on the virtual GPU")
    return "; ".join([*findings[:2], *([f"and {len(findings) - 2} more"] if findings[2:] else [])]) or None


REFERENCE_EXEMPT = ("memory kept", "held by ctx", "races and memory")  # the reference need not pass these
MAY_REFUSE = ("second derivative", "written between")  # a refusal is as good as a correct result
CHECKS: dict[str, Check] = {  # in the order of a report
    "plain": check_ordinary,
    "written to": checks.inputs_unchanged.__wrapped__,
    "outputs with a gradient": checks.differentiable_outputs.__wrapped__,
    **{get_dtype_name(d): compare_calls("in {dtype} ({sizes})", select_sizes=get_ordinary_sizes, dtypes=lambda _, d=d: [d]) for d in DTYPES},
    "means far from 0": compare_calls("with means far from 0", edit=lambda t: t + 30),  # squares lose half the digits
    "tiny variance": compare_calls("with rows that hardly vary", edit=lambda t: 3 + t * 1e-3, first_only=True, dtypes=select_kernel_dtypes()),
    "ties": compare_calls("with many equal numbers", edit=torch.round),
    "zeros": compare_calls("where an input is exactly 0", edit=checks.set_every_nth(0.0)),
    "negative zero": compare_calls("where an input is -0.0", edit=checks.set_every_nth(-0.0)),
    "far": combine(*(
        compare_calls(f"with inputs whose exp is {exp}", edit=lambda t, far=far: t + far, min_scale=1.0, floor=COARSE_FLOOR, dtypes=select_kernel_dtypes())
        for far, exp in ((checks.EXP_LIMIT, "infinite"), (-checks.EXP_LIMIT, "0"))
    )),
    "huge": check_huge,
    "NaN": compare_calls("where an input is NaN", edit=checks.set_every_nth(torch.nan, 7)),
    "infinity": compare_calls("where an input is infinite", edit=checks.set_every_nth(torch.inf, 7)),
    "negative infinity": compare_calls("where an input is -inf", edit=checks.set_every_nth(-torch.inf, 7)),
    "infinite gradient": combine(*(
        compare_calls("where infinity comes in", make_grad_outputs=checks.make_infinite_gradients(part))
        for part in (lambda g: g.view(-1)[:1], lambda g: g[:1], lambda g: g.view(-1)[::2])
    )),
    "sums that cancel": compare_calls(
        "where sums of {dtype} cancel ({sizes})", select_sizes=lambda problem: [*list_sizes(64)(problem)[:1], "odd"][:1],
        dtypes=select_dtypes(*LOW_PRECISION_DTYPES), make_grad_outputs=checks.make_cancelling_gradients, reorder_only=True,
    ),
    "following gradient": compare_calls("for a gradient that follows the result",
        make_grad_outputs=lambda out: [t.detach() + g / 8 for t, g in zip(out, random_like(out), strict=True)]),
    "frozen inputs": checks.frozen_inputs.__wrapped__,
    "layout of inputs": check_layouts,
    "layout of the gradient": combine(
        *(
            compare_calls(f"for a gradient that is not contiguous ({name}) ({{sizes}})", select_sizes=get_ordinary_sizes, dtypes=select_kernel_dtypes(*LOW_PRECISION_DTYPES), make_grad_outputs=make_gradients)
            for name, make_gradients in STRIDED_GRADIENTS.items()
        ),
        *(
            compare_calls(f"where inputs and gradient are not contiguous ({name})", transform_inputs=checks.change_layout(layout), make_grad_outputs=STRIDED_GRADIENTS[name])
            for name, layout in LAYOUTS.items() if name != EXPANDED  # it would change the inputs' values
        ),
    ),
    "size 1": compare_calls("where a size is 1 ({sizes})", select_sizes=list_sizes(1, "all")),
    "larger than a block": combine(
        compare_calls("at a larger size ({sizes})", dtypes=select_kernel_dtypes(*LOW_PRECISION_DTYPES), select_sizes=list_sizes(64)),  # rows of whole vectors
        compare_calls("at a larger size ({sizes})", dtypes=select_kernel_dtypes(), select_sizes=list_sizes(LARGE_SIZE)),
        compare_calls("at a larger size ({sizes})", select_sizes=lambda problem: list_sizes(MODEL_WIDTH)(problem)[-1:])),
    "thousands of rows": compare_calls(
        "over thousands of rows of {dtype} ({sizes})", select_sizes=lambda problem: ["tall"] * bool(problem.size_names),
        dtypes=lambda problem: [problem.dtypes[0], *select_dtypes(*LOW_PRECISION_DTYPES)(problem)[:1]],
        edit=lambda t: t + 2, make_grad_outputs=lambda out: [g + 2 for g in random_like(out)],
    ),
    "graph used twice": checks.second_backward.__wrapped__,
    "added to existing": compare_calls("where gradients are added to existing ones", run_backward_pass=accumulate_twice),
    "written between": checks.written_between.__wrapped__,
    "two calls": checks.two_calls.__wrapped__,
    "alternating calls": check_alternating_calls,
    "some outputs": check_some_outputs,
    "checkpoint": checks.under_checkpoint.__wrapped__,
    "save_on_cpu": compare_calls("under save_on_cpu", wrap=partial(run_inside, lambda _: torch.autograd.graph.save_on_cpu())),
    "no_grad": check_no_grad,
    "autocast": compare_calls(
        "under autocast in bfloat16, for which there are torch.amp.custom_fwd and custom_bwd", dtypes=select_dtypes(torch.float32),
        wrap=partial(run_inside, lambda device: torch.autocast(device, torch.bfloat16)), autocast_dtype=torch.bfloat16),
    "compile": check_compiled,
    "deepcopy": check_deepcopy,
    "another stream": compare_calls("on another stream", wrap=partial(run_inside, use_another_stream),
        select_sizes=lambda problem: [*list_sizes(LARGE_SIZE)(problem)[:1], "odd"][:1]),
    "size 0": compare_calls("where a size is 0 ({sizes})", select_sizes=list_sizes(0)),
    "second derivative": lambda problem: report_excess(
        mark_refusals(checks.compare_second_derivatives, RuntimeError)(problem),
        "the gradient of a gradient is wrong; @once_differentiable would refuse it",
    ),
    "gradcheck": need_float64(checks.gradcheck_float64.__wrapped__),
    "random directions": need_float64(checks.random_directions.__wrapped__),
    "repeat": note_repeat,
    "memory kept": check_memory,
    "held by ctx": note_ctx_tensors,
    "races and memory": report_findings,
}  # fmt: skip
