"""Puzzle 24, Hilbert-ordered attention: gates, rungs, cases, inputs and reference.

B = batch, N = heads, H and W = rows and columns of the grid, L = H * W, d = head dimension, r = radius of the
window, T = positions per tile. Tensors [B, N, L, d] have one row per cell of the grid, row-major; `order` [L]
is the cell at each step.
"""

import numpy as np

from harness.puzzles.p24 import orders
from harness.puzzles.p24.derivation import derive
from harness.puzzles.p24.mistakes import MISTAKES, explain_wrong_curve
from harness.spec.baseline import compute_worst_baseline
from harness.spec.cases import (
    is_nonfinite,
    make_covering_cases,
    make_listed_axis,
    make_nonfinite_cases,
    write_nonfinite,
)
from harness.spec.ops import ACCUM_DTYPE, Argument, Call, OpSpec, Scalar, get_accum_dtype, get_itemsize
from harness.spec.puzzle import Arrays, Case, Demo, Dims, Gate, Ledger, Puzzle, map_printed_names
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung, NumpyRung, TorchFunction, TorchRung

DIMS = (1, 1, 4, 4, 4, 1, 16)
"""The default sizes: B, N, H, W, d, r, T."""

ROWS = Argument(("B", "N", "L", "d"))
ROW = Argument(("B", "N", "L"), ACCUM_DTYPE)
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
"""One variant per part of the puzzle, so that a gate compiles only its own part."""

GRADIENTS = ("grad_query", "grad_key", "grad_value")
GATES = (
    Gate("index", "curve", ("index",), "the cell at each step of the curve, from the step's bits"),
    Gate("inverse", "curve", ("inverse",), "the step of each cell"),
    Gate("dgather", "permute", ("grad_input",), "the gradient of a gather", provided_quantities=("gathered",)),
    Gate("tiles", "window", ("tiles",), "the pairs of tiles that a window needs",
         provided_quantities=("output", "lse", "delta", *GRADIENTS)),
    Gate("attention", "", ("output", *GRADIENTS), "gradients through gather, attention and scatter"),
)  # fmt: skip
MOJO_GATES = ("index", "inverse", "dgather", "tiles")

# ---- Cases --------------------------------------------------------------------------------------------------


def cases(dims: Dims | None = None) -> list[Case]:
    """Return the default case and the adversarial ones; with `dims`, one case per order at those sizes.

    The first word of `values` is the order. A case's curve fills the smallest square that contains the grid and
    whose side is a power of two.
    """
    if dims:
        return [Case(name, f"positions in {name} order", dims, f"{name} hard") for name in orders.ORDERS]
    return [
        Case("chapter", "small enough to print", DIMS, "hilbert plain"),
        Case("hard values", "means far from 0, grad_output follows V", (2, 2, 8, 8, 8, 1, 16), "hilbert hard",
             in_16_bits=True),
        Case("wide window", "a tile needs tiles that are not adjacent to it", (1, 2, 16, 16, 4, 3, 16),
             "hilbert hard"),
        Case("row by row", "the order in which the grid is stored", (1, 2, 8, 8, 4, 2, 16), "row-major hard"),
        Case("z-order", "an order whose steps jump", (2, 1, 8, 8, 4, 1, 16), "z-order hard"),
        Case("squares", "a grid of 8 x 8 squares, cut off at two edges", (1, 1, 12, 20, 4, 2, 32),
             "tiled hard"),
        Case("odd sizes", "no side is a power of two, no tile is full, more heads than a small grid has blocks",
             (3, 3, 5, 7, 5, 1, 16), "hilbert hard"),
        Case("many tiles",
             "a rectangle with many tiles, of which a window needs few",
             (1, 1, 9, 28, 4, 2, 16), "hilbert hard"),
        Case("wide heads", "d is not a multiple of a tile", (1, 1, 4, 6, 37, 2, 16), "hilbert hard"),
        Case("the whole grid", "every cell sees every other: dense attention", (1, 2, 6, 6, 4, 6, 16),
             "hilbert hard"),
        *make_nonfinite_cases(NONFINITE_VALUES, (1, 2, 4, 4, 4, 1, 16)),
        *make_covering_cases(AXES, ("hilbert hard",), lambda H, W, radius: (1, 1, H, W, 4, radius, 16)),
    ]  # fmt: skip


AXES = (make_listed_axis("H", 1, 3, 5), make_listed_axis("W", 1, 5, 33), make_listed_axis("radius", 0, 2, 9))
"""Axes of the cases: single cells, rows, columns and grids, curves larger than the grid, small and large windows."""


NONFINITE_VALUES = {"input": ("the tensor", "NaN"), "grad_gathered": ("its gradient", "NaN", "inf")}
"""Tensor -> its symbol, and the non-finite values that cases write into it. Only tensors of the gather: the
reference of the window's attention would return NaN for hidden keys."""


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return a case's input, grad_gathered, query, key, value and grad_output [B, N, L, d], order [L], and the
    scalars side, width, radius and tile. Floats are float64, rounded to `dtype`; integers are int32.
    """
    B, N, H, W, d, radius, tile = case.dims
    name, values = ("hilbert", "hard") if is_nonfinite(case.values) else case.values.split()
    random = np.random.default_rng([seed, *case.dims])
    names = ("input", "grad_gathered", "query", "key", "value", "grad_output")
    arrays = {tensor_name: random.standard_normal((B, N, H * W, d)) for tensor_name in names}
    if values == "hard":
        # A common offset moves a row's scores away from 0; a gradient with a mean and a component along V
        # makes delta large.
        for tensor_name in ("query", "key"):
            arrays[tensor_name] += 0.5
        arrays["value"] += 1
        arrays["grad_output"] += 0.5 + arrays["value"].mean(-2, keepdims=True)
    write_nonfinite(arrays, case.values)
    order = orders.ORDERS[name](H, W)
    scalars = {"order": order, "side": get_curve_side(case.dims), "width": W, "radius": radius, "tile": tile}
    return {tensor_name: round_to_dtype(array, dtype) for tensor_name, array in arrays.items()} | {
        tensor_name: np.asarray(number, np.int32) for tensor_name, number in scalars.items()
    }


def get_curve_side(dims: Dims) -> int:
    """Return the side of a case's curve, the smallest power of two that is at least the grid's sides."""
    _, _, H, W, *_ = dims
    return 1 << (max(H, W) - 1).bit_length()


# ---- Reference ----------------------------------------------------------------------------------------------


def reference(tensors: dict) -> dict:
    """Return PyTorch's results, with masked dense attention over cells.

    In float64, they are autograd's. Below float64, the backward pass starts from the saved output and lse, and
    each result is the least accurate of several orders of the head dimension, of both formulas of delta, from
    the output and from the probabilities, and of rows in cell order and in step order.
    """
    import torch

    if tensors["query"].dtype == torch.float64:
        dense = compute_with_autograd(tensors)
    else:
        columns = ("query", "key", "value", "grad_output")
        quantities = ("output", *GRADIENTS)
        others = compute_from_probabilities, compute_in_step_order
        dense = compute_worst_baseline(
            compute_from_saved, tensors, columns, quantities, other_formulas=others
        )
    return {**dense, **compute_integers(tensors), **gather_with_autograd(tensors)}


def compute_integers(tensors: dict) -> dict:
    """Return the curve and the tiles, which do not depend on the dtype."""
    import torch

    side, width, radius, tile = (int(tensors[name]) for name in ("side", "width", "radius", "tile"))
    index = orders.make_hilbert_order(side, side)
    order = tensors["order"].cpu().numpy()
    tiles = orders.find_window_tiles(order, width, radius, tile)
    indices = {"index": index, "inverse": orders.invert_order(index), "tiles": tiles}
    return {name: torch.tensor(array.astype(np.int32)) for name, array in indices.items()}


def gather_with_autograd(tensors: dict) -> dict:
    """Return the gathered rows, and autograd's gradient of the input."""
    import torch

    tensor = tensors["input"].detach().requires_grad_()
    gathered = tensor.index_select(2, tensors["order"].long())
    (grad,) = torch.autograd.grad(gathered, tensor, tensors["grad_gathered"])
    return {"gathered": gathered.detach(), "grad_input": grad}


def make_hidden_mask(tensors: dict):
    """Return a mask [L, L] over cells that is True where a query does not see a key."""
    import torch

    cells = tensors.get("cells", torch.arange(tensors["query"].shape[2], device=tensors["query"].device))
    axes = (cells // tensors["width"], cells % tensors["width"])
    rows, columns = ((axis[:, None] - axis).abs() > tensors["radius"] for axis in axes)
    return rows | columns


def compute_with_autograd(tensors: dict) -> dict:
    """Return the output and gradients of masked dense attention, which do not depend on the order."""
    import torch

    names = ("query", "key", "value")
    query, key, value = (tensors[name].detach().requires_grad_() for name in names)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(make_hidden_mask(tensors), -torch.inf)
    output = torch.softmax(scores, -1) @ value
    grads = torch.autograd.grad(output, (query, key, value), tensors["grad_output"])
    results = {
        "output": output,
        "lse": torch.logsumexp(scores, -1),
        "delta": (tensors["grad_output"] * output).sum(-1),
        **dict(zip(GRADIENTS, grads, strict=True)),
    }
    return {name: tensor.detach() for name, tensor in results.items()}


def compute_from_saved(tensors: dict, delta_from_probabilities: bool = False) -> dict:
    """Return the results of `compute_with_autograd`, computed from the saved lse and output.

    delta comes from the output or, if `delta_from_probabilities`, from the probabilities. Sums are in float32 or wider
    and rounded once.
    """
    import torch

    dtype = tensors["query"].dtype
    accum = torch.float64 if dtype == torch.float64 else torch.float32
    names = ("query", "key", "value", "grad_output")
    query, key, value, grad_output = (tensors[name].to(accum) for name in names)
    scale = query.shape[-1] ** -0.5
    scores = (scale * (query @ key.mT)).masked_fill(make_hidden_mask(tensors), -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    output = (torch.softmax(scores, -1) @ value).to(dtype)
    delta = (grad_output * output.to(accum)).sum(-1, keepdim=True)
    P, dP = torch.exp(scores - lse), grad_output @ value.mT
    dS = scale * P * (dP - ((dP * P).sum(-1, keepdim=True) if delta_from_probabilities else delta))
    gradients = dict(zip(GRADIENTS, (dS @ key, dS.mT @ query, P.mT @ grad_output), strict=True))
    rounded = {name: tensor.to(dtype) for name, tensor in gradients.items()}
    return {"output": output, **rounded, "lse": lse[..., 0], "delta": delta[..., 0]}


def compute_from_probabilities(tensors: dict) -> dict:
    """Return the gradients of query and key, with delta computed as the row sum of dP * P."""
    results = compute_from_saved(tensors, delta_from_probabilities=True)
    return {name: results[name] for name in ("grad_query", "grad_key")}


def compute_in_step_order(tensors: dict) -> dict:
    """Return the results of `compute_from_probabilities`, computed on rows gathered in step order."""
    order = tensors["order"].long()
    names = ("query", "key", "value", "grad_output")
    rows = {name: tensors[name][:, :, order] for name in names}
    results = compute_from_probabilities({**tensors, **rows, "cells": order})
    return {name: tensor[:, :, order.argsort()] for name, tensor in results.items()}


def terms(arrays: Arrays) -> dict[str, float]:
    """Return the magnitude of the terms of dS = P * (dP - delta) in dQ and dK; with one key, they cancel."""
    v = derive(arrays)
    magnitudes = v.P * (np.abs(v.dO @ v.V.swapaxes(-1, -2)) + np.abs(v.dot))
    return {
        "grad_query": float((v.scale * (magnitudes @ np.abs(v.K))).max(initial=0.0)),
        "grad_key": float((v.scale * (magnitudes.swapaxes(-1, -2) @ np.abs(v.Q))).max(initial=0.0)),
    }


# ---- Reports ------------------------------------------------------------------------------------------------


def multiply_adds(dims: Dims) -> int:
    """Return the multiply-adds of the forward pass, counting only pairs of cells within a window."""
    B, N, H, W, d, radius, _ = dims
    return 2 * B * N * H * W * d * min(H, 2 * radius + 1) * min(W, 2 * radius + 1)


def ledger(dims: Dims, dtype: str) -> Ledger:
    """Return the bytes saved for the backward pass, and of temporaries.

    PyTorch's attention saves the gathered rows and the dense mask. The fused kernels save the original tensors,
    the output, one number per row, the order and the tiles.
    """
    B, N, H, W, d, _, tile = dims
    itemsize, accum_size = get_itemsize(dtype), get_itemsize(get_accum_dtype(dtype))
    rows, L = B * N * H * W, H * W
    saved = {"output": rows * d * itemsize, "lse": rows * accum_size, "order": 4 * L}
    operands = ("query", "key", "value")
    return Ledger(
        eager_saved={
            **{f"gathered {name}": rows * d * itemsize for name in operands},
            **saved,
            "mask": L * L,
        },
        our_saved={
            **dict.fromkeys(operands, rows * d * itemsize),
            **saved,
            "tiles": 4 * (-(-L // tile)) ** 2,
        },
        temporaries={"window": {"backward delta": rows * accum_size}},
    )


def derive_sizes(dims: Dims) -> dict[str, int]:
    """Return the numbers of the grid's cells, L, of the curve's cells and steps, and of tiles, t."""
    _, _, H, W, _, _, tile = dims
    curve_cells = get_curve_side(dims) ** 2
    return {"L": H * W, "cells": curve_cells, "steps": curve_cells, "t": -(-H * W // tile)}


def describe_dims(dims: Dims) -> str:
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
    note="the curve, the permutation and the tiles, in NumPy",
    optional=True,
    gates=MOJO_GATES,
    step_names={"cells": "steps"},
)
TORCH_RUNG = TorchRung(
    file="in_torch.py",
    note="autograd.Functions on gathered rows",
    optional=True,
    gates=("dgather", "attention"),
    functions={
        "dgather": TorchFunction(
            "Gather",
            arguments=("input", "order"),
            returns=("gathered",),
            gradients={"input": "grad_input"},
            grad_outputs=("grad_gathered",),
        ),
        "attention": TorchFunction(
            "WindowAttention",
            arguments=("query", "key", "value", "order", "width", "radius"),
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
    rungs=(NUMPY_RUNG, TORCH_RUNG, MojoRung(file="op/hilbert.mojo", gates=MOJO_GATES, sizes=MOJO_SIZES)),
    dims=DIMS,
    dim_names=("B", "N", "H", "W", "d", "r", "T"),
    list_cases=cases,
    make_inputs=inputs,
    compute_reference=reference,
    derive=derive,
    mistakes=MISTAKES,
    find_symptom=explain_wrong_curve,
    compute_term_magnitudes=terms,
    forward=map_printed_names("index", "inverse", "gathered", "tiles", "output"),
    backward=map_printed_names("grad_input", *GRADIENTS),
    compute_derived_sizes=derive_sizes,
    intermediate=("lse", "delta"),
    variants=VARIANTS,
    variant_help={
        "curve": "only the index and its inverse",
        "permute": "only the gather and its backward pass",
        "window": "only the tiles of the window, and attention within it",
    },
    count_multiply_adds=multiply_adds,
    make_ledger=ledger,
    format_custom_dims=describe_dims,
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
