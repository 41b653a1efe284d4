"""Slips in a kernel that the compiler refuses: what somebody from NumPy or CUDA writes first, and what must be said about it.

Each is the code of a blank of puzzle 22's kind, and a part of the sentence that explains the compiler's message. With the
mistakes that compile (tests/p22/mojo_mistakes.toml) they are one list.
"""

SLIPS = {
    "a literal begins the sum": ("var total = 0.0\ntotal += x[row, 0].cast[accum]()", "`var total = Scalar[accum](0)`"),
    "an integer begins the sum": ("var total = 0\ntotal += x[row, 0].cast[accum]()", "a sum of floats begins as `var total = Scalar"),
    "an integer begins the largest": ("var largest = 0\nlargest = max(largest, x[row, 0].cast[accum]())", "a sum of floats begins as"),
    "a slice of a tensor": ("var t = x[row, :].cast[accum]()", "`x[row, :]` is a slice"),
    "a slice of an address": ("var q = mean[:] * 2", "`mean[:]` is a slice"),
    "a row in one line": ("dx[row, :] = x[row, :]", "`dx[row, :]` is a slice"),
    "an address with two indices": ("grad_bias[0, 1] = 3", "not a tensor with axes"),
    "total forgotten in a division": (
        "var s = CompensatedSum[accum]()\nvar c = s / Scalar[accum](H)", "is its `.total`",
    ),
    "total forgotten in a cast": ("var s = CompensatedSum[accum]()\ndx[row, 0] = s.cast[dtype]()", "is its `.total`"),
    "divided by an integer": ("var c = x[row, 0].cast[accum]() / H", "`Scalar[accum](...)`"),
    "stored without a cast": ("dx[row, 0] = x[row, 0].cast[accum]() * 2", "`.cast[dtype]()`"),
    "a sum of float32": ("var t = Float32(0)\nt += x[row, 0].cast[accum]()", "Two dtypes meet"),
    "a plain sum over blocks": ("grad_bias[unsafe_offset=0] += x[row, 0].cast[accum]()", "`atomic_add(sums, index, value)`"),
    "alias": ("alias N = 4", "`comptime N = 8`"),
    "let": ("let q = 3", "declared by `var`"),
    "no var": ("q = 3", "`var q = ...`"),
    "an index that is called": ("var t = thread_idx.x()", "goes without `()`"),
    "a tensor that is called": ("var q = x(row, 0)", "`x[row, 0]`"),
    "block.sum without its size": ("var c = block.sum(x[row, 0].cast[accum]())", "`block.sum[block_size=...](value)`"),
    "CUDA's barrier": ("__syncthreads()", "`barrier()`"),
    "CUDA's index": ("var t = threadIdx.x", "`thread_idx.x`"),
    "an input is written": ("x[row, 0] = dx[row, 0]", "may only be read"),
    "an argument left out": ("atomic_add(grad_bias, x[row, 0].cast[accum]())", "leaves out `value`"),
    "&&": ("if row < H && row > 0:\n    pass", "joined by `and`"),
    "half a conditional": ("var q = 1 if row == 0", "`a if condition else b`"),
    "a name that is not there": ("var q = xhat + 1", "Nothing called `xhat`"),
}  # fmt: skip
