"""Shared code of CPU paths and GPU kernels: pointer types, types of sums, the GPU's limits, row statistics."""

from std.atomic import Atomic, Ordering
from std.math import sqrt
from std.sys import default_accelerator, has_accelerator, inlined_assembly, is_amd_gpu
from max.gpu.host import DeviceContext
from layout import TileTensor
from layout.tile_layout import row_major

comptime ImmPtr[dtype: DType] = Pointer[Scalar[dtype], ImmutAnyOrigin]
"""The address of a tensor that is only read."""

comptime MutPtr[dtype: DType] = Pointer[Scalar[dtype], MutAnyOrigin]
"""The address of a tensor that is written."""

comptime accum_type[dtype: DType] = DType.float64 if dtype == DType.float64 else DType.float32
"""The type of every sum: float32 for the 16-bit types, else the type itself."""


def accelerator_has_float64() -> Bool:
    """Whether the GPU that this is compiled for computes in float64; Apple's do not."""
    comptime if has_accelerator():
        return not default_accelerator().is_apple_gpu()
    else:
        return True


comptime atomic_type[
    dtype: DType
] = DType.float32 if dtype.is_half_float() or not accelerator_has_float64() else DType.float64
"""The type of sums that many blocks add to: wide enough that thousands of additions, one at a time and each
rounded, leave every digit of the result. Without float64 on the GPU, the sums of float32 stay float32."""


def multiprocessors() -> Int:
    """How many blocks the GPU of this build runs side by side, at one a multiprocessor."""
    comptime if has_accelerator():
        return DeviceContext.default_device_info.sm_count
    else:
        return 1


def lanes_of_a_warp() -> Int:
    """Threads of a warp on the GPU of this build, for launch geometry; kernels ask WARP_SIZE."""
    comptime if has_accelerator():
        return DeviceContext.default_device_info.warp_size
    else:
        return 32


def shared_memory() -> Int:
    """Bytes of shared memory for a block that has a multiprocessor of the GPU of this build to itself."""
    comptime if has_accelerator():
        # NVIDIA keeps 1 KiB of it; kernels that ask for the rest declare at most 2 KiB themselves.
        return DeviceContext.default_device_info.shared_memory_per_multiprocessor - 3072
    else:
        return 30 * 1024


@always_inline
def wait_for_earlier_grids():
    """Wait until the grids launched before this one are done and what they wrote can be read.

    It returns at once unless the launch asked for programmatic serialization.
    """
    inlined_assembly["griddepcontrol.wait;", NoneType, constraints="~{memory}"]()


@always_inline
def start_later_grids():
    """Let the next grid start, if it was launched with programmatic serialization; it waits for this one itself.
    """
    inlined_assembly["griddepcontrol.launch_dependents;", NoneType, constraints="~{memory}"]()


struct CompensatedSum[dtype: DType](Copyable, Movable):
    """A running sum that compensates for its rounding errors (Kahan, 1965).

    A plain float32 sum of n terms loses digits as n grows; this one keeps all but the last at any length.
    """

    var total: Scalar[Self.dtype]
    var _excess: Scalar[Self.dtype]

    @always_inline
    def __init__(out self):
        """An empty sum."""
        self.total = 0
        self._excess = 0

    @always_inline
    def __iadd__(mut self, term: Scalar[Self.dtype]):
        """Add a term."""
        var corrected = term - self._excess
        var grown = self.total + corrected
        # The real increase of `total`, minus the exact one.
        self._excess = (grown - self.total) - corrected
        self.total = grown


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

    var elements = CompensatedSum[accum]()
    for h in range(hidden_dim):
        elements += x[h].cast[accum]()
    var first_mean = elements.total / count

    var deviations = CompensatedSum[accum]()
    var squares = CompensatedSum[accum]()
    for h in range(hidden_dim):
        var deviation = x[h].cast[accum]() - first_mean
        deviations += deviation
        squares += deviation * deviation
    var correction = deviations.total / count
    var variance = squares.total / count - correction * correction
    return RowStatistics(first_mean + correction, 1 / sqrt(variance + eps))


@always_inline
def rounded_product[
    dtype: DType, width: SIMDLength, //
](a: SIMD[dtype, width], b: SIMD[dtype, width]) -> SIMD[dtype, width]:
    """a * b, rounded before anything is subtracted from it.

    The compiler makes one operation of `a * b - c`, which keeps what rounding took from the product. Where c is the same
    product, rounded, the difference is then not 0 but that rest. LayerNorm of one column has a gradient of exactly 0.
    """
    return a.fma(b, 0)


@always_inline
def atomic_add[sum_dtype: DType, dtype: DType](sums: MutPtr[sum_dtype], index: Int, value: Scalar[dtype]):
    """Add `value` to `sums[index]` while other blocks may add to it too; the order is not fixed.

    Relaxed: the sum needs no order among the additions, and the end of the kernel publishes it.
    """
    # AMD calls the scope of one device "agent"; NVIDIA and Apple call it "device".
    comptime scope: StaticString = "agent" if is_amd_gpu() else "device"
    _ = Atomic[Scalar[sum_dtype], scope=scope].fetch_add[ordering=Ordering.RELAXED](
        sums.unsafe_offset(index), value.cast[sum_dtype]()
    )
