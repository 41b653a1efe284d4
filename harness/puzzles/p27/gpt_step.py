"""One training step of GPT-2 by hand, from the workbook's layers: without autograd, and with little memory.

The LayerNorm before a product is one layer with it, attention saves its output and lse, GELU is recomputed,
and the head with its loss computes its gradients in the forward pass, chunk by chunk. The stream between the
blocks, [rows, C] with rows = batch * T, is in the working dtype; parameters are float32, AdamW updates them,
and the products read a copy in the working dtype, written by the update. The largest temporaries use the
gradients' memory before those are written.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.nn import host
from harness.puzzles.p27 import step_parts as parts
from harness.puzzles.p27.autograd import Tensors
from harness.puzzles.p27.derivation import IGNORED
from harness.puzzles.p27.gpt import RUN, Pieces, Sizes, State, working_dtype
from harness.puzzles.p27.step_kernels import on_kernels

BETAS, ADAM_EPS, DECAY, LIMIT = (0.9, 0.95), 1e-8, 0.1, 1.0
"""Of AdamW, and the norm that gradients are clipped to; as in the tape's file."""
MEAN, INPUT, WEIGHT, STAYS_WIDE = 1, 1, 2, 8
"""Numeric arguments of the loss's operator: the reduction, and the requested gradients, that of weight in float32."""


def head(
    x: Tensor, weight: Tensor, targets: Tensor, matrix: Callable[[int, int], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss of the logits x weight^T, [rows, V], and the gradients of x and weight.

    On a GPU the logits are computed chunk by chunk by the operator of `harness.nn.linear_cross_entropy`;
    elsewhere in the workspace `matrix`.
    """
    if host.load("cross_entropy", x.device.type):
        integers, numbers, gradients = [IGNORED, MEAN, 0], [0.0, 0.0, 0.0], INPUT | WEIGHT | STAYS_WIDE
        return torch.ops.mojo_workbook.linear_cross_entropy_forward(
            x, weight, None, targets, integers, numbers, gradients
        )[:3]
    scores = torch.mm(x, weight.T, out=matrix(len(x), len(weight))).float()
    counted = (targets != IGNORED)[:, None]
    place = targets[:, None].where(counted, 0)
    count = counted.sum()
    scores -= scores.amax(1, keepdim=True)
    own = scores.gather(1, place)
    total = scores.exp_().sum(1, keepdim=True)
    loss = (total.log() - own).where(counted, 0).sum() / count
    scores /= total
    scores.scatter_add_(1, place, torch.full_like(own, -1)).mul_(counted / count)
    gradient = scores.to(x.dtype)
    return loss, gradient @ weight, gradient.T @ x


def ignore(name: str, value: Tensor) -> None: ...


class Idle:
    """The unused part of the gradients' buffer: all of it at first, then what precedes the block in the
    backward pass, as blocks are in forward order.

    Args:
        pieces: The layout of the gradients.
        piece: [count].
    """

    def __init__(self, pieces: Pieces, piece: Tensor):
        self.pieces, self.piece = pieces, piece
        self.places = pieces.views(piece)
        self.free = piece

    def before(self, name: str) -> None:
        """Reclaim the workspace; from now on only what precedes a gradient is available."""
        self.free = self.piece[: self.pieces.places[name][0]]

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised matrix, newly allocated if there is no room."""
        count = rows * columns
        if count > len(self.free):
            return self.piece.new_empty(rows, columns)
        lent, self.free = self.free[:count], self.free[-(-count // RUN) * RUN :]
        return lent.view(rows, columns)


@dataclass
class Pass:
    """The forward and the backward pass of one model.

    Args:
        sizes: Of the model.
        p: Its parameters in the working dtype, by the tape's names.
        note: A callback for every activation, "block0.qkv, its output", and every gradient of an input, by name.
        idle: The buffer of the parameters' gradients, and until then workspace; None: allocate both.

    Attributes:
        grads: The gradients of the parameters, after `backward`.
        kept: Name of a part -> the tensors that its backward pass takes.
    """

    sizes: Sizes
    p: Tensors
    note: Callable[[str, Tensor], None] = ignore
    idle: Idle | None = None
    grads: Tensors = field(default_factory=dict)
    kept: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def shown(self, part: str, output: Tensor) -> Tensor:
        self.note(f"{part}, its output", output)
        return output

    def back(self, part: str, gradient: Tensor) -> Tensor:
        self.note(f"the gradient of what {part} is given", gradient)
        return gradient

    def place(self, name: str) -> Tensor | None:
        return self.idle.places[name] if self.idle else None

    def matrix(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised temporary in the working dtype."""
        return (self.idle.matrix if self.idle else self.p["token"].new_empty)(rows, columns)

    # ---- Parts --------------------------------------------------------------------------------------------------

    def embedding(self, tokens: Tensor) -> Tensor:
        """Return the initial stream, [rows, C]."""
        token, position = self.p["token"], self.p["position"]
        x = F.embedding(tokens, token) + position[: tokens.shape[1]]
        self.kept["embedding"] = (tokens,)
        return self.shown("embedding", x.flatten(0, 1))

    def embedding_backward(self, dx: Tensor, of_head: Tensor) -> None:
        """Compute the gradients of both tables; that of the tokens' also holds the head's, [V, C]."""
        (tokens,) = self.kept.pop("embedding")
        table = self.place("token")
        table = torch.empty_like(self.p["token"]) if table is None else table
        self.grads["token"] = parts.token_gradient(table, of_head, dx, tokens.flatten())
        self.grads["position"] = torch.zeros_like(self.p["position"])
        self.grads["position"][: tokens.shape[1]] = dx.view(*tokens.shape, -1).sum(0)

    def norm_linear(self, x: Tensor, ln: str, linear: str) -> Tensor:
        """Run a LayerNorm and the product after it; save x and two numbers per row."""
        gamma, beta, W, b = (self.p[f"{part}.{each}"] for part in (ln, linear) for each in ("weight", "bias"))
        y, statistics = parts.layernorm_linear(x, gamma, beta, W, b)
        self.kept[ln] = (x, statistics)
        return self.shown(linear, y)

    def norm_linear_backward(self, dx: Tensor, dy: Tensor, ln: str, linear: str, before: str) -> Tensor:
        """Return the stream's gradient plus the branch's; its sum over rows is the gradient of the bias of
        `before`, the linear layer (if any) that adds to the stream."""
        x, statistics = self.kept.pop(ln)
        gamma, beta, W = (self.p[name] for name in (f"{ln}.weight", f"{ln}.bias", f"{linear}.weight"))
        branch, dgamma, dbeta, dW, db = parts.layernorm_linear_backward(dy, x, statistics, gamma, beta, W)
        self.grads |= {f"{ln}.weight": dgamma, f"{ln}.bias": dbeta}
        self.grads |= {f"{linear}.weight": dW, f"{linear}.bias": db}
        self.back(ln, branch)
        if not before:
            return dx.add_(branch)
        self.grads[f"{before}.bias"] = parts.add_with_sums(dx, branch)
        return dx

    def weight_gradient(self, dy: Tensor, x: Tensor, name: str) -> None:
        """Compute the weight gradient of a linear layer with input x."""
        weight = f"{name}.weight"
        self.grads[weight] = torch.mm(dy.T, x, out=self.place(weight))

    def add_linear(self, x: Tensor, branch: Tensor, name: str) -> Tensor:
        """Add a branch's linear layer to the stream."""
        y = F.linear(branch, self.p[f"{name}.weight"], self.p[f"{name}.bias"])
        return x + self.shown(name, y)

    # ---- Blocks -------------------------------------------------------------------------------------------------

    def block(self, x: Tensor, name: str, batch: int) -> Tensor:
        """Run both branches. Saved are the stream twice, qkv, attention's output and lse, and GELU's input."""
        qkv = self.norm_linear(x, f"{name}.ln_1", f"{name}.qkv")
        output, lse = parts.attention(qkv, batch, self.sizes.heads)
        self.kept[f"{name}.attention"] = (qkv, self.shown(f"{name}.attention", output), lse)
        x = self.add_linear(x, output, f"{name}.join")
        wide = self.norm_linear(x, f"{name}.ln_2", f"{name}.widen")
        self.kept[f"{name}.gelu"] = (wide,)
        x = self.add_linear(x, self.shown(f"{name}.gelu", parts.gelu(wide)), f"{name}.narrow")
        return self.shown(name, x)

    def block_backward(self, dx: Tensor, i: int, batch: int) -> Tensor:
        """Return the gradient of the stream before block i; dx is overwritten. The bias of the last linear
        layer has its gradient already."""
        name, before = f"block{i}", f"block{i - 1}.narrow" if i else ""
        if self.idle:
            self.idle.before(f"{name}.qkv.weight")
        (wide,) = self.kept.pop(f"{name}.gelu")
        d = torch.mm(dx, self.p[f"{name}.narrow.weight"], out=self.matrix(*wide.shape))
        self.back(f"{name}.narrow", d)
        again, d = parts.gelu_backward(wide, d)
        self.weight_gradient(dx, again, f"{name}.narrow")
        del wide, again
        self.back(f"{name}.gelu", d)
        dx = self.norm_linear_backward(dx, d, f"{name}.ln_2", f"{name}.widen", f"{name}.join")
        qkv, output, lse = self.kept.pop(f"{name}.attention")
        self.weight_gradient(dx, output, f"{name}.join")
        d = self.back(f"{name}.join", dx @ self.p[f"{name}.join.weight"])
        d = parts.attention_gradient(d, qkv, output, lse, batch, self.sizes.heads)
        self.back(f"{name}.attention", d)
        dx = self.norm_linear_backward(dx, d, f"{name}.ln_1", f"{name}.qkv", before)
        return self.back(name, dx)

    # ---- The model ----------------------------------------------------------------------------------------------

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, float32. The head's gradients are computed here, and saved."""
        x = self.stream(tokens)
        self.kept["ln_f"] = (x,)
        y, statistics = parts.layernorm(x, self.p["ln_f.weight"], self.p["ln_f.bias"])
        rows, token = targets.flatten(), self.p["token"]
        loss, dy, of_head = head(self.shown("ln_f", y), token, rows, self.matrix)
        self.kept["head"] = (statistics, dy, of_head)
        return loss

    def stream(self, tokens: Tensor) -> Tensor:
        """Return the stream after the last block, [rows, C]."""
        x = self.embedding(tokens)
        for i in range(self.sizes.layers):
            x = self.block(x, f"block{i}", len(tokens))
        return x

    def backward(self) -> Tensors:
        """Return all gradients by name; nothing stays saved."""
        batch = len(self.kept["embedding"][0])
        statistics, dy, of_head = self.kept.pop("head")
        (x,) = self.kept.pop("ln_f")
        dx, dgamma, dbeta = parts.layernorm_backward(dy, x, statistics, self.p["ln_f.weight"])
        self.grads |= {"ln_f.weight": dgamma, "ln_f.bias": dbeta}
        dx = self.back("ln_f", dx)
        del dy, x
        self.grads[f"block{self.sizes.layers - 1}.narrow.bias"] = dx.sum(0)
        for i in reversed(range(self.sizes.layers)):
            dx = self.block_backward(dx, i, batch)
        self.embedding_backward(dx, of_head)
        return self.grads


# All of a list by few launches.
copy_each: Callable = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class ByHand:
    """Trains a state by hand.

    Attributes:
        state: The state to train.
        working: The parameters in the working dtype, in one buffer; the state's own if that is float32.
        gradients: [count], of the last step, in the working dtype.
        numbers: AdamW's inputs at each step: the rate and both corrections, float32 [3].
        norm: Of all gradients of the last step, float32 [1].
    """

    def __init__(self, state: State):
        device = state.master.device
        dtype = working_dtype(device)
        self.state = state
        self.working = state.master if dtype == torch.float32 else state.master.to(dtype)
        self.gradients = torch.zeros_like(self.working)
        self.numbers = torch.zeros(3, device=device)
        self.norm = torch.zeros(1, device=device)
        self.p = state.pieces.views(self.working)
        self.grads = state.pieces.views(self.gradients)
        self.gaps = state.pieces.gaps(self.gradients)

    def passes(self, excerpt: Tensor) -> Tensor:
        """Run forward and backward over an excerpt [batch, context + 1]; return the loss."""
        model = Pass(self.state.sizes, self.p, idle=Idle(self.state.pieces, self.gradients))
        loss = model.forward(excerpt[:, :-1], excerpt[:, 1:])
        gradients = model.backward().items()
        elsewhere = {name: grad for name, grad in gradients if grad.data_ptr() != self.grads[name].data_ptr()}
        copy_each([self.grads[name] for name in elsewhere], [*elsewhere.values()])
        for gap in self.gaps:
            gap.zero_()
        return loss

    def update(self) -> None:
        """Clip the gradients and run AdamW in one pass."""
        state = self.state
        parts.norm_of(self.norm, self.gradients)
        parts.adamw(
            state.master,
            self.working,
            self.gradients,
            state.mean,
            state.square,
            self.numbers,
            self.norm,
            decayed=state.pieces.decayed,
            options=parts.AdamW(*BETAS, ADAM_EPS, DECAY, LIMIT),
        )

    def whole(self, excerpt: Tensor) -> Tensor:
        """Run all of a step that happens on the device."""
        loss = self.passes(excerpt)
        self.update()
        return loss

    def step(self, excerpt: Tensor, rate: float) -> Tensor:
        """Run one training step; return the loss before it, on the device."""
        self.state.steps += 1
        self.tell(self.state.steps, rate)
        return self.whole(excerpt)

    def tell(self, step: int, rate: float) -> None:
        """Set AdamW's inputs for a step, counted from 1."""
        self.numbers.copy_(torch.tensor([rate, *(1 - beta**step for beta in BETAS)]))


class Graphed(ByHand):
    """`ByHand` on a GPU with the workbook's kernels: the first step is captured as one CUDA graph, every step
    replays it.

    A graph may use other products than single launches (`harness/nn/kernels/layernorm_linear/plan.mojo`), so
    the last bits differ from ByHand's; two runs are equal.
    """

    def __init__(self, state: State):
        super().__init__(state)
        self.graph: torch.cuda.CUDAGraph | None = None

    def whole(self, excerpt: Tensor) -> Tensor:
        if self.graph is None:
            self.graph = self.record(excerpt)
        self.excerpt.copy_(excerpt)
        self.graph.replay()
        return self.loss.clone()

    def record(self, excerpt: Tensor) -> torch.cuda.CUDAGraph:
        """Capture the graph after two warm-up steps, which load and choose what a capture cannot; the state
        is restored."""
        written = (self.state.master, self.state.mean, self.state.square, self.working, self.numbers)
        before = [tensor.cpu() for tensor in written]
        self.excerpt, stream = excerpt.clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                super().whole(self.excerpt)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(written, before, strict=True):
            tensor.copy_(value)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = super().whole(self.excerpt)
        return graph


def by_hand(state: State) -> ByHand:
    """Return a CUDA graph if the workbook's kernels have a module for the state's GPU, else single launches."""
    return Graphed(state) if on_kernels(state.master.device) else ByHand(state)
