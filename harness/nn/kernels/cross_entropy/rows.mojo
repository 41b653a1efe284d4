"""Softmax with cross-entropy: one launch computes the loss of each row and the gradient of its logits.

For a row of logits with the classes v, after an optional soft cap s = c tanh(logits / c):

    lse  = log(sum over v of exp(s_v))
    loss = lse - (1 - e) s_target - e mean(s) + z lse^2           e: label smoothing
    dlogits_v = g ((1 + 2 z lse) exp(s_v - lse) - (1 - e) [v = target] - e / V) (1 - (s_v / c)^2)

where g is a scale of the row. The gradient overwrites the logits. The first pass over a row computes the
largest logit m and the sum t of exp(s_v - m) online (Milakov and Gimelshein, 2018). The second pass goes
backwards, because the logits read last are still cached.

m and log(t) are kept separately, since rounding their sum lse loses log(t) if logits are large. So exp(s_v -
lse) is exp(s_v - m) / t, and the loss is log(t) + (1 - e) (m - s_target) + e mean(m - s) + z lse^2.
"""

from std.math import ceildiv, exp, exp2, log, log1p
from std.utils import StaticTuple
from std.utils.numerics import min_finite
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, grid_dim, thread_idx
from max.gpu.host import Dim
from max.gpu.primitives import block

from shared.common import ImmPtr, MutPtr, accum_type, multiprocessors
from shared.launcher import Launcher
from common.row_reductions import VECTOR_BYTES, vector_width

comptime LOG2E = 1.4426950408889634
"""log2(e), to compute exp with the GPU's exp2."""
comptime MAX_FEW_CLASSES = 2048
"""Maximum classes for a row to have FEW_THREADS threads."""
comptime FEW_THREADS = 128
comptime MANY_THREADS = 512
"""Threads per row with few classes (FEW_THREADS) and with many (MANY_THREADS)."""
comptime VECTORS_IN_FLIGHT = 4
"""Vectors that a thread loads at a time, to hide memory latency."""
comptime SCALE_THREADS = 256
"""Threads per block of `scale_unless_one`."""


@fieldwise_init
struct RowSizes(Copyable, Movable):
    """The sizes of a matrix of logits."""

    var rows: Int
    var classes: Int
    var pitch: Int
    """The row pitch in elements."""
    var scale_step: Int
    """The stride of `scales` in elements; 0 if all rows share one scale."""


@fieldwise_init
struct LossOptions[accum: DType](Copyable, Movable):
    """The options of the loss; see the formulas above."""

    var ignore_index: Int64
    """The target of ignored rows, whose loss and gradient are 0."""
    var smoothing: Scalar[Self.accum]
    var z: Scalar[Self.accum]
    var cap: Scalar[Self.accum]
    """The soft cap of the logits; 0 for none."""


@always_inline
def fast_exp[accum: DType, width: SIMDLength, //](x: SIMD[accum, width]) -> SIMD[accum, width]:
    """Return exp(x), for float32 with the GPU's instruction for exp2."""
    comptime assert accum.is_floating_point(), "softmax needs a floating-point dtype"
    comptime if accum == DType.float32:
        return exp2(x * LOG2E)
    else:
        # `exp` does not propagate NaN.
        return x.ne(x).select(x, exp(x))


@always_inline
def apply_cap[
    accum: DType, width: SIMDLength, //
](logits: SIMD[accum, width], cap: Scalar[accum]) -> SIMD[accum, width]:
    """Apply the soft cap to logits."""
    comptime assert accum.is_floating_point(), "logits need a floating-point dtype"
    # Compute tanh from the exponential; on a GPU `tanh` has only five digits.
    return cap * (1 - 2 / (fast_exp(2 * logits / cap) + 1))


@always_inline
def load_and_cap[
    dtype: DType, //, accum: DType, with_cap: Bool
](logits: MutPtr[dtype], offset: Int, cap: Scalar[accum]) -> SIMD[accum, vector_width[dtype]]:
    """Load a vector of logits and apply the soft cap, if any."""
    comptime width = vector_width[dtype]
    var values = logits.unsafe_load[width=width, alignment=VECTOR_BYTES](offset).cast[accum]()
    comptime if with_cap:
        return apply_cap(values, cap)
    else:
        return values


@always_inline
def replace_tail[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width], count: Int, fill: Scalar[dtype] = 0) -> SIMD[dtype, width]:
    """Return `values` with `fill` in place of the elements after the first `count`."""
    var result = values
    comptime for i in range(Int(width)):
        result[i] = values[i] if i < count else fill
    return result


struct RowSums[accum: DType]:
    """Running sums over logits, relative to the largest one so far."""

    var largest: Scalar[Self.accum]
    var max_count: Scalar[Self.accum]
    """Number of logits equal to the largest one."""
    var exp_sum: Scalar[Self.accum]
    """The sum of the exponentials of the other logits."""
    var deficit_sum: Scalar[Self.accum]
    """The sum of the differences between the largest logit and each logit."""
    var count_seen: Scalar[Self.accum]
    """Number of logits added."""

    @always_inline
    def __init__(out self):
        self.largest = min_finite[Self.accum]()
        self.max_count, self.exp_sum, self.deficit_sum, self.count_seen = 0, 0, 0, 0

    @always_inline
    def raise_maximum(mut self, new_maximum: Scalar[Self.accum]):
        """Rescale the sums to a new largest logit, at least as large as the old one."""
        if new_maximum == self.largest or self.count_seen == 0:
            self.largest = new_maximum
            return
        self.exp_sum = (self.exp_sum + self.max_count) * fast_exp(self.largest - new_maximum)
        self.max_count = 0
        self.deficit_sum += self.count_seen * (new_maximum - self.largest)
        self.largest = new_maximum

    @always_inline
    def add[width: SIMDLength, //](mut self, logits: SIMD[Self.accum, width], count: Int):
        """Add the first `count` logits of a vector, none of which is larger than the largest."""
        var distance = replace_tail(self.largest - logits, count)
        var is_peak = replace_tail(logits.eq(self.largest).cast[Self.accum](), count)
        var weights = replace_tail(fast_exp(logits - self.largest), count)
        self.max_count += is_peak.reduce_add()
        self.exp_sum += (weights * (1 - is_peak)).reduce_add()
        self.deficit_sum += distance.reduce_add()
        self.count_seen += Scalar[Self.accum](count)


@fieldwise_init
struct RowGradient[accum: DType](Copyable, Movable):
    """The factors of a row's gradient; see the formulas above."""

    var largest: Scalar[Self.accum]
    var weight: Scalar[Self.accum]
    """The factor of exp(s_v - m): g (1 + 2 z lse) / t."""
    var smoothing_share: Scalar[Self.accum]
    """Subtracted from all classes: g e / V."""
    var target_share: Scalar[Self.accum]
    """Also subtracted from the target: g (1 - e)."""
    var cap: Scalar[Self.accum]
    var target: Int

    @always_inline
    def of[
        width: SIMDLength, //, with_cap: Bool
    ](self, logits: SIMD[Self.accum, width], first: Int) -> SIMD[Self.accum, width]:
        """Compute the gradient of a vector of logits whose first class is `first`."""
        var gradient = fast_exp(logits - self.largest) * self.weight - self.smoothing_share
        var target_index = self.target - first
        if 0 <= target_index < Int(width):
            comptime for i in range(Int(width)):
                if i == target_index:
                    gradient[i] -= self.target_share
        comptime if with_cap:
            var ratio = logits / self.cap
            gradient *= 1 - ratio * ratio
        return gradient


@__name("cross_entropy_rows")
@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(MANY_THREADS)))
def cross_entropy_rows[
    dtype: DType, threads: Int, with_cap: Bool
](
    logits: MutPtr[
        dtype
    ],  # [rows, pitch], rows aligned to 16 bytes; overwritten by the gradient if that is requested
    losses: MutPtr[accum_type[dtype]],  # [rows]
    targets: ImmPtr[DType.int64],  # [rows]
    scales: ImmPtr[accum_type[dtype]],  # factors of the rows' gradients, scale_step apart
    scale_step: Int32,
    classes: Int32,
    pitch: Int32,
    gradient_requested: Int32,
    ignore_index: Int64,
    smoothing: Scalar[accum_type[dtype]],
    z: Scalar[accum_type[dtype]],
    cap: Scalar[accum_type[dtype]],
):
    """Compute one row's loss per block and, if requested, its gradient in place; the gradient is 0 past the
    last class.

    If the target is neither a class nor `ignore_index`, the row's loss and gradient are NaN.
    """
    comptime accum = accum_type[dtype]
    comptime assert accum.is_floating_point(), "softmax needs a floating-point dtype"
    comptime width = vector_width[dtype]
    comptime step = threads * width
    var V = Int(classes)
    var row = block_idx.x
    var values = logits.unsafe_offset(row * Int(pitch))
    var first = thread_idx.x * width
    var target = Int(targets[unsafe_offset=row])
    if target == Int(ignore_index):
        if thread_idx.x == 0:
            losses[unsafe_offset=row] = 0
        if gradient_requested != 0:
            for v in range(first, Int(pitch), step):
                values.unsafe_store[alignment=VECTOR_BYTES](v, SIMD[dtype, width](0))
        return
    # Read it now: other threads overwrite it after the barriers of the sums.
    var nan = Scalar[accum](0) / Scalar[accum](0)
    var valid = 0 <= target < V
    var target_logit = nan
    if thread_idx.x == 0 and valid:
        target_logit = values[unsafe_offset=target].cast[accum]()
        comptime if with_cap:
            target_logit = apply_cap(target_logit, cap)

    # Pass 1: the sums over this thread's logits, first VECTORS_IN_FLIGHT whole vectors at a time, then vector
    # by vector.
    comptime stride = VECTORS_IN_FLIGHT * step
    var iterations = max(0, V - first - width + step) // stride
    var rest = first + iterations * stride
    var sums = RowSums[accum]()
    for iteration in range(iterations):
        var groups = Array[SIMD[accum, width], VECTORS_IN_FLIGHT](fill=0)
        var new_maximum = sums.largest
        comptime for i in range(VECTORS_IN_FLIGHT):
            groups[i] = load_and_cap[accum, with_cap](values, first + iteration * stride + i * step, cap)
        comptime for i in range(VECTORS_IN_FLIGHT):
            new_maximum = max(new_maximum, groups[i].reduce_max())
        sums.raise_maximum(new_maximum)
        comptime for i in range(VECTORS_IN_FLIGHT):
            sums.add(groups[i], width)
    for v in range(rest, V, step):
        var group = load_and_cap[accum, with_cap](values, v, cap)
        sums.raise_maximum(max(sums.largest, replace_tail(group, V - v, min_finite[accum]()).reduce_max()))
        sums.add(group, min(width, V - v))
    sums.raise_maximum(block.max[block_size=threads, broadcast=True](sums.largest))
    var max_count = block.sum[block_size=threads, broadcast=True](sums.max_count)
    var exp_sum = block.sum[block_size=threads, broadcast=True](sums.exp_sum)
    var deficit_sum = block.sum[block_size=threads, broadcast=True](sums.deficit_sum)
    var total = max_count + exp_sum
    # If one logit is far above all others, the sum would round to 1.
    var log_total = log1p(exp_sum) if max_count == 1 else log(total)
    var lse = sums.largest + log_total
    var smoothing_share = smoothing / Scalar[accum](V)
    if thread_idx.x == 0:
        var loss = log_total + (1 - smoothing) * (sums.largest - target_logit) + z * lse * lse
        # Without smoothing the sum may be infinite, if a class is masked.
        if smoothing > 0:
            loss += smoothing_share * deficit_sum
        losses[unsafe_offset=row] = loss
    if gradient_requested == 0:
        return

    # Pass 2: the gradient, backwards.
    var scale = scales[unsafe_offset=row * Int(scale_step)] if valid else nan
    var gradient = RowGradient(
        largest=sums.largest,
        weight=scale * (1 + 2 * z * lse) / total,
        smoothing_share=scale * smoothing_share,
        target_share=scale * (1 - smoothing),
        cap=cap,
        target=target,
    )
    for v in range(rest, Int(pitch), step):
        var gradients = gradient.of[with_cap=with_cap](load_and_cap[accum, with_cap](values, v, cap), v)
        values.unsafe_store[alignment=VECTOR_BYTES](v, replace_tail(gradients, V - v).cast[dtype]())
    for iteration in range(iterations):
        var begin = first + (iterations - 1 - iteration) * stride
        var groups = Array[SIMD[accum, width], VECTORS_IN_FLIGHT](fill=0)
        comptime for i in range(VECTORS_IN_FLIGHT):
            groups[i] = load_and_cap[accum, with_cap](values, begin + i * step, cap)
        comptime for i in range(VECTORS_IN_FLIGHT):
            var v = begin + i * step
            var gradients = gradient.of[with_cap=with_cap](groups[i], v)
            values.unsafe_store[alignment=VECTOR_BYTES](v, gradients.cast[dtype]())


@__name("cross_entropy_scale")
def scale_unless_one[
    dtype: DType
](
    values: MutPtr[dtype],  # [count], aligned to 16 bytes
    count: Int64,
    factor: ImmPtr[accum_type[dtype]],  # one number
):
    """Multiply all values by a factor in GPU memory, unless the factor is 1."""
    comptime width = vector_width[dtype]
    var multiplier = factor[unsafe_offset=0]
    if multiplier == 1:
        return
    for i in range(
        (block_idx.x * SCALE_THREADS + thread_idx.x) * width, Int(count), grid_dim.x * SCALE_THREADS * width
    ):
        if i + width <= Int(count):
            var vector = values.unsafe_load[width=width, alignment=VECTOR_BYTES](i).cast[accum_type[dtype]]()
            values.unsafe_store[alignment=VECTOR_BYTES](i, (vector * multiplier).cast[dtype]())
        else:
            for j in range(i, Int(count)):
                values[unsafe_offset=j] = (
                    values[unsafe_offset=j].cast[accum_type[dtype]]() * multiplier
                ).cast[dtype]()


# ---- Launches ---------------------------------------------------------------------------------------------


def launch_cross_entropy_rows[
    L: Launcher, dtype: DType, //
](
    mut launcher: L,
    logits: MutPtr[dtype],
    losses: MutPtr[accum_type[dtype]],
    targets: ImmPtr[DType.int64],
    scales: ImmPtr[accum_type[dtype]],
    sizes: RowSizes,
    gradient_requested: Bool,
    options: LossOptions[accum_type[dtype]],
) raises:
    """Launch the kernel. No-op if there are no rows."""
    if sizes.rows == 0:
        return
    comptime for few in [True, False]:
        comptime for with_cap in [True, False]:
            comptime threads = FEW_THREADS if few else MANY_THREADS
            if few == (sizes.classes <= MAX_FEW_CLASSES) and with_cap == (options.cap > 0):
                launcher.launch[cross_entropy_rows[dtype, threads, with_cap]](
                    "cross_entropy_rows",
                    logits,
                    losses,
                    targets,
                    scales,
                    Int32(sizes.scale_step),
                    Int32(sizes.classes),
                    Int32(sizes.pitch),
                    Int32(1 if gradient_requested else 0),
                    options.ignore_index,
                    options.smoothing,
                    options.z,
                    options.cap,
                    grid_dim=Dim(sizes.rows),
                    block_dim=Dim(threads),
                )


def launch_scale_unless_one[
    L: Launcher, dtype: DType, //
](mut launcher: L, values: MutPtr[dtype], count: Int, factor: ImmPtr[accum_type[dtype]]) raises:
    """Launch the kernel. No-op if there are no values."""
    if count == 0:
        return
    var blocks = ceildiv(count, SCALE_THREADS * vector_width[dtype])
    launcher.launch[scale_unless_one[dtype]](
        "scale_unless_one",
        values,
        Int64(count),
        factor,
        grid_dim=Dim(min(blocks, 8 * multiprocessors())),
        block_dim=Dim(SCALE_THREADS),
    )
