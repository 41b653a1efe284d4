"""Small GPU kernels for the tests of the virtual GPU's executor."""

from max.gpu import barrier, block_dim, block_idx, global_idx, grid_dim, lane_id, syncwarp, thread_idx
from max.gpu.compute.mma import ld_matrix, mma
from max.gpu.memory import async_copy, async_copy_commit_group, async_copy_wait_group, external_memory
from max.gpu.primitives import block, warp
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from std.atomic import Atomic, Ordering, fence
from std.math import ceildiv, exp, rsqrt, sqrt, tanh
from std.memory import AddressSpace

comptime F32 = DType.float32
comptime In = Pointer[Float32, ImmutAnyOrigin]
comptime Out = MutPointer[Float32, MutAnyOrigin]
comptime IntIn = Pointer[Int32, ImmutAnyOrigin]
comptime IntOut = MutPointer[Int32, MutAnyOrigin]


def vector_add(o: Out, a: In, b: In, n: Int32):
    var i = global_idx.x
    if i < Int(n):
        o[unsafe_offset=i] = a[unsafe_offset=i] + b[unsafe_offset=i]


def vector_add_wide(o: Out, a: In, b: In, n: Int32):
    """Four elements a thread."""
    var i = 4 * global_idx.x
    if i < Int(n):
        var x = a.unsafe_load[width=4, alignment=16](i)
        var y = b.unsafe_load[width=4, alignment=16](i)
        o.unsafe_store[alignment=16](i, x + y)


def vector_add_past_end(o: Out, a: In, b: In, n: Int32):
    """The guard lets one thread too many through."""
    var i = global_idx.x
    if i <= Int(n):
        o[unsafe_offset=i] = a[unsafe_offset=i] + b[unsafe_offset=i]


def collatz(o: IntOut, n: Int32):
    """Steps of the Collatz sequence: a loop that every thread leaves at another time."""
    var i = global_idx.x
    if i >= Int(n):
        return
    var x = i + 1
    var steps = 0
    while x != 1:
        x = x // 2 if x % 2 == 0 else 3 * x + 1
        steps += 1
    o[unsafe_offset=i] = Int32(steps)


def transcendental(o: Out, a: In, n: Int32):
    var i = global_idx.x
    if i < Int(n):
        var x = a[unsafe_offset=i]
        o[unsafe_offset=4 * i] = exp(x)
        o[unsafe_offset=4 * i + 1] = rsqrt(abs(x) + 1)
        o[unsafe_offset=4 * i + 2] = tanh(x)
        o[unsafe_offset=4 * i + 3] = sqrt(abs(x)) / (x + 10)


def matmul_tiled(o: Out, a: In, b: In, m: Int32, n: Int32, k: Int32):
    comptime T = 16
    var a_tile = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[T, T]())
    var b_tile = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[T, T]())
    var tx = thread_idx.x
    var ty = thread_idx.y
    var row = block_idx.y * T + ty
    var column = block_idx.x * T + tx
    var total = Float32(0)
    for t in range(0, Int(k), T):
        var inside_a = row < Int(m) and t + tx < Int(k)
        var inside_b = column < Int(n) and t + ty < Int(k)
        a_tile[ty, tx] = a[unsafe_offset=row * Int(k) + t + tx] if inside_a else Float32(0)
        b_tile[ty, tx] = b[unsafe_offset=(t + ty) * Int(n) + column] if inside_b else Float32(0)
        barrier()
        comptime for j in range(T):
            total += a_tile[ty, j] * b_tile[j, tx]
        barrier()
    if row < Int(m) and column < Int(n):
        o[unsafe_offset=row * Int(n) + column] = total


def matmul_no_barrier(o: Out, a: In, b: In, m: Int32, n: Int32, k: Int32):
    """The barrier between filling and using the tiles is missing."""
    comptime T = 16
    var a_tile = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[T, T]())
    var b_tile = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[T, T]())
    var tx = thread_idx.x
    var ty = thread_idx.y
    var row = block_idx.y * T + ty
    var column = block_idx.x * T + tx
    var total = Float32(0)
    for t in range(0, Int(k), T):
        a_tile[ty, tx] = a[unsafe_offset=row * Int(k) + t + tx]
        b_tile[ty, tx] = b[unsafe_offset=(t + ty) * Int(n) + column]
        comptime for j in range(T):
            total += a_tile[ty, j] * b_tile[j, tx]
        barrier()
    o[unsafe_offset=row * Int(n) + column] = total


def block_sum_no_atomic(o: Out, a: In, n: Int32):
    """Every block adds to o[0] without an atomic."""
    var i = global_idx.x
    var total = block.sum[block_size=256](a[unsafe_offset=i] if i < Int(n) else Float32(0))
    if thread_idx.x == 0:
        o[unsafe_offset=0] += total


def zero_in_first_block(o: Out, a: In, n: Int32):
    """Block 0 zeroes what all blocks add to: right only if block 0 happens to be first."""
    var i = global_idx.x
    if i == 0:
        o[unsafe_offset=0] = 0
    var total = block.sum[block_size=256](a[unsafe_offset=i] if i < Int(n) else Float32(0))
    if thread_idx.x == 0:
        _ = Atomic[Float32, scope="device"].fetch_add[ordering=Ordering.RELAXED](o, total)


def last_block_reduces(o: Out, partials: Out, counter: IntOut, a: In, n: Int32):
    """Each block leaves a partial sum; the block that counts last adds them up."""
    var flag = stack_allocation[dtype=DType.int32, address_space=AddressSpace.SHARED](row_major[1]())
    var i = global_idx.x
    var total = block.sum[block_size=128](a[unsafe_offset=i] if i < Int(n) else Float32(0))
    if thread_idx.x == 0:
        partials[unsafe_offset=block_idx.x] = total
        fence[ordering=Ordering.ACQUIRE_RELEASE, scope="device"]()
        var before = Atomic[Int32, scope="device"].fetch_add[ordering=Ordering.RELAXED](counter, 1)
        fence[ordering=Ordering.ACQUIRE_RELEASE, scope="device"]()
        flag[0] = before
    barrier()
    if flag[0] == Int32(grid_dim.x - 1) and thread_idx.x == 0:
        var sum = Float32(0)
        for k in range(grid_dim.x):
            sum += partials[unsafe_offset=k]
        o[unsafe_offset=0] = sum


def last_block_no_fence(o: Out, partials: Out, counter: IntOut, a: In, n: Int32):
    """The same without fences: the counter orders nothing."""
    var flag = stack_allocation[dtype=DType.int32, address_space=AddressSpace.SHARED](row_major[1]())
    var i = global_idx.x
    var total = block.sum[block_size=128](a[unsafe_offset=i] if i < Int(n) else Float32(0))
    if thread_idx.x == 0:
        partials[unsafe_offset=block_idx.x] = total
        flag[0] = Atomic[Int32, scope="device"].fetch_add[ordering=Ordering.RELAXED](counter, 1)
    barrier()
    if flag[0] == Int32(grid_dim.x - 1) and thread_idx.x == 0:
        var sum = Float32(0)
        for k in range(grid_dim.x):
            sum += partials[unsafe_offset=k]
        o[unsafe_offset=0] = sum


def warp_tree(o: Out, a: In):
    """A tree reduction in shared memory; inside one warp only syncwarp orders the steps."""
    var s = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[32]())
    var lane = thread_idx.x
    s[lane] = a[unsafe_offset=block_idx.x * 32 + lane]
    syncwarp()
    comptime for step in range(5):
        comptime width = 16 >> step
        if lane < width:
            s[lane] += s[lane + width]
        syncwarp()
    if lane == 0:
        o[unsafe_offset=block_idx.x] = rebind[Float32](s[0])


def barrier_in_branch(o: Out, a: In):
    """Only half of the threads reach the barrier."""
    var s = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[64]())
    s[thread_idx.x] = a[unsafe_offset=thread_idx.x]
    if thread_idx.x < 32:
        barrier()
        o[unsafe_offset=thread_idx.x] = rebind[Float32](s[63 - thread_idx.x])
    else:
        o[unsafe_offset=thread_idx.x] = 0


def barrier_in_branch_of_warp(o: Out, a: In):
    """Only ten threads of the warp reach the barrier."""
    var s = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[64]())
    s[thread_idx.x] = a[unsafe_offset=thread_idx.x]
    if thread_idx.x < 10:
        barrier()
        o[unsafe_offset=thread_idx.x] = rebind[Float32](s[thread_idx.x])
    else:
        o[unsafe_offset=thread_idx.x] = 0


def two_barriers(o: Out, a: In):
    """The two sides of a branch wait at different barriers."""
    var s = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[64]())
    s[thread_idx.x] = a[unsafe_offset=thread_idx.x]
    if thread_idx.x < 32:
        barrier()
        o[unsafe_offset=thread_idx.x] = rebind[Float32](s[63 - thread_idx.x])
    else:
        barrier()
        o[unsafe_offset=thread_idx.x] = rebind[Float32](s[63 - thread_idx.x]) + 1


def shared_unwritten(o: Out, a: In):
    """Reads a shared element that no thread has written."""
    var s = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[64]())
    if thread_idx.x < 32:
        s[thread_idx.x] = a[unsafe_offset=thread_idx.x]
    barrier()
    o[unsafe_offset=thread_idx.x] = rebind[Float32](s[thread_idx.x])


def mma_tf32(o: Out, a: In, b: In):
    """One m16n8k8 product; a is [16, 8], b is [8, 8] (transposed), o is [16, 8]."""
    var lane = lane_id()
    var g = lane // 4
    var t = lane % 4
    var x = SIMD[F32, 4](0)
    comptime for i in range(4):
        x[i] = a[unsafe_offset=(g + (8 if i % 2 == 1 else 0)) * 8 + t + (4 if i >= 2 else 0)]
    var y = SIMD[F32, 2](b[unsafe_offset=g * 8 + t], b[unsafe_offset=g * 8 + t + 4])
    var d = SIMD[F32, 4](0)
    mma(d, x, y, SIMD[F32, 4](0))
    comptime for i in range(4):
        o[unsafe_offset=(g + (8 if i >= 2 else 0)) * 8 + 2 * t + i % 2] = d[i]


def matrix_load(o: MutPointer[BFloat16, MutAnyOrigin], a: Pointer[BFloat16, ImmutAnyOrigin]):
    """Loads four 8 x 8 tiles with ldmatrix, plain and transposed; every lane stores its eight elements twice.
    """
    var s = stack_allocation[dtype=DType.bfloat16, address_space=AddressSpace.SHARED](row_major[16, 16]())
    var lane = lane_id()
    comptime for k in range(8):
        s.ptr.unsafe_store(lane * 8 + k, a[unsafe_offset=lane * 8 + k])
    barrier()
    var p = s.ptr.unsafe_offset((lane % 16) * 16 + (lane // 16) * 8)
    var x = ld_matrix[8](p)
    var y = ld_matrix[8, transpose=True](p)
    comptime for k in range(8):
        o[unsafe_offset=lane * 16 + k] = x[k]
        o[unsafe_offset=lane * 16 + 8 + k] = y[k]


def warp_things(o: IntOut, a: IntIn):
    var lane = thread_idx.x
    var v = a[unsafe_offset=lane]
    o[unsafe_offset=lane] = warp.sum(v)
    o[unsafe_offset=64 + lane] = warp.max(v)
    o[unsafe_offset=128 + lane] = warp.prefix_sum[exclusive=True](v)
    o[unsafe_offset=192 + lane] = warp.shuffle_down(v, 3)
    o[unsafe_offset=256 + lane] = warp.broadcast(v)


def block_prefix_sum(o: IntOut, a: IntIn):
    var i = thread_idx.x
    o[unsafe_offset=i] = block.prefix_sum[block_size=128](a[unsafe_offset=i])


def local_array(o: IntOut, a: IntIn):
    """A local array with a dynamic index."""
    var counts = Array[Int32, 8](fill=0)
    for k in range(16):
        counts[Int(a[unsafe_offset=thread_idx.x * 16 + k])] += 1
    var best = 0
    for k in range(8):
        if counts[k] > counts[best]:
            best = k
    o[unsafe_offset=thread_idx.x] = Int32(best)


def bfloat_scale(
    o: MutPointer[BFloat16, MutAnyOrigin], a: Pointer[BFloat16, ImmutAnyOrigin], s: Float32, n: Int32
):
    var i = global_idx.x
    if i < Int(n):
        o[unsafe_offset=i] = (a[unsafe_offset=i].cast[F32]() * s + 1).cast[DType.bfloat16]()


def double_axpy(
    o: MutPointer[Float64, MutAnyOrigin], a: Pointer[Float64, ImmutAnyOrigin], s: Float64, n: Int32
):
    var i = global_idx.x
    if i < Int(n):
        o[unsafe_offset=i] = s * a[unsafe_offset=i] + 0.1


def spin_forever(flag: IntOut):
    while Atomic[Int32, scope="device"].load(flag) == 0:
        pass


def unwritten_tail(o: Out, a: In, n: Int32):
    """Forgets the last element."""
    var i = global_idx.x
    if i < Int(n) - 1:
        o[unsafe_offset=i] = a[unsafe_offset=i]


def bank_conflicts(o: Out, a: In):
    """A column of an unpadded tile: all 32 lanes meet in one bank."""
    var s = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[32, 32]())
    comptime for r in range(32):
        s[r, thread_idx.x] = a[unsafe_offset=r * 32 + thread_idx.x]
    barrier()
    comptime for r in range(32):
        o[unsafe_offset=r * 32 + thread_idx.x] = rebind[Float32](s[thread_idx.x, r])
