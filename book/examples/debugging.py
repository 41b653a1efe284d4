"""The debugging chapter: a model whose gradient is wrong somewhere, and a way to find where.

`python debugging.py bisecting` runs it.
"""

import torch
from torch import nn
from torch.autograd import Function, gradcheck


# ANCHOR: model
class Gate(Function):
    """y = x * sigmoid(x), with a gradient that forgets the second term."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * torch.sigmoid(x)


class Wrapped(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def model():
    torch.manual_seed(0)
    layers = {
        "first": nn.Linear(4, 8),
        "gate": Wrapped(Gate.apply),
        "norm": nn.LayerNorm(8),
        "last": nn.Linear(8, 3),
    }
    made = nn.Sequential()
    for name, layer in layers.items():
        made.add_module(name, layer.double())
    return made


# ANCHOR_END: model


# ANCHOR: bisect
def bisect(net, x):
    """The first submodule whose own gradient is wrong: gradcheck on each, on the input that it gets in the model."""
    for name, layer in net.named_children():
        with torch.no_grad():
            following = layer(x)
        try:
            gradcheck(layer, x.detach().requires_grad_())
            print(f"{name:6} passes")
        except RuntimeError as error:
            print(f"{name:6} {str(error).splitlines()[0].rstrip(',')}")
        x = following


def bisecting():
    net = model()
    x = torch.randn(2, 4, dtype=torch.float64)
    try:
        gradcheck(net, x.clone().requires_grad_())
    except RuntimeError:
        print("the whole model: wrong somewhere")
    bisect(net, x)


# ANCHOR_END: bisect

if __name__ == "__main__":
    import sys
    import warnings

    warnings.simplefilter("ignore")
    globals()[sys.argv[1]]()
