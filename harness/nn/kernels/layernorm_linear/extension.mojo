"""Puzzle 22 as a Python extension module: the shortest way from PyTorch to the kernels.

`harness.toolchain.extension` builds this file for one GPU architecture and loads it. Every function takes addresses and sizes as
integers, and launches on the stream whose handle it is given, so that the kernels are ordered with whatever else the
caller puts there and a CUDA graph can capture them. Nothing is allocated on the GPU: scratch memory is the caller's,
who first asks how many bytes it takes. Arguments are not checked here.
"""

from std.os import abort
from std.python import Python, PythonObject
from std.python.bindings import PyObjectPtr, PythonModuleBuilder, _set_python_error

from layernorm_linear.launches import DLN_GIVEN, LN_OUT_TAKEN, launch_forward_fast, launch_gradients
from layernorm_linear.pairs import launch_backward_pairs, launch_forward_pairs
from layernorm_linear.forward import launch_layernorm_fast
from shared.common import accum_type
from common.stream_launcher import Arguments, StreamLauncher, open_gpu
from layernorm_linear.tensors import BackwardTensors, ForwardTensors, Sizes
from layernorm_linear.small import (
    launch_backward_small,
    launch_forward_small,
    suits_small_backward,
    suits_small_forward,
)


# ---- The passes --------------------------------------------------------------------------------------------


def sizes_of(mut arguments: Arguments) -> Sizes:
    """The next three arguments: rows, H, O."""
    var rows = Int32(arguments.integer())
    var hidden_dim = Int32(arguments.integer())
    return Sizes(rows, 1, hidden_dim, Int32(arguments.integer()))


def run_forward[
    dtype: DType, tf32: Bool, pairs: Bool
](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """The forward pass of one dtype: sizes, eps, and the tensors."""
    var sizes = sizes_of(arguments)
    var eps = arguments.float().cast[accum_type[dtype]]()
    # Taken in this order.
    var tensors = ForwardTensors[dtype](
        output=arguments.written[dtype](),
        mean=arguments.written[accum_type[dtype]](),
        rstd=arguments.written[accum_type[dtype]](),
        input=arguments.read[dtype](),
        ln_weight=arguments.read[dtype](),
        ln_bias=arguments.read[dtype](),
        linear_weight=arguments.read[dtype](),
        linear_bias=arguments.read[dtype](),
        sizes=sizes^,
        eps=eps,
    )
    if suits_small_forward(tensors.sizes):
        launch_forward_small(launcher, tensors)
        return
    comptime if pairs:
        launch_forward_pairs(launcher, rebind[ForwardTensors[DType.float32]](tensors))
    else:
        launch_forward_fast[tf32=tf32](launcher, tensors)


def run_backward[
    dtype: DType, tf32: Bool, pairs: Bool
](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """The backward pass of one dtype: sizes, what is wanted (the bits of `op.fast`), the
    tensors, and dln and ln_out where they are the caller's, with the elements from one of their rows to the next.
    """
    var sizes = sizes_of(arguments)
    var wanted = arguments.integer()
    # Taken in this order.
    var tensors = BackwardTensors[dtype](
        grad_input=arguments.written[dtype](),
        grad_ln_weight=arguments.written[dtype](),
        grad_ln_bias=arguments.written[dtype](),
        grad_weight=arguments.written[dtype](),
        grad_bias=arguments.written[dtype](),
        grad_output=arguments.read[dtype](),
        input=arguments.read[dtype](),
        mean=arguments.read[accum_type[dtype]](),
        rstd=arguments.read[accum_type[dtype]](),
        ln_weight=arguments.read[dtype](),
        ln_bias=arguments.read[dtype](),
        linear_weight=arguments.read[dtype](),
        sizes=sizes^,
    )
    var dln = arguments.written[dtype]()
    var ln_out = arguments.written[dtype]()
    var stride = arguments.integer()
    var alone = wanted & (DLN_GIVEN | LN_OUT_TAKEN) == 0
    if alone and suits_small_backward(tensors.sizes):
        launch_backward_small(launcher, tensors, wanted)
        return
    comptime if pairs:
        launch_backward_pairs(launcher, rebind[BackwardTensors[DType.float32]](tensors), wanted)
    else:
        launch_gradients[tf32=tf32](launcher, tensors, wanted, dln, ln_out, stride)


def run_forward_rows[dtype: DType](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """What comes before the product of the forward pass: sizes, eps, ln_out, mean, rstd, input, gamma, beta, and the
    elements from one row of ln_out to the next."""
    var sizes = sizes_of(arguments)
    var eps = arguments.float().cast[accum_type[dtype]]()
    var ln_out = arguments.written[dtype]()
    var mean = arguments.written[accum_type[dtype]]()
    var rstd = arguments.written[accum_type[dtype]]()
    var input = arguments.read[dtype]()
    var ln_weight = arguments.read[dtype]()
    var ln_bias = arguments.read[dtype]()
    launch_layernorm_fast[dtype](
        launcher, ln_out, mean, rstd, input, ln_weight, ln_bias, sizes, eps, arguments.integer()
    )


def run[
    part: StaticString, dtype: DType, *, tf32: Bool = False, pairs: Bool = False
](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """Runs one part of one dtype."""
    comptime if part == "forward":
        run_forward[dtype, tf32, pairs](arguments, launcher)
    elif part == "backward":
        run_backward[dtype, tf32, pairs](arguments, launcher)
    else:
        run_forward_rows[dtype](arguments, launcher)


def run[part: StaticString](items: Pointer[PyObjectPtr, MutUntrackedOrigin]) raises -> Int:
    """Runs one part and returns the bytes of scratch memory that it takes.

    After the launcher's four arguments comes the number of the kind: a dtype, and of float32 whether its products may
    be rounded to tf32, or are made of pairs; the rows alone have no products, and know only the dtypes.
    """
    comptime rows_alone = part == "forward_rows"
    var arguments = Arguments(items)
    var launcher = arguments.launcher()
    var kind = arguments.integer()
    if kind == 0:
        run[part, DType.float32](arguments, launcher)
    elif kind == 2:
        run[part, DType.bfloat16](arguments, launcher)
    elif kind == 3:
        run[part, DType.float16](arguments, launcher)
    elif kind == 4:
        run[part, DType.float64](arguments, launcher)
    else:
        comptime if not rows_alone:
            if kind == 1:
                run[part, DType.float32, tf32=True](arguments, launcher)
            else:
                run[part, DType.float32, pairs=True](arguments, launcher)
    return launcher.used


# ---- What Python sees ---------------------------------------------------------------------------------------


def call[
    part: StaticString, expected: Int
](module: PyObjectPtr, items: Pointer[PyObjectPtr, MutUntrackedOrigin], count: Int) abi("C") -> PyObjectPtr:
    """One part; a Mojo error becomes a Python exception."""
    try:
        if count != expected:
            raise Error(t"expected {expected} arguments, got {count}")
        return Python().cpython().PyLong_FromSsize_t(run[part](items))
    except error:
        _set_python_error(error)
        return PyObjectPtr()


@export
def PyInit_workbook_layernorm_linear() abi("C") -> PythonObject:
    """Makes the module."""
    try:
        var module = PythonModuleBuilder("workbook_layernorm_linear")
        module.def_function[open_gpu]("open", docstring="open(index): a handle of a GPU")
        # The launcher's four arguments, the kind, three sizes, eps or what is wanted, and the tensors.
        module.def_py_c_function(call["forward", 9 + 8], "forward")
        module.def_py_c_function(call["backward", 9 + 15], "backward")
        module.def_py_c_function(call["forward_rows", 9 + 7], "forward_rows")
        return module.finalize()
    except error:
        abort(String(error))
