"""The CPU path of the fused variant: a row of scores at a time, none of them stored. Sums are kept in float64."""

from std.math import log

from .flash_tensors import FlashBackward, FlashForward, FlashSizes
from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.exponential import exponential

comptime accum = DType.float64
"""The type of every sum on the CPU."""


def dot_cpu[dtype: DType](a: ImmPtr[dtype], b: ImmPtr[dtype], count: Int) -> Scalar[accum]:
    """The dot product of two rows."""
    var total = Scalar[accum](0)
    for i in range(count):
        total += a[unsafe_offset=i].cast[accum]() * b[unsafe_offset=i].cast[accum]()
    return total


def score_cpu[
    dtype: DType
](
    query: ImmPtr[dtype],  # [d]
    key: ImmPtr[dtype],  # [T, d]
    mask: ImmPtr[dtype],
    mask_at: Int,
    s: Int,
    t: Int,
    sizes: FlashSizes,
    scale: Scalar[accum],
) -> Scalar[accum]:
    """The score of query s and key t, with the mask added."""
    var d = Int(sizes.head_dim)
    var added = mask[unsafe_offset=mask_at + sizes.mask_at(s, t)].cast[accum]()
    return scale * dot_cpu(query, key.unsafe_offset(t * d), d) + added


def flash_forward_cpu[
    dtype: DType, //
](p: FlashForward[dtype], sums: MutPtr[accum],):  # [d], scratch
    """Output and lse: of each row the largest score, then the exponentials and what they weigh."""
    var S = Int(p.sizes.query_len)
    var T = Int(p.sizes.key_len)
    var d = Int(p.sizes.head_dim)
    var scale = p.scale.cast[accum]()
    for head in range(p.sizes.heads()):
        var K = p.key.unsafe_offset(p.sizes.shared_head(head) * T * d)
        var V = p.value.unsafe_offset(p.sizes.shared_head(head) * T * d)
        var mask_at = p.sizes.mask_of(head)
        for s in range(S):
            var row = head * S + s
            var q = p.query.unsafe_offset(row * d)
            var seen = p.sizes.keys_seen(s)
            var largest = Scalar[accum].MIN
            for t in range(seen):
                largest = max(largest, score_cpu(q, K, p.mask, mask_at, s, t, p.sizes, scale))
            var shift = largest if largest > Scalar[accum].MIN else Scalar[accum](0)
            var total = Scalar[accum](0)
            for i in range(d):
                sums[unsafe_offset=i] = 0
            for t in range(seen):
                var score = score_cpu(q, K, p.mask, mask_at, s, t, p.sizes, scale)
                var weight = exponential(score - shift)
                total += weight
                for i in range(d):
                    sums[unsafe_offset=i] += weight * V[unsafe_offset=t * d + i].cast[accum]()
            # A row that sees no key: total and sums are 0, unless a value is no number.
            var divisor = Scalar[accum](1) if total == 0 else total
            for i in range(d):
                p.output[unsafe_offset=row * d + i] = (sums[unsafe_offset=i] / divisor).cast[dtype]()
            var row_lse = Scalar[accum].MIN if total == 0 else largest + log(total)
            p.lse[unsafe_offset=row] = row_lse.cast[accum_type[dtype]]()


def delta_cpu[
    dtype: DType
](
    delta: MutPtr[accum_type[dtype]],  # [rows]
    grad_output: ImmPtr[dtype],  # [rows, d]
    output: ImmPtr[dtype],  # [rows, d]
    rows: Int,
    d: Int,
):
    """Delta = rowsum(dO * O)."""
    for row in range(rows):
        var total = dot_cpu(grad_output.unsafe_offset(row * d), output.unsafe_offset(row * d), d)
        delta[unsafe_offset=row] = total.cast[accum_type[dtype]]()


def flash_backward_cpu[
    dtype: DType, //
](p: FlashBackward[dtype], sums: MutPtr[accum],):  # [2 * T * d + d], scratch
    """All three gradients, a head of key and value at a time, from probabilities that are computed again."""
    var S = Int(p.sizes.query_len)
    var T = Int(p.sizes.key_len)
    var d = Int(p.sizes.head_dim)
    var scale = p.scale.cast[accum]()
    var dV = sums.unsafe_offset(T * d)
    var dQ = dV.unsafe_offset(T * d)
    for shared_head in range(p.sizes.shared_heads()):
        var K = p.key.unsafe_offset(shared_head * T * d)
        var V = p.value.unsafe_offset(shared_head * T * d)
        for i in range(2 * T * d):
            sums[unsafe_offset=i] = 0
        for member in range(p.sizes.group()):
            var head = shared_head * p.sizes.group() + member
            var mask_at = p.sizes.mask_of(head)
            for s in range(S):
                var row = head * S + s
                var q = p.query.unsafe_offset(row * d)
                var dO = p.grad_output.unsafe_offset(row * d)
                var row_lse = p.lse[unsafe_offset=row].cast[accum]()
                # A row that sees no key: its scores are -inf, and minus 0 their exponentials are 0.
                var shift = Scalar[accum](0) if row_lse == Scalar[accum].MIN else row_lse
                var row_delta = p.delta[unsafe_offset=row].cast[accum]()
                for i in range(d):
                    dQ[unsafe_offset=i] = 0
                for t in range(p.sizes.keys_seen(s)):
                    var score = score_cpu(q, K, p.mask, mask_at, s, t, p.sizes, scale)
                    var weight = exponential(score - shift)
                    var dP = dot_cpu(dO, V.unsafe_offset(t * d), d)
                    var slope = weight * (dP - row_delta)
                    for i in range(d):
                        dQ[unsafe_offset=i] += slope * K[unsafe_offset=t * d + i].cast[accum]()
                        sums[unsafe_offset=t * d + i] += slope * q[unsafe_offset=i].cast[accum]()
                        dV[unsafe_offset=t * d + i] += weight * dO[unsafe_offset=i].cast[accum]()
                for i in range(d):
                    p.grad_query[unsafe_offset=row * d + i] = (scale * dQ[unsafe_offset=i]).cast[dtype]()
        for i in range(T * d):
            var at = shared_head * T * d + i
            p.grad_key[unsafe_offset=at] = (scale * sums[unsafe_offset=i]).cast[dtype]()
            p.grad_value[unsafe_offset=at] = dV[unsafe_offset=i].cast[dtype]()
