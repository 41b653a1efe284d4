"""What the CPU path and the GPU kernels share: pointer types, the accumulation type, row statistics, atomics."""

from std.atomic import Atomic, Ordering
from std.math import sqrt
from std.sys import is_amd_gpu
from layout import TileTensor
from layout.tile_layout import row_major

comptime ImmPtr[dtype: DType] = Pointer[Scalar[dtype], ImmutAnyOrigin]
"""The address of a tensor that is only read."""

comptime MutPtr[dtype: DType] = Pointer[Scalar[dtype], MutAnyOrigin]
"""The address of a tensor that is written."""

comptime accum_type[dtype: DType] = DType.float64 if dtype == DType.float64 else DType.float32
"""The type of every sum: float32 for the 16-bit types, else the type itself."""

comptime CHUNK = 32
"""How many elements of a row are added up before their sum is added to the row's."""


@fieldwise_init
struct RowStatistics[dtype: DType](Copyable, Movable):
    """Mean and reciprocal standard deviation of one row."""

    var mean: Scalar[Self.dtype]
    var rstd: Scalar[Self.dtype]


@always_inline
def row_statistics[
    dtype: DType
](
    input: ImmPtr[dtype],
    row: Int,
    hidden_dim: Int,
    eps: Scalar[accum_type[dtype]],
) -> RowStatistics[
    accum_type[dtype]
]:
    """Mean and rstd = 1 / sqrt(variance + eps) of one row, in two passes over it.

    Forward and backward, fused and unfused, CPU and GPU all call this one function, so that a saved and a
    recomputed statistic are equal to the last bit on one device. The variance is the mean of squared
    deviations, never E[x^2] - mean^2, which cancels when the mean is large beside the deviation. The second
    pass also sums the deviations themselves: their mean is the rounding error of the first mean, and is
    taken out (the corrected two-pass algorithm of Chan, Golub and LeVeque, 1983).

    Args:
        input: The rows, [rows, hidden_dim].
        row: Which row.
        hidden_dim: Elements of a row, at least 1.
        eps: Added to the variance, inside the root.
    """
    comptime accum = accum_type[dtype]
    var x = TileTensor(input.unsafe_offset(row * hidden_dim), row_major(hidden_dim))
    var count = Scalar[accum](hidden_dim)

    # Each chunk of a row is summed by itself, then the chunks: in float32 one long sum would lose digits.
    var total = Scalar[accum](0)
    for start in range(0, hidden_dim, CHUNK):
        var chunk_total = Scalar[accum](0)
        for h in range(start, min(start + CHUNK, hidden_dim)):
            chunk_total += x[h].cast[accum]()
        total += chunk_total
    var first_mean = total / count

    var deviations = Scalar[accum](0)
    var squares = Scalar[accum](0)
    for start in range(0, hidden_dim, CHUNK):
        var chunk_deviations = Scalar[accum](0)
        var chunk_squares = Scalar[accum](0)
        for h in range(start, min(start + CHUNK, hidden_dim)):
            var deviation = x[h].cast[accum]() - first_mean
            chunk_deviations += deviation
            chunk_squares += deviation * deviation
        deviations += chunk_deviations
        squares += chunk_squares
    var correction = deviations / count
    var variance = squares / count - correction * correction
    return RowStatistics(first_mean + correction, 1 / sqrt(variance + eps))


@always_inline
def atomic_add[dtype: DType](address: MutPtr[dtype], index: Int, value: Scalar[dtype]):
    """Adds `value` to `address[index]` while other blocks may add to it too; the order is not fixed.

    Relaxed: the sum needs no order among the additions, and the end of the kernel publishes it.
    """
    # AMD calls the scope of one device "agent"; NVIDIA and Apple call it "device".
    comptime scope: StaticString = "agent" if is_amd_gpu() else "device"
    _ = Atomic[Scalar[dtype], scope=scope].fetch_add[ordering=Ordering.RELAXED](
        address.unsafe_offset(index), value
    )
