"""How many times faster or slower the one-thread fused kernels are than the unfused ones, from small sizes to large."""

import math

from book.figures.charts import LEFT, RIGHT, Axis, LogChart


def ratio(times: dict[tuple, dict[str, float]], names: dict[tuple[int, int, int, int], str]) -> str:
    """Unfused time over fused time, over the size of the matrix product, forward and backward apart.

    Args:
        times: (dims, pass) -> who -> microseconds.
        names: What to write below the sizes.
    """
    drawing = LogChart(
        360,
        "Time of the unfused kernels divided by the time of the fused ones, over the size. The curves begin a little above 1 "
        "and fall far below it: the fused kernels become slower and slower.",
        Axis(
            "size of the product in multiply-adds; written below: H → O",
            1e3,
            6e10,
            {float(math.prod(dims)): name for dims, name in names.items()},
        ),
        Axis("unfused time / fused time", 0.004, 4, {value: f"{value:g}" for value in (0.01, 0.1, 1.0)}),
        width=720,
    )
    _, level = drawing.place(1e3, 1.0)
    drawing.segment(LEFT, level, drawing.width - RIGHT, level)
    drawing.note(6e10, 1.0, "equally fast", dx=-6, dy=-6, anchor="end")
    for direction, shape, dash in (("forward", "circle", ""), ("backward", "square", "6 4")):
        points = [
            (float(math.prod(dims)), times[dims, direction]["unfused"] / times[dims, direction]["fused"])
            for dims in names
        ]
        drawing.curve(points, dash=dash, shape=shape)
    for y, name, shape, dash in ((0.03, "forward", "circle", ""), (0.015, "backward", "square", "6 4")):
        drawing.curve([(2e3, y), (1.2e4, y)], dash=dash)
        drawing.marker(5e3, y, shape)
        drawing.note(1.2e4, y, name)
    return drawing.svg()
