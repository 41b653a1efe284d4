"""Errors and times of float32 attention by pairs of float16: `python -m book.measure attention_pairs`.

A row for each kind of input and result: the largest error against float64 over the largest value, beside those of PyTorch's
two kernels for float32. A row for each place of an infinity or a NaN, and for the bits of repeated runs. Then a row for each size
and way with the time of both passes as one CUDA graph, the median of shuffled turns after a pause, and with their memory.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from book.measure.shared import peak, write
from harness.bench.timing import CudaClock, Graph, Protocol, take_turns
from harness.nn import attention, attention_direct

Tensor = torch.Tensor
RESULTS = ("output", "grad_query", "grad_key", "grad_value")
PROTOCOL = Protocol(rounds=7, burst=15_000, idle=(0.03, 0.03))
BATCH, HEADS, DIM = 8, 12, 64


def by(backend: SDPBackend, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    """PyTorch's function by one of its backends."""
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


class Way(NamedTuple):
    """A function, and what holds during both of its passes."""

    function: Callable[..., Tensor]
    meanwhile: Callable[[], AbstractContextManager] = nullcontext


EFFICIENT = Way(functools.partial(by, SDPBackend.EFFICIENT_ATTENTION))
MATH = Way(functools.partial(by, SDPBackend.MATH))
FLASH = Way(attention, attention_direct.flash_kernels)
OURS = {"pairs": Way(attention), "pairs, portable": Way(attention, attention_direct.portable_kernels)}


def answer(way: Way, tensors: list[Tensor], is_causal: bool = False) -> tuple[Tensor, ...]:
    """Output and gradients, of query, key, value and grad_output."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    with way.meanwhile():
        output = way.function(*leaves, is_causal=is_causal)
        return output.detach(), *torch.autograd.grad(output, leaves, tensors[3])


def truth(tensors: list[Tensor], is_causal: bool) -> list[Tensor]:
    """The same in float64, head by head."""
    heads = zip(*(tensor.double().split(1, 1) for tensor in tensors), strict=True)
    parts = [answer(MATH, list(head), is_causal) for head in heads]
    return [torch.cat(each, 1) for each in zip(*parts, strict=True)]


def make(S: int, heads: int = 4, d: int = DIM, seed: int = 1) -> list[Tensor]:
    """Query, key, value and a gradient that follows the value, as `p23 --bench` draws them."""
    generator = torch.Generator("cuda").manual_seed(seed)
    query, key, value, noise = (
        torch.randn(1, heads, S, d, generator=generator, device="cuda") for _ in range(4)
    )
    return [query + 0.25, key, value, noise + 0.5 * value]


def scaled(*factors: float) -> Callable[[list[Tensor]], None]:
    """Multiplies the four tensors."""

    def change(tensors: list[Tensor]) -> None:
        for tensor, factor in zip(tensors, factors, strict=True):
            tensor *= factor

    return change


def outlier(which: int, factor: float, rows: int = 1) -> Callable[[list[Tensor]], None]:
    """Makes an element of some rows of each head so many times as large."""

    def change(tensors: list[Tensor]) -> None:
        tensors[which][:, :, 77 : 77 + rows, 5] *= factor

    return change


KINDS: dict[str, tuple[int, bool, Callable[[list[Tensor]], None]]] = {
    "ordinary, 128": (128, False, scaled(1, 1, 1, 1)),
    "ordinary, 512": (512, False, scaled(1, 1, 1, 1)),
    "ordinary, 2,048": (2048, False, scaled(1, 1, 1, 1)),
    "ordinary, 8,192": (8192, False, scaled(1, 1, 1, 1)),
    "causal, 1,000": (1000, True, scaled(1, 1, 1, 1)),
    "query × 8": (2048, False, scaled(8, 1, 1, 1)),
    "query × 32": (2048, False, scaled(32, 1, 1, 1)),
    "query × 256": (2048, False, scaled(256, 1, 1, 1)),
    "query × 1,000": (2048, False, scaled(1000, 1, 1, 1)),
    "key × 1e-6, value × 1e5, grad_output × 1e-4": (2048, False, scaled(1, 1e-6, 1e5, 1e-4)),
    "all × 1e-6": (2048, False, scaled(1e-6, 1e-6, 1e-6, 1e-6)),
    "value × 1e20": (512, False, scaled(1, 1, 1e20, 1)),
    "an outlier in query, × 100": (2048, False, outlier(0, 100)),
    "an outlier in key, × 100": (2048, False, outlier(1, 100)),
    "an outlier in key, × 1,000": (2048, False, outlier(1, 1000)),
    "an outlier in value, × 1,000": (2048, False, outlier(2, 1000)),
    "200 outliers in value, × 1,000": (2048, False, outlier(2, 1000, 200)),
    "an outlier in grad_output, × 1e6": (2048, False, outlier(3, 1e6)),
}
"""Length, whether causal, and what is done to the four tensors."""


def error(got: Tensor, right: Tensor) -> float:
    """The largest difference over the largest value."""
    return float((got.double() - right).abs().max() / right.abs().max())


def error_rows(kind: str) -> list[dict]:
    """A row for each way and result."""
    S, causal, change = KINDS[kind]
    tensors = make(S, 1 if S > 4096 else 4)
    change(tensors)
    right = truth(tensors, causal)
    theirs = {
        name: [error(*pair) for pair in zip(answer(function, tensors, is_causal=causal), right, strict=True)]
        for name, function in (("efficient", EFFICIENT), ("math", MATH))
    }
    plain, rows = answer(FLASH, tensors, is_causal=causal), []
    for way, function in OURS.items():
        got = answer(function, tensors, is_causal=causal)
        path = "the plain path" if all(map(torch.equal, got, plain)) else ""
        for i, result in enumerate(RESULTS):
            rows.append(
                {"S": S, "causal": int(causal), "inputs": kind, "way": way, "result": result, "note": path}
                | {"error": f"{error(got[i], right[i]):.3e}"}
                | {f"of_{name}": f"{errors[i]:.3e}" for name, errors in theirs.items()}
            )
    return rows


def strange_rows() -> list[dict]:
    """Whether infinities and NaN stand where PyTorch's formula has them, by what is strange."""
    rows = []
    for which, name in enumerate(("query", "key", "value", "grad_output")):
        for value in (math.nan, math.inf, -math.inf):
            tensors = make(200, 2, seed=2)
            tensors[which][0, 1, 30, 7] = value
            theirs = answer(MATH, tensors)
            for way, function in OURS.items():
                pairs = zip(answer(function, tensors), theirs, strict=True)
                same = all(
                    torch.equal(kind(one), kind(other))
                    for one, other in pairs
                    for kind in (torch.isnan, torch.isposinf, torch.isneginf)
                )
                note = "as PyTorch" if same else "elsewhere than PyTorch"
                rows.append({"S": 200, "inputs": f"{value} in {name}", "way": way, "note": note})
    return rows


def repeat_rows() -> list[dict]:
    """How many of 20 further runs have the same bits."""
    tensors, rows = make(1000, 12), []
    for way, function in OURS.items():
        first = answer(function, tensors, is_causal=True)
        same = sum(all(map(torch.equal, first, answer(function, tensors, is_causal=True))) for _ in range(20))
        rows.append({"S": 1000, "causal": 1, "way": way, "note": f"the same bits in {same} of 20 runs"})
    return rows


def time_rows(S: int, causal: bool) -> list[dict]:
    """A row for each way."""
    tensors = [torch.randn(BATCH, HEADS, S, DIM, device="cuda") for _ in range(4)]
    ways = OURS | {"efficient": EFFICIENT} | ({"flash kernels": FLASH} if S == 512 else {})
    work = {
        way: functools.partial(answer, function, tensors, is_causal=causal) for way, function in ways.items()
    }
    for both in work.values():
        both()  # kernels are loaded before anything is captured
    graphs = {way: Graph(lambda both=both: both) for way, both in work.items()}
    taken = take_turns(graphs, CudaClock(), PROTOCOL)
    return [
        {"S": S, "causal": int(causal), "inputs": "ordinary", "way": way}
        | {"graph_us": f"{statistics.median(times):.1f}", "peak_bytes": peak(work[way])}
        for way, times in taken.items()
    ]


def rows() -> Iterator[dict]:
    """The times first, then errors, strange places and repeated runs."""
    for S, causal in ((2048, False), (512, False), (1024, False), (4096, False), (2048, True)):
        yield from time_rows(S, causal)
    for kind in KINDS:
        yield from error_rows(kind)
    yield from (*strange_rows(), *repeat_rows())


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    columns = ("S", "causal", "inputs", "way", "result", "error", "of_efficient", "of_math", "graph_us")
    write(rows(), (*columns, "peak_bytes", "note"))
