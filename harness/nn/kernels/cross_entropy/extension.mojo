"""Puzzle 27 as a Python extension module: cross-entropy by rows, between the products of `harness.nn.linear_cross_entropy`, and
what a training step in bfloat16 takes beside its layers.

`harness.toolchain.extension` builds this file for one GPU architecture and loads it. Every function takes addresses and
sizes as integers, and launches on the stream whose handle it is given, and returns the bytes of scratch memory that it takes, which are the caller's.
Nothing is allocated on the GPU. Arguments are not checked here.
"""

from std.os import abort
from std.python import Python, PythonObject
from std.python.bindings import PyObjectPtr, PythonModuleBuilder, _set_python_error

from cross_entropy.rows import (
    LossOptions,
    RowSizes,
    launch_cross_entropy_rows,
    launch_scale_unless_one,
)
from cross_entropy.step import (
    NARROW,
    WIDE,
    AdamW,
    launch_add_with_sums,
    launch_adamw,
    launch_gelu,
    launch_gelu_backward,
    launch_norm,
    launch_token_gradient,
)
from shared.common import accum_type
from common.stream_launcher import Arguments, StreamLauncher, open_gpu


def run_rows[dtype: DType](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """Loss and gradient: rows, classes, pitch, the step of the scales, whether the gradient is wanted, the ignored target,
    smoothing, z, the cap; logits, losses, targets, scales."""
    comptime accum = accum_type[dtype]
    # Taken in this order.
    var sizes = RowSizes(
        rows=arguments.integer(),
        classes=arguments.integer(),
        pitch=arguments.integer(),
        scale_step=arguments.integer(),
    )
    var gradient_wanted = arguments.integer() != 0
    var options = LossOptions[accum](
        ignored=Int64(arguments.integer()),
        smoothing=arguments.float().cast[accum](),
        z=arguments.float().cast[accum](),
        cap=arguments.float().cast[accum](),
    )
    var logits = arguments.written[dtype]()
    var losses = arguments.written[accum]()
    var targets = arguments.read[DType.int64]()
    launch_cross_entropy_rows(
        launcher, logits, losses, targets, arguments.read[accum](), sizes, gradient_wanted, options
    )


def run_scale[dtype: DType](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """In place: how many values, the values, the factor."""
    var count = arguments.integer()
    var values = arguments.written[dtype]()
    launch_scale_unless_one(launcher, values, count, arguments.read[accum_type[dtype]]())


def run[part: StaticString, dtype: DType](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """Runs one part of one dtype."""
    comptime if part == "rows":
        run_rows[dtype](arguments, launcher)
    else:
        run_scale[dtype](arguments, launcher)


def call[
    part: StaticString, expected: Int
](module: PyObjectPtr, items: Pointer[PyObjectPtr, MutUntrackedOrigin], count: Int) abi("C") -> PyObjectPtr:
    """One part: the launcher's four arguments, the number of the dtype, its own. A Mojo error becomes a Python exception.
    """
    try:
        if count != expected:
            raise Error(t"expected {expected} arguments, got {count}")
        var arguments = Arguments(items)
        var launcher = arguments.launcher()
        var kind = arguments.integer()
        if kind == 0:
            run[part, DType.float32](arguments, launcher)
        elif kind == 2:
            run[part, DType.bfloat16](arguments, launcher)
        elif kind == 3:
            run[part, DType.float16](arguments, launcher)
        else:
            run[part, DType.float64](arguments, launcher)
        return Python().cpython().PyLong_FromSsize_t(launcher.used)
    except error:
        _set_python_error(error)
        return PyObjectPtr()


# ---- The step -----------------------------------------------------------------------------------------------


def run_of_step[part: StaticString](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """GELU and its gradient: the two tensors, the count. The stream's gradient: stream, sums, branch, rows, channels. The table's:
    table, the head's gradient, rows, tokens, order, starts, places, vocabulary, channels. The norm: the norm, gradients, the count. AdamW: the five constants, how many decay, the
    count; master, working, mean, square, gradients, numbers, norm."""
    comptime if part == "gelu":
        var output = arguments.written[NARROW]()
        var input = arguments.read[NARROW]()
        launch_gelu(launcher, output, input, arguments.integer())
    elif part == "gelu_backward":
        var input = arguments.written[NARROW]()
        var gradient = arguments.written[NARROW]()
        launch_gelu_backward(launcher, input, gradient, arguments.integer())
    elif part == "add_with_sums":
        var stream = arguments.written[NARROW]()
        var sums = arguments.written[NARROW]()
        var branch = arguments.read[NARROW]()
        var rows = arguments.integer()
        launch_add_with_sums(launcher, stream, sums, branch, rows, arguments.integer())
    elif part == "token_gradient":
        var table = arguments.written[NARROW]()
        var of_head = arguments.read[WIDE]()
        var gradient = arguments.read[NARROW]()
        var tokens = arguments.read[DType.int64]()
        var order = arguments.read[DType.int64]()
        var starts = arguments.read[DType.int64]()
        var places = arguments.integer()
        var vocabulary = arguments.integer()
        var channels = arguments.integer()
        launch_token_gradient(
            launcher, table, of_head, gradient, tokens, order, starts, places, vocabulary, channels
        )
    elif part == "norm":
        var norm = arguments.written[WIDE]()
        var gradient = arguments.read[NARROW]()
        launch_norm(launcher, norm, gradient, arguments.integer())
    else:
        # Taken in this order.
        var options = AdamW(
            beta1=arguments.float().cast[WIDE](),
            beta2=arguments.float().cast[WIDE](),
            eps=arguments.float().cast[WIDE](),
            decay=arguments.float().cast[WIDE](),
            limit=arguments.float().cast[WIDE](),
        )
        var decayed = arguments.integer()
        var count = arguments.integer()
        var master = arguments.written[WIDE]()
        var working = arguments.written[NARROW]()
        var mean = arguments.written[WIDE]()
        var square = arguments.written[WIDE]()
        var gradient = arguments.read[NARROW]()
        var numbers = arguments.read[WIDE]()
        var norm = arguments.read[WIDE]()
        launch_adamw(
            launcher, master, working, mean, square, gradient, numbers, norm, options, decayed, count
        )


def call_of_step[
    part: StaticString, expected: Int
](module: PyObjectPtr, items: Pointer[PyObjectPtr, MutUntrackedOrigin], count: Int) abi("C") -> PyObjectPtr:
    """One part of a step: the launcher's four arguments, its own. A Mojo error becomes a Python exception."""
    try:
        if count != expected:
            raise Error(t"expected {expected} arguments, got {count}")
        var arguments = Arguments(items)
        var launcher = arguments.launcher()
        run_of_step[part](arguments, launcher)
        return Python().cpython().PyLong_FromSsize_t(launcher.used)
    except error:
        _set_python_error(error)
        return PyObjectPtr()


@export
def PyInit_workbook_cross_entropy() abi("C") -> PythonObject:
    """Makes the module."""
    try:
        var module = PythonModuleBuilder("workbook_cross_entropy")
        module.def_function[open_gpu]("open", docstring="open(index): a handle of a GPU")
        module.def_py_c_function(call["rows", 5 + 13], "cross_entropy_rows")
        module.def_py_c_function(call["scale", 5 + 3], "scale_unless_one")
        module.def_py_c_function(call_of_step["gelu", 4 + 3], "gelu")
        module.def_py_c_function(call_of_step["gelu_backward", 4 + 3], "gelu_backward")
        module.def_py_c_function(call_of_step["add_with_sums", 4 + 5], "add_with_sums")
        module.def_py_c_function(call_of_step["token_gradient", 4 + 9], "token_gradient")
        module.def_py_c_function(call_of_step["norm", 4 + 3], "norm")
        module.def_py_c_function(call_of_step["adamw", 4 + 14], "adamw")
        return module.finalize()
    except error:
        abort(String(error))
