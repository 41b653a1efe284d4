"""Candidates of `p22 --bench`: the workbook's variants, PyTorch's alternatives, and the bare GEMMs."""

import functools
import math
import random
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from harness.bench.benchmark import (
    AutogradCandidate,
    Benchmark,
    BuiltCandidate,
    Call,
    Candidate,
    Problem,
    Unavailable,
    make_eager,
)
from harness.puzzles.p22.ops import EPS

Tensor = torch.Tensor

QUANTITIES = ("output", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")
ARGUMENT_NAMES = ("input", "ln_weight", "ln_bias", "linear_weight", "linear_bias")
NUM_GEMMS = {"inference": 1, "forward": 1, "backward": 2, "both": 3}
MULTIPLY_ADD_LIMITS = {("cuda", "fused"): 2**35, ("cpu", "fused"): 2**30, ("cpu", "unfused"): 2**30}
"""(device, variant) -> number of multiply-adds in a GEMM from which a call takes seconds or more."""
MAX_VARIANTS = ("fused", "unfused")
"""Variants that are also timed as MAX graphs, without a layer."""


# ---- The problem --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Rows, input features and output features of one problem."""

    M: int
    H: int
    O: int

    def __str__(self) -> str:
        return f"{self.M:,} rows, {self.H:,} -> {self.O:,}"

    def count_flops(self, direction: str) -> int:
        """Return the floating-point operations of a pass's GEMMs, two per multiply-add.

        LayerNorm's operations, about ten per element of x, are not counted: less than 1 % for O >= 768.
        """
        return 2 * self.M * self.H * self.O * NUM_GEMMS[direction]


def eager(x: Tensor, gamma: Tensor, beta: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), W, b)


def make_problem(sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Problem:
    """Return random x [M, H], gamma [H], beta [H], W [O, H], b [O] and grad_output [M, O].

    No gradient term vanishes: row means differ from 0 and gamma from 1, and grad_output is correlated with
    x_hat.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    M, H, O = sizes.M, sizes.H, sizes.O
    x = 1.5 * normal(M, H) + 0.5 * normal(M, 1)
    gamma, beta = 1 + 0.3 * normal(H), 0.3 * normal(H)
    W, b = normal(O, H) / math.sqrt(H), normal(O)
    grad_output = normal(M, O) + 0.5 * F.layer_norm(x, (H,)) @ W.T
    leaves = tuple(tensor.to(dtype).requires_grad_() for tensor in (x, gamma, beta, W, b))
    return Problem(sizes, eager, leaves, grad_output.to(dtype))


# ---- Candidates ---------------------------------------------------------------------------------------------


class BareGemms(BuiltCandidate):
    """The bare GEMMs of a pass, a lower bound on every candidate's time."""

    def __init__(self, problem: Problem):
        self.x, _, _, self.W, _ = (leaf.detach() for leaf in problem.leaves)
        self.dy = problem.grad_output

    def prepare(self, direction: str) -> Call:
        x, W, dy = self.x, self.W, self.dy

        def forward() -> tuple[Tensor, ...]:
            return (torch.mm(x, W.T),)

        def backward() -> tuple[Tensor, ...]:
            return torch.mm(dy, W), torch.mm(dy.T, x)

        def forward_backward() -> tuple[Tensor, ...]:
            return *forward(), *backward()

        return {"backward": backward, "both": forward_backward}.get(direction, forward)


def make_layer_builder(memory: str) -> Callable[[Problem], AutogradCandidate]:
    def build(problem: Problem) -> AutogradCandidate:
        from harness.nn import host, layers

        has_kernels = host.load(layers.LAYER, problem.device.type)
        if memory != layers.AUTO and not has_kernels:
            raise Unavailable("only the kernels choose between time and memory")

        def function(*leaves: Tensor) -> Tensor:
            return layers.fused_layernorm_linear(*leaves, eps=EPS, memory=memory)

        uses_pytorch = problem.device.type == "cuda" and not has_kernels
        note = "no kernels: PyTorch's own operations" if uses_pytorch else ""
        return AutogradCandidate(function, problem.leaves, problem.grad_output, note=note)

    return build


def build_max_graphs(algorithm: str) -> Callable[[Problem], BuiltCandidate]:
    """Return a function that builds one algorithm's MAX graphs."""

    def build(problem: Problem) -> BuiltCandidate:
        sizes, device = problem.sizes, problem.device.type
        if MULTIPLY_ADD_LIMITS.get((device, algorithm), math.inf) <= sizes.M * sizes.H * sizes.O:
            raise Unavailable("written to be read, not to be fast: a call takes seconds at this size")
        from harness.bench.max_graph import MaxCandidate
        from harness.puzzles.p22.spec import PUZZLE

        leaves = dict(zip(ARGUMENT_NAMES, problem.leaves, strict=True))
        inputs = {
            **leaves,
            "input": leaves["input"].view(1, sizes.M, sizes.H),
            "grad_output": problem.grad_output.view(1, sizes.M, sizes.O),
        }
        results = (problem.grad_output, *problem.leaves)
        shapes = {name: tuple(tensor.shape) for name, tensor in zip(QUANTITIES, results, strict=True)}
        return MaxCandidate(PUZZLE, MAX_VARIANTS, algorithm, inputs, shapes)

    return build


def build_compiled(problem: Problem) -> AutogradCandidate:
    """Compile the two operations with torch.compile, for this size only.

    By default, a compiled backward pass overwrites the saved tensors ("donated buffers"). That is faster in a
    real step, so "both" uses it; a backward pass that is timed repeatedly cannot, and is compiled without it.
    """

    def compile_copy() -> Callable[..., Tensor]:
        # torch.compile caches by code object; a copy keeps the compilations separate.
        copy = types.FunctionType(eager.__code__.replace(), eager.__globals__, eager.__name__)
        return torch.compile(copy, dynamic=False, fullgraph=True)

    @functools.cache
    def compile_repeatable() -> Callable[..., Tensor]:
        from torch._functorch import config
        from torch._inductor import config as inductor_config

        function = compile_copy()
        # retain_graph needs donated buffers off, and the FX graph cache does not key on that setting.
        with inductor_config.patch(fx_graph_cache=False), config.patch(donated_buffer=False):
            output = function(*problem.leaves)
            torch.autograd.grad(output, problem.leaves, problem.grad_output, retain_graph=True)
        return function

    return AutogradCandidate(
        compile_copy(), problem.leaves, problem.grad_output, lambda *leaves: compile_repeatable()(*leaves)
    )


def build_liger(problem: Problem) -> AutogradCandidate:
    if problem.device.type == "cpu":
        raise Unavailable("its Triton kernels need a GPU")
    from liger_kernel.ops.layer_norm import (  # pyright: ignore[reportMissingImports] (on GPU machines)
        LigerLayerNormFunction,
    )

    def function(x, gamma, beta, W, b):
        return F.linear(LigerLayerNormFunction.apply(x, gamma, beta, EPS), W, b)

    return AutogradCandidate(function, problem.leaves, problem.grad_output)


CANDIDATES = (
    Candidate("bare GEMMs", "floor", BareGemms),
    Candidate("fast", "ours", make_layer_builder("auto")),
    Candidate("least memory", "ours", make_layer_builder("least")),
    *(Candidate(f"{n} through MAX", "ours", build_max_graphs(n), columns=("waited",)) for n in MAX_VARIANTS),
    Candidate("eager", "peer", make_eager),
    Candidate("compile", "peer", build_compiled),
    Candidate("liger", "peer", build_liger, "liger_kernel"),
)


def draw_sizes(seed: int, num_sizes: int = 20) -> list[Sizes]:
    """Return random sizes, log-uniform between bounds; in half of them, H and O are multiples of 64."""
    generator = random.Random(seed)

    def draw(low: int, high: int, step: int) -> int:
        size = round(math.exp(generator.uniform(math.log(low), math.log(high))))
        return max(step, round(size / step) * step)

    steps = (generator.choice((1, 64)) for _ in range(num_sizes))
    return [Sizes(draw(16, 32_768, 1), draw(64, 16_384, step), draw(64, 16_384, step)) for step in steps]


BENCHMARK = Benchmark(
    description="Time the workbook's LayerNorm + Linear and its alternatives.",
    sizes=Sizes,
    named_sizes={
        "puzzle": [Sizes(16, 8, 16)],
        "gpt2": [Sizes(8192, 768, 3072)],
        "S0": [Sizes(4096, 768, 3072)],
        "S1": [Sizes(8192, 1024, 4096)],
        "S2": [Sizes(8192, 4096, 4096)],
        "S3": [Sizes(16384, 4096, 12288)],
        "climb": [
            *(Sizes(16, 8, 16), Sizes(256, 64, 64), Sizes(1024, 256, 256)),
            *(Sizes(4096, 768, 768), Sizes(8192, 768, 3072)),
        ],
        "drawn": draw_sizes(12),
    },
    cpu_sizes="256,128,256",
    gpu_sizes="S0;S1;S2;S3",
    cpu_bound_sizes=Sizes(16, 8, 16),
    quantities=QUANTITIES,
    candidates=CANDIDATES,
    make_problem=make_problem,
)
