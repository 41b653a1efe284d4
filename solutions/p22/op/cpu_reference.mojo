"""The CPU path of puzzle 22: ordinary loops in the order of the formulas, to be read before the GPU kernels.

The phase comments are the same as in the kernels of `layernorm_linear.mojo`, so that both can be read side by
side. Pointers and shapes are the same too. Sums are float64 for every dtype: this path is the reference.
"""

from layout import TileTensor
from layout.tile_layout import row_major

from .shared.common import ImmPtr, MutPtr, accum_type, rounded_product, row_statistics
from .tensors import BackwardTensors, ForwardTensors

comptime accum = DType.float64
"""The accumulation type on the CPU."""


def row_statistics_cpu[
    dtype: DType
](
    mean: MutPtr[accum_type[dtype]],  # [rows]
    rstd: MutPtr[accum_type[dtype]],  # [rows]
    input: ImmPtr[dtype],  # [rows, H]
    rows: Int,
    H: Int,
    eps: Scalar[accum_type[dtype]],
):
    """Compute mean and rstd of every row."""
    for row in range(rows):
        var statistics = row_statistics(input, row, H, eps)
        mean[unsafe_offset=row] = statistics.mean
        rstd[unsafe_offset=row] = statistics.rstd


def layernorm_cpu[
    dtype: DType
](
    ln_out: MutPtr[dtype],  # [rows, H]
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    ln_bias: ImmPtr[dtype],  # [H], beta
    rows: Int,
    H: Int,
):
    """Compute LayerNorm from statistics: ln_out = (input - mean) * rstd * gamma + beta."""
    var x = TileTensor(input, row_major(rows, H))
    var y = TileTensor(ln_out, row_major(rows, H))
    for row in range(rows):
        for h in range(H):
            var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row].cast[accum]()
            var x_hat = deviation * rstd[unsafe_offset=row].cast[accum]()
            var gamma = ln_weight[unsafe_offset=h].cast[accum]()
            var beta = ln_bias[unsafe_offset=h].cast[accum]()
            y[row, h] = (x_hat * gamma + beta).cast[dtype]()


def forward_unfused_cpu[
    dtype: DType, //
](t: ForwardTensors[dtype], ln_out: MutPtr[dtype],):  # [rows, H], workspace
    """Compute statistics, LayerNorm, matmul and bias in separate loops; ln_out goes through memory."""
    var rows = Int(t.sizes.rows())
    var H = Int(t.sizes.hidden_dim)
    var O = Int(t.sizes.output_dim)
    row_statistics_cpu[dtype](t.mean, t.rstd, t.input, rows, H, t.eps)
    layernorm_cpu(ln_out, t.input, t.mean.as_imm(), t.rstd.as_imm(), t.ln_weight, t.ln_bias, rows, H)
    var z = TileTensor(ln_out, row_major(rows, H))
    var y = TileTensor(t.output, row_major(rows, O))
    var W = TileTensor(t.linear_weight, row_major(O, H))
    for row in range(rows):
        for o in range(O):
            var total = Scalar[accum](0)
            for h in range(H):
                total += z[row, h].cast[accum]() * W[o, h].cast[accum]()
            var bias = t.linear_bias[unsafe_offset=o].cast[accum]()
            y[row, o] = (total + bias).cast[dtype]()


def forward_fused_cpu[dtype: DType, //](t: ForwardTensors[dtype]):
    """Compute everything in one loop over rows; the normalised row is never stored."""
    var rows = Int(t.sizes.rows())
    var H = Int(t.sizes.hidden_dim)
    var O = Int(t.sizes.output_dim)
    var x = TileTensor(t.input, row_major(rows, H))
    var y = TileTensor(t.output, row_major(rows, O))
    var W = TileTensor(t.linear_weight, row_major(O, H))
    for row in range(rows):
        # Phase 1: the statistics of this row, saved for the backward pass.
        var statistics = row_statistics(t.input, row, H, t.eps)
        t.mean[unsafe_offset=row] = statistics.mean
        t.rstd[unsafe_offset=row] = statistics.rstd

        # Phase 2: normalise, scale, shift and multiply, element by element.
        for o in range(O):
            var total = Scalar[accum](0)
            for h in range(H):
                var deviation = x[row, h].cast[accum]() - statistics.mean.cast[accum]()
                var x_hat = deviation * statistics.rstd.cast[accum]()
                var gamma = t.ln_weight[unsafe_offset=h].cast[accum]()
                var beta = t.ln_bias[unsafe_offset=h].cast[accum]()
                total += (x_hat * gamma + beta) * W[o, h].cast[accum]()
            var bias = t.linear_bias[unsafe_offset=o].cast[accum]()
            y[row, o] = (total + bias).cast[dtype]()


def row_sums_cpu[
    dtype: DType
](
    row_sums: MutPtr[accum_type[dtype]],  # [rows, 2]: c1, c2
    dln: ImmPtr[dtype],  # [rows, H], the gradient of the LayerNorm output
    input: ImmPtr[dtype],  # [rows, H]
    mean: ImmPtr[accum_type[dtype]],  # [rows]
    rstd: ImmPtr[accum_type[dtype]],  # [rows]
    ln_weight: ImmPtr[dtype],  # [H], gamma
    rows: Int,
    H: Int,
):
    """Compute two means per row for dx: c1 = mean_h(g * x_hat), c2 = mean_h(g), g = dln * gamma."""
    var x = TileTensor(input, row_major(rows, H))
    var dy_ln = TileTensor(dln, row_major(rows, H))
    for row in range(rows):
        var c1 = Scalar[accum](0)
        var c2 = Scalar[accum](0)
        for h in range(H):
            var deviation = x[row, h].cast[accum]() - mean[unsafe_offset=row].cast[accum]()
            var x_hat = deviation * rstd[unsafe_offset=row].cast[accum]()
            var g = dy_ln[row, h].cast[accum]() * ln_weight[unsafe_offset=h].cast[accum]()
            c1 += g * x_hat
            c2 += g
        row_sums[unsafe_offset=2 * row] = (c1 / Scalar[accum](H)).cast[accum_type[dtype]]()
        row_sums[unsafe_offset=2 * row + 1] = (c2 / Scalar[accum](H)).cast[accum_type[dtype]]()


def backward_unfused_cpu[
    dtype: DType, //
](
    t: BackwardTensors[dtype],
    ln_out: MutPtr[dtype],  # [rows, H], workspace
    dln: MutPtr[dtype],  # [rows, H], workspace
    row_sums: MutPtr[accum_type[dtype]],  # [rows, 2], workspace
):
    """Compute each gradient in a separate loop; dln and the recomputed ln_out go through memory."""
    var rows = Int(t.sizes.rows())
    var H = Int(t.sizes.hidden_dim)
    var O = Int(t.sizes.output_dim)
    var x = TileTensor(t.input, row_major(rows, H))
    var dy = TileTensor(t.grad_output, row_major(rows, O))
    var dx = TileTensor(t.grad_input, row_major(rows, H))
    var W = TileTensor(t.linear_weight, row_major(O, H))
    var dW = TileTensor(t.grad_weight, row_major(O, H))
    var z = TileTensor(ln_out, row_major(rows, H))
    var dy_ln = TileTensor(dln, row_major(rows, H))

    # Linear: dln = dY W, dW = dY^T ln_out, db = sum of dY.
    for row in range(rows):
        for h in range(H):
            var total = Scalar[accum](0)
            for o in range(O):
                total += dy[row, o].cast[accum]() * W[o, h].cast[accum]()
            dy_ln[row, h] = total.cast[dtype]()
    layernorm_cpu(ln_out, t.input, t.mean, t.rstd, t.ln_weight, t.ln_bias, rows, H)
    for o in range(O):
        var db = Scalar[accum](0)
        for row in range(rows):
            db += dy[row, o].cast[accum]()
        t.grad_bias[unsafe_offset=o] = db.cast[dtype]()
        for h in range(H):
            var total = Scalar[accum](0)
            for row in range(rows):
                total += dy[row, o].cast[accum]() * z[row, h].cast[accum]()
            dW[o, h] = total.cast[dtype]()

    # LayerNorm: c1 and c2, then dx; dgamma and dbeta.
    row_sums_cpu[dtype](row_sums, dln.as_imm(), t.input, t.mean, t.rstd, t.ln_weight, rows, H)
    for h in range(H):
        var gamma = t.ln_weight[unsafe_offset=h].cast[accum]()
        var dgamma = Scalar[accum](0)
        var dbeta = Scalar[accum](0)
        for row in range(rows):
            var row_rstd = t.rstd[unsafe_offset=row].cast[accum]()
            var x_hat = (x[row, h].cast[accum]() - t.mean[unsafe_offset=row].cast[accum]()) * row_rstd
            var dln_h = dy_ln[row, h].cast[accum]()
            dgamma += dln_h * x_hat
            dbeta += dln_h
            var c1 = row_sums[unsafe_offset=2 * row].cast[accum]()
            var c2 = row_sums[unsafe_offset=2 * row + 1].cast[accum]()
            dx[row, h] = (row_rstd * (rounded_product(dln_h, gamma) - c2 - x_hat * c1)).cast[dtype]()
        t.grad_ln_weight[unsafe_offset=h] = dgamma.cast[dtype]()
        t.grad_ln_bias[unsafe_offset=h] = dbeta.cast[dtype]()


def backward_fused_cpu[
    dtype: DType, //
](t: BackwardTensors[dtype], sums: MutPtr[accum],):  # [O * H + O + 3 * H], workspace
    """Compute all five gradients in one loop over rows. A single loop needs no atomics, and keeps only one row of dln.
    """
    var rows = Int(t.sizes.rows())
    var H = Int(t.sizes.hidden_dim)
    var O = Int(t.sizes.output_dim)
    var x = TileTensor(t.input, row_major(rows, H))
    var dy = TileTensor(t.grad_output, row_major(rows, O))
    var dx = TileTensor(t.grad_input, row_major(rows, H))
    var W = TileTensor(t.linear_weight, row_major(O, H))

    # The workspace holds the sums dW, db, dgamma, dbeta, which start at zero, and one row of dln.
    var dW = TileTensor(sums, row_major(O, H))
    var db = sums.unsafe_offset(O * H)
    var dgamma = db.unsafe_offset(O)
    var dbeta = dgamma.unsafe_offset(H)
    var dln = dbeta.unsafe_offset(H)
    for i in range(O * H + O + 2 * H):
        sums[unsafe_offset=i] = 0

    for row in range(rows):
        # Phase 1: the statistics that the forward pass saved for this row.
        var row_mean = t.mean[unsafe_offset=row].cast[accum]()
        var row_rstd = t.rstd[unsafe_offset=row].cast[accum]()

        # Phase 2: the gradient of the linear bias.
        for o in range(O):
            db[unsafe_offset=o] += dy[row, o].cast[accum]()

        # Phase 3: the gradient of the linear weight, from the LayerNorm output, which is recomputed here.
        for h in range(H):
            var x_hat = (x[row, h].cast[accum]() - row_mean) * row_rstd
            var gamma = t.ln_weight[unsafe_offset=h].cast[accum]()
            var ln_out = x_hat * gamma + t.ln_bias[unsafe_offset=h].cast[accum]()
            for o in range(O):
                dW[o, h] += dy[row, o].cast[accum]() * ln_out

        # Phase 4: the gradients of the LayerNorm weight and bias.
        for h in range(H):
            var x_hat = (x[row, h].cast[accum]() - row_mean) * row_rstd
            var dln_h = Scalar[accum](0)
            for o in range(O):
                dln_h += dy[row, o].cast[accum]() * W[o, h].cast[accum]()
            dln[unsafe_offset=h] = dln_h
            dgamma[unsafe_offset=h] += dln_h * x_hat
            dbeta[unsafe_offset=h] += dln_h

        # Phase 5: the gradient of the input. Every element affects its row's mean and variance, so c1 and c2,
        # two means over the whole row, are needed before any element can be finished.
        var c1 = Scalar[accum](0)
        var c2 = Scalar[accum](0)
        for h in range(H):
            var x_hat = (x[row, h].cast[accum]() - row_mean) * row_rstd
            var g = dln[unsafe_offset=h] * t.ln_weight[unsafe_offset=h].cast[accum]()
            c1 += g * x_hat
            c2 += g
        c1 /= Scalar[accum](H)
        c2 /= Scalar[accum](H)
        for h in range(H):
            var x_hat = (x[row, h].cast[accum]() - row_mean) * row_rstd
            var g = rounded_product(dln[unsafe_offset=h], t.ln_weight[unsafe_offset=h].cast[accum]())
            dx[row, h] = (row_rstd * (g - c2 - x_hat * c1)).cast[dtype]()

    # Round the sums to the dtype of the gradients.
    convert_cpu(t.grad_weight, sums.as_imm(), O * H)
    convert_cpu(t.grad_bias, db.as_imm(), O)
    convert_cpu(t.grad_ln_weight, dgamma.as_imm(), H)
    convert_cpu(t.grad_ln_bias, dbeta.as_imm(), H)


def convert_cpu[dtype: DType](target: MutPtr[dtype], source: ImmPtr[accum], count: Int):
    """Round `count` sums to the dtype of the gradients."""
    for i in range(count):
        target[unsafe_offset=i] = source[unsafe_offset=i].cast[dtype]()
