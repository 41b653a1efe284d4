"""The ops of the ramp for MAX and PyTorch, one for each kernel. Outputs come before inputs; sizes are taken
from the tensors.
"""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .launches import (
    launch_atomic,
    launch_cast,
    launch_index,
    launch_map,
    launch_reduce,
    launch_rmsnorm,
    launch_stages,
    launch_tile,
)
from .ramp import EPS
from .shared.checks import expect_shape
from .shared.common import MutPtr, accum_type
from .shared.launcher import DeviceLauncher


@extensibility.register("ramp_map")
struct RampMap:
    """Compute 2 * vector + 1."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        mapped: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [n]
        vector: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [n]
        ctx: DeviceContext,
    ) raises:
        var n = vector.dim_size(0)
        expect_shape("mapped", mapped, n)
        var launcher = DeviceLauncher(ctx)
        launch_map[dtype](launcher, mapped.unsafe_ptr(), vector.unsafe_ptr().as_imm(), n)


@extensibility.register("ramp_index")
struct RampIndex:
    """Compute matrix + offset, with the same offset for every row."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        shifted: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        matrix: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        offset: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [columns]
        ctx: DeviceContext,
    ) raises:
        var rows = matrix.dim_size(0)
        var columns = matrix.dim_size(1)
        expect_shape("shifted", shifted, rows, columns)
        expect_shape("offset", offset, columns)
        var launcher = DeviceLauncher(ctx)
        launch_index[dtype](
            launcher,
            shifted.unsafe_ptr(),
            matrix.unsafe_ptr().as_imm(),
            offset.unsafe_ptr().as_imm(),
            rows,
            columns,
        )


@extensibility.register("ramp_cast")
struct RampCast:
    """Compute half_matrix @ half_vector with float32 sums."""

    @staticmethod
    def execute(
        products: MutableInputTensor[dtype=DType.float32, rank=1, static_spec=_],  # [rows]
        half_matrix: InputTensor[dtype=DType.bfloat16, rank=2, static_spec=_],  # [rows, columns]
        half_vector: InputTensor[dtype=DType.bfloat16, rank=1, static_spec=_],  # [columns]
        ctx: DeviceContext,
    ) raises:
        var rows = half_matrix.dim_size(0)
        var columns = half_matrix.dim_size(1)
        expect_shape("products", products, rows)
        expect_shape("half_vector", half_vector, columns)
        var launcher = DeviceLauncher(ctx)
        launch_cast(
            launcher,
            products.unsafe_ptr(),
            half_matrix.unsafe_ptr().as_imm(),
            half_vector.unsafe_ptr().as_imm(),
            rows,
            columns,
        )


@extensibility.register("ramp_reduce")
struct RampReduce:
    """Compute the sum of every row."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        row_sums: MutableInputTensor[dtype=accum, rank=1, static_spec=_],  # [rows]
        matrix: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "row_sums must have the accumulation dtype"
        var rows = matrix.dim_size(0)
        var columns = matrix.dim_size(1)
        expect_shape("row_sums", row_sums, rows)
        var sums = rebind[MutPtr[accum_type[dtype]]](row_sums.unsafe_ptr())
        var launcher = DeviceLauncher(ctx)
        launch_reduce[dtype](launcher, sums, matrix.unsafe_ptr().as_imm(), rows, columns)


@extensibility.register("ramp_tile")
struct RampTile:
    """Reverse every tile of the vector."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        mirrored: MutableInputTensor[dtype=dtype, rank=1, static_spec=_],  # [n]
        vector: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [n]
        ctx: DeviceContext,
    ) raises:
        var n = vector.dim_size(0)
        expect_shape("mirrored", mirrored, n)
        var launcher = DeviceLauncher(ctx)
        launch_tile[dtype](launcher, mirrored.unsafe_ptr(), vector.unsafe_ptr().as_imm(), n)


@extensibility.register("ramp_atomic")
struct RampAtomic:
    """Compute the sum of every column with atomics."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        column_sums: MutableInputTensor[dtype=accum, rank=1, static_spec=_],  # [columns]
        matrix: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "column_sums must have the accumulation dtype"
        var rows = matrix.dim_size(0)
        var columns = matrix.dim_size(1)
        expect_shape("column_sums", column_sums, columns)
        var sums = rebind[MutPtr[accum_type[dtype]]](column_sums.unsafe_ptr())
        var launcher = DeviceLauncher(ctx)
        launch_atomic[dtype](launcher, sums, matrix.unsafe_ptr().as_imm(), rows, columns)


@extensibility.register("ramp_stages")
struct RampStages:
    """Compute the sum of every column in two stages."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        staged_sums: MutableInputTensor[dtype=accum, rank=1, static_spec=_],  # [columns]
        matrix: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "staged_sums must have the accumulation dtype"
        var rows = matrix.dim_size(0)
        var columns = matrix.dim_size(1)
        expect_shape("staged_sums", staged_sums, columns)
        var sums = rebind[MutPtr[accum_type[dtype]]](staged_sums.unsafe_ptr())
        var launcher = DeviceLauncher(ctx)
        launch_stages[dtype](launcher, sums, matrix.unsafe_ptr().as_imm(), rows, columns)


@extensibility.register("ramp_rmsnorm")
struct RampRmsnorm:
    """Compute RMSNorm of every row, with eps = EPS."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        normalised: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        matrix: InputTensor[dtype=dtype, rank=2, static_spec=_],  # [rows, columns]
        weight: InputTensor[dtype=dtype, rank=1, static_spec=_],  # [columns]
        ctx: DeviceContext,
    ) raises:
        var rows = matrix.dim_size(0)
        var columns = matrix.dim_size(1)
        expect_shape("normalised", normalised, rows, columns)
        expect_shape("weight", weight, columns)
        var launcher = DeviceLauncher(ctx)
        var eps = Scalar[accum_type[dtype]](EPS)
        launch_rmsnorm[dtype](
            launcher,
            normalised.unsafe_ptr(),
            matrix.unsafe_ptr().as_imm(),
            weight.unsafe_ptr().as_imm(),
            rows,
            columns,
            eps,
        )
