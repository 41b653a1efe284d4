"""How many nodes Dynamo captures of a function, how many kernels Inductor makes of them on a CPU, and how many calls of a library it leaves.

The code is counted when Inductor has written it, and not compiled.
"""

import logging
import math
import sys
from unittest import mock

import torch
import torch.nn.functional as F
from torch._inductor.graph import GraphLowering

from harness.check.python_files import load_module
from harness.toolchain.roots import get_solutions

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no CUDA
H, O = 64, 96


class Written(Exception):
    """Inductor's code for a graph."""


def code_of(function, *inputs) -> str:
    """What Inductor writes for the forward pass of a function."""

    def stop(code):
        raise Written(code)

    torch._dynamo.reset()
    with mock.patch.object(GraphLowering, "save_output_code", stop), torch.no_grad():
        try:
            torch.compile(function)(*inputs)
        except Exception as error:
            return getattr(error, "inner_exception", error).args[0]
    raise AssertionError("nothing was compiled")


def nodes_of(function, *inputs) -> int:
    """How many operations Dynamo's graph of a function has."""
    seen = []

    def backend(gm, example_inputs):
        seen.append(sum(node.op.startswith("call_") for node in gm.graph.nodes))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return sum(seen)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def residual(x, w, b):
    h = gelu(x)
    return h + F.linear(h, w, b)


def count(function, x):
    """Inductor's kernels and its calls of a library."""
    code = code_of(function, x)
    return code.count("async_compile.cpp_pybinding("), code.count("extern_kernels.")


def main():
    x, w, b = torch.randn(32, H), torch.randn(O, H), torch.randn(O)
    if sys.argv[1:] == ["residual"]:  # the groups that puzzle 26's printer counts, and the kernels
        w, b, written = torch.randn(H, H), torch.randn(H), []
        printer = load_module(get_solutions() / "p26" / "printer.py")["Printer"](write=written.append)
        torch.compile(residual, backend=printer)(x, w, b)
        kernels, calls = count(lambda x: residual(x, w, b), x)
        print(f"{written[0]}\nInductor: {kernels} kernels, {calls} library call")
        return
    for words, function in (
        ("GELU written out", gelu),
        ("GELU as one call", lambda x: F.gelu(x, approximate="tanh")),
        ("LayerNorm", lambda x: F.layer_norm(x, (H,))),
        ("LayerNorm, then Linear", lambda x: F.linear(F.layer_norm(x, (H,)), w, b)),
        ("Linear, then GELU", lambda x: gelu(F.linear(x, w, b))),
    ):
        kernels, calls = count(function, x)
        print(
            f"{words:<22} operations: {nodes_of(function, x)}, Inductor kernels: {kernels}, library calls: {calls}"
        )


if __name__ == "__main__":
    main()
