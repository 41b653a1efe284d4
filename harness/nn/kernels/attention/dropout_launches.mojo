"""Launches of attention with dropout: the `mma.sync` kernels, which generate the random numbers themselves,
and on Hopper the wgmma kernels, which read bits drawn by `hopper_dropout.mojo`.
"""

from .dropout import DropoutArguments
from .hopper_launches import launch_backward_hopper, launch_forward_hopper
from .kernels_launches import (
    MASKED_SHARED_BYTES,
    launch_delta_rows,
    launch_forward_tiles,
    launch_key_value_tiles,
    launch_query_tiles,
)
from .layout import MAX_OPTION_HEAD_DIM, Layout, has_tensor_cores
from .tensors import FlashBackward, FlashForward
from shared.common import ImmPtr, accum_type, shared_memory
from shared.launcher import Launcher

comptime MASK_TILES_FIT = shared_memory() >= MASKED_SHARED_BYTES
"""Whether mask tiles fit in shared memory together with the tiles for 128 rows."""


def launch_forward_dropout[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: FlashForward[dtype], layout: Layout, draws: DropoutArguments, wgmma: Bool) raises:
    """Launch one kernel, or two with `wgmma`, that compute the output with dropout and lse without it."""
    comptime if has_tensor_cores[dtype]():
        comptime if L.wgmma:
            if wgmma:
                if t.sizes.mask_block != 0:
                    launch_forward_dropout_hopper[has_mask=True](launcher, t, layout, draws)
                else:
                    launch_forward_dropout_hopper[has_mask=False](launcher, t, layout, draws)
                return
        if t.sizes.head_dim > 64:
            launch_forward_tiles[
                True, MAX_OPTION_HEAD_DIM, bands=2, warps=4, step=32, resident=2, dropout=True
            ](launcher, t, layout, draws)
        elif t.sizes.mask_block != 0 or t.scale <= 0:
            launch_forward_tiles[True, 64, bands=2, warps=4, step=64, resident=2, dropout=True](
                launcher, t, layout, draws
            )
        else:
            launch_forward_tiles[False, 64, bands=2, warps=4, step=64, resident=2, dropout=True](
                launcher, t, layout, draws
            )


def launch_forward_dropout_hopper[
    L: Launcher, dtype: DType, //, *, has_mask: Bool
](mut launcher: L, t: FlashForward[dtype], layout: Layout, draws: DropoutArguments) raises:
    """Launch two kernels: the draws, and the forward pass with wgmma."""
    if t.sizes.head_dim <= 64:
        launch_forward_hopper[64, groups=1, keys=128, resident=2, has_mask=has_mask, has_dropout=True](
            launcher, t, layout, draws
        )
    else:
        launch_forward_hopper[128, groups=2, keys=128, resident=1, has_mask=has_mask, has_dropout=True](
            launcher, t, layout, draws
        )


def launch_backward_dropout[
    L: Launcher, dtype: DType, //
](
    mut launcher: L,
    t: FlashBackward[dtype],
    output: ImmPtr[dtype],
    layout: Layout,
    draws: DropoutArguments,
    wgmma: Bool,
) raises:
    """Launch three kernels, or four with `wgmma`: delta, grad_key and grad_value, then grad_query. `t.delta`
    is not read.
    """
    comptime if has_tensor_cores[dtype]():
        comptime if L.wgmma:
            if wgmma:
                if t.sizes.mask_block != 0:
                    launch_backward_dropout_hopper[has_mask=True](launcher, t, output, layout, draws)
                else:
                    launch_backward_dropout_hopper[has_mask=False](launcher, t, output, layout, draws)
                return
        var delta = launcher.workspace[DType.float32]("delta", t.sizes.rows())
        launch_delta_rows(launcher, delta, t.grad_output, output, delta.as_imm(), False, t.sizes, layout)
        var with_delta = t.copy()
        with_delta.delta = rebind[ImmPtr[accum_type[dtype]]](delta.as_imm())
        if t.sizes.head_dim > 64:
            launch_key_value_tiles[
                True,
                MAX_OPTION_HEAD_DIM,
                bands=1,
                warps=8 if MASK_TILES_FIT else 4,
                step=32,
                part=32,
                resident=1,
                dropout=True,
            ](launcher, with_delta, layout, draws)
            launch_query_tiles[
                True,
                MAX_OPTION_HEAD_DIM,
                bands=2 if MASK_TILES_FIT else 1,
                warps=4,
                step=32,
                part=16,
                resident=2,
                dropout=True,
            ](launcher, with_delta, layout, draws)
        elif t.sizes.mask_block != 0 or t.scale <= 0:
            launch_backward_dropout[True](launcher, with_delta, layout, draws)
        else:
            launch_backward_dropout[False](launcher, with_delta, layout, draws)


def launch_backward_dropout[
    L: Launcher, dtype: DType, //, masked: Bool
](mut launcher: L, t: FlashBackward[dtype], layout: Layout, draws: DropoutArguments) raises:
    """Launch both gradient kernels for heads of up to 64 elements."""
    launch_key_value_tiles[masked, 64, bands=2, warps=4, step=64, part=32, resident=2, dropout=True](
        launcher, t, layout, draws
    )
    launch_query_tiles[masked, 64, bands=2, warps=4, step=64, part=32, resident=2, dropout=True](
        launcher, t, layout, draws
    )


def launch_backward_dropout_hopper[
    L: Launcher, dtype: DType, //, *, has_mask: Bool
](
    mut launcher: L, t: FlashBackward[dtype], output: ImmPtr[dtype], layout: Layout, draws: DropoutArguments
) raises:
    """Launch four kernels: the draws, the two numbers per row, and both gradient kernels with wgmma."""
    if t.sizes.head_dim <= 64:
        launch_backward_hopper[
            64,
            key_groups=1,
            key_resident=2,
            query_groups=1,
            query_stages=3,
            query_resident=2,
            has_mask=has_mask,
            has_dropout=True,
        ](launcher, t, output, layout, draws)
    else:
        launch_backward_hopper[
            128,
            key_groups=2,
            key_resident=1,
            query_groups=2,
            query_stages=3,
            query_resident=1,
            has_mask=has_mask,
            has_dropout=True,
        ](launcher, t, output, layout, draws)
