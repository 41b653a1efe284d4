"""How many nodes Dynamo captures of a function, how many kernels Inductor makes of them on a CPU, and how many calls of a library it leaves.

The code is counted when Inductor has written it, and not compiled.
"""

import logging
import math
from unittest import mock

import torch
import torch.nn.functional as F
from torch._inductor.graph import GraphLowering

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


def main():
    x, w, b = torch.randn(32, H), torch.randn(O, H), torch.randn(O)
    for words, function in (
        ("GELU written out", gelu),
        ("GELU as one call", lambda x: F.gelu(x, approximate="tanh")),
        ("LayerNorm", lambda x: F.layer_norm(x, (H,))),
        ("LayerNorm, then Linear", lambda x: F.linear(F.layer_norm(x, (H,)), w, b)),
        ("Linear, then GELU", lambda x: gelu(F.linear(x, w, b))),
    ):
        code = code_of(function, x)
        kernels, calls = code.count("async_compile.cpp_pybinding("), code.count("extern_kernels.")
        print(
            f"{words:<22} {nodes_of(function, x)} in the graph, {kernels} of Inductor's, {calls} of a library"
        )


if __name__ == "__main__":
    main()
