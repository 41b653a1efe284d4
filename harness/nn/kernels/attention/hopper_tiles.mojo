"""Building blocks of the `wgmma` kernels: barriers, TMA loads, products, stores.

One thread of the first warpgroup, the producer, waits for free stages and loads boxes of 64 x 64 by TMA; each
other warpgroup, a consumer, owns 64 rows and multiplies. A stage's "full" barrier signals that its tiles have
arrived, its "empty" barrier that all reads are done.

Products are asynchronous, which the compiler does not know: `fence_accumulators`, called after each wait,
keeps the compiler from moving uses of the accumulators before the wait. Accumulators have the layout of
`mma`: two elements of a row, then two elements of the row 8 below, and so on along the row. For heads wider
than a box there are separate accumulators, and tiles, for every 64 elements.
"""

from std.memory import AddressSpace, bitcast
from std.sys import inlined_assembly
from std.utils import StaticTuple
from std.utils.index import IndexList
from max.gpu import barrier, lane_id, thread_idx
from max.gpu.compute.mma import WGMMADescriptor, _RegisterPackType, wgmma_async
from max.gpu.host import DeviceContext
from max.gpu.host.nvidia.tma import TensorMapSwizzle, TMADescriptor
from max.gpu.primitives import warp
from max.gpu.sync import mbarrier_try_wait_parity_shared

from .scores import Strides
from .tensors import FlashSizes
from shared.common import ImmPtr, MutPtr
from common.tensor_maps import get_tensor_map

comptime GROUP_THREADS = 128
"""Threads of a warpgroup."""
comptime BOX_SIZE = 64
"""Rows of a box, and elements per row: 128 bytes, the width of TMA's widest swizzle."""
comptime ROW_BYTES = 128
comptime BOX_BYTES = BOX_SIZE * ROW_BYTES
comptime WAIT_HINT_NS = 10_000_000
"""Maximum nanoseconds that a wait may suspend the thread before it checks again."""
comptime BoxSums = SIMD[DType.float32, 32]
"""A lane's share of 64 x 64 accumulators."""
comptime Shared[T: AnyType] = Pointer[T, MutAnyOrigin, address_space=AddressSpace.SHARED]


# ---- Barriers and boxes -------------------------------------------------------------------------------------


@fieldwise_init
struct PipelineState(Copyable, Movable):
    """The next stage of a ring, and the parity of its barriers."""

    var stage: Int
    var parity: Int32

    @always_inline
    def step[stages: Int](mut self):
        """Advance to the next stage, flipping the parity on wrap-around."""
        self.stage += 1
        if self.stage == stages:
            self.stage = 0
            self.parity ^= 1


@always_inline
def wait(at: Shared[Int64], parity: Int32):
    """Wait until the barrier's phase with this parity completes."""
    mbarrier_try_wait_parity_shared(at, parity, WAIT_HINT_NS)


@always_inline
def wait_warp(at: Shared[Int64], parity: Int32):
    """Wait with a whole warp, and reconverge. The compiler then keeps warp-uniform values in uniform
    registers, which hold the tile addresses of products.
    """
    inlined_assembly[
        (
            "{\n.reg .pred p;\nWAITING:\nmbarrier.try_wait.parity.shared.b64 p, [$0], $1, $2;\n"
            "vote.sync.all.pred p, p, 0xffffffff;\n@!p bra.uni WAITING;\n}"
        ),
        NoneType,
        constraints="r,r,r,~{memory}",
        has_side_effect=True,
    ](Int32(Int(at)), parity, Int32(WAIT_HINT_NS))


@always_inline
def tma_load_box(
    target: Shared[UInt8],
    map: TMADescriptor,
    full: Shared[Int64],
    column: Int,
    row: Int,
    head: Int,
    batch: Int,
):
    """Load 64 rows of a head, 64 elements each; elements outside the tensor are 0."""
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
def tma_load_tile[
    width: Int, rows: Int
](target: Shared[UInt8], map: TMADescriptor, full: Shared[Int64], row: Int, head: Int, batch: Int):
    """Load a tile of a head: the first 64 elements of all rows, then the next 64, and so on."""
    comptime for half in range(width // BOX_SIZE):
        comptime for part in range(rows // BOX_SIZE):
            tma_load_box(
                target.unsafe_offset(half * rows * ROW_BYTES + part * BOX_BYTES),
                map,
                full,
                half * BOX_SIZE,
                row + part * BOX_SIZE,
                head,
                batch,
            )


@always_inline
def bulk_load[dtype: DType](target: Shared[UInt8], source: ImmPtr[dtype], bytes: Int32, full: Shared[Int64]):
    """Load `bytes` contiguous bytes, a multiple of 16, from an aligned address."""
    inlined_assembly[
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        NoneType,
        constraints="r,l,r,r,~{memory}",
        has_side_effect=True,
    ](Int32(Int(target)), Int64(Int(source)), bytes, Int32(Int(full)))


def create_head_map[
    dtype: DType
](
    ctx: DeviceContext,
    tensor: ImmPtr[dtype],
    heads: Int32,
    length: Int32,
    sizes: FlashSizes,
    strides: Strides,
) raises -> TMADescriptor:
    """Return the tensor map of a tensor [B, heads, length, d] whose rows start at multiples of 16 bytes."""
    var shape = IndexList[4](Int(sizes.batch), Int(heads), Int(length), Int(sizes.head_dim))
    var steps = IndexList[4](Int(strides[0]), Int(strides[1]), Int(strides[2]), 1)
    return get_tensor_map(ctx, tensor, shape, steps, IndexList[4](1, 1, BOX_SIZE, BOX_SIZE))


@always_inline
def consumer_index[groups: Int]() -> Int:
    """Return the index of this consumer warpgroup in a register that the compiler knows to be uniform in a
    warp, so that the tile addresses and loop bounds derived from it are uniform too.
    """
    comptime if groups == 1:
        return 0
    return Int(warp.broadcast(Int32(thread_idx.x // GROUP_THREADS))) - 1


@always_inline
def make_uniform(tile: Shared[UInt8]) -> Shared[UInt8]:
    """Return a tile's address in a warp-uniform register."""
    return Shared[UInt8](unsafe_from_address=Int(warp.broadcast(Int32(Int(tile)))))


@always_inline
def alternate_groups[arrive: Bool](group: Int):
    """Make two warpgroups multiply alternately: wait for this warpgroup's turn or, if `arrive`, signal
    `group`.
    """
    inlined_assembly[
        "barrier.cta.arrive $0, 256;" if arrive else "barrier.cta.sync $0, 256;",
        NoneType,
        constraints="r,~{memory}",
        has_side_effect=True,
    ](Int32(group + 1))


@always_inline
def divmod32(number: Int, by: Int) -> Tuple[Int, Int]:
    """Return quotient and remainder of numbers below 2^32; a 64-bit division would take a hundred
    instructions.
    """
    var quotient = UInt32(number) // UInt32(by)
    return (Int(quotient), Int(UInt32(number) - quotient * UInt32(by)))


@always_inline
def head_offset(batch: Int, head: Int, strides: Strides) -> Int:
    """Return the offset of a head."""
    return batch * Int(strides[0]) + head * Int(strides[1])


@always_inline
def count_group_heads(sizes: FlashSizes) -> Int:
    """Return the number of query heads that share a head of key and value."""
    if sizes.query_heads == sizes.key_heads:
        return 1
    return divmod32(Int(sizes.query_heads), Int(sizes.key_heads))[0]


# ---- Products -----------------------------------------------------------------------------------------------


@always_inline
def fence_accumulators[width: SIMDLength, //](mut sums: SIMD[DType.float32, width]):
    """Keep the compiler from moving uses of the accumulators before the preceding wait."""
    comptime for i in range(Int(width)):
        sums[i] = inlined_assembly["", Float32, constraints="=f,0", has_side_effect=True](sums[i])


@always_inline
def tile_descriptor(tile: Shared[UInt8], leading: Int) -> Int64:
    """Return the matrix descriptor of a tile in shared memory: address and both strides in units of 16 bytes,
    and the swizzle.
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
comptime IN_PLACE_CONSTRAINTS: StaticString = "=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,=f,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,r,r,r,r,l"
"""Constraints: 32 accumulators read and written, a left operand of four registers, and a descriptor."""


comptime INSTRUCTION = "wgmma.mma_async.sync.aligned.m64n64k16.f32."
comptime SUMS = (
    " {$0, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21,"
    " $22, $23, $24, $25, $26, $27, $28, $29, $30, $31}, "
)


@always_inline
def multiply[
    dtype: DType, //, along: Bool, fresh: Bool = False
](left: SIMD[dtype, 8], right: Int64, sums: BoxSums) -> BoxSums:
    """Return sums + left @ right: 64 x 16 in registers times 16 x 64 in shared memory, or its transpose; if
    `fresh`, return left @ right alone.

    Rows in shared memory are `along` the 16 summands, or across them. `wgmma_async` does not support float16
    from registers.
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
        constraints=IN_PLACE_CONSTRAINTS,
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
    var result = BoxSums(0)
    comptime for i in range(32):
        result[i] = written[i]
    return result


@always_inline
def round_to_operands[
    dtype: DType, count: Int
](sums: SIMD[DType.float32, _]) -> StaticTuple[SIMD[dtype, 8], count]:
    """Round accumulators to `count` left operands."""
    var fragments = StaticTuple[SIMD[dtype, 8], count]()
    comptime for k in range(count):
        fragments[k] = sums.slice[8, offset=8 * k]().cast[dtype]()
    return fragments


comptime Sums[width: Int] = StaticTuple[BoxSums, width // BOX_SIZE]
"""A lane's share of the accumulators of 64 rows, `width` wide, in parts of 64 columns."""


@always_inline
def scores_from_shared[
    dtype: DType, width: Int, columns: Int
](left: Shared[UInt8], right: Shared[UInt8]) -> SIMD[DType.float32, columns // 2]:
    """Return left @ right^T of 64 rows and `columns` rows, all with `width` elements."""
    var sums = SIMD[DType.float32, columns // 2](0)
    comptime for half in range(width // BOX_SIZE):
        var a = WGMMADescriptor[dtype].create[64, 1, TensorMapSwizzle.SWIZZLE_128B](
            left.unsafe_offset(half * BOX_BYTES).unsafe_bitcast[Scalar[dtype]]()
        )
        var b = WGMMADescriptor[dtype].create[64, 1, TensorMapSwizzle.SWIZZLE_128B](
            right.unsafe_offset(half * columns * ROW_BYTES).unsafe_bitcast[Scalar[dtype]]()
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
](left: StaticTuple[SIMD[dtype, 8], count], right: Shared[UInt8], sums: BoxSums) -> BoxSums:
    """Return sums + left @ right, where right has 16 * count rows of 64 elements."""
    var right_descriptor = tile_descriptor(right, BOX_BYTES // 16)
    var result = sums
    comptime for k in range(count):
        result = multiply[False](left[k], right_descriptor + Int64(k * ROW_BYTES), result)
    return result


@always_inline
def add_products[
    dtype: DType, count: Int, width: Int
](left: StaticTuple[SIMD[dtype, 8], count], right: Shared[UInt8], mut sums: Sums[width]):
    """Compute sums += left @ right, where right is a tile of 16 * count rows.

    It multiplies 128 elements at a time if `wgmma_async` supports that: it does not for float16 from
    registers.
    """
    comptime if width == 2 * BOX_SIZE and dtype == DType.bfloat16:
        var right_descriptor = WGMMADescriptor[dtype].create[
            64, count * ROW_BYTES, TensorMapSwizzle.SWIZZLE_128B
        ](right.unsafe_bitcast[Scalar[dtype]]())
        var both = sums[0].join(sums[1])
        comptime for k in range(count):
            both = rebind[type_of(both)](
                wgmma_async[64, 128, 16, a_type=dtype, b_type=dtype, layout_a="row", layout_b="row"](
                    left[k], right_descriptor + k * 16 * ROW_BYTES, rebind[SIMD[DType.float32, 64]](both)
                )
            )
        sums[0] = rebind[BoxSums](both.slice[32]())
        sums[1] = rebind[BoxSums](both.slice[32, offset=32]())
        return
    comptime for half in range(width // BOX_SIZE):
        sums[half] = add_product[dtype, count](
            left, right.unsafe_offset(half * 16 * count * ROW_BYTES), sums[half]
        )


@always_inline
def fence_all_accumulators[width: Int](mut sums: Sums[width]):
    """Apply `fence_accumulators` to the accumulators of all columns."""
    comptime for half in range(width // BOX_SIZE):
        var some = sums[half]
        fence_accumulators(some)
        sums[half] = some


@always_inline
def store_half[
    dtype: DType
](
    target: MutPtr[dtype],
    sums: BoxSums,
    factors: StaticTuple[Float32, 2],
    first: Int,
    count: Int,
    pitch: Int,
    d: Int,
):
    """Write a warp's 16 rows to the rows from `first` on of a matrix [count, d], each row times its own
    factor.
    """

    @__parameter
    @always_inline
    def store[half: Int, j: Int](place: MutPtr[dtype]):
        var pair = SIMD[DType.float32, 2](sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1])
        place.unsafe_store[alignment=4](j * 8, (pair * factors[half]).cast[dtype]())

    comptime for half in range(2):
        var row = first + half * 8 + lane_id() // 4
        if row < count:
            var place = target.unsafe_offset(row * pitch + lane_id() % 4 * 2)
            if d >= BOX_SIZE:  # Nearly always: all addresses are then one plus a constant.
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
    """Apply `store_half` to the accumulators of all columns."""
    comptime for half in range(width // BOX_SIZE):
        store_half[dtype](
            target.unsafe_offset(half * BOX_SIZE),
            sums[half],
            factors,
            first,
            count,
            pitch,
            d - half * BOX_SIZE,
        )


@always_inline
def count_visible_keys(first: Int, sizes: FlashSizes) -> StaticTuple[Int32, 2]:
    """Return the number of keys visible to each of a lane's two rows, minus the lane's first column. A warp's
    queries begin at `first`. The result is 32-bit, so that a comparison per score is one instruction.
    """
    var bounds = StaticTuple[Int32, 2](0, 0)
    comptime for half in range(2):
        var query = Int32(first) + Int32(half * 8) + Int32(lane_id()) // 4
        bounds[half] = min(sizes.key_len, query + sizes.diagonal + 1) - Int32(lane_id()) % 4 * 2
    return bounds
