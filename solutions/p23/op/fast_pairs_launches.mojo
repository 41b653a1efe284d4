"""How float32 attention by pairs of float16 is launched: splitting, the choice of the path, and both paths.

Both paths are launched, because nobody waits for the GPU to read what it has chosen; the kernels of the one that is not chosen
return at once. The plain one is that of the flash kernels.
"""

from std.math import ceildiv
from max.gpu import block_idx
from max.gpu.host import Dim

from .attention import flash_forward_kernel, flash_key_value_kernel, flash_query_kernel
from .fast_pairs import (
    CHOOSE_THREADS,
    HALF_TILE,
    HALF_TYPE,
    NUMBERS,
    PLAIN,
    RECORD,
    SIDE,
    SPLIT_THREADS,
    TileRows,
    choose_path_kernel,
    split_tiles_kernel,
)
from .fast_hopper import GROUP
from .fast_pairs_hopper import (
    FORWARD_PAIRS_BYTES,
    KEY_VALUE_PAIRS_BYTES,
    QUERY_PAIRS_BYTES,
    hopper_pairs_forward_kernel,
    hopper_pairs_key_value_kernel,
    hopper_pairs_query_kernel,
)
from .fast_pairs_kernels import (
    OUTPUT_ROWS,
    PAIRS_FORWARD_ELEMENTS,
    PAIRS_KEY_VALUE_ELEMENTS,
    PAIRS_QUERY_ELEMENTS,
    THREADS,
    pairs_forward_kernel,
    pairs_key_value_kernel,
    pairs_query_kernel,
)
from .flash_tensors import FlashBackward, FlashForward, FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr
from .shared.launcher import Launcher
from .tiles import TILE

comptime F32 = DType.float32
comptime PLAIN_BLOCKS = 2048
"""About as many blocks are launched of the plain path: they stride over the heads, and most calls need none."""


@fieldwise_init
struct Pairs(Copyable, Movable):
    """What the kernels read of all tensors, in scratch memory."""

    @__allow_legacy_any_origin_fields
    var tiles: ImmPtr[HALF_TYPE]

    @__allow_legacy_any_origin_fields
    var records: ImmPtr[F32]

    @__allow_legacy_any_origin_fields
    var numbers: ImmPtr[F32]

    @__allow_legacy_any_origin_fields
    var path: ImmPtr[DType.int32]


def suits_pairs(sizes: FlashSizes, scale: Float32) -> Bool:
    """Whether there are kernels: heads of at most 64 elements, no mask, a scale above 0, and something to do.
    """
    var some = sizes.rows() > 0 and sizes.shared_heads() > 0 and sizes.key_len > 0
    return some and Int(sizes.head_dim) <= SIDE and sizes.mask_block == 0 and scale > 0


def launch_pairs[
    L: Launcher, //
](
    mut launcher: L,
    query: ImmPtr[F32],
    key: ImmPtr[F32],
    value: ImmPtr[F32],
    grad_output: ImmPtr[F32],
    lse: ImmPtr[F32],
    delta: ImmPtr[F32],
    backward: Bool,
    sizes: FlashSizes,
    scale: Float32,
) raises -> Pairs:
    """Two launches: every tensor split into tiles, and the choice of the path. A forward pass has no grad_output.
    """
    var places = TileRows(sizes)
    var count = places.grad(sizes.heads() if backward else 0)
    var tiles = launcher.workspace[HALF_TYPE]("pairs", count * 2 * HALF_TILE)
    var records = launcher.workspace[F32]("records", count * RECORD)
    var rows = places.query(sizes.heads() if backward else 0) * SIDE
    var numbers = launcher.workspace[F32]("numbers", rows * NUMBERS)
    var path = launcher.workspace[DType.int32]("path", 1)
    launcher.launch[split_tiles_kernel](
        "split_tiles",
        tiles,
        records,
        numbers,
        query,
        key,
        value,
        grad_output,
        lse,
        delta,
        sizes.packed(),
        grid_dim=Dim(count),
        block_dim=Dim(SPLIT_THREADS),
    )
    launcher.launch[choose_path_kernel](
        "choose_path",
        path,
        records.as_imm(),
        Int64(count),
        sizes.packed(),
        scale,
        grid_dim=Dim(1),
        block_dim=Dim(CHOOSE_THREADS),
    )
    return Pairs(tiles.as_imm(), records.as_imm(), numbers.as_imm(), path.as_imm())


def plain_grid(length: Int32, heads: Int) -> Dim:
    """The blocks of a flash kernel that strides over the heads."""
    var blocks = ceildiv(Int(length), TILE)
    return Dim(blocks, max(1, min(heads, PLAIN_BLOCKS // blocks)))


# ---- The plain path -----------------------------------------------------------------------------------------


def plain_forward_kernel(
    path: ImmPtr[DType.int32],
    output: MutPtr[F32],
    lse: MutPtr[F32],
    query: ImmPtr[F32],
    key: ImmPtr[F32],
    value: ImmPtr[F32],
    mask: ImmPtr[F32],
    packed: PackedSizes,
    scale: Float32,
):
    """`flash_forward_kernel`, where the plain path has been chosen."""
    if path[unsafe_offset=0] == PLAIN:
        flash_forward_kernel[F32](output, lse, query, key, value, mask, packed, scale)


def plain_query_kernel(
    path: ImmPtr[DType.int32],
    grad_query: MutPtr[F32],
    grad_output: ImmPtr[F32],
    query: ImmPtr[F32],
    key: ImmPtr[F32],
    value: ImmPtr[F32],
    lse: ImmPtr[F32],
    delta: ImmPtr[F32],
    mask: ImmPtr[F32],
    packed: PackedSizes,
    scale: Float32,
):
    """`flash_query_kernel`, where the plain path has been chosen."""
    if path[unsafe_offset=0] == PLAIN:
        flash_query_kernel[F32](grad_query, grad_output, query, key, value, lse, delta, mask, packed, scale)


def plain_key_value_kernel(
    path: ImmPtr[DType.int32],
    grad_key: MutPtr[F32],
    grad_value: MutPtr[F32],
    grad_output: ImmPtr[F32],
    query: ImmPtr[F32],
    key: ImmPtr[F32],
    value: ImmPtr[F32],
    lse: ImmPtr[F32],
    delta: ImmPtr[F32],
    mask: ImmPtr[F32],
    packed: PackedSizes,
    scale: Float32,
):
    """`flash_key_value_kernel`, where the plain path has been chosen."""
    if path[unsafe_offset=0] == PLAIN:
        flash_key_value_kernel[F32](
            grad_key, grad_value, grad_output, query, key, value, lse, delta, mask, packed, scale
        )


def without_mask(sizes: FlashSizes) -> PackedSizes:
    """The sizes as the flash kernels want them, which read a mask of one 0."""
    var same = sizes.copy()
    same.mask_block = 1
    return same.packed()


# ---- The kernels on tensor cores ----------------------------------------------------------------------------


def launch_output[
    L: Launcher, //
](mut launcher: L, t: FlashForward[F32], pairs: Pairs, portable: Bool) raises:
    """One launch: output and lse."""
    ref sizes = t.sizes
    var scale = t.scale.cast[F32]()
    comptime if L.wgmma:
        if not portable:
            launcher.launch[hopper_pairs_forward_kernel](
                "hopper_pairs_forward",
                t.output,
                t.lse,
                pairs.tiles,
                pairs.records,
                pairs.path,
                sizes.packed(),
                scale,
                grid_dim=Dim(TileRows(sizes).of_queries * sizes.heads()),
                block_dim=Dim(2 * GROUP),
                shared_bytes=FORWARD_PAIRS_BYTES,
            )
            return
    launcher.launch[pairs_forward_kernel](
        "pairs_forward",
        t.output,
        t.lse,
        pairs.tiles,
        pairs.records,
        pairs.path,
        sizes.packed(),
        scale,
        grid_dim=Dim(ceildiv(Int(sizes.query_len), OUTPUT_ROWS) * sizes.heads()),
        block_dim=Dim(THREADS),
        shared_bytes=2 * PAIRS_FORWARD_ELEMENTS,
    )


def launch_key_value[
    L: Launcher, //
](mut launcher: L, t: FlashBackward[F32], pairs: Pairs, portable: Bool) raises:
    """One launch: grad_key and grad_value."""
    ref sizes = t.sizes
    var scale = t.scale.cast[F32]()
    var blocks = TileRows(sizes).of_keys * sizes.shared_heads()
    comptime if L.wgmma:
        if not portable:
            launcher.launch[hopper_pairs_key_value_kernel](
                "hopper_pairs_key_value",
                t.grad_key,
                t.grad_value,
                pairs.numbers,
                pairs.tiles,
                pairs.records,
                pairs.path,
                sizes.packed(),
                scale,
                grid_dim=Dim(blocks),
                block_dim=Dim(2 * GROUP),
                shared_bytes=KEY_VALUE_PAIRS_BYTES,
            )
            return
    launcher.launch[pairs_key_value_kernel](
        "pairs_key_value",
        t.grad_key,
        t.grad_value,
        pairs.numbers,
        pairs.tiles,
        pairs.records,
        pairs.path,
        sizes.packed(),
        scale,
        grid_dim=Dim(blocks),
        block_dim=Dim(THREADS),
        shared_bytes=2 * PAIRS_KEY_VALUE_ELEMENTS,
    )


def launch_query[
    L: Launcher, //
](mut launcher: L, t: FlashBackward[F32], pairs: Pairs, portable: Bool) raises:
    """One launch: grad_query."""
    ref sizes = t.sizes
    var scale = t.scale.cast[F32]()
    comptime if L.wgmma:
        if not portable:
            launcher.launch[hopper_pairs_query_kernel](
                "hopper_pairs_query",
                t.grad_query,
                pairs.numbers,
                pairs.tiles,
                pairs.records,
                pairs.path,
                sizes.packed(),
                scale,
                grid_dim=Dim(TileRows(sizes).of_queries * sizes.heads()),
                block_dim=Dim(2 * GROUP),
                shared_bytes=QUERY_PAIRS_BYTES,
            )
            return
    launcher.launch[pairs_query_kernel](
        "pairs_query",
        t.grad_query,
        pairs.numbers,
        pairs.tiles,
        pairs.records,
        pairs.path,
        sizes.packed(),
        scale,
        grid_dim=Dim(ceildiv(Int(sizes.query_len), OUTPUT_ROWS) * sizes.heads()),
        block_dim=Dim(THREADS),
        shared_bytes=2 * PAIRS_QUERY_ELEMENTS,
    )


# ---- Both passes --------------------------------------------------------------------------------------------


def launch_forward_pairs[L: Launcher, //](mut launcher: L, t: FlashForward[F32], portable: Bool) raises:
    """Four launches: output and lse of contiguous tensors that suit, by the `portable` kernels or by the fastest.
    """
    ref sizes = t.sizes
    var scale = t.scale.cast[F32]()
    var none = t.lse.as_imm()
    var pairs = launch_pairs(launcher, t.query, t.key, t.value, none, none, none, False, sizes, scale)
    launch_output(launcher, t, pairs, portable)
    launcher.launch[plain_forward_kernel](
        "plain_forward",
        pairs.path,
        t.output,
        t.lse,
        t.query,
        t.key,
        t.value,
        t.mask,
        without_mask(sizes),
        scale,
        grid_dim=plain_grid(sizes.query_len, sizes.heads()),
        block_dim=Dim(TILE, TILE),
    )


def launch_backward_pairs[L: Launcher, //](mut launcher: L, t: FlashBackward[F32], portable: Bool) raises:
    """Six launches: the gradients of contiguous tensors that suit, grad_key and grad_value in front of grad_query.
    """
    ref sizes = t.sizes
    var scale = t.scale.cast[F32]()
    var pairs = launch_pairs(
        launcher, t.query, t.key, t.value, t.grad_output, t.lse, t.delta, True, sizes, scale
    )
    var packed = without_mask(sizes)
    launch_key_value(launcher, t, pairs, portable)
    launcher.launch[plain_key_value_kernel](
        "plain_key_value",
        pairs.path,
        t.grad_key,
        t.grad_value,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        t.lse,
        t.delta,
        t.mask,
        packed,
        scale,
        grid_dim=plain_grid(sizes.key_len, sizes.shared_heads()),
        block_dim=Dim(TILE, TILE),
    )
    launch_query(launcher, t, pairs, portable)
    launcher.launch[plain_query_kernel](
        "plain_query",
        pairs.path,
        t.grad_query,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        t.lse,
        t.delta,
        t.mask,
        packed,
        scale,
        grid_dim=plain_grid(sizes.query_len, sizes.heads()),
        block_dim=Dim(TILE, TILE),
    )
