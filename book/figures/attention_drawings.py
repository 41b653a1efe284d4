"""Drawings for puzzle 23's pages: softmax's gradient, and the matrix products of attention."""

import numpy as np

from book.figures.figures import LEGIBLE, Drawing, svgs, two_digits


def softmax_jacobians() -> str:
    """Jacobians of softmax, diag(p) - p p^T, from even probabilities to a nearly sure one."""
    drawing = Drawing(200, "Three Jacobians of softmax, a number in each square; each row adds up to 0.")
    cell = 48
    for number, p in enumerate(np.array(((1, 1, 1), (8, 1, 1), (98, 1, 1))) / ((3,), (10,), (100,))):
        left, jacobian = 4 + 162 * number, np.diag(p) - np.outer(p, p)
        drawing.text(left + 1.5 * cell, 18, f"p = ({', '.join(f'{share:.2g}' for share in p)})")
        for (i, j), value in np.ndenumerate(jacobian):
            x, y, shade = left + cell * j, 32 + cell * i, 1.2 * abs(value)
            drawing.labelled(x, y, cell - 3, cell - 3, two_digits(value), shade=shade)
    drawing.text(240, 194, "a row for each probability, a column for each score")
    return drawing.svg()


def softmax_areas() -> str:
    """A row of ds as areas: bars as wide as p and as high as dp, between their ends and the weighted mean."""
    p, dp = np.array((0.5, 0.3, 0.2)), np.array((1, 4, -1))
    mean = float(p @ dp)
    ds = p * (dp - mean)
    drawing = Drawing(
        252,
        f"Bars as wide as p, {', '.join(f'{share:g}' for share in p)}, and as high as dp, {', '.join(map(str, dp))}. Their weighted mean is "
        f"{mean:g}; the areas between the bars' ends and the mean are ds, {', '.join(f'{area:g}' for area in ds)}.",
    )
    left, width, unit, zero = 56, 350, 28, 138
    x = np.concatenate(([0], p.cumsum())) * width + left
    for at, wide_, height, share, area in zip(x, p * width, dp, p, ds, strict=False):
        drawing.box(at, zero - max(height, 0) * unit, wide_, abs(height) * unit, shade=0.04)
        drawing.box(at, zero - max(height, mean) * unit, wide_, abs(height - mean) * unit, shade=0.4, thick=0)
        for y, words in ((194, f"{share:g}"), (216, str(height)), (238, f"{area:g}")):
            drawing.text(at + wide_ / 2, y, words.replace("-", "−"))
    drawing.segment(left, zero, left + width, zero)
    drawing.segment(left - 6, zero - mean * unit, left + width + 6, zero - mean * unit, thick=2.5)
    drawing.text(left + width + 10, zero - mean * unit + 5, f"D = {mean:g}", anchor="start")
    drawing.text(left - 8, zero + 5, "0", anchor="end")
    for y, words in ((194, "p"), (216, "dp"), (238, "ds")):
        drawing.text(left - 8, y, words, anchor="end")
    return drawing.svg()


def five_products() -> str:
    """The products of attention, forward and backward, to scale; a factor that is read transposed is shaded."""
    sides = {"S": 56, "T": 84, "d": 48}
    shapes = {"P": "ST", "dP": "ST", "dS": "ST", "V": "Td", "K": "Td", "dV": "Td", "dK": "Td"}
    products = (
        (2, 4, "O = P V"), (270, 4, "dK = dSᵀ Q"), (2, 100, "dV = Pᵀ dO"), (216, 100, "dP = dO Vᵀ"), (2, 196, "dQ = dS K"),
    )  # fmt: skip
    drawing = Drawing(
        284, "; ".join(words for *_, words in products) + ": each product with the sides of its matrices."
    )
    for x, y, words in products:
        for name in words.split():
            if name == "=":
                drawing.text(x - 15, y + 30, "=")
                continue
            rows, columns = shapes.get(name.removesuffix("ᵀ"), "Sd")[:: -1 if name.endswith("ᵀ") else 1]
            shade = LEGIBLE if name.endswith("ᵀ") else 0.04
            drawing.labelled(
                x, y, sides[columns], sides[rows], name, f"{rows} × {columns}", shade=shade, size=14
            )
            x += sides[columns] + (30 if name == words.split()[0] else 12)
    return drawing.svg()


def delta_twice() -> str:
    """A row of dP times P, and of dO times O: the two ways to one sum, to scale for sixteen times as many keys as elements of a head."""
    drawing = Drawing(
        206,
        "A row sum over T keys from two matrices of S by T, and the same number over d elements from two matrices of S by d.",
    )
    for y, names, columns, width, right in (
        (26, ("dP", "P"), "T", 176, 204),
        (120, ("dO", "O"), "d", 11, 94),
    ):
        for x, name in zip((4, right), names, strict=True):
            drawing.box(x, y, width, 60, shade=0.06)
            drawing.box(x, y + 24, width, 8, shade=0.6, thick=0)
            drawing.text(x, y - 8, f"{name}: S × {columns}", anchor="start")
        drawing.text((4 + width + right) / 2, y + 33, "⊙")
        drawing.arrow(right + width + 4, y + 28, 396, 104)
    drawing.labelled(398, 87, 80, 34, "D of a row", shade=LEGIBLE)
    return drawing.svg()


FILES = svgs(softmax_jacobians, softmax_areas, five_products, delta_twice)
