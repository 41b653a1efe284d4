"""Puzzle 27, a GPT trained without `loss.backward()`: rungs, gates, and cases for NumPy and the kernels.

Names: B = sequences, T = tokens per sequence, C = channels, V = vocabulary.
"""

from dataclasses import replace

import numpy as np

from harness.puzzles.p27 import kernels
from harness.puzzles.p27.derivation import IGNORE_INDEX
from harness.spec.cases import (
    CANCELLING,
    draw_cancelling,
    make_covering_cases,
    make_listed_axis,
    make_nonfinite_cases,
    make_tiled_axis,
    write_nonfinite,
)
from harness.spec.puzzle import Arrays, Case, Demo, Dims, Gate, Puzzle
from harness.spec.rounding import round_to_dtype
from harness.spec.rungs import MojoRung, NumpyRung, Rung

DIMS = (2, 4, 6, 8)
"""The default B, T, C, V."""
OUTPUTS = 5
"""O, the output features of the linear layer."""

NUMPY_GATES = {
    "loss": (("loss",), "cross-entropy: ignored places, label smoothing"),
    "dlogits": (("grad_logits",), "p - y, divided by the number of places that count"),
    "dgelu": (("grad_gelu",), "the derivative of GELU in its tanh form"),
    "dlinear": (("grad_x", "grad_W", "grad_b"), "a product, for every token of every sequence"),
    "dembedding": (("grad_token", "grad_position"), "tables that are indexed by tokens"),
    "dresidual": (("grad_stream",), "a residual connection"),
    "dtied": (("grad_tied",), "one tensor, two gradients"),
}
TAPE_GATES = (
    Gate("tape", description="how many bytes are saved"),
    Gate("embedding", description="two tables and their gradients"),
    Gate("layernorm", description="puzzle 22's, which saves what its backward pass needs"),
    Gate("attention", description="puzzle 23's, with a causal mask"),
    Gate("gelu", description="the tanh form"),
    Gate("cross_entropy", description="the loss, where the backward pass starts"),
    Gate("block", description="right order, residual branches added"),
    Gate("model", description="every gradient of every parameter"),
    Gate("clip", description="the norm of all gradients, limited"),
    Gate("adamw", description="the optimizer, decay apart"),
    Gate("step", description="a training step, and the next"),
)


def cases(dims: Dims | None = None) -> list[Case]:
    """Return the default case and the adversarial ones; with `dims`, two cases at those sizes."""
    default = Case("chapter", "small enough to print", dims or DIMS, "smoothed")
    unsmoothed = Case("no smoothing", "y is 1 on the target", dims or (3, 5, 4, 7), "plain")
    if dims:
        return [default, unsmoothed]
    return [
        default,
        unsmoothed,
        Case("large logits", "exp(800) is infinite", (2, 3, 4, 5), "large"),
        Case("one sequence", "no sum over the batch", (1, 7, 3, 4), "smoothed"),
        Case("one token", "no sum over the places", (5, 1, 4, 9), "smoothed"),
        Case("few words", "every token occurs often", (4, 9, 5, 2), "smoothed", in_16_bits=True),
        Case("many places", "more of them than a block has threads", (2, kernels.THREADS - 40, 2, 3), "plain"),
        Case("sums that cancel",
             "in 16-bit types, a token's places leave little of one term, and so does p - 1: neither may be rounded on the way",
             (2, 33, 6, 5), CANCELLING, in_16_bits=True),
        *make_covering_cases(AXES, ("plain",), lambda places, C, V: (*POSITION_SHAPES[places], C, V)),
    ]  # fmt: skip


AXES = (
    make_listed_axis("places", 1, 6),
    make_tiled_axis("channels", kernels.CHUNK),
    make_tiled_axis("vocabulary", kernels.THREADS, 3 * kernels.THREADS + 5),
)
"""Axes that the kernels tile: logits by a block's threads, gradients by chunks."""
POSITION_SHAPES = {1: (1, 1), 6: (2, 3)}
LONG_CASE = Case("long", "more chunks than a block has threads", (1, kernels.THREADS + 1, kernels.CHUNK, 1), "plain",
            variant="clip")  # fmt: skip
"""A case only for the kernels, whose second stage of the norm has a loop."""
NONFINITE_VALUES = {
    "loss": {"logits": ("z", "NaN", "-inf")},
    "gelu": {"x": ("x", "NaN"), "dx": ("dx", "inf")},
    "embedding": {"dx": ("dx", "inf")},
    "adamw": {"dx": ("dx", "NaN")},
    "clip": {"dx": ("dx", "inf", "NaN")},
}
"""Variant -> tensor -> its symbol in the book, and the non-finite values of cases; only for the kernels."""
FAR_CASE = Case("far from 0",
           "of logits near 4096 or -4096 a rounded lse has no digits left for a loss, and exp(z) is inf or 0",
           (4, 9, 2, 8), "far", variant="loss")  # fmt: skip
"""A case only for the kernels, whose lse is rounded to float32."""
GATE_CASES = (
    LONG_CASE,
    FAR_CASE,
    *(
        replace(case, variant=name)
        for name, values in NONFINITE_VALUES.items()
        for case in make_nonfinite_cases(values, DIMS)
    ),
)


def inputs(case: Case, dtype: str, seed: int) -> Arrays:
    """Return random inputs for `derivation.py`; a third of the targets are ignored (never all)."""
    B, T, C, V = case.dims
    random = np.random.default_rng([seed, *case.dims])

    def normal(*shape: int) -> np.ndarray:
        return round_to_dtype(random.standard_normal(shape) + 0.25, dtype)

    targets = random.integers(V, size=(B, T))
    targets.reshape(-1)[1::3] = IGNORE_INDEX
    # Every second sequence has logits below 0, so that a running maximum that starts at 0 stays there.
    offset = (case.values == "far") * 4096.0 * (-1) ** np.arange(B)[:, None, None]
    arrays: Arrays = {
        "tokens": random.integers(V, size=(B, T)),
        "targets": targets,
        "x": normal(B, T, C),
        "dx": normal(B, T, C),
        "dy": normal(B, T, OUTPUTS),
        "W": normal(OUTPUTS, C),
        "A": normal(C, C),
        "logits": round_to_dtype(normal(B, T, V) * (800 if case.values == "large" else 2) + offset, dtype),
        "smoothing": np.asarray(0.1 if case.values == "smoothed" else 0.0),
        "V": np.asarray(V),
    }
    if case.values == CANCELLING:
        arrays |= make_cancelling_values(arrays, random, cancel=dtype in ("float16", "bfloat16"))
    write_nonfinite(arrays, case.values)
    moments = {"mean": normal(B, T, C), "square": round_to_dtype(normal(B, T, C) ** 2, dtype)}
    return arrays | moments | kernels.sort_positions(arrays["tokens"], V)


def make_cancelling_values(arrays: Arrays, random: np.random.Generator, cancel: bool) -> Arrays:
    """Return tokens, dx and logits whose sums and differences reveal rounding to 16 bits.

    Groups of positions that cancel are distributed over the tokens, so that a token's sum grows before it
    shrinks; the probability of each target is near 1.
    """
    B, T, C = arrays["dx"].shape
    dx, group = draw_cancelling(B * T, C, random, cancel)
    boost = (arrays["targets"][..., None] == np.arange(int(arrays["V"]))) * 5.0
    return {
        "tokens": group.reshape(B, T) % arrays["V"],
        "dx": dx.reshape(B, T, C) / 16,
        "logits": np.round(2 * arrays["logits"]) / 8 + boost,
    }


NUMPY_RUNG = NumpyRung(
    file="in_numpy.py",
    title="The parts, in NumPy",
    gates=tuple(NUMPY_GATES),
    returns={gate: names for gate, (names, _) in NUMPY_GATES.items()},
    step_names={"dtied.dlogits": "grad_logits"},
)
TAPE_RUNG = Rung(
    id="tape",
    file="tape.py",
    gates=tuple(gate.id for gate in TAPE_GATES),
    checker=".checker:TapeChecker",
    title="The tape, in PyTorch without autograd",
    # Functions run as they are in the file, so callees must be correct first.
    dependencies={
        "block": ("layernorm", "attention", "gelu"),
        "model": ("embedding", "block", "layernorm", "cross_entropy"),
        "step": ("model", "clip", "adamw"),
    },
)
MOJO_RUNG = MojoRung(
    file="op/parts.mojo",
    gates=tuple(gate.id for gate in kernels.GATES),
    title="The parts without a kernel so far, in Mojo",
    sizes=kernels.SIZES,
    dependencies={
        "adamw_update": ("correction",),
        "grad_norm": ("square_sums",),
        "clip_gradients": ("square_sums", "grad_norm"),
    },
)

PUZZLE = Puzzle(
    name="p27",
    title="A GPT trained without loss.backward()",
    subject="GPT",
    gates=(
        *(Gate(id, "", names, about) for id, (names, about) in NUMPY_GATES.items()),
        *TAPE_GATES,
        *kernels.GATES,
    ),
    rungs=(NUMPY_RUNG, TAPE_RUNG, MOJO_RUNG),
    every_rung=True,
    dims=DIMS,
    dim_names=("B", "T", "C", "V"),
    list_cases=cases,
    gate_cases=GATE_CASES,
    compute_derived_sizes=kernels.derive_sizes,
    make_inputs=inputs,
    compute_reference=kernels.reference,
    derive=kernels.derive,
    mistakes=kernels.MISTAKES,
    find_symptom=kernels.explain_loss_error,
    compute_propagated_errors=kernels.propagate_rounding,
    forward=kernels.PRINTED_NAMES,
    backward={name: name for name in kernels.QUANTITIES if name not in kernels.FORWARD},
    variants=kernels.VARIANTS,
    variant_help=kernels.VARIANT_DESCRIPTIONS,
    demos=(
        Demo(
            "compare",
            "one step by hand and one by autograd: every activation and gradient side by side",
            ".compare:main",
            options=True,
        ),
        Demo(
            "train",
            "train a tiny GPT by hand on the book's text (--train --help: its flags)",
            ".train:main",
            options=True,
            finale=True,
        ),
    ),
)
