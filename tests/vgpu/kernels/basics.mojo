"""Small GPU kernels for the tests of the virtual GPU's executor."""

from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.primitives import block
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation
from std.atomic import Atomic, Ordering
from std.memory import AddressSpace

comptime F32 = DType.float32
comptime In = Pointer[Float32, ImmutAnyOrigin]
comptime Out = MutPointer[Float32, MutAnyOrigin]
comptime IntIn = Pointer[Int32, ImmutAnyOrigin]
comptime IntOut = MutPointer[Int32, MutAnyOrigin]


def vector_add_past_end(o: Out, a: In, b: In, n: Int32):
    """The guard admits one thread too many."""
    var i = global_idx.x
    if i <= Int(n):
        o[unsafe_offset=i] = a[unsafe_offset=i] + b[unsafe_offset=i]


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


def zero_in_first_block(o: Out, a: In, n: Int32):
    """Block 0 zeroes the sum of all blocks, which is correct only if block 0 runs first."""
    var i = global_idx.x
    if i == 0:
        o[unsafe_offset=0] = 0
    var total = block.sum[block_size=256](a[unsafe_offset=i] if i < Int(n) else Float32(0))
    if thread_idx.x == 0:
        _ = Atomic[Float32, scope="device"].fetch_add[ordering=Ordering.RELAXED](o, total)


def barrier_in_branch(o: Out, a: In):
    """Only half of the threads reach the barrier."""
    var s = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[64]())
    s[thread_idx.x] = a[unsafe_offset=thread_idx.x]
    if thread_idx.x < 32:
        barrier()
        o[unsafe_offset=thread_idx.x] = rebind[Float32](s[63 - thread_idx.x])
    else:
        o[unsafe_offset=thread_idx.x] = 0


def shared_unwritten(o: Out, a: In):
    """Reads a shared element that no thread has written."""
    var s = stack_allocation[dtype=F32, address_space=AddressSpace.SHARED](row_major[64]())
    if thread_idx.x < 32:
        s[thread_idx.x] = a[unsafe_offset=thread_idx.x]
    barrier()
    o[unsafe_offset=thread_idx.x] = rebind[Float32](s[thread_idx.x])


def block_prefix_sum(o: IntOut, a: IntIn):
    var i = thread_idx.x
    o[unsafe_offset=i] = block.prefix_sum[block_size=128](a[unsafe_offset=i])


def spin_forever(flag: IntOut):
    while Atomic[Int32, scope="device"].load(flag) == 0:
        pass
