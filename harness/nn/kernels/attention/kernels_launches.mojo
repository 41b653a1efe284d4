"""Launches of the kernels in `kernels.mojo` and `keys.mojo`: tile sizes and geometry."""

from std.math import ceildiv
from std.sys import size_of
from max.gpu.host import Dim

from .dropout import DropoutArguments
from .kernels import (
    DELTA_LANES,
    DELTA_THREADS,
    fast_delta_kernel,
    fast_forward_kernel,
    fast_query_kernel,
)
from .keys import fast_key_value_kernel, p_exchange_bytes, uses_warp_pairs
from .layout import MAX_OPTION_HEAD_DIM, Layout
from .masks import is_one_row
from .tiles import MAX_HEAD_DIM, row_pitch
from .varlen import count_slots
from .tensors import FlashBackward, FlashForward, FlashSizes
from shared.common import ImmPtr, MutPtr, shared_memory
from shared.launcher import Launcher

comptime MAX_ROWS = 128
"""Rows in the largest tile of the `mma.sync` kernels, a multiple of all other tile sizes."""
comptime MASKED_SHARED_BYTES = 115200
"""Bytes of shared memory of the largest `mma.sync` kernel with a mask."""


def has_full_tiles(sizes: FlashSizes) -> Bool:
    """Return whether every tile of every `mma.sync` kernel is full and every query sees every key; always
    False for heads above MAX_OPTION_HEAD_DIM, whose kernels always check.
    """
    var full = sizes.query_len % MAX_ROWS == 0 and sizes.key_len % MAX_ROWS == 0
    full = full and sizes.head_dim % 64 == 0 and Int(sizes.head_dim) <= MAX_OPTION_HEAD_DIM
    return full and sizes.visible_keys(0) == Int(sizes.key_len)


def mask_bytes[dtype: DType, rows: Int, columns: Int](sizes: FlashSizes) -> Int:
    """Return the bytes of shared memory for two stages of a mask tile."""
    return 2 * size_of[Scalar[dtype]]() * columns * (1 if is_one_row(sizes) else rows)


def count_tiles[varlen: Bool](sizes: FlashSizes, length: Int32, rows: Int) -> Int:
    """Return the number of blocks per head."""
    comptime if varlen:
        return count_slots(Int(length), Int(sizes.mask_block), rows)
    return ceildiv(Int(length), rows)


def launch_forward_tiles[
    L: Launcher, dtype: DType, //, masked: Bool
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """Launch the forward kernel with the tiles for the head dimension."""
    comptime if not masked:
        if has_full_tiles(t.sizes):
            launch_forward_tiles[masked, whole=True](launcher, t, layout)
            return
    launch_forward_tiles[masked, whole=False](launcher, t, layout)


def launch_forward_tiles[
    L: Launcher, dtype: DType, //, masked: Bool, *, whole: Bool
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """Launch the forward kernel, the `whole` variant if possible."""
    if t.sizes.head_dim <= 64:
        launch_forward_tiles[masked, 64, bands=2, warps=4, step=64, resident=2, whole=whole](
            launcher, t, layout
        )
    elif t.sizes.head_dim <= 128:
        launch_forward_tiles[masked, 128, bands=2, warps=4, step=32, resident=2, whole=whole](
            launcher, t, layout
        )
    elif t.sizes.head_dim <= 160:
        launch_forward_tiles[masked, 160, bands=1, warps=4, step=32, resident=2](launcher, t, layout)
    elif t.sizes.head_dim <= 192:
        launch_forward_tiles[masked, 192, bands=1, warps=4, step=32, resident=2](launcher, t, layout)
    else:
        comptime step = 32 if not masked or shared_memory() >= MASKED_SHARED_BYTES else 16
        launch_forward_tiles[masked, MAX_HEAD_DIM, bands=1, warps=4, step=step, resident=2](
            launcher, t, layout
        )


def launch_forward_tiles[
    L: Launcher,
    dtype: DType,
    //,
    masked: Bool,
    width: Int,
    *,
    bands: Int,
    warps: Int,
    step: Int,
    resident: Int,
    whole: Bool = False,
    varlen: Bool = False,
    dropout: Bool = False,
](mut launcher: L, t: FlashForward[dtype], layout: Layout, draws: Optional[DropoutArguments] = None) raises:
    """Launch the forward kernel with one tile size."""
    comptime rows = 16 * bands * warps
    var drawn = draws.copy().or_else(
        DropoutArguments(t.query.unsafe_bitcast[UInt32](), 0)
    )  # not read without dropout
    launcher.launch[
        fast_forward_kernel[dtype, masked, width, bands, warps, step, resident, whole, varlen, dropout]
    ](
        "attention_forward_mma",
        t.output,
        rebind[MutPtr[DType.float32]](t.lse),
        t.query,
        t.key,
        t.value,
        t.mask,
        layout.output,
        layout.query,
        layout.key,
        layout.value,
        t.sizes.packed(),
        t.scale.cast[DType.float32](),
        drawn.state,
        drawn.keep_threshold,
        grid_dim=Dim(count_tiles[varlen](t.sizes, t.sizes.query_len, rows) * t.sizes.heads()),
        block_dim=Dim(32 * warps),
        shared_bytes=(rows + 4 * step) * row_pitch[width]() * size_of[Scalar[dtype]]()
        + (mask_bytes[dtype, rows, step](t.sizes) if masked else 0),
    )


def launch_delta_rows[
    L: Launcher, dtype: DType, //
](
    mut launcher: L,
    delta: MutPtr[DType.float32],
    grad_output: ImmPtr[dtype],
    output: ImmPtr[dtype],
    grad_lse: ImmPtr[DType.float32],
    with_grad_lse: Bool,
    sizes: FlashSizes,
    layout: Layout,
) raises:
    """Launch the delta kernel."""
    launcher.launch[fast_delta_kernel[dtype]](
        "attention_delta",
        delta,
        grad_output,
        output,
        grad_lse,
        Int32(1 if with_grad_lse else 0),
        layout.grad_output,
        layout.output,
        sizes.packed(),
        grid_dim=Dim(ceildiv(sizes.rows(), DELTA_THREADS // DELTA_LANES)),
        block_dim=Dim(DELTA_THREADS),
    )


def launch_backward_tiles[
    L: Launcher, dtype: DType, //, masked: Bool
](mut launcher: L, t: FlashBackward[dtype], layout: Layout) raises:
    """Launch both gradient kernels with the tiles for the head dimension. No-op if there are no rows to
    write.
    """
    comptime if not masked:
        if has_full_tiles(t.sizes):
            launch_backward_tiles[masked, whole=True](launcher, t, layout)
            return
    launch_backward_tiles[masked, whole=False](launcher, t, layout)


def launch_backward_tiles[
    L: Launcher, dtype: DType, //, masked: Bool, *, whole: Bool
](mut launcher: L, t: FlashBackward[dtype], layout: Layout) raises:
    """Launch both gradient kernels, the `whole` variants if possible."""
    # If a mask's tiles do not fit next to the tiles for 128 rows, blocks are half as large.
    comptime mask_tiles_fit = not masked or shared_memory() >= MASKED_SHARED_BYTES
    comptime wide_step = 32 if mask_tiles_fit else 16
    if t.sizes.shared_heads() and t.sizes.key_len:
        if t.sizes.head_dim <= 64:
            launch_key_value_tiles[masked, 64, bands=2, warps=4, step=64, part=32, resident=2, whole=whole](
                launcher, t, layout
            )
        elif t.sizes.head_dim <= 128:
            launch_key_value_tiles[
                masked,
                128,
                bands=1,
                warps=8 if mask_tiles_fit else 4,
                step=32,
                part=32,
                resident=1,
                whole=whole,
            ](launcher, t, layout)
        elif t.sizes.head_dim <= 160:
            launch_key_value_tiles[masked, 160, bands=1, warps=4, step=32, part=32, resident=2](
                launcher, t, layout
            )
        elif t.sizes.head_dim <= 192:
            launch_key_value_tiles[masked, 192, bands=1, warps=4, step=32, part=32, resident=2](
                launcher, t, layout
            )
        else:
            launch_key_value_tiles[masked, MAX_HEAD_DIM, bands=1, warps=4, step=16, part=16, resident=2](
                launcher, t, layout
            )
    if t.sizes.heads() and t.sizes.query_len:
        if t.sizes.head_dim <= 64:
            launch_query_tiles[masked, 64, bands=2, warps=4, step=64, part=32, resident=2, whole=whole](
                launcher, t, layout
            )
        elif t.sizes.head_dim <= 128:
            launch_query_tiles[
                masked,
                128,
                bands=2 if mask_tiles_fit else 1,
                warps=4,
                step=32,
                part=16,
                resident=2,
                whole=whole,
            ](launcher, t, layout)
        elif t.sizes.head_dim <= 160:
            launch_query_tiles[masked, 160, bands=1, warps=4, step=wide_step, part=wide_step, resident=2](
                launcher, t, layout
            )
        elif t.sizes.head_dim <= 192:
            launch_query_tiles[masked, 192, bands=1, warps=4, step=wide_step, part=wide_step, resident=2](
                launcher, t, layout
            )
        else:
            comptime warps = 4 if mask_tiles_fit else 2
            launch_query_tiles[masked, MAX_HEAD_DIM, bands=1, warps=warps, step=16, part=16, resident=2](
                launcher, t, layout
            )


def launch_query_tiles[
    L: Launcher,
    dtype: DType,
    //,
    masked: Bool,
    width: Int,
    *,
    bands: Int,
    warps: Int,
    step: Int,
    part: Int,
    resident: Int,
    whole: Bool = False,
    varlen: Bool = False,
    dropout: Bool = False,
](mut launcher: L, t: FlashBackward[dtype], layout: Layout, draws: Optional[DropoutArguments] = None) raises:
    """Launch the kernel for the gradient of the query with one tile size."""
    comptime rows = 16 * bands * warps
    var drawn = draws.copy().or_else(
        DropoutArguments(t.query.unsafe_bitcast[UInt32](), 0)
    )  # not read without dropout
    launcher.launch[
        fast_query_kernel[
            dtype,
            masked,
            width,
            bands,
            warps,
            step,
            part,
            resident,
            whole,
            varlen,
            dropout,
        ]
    ](
        "attention_query_mma",
        t.grad_query,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        rebind[ImmPtr[DType.float32]](t.lse),
        rebind[ImmPtr[DType.float32]](t.delta),
        t.mask,
        layout.grad_query,
        layout.grad_output,
        layout.query,
        layout.key,
        layout.value,
        t.sizes.packed(),
        t.scale.cast[DType.float32](),
        drawn.state,
        drawn.keep_threshold,
        grid_dim=Dim(count_tiles[varlen](t.sizes, t.sizes.query_len, rows) * t.sizes.heads()),
        block_dim=Dim(32 * warps),
        shared_bytes=(2 * rows + 4 * step) * row_pitch[width]() * size_of[Scalar[dtype]]()
        + (mask_bytes[dtype, rows, step](t.sizes) if masked else 0),
    )


def launch_key_value_tiles[
    L: Launcher,
    dtype: DType,
    //,
    masked: Bool,
    width: Int,
    *,
    bands: Int,
    warps: Int,
    step: Int,
    part: Int,
    resident: Int,
    whole: Bool = False,
    varlen: Bool = False,
    dropout: Bool = False,
](mut launcher: L, t: FlashBackward[dtype], layout: Layout, draws: Optional[DropoutArguments] = None) raises:
    """Launch the kernel for the gradients of key and value with one tile size."""
    comptime rows = 16 * bands * (warps // 2 if uses_warp_pairs[width]() else warps)
    var drawn = draws.copy().or_else(
        DropoutArguments(t.query.unsafe_bitcast[UInt32](), 0)
    )  # not read without dropout
    launcher.launch[
        fast_key_value_kernel[
            dtype,
            masked,
            width,
            bands,
            warps,
            step,
            part,
            resident,
            whole,
            varlen,
            dropout,
        ]
    ](
        "attention_key_value_mma",
        t.grad_key,
        t.grad_value,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        rebind[ImmPtr[DType.float32]](t.lse),
        rebind[ImmPtr[DType.float32]](t.delta),
        t.mask,
        layout.grad_key,
        layout.grad_value,
        layout.grad_output,
        layout.query,
        layout.key,
        layout.value,
        t.sizes.packed(),
        t.scale.cast[DType.float32](),
        drawn.state,
        drawn.keep_threshold,
        grid_dim=Dim(count_tiles[varlen](t.sizes, t.sizes.key_len, rows) * t.sizes.shared_heads()),
        block_dim=Dim(32 * warps),
        shared_bytes=(2 * rows + 4 * step) * row_pitch[width]() * size_of[Scalar[dtype]]()
        + 16 * step
        + p_exchange_bytes[width, rows, part]()
        + (mask_bytes[dtype, step, rows](t.sizes) if masked else 0),
    )
