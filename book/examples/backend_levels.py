"""What each level of torch.compile hands over for LayerNorm -> Linear in training: Dynamo's graph, then AOTAutograd's two.

The printer is puzzle 26's. Nothing is compiled: after AOTAutograd comes a compiler that runs the graphs as they are.
"""

import textwrap

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from harness.check.python_files import load_module
from harness.puzzles.p26.nodes import CALLS, call_name
from harness.toolchain.roots import get_solutions

Printer = load_module(get_solutions() / "p26" / "printer.py")["Printer"]


def noting(direction):
    """A compiler that prints what a graph computes and returns, and runs it as it is."""

    def compile(gm, example_inputs):
        names = [call_name(node) for node in gm.graph.nodes if node.op in CALLS]
        kept = [str(value) for value in gm.graph.output_node().args[0]]
        names = [name.split(".")[0] for name in names]
        print("\n".join(textwrap.wrap(f"  {direction}: {', '.join(names)}", 96, subsequent_indent="    ")))
        print(f"    returns {', '.join(kept)}")
        return make_boxed_func(gm.forward)

    return compile


def train(backend):
    """One training step of the pair."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6))
    torch.compile(model, backend=backend)(torch.randn(4, 8, requires_grad=True)).sum().backward()


def main():
    print("Dynamo:")
    train(Printer())
    for words, table in (("no table", {}), ("Inductor's table", select_decomp_table())):
        print(f"AOTAutograd, {words}:")
        compilers = {"fw_compiler": noting("forward"), "bw_compiler": noting("backward")}
        train(aot_autograd(**compilers, decompositions=table))


if __name__ == "__main__":
    main()
