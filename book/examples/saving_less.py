"""One block of a network, its activations kept in six ways: bytes between the passes, and what they cost in accuracy.

The backend `aot_eager_decomp_partition` decides as torch.compile does which values are kept and which are computed again,
and then runs plain PyTorch, so that no C++ compiler is needed.
"""

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


def in_bfloat16(x):
    with torch.autograd.graph.saved_tensors_hooks(narrow, lambda tensor: tensor.float()):
        return block(x)


def compiled(budget):
    torch.compiler.reset()
    config.activation_memory_budget = budget
    return torch.compile(block, backend="aot_eager_decomp_partition")


def bytes_kept(function):
    """Bytes between the passes that are no parameters, each piece of memory once."""
    kept = {}

    def note(tensor):
        if isinstance(tensor, torch.Tensor) and tensor.data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    if function is in_bfloat16:  # hooks that pack are looked at from inside
        with torch.autograd.graph.saved_tensors_hooks(lambda t: note(narrow(t)), lambda t: t.float()):
            block(x)
        return sum(kept.values())
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(x)
    return sum(kept.values())


def gradients(function):
    return torch.autograd.grad(function(x), leaves, dy)


with torch.enable_grad():
    wide = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H)).double()
    wide.load_state_dict({name: value.double() for name, value in block.state_dict().items()})
    x64 = x.detach().double().requires_grad_()
    truth = torch.autograd.grad(wide(x64), [x64, *wide.parameters()], dy.double())

ways = {
    "everything kept": lambda: block,
    "kept in bfloat16": lambda: in_bfloat16,
    "checkpoint": lambda: lambda x: checkpoint(block, x, use_reentrant=False),
    "compiled, budget 1": lambda: compiled(1.0),
    "compiled, budget 0.5": lambda: compiled(0.5),
    "compiled, budget 0": lambda: compiled(0.0),
}
print(f"{'':22}{'kept':>9}   error of the worst gradient")
for name, make in ways.items():
    function = make()
    error = max(
        ((g - t).abs().max() / t.abs().max()).item() for g, t in zip(gradients(function), truth, strict=True)
    )
    print(f"{name:22}{bytes_kept(function) / 1e6:6.1f} MB   {error:.1e}")
