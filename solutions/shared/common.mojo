"""Code shared by CPU paths and GPU kernels: pointer types, accumulation types, GPU limits, row statistics."""

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
"""The accumulation type: float32 for 16-bit dtypes, otherwise the dtype itself."""


def accelerator_has_float64() -> Bool:
    """Return whether the target GPU supports float64; Apple's do not."""
    comptime if has_accelerator():
        return not default_accelerator().is_apple_gpu()
    else:
        return True


comptime atomic_type[
    dtype: DType
] = DType.float32 if dtype.is_half_float() or not accelerator_has_float64() else DType.float64
"""The type of sums that many blocks add to: wide enough that the rounding errors of thousands of sequential
additions do not reach the result's dtype. On a GPU without float64, sums of float32 stay float32.
"""


def multiprocessors() -> Int:
    """Return the number of multiprocessors of the target GPU."""
    comptime if has_accelerator():
        return DeviceContext.default_device_info.sm_count
    else:
        return 1


def lanes_per_warp() -> Int:
    """Return the warp size of the target GPU, for launch geometry; kernels use WARP_SIZE."""
    comptime if has_accelerator():
        return DeviceContext.default_device_info.warp_size
    else:
        return 32


def shared_memory() -> Int:
    """Return the bytes of shared memory for a block that is alone on a multiprocessor of the target GPU."""
    comptime if has_accelerator():
        # NVIDIA reserves 1 KiB; kernels that request the rest declare at most 2 KiB of static shared memory.
        return DeviceContext.default_device_info.shared_memory_per_multiprocessor - 3072
    else:
        return 30 * 1024


@always_inline
def wait_on_dependent_grids():
    """Wait until the grids launched before this one are done and their results are visible.

    Returns immediately unless the kernel was launched with programmatic stream serialization.
    """
    inlined_assembly["griddepcontrol.wait;", NoneType, constraints="~{memory}"]()


@always_inline
def launch_dependent_grids():
    """Let the next grid start if it was launched with programmatic stream serialization; it waits for this
    grid itself.
    """
    inlined_assembly["griddepcontrol.launch_dependents;", NoneType, constraints="~{memory}"]()


struct CompensatedSum[dtype: DType](Copyable, Movable):
    """A running sum that compensates for its rounding errors (Kahan, 1965).

    The error of an ordinary float32 sum grows with the number of terms; the error of this one does not.
    """

    var total: Scalar[Self.dtype]
    var _excess: Scalar[Self.dtype]

    @always_inline
    def __init__(out self):
        """Start with 0."""
        self.total = 0
        self._excess = 0

    @always_inline
    def __iadd__(mut self, term: Scalar[Self.dtype]):
        """Add a term."""
        var corrected = term - self._excess
        var grown = self.total + corrected
        # The actual increase of `total` minus the exact increase.
        self._excess = (grown - self.total) - corrected
        self.total = grown


@fieldwise_init
struct RowStatistics[dtype: DType](Copyable, Movable):
    """The mean and the reciprocal standard deviation of one row."""

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
    """Return the mean and rstd = 1 / sqrt(variance + eps) of one row, computed in two passes over it.

    Forward and backward, fused and unfused, CPU and GPU code all call this function, so that saved and
    recomputed statistics are bitwise equal on one device. The variance is the mean of squared deviations,
    never E[x^2] - mean^2, which cancels if the mean is large compared with the deviations. The second pass
    also sums the deviations themselves: their mean is the rounding error of the first mean, which is then
    corrected (the corrected two-pass algorithm of Chan, Golub and LeVeque, 1983).

    Args:
        input: The rows, [rows, hidden_dim].
        row: The index of the row.
        hidden_dim: Elements per row, at least 1.
        eps: Added to the variance, inside the square root.
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
    """Return a * b, rounded before anything is subtracted from it.

    The compiler fuses `a * b - c` into one operation, which does not round the product. If c is the same
    product, rounded, the difference is then its rounding error, not 0; but LayerNorm of one column has a
    gradient of exactly 0.
    """
    return a.fma(b, 0)


@always_inline
def atomic_add[sum_dtype: DType, dtype: DType](sums: MutPtr[sum_dtype], index: Int, value: Scalar[dtype]):
    """Add `value` to `sums[index]` atomically; the order of the blocks' additions is not fixed.

    The ordering is relaxed: the additions need no order, and the sum is visible after the kernel ends.
    """
    # The scope of one device is "agent" on AMD, "device" on NVIDIA and Apple.
    comptime scope: StaticString = "agent" if is_amd_gpu() else "device"
    _ = Atomic[Scalar[sum_dtype], scope=scope].fetch_add[ordering=Ordering.RELAXED](
        sums.unsafe_offset(index), value.cast[sum_dtype]()
    )
