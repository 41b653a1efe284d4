"""The kernels of the fast variant for Hopper: `wgmma` for the products, the TMA for every tile, heads of up to 64 elements.

The scheme is that of `fast_kernels.mojo`: a block owns rows and walks over the other side, P and dS go from product to product
in registers. The forward pass and the gradient of the query are here; those of key and value are the portable kernel's. What differs is who does what. One thread of the first
warpgroup sends boxes of 64 x 64 to shared memory and waits for room; each further warpgroup owns 64 rows and multiplies. A
"full" barrier of a stage says that its tiles are here, an "empty" one that nobody reads them any longer.

Products are asynchronous, and the compiler does not know it: after each wait `settled` keeps what uses the sums behind it.
Many small blocks are faster than few large ones; the backward kernels keep, or stream, what the shared memory's bandwidth
allows. Sums have the layout of `mma`, two elements of a row, then two of the row 8 below, and so on along the row.
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
from max.gpu.sync import (
    mbarrier_arrive,
    mbarrier_arrive_expect_tx_shared,
    mbarrier_init,
    mbarrier_try_wait_parity_shared,
)

from .fast_kernels import LN_2, LOG2_E, Strides, all_seen, of_row, row_shift, sees, start_of
from .fast_tiles import HIDDEN
from .flash_tensors import FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr

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
def send_box(target: Shared[UInt8], map: TMADescriptor, full: Shared[Int64], row: Int, head: Int, batch: Int):
    """Sends for 64 rows of a head; what lies outside of it becomes 0."""
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
        Int32(0),
        Int32(row),
        Int32(head),
        Int32(batch),
        Int32(Int(full)),
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


@always_inline
def scores_from_shared[
    dtype: DType, columns: Int
](own: Shared[UInt8], other: Shared[UInt8]) -> SIMD[DType.float32, columns // 2]:
    """Own @ other^T: 64 rows by `columns` rows, all of 64 elements."""
    var a = WGMMADescriptor[dtype].create[64, 1, TensorMapSwizzle.SWIZZLE_128B](
        own.unsafe_bitcast[Scalar[dtype]]()
    )
    var b = WGMMADescriptor[dtype].create[64, 1, TensorMapSwizzle.SWIZZLE_128B](
        other.unsafe_bitcast[Scalar[dtype]]()
    )
    var sums = SIMD[DType.float32, columns // 2](0)
    sums = wgmma_async[
        64, columns, 16, a_type=dtype, b_type=dtype, layout_a="row", layout_b="col", scale_d=0
    ](a, b, sums)
    comptime for k in range(1, 4):
        sums = wgmma_async[64, columns, 16, a_type=dtype, b_type=dtype, layout_a="row", layout_b="col"](
            a + k * 32, b + k * 32, sums
        )
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
    comptime for half in range(2):
        var row = first + half * 8 + lane_id() // 4
        if row < count:
            comptime for j in range(8):
                if j * 8 < d:
                    var pair = SIMD[DType.float32, 2](sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1])
                    target.unsafe_store[alignment=4](
                        row * pitch + j * 8 + lane_id() % 4 * 2, (pair * factors[half]).cast[dtype]()
                    )


# ---- Forward ------------------------------------------------------------------------------------------------

comptime FORWARD_KEYS = 128
"""Keys of a step of the forward pass."""
comptime FORWARD_STAGES = 2
comptime FORWARD_BYTES = BOX_BYTES + FORWARD_STAGES * 2 * FORWARD_KEYS * ROW_BYTES + 8 * (
    1 + 4 * FORWARD_STAGES
)


@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * GROUP)), `nvvm.minctasm`=SIMDLength(2)
)
def hopper_forward_kernel[
    dtype: DType
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
    """Output and lse. A block owns 64 queries and walks over the keys, 128 at a time; two blocks share a multiprocessor.

    The scores of a step are multiplied while the product with the values of the step before is under way.
    """
    comptime TILE = FORWARD_KEYS * ROW_BYTES
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var tiles = ceildiv(S, SIDE)
    var head = block_idx.x // tiles
    var s0 = (tiles - 1 - block_idx.x % tiles) * SIDE
    # One step at least: a row that sees nothing is a row whose keys are all hidden.
    var steps = max(1, ceildiv(sizes.keys_seen(min(s0 + SIDE, S) - 1), FORWARD_KEYS))
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var keys = shared.unsafe_offset(BOX_BYTES)
    var values = keys.unsafe_offset(FORWARD_STAGES * TILE)
    var query_here = values.unsafe_offset(FORWARD_STAGES * TILE).unsafe_bitcast[Int64]()
    var keys_full = query_here.unsafe_offset(1)
    var values_full = keys_full.unsafe_offset(FORWARD_STAGES)
    var keys_empty = values_full.unsafe_offset(FORWARD_STAGES)
    var values_empty = keys_empty.unsafe_offset(FORWARD_STAGES)
    if thread_idx.x == 0:
        comptime for i in range(1 + 4 * FORWARD_STAGES):
            mbarrier_init(query_here.unsafe_offset(i), 1)
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP:
        warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            var batch = head // Int(sizes.query_heads)
            var shared_head = sizes.shared_head(head) % Int(sizes.key_heads)
            mbarrier_arrive_expect_tx_shared(query_here, Int32(BOX_BYTES))
            send_box(shared, query_map, query_here, s0, head % Int(sizes.query_heads), batch)
            var turn = Turn(0, 1)
            for step in range(steps):
                var stage = turn.stage
                var t0 = step * FORWARD_KEYS
                wait(keys_empty.unsafe_offset(stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(keys_full.unsafe_offset(stage), Int32(TILE))
                comptime for box in range(FORWARD_KEYS // SIDE):
                    send_box(
                        keys.unsafe_offset(stage * TILE + box * BOX_BYTES),
                        key_map,
                        keys_full.unsafe_offset(stage),
                        t0 + box * SIDE,
                        shared_head,
                        batch,
                    )
                wait(values_empty.unsafe_offset(stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(values_full.unsafe_offset(stage), Int32(TILE))
                comptime for box in range(FORWARD_KEYS // SIDE):
                    send_box(
                        values.unsafe_offset(stage * TILE + box * BOX_BYTES),
                        value_map,
                        values_full.unsafe_offset(stage),
                        t0 + box * SIDE,
                        shared_head,
                        batch,
                    )
                turn.step[FORWARD_STAGES]()
        return

    warpgroup_reg_alloc[232]()
    var first = s0 + thread_idx.x % GROUP // 32 * 16
    var leads = thread_idx.x % GROUP == 0
    var factor = scale * LOG2_E
    var largest = StaticTuple[Float32, 2](HIDDEN, HIDDEN)
    var totals = StaticTuple[Float32, 2](0, 0)
    var rescales = StaticTuple[Float32, 2](0, 0)
    var sums = HALF(0)

    @__parameter
    @always_inline
    def weigh[width: SIMDLength, //](mut scores: SIMD[DType.float32, width], t0: Int):
        if not all_seen(first, first + 1, t0, t0 + FORWARD_KEYS, sizes):
            comptime for i in range(FORWARD_KEYS // 2):
                var s = first + i // 2 % 2 * 8 + lane_id() // 4
                var t = t0 + i // 4 * 8 + lane_id() % 4 * 2 + i % 2
                scores[i] = scores[i] if sees(s, t, sizes) else HIDDEN
        comptime for half in range(2):
            var grown = largest[half]
            comptime for j in range(FORWARD_KEYS // 8):
                grown = max(grown, max(scores[4 * j + 2 * half], scores[4 * j + 2 * half + 1]))
            grown = of_row(grown, True)
            var shift = grown * factor if grown > HIDDEN else Float32(0)
            rescales[half] = exp2(largest[half] * factor - shift)
            largest[half] = grown
            var total = Float32(0)
            comptime for j in range(FORWARD_KEYS // 8):
                comptime for side in range(2):
                    var weight = exp2(scores[4 * j + 2 * half + side] * factor - shift)
                    scores[4 * j + 2 * half + side] = weight
                    total += weight
            totals[half] = totals[half] * rescales[half] + total

    wait(query_here, 0)
    wait(keys_full, 0)
    wgmma_fence_aligned()
    var scores = scores_from_shared[dtype, FORWARD_KEYS](shared, keys)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    settled(scores)
    if leads:
        _ = mbarrier_arrive(keys_empty)
    weigh(scores, 0)
    var weights = rounded[dtype, 8](scores)
    var turn = Turn(1 % FORWARD_STAGES, 0)
    var before = Turn(0, 0)
    for step in range(1, steps):
        wait(keys_full.unsafe_offset(turn.stage), turn.parity)
        wgmma_fence_aligned()
        var next = scores_from_shared[dtype, FORWARD_KEYS](shared, keys.unsafe_offset(turn.stage * TILE))
        wgmma_commit_group_sync()
        wait(values_full.unsafe_offset(before.stage), before.parity)
        wgmma_fence_aligned()
        sums = add_product[dtype, 8](weights, values.unsafe_offset(before.stage * TILE), sums)
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(next)
        if leads:
            _ = mbarrier_arrive(keys_empty.unsafe_offset(turn.stage))
        weigh(next, step * FORWARD_KEYS)
        wgmma_wait_group_sync[0]()
        settled(sums)
        if leads:
            _ = mbarrier_arrive(values_empty.unsafe_offset(before.stage))
        comptime for i in range(32):
            sums[i] *= rescales[i // 2 % 2]
        weights = rounded[dtype, 8](next)
        turn.step[FORWARD_STAGES]()
        before.step[FORWARD_STAGES]()
    wait(values_full.unsafe_offset(before.stage), before.parity)
    wgmma_fence_aligned()
    sums = add_product[dtype, 8](weights, values.unsafe_offset(before.stage * TILE), sums)
    wgmma_commit_group_sync()
    wgmma_wait_group_sync[0]()
    settled(sums)

    var factors = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var total = of_row(totals[half], False)
        factors[half] = 1 / total if total != 0 else 1
        var s = first + half * 8 + lane_id() // 4
        if s < S and lane_id() % 4 == 0:
            lse[unsafe_offset=head * S + s] = (
                HIDDEN if total == 0 else (largest[half] * factor + log2(total)) * LN_2
            )
    store_half[dtype](
        output.unsafe_offset(start_of(head, sizes.query_heads, output_strides)),
        sums,
        factors,
        first,
        S,
        Int(output_strides[2]),
        Int(sizes.head_dim),
    )


# ---- Backward -----------------------------------------------------------------------------------------------

comptime NUMBERS_THREADS = 256
comptime QUERY_GROUPS = 3
"""Warpgroups that multiply in a block of the query's kernel."""
comptime QUERY_STAGES = 3
comptime QUERY_BYTES = (2 * QUERY_GROUPS + 2 * QUERY_STAGES) * BOX_BYTES + 8 * (1 + 2 * QUERY_STAGES)


def padded(length: Int) -> Int:
    """Rows that are whole boxes."""
    return ceildiv(length, SIDE) * SIDE


def hopper_numbers_kernel(
    numbers: MutPtr[DType.float32],  # [B, N, 2, padded S]
    lse: ImmPtr[DType.float32],  # [B, N, S]
    delta: ImmPtr[DType.float32],  # [B, N, S]
    packed: PackedSizes,
):
    """Of each head what is taken from its scores, to the base 2, and delta, in whole boxes. Behind the last query P is 0.
    """
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var length = ceildiv(S, SIDE) * SIDE
    var index = block_idx.x * NUMBERS_THREADS + thread_idx.x
    var head = index // length
    var s = index % length
    if head < sizes.heads():
        var exists = s < S
        var shift = row_shift[True](lse[unsafe_offset=head * S + s]) if exists else -HIDDEN
        numbers[unsafe_offset=head * 2 * length + s] = shift
        numbers[unsafe_offset=(head * 2 + 1) * length + s] = delta[
            unsafe_offset=head * S + s
        ] if exists else 0


@__llvm_arg_metadata(query_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(grad_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(key_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(value_map, `nvvm.grid_constant`)
@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32((QUERY_GROUPS + 1) * GROUP)),
    `nvvm.minctasm`=SIMDLength(1),
)
def hopper_query_kernel[
    dtype: DType
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
    """The gradient of the query. A block owns 192 queries, 64 for each of three warpgroups, and walks over the keys.
    """
    comptime ROWS = QUERY_GROUPS * SIDE
    comptime STAGE = 2 * BOX_BYTES
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var length = ceildiv(S, SIDE) * SIDE
    var tiles = ceildiv(S, ROWS)
    var head = block_idx.x // tiles
    var s0 = (tiles - 1 - block_idx.x % tiles) * ROWS
    var steps = ceildiv(sizes.keys_seen(min(s0 + ROWS, S) - 1), SIDE)
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]().as_unsafe_any_origin()
    var stages = shared.unsafe_offset(2 * QUERY_GROUPS * BOX_BYTES)
    var own_here = stages.unsafe_offset(QUERY_STAGES * STAGE).unsafe_bitcast[Int64]()
    var full = own_here.unsafe_offset(1)
    var empty = full.unsafe_offset(QUERY_STAGES)
    if thread_idx.x == 0:
        mbarrier_init(own_here, 1)
        comptime for i in range(QUERY_STAGES):
            mbarrier_init(full.unsafe_offset(i), 1)
            mbarrier_init(empty.unsafe_offset(i), Int32(QUERY_GROUPS))
        fence_mbarrier_init()
    barrier()

    if thread_idx.x < GROUP:
        warpgroup_reg_dealloc[24]()
        if thread_idx.x == 0:
            var batch = head // Int(sizes.query_heads)
            var shared_head = sizes.shared_head(head) % Int(sizes.key_heads)
            mbarrier_arrive_expect_tx_shared(own_here, Int32(2 * QUERY_GROUPS * BOX_BYTES))
            comptime for box in range(QUERY_GROUPS):
                var row = s0 + box * SIDE
                send_box(
                    shared.unsafe_offset(box * BOX_BYTES),
                    query_map,
                    own_here,
                    row,
                    head % Int(sizes.query_heads),
                    batch,
                )
                send_box(
                    shared.unsafe_offset((QUERY_GROUPS + box) * BOX_BYTES),
                    grad_map,
                    own_here,
                    row,
                    head % Int(sizes.query_heads),
                    batch,
                )
            var turn = Turn(0, 1)
            for step in range(steps):
                var tile = stages.unsafe_offset(turn.stage * STAGE)
                var arrives = full.unsafe_offset(turn.stage)
                wait(empty.unsafe_offset(turn.stage), turn.parity)
                mbarrier_arrive_expect_tx_shared(arrives, Int32(STAGE))
                send_box(tile, key_map, arrives, step * SIDE, shared_head, batch)
                send_box(tile.unsafe_offset(BOX_BYTES), value_map, arrives, step * SIDE, shared_head, batch)
                turn.step[QUERY_STAGES]()
        return

    warpgroup_reg_alloc[160]()
    var group = thread_idx.x // GROUP - 1
    var first = s0 + group * SIDE + thread_idx.x % GROUP // 32 * 16
    var leads = thread_idx.x % GROUP == 0
    var factor = scale * LOG2_E
    var own_queries = shared.unsafe_offset(group * BOX_BYTES)
    var own_grads = shared.unsafe_offset((QUERY_GROUPS + group) * BOX_BYTES)
    var shifts = StaticTuple[Float32, 2](0, 0)
    var deltas = StaticTuple[Float32, 2](0, 0)
    comptime for half in range(2):
        var s = min(first + half * 8 + lane_id() // 4, S - 1)
        shifts[half] = numbers[unsafe_offset=head * 2 * length + s]
        deltas[half] = numbers[unsafe_offset=(head * 2 + 1) * length + s]
    var sums = HALF(0)
    var turn = Turn(0, 0)
    var before = 0
    wait(own_here, 0)
    for step in range(steps):
        wait(full.unsafe_offset(turn.stage), turn.parity)
        var keys = stages.unsafe_offset(turn.stage * STAGE)
        var t0 = step * SIDE
        wgmma_fence_aligned()
        var weights = scores_from_shared[dtype, SIDE](own_queries, keys)
        wgmma_commit_group_sync()
        wgmma_fence_aligned()
        var slopes = scores_from_shared[dtype, SIDE](own_grads, keys.unsafe_offset(BOX_BYTES))
        wgmma_commit_group_sync()
        wgmma_wait_group_sync[1]()
        settled(weights)
        # Now the product of the step before is done too: its stage may be filled again.
        if step > 0 and leads:
            _ = mbarrier_arrive(empty.unsafe_offset(before))
        comptime for i in range(32):
            weights[i] = exp2(weights[i] * factor - shifts[i // 2 % 2])
        if not all_seen(first, first + 1, t0, t0 + SIDE, sizes):
            comptime for i in range(32):
                var s = first + i // 2 % 2 * 8 + lane_id() // 4
                var t = t0 + i // 4 * 8 + lane_id() % 4 * 2 + i % 2
                weights[i] = weights[i] if sees(s, t, sizes) else 0
        wgmma_wait_group_sync[0]()
        settled(slopes)
        comptime for i in range(32):
            slopes[i] = weights[i] * (slopes[i] - deltas[i // 2 % 2])
        var left = rounded[dtype, 4](slopes)
        wgmma_fence_aligned()
        sums = add_product[dtype, 4](left, keys, sums)
        wgmma_commit_group_sync()
        before = turn.stage
        turn.step[QUERY_STAGES]()
    wgmma_wait_group_sync[0]()
    settled(sums)
    store_half[dtype](
        grad_query.unsafe_offset(start_of(head, sizes.query_heads, gradient_strides)),
        sums,
        StaticTuple[Float32, 2](scale, scale),
        first,
        S,
        Int(gradient_strides[2]),
        Int(sizes.head_dim),
    )
