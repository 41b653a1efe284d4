"""Puzzle 23 as a Python extension module: the shortest way from PyTorch to the kernels of the fast variant.

`harness.toolchain.extension` builds this file for one GPU architecture and loads it. Every function takes addresses and sizes as
integers, and launches on the stream whose handle it is given (`common/stream_launcher.mojo`). Scratch memory is the caller's.
Arguments are not checked here.
"""

from std.os import abort
from std.python import Python, PythonObject
from std.python.bindings import PyObjectPtr, PythonModuleBuilder, _set_python_error

from attention.dropout import Draws
from attention.dropout_launches import launch_backward_dropout, launch_forward_dropout
from attention.scores import Strides
from attention.launches import (
    launch_backward_fast,
    launch_delta_fast,
    launch_forward_fast,
    launch_gradients_fast,
)
from attention.layout import Layout
from attention.mask_gradient import MaskGradient, launch_mask_gradient_fast
from attention.varlen_launches import launch_backward_varlen, launch_forward_varlen
from attention.tensors import FlashBackward, FlashForward, FlashSizes
from shared.common import accum_type
from common.stream_launcher import Arguments, StreamLauncher, open_gpu


def sizes_of(mut arguments: Arguments) -> FlashSizes:
    """The next twelve arguments, in the order of the fields."""
    var numbers = List[Int32]()
    for _ in range(12):
        numbers.append(Int32(arguments.integer()))
    return FlashSizes(
        numbers[0],
        numbers[1],
        numbers[2],
        numbers[3],
        numbers[4],
        numbers[5],
        numbers[6],
        numbers[7],
        numbers[8],
        numbers[9],
        numbers[10],
        numbers[11],
    )


def strides_of(mut arguments: Arguments) -> Strides:
    """The next three arguments: how far apart batches, heads and rows are, in elements."""
    var strides = Strides(0)
    for axis in range(3):
        strides[axis] = Int64(arguments.integer())
    return strides


def draws_of(mut arguments: Arguments) -> Draws:
    """The next two arguments: the address of the state that is drawn from, and how many elements of 65,536 are kept.
    """
    var state = arguments.read[DType.uint32]()
    return Draws(state, Int32(arguments.integer()))


def run_forward[
    part: StaticString, dtype: DType
](mut arguments: Arguments, mut launcher: StreamLauncher, choice: Int) raises:
    """Sizes, scale, the addresses of output, lse, query, key, value and mask, and strides: query, key, value, output.

    `choice` is 1 for the portable kernels, 0 for the fastest.
    Where there are several sequences the mask is their offsets, and the size of its blocks their number. With dropout, `draws_of` are last.
    """
    var sizes = sizes_of(arguments)
    var scale = arguments.float().cast[accum_type[dtype]]()
    var layout = Layout.without_gaps(sizes)
    # Taken in this order.
    var tensors = FlashForward[dtype](
        output=arguments.written[dtype](),
        lse=arguments.written[accum_type[dtype]](),
        query=arguments.read[dtype](),
        key=arguments.read[dtype](),
        value=arguments.read[dtype](),
        mask=arguments.read[dtype](),
        sizes=sizes^,
        scale=scale,
    )
    layout.query = strides_of(arguments)
    layout.key = strides_of(arguments)
    layout.value = strides_of(arguments)
    layout.output = strides_of(arguments)
    comptime if part == "forward":
        launch_forward_fast(launcher, tensors, layout, choice == 1)
    elif part == "varlen_forward":
        launch_forward_varlen(launcher, tensors, layout)
    else:
        launch_forward_dropout(launcher, tensors, layout, draws_of(arguments), choice == 1)


def run_delta[dtype: DType](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """Sizes, the addresses of delta, grad_output, output and the gradient of lse, which may be 0, and strides: grad_output,
    output."""
    var sizes = sizes_of(arguments)
    var layout = Layout.without_gaps(sizes)
    var delta = arguments.written[accum_type[dtype]]()
    var grad_output = arguments.read[dtype]()
    var output = arguments.read[dtype]()
    var grad_lse = arguments.read[accum_type[dtype]]()
    layout.grad_output = strides_of(arguments)
    layout.output = strides_of(arguments)
    launch_delta_fast[dtype](
        launcher, delta, grad_output, output, grad_lse, Int(grad_lse) != 0, sizes, layout
    )


def run_backward[
    part: StaticString, dtype: DType
](mut arguments: Arguments, mut launcher: StreamLauncher, choice: Int) raises:
    """Sizes, scale, the addresses of the three gradients, grad_output, query, key, value, lse, delta and mask, and strides:
    query, key, value, grad_output, and the three gradients. `choice` is that of the forward pass.
    """
    var sizes = sizes_of(arguments)
    var scale = arguments.float().cast[accum_type[dtype]]()
    var layout = Layout.without_gaps(sizes)
    # Taken in this order.
    var tensors = FlashBackward[dtype](
        grad_query=arguments.written[dtype](),
        grad_key=arguments.written[dtype](),
        grad_value=arguments.written[dtype](),
        grad_output=arguments.read[dtype](),
        query=arguments.read[dtype](),
        key=arguments.read[dtype](),
        value=arguments.read[dtype](),
        lse=arguments.read[accum_type[dtype]](),
        delta=arguments.read[accum_type[dtype]](),
        mask=arguments.read[dtype](),
        sizes=sizes^,
        scale=scale,
    )
    layout.query = strides_of(arguments)
    layout.key = strides_of(arguments)
    layout.value = strides_of(arguments)
    layout.grad_output = strides_of(arguments)
    layout.grad_query = strides_of(arguments)
    layout.grad_key = strides_of(arguments)
    layout.grad_value = strides_of(arguments)
    comptime if part == "backward":
        launch_backward_fast(launcher, tensors, layout, choice == 1)
    else:
        launch_backward_varlen(launcher, tensors, layout)


def run_gradients[
    part: StaticString, dtype: DType
](mut arguments: Arguments, mut launcher: StreamLauncher, choice: Int) raises:
    """Delta and the backward pass: sizes, scale, the addresses of the three gradients, grad_output, query, key, value, output, lse
    and mask, and strides: query, key, value, grad_output, output, and the three gradients. With dropout,
    `draws_of` are last.
    """
    var sizes = sizes_of(arguments)
    var scale = arguments.float().cast[accum_type[dtype]]()
    var layout = Layout.without_gaps(sizes)
    # Taken in this order.
    var grad_query = arguments.written[dtype]()
    var grad_key = arguments.written[dtype]()
    var grad_value = arguments.written[dtype]()
    var grad_output = arguments.read[dtype]()
    var query = arguments.read[dtype]()
    var key = arguments.read[dtype]()
    var value = arguments.read[dtype]()
    var output = arguments.read[dtype]()
    var lse = arguments.read[accum_type[dtype]]()
    var mask = arguments.read[dtype]()
    layout.query = strides_of(arguments)
    layout.key = strides_of(arguments)
    layout.value = strides_of(arguments)
    layout.grad_output = strides_of(arguments)
    layout.output = strides_of(arguments)
    layout.grad_query = strides_of(arguments)
    layout.grad_key = strides_of(arguments)
    layout.grad_value = strides_of(arguments)
    var tensors = FlashBackward[dtype](
        grad_query=grad_query,
        grad_key=grad_key,
        grad_value=grad_value,
        grad_output=grad_output,
        query=query,
        key=key,
        value=value,
        lse=lse,
        delta=lse,  # not read
        mask=mask,
        sizes=sizes^,
        scale=scale,
    )
    comptime if part == "dropout_backward":
        launch_backward_dropout(launcher, tensors, output, layout, draws_of(arguments), choice == 1)
    else:
        launch_gradients_fast(launcher, tensors, output, layout, choice == 1)


def run_mask_gradient[dtype: DType](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """Sizes, scale, the addresses of the mask's gradient, grad_output, query, key, value, lse, delta and
    mask, and strides: query, key, value, grad_output. The gradient has the mask's strides.
    """
    var sizes = sizes_of(arguments)
    var scale = arguments.float().cast[accum_type[dtype]]()
    var layout = Layout.without_gaps(sizes)
    # Taken in this order.
    var tensors = MaskGradient[dtype](
        grad_mask=arguments.written[dtype](),
        grad_output=arguments.read[dtype](),
        query=arguments.read[dtype](),
        key=arguments.read[dtype](),
        value=arguments.read[dtype](),
        lse=arguments.read[accum_type[dtype]](),
        delta=arguments.read[accum_type[dtype]](),
        mask=arguments.read[dtype](),
        sizes=sizes^,
        scale=scale,
    )
    layout.query = strides_of(arguments)
    layout.key = strides_of(arguments)
    layout.value = strides_of(arguments)
    layout.grad_output = strides_of(arguments)
    launch_mask_gradient_fast(launcher, tensors, layout)


def run[
    part: StaticString, dtype: DType
](mut arguments: Arguments, mut launcher: StreamLauncher, choice: Int) raises:
    """Runs one part of one dtype."""
    comptime if part == "delta":
        run_delta[dtype](arguments, launcher)
    elif part == "mask_gradient":
        run_mask_gradient[dtype](arguments, launcher)
    elif part == "gradients" or part == "dropout_backward":
        run_gradients[part, dtype](arguments, launcher, choice)
    elif part == "forward" or part.endswith("_forward"):
        run_forward[part, dtype](arguments, launcher, choice)
    else:
        run_backward[part, dtype](arguments, launcher, choice)


def call[
    part: StaticString, expected: Int
](module: PyObjectPtr, items: Pointer[PyObjectPtr, MutUntrackedOrigin], count: Int) abi("C") -> PyObjectPtr:
    """One part, of the dtype whose number comes after the launcher's four arguments, and then the choice of kernels. A
    Mojo error becomes a Python exception."""
    try:
        if count != expected:
            raise Error(t"expected {expected} arguments, got {count}")
        var arguments = Arguments(items)
        var launcher = arguments.launcher()
        var kind = arguments.integer()
        var choice = arguments.integer()
        if kind == 2:
            run[part, DType.bfloat16](arguments, launcher, choice)
        elif kind == 3:
            run[part, DType.float16](arguments, launcher, choice)
        else:
            raise Error(t"there are kernels of bfloat16 and float16, got dtype {kind}")
        return Python().cpython().PyLong_FromSsize_t(launcher.used)
    except error:
        _set_python_error(error)
        return PyObjectPtr()


@export
def PyInit_workbook_attention() abi("C") -> PythonObject:
    """Makes the module."""
    try:
        var module = PythonModuleBuilder("workbook_attention")
        module.def_function[open_gpu]("open", docstring="open(index): a handle of a GPU")
        # The launcher's four arguments, the kind, the choice, twelve sizes, the scale, addresses, and three strides a tensor.
        module.def_py_c_function(call["forward", 6 + 12 + 1 + 6 + 12], "forward")
        module.def_py_c_function(call["delta", 6 + 12 + 4 + 6], "delta")
        module.def_py_c_function(call["backward", 6 + 12 + 1 + 10 + 21], "backward")
        module.def_py_c_function(call["gradients", 6 + 12 + 1 + 10 + 24], "gradients")
        module.def_py_c_function(call["mask_gradient", 6 + 12 + 1 + 8 + 12], "mask_gradient")
        module.def_py_c_function(call["varlen_forward", 6 + 12 + 1 + 6 + 12], "varlen_forward")
        module.def_py_c_function(call["varlen_backward", 6 + 12 + 1 + 10 + 21], "varlen_backward")
        module.def_py_c_function(call["dropout_forward", 6 + 12 + 1 + 6 + 12 + 2], "dropout_forward")
        module.def_py_c_function(call["dropout_backward", 6 + 12 + 1 + 10 + 24 + 2], "dropout_backward")
        return module.finalize()
    except error:
        abort(String(error))
