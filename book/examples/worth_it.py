"""Four operations forward and backward, eager, compiled and custom: milliseconds on this machine, and bytes kept.

Each is checked against float64 first. They take turns, and a time is the shortest of all rounds: other work on the
machine only adds to it.
"""

import logging
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.bench.timing import CudaClock, WallClock, disable_garbage_collection
from harness.check.gradient_checks import count_saved_bytes
from harness.check.python_files import load_module
from harness.toolchain.roots import get_solutions

ROWS, COLUMNS, HEADS, ROUNDS = 2048, 1024, 16, 25
FOLDER = get_solutions() / "p20"


class Plain:
    """PyTorch's operations where puzzle 20's operator calls its kernels, which run on a GPU alone."""

    def softmax(self, y: Tensor, x: Tensor) -> None:
        y.copy_(x.detach().softmax(-1))

    def softmax_backward(self, dx: Tensor, dy: Tensor, y: Tensor) -> None:
        dx.copy_(y * (dy - (y * dy).sum(-1, keepdim=True)))


def operations(device: str):
    """Name, inputs, PyTorch's function and the custom one."""
    custom = load_module(FOLDER / "functions.py")
    softmax = load_module(FOLDER / "register.py")["register"]("workbook_p20_worth", Plain())

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).requires_grad_()

    x, parameters = leaf(ROWS, COLUMNS), (leaf(COLUMNS), leaf(COLUMNS))
    heads = [leaf(HEADS, ROWS // HEADS, 64) for _ in range(3)]
    yield "relu", [x], F.relu, custom["ReluFromBits"].apply
    yield "softmax", [x], lambda x: F.softmax(x, -1), softmax
    norm = [
        lambda x, w, b: F.layer_norm(x, (COLUMNS,), w, b),
        lambda *xwb: custom["LayerNorm"].apply(*xwb, 1e-5),
    ]
    yield "layernorm", [x, *parameters], *norm
    yield "attention", heads, F.scaled_dot_product_attention, custom["Attention"].apply


def both(function, inputs, dy: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the output and every gradient."""
    output = function(*inputs)
    return output.detach(), *torch.autograd.grad(output, inputs, dy)


def main() -> None:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no CUDA
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = CudaClock() if device == "cuda" else WallClock()
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    torch.manual_seed(0)
    print(f"[{ROWS}, {COLUMNS}] in float32, on {where}; the shortest of {ROUNDS} rounds in turns")
    print(f"{'':21}{'time':>12}{'kept':>13}")
    for name, inputs, eager, custom in operations(device):
        ways = {"eager": eager, "compiled": torch.compile(eager, dynamic=False), "custom": custom}
        dy = torch.randn_like(eager(*inputs))
        exact = both(eager, [t.detach().double().requires_grad_() for t in inputs], dy.double())
        for way, function in ways.items():
            for got, right in zip(both(function, inputs, dy), exact, strict=True):
                assert (got - right).abs().max() <= 1e-4 * right.abs().max(), f"{name}, {way}: wrong"
        times: dict[str, list[float]] = {way: [] for way in ways}
        with disable_garbage_collection():
            for _ in range(ROUNDS):
                for way, function in ways.items():
                    times[way].append(clock.measure(partial(both, function, inputs, dy), 1) / 1e3)
        for way, function in ways.items():
            kept = count_saved_bytes(function, inputs)[0] / 1e6
            print(f"{name:<10} {way:<10}{min(times[way]):>9.2f} ms{kept:>10.2f} MB")


if __name__ == "__main__":
    main()
