"""What PyTorch makes of the registered operator: what is kept, what a fake run says, autocast, a second derivative."""

import torch
from torch._subclasses import FakeTensorMode

from harness.nn.autograd import layernorm_linear

torch.manual_seed(22)
B, S, H, O = 2, 4, 8, 16
x = torch.randn(B, S, H, requires_grad=True)
gamma, beta = torch.ones(H, requires_grad=True), torch.zeros(H, requires_grad=True)
W, b = torch.randn(O, H, requires_grad=True), torch.zeros(O, requires_grad=True)
inputs = {"x": x, "gamma": gamma, "beta": beta, "W": W, "b": b}


def kept() -> None:
    """Prints what autograd holds between the passes."""
    # ANCHOR: kept
    names = {tensor.data_ptr(): name for name, tensor in inputs.items()}

    def pack(tensor):
        print(f"  {names.get(tensor.data_ptr(), 'statistics'):10} {tuple(tensor.shape)}, {tensor.dtype}")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, statistics = layernorm_linear(*inputs.values(), 1e-5, "fast")
    # ANCHOR_END: kept
    print("the statistics need a gradient:", statistics.requires_grad)


def fake() -> None:
    """Prints what the operator says of a result that nobody computes."""
    # ANCHOR: fake
    with FakeTensorMode() as mode:
        large = mode.from_tensor(torch.empty(65536, 4096, device="meta"))
        weight = torch.empty(16384, 4096, device="meta")
        output, statistics = layernorm_linear(large, None, None, mode.from_tensor(weight), None, 1e-5, "fast")
    # ANCHOR_END: fake
    print(
        f"  output {tuple(output.shape)}, {output.dtype}; statistics {tuple(statistics.shape)}, {statistics.dtype}"
    )


def autocast() -> None:
    """Prints the dtypes under autocast."""
    import harness

    # ANCHOR: autocast
    with torch.autocast("cpu", torch.bfloat16):
        y = harness.fused_layernorm_linear(*inputs.values())
    y.sum().backward()
    # ANCHOR_END: autocast
    print(f"  output {y.dtype}, x.grad {x.grad.dtype}, W.grad {W.grad.dtype}")


def twice() -> None:
    """Prints the refusal of a second derivative."""
    # ANCHOR: twice
    output, _ = layernorm_linear(*inputs.values(), 1e-5, "fast")
    (dx,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    try:
        dx.square().sum().backward()
    except NotImplementedError as error:
        print(f"  NotImplementedError: {error}")
    # ANCHOR_END: twice


if __name__ == "__main__":
    for part, words in (
        (kept, "kept for backward"),
        (fake, "a fake run"),
        (autocast, "under autocast"),
        (twice, "a second derivative"),
    ):
        print(f"{words}:")
        part()
