"""What three settings of torch.compile do in the pinned PyTorch: dynamic shapes, the recompile limit, suppressed errors.

The backend only counts, so that nothing is timed here and no C++ compiler is needed. What ran compiled and what fell
back to plain PyTorch is told apart by counting the calls that went through a compiled graph.
"""

import logging

import torch
import torch.nn.functional as F
from torch._dynamo import config

# The messages say when and where, which is different in every run.
logging.getLogger("torch").setLevel(logging.CRITICAL)

# ANCHOR: counting
counts = {"graphs": 0, "compiled calls": 0}


def counting(graph, inputs):
    """A backend of torch.compile that compiles nothing: it counts its graphs and the calls of them."""
    counts["graphs"] += 1

    def run(*arguments):
        counts["compiled calls"] += 1
        return graph.forward(*arguments)

    return run


# ANCHOR_END: counting


def layer(x, scale):
    """LayerNorm + Linear in plain PyTorch, with an argument that is a constant for the compiler."""
    return F.linear(F.layer_norm(x, [8]), x.new_ones(4, 8)) * len(scale)


def show(what: str, calls: list[tuple], **options) -> None:
    """Compiles `layer` anew, makes the calls, and prints what was counted or the exception."""
    torch.compiler.reset()
    counts.update({"graphs": 0, "compiled calls": 0})
    compiled = torch.compile(layer, backend=counting, **options)
    try:
        for arguments in calls:
            compiled(*arguments)
    except Exception as error:
        print(f"{what:34} {type(error).__name__} at call {counts['compiled calls'] + 1} of {len(calls)}")
        return
    plain = len(calls) - counts["compiled calls"]
    print(f"{what:34} {counts['graphs']:6} {counts['compiled calls']:9} {plain:6}")


print(f"{'twelve calls':34} graphs  compiled  plain")
# ANCHOR: shapes
lengths = [(torch.randn(rows, 8), "s") for rows in range(2, 14)]  # twelve batch sizes
show("batch sizes, dynamic=False", lengths, dynamic=False)
show("batch sizes, default", lengths)
show("batch sizes, dynamic=True", lengths, dynamic=True)
# ANCHOR_END: shapes

# ANCHOR: limit
constants = [(torch.randn(2, 8), "s" * n) for n in range(1, 13)]  # twelve values of a Python constant
show("constants, limit 8 (the default)", constants)
show("constants, limit 8, fullgraph=True", constants, fullgraph=True)
config.cache_size_limit = 64  # another name of recompile_limit
show("constants, limit 64", constants)
# ANCHOR_END: limit
print("recompile_limit is now", config.recompile_limit)


# ANCHOR: suppress
@torch.library.custom_op("book::double_rows", mutates_args=())
def double_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x])


@double_rows.register_fake
def double_rows_fake(x):
    return x.new_empty(x.shape[0] * 3)  # wrong: it should be [2 * rows, columns]


def model(x):
    return double_rows(x) @ torch.ones(8, 1)


for suppress in (False, True):
    config.suppress_errors = suppress
    torch.compiler.reset()
    counts["compiled calls"] = 0
    try:
        shape = tuple(torch.compile(model, backend=counting)(torch.randn(2, 8)).shape)
        print(f"suppress_errors={suppress}: {shape}, calls of a compiled graph: {counts['compiled calls']}")
    except Exception as error:
        print(f"suppress_errors={suppress}: {type(error).__name__}")
# ANCHOR_END: suppress
