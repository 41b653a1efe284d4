"""The essay "What gradcheck misses": gradcheck accepts a wrong SiLU in a friendly call, and rejects it in three others."""

import torch
import torch.nn.functional as F
from gradcheck_calls import SiLU, list_calls

torch.manual_seed(0)
# ANCHOR: first
x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
print("gradcheck:", torch.autograd.gradcheck(SiLU.apply, x))

weights = torch.randn(3, 10, dtype=torch.float64)
wrong, right = (
    torch.autograd.grad((torch.cat([f(x), f(x)], -1) * weights).sum(), x)[0] for f in (SiLU.apply, F.silu)
)
print(f"largest error of the gradient after torch.cat: {(wrong - right).abs().max():.1f}")
# ANCHOR_END: first

# ANCHOR: others
edges = torch.tensor([[0.0, 800.0, -800.0]], dtype=torch.float64, requires_grad=True)
deep, tall = (
    torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 2, 5), (4097, 5))
)
for name, call in list_calls(SiLU.apply, [x], [edges], [deep], [tall]).items():
    try:
        call()
    except RuntimeError as error:
        print(f"{name}: {type(error).__name__}")
# ANCHOR_END: others
