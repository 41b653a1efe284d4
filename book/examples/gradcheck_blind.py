"""The gradcheck chapter: three functions of which gradcheck says the wrong thing, and what it takes to see it.

`python gradcheck_blind.py PART` runs one of in_float32, at_flat_points, at_kinks.
"""

import torch
from torch.autograd import Function, gradcheck


def verdict(function, *inputs, **options):
    """ "passes", or the first line of what gradcheck says."""
    try:
        gradcheck(function, inputs, **options)
    except RuntimeError as error:  # GradcheckError is one
        return "fails: " + str(error).split(",")[0]
    return "passes"


def leaf(*shape, dtype=torch.float64):
    """Random numbers that ask for a gradient."""
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


# ANCHOR: float32
class Cube(Function):
    """y = x^3, right."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dy


class AlmostCube(Cube):
    """The same, and one per cent too large."""

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3.03 * x**2 * dy


def in_float32():
    x = leaf(4, dtype=torch.float32)
    print("right, default settings:   ", verdict(Cube.apply, x))
    loose = {"eps": 1e-2, "atol": 5e-2, "rtol": 5e-2}
    print("right, loose settings:     ", verdict(Cube.apply, x, **loose))
    print("1 % wrong, loose settings: ", verdict(AlmostCube.apply, x, **loose))
    print("1 % wrong, in float64:     ", verdict(AlmostCube.apply, x.detach().double().requires_grad_()))


# ANCHOR_END: float32


class Clamp(Function):
    """y = x, cut off at 3. The gradient forgets the cut."""

    @staticmethod
    def forward(ctx, x):
        return x.clamp(max=3.0)

    @staticmethod
    def backward(ctx, dy):
        return dy


def at_flat_points():
    x = leaf(3, 4)
    print(f"largest input {x.max():.2f}:         ", verdict(Clamp.apply, x))
    print("inputs three times as large:", verdict(Clamp.apply, (3 * x).detach().requires_grad_()))


def at_kinks():
    away = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    near = torch.tensor([-1.0, 1e-8, 2.0], dtype=torch.float64, requires_grad=True)
    print("PyTorch's ReLU, away from 0:", verdict(torch.relu, away))
    print("PyTorch's ReLU, near 0:     ", verdict(torch.relu, near))


if __name__ == "__main__":
    import sys
    import warnings

    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
