"""Launches of the flash kernels, provided: geometry and the order of arguments."""

from std.math import ceildiv
from max.gpu.host import Dim

from .attention import (
    ROW_THREADS,
    delta_kernel,
    flash_forward_kernel,
    flash_key_value_kernel,
    flash_query_kernel,
)
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.launcher import Launcher
from .sizes import FlashBackward, FlashForward
from .tiles import MAX_GRID_Z, TILE


def launch_flash_forward[L: Launcher, dtype: DType, //](mut launcher: L, t: FlashForward[dtype]) raises:
    """Launch one kernel: output and lse."""
    if t.sizes.heads() == 0 or t.sizes.query_len == 0:
        return
    launcher.launch[flash_forward_kernel[dtype]](
        "flash_forward",
        t.output,
        t.lse,
        t.query,
        t.key,
        t.value,
        t.mask,
        t.sizes.packed(),
        t.scale,
        grid_dim=Dim(ceildiv(Int(t.sizes.query_len), TILE), min(t.sizes.heads(), MAX_GRID_Z)),
        block_dim=Dim(TILE, TILE),
    )


def launch_delta[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    delta: MutPtr[accum_type[dtype]],
    grad_output: ImmPtr[dtype],
    output: ImmPtr[dtype],
    rows: Int,
    head_dim: Int32,
) raises:
    """Launch one kernel: delta = rowsum(dO * O)."""
    if rows == 0:
        return
    launcher.launch[delta_kernel[dtype]](
        "delta", delta, grad_output, output, head_dim, grid_dim=Dim(rows), block_dim=Dim(ROW_THREADS)
    )


def launch_flash_backward[L: Launcher, dtype: DType, //](mut launcher: L, t: FlashBackward[dtype]) raises:
    """Launch two kernels: one computes grad_query, the other grad_key and grad_value."""
    if t.sizes.heads() and t.sizes.query_len:
        launcher.launch[flash_query_kernel[dtype]](
            "flash_query",
            t.grad_query,
            t.grad_output,
            t.query,
            t.key,
            t.value,
            t.lse,
            t.delta,
            t.mask,
            t.sizes.packed(),
            t.scale,
            grid_dim=Dim(ceildiv(Int(t.sizes.query_len), TILE), min(t.sizes.heads(), MAX_GRID_Z)),
            block_dim=Dim(TILE, TILE),
        )
    if t.sizes.shared_heads() and t.sizes.key_len:
        launcher.launch[flash_key_value_kernel[dtype]](
            "flash_key_value",
            t.grad_key,
            t.grad_value,
            t.grad_output,
            t.query,
            t.key,
            t.value,
            t.lse,
            t.delta,
            t.mask,
            t.sizes.packed(),
            t.scale,
            grid_dim=Dim(ceildiv(Int(t.sizes.key_len), TILE), min(t.sizes.shared_heads(), MAX_GRID_Z)),
            block_dim=Dim(TILE, TILE),
        )
