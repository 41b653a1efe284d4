"""Candidates of `p23 --bench`: the workbook's attention, and PyTorch's with FlashAttention and cuDNN."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from harness.bench.benchmark import AutogradCandidate, Benchmark, Candidate, Problem, Unavailable

Tensor = torch.Tensor

QUANTITIES = ("output", "grad_query", "grad_key", "grad_value")
NUM_MATMULS = {"inference": 2, "forward": 2, "backward": 5, "both": 7}
"""Minimum number of matmuls in a pass; the backward pass recomputes the scores."""
MAX_SCORES = 2**28
"""Number of scores above which the reference runs one batch element at a time, with checkpointing."""
SLOW_MULTIPLY_ADDS = 2**34
"""Scores times head dimension above which kernels without tensor cores take a second or more."""


# ---- The problem --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Batch, heads, sequence length and head dimension; `flops_divisor` is 2 with a causal mask, else 1."""

    B: int
    N: int
    S: int
    d: int
    flops_divisor: int = 1

    def __str__(self) -> str:
        suffix = ", causal" if self.causal else ""
        return f"[{self.B}, {self.N}, {self.S:,}, {self.d}]{suffix}"

    @property
    def causal(self) -> bool:
        return self.flops_divisor == 2

    def count_flops(self, direction: str) -> int:
        """Return the floating-point operations of the matmuls, halved if causal."""
        return 2 * NUM_MATMULS[direction] * self.B * self.N * self.S * self.S * self.d // self.flops_divisor


def make_sdpa(causal: bool, backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return function


def make_reference(sizes: Sizes) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return PyTorch's unfused attention; above MAX_SCORES by batch element, with checkpointing."""
    unfused = make_sdpa(sizes.causal, SDPBackend.MATH)

    def checkpoint_by_batch(*leaves: Tensor) -> Tensor:
        elements = zip(*(leaf.split(1) for leaf in leaves), strict=True)
        return torch.cat([checkpoint(unfused, *element, use_reentrant=False) for element in elements])

    return checkpoint_by_batch if sizes.B * sizes.N * sizes.S**2 > MAX_SCORES else unfused


def make_problem(sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Problem:
    """Return random query, key and value [B, N, S, d], and a grad_output that is correlated with the value.

    Keys have mean 0, as after a LayerNorm: otherwise the rounded factors of every tensor-core kernel leave few
    correct digits in the query's gradient.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (sizes.B, sizes.N, sizes.S, sizes.d)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    query, key, value = normal(*shape) + 0.25, normal(*shape), normal(*shape)
    grad_output = normal(*shape) + 0.5 * value
    leaves = tuple(tensor.to(dtype).requires_grad_() for tensor in (query, key, value))
    return Problem(sizes, make_reference(sizes), leaves, grad_output.to(dtype))


# ---- Candidates ---------------------------------------------------------------------------------------------


def build_layer(problem: Problem, portable: bool = False) -> AutogradCandidate:
    from harness.nn import attention, attention_layer

    sizes, query = problem.sizes, problem.leaves[0]
    multiply_adds = sizes.B * sizes.N * sizes.S**2 * sizes.d // sizes.flops_divisor
    if multiply_adds > SLOW_MULTIPLY_ADDS and problem.device.type != "cuda":
        raise Unavailable("on a CPU, a call takes a second or more at this size")
    if portable and not attention_layer.uses_wgmma(query):
        raise Unavailable("this problem already runs the portable kernels")

    def run_default(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, is_causal=sizes.causal)

    def run_portable(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with attention_layer.use_portable_kernels():
            return attention(query, key, value, is_causal=sizes.causal)

    with attention_layer.use_portable_kernels(portable):
        note = attention_layer.explain(query)
    function = run_portable if portable else run_default
    return AutogradCandidate(function, problem.leaves, problem.grad_output, note=note)


def build_sdpa(problem: Problem) -> AutogradCandidate:
    """Build PyTorch's function with its default backend, without the host time of forcing a backend."""
    function = partial(F.scaled_dot_product_attention, is_causal=problem.sizes.causal)
    return AutogradCandidate(function, problem.leaves, problem.grad_output)


def make_sdpa_builder(backend: SDPBackend) -> Callable[[Problem], AutogradCandidate]:
    def build(problem: Problem) -> AutogradCandidate:
        return AutogradCandidate(
            make_sdpa(problem.sizes.causal, backend), problem.leaves, problem.grad_output
        )

    return build


CANDIDATES = (
    Candidate("attention", "ours", build_layer),
    Candidate("portable", "ours", partial(build_layer, portable=True)),
    Candidate("SDPA", "peer", build_sdpa, columns=("loop", "host")),
    Candidate("flash", "peer", make_sdpa_builder(SDPBackend.FLASH_ATTENTION)),
    Candidate("cuDNN", "peer", make_sdpa_builder(SDPBackend.CUDNN_ATTENTION)),
)
LENGTHS = (512, 1024, 2048, 4096, 8192)


def list_sizes(d: int, flops_divisor: int) -> list[Sizes]:
    return [Sizes(8, 12, S, d, flops_divisor) for S in LENGTHS]


BENCHMARK = Benchmark(
    description="Time the workbook's attention and PyTorch's scaled_dot_product_attention.",
    sizes=Sizes,
    named_sizes={
        "puzzle": [Sizes(2, 2, 8, 4)],
        "d64": list_sizes(64, 1),
        "d64-causal": list_sizes(64, 2),
        "d128": list_sizes(128, 1),
        "d128-causal": list_sizes(128, 2),
        "ragged": [Sizes(8, 12, S, 64, part) for S in (1000, 1023, 1024, 2001, 2048) for part in (1, 2)],
    },
    cpu_sizes="1,2,128,32,1",
    gpu_sizes="d64;d64-causal",
    cpu_bound_sizes=Sizes(1, 2, 8, 8),
    quantities=QUANTITIES,
    candidates=CANDIDATES,
    make_problem=make_problem,
)
