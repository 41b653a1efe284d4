"""The debugging chapter: a model whose gradient is wrong somewhere, and four ways of finding where.

`python debugging.py PART` runs one of anomaly, hooks, assertions, bisecting.
"""

import torch
from torch import nn
from torch.autograd import Function, detect_anomaly, gradcheck


# ANCHOR: root
class Root(Function):
    """y = sqrt(x); its gradient is infinite at 0."""

    @staticmethod
    def forward(ctx, x):
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return dy / (2 * y)


# ANCHOR_END: root


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


# ANCHOR: anomaly
def anomaly():
    x = torch.tensor([4.0, 0.0], requires_grad=True)
    scale = torch.tensor([1.0, 0.0])
    loss = (Root.apply(x) * scale).sum()
    loss.backward()
    print("loss", loss.item(), " gradient", x.grad.tolist())
    with detect_anomaly(check_nan=True):
        try:
            (Root.apply(x) * scale).sum().backward()
        except RuntimeError as error:
            print(error)


# ANCHOR_END: anomaly


# ANCHOR: hooks
def hooks():
    net, seen = model(), {}

    def watch(name):
        def note(module, inputs, output):
            output.register_hook(lambda gradient: seen.update({name: gradient}))

        return note

    for name, layer in net.named_children():
        layer.register_forward_hook(watch(name))
    net(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
    for name, gradient in seen.items():
        print(f"after {name:6} shape {list(gradient.shape)}  largest {gradient.abs().max():.2e}")


# ANCHOR_END: hooks


# ANCHOR: assertions
def guarded(backward, names):
    """A backward pass that says at once which of its gradients has a wrong shape, or is not finite."""

    def checked(ctx, *incoming):
        gradients = backward(ctx, *incoming)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        for name, gradient, shape in zip(names, gradients, ctx.shapes, strict=True):
            assert gradient is None or gradient.shape == shape, (
                f"{name}: {list(gradient.shape)}, not {list(shape)}"
            )
            assert gradient is None or gradient.isfinite().all(), f"{name} is not finite everywhere"
        return gradients

    return staticmethod(checked)


class GuardedRoot(Root):
    """Root, with assertions."""

    @staticmethod
    def forward(ctx, x):
        ctx.shapes = (x.shape,)
        return Root.forward(ctx, x)

    backward = guarded(Root.backward, ["dx"])


def assertions():
    x = torch.tensor([4.0, 0.0], requires_grad=True)
    try:
        GuardedRoot.apply(x).sum().backward()
    except AssertionError as error:
        print("AssertionError:", error)


# ANCHOR_END: assertions


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
