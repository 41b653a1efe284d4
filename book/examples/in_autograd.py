"""What PyTorch makes of the registered operator: what a fake run says, and autocast."""

import torch
from torch._subclasses import FakeTensorMode

import harness

torch.manual_seed(22)
B, S, H, O = 2, 4, 8, 16
x = torch.randn(B, S, H, requires_grad=True)
gamma, beta = torch.ones(H, requires_grad=True), torch.zeros(H, requires_grad=True)
W, b = torch.randn(O, H, requires_grad=True), torch.zeros(O, requires_grad=True)


def fake() -> None:
    """Prints the shape of a result that nobody computes."""
    # ANCHOR: fake
    with FakeTensorMode() as mode:
        large = mode.from_tensor(torch.empty(65536, 4096, device="meta"))
        weight = mode.from_tensor(torch.empty(16384, 4096, device="meta"))
        output = harness.fused_layernorm_linear(large, None, None, weight, None)
    # ANCHOR_END: fake
    print(f"  output {tuple(output.shape)}, {output.dtype}")


def autocast() -> None:
    """Prints the dtypes under autocast."""
    # ANCHOR: autocast
    with torch.autocast("cpu", torch.bfloat16):
        y = harness.fused_layernorm_linear(x, gamma, beta, W, b)
    y.sum().backward()
    # ANCHOR_END: autocast
    print(f"  output {y.dtype}, x.grad {x.grad.dtype}, W.grad {W.grad.dtype}")


if __name__ == "__main__":
    for part, words in ((fake, "a fake run"), (autocast, "under autocast")):
        print(f"{words}:")
        part()
