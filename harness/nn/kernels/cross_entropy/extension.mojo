"""Cross-entropy by rows as a Python extension module, between the products of `harness.nn.linear_cross_entropy`.

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


@export
def PyInit_workbook_cross_entropy() abi("C") -> PythonObject:
    """Makes the module."""
    try:
        var module = PythonModuleBuilder("workbook_cross_entropy")
        module.def_function[open_gpu]("open", docstring="open(index): a handle of a GPU")
        module.def_py_c_function(call["rows", 5 + 13], "cross_entropy_rows")
        module.def_py_c_function(call["scale", 5 + 3], "scale_unless_one")
        return module.finalize()
    except error:
        abort(String(error))
