"""The CPU path of puzzle 23: plain loops in the order of the formulas, to be read before the GPU kernels.

Pointers and shapes are those of the launch functions in `attention.mojo`. Sums are kept in float64, whatever the dtype:
this is the path to trust. Matrix products are one function, as there; the steps say which factor is transposed.
"""

from .shared.common import ImmPtr, MutPtr, accum_type
from .shared.exponential import exponential
from .sizes import Sizes

comptime accum = DType.float64
"""The type of every sum on the CPU."""


def product_cpu[
    out_dtype: DType,
    a_dtype: DType,
    b_dtype: DType,
    //,
    *,
    transpose_a: Bool = False,
    transpose_b: Bool = False,
](
    output: MutPtr[out_dtype],  # [batches, m, n]
    a: ImmPtr[a_dtype],  # [batches, m, k], or [batches, k, m] where transpose_a
    b: ImmPtr[b_dtype],  # [batches, k, n], or [batches, n, k] where transpose_b
    *,
    batches: Int,
    m: Int,
    n: Int,
    k: Int,
    alpha: Float64 = 1,
):
    """Output = alpha * a @ b in every batch."""
    for batch in range(batches):
        var A = a.unsafe_offset(batch * m * k)
        var B = b.unsafe_offset(batch * k * n)
        for row in range(m):
            for column in range(n):
                var total = Scalar[accum](0)
                for i in range(k):
                    var in_a = i * m + row if transpose_a else row * k + i
                    var in_b = column * k + i if transpose_b else i * n + column
                    total += A[unsafe_offset=in_a].cast[accum]() * B[unsafe_offset=in_b].cast[accum]()
                output[unsafe_offset=(batch * m + row) * n + column] = (alpha * total).cast[out_dtype]()


def scores_cpu[
    dtype: DType
](scores: MutPtr[accum_type[dtype]], query: ImmPtr[dtype], key: ImmPtr[dtype], sizes: Sizes):
    """S = scale * Q K^T."""
    product_cpu[transpose_b=True](
        scores,
        query,
        key,
        batches=Int(sizes.batches),
        m=Int(sizes.query_len),
        n=Int(sizes.key_len),
        k=Int(sizes.head_dim),
        alpha=sizes.scale(),
    )


def softmax_cpu[
    dtype: DType
](
    probabilities: MutPtr[accum_type[dtype]],
    scores: ImmPtr[accum_type[dtype]],
    mask: ImmPtr[dtype],
    sizes: Sizes,
    mask_rows: Int,
):
    """P = softmax(S + mask); a row that is masked everywhere gives 0."""
    var T = Int(sizes.key_len)
    for row in range(sizes.rows()):
        var s = scores.unsafe_offset(row * T)
        var p = probabilities.unsafe_offset(row * T)
        var m = mask.unsafe_offset(row % mask_rows * T if mask_rows else 0)
        var largest = Scalar[accum].MIN
        for t in range(T):
            var added = m[unsafe_offset=t].cast[accum]() if mask_rows else 0
            largest = max(largest, s[unsafe_offset=t].cast[accum]() + added)
        var shift = largest if largest > Scalar[accum].MIN else Scalar[accum](0)
        var total = Scalar[accum](0)
        for t in range(T):
            var added = m[unsafe_offset=t].cast[accum]() if mask_rows else 0
            total += exponential(s[unsafe_offset=t].cast[accum]() + added - shift)
        for t in range(T):
            var added = m[unsafe_offset=t].cast[accum]() if mask_rows else 0
            var weight = exponential(s[unsafe_offset=t].cast[accum]() + added - shift)
            var share = Scalar[accum](0) if total == 0 else weight / total
            p[unsafe_offset=t] = share.cast[accum_type[dtype]]()


def output_cpu[
    dtype: DType
](output: MutPtr[dtype], probabilities: ImmPtr[accum_type[dtype]], value: ImmPtr[dtype], sizes: Sizes):
    """O = P V."""
    product_cpu(
        output,
        probabilities,
        value,
        batches=Int(sizes.batches),
        m=Int(sizes.query_len),
        n=Int(sizes.head_dim),
        k=Int(sizes.key_len),
    )


def output_backward_cpu[
    dtype: DType
](
    grad_value: MutPtr[dtype],
    grad_probabilities: MutPtr[accum_type[dtype]],
    grad_output: ImmPtr[dtype],
    probabilities: ImmPtr[accum_type[dtype]],
    value: ImmPtr[dtype],
    sizes: Sizes,
):
    """The backward of O = P V: dV = P^T dO and dP = dO V^T."""
    var heads = Int(sizes.batches)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    product_cpu[transpose_a=True](grad_value, probabilities, grad_output, batches=heads, m=T, n=d, k=S)
    product_cpu[transpose_b=True](grad_probabilities, grad_output, value, batches=heads, m=S, n=T, k=d)


def softmax_backward_cpu[
    dtype: DType
](
    grad_scores: MutPtr[accum_type[dtype]],
    grad_probabilities: ImmPtr[accum_type[dtype]],
    probabilities: ImmPtr[accum_type[dtype]],
    sizes: Sizes,
):
    """The backward of softmax: dS = P * (dP - rowsum(dP * P))."""
    var T = Int(sizes.key_len)
    for row in range(sizes.rows()):
        var P = probabilities.unsafe_offset(row * T)
        var dP = grad_probabilities.unsafe_offset(row * T)
        var dS = grad_scores.unsafe_offset(row * T)
        var dot = Scalar[accum](0)
        for t in range(T):
            dot += dP[unsafe_offset=t].cast[accum]() * P[unsafe_offset=t].cast[accum]()
        for t in range(T):
            var difference = dP[unsafe_offset=t].cast[accum]() - dot
            var slope = P[unsafe_offset=t].cast[accum]() * difference
            dS[unsafe_offset=t] = slope.cast[accum_type[dtype]]()


def scores_backward_cpu[
    dtype: DType
](
    grad_query: MutPtr[dtype],
    grad_key: MutPtr[dtype],
    grad_scores: ImmPtr[accum_type[dtype]],
    query: ImmPtr[dtype],
    key: ImmPtr[dtype],
    sizes: Sizes,
):
    """The backward of S = scale * Q K^T: dQ = scale * dS K and dK = scale * dS^T Q."""
    var heads = Int(sizes.batches)
    var S = Int(sizes.query_len)
    var T = Int(sizes.key_len)
    var d = Int(sizes.head_dim)
    var scale = sizes.scale()
    product_cpu(grad_query, grad_scores, key, batches=heads, m=S, n=d, k=T, alpha=scale)
    product_cpu[transpose_a=True](grad_key, grad_scores, query, batches=heads, m=T, n=d, k=S, alpha=scale)
