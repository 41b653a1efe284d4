"""The toy puzzle: y[r] = scale * x[order[r]] ** 2 for the rows of a mask, on [rows, columns], one block for each row."""

from extensibility import InputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from layout import TileTensor
from layout.tile_layout import row_major

from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher, Launcher

comptime THREADS = 64
"""Threads of a block, which share the columns of one row."""


# ANCHOR: square_kernel_solution
def square_kernel[
    dtype: DType
](
    output: MutPtr[dtype],
    kept: MutPtr[DType.bool],
    input: ImmPtr[dtype],
    order: ImmPtr[DType.int32],
    mask: ImmPtr[DType.bool],
    rows: Int32,
    columns: Int32,
    scale: Float64,
):
    """The squares of the row that comes in this block's place, 0 where the mask is."""
    comptime accum = accum_type[dtype]
    var row = block_idx.x
    var from_row = Int(order[unsafe_offset=row])
    var on = mask[unsafe_offset=row]
    var x = TileTensor(input, row_major(Int(rows), Int(columns)))
    var y = TileTensor(output, row_major(Int(rows), Int(columns)))
    if thread_idx.x == 0:
        kept[unsafe_offset=row] = on
    # BLANK-START square: y = scale * x * x for the columns of this thread, where on
    for c in range(thread_idx.x, Int(columns), block_dim.x):
        var value = x[from_row, c].cast[accum]()
        y[row, c] = (scale.cast[accum]() * value * value).cast[dtype]() if on else 0
    # BLANK-END square


# ANCHOR_END: square_kernel_solution


def square_backward_kernel[
    dtype: DType
](
    grad_input: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    order: ImmPtr[DType.int32],
    mask: ImmPtr[DType.bool],
    rows: Int32,
    columns: Int32,
    scale: Float64,
):
    """The gradient of the row that this block's row came from."""
    comptime accum = accum_type[dtype]
    var row = block_idx.x
    var from_row = Int(order[unsafe_offset=row])
    var on = mask[unsafe_offset=row]
    var x = TileTensor(input, row_major(Int(rows), Int(columns)))
    var dy = TileTensor(grad_output, row_major(Int(rows), Int(columns)))
    var dx = TileTensor(grad_input, row_major(Int(rows), Int(columns)))
    # BLANK-START dsquare: dx = scale * 2 * x * dy for the columns of this thread, where on
    for c in range(thread_idx.x, Int(columns), block_dim.x):
        var slope = (2 * x[from_row, c].cast[accum]()) * scale.cast[accum]()
        dx[from_row, c] = (slope * dy[row, c].cast[accum]()).cast[dtype]() if on else 0
    # BLANK-END dsquare


def launch_square[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    output: MutPtr[dtype],
    kept: MutPtr[DType.bool],
    input: ImmPtr[dtype],
    order: ImmPtr[DType.int32],
    mask: ImmPtr[DType.bool],
    rows: Int32,
    columns: Int32,
    scale: Float64,
) raises:
    """One launch: a block for each row."""
    launcher.launch[square_kernel[dtype]](
        "square",
        output,
        kept,
        input,
        order,
        mask,
        rows,
        columns,
        scale,
        grid_dim=Int(rows),
        block_dim=THREADS,
    )


def launch_square_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    order: ImmPtr[DType.int32],
    mask: ImmPtr[DType.bool],
    rows: Int32,
    columns: Int32,
    scale: Float64,
) raises:
    """One launch: a block for each row."""
    launcher.launch[square_backward_kernel[dtype]](
        "square_backward",
        grad_input,
        grad_output,
        input,
        order,
        mask,
        rows,
        columns,
        scale,
        grid_dim=Int(rows),
        block_dim=THREADS,
    )


@extensibility.register("square_train")
struct SquareTrain:
    """The forward op."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        kept: MutableInputTensor[dtype=DType.bool, rank=1, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],
        mask: InputTensor[dtype=DType.bool, rank=1, static_spec=_],
        scale: Float64,
        power: Int32,
        ctx: DeviceContext,
    ) raises:
        if power != 2:
            raise Error("power must be 2")
        var y = output.unsafe_ptr()
        var x = input.unsafe_ptr().as_imm()
        var rows = input.dim_size(0)
        var columns = input.dim_size(1)
        var launcher = DeviceLauncher(ctx)
        launch_square[dtype](
            launcher,
            y,
            kept.unsafe_ptr(),
            x,
            order.unsafe_ptr().as_imm(),
            mask.unsafe_ptr().as_imm(),
            Int32(rows),
            Int32(columns),
            scale,
        )


@extensibility.register("square_train_backward")
struct SquareTrainBackward:
    """The backward op."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],
        mask: InputTensor[dtype=DType.bool, rank=1, static_spec=_],
        scale: Float64,
        ctx: DeviceContext,
    ) raises:
        var dx = grad_input.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var rows = input.dim_size(0)
        var columns = input.dim_size(1)
        var launcher = DeviceLauncher(ctx)
        launch_square_backward[dtype](
            launcher,
            dx,
            dy,
            x,
            order.unsafe_ptr().as_imm(),
            mask.unsafe_ptr().as_imm(),
            Int32(rows),
            Int32(columns),
            scale,
        )
