"""The `libcuda.so.1` of the virtual GPU: the CUDA driver entry points that MAX and Mojo programs look up.

Each function has the C signature of the CUDA driver API and sends a `Request` (transport.mojo), which Python
executes. Everything is synchronous: when a launch returns, the kernel has run, so streams and events order nothing and
any non-null handle will do. Device addresses are not mapped in this process: a program that dereferences one on the
host crashes, as with a real GPU. interface.py declares the entry points that need no code here: those with constant
outputs, and aliases of the functions below.
"""

from host_memory import add_pinned, copy_host, fill_host, find_pinned_range, is_pinned, remove_pinned
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
    var result = connect_locked()
    if result != SUCCESS:
        return result
    return send(OP_HELLO)


def return_no_device() abi("C") -> Int32:
    return NO_DEVICE


@export("cuGetProcAddress_v2")
def cuGetProcAddress_v2(
    name: Int, function: Int, version: Int32, flags: UInt64, status: Int
) abi("C") -> Int32:
    """Return an entry point for CUDA's run-time library (in PyTorch, for example); MAX does not call this.

    All these entry points return NO_DEVICE, so that PyTorch finds no GPU.
    """
    var f = return_no_device
    at[Int](function)[] = Pointer(to=f).unsafe_bitcast[Int]()[]
    if status != 0:
        at[Int32](status)[] = 0
    return SUCCESS


@export("cuGetErrorName")
def cuGetErrorName(code: Int32, name: Int) abi("C") -> Int32:
    at[Int](name)[] = c_text(describe_result(code)[0])
    return SUCCESS


@export("cuGetErrorString")
def cuGetErrorString(code: Int32, text: Int) abi("C") -> Int32:
    at[Int](text)[] = c_text(describe_result(code)[1])
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
    request.output(name, Int(length))
    return request.call()


@export("cuDeviceGetAttribute")
def cuDeviceGetAttribute(value: Int, attribute: Int32, device: Int32) abi("C") -> Int32:
    return store_int32_result(Request(OP_ATTRIBUTE, Int(attribute)), value)


# ---- streams and events: nothing to order ----------------------------------------------------------------------------


@export("cuLaunchHostFunc")
def cuLaunchHostFunc(stream: Int, function: Int, data: Int) abi("C") -> Int32:
    """Run the function now, because all earlier work on the stream has finished."""
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
    """Store the host's clock in nanoseconds; differences are simulation time, not a GPU's."""
    return store_int_result(Request(OP_CLOCK), event)


@export("cuEventElapsedTime")
def cuEventElapsedTime(milliseconds: Int, start: Int, end: Int) abi("C") -> Int32:
    at[Float32](milliseconds)[] = Float32(at[Int](end)[] - at[Int](start)[]) / 1e6
    return SUCCESS


# ---- memory ---------------------------------------------------------------------------------------------------------


@export("cuMemGetInfo_v2")
def cuMemGetInfo_v2(free: Int, total: Int) abi("C") -> Int32:
    return store_two_results(Request(OP_MEMORY_INFO), free, total)


@export("cuMemAlloc_v2")
def cuMemAlloc_v2(address: Int, count: Int) abi("C") -> Int32:
    return store_int_result(Request(OP_ALLOCATE, count), address)


@export("cuMemFree_v2")
def cuMemFree_v2(address: Int) abi("C") -> Int32:
    return send(OP_FREE, address)


@export("cuMemGetAddressRange_v2")
def cuMemGetAddressRange_v2(base: Int, size: Int, address: Int) abi("C") -> Int32:
    return store_two_results(Request(OP_ADDRESS_RANGE, address), base, size)


@export("cuMemHostAlloc")
def cuMemHostAlloc(address: Int, count: Int) abi("C") -> Int32:
    """Allocate page-aligned memory for use in fills, copies and kernel arguments."""
    if external_call["posix_memalign", Int32](address, Int(4096), max(count, 1)) != 0:
        return OUT_OF_MEMORY
    add_pinned(at[Int](address)[], count)
    return SUCCESS


@export("cuMemFreeHost")
def cuMemFreeHost(address: Int) abi("C") -> Int32:
    if not remove_pinned(address):
        return INVALID_VALUE
    external_call["free", NoneType](address)
    return SUCCESS


@export("cuMemHostRegister_v2")
def cuMemHostRegister_v2(address: Int, count: Int, flags: UInt32) abi("C") -> Int32:
    add_pinned(address, count)
    return SUCCESS


@export("cuMemHostUnregister")
def cuMemHostUnregister(address: Int) abi("C") -> Int32:
    return SUCCESS if remove_pinned(address) else INVALID_VALUE


@export("cuMemHostGetDevicePointer_v2")
def cuMemHostGetDevicePointer_v2(address: Int, host: Int, flags: UInt32) abi("C") -> Int32:
    at[Int](address)[] = host
    return SUCCESS


@export("cuMemcpyHtoD_v2")
def write_to_device(address: Int, host: Int, count: Int) abi("C") -> Int32:
    """Copy host memory to device memory or pinned host memory."""
    if is_pinned(address, count):
        copy_host(address, host, count)
        return SUCCESS
    var request = Request(OP_WRITE, address)
    request.input(host, count)
    return request.call()


@export("cuMemcpyDtoH_v2")
def read_from_device(host: Int, address: Int, count: Int) abi("C") -> Int32:
    """Copy device memory or pinned host memory to host memory."""
    if is_pinned(address, count):
        copy_host(host, address, count)
        return SUCCESS
    var request = Request(OP_READ, address)
    request.output(host, count)
    return request.call()


@export("cuMemcpy")
def copy(target: Int, source: Int, count: Int) abi("C") -> Int32:
    """Copy between any combination of device and pinned host memory."""
    if is_pinned(target, count):
        return read_from_device(target, source, count)
    if is_pinned(source, count):
        return write_to_device(target, source, count)
    return send(OP_COPY, target, source, count)


def fill(address: Int, value: Int, width: Int, count: Int) -> Int32:
    """Fill device or pinned host memory with a value of `width` bytes."""
    if not is_pinned(address, width * count):
        return send(OP_FILL, address, value, width, count)
    fill_host(address, value, width, count)
    return SUCCESS


def fill_rows(address: Int, pitch: Int, value: Int, width: Int, columns: Int, rows: Int) -> Int32:
    """Fill the first `columns` elements of every row; `pitch` is in bytes."""
    for row in range(rows):
        var code = fill(address + row * pitch, value, width, columns)
        if code != SUCCESS:
            return code
    return SUCCESS


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
        var addresses = Array[Int, 2](fill=0)
        var on_host = Array[Bool, 2](fill=False)
        for half in range(2):
            var part = rows + 56 * half
            var type = at[UInt32](part + 16)[]
            if type != 1 and type != 2 and type != 4:
                return unsupported("cuMemcpy2D with an array")
            on_host[half] = type == 1
            var base = at[Int](part + (24 if type == 1 else 32))[]
            var y = at[Int](part + 8)[] + row
            addresses[half] = base + y * at[Int](part + 48)[] + at[Int](part)[]
        var code = SUCCESS
        if on_host[0] and on_host[1]:
            copy_host(addresses[1], addresses[0], width)
        elif on_host[0]:
            code = write_to_device(addresses[1], addresses[0], width)
        elif on_host[1]:
            code = read_from_device(addresses[1], addresses[0], width)
        else:
            code = copy(addresses[1], addresses[0], width)
        if code != SUCCESS:
            return code
    return SUCCESS


@export("cuMemAllocPitch_v2")
def cuMemAllocPitch_v2(address: Int, pitch: Int, width: Int, height: Int, element: UInt32) abi("C") -> Int32:
    """Allocate rows with a pitch that is a multiple of 512 bytes, as on most GPUs."""
    at[Int](pitch)[] = (width + 511) // 512 * 512
    return store_int_result(Request(OP_ALLOCATE, at[Int](pitch)[] * height), address)


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
    """Load PTX text (Python rejects machine code); errors are written to the caller's JIT log buffer, if any.
    """
    var log = 0
    var log_bytes = 0
    for i in range(Int(count)):
        var option = at[Int32](options + 4 * i)[]
        if option == 5:  # CU_JIT_ERROR_LOG_BUFFER
            log = at[Int](values + 8 * i)[]
        elif option == 6:  # CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, passed by value
            log_bytes = at[Int](values + 8 * i)[] & 0xFFFF_FFFF
    # strlen truncates an ELF image, which contains zero bytes, but its first bytes are enough to reject it.
    var request = Request(OP_LOAD_MODULE)
    request.input(image, external_call["strlen", Int](image))
    if log != 0:
        request.output(log, min(log_bytes, ERROR_LOG_BYTES))
    return store_int_result(request^, module)


@export("cuModuleUnload")
def cuModuleUnload(module: Int) abi("C") -> Int32:
    return send(OP_UNLOAD_MODULE, module)


@export("cuModuleGetFunction")
def cuModuleGetFunction(function: Int, module: Int, name: Int) abi("C") -> Int32:
    """Return a CUfunction: an array of words that is never freed.

    Words: id, number of parameters, then offset and size of each parameter (at most MAX_PARAMETERS).
    """
    var record = external_call["calloc", Int](Int(2 + 2 * MAX_PARAMETERS), Int(8))
    var request = Request(OP_FIND_FUNCTION, module)
    request.input(name, external_call["strlen", Int](name))
    request.output(record + 16, 16 * MAX_PARAMETERS)
    var code = request.call()
    if code != SUCCESS:
        external_call["free", NoneType](record)
        return code
    at[Int](record)[] = request.result()
    at[Int](record + 8)[] = request.output_length() // 16
    at[Int](function)[] = record
    return SUCCESS


@export("cuModuleGetGlobal_v2")
def cuModuleGetGlobal_v2(address: Int, size: Int, module: Int, name: Int) abi("C") -> Int32:
    var request = Request(OP_FIND_GLOBAL, module)
    request.input(name, external_call["strlen", Int](name))
    return store_two_results(request^, address, size)


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
    return store_int32_result(Request(OP_FUNCTION_ATTRIBUTE, at[Int](function)[], Int(attribute)), value)


@export("cuFuncSetAttribute")
def cuFuncSetAttribute(function: Int, attribute: Int32, value: Int32) abi("C") -> Int32:
    return send(OP_SET_FUNCTION_ATTRIBUTE, at[Int](function)[], Int(attribute), Int(value))


@export("cuOccupancyMaxActiveBlocksPerMultiprocessor")
def cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Int, function: Int, threads: Int32, shared: Int
) abi("C") -> Int32:
    return store_int32_result(Request(OP_OCCUPANCY, at[Int](function)[], Int(threads), shared), blocks)


def launch(mut request: Request, function: Int, parameters: Int, extra: Int) -> Int32:
    """Pack the arguments, each at its parameter's offset, and run the kernel."""
    var buffer = 0
    if parameters == 0 and extra != 0:
        # (key, value) pairs up to a null key; key 1 is the address of a packed argument buffer.
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
    var copies = 0
    var code = copy_pinned_to_device(packed, end, copies)
    if code == SUCCESS:
        code = request.call()
    var copied_back = copy_pinned_back(copies)
    external_call["free", NoneType](packed)
    return code if code != SUCCESS else copied_back


def copy_pinned_to_device(packed: Int, end: Int, mut copies: Int) -> Int32:
    """Copy the pinned host memory that a kernel's arguments point to into device memory for one launch.

    Redirect every argument word that points into pinned memory to the copy. `copies` becomes a linked list of nodes of
    four words (host address, bytes, device address, next).
    """
    for offset in range(0, end - 7, 8):
        var word = at[Int](packed + offset)[]
        var host = find_pinned_range(word)
        if host[1] == 0:
            continue
        var node = copies
        while node != 0 and at[Int](node)[] != host[0]:
            node = at[Int](node + 24)[]
        if node == 0:
            var request = Request(OP_ALLOCATE, host[1])
            var code = request.call()
            if code != SUCCESS:
                return code
            node = external_call["calloc", Int](Int(4), Int(8))
            at[Int](node)[] = host[0]
            at[Int](node + 8)[] = host[1]
            at[Int](node + 16)[] = request.result()
            at[Int](node + 24)[] = copies
            copies = node
            var write = Request(OP_WRITE, at[Int](node + 16)[])
            write.input(host[0], host[1])
            code = write.call()
            if code != SUCCESS:
                return code
        at[Int](packed + offset)[] = at[Int](node + 16)[] + word - host[0]
    return SUCCESS


def copy_pinned_back(copies: Int) -> Int32:
    """Copy the device copies of a launch back to pinned memory, and free them."""
    var first = SUCCESS
    var node = copies
    while node != 0:
        var request = Request(OP_READ, at[Int](node + 16)[])
        request.output(at[Int](node)[], at[Int](node + 8)[])
        var code = request.call()
        if first == SUCCESS:
            first = code
        _ = send(OP_FREE, at[Int](node + 16)[])
        var next = at[Int](node + 24)[]
        external_call["free", NoneType](node)
        node = next
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
    """Launch with a CUlaunchConfig: seven 32-bit numbers, the stream, attributes (72 bytes each) and their count.
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
    element_strides: Int,
    interleave: Int32,
    swizzle: Int32,
    promotion: Int32,
    fill: Int32,
) abi("C") -> Int32:
    """Encode a tensor map in 128 bytes; dimensions and strides have 64 bits each, box sizes and element strides 32 bits.
    """
    var count = Int(rank)
    if map == 0 or dims == 0 or box == 0 or element_strides == 0 or count < 1 or count > 5:
        return INVALID_VALUE
    # 5 dimensions, 4 strides, 5 box sizes, 5 element strides, 64 bits each.
    var words = Array[Int, 19](fill=0)
    for i in range(count):
        words[i] = at[Int](dims + 8 * i)[]
        words[9 + i] = Int(at[UInt32](box + 4 * i)[])
        words[14 + i] = Int(at[UInt32](element_strides + 4 * i)[])
    for i in range(count - 1):
        words[5 + i] = at[Int](strides + 8 * i)[]
    var request = Request(OP_ENCODE_TENSOR_MAP, Int(kind), count, address, Int(interleave))
    request.words[9] = Int(swizzle)
    request.words[10] = Int(promotion)
    request.words[11] = Int(fill)
    request.input(Int(Pointer(to=words).unsafe_bitcast[Int]()), 152)
    request.output(map, 128)
    var code = request.call()
    _ = words
    return code
