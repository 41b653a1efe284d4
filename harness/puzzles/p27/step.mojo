"""The kernels of a training step on a GPU other than GEMMs, LayerNorm, attention and the loss: GELU and its
gradient, the residual's gradient with its column sums, the token table's gradient, the norm of all gradients,
and AdamW in one pass over all parameters.

Tensors are bfloat16; sums and parameters are float32. Every sum has a fixed order, so results are bitwise
reproducible. Element counts are multiples of WIDTH, and tensors are aligned to 16 bytes. `step_kernels.py`
builds this file, together with the layer kernels' shared code, and calls the functions at its end.
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
"""Elements per vector."""
comptime Vector = SIMD[WIDE, WIDTH]
comptime THREADS = 256
comptime SCALE: Float32 = 0.7978845608028654
"""sqrt(2 / pi), in GELU's u = SCALE (x + CUBE x^3)."""
comptime CUBE: Float32 = 0.044715
comptime LOG2E: Float32 = 1.4426950408889634
comptime NORM_EPS: Float32 = 1e-6
"""Added to the norm before max_norm is divided by it."""
comptime ROWS_PER_LOAD = 8
"""Rows of a token that a thread loads before it adds them, to hide memory latency."""
comptime ROW_THREADS = 128
"""Threads per token row."""
comptime CHUNK_POSITIONS = 32
"""Positions per chunk; a block sums a chunk's rows if all are of one token."""
comptime SUM_LANES = 32
"""Column sums: threads along the columns, each with WIDTH columns in the first stage and one in the second.
"""
comptime SUM_ROWS = 8
"""Column sums: threads per column."""
comptime SLICE_ROWS = 64
"""Column sums: rows per block in the first stage."""
comptime NORM_BLOCKS_PER_SM = 4
"""Blocks per multiprocessor for the sum of squares."""


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
def gelu_gate(x: Vector) -> Vector:
    """Return s = (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)), where GELU is x s."""
    return 1 / (1 + exp2(-2 * LOG2E * SCALE * (x + CUBE * x * x * x)))


# ---- GELU: one vector per thread ---------------------------------------------------------------------------


def gelu_kernel(
    output: MutPtr[NARROW],  # [count]
    input: ImmPtr[NARROW],  # [count]
    count: Int64,
):
    """Compute the tanh approximation of GELU."""
    var i = (block_idx.x * THREADS + thread_idx.x) * WIDTH
    if i >= Int(count):
        return
    var x = load(input, i)
    store(output, i, x * gelu_gate(x))


def gelu_backward_kernel(
    input: MutPtr[NARROW],  # [count], overwritten with its GELU
    gradient: MutPtr[NARROW],  # [count], the output's gradient, overwritten with the input's
    count: Int64,
):
    """Compute the gradient of GELU's input, and recompute GELU's output, an input of the next weight
    gradient.
    """
    var i = (block_idx.x * THREADS + thread_idx.x) * WIDTH
    if i >= Int(count):
        return
    var x = load(input.as_imm(), i)
    var dy = load(gradient.as_imm(), i)
    var s = gelu_gate(x)
    var du_dx = SCALE * (1 + 3 * CUBE * x * x)
    store(gradient, i, dy * (s + 2 * x * s * (1 - s) * du_dx))
    store(input, i, x * s)


# ---- The residual's gradient and its column sums, in two stages --------------------------------------------


def add_and_partial_sums_kernel(
    grad_residual: MutPtr[NARROW],  # [rows, channels], overwritten with grad_residual + grad_branch
    partials: MutPtr[WIDE],  # [slices, channels]
    grad_branch: ImmPtr[NARROW],  # [rows, channels]
    rows: Int32,
    channels: Int32,
):
    """Add grad_branch to grad_residual, and sum the columns of each slice of SLICE_ROWS rows of the result.
    """
    var C = Int(channels)
    var column = (block_idx.x * SUM_LANES + thread_idx.x) * WIDTH
    var first = block_idx.y * SLICE_ROWS + thread_idx.y
    comptime rows_per_thread = SLICE_ROWS // SUM_ROWS
    var total = Vector(0)
    if column < C:
        # Issue all loads first, so that their latencies overlap.
        var a = Array[SIMD[NARROW, WIDTH], rows_per_thread](fill=0)
        var b = Array[SIMD[NARROW, WIDTH], rows_per_thread](fill=0)
        comptime for k in range(rows_per_thread):
            if first + k * SUM_ROWS < Int(rows):
                var at = (first + k * SUM_ROWS) * C + column
                a[k] = grad_residual.unsafe_load[width=WIDTH, alignment=VECTOR_BYTES](at)
                b[k] = grad_branch.unsafe_load[width=WIDTH, alignment=VECTOR_BYTES](at)
        comptime for k in range(rows_per_thread):
            if first + k * SUM_ROWS < Int(rows):
                var sum = (a[k].cast[WIDE]() + b[k].cast[WIDE]()).cast[NARROW]()
                var at = (first + k * SUM_ROWS) * C + column
                grad_residual.unsafe_store[alignment=VECTOR_BYTES](at, sum)
                total += sum.cast[WIDE]()
    comptime tile = SUM_LANES * WIDTH
    var partial_tile = stack_allocation[dtype=WIDE, address_space=AddressSpace.SHARED](
        row_major[SUM_ROWS, tile]()
    )
    comptime for i in range(WIDTH):
        partial_tile[thread_idx.y, thread_idx.x * WIDTH + i] = total[i]
    barrier()
    var c = thread_idx.y * SUM_LANES + thread_idx.x
    if block_idx.x * tile + c < C:
        var sum = Float32(0)
        comptime for row in range(SUM_ROWS):
            sum += partial_tile[row, c]
        partials[unsafe_offset=block_idx.y * C + block_idx.x * tile + c] = sum


def column_sums_kernel(
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
    var partial_tile = stack_allocation[dtype=WIDE, address_space=AddressSpace.SHARED](
        row_major[SUM_ROWS, SUM_LANES]()
    )
    partial_tile[thread_idx.y, thread_idx.x] = total
    barrier()
    if thread_idx.y == 0 and column < C:
        total = 0
        comptime for row in range(SUM_ROWS):
            total += partial_tile[row, thread_idx.x]
        sums[unsafe_offset=column] = total.cast[NARROW]()


# ---- The token table's gradient: one row per block ---------------------------------------------------------


@always_inline
def add_rows[
    dtype: DType, //, indirect: Bool
](
    var total: Vector, rows: ImmPtr[dtype], order: ImmPtr[DType.int64], first: Int, end: Int, C: Int, c: Int
) -> Vector:
    """Return total plus a vector of each of rows[first:end], or of rows[order[first:end]] if `indirect`. Load
    ROWS_PER_LOAD rows at a time.
    """
    var i = first
    while i < end:
        var vectors = Array[Vector, ROWS_PER_LOAD](fill=0)
        comptime for k in range(ROWS_PER_LOAD):
            if i + k < end:
                var row = i + k
                comptime if indirect:
                    row = Int(order[unsafe_offset=row])
                vectors[k] = rows.unsafe_load[width=WIDTH, alignment=VECTOR_BYTES](row * C + c).cast[WIDE]()
        comptime for k in range(ROWS_PER_LOAD):
            total += vectors[k]
        i += ROWS_PER_LOAD
    return total


def chunk_sums_kernel(
    sums: MutPtr[WIDE],  # [chunks, channels], written only for chunks of a single token
    gradient: ImmPtr[NARROW],  # [positions, channels]
    tokens: ImmPtr[DType.int64],  # [positions]
    order: ImmPtr[DType.int64],  # [positions]: the positions, sorted by token
    channels: Int32,
):
    """Sum the rows of a chunk, CHUNK_POSITIONS consecutive entries of `order`, if all are of one token."""
    var first = block_idx.x * CHUNK_POSITIONS
    var end = first + CHUNK_POSITIONS
    var first_token = tokens[unsafe_offset=Int(order[unsafe_offset=first])]
    if first_token != tokens[unsafe_offset=Int(order[unsafe_offset=end - 1])]:
        return
    var C = Int(channels)
    for c in range(thread_idx.x * WIDTH, C, ROW_THREADS * WIDTH):
        var total = add_rows[True](Vector(0), gradient, order, first, end, C, c)
        sums.unsafe_store[alignment=VECTOR_BYTES](block_idx.x * C + c, total)


def token_gradient_kernel(
    table: MutPtr[NARROW],  # [vocabulary, channels]
    head_gradient: ImmPtr[WIDE],  # [vocabulary, channels], the gradient of the table as the head's weight
    gradient: ImmPtr[NARROW],  # [positions, channels], the gradient of the embedding's output
    sums: ImmPtr[WIDE],  # [chunks, channels], the sums of chunks with a single token
    order: ImmPtr[DType.int64],  # [positions]: the positions, sorted by token
    starts: ImmPtr[DType.int64],  # [vocabulary + 1]: starts of the tokens' positions in `order`, and the end
    channels: Int32,
):
    """Compute the gradient of a tied table: the head's plus every position's, in order, and one addition for
    each whole chunk.

    Without chunks, the block of a frequent token, such as the space (every sixth position of a text), would
    run long after the others.
    """
    var C = Int(channels)
    var token = block_idx.x
    var first = Int(starts[unsafe_offset=token])
    var end = Int(starts[unsafe_offset=token + 1])
    var chunk = ceildiv(first, CHUNK_POSITIONS)
    var last_chunk = max(chunk, end // CHUNK_POSITIONS)
    for c in range(thread_idx.x * WIDTH, C, ROW_THREADS * WIDTH):
        var total = load_wide(head_gradient, token * C + c)
        total = add_rows[True](total, gradient, order, first, min(end, chunk * CHUNK_POSITIONS), C, c)
        total = add_rows[False](total, sums, order, chunk, last_chunk, C, c)
        total = add_rows[True](total, gradient, order, max(first, last_chunk * CHUNK_POSITIONS), end, C, c)
        store(table, token * C + c, total)


# ---- The norm of all gradients, in two stages --------------------------------------------------------------


def square_sums_kernel(
    sums: MutPtr[WIDE],  # [blocks]
    gradient: ImmPtr[NARROW],  # [count]
    count: Int64,
):
    """Compute each block's sum of squares."""
    var partial = Vector(0)
    for i in range((block_idx.x * THREADS + thread_idx.x) * WIDTH, Int(count), grid_dim.x * THREADS * WIDTH):
        var g = load(gradient, i)
        partial += g * g
    var total = block.sum[block_size=THREADS](partial.reduce_add())
    if thread_idx.x == 0:
        sums[unsafe_offset=block_idx.x] = total


def norm_kernel(
    norm: MutPtr[WIDE],  # [1]
    sums: ImmPtr[WIDE],  # [blocks]
    blocks: Int32,
):
    """Compute the square root of the sum of all blocks' sums, in a single block."""
    var partial = Float32(0)
    for i in range(thread_idx.x, Int(blocks), THREADS):
        partial += sums[unsafe_offset=i]
    var total = block.sum[block_size=THREADS](partial)
    if thread_idx.x == 0:
        norm[unsafe_offset=0] = sqrt(total)


# ---- AdamW: one vector per thread --------------------------------------------------------------------------


@fieldwise_init
struct AdamW(Copyable, Movable):
    """AdamW's hyperparameters, and the norm to which gradients are clipped."""

    var beta1: Float32
    var beta2: Float32
    var eps: Float32
    var decay: Float32
    var max_norm: Float32


def adamw_kernel(
    master: MutPtr[WIDE],  # [count], the parameters
    working: MutPtr[NARROW],  # [count], the parameters in bfloat16
    mean: MutPtr[WIDE],  # [count], running mean of the gradient
    square: MutPtr[WIDE],  # [count], running mean of its square
    gradient: ImmPtr[NARROW],  # [count]
    schedule: ImmPtr[WIDE],  # [3]: the learning rate, and both bias corrections 1 - beta^step
    norm: ImmPtr[WIDE],  # [1], the norm of all gradients
    beta1: Float32,
    beta2: Float32,
    eps: Float32,
    decay: Float32,
    max_norm: Float32,
    decayed_count: Int64,  # the first decayed_count parameters have weight decay
    count: Int64,
):
    """Clip the gradient and apply one step of AdamW, with one read and one write per element."""
    var i = (block_idx.x * THREADS + thread_idx.x) * WIDTH
    if i >= Int(count):
        return
    var learning_rate = schedule[unsafe_offset=0]
    var factor = max_norm / (norm[unsafe_offset=0] + NORM_EPS)
    if factor > 1:  # not min(1, factor), which is 1 for NaN
        factor = 1
    var g = load(gradient, i) * factor
    var m = load_wide(mean.as_imm(), i)
    m += (1 - beta1) * (g - m)
    var v = load_wide(square.as_imm(), i)
    v += (1 - beta2) * (g * g - v)
    var root_mean_square = sqrt(v / schedule[unsafe_offset=2])
    var decay_factor = 1 - learning_rate * decay if i < Int(decayed_count) else Float32(1)
    var x = load_wide(master.as_imm(), i) * decay_factor - learning_rate * (m / schedule[unsafe_offset=1]) / (
        root_mean_square + eps
    )
    mean.unsafe_store[alignment=VECTOR_BYTES](i, m)
    square.unsafe_store[alignment=VECTOR_BYTES](i, v)
    master.unsafe_store[alignment=VECTOR_BYTES](i, x)
    store(working, i, x)


# ---- Launches ----------------------------------------------------------------------------------------------


def vector_grid(count: Int) -> Dim:
    """Return the grid size for one vector per thread."""
    return Dim(ceildiv(count, THREADS * WIDTH))


def launch_gelu[
    L: Launcher, //
](mut launcher: L, output: MutPtr[NARROW], input: ImmPtr[NARROW], count: Int) raises:
    """Launch the kernel."""
    launcher.launch[gelu_kernel](
        "gelu", output, input, Int64(count), grid_dim=vector_grid(count), block_dim=Dim(THREADS)
    )


def launch_gelu_backward[
    L: Launcher, //
](mut launcher: L, input: MutPtr[NARROW], gradient: MutPtr[NARROW], count: Int) raises:
    """Launch the kernel."""
    launcher.launch[gelu_backward_kernel](
        "gelu_backward", input, gradient, Int64(count), grid_dim=vector_grid(count), block_dim=Dim(THREADS)
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
    launcher.launch[add_and_partial_sums_kernel](
        "add_with_partials",
        grad_residual,
        partials,
        grad_branch,
        Int32(rows),
        Int32(channels),
        grid_dim=Dim(ceildiv(channels, SUM_LANES * WIDTH), slices),
        block_dim=Dim(SUM_LANES, SUM_ROWS),
    )
    launcher.launch[column_sums_kernel](
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
    head_gradient: ImmPtr[WIDE],
    gradient: ImmPtr[NARROW],
    tokens: ImmPtr[DType.int64],
    order: ImmPtr[DType.int64],
    starts: ImmPtr[DType.int64],
    positions: Int,
    vocabulary: Int,
    channels: Int,
) raises:
    """Launch the chunk sums, if there are whole chunks, and then the table's gradient."""
    var chunks = positions // CHUNK_POSITIONS
    var sums = launcher.workspace[WIDE]("sums of chunks", chunks * channels)
    if chunks > 0:
        launcher.launch[chunk_sums_kernel](
            "token_sums",
            sums,
            gradient,
            tokens,
            order,
            Int32(channels),
            grid_dim=Dim(chunks),
            block_dim=Dim(ROW_THREADS),
        )
    launcher.launch[token_gradient_kernel](
        "token_gradient",
        table,
        head_gradient,
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
    var blocks = min(ceildiv(count, THREADS * WIDTH), NORM_BLOCKS_PER_SM * multiprocessors())
    var sums = launcher.workspace[WIDE]("sums of squares", blocks)
    launcher.launch[square_sums_kernel](
        "square_sums", sums, gradient, Int64(count), grid_dim=Dim(blocks), block_dim=Dim(THREADS)
    )
    launcher.launch[norm_kernel](
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
    schedule: ImmPtr[WIDE],
    norm: ImmPtr[WIDE],
    options: AdamW,
    decayed_count: Int,
    count: Int,
) raises:
    """Launch the kernel."""
    launcher.launch[adamw_kernel](
        "adamw",
        master,
        working,
        mean,
        square,
        gradient,
        schedule,
        norm,
        options.beta1,
        options.beta2,
        options.eps,
        options.decay,
        options.max_norm,
        Int64(decayed_count),
        Int64(count),
        grid_dim=vector_grid(count),
        block_dim=Dim(THREADS),
    )


# ---- Functions that Python calls ---------------------------------------------------------------------------


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
    """Arguments: table, the head's gradient, rows, tokens, order, starts, positions, vocabulary, channels."""
    var table = words.output[NARROW]()
    var head_gradient = words.input[WIDE]()
    var gradient = words.input[NARROW]()
    var tokens = words.input[DType.int64]()
    var order = words.input[DType.int64]()
    var starts = words.input[DType.int64]()
    var positions = words.integer()
    var vocabulary = words.integer()
    var channels = words.integer()
    launch_token_gradient(
        launcher, table, head_gradient, gradient, tokens, order, starts, positions, vocabulary, channels
    )


def norm(mut words: Words, mut launcher: StreamLauncher) raises:
    """Arguments: norm, gradients, count."""
    var result = words.output[WIDE]()
    var gradient = words.input[NARROW]()
    launch_norm(launcher, result, gradient, words.integer())


def adamw(mut words: Words, mut launcher: StreamLauncher) raises:
    """Arguments: the five hyperparameters, decayed_count, count, master, working, mean, square, gradients,
    schedule, norm.
    """
    # The evaluation order of these arguments is the order of the words.
    var options = AdamW(
        beta1=words.float().cast[WIDE](),
        beta2=words.float().cast[WIDE](),
        eps=words.float().cast[WIDE](),
        decay=words.float().cast[WIDE](),
        max_norm=words.float().cast[WIDE](),
    )
    var decayed_count = words.integer()
    var count = words.integer()
    var master = words.output[WIDE]()
    var working = words.output[NARROW]()
    var mean = words.output[WIDE]()
    var square = words.output[WIDE]()
    var gradient = words.input[NARROW]()
    var schedule = words.input[WIDE]()
    var norm = words.input[WIDE]()
    launch_adamw(
        launcher, master, working, mean, square, gradient, schedule, norm, options, decayed_count, count
    )


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
