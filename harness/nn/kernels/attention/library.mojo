"""Attention's kernels as C functions: one library per part, which is a dtype with a feature, or `plan`, which
selects kernels.

`harness/nn/host/attention.cpp` calls `workbook_attention_plan` in part `plan`, which returns the kernels and
their part, then that part's functions with the same words (`call.mojo`).
"""

from std.sys.defines import get_defined_string

from common.calls import Words, call, open_gpu, write_message
from common.stream_launcher import StreamLauncher

from attention.call import Call, input_pointer, output_pointer
from attention.choice import HOPPER, MMA, MMA_MASK, WGMMA, WGMMA_MASK, choose
from attention.dropout_launches import launch_backward_dropout, launch_forward_dropout
from attention.hopper_launches import launch_backward_wgmma, launch_forward_wgmma
from attention.kernels_launches import launch_backward_tiles, launch_delta_rows, launch_forward_tiles
from attention.mask_gradient import MaskGradient, launch_mask_gradient
from attention.varlen_launches import launch_backward_varlen, launch_forward_varlen
from shared.common import ImmPtr, accum_type

comptime PART = get_defined_string["PART", "bfloat16"]()
comptime dtype = DType.float16 if PART.startswith("float16") else DType.bfloat16


def has[kernel: Int]() -> Bool:
    """Return whether this part of the library contains these kernels."""
    comptime if PART == "float16" or PART == "bfloat16":
        return kernel == (WGMMA if HOPPER else MMA)
    elif PART.endswith("_mask"):
        return kernel == (WGMMA_MASK if HOPPER else MMA_MASK)
    elif PART.endswith("_portable"):
        return HOPPER and (kernel == MMA or kernel == MMA_MASK)
    else:
        return False


def forward(mut words: Words, mut launcher: StreamLauncher) raises:
    """Launch the forward pass: output and lse."""
    var arguments = Call(words)
    var t = arguments.forward[dtype]()
    comptime if PART.endswith("_varlen"):
        launch_forward_varlen(launcher, t, arguments.layout)
    elif PART.endswith("_dropout"):
        launch_forward_dropout(launcher, t, arguments.layout, arguments.draws, arguments.kernel <= WGMMA_MASK)
    else:
        if arguments.kernel == WGMMA:
            comptime if has[WGMMA]():
                launch_forward_wgmma[False](launcher, t, arguments.layout)
        elif arguments.kernel == WGMMA_MASK:
            comptime if has[WGMMA_MASK]():
                launch_forward_wgmma[True](launcher, t, arguments.layout)
        elif arguments.kernel == MMA:
            comptime if has[MMA]():
                launch_forward_tiles[False](launcher, t, arguments.layout)
        else:
            comptime if has[MMA_MASK]():
                launch_forward_tiles[True](launcher, t, arguments.layout)


def backward(mut words: Words, mut launcher: StreamLauncher) raises:
    """Launch the backward pass: the gradients of query, key and value; delta is passed in or computed from
    the output.
    """
    var arguments = Call(words)
    var t = arguments.backward[dtype]()
    var output = input_pointer[dtype](arguments.output)
    comptime if PART.endswith("_dropout"):
        launch_backward_dropout(
            launcher, t, output, arguments.layout, arguments.draws, arguments.kernel <= WGMMA_MASK
        )
        return
    comptime if has[WGMMA]() or has[WGMMA_MASK]():
        if not arguments.delta and not arguments.grad_lse:
            launch_backward_wgmma[has[WGMMA_MASK]()](launcher, t, output, arguments.layout)
            return
    if not arguments.delta:
        t.delta = launch_delta(launcher, arguments)
    comptime if PART.endswith("_varlen"):
        launch_backward_varlen(launcher, t, arguments.layout)
    elif has[WGMMA]() or has[WGMMA_MASK]():
        launch_backward_wgmma[has[WGMMA_MASK]()](launcher, t, None, arguments.layout)
    else:
        if arguments.kernel == MMA:
            comptime if has[MMA]():
                launch_backward_tiles[False](launcher, t, arguments.layout)
        else:
            comptime if has[MMA_MASK]():
                launch_backward_tiles[True](launcher, t, arguments.layout)


def launch_delta(mut launcher: StreamLauncher, arguments: Call) raises -> ImmPtr[accum_type[dtype]]:
    """Launch delta = rowsum(dO * O), minus grad_lse if there is one, and return its address."""
    var delta = launcher.workspace[DType.float32]("delta", arguments.sizes.rows())
    launch_delta_rows(
        launcher,
        delta,
        input_pointer[dtype](arguments.grad_output),
        input_pointer[dtype](arguments.output),
        input_pointer[DType.float32](arguments.grad_lse),
        arguments.grad_lse != 0,
        arguments.sizes,
        arguments.layout,
    )
    return rebind[ImmPtr[accum_type[dtype]]](delta.as_imm())


def mask_gradient(mut words: Words, mut launcher: StreamLauncher) raises:
    """Launch the gradient of a mask, stored with the mask's strides."""
    var arguments = Call(words)
    var tensors = MaskGradient[dtype](
        grad_mask=output_pointer[dtype](arguments.grad_mask),
        grad_output=input_pointer[dtype](arguments.grad_output),
        query=input_pointer[dtype](arguments.query),
        key=input_pointer[dtype](arguments.key),
        value=input_pointer[dtype](arguments.value),
        lse=input_pointer[accum_type[dtype]](arguments.lse),
        delta=launch_delta(launcher, arguments),
        mask=input_pointer[dtype](arguments.mask),
        sizes=arguments.sizes.copy(),
        scale=arguments.scale.cast[accum_type[dtype]](),
    )
    launch_mask_gradient(launcher, tensors, arguments.layout)


@export("workbook_open")
def workbook_open(index: Int64, message: Int, capacity: Int64) abi("C") -> Int64:
    """Return a handle to GPU `index`, or a dummy handle in part `plan`, which needs no GPU."""
    comptime if PART == "plan":
        return 1
    else:
        return open_gpu(index, message, capacity)


@export("workbook_attention_plan")
def workbook_attention_plan(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    """Return the kernel selection encoded as kernels + 8 * part, 0 for PyTorch's own operations. The message
    is the reason why no faster kernels support the call.
    """
    var arguments = Words(words)
    arguments.position = 4
    var call_arguments = Call(arguments)
    var choice = choose(call_arguments, call_arguments.kernel)
    write_message(choice.reason, message, Int(capacity))
    return Int64(choice.kernel + 8 * choice.part)


@export("workbook_attention_forward")
def workbook_attention_forward(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    comptime if PART == "plan":
        return -1
    else:
        return call[forward](words, message, capacity)


@export("workbook_attention_backward")
def workbook_attention_backward(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    comptime if PART == "plan":
        return -1
    else:
        return call[backward](words, message, capacity)


@export("workbook_attention_mask_gradient")
def workbook_attention_mask_gradient(words: Int, message: Int, capacity: Int64) abi("C") -> Int64:
    """Launch the mask's gradient; only parts with masks have its kernel."""
    comptime if PART.endswith("_mask"):
        return call[mask_gradient](words, message, capacity)
    else:
        return -1
