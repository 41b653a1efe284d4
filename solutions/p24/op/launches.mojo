"""Launches of puzzle 24's kernels, provided: geometry and the order of arguments."""

from std.math import ceildiv
from std.sys.defines import get_defined_int
from max.gpu.host import Dim

from .attention import window_forward_kernel, window_key_value_kernel, window_query_kernel
from .hilbert import (
    THREADS,
    hilbert_gather_kernel,
    hilbert_index_kernel,
    hilbert_inverse_kernel,
    hilbert_scatter_kernel,
    window_tiles_kernel,
)
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import Launcher
from .window import TILE, WindowBackward, WindowForward, WindowSizes

comptime MAX_GRID_Y = get_defined_int["MAX_GRID_Y", 65535]()
"""NVIDIA's maximum grid along y. Checks define a small one, so that kernels must stride."""


def launch_curve[
    L: Launcher, //
](mut launcher: L, index: MutPtr[DType.int32], inverse: MutPtr[DType.int32], side: Int) raises:
    """Launch two kernels: a thread for each step, then a thread for each cell."""
    launcher.launch[hilbert_index_kernel](
        "hilbert_index",
        index,
        Int32(side),
        grid_dim=Dim(ceildiv(side * side, THREADS)),
        block_dim=Dim(THREADS),
    )
    launcher.launch[hilbert_inverse_kernel](
        "hilbert_inverse",
        inverse,
        Int32(side),
        grid_dim=Dim(ceildiv(side * side, THREADS)),
        block_dim=Dim(THREADS),
    )


def launch_gather[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    gathered: MutPtr[dtype],  # [batches, L, d]
    input: ImmPtr[dtype],  # [batches, L, d]
    order: ImmPtr[DType.int32],  # [L]
    batches: Int,
    length: Int,
    head_dim: Int,
) raises:
    """Launch one kernel: a thread for each element of a batch."""
    if batches == 0 or length == 0 or head_dim == 0:
        return
    launcher.launch[hilbert_gather_kernel[dtype]](
        "hilbert_gather",
        gathered,
        input,
        order,
        Int32(batches),
        Int32(length),
        Int32(head_dim),
        grid_dim=Dim(ceildiv(length * head_dim, THREADS), min(batches, MAX_GRID_Y)),
        block_dim=Dim(THREADS),
    )


def launch_scatter[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    grad_input: MutPtr[dtype],  # [batches, L, d]
    grad_gathered: ImmPtr[dtype],  # [batches, L, d]
    order: ImmPtr[DType.int32],  # [L]
    batches: Int,
    length: Int,
    head_dim: Int,
) raises:
    """Launch one kernel: a thread for each element of a batch."""
    if batches == 0 or length == 0 or head_dim == 0:
        return
    launcher.launch[hilbert_scatter_kernel[dtype]](
        "hilbert_scatter",
        grad_input,
        grad_gathered,
        order,
        Int32(batches),
        Int32(length),
        Int32(head_dim),
        grid_dim=Dim(ceildiv(length * head_dim, THREADS), min(batches, MAX_GRID_Y)),
        block_dim=Dim(THREADS),
    )


def launch_tiles[
    L: Launcher, //
](
    mut launcher: L,
    tiles: MutPtr[DType.int32],  # [t, t]
    order: ImmPtr[DType.int32],  # [L]
    sizes: WindowSizes,
) raises:
    """Launch one kernel: a block for each pair of tiles."""
    if sizes.length == 0:
        return
    launcher.launch[window_tiles_kernel](
        "window_tiles",
        tiles,
        order,
        sizes.length,
        sizes.width,
        sizes.radius,
        sizes.tile,
        grid_dim=Dim(sizes.tiles(), min(sizes.tiles(), MAX_GRID_Y)),
        block_dim=Dim(THREADS),
    )


def launch_window_forward[L: Launcher, dtype: DType, //](mut launcher: L, t: WindowForward[dtype]) raises:
    """Launch one kernel: output and lse."""
    if t.sizes.batches == 0 or t.sizes.length == 0:
        return
    launcher.launch[window_forward_kernel[dtype]](
        "window_forward",
        t.output,
        t.lse,
        t.query,
        t.key,
        t.value,
        t.order,
        t.tiles,
        t.sizes.packed(),
        t.sizes.scale().cast[accum_type[dtype]](),
        grid_dim=Dim(ceildiv(Int(t.sizes.length), TILE), min(Int(t.sizes.batches), MAX_GRID_Y)),
        block_dim=Dim(TILE, TILE),
    )


def launch_window_backward[L: Launcher, dtype: DType, //](mut launcher: L, t: WindowBackward[dtype]) raises:
    """Launch two kernels: one computes grad_query and delta, the other grad_key and grad_value."""
    if t.sizes.batches == 0 or t.sizes.length == 0:
        return
    launcher.launch[window_query_kernel[dtype]](
        "window_query",
        t.grad_query,
        t.delta,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        t.output,
        t.lse,
        t.order,
        t.tiles,
        t.sizes.packed(),
        t.sizes.scale().cast[accum_type[dtype]](),
        grid_dim=Dim(ceildiv(Int(t.sizes.length), TILE), min(Int(t.sizes.batches), MAX_GRID_Y)),
        block_dim=Dim(TILE, TILE),
    )
    launcher.launch[window_key_value_kernel[dtype]](
        "window_key_value",
        t.grad_key,
        t.grad_value,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        t.lse,
        t.delta.as_imm(),
        t.order,
        t.tiles,
        t.sizes.packed(),
        t.sizes.scale().cast[accum_type[dtype]](),
        grid_dim=Dim(ceildiv(Int(t.sizes.length), TILE), min(Int(t.sizes.batches), MAX_GRID_Y)),
        block_dim=Dim(TILE, TILE),
    )
