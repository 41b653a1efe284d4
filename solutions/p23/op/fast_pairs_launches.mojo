"""How float32 attention by pairs of float16 is launched: splitting, the choice of the path, and both paths.

Both paths are launched, because nobody waits for the GPU to read what it has chosen; the kernels of the one that is not chosen
return at once. The plain one is that of the flash kernels, with dropout kernels of its own (`fast_pairs_plain.mojo`).

A pair takes as much scratch memory as the tensor. A batch that keeps the GPU busy in parts is done in parts, one after the
other in the same memory, which then may stay in the cache, too. In a backward pass the pairs of key and value lie where their
gradients will, if these have room for whole tiles: the last kernel reads each of these tiles once, and then writes the gradient there.

On a Hopper every launch but the first of a part begins before the one in front of it is done, and waits for it.
"""

from std.math import ceildiv
from max.gpu.host import Dim

from .fast_dropout import Draws
from .fast_hopper_launches import draw_words, rescale_of, share_of
from .fast_pairs import (
    CHOOSE_THREADS,
    HALF_TILE,
    HALF_TYPE,
    NUMBERS,
    RECORD,
    SIDE,
    SPLIT_THREADS,
    TileRows,
    WIDEST_PAIRS,
    WIDE_PAIRS,
    boxes_of,
    choose_path_kernel,
    split_tiles_kernel,
)
from .fast_hopper_tiles import GROUP
from .fast_pairs_hopper import (
    forward_bytes,
    hopper_pairs_forward_kernel,
    hopper_pairs_query_kernel,
    query_bytes,
)
from .fast_pairs_hopper_keys import gradient_groups, hopper_pairs_key_value_kernel, key_value_bytes
from .fast_pairs_kernels import (
    THREADS,
    forward_elements,
    key_value_elements,
    output_rows,
    pairs_forward_kernel,
    pairs_key_value_kernel,
    pairs_query_kernel,
    query_elements,
)
from .fast_pairs_plain import (
    PLAIN_THREADS,
    plain_dropout_backward_kernel,
    plain_dropout_forward_kernel,
    plain_forward_kernel,
    plain_key_value_kernel,
    plain_query_kernel,
)
from .flash_tensors import FlashBackward, FlashForward, FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr
from .shared.launcher import Launcher
from .tiles import MAX_GRID_Z, TILE

comptime F32 = DType.float32
comptime PLAIN_BLOCKS = 256
"""About as many blocks are launched of the plain path: they stride over the heads, and most calls need none."""


comptime WIDE = 96
"""Between SIDE and WIDE_PAIRS: up to so many elements a head's products take three quarters of the instructions."""
comptime ENOUGH_BLOCKS = min(3072, MAX_GRID_Z)
"""So many blocks of 64 queries keep a GPU busy: a part of a batch has no more entries than it takes. Checks make it small.
"""


@fieldwise_init
struct Pairs(Copyable, Movable):
    """What the kernels read of all tensors, in scratch memory."""

    @__allow_legacy_any_origin_fields
    var tiles: MutPtr[HALF_TYPE]
    """Of query and grad_output."""

    @__allow_legacy_any_origin_fields
    var key_tiles: MutPtr[HALF_TYPE]

    @__allow_legacy_any_origin_fields
    var value_tiles: MutPtr[HALF_TYPE]

    var tiles_before: Int32
    """Tiles of key, and of value, that are in front of those of the part."""

    @__allow_legacy_any_origin_fields
    var records: MutPtr[F32]

    @__allow_legacy_any_origin_fields
    var numbers: MutPtr[F32]

    @__allow_legacy_any_origin_fields
    var path: MutPtr[DType.int32]

    var draws: Draws
    """What the kernels with dropout take;"""

    @__allow_legacy_any_origin_fields
    var words: ImmPtr[DType.uint32]
    """those with wgmma this."""


def suits_pairs[L: Launcher](sizes: FlashSizes, scale: Float32, portable: Bool) -> Bool:
    """Whether there are kernels: heads of at most 128 elements, of 256 on a Hopper, no mask of blocks, a scale above 0, and
    something to do."""
    var some = sizes.rows() > 0 and sizes.shared_heads() > 0 and sizes.key_len > 0
    var widest = WIDEST_PAIRS if L.wgmma and not portable else WIDE_PAIRS
    return some and Int(sizes.head_dim) <= widest and sizes.mask_block <= 1 and scale > 0


def entries_together(sizes: FlashSizes) -> Int:
    """How many entries of the batch are a part; the last part may have fewer."""
    var of_entry = ceildiv(Int(sizes.query_len), SIDE) * Int(sizes.query_heads)
    var parts = ceildiv(Int(sizes.batch), ceildiv(ENOUGH_BLOCKS, of_entry))
    return ceildiv(Int(sizes.batch), parts)


def of_entries(sizes: FlashSizes, count: Int) -> FlashSizes:
    """The sizes of so many entries of the batch."""
    var part = sizes.copy()
    part.batch = Int32(count)
    return part^


def lend_pairs[
    L: Launcher, //
](mut launcher: L, sizes: FlashSizes, backward: Bool, elsewhere: Bool) raises -> Pairs:
    """Scratch memory for these sizes; of key and value none where their tiles are `elsewhere`."""
    var places = TileRows(sizes)
    var elements = ceildiv(Int(sizes.head_dim), SIDE) * (2 * HALF_TILE)
    var count = places.grad(sizes.heads() if backward else 0)
    var rows = places.query(sizes.heads() if backward else 0) * SIDE
    var own = places.grad_here(sizes.heads() if backward else 0)
    var of_keys = 0 if elsewhere else places.shared(sizes.shared_heads()) * elements
    return Pairs(
        tiles=launcher.workspace[HALF_TYPE]("pairs", own * elements),
        key_tiles=launcher.workspace[HALF_TYPE]("key_pairs", of_keys),
        value_tiles=launcher.workspace[HALF_TYPE]("value_pairs", of_keys),
        tiles_before=0,
        records=launcher.workspace[F32]("records", count * RECORD),
        numbers=launcher.workspace[F32]("numbers", rows * NUMBERS),
        path=launcher.workspace[DType.int32]("path", 1),
        draws=Draws(ImmPtr[DType.uint32](unsafe_from_address=16), 0),
        words=ImmPtr[DType.uint32](unsafe_from_address=16),
    )


def launch_split[
    L: Launcher, //, boxes: Int
](
    mut launcher: L,
    pairs: Pairs,
    query: ImmPtr[F32],
    key: ImmPtr[F32],
    value: ImmPtr[F32],
    grad_output: ImmPtr[F32],
    lse: ImmPtr[F32],
    delta: ImmPtr[F32],
    output: Optional[ImmPtr[F32]],
    made_delta: MutPtr[F32],
    backward: Bool,
    behind_draws: Bool,
    first: Int,
    sizes: FlashSizes,
    scale: Float32,
) raises:
    """Two launches: every tensor split into tiles, and the choice of the path. A forward pass has no grad_output. Delta is made
    of the output where there is one."""
    var count = TileRows(sizes).grad(sizes.heads() if backward else 0)
    launcher.launch[split_tiles_kernel[boxes]](
        "split_tiles",
        pairs.tiles,
        pairs.key_tiles,
        pairs.value_tiles,
        pairs.tiles_before,
        pairs.records,
        pairs.numbers,
        made_delta,
        query,
        key,
        value,
        grad_output,
        lse,
        delta,
        output.value() if output else grad_output,
        Int32(1 if output else 0),
        Int32(1 if behind_draws else 0),
        Int32(first),
        sizes.packed(),
        grid_dim=Dim(count),
        block_dim=Dim(SPLIT_THREADS),
        early=first > 0 or behind_draws,
    )
    launcher.launch[choose_path_kernel](
        "choose_path",
        pairs.path,
        pairs.records.as_imm(),
        Int64(count),
        sizes.packed(),
        scale,
        grid_dim=Dim(1),
        block_dim=Dim(CHOOSE_THREADS),
        early=True,
    )


def plain_grid(length: Int32, heads: Int) -> Dim:
    """The blocks of a flash kernel that strides over the heads."""
    var blocks = ceildiv(Int(length), TILE)
    return Dim(blocks, max(1, min(heads, PLAIN_BLOCKS // blocks)))


def without_mask(sizes: FlashSizes) -> PackedSizes:
    """The sizes as the flash kernels want them, which read a mask of one 0."""
    var same = sizes.copy()
    same.mask_block = 1
    return same.packed()


# ---- The kernels on tensor cores ----------------------------------------------------------------------------


def launch_output[
    L: Launcher, //, width: Int, dropped: Bool
](mut launcher: L, t: FlashForward[F32], pairs: Pairs, first: Int, portable: Bool) raises:
    """One launch: output and lse."""
    if t.sizes.mask_block != 0:
        launch_output_by[width, True, dropped](launcher, t, pairs, first, portable)
    else:
        launch_output_by[width, False, dropped](launcher, t, pairs, first, portable)


def launch_output_by[
    L: Launcher, //, width: Int, masked: Bool, dropped: Bool
](mut launcher: L, t: FlashForward[F32], pairs: Pairs, first: Int, portable: Bool) raises:
    """By the kernel for Hopper, or by that for every GPU."""
    ref sizes = t.sizes
    comptime if L.wgmma:
        if not portable:
            launcher.launch[hopper_pairs_forward_kernel[width, masked, dropped]](
                "hopper_pairs_forward",
                t.output,
                t.lse,
                pairs.tiles.as_imm(),
                pairs.key_tiles.as_imm(),
                pairs.value_tiles.as_imm(),
                pairs.tiles_before,
                pairs.records.as_imm(),
                pairs.path.as_imm(),
                t.mask,
                pairs.words,
                Int32(first),
                sizes.packed(),
                t.scale.cast[F32](),
                rescale_of(pairs.draws),
                grid_dim=Dim(TileRows(sizes).of_queries * sizes.heads()),
                block_dim=Dim(2 * GROUP),
                shared_bytes=forward_bytes[width](),
                early=True,
            )
            return
    comptime if width <= WIDE_PAIRS:
        launcher.launch[pairs_forward_kernel[width, masked or dropped, dropped]](
            "pairs_forward",
            t.output,
            t.lse,
            pairs.tiles.as_imm(),
            pairs.key_tiles.as_imm(),
            pairs.value_tiles.as_imm(),
            pairs.tiles_before,
            pairs.records.as_imm(),
            pairs.path.as_imm(),
            t.mask,
            Int32(first),
            sizes.packed(),
            t.scale.cast[F32](),
            pairs.draws.state,
            pairs.draws.kept,
            grid_dim=Dim(ceildiv(Int(sizes.query_len), output_rows[width]()) * sizes.heads()),
            block_dim=Dim(THREADS),
            shared_bytes=2 * forward_elements[width](),
            early=True,
        )


def launch_key_value[
    L: Launcher, //, width: Int, dropped: Bool
](mut launcher: L, t: FlashBackward[F32], pairs: Pairs, first: Int, portable: Bool) raises:
    """One launch: grad_key and grad_value."""
    if t.sizes.mask_block != 0:
        launch_key_value_by[width, True, dropped](launcher, t, pairs, first, portable)
    else:
        launch_key_value_by[width, False, dropped](launcher, t, pairs, first, portable)


def launch_key_value_by[
    L: Launcher, //, width: Int, masked: Bool, dropped: Bool
](mut launcher: L, t: FlashBackward[F32], pairs: Pairs, first: Int, portable: Bool) raises:
    """By the kernel for Hopper, or by that for every GPU."""
    ref sizes = t.sizes
    comptime if L.wgmma:
        if not portable:
            launcher.launch[hopper_pairs_key_value_kernel[width, masked, dropped]](
                "hopper_pairs_key_value",
                t.grad_key,
                t.grad_value,
                pairs.numbers.as_imm(),
                pairs.tiles.as_imm(),
                pairs.key_tiles.as_imm(),
                pairs.value_tiles.as_imm(),
                pairs.tiles_before,
                pairs.records.as_imm(),
                pairs.path.as_imm(),
                t.mask,
                pairs.words,
                Int32(first),
                sizes.packed(),
                t.scale.cast[F32](),
                share_of(pairs.draws),
                rescale_of(pairs.draws),
                grid_dim=Dim(TileRows(sizes).of_keys * sizes.shared_heads()),
                block_dim=Dim((1 + gradient_groups[width]()) * GROUP),
                shared_bytes=key_value_bytes[width](),
                early=True,
            )
            return
    comptime if width <= WIDE_PAIRS:
        launcher.launch[pairs_key_value_kernel[width, masked or dropped, dropped]](
            "pairs_key_value",
            t.grad_key,
            t.grad_value,
            pairs.numbers.as_imm(),
            pairs.tiles.as_imm(),
            pairs.key_tiles.as_imm(),
            pairs.value_tiles.as_imm(),
            pairs.tiles_before,
            pairs.records.as_imm(),
            pairs.path.as_imm(),
            t.mask,
            Int32(first),
            sizes.packed(),
            t.scale.cast[F32](),
            pairs.draws.state,
            pairs.draws.kept,
            grid_dim=Dim(TileRows(sizes).of_keys * sizes.shared_heads()),
            block_dim=Dim(THREADS),
            shared_bytes=2 * key_value_elements[width](),
            early=True,
        )


def launch_query[
    L: Launcher, //, width: Int, dropped: Bool
](mut launcher: L, t: FlashBackward[F32], pairs: Pairs, first: Int, portable: Bool) raises:
    """One launch: grad_query."""
    if t.sizes.mask_block != 0:
        launch_query_by[width, True, dropped](launcher, t, pairs, first, portable)
    else:
        launch_query_by[width, False, dropped](launcher, t, pairs, first, portable)


def launch_query_by[
    L: Launcher, //, width: Int, masked: Bool, dropped: Bool
](mut launcher: L, t: FlashBackward[F32], pairs: Pairs, first: Int, portable: Bool) raises:
    """By the kernel for Hopper, or by that for every GPU."""
    ref sizes = t.sizes
    comptime if L.wgmma:
        if not portable:
            launcher.launch[hopper_pairs_query_kernel[width, masked, dropped]](
                "hopper_pairs_query",
                t.grad_query,
                pairs.numbers.as_imm(),
                pairs.tiles.as_imm(),
                pairs.key_tiles.as_imm(),
                pairs.value_tiles.as_imm(),
                pairs.tiles_before,
                pairs.records.as_imm(),
                pairs.path.as_imm(),
                t.mask,
                pairs.words,
                Int32(first),
                sizes.packed(),
                t.scale.cast[F32](),
                share_of(pairs.draws),
                rescale_of(pairs.draws),
                grid_dim=Dim(TileRows(sizes).of_queries * sizes.heads()),
                block_dim=Dim(2 * GROUP),
                shared_bytes=query_bytes[width](),
                early=True,
            )
            return
    comptime if width <= WIDE_PAIRS:
        launcher.launch[pairs_query_kernel[width, masked or dropped, dropped]](
            "pairs_query",
            t.grad_query,
            pairs.numbers.as_imm(),
            pairs.tiles.as_imm(),
            pairs.key_tiles.as_imm(),
            pairs.value_tiles.as_imm(),
            pairs.tiles_before,
            pairs.records.as_imm(),
            pairs.path.as_imm(),
            t.mask,
            Int32(first),
            sizes.packed(),
            t.scale.cast[F32](),
            pairs.draws.state,
            pairs.draws.kept,
            grid_dim=Dim(ceildiv(Int(sizes.query_len), output_rows[width]()) * sizes.heads()),
            block_dim=Dim(THREADS),
            shared_bytes=2 * query_elements[width](),
            early=True,
        )


# ---- Both passes --------------------------------------------------------------------------------------------


def draw[
    L: Launcher, //, dropped: Bool
](mut launcher: L, mut pairs: Pairs, sizes: FlashSizes, draws: Optional[Draws], portable: Bool) raises:
    """Where some probabilities are `dropped`, what the kernels need for it: for those with wgmma one launch.
    """
    comptime if dropped:
        pairs.draws = draws.value()
        comptime if L.wgmma:
            if not portable:
                pairs.words = draw_words[True](launcher, sizes, draws)


def launch_forward_pairs[
    L: Launcher, //, dropped: Bool = False
](mut launcher: L, t: FlashForward[F32], portable: Bool, draws: Optional[Draws] = None) raises:
    """Four launches for each part of the batch: output and lse of contiguous tensors that suit, by the `portable` kernels or
    by the fastest. With dropout on a Hopper what is kept is drawn first, of the whole batch."""
    ref whole = t.sizes
    var together = entries_together(whole)
    var pairs = lend_pairs(launcher, of_entries(whole, together), False, False)
    draw[dropped](launcher, pairs, whole, draws, portable)
    for first in range(0, Int(whole.batch), together):
        var part = t.copy()
        part.sizes = of_entries(whole, min(together, Int(whole.batch) - first))
        if Int(whole.head_dim) <= SIDE:
            launch_forward_part[SIDE, dropped](launcher, part, pairs, first, portable)
        elif not dropped and Int(whole.head_dim) <= WIDE:
            launch_forward_part[WIDE, False](launcher, part, pairs, first, portable)
        elif Int(whole.head_dim) <= WIDE_PAIRS:
            launch_forward_part[WIDE_PAIRS, dropped](launcher, part, pairs, first, portable)
        else:
            comptime if L.wgmma:
                if Int(whole.head_dim) <= 3 * SIDE:
                    launch_forward_part[3 * SIDE, False](launcher, part, pairs, first, portable)
                else:
                    launch_forward_part[WIDEST_PAIRS, False](launcher, part, pairs, first, portable)


def launch_forward_part[
    L: Launcher, //, width: Int, dropped: Bool
](mut launcher: L, t: FlashForward[F32], pairs: Pairs, first: Int, portable: Bool) raises:
    """Four launches."""
    ref sizes = t.sizes
    var scale = t.scale.cast[F32]()
    var none = t.lse.as_imm()
    launch_split[boxes_of[width]()](
        launcher,
        pairs,
        t.query,
        t.key,
        t.value,
        none,
        none,
        none,
        None,
        pairs.numbers,
        False,
        dropped and L.wgmma and first == 0 and not portable,
        first,
        sizes,
        scale,
    )
    launch_output[width, dropped](launcher, t, pairs, first, portable)
    comptime if dropped:
        launcher.launch[plain_dropout_forward_kernel](
            "plain_dropout_forward",
            pairs.path.as_imm(),
            Int32(first),
            t.output,
            t.lse,
            t.query,
            t.key,
            t.value,
            t.mask,
            pairs.draws.state,
            pairs.draws.kept,
            without_mask(sizes),
            scale,
            grid_dim=Dim(PLAIN_BLOCKS),
            block_dim=Dim(PLAIN_THREADS),
            early=True,
        )
        return
    launcher.launch[plain_forward_kernel](
        "plain_forward",
        pairs.path.as_imm(),
        Int32(first),
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
        early=True,
    )


def holds_tiles(gradient: MutPtr[F32], sizes: FlashSizes) -> Bool:
    """Whether the memory of a gradient of key or value is made of whole tiles."""
    return Int(sizes.head_dim) % SIDE == 0 and Int(sizes.key_len) % SIDE == 0 and Int(gradient) % 16 == 0


def launch_backward_pairs[
    L: Launcher, //, dropped: Bool = False
](
    mut launcher: L,
    t: FlashBackward[F32],
    output: Optional[ImmPtr[F32]],
    portable: Bool,
    draws: Optional[Draws] = None,
) raises:
    """Six launches for each part of the batch: the gradients of contiguous tensors that suit, grad_query in front of grad_key and
    grad_value; by the `portable` kernels or by the fastest. Delta is made of the output where there is one, else it is t.delta.
    """
    ref whole = t.sizes
    var together = entries_together(whole)
    var elsewhere = holds_tiles(t.grad_key, whole) and holds_tiles(t.grad_value, whole)
    var pairs = lend_pairs(launcher, of_entries(whole, together), True, elsewhere)
    if elsewhere:
        pairs.key_tiles = t.grad_key.unsafe_bitcast[Scalar[HALF_TYPE]]()
        pairs.value_tiles = t.grad_value.unsafe_bitcast[Scalar[HALF_TYPE]]()
    draw[dropped](launcher, pairs, whole, draws, portable)
    var made = pairs.numbers
    var with_delta = t.copy()
    if output:
        made = launcher.workspace[F32]("delta", whole.rows())
        with_delta.delta = made.as_imm()
    for first in range(0, Int(whole.batch), together):
        var part = with_delta.copy()
        part.sizes = of_entries(whole, min(together, Int(whole.batch) - first))
        if elsewhere:
            pairs.tiles_before = Int32(TileRows(whole).shared(first * Int(whole.key_heads)))
        if Int(whole.head_dim) <= SIDE:
            launch_backward_part[SIDE, dropped](launcher, part, output, made, pairs, first, portable)
        elif not dropped and Int(whole.head_dim) <= WIDE:
            launch_backward_part[WIDE, False](launcher, part, output, made, pairs, first, portable)
        elif Int(whole.head_dim) <= WIDE_PAIRS:
            launch_backward_part[WIDE_PAIRS, dropped](launcher, part, output, made, pairs, first, portable)
        else:
            comptime if L.wgmma:
                if Int(whole.head_dim) <= 3 * SIDE:
                    launch_backward_part[3 * SIDE, False](
                        launcher, part, output, made, pairs, first, portable
                    )
                else:
                    launch_backward_part[WIDEST_PAIRS, False](
                        launcher, part, output, made, pairs, first, portable
                    )


def launch_backward_part[
    L: Launcher, //, width: Int, dropped: Bool
](
    mut launcher: L,
    t: FlashBackward[F32],
    output: Optional[ImmPtr[F32]],
    made_delta: MutPtr[F32],
    pairs: Pairs,
    first: Int,
    portable: Bool,
) raises:
    """Six launches, five with dropout."""
    ref sizes = t.sizes
    var scale = t.scale.cast[F32]()
    launch_split[boxes_of[width]()](
        launcher,
        pairs,
        t.query,
        t.key,
        t.value,
        t.grad_output,
        t.lse,
        t.delta,
        output,
        made_delta,
        True,
        dropped and L.wgmma and first == 0 and not portable,
        first,
        sizes,
        scale,
    )
    var packed = without_mask(sizes)
    launch_query[width, dropped](launcher, t, pairs, first, portable)
    comptime if dropped:
        launch_key_value[width, dropped](launcher, t, pairs, first, portable)
        launcher.launch[plain_dropout_backward_kernel](
            "plain_dropout_backward",
            pairs.path.as_imm(),
            Int32(first),
            t.grad_query,
            t.grad_key,
            t.grad_value,
            t.grad_output,
            t.query,
            t.key,
            t.value,
            t.lse,
            t.delta,
            t.mask,
            pairs.draws.state,
            pairs.draws.kept,
            without_mask(sizes),
            scale,
            grid_dim=Dim(PLAIN_BLOCKS),
            block_dim=Dim(PLAIN_THREADS),
            early=True,
        )
        return
    launcher.launch[plain_query_kernel](
        "plain_query",
        pairs.path.as_imm(),
        Int32(first),
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
        early=True,
    )
    launch_key_value[width, dropped](launcher, t, pairs, first, portable)
    launcher.launch[plain_key_value_kernel](
        "plain_key_value",
        pairs.path.as_imm(),
        Int32(first),
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
        early=True,
    )
