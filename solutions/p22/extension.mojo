"""Puzzle 22 as a Python extension module: the shortest way from PyTorch to the kernels.

`harness.toolchain.extension` builds this file for one GPU architecture and loads it. Every function takes addresses and sizes as
integers, and launches on the stream whose handle it is given, so that the kernels are ordered with whatever else the
caller puts there and a CUDA graph can capture them. Nothing is allocated on the GPU: scratch memory is the caller's,
who first asks how many bytes it takes. Arguments are not checked here.
"""

from std.memory.alloc import unsafe_alloc
from std.os import abort
from std.python import Python, PythonObject
from std.python.bindings import PyObjectPtr, PythonModuleBuilder, _set_python_error
from std.reflection import get_linkage_name
from std.sys import default_accelerator, size_of
from max.gpu.host import DeviceContext, DeviceStream, Dim, FuncAttribute
from max.gpu.host.device_context import DevicePassable
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes

from op.fast import DLN_GIVEN, LN_OUT_TAKEN, launch_forward_fast, launch_gradients
from op.fast_pairs import launch_backward_pairs, launch_forward_pairs
from op.fast_rows import launch_layernorm_fast
from op.shared.common import ImmPtr, MutPtr, accum_type, shared_memory
from op.shared.launcher import Launcher
from op.tensors import BackwardTensors, ForwardTensors, Sizes
from small import launch_backward_small, launch_forward_small, suits_small_backward, suits_small_forward

comptime ALIGNMENT = 256
"""Of every piece of scratch memory, in bytes; the caller's block must have it too."""


# ---- One GPU ------------------------------------------------------------------------------------------------


struct Gpu(Movable):
    """A GPU and the kernels that have been loaded on it."""

    var ctx: DeviceContext
    var kernels: List[Tuple[Int, Int]]
    """The address of a kernel's name, which is one for each kernel, and of its `DeviceFunction`. Never freed."""

    def __init__(out self, index: Int) raises:
        self.ctx = DeviceContext(index)
        self.kernels = []

    def find(self, name: Int) -> Int:
        """The address of a loaded function, 0 where it is not loaded."""
        for kernel in self.kernels:
            if kernel[0] == name:
                return kernel[1]
        return 0


# ---- Launching on a stream of the caller's ------------------------------------------------------------------


struct StreamLauncher(Launcher):
    """Enqueues on a stream that somebody else owns, with scratch memory that somebody else lends.

    Without a GPU it launches nothing and only counts the scratch memory.
    """

    comptime wgmma = default_accelerator()._is_arch["sm_90a"]()

    var gpu: Optional[Pointer[Gpu, MutUntrackedOrigin]]
    var stream: Optional[DeviceStream]
    var scratch: Int
    var available: Int
    var used: Int

    def __init__(out self):
        """Counts."""
        self.gpu = None
        self.stream = None
        self.scratch = 0
        self.available = Int.MAX
        self.used = 0

    def __init__(out self, gpu: Int, stream: Int, scratch: Int, available: Int) raises:
        """Launches on `stream` of a GPU that `open` has given, with `available` bytes at `scratch`."""
        var opened = Pointer[Gpu, MutUntrackedOrigin](unsafe_from_address=gpu)
        self.gpu = opened
        self.stream = opened[].ctx.create_external_stream(
            OpaquePointer[MutAnyOrigin](unsafe_from_address=stream)
        )
        self.scratch = scratch
        self.available = available
        self.used = 0

    def launch[
        declared: TypeList[Trait=AnyType, ...],
        //,
        kernel: def(* args: * declared) thin -> None,
        *Ts: DevicePassable,
    ](
        mut self,
        name: StaticString,
        *args: *Ts,
        grid_dim: Dim,
        block_dim: Dim,
        shared_bytes: Int = 0,
        early: Bool = False,
    ) raises:
        if not self.gpu:
            return
        comptime Function = type_of(self.gpu.value()[].ctx.compile_function[kernel]())
        ref gpu = self.gpu.value()[]
        comptime symbol = get_linkage_name[kernel]()
        var key = Int(symbol.unsafe_ptr())
        var address = gpu.find(key)
        if not address:
            # Loading takes milliseconds and more, and must not happen again on the next call.
            var loaded = unsafe_alloc[Function](1)
            if shared_bytes:
                var most = FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                    UInt32(max(shared_bytes, shared_memory()))
                )
                loaded.unsafe_write(gpu.ctx.compile_function[kernel](func_attribute=most))
            else:
                loaded.unsafe_write(gpu.ctx.compile_function[kernel]())
            address = Int(loaded)
            gpu.kernels.append((key, address))
        ref function = Pointer[Function, MutAnyOrigin](unsafe_from_address=address)[]
        if early and Self.wgmma:
            self.stream.value().enqueue_function(
                function,
                *args,
                grid_dim=grid_dim,
                block_dim=block_dim,
                shared_mem_bytes=shared_bytes,
                attributes=pdl_launch_attributes(PDLLevel.ON),
            )
        else:
            self.stream.value().enqueue_function(
                function, *args, grid_dim=grid_dim, block_dim=block_dim, shared_mem_bytes=shared_bytes
            )

    def context(self) -> Optional[DeviceContext]:
        if self.gpu:
            return self.gpu.value()[].ctx
        return None

    def workspace[dtype: DType](mut self, name: StaticString, count: Int) raises -> MutPtr[dtype]:
        var start = self.used
        var bytes = count * size_of[Scalar[dtype]]()
        self.used += (bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        if self.used > self.available:
            raise Error(t"{name} needs {self.used} bytes of scratch memory, got {self.available}")
        return MutPtr[dtype](unsafe_from_address=self.scratch + start)


# ---- Arguments ----------------------------------------------------------------------------------------------


struct Arguments:
    """The integers, and the one float, of a call, taken in order."""

    var items: Pointer[PyObjectPtr, MutUntrackedOrigin]
    var taken: Int

    def __init__(out self, items: Pointer[PyObjectPtr, MutUntrackedOrigin]):
        self.items = items
        self.taken = 0

    def integer(mut self) -> Int:
        """The next argument, an integer."""
        self.taken += 1
        return Int(Python().cpython().PyLong_AsSsize_t(self.items[unsafe_offset=self.taken - 1]))

    def float(mut self) -> Float64:
        """The next argument, a float."""
        self.taken += 1
        return Float64(Python().cpython().PyFloat_AsDouble(self.items[unsafe_offset=self.taken - 1]))

    def written[dtype: DType](mut self) -> MutPtr[dtype]:
        """The next argument, the address of a tensor that is written."""
        return MutPtr[dtype](unsafe_from_address=self.integer())

    def read[dtype: DType](mut self) -> ImmPtr[dtype]:
        """The next argument, the address of a tensor that is only read."""
        return ImmPtr[dtype](unsafe_from_address=self.integer())

    def sizes(mut self) -> Sizes:
        """The next three arguments: rows, H, O."""
        var rows = Int32(self.integer())
        var hidden_dim = Int32(self.integer())
        return Sizes(rows, 1, hidden_dim, Int32(self.integer()))

    def launcher(mut self) raises -> StreamLauncher:
        """The next four arguments: what `open` has returned, the stream's handle, scratch memory and its bytes; or
        four times 0 to launch nothing and only count the scratch memory."""
        var gpu = self.integer()
        var stream = self.integer()
        var scratch = self.integer()
        var available = self.integer()
        return StreamLauncher(gpu, stream, scratch, available) if gpu else StreamLauncher()


# ---- The passes --------------------------------------------------------------------------------------------


def run_forward[
    dtype: DType, tf32: Bool, pairs: Bool
](mut arguments: Arguments, mut launcher: StreamLauncher) raises:
    """The forward pass of one dtype: sizes, eps, and the tensors."""
    var sizes = arguments.sizes()
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
    var sizes = arguments.sizes()
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
    var sizes = arguments.sizes()
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


def open(index: PythonObject) raises -> PythonObject:
    """A handle of the GPU with this number; it lasts as long as the process."""
    var gpu = unsafe_alloc[Gpu](1)
    gpu.unsafe_write(Gpu(Int(py=index)))
    return PythonObject(Int(gpu))


@export
def PyInit_workbook_p22() abi("C") -> PythonObject:
    """Makes the module."""
    try:
        var module = PythonModuleBuilder("workbook_p22")
        module.def_function[open]("open", docstring="open(index): a handle of a GPU")
        # The launcher's four arguments, the kind, three sizes, eps or what is wanted, and the tensors.
        module.def_py_c_function(call["forward", 9 + 8], "forward")
        module.def_py_c_function(call["backward", 9 + 15], "backward")
        module.def_py_c_function(call["forward_rows", 9 + 7], "forward_rows")
        return module.finalize()
    except error:
        abort(String(error))
