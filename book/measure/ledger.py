"""The byte ledger of puzzle 22: what every launch must read and write, computed from the shapes alone.

Each tensor counts once for every launch that touches it. That is a floor, the traffic of caches that never forget;
how much the threads really ask for is counted by the virtual GPU (`p22 --profile`).
"""

import math
from dataclasses import dataclass

GPT2_SMALL = (8, 1024, 768, 3072)
"""B, S, H and O of GPT-2 small's first MLP layer, with eight sequences: the large sizes of the book."""

FLOAT = 4  # bytes of a float32
SUM = 8  # of the float64 in which blocks add up the gradients of float32 parameters

SHAPES = {
    **{name: "RH" for name in ("x", "ln_out", "dln", "dx")},
    **{name: "RO" for name in ("output", "dy", "grad_output_t")},
    **{name: "H" for name in ("gamma", "beta", "dgamma", "dbeta")},
    **{name: "O" for name in ("bias", "db")},
    **{name: "HO" for name in ("W", "linear_weight_t", "dW")},
    **{name: "R" for name in ("mean", "rstd")},
    "row_sums": "R2",
}
SUMS = "sums_ln_weight sums_ln_bias sums_weight sums_bias"
SHAPES |= dict(zip(SUMS.split(), ("H", "H", "HO", "O"), strict=True))


@dataclass(frozen=True)
class Launch:
    """One launch: the tensors that it reads, writes, and adds to with atomics."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()


def launch(name: str, reads: str = "", writes: str = "", adds: str = "") -> Launch:
    """A launch, from names separated by spaces."""
    return Launch(name, tuple(reads.split()), tuple(writes.split()), tuple(adds.split()))


LAUNCHES = {
    ("forward", "unfused"): [
        launch("row_statistics", "x", "mean rstd"),
        launch("layernorm", "x mean rstd gamma beta", "ln_out"),
        launch("transpose", "W", "linear_weight_t"),
        launch("matmul", "ln_out linear_weight_t", "output"),
        launch("add_bias", "output bias", "output"),
    ],
    ("forward", "fused"): [launch("minimal_fused_forward", "x gamma beta W bias", "output mean rstd")],
    ("backward", "unfused"): [
        launch("matmul", "dy W", "dln"),
        launch("layernorm", "x mean rstd gamma beta", "ln_out"),
        launch("transpose", "dy", "grad_output_t"),
        launch("matmul", "grad_output_t ln_out", "dW"),
        launch("column_sums", "dy", "db"),
        launch("ln_backward_row_sums", "dln x mean rstd gamma", "row_sums"),
        launch("ln_backward_input", "row_sums dln x mean rstd gamma", "dx"),
        launch("ln_backward_parameters", "dln x mean rstd", "dgamma dbeta"),
    ],
    ("backward", "fused"): [
        launch("clear_gradients", "", SUMS),
        launch("minimal_fused_backward", "dy x mean rstd gamma beta W", "dx", SUMS),
        launch("convert_gradients", SUMS, "dgamma dbeta dW db"),
    ],
}


def size(tensor: str, dims: tuple[int, ...]) -> int:
    """The bytes of a tensor in float32 at sizes (B, S, H, O)."""
    B, S, H, O = dims
    letters = {"R": B * S, "H": H, "O": O, "2": 2}
    width = SUM if tensor.startswith("sums_") else FLOAT
    return width * math.prod(letters[letter] for letter in SHAPES[tensor])


def moved(direction: str, variant: str, dims: tuple[int, ...]) -> int:
    """The least bytes that the launches of a pass move."""
    return sum(
        size(tensor, dims)
        for step in LAUNCHES[direction, variant]
        for tensor in (*step.reads, *step.writes, *step.adds)
    )
