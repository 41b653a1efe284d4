"""The `libcuda.so.1` of the virtual GPU: the CUDA driver entry points that MAX and Mojo programs look up.

Each function has the C signature of the CUDA driver API and turns into a `Request` (transport.mojo); the answers
come from Python. Everything is synchronous: when a launch returns, the kernel has run, so streams and events order
nothing and any non-null handle serves. Device addresses are not mapped in this process: a program that dereferences
one on the host crashes, as it does with a real GPU. What asks nothing of Python is in interface.py: entry points whose
answer never changes, and the further names of those that do the same, with a stream or without.
"""

from host_memory import fill_host, forget_pinned, is_pinned, move_host, pinned_range, remember_pinned
from std.ffi import external_call
from transport import *

comptime EVENT_BYTES = 16
comptime MAX_PARAMETERS = 256
comptime ERROR_LOG_BYTES = 4096


@export("workbook_vgpu_open")
def workbook_vgpu_open() abi("C"):
    """Library constructor."""
    open_state()


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
    """Answer CUDA's run-time library (PyTorch's, for example); MAX does not use this function.

    Every entry point returns "no device", so that PyTorch sees no GPU.
    """
    var f = no_device
    at[Int](function)[] = Pointer(to=f).unsafe_bitcast[Int]()[]
    if status != 0:
        at[Int32](status)[] = 0
    return SUCCESS


@export("cuGetErrorName")
def cuGetErrorName(code: Int32, name: Int) abi("C") -> Int32:
    at[Int](name)[] = c_text(described(code)[0])
    return SUCCESS


@export("cuGetErrorString")
def cuGetErrorString(code: Int32, text: Int) abi("C") -> Int32:
    at[Int](text)[] = c_text(described(code)[1])
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


# ---- streams and events: nothing to order ----------------------------------------------------------------------------


@export("cuLaunchHostFunc")
def cuLaunchHostFunc(stream: Int, function: Int, data: Int) abi("C") -> Int32:
    """Run the function now: everything enqueued before has finished."""
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
    """Store the clock in nanoseconds: the time of the simulation, not a GPU's."""
    return int_answer(Request(OP_CLOCK), event)


@export("cuEventElapsedTime")
def cuEventElapsedTime(milliseconds: Int, start: Int, end: Int) abi("C") -> Int32:
    at[Float32](milliseconds)[] = Float32(at[Int](end)[] - at[Int](start)[]) / 1e6
    return SUCCESS


# ---- memory ---------------------------------------------------------------------------------------------------------


@export("cuMemGetInfo_v2")
def cuMemGetInfo_v2(free: Int, total: Int) abi("C") -> Int32:
    return two_answers(Request(OP_MEMORY_INFO), free, total)


@export("cuMemAlloc_v2")
def cuMemAlloc_v2(address: Int, count: Int) abi("C") -> Int32:
    return int_answer(Request(OP_ALLOCATE, count), address)


@export("cuMemFree_v2")
def cuMemFree_v2(address: Int) abi("C") -> Int32:
    return ask(OP_FREE, address)


@export("cuMemGetAddressRange_v2")
def cuMemGetAddressRange_v2(base: Int, size: Int, address: Int) abi("C") -> Int32:
    return two_answers(Request(OP_ADDRESS_RANGE, address), base, size)


@export("cuMemHostAlloc")
def cuMemHostAlloc(address: Int, count: Int) abi("C") -> Int32:
    """Allocate page-aligned memory that fills, copies and arguments of kernels may use."""
    if external_call["posix_memalign", Int32](address, Int(4096), max(count, 1)) != 0:
        return OUT_OF_MEMORY
    remember_pinned(at[Int](address)[], count)
    return SUCCESS


@export("cuMemFreeHost")
def cuMemFreeHost(address: Int) abi("C") -> Int32:
    if not forget_pinned(address):
        return INVALID_VALUE
    external_call["free", NoneType](address)
    return SUCCESS


@export("cuMemHostRegister_v2")
def cuMemHostRegister_v2(address: Int, count: Int, flags: UInt32) abi("C") -> Int32:
    remember_pinned(address, count)
    return SUCCESS


@export("cuMemHostUnregister")
def cuMemHostUnregister(address: Int) abi("C") -> Int32:
    return SUCCESS if forget_pinned(address) else INVALID_VALUE


@export("cuMemHostGetDevicePointer_v2")
def cuMemHostGetDevicePointer_v2(address: Int, host: Int, flags: UInt32) abi("C") -> Int32:
    at[Int](address)[] = host
    return SUCCESS


def write_to_device(address: Int, host: Int, count: Int) -> Int32:
    """Copy host to device, where "device" may be pinned host memory."""
    if is_pinned(address, count):
        move_host(address, host, count)
        return SUCCESS
    var request = Request(OP_WRITE, address)
    request.input(host, count)
    return request.call()


def read_from_device(host: Int, address: Int, count: Int) -> Int32:
    """Copy device to host, where "device" may be pinned host memory."""
    if is_pinned(address, count):
        move_host(host, address, count)
        return SUCCESS
    var request = Request(OP_READ, address)
    request.room(host, count)
    return request.call()


def copy(target: Int, source: Int, count: Int) -> Int32:
    """Copy between device and pinned host memory, by the addresses."""
    if is_pinned(target, count):
        return read_from_device(target, source, count)
    if is_pinned(source, count):
        return write_to_device(target, source, count)
    return ask(OP_COPY, target, source, count)


def fill(address: Int, value: Int, width: Int, count: Int) -> Int32:
    """Fill device or pinned host memory with a value of `width` bytes."""
    if not is_pinned(address, width * count):
        return ask(OP_FILL, address, value, width, count)
    fill_host(address, value, width, count)
    return SUCCESS


def fill_rows(address: Int, pitch: Int, value: Int, width: Int, columns: Int, rows: Int) -> Int32:
    """Fill the first `columns` elements of every row; `pitch` is the bytes from row to row."""
    for row in range(rows):
        var code = fill(address + row * pitch, value, width, columns)
        if code != SUCCESS:
            return code
    return SUCCESS


@export("cuMemcpyHtoD_v2")
def cuMemcpyHtoD_v2(address: Int, host: Int, count: Int) abi("C") -> Int32:
    return write_to_device(address, host, count)


@export("cuMemcpyDtoH_v2")
def cuMemcpyDtoH_v2(host: Int, address: Int, count: Int) abi("C") -> Int32:
    return read_from_device(host, address, count)


@export("cuMemcpy")
def cuMemcpy(target: Int, source: Int, count: Int) abi("C") -> Int32:
    return copy(target, source, count)


@export("cuMemcpyPeer")
def cuMemcpyPeer(target: Int, to_context: Int, source: Int, from_context: Int, count: Int) abi("C") -> Int32:
    return copy(target, source, count)


@export("cuMemcpy2D_v2")
def cuMemcpy2D_v2(rows: Int) abi("C") -> Int32:
    """Copy a rectangle; `rows` is the address of a CUDA_MEMCPY2D, whose two halves describe source and target.

    Each half: x in bytes, y, memory type, host address, device address, array, pitch, eight bytes each. Types: 1 host, 2
    device, 3 array (which the virtual GPU does not have), 4 any.
    """
    var width = at[Int](rows + 112)[]
    for row in range(at[Int](rows + 120)[]):
        var place = Array[Int, 2](fill=0)
        var on_host = Array[Bool, 2](fill=False)
        for half in range(2):
            var part = rows + 56 * half
            var type = at[UInt32](part + 16)[]
            if type != 1 and type != 2 and type != 4:
                return unsupported("cuMemcpy2D with an array")
            on_host[half] = type == 1
            var base = at[Int](part + (24 if type == 1 else 32))[]
            var y = at[Int](part + 8)[] + row
            place[half] = base + y * at[Int](part + 48)[] + at[Int](part)[]
        var code = SUCCESS
        if on_host[0] and on_host[1]:
            move_host(place[1], place[0], width)
        elif on_host[0]:
            code = write_to_device(place[1], place[0], width)
        elif on_host[1]:
            code = read_from_device(place[1], place[0], width)
        else:
            code = copy(place[1], place[0], width)
        if code != SUCCESS:
            return code
    return SUCCESS


@export("cuMemAllocPitch_v2")
def cuMemAllocPitch_v2(address: Int, pitch: Int, width: Int, height: Int, element: UInt32) abi("C") -> Int32:
    """Allocate rows that begin at multiples of 512 bytes, as on most GPUs."""
    at[Int](pitch)[] = (width + 511) // 512 * 512
    return int_answer(Request(OP_ALLOCATE, at[Int](pitch)[] * height), address)


@export("cuMemsetD8_v2")
def cuMemsetD8_v2(address: Int, value: UInt8, count: Int) abi("C") -> Int32:
    return fill(address, Int(value), 1, count)


@export("cuMemsetD16_v2")
def cuMemsetD16_v2(address: Int, value: UInt16, count: Int) abi("C") -> Int32:
    return fill(address, Int(value), 2, count)


@export("cuMemsetD32_v2")
def cuMemsetD32_v2(address: Int, value: UInt32, count: Int) abi("C") -> Int32:
    return fill(address, Int(value), 4, count)


@export("cuMemsetD2D8_v2")
def cuMemsetD2D8_v2(address: Int, pitch: Int, value: UInt8, columns: Int, rows: Int) abi("C") -> Int32:
    return fill_rows(address, pitch, Int(value), 1, columns, rows)


@export("cuMemsetD2D16_v2")
def cuMemsetD2D16_v2(address: Int, pitch: Int, value: UInt16, columns: Int, rows: Int) abi("C") -> Int32:
    return fill_rows(address, pitch, Int(value), 2, columns, rows)


@export("cuMemsetD2D32_v2")
def cuMemsetD2D32_v2(address: Int, pitch: Int, value: UInt32, columns: Int, rows: Int) abi("C") -> Int32:
    return fill_rows(address, pitch, Int(value), 4, columns, rows)


# ---- modules and launches -------------------------------------------------------------------------------------------


@export("cuModuleLoadDataEx")
def cuModuleLoadDataEx(module: Int, image: Int, count: UInt32, options: Int, values: Int) abi("C") -> Int32:
    """Load PTX text; Python refuses machine code. Errors go to the caller's JIT log buffer, if any."""
    var log = 0
    var log_bytes = 0
    for i in range(Int(count)):
        var option = at[Int32](options + 4 * i)[]
        if option == 5:  # CU_JIT_ERROR_LOG_BUFFER
            log = at[Int](values + 8 * i)[]
        elif option == 6:  # CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, passed by value
            log_bytes = at[Int](values + 8 * i)[] & 0xFFFF_FFFF
    # An ELF image holds zero bytes: its first ones are enough to refuse it.
    var request = Request(OP_LOAD_MODULE)
    request.input(image, external_call["strlen", Int](image))
    if log != 0:
        request.room(log, min(log_bytes, ERROR_LOG_BYTES))
    return int_answer(request^, module)


@export("cuModuleUnload")
def cuModuleUnload(module: Int) abi("C") -> Int32:
    return ask(OP_UNLOAD_MODULE, module)


@export("cuModuleGetFunction")
def cuModuleGetFunction(function: Int, module: Int, name: Int) abi("C") -> Int32:
    """Return a CUfunction: a block of words that lives as long as the process.

    Words: id, number of parameters, then offset and size of each parameter (at most MAX_PARAMETERS).
    """
    var record = external_call["calloc", Int](Int(2 + 2 * MAX_PARAMETERS), Int(8))
    var request = Request(OP_FIND_FUNCTION, module)
    request.input(name, external_call["strlen", Int](name))
    request.room(record + 16, 16 * MAX_PARAMETERS)
    var code = request.call()
    if code != SUCCESS:
        external_call["free", NoneType](record)
        return code
    at[Int](record)[] = request.result()
    at[Int](record + 8)[] = request.filled() // 16
    at[Int](function)[] = record
    return SUCCESS


@export("cuModuleGetGlobal_v2")
def cuModuleGetGlobal_v2(address: Int, size: Int, module: Int, name: Int) abi("C") -> Int32:
    var request = Request(OP_FIND_GLOBAL, module)
    request.input(name, external_call["strlen", Int](name))
    return two_answers(request^, address, size)


@export("cuFuncGetParamInfo")
def cuFuncGetParamInfo(function: Int, index: Int, offset: Int, size: Int) abi("C") -> Int32:
    if index < 0 or index >= at[Int](function + 8)[]:
        return INVALID_VALUE
    at[Int](offset)[] = at[Int](function + 16 + 16 * index)[]
    if size != 0:
        at[Int](size)[] = at[Int](function + 24 + 16 * index)[]
    return SUCCESS


@export("cuFuncGetAttribute")
def cuFuncGetAttribute(value: Int, attribute: Int32, function: Int) abi("C") -> Int32:
    return int32_answer(Request(OP_FUNCTION_ATTRIBUTE, at[Int](function)[], Int(attribute)), value)


@export("cuFuncSetAttribute")
def cuFuncSetAttribute(function: Int, attribute: Int32, value: Int32) abi("C") -> Int32:
    return ask(OP_SET_FUNCTION_ATTRIBUTE, at[Int](function)[], Int(attribute), Int(value))


@export("cuOccupancyMaxActiveBlocksPerMultiprocessor")
def cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Int, function: Int, threads: Int32, shared: Int
) abi("C") -> Int32:
    return int32_answer(Request(OP_OCCUPANCY, at[Int](function)[], Int(threads), shared), blocks)


def launch(mut request: Request, function: Int, parameters: Int, extra: Int) -> Int32:
    """Gather the argument bytes, each parameter at its offset, and run the kernel."""
    var buffer = 0
    if parameters == 0 and extra != 0:
        # Pairs of a key and a value, ended by a null key: 1 = address of a ready argument buffer.
        var entry = extra
        while at[Int](entry)[] != 0:
            if at[Int](entry)[] == 1:
                buffer = at[Int](entry + 8)[]
            entry += 16
    var count = at[Int](function + 8)[]
    if count > 0 and parameters == 0 and buffer == 0:
        return INVALID_VALUE
    var packed = external_call["calloc", Int](Int(1), Int(32768))
    var end = 0
    for i in range(count):
        var offset = at[Int](function + 16 + 16 * i)[]
        var size = at[Int](function + 24 + 16 * i)[]
        var source = buffer + offset if buffer != 0 else at[Int](parameters + 8 * i)[]
        _ = external_call["memmove", Int](packed + offset, source, size)
        end = offset + size
    request.words[5] = at[Int](function)[]
    request.input(packed, end)
    var loans = 0
    var code = lend_pinned(packed, end, loans)
    if code == SUCCESS:
        code = request.call()
    var returned = return_pinned(loans)
    external_call["free", NoneType](packed)
    return code if code != SUCCESS else returned


def lend_pinned(packed: Int, end: Int, mut loans: Int) -> Int32:
    """Copy the pinned host memory that a kernel's arguments point to into device memory for one launch.

    Every argument word that points into pinned memory is made to point into the copy. `loans` becomes the list of copies:
    four words each (host address, bytes, device address, next).
    """
    for offset in range(0, end - 7, 8):
        var word = at[Int](packed + offset)[]
        var host = pinned_range(word)
        if host[1] == 0:
            continue
        var loan = loans
        while loan != 0 and at[Int](loan)[] != host[0]:
            loan = at[Int](loan + 24)[]
        if loan == 0:
            var request = Request(OP_ALLOCATE, host[1])
            var code = request.call()
            if code != SUCCESS:
                return code
            loan = external_call["calloc", Int](Int(4), Int(8))
            at[Int](loan)[] = host[0]
            at[Int](loan + 8)[] = host[1]
            at[Int](loan + 16)[] = request.result()
            at[Int](loan + 24)[] = loans
            loans = loan
            var write = Request(OP_WRITE, at[Int](loan + 16)[])
            write.input(host[0], host[1])
            code = write.call()
            if code != SUCCESS:
                return code
        at[Int](packed + offset)[] = at[Int](loan + 16)[] + word - host[0]
    return SUCCESS


def return_pinned(loans: Int) -> Int32:
    """Copy the launch's copies of pinned memory back."""
    var first = SUCCESS
    var loan = loans
    while loan != 0:
        var request = Request(OP_READ, at[Int](loan + 16)[])
        request.room(at[Int](loan)[], at[Int](loan + 8)[])
        var code = request.call()
        if first == SUCCESS:
            first = code
        _ = ask(OP_FREE, at[Int](loan + 16)[])
        var next = at[Int](loan + 24)[]
        external_call["free", NoneType](loan)
        loan = next
    return first


@export("cuLaunchKernel")
def cuLaunchKernel(
    function: Int,
    grid_x: UInt32,
    grid_y: UInt32,
    grid_z: UInt32,
    block_x: UInt32,
    block_y: UInt32,
    block_z: UInt32,
    shared: UInt32,
    stream: Int,
    parameters: Int,
    extra: Int,
) abi("C") -> Int32:
    var request = Request(OP_LAUNCH, 0, Int(grid_x), Int(grid_y), Int(grid_z))
    request.words[9] = Int(block_x)
    request.words[10] = Int(block_y)
    request.words[11] = Int(block_z)
    request.words[12] = Int(shared)
    return launch(request, function, parameters, extra)


@export("cuLaunchKernelEx")
def cuLaunchKernelEx(config: Int, function: Int, parameters: Int, extra: Int) abi("C") -> Int32:
    """Launch by a CUlaunchConfig: seven 32-bit numbers, the stream, the attributes (72 bytes each) and their number.
    """
    var request = Request(OP_LAUNCH)
    for i in range(7):
        request.words[6 + i] = Int(at[UInt32](config + 4 * i)[])
    var attributes = at[Int](config + 40)[]
    for i in range(Int(at[UInt32](config + 48)[])):
        var attribute = attributes + 72 * i
        if at[UInt32](attribute)[] == 4:  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            for j in range(3):
                request.words[13 + j] = Int(at[UInt32](attribute + 8 + 4 * j)[])
    return launch(request, function, parameters, extra)


# ---- tensor maps ----------------------------------------------------------------------------------------------------


@export("cuTensorMapEncodeTiled")
def cuTensorMapEncodeTiled(
    map: Int,
    kind: Int32,
    rank: UInt32,
    address: Int,
    dims: Int,
    strides: Int,
    box: Int,
    steps: Int,
    interleave: Int32,
    swizzle: Int32,
    promotion: Int32,
    fill: Int32,
) abi("C") -> Int32:
    """Encode a tensor map in 128 bytes: `rank` dimensions and one stride fewer (64 bits each), tile and steps (32 bits).
    """
    var count = Int(rank)
    if map == 0 or dims == 0 or box == 0 or steps == 0 or count < 1 or count > 5:
        return INVALID_VALUE
    # 5 dimensions, 4 strides, 5 sizes of the box, 5 steps, 64 bits each.
    var words = Array[Int, 19](fill=0)
    for i in range(count):
        words[i] = at[Int](dims + 8 * i)[]
        words[9 + i] = Int(at[UInt32](box + 4 * i)[])
        words[14 + i] = Int(at[UInt32](steps + 4 * i)[])
    for i in range(count - 1):
        words[5 + i] = at[Int](strides + 8 * i)[]
    var request = Request(OP_ENCODE_TENSOR_MAP, Int(kind), count, address, Int(interleave))
    request.words[9] = Int(swizzle)
    request.words[10] = Int(promotion)
    request.words[11] = Int(fill)
    request.input(Int(Pointer(to=words).unsafe_bitcast[Int]()), 152)
    request.room(map, 128)
    var code = request.call()
    _ = words
    return code
