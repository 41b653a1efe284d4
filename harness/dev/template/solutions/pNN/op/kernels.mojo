"""Puzzle NN: kernels, launches and ops. So far a placeholder, y = x * x on [rows, columns], one block for each row."""

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
def square_kernel[dtype: DType](output: MutPtr[dtype], input: ImmPtr[dtype], rows: Int32, columns: Int32):
    """Compute the square of every element of a row."""
    comptime accum = accum_type[dtype]
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), Int(columns)))
    var y = TileTensor(output, row_major(Int(rows), Int(columns)))
    # BLANK-START square: y = x * x for the columns of this thread
    for c in range(thread_idx.x, Int(columns), block_dim.x):
        var value = x[row, c].cast[accum]()
        y[row, c] = (value * value).cast[dtype]()
    # BLANK-END square


# ANCHOR_END: square_kernel_solution


def square_backward_kernel[
    dtype: DType
](grad_input: MutPtr[dtype], grad_output: ImmPtr[dtype], input: ImmPtr[dtype], rows: Int32, columns: Int32,):
    """Compute the gradient of a row's input."""
    comptime accum = accum_type[dtype]
    var row = block_idx.x
    var x = TileTensor(input, row_major(Int(rows), Int(columns)))
    var dy = TileTensor(grad_output, row_major(Int(rows), Int(columns)))
    var dx = TileTensor(grad_input, row_major(Int(rows), Int(columns)))
    # BLANK-START dsquare: dx = 2 * x * dy for the columns of this thread
    for c in range(thread_idx.x, Int(columns), block_dim.x):
        dx[row, c] = (2 * x[row, c].cast[accum]() * dy[row, c].cast[accum]()).cast[dtype]()
    # BLANK-END dsquare


def launch_square[
    dtype: DType, L: Launcher
](mut launcher: L, output: MutPtr[dtype], input: ImmPtr[dtype], rows: Int32, columns: Int32) raises:
    """Launch one block for each row."""
    launcher.launch[square_kernel[dtype]](
        "square", output, input, rows, columns, grid_dim=Int(rows), block_dim=THREADS
    )


def launch_square_backward[
    dtype: DType, L: Launcher
](
    mut launcher: L,
    grad_input: MutPtr[dtype],
    grad_output: ImmPtr[dtype],
    input: ImmPtr[dtype],
    rows: Int32,
    columns: Int32,
) raises:
    """Launch one block for each row."""
    launcher.launch[square_backward_kernel[dtype]](
        "square_backward",
        grad_input,
        grad_output,
        input,
        rows,
        columns,
        grid_dim=Int(rows),
        block_dim=THREADS,
    )


@extensibility.register("puzzle_NN_train")
struct Train:
    """The forward op."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var y = output.unsafe_ptr()
        var x = input.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_square[dtype](launcher, y, x, Int32(input.dim_size(0)), Int32(input.dim_size(1)))


@extensibility.register("puzzle_NN_train_backward")
struct TrainBackward:
    """The backward op."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=2, static_spec=_],
        grad_output: InputTensor[dtype=dtype, rank=2, static_spec=_],
        input: InputTensor[dtype=dtype, rank=2, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        var dx = grad_input.unsafe_ptr()
        var dy = grad_output.unsafe_ptr().as_imm()
        var x = input.unsafe_ptr().as_imm()
        var launcher = DeviceLauncher(ctx)
        launch_square_backward[dtype](launcher, dx, dy, x, Int32(input.dim_size(0)), Int32(input.dim_size(1)))
