"""The fast CPU path of puzzle 22: vectorised, in parallel, and equal to the last bit on any number of threads.

The formulas are those of `cpu_reference.mojo`, which is the one to read first. What differs is the order of the
work: all three products go through `gemm_cpu.mojo`; a block of rows is finished while it is in cache; the LayerNorm
output is computed where a product reads it, and never stored. Sums are kept in `accum_type[dtype]`, as on the GPU:
long ones are compensated, the parameter gradients are summed by block first, and then over the blocks.
"""

from std.algorithm import vectorize
from std.math import ceildiv, sqrt
from std.sys import simd_width_of

from .shared.common import CompensatedSum, ImmPtr, MutPtr, RowStatistics, accum_type, rounded_product
from .shared.gemm_cpu import (
    BLOCK_ROWS,
    PANEL_DEPTH,
    Matrix,
    Operand,
    aligned_alloc,
    block_rows,
    multiply_block,
    pack_columns,
    padded_columns,
    share_blocks,
    workers,
)
from .tensors import BackwardTensors, ForwardTensors

comptime CHUNK_ELEMENTS = 1 << 22
"""About how many elements of the LayerNorm output are packed at a time."""


struct VectorSum[dtype: DType](Copyable, Movable):
    """A compensated sum (Kahan, 1965) that takes a vector of terms at a time, one running sum for each lane.
    """

    comptime lanes = simd_width_of[Self.dtype]()

    var _totals: SIMD[Self.dtype, Self.lanes]
    var _excess: SIMD[Self.dtype, Self.lanes]
    var _rest: CompensatedSum[Self.dtype]

    @always_inline
    def __init__(out self):
        """An empty sum."""
        self._totals = 0
        self._excess = 0
        self._rest = CompensatedSum[Self.dtype]()

    @always_inline
    def add[width: Int](mut self, terms: SIMD[Self.dtype, width]):
        """Adds a whole vector of terms, or fewer, one by one."""
        comptime if width == Self.lanes:
            var corrected = rebind[SIMD[Self.dtype, Self.lanes]](terms) - self._excess
            var grown = self._totals + corrected
            self._excess = (grown - self._totals) - corrected
            self._totals = grown
        else:
            comptime for lane in range(width):
                self._rest += terms[lane]

    @always_inline
    def total(self) -> Scalar[Self.dtype]:
        """The sum of every term so far."""
        var sum = self._rest.copy()
        comptime for lane in range(Self.lanes):
            sum += self._totals[lane]
        return sum.total


@always_inline
def add_compensated[
    dtype: DType, width: Int
](totals: MutPtr[dtype], excess: MutPtr[dtype], index: Int, terms: SIMD[dtype, width]):
    """Adds one term to each of `width` running sums in memory, which lie side by side, as `CompensatedSum` does.
    """
    var total = totals.unsafe_load[width=width](index)
    var corrected = terms - excess.unsafe_load[width=width](index)
    var grown = total + corrected
    excess.unsafe_store(index, (grown - total) - corrected)
    totals.unsafe_store(index, grown)


struct Normalised[dtype: DType, transposed: Bool](Operand):
    """The LayerNorm output as an operand, (x - mean) * rstd * gamma + beta: [rows, H], or transposed [H, rows].

    The index that is summed is the row, or, transposed, h.
    """

    comptime accum = accum_type[Self.dtype]
    comptime along_k = Self.transposed

    var input: Pointer[Scalar[Self.dtype], ImmUntrackedOrigin]
    var mean: Pointer[Scalar[accum_type[Self.dtype]], ImmUntrackedOrigin]
    var rstd: Pointer[Scalar[accum_type[Self.dtype]], ImmUntrackedOrigin]
    var ln_weight: Pointer[Scalar[Self.dtype], ImmUntrackedOrigin]
    var ln_bias: Pointer[Scalar[Self.dtype], ImmUntrackedOrigin]
    var hidden_dim: Int

    def __init__(
        out self,
        input: ImmPtr[Self.dtype],  # [rows, H]
        mean: ImmPtr[accum_type[Self.dtype]],  # [rows]
        rstd: ImmPtr[accum_type[Self.dtype]],  # [rows]
        ln_weight: ImmPtr[Self.dtype],  # [H], gamma
        ln_bias: ImmPtr[Self.dtype],  # [H], beta
        hidden_dim: Int,
    ):
        """Remembers where everything lies."""
        self.input = input.unsafe_origin_cast[ImmUntrackedOrigin]()
        self.mean = mean.unsafe_origin_cast[ImmUntrackedOrigin]()
        self.rstd = rstd.unsafe_origin_cast[ImmUntrackedOrigin]()
        self.ln_weight = ln_weight.unsafe_origin_cast[ImmUntrackedOrigin]()
        self.ln_bias = ln_bias.unsafe_origin_cast[ImmUntrackedOrigin]()
        self.hidden_dim = hidden_dim

    @always_inline
    def load[width: Int](self, k: Int, i: Int) -> SIMD[Self.accum, width]:
        var row = i if Self.transposed else k
        var h = k if Self.transposed else i
        var x = self.input.unsafe_load[width=width](row * self.hidden_dim + h).cast[Self.accum]()
        var x_hat = (x - self.mean[unsafe_offset=row]) * self.rstd[unsafe_offset=row]
        var gamma = self.ln_weight.unsafe_load[width=width](h).cast[Self.accum]()
        return x_hat * gamma + self.ln_bias.unsafe_load[width=width](h).cast[Self.accum]()


def forward_fast_cpu[dtype: DType, //](t: ForwardTensors[dtype]):
    """One product, whose left operand is normalised as it is read, a block of rows at a time."""
    var rows = Int(t.sizes.rows())
    var H = Int(t.sizes.hidden_dim)
    var O = Int(t.sizes.output_dim)
    comptime accum = accum_type[dtype]
    var stride = padded_columns[accum](O)
    var panels = aligned_alloc[accum](H * stride)
    pack_columns(panels, Matrix[dtype, True](t.linear_weight, H), O, 0, H)

    var block = block_rows(rows, O)
    var blocks = ceildiv(rows, block)
    var scratch = block * stride + BLOCK_ROWS * PANEL_DEPTH
    var memory = aligned_alloc[accum](workers(blocks) * scratch)

    def forward_block(index: Int, worker: Int) {imm}:
        var first = index * block
        var count = min(block, rows - first)
        var sums = memory.unsafe_offset(worker * scratch)

        # Phase 1: the statistics of these rows, saved for the backward pass.
        for row in range(first, first + count):
            var statistics = vector_row_statistics(t.input, row, H, t.eps)
            t.mean[unsafe_offset=row] = statistics.mean
            t.rstd[unsafe_offset=row] = statistics.rstd

        # Phase 2: normalise, scale, shift and multiply; then the bias.
        multiply_block[accum](
            sums,
            stride,
            Normalised[dtype, True](t.input, t.mean.as_imm(), t.rstd.as_imm(), t.ln_weight, t.ln_bias, H),
            panels.as_imm(),
            sums.unsafe_offset(block * stride),
            first,
            count,
            0,
            H,
            False,
        )
        for row in range(count):
            var y = t.output.unsafe_offset((first + row) * O)
            var row_sums = sums.unsafe_offset(row * stride)

            def store[width: Int](o: Int) {imm}:
                var bias = t.linear_bias.unsafe_load[width=width](o).cast[accum]()
                y.unsafe_store(o, (row_sums.unsafe_load[width=width](o) + bias).cast[dtype]())

            vectorize[simd_width_of[accum]()](O, store)

    share_blocks(blocks, forward_block)
    memory.unsafe_free()
    panels.unsafe_free()


def vector_row_statistics[
    dtype: DType
](input: ImmPtr[dtype], row: Int, H: Int, eps: Scalar[accum_type[dtype]]) -> RowStatistics[accum_type[dtype]]:
    """Mean and rstd of one row by the corrected two passes of `row_statistics`, a vector of elements at a time.
    """
    comptime accum = accum_type[dtype]
    comptime lanes = simd_width_of[accum]()
    var x = input.unsafe_offset(row * H)

    var elements = VectorSum[accum]()

    def add_elements[width: Int](h: Int) {mut elements, imm x}:
        elements.add(x.unsafe_load[width=width](h).cast[accum]())

    vectorize[lanes](H, add_elements)
    var first_mean = elements.total() / Scalar[accum](H)

    var deviations = VectorSum[accum]()
    var squares = VectorSum[accum]()

    def add_deviations[width: Int](h: Int) {mut deviations, mut squares, imm x, imm first_mean}:
        var deviation = x.unsafe_load[width=width](h).cast[accum]() - first_mean
        deviations.add(deviation)
        squares.add(deviation * deviation)

    vectorize[lanes](H, add_deviations)
    var correction = deviations.total() / Scalar[accum](H)
    var variance = squares.total() / Scalar[accum](H) - correction * correction
    return RowStatistics(first_mean + correction, 1 / sqrt(variance + eps))


def backward_fast_cpu[dtype: DType, //](t: BackwardTensors[dtype]):
    """Two products: dln, whose rows are finished while they are in cache, and dW."""
    var rows = Int(t.sizes.rows())
    var H = Int(t.sizes.hidden_dim)
    var O = Int(t.sizes.output_dim)
    comptime accum = accum_type[dtype]
    var stride = padded_columns[accum](H)
    var panels = aligned_alloc[accum](O * stride)
    pack_columns(panels, Matrix[dtype, False](t.linear_weight, H), H, 0, O)

    var block = block_rows(rows, H)
    var blocks = ceildiv(rows, block)
    var scratch = block * stride + BLOCK_ROWS * PANEL_DEPTH
    var memory = aligned_alloc[accum](workers(blocks) * scratch)
    # The sums over the rows of each block: dgamma [H], dbeta [H], db [O].
    var partials = aligned_alloc[accum](blocks * (2 * H + O))

    def backward_block(index: Int, worker: Int) {imm}:
        var first = index * block
        var count = min(block, rows - first)
        var dln = memory.unsafe_offset(worker * scratch)

        # Linear: dln = dY W.
        multiply_block[accum](
            dln,
            stride,
            Matrix[dtype, True](t.grad_output, O),
            panels.as_imm(),
            dln.unsafe_offset(block * stride),
            first,
            count,
            0,
            O,
            False,
        )
        # LayerNorm: c1 and c2 of every row, then dx; the sums over these rows.
        backward_rows[dtype](
            t.grad_input,
            partials.unsafe_offset(index * (2 * H + O)),
            dln.as_imm(),
            stride,
            t.grad_output,
            t.input,
            t.mean,
            t.rstd,
            t.ln_weight,
            first,
            first + count,
            H,
            O,
        )

    share_blocks(blocks, backward_block)
    sum_blocks(t.grad_ln_weight, t.grad_ln_bias, t.grad_bias, partials.as_imm(), blocks, H, O)
    partials.unsafe_free()
    memory.unsafe_free()
    panels.unsafe_free()
    weight_gradient(
        t.grad_weight,
        Matrix[dtype, False](t.grad_output, O),
        Normalised[dtype, False](t.input, t.mean, t.rstd, t.ln_weight, t.ln_bias, H),
        rows,
        H,
        O,
    )


def weight_gradient[
    dtype: DType
](
    grad_weight: MutPtr[dtype],  # [O, H]
    dy: Matrix[dtype, False],  # [rows, O]
    ln_out: Normalised[dtype, False],  # [rows, H]
    rows: Int,
    H: Int,
    O: Int,
):
    """Linear: dW = dY^T ln_out, over one chunk of rows after the other."""
    comptime accum = accum_type[dtype]
    var stride = padded_columns[accum](H)
    var most = max(PANEL_DEPTH, CHUNK_ELEMENTS // stride // PANEL_DEPTH * PANEL_DEPTH)
    var chunk = max(1, min(rows, most))
    var panels = aligned_alloc[accum](chunk * stride)
    var block = block_rows(O, H)
    var blocks = ceildiv(O, block)
    var sums = aligned_alloc[accum](blocks * block * stride)
    var packed = aligned_alloc[accum](workers(blocks) * BLOCK_ROWS * PANEL_DEPTH)
    for row in range(0, rows, chunk):
        var count = min(chunk, rows - row)
        pack_columns(panels, ln_out, H, row, count)

        def add_chunk(index: Int, worker: Int) {imm}:
            multiply_block[accum](
                sums.unsafe_offset(index * block * stride),
                stride,
                dy,
                panels.as_imm(),
                packed.unsafe_offset(worker * BLOCK_ROWS * PANEL_DEPTH),
                index * block,
                min(block, O - index * block),
                row,
                count,
                row > 0,
            )

        share_blocks(blocks, add_chunk)

    def store_block(index: Int, worker: Int) {imm}:
        for o in range(index * block, min((index + 1) * block, O)):
            var dW = grad_weight.unsafe_offset(o * H)
            var row_sums = sums.unsafe_offset(o * stride)

            def store[width: Int](h: Int) {imm}:
                var sum = row_sums.unsafe_load[width=width](h) if rows > 0 else SIMD[accum, width](0)
                dW.unsafe_store(h, sum.cast[dtype]())

            vectorize[simd_width_of[accum]()](H, store)

    share_blocks(blocks, store_block)
    packed.unsafe_free()
    sums.unsafe_free()
    panels.unsafe_free()


def backward_rows[
    dtype: DType
](
    grad_input: MutPtr[dtype],  # [rows, H]
    sums: MutPtr[accum_type[dtype]],  # dgamma [H], dbeta [H], db [O], of these rows
    dln: ImmPtr[accum_type[dtype]],  # [last_row - first_row, H], rows `stride` apart
    stride: Int,
    grad_output: ImmPtr[dtype],  # [rows, O], dy
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    first_row: Int,
    last_row: Int,
    H: Int,
    O: Int,
):
    """The rows [first_row, last_row): dx, and their sums of dln * x_hat, dln and dy."""
    comptime accum = accum_type[dtype]
    comptime lanes = simd_width_of[accum]()
    var excess = aligned_alloc[accum](2 * H + O)
    for i in range(2 * H + O):
        sums[unsafe_offset=i] = 0
        excess[unsafe_offset=i] = 0
    for row in range(first_row, last_row):
        var x = input.unsafe_offset(row * H)
        var dx = grad_input.unsafe_offset(row * H)
        var dy = grad_output.unsafe_offset(row * O)
        var row_dln = dln.unsafe_offset((row - first_row) * stride)
        var row_mean = mean[unsafe_offset=row]
        var row_rstd = rstd[unsafe_offset=row]

        # The two means over the row: c1 = mean_h(g * x_hat), c2 = mean_h(g), g = dln * gamma.
        var sum_g_x_hat = VectorSum[accum]()
        var sum_g = VectorSum[accum]()

        def add_terms[width: Int](h: Int) {mut sum_g_x_hat, mut sum_g, imm}:
            var x_hat = (x.unsafe_load[width=width](h).cast[accum]() - row_mean) * row_rstd
            var g = row_dln.unsafe_load[width=width](h) * ln_weight.unsafe_load[width=width](h).cast[accum]()
            sum_g_x_hat.add(g * x_hat)
            sum_g.add(g)

        vectorize[lanes](H, add_terms)
        var c1 = sum_g_x_hat.total() / Scalar[accum](H)
        var c2 = sum_g.total() / Scalar[accum](H)

        # dx = rstd * (g - c2 - x_hat * c1), and this row's share of dgamma, dbeta and db.
        def finish[width: Int](h: Int) {imm}:
            var x_hat = (x.unsafe_load[width=width](h).cast[accum]() - row_mean) * row_rstd
            var dln_h = row_dln.unsafe_load[width=width](h)
            var g = rounded_product(dln_h, ln_weight.unsafe_load[width=width](h).cast[accum]())
            dx.unsafe_store(h, (row_rstd * (g - c2 - x_hat * c1)).cast[dtype]())
            add_compensated(sums, excess, h, dln_h * x_hat)
            add_compensated(sums, excess, H + h, dln_h)

        vectorize[lanes](H, finish)

        def add_dy[width: Int](o: Int) {imm}:
            add_compensated(sums, excess, 2 * H + o, dy.unsafe_load[width=width](o).cast[accum]())

        vectorize[lanes](O, add_dy)
    excess.unsafe_free()


def sum_blocks[
    dtype: DType
](
    grad_ln_weight: MutPtr[dtype],  # [H]
    grad_ln_bias: MutPtr[dtype],  # [H]
    grad_bias: MutPtr[dtype],  # [O]
    partials: ImmPtr[accum_type[dtype]],  # [blocks, H + H + O]
    blocks: Int,
    H: Int,
    O: Int,
):
    """Adds the sums of all blocks, compensated, in the order of the blocks."""
    comptime accum = accum_type[dtype]
    comptime COLUMNS = 64  # of one task
    var columns = 2 * H + O

    def sum_columns(task: Int, worker: Int) {imm}:
        for column in range(task * COLUMNS, min((task + 1) * COLUMNS, columns)):
            var sum = CompensatedSum[accum]()
            for block in range(blocks):
                sum += partials[unsafe_offset=block * columns + column]
            var gradient = sum.total.cast[dtype]()
            if column < H:
                grad_ln_weight[unsafe_offset=column] = gradient
            elif column < 2 * H:
                grad_ln_bias[unsafe_offset=column - H] = gradient
            else:
                grad_bias[unsafe_offset=column - 2 * H] = gradient

    share_blocks(ceildiv(columns, COLUMNS), sum_columns)
