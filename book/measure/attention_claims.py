"""Times and memory of attention's backward pass by hand: `python -m book.measure attention_claims`.

The same two functions are timed twice: by a careless method, with everything in it that flatters one side, and by a
fair one. The custom backward pass is the plain one: it keeps query, key, value and the probabilities, as
autograd does for the same formula, and computes the gradients by four products. Beside it stand the puzzle's
flash kernels, as they are learnt, and PyTorch's own function. Inputs are [B, N, S, d], float32; without a GPU
they are small.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from book.measure.shared import write
from harness.bench.timing import CudaClock, TimingProtocol, WallClock, summarize, time_interleaved
from harness.check.gradient_checks import count_saved_bytes
from harness.devices.on_max import OpGraphs
from harness.puzzles.p23.spec import BACKWARD, DELTA, FORWARD

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
LARGE = (512, 1024, 2048, 4096, 8192), {"batch": 8, "heads": 12, "dim": 64}
SMALL = (32, 64, 128), {"batch": 1, "heads": 2, "dim": 16}
"""Lengths and sizes on a GPU, and on a CPU."""
ROUNDS = 9
SDPA, TWO_PASSES = "SDPA", "two passes"
AUTOGRAD, CUSTOM = "autograd", "custom"
OWN, FAIR = "own", "fair"
BURST = 20_000.0
"""Microseconds of work in a turn."""
SLOW = 200.0
"""Milliseconds from which on a candidate takes no turns."""
LONGEST = 4000.0
"""Milliseconds above which a candidate is left out."""
TOO_LONG = "> 4 s"
TOLERANCE = 1e-4
"""Largest error of a gradient, relative to its largest element, for a candidate to be timed."""


@dataclass(frozen=True)
class Row:
    """One candidate at one length, by one method; `failed` says why where it came to nothing.

    Attributes:
        length: Queries, and keys.
        method: OWN or FAIR.
        who: AUTOGRAD, CUSTOM, SDPA or TWO_PASSES.
        ms: Milliseconds of a forward and a backward pass.
        peak: Bytes at the peak; 0 where the device does not say.
        kept: Bytes that autograd keeps for the backward pass, the inputs among them.
        same_bits: Whether two runs gave the same gradients, "" where not asked.
    """

    length: int
    method: str
    who: str
    ms: float = 0.0
    peak: int = 0
    kept: int = 0
    same_bits: str = ""
    failed: str = ""


# ---- Who takes part -----------------------------------------------------------------------------------------


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula, its backward pass left to autograd."""
    return torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1) @ value


class ByHand(torch.autograd.Function):
    """The same with the backward pass that tutorials write; `scale` is None for scores that nobody divides."""

    @staticmethod
    def forward(ctx, query, key, value, scale):
        scores = query @ key.mT
        P = torch.softmax(scores if scale is None else scores * scale, -1)
        ctx.save_for_backward(query, key, value, P)
        ctx.scale = scale
        return P @ value

    @staticmethod
    def backward(ctx, grad_output):
        query, key, value, P = ctx.saved_tensors
        grad_value = P.mT @ grad_output
        dP = grad_output @ value.mT
        dS = P * (dP - (dP * P).sum(-1, keepdim=True))
        if ctx.scale is not None:
            dS = dS * ctx.scale
        return dS @ key, dS.mT @ query, grad_value, None


class FlashKernels(torch.autograd.Function):
    """The flash kernels of the puzzle as they are learnt, with a backward pass of two kernels."""

    @staticmethod
    def forward(ctx, query, key, value):
        output, lse, mask = (
            torch.empty_like(query),
            query.new_empty(query.shape[:-1]),
            query.new_zeros(query.shape[-2], key.shape[-2]),
        )
        GRAPHS.run(FORWARD, (output, lse, query, key, value, mask))
        ctx.save_for_backward(query, key, value, output, lse, mask)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        query, key, value, output, lse, mask = ctx.saved_tensors
        delta, gradients = torch.empty_like(lse), [torch.empty_like(each) for each in (query, key, value)]
        GRAPHS.run(DELTA, (delta, grad_output, output))
        GRAPHS.run(BACKWARD, (*gradients, grad_output, query, key, value, lse, delta, mask))
        return tuple(gradients)


GRAPHS = OpGraphs("p23", "attention", (FORWARD, DELTA, BACKWARD))


def candidates(device: torch.device) -> dict[str, Function]:
    """Those of the fair method; the flash kernels on a GPU alone."""
    methods: dict[str, Function] = {
        AUTOGRAD: eager,
        CUSTOM: lambda query, key, value: ByHand.apply(query, key, value, 1 / math.sqrt(query.shape[-1])),
        SDPA: F.scaled_dot_product_attention,
    }
    return methods | ({TWO_PASSES: FlashKernels.apply} if device.type == "cuda" else {})


# ---- Both methods -------------------------------------------------------------------------------------------


def measure(lengths: tuple[int, ...], dims: Mapping[str, int], rounds: int) -> Iterator[Row]:
    """Gives the rows of every length by both methods; first the tutorials', because it wants a machine that has done nothing.

    Args:
        dims: batch, heads, dim.
        rounds: Of the fair method.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for length in lengths:
        yield from by_its_method(length, dims, device)
    earlier: dict[str, Row] = {}
    for length in lengths:
        for row in by_a_fair_one(length, dims, device, rounds, earlier):
            earlier[row.who] = row
            yield row


def tensors(length: int, dims: Mapping[str, int], device: torch.device, count: int) -> list[Tensor]:
    """Random tensors [B, N, S, d], the same at every call."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (dims["batch"], dims["heads"], length, dims["dim"])
    return [torch.randn(shape, generator=generator, device=device) for _ in range(count)]


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def start_peak(device: torch.device) -> int:
    """Bytes in use now, from which on the peak is noted."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device: torch.device) -> int:
    """Bytes at the peak; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def by_its_method(length: int, dims: Mapping[str, int], device: torch.device) -> Iterator[Row]:
    """Each once and unwarmed, autograd first; copies and the forward pass within the time; unscaled against scaled.

    The copies are no leaves, and keep their gradients; nothing of the first candidate is freed before the second runs.
    """
    inputs = tensors(length, dims, device, 3)
    # ANCHOR: careless
    held = []
    functions: dict[str, Function] = {AUTOGRAD: eager, CUSTOM: lambda *t: ByHand.apply(*t, None)}
    for who, function in functions.items():
        start_peak(device)
        try:
            synchronize(device)
            start = time.perf_counter()
            copies = [tensor.requires_grad_().clone() for tensor in inputs]
            for copy in copies:
                copy.retain_grad()
            function(*copies).sum().backward()
            synchronize(device)
            milliseconds = (time.perf_counter() - start) * 1e3
        except torch.cuda.OutOfMemoryError:
            yield Row(length, OWN, who, failed="OOM")
            continue
        held.append(copies)
        yield Row(length, OWN, who, milliseconds, peak(device))
    # ANCHOR_END: careless


def by_a_fair_one(
    length: int, dims: Mapping[str, int], device: torch.device, rounds: int, earlier: Mapping[str, Row]
) -> Iterator[Row]:
    """The same problem for all, checked first; then the peak, what is kept, two runs compared, and turns in random order.

    Who is slow is timed by those two runs alone, and left out where the row of an `earlier` length says that it would take
    more than LONGEST.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    *inputs, grad_output = tensors(length, dims, device, 4)
    leaves = [tensor.requires_grad_() for tensor in inputs]

    def step(function: Function) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*leaves), leaves, grad_output)

    calls, rows = {}, {}
    truth = step(F.scaled_dot_product_attention)
    for who, function in candidates(device).items():
        before = earlier.get(who)
        if before and (before.failed == TOO_LONG or before.ms * (length / before.length) ** 2 > LONGEST):
            rows[who] = Row(length, FAIR, who, failed=TOO_LONG)
            continue
        try:
            rows[who] = one_candidate(length, who, lambda function=function: step(function), truth, device)
        except torch.cuda.OutOfMemoryError:
            rows[who] = Row(length, FAIR, who, failed="OOM")
            continue
        rows[who] = replace(rows[who], kept=count_saved_bytes(function, leaves)[0])
        if rows[who].ms < SLOW:
            calls[who] = lambda function=function: step(function)
    clock = CudaClock() if device.type == "cuda" else WallClock()
    for who, taken in time_interleaved(calls, clock, TimingProtocol(rounds, BURST)).items():
        rows[who] = replace(rows[who], ms=summarize(taken).median / 1e3)
    yield from rows.values()


def one_candidate(
    length: int,
    who: str,
    call: Callable[[], tuple[Tensor, ...]],
    truth: tuple[Tensor, ...],
    device: torch.device,
) -> Row:
    """The row from three runs: the first may compile, the second has its peak noted, and two are compared and timed."""
    call()
    in_use = start_peak(device)
    first, seconds = timed(call, device)
    most = max(0, peak(device) - in_use)
    for got, right in zip(first, truth, strict=True):
        error = float((got - right).abs().max() / right.abs().max())
        assert error <= TOLERANCE, f"{who} at length {length} is wrong by {error:.1e}"
    second, again = timed(call, device)
    same = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    return Row(length, FAIR, who, ms=1e3 * min(seconds, again), peak=most, same_bits="yes" if same else "no")


def timed(call: Callable[[], tuple[Tensor, ...]], device: torch.device) -> tuple[tuple[Tensor, ...], float]:
    """What a call returns, and its seconds."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


if __name__ == "__main__":
    lengths, dims = LARGE if torch.cuda.is_available() else SMALL
    write(asdict(row) | dims for row in measure(lengths, dims, ROUNDS))
