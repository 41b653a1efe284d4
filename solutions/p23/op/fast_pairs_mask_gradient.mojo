"""The gradient of an additive mask of float32 on tensor cores, by pairs of float16: kernels and launch.

`fast_mask_gradient.mojo` says who walks where, and adds up. Nothing here is as wide as a head: its boxes are multiplied one after the
other, so that one kernel takes them all. While a box is multiplied the next one comes, of the same tiles or of those of the next step.
"""

from std.math import ceildiv, exp2
from std.memory import AddressSpace
from std.utils import StaticTuple
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, lane_id, thread_idx
from max.gpu.host import Dim
from max.gpu.memory import async_copy_commit_group, async_copy_wait_group, external_memory

from .fast_mask_gradient import KEYS, ROWS, WARPS, MaskWalk
from .fast_pairs import (
    HALF_TILE,
    HALF_TYPE,
    NUMBERS,
    PAIRS,
    PLAIN,
    SIDE,
    WEIGHT,
    WIDEST_PAIRS,
    WIDE_PAIRS,
    Record,
    TileRows,
    load_pair_rows,
    score_factor,
    take_turn,
)
from .fast_pairs_products import add_mask, times_rows
from .fast_pairs_launches import F32, PLAIN_BLOCKS, launch_split, lend_pairs
from .fast_scores import sees
from .fast_tiles import Lane, Sums
from .flash_tensors import FlashSizes, PackedSizes
from .mask_gradient import MaskGradient, mask_gradient_grid, mask_gradient_kernel
from .shared.common import ImmPtr, MutPtr
from .shared.launcher import Launcher
from .tiles import TILE

comptime THREADS = 32 * WARPS
comptime PAIR = 2 * HALF_TILE
"""Elements of a box of a tile, both halves."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)), `nvvm.minctasm`=SIMDLength(2)
)
def pairs_mask_gradient_kernel(
    grad_mask: MutPtr[F32],  # [B or 1, N or 1, S or 1, T]
    numbers: ImmPtr[F32],  # [tiles of grad_output, 3, 64]
    tiles: ImmPtr[HALF_TYPE],  # [tiles of query and grad_output, boxes, 2, 64, 64]
    key_tiles: ImmPtr[HALF_TYPE],  # [tiles of key, boxes, 2, 64, 64]
    value_tiles: ImmPtr[HALF_TYPE],  # [tiles of value, boxes, 2, 64, 64]
    records: ImmPtr[F32],  # [tiles, 4]
    path: ImmPtr[DType.int32],  # [1]
    mask: ImmPtr[F32],  # as grad_mask
    packed: PackedSizes,
    scale: Float32,
):
    """The gradient of the mask. A block owns 64 keys of it and 64 queries, or the one row that there is."""
    comptime assert ROWS == SIDE and KEYS == SIDE, "a block's tile is one of the pairs'"
    comptime columns = KEYS // 8
    take_turn()
    if path[unsafe_offset=0] != PAIRS:
        return
    var sizes = FlashSizes(packed)
    var places = TileRows(sizes)
    var boxes = ceildiv(Int(sizes.head_dim), SIDE)
    var mine = MaskWalk(sizes)
    var own_keys = mine.t0 // SIDE
    var stages = external_memory[
        Scalar[HALF_TYPE], address_space=AddressSpace.SHARED, alignment=128
    ]().as_unsafe_any_origin()
    var lane = Lane[SIDE]()
    var warp_rows = thread_idx.x // 32 * 16

    @__parameter
    @always_inline
    def fetch(step: Int, part: Int):
        """Sends for a box of query and key, or of grad_output and value: these are the parts from `boxes` on.
        """
        var head = mine.head(step, sizes)
        var own = mine.query(step) // SIDE
        var other = places.shared(sizes.shared_head(head)) + own_keys
        var target = stages.unsafe_offset(part % 2 * (2 * PAIR))
        var box = part
        var source = key_tiles
        if part < boxes:
            own += places.query(head)
        else:
            own += places.grad_here(head)
            box -= boxes
            source = value_tiles
        load_pair_rows[SIDE, THREADS, 1](target, tiles.unsafe_offset((own * boxes + box) * PAIR))
        load_pair_rows[SIDE, THREADS, 1](
            target.unsafe_offset(PAIR), source.unsafe_offset((other * boxes + box) * PAIR)
        )
        async_copy_commit_group()

    @__parameter
    @always_inline
    def seen_from(start: Int) -> Int:
        """The first step, from one on, that sees a key."""
        var step = start
        while step < mine.steps and not mine.seen(step, sizes):
            step += 1
        return step

    @__parameter
    @always_inline
    def multiply(step: Int, after: Int, first_part: Int) -> Array[Sums, columns]:
        """A warp's products of all boxes from a part on."""
        var all = Array[Sums, columns](fill=0)
        for part in range(first_part, first_part + boxes):
            async_copy_wait_group(0)
            # Now everybody's share of this part is here, and nobody still reads the one before.
            barrier()
            if part + 1 < 2 * boxes:
                fetch(step, part + 1)
            elif after < mine.steps:
                fetch(after, 0)
            var own = stages.unsafe_offset(part % 2 * (2 * PAIR))
            var of_box = times_rows[SIDE, 1, columns, SIDE, SIDE](
                own.unsafe_offset(warp_rows * SIDE), own.unsafe_offset(PAIR), lane
            )
            comptime for place in range(columns):
                all[place] += of_box[place]
        return all^

    var totals = Array[Sums, columns](fill=0)
    var step = seen_from(0)
    if step < mine.steps:
        fetch(step, 0)
    while step < mine.steps:
        var after = seen_from(step + 1)
        var head = mine.head(step, sizes)
        var own = mine.query(step) // SIDE
        var shared_head = sizes.shared_head(head)
        var query = Record(records, places.query(head) + own)
        var key = Record(records, places.key(shared_head) + own_keys)
        var grad = Record(records, places.grad(head) + own)
        var value = Record(records, places.value(shared_head) + own_keys)
        var factor = score_factor(query, key, scale)
        var of_head = mask.unsafe_offset(sizes.mask_of(head))
        var own_numbers = numbers.unsafe_offset(
            (places.query(head) + own) * (NUMBERS * SIDE) + warp_rows + lane_id() // 4
        )
        var weights = multiply(step, after, 0)
        comptime for place in range(columns):
            comptime for e in range(4):
                comptime half = e // 2 * 8
                var s = mine.query(step) + warp_rows + half + lane_id() // 4
                var t = mine.t0 + place * 8 + lane_id() % 4 * 2 + e % 2
                var score = add_mask(weights[place][e], factor, of_head, s, t, sizes)
                var weight = exp2(score - own_numbers[unsafe_offset=half])
                weights[place][e] = weight if sees(s, t, sizes) else 0
        var slopes = multiply(step, after, boxes)
        comptime for half in range(2):
            var rest = own_numbers[unsafe_offset=SIDE + 8 * half] / WEIGHT
            var delta = own_numbers[unsafe_offset=2 * SIDE + 8 * half]
            comptime for place in range(columns):
                comptime for e in range(2 * half, 2 * half + 2):
                    var slope = slopes[place][e] * (grad.undo * value.undo) - delta
                    totals[place][e] += weights[place][e] * rest * slope
        step = after
    mine.store[1](grad_mask, totals, stages.unsafe_bitcast[Float32](), sizes)


def plain_mask_gradient_kernel(
    path: ImmPtr[DType.int32],
    grad_mask: MutPtr[F32],
    grad_output: ImmPtr[F32],
    query: ImmPtr[F32],
    key: ImmPtr[F32],
    value: ImmPtr[F32],
    output: ImmPtr[F32],
    lse: ImmPtr[F32],
    delta: ImmPtr[F32],
    mask: ImmPtr[F32],
    packed: PackedSizes,
    scale: Float32,
):
    """`mask_gradient_kernel`, where the plain path has been chosen."""
    take_turn()
    if path[unsafe_offset=0] == PLAIN:
        mask_gradient_kernel[F32](
            grad_mask, grad_output, query, key, value, output, lse, delta, mask, packed, scale
        )


def launch_mask_gradient_pairs[L: Launcher, //](mut launcher: L, t: MaskGradient[F32]) raises:
    """Four launches: grad_mask, of the whole batch at once, which may share an element."""
    ref sizes = t.sizes
    var scale = t.scale.cast[F32]()
    var pairs = lend_pairs(launcher, sizes, True, False)
    comptime for boxes in range(1, (WIDEST_PAIRS if L.wgmma else WIDE_PAIRS) // SIDE + 1):
        if ceildiv(Int(sizes.head_dim), SIDE) == boxes:
            launch_split[boxes](
                launcher,
                pairs,
                t.query,
                t.key,
                t.value,
                t.grad_output,
                t.lse,
                t.delta,
                None,
                pairs.numbers,
                True,
                False,
                0,
                sizes,
                scale,
            )
    launcher.launch[pairs_mask_gradient_kernel](
        "pairs_mask_gradient",
        t.grad_mask,
        pairs.numbers.as_imm(),
        pairs.tiles.as_imm(),
        pairs.key_tiles.as_imm(),
        pairs.value_tiles.as_imm(),
        pairs.records.as_imm(),
        pairs.path.as_imm(),
        t.mask,
        sizes.packed(),
        scale,
        grid_dim=Dim(MaskWalk.blocks(sizes)),
        block_dim=Dim(THREADS),
        shared_bytes=4 * PAIR * 2,
        early=True,
    )
    # Most calls need none of these blocks; where there are many, each of them costs what it takes to begin.
    var grid = mask_gradient_grid(sizes)
    launcher.launch[plain_mask_gradient_kernel](
        "plain_mask_gradient",
        pairs.path.as_imm(),
        t.grad_mask,
        t.grad_output,
        t.query,
        t.key,
        t.value,
        t.output,
        t.lse,
        t.delta,
        t.mask,
        sizes.packed(),
        scale,
        grid_dim=Dim(grid.x(), grid.y(), max(1, min(grid.z(), PLAIN_BLOCKS // (grid.x() * grid.y())))),
        block_dim=Dim(TILE, TILE),
        early=True,
    )
