"""Who is timed: the workbook's variants, what a user would take in their place, and three bare matrix products.

A candidate is built for one problem and then gives calls: a forward pass without gradients, a forward pass of
training, a backward pass, or both together. Every candidate sees the same numbers and returns the same quantities.
"""

import importlib.metadata
import math
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Tensor = torch.Tensor
Forward = Callable[[], Tensor]

QUANTITIES = ("output", "grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")
PASSES = ("inference", "forward", "backward", "both")
GEMMS = {"inference": 1, "forward": 1, "backward": 2, "both": 3}
EPS = 1e-5
LIMITS = {("cuda", "fused"): 2**35, ("cpu", "fused"): 2**30, ("cpu", "unfused"): 2**30}
"""Multiply-adds of one matrix product from which on a call of a variant takes seconds and more, by device."""


class Unavailable(Exception):
    """A candidate that this machine or this size does not have; the message says why."""


# ---- The problem --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Rows, input features and output features of one problem."""

    M: int
    H: int
    O: int

    def __str__(self) -> str:
        return f"{self.M:,} rows, {self.H:,} -> {self.O:,}"

    def operations(self, direction: str) -> int:
        """Floating-point operations of the matrix products of a pass, two for each multiply-add.

        What LayerNorm adds, some ten for each element of x, is left out: it is below 1 % from O = 768 on.
        """
        return 2 * self.M * self.H * self.O * GEMMS[direction]

    def bytes(self, direction: str, width: int) -> int:
        """Bytes that a pass moves if it touches every argument and every result once, at `width` bytes an element.

        Forward reads x, W, gamma, beta and b, and writes the output and two float32 numbers for each row; backward
        reads grad_output, x, W, gamma, beta and those numbers, and writes the five gradients.
        """
        M, H, O = self.M, self.H, self.O
        forward = width * (M * H + O * H + 2 * H + O + M * O)
        backward = width * ((M * O + M * H + O * H + 2 * H) + (M * H + 2 * H + O * H + O))
        statistics = 8 * M
        return {
            "inference": forward,
            "forward": forward + statistics,
            "backward": backward + statistics,
            "both": forward + backward + 2 * statistics,
        }[direction]


@dataclass(frozen=True)
class Problem:
    """The tensors of one size: x [M, H], gamma [H], beta [H], W [O, H], b [O] as leaves, and grad_output [M, O]."""

    sizes: Sizes
    leaves: tuple[Tensor, ...]
    grad_output: Tensor

    @property
    def x(self) -> Tensor:
        """The input."""
        return self.leaves[0]

    def truth(self) -> dict[str, Tensor]:
        """Every quantity by autograd in float64."""
        leaves = tuple(leaf.detach().double().requires_grad_() for leaf in self.leaves)
        return dict(
            zip(QUANTITIES, forward_and_backward(eager, leaves, self.grad_output.double()), strict=True)
        )


def make_problem(sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Problem:
    """Random numbers that let no gradient term vanish: rows off zero, gamma off one, grad_output like x_hat in part."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    M, H, O = sizes.M, sizes.H, sizes.O
    x = 1.5 * normal(M, H) + 0.5 * normal(M, 1)
    gamma, beta = 1 + 0.3 * normal(H), 0.3 * normal(H)
    W, b = normal(O, H) / math.sqrt(H), normal(O)
    grad_output = normal(M, O) + 0.5 * F.layer_norm(x, (H,)) @ W.T
    leaves = tuple(tensor.to(dtype).requires_grad_() for tensor in (x, gamma, beta, W, b))
    return Problem(sizes, leaves, grad_output.to(dtype))


# ---- Calls --------------------------------------------------------------------------------------------------


def eager(x: Tensor, gamma: Tensor, beta: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """The two operations as PyTorch has them."""
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), W, b)


def forward_and_backward(
    function: Callable[..., Tensor], leaves: tuple[Tensor, ...], grad_output: Tensor
) -> tuple[Tensor, ...]:
    """The output and the gradient of every leaf."""
    output = function(*leaves)
    return output.detach(), *torch.autograd.grad(output, leaves, grad_output)


class Differentiable:
    """Calls of a function that autograd can differentiate.

    Args:
        function: Takes the leaves.
        leaves: x, gamma, beta, W and b, as the function wants them.
        grad_output: What the backward pass starts from.
        again: The same function for a backward pass that is run many times after one forward pass.
        note: What a reader of the times must know.
    """

    def __init__(self, function, leaves, grad_output, again=None, note=""):
        self.function, self.leaves, self.grad_output = function, leaves, grad_output
        self.again, self.note = again or function, note

    def prepare(self, direction: str) -> Callable[[], tuple[Tensor, ...]]:
        """A call that does one pass and returns its quantities, in the order of `quantities(direction)`.

        "inference" is meant to be called without gradients; who calls sees to it, for the switch itself takes time.
        """
        if direction in ("inference", "forward"):
            return lambda: (self.function(*self.leaves),)
        if direction == "both":
            return lambda: forward_and_backward(self.function, self.leaves, self.grad_output)
        output = self.again(*self.leaves)
        return lambda: torch.autograd.grad(output, self.leaves, self.grad_output, retain_graph=True)


class Products:
    """The bare matrix products of a pass on the numbers of the problem: no candidate can do without them."""

    note = ""

    def __init__(self, problem: Problem):
        self.x, _, _, self.W, _ = (leaf.detach() for leaf in problem.leaves)
        self.dy = problem.grad_output

    def prepare(self, direction: str) -> Callable[[], tuple[Tensor, ...]]:
        """A call that does the products of one pass."""
        x, W, dy = self.x, self.W, self.dy

        def forward() -> tuple[Tensor, ...]:
            return (torch.mm(x, W.T),)

        def backward() -> tuple[Tensor, ...]:
            return torch.mm(dy, W), torch.mm(dy.T, x)

        def both() -> tuple[Tensor, ...]:
            return *forward(), *backward()

        return {"backward": backward, "both": both}.get(direction, forward)


def quantities(direction: str) -> tuple[str, ...]:
    """What a call of a pass returns."""
    return {"backward": QUANTITIES[1:], "both": QUANTITIES}.get(direction, QUANTITIES[:1])


# ---- Candidates ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """Somebody to time.

    Attributes:
        name: In the table, in the CSV and on the command line.
        role: "ours", "peer" or "floor".
        build: Takes a problem and returns an object with `prepare`. Raises Unavailable.
        seconds: What building and compiling it may take on a GPU; a run with a time limit asks.
        distribution: The package it comes from, for its version.
    """

    name: str
    role: str
    build: Callable[[Problem], Differentiable | Products]
    seconds: float = 5.0
    distribution: str = ""

    def version(self) -> str:
        """ "liger_kernel 0.6.4", or nothing where there is nothing to say."""
        try:
            return f"{self.distribution} {importlib.metadata.version(self.distribution)}"
        except (importlib.metadata.PackageNotFoundError, ValueError):
            return ""


def plain(problem: Problem) -> Differentiable:
    """PyTorch's two operations, one after the other."""
    return Differentiable(eager, problem.leaves, problem.grad_output)


def ours(algorithm: str) -> Callable[[Problem], Differentiable]:
    """The workbook's layer with one algorithm."""

    def build(problem: Problem) -> Differentiable:
        sizes, where = problem.sizes, problem.x.device.type
        if LIMITS.get((where, algorithm), math.inf) <= sizes.M * sizes.H * sizes.O:
            raise Unavailable("made for reading; a call takes seconds and more at this size")
        try:
            from harness.nn import direct, layers
        except ImportError as error:
            raise Unavailable(f"{error}; the workbook's kernels need MAX") from error
        detour = algorithm == "fast" and where == "cuda" and direct.kernels(problem.x.device) is None

        def function(*leaves: Tensor) -> Tensor:
            return layers.fused_layernorm_linear(*leaves, EPS, algorithm=algorithm)

        note = "no extension module: a MAX graph" if detour else ""
        return Differentiable(function, problem.leaves, problem.grad_output, note=note)

    return build


def compiled(mode: str) -> Callable[[Problem], Differentiable]:
    """torch.compile of the two operations, for this size alone.

    By default a compiled backward pass writes over what the forward pass kept. That pays in a real step, so "both" has
    it; a backward pass that is run again and again must not, and is compiled once more without.
    """

    def build(problem: Problem) -> Differentiable:
        if mode != "default" and problem.x.device.type == "cpu":
            raise Unavailable("chooses among GPU kernels")
        from torch._functorch import config as autograd_config
        from torch._inductor import config as inductor_config
        from torch._inductor import select_algorithm

        select_algorithm.PRINT_AUTOTUNE = False  # a table of every kernel that was tried, into the report

        def make() -> Callable[..., Tensor]:
            # torch.compile remembers by code object; a copy of its own keeps the two compilations apart.
            copy = types.FunctionType(eager.__code__.replace(), eager.__globals__, eager.__name__)
            return torch.compile(copy, mode=mode, dynamic=False, fullgraph=True)

        repeatable = make()

        def again(*leaves: Tensor) -> Tensor:
            # The cache of compiled graphs does not tell a backward pass that may write there from one that may not.
            with autograd_config.patch(donated_buffer=False), inductor_config.patch(fx_graph_cache=False):
                output = repeatable(*leaves)
                torch.autograd.grad(output, leaves, problem.grad_output, retain_graph=True)  # compiles it
            return output

        return Differentiable(make(), problem.leaves, problem.grad_output, again)

    return build


def liger(problem: Problem) -> Differentiable:
    """Liger's Triton LayerNorm, then F.linear."""
    if problem.x.device.type == "cpu":
        raise Unavailable("its Triton kernels need a GPU")
    try:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    except ImportError as error:
        raise Unavailable(f"not installed ({error})") from error

    def function(x, gamma, beta, W, b):
        return F.linear(LigerLayerNormFunction.apply(x, gamma, beta, EPS), W, b)

    return Differentiable(function, problem.leaves, problem.grad_output)


def transformer_engine(problem: Problem) -> Differentiable:
    """NVIDIA's LayerNormLinear module, with the parameters of the problem."""
    if problem.x.device.type == "cpu":
        raise Unavailable("needs a GPU")
    try:
        from transformer_engine.pytorch import LayerNormLinear
    except (ImportError, OSError, RuntimeError) as error:
        raise Unavailable(f"not installed ({error})") from error
    x, *parameters = problem.leaves
    module = LayerNormLinear(problem.sizes.H, problem.sizes.O, eps=EPS, params_dtype=x.dtype, device=x.device)
    own = (module.layer_norm_weight, module.layer_norm_bias, module.weight, module.bias)
    with torch.no_grad():
        for parameter, value in zip(own, parameters, strict=True):
            parameter.copy_(value)
    return Differentiable(lambda x, *_: module(x), (x, *own), problem.grad_output)


CANDIDATES = (
    Candidate("bare GEMMs", "floor", Products),
    Candidate("fast", "ours", ours("fast")),
    Candidate("unfused", "ours", ours("unfused")),
    Candidate("fused", "ours", ours("fused")),
    Candidate("eager", "peer", plain),
    Candidate("compile", "peer", compiled("default"), 30),
    Candidate("max-autotune", "peer", compiled("max-autotune-no-cudagraphs"), 90),
    Candidate("liger", "peer", liger, 10, "liger_kernel"),
    Candidate("transformer-engine", "peer", transformer_engine, 10, "transformer_engine"),
)
VARIANTS = tuple(candidate.name for candidate in CANDIDATES if candidate.role == "ours")
PEERS = tuple(candidate.name for candidate in CANDIDATES if candidate.role == "peer")


# ---- Right or wrong -----------------------------------------------------------------------------------------


def errors(results: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Of each quantity the relative Frobenius error, and the largest error over the largest value."""
    found = {}
    for name, result in results.items():
        difference = result.double() - truth[name]
        norms = ((difference.norm(), truth[name].norm()), (difference.abs().max(), truth[name].abs().max()))
        found[name] = tuple((top / bottom if bottom else top).item() for top, bottom in norms)
    return found


def wrong(found: dict[str, tuple[float, float]], baseline: dict, dtype: torch.dtype) -> list[str]:
    """What is wrong with a candidate, one sentence for each quantity whose error is too large.

    Either error may be twice PyTorch's own in the same dtype, plus the floor that every verdict of the workbook has.
    """
    floor = torch.finfo(dtype).eps * {torch.float32: 4, torch.float64: 64}.get(dtype, 0.5)
    return [
        f"{name} is off by {error:.1e} of its {kind}, PyTorch by {own:.1e}"
        for name, pair in found.items()
        for kind, error, own in zip(("norm", "largest value"), pair, baseline[name], strict=True)
        if not error <= 2 * own + floor
    ]


# ---- Memory -------------------------------------------------------------------------------------------------


def saved_bytes(forward: Callable[[], tuple[Tensor, ...]], parameters: tuple[Tensor, ...]) -> int:
    """Bytes that autograd keeps between forward and backward, each storage once, without parameters and output."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, *_ = forward()
    for tensor in (*parameters, output):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def grown_bytes(forward: Callable[[], tuple[Tensor, ...]]) -> int:
    """By how much the memory in use has grown behind a forward pass, its output left out. CUDA only."""
    before = torch.cuda.memory_allocated()
    output, *_ = forward()
    return torch.cuda.memory_allocated() - before - output.untyped_storage().nbytes()


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory in use during a call, above what was in use before. CUDA only."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
