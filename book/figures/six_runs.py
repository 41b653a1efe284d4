"""Six runs of a file, five of them edited as in `solutions/pNN/wrong`: the picture that opens a museum page."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from book.figures.figures import ROOT, Drawing
from harness.check import zoo
from harness.check.python_files import load_module

WALKS = (
    "numpy_index_flip_forgotten", "numpy_index_exchanged", "numpy_index_turn_forgotten", "numpy_index_plain_bits", "",
    "numpy_index_inverse_meant",
)  # fmt: skip
RINGS = (
    "numpy_backwards",
    "numpy_local_index",
    "numpy_not_renormalised",
    "",
    "numpy_step_too_few",
    "numpy_mask_turned",
)
SLOPES = (
    "numpy_dgelu_first_term", "", "numpy_dgelu_no_x", "numpy_dgelu_brackets", "numpy_dgelu_sigmoid",
    "numpy_dgelu_second_term",
)  # fmt: skip
"""The wrong solutions as they are drawn, without their names; "" is the solution."""


def run(puzzle: str, name: str) -> Mapping[str, Any]:
    """Load the NumPy file of a puzzle with one wrong edit, or the solution."""
    wrong = [wrong.build_target() for wrong in zoo.load_wrong_solutions(puzzle) if wrong.name == name]
    return load_module(wrong[0] if wrong else ROOT / "solutions" / puzzle / "in_numpy.py")


def walks(side: int = 8) -> str:
    """Draw six walks through a small grid, one of them right; a dot marks where each begins."""
    drawing = Drawing(
        352,
        "Six walks through 8 x 8 cells, numbered. Walks 2 and 5 never jump: 2 begins to the right, 5 begins downwards.",
    )
    for number, name in enumerate(WALKS):
        left, top = 10 + 158 * (number % 3), 28 + 176 * (number // 3)
        drawing.text(left + 72, top - 10, str(number + 1))
        drawing.box(left, top, 144, 144, shade=0.04, thick=0.4, radius=0)
        cells = run("p24", name)["index"](np.arange(side**2), side).tolist()
        places = [(left + 18 * (cell % side) + 9, top + 18 * (cell // side) + 9) for cell in cells]
        for (x0, y0), (x1, y1) in pairwise(places):
            jump = max(abs(x1 - x0), abs(y1 - y0)) > 18
            drawing.segment(x0, y0, x1, y1, thick=0.7 if jump else 2, dash="2 2" if jump else "")
        drawing.box(places[0][0] - 5, places[0][1] - 5, 10, 10, shade=1, radius=5)
    return drawing.svg()


def weights(name: str, ranks: int = 4, length: int = 16) -> np.ndarray:
    """Return what each query takes from each key, [query, key], in a causal ring whose scores are equal."""
    ring = run("p25", name)
    held = [[each] for each in ring["cut"](length, ranks)]
    zeros = [np.zeros((1, 1, length // ranks, length))] * ranks
    values = list(np.split(np.eye(length)[None, None], ranks, 2))  # a unit matrix: the output is the weights
    out, _ = ring["ring_forward"](zeros, zeros, values, held, 1.0, True)
    return np.concatenate(out, 2)[0, 0]


def rings() -> str:
    """Draw the weights of six causal rings, one of them right: a row for each query, darker where it takes too much."""
    side, apart = 8, 162
    drawing = Drawing(
        326,
        "Six squares of 16 queries by 16 keys, numbered. In square 4 the lower left triangle is evenly grey, and nothing else is.",
    )
    for number, name in enumerate(RINGS):
        x0, y0 = 8 + apart * (number % 3), 24 + apart * (number // 3)
        taken = weights(name)
        length = len(taken)
        drawing.text(x0 + side * length / 2, y0 - 8, str(number + 1))
        for (query, key), weight in np.ndenumerate(taken):
            if weight:
                shade = round(min(1, weight * (query + 1) / 2.5), 2)
                drawing.box(x0 + side * key, y0 + side * query, side, side, shade=shade, thick=0, radius=0)
        for at in range(0, side * length + 1, side * length // 4):
            drawing.segment(x0 + at, y0, x0 + at, y0 + side * length, opacity=0.4)
            drawing.segment(x0, y0 + at, x0 + side * length, y0 + at, opacity=0.4)
    return drawing.svg()


def slopes() -> str:
    """Draw six slopes of GELU, one of them right, each over GELU itself."""
    x = np.linspace(-4, 4, 161)
    gelu = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    drawing = Drawing(
        300,
        "Six slopes of GELU, numbered, each over GELU itself. Slope 1 never falls below 0, 3 is 0.9 at 0, and 6 goes to 0 on "
        "the right; 2, 4 and 5 look alike.",
    )
    for number, name in enumerate(SLOPES):
        left, zero = 8 + 160 * (number % 3), 116 + 146 * (number // 3)
        drawing.text(left + 72, zero - 94, str(number + 1))
        drawing.segment(left, zero, left + 144, zero, opacity=0.4)
        drawing.segment(left + 72, zero + 20, left + 72, zero - 84, opacity=0.4)
        for level in (0.5, 1):
            drawing.segment(left, zero - 60 * level, left + 144, zero - 60 * level, opacity=0.15)
        for values, low, thick, dash in (
            (gelu, gelu < 1.35, 1, "3 4"),
            (run("p27", name)["dgelu"](x, np.ones_like(x)), x == x, 2, ""),
        ):
            places = zip(left + 18 * (x[low] + 4), zero - 60 * values[low], strict=True)
            drawing.polyline(places, thick=thick, dash=dash)
    return drawing.svg()


FILES = {"six_walks.svg": walks, "six_rings.svg": rings, "six_slopes.svg": slopes}
