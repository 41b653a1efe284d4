"""Launches of attention for packed sequences: the kernels in `kernels.mojo` with offsets instead of a mask.
"""

from .kernels_launches import launch_forward_tiles, launch_key_value_tiles, launch_query_tiles
from .layout import MAX_OPTION_HEAD_DIM, Layout, has_tensor_cores
from .tiles import CHUNK
from .tensors import FlashBackward, FlashForward, FlashSizes
from shared.common import accum_type
from shared.launcher import Launcher


def check_varlen_arguments[dtype: DType](sizes: FlashSizes, scale: Scalar[accum_type[dtype]]) raises:
    """Raise if the kernels for unequal lengths do not support the arguments."""
    comptime if not has_tensor_cores[dtype]():
        raise Error("unequal lengths need 16-bit dtypes and NVIDIA's tensor cores")
    var d = Int(sizes.head_dim)
    if d > MAX_OPTION_HEAD_DIM or d % CHUNK != 0 or sizes.batch != 1 or sizes.mask_block < 1 or scale <= 0:
        raise Error(
            t"unequal lengths need one batch of at least one sequence, heads of at most"
            t" {MAX_OPTION_HEAD_DIM} elements in whole chunks of {CHUNK}, and a positive scale"
        )


def launch_forward_varlen[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """Launch one kernel that computes output and lse of `t.sizes.mask_block` sequences with the offsets
    `t.mask`; the lengths in `t.sizes` are totals over the sequences.
    """
    check_varlen_arguments[dtype](t.sizes, t.scale)
    comptime if has_tensor_cores[dtype]():
        if t.sizes.heads() == 0:
            return
        if t.sizes.head_dim <= 64:
            launch_forward_tiles[False, 64, bands=2, warps=4, step=64, resident=2, varlen=True](
                launcher, t, layout
            )
        else:
            launch_forward_tiles[
                False, MAX_OPTION_HEAD_DIM, bands=2, warps=4, step=32, resident=2, varlen=True
            ](launcher, t, layout)


def launch_backward_varlen[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: FlashBackward[dtype], layout: Layout) raises:
    """Launch two kernels: grad_key and grad_value, then grad_query."""
    check_varlen_arguments[dtype](t.sizes, t.scale)
    comptime if has_tensor_cores[dtype]():
        if t.sizes.heads() == 0:
            return
        if t.sizes.head_dim <= 64:
            launch_key_value_tiles[False, 64, bands=2, warps=4, step=64, part=32, resident=2, varlen=True](
                launcher, t, layout
            )
            launch_query_tiles[False, 64, bands=2, warps=4, step=64, part=32, resident=2, varlen=True](
                launcher, t, layout
            )
        else:
            launch_key_value_tiles[
                False, MAX_OPTION_HEAD_DIM, bands=1, warps=8, step=32, part=32, resident=1, varlen=True
            ](launcher, t, layout)
            launch_query_tiles[
                False, MAX_OPTION_HEAD_DIM, bands=2, warps=4, step=32, part=16, resident=2, varlen=True
            ](launcher, t, layout)
