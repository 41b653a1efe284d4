"""How attention in a window is launched: the kernels of `fast_kernels.mojo` with a window in place of a mask."""

from .fast_kernels_launches import launch_forward_tiles, launch_key_value_tiles, launch_query_tiles
from .fast_layout import WIDE, Layout, has_tensor_cores
from .fast_tiles import CHUNK
from .flash_tensors import FlashBackward, FlashForward, FlashSizes
from .shared.common import accum_type
from .shared.launcher import Launcher

comptime WINDOW_WARPS = 8
"""Warps on a multiprocessor of the kernels of a window, of one block or of several: as many as the registers last for."""


def expect_window[dtype: DType](sizes: FlashSizes, scale: Scalar[accum_type[dtype]]) raises:
    """Raises an error for what the kernels of a window do not take."""
    comptime if not has_tensor_cores[dtype]():
        raise Error("a window wants 16-bit types on NVIDIA's tensor cores")
    var d = Int(sizes.head_dim)
    var alike = sizes.query_len == sizes.key_len and sizes.query_heads == sizes.key_heads
    if d > WIDE or d % CHUNK != 0 or not alike or scale <= 0:
        raise Error(
            t"a window wants as many keys as queries in each head, heads of at most {WIDE} elements in"
            t" whole chunks, a scale above 0"
        )


def launch_forward_window[
    L: Launcher, dtype: DType, //, tiles: Int
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """One launch: output and lse in a window, which `t.mask` is (`fast_window.mojo`); a block owns 64 * tiles queries.
    """
    expect_window[dtype](t.sizes, t.scale)
    comptime if has_tensor_cores[dtype]():
        if t.sizes.rows():
            if t.sizes.head_dim <= 64:
                launch_forward_window[64, bands=2, warps=2 * tiles](launcher, t, layout)
            else:
                launch_forward_window[128, bands=1, warps=4 * tiles](launcher, t, layout)


def launch_forward_window[
    L: Launcher, dtype: DType, //, width: Int, *, bands: Int, warps: Int
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """The forward kernel in one tiling."""
    launch_forward_tiles[
        False, width, bands=bands, warps=warps, step=64, resident=WINDOW_WARPS // warps, windowed=True
    ](launcher, t, layout)


def launch_backward_window[
    L: Launcher, dtype: DType, //, tiles: Int
](mut launcher: L, t: FlashBackward[dtype], layout: Layout) raises:
    """Two launches: grad_key and grad_value in a window, then grad_query."""
    expect_window[dtype](t.sizes, t.scale)
    comptime if has_tensor_cores[dtype]():
        if t.sizes.rows():
            if t.sizes.head_dim <= 64:
                launch_backward_window[64, bands=2, warps=2 * tiles](launcher, t, layout)
            else:
                launch_backward_window[128, bands=1, warps=4 * tiles](launcher, t, layout)


def launch_backward_window[
    L: Launcher, dtype: DType, //, width: Int, *, bands: Int, warps: Int
](mut launcher: L, t: FlashBackward[dtype], layout: Layout) raises:
    """Both kernels in one tiling."""
    comptime resident = WINDOW_WARPS // warps
    launch_key_value_tiles[
        False, width, bands=bands, warps=warps, step=64, part=32, resident=resident, windowed=True
    ](launcher, t, layout)
    launch_query_tiles[
        False, width, bands=bands, warps=warps, step=64, part=32, resident=resident, windowed=True
    ](launcher, t, layout)
