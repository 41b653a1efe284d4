"""The backward pass of flash attention in one kernel, given: the other answer to "why two passes", to be measured beside it.

A block owns TILE keys, as in `flash_key_value_kernel`, and sums dK and dV of them by itself. Of dQ it has one term for
every query that it meets: these it adds with atomics, to sums that other blocks add to as well. Each tile of the scores is
computed once, five products instead of seven; the order of the additions is not fixed, and with it the last bits of dQ.
"""

from std.math import ceildiv
from std.memory import AddressSpace
from max.gpu import barrier, block_idx, global_idx, grid_dim, thread_idx
from max.gpu.host import Dim
from layout.tile_tensor import stack_allocation

from .attention import ROW_THREADS
from .flash_tensors import FlashBackward, FlashSizes, PackedSizes
from .shared.common import ImmPtr, MutPtr, accum_type, atomic_add
from .shared.launcher import Launcher
from .tiles import (
    CHUNKS,
    MAX_GRID_Z,
    TILE,
    TILE_LAYOUT,
    element,
    hidden_tile,
    probability,
    seen_score,
    tile_product,
)


def clear_sums_kernel[dtype: DType](sums: MutPtr[dtype], count: Int64):
    """Zeroes what the blocks of the next launch add to; a block of that launch would come too late for some.
    """
    if global_idx.x < Int(count):
        sums[unsafe_offset=global_idx.x] = 0


def round_sums_kernel[
    dtype: DType, sum_dtype: DType
](rounded: MutPtr[dtype], sums: ImmPtr[sum_dtype], count: Int64):
    """The sums in the dtype of the gradient."""
    if global_idx.x < Int(count):
        rounded[unsafe_offset=global_idx.x] = sums[unsafe_offset=global_idx.x].cast[dtype]()


# ANCHOR: one_pass_kernel
def one_pass_kernel[
    dtype: DType
](
    query_sums: MutPtr[accum_type[dtype]],  # [B, N, S, d], zeroed
    grad_key: MutPtr[dtype],  # [B, G, T, d]
    grad_value: MutPtr[dtype],  # [B, G, T, d]
    grad_output: ImmPtr[dtype],  # [B, N, S, d]
    query: ImmPtr[dtype],  # [B, N, S, d]
    key: ImmPtr[dtype],  # [B, G, T, d]
    value: ImmPtr[dtype],  # [B, G, T, d]
    lse: ImmPtr[accum_type[dtype]],  # [B, N, S]
    delta: ImmPtr[accum_type[dtype]],  # [B, N, S]
    mask: ImmPtr[dtype],  # [B, N, S, T], at its own strides
    packed: PackedSizes,
    scale: Scalar[accum_type[dtype]],
):
    """All three gradients. A block owns TILE keys; thread (x, y) holds query s0 + x and key t0 + y."""
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "attention is of floating-point numbers"
    var sizes = FlashSizes(packed)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var weights = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var slopes = stack_allocation[dtype=accum, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var queries = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var grads = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var keys = stack_allocation[dtype=dtype, address_space=AddressSpace.SHARED](TILE_LAYOUT)
    var x = thread_idx.x
    var y = thread_idx.y
    var t0 = block_idx.x * TILE
    var t = t0 + y

    for shared_head in range(block_idx.y, sizes.shared_heads(), grid_dim.y):
        var K = key.unsafe_offset(shared_head * T * d)
        var V = value.unsafe_offset(shared_head * T * d)
        var key_sums = SIMD[accum, CHUNKS](0)
        var value_sums = SIMD[accum, CHUNKS](0)
        for member in range(sizes.group()):
            var head = shared_head * sizes.group() + member
            var Q = query.unsafe_offset(head * S * d)
            var dO = grad_output.unsafe_offset(head * S * d)
            var M = mask.unsafe_offset(sizes.mask_of(head))
            for s0 in range(sizes.first_query(t0) // TILE * TILE, S, TILE):
                if hidden_tile(M, s0, t0, sizes):
                    continue
                var s = s0 + x
                var product = tile_product[dtype](K, Q, t0, s0, T, S, d)
                var score = seen_score(scale * product, M, s, t, sizes)
                var dP = tile_product[dtype](V, dO, t0, s0, T, S, d)
                var row_lse = lse[unsafe_offset=head * S + s] if s < S else Scalar[accum](0)
                var row_delta = delta[unsafe_offset=head * S + s] if s < S else Scalar[accum](0)
                var weight = probability(score, row_lse)
                weights[y, x] = weight
                slopes[y, x] = scale * weight * (dP - row_delta)
                for chunk in range(ceildiv(d, TILE)):
                    var column = chunk * TILE + x
                    queries[y, x] = element(Q, s0 + y, column, S, d)
                    grads[y, x] = element(dO, s0 + y, column, S, d)
                    keys[y, x] = element(K, t, column, T, d)
                    barrier()
                    var key_sum = Scalar[accum](0)
                    var value_sum = Scalar[accum](0)
                    var query_sum = Scalar[accum](0)
                    comptime for i in range(TILE):
                        key_sum += slopes[y, i] * queries[i, x].cast[accum]()
                        value_sum += weights[y, i] * grads[i, x].cast[accum]()
                        # Query s0 + y now, whose slopes stand in column y.
                        query_sum += slopes[i, y] * keys[i, x].cast[accum]()
                    key_sums[chunk] += key_sum
                    value_sums[chunk] += value_sum
                    if s0 + y < S and column < d:
                        atomic_add(query_sums, (head * S + s0 + y) * d + column, query_sum)
                    barrier()
        if t < T:
            for chunk in range(ceildiv(d, TILE)):
                if chunk * TILE + x < d:
                    var at = (shared_head * T + t) * d + chunk * TILE + x
                    grad_key[unsafe_offset=at] = key_sums[chunk].cast[dtype]()
                    grad_value[unsafe_offset=at] = value_sums[chunk].cast[dtype]()


# ANCHOR_END: one_pass_kernel


def launch_one_pass[L: Launcher, dtype: DType, //](mut launcher: L, t: FlashBackward[dtype]) raises:
    """Three launches: the sums of grad_query zeroed, the kernel, the sums rounded."""
    comptime accum = accum_type[dtype]
    var count = t.sizes.rows() * Int(t.sizes.head_dim)
    var sums = launcher.workspace[accum]("query_sums", count)
    if count:
        launcher.launch[clear_sums_kernel[accum]](
            "clear_sums",
            sums,
            Int64(count),
            grid_dim=Dim(ceildiv(count, ROW_THREADS)),
            block_dim=Dim(ROW_THREADS),
        )
    if t.sizes.shared_heads() and t.sizes.key_len:
        launcher.launch[one_pass_kernel[dtype]](
            "one_pass",
            sums,
            t.grad_key,
            t.grad_value,
            t.grad_output,
            t.query,
            t.key,
            t.value,
            t.lse,
            t.delta,
            t.mask,
            t.sizes.packed(),
            t.scale,
            grid_dim=Dim(ceildiv(Int(t.sizes.key_len), TILE), min(t.sizes.shared_heads(), MAX_GRID_Z)),
            block_dim=Dim(TILE, TILE),
        )
    if count:
        launcher.launch[round_sums_kernel[dtype, accum]](
            "round_sums",
            t.grad_query,
            sums.as_imm(),
            Int64(count),
            grid_dim=Dim(ceildiv(count, ROW_THREADS)),
            block_dim=Dim(ROW_THREADS),
        )
