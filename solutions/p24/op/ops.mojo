"""Puzzle 24, provided: the ops for MAX and PyTorch.

Tensors of positions are [batch, heads, cells, dim], a row for each cell of a grid as it is stored; order is int32 [cells].
Outputs come first, then incoming gradients, then inputs. `hilbert_gather` and `hilbert_scatter` allocate their outputs, as
`CustomOpLibrary` expects; an op NAME_train writes into the caller's buffers, so that the checks can fill them beforehand.
"""

from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext

from .launches import (
    launch_curve,
    launch_gather,
    launch_scatter,
    launch_tiles,
    launch_window_backward,
    launch_window_forward,
)
from .shared.checks import expect_shape
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import DeviceLauncher
from .window import MAX_HEAD, TILE, WindowBackward, WindowForward, WindowSizes


def validate_sizes(
    batches: Int, length: Int, head_dim: Int, width: Int32, radius: Int32, tile: Int32
) raises -> WindowSizes:
    """Return the sizes in the kernels' type; raise if the grid, window or tile is invalid."""
    if width < 1 or length % Int(width) != 0:
        raise Error(t"{length} cells do not form a grid of {width} columns")
    if radius < 0:
        raise Error(t"the radius must be at least 0, got {radius}")
    if tile < TILE or tile % TILE != 0:
        raise Error(t"a tile must be a multiple of {TILE} positions, got {tile}")
    if head_dim > MAX_HEAD:
        raise Error(t"the head dimension must be at most {MAX_HEAD}, got {head_dim}")
    return WindowSizes(Int32(batches), Int32(length), Int32(head_dim), width, radius, tile)


@extensibility.register("hilbert_curve_train")
struct HilbertCurveTrain:
    """Compute the index and the inverse of the curve through a square, in the caller's buffers."""

    @staticmethod
    def execute(
        index: MutableInputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [side * side]
        inverse: MutableInputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [side * side]
        side: Int32,  # a power of two
        ctx: DeviceContext,
    ) raises:
        if side < 1 or side & (side - 1) != 0 or side > 2**15:
            raise Error(t"the side must be a power of two up to {2**15}, got {side}")
        expect_shape("index", index, Int(side) * Int(side))
        expect_shape("inverse", inverse, Int(side) * Int(side))
        var launcher = DeviceLauncher(ctx)
        launch_curve(launcher, index.unsafe_ptr(), inverse.unsafe_ptr(), Int(side))


@extensibility.register("hilbert_gather")
struct HilbertGather:
    """Gather rows by step: row order[i] becomes row i."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        gathered: OutputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        input: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [L]
        ctx: DeviceContext,
    ) raises:
        var B = input.dim_size(0)
        var N = input.dim_size(1)
        var L = input.dim_size(2)
        var d = input.dim_size(3)
        expect_shape("gathered", gathered, B, N, L, d)
        expect_shape("order", order, L)
        var launcher = DeviceLauncher(ctx)
        launch_gather[dtype](
            launcher,
            gathered.unsafe_ptr(),
            input.unsafe_ptr().as_imm(),
            order.unsafe_ptr().as_imm(),
            B * N,
            L,
            d,
        )


@extensibility.register("hilbert_gather_train")
struct HilbertGatherTrain:
    """Gather rows by step, in the caller's buffer."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        gathered: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        input: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [L]
        ctx: DeviceContext,
    ) raises:
        var B = input.dim_size(0)
        var N = input.dim_size(1)
        var L = input.dim_size(2)
        var d = input.dim_size(3)
        expect_shape("gathered", gathered, B, N, L, d)
        expect_shape("order", order, L)
        var launcher = DeviceLauncher(ctx)
        launch_gather[dtype](
            launcher,
            gathered.unsafe_ptr(),
            input.unsafe_ptr().as_imm(),
            order.unsafe_ptr().as_imm(),
            B * N,
            L,
            d,
        )


@extensibility.register("hilbert_scatter")
struct HilbertScatter:
    """Scatter rows to their origin: row i becomes row order[i]. This is the gather's backward, and the gather is this op's.
    """

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: OutputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        grad_gathered: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [L]
        ctx: DeviceContext,
    ) raises:
        var B = grad_gathered.dim_size(0)
        var N = grad_gathered.dim_size(1)
        var L = grad_gathered.dim_size(2)
        var d = grad_gathered.dim_size(3)
        expect_shape("grad_input", grad_input, B, N, L, d)
        expect_shape("order", order, L)
        var launcher = DeviceLauncher(ctx)
        launch_scatter[dtype](
            launcher,
            grad_input.unsafe_ptr(),
            grad_gathered.unsafe_ptr().as_imm(),
            order.unsafe_ptr().as_imm(),
            B * N,
            L,
            d,
        )


@extensibility.register("hilbert_scatter_train")
struct HilbertScatterTrain:
    """Scatter rows to their origin, in the caller's buffer."""

    @staticmethod
    def execute[
        dtype: DType
    ](
        grad_input: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        grad_gathered: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [L]
        ctx: DeviceContext,
    ) raises:
        var B = grad_gathered.dim_size(0)
        var N = grad_gathered.dim_size(1)
        var L = grad_gathered.dim_size(2)
        var d = grad_gathered.dim_size(3)
        expect_shape("grad_input", grad_input, B, N, L, d)
        expect_shape("order", order, L)
        var launcher = DeviceLauncher(ctx)
        launch_scatter[dtype](
            launcher,
            grad_input.unsafe_ptr(),
            grad_gathered.unsafe_ptr().as_imm(),
            order.unsafe_ptr().as_imm(),
            B * N,
            L,
            d,
        )


@extensibility.register("window_tiles_train")
struct WindowTilesTrain:
    """Mark which tiles of queries need which tiles of keys, in the caller's buffer."""

    @staticmethod
    def execute(
        tiles: MutableInputTensor[dtype=DType.int32, rank=2, static_spec=_],  # [t, t]
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [L]
        width: Int32,
        radius: Int32,
        tile: Int32,
        ctx: DeviceContext,
    ) raises:
        var sizes = validate_sizes(1, order.dim_size(0), 1, width, radius, tile)
        expect_shape("tiles", tiles, sizes.tiles(), sizes.tiles())
        var launcher = DeviceLauncher(ctx)
        launch_tiles(launcher, tiles.unsafe_ptr(), order.unsafe_ptr().as_imm(), sizes)


@extensibility.register("window_attention_train")
struct WindowAttentionTrain:
    """Compute attention within a window, with rows read by the order: output and lse, in place."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        output: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        lse: MutableInputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, L]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [L]
        tiles: InputTensor[dtype=DType.int32, rank=2, static_spec=_],  # [t, t]
        width: Int32,
        radius: Int32,
        tile: Int32,
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "lse must have the accumulation dtype"
        var B = query.dim_size(0)
        var N = query.dim_size(1)
        var L = query.dim_size(2)
        var d = query.dim_size(3)
        var sizes = validate_sizes(B * N, L, d, width, radius, tile)
        expect_shape("output", output, B, N, L, d)
        expect_shape("lse", lse, B, N, L)
        expect_shape("key", key, B, N, L, d)
        expect_shape("value", value, B, N, L, d)
        expect_shape("order", order, L)
        expect_shape("tiles", tiles, sizes.tiles(), sizes.tiles())
        var tensors = WindowForward[dtype](
            output=output.unsafe_ptr(),
            lse=rebind[Pointer[Scalar[accum_type[dtype]], MutAnyOrigin]](lse.unsafe_ptr()),
            query=query.unsafe_ptr().as_imm(),
            key=key.unsafe_ptr().as_imm(),
            value=value.unsafe_ptr().as_imm(),
            order=order.unsafe_ptr().as_imm(),
            tiles=tiles.unsafe_ptr().as_imm(),
            sizes=sizes.copy(),
        )
        var launcher = DeviceLauncher(ctx)
        launch_window_forward(launcher, tensors)


@extensibility.register("window_attention_train_backward")
struct WindowAttentionTrainBackward:
    """Compute delta and the gradients of query, key and value from output and lse, in place."""

    @staticmethod
    def execute[
        accum: DType, dtype: DType
    ](
        grad_query: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        grad_key: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        grad_value: MutableInputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        delta: MutableInputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, L]
        grad_output: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        query: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        key: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        value: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        output: InputTensor[dtype=dtype, rank=4, static_spec=_],  # [B, N, L, d]
        lse: InputTensor[dtype=accum, rank=3, static_spec=_],  # [B, N, L]
        order: InputTensor[dtype=DType.int32, rank=1, static_spec=_],  # [L]
        tiles: InputTensor[dtype=DType.int32, rank=2, static_spec=_],  # [t, t]
        width: Int32,
        radius: Int32,
        tile: Int32,
        ctx: DeviceContext,
    ) raises:
        comptime assert accum == accum_type[dtype], "lse and delta must have the accumulation dtype"
        var B = query.dim_size(0)
        var N = query.dim_size(1)
        var L = query.dim_size(2)
        var d = query.dim_size(3)
        var sizes = validate_sizes(B * N, L, d, width, radius, tile)
        expect_shape("grad_query", grad_query, B, N, L, d)
        expect_shape("grad_key", grad_key, B, N, L, d)
        expect_shape("grad_value", grad_value, B, N, L, d)
        expect_shape("delta", delta, B, N, L)
        expect_shape("grad_output", grad_output, B, N, L, d)
        expect_shape("key", key, B, N, L, d)
        expect_shape("value", value, B, N, L, d)
        expect_shape("output", output, B, N, L, d)
        expect_shape("lse", lse, B, N, L)
        expect_shape("order", order, L)
        expect_shape("tiles", tiles, sizes.tiles(), sizes.tiles())
        var tensors = WindowBackward[dtype](
            grad_query=grad_query.unsafe_ptr(),
            grad_key=grad_key.unsafe_ptr(),
            grad_value=grad_value.unsafe_ptr(),
            delta=rebind[Pointer[Scalar[accum_type[dtype]], MutAnyOrigin]](delta.unsafe_ptr()),
            grad_output=grad_output.unsafe_ptr().as_imm(),
            query=query.unsafe_ptr().as_imm(),
            key=key.unsafe_ptr().as_imm(),
            value=value.unsafe_ptr().as_imm(),
            output=output.unsafe_ptr().as_imm(),
            lse=rebind[Pointer[Scalar[accum_type[dtype]], ImmutAnyOrigin]](lse.unsafe_ptr().as_imm()),
            order=order.unsafe_ptr().as_imm(),
            tiles=tiles.unsafe_ptr().as_imm(),
            sizes=sizes.copy(),
        )
        var launcher = DeviceLauncher(ctx)
        launch_window_backward(launcher, tensors)
