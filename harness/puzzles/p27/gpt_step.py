"""One training step of GPT-2 by hand, from the workbook's layers, without autograd and with little memory.

The residual stream, [rows, C] with rows = batch * T, is in the working dtype; parameters are
float32, and matmuls read a copy in the working dtype that AdamW writes. GELU is recomputed, the head
computes its gradients in the forward pass, and the largest temporaries use the gradients' memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.nn import host
from harness.puzzles.p27 import step_parts as parts
from harness.puzzles.p27.autograd import Tensors
from harness.puzzles.p27.derivation import IGNORE_INDEX
from harness.puzzles.p27.gpt import ALIGNMENT, BufferLayout, Sizes, State, get_working_dtype
from harness.puzzles.p27.step_kernels import has_kernels

MEAN_REDUCTION, INPUT_GRADIENT, WEIGHT_GRADIENT, FLOAT32_WEIGHT_GRADIENT = 1, 1, 2, 8
"""Arguments of the loss operator: mean reduction, both gradients, and the weight's gradient in float32."""


def head(
    x: Tensor, weight: Tensor, targets: Tensor, allocate_matrix: Callable[[int, int], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean loss of the logits x weight^T, [rows, V], and the gradients of x and weight.

    On a GPU the operator of `harness.nn.linear_cross_entropy` computes the logits chunk by chunk; elsewhere
    `allocate_matrix` allocates them in the workspace.
    """
    if host.load("cross_entropy", x.device.type):
        integers, numbers, gradients = (
            [IGNORE_INDEX, MEAN_REDUCTION, 0],
            [0.0, 0.0, 0.0],
            INPUT_GRADIENT | WEIGHT_GRADIENT | FLOAT32_WEIGHT_GRADIENT,
        )
        return torch.ops.mojo_workbook.linear_cross_entropy_forward(
            x, weight, None, targets, integers, numbers, gradients
        )[:3]
    scores = torch.mm(x, weight.T, out=allocate_matrix(len(x), len(weight))).float()
    valid = (targets != IGNORE_INDEX)[:, None]
    index = targets[:, None].where(valid, 0)
    count = valid.sum()
    scores -= scores.amax(1, keepdim=True)
    target_score = scores.gather(1, index)
    total = scores.exp_().sum(1, keepdim=True)
    loss = (total.log() - target_score).where(valid, 0).sum() / count
    scores /= total
    scores.scatter_add_(1, index, torch.full_like(target_score, -1)).mul_(valid / count)
    gradient = scores.to(x.dtype)
    return loss, gradient @ weight, gradient.T @ x


def ignore_value(name: str, value: Tensor) -> None: ...


class Workspace:
    """The unused part of the gradients' buffer: all of it, then the part before the current block."""

    def __init__(self, layout: BufferLayout, buffer: Tensor):
        self.layout, self.buffer = layout, buffer
        self.grads = layout.make_views(buffer)
        self.free = buffer

    def reset_workspace(self, name: str) -> None:
        """Reclaim the workspace, up to the start of the gradient `name`."""
        self.free = self.buffer[: self.layout.entries[name][0]]

    def allocate_matrix(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised matrix, newly allocated if the workspace is too small."""
        count = rows * columns
        if count > len(self.free):
            return self.buffer.new_empty(rows, columns)
        memory, self.free = self.free[:count], self.free[-(-count // ALIGNMENT) * ALIGNMENT :]
        return memory.view(rows, columns)


@dataclass
class ManualPass:
    """The forward and backward pass of one model.

    Args:
        sizes: The model's sizes.
        p: Its parameters in the working dtype, by their names on the tape.
        on_value: Called with the name and value of every activation and input gradient: "block0.qkv, its output".
        workspace: The parameter gradients' buffer, used as workspace until it is written; None to allocate both.

    Attributes:
        grads: The parameters' gradients, after `backward`.
        saved: Name of a part -> the tensors saved for its backward pass.
    """

    sizes: Sizes
    p: Tensors
    on_value: Callable[[str, Tensor], None] = ignore_value
    workspace: Workspace | None = None
    grads: Tensors = field(default_factory=dict)
    saved: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def record_output(self, part: str, output: Tensor) -> Tensor:
        self.on_value(f"{part}, its output", output)
        return output

    def record_gradient(self, part: str, gradient: Tensor) -> Tensor:
        self.on_value(f"the gradient of what {part} is given", gradient)
        return gradient

    def get_grad_view(self, name: str) -> Tensor | None:
        return self.workspace.grads[name] if self.workspace else None

    def allocate_matrix(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised temporary in the working dtype."""
        return (self.workspace.allocate_matrix if self.workspace else self.p["token"].new_empty)(
            rows, columns
        )

    # ---- Parts --------------------------------------------------------------------------------------------------

    def embedding(self, tokens: Tensor) -> Tensor:
        token, position = self.p["token"], self.p["position"]
        x = F.embedding(tokens, token) + position[: tokens.shape[1]]
        self.saved["embedding"] = (tokens,)
        return self.record_output("embedding", x.flatten(0, 1))

    def embedding_backward(self, dx: Tensor, head_grad: Tensor) -> None:
        """Compute the gradients of both tables; the token table's includes the head's, [V, C]."""
        (tokens,) = self.saved.pop("embedding")
        table = self.get_grad_view("token")
        table = torch.empty_like(self.p["token"]) if table is None else table
        self.grads["token"] = parts.compute_token_gradient(table, head_grad, dx, tokens.flatten())
        self.grads["position"] = torch.zeros_like(self.p["position"])
        self.grads["position"][: tokens.shape[1]] = dx.view(*tokens.shape, -1).sum(0)

    def norm_linear(self, x: Tensor, ln: str, linear: str) -> Tensor:
        """Run a LayerNorm and the linear layer after it; save x, and mean and rstd of each row."""
        gamma, beta, W, b = (self.p[f"{part}.{key}"] for part in (ln, linear) for key in ("weight", "bias"))
        y, statistics = parts.layernorm_linear(x, gamma, beta, W, b)
        self.saved[ln] = (x, statistics)
        return self.record_output(linear, y)

    def norm_linear_backward(
        self, dx: Tensor, dy: Tensor, ln: str, linear: str, previous_linear: str
    ) -> Tensor:
        """Return the residual's gradient plus the branch's; its sum over rows is the bias gradient of
        `previous_linear`, the linear layer that last added to the residual, if any."""
        x, statistics = self.saved.pop(ln)
        gamma, beta, W = (self.p[name] for name in (f"{ln}.weight", f"{ln}.bias", f"{linear}.weight"))
        branch, dgamma, dbeta, dW, db = parts.layernorm_linear_backward(dy, x, statistics, gamma, beta, W)
        self.grads |= {f"{ln}.weight": dgamma, f"{ln}.bias": dbeta}
        self.grads |= {f"{linear}.weight": dW, f"{linear}.bias": db}
        self.record_gradient(ln, branch)
        if not previous_linear:
            return dx.add_(branch)
        self.grads[f"{previous_linear}.bias"] = parts.add_with_sums(dx, branch)
        return dx

    def weight_gradient(self, dy: Tensor, x: Tensor, name: str) -> None:
        weight = f"{name}.weight"
        self.grads[weight] = torch.mm(dy.T, x, out=self.get_grad_view(weight))

    def add_linear(self, x: Tensor, branch: Tensor, name: str) -> Tensor:
        y = F.linear(branch, self.p[f"{name}.weight"], self.p[f"{name}.bias"])
        return x + self.record_output(name, y)

    # ---- Blocks -------------------------------------------------------------------------------------------------

    def block(self, x: Tensor, name: str, batch: int) -> Tensor:
        """Run both branches; save the residual twice, qkv, attention's output and lse, and GELU's input."""
        qkv = self.norm_linear(x, f"{name}.ln_1", f"{name}.qkv")
        output, lse = parts.attention(qkv, batch, self.sizes.heads)
        self.saved[f"{name}.attention"] = (qkv, self.record_output(f"{name}.attention", output), lse)
        x = self.add_linear(x, output, f"{name}.join")
        hidden = self.norm_linear(x, f"{name}.ln_2", f"{name}.widen")
        self.saved[f"{name}.gelu"] = (hidden,)
        x = self.add_linear(x, self.record_output(f"{name}.gelu", parts.gelu(hidden)), f"{name}.narrow")
        return self.record_output(name, x)

    def block_backward(self, dx: Tensor, i: int, batch: int) -> Tensor:
        """Return the residual's gradient before block i; overwrites dx. The last bias already has its
        gradient."""
        name, previous_linear = f"block{i}", f"block{i - 1}.narrow" if i else ""
        if self.workspace:
            self.workspace.reset_workspace(f"{name}.qkv.weight")
        (hidden,) = self.saved.pop(f"{name}.gelu")
        d = torch.mm(dx, self.p[f"{name}.narrow.weight"], out=self.allocate_matrix(*hidden.shape))
        self.record_gradient(f"{name}.narrow", d)
        gelu, d = parts.gelu_backward(hidden, d)
        self.weight_gradient(dx, gelu, f"{name}.narrow")
        del hidden, gelu
        self.record_gradient(f"{name}.gelu", d)
        dx = self.norm_linear_backward(dx, d, f"{name}.ln_2", f"{name}.widen", f"{name}.join")
        qkv, output, lse = self.saved.pop(f"{name}.attention")
        self.weight_gradient(dx, output, f"{name}.join")
        d = self.record_gradient(f"{name}.join", dx @ self.p[f"{name}.join.weight"])
        d = parts.attention_gradient(d, qkv, output, lse, batch, self.sizes.heads)
        self.record_gradient(f"{name}.attention", d)
        dx = self.norm_linear_backward(dx, d, f"{name}.ln_1", f"{name}.qkv", previous_linear)
        return self.record_gradient(name, dx)

    # ---- The model ----------------------------------------------------------------------------------------------

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, float32; compute and save the head's gradients too."""
        x = self.stream(tokens)
        self.saved["ln_f"] = (x,)
        y, statistics = parts.layernorm(x, self.p["ln_f.weight"], self.p["ln_f.bias"])
        rows, token = targets.flatten(), self.p["token"]
        loss, dy, head_grad = head(self.record_output("ln_f", y), token, rows, self.allocate_matrix)
        self.saved["head"] = (statistics, dy, head_grad)
        return loss

    def stream(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i in range(self.sizes.layers):
            x = self.block(x, f"block{i}", len(tokens))
        return x

    def backward(self) -> Tensors:
        """Return all gradients by name; release the saved tensors."""
        batch = len(self.saved["embedding"][0])
        statistics, dy, head_grad = self.saved.pop("head")
        (x,) = self.saved.pop("ln_f")
        dx, dgamma, dbeta = parts.layernorm_backward(dy, x, statistics, self.p["ln_f.weight"])
        self.grads |= {"ln_f.weight": dgamma, "ln_f.bias": dbeta}
        dx = self.record_gradient("ln_f", dx)
        del dy, x
        self.grads[f"block{self.sizes.layers - 1}.narrow.bias"] = dx.sum(0)
        for i in reversed(range(self.sizes.layers)):
            dx = self.block_backward(dx, i, batch)
        self.embedding_backward(dx, head_grad)
        return self.grads


# Copies a list of tensors in few launches.
copy_each: Callable = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


class ManualTrainer:
    """Trains a state by hand.

    Attributes:
        state: The state to train.
        working: The parameters in the working dtype, in one buffer; the state's buffer if that is float32.
        gradients: The last step's gradients in one buffer, in the working dtype.
        step_inputs: AdamW's inputs of each step: the rate and both bias corrections, float32 [3].
        norm: The norm of all gradients of the last step, float32 [1].
    """

    def __init__(self, state: State):
        device = state.master.device
        dtype = get_working_dtype(device)
        self.state = state
        self.working = state.master if dtype == torch.float32 else state.master.to(dtype)
        self.gradients = torch.zeros_like(self.working)
        self.step_inputs = torch.zeros(3, device=device)
        self.norm = torch.zeros(1, device=device)
        self.p = state.layout.make_views(self.working)
        self.grads = state.layout.make_views(self.gradients)
        self.padding = state.layout.get_padding(self.gradients)

    def compute_gradients(self, excerpt: Tensor) -> Tensor:
        model = ManualPass(self.state.sizes, self.p, workspace=Workspace(self.state.layout, self.gradients))
        loss = model.forward(excerpt[:, :-1], excerpt[:, 1:])
        gradients = model.backward().items()
        outside = {name: grad for name, grad in gradients if grad.data_ptr() != self.grads[name].data_ptr()}
        copy_each([self.grads[name] for name in outside], [*outside.values()])
        for gap in self.padding:
            gap.zero_()
        return loss

    def update(self) -> None:
        """Clip the gradients and apply AdamW in one pass, after computing the norm."""
        state = self.state
        parts.compute_norm(self.norm, self.gradients)
        parts.adamw(
            state.master,
            self.working,
            self.gradients,
            state.mean,
            state.square,
            self.step_inputs,
            self.norm,
            num_decayed=state.layout.num_decayed,
        )

    def run(self, excerpt: Tensor) -> Tensor:
        loss = self.compute_gradients(excerpt)
        self.update()
        return loss

    def step(self, excerpt: Tensor, learning_rate: float) -> Tensor:
        """Run one training step; return the loss before the update, on the device."""
        self.state.steps += 1
        self.set_step_inputs(self.state.steps, learning_rate)
        return self.run(excerpt)

    def set_step_inputs(self, step: int, learning_rate: float) -> None:
        self.step_inputs.copy_(torch.tensor([learning_rate, *(1 - beta**step for beta in parts.BETAS)]))


class GraphedTrainer(ManualTrainer):
    """`ManualTrainer` on a GPU with the workbook's kernels: captures the first step in a CUDA graph and replays it.

    A graph may choose other GEMMs than single launches do (`harness/nn/kernels/layernorm_linear/plan.mojo`),
    so the last bits may differ from ManualTrainer's; two runs are equal.
    """

    def __init__(self, state: State):
        super().__init__(state)
        self.graph: torch.cuda.CUDAGraph | None = None

    def run(self, excerpt: Tensor) -> Tensor:
        if self.graph is None:
            self.graph = self.capture(excerpt)
        self.excerpt.copy_(excerpt)
        self.graph.replay()
        return self.loss.clone()

    def capture(self, excerpt: Tensor) -> torch.cuda.CUDAGraph:
        """Capture the graph after two warm-up steps, which load modules that a capture cannot; restore the state."""
        tensors = (self.state.master, self.state.mean, self.state.square, self.working, self.step_inputs)
        saved_values = [tensor.cpu() for tensor in tensors]
        self.excerpt, stream = excerpt.clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                super().run(self.excerpt)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(tensors, saved_values, strict=True):
            tensor.copy_(value)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = super().run(self.excerpt)
        return graph


def make_trainer(state: State) -> ManualTrainer:
    """Return `GraphedTrainer` if the workbook's kernels run on the state's GPU, else `ManualTrainer`."""
    return GraphedTrainer(state) if has_kernels(state.master.device) else ManualTrainer(state)
