"""Who multiplies: the one table of LayerNorm + Linear's products, in microseconds of an H200.

The three products are Y = ln_out W^T, dln = dY W and dW = dY^T ln_out. The choice compares estimates; their constants come
from book/records/products.csv, which holds the times of both ways, and from branches.csv beside it:

- This project's kernel for Hopper cuts a product into tiles that its multiprocessors take in rounds (`plan_tiles`). Few tiles leave
  most of the GPU idle. Its products make the column sums of dY, dgamma and dbeta on the side.
- PyTorch's library splits the sums of few tiles among blocks, and is a little faster in the largest products.
- Rows of a matrix that are no multiple of 16 bytes keep both from wide loads: the library falls to a fifth. This project's path
  makes copies with aligned rows; the library finds them where ln_out, W and the bias are padded (PADDED).

A plain loop of small calls waits for the host, for whom this project's launches are the cheapest; a CUDA graph waits for the
GPU. So where the estimates disagree, what a graph captures is multiplied otherwise. There the backward pass may also be
two branches, dln with what follows from it and dW from an ln_out of its own: each fills the multiprocessors that
the other leaves idle.
"""

from std.math import ceildiv

from common.gemm_hopper_launches import plan_tiles
from common.gemm_hopper_pipeline import BLOCK_M
from common.tensor_maps import lies_in_rows, pitch_of
from .small import suits_small_backward, suits_small_forward
from .tensors import Sizes

comptime OWN = 0
"""Who multiplies: this project's kernel,"""
comptime LIBRARY = 1
"""PyTorch's library,"""
comptime PADDED = 2
"""or that on copies with aligned rows."""

comptime PROCESSORS = 132
comptime STEP = 0.0023 * 1.15
"""Microseconds of a step of one column of this project's product: as planned, and by how much the measured ones are above."""
comptime EMPTY_COLUMNS = 64
"""Columns below which most of every tile is empty."""
comptime EMPTY_ROWS = 8 * BLOCK_M * PROCESSORS
"""Rows above which tiles are so many, eight rounds, that reading and writing come on top where most of every tile is empty.
"""
comptime NARROW_ROWS = 1 << 16
"""Rows of so few columns from which on both products may be the library's on branches of their own."""
comptime LARGE = 1 << 37
"""Multiply-adds from which on the GPU is at its power limit, and this project's product slower by so much:"""
comptime LARGE_COST = 1.05
comptime SMALL = 1 << 15
"""Multiply-adds up to which one launch makes each whole pass (`small.mojo`)."""
comptime COPIES_FROM = 1 << 16
"""Multiply-adds of unaligned rows from which on copies with aligned ones may pay."""
comptime MOST_FEW_ROWS = 64
"""The most rows that are few: of more, adding columns row by row takes longer than a launch."""
comptime FEW_WORK = 1 << 24
"""Multiply-adds of few unaligned rows up to which the library's products cost less than the copies for others."""
comptime LAUNCH = 3.0
"""Microseconds that a product of the library takes beside its work, and that a further launch costs."""
comptime OWN_LAUNCH = 1.0
"""The same for this project's product, which starts early."""
comptime LIBRARY_RATE = 780e6
"""Floating-point operations of the library in a microsecond."""
comptime BANDWIDTH = 3.6e6
"""Bytes in a microsecond of a product that waits for memory,"""
comptime COPY_BANDWIDTH = 1.2e6
"""of PyTorch's copy of unaligned rows,"""
comptime OWN_COPY_BANDWIDTH = 4e6
"""and of this project's."""
comptime ROWS = 2.5
"""Microseconds of a row kernel beside its reading and writing,"""
comptime SUMS = 2.0
"""and of adding what several blocks have summed."""
comptime BESIDE_ROWS = 1.2
"""Two branches: how much longer row kernels take for what they read and write beside products, and microseconds that both
branches, and a dW of the library there, take beside their work."""
comptime BESIDE = 4.0
comptime BESIDE_LIBRARY = 2.5
comptime BRANCH_GAIN = 0.98
"""What two branches must take of one for them to be chosen."""
comptime MANY_SUMS = 1 << 19
"""Elements of dY from which on summing its columns is a branch of its own, where dln is the library's."""
comptime UNALIGNED_BRANCHES = 1 << 19
"""Elements of the input, and of a row, up to which the backward pass over unaligned rows is two branches."""
comptime UNALIGNED_WIDTH = 1024
comptime UNALIGNED_ROWS = 512
"""Rows and multiply-adds up to which those branches are the library's."""
comptime UNALIGNED_WORK = 1 << 25
comptime LOOSE = 1.15
"""By how much this project's product is slower where it writes rows that begin at any address."""
comptime PADDED_GAIN = 0.9
"""What the library on padded rows must take of this project's time to be chosen."""
comptime HOST = 350.0
"""Microseconds of GPU time of both passes below which a loop of plain calls waits for the host."""


@fieldwise_init
struct Problem(Copyable, Movable):
    """What a choice follows from."""

    var rows: Int
    var H: Int
    var O: Int
    var transposed: Bool
    """Whether W lies as [H, O], which this project's products do not read."""
    var lean: Bool
    """Whether memory counts more than time."""
    var captured: Bool
    """Whether a CUDA graph captures the call."""
    var pairs: Bool
    """Whether products of float32 are to be made by pairs of float16."""

    def work(self) -> Int:
        """Multiply-adds of a product."""
        return self.rows * self.H * self.O


@fieldwise_init
struct Choice(Copyable, Movable):
    """Who multiplies each product, and whether dW is a branch of its own beside all the rest of the backward pass.
    """

    var output: Int
    var dln: Int
    var dW: Int
    var forked: Bool

    @staticmethod
    def of(who: Int) -> Self:
        """One for all three."""
        return Self(who, who, who, False)


def choose[wgmma: Bool, dtype: DType, x_dtype: DType](p: Problem) -> Choice:
    """Who multiplies x [rows, H] of `x_dtype` and W [O, H] in `dtype`, on a GPU that has Hopper's `wgmma` or not.

    Products of float32 but by pairs are the library's, as those of GPUs before Hopper: no record shows this project's to be
    faster there.
    """
    if not wgmma or p.transposed:
        return Choice.of(LIBRARY)
    comptime if dtype == DType.float32:
        return Choice.of(OWN if p.pairs and p.H % 8 == 0 == p.O % 8 else LIBRARY)
    if lies_in_rows[dtype](p.H) and lies_in_rows[dtype](p.O):
        return aligned_choice(p)
    return unaligned_choice[dtype, x_dtype](p)


# ---- Rows that begin at multiples of 16 bytes -----------------------------------------------------------------------


def aligned_choice(p: Problem) -> Choice:
    """By the estimated times of each pass."""
    if p.work() <= SMALL:
        return Choice.of(OWN)
    var own = own_cost(p.rows, p.O, p.H).time
    var output = LIBRARY if library_cost(p.rows, p.O, p.H).time < own else OWN
    var chain = fastest_chain(p)
    var branches = fastest_branches(p)
    var forked = branches.time < BRANCH_GAIN * chain.time
    own += own_cost(p.rows, p.H, p.O).time + own_cost(p.O, p.H, p.rows, may_share=True).time
    if p.captured and forked:
        return Choice(output, branches.dln, branches.dW, True)
    if not p.captured and own < HOST:
        return Choice.of(OWN)
    return Choice(output, chain.dln, chain.dW, False)


@fieldwise_init
struct Way(Copyable, Movable):
    """A backward pass: who multiplies, and its microseconds."""

    var dln: Int
    var dW: Int
    var time: Float64


def fastest_chain(p: Problem) -> Way:
    """One launch after the other: dln, the row kernel, dW; an own dW adds the sums on its way."""
    var row_kernel = ROWS + 8 * Float64(p.rows * p.H) / BANDWIDTH
    # Column sums of dY: two more launches where its rows are many, and dY read once more; else within another's.
    var sums = 2 * Float64(p.rows * p.O) / BANDWIDTH + 2 * LAUNCH if p.rows > 1024 else 1.0
    sums += 0.0 if p.rows <= MOST_FEW_ROWS else SUMS
    var own = own_cost(p.rows, p.H, p.O).time + row_kernel + SUMS
    var library = library_cost(p.rows, p.H, p.O).time + row_kernel + sums
    var own_dW = own_cost(p.O, p.H, p.rows, may_share=True).time
    var library_dW = library_cost(p.O, p.H, p.rows).time
    var best = Way(OWN, OWN, own + own_dW)
    if own + library_dW < best.time:
        best = Way(OWN, LIBRARY, own + library_dW)
    if library + library_dW < best.time:
        best = Way(LIBRARY, LIBRARY, library + library_dW)
    return best^


def fastest_branches(p: Problem) -> Way:
    """The longer branch, or the work of both where that fills the GPU. The library on both wants two workspaces, which only many
    narrow rows are worth."""
    var best = branches(p, OWN, OWN)
    for dln, dW in [(OWN, LIBRARY), (LIBRARY, OWN), (LIBRARY, LIBRARY)]:
        if (dln == OWN or dW == OWN) or (p.H < EMPTY_COLUMNS and p.rows >= NARROW_ROWS):
            var way = branches(p, dln, dW)
            if way.time < best.time:
                best = way^
    return best^


def branches(p: Problem, dln: Int, dW: Int) -> Way:
    """Two branches by these products."""
    var elements = Float64(p.rows * p.H)
    var apart = dln == LIBRARY and p.rows * p.O >= MANY_SUMS
    var mine = own_cost(p.rows, p.H, p.O) if dln == OWN else library_cost(p.rows, p.H, p.O)
    var other = own_cost(p.O, p.H, p.rows, may_share=True) if dW == OWN else library_cost(p.O, p.H, p.rows)
    var behind = 0.0 if dln == LIBRARY and p.rows <= MOST_FEW_ROWS else SUMS
    var first = mine.time + ROWS + 6 * elements / BANDWIDTH + behind
    var late = BESIDE_LIBRARY if dW == LIBRARY else 0.0
    var second = ROWS + 4 * elements / BANDWIDTH + other.time + late
    var read = 10 * elements + (2 * Float64(p.rows * p.O) if apart else 0.0)
    var both = mine.work + other.work + late + BESIDE_ROWS * read / BANDWIDTH + BESIDE
    return Way(dln, dW, max(first, second, both) + (LAUNCH / 2 if apart else 0.0))


@fieldwise_init
struct Cost(Copyable, Movable):
    """What a product takes."""

    var time: Float64
    """Microseconds until it is done."""
    var work: Float64
    """Microseconds of the whole GPU: less, where it leaves multiprocessors idle."""


def own_cost(m: Int, n: Int, k: Int, may_share: Bool = False) -> Cost:
    """This project's product, [m, n] with sums of k."""
    var plan = plan_tiles(m, n, k, may_share)
    var step = STEP * (LARGE_COST if m * n * k >= LARGE else 1.0)
    var waits = bytes_time(m, n, k) if n < EMPTY_COLUMNS and m > EMPTY_ROWS else 0.0
    return Cost(
        OWN_LAUNCH + waits + step * Float64(plan.cost), waits + step * Float64(plan.work) / PROCESSORS
    )


def library_cost(m: Int, n: Int, k: Int) -> Cost:
    """The library's product of aligned rows: half of its writing is in nobody's shadow."""
    var work = 2 * Float64(m * n * k) / LIBRARY_RATE + Float64(m * n) / BANDWIDTH
    return Cost(LAUNCH + max(work, bytes_time(m, n, k)), work)


def bytes_time(m: Int, n: Int, k: Int) -> Float64:
    """Microseconds of reading both factors and writing the product."""
    return 2 * Float64(m * k + k * n + m * n) / BANDWIDTH


# ---- Rows that begin at any address ---------------------------------------------------------------------------------


def unaligned_choice[dtype: DType, x_dtype: DType](p: Problem) -> Choice:
    """This project's products, which copy what they must; but the library's where the first has few tiles or long sums, and
    where all are so small that they take no longer than the copies."""
    var whole_H = lies_in_rows[dtype](p.H)
    if p.lean:
        # The library reads every factor as it lies, which takes longer. Where only the rows that it writes are unaligned,
        # this project's product copies none either.
        return Choice(OWN if whole_H else LIBRARY, LIBRARY, LIBRARY, False)
    var work = p.work()
    if work < COPIES_FROM:
        var sizes = Sizes(Int32(p.rows), 1, Int32(p.H), Int32(p.O))
        var output = OWN if dtype == x_dtype and suits_small_forward(sizes) else LIBRARY
        var gradients = OWN if dtype == x_dtype and suits_small_backward(sizes) else LIBRARY
        return Choice(output, gradients, gradients, False)
    var forked = p.captured and p.H <= UNALIGNED_WIDTH and p.rows * p.H <= UNALIGNED_BRANCHES
    if p.rows <= MOST_FEW_ROWS and work <= FEW_WORK:
        return Choice(LIBRARY, LIBRARY, LIBRARY, forked) if p.captured else Choice.of(OWN)
    var wide = ceildiv(p.H, 8) * 8
    var tall = ceildiv(p.O, 8) * 8
    var own = own_cost(p.rows, p.O, p.H).time * (LOOSE if tall != p.O else 1.0)
    own += 4 * Float64(p.O * p.H) / OWN_COPY_BANDWIDTH if not whole_H else 0.0
    var library = library_cost(p.rows, tall, wide).time + copy_time(tall, wide)
    library += copy_time(p.rows, p.O) if tall != p.O else 0.0
    var output = PADDED if library < PADDED_GAIN * own else OWN
    var backward = own_cost(p.rows, p.H, p.O).time + own_cost(p.O, p.H, p.rows, may_share=True).time
    if not p.captured and own + backward < HOST:
        output = OWN
    var few = forked and p.rows <= UNALIGNED_ROWS and work <= UNALIGNED_WORK
    var gradients = LIBRARY if few else OWN
    return Choice(output, gradients, gradients, forked)


def copy_time(rows: Int, columns: Int) -> Float64:
    """Microseconds of PyTorch's copy of a matrix whose rows are not aligned."""
    return LAUNCH + 4 * Float64(rows * columns) / COPY_BANDWIDTH


# ---- Over the C ABI -------------------------------------------------------------------------------------------------


def packed[wgmma: Bool, dtype: DType, x_dtype: DType](p: Problem) -> Int:
    """The choice in bits, as `harness/nn/host/layernorm_linear.cpp` reads it: two for each of output, dln and dW, and one for two
    branches; above them the elements that the memory of dW needs where a copy of W with aligned rows comes there first.
    """
    var choice = choose[wgmma, dtype, x_dtype](p)
    var room = 0
    comptime if wgmma and dtype.is_half_float():
        if not (p.lean or lies_in_rows[dtype](p.H)):
            room = p.O * pitch_of[dtype](p.H)
    return choice.output | choice.dln << 2 | choice.dW << 4 | Int(choice.forked) << 6 | room << 8
