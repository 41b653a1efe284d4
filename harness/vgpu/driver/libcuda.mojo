"""The `libcuda.so.1` of the virtual GPU: the CUDA driver entry points that MAX and Mojo programs look up.

Each function has the C signature of the CUDA driver API and turns into a `Request` (transport.mojo); the answers
come from Python. Everything is synchronous: when a launch returns, the kernel has run, so streams and events order
nothing and any non-null handle serves. Device addresses are not mapped in this process: a program that dereferences
one on the host crashes, as it does with a real GPU. Here stand the start, errors, devices, contexts, streams and events;
memory and launches are in libcuda_work.mojo, which build.py compiles apart and links in. Entry points that do the same,
with a stream or without, are one function under several names, which build.py gives it.
"""

from transport import *

# Handles are opaque to the program. One device, one context, one memory pool; every stream is the same stream.
comptime CONTEXT = 0x1000
comptime STREAM = 0x2000
comptime EVENT_BYTES = 16
comptime POOL = 0x4000


@export("workbook_vgpu_open")
def workbook_vgpu_open() abi("C"):
    """Library constructor."""
    open_state()


@export("workbook_vgpu_set_callback")
def workbook_vgpu_set_callback(callback: Int, functions: Int) abi("C") -> Int32:
    """Answer calls by this C function pointer `int32_t f(int64_t words[16])`; null ends it.

    `functions` points to the addresses of PyGILState_Ensure, PyErr_Fetch, PyErr_Restore and PyGILState_Release.
    """
    if not state_is_ours():
        return OPERATING_SYSTEM
    if callback != 0:
        for i in range(4):
            state(S_PYTHON + i)[] = at[Int](functions + 8 * i)[]
    state(S_CALLBACK)[] = callback
    state(S_PID)[] = own_pid()
    return SUCCESS


@export("workbook_vgpu_main_is_inside")
def workbook_vgpu_main_is_inside() abi("C") -> Int32:
    """Whether the main thread is in the callback, or has called it and not yet entered its first line."""
    return Int32(state(S_MAIN_INSIDE)[])


# ---- start, errors, device ------------------------------------------------------------------------------------------


@export("cuInit")
def cuInit(flags: UInt32) abi("C") -> Int32:
    var result = locked_connect()
    if result != SUCCESS:
        return result
    return ask(OP_HELLO)


def no_device() abi("C") -> Int32:
    return NO_DEVICE


@export("cuGetProcAddress_v2")
def cuGetProcAddress_v2(
    name: Int, function: Int, version: Int32, flags: UInt64, status: Int
) abi("C") -> Int32:
    """How CUDA's run-time library (that of PyTorch, say) finds its driver; MAX does not ask this way.

    Everything that it finds answers "no device": PyTorch then sees no GPU, and needs no word about it.
    """
    var f = no_device
    at[Int](function)[] = Pointer(to=f).unsafe_bitcast[Int]()[]
    if status != 0:
        at[Int32](status)[] = 0
    return SUCCESS


@export("cuDriverGetVersion")
def cuDriverGetVersion(version: Int) abi("C") -> Int32:
    at[Int32](version)[] = 13000
    return SUCCESS


def described(code: Int32) -> Tuple[StaticString, StaticString]:
    """The name of a result and what it says."""
    if code == 0:
        return "CUDA_SUCCESS", "no error"
    if code == 1:
        return "CUDA_ERROR_INVALID_VALUE", "invalid argument"
    if code == 2:
        return "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"
    if code == 3:
        return "CUDA_ERROR_NOT_INITIALIZED", "initialization error"
    if code == 100:
        return "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"
    if code == 101:
        return "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"
    if code == 200:
        return "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"
    if code == 218:
        return "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"
    if code == 222:
        return (
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            "the provided PTX was compiled with an unsupported toolchain.",
        )
    if code == 304:
        return "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"
    if code == 400:
        return "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"
    if code == 500:
        return "CUDA_ERROR_NOT_FOUND", "named symbol not found"
    if code == 700:
        return "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"
    if code == 701:
        return "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"
    if code == 702:
        return "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"
    if code == 715:
        return "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"
    if code == 716:
        return "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"
    if code == 719:
        return "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"
    if code == 801:
        return "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"
    if code == 912:
        return (
            "CUDA_ERROR_INVALID_CLUSTER_SIZE",
            "a kernel launch error has occurred due to cluster misconfiguration",
        )
    return "CUDA_ERROR_UNKNOWN", "unknown error"


@export("cuGetErrorName")
def cuGetErrorName(code: Int32, name: Int) abi("C") -> Int32:
    at[Int](name)[] = c_text(described(code)[0])
    return SUCCESS


@export("cuGetErrorString")
def cuGetErrorString(code: Int32, text: Int) abi("C") -> Int32:
    at[Int](text)[] = c_text(described(code)[1])
    return SUCCESS


@export("cuDeviceGetCount")
def cuDeviceGetCount(count: Int) abi("C") -> Int32:
    at[Int32](count)[] = 1
    return SUCCESS


@export("cuDeviceGet")
def cuDeviceGet(device: Int, ordinal: Int32) abi("C") -> Int32:
    if ordinal != 0:
        return 101
    at[Int32](device)[] = 0
    return SUCCESS


@export("cuDeviceGetName")
def cuDeviceGetName(name: Int, length: Int32, device: Int32) abi("C") -> Int32:
    var request = Request(OP_DEVICE_NAME)
    request.room(name, Int(length))
    return request.call()


@export("cuDeviceGetAttribute")
def cuDeviceGetAttribute(value: Int, attribute: Int32, device: Int32) abi("C") -> Int32:
    return int32_answer(Request(OP_ATTRIBUTE, Int(attribute)), value)


@export("cuDeviceCanAccessPeer")
def cuDeviceCanAccessPeer(can: Int, device: Int32, peer: Int32) abi("C") -> Int32:
    at[Int32](can)[] = 0
    return SUCCESS


@export("cuDeviceGetP2PAttribute")
def cuDeviceGetP2PAttribute(value: Int, attribute: Int32, source: Int32, target: Int32) abi("C") -> Int32:
    at[Int32](value)[] = 0
    return SUCCESS


@export("cuDeviceGetMemPool")
def cuDeviceGetMemPool(pool: Int, device: Int32) abi("C") -> Int32:
    at[Int](pool)[] = POOL
    return SUCCESS


@export("cuDeviceGetGraphMemAttribute")
def cuDeviceGetGraphMemAttribute(device: Int32, attribute: Int32, value: Int) abi("C") -> Int32:
    at[Int](value)[] = 0
    return SUCCESS


# ---- context, stream, event: one of each kind, nothing to order ------------------------------------------------------


@export("workbook_vgpu_nothing_to_do")
def workbook_vgpu_nothing_to_do() abi("C") -> Int32:
    """What build.py gives the names of entry points that have no work to do here."""
    return SUCCESS


@export("cuDevicePrimaryCtxRetain")
def cuDevicePrimaryCtxRetain(context: Int, device: Int32) abi("C") -> Int32:
    at[Int](context)[] = CONTEXT
    return SUCCESS


@export("cuCtxPopCurrent")
def cuCtxPopCurrent(context: Int) abi("C") -> Int32:
    if context != 0:
        at[Int](context)[] = CONTEXT
    return SUCCESS


@export("cuCtxGetStreamPriorityRange")
def cuCtxGetStreamPriorityRange(least: Int, greatest: Int) abi("C") -> Int32:
    if least != 0:
        at[Int32](least)[] = 0
    if greatest != 0:
        at[Int32](greatest)[] = 0
    return SUCCESS


@export("cuStreamCreate")
def cuStreamCreate(stream: Int, flags: UInt32) abi("C") -> Int32:
    at[Int](stream)[] = STREAM
    return SUCCESS


@export("cuStreamIsCapturing")
def cuStreamIsCapturing(stream: Int, status: Int) abi("C") -> Int32:
    at[Int32](status)[] = 0
    return SUCCESS


@export("cuLaunchHostFunc")
def cuLaunchHostFunc(stream: Int, function: Int, data: Int) abi("C") -> Int32:
    """Everything enqueued before has finished, so the function runs now."""
    var f = function
    Pointer(to=f).unsafe_bitcast[def(Int) abi("C") thin -> None]()[](data)
    return SUCCESS


@export("cuEventCreate")
def cuEventCreate(event: Int, flags: UInt32) abi("C") -> Int32:
    at[Int](event)[] = external_call["calloc", Int](Int(1), Int(EVENT_BYTES))
    return SUCCESS


@export("cuEventDestroy")
def cuEventDestroy(event: Int) abi("C") -> Int32:
    external_call["free", NoneType](event)
    return SUCCESS


@export("cuEventRecord")
def cuEventRecord(event: Int, stream: Int) abi("C") -> Int32:
    """Stores the clock in nanoseconds: the time that the simulation takes, not what a GPU would take."""
    return int_answer(Request(OP_CLOCK), event)


@export("cuEventElapsedTime")
def cuEventElapsedTime(milliseconds: Int, start: Int, end: Int) abi("C") -> Int32:
    at[Float32](milliseconds)[] = Float32(at[Int](end)[] - at[Int](start)[]) / 1e6
    return SUCCESS
