"""The roofline of LayerNorm + Linear on an H200: what memory and arithmetic allow, and what was measured.

A pass that does `operations` and must move `bytes` takes at least bytes / bandwidth and at least operations / peak. The
ceilings are those of NVIDIA's data sheet of the H200 (SXM), without sparsity; nothing reaches them entirely.
"""

from dataclasses import dataclass

from book.figures.charts import Axis, Series, plot

BANDWIDTH = 4.8e12  # bytes a second
PEAKS = {"float32": 67e12, "bfloat16": 989e12}  # operations a second: float32 units, tensor cores
WIDTH = {"float32": 4, "bfloat16": 2}  # bytes of an element
NORMALISE = 8  # operations for each element of LayerNorm: two for the mean, three for the variance, and so on


@dataclass(frozen=True)
class Work:
    """What a pass has to do: floating-point operations, and bytes that must move if nothing moves twice."""

    operations: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.operations / self.bytes

    def least_seconds(self, dtype: str) -> tuple[float, float]:
        """The time that memory needs, and the time that arithmetic needs."""
        return self.bytes / BANDWIDTH, self.operations / PEAKS[dtype]

    def ceiling(self, dtype: str) -> float:
        """The most operations a second at this intensity."""
        return self.operations / max(self.least_seconds(dtype))


def layernorm(dims: tuple[int, int, int, int], dtype: str) -> Work:
    """LayerNorm alone, forward: it reads the rows and writes them."""
    B, S, H, _ = dims
    return Work(NORMALISE * B * S * H, WIDTH[dtype] * (2 * B * S * H + 2 * H))


def pair(dims: tuple[int, int, int, int], dtype: str, direction: str) -> Work:
    """LayerNorm + Linear as one operation, "forward" or "backward".

    Forward: x, W and the vectors in, y out. Backward: dy, x, W, gamma, mean and rstd in, dx, dW and the vectors out;
    two products of the forward one's size.
    """
    B, S, H, O = dims
    rows = B * S
    products = {"forward": 1, "backward": 2}[direction]
    operations = products * (2 * rows * H * O + NORMALISE * rows * H)
    tensors = {
        "forward": rows * H + O * H + 2 * H + O + rows * O,
        "backward": rows * O + 2 * rows * H + 2 * O * H + 4 * H + O,
    }[direction]
    return Work(operations, WIDTH[dtype] * tensors + 2 * 4 * rows)  # and the statistics, in float32


MARKS = {"eager": "o", "unfused": "s", "fused": "^"}


def chart(
    measured: dict[str, dict[tuple, dict[str, float]]], sizes: dict[str, tuple[int, int, int, int]]
) -> str:
    """The two roofs, and forward passes that were measured.

    Args:
        measured: dtype -> (dims, pass) -> who -> microseconds.
        sizes: What to call the sizes that are shown, and the sizes.
    """
    series = [
        Series("", [(0.3, 0.3 * BANDWIDTH / 1e12), (peak / BANDWIDTH, peak / 1e12), (3e3, peak / 1e12)])
        for peak in PEAKS.values()
    ]
    for dtype, times in measured.items():
        for who, marker in MARKS.items():
            points = []
            for dims in sizes.values():
                work = pair(dims, dtype, "forward")
                points.append((work.intensity, work.operations / times[dims, "forward"][who] / 1e6))
            name = "PyTorch" if who == "eager" else who
            series.append(Series(f"{name}, {dtype}", points, "", marker, dtype == "bfloat16"))
    return plot(
        "Operations a second over operations for each byte, on logarithmic axes, with a slanted roof that ends in two flat ones. "
        "All measured forward passes at the chapter's sizes lie far below the roof. At GPT-2 small's sizes PyTorch "
        "comes near its flat roofs, the unfused kernels stay below, and the fused ones stay far below.",
        series,
        Axis("operations for each byte that must move"),
        Axis("operations a second, in trillions"),
        height=400,
        notes=[((30, peak / 1e12), f"{dtype}: {peak / 1e12:.0f} T/s") for dtype, peak in PEAKS.items()],
    )
