"""Which kernels a pass of attention launches, of 16-bit types on NVIDIA's GPUs.

Those of `kernels.mojo` (`kernels_launches.mojo`), or of `hopper.mojo` where they fit and the GPU is a Hopper
(`hopper_launches.mojo`). Where there is no mask, its blocks have size 0.
"""

from .hopper_launches import (
    launch_backward_hopper,
    launch_forward_hopper,
    suits_hopper,
    suits_hopper_forward,
)
from .kernels_launches import launch_backward_tiles, launch_delta_rows, launch_forward_tiles
from .layout import Layout, fits_chunks, has_tensor_cores, is_aligned
from .tiles import CHUNK
from .tensors import FlashBackward, FlashForward, FlashSizes
from shared.common import ImmPtr, MutPtr, accum_type
from shared.launcher import Launcher

comptime FOR = "the kernels are for 16-bit types on NVIDIA's tensor cores"


def launch_forward_fast[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: FlashForward[dtype], layout: Layout, portable: Bool = False) raises:
    """One launch: output and lse; by the `portable` kernels, or by the fastest."""
    ref sizes = t.sizes
    comptime assert has_tensor_cores[dtype](), FOR
    if sizes.heads() == 0 or sizes.query_len == 0:
        return
    var plain = fits_chunks(t.query, layout.query) and fits_chunks(t.key, layout.key)
    plain = plain and fits_chunks(t.value, layout.value)
    plain = plain and fits_chunks(t.output.as_imm(), layout.output)
    if not plain or sizes.head_dim % CHUNK != 0:
        launch_forward_tiles[True, aligned=False](launcher, t, layout)
        return
    comptime if L.wgmma:
        if not portable and suits_hopper_forward(t, layout):
            launch_forward_hopper(launcher, t, layout)
            return
    if sizes.mask_block != 0 or t.scale <= 0:
        launch_forward_tiles[True](launcher, t, layout)
    else:
        launch_forward_tiles[False](launcher, t, layout)


def launch_delta_fast[
    L: Launcher, //, dtype: DType
](
    mut launcher: L,
    delta: MutPtr[accum_type[dtype]],
    grad_output: ImmPtr[dtype],
    output: ImmPtr[dtype],
    grad_lse: ImmPtr[accum_type[dtype]],
    with_grad_lse: Bool,
    sizes: FlashSizes,
    layout: Layout,
) raises:
    """One launch: delta = rowsum(dO * O), minus grad_lse where there is one."""
    if sizes.rows() == 0:
        return
    var plain = fits_chunks(grad_output, layout.grad_output) and fits_chunks(output, layout.output)
    plain = plain and sizes.head_dim % CHUNK == 0
    comptime assert has_tensor_cores[dtype](), FOR
    if plain:
        launch_delta_rows[aligned=True](
            launcher,
            rebind[MutPtr[DType.float32]](delta),
            grad_output,
            output,
            rebind[ImmPtr[DType.float32]](grad_lse),
            with_grad_lse,
            sizes,
            layout,
        )
        return
    launch_delta_rows[aligned=False](
        launcher,
        rebind[MutPtr[DType.float32]](delta),
        grad_output,
        output,
        rebind[ImmPtr[DType.float32]](grad_lse),
        with_grad_lse,
        sizes,
        layout,
    )


def launch_backward_fast[
    L: Launcher, dtype: DType, //
](mut launcher: L, t: FlashBackward[dtype], layout: Layout, portable: Bool = False) raises:
    """Two launches, three on a Hopper: grad_query by one kernel, grad_key and grad_value by another; by the `portable` kernels,
    or by the fastest."""
    ref sizes = t.sizes
    comptime assert has_tensor_cores[dtype](), FOR
    if not is_aligned(t, layout):
        launch_backward_tiles[True, aligned=False](launcher, t, layout)
        return
    comptime if L.wgmma:
        if not portable and suits_hopper(t, layout):
            launch_backward_hopper(launcher, t, None, layout)
            return
    if sizes.mask_block != 0 or t.scale <= 0:
        launch_backward_tiles[True](launcher, t, layout)
    else:
        launch_backward_tiles[False](launcher, t, layout)


def launch_gradients_fast[
    L: Launcher, dtype: DType, //
](
    mut launcher: L,
    t: FlashBackward[dtype],
    output: ImmPtr[dtype],
    layout: Layout,
    portable: Bool = False,
) raises:
    """`launch_delta_fast` and `launch_backward_fast` in one, three launches; t.delta is not read."""
    comptime if L.wgmma:
        var plain = fits_chunks(output, layout.output) and is_aligned(t, layout)
        if not portable and plain and suits_hopper(t, layout):
            launch_backward_hopper(launcher, t, output, layout)
            return
    var delta = launcher.workspace[accum_type[dtype]]("delta", t.sizes.rows())
    launch_delta_fast[dtype](launcher, delta, t.grad_output, output, delta.as_imm(), False, t.sizes, layout)
    var with_delta = t.copy()
    with_delta.delta = delta.as_imm()
    launch_backward_fast(launcher, with_delta, layout, portable)
