"""The kernels of a training step on a GPU other than GEMMs, LayerNorm, attention and the loss: GELU and its
gradient, the residual's gradient with its column sums, the token table's gradient, the norm of all gradients,
and AdamW in one pass over all parameters.

Tensors are bfloat16, sums and parameters float32. Every sum has a fixed order, so that every run gives the
same bits. Counts are multiples of WIDTH, and tensors are aligned to 16 bytes. `step_kernels.py` builds this
file, together with the code that the layers' kernels share, and calls the functions at its end.
"""

from std.math import ceildiv, exp2, sqrt
from std.memory import AddressSpace
from max.gpu import barrier, block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import Dim
from max.gpu.primitives import block
from layout.tile_layout import row_major
from layout.tile_tensor import stack_allocation

from common.calls import Words, call, open_gpu
from common.row_reductions import VECTOR_BYTES, vector_width
from common.stream_launcher import StreamLauncher
from shared.common import ImmPtr, MutPtr, multiprocessors
from shared.launcher import Launcher

comptime NARROW = DType.bfloat16
comptime WIDE = DType.float32
comptime WIDTH = vector_width[NARROW]
"""Elements that a thread handles at a time."""
comptime Vector = SIMD[WIDE, WIDTH]
comptime THREADS = 256
comptime SCALE: Float32 = 0.7978845608028654
"""sqrt(2 / pi), in GELU's u = SCALE (x + CUBE x^3)."""
comptime CUBE: Float32 = 0.044715
comptime LOG2E: Float32 = 1.4426950408889634
comptime NORM_EPS: Float32 = 1e-6
"""The constant added to the norm by which the limit is divided."""
comptime ROWS_ABREAST = 8
"""Rows of a token that a thread loads at a time, to hide memory latency."""
comptime ROW_THREADS = 128
"""Threads per token row."""
comptime CHUNK_PLACES = 32
"""Positions per chunk; a block sums a chunk's rows if all belong to one token."""
comptime SUM_LANES = 32
"""Threads across the columns of column sums; each owns WIDTH columns in the first stage, one in the second.
"""
comptime SUM_ROWS = 8
"""Threads that share a column in column sums."""
comptime SLICE_ROWS = 64
"""Rows that a block sums in the first stage of column sums."""
comptime BLOCKS_OF_SUMS = 4
"""Blocks per multiprocessor in the sum of squares."""


@always_inline
def load(tensor: ImmPtr[NARROW], at: Int) -> Vector:
    """Load a vector of a bfloat16 tensor as float32."""
    return tensor.unsafe_load[width=WIDTH, alignment=VECTOR_BYTES](at).cast[WIDE]()


@always_inline
def store(tensor: MutPtr[NARROW], at: Int, values: Vector):
    """Store a vector, rounded to bfloat16."""
    tensor.unsafe_store[alignment=VECTOR_BYTES](at, values.cast[NARROW]())


@always_inline
def load_wide(tensor: ImmPtr[WIDE], at: Int) -> Vector:
    """Load a vector of a float32 tensor."""
    return tensor.unsafe_load[width=WIDTH, alignment=VECTOR_BYTES](at)


@always_inline
def share_of_gelu(x: Vector) -> Vector:
    """Return s = (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)), where GELU is x s."""
    return 1 / (1 + exp2(-2 * LOG2E * SCALE * (x + CUBE * x * x * x)))


# ---- GELU: a thread owns a vector ---------------------------------------------------------------------------


def gelu_vectors(
    output: MutPtr[NARROW],  # [count]
    input: ImmPtr[NARROW],  # [count]
    count: Int64,
):
    """Compute GELU in its tanh form."""
    var i = (block_idx.x * THREADS + thread_idx.x) * WIDTH
    if i >= Int(count):
        return
    var x = load(input, i)
    store(output, i, x * share_of_gelu(x))


def gelu_backward_vectors(
    input: MutPtr[NARROW],  # [count], overwritten with its GELU
    gradient: MutPtr[NARROW],  # [count], the output's gradient; overwritten with the input's
    count: Int64,
):
    """Compute the gradient of GELU's input, and recompute its output for the next weight's gradient."""
    var i = (block_idx.x * THREADS + thread_idx.x) * WIDTH
    if i >= Int(count):
        return
    var x = load(input.as_imm(), i)
    var dy = load(gradient.as_imm(), i)
    var s = share_of_gelu(x)
    var slope = SCALE * (1 + 3 * CUBE * x * x)
    store(gradient, i, dy * (s + 2 * x * s * (1 - s) * slope))
    store(input, i, x * s)


# ---- The residual's gradient and its column sums, in two stages ----------------------------------------------


def add_with_partials(
    grad_residual: MutPtr[NARROW],  # [rows, channels], overwritten with grad_residual + grad_branch
    partials: MutPtr[WIDE],  # [slices, channels]
    grad_branch: ImmPtr[NARROW],  # [rows, channels]
    rows: Int32,
    channels: Int32,
):
    """Add grad_branch to grad_residual, and sum the columns of the result over every SLICE_ROWS rows."""
    var C = Int(channels)
    var column = (block_idx.x * SUM_LANES + thread_idx.x) * WIDTH
    var first = block_idx.y * SLICE_ROWS + thread_idx.y
    comptime turns = SLICE_ROWS // SUM_ROWS
    var total = Vector(0)
    if column < C:
        # All loads come first, so that their latencies overlap.
        var a = Array[SIMD[NARROW, WIDTH], turns](fill=0)
        var b = Array[SIMD[NARROW, WIDTH], turns](fill=0)
        comptime for k in range(turns):
            if first + k * SUM_ROWS < Int(rows):
                var at = (first + k * SUM_ROWS) * C + column
                a[k] = grad_residual.unsafe_load[width=WIDTH, alignment=VECTOR_BYTES](at)
                b[k] = grad_branch.unsafe_load[width=WIDTH, alignment=VECTOR_BYTES](at)
        comptime for k in range(turns):
            if first + k * SUM_ROWS < Int(rows):
                var sum = (a[k].cast[WIDE]() + b[k].cast[WIDE]()).cast[NARROW]()
                var at = (first + k * SUM_ROWS) * C + column
                grad_residual.unsafe_store[alignment=VECTOR_BYTES](at, sum)
                total += sum.cast[WIDE]()
    comptime tile = SUM_LANES * WIDTH
    var shares = stack_allocation[dtype=WIDE, address_space=AddressSpace.SHARED](row_major[SUM_ROWS, tile]())
    comptime for i in range(WIDTH):
        shares[thread_idx.y, thread_idx.x * WIDTH + i] = total[i]
    barrier()
    var c = thread_idx.y * SUM_LANES + thread_idx.x
    if block_idx.x * tile + c < C:
        var sum = Float32(0)
        comptime for row in range(SUM_ROWS):
            sum += shares[row, c]
        partials[unsafe_offset=block_idx.y * C + block_idx.x * tile + c] = sum


def finish_columns(
    sums: MutPtr[NARROW],  # [channels]
    partials: ImmPtr[WIDE],  # [slices, channels]
    slices: Int32,
    channels: Int32,
):
    """Add the slices' sums."""
    var C = Int(channels)
    var column = block_idx.x * SUM_LANES + thread_idx.x
    var total = Float32(0)
    if column < C:
        for slice in range(thread_idx.y, Int(slices), SUM_ROWS):
            total += partials[unsafe_offset=slice * C + column]
    var shares = stack_allocation[dtype=WIDE, address_space=AddressSpace.SHARED](
        row_major[SUM_ROWS, SUM_LANES]()
    )
    shares[thread_idx.y, thread_idx.x] = total
    barrier()
    if thread_idx.y == 0 and column < C:
        total = 0
        comptime for row in range(SUM_ROWS):
            total += shares[row, thread_idx.x]
        sums[unsafe_offset=column] = total.cast[NARROW]()


# ---- The table of tokens: a block owns a row ----------------------------------------------------------------


@always_inline
def with_rows[
    dtype: DType, //, sorted_places: Bool
](
    var total: Vector, rows: ImmPtr[dtype], order: ImmPtr[DType.int64], first: Int, end: Int, C: Int, c: Int
) -> Vector:
    """Return the total plus a vector of each row from `first` to `end`, with ROWS_ABREAST rows loaded at a
    time; if `sorted_places`, of rows order[first:end].
    """
    var i = first
    while i < end:
        var vectors = Array[Vector, ROWS_ABREAST](fill=0)
        comptime for k in range(ROWS_ABREAST):
            if i + k < end:
                var row = i + k
                comptime if sorted_places:
                    row = Int(order[unsafe_offset=row])
                vectors[k] = rows.unsafe_load[width=WIDTH, alignment=VECTOR_BYTES](row * C + c).cast[WIDE]()
        comptime for k in range(ROWS_ABREAST):
            total += vectors[k]
        i += ROWS_ABREAST
    return total


def token_sums_of_chunks(
    sums: MutPtr[WIDE],  # [chunks, channels], written for chunks of a single token
    gradient: ImmPtr[NARROW],  # [places, channels]
    tokens: ImmPtr[DType.int64],  # [places]
    order: ImmPtr[DType.int64],  # [places]: the places, sorted by token
    channels: Int32,
):
    """Sum the rows of a chunk, CHUNK_PLACES neighbours in `order`, if they belong to one token."""
    var first = block_idx.x * CHUNK_PLACES
    var end = first + CHUNK_PLACES
    var of_first = tokens[unsafe_offset=Int(order[unsafe_offset=first])]
    if of_first != tokens[unsafe_offset=Int(order[unsafe_offset=end - 1])]:
        return
    var C = Int(channels)
    for c in range(thread_idx.x * WIDTH, C, ROW_THREADS * WIDTH):
        var total = with_rows[True](Vector(0), gradient, order, first, end, C, c)
        sums.unsafe_store[alignment=VECTOR_BYTES](block_idx.x * C + c, total)


def token_gradient_rows(
    table: MutPtr[NARROW],  # [vocabulary, channels]
    of_head: ImmPtr[WIDE],  # [vocabulary, channels], the gradient of the table as the head's weight
    gradient: ImmPtr[NARROW],  # [places, channels], the gradient of the rows that the embedding read
    sums: ImmPtr[WIDE],  # [chunks, channels], the sums of chunks with a single token
    order: ImmPtr[DType.int64],  # [places]: the places, sorted by token
    starts: ImmPtr[DType.int64],  # [vocabulary + 1]: where each token's places begin in `order`, and the end
    channels: Int32,
):
    """Compute the gradient of a tied table: the head's plus every position's, in order, whole chunks at once.

    Without chunks, a frequent token, such as the space at every sixth position of a text, would keep one
    block busy for long.
    """
    var C = Int(channels)
    var token = block_idx.x
    var first = Int(starts[unsafe_offset=token])
    var end = Int(starts[unsafe_offset=token + 1])
    var chunk = ceildiv(first, CHUNK_PLACES)
    var last_chunk = max(chunk, end // CHUNK_PLACES)
    for c in range(thread_idx.x * WIDTH, C, ROW_THREADS * WIDTH):
        var total = load_wide(of_head, token * C + c)
        total = with_rows[True](total, gradient, order, first, min(end, chunk * CHUNK_PLACES), C, c)
        total = with_rows[False](total, sums, order, chunk, last_chunk, C, c)
        total = with_rows[True](total, gradient, order, max(first, last_chunk * CHUNK_PLACES), end, C, c)
        store(table, token * C + c, total)


# ---- The norm of all gradients, in two stages ---------------------------------------------------------------


def square_sums_of_blocks(
    sums: MutPtr[WIDE],  # [blocks]
    gradient: ImmPtr[NARROW],  # [count]
    count: Int64,
):
    """Sum the squares of a block's elements."""
    var partial = Vector(0)
    for i in range((block_idx.x * THREADS + thread_idx.x) * WIDTH, Int(count), grid_dim.x * THREADS * WIDTH):
        var g = load(gradient, i)
        partial += g * g
    var total = block.sum[block_size=THREADS](partial.reduce_add())
    if thread_idx.x == 0:
        sums[unsafe_offset=block_idx.x] = total


def norm_of_sums(
    norm: MutPtr[WIDE],  # [1]
    sums: ImmPtr[WIDE],  # [blocks]
    blocks: Int32,
):
    """Compute the square root of the sum of all blocks' sums, in one block."""
    var partial = Float32(0)
    for i in range(thread_idx.x, Int(blocks), THREADS):
        partial += sums[unsafe_offset=i]
    var total = block.sum[block_size=THREADS](partial)
    if thread_idx.x == 0:
        norm[unsafe_offset=0] = sqrt(total)


# ---- AdamW: a thread owns a vector --------------------------------------------------------------------------


@fieldwise_init
struct AdamW(Copyable, Movable):
    """AdamW's constants, and the norm to which gradients are clipped."""

    var beta1: Float32
    var beta2: Float32
    var eps: Float32
    var decay: Float32
    var limit: Float32


def adamw_vectors(
    master: MutPtr[WIDE],  # [count], the parameters
    working: MutPtr[NARROW],  # [count], the parameters in bfloat16
    mean: MutPtr[WIDE],  # [count], running mean of the gradient
    square: MutPtr[WIDE],  # [count], running mean of its square
    gradient: ImmPtr[NARROW],  # [count]
    numbers: ImmPtr[WIDE],  # [3]: the learning rate, and the corrections 1 - beta^step of both means
    norm: ImmPtr[WIDE],  # [1], the norm of all gradients
    beta1: Float32,
    beta2: Float32,
    eps: Float32,
    decay: Float32,
    limit: Float32,
    decayed: Int64,  # number of leading elements with weight decay
    count: Int64,
):
    """Clip the gradient and apply one step of AdamW, reading and writing every element once."""
    var i = (block_idx.x * THREADS + thread_idx.x) * WIDTH
    if i >= Int(count):
        return
    var rate = numbers[unsafe_offset=0]
    var factor = limit / (norm[unsafe_offset=0] + NORM_EPS)
    if factor > 1:  # not min(1, factor), which turns NaN into 1
        factor = 1
    var g = load(gradient, i) * factor
    var m = load_wide(mean.as_imm(), i)
    m += (1 - beta1) * (g - m)
    var v = load_wide(square.as_imm(), i)
    v += (1 - beta2) * (g * g - v)
    var root = sqrt(v / numbers[unsafe_offset=2])
    var kept = 1 - rate * decay if i < Int(decayed) else Float32(1)
    var x = load_wide(master.as_imm(), i) * kept - rate * (m / numbers[unsafe_offset=1]) / (root + eps)
    mean.unsafe_store[alignment=VECTOR_BYTES](i, m)
    square.unsafe_store[alignment=VECTOR_BYTES](i, v)
    master.unsafe_store[alignment=VECTOR_BYTES](i, x)
    store(working, i, x)


# ---- Launches ---------------------------------------------------------------------------------------------


def blocks_for(count: Int) -> Dim:
    """Return the grid for one vector per thread."""
    return Dim(ceildiv(count, THREADS * WIDTH))


def launch_gelu[
    L: Launcher, //
](mut launcher: L, output: MutPtr[NARROW], input: ImmPtr[NARROW], count: Int) raises:
    """Launch the kernel."""
    launcher.launch[gelu_vectors](
        "gelu", output, input, Int64(count), grid_dim=blocks_for(count), block_dim=Dim(THREADS)
    )


def launch_gelu_backward[
    L: Launcher, //
](mut launcher: L, input: MutPtr[NARROW], gradient: MutPtr[NARROW], count: Int) raises:
    """Launch the kernel."""
    launcher.launch[gelu_backward_vectors](
        "gelu_backward", input, gradient, Int64(count), grid_dim=blocks_for(count), block_dim=Dim(THREADS)
    )


def launch_add_with_sums[
    L: Launcher, //
](
    mut launcher: L,
    grad_residual: MutPtr[NARROW],
    sums: MutPtr[NARROW],
    grad_branch: ImmPtr[NARROW],
    rows: Int,
    channels: Int,
) raises:
    """Launch both stages, with a row of partial sums per slice in workspace."""
    var slices = ceildiv(rows, SLICE_ROWS)
    var partials = launcher.workspace[WIDE]("sums of columns", slices * channels)
    launcher.launch[add_with_partials](
        "add_with_partials",
        grad_residual,
        partials,
        grad_branch,
        Int32(rows),
        Int32(channels),
        grid_dim=Dim(ceildiv(channels, SUM_LANES * WIDTH), slices),
        block_dim=Dim(SUM_LANES, SUM_ROWS),
    )
    launcher.launch[finish_columns](
        "finish_columns",
        sums,
        partials.as_imm(),
        Int32(slices),
        Int32(channels),
        grid_dim=Dim(ceildiv(channels, SUM_LANES)),
        block_dim=Dim(SUM_LANES, SUM_ROWS),
    )


def launch_token_gradient[
    L: Launcher, //
](
    mut launcher: L,
    table: MutPtr[NARROW],
    of_head: ImmPtr[WIDE],
    gradient: ImmPtr[NARROW],
    tokens: ImmPtr[DType.int64],
    order: ImmPtr[DType.int64],
    starts: ImmPtr[DType.int64],
    places: Int,
    vocabulary: Int,
    channels: Int,
) raises:
    """Launch the kernel, after the sums of the chunks if there are any."""
    var chunks = places // CHUNK_PLACES
    var sums = launcher.workspace[WIDE]("sums of chunks", chunks * channels)
    if chunks > 0:
        launcher.launch[token_sums_of_chunks](
            "token_sums",
            sums,
            gradient,
            tokens,
            order,
            Int32(channels),
            grid_dim=Dim(chunks),
            block_dim=Dim(ROW_THREADS),
        )
    launcher.launch[token_gradient_rows](
        "token_gradient",
        table,
        of_head,
        gradient,
        sums.as_imm(),
        order,
        starts,
        Int32(channels),
        grid_dim=Dim(vocabulary),
        block_dim=Dim(ROW_THREADS),
    )


def launch_norm[
    L: Launcher, //
](mut launcher: L, norm: MutPtr[WIDE], gradient: ImmPtr[NARROW], count: Int) raises:
    """Launch both stages, with one partial sum per block in workspace."""
    var blocks = min(ceildiv(count, THREADS * WIDTH), BLOCKS_OF_SUMS * multiprocessors())
    var sums = launcher.workspace[WIDE]("sums of squares", blocks)
    launcher.launch[square_sums_of_blocks](
        "square_sums", sums, gradient, Int64(count), grid_dim=Dim(blocks), block_dim=Dim(THREADS)
    )
    launcher.launch[norm_of_sums](
        "norm", norm, sums.as_imm(), Int32(blocks), grid_dim=Dim(1), block_dim=Dim(THREADS)
    )


def launch_adamw[
    L: Launcher, //
](
    mut launcher: L,
    master: MutPtr[WIDE],
    working: MutPtr[NARROW],
    mean: MutPtr[WIDE],
    square: MutPtr[WIDE],
    gradient: ImmPtr[NARROW],
    numbers: ImmPtr[WIDE],
    norm: ImmPtr[WIDE],
    options: AdamW,
    decayed: Int,
    count: Int,
) raises:
    """Launch the kernel."""
    launcher.launch[adamw_vectors](
        "adamw",
        master,
        working,
        mean,
        square,
        gradient,
        numbers,
        norm,
        options.beta1,
        options.beta2,
        options.eps,
        options.decay,
        options.limit,
        Int64(decayed),
        Int64(count),
        grid_dim=blocks_for(count),
        block_dim=Dim(THREADS),
    )


# ---- Functions that Python calls ----------------------------------------------------------------------------


def gelu(mut words: Words, mut launcher: StreamLauncher) raises:
    """Arguments: output, input, count."""
    var output = words.output[NARROW]()
    var input = words.input[NARROW]()
    launch_gelu(launcher, output, input, words.integer())


def gelu_backward(mut words: Words, mut launcher: StreamLauncher) raises:
    """Arguments: input and gradient, both overwritten, and count."""
    var input = words.output[NARROW]()
    var gradient = words.output[NARROW]()
    launch_gelu_backward(launcher, input, gradient, words.integer())


def add_with_sums(mut words: Words, mut launcher: StreamLauncher) raises:
    """Arguments: grad_residual, sums, grad_branch, rows, channels."""
    var grad_residual = words.output[NARROW]()
    var sums = words.output[NARROW]()
    var grad_branch = words.input[NARROW]()
    var rows = words.integer()
    launch_add_with_sums(launcher, grad_residual, sums, grad_branch, rows, words.integer())


def token_gradient(mut words: Words, mut launcher: StreamLauncher) raises:
    """Arguments: table, the head's gradient, rows, tokens, order, starts, places, vocabulary, channels."""
    var table = words.output[NARROW]()
    var of_head = words.input[WIDE]()
    var gradient = words.input[NARROW]()
    var tokens = words.input[DType.int64]()
    var order = words.input[DType.int64]()
    var starts = words.input[DType.int64]()
    var places = words.integer()
    var vocabulary = words.integer()
    var channels = words.integer()
    launch_token_gradient(
        launcher, table, of_head, gradient, tokens, order, starts, places, vocabulary, channels
    )


def norm(mut words: Words, mut launcher: StreamLauncher) raises:
    """Arguments: norm, gradients, count."""
    var result = words.output[WIDE]()
    var gradient = words.input[NARROW]()
    launch_norm(launcher, result, gradient, words.integer())


def adamw(mut words: Words, mut launcher: StreamLauncher) raises:
    """Arguments: the five constants, decayed, count; master, working, mean, square, gradients, numbers, norm.
    """
    # Arguments are evaluated in this order.
    var options = AdamW(
        beta1=words.float().cast[WIDE](),
        beta2=words.float().cast[WIDE](),
        eps=words.float().cast[WIDE](),
        decay=words.float().cast[WIDE](),
        limit=words.float().cast[WIDE](),
    )
    var decayed = words.integer()
    var count = words.integer()
    var master = words.output[WIDE]()
    var working = words.output[NARROW]()
    var mean = words.output[WIDE]()
    var square = words.output[WIDE]()
    var gradient = words.input[NARROW]()
    var numbers = words.input[WIDE]()
    var norm = words.input[WIDE]()
    launch_adamw(launcher, master, working, mean, square, gradient, numbers, norm, options, decayed, count)


@export
def workbook_open(index: Int64, message: Int, capacity: Int64) abi("C") -> Int64:
    """Return a handle of a GPU."""
    return open_gpu(index, message, capacity)


@export
def workbook_gelu(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    return call[gelu](words, message, capacity)


@export
def workbook_gelu_backward(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    return call[gelu_backward](words, message, capacity)


@export
def workbook_add_with_sums(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    return call[add_with_sums](words, message, capacity)


@export
def workbook_token_gradient(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    return call[token_gradient](words, message, capacity)


@export
def workbook_norm(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    return call[norm](words, message, capacity)


@export
def workbook_adamw(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    return call[adamw](words, message, capacity)
