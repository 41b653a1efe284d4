"""What LayerNorm + Linear keeps for its backward pass: in plain PyTorch, compiled, and compiled with a memory budget.

The backend `aot_eager_decomp_partition` decides as torch.compile does which values are kept and which are computed again,
and then runs plain PyTorch, so that no C++ compiler is needed.
"""

import torch
from torch import nn
from torch._functorch import config

B, S, H, O = 8, 1024, 768, 3072
torch.manual_seed(0)
pair = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))
x = torch.randn(B, S, H, requires_grad=True)
names = {parameter.data_ptr(): name for name, parameter in pair.named_parameters()} | {x.data_ptr(): "x"}


# ANCHOR: kept
def show(what: str, model) -> None:
    """Prints what autograd holds between the passes, and the bytes of it that are no parameters."""
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    others = [tensor for at, tensor in kept.items() if names.get(at, "x") == "x"]
    size = sum(tensor.untyped_storage().nbytes() for tensor in others)
    print(f"{what:22} {size / 1e6:5.1f} MB:", *sorted(str(tuple(tensor.shape)) for tensor in others))


show("plain PyTorch", pair)
for budget in (1.0, 0.5):
    torch.compiler.reset()
    config.activation_memory_budget = budget
    show(f"compiled, budget {budget}", torch.compile(pair, backend="aot_eager_decomp_partition"))
# ANCHOR_END: kept
