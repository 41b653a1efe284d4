"""Launches of the `wgmma` kernels of `hopper.mojo` and `hopper_keys.mojo`: tile sizes and geometry."""

from std.math import ceildiv
from max.gpu.host import Dim
from max.gpu.host.nvidia.tma import TMADescriptor

from .dropout import KEEP_ONE, DropoutArguments
from .hopper import (
    forward_bytes,
    hopper_forward_kernel,
    hopper_numbers_kernel,
    hopper_query_kernel,
    padded,
    query_bytes,
)
from .hopper_dropout import DRAW_THREADS, count_words, draw_blocks, hopper_draws_kernel
from .hopper_keys import hopper_key_value_kernel, key_bytes, key_owners
from .hopper_masks import create_mask_map
from .hopper_tiles import GROUP_THREADS, BOX_SIZE, create_head_map
from .kernels import DELTA_LANES, DELTA_THREADS
from .layout import Layout
from .tiles import MAX_HEAD_DIM
from .tensors import FlashBackward, FlashForward, FlashSizes
from shared.common import ImmPtr, MutPtr
from shared.launcher import Launcher

comptime FEW_QUERIES = 1024
"""Maximum queries for small blocks of the query's gradient kernel: with few queries, or a causal mask, they
leave less of a Hopper GPU idle at the end.
"""
comptime MAX_GRID_YZ = 65535
"""Maximum blocks along y and z of a grid."""


def launch_forward_wgmma[
    L: Launcher, dtype: DType, //, has_mask: Bool
](mut launcher: L, t: FlashForward[dtype], layout: Layout) raises:
    """Launch the forward kernel with the tiles for the head dimension; with a mask if `has_mask`."""
    if Int(t.sizes.head_dim) <= BOX_SIZE:
        launch_forward_hopper[BOX_SIZE, groups=1, keys=128, resident=2, has_mask=has_mask](
            launcher, t, layout
        )
    elif Int(t.sizes.head_dim) <= 2 * BOX_SIZE:
        launch_forward_hopper[2 * BOX_SIZE, groups=2, keys=128, resident=1, has_mask=has_mask](
            launcher, t, layout
        )
    elif Int(t.sizes.head_dim) <= 3 * BOX_SIZE:
        launch_forward_hopper[3 * BOX_SIZE, groups=2, keys=64, resident=1, has_mask=has_mask](
            launcher, t, layout
        )
    else:
        launch_forward_hopper[MAX_HEAD_DIM, groups=2, keys=64, resident=1, has_mask=has_mask](
            launcher, t, layout
        )


def launch_forward_hopper[
    L: Launcher,
    dtype: DType,
    //,
    width: Int,
    *,
    groups: Int,
    keys: Int,
    resident: Int,
    has_mask: Bool = False,
    has_dropout: Bool = False,
](mut launcher: L, t: FlashForward[dtype], layout: Layout, draws: Optional[DropoutArguments] = None) raises:
    """Launch the forward kernel with one tile size; with a mask if `has_mask`, and after the kernel that
    draws if `has_dropout`.
    """
    ref sizes = t.sizes
    var words = draw_words[has_dropout](launcher, sizes, draws)
    var ctx = launcher.context()
    if not ctx:
        return
    var query = create_head_map(ctx.value(), t.query, sizes.query_heads, sizes.query_len, sizes, layout.query)
    launcher.launch[hopper_forward_kernel[dtype, width, groups, keys, resident, has_mask, has_dropout]](
        "attention_forward_wgmma",
        t.output,
        rebind[MutPtr[DType.float32]](t.lse),
        query,
        create_head_map(ctx.value(), t.key, sizes.key_heads, sizes.key_len, sizes, layout.key),
        create_head_map(ctx.value(), t.value, sizes.key_heads, sizes.key_len, sizes, layout.value),
        create_mask_map(ctx.value(), t.mask, sizes) if has_mask else query,
        t.mask,
        words,
        layout.output,
        sizes.packed(),
        t.scale.cast[DType.float32](),
        keep_factor(draws),
        grid_dim=Dim(
            ceildiv(Int(sizes.query_len), groups * BOX_SIZE), Int(sizes.query_heads), Int(sizes.batch)
        ),
        block_dim=Dim((groups + 1) * GROUP_THREADS),
        shared_bytes=forward_bytes[width, groups, keys, has_mask](),
        early=has_dropout,
    )


def draw_words[
    L: Launcher, //, has_dropout: Bool
](mut launcher: L, sizes: FlashSizes, draws: Optional[DropoutArguments]) raises -> ImmPtr[DType.uint32]:
    """If `has_dropout`, launch the kernel that draws and return its words; otherwise return an address that
    is not read.
    """
    comptime if not has_dropout:
        return ImmPtr[DType.uint32](unsafe_from_address=16)
    var words = launcher.workspace[DType.uint32]("draws", count_words(sizes))
    if launcher.context():
        launcher.launch[hopper_draws_kernel](
            "attention_dropout_bits",
            words,
            draws.value().state,
            draws.value().keep_threshold,
            sizes.packed(),
            grid_dim=Dim(draw_blocks(sizes)),
            block_dim=Dim(DRAW_THREADS),
            early=True,
        )
    return words.as_imm()


def keep_fraction(draws: Optional[DropoutArguments]) -> Float32:
    """Return the fraction of probabilities that are kept."""
    return Float32(draws.value().keep_threshold) / KEEP_ONE if draws else 1


def keep_factor(draws: Optional[DropoutArguments]) -> Float32:
    """Return the factor for kept probabilities."""
    var fraction = keep_fraction(draws)
    return 1 / fraction if fraction != 0 else 0


def launch_backward_wgmma[
    L: Launcher, dtype: DType, //, has_mask: Bool
](mut launcher: L, t: FlashBackward[dtype], output: Optional[ImmPtr[dtype]], layout: Layout) raises:
    """Launch three kernels with the tiles for the head dimension: the two numbers per row; grad_key and
    grad_value; grad_query. If `has_mask`, there is a mask, and heads have up to 128 elements.

    Delta is computed from the output if there is one; otherwise it is `t.delta`.
    """
    var d = Int(t.sizes.head_dim)
    comptime if not has_mask:
        if d > 3 * BOX_SIZE:
            launch_backward_hopper[
                MAX_HEAD_DIM, key_groups=2, key_resident=1, query_groups=1, query_stages=2, query_resident=1
            ](launcher, t, output, layout)
            return
        if d > 2 * BOX_SIZE:
            launch_backward_hopper[
                3 * BOX_SIZE, key_groups=2, key_resident=1, query_groups=2, query_stages=2, query_resident=1
            ](launcher, t, output, layout)
            return
        if (
            d <= BOX_SIZE
            and Int(t.sizes.query_len) > FEW_QUERIES
            and t.sizes.visible_keys(0) == Int(t.sizes.key_len)
        ):
            launch_backward_hopper[
                BOX_SIZE, key_groups=1, key_resident=2, query_groups=3, query_stages=3, query_resident=1
            ](launcher, t, output, layout)
            return
    if d > BOX_SIZE:
        launch_backward_hopper[
            2 * BOX_SIZE,
            key_groups=2,
            key_resident=1,
            query_groups=2,
            query_stages=3,
            query_resident=1,
            has_mask=has_mask,
        ](launcher, t, output, layout)
    else:
        launch_backward_hopper[
            BOX_SIZE,
            key_groups=1,
            key_resident=2,
            query_groups=1,
            query_stages=3,
            query_resident=2,
            has_mask=has_mask,
        ](launcher, t, output, layout)


def launch_backward_hopper[
    L: Launcher,
    dtype: DType,
    //,
    width: Int,
    *,
    key_groups: Int,
    key_resident: Int,
    query_groups: Int,
    query_stages: Int,
    query_resident: Int,
    has_mask: Bool = False,
    has_dropout: Bool = False,
](
    mut launcher: L,
    t: FlashBackward[dtype],
    output: Optional[ImmPtr[dtype]],
    layout: Layout,
    draws: Optional[DropoutArguments] = None,
) raises:
    """Launch the backward kernels with one tile size; with a mask if `has_mask`; if `has_dropout`, after the
    kernel that draws the forward pass's bits again. `resident` is the number of blocks per multiprocessor.
    """
    ref sizes = t.sizes
    var words = draw_words[has_dropout](launcher, sizes, draws)
    var count = sizes.heads() * 2 * padded(Int(sizes.query_len))
    var numbers = launcher.workspace[DType.float32]("numbers", count)
    var ctx = launcher.context()
    if not ctx:
        return
    var query = create_head_map(ctx.value(), t.query, sizes.query_heads, sizes.query_len, sizes, layout.query)
    var grad = create_head_map(
        ctx.value(), t.grad_output, sizes.query_heads, sizes.query_len, sizes, layout.grad_output
    )
    var key = create_head_map(ctx.value(), t.key, sizes.key_heads, sizes.key_len, sizes, layout.key)
    var value = create_head_map(ctx.value(), t.value, sizes.key_heads, sizes.key_len, sizes, layout.value)
    var mask = create_mask_map(ctx.value(), t.mask, sizes) if has_mask else query
    launcher.launch[hopper_numbers_kernel[dtype, has_dropout]](
        "attention_row_numbers",
        numbers,
        rebind[ImmPtr[DType.float32]](t.lse),
        rebind[ImmPtr[DType.float32]](t.delta),
        t.grad_output,
        output.value() if output else t.grad_output,
        Int32(1 if output else 0),
        keep_fraction(draws),
        layout.grad_output,
        layout.output,
        sizes.packed(),
        grid_dim=Dim(ceildiv(count // 2, DELTA_THREADS // DELTA_LANES)),
        block_dim=Dim(DELTA_THREADS),
        early=True,
    )
    # If the first query sees the last key, every query sees every key, and no masked kernel is needed. With
    # dropout, only the masked kernel exists.
    if has_mask or (not has_dropout and sizes.visible_keys(0) == Int(sizes.key_len)):
        launch_key_value_hopper[
            width, key_groups, key_resident, has_dropout and not has_mask, has_mask, has_dropout
        ](launcher, t, query, grad, key, value, mask, words, numbers.as_imm(), layout, keep_factor(draws))
    else:
        launch_key_value_hopper[width, key_groups, key_resident, not has_mask, has_mask, has_dropout](
            launcher, t, query, grad, key, value, mask, words, numbers.as_imm(), layout, keep_factor(draws)
        )
    launcher.launch[
        hopper_query_kernel[dtype, width, query_groups, query_stages, query_resident, has_mask, has_dropout]
    ](
        "attention_query_wgmma",
        t.grad_query,
        query,
        grad,
        key,
        value,
        mask,
        t.mask,
        words,
        numbers.as_imm(),
        layout.grad_query,
        sizes.packed(),
        t.scale.cast[DType.float32](),
        keep_factor(draws),
        grid_dim=Dim(
            ceildiv(Int(sizes.query_len), query_groups * BOX_SIZE), Int(sizes.query_heads), Int(sizes.batch)
        ),
        block_dim=Dim((query_groups + 1) * GROUP_THREADS),
        shared_bytes=query_bytes[width, query_groups, query_stages, has_mask, has_dropout](),
        early=True,
    )


def launch_key_value_hopper[
    L: Launcher,
    dtype: DType,
    //,
    width: Int,
    groups: Int,
    resident: Int,
    masked: Bool,
    has_mask: Bool,
    has_dropout: Bool,
](
    mut launcher: L,
    t: FlashBackward[dtype],
    query: TMADescriptor,
    grad: TMADescriptor,
    key: TMADescriptor,
    value: TMADescriptor,
    mask: TMADescriptor,
    words: ImmPtr[DType.uint32],
    numbers: ImmPtr[DType.float32],
    layout: Layout,
    rescale: Float32,
) raises:
    """Launch the kernel for the gradients of key and value with one tile size; `masked` if a causal mask
    hides keys, `has_mask` if there is an additive mask, `has_dropout` if there is dropout.
    """
    ref sizes = t.sizes
    launcher.launch[hopper_key_value_kernel[dtype, width, groups, resident, masked, has_mask, has_dropout]](
        "attention_key_value_wgmma",
        t.grad_key,
        t.grad_value,
        query,
        grad,
        key,
        value,
        mask,
        t.mask,
        words,
        numbers,
        layout.grad_key,
        layout.grad_value,
        sizes.packed(),
        t.scale.cast[DType.float32](),
        rescale,
        grid_dim=Dim(
            ceildiv(Int(sizes.key_len), key_owners[width, groups]() * BOX_SIZE),
            Int(sizes.key_heads),
            Int(sizes.batch),
        ),
        block_dim=Dim((groups + 1) * GROUP_THREADS),
        shared_bytes=key_bytes[width, groups, has_mask, has_dropout](),
        early=True,
    )
