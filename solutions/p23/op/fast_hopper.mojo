"""The forward pass and the gradient of the query for Hopper: `wgmma` for the products, the TMA for every tile.

The scheme is that of `fast_kernels.mojo`: a block owns rows and walks over the other side, P and dS go from product to product
in registers, and the backward pass is two kernels without atomics (the other one: `fast_hopper_keys.mojo`). What differs is who
does what. One thread of the first warpgroup sends boxes of 64 x 64 to shared memory and waits for room; each further warpgroup
owns 64 rows and multiplies. A "full" barrier of a stage says that its tiles are here, an "empty" one that nobody reads them any
longer.

Products are asynchronous, and the compiler does not know it: after each wait `settled` keeps what uses the sums behind it.
Many small blocks are faster than few large ones; the backward kernels keep, or stream, what the shared memory's bandwidth
allows. Sums have the layout of `mma`, two elements of a row, then two of the row 8 below, and so on along the row. Of heads
that are wider than a box there are sums, and tiles, for every 64 elements. A loop without a mask comes in front of one with:
a branch within would keep the exponentials from being made while products are under way.
"""

from std.math import ceildiv, exp2, log2
from std.memory import AddressSpace, bitcast
from std.sys import inlined_assembly
from std.utils import StaticTuple
from std.utils.index import IndexList
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, barrier, block_idx, lane_id, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    _RegisterPackType,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.host.nvidia.tma import (
    TensorMapL2Promotion,
    TensorMapSwizzle,
    TMADescriptor,
    create_tma_descriptor,
)
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory, fence_mbarrier_init
from max.gpu.primitives import warp
from max.gpu.sync import (
    mbarrier_arrive,
    mbarrier_arrive_expect_tx_shared,
    mbarrier_init,
    mbarrier_try_wait_parity_shared,
)

from .fast_kernels import (
    DELTA_LANES,
    DELTA_THREADS,
    LN_2,
    LOG2_E,
    Strides,
    of_row,
    row_shift,
    share_of_delta,
    sum_of_lanes,
)
from .fast_tiles import CHUNK, HIDDEN
from .flash_tensors import FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr, start_later_grids, wait_for_earlier_grids

comptime GROUP = 128
"""Threads of a warpgroup."""
comptime SIDE = 64
"""Rows of a box, and elements of its rows: 128 bytes, the width of the TMA's widest swizzle."""
comptime ROW_BYTES = 128
comptime BOX_BYTES = SIDE * ROW_BYTES
comptime PATIENCE = 10_000_000
"""Nanoseconds that a wait may sleep before it looks again."""
comptime HALF = SIMD[DType.float32, 32]
"""A lane's share of 64 x 64 sums."""
comptime Shared[T: AnyType] = Pointer[T, MutAnyOrigin, address_space=AddressSpace.SHARED]


# ---- Barriers and boxes -------------------------------------------------------------------------------------


@fieldwise_init
struct Turn(Copyable, Movable):
    """Which of the stages is next, and the parity that its barriers then have."""

    var stage: Int
    var parity: Int32

    @always_inline
    def step[stages: Int](mut self):
        """On to the next stage."""
        self.stage += 1
        if self.stage == stages:
            self.stage = 0
            self.parity ^= 1


@always_inline
def wait(at: Shared[Int64], parity: Int32):
    """Returns when the phase of this parity is over."""
    mbarrier_try_wait_parity_shared(at, parity, PATIENCE)


@always_inline
def wait_together(at: Shared[Int64], parity: Int32):
    """`wait` of a whole warp, which leaves it as one: the compiler then keeps what the lanes have in common in registers that
    they share, from which products take the addresses of their tiles."""
    inlined_assembly[
        (
            "{\n.reg .pred p;\nWAITING:\nmbarrier.try_wait.parity.shared.b64 p, [$0], $1, $2;\n"
            "vote.sync.all.pred p, p, 0xffffffff;\n@!p bra.uni WAITING;\n}"
        ),
        NoneType,
        constraints="r,r,r,~{memory}",
        has_side_effect=True,
    ](Int32(Int(at)), parity, Int32(PATIENCE))


@always_inline
def send_box(
    target: Shared[UInt8],
    map: TMADescriptor,
    full: Shared[Int64],
    column: Int,
    row: Int,
    head: Int,
    batch: Int,
):
    """Sends for 64 rows of a head, 64 elements of each; what lies outside of it becomes 0."""
    inlined_assembly[
        (
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2,"
            " $3, $4, $5}], [$6];"
        ),
        NoneType,
        constraints="r,l,r,r,r,r,r,~{memory}",
        has_side_effect=True,
    ](
        Int32(Int(target)),
        Int64(Int(Pointer(to=map))),
        Int32(column),
        Int32(row),
        Int32(head),
        Int32(batch),
        Int32(Int(full)),
    )


@always_inline
def send_tile[
    width: Int, rows: Int
](target: Shared[UInt8], map: TMADescriptor, full: Shared[Int64], row: Int, head: Int, batch: Int):
    """Sends for a tile of a head: for every 64 elements of its rows, one behind the other, all of the rows.
    """
    comptime for half in range(width // SIDE):
        comptime for part in range(rows // SIDE):
            send_box(
                target.unsafe_offset(half * rows * ROW_BYTES + part * BOX_BYTES),
                map,
                full,
                half * SIDE,
                row + part * SIDE,
                head,
                batch,
            )


def head_map[
    dtype: DType
](
    ctx: DeviceContext,
    tensor: ImmPtr[dtype],
    heads: Int32,
    length: Int32,
    sizes: FlashSizes,
    strides: Strides,
) raises -> TMADescriptor:
    """How the TMA finds boxes in a tensor [B, heads, length, d]; its rows begin at multiples of 16 bytes."""
    var batch = Int(sizes.batch)
    var shape = IndexList[4](batch, Int(heads), Int(length), Int(sizes.head_dim))
    var steps = IndexList[4](Int(strides[0]), Int(strides[1]), Int(strides[2]), 1)
    return create_tma_descriptor[dtype, 4, TensorMapSwizzle.SWIZZLE_128B, TensorMapL2Promotion.L2_256B](
        DeviceBuffer[dtype](
            ctx,
            tensor.unsafe_mut_cast[True]().as_unsafe_any_origin(),
            batch * Int(heads) * Int(length) * Int(sizes.head_dim),
            owning=False,
        ),
        shape,
        steps,
        IndexList[4](1, 1, SIDE, SIDE),
    )


@always_inline
def own_group[groups: Int]() -> Int:
    """Which of the warpgroups that multiply asks, in a register that the compiler knows to be the same in a warp's lanes: what
    is made of it, addresses of tiles and ends of loops, then takes no other registers either."""
    comptime if groups == 1:
        return 0
    return Int(warp.broadcast(Int32(thread_idx.x // GROUP))) - 1


@always_inline
def common(tile: Shared[UInt8]) -> Shared[UInt8]:
    """A tile's address, in a register that a warp's lanes share."""
    return Shared[UInt8](unsafe_from_address=Int(warp.broadcast(Int32(Int(tile)))))


@always_inline
def take_turn[arrive: Bool](group: Int):
    """Of two warpgroups that multiply in turns: waits until it is this one's, or says that it is the `group`'s.
    """
    inlined_assembly[
        "barrier.cta.arrive $0, 256;" if arrive else "barrier.cta.sync $0, 256;",
        NoneType,
        constraints="r,~{memory}",
        has_side_effect=True,
    ](Int32(group + 1))


@always_inline
def divided(number: Int, by: Int) -> Tuple[Int, Int]:
    """Quotient and remainder of numbers below 2 to the 32: a division of 64 bits takes a hundred instructions.
    """
    var quotient = UInt32(number) // UInt32(by)
    return (Int(quotient), Int(UInt32(number) - quotient * UInt32(by)))


@always_inline
def start_of_head(batch: Int, head: Int, strides: Strides) -> Int:
    """Where a head begins."""
    return batch * Int(strides[0]) + head * Int(strides[1])


@always_inline
def sharing(sizes: FlashSizes) -> Int:
    """How many query heads share a head of key and value."""
    if sizes.query_heads == sizes.key_heads:
        return 1
    return divided(Int(sizes.query_heads), Int(sizes.key_heads))[0]


# ---- Products -----------------------------------------------------------------------------------------------


@always_inline
def settled[width: SIMDLength, //](mut sums: SIMD[DType.float32, width]):
    """Keeps the compiler from using sums before the wait in front of this."""
    comptime for i in range(Int(width)):
        sums[i] = inlined_assembly["", Float32, constraints="=f,0", has_side_effect=True](sums[i])


@always_inline
def tile_descriptor(tile: Shared[UInt8], leading: Int) -> Int64:
    """Shared memory as `wgmma` is told of it: address and both strides in units of 16 bytes, and the swizzle.
    """
    return (Int64(Int(tile)) & 0x3FFFF) >> 4 | (Int64(leading) << 16) | (Int64(64) << 32) | (Int64(1) << 62)


comptime Registers = _RegisterPackType[
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
    Float32,
]
comptime IN_PLACE: StaticString = "=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,r,r,r,r,l"
"""32 sums that are read and written, a left factor of four registers, and a descriptor."""


comptime INSTRUCTION = "wgmma.mma_async.sync.aligned.m64n64k16.f32."
comptime SUMS = (
    " {$0, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,"
    " $22, $23, $24, $25, $26, $27, $28, $29, $30, $31}, "
)


@always_inline
def multiply[
    dtype: DType, //, along: Bool, fresh: Bool = False
](left: SIMD[dtype, 8], right: Int64, sums: HALF) -> HALF:
    """Sums + left @ right: 64 x 16 from registers by 16 x 64 in shared memory, or its transpose; `fresh` without the sums.

    The rows of shared memory run `along` the 16 summands, or across them. `wgmma_async` takes no float16 from registers.
    """
    comptime adds = "0" if fresh else "1"
    comptime types = "bf16.bf16" if dtype == DType.bfloat16 else "f16.f16"
    comptime transposed = "0" if along else "1"
    var factor = bitcast[DType.uint32, 4](left)
    var written = inlined_assembly[
        "{\n.reg .pred p;\nsetp.ne.b32 p, "
        + adds
        + ", 0;\n"
        + INSTRUCTION
        + types
        + SUMS
        + "{$64, $65, $66, $67}, $68, p, 1, 1, "
        + transposed
        + ";\n}",
        Registers,
        constraints=IN_PLACE,
        has_side_effect=True,
    ](
        sums[0],
        sums[1],
        sums[2],
        sums[3],
        sums[4],
        sums[5],
        sums[6],
        sums[7],
        sums[8],
        sums[9],
        sums[10],
        sums[11],
        sums[12],
        sums[13],
        sums[14],
        sums[15],
        sums[16],
        sums[17],
        sums[18],
        sums[19],
        sums[20],
        sums[21],
        sums[22],
        sums[23],
        sums[24],
        sums[25],
        sums[26],
        sums[27],
        sums[28],
        sums[29],
        sums[30],
        sums[31],
        factor[0],
        factor[1],
        factor[2],
        factor[3],
        right,
    )
    var result = HALF(0)
    comptime for i in range(32):
        result[i] = written[i]
    return result


@always_inline
def rounded[dtype: DType, count: Int](sums: SIMD[DType.float32, _]) -> StaticTuple[SIMD[dtype, 8], count]:
    """Sums as left factors, so many."""
    var fragments = StaticTuple[SIMD[dtype, 8], count]()
    comptime for k in range(count):
        fragments[k] = sums.slice[8, offset=8 * k]().cast[dtype]()
    return fragments


comptime Sums[width: Int] = StaticTuple[HALF, width // SIDE]
"""A lane's share of sums of 64 rows, `width` wide: those of every 64 columns."""


@always_inline
def scores_from_shared[
    dtype: DType, width: Int, columns: Int
](own: Shared[UInt8], other: Shared[UInt8]) -> SIMD[DType.float32, columns // 2]:
    """Own @ other^T: 64 rows by `columns` rows, all of `width` elements."""
    var sums = SIMD[DType.float32, columns // 2](0)
    comptime for half in range(width // SIDE):
        var a = WGMMADescriptor[dtype].create[64, 1, TensorMapSwizzle.SWIZZLE_128B](
            own.unsafe_offset(half * BOX_BYTES).unsafe_bitcast[Scalar[dtype]]()
        )
        var b = WGMMADescriptor[dtype].create[64, 1, TensorMapSwizzle.SWIZZLE_128B](
            other.unsafe_offset(half * columns * ROW_BYTES).unsafe_bitcast[Scalar[dtype]]()
        )
        comptime for k in range(4):
            sums = wgmma_async[
                64,
                columns,
                16,
                a_type=dtype,
                b_type=dtype,
                layout_a="row",
                layout_b="col",
                scale_d=0 if half == 0 and k == 0 else 1,
            ](a + k * 32, b + k * 32, sums)
    return sums


@always_inline
def add_product[
    dtype: DType, count: Int
](left: StaticTuple[SIMD[dtype, 8], count], right: Shared[UInt8], sums: HALF) -> HALF:
    """Sums + left @ right, where right has 16 * count rows of 64 elements."""
    var across = tile_descriptor(right, BOX_BYTES // 16)
    var result = sums
    comptime for k in range(count):
        result = multiply[False](left[k], across + Int64(k * ROW_BYTES), result)
    return result


@always_inline
def add_products[
    dtype: DType, count: Int, width: Int
](left: StaticTuple[SIMD[dtype, 8], count], right: Shared[UInt8], mut sums: Sums[width]):
    """Sums += left @ right, where right is a tile of 16 * count rows.

    Of 128 elements at once where `wgmma_async` can: it takes no float16 from registers.
    """
    comptime if width == 2 * SIDE and dtype == DType.bfloat16:
        var across = WGMMADescriptor[dtype].create[64, count * ROW_BYTES, TensorMapSwizzle.SWIZZLE_128B](
            right.unsafe_bitcast[Scalar[dtype]]()
        )
        var both = sums[0].join(sums[1])
        comptime for k in range(count):
            both = rebind[type_of(both)](
                wgmma_async[64, 128, 16, a_type=dtype, b_type=dtype, layout_a="row", layout_b="row"](
                    left[k], across + k * 16 * ROW_BYTES, rebind[SIMD[DType.float32, 64]](both)
                )
            )
        sums[0] = rebind[HALF](both.slice[32]())
        sums[1] = rebind[HALF](both.slice[32, offset=32]())
        return
    comptime for half in range(width // SIDE):
        sums[half] = add_product[dtype, count](
            left, right.unsafe_offset(half * 16 * count * ROW_BYTES), sums[half]
        )


@always_inline
def settled_sums[width: Int](mut sums: Sums[width]):
    """`settled`, for all columns."""
    comptime for half in range(width // SIDE):
        var some = sums[half]
        settled(some)
        sums[half] = some


@always_inline
def store_half[
    dtype: DType
](
    target: MutPtr[dtype],
    sums: HALF,
    factors: StaticTuple[Float32, 2],
    first: Int,
    count: Int,
    pitch: Int,
    d: Int,
):
    """Writes a warp's 16 rows, from row `first` of a matrix [count, d], each times its own factor."""

    @__parameter
    @always_inline
    def store[half: Int, j: Int](place: MutPtr[dtype]):
        var pair = SIMD[DType.float32, 2](sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1])
        place.unsafe_store[alignment=4](j * 8, (pair * factors[half]).cast[dtype]())

    comptime for half in range(2):
        var row = first + half * 8 + lane_id() // 4
        if row < count:
            var place = target.unsafe_offset(row * pitch + lane_id() % 4 * 2)
            if d >= SIDE:  # Nearly always: then all addresses are one and a constant.
                comptime for j in range(8):
                    store[half, j](place)
            else:
                comptime for j in range(8):
                    if j * 8 < d:
                        store[half, j](place)


@always_inline
def store_sums[
    dtype: DType, //, width: Int
](
    target: MutPtr[dtype],
    sums: Sums[width],
    factors: StaticTuple[Float32, 2],
    first: Int,
    count: Int,
    pitch: Int,
    d: Int,
):
    """`store_half`, for all columns."""
    comptime for half in range(width // SIDE):
        store_half[dtype](
            target.unsafe_offset(half * SIDE), sums[half], factors, first, count, pitch, d - half * SIDE
        )


@always_inline
def seen_before(first: Int, sizes: FlashSizes) -> StaticTuple[Int32, 2]:
    """For both rows of a lane the key before which it sees all keys, less the lane's first column. A warp's queries begin at
    `first`. Of 32 bits: a comparison for each score takes one instruction then."""
    var bounds = StaticTuple[Int32, 2](0, 0)
    comptime for half in range(2):
        var query = Int32(first) + Int32(half * 8) + Int32(lane_id()) // 4
        bounds[half] = min(sizes.key_len, query + sizes.diagonal + 1) - Int32(lane_id()) % 4 * 2
    return bounds


# ---- Forward ------------------------------------------------------------------------------------------------

comptime FORWARD_STAGES = 2


def registers[groups: Int, resident: Int]() -> Int:
    """What a thread of `groups` warpgroups that multiply can have, where so many blocks share a multiprocessor.
    """
    comptime if groups == 1 and resident == 1:
        # As many as a thread of two warpgroups has at its start: it cannot ask for fewer.
        return 248
    return 232 if resident == 2 else 240 if groups == 2 else 160


def forward_bytes[width: Int, groups: Int, keys: Int]() -> Int:
    """Shared memory of a block of the forward pass."""
    comptime boxes = width // SIDE * (groups + FORWARD_STAGES * 2 * keys // SIDE)
    return boxes * BOX_BYTES + 8 * (1 + 4 * FORWARD_STAGES)


@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((groups + 1) * GROUP)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def hopper_forward_kernel[
    dtype: DType, width: Int, groups: Int, keys: Int, resident: Int
](
    output: MutPtr[dtype],  # [B, N, S, d]
    lse: MutPtr[DType.float32],  # [B, N, S]
    query_map: TMADescriptor,
    key_map: TMADescriptor,
    value_map: TMADescriptor,
    output_strides: Strides,
    packed: PackedSizes,
    scale: Float32,
):
    """Output and lse. A block owns 64 queries for each of its `groups` and walks over the keys, `keys` at a time.

    The scores of a step are multiplied while the product with the values of the step before is under way.
    """
    comptime ROWS = groups * SIDE
    comptime OWN = width // SIDE * BOX_BYTES
    comptime TILE = width // SIDE * keys * ROW_BYTES
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var own_head = block_idx.y
    var batch = block_idx.z
    var head = batch * Int(sizes.query_heads) + own_head
    var s0 = (ceildiv(S, ROWS) - 1 - block_idx.x) * ROWS
    # One step at least: a row that sees nothing is a row whose keys are all hidden.
    var steps = max(1, ceildiv(sizes.keys_seen(min(s0 + ROWS, S) - 1), keys))
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var key_tiles = shared.unsafe_offset(groups * OWN)
    var value_tiles = key_tiles.unsafe_offset(FORWARD_STAGES * TILE)
    var query_here = value_tiles.unsafe_offset(FORWARD_STAGES * TILE).unsafe_bitcast[Int64]()
    var keys_full = query_here.unsafe_offset(1)
    var values_full = keys_full.unsafe_offset(FORWARD_STAGES)
    var keys_empty = values_full.unsafe_offset(FORWARD_STAGES)
    var values_empty = keys_empty.unsafe_offset(FORWARD_STAGES)
    if thread_idx.x == 0:
        comptime for i in range(1 + 2 * FORWARD_STAGES):
            mbarrier_init(query_here.unsafe_offset(i), 1)
        comptime for i in range(2 * FORWARD_STAGES):
            mbarrier_init(keys_empty.unsafe_offset(i), Int32(groups))
        fence_mbarrier_init()
    barrier()
    # Whoever uses this waits for all of it.
    start_later_grids()

    if thread_idx.x < GROUP:
        warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            var members = sharing(sizes)
            var shared_head = own_head if members == 1 else divided(own_head, members)[0]
            mbarrier_arrive_expect_tx_shared(query_here, Int32(groups * OWN))
            comptime for group in range(groups):
                send_tile[width, SIDE](
                    shared.unsafe_offset(group * OWN),
                    query_map,
                    query_here,
                    s0 + group * SIDE,
                    own_head,
                    batch,
                )
            var turn = Turn(0, 1)
            for step in range(steps):
                var stage = turn.stage
                var t0 = step * keys
                wait(keys_empty.unsafe_offset(stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(keys_full.unsafe_offset(stage), Int32(TILE))
                send_tile[width, keys](
                    key_tiles.unsafe_offset(stage * TILE),
                    key_map,
                    keys_full.unsafe_offset(stage),
                    t0,
                    shared_head,
                    batch,
                )
                wait(values_empty.unsafe_offset(stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(values_full.unsafe_offset(stage), Int32(TILE))
                send_tile[width, keys](
                    value_tiles.unsafe_offset(stage * TILE),
                    value_map,
                    values_full.unsafe_offset(stage),
                    t0,
                    shared_head,
                    batch,
                )
                turn.step[FORWARD_STAGES]()
        return

    warpgroup_reg_alloc[registers[groups, resident]()]()
    var group = own_group[groups]()
    var own = common(shared.unsafe_offset(group * OWN))
    key_tiles = common(key_tiles)
    value_tiles = common(value_tiles)
    var first = s0 + group * SIDE + thread_idx.x % GROUP // 32 * 16
    var leads = thread_idx.x % GROUP == 0
    var factor = scale * LOG2_E
    var bounds = seen_before(first, sizes)
    # Not -inf, so that -inf less it is -inf, and not NaN: what is smaller has no finite score to the base 2.
    var lowest = Float32.MIN_FINITE / 2 / max(factor, 1)
    var largest = StaticTuple[Float32, 2](lowest, lowest)
    var totals = StaticTuple[Float32, 2](0, 0)
    var rescales = StaticTuple[Float32, 2](0, 0)
    var sums = Sums[width](fill=HALF(0))

    @__parameter
    @always_inline
    def weigh[width: SIMDLength, //, masked: Bool](mut scores: SIMD[DType.float32, width], t0: Int):
        comptime if masked:
            comptime for i in range(keys // 2):
                comptime column = Int32(i // 4 * 8 + i % 2)
                scores[i] = scores[i] if column < bounds[i // 2 % 2] - Int32(t0) else HIDDEN
        comptime for half in range(2):
            var grown = largest[half]
            comptime for j in range(keys // 8):
                grown = max(grown, max(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]))
            grown = of_row(grown, True)
            var shift = grown * factor
            # The difference first: of the lowest less itself a multiply-add would leave what it rounds off.
            rescales[half] = exp2((largest[half] - grown) * factor)
            largest[half] = grown
            var total = Float32(0)
            comptime for j in range(keys // 8):
                comptime for side in range(2):
                    var weight = exp2(scores[4 * j + 2 * half + side] * factor - shift)
                    scores[4 * j + 2 * half + side] = weight
                    total += weight
            totals[half] = totals[half] * rescales[half] + total

    wait_together(query_here, 0)
    wait_together(keys_full, 0)
    wgmma_fence_aligned()
    var scores = scores_from_shared[dtype, width, keys](own, key_tiles)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    settled(scores)
    if leads:
        _ = mbarrier_arrive(keys_empty)
    # The first query of the warpgroup sees the fewest keys; steps with keys that it does not see come last.
    var whole = min(steps, sizes.keys_seen(s0 + group * SIDE) // keys)
    if whole > 0:
        weigh[False](scores, 0)
    else:
        weigh[True](scores, 0)
    var weights = rounded[dtype, keys // 16](scores)
    var turn = Turn(1 % FORWARD_STAGES, 0)
    var before = Turn(0, 0)
    comptime if groups == 2:
        if group == 1 and steps > 1:
            take_turn[arrive=True](0)

    @__parameter
    @always_inline
    def advance[masked: Bool](step: Int):
        wait_together(keys_full.unsafe_offset(turn.stage), turn.parity)
        wait_together(values_full.unsafe_offset(before.stage), before.parity)
        comptime if groups == 2:
            take_turn[arrive=False](group)
        wgmma_fence_aligned()
        var next = scores_from_shared[dtype, width, keys](own, key_tiles.unsafe_offset(turn.stage * TILE))
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        add_products[dtype, keys // 16, width](weights, value_tiles.unsafe_offset(before.stage * TILE), sums)
        wgmma_commit_group_sync()
        comptime if groups == 2:
            if group == 0 or step + 1 < steps:
                take_turn[arrive=True](1 - group)
        wgmma_wait_group_sync[1]()
        settled(next)
        if leads:
            _ = mbarrier_arrive(keys_empty.unsafe_offset(turn.stage))
        weigh[masked](next, step * keys)
        wgmma_wait_group_sync[0]()
        settled_sums[width](sums)
        if leads:
            _ = mbarrier_arrive(values_empty.unsafe_offset(before.stage))
        comptime for half in range(width // SIDE):
            var scaled = sums[half]
            comptime for i in range(32):
                scaled[i] *= rescales[i // 2 % 2]
            sums[half] = scaled
        weights = rounded[dtype, keys // 16](next)
        turn.step[FORWARD_STAGES]()
        before.step[FORWARD_STAGES]()

    for step in range(1, whole):
        advance[False](step)
    for step in range(max(1, whole), steps):
        advance[True](step)
    wait_together(values_full.unsafe_offset(before.stage), before.parity)
    wgmma_fence_aligned()
    add_products[dtype, keys // 16, width](weights, value_tiles.unsafe_offset(before.stage * TILE), sums)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    settled_sums[width](sums)

    var factors = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var total = of_row(totals[half], False)
        factors[half] = 1 / total if total != 0 else 1
        var s = first + half * 8 + lane_id() // 4
        if s < S and lane_id() % 4 == 0:
            lse[unsafe_offset=head * S + s] = (
                HIDDEN if total == 0 else (largest[half] * factor + log2(total)) * LN_2
            )
    store_sums[width](
        output.unsafe_offset(start_of_head(batch, own_head, output_strides)),
        sums,
        factors,
        first,
        S,
        Int(output_strides[2]),
        Int(sizes.head_dim),
    )


# ---- Backward -----------------------------------------------------------------------------------------------


def query_bytes[width: Int, groups: Int, stages: Int]() -> Int:
    """Shared memory of a block of the query's kernel."""
    return width // SIDE * 2 * (groups + stages) * BOX_BYTES + 8 * (1 + 2 * stages)


def padded(length: Int) -> Int:
    """Rows that are whole boxes."""
    return ceildiv(length, SIDE) * SIDE


def hopper_numbers_kernel[
    dtype: DType
](
    numbers: MutPtr[DType.float32],  # [B, N, 2, padded S]
    lse: ImmPtr[DType.float32],  # [B, N, S]
    delta: ImmPtr[DType.float32],  # [B, N, S], read only where not from_output
    grad_output: ImmPtr[dtype],  # [B, N, S, d], read only where from_output
    output: ImmPtr[dtype],  # [B, N, S, d], likewise
    from_output: Int32,  # 0 or 1
    grad_strides: Strides,
    output_strides: Strides,
    packed: PackedSizes,
):
    """Of each head what is taken from its scores, to the base 2, and delta, in whole boxes. Behind the last query P is 0.
    """
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var length = ceildiv(S, SIDE) * SIDE
    var index = block_idx.x * (DELTA_THREADS // DELTA_LANES) + thread_idx.x // DELTA_LANES
    var head, s = divided(index, length)
    # Only now may the next grid start: it reads what the grids in front of this one have written.
    wait_for_earlier_grids()
    start_later_grids()
    var batch, own_head = divided(head, Int(sizes.query_heads))
    var exists = head < sizes.heads() and s < S
    var sum = Float32(0)
    if exists and from_output != 0:
        sum = share_of_delta[CHUNK](
            grad_output.unsafe_offset(
                start_of_head(batch, own_head, grad_strides) + s * Int(grad_strides[2])
            ),
            output.unsafe_offset(start_of_head(batch, own_head, output_strides) + s * Int(output_strides[2])),
            Int(sizes.head_dim),
        )
    sum = sum_of_lanes(sum)
    if head < sizes.heads() and thread_idx.x % DELTA_LANES == 0:
        var at = head * S + s
        if exists and from_output == 0:
            sum = delta[unsafe_offset=at]
        var shift = row_shift[True](lse[unsafe_offset=at]) if exists else -HIDDEN
        numbers[unsafe_offset=head * 2 * length + s] = shift
        numbers[unsafe_offset=(head * 2 + 1) * length + s] = sum


@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(grad_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((groups + 1) * GROUP)),
    `nvvm.minctasm`=SIMDLength(resident),
)
def hopper_query_kernel[
    dtype: DType, width: Int, groups: Int, stages: Int, resident: Int
](
    grad_query: MutPtr[dtype],  # [B, N, S, d]
    query_map: TMADescriptor,
    grad_map: TMADescriptor,
    key_map: TMADescriptor,
    value_map: TMADescriptor,
    numbers: ImmPtr[DType.float32],  # [B, N, 2, padded S]
    gradient_strides: Strides,
    packed: PackedSizes,
    scale: Float32,
):
    """The gradient of the query. A block owns 64 queries for each of its `groups` and walks over the keys, 64 at a time.
    """
    comptime ROWS = groups * SIDE
    comptime TILE = width // SIDE * BOX_BYTES
    comptime STAGE = 2 * TILE
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var length = ceildiv(S, SIDE) * SIDE
    var own_head = block_idx.y
    var batch = block_idx.z
    var head = batch * Int(sizes.query_heads) + own_head
    var s0 = (ceildiv(S, ROWS) - 1 - block_idx.x) * ROWS
    var steps = ceildiv(sizes.keys_seen(min(s0 + ROWS, S) - 1), SIDE)
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var streamed = shared.unsafe_offset(2 * groups * TILE)
    var own_here = streamed.unsafe_offset(stages * STAGE).unsafe_bitcast[Int64]()
    var full = own_here.unsafe_offset(1)
    var empty = full.unsafe_offset(stages)
    if thread_idx.x == 0:
        mbarrier_init(own_here, 1)
        comptime for i in range(stages):
            mbarrier_init(full.unsafe_offset(i), 1)
            mbarrier_init(empty.unsafe_offset(i), Int32(groups))
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP:
        warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            var members = sharing(sizes)
            var shared_head = own_head if members == 1 else divided(own_head, members)[0]
            mbarrier_arrive_expect_tx_shared(own_here, Int32(2 * groups * TILE))
            comptime for group in range(groups):
                var row = s0 + group * SIDE
                var at = shared.unsafe_offset(group * TILE)
                send_tile[width, SIDE](at, query_map, own_here, row, own_head, batch)
                send_tile[width, SIDE](
                    at.unsafe_offset(groups * TILE), grad_map, own_here, row, own_head, batch
                )
            var turn = Turn(0, 1)
            for step in range(steps):
                var tile = streamed.unsafe_offset(turn.stage * STAGE)
                var arrives = full.unsafe_offset(turn.stage)
                wait(empty.unsafe_offset(turn.stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(arrives, Int32(STAGE))
                send_tile[width, SIDE](tile, key_map, arrives, step * SIDE, shared_head, batch)
                send_tile[width, SIDE](
                    tile.unsafe_offset(TILE), value_map, arrives, step * SIDE, shared_head, batch
                )
                turn.step[stages]()
        return

    warpgroup_reg_alloc[registers[groups, resident]()]()
    var group = own_group[groups]()
    var first = s0 + group * SIDE + thread_idx.x % GROUP // 32 * 16
    var leads = thread_idx.x % GROUP == 0
    var factor = scale * LOG2_E
    var bounds = seen_before(first, sizes)
    var own_queries = shared.unsafe_offset(group * TILE)
    var own_grads = shared.unsafe_offset((groups + group) * TILE)
    var shifts = StaticTuple[Float32, 2](0, 0)
    var deltas = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var s = min(first + half * 8 + lane_id() // 4, S - 1)
        shifts[half] = numbers[unsafe_offset=head * 2 * length + s]
        deltas[half] = numbers[unsafe_offset=(head * 2 + 1) * length + s]
    var sums = Sums[width](fill=HALF(0))
    var turn = Turn(0, 0)
    var before = 0
    wait(own_here, 0)

    @__parameter
    @always_inline
    def advance[masked: Bool](step: Int):
        wait(full.unsafe_offset(turn.stage), turn.parity)
        var keys = streamed.unsafe_offset(turn.stage * STAGE)
        var t0 = step * SIDE
        wgmma_fence_aligned()
        var weights = scores_from_shared[dtype, width, SIDE](own_queries, keys)
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        var slopes = scores_from_shared[dtype, width, SIDE](own_grads, keys.unsafe_offset(TILE))
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(weights)
        # Now the product of the step before is done too: its stage may be filled again.
        if step > 0 and leads:
            _ = mbarrier_arrive(empty.unsafe_offset(before))
        comptime for i in range(32):
            weights[i] = exp2(weights[i] * factor - shifts[i // 2 % 2])
        comptime if masked:
            comptime for i in range(32):
                comptime column = Int32(i // 4 * 8 + i % 2)
                weights[i] = weights[i] if column < bounds[i // 2 % 2] - Int32(t0) else 0
        wgmma_wait_group_sync[0]()
        settled(slopes)
        comptime for i in range(32):
            slopes[i] = weights[i] * (slopes[i] - deltas[i // 2 % 2])
        var left = rounded[dtype, 4](slopes)
        wgmma_fence_aligned()
        add_products[dtype, 4, width](left, keys, sums)
        wgmma_commit_group_sync()
        before = turn.stage
        turn.step[stages]()

    # The first query of the warpgroup sees the fewest keys; steps with keys that it does not see come last.
    var whole = min(steps, sizes.keys_seen(s0 + group * SIDE) // SIDE)
    for step in range(whole):
        advance[False](step)
    for step in range(whole, steps):
        advance[True](step)
    wgmma_wait_group_sync[0]()
    settled_sums[width](sums)
    store_sums[width](
        grad_query.unsafe_offset(start_of_head(batch, own_head, gradient_strides)),
        sums,
        StaticTuple[Float32, 2](scale, scale),
        first,
        S,
        Int(gradient_strides[2]),
        Int(sizes.head_dim),
    )
    # This kernel starts while the last blocks of the one in front of it are at work, and must not be done before them.
    wait_for_earlier_grids()
