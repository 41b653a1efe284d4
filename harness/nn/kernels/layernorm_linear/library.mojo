"""LayerNorm + Linear as a library of C functions, in parts by dtype (see `common/calls.mojo`).

PART is the dtype of the products: bfloat16, float16, or float32. With the suffix "_mixed", x, gamma, beta and
their gradients are float32 and the products are 16-bit, as under autocast.
"""

from std.sys.defines import get_defined_string

from common.calls import Words, call, open_gpu
from common.stream_launcher import StreamLauncher
from layernorm_linear.launches import DLN_COMPUTED, LN_OUT_REQUESTED, launch_forward_hopper, launch_gradients
from layernorm_linear.forward import launch_layernorm
from layernorm_linear.pairs import launch_backward_pairs, launch_forward_pairs
from layernorm_linear.plan import Problem, pack_choice
from layernorm_linear.small import (
    launch_backward_small,
    launch_forward_small,
    suits_small_backward,
    suits_small_forward,
)
from layernorm_linear.tensors import BackwardTensors, ForwardTensors, Sizes
from shared.common import accum_type

comptime PART = get_defined_string["PART", "bfloat16"]()
comptime IS_FLOAT32 = PART == "float32"
comptime dtype = DType.float32 if IS_FLOAT32 else (
    DType.bfloat16 if PART == "bfloat16" or PART == "bfloat16_mixed" else DType.float16
)
comptime x_dtype = DType.float32 if PART == "bfloat16_mixed" or PART == "float16_mixed" else dtype
comptime stat = accum_type[dtype]
"""The dtype of mean and rstd."""

comptime SPLIT_FLOAT32 = 1
"""Bit of a call's options: compute float32 products as split float16."""
comptime LEAST_MEMORY = 2
"""Bit of a call's options: use the least memory."""


def read_sizes(mut words: Words) -> Sizes:
    """Read the next three words: rows, H, O."""
    var rows = Int32(words.integer())
    var hidden_dim = Int32(words.integer())
    return Sizes(rows, 1, hidden_dim, Int32(words.integer()))


def forward(mut words: Words, mut launcher: StreamLauncher) raises:
    """Launch the forward pass. 12 words: rows, H, O, eps; y, mean, rstd; x, gamma, beta, W, bias."""
    var sizes = read_sizes(words)
    var eps = words.float().cast[stat]()
    # Arguments are evaluated in this order.
    var t = ForwardTensors[dtype, x_dtype](
        output=words.output[dtype](),
        mean=words.output[stat](),
        rstd=words.output[stat](),
        input=words.input[x_dtype](),
        ln_weight=words.input[x_dtype](),
        ln_bias=words.input[x_dtype](),
        linear_weight=words.input[dtype](),
        linear_bias=words.input[dtype](),
        sizes=sizes^,
        eps=eps,
    )
    comptime if StreamLauncher.wgmma and IS_FLOAT32:
        launch_forward_pairs(launcher, rebind[ForwardTensors[DType.float32, DType.float32]](t))
    elif StreamLauncher.wgmma:
        comptime if dtype == x_dtype:
            if suits_small_forward(t.sizes):
                launch_forward_small(launcher, rebind[ForwardTensors[dtype, dtype]](t))
                return
        launch_forward_hopper(launcher, t)


def rows(mut words: Words, mut launcher: StreamLauncher) raises:
    """Launch the LayerNorm before a product that PyTorch computes. 11 words: rows, H, O, eps; ln_out, mean,
    rstd; x, gamma, beta; and the row pitch of ln_out, with zeros from column H on.
    """
    var sizes = read_sizes(words)
    var eps = words.float().cast[stat]()
    var ln_out = words.output[dtype]()
    var mean = words.output[stat]()
    var rstd = words.output[stat]()
    var input = words.input[x_dtype]()
    var ln_weight = words.input[x_dtype]()
    var ln_bias = words.input[x_dtype]()
    launch_layernorm(launcher, ln_out, mean, rstd, input, ln_weight, ln_bias, sizes, eps, words.integer())


def backward(mut words: Words, mut launcher: StreamLauncher) raises:
    """Launch the backward pass. 18 words: rows, H, O, what to compute (the bits in `launches.mojo`); dx,
    dgamma, dbeta, dW, db; dY, x, mean, rstd, gamma, beta, W; dln and ln_out if the caller computes the
    products.
    """
    var sizes = read_sizes(words)
    var requested = words.integer()
    # Arguments are evaluated in this order.
    var t = BackwardTensors[dtype, x_dtype](
        grad_input=words.output[x_dtype](),
        grad_ln_weight=words.output[x_dtype](),
        grad_ln_bias=words.output[x_dtype](),
        grad_weight=words.output[dtype](),
        grad_bias=words.output[dtype](),
        grad_output=words.input[dtype](),
        input=words.input[x_dtype](),
        mean=words.input[stat](),
        rstd=words.input[stat](),
        ln_weight=words.input[x_dtype](),
        ln_bias=words.input[x_dtype](),
        linear_weight=words.input[dtype](),
        sizes=sizes^,
    )
    var dln = words.output[dtype]()
    var ln_out = words.output[dtype]()
    var computes_products = requested & (DLN_COMPUTED | LN_OUT_REQUESTED) == 0
    comptime if StreamLauncher.wgmma and IS_FLOAT32:
        if computes_products:
            launch_backward_pairs(
                launcher, rebind[BackwardTensors[DType.float32, DType.float32]](t), requested
            )
            return
    comptime if StreamLauncher.wgmma and not IS_FLOAT32 and dtype == x_dtype:
        if computes_products and suits_small_backward(t.sizes):
            launch_backward_small(launcher, rebind[BackwardTensors[dtype, dtype]](t), requested)
            return
    launch_gradients(launcher, t, requested, dln, ln_out)


@export("workbook_open")
def workbook_open(index: Int64, message: Int, capacity: Int64) abi("C") -> Int64:
    """Return a handle to GPU `index`."""
    return open_gpu(index, message, capacity)


@export("workbook_layernorm_linear_forward")
def workbook_layernorm_linear_forward(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    """Launch the forward pass with this project's GEMM."""
    return call[forward](words, message, capacity)


@export("workbook_layernorm_linear_rows")
def workbook_layernorm_linear_rows(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    """Launch the LayerNorm of the forward pass."""
    return call[rows](words, message, capacity)


@export("workbook_layernorm_linear_backward")
def workbook_layernorm_linear_backward(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    """Launch the backward pass, without the products that PyTorch computes."""
    return call[backward](words, message, capacity)


@export("workbook_layernorm_linear_plan")
def workbook_layernorm_linear_plan(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    """Return the GEMM selection (see `plan.mojo`). 6 words: rows, H, O; whether W is transposed;
    SPLIT_FLOAT32 + LEAST_MEMORY; whether a CUDA graph captures the call.
    """
    var arguments = Words(words)
    var rows = arguments.integer()
    var H = arguments.integer()
    var O = arguments.integer()
    var transposed = arguments.integer() != 0
    var options = arguments.integer()
    var captured = arguments.integer() != 0
    var problem = Problem(
        rows, H, O, transposed, options & LEAST_MEMORY != 0, captured, options & SPLIT_FLOAT32 != 0
    )
    return Int64(pack_choice[StreamLauncher.wgmma, dtype, x_dtype](problem))
