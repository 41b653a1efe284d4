"""Puzzle 22's kernels in PyTorch: LayerNorm + Linear as an `autograd.Function` over MAX's custom ops.

    python solutions/p22/in_torch.py [FOLDER]

trains a small model on a CPU or a GPU, with the unfused and the fused kernels of an op package (the `op` folder of this
file, or problems/p22/op), and with PyTorch's own operations. The first call with a size compiles a graph, which takes a
while.
"""

import functools
import sys
from pathlib import Path

import torch
from max.experimental.torch import CustomOpLibrary
from torch import nn
from torch.autograd.function import once_differentiable

OPS = Path(__file__).resolve().with_name("op")
"""The kernels: an op package."""
PLAIN = "plain"
"""The algorithm of PyTorch's own operations."""


@functools.cache
def library(folder=OPS):
    """Return the ops of a package, compiled once."""
    return CustomOpLibrary(folder)


def ready(*tensors):
    """Return tensors as MAX requires them: contiguous and detached."""
    return [tensor.detach().contiguous() for tensor in tensors]


# ANCHOR: function
class LayerNormLinear(torch.autograd.Function):
    """W (gamma * x_hat + beta) + b of x [B, S, H]; an op writes into its outputs and takes sizes as parameters.

    Args of `apply`: x, gamma, beta [H], W [O, H], b [O]; the algorithm, "unfused" or "fused"; the folder of the ops.
    """

    @staticmethod
    def forward(ctx, x, gamma, beta, W, b, algorithm, folder):
        """Return the output [B, S, O]. Save the arguments except b, which no gradient needs."""
        (B, S, H), O = x.shape, len(W)
        parameters = {"algorithm": algorithm, "batch_size": B, "seq_len": S, "hidden_dim": H, "output_dim": O}
        output = x.new_empty(B, S, O)
        library(folder).layernorm_linear[parameters](output, *ready(x, gamma, beta, W, b))
        ctx.save_for_backward(x, gamma, beta, W)
        ctx.parameters, ctx.folder = parameters, folder
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        """Return a gradient for each argument of `forward`; dy may be expanded or transposed."""
        x, gamma, beta, W = ctx.saved_tensors
        gradients = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (x, gamma, beta, W)
        ]
        gradients.append(W.new_empty(len(W)))
        op = library(ctx.folder).layernorm_linear_backward[ctx.parameters]
        op(*gradients, *ready(dy, x, gamma, beta, W))
        return *gradients, None, None


# ANCHOR_END: function
# ANCHOR: layer
class Layer(nn.Module):
    """`nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))`, with the same parameters, computed by an algorithm."""

    def __init__(self, H, O, algorithm, folder=OPS):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(H), nn.Linear(H, O)
        self.algorithm, self.folder = algorithm, folder

    def forward(self, x):
        if self.algorithm == PLAIN:
            return self.linear(self.norm(x))
        parameters = (self.norm.weight, self.norm.bias, self.linear.weight, self.linear.bias)
        return LayerNormLinear.apply(x, *parameters, self.algorithm, self.folder)


# ANCHOR_END: layer


def train(algorithm, steps=40, folder=OPS, device="cpu"):
    """Return the losses of a small model that learns which of its eight numbers is the largest."""
    torch.manual_seed(22)
    model = nn.Sequential(Layer(8, 16, algorithm, folder), nn.GELU(), nn.Linear(16, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 8, 8).to(device)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.argmax(-1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    kernels = Path(sys.argv[1]) if len(sys.argv) > 1 else OPS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for algorithm in (PLAIN, "unfused", "fused"):
        losses = train(algorithm, folder=kernels, device=device)
        print(f"{algorithm:8} loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} steps")
