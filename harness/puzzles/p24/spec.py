"""Puzzle 24, Hilbert-ordered attention: gates, rungs, cases, inputs and reference.

Names: B = batch, N = heads, H and W = rows and columns of the grid, L = H * W, d = head dimension, r = radius
of the window, T = positions in a tile. A tensor of positions [B, N, L, d] has one row per cell of the grid,
row-major; `order` [L] is the cell at each step.
"""

import numpy as np

from harness.puzzles.p24 import orders
from harness.puzzles.p24.derivation import derive
from harness.puzzles.p24.mistakes import MISTAKES, curve_symptom
from harness.spec.baseline import unluckiest
from harness.spec.cases import covering, is_not_finite, listed_axis, not_finite, with_not_finite
from harness.spec.ops import ACCUM, Argument, Call, OpSpec, Scalar, accum_dtype, bytes_of
from harness.spec.puzzle import Arrays, Case, Demo, Dims, Gate, Ledger, Puzzle, printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung, NumpyRung, TorchFunction, TorchRung

DIMS = (1, 1, 4, 4, 4, 1, 16)
"""The default sizes: B, N, H, W, d, r, T."""

ROWS = Argument(("B", "N", "L", "d"))
ROW = Argument(("B", "N", "L"), ACCUM)
ORDER = Argument(("L",), "int32")
STEPS = Argument(("steps",), "int32")
CELLS = Argument(("cells",), "int32")
TILES = Argument(("t", "t"), "int32")
WINDOW = {"width": Scalar(1, "int32"), "radius": Scalar(0, "int32"), "tile": Scalar(16, "int32")}

OPS = {
    "curve": (
        OpSpec("hilbert_curve_train", writes={"index": STEPS, "inverse": CELLS}, reads={},
               scalars={"side": Scalar(1, "int32")}),
    ),
    "permute": (
        OpSpec("hilbert_gather_train", writes={"gathered": ROWS}, reads={"input": ROWS, "order": ORDER}),
        OpSpec("hilbert_scatter_train", writes={"grad_input": ROWS},
               reads={"grad_gathered": ROWS, "order": ORDER}),
    ),
    "window": (
        OpSpec("window_tiles_train", writes={"tiles": TILES}, reads={"order": ORDER}, scalars=WINDOW),
        OpSpec("window_attention_train", writes={"output": ROWS, "lse": ROW},
               reads={"query": ROWS, "key": ROWS, "value": ROWS, "order": ORDER, "tiles": TILES},
               scalars=WINDOW),
        OpSpec("window_attention_train_backward",
               writes={"grad_query": ROWS, "grad_key": ROWS, "grad_value": ROWS, "delta": ROW},
               reads={**{name: ROWS for name in ("grad_output", "query", "key", "value", "output")},
                      **{"lse": ROW, "order": ORDER, "tiles": TILES}},
               scalars=WINDOW),
    ),
}  # fmt: skip
LAUNCHES = {
    "hilbert_curve_train": "launch_curve(..., side)",
    "hilbert_gather_train": "launch_gather[dtype](..., B * N, L, d)",
    "hilbert_scatter_train": "launch_scatter[dtype](..., B * N, L, d)",
    "window_tiles_train": "launch_tiles(..., sizes)",
    "window_attention_train": "launch_window_forward(recorder, WindowForward[dtype](=, sizes=sizes.copy()))",
    "window_attention_train_backward": "launch_window_backward(recorder, WindowBackward[dtype](=, sizes=sizes.copy()))",
}
VARIANTS = {name: tuple(Call(op, (), name, LAUNCHES[op.name]) for op in ops) for name, ops in OPS.items()}
"""One for each part of the puzzle, so that work on one compiles no other."""

GRADIENTS = ("grad_query", "grad_key", "grad_value")
GATES = (
    Gate("index", "curve", ("index",), "the cell at each step of the curve, by its bits"),
    Gate("inverse", "curve", ("inverse",), "the step at which each cell comes"),
    Gate("dgather", "permute", ("grad_input",), "the gradient of a gather", given=("gathered",)),
    Gate("tiles", "window", ("tiles",), "the pairs of tiles that a window needs",
         given=("output", "lse", "delta", *GRADIENTS)),
    Gate("attention", "", ("output", *GRADIENTS), "gradients through gather, attention and scatter"),
)  # fmt: skip
MOJO = ("index", "inverse", "dgather", "tiles")

# ---- Cases --------------------------------------------------------------------------------------------------


def cases(dims: Dims | None = None) -> list[Case]:
    """Return the default case and the adversarial ones; with `dims`, one of each order at those sizes.

    The first word of `values` is the order. The curve of a case has the smallest power of two that holds the
    grid.
    """
    if dims:
        return [Case(name, f"positions in {name} order", dims, f"{name} hard") for name in orders.ORDERS]
    return [
        Case("chapter", "small enough to print", DIMS, "hilbert plain"),
        Case("hard values", "means far from 0, grad_output follows V", (2, 2, 8, 8, 8, 1, 16), "hilbert hard",
             in_16_bits=True),
        Case("wide window", "a tile needs tiles that it does not touch", (1, 2, 16, 16, 4, 3, 16),
             "hilbert hard"),
        Case("row by row", "the order in which the grid is stored", (1, 2, 8, 8, 4, 2, 16), "row-major hard"),
        Case("z-order", "its steps jump", (2, 1, 8, 8, 4, 1, 16), "z-order hard"),
        Case("squares", "a grid of 8 x 8 squares, cut off at two edges", (1, 1, 12, 20, 4, 2, 32),
             "tiled hard"),
        Case("odd sizes", "sides without a power of two, no whole tile, twice more heads than a small grid",
             (3, 3, 5, 7, 5, 1, 16), "hilbert hard"),
        Case("many tiles",
             "neither height nor width is the side of a square, and tiles are few cells of the grid",
             (1, 1, 9, 28, 4, 2, 16), "hilbert hard"),
        Case("wide heads", "d is no multiple of a tile", (1, 1, 4, 6, 37, 2, 16), "hilbert hard"),
        Case("the whole grid", "every cell sees every other: dense attention", (1, 2, 6, 6, 4, 6, 16),
             "hilbert hard"),
        *not_finite(NOT_FINITE, (1, 2, 4, 4, 4, 1, 16)),
        *covering(AXES, ("hilbert hard",), lambda H, W, radius: (1, 1, H, W, 4, radius, 16)),
    ]  # fmt: skip


AXES = (listed_axis("H", 1, 3, 5), listed_axis("W", 1, 5, 33), listed_axis("radius", 0, 2, 9))
"""Axes of the cases: a cell, a row and a column, strips, grids; a curve larger than most; a window within a tile and beyond."""


NOT_FINITE = {"input": ("the tensor", "NaN"), "grad_gathered": ("its gradient", "NaN", "inf")}
"""Tensor -> its symbol, and how an element is computed. Only the gather's: the reference of the window gives NaN for
hidden keys."""


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return the input arrays of a case, in float64, rounded to `dtype`; integers as int32.

    These are input, grad_gathered, query, key, value and grad_output [B, N, L, d], order [L], and without
    axes side, width, radius and tile.
    """
    B, N, H, W, d, radius, tile = case.dims
    name, values = ("hilbert", "hard") if is_not_finite(case.values) else case.values.split()
    random = np.random.default_rng([seed, *case.dims])
    names = ("input", "grad_gathered", "query", "key", "value", "grad_output")
    arrays = {each: random.standard_normal((B, N, H * W, d)) for each in names}
    if values == "hard":
        # A common part moves a row's scores away from 0; a gradient with a mean and a part along V
        # makes delta large.
        for each in ("query", "key"):
            arrays[each] += 0.5
        arrays["value"] += 1
        arrays["grad_output"] += 0.5 + arrays["value"].mean(-2, keepdims=True)
    with_not_finite(arrays, case.values)
    order = orders.ORDERS[name](H, W)
    whole = {"order": order, "side": side_of(case.dims), "width": W, "radius": radius, "tile": tile}
    return {each: round_to_dtype(array, dtype) for each, array in arrays.items()} | {
        each: np.asarray(number, np.int32) for each, number in whole.items()
    }


def side_of(dims: Dims) -> int:
    """Return the side of the curve of a case: the smallest power of two that holds the grid."""
    _, _, H, W, *_ = dims
    return 1 << (max(H, W) - 1).bit_length()


# ---- Reference ----------------------------------------------------------------------------------------------


def reference(tensors: dict) -> dict:
    """Return PyTorch's results by masked dense attention over cells, in the dtype and on the device of the
    tensors.

    float64's are autograd's. Below it PyTorch too starts its backward pass from the saved output and lse, and
    is taken at the worst of several orders of the head dimension.
    """
    import torch

    if tensors["query"].dtype == torch.float64:
        dense = by_autograd(tensors)
    else:
        columns = ("query", "key", "value", "grad_output")
        dense = unluckiest(from_saved, tensors, columns, ("output", *GRADIENTS))
    return {**dense, **whole_numbers(tensors), **permute(tensors)}


def whole_numbers(tensors: dict) -> dict:
    """Return the curve and the tiles, which do not depend on the dtype."""
    import torch

    side, width, radius, tile = (int(tensors[name]) for name in ("side", "width", "radius", "tile"))
    index = orders.hilbert(side, side)
    order = tensors["order"].cpu().numpy()
    indices = {
        "index": index,
        "inverse": orders.inverse(index),
        "tiles": orders.window_tiles(order, width, radius, tile),
    }
    return {name: torch.tensor(array.astype(np.int32)) for name, array in indices.items()}


def permute(tensors: dict) -> dict:
    """Return the gathered rows, and the gradient of the tensor by autograd."""
    import torch

    tensor = tensors["input"].detach().requires_grad_()
    gather = tensor.index_select(2, tensors["order"].long())
    (grad,) = torch.autograd.grad(gather, tensor, tensors["grad_gathered"])
    return {"gathered": gather.detach(), "grad_input": grad}


def hidden(tensors: dict):
    """Return a mask that is True where a query does not see a key, both by their cells, [L, L]."""
    import torch

    cells = torch.arange(tensors["query"].shape[2], device=tensors["query"].device)
    far = [
        (each[:, None] - each).abs() > tensors["radius"]
        for each in (cells // tensors["width"], cells % tensors["width"])
    ]
    return far[0] | far[1]


def by_autograd(tensors: dict) -> dict:
    """Return output and gradients of masked dense attention, independent of the order of positions."""
    import torch

    names = ("query", "key", "value")
    query, key, value = (tensors[name].detach().requires_grad_() for name in names)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(hidden(tensors), -torch.inf)
    output = torch.softmax(scores, -1) @ value
    grads = torch.autograd.grad(output, (query, key, value), tensors["grad_output"])
    answers = {
        "output": output,
        "lse": torch.logsumexp(scores, -1),
        "delta": (tensors["grad_output"] * output).sum(-1),
        **dict(zip(GRADIENTS, grads, strict=True)),
    }
    return {name: tensor.detach() for name, tensor in answers.items()}


def from_saved(tensors: dict) -> dict:
    """Return the same from the saved lse and output. Sums are in float32 at least, and rounded once."""
    import torch

    dtype = tensors["query"].dtype
    accum = torch.float64 if dtype == torch.float64 else torch.float32
    names = ("query", "key", "value", "grad_output")
    query, key, value, grad_output = (tensors[name].to(accum) for name in names)
    scale = query.shape[-1] ** -0.5
    scores = (scale * (query @ key.mT)).masked_fill(hidden(tensors), -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    output = (torch.softmax(scores, -1) @ value).to(dtype)
    delta = (grad_output * output.to(accum)).sum(-1, keepdim=True)
    P = torch.exp(scores - lse)
    dS = scale * P * (grad_output @ value.mT - delta)
    narrow = {
        "output": output,
        "grad_query": dS @ key,
        "grad_key": dS.mT @ query,
        "grad_value": P.mT @ grad_output,
    }
    return {
        **{name: tensor.to(dtype) for name, tensor in narrow.items()},
        "lse": lse[..., 0],
        "delta": delta[..., 0],
    }


def terms(arrays: Arrays) -> dict[str, float]:
    """Return the size of the terms of dS = P * (dP - delta) in dQ and dK; for a cell that sees one key they
    cancel."""
    v = derive(arrays)
    sizes = v.P * (np.abs(v.dO @ v.V.swapaxes(-1, -2)) + np.abs(v.dot))
    return {
        "grad_query": float((v.scale * (sizes @ np.abs(v.K))).max(initial=0.0)),
        "grad_key": float((v.scale * (sizes.swapaxes(-1, -2) @ np.abs(v.Q))).max(initial=0.0)),
    }


# ---- Reports ------------------------------------------------------------------------------------------------


def multiply_adds(dims: Dims) -> int:
    """Return those of the two products of the forward pass, without the pairs of cells outside of every
    window."""
    B, N, H, W, d, radius, _ = dims
    return 2 * B * N * H * W * d * min(H, 2 * radius + 1) * min(W, 2 * radius + 1)


def ledger(dims: Dims, dtype: str) -> Ledger:
    """Return the bytes saved for the backward pass. PyTorch's attention saves its inputs: the gathered rows
    and the dense mask.

    The fused kernels save the original tensors, the output, a number for each row, and order and tiles once.
    """
    B, N, H, W, d, _, tile = dims
    element, accum = bytes_of(dtype), bytes_of(accum_dtype(dtype))
    rows, L = B * N * H * W, H * W
    kept = {"output": rows * d * element, "lse": rows * accum, "order": 4 * L}
    operands = ("query", "key", "value")
    return Ledger(
        saved_eager={**{f"gathered {name}": rows * d * element for name in operands}, **kept, "mask": L * L},
        saved_ours={**dict.fromkeys(operands, rows * d * element), **kept, "tiles": 4 * (-(-L // tile)) ** 2},
        between={"window": {"backward delta": rows * accum}},
    )


def derived_sizes(dims: Dims) -> dict[str, int]:
    """Return L cells of the grid, the cells (and steps) of the curve's square, and t tiles."""
    _, _, H, W, _, _, tile = dims
    square = side_of(dims) ** 2
    return {"L": H * W, "cells": square, "steps": square, "t": -(-H * W // tile)}


def describe_dims(dims: Dims) -> str:
    """Format as "a grid of 8 x 8 cells, query [2, 2, 64, 8], radius 1, tiles of 16"."""
    B, N, H, W, d, radius, tile = dims
    return f"a grid of {H} x {W} cells, query {[B, N, H * W, d]}, radius {radius}, tiles of {tile}"


# ---- Rungs --------------------------------------------------------------------------------------------------

MOJO_SIZES = {
    "L": "H * W",
    "side": "next_power_of_two(max(H, W))",
    "cells": "side * side",
    "steps": "side * side",
    "sizes": "WindowSizes(Int32(B * N), Int32(L), Int32(d), Int32(W), Int32(r), Int32(T))",
    "t": "sizes.tiles()",
}
NUMPY_RUNG = NumpyRung(
    file="in_numpy.py",
    about="the curve, the permutation and the tiles, on arrays",
    optional=True,
    gates=MOJO,
    names={"cells": "steps"},
)
TORCH_RUNG = TorchRung(
    file="in_torch.py",
    about="autograd.Functions on gathered rows",
    optional=True,
    gates=("dgather", "attention"),
    functions={
        "dgather": TorchFunction(
            "Gather",
            takes=("input", "order"),
            returns=("gathered",),
            gradients={"input": "grad_input"},
            grad_outputs=("grad_gathered",),
        ),
        "attention": TorchFunction(
            "WindowAttention",
            takes=("query", "key", "value", "order", "width", "radius"),
            returns=("output",),
            gradients={"query": "grad_query", "key": "grad_key", "value": "grad_value"},
            grad_outputs=("grad_output",),
        ),
    },
)

PUZZLE = Puzzle(
    name="p24",
    title="Hilbert-ordered attention: what an order of positions can and cannot buy",
    subject="Hilbert-Ordered Attention",
    gates=GATES,
    rungs=(NUMPY_RUNG, TORCH_RUNG, MojoRung(file="op/hilbert.mojo", gates=MOJO, sizes=MOJO_SIZES)),
    dims=DIMS,
    dim_names=("B", "N", "H", "W", "d", "r", "T"),
    cases=cases,
    inputs=inputs,
    reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    symptom=curve_symptom,
    terms=terms,
    forward=printed_names("index", "inverse", "gathered", "tiles", "output"),
    backward=printed_names("grad_input", *GRADIENTS),
    derived_sizes=derived_sizes,
    intermediate=("lse", "delta"),
    variants=VARIANTS,
    about_variants={
        "curve": "only the index and its inverse",
        "permute": "only the gather and its backward pass",
        "window": "only the tiles of the window, and attention within it",
    },
    multiply_adds=multiply_adds,
    ledger=ledger,
    describe_dims=describe_dims,
    demos=(
        Demo(
            "draw",
            "draw an order of a grid of any size (--draw --help: its flags)",
            ".drawing:main",
            options=True,
        ),
        Demo(
            "count",
            "count what each order of positions costs a window (--count --help: its flags)",
            ".counting:main",
            options=True,
        ),
    ),
)
