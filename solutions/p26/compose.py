"""Puzzle 26, fourth rung: from passes to a backend, and the entry points of the compiler.

`compile_fx` takes Dynamo's graph and runs everything after it: AOTAutograd, which makes a forward and a backward graph
of ATen operations, and Inductor, which compiles them. `compile_fx_inner` takes one of those two graphs alone. Passes
over Dynamo's graph run before the first entry point. `workbook p26 --rung compose` checks the three parts; the last two
compile with Inductor, which takes its time.
"""

import torch
import torch._inductor
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import compile_fx as inductor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from harness.puzzles.p26.nodes import CALLS, call_name


def rewrite(gm, passes):
    """Run every pass over a graph and over the graphs that it calls; return how many changes they report.

    A checkpointed region and a branch of `torch.cond` are separate graphs: GraphModules below `gm`. A changed graph is
    linted and recompiled.
    """
    # BLANK-START rewrite: every GraphModule among gm.modules(); lint and recompile where something has changed
    num_changes = 0
    for module in gm.modules():
        if isinstance(module, GraphModule):
            changed = sum(run_pass(module) for run_pass in passes)
            if changed:
                module.graph.lint()
                module.recompile()
            num_changes += changed
    return num_changes
    # BLANK-END rewrite


def backend(gm, example_inputs, passes, *, mode=None, options=None):
    """Rewrite Dynamo's graph, then pass it to Inductor with the user's mode and options.

    `torch._inductor.list_mode_options(mode)` returns a mode's options. They are passed on as `config_patches`: the
    backward pass is compiled when it first runs, long after this function has returned.
    """
    # BLANK-START backend: rewrite, then inductor.compile_fx(gm, example_inputs, config_patches=...)
    rewrite(gm, passes)
    patches = torch._inductor.list_mode_options(mode) if mode else {}
    return inductor.compile_fx(gm, example_inputs, config_patches={**patches, **(options or {})})
    # BLANK-END backend


def aot(gm, example_inputs, graphs):
    """Run after AOTAutograd: record both of its graphs, then compile them with Inductor.

    `graphs` is a list to extend with ("forward" or "backward", [names of the operations]). Inductor expects graphs in the
    operations that its own table of decompositions leaves over.
    """

    # BLANK-START aot: a compiler for each direction around inductor.compile_fx_inner, and aot_autograd with select_decomp_table()
    def make_compiler(direction):
        def compile(gm, example_inputs):
            graphs.append((direction, [call_name(node) for node in gm.graph.nodes if node.op in CALLS]))
            return inductor.compile_fx_inner(gm, example_inputs, is_backward=direction == "backward")

        return compile

    compiler = aot_autograd(
        fw_compiler=make_compiler("forward"),
        bw_compiler=make_compiler("backward"),
        decompositions=select_decomp_table(),
    )
    return compiler(gm, example_inputs)
    # BLANK-END aot
