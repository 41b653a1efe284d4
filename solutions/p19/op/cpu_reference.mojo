"""The ramp in plain loops: what each kernel computes, without threads. Read it when you have solved the blanks."""

from std.math import sqrt

from .ramp import EPS, THREADS
from .shared.common import ImmPtr, MutPtr, accum_type


def map_cpu[dtype: DType](mapped: MutPtr[dtype], vector: ImmPtr[dtype], n: Int):
    """Twice every element, and one more."""
    for k in range(n):
        var value = vector[unsafe_offset=k]
        mapped[unsafe_offset=k] = value + value + 1


def index_cpu[
    dtype: DType
](shifted: MutPtr[dtype], matrix: ImmPtr[dtype], offset: ImmPtr[dtype], rows: Int, columns: Int):
    """An offset for each column."""
    for r in range(rows):
        for c in range(columns):
            var place = r * columns + c
            shifted[unsafe_offset=place] = matrix[unsafe_offset=place] + offset[unsafe_offset=c]


def cast_cpu(
    products: MutPtr[DType.float32],
    half_matrix: ImmPtr[DType.bfloat16],
    half_vector: ImmPtr[DType.bfloat16],
    rows: Int,
    columns: Int,
):
    """The product of a matrix and a vector in bfloat16, with sums in float32."""
    for r in range(rows):
        var total = Float32(0)
        for c in range(columns):
            var factor = half_vector[unsafe_offset=c].cast[DType.float32]()
            total += half_matrix[unsafe_offset=r * columns + c].cast[DType.float32]() * factor
        products[unsafe_offset=r] = total


def row_sums_cpu[
    dtype: DType
](row_sums: MutPtr[accum_type[dtype]], matrix: ImmPtr[dtype], rows: Int, columns: Int):
    """The sum of every row."""
    for r in range(rows):
        var total = Scalar[accum_type[dtype]](0)
        for c in range(columns):
            total += matrix[unsafe_offset=r * columns + c].cast[accum_type[dtype]]()
        row_sums[unsafe_offset=r] = total


def tile_cpu[dtype: DType](mirrored: MutPtr[dtype], vector: ImmPtr[dtype], n: Int):
    """Every tile of THREADS elements turned round."""
    for start in range(0, n, THREADS):
        var last = min(start + THREADS, n) - 1
        for k in range(start, last + 1):
            mirrored[unsafe_offset=k] = vector[unsafe_offset=start + last - k]


def column_sums_cpu[
    dtype: DType
](column_sums: MutPtr[accum_type[dtype]], matrix: ImmPtr[dtype], rows: Int, columns: Int):
    """The sum of every column."""
    for c in range(columns):
        var total = Scalar[accum_type[dtype]](0)
        for r in range(rows):
            total += matrix[unsafe_offset=r * columns + c].cast[accum_type[dtype]]()
        column_sums[unsafe_offset=c] = total


def rmsnorm_cpu[
    dtype: DType
](normalised: MutPtr[dtype], matrix: ImmPtr[dtype], weight: ImmPtr[dtype], rows: Int, columns: Int):
    """Every row divided by the root of its mean square, and scaled."""
    comptime accum = accum_type[dtype]
    for r in range(rows):
        var total = Scalar[accum](0)
        for c in range(columns):
            var value = matrix[unsafe_offset=r * columns + c].cast[accum]()
            total += value * value
        var root = sqrt(total / Scalar[accum](columns) + Scalar[accum](EPS))
        for c in range(columns):
            var value = matrix[unsafe_offset=r * columns + c].cast[accum]()
            var scaled = value / root * weight[unsafe_offset=c].cast[accum]()
            normalised[unsafe_offset=r * columns + c] = scaled.cast[dtype]()
