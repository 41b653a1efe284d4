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
comptime FEW_CLASSES = 2048
"""Maximum classes for a row to have FEW_THREADS threads."""
comptime FEW_THREADS = 128
comptime MANY_THREADS = 512
"""Threads per row with few classes (FEW_THREADS) and with many (MANY_THREADS)."""
comptime ABREAST = 4
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

    var ignored: Int64
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
def first_of[
    dtype: DType, width: SIMDLength, //
](values: SIMD[dtype, width], count: Int, other: Scalar[dtype] = 0) -> SIMD[dtype, width]:
    """Return `values` with `other` in place of the elements after the first `count`."""
    var kept = values
    comptime for i in range(Int(width)):
        kept[i] = values[i] if i < count else other
    return kept


struct RowSums[accum: DType]:
    """Running sums over logits, relative to the largest one so far."""

    var largest: Scalar[Self.accum]
    var peaks: Scalar[Self.accum]
    """Number of logits equal to the largest one."""
    var others: Scalar[Self.accum]
    """The sum of the exponentials of the other logits."""
    var below: Scalar[Self.accum]
    """The sum of the differences between the largest logit and each logit."""
    var seen: Scalar[Self.accum]
    """Number of logits added."""

    @always_inline
    def __init__(out self):
        self.largest = min_finite[Self.accum]()
        self.peaks, self.others, self.below, self.seen = 0, 0, 0, 0

    @always_inline
    def grow(mut self, grown: Scalar[Self.accum]):
        """Rescale to a new largest logit, at least as large as the old one."""
        if grown == self.largest or self.seen == 0:
            self.largest = grown
            return
        self.others = (self.others + self.peaks) * fast_exp(self.largest - grown)
        self.peaks = 0
        self.below += self.seen * (grown - self.largest)
        self.largest = grown

    @always_inline
    def add[width: SIMDLength, //](mut self, logits: SIMD[Self.accum, width], count: Int):
        """Add the first `count` logits of a vector, none of which is larger than the largest."""
        var distance = first_of(self.largest - logits, count)
        var is_peak = first_of(logits.eq(self.largest).cast[Self.accum](), count)
        var weights = first_of(fast_exp(logits - self.largest), count)
        self.peaks += is_peak.reduce_add()
        self.others += (weights * (1 - is_peak)).reduce_add()
        self.below += distance.reduce_add()
        self.seen += Scalar[Self.accum](count)


@fieldwise_init
struct RowGradient[accum: DType](Copyable, Movable):
    """The factors of a row's gradient; see the formulas above."""

    var largest: Scalar[Self.accum]
    var weight: Scalar[Self.accum]
    """The factor of exp(s_v - m): g (1 + 2 z lse) / t."""
    var share: Scalar[Self.accum]
    """Subtracted from all classes: g e / V."""
    var kept: Scalar[Self.accum]
    """Also subtracted from the target: g (1 - e)."""
    var cap: Scalar[Self.accum]
    var target: Int

    @always_inline
    def of[
        width: SIMDLength, //, with_cap: Bool
    ](self, logits: SIMD[Self.accum, width], first: Int) -> SIMD[Self.accum, width]:
        """Compute the gradient of a vector of logits whose first class is `first`."""
        var gradient = fast_exp(logits - self.largest) * self.weight - self.share
        var place = self.target - first
        if 0 <= place < Int(width):
            comptime for i in range(Int(width)):
                if i == place:
                    gradient[i] -= self.kept
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
    ignored: Int64,
    smoothing: Scalar[accum_type[dtype]],
    z: Scalar[accum_type[dtype]],
    cap: Scalar[accum_type[dtype]],
):
    """Compute one row's loss per block and, if requested, its gradient in place; the gradient is 0 past the
    last class.

    If the target is neither a class nor `ignored`, the row's loss and gradient are NaN.
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
    if target == Int(ignored):
        if thread_idx.x == 0:
            losses[unsafe_offset=row] = 0
        if gradient_requested != 0:
            for v in range(first, Int(pitch), step):
                values.unsafe_store[alignment=VECTOR_BYTES](v, SIMD[dtype, width](0))
        return
    # Read it now: other threads overwrite it after the barriers of the sums.
    var nan = Scalar[accum](0) / Scalar[accum](0)
    var valid = 0 <= target < V
    var score = nan
    if thread_idx.x == 0 and valid:
        score = values[unsafe_offset=target].cast[accum]()
        comptime if with_cap:
            score = apply_cap(score, cap)

    # Pass 1: the sums over this thread's logits, first ABREAST whole vectors at a time, then vector by
    # vector.
    comptime stride = ABREAST * step
    var turns = max(0, V - first - width + step) // stride
    var rest = first + turns * stride
    var sums = RowSums[accum]()
    for turn in range(turns):
        var groups = Array[SIMD[accum, width], ABREAST](fill=0)
        var grown = sums.largest
        comptime for i in range(ABREAST):
            groups[i] = load_and_cap[accum, with_cap](values, first + turn * stride + i * step, cap)
        comptime for i in range(ABREAST):
            grown = max(grown, groups[i].reduce_max())
        sums.grow(grown)
        comptime for i in range(ABREAST):
            sums.add(groups[i], width)
    for v in range(rest, V, step):
        var group = load_and_cap[accum, with_cap](values, v, cap)
        sums.grow(max(sums.largest, first_of(group, V - v, min_finite[accum]()).reduce_max()))
        sums.add(group, min(width, V - v))
    sums.grow(block.max[block_size=threads, broadcast=True](sums.largest))
    var peaks = block.sum[block_size=threads, broadcast=True](sums.peaks)
    var others = block.sum[block_size=threads, broadcast=True](sums.others)
    var below = block.sum[block_size=threads, broadcast=True](sums.below)
    var total = peaks + others
    # If one logit is far above all others, the sum would round to 1.
    var log_total = log1p(others) if peaks == 1 else log(total)
    var lse = sums.largest + log_total
    var share = smoothing / Scalar[accum](V)
    if thread_idx.x == 0:
        var loss = log_total + (1 - smoothing) * (sums.largest - score) + z * lse * lse
        # Without smoothing the sum may be infinite, if a class is masked.
        if smoothing > 0:
            loss += share * below
        losses[unsafe_offset=row] = loss
    if gradient_requested == 0:
        return

    # Pass 2: the gradient, backwards.
    var scale = scales[unsafe_offset=row * Int(scale_step)] if valid else nan
    var gradient = RowGradient(
        largest=sums.largest,
        weight=scale * (1 + 2 * z * lse) / total,
        share=scale * share,
        kept=scale * (1 - smoothing),
        cap=cap,
        target=target,
    )
    for v in range(rest, Int(pitch), step):
        var made = gradient.of[with_cap=with_cap](load_and_cap[accum, with_cap](values, v, cap), v)
        values.unsafe_store[alignment=VECTOR_BYTES](v, first_of(made, V - v).cast[dtype]())
    for turn in range(turns):
        var begin = first + (turns - 1 - turn) * stride
        var groups = Array[SIMD[accum, width], ABREAST](fill=0)
        comptime for i in range(ABREAST):
            groups[i] = load_and_cap[accum, with_cap](values, begin + i * step, cap)
        comptime for i in range(ABREAST):
            var v = begin + i * step
            var made = gradient.of[with_cap=with_cap](groups[i], v)
            values.unsafe_store[alignment=VECTOR_BYTES](v, made.cast[dtype]())


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
    var by = factor[unsafe_offset=0]
    if by == 1:
        return
    for i in range(
        (block_idx.x * SCALE_THREADS + thread_idx.x) * width, Int(count), grid_dim.x * SCALE_THREADS * width
    ):
        if i + width <= Int(count):
            var vector = values.unsafe_load[width=width, alignment=VECTOR_BYTES](i).cast[accum_type[dtype]]()
            values.unsafe_store[alignment=VECTOR_BYTES](i, (vector * by).cast[dtype]())
        else:
            for j in range(i, Int(count)):
                values[unsafe_offset=j] = (values[unsafe_offset=j].cast[accum_type[dtype]]() * by).cast[
                    dtype
                ]()


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
    """Launch the kernel, unless there are no rows."""
    if sizes.rows == 0:
        return
    comptime for few in [True, False]:
        comptime for with_cap in [True, False]:
            comptime threads = FEW_THREADS if few else MANY_THREADS
            if few == (sizes.classes <= FEW_CLASSES) and with_cap == (options.cap > 0):
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
                    options.ignored,
                    options.smoothing,
                    options.z,
                    options.cap,
                    grid_dim=Dim(sizes.rows),
                    block_dim=Dim(threads),
                )


def launch_scale_unless_one[
    L: Launcher, dtype: DType, //
](mut launcher: L, values: MutPtr[dtype], count: Int, factor: ImmPtr[accum_type[dtype]]) raises:
    """Launch the kernel, unless there are no values."""
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
