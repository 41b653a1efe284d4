"""Candidates of `p23 --bench`: the workbook's attention, and PyTorch's scaled_dot_product_attention by
FlashAttention and cuDNN.

The spec names this module as `bench`; `harness/bench/benchmark.py` defines its names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from harness.bench.benchmark import Benchmark, Candidate, Differentiable, Problem, Unavailable

Tensor = torch.Tensor

QUANTITIES = ("output", "grad_query", "grad_key", "grad_value")
PRODUCTS = {"inference": 2, "forward": 2, "backward": 5, "both": 7}
"""Matrix products that a pass cannot do without; backward they include the scores, computed again."""
AT_ONCE = 2**28
"""Scores that the reference holds at a time; above that it runs batch by batch and recomputes them."""
SLOW = 2**34
"""Scores times head dimension from which on kernels without tensor cores take a second and more."""


# ---- The problem --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Batch, heads, length of queries and of keys, head dimension; a fraction 1 / part of the scores is
    visible.

    `part` is 1 where a query sees every key, and 2 under a causal mask.
    """

    B: int
    N: int
    S: int
    d: int
    part: int = 1

    def __str__(self) -> str:
        suffix = ", causal" if self.causal else ""
        return f"[{self.B}, {self.N}, {self.S:,}, {self.d}]{suffix}"

    @property
    def causal(self) -> bool:
        return self.part == 2

    def operations(self, direction: str) -> int:
        """Return the floating-point operations of the matrix products, two for each multiply-add; half of
        them if causal."""
        return 2 * PRODUCTS[direction] * self.B * self.N * self.S * self.S * self.d // self.part


def sdpa(causal: bool, backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return function


def reference(sizes: Sizes) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return PyTorch's unfused operations, [B, N, S, d] each; for many scores batch by batch, recomputed in
    the backward pass."""
    plain = sdpa(sizes.causal, SDPBackend.MATH)

    def by_batch(*leaves: Tensor) -> Tensor:
        rows = zip(*(leaf.split(1) for leaf in leaves), strict=True)
        return torch.cat([checkpoint(plain, *row, use_reentrant=False) for row in rows])

    return by_batch if sizes.B * sizes.N * sizes.S**2 > AT_ONCE else plain


def make_problem(sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Problem:
    """Return random query, key and value [B, N, S, d]; grad_output follows the value, so that dP differs from
    its mean.

    Keys have mean 0, as after a LayerNorm: with others, rounded factors leave the query's gradient few digits
    in every tensor-core kernel.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (sizes.B, sizes.N, sizes.S, sizes.d)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    query, key, value = normal(*shape) + 0.25, normal(*shape), normal(*shape)
    grad_output = normal(*shape) + 0.5 * value
    leaves = tuple(tensor.to(dtype).requires_grad_() for tensor in (query, key, value))
    return Problem(sizes, reference(sizes), leaves, grad_output.to(dtype))


# ---- Candidates ---------------------------------------------------------------------------------------------


def ours(problem: Problem, portable: bool = False) -> Differentiable:
    """Build the workbook's attention with its own choice of kernels; or with the `portable` ones on a Hopper
    too."""
    from harness.nn import attention, attention_layer

    sizes, query = problem.sizes, problem.leaves[0]
    scores = sizes.B * sizes.N * sizes.S**2 * sizes.d // sizes.part
    if scores > SLOW and problem.device.type != "cuda":
        raise Unavailable("on a CPU a call takes a second and more at this size")
    if portable and not attention_layer.takes_wgmma(query):
        raise Unavailable("there are no others for this problem")

    def fastest(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, is_causal=sizes.causal)

    def for_every_gpu(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with attention_layer.portable_kernels():
            return attention(query, key, value, is_causal=sizes.causal)

    with attention_layer.portable_kernels(portable):
        note = attention_layer.explain(query)
    function = for_every_gpu if portable else fastest
    return Differentiable(function, problem.leaves, problem.grad_output, note=note)


def sdpa_default(problem: Problem) -> Differentiable:
    """Build PyTorch's function with its own choice of backend, as a model calls it: forcing one costs host
    time too."""
    function = partial(F.scaled_dot_product_attention, is_causal=problem.sizes.causal)
    return Differentiable(function, problem.leaves, problem.grad_output)


def backend(backend: SDPBackend) -> Callable[[Problem], Differentiable]:
    def build(problem: Problem) -> Differentiable:
        return Differentiable(sdpa(problem.sizes.causal, backend), problem.leaves, problem.grad_output)

    return build


CANDIDATES = (
    Candidate("attention", "ours", ours),
    Candidate("portable", "ours", partial(ours, portable=True)),
    Candidate("SDPA", "peer", sdpa_default, columns=("loop", "host")),
    Candidate("flash", "peer", backend(SDPBackend.FLASH_ATTENTION)),
    Candidate("cuDNN", "peer", backend(SDPBackend.CUDNN_ATTENTION)),
)
LENGTHS = (512, 1024, 2048, 4096, 8192)


def ladder(d: int, part: int) -> list[Sizes]:
    """Return GPT-2's batch and heads at every length."""
    return [Sizes(8, 12, S, d, part) for S in LENGTHS]


BENCHMARK = Benchmark(
    about="Attention of the workbook timed beside PyTorch's scaled_dot_product_attention.",
    sizes=Sizes,
    named={
        "puzzle": [Sizes(2, 2, 8, 4)],
        "d64": ladder(64, 1),
        "d64-causal": ladder(64, 2),
        "d128": ladder(128, 1),
        "d128-causal": ladder(128, 2),
        "ragged": [Sizes(8, 12, S, 64, part) for S in (1000, 1023, 1024, 2001, 2048) for part in (1, 2)],
    },
    cpu_sizes="1,2,128,32,1",
    gpu_sizes="d64;d64-causal",
    host_sizes=Sizes(1, 2, 8, 8),
    quantities=QUANTITIES,
    candidates=CANDIDATES,
    make_problem=make_problem,
)
