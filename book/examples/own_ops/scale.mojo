"""y = x * w for x [rows, columns] and w [columns], and its gradients: dx = dy * w, dw = sum over the rows of dy * x."""

from std.math import ceildiv
import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu import block_idx, global_idx, grid_dim
from max.gpu.host import DeviceContext

comptime Read = Pointer[Float32, ImmutAnyOrigin]
comptime Write = Pointer[Float32, MutAnyOrigin]
comptime THREADS = 64
comptime BLOCKS = 64


def forward(y: Write, x: Read, w: Read, rows: Int32, columns: Int32):
    """Compute an element in each thread."""
    var i = global_idx.x
    if i < Int(rows * columns):
        y[unsafe_offset=i] = x[unsafe_offset=i] * w[unsafe_offset=i % Int(columns)]


# ANCHOR: backward
def backward(dx: Write, dw: Write, dy: Read, x: Read, w: Read, rows: Int32, columns: Int32):
    """Give a column to each thread, and every 64th row to each of the 64 blocks along y."""
    var column = global_idx.x
    if column < Int(columns):
        var total = Float32(0)
        for row in range(block_idx.y, Int(rows), grid_dim.y):
            var i = row * Int(columns) + column
            dx[unsafe_offset=i] = dy[unsafe_offset=i] * w[unsafe_offset=column]
            total += dy[unsafe_offset=i] * x[unsafe_offset=i]
        dw[unsafe_offset=column] += total


# ANCHOR_END: backward


@extensibility.register("scale")
struct Scale:
    @staticmethod
    def execute(
        y: OutputTensor[dtype=DType.float32, rank=2, static_spec=_],
        x: InputTensor[dtype=DType.float32, rank=2, static_spec=_],
        w: InputTensor[dtype=DType.float32, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        if x.size() > 0:
            ctx.enqueue_function[forward](
                y.unsafe_ptr(), x.unsafe_ptr().as_imm(), w.unsafe_ptr().as_imm(),
                Int32(x.dim_size(0)), Int32(x.dim_size(1)),
                grid_dim=ceildiv(x.size(), THREADS), block_dim=THREADS,
            )  # fmt: skip


@extensibility.register("scale_backward")
struct ScaleBackward:
    @staticmethod
    def execute(
        dx: OutputTensor[dtype=DType.float32, rank=2, static_spec=_],
        dw: OutputTensor[dtype=DType.float32, rank=1, static_spec=_],
        dy: InputTensor[dtype=DType.float32, rank=2, static_spec=_],
        x: InputTensor[dtype=DType.float32, rank=2, static_spec=_],
        w: InputTensor[dtype=DType.float32, rank=1, static_spec=_],
        ctx: DeviceContext,
    ) raises:
        if dw.size() > 0:
            ctx.enqueue_memset(dw.to_device_buffer(ctx), Float32(0))
            ctx.enqueue_function[backward](
                dx.unsafe_ptr(), dw.unsafe_ptr(), dy.unsafe_ptr().as_imm(), x.unsafe_ptr().as_imm(), w.unsafe_ptr().as_imm(),
                Int32(x.dim_size(0)), Int32(x.dim_size(1)),
                grid_dim=(ceildiv(dw.size(), THREADS), BLOCKS), block_dim=THREADS,
            )  # fmt: skip
