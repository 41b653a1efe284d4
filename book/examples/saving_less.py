"""One block of a network, its activations kept in six ways: bytes between the passes, and what they cost in accuracy.

The backend `aot_eager_decomp_partition` decides as torch.compile does which values are kept and which are computed again,
and then runs plain PyTorch, so that no C++ compiler is needed.
"""

import copy

import torch
from torch import nn
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

ROWS, H = 2048, 512
torch.manual_seed(0)
block = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))
x, dy = torch.randn(ROWS, H, requires_grad=True), torch.randn(ROWS, H)
leaves = [x, *block.parameters()]
parameters = {parameter.data_ptr() for parameter in block.parameters()}


def narrow(tensor):
    """Keeps in bfloat16 what is no parameter."""
    return tensor if tensor.data_ptr() in parameters else tensor.bfloat16()


def compiled(budget):
    torch.compiler.reset()
    config.activation_memory_budget = budget
    return torch.compile(block, backend="aot_eager_decomp_partition")


def run(function, pack=lambda tensor: tensor):
    """Bytes between the passes that are no parameters, each piece of memory once, and every gradient."""
    kept = {}

    def note(tensor):
        packed = pack(tensor)
        if packed.data_ptr() not in parameters:
            kept[packed.untyped_storage().data_ptr()] = packed.untyped_storage().nbytes()
        return packed

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor.to(x.dtype)):
        output = function(x)
    return sum(kept.values()), torch.autograd.grad(output, leaves, dy)


wide, x64 = copy.deepcopy(block).double(), x.detach().double().requires_grad_()
truth = torch.autograd.grad(wide(x64), [x64, *wide.parameters()], dy.double())
ways = {
    "everything kept": lambda: run(block),
    "kept in bfloat16": lambda: run(block, narrow),
    "checkpoint": lambda: run(lambda x: checkpoint(block, x, use_reentrant=False)),
    "compiled, budget 1": lambda: run(compiled(1.0)),
    "compiled, budget 0.5": lambda: run(compiled(0.5)),
    "compiled, budget 0": lambda: run(compiled(0.0)),
}
print(f"{'':22}{'kept':>9}   error of the worst gradient")
for name, measure in ways.items():
    size, gradients = measure()
    error = max(((g - t).abs().max() / t.abs().max()).item() for g, t in zip(gradients, truth, strict=True))
    print(f"{name:22}{size / 1e6:6.1f} MB   {error:.1e}")
