"""The `libnvidia-ml.so.1` of the virtual GPU: the few NVML functions that MAX calls before it opens a device.

It uses the transport of libcuda.mojo; device properties (name, compute capability, memory) come from Python.
"""

from std.ffi import external_call
from transport import *

comptime NVML_SUCCESS = Int32(0)
comptime NVML_NOT_SUPPORTED = Int32(3)
comptime NVML_DRIVER_NOT_LOADED = Int32(9)
comptime COMPUTE_CAPABILITY_MAJOR = 75  # CUDA device attributes
comptime COMPUTE_CAPABILITY_MINOR = 76


@export("workbook_vgpu_open")
def workbook_vgpu_open() abi("C"):
    """Library constructor."""
    open_state()


def nvml_code(code: Int32) -> Int32:
    return NVML_SUCCESS if code == SUCCESS else NVML_DRIVER_NOT_LOADED


def copy_text(text: StaticString, address: Int, length: Int):
    """Write a NUL-terminated copy, truncated to `length` bytes."""
    if length <= 0:
        return
    var count = min(text.byte_length(), length - 1)
    _ = external_call["memmove", Int](address, c_text(text), count)
    at[UInt8](address + count)[] = 0


@export("nvmlInit_v2")
def nvmlInit_v2() abi("C") -> Int32:
    return nvml_code(connect_locked())


@export("nvmlErrorString")
def nvmlErrorString(code: Int32) abi("C") -> Int:
    if code == NVML_SUCCESS:
        return c_text("Success")
    if code == NVML_DRIVER_NOT_LOADED:
        return c_text("Driver Not Loaded")
    return c_text("Not Supported")


@export("nvmlSystemGetDriverVersion")
def nvmlSystemGetDriverVersion(version: Int, length: UInt32) abi("C") -> Int32:
    copy_text("580.00.00", version, Int(length))
    return NVML_SUCCESS


@export("nvmlDeviceGetName")
def nvmlDeviceGetName(device: Int, name: Int, length: UInt32) abi("C") -> Int32:
    var request = Request(OP_DEVICE_NAME)
    request.output(name, Int(length))
    return nvml_code(request.call())


@export("nvmlDeviceGetCudaComputeCapability")
def nvmlDeviceGetCudaComputeCapability(device: Int, major: Int, minor: Int) abi("C") -> Int32:
    var request = Request(OP_ATTRIBUTE, COMPUTE_CAPABILITY_MAJOR)
    var code = request.call()
    at[Int32](major)[] = Int32(request.result())
    request = Request(OP_ATTRIBUTE, COMPUTE_CAPABILITY_MINOR)
    code = max(code, request.call())
    at[Int32](minor)[] = Int32(request.result())
    return nvml_code(code)


@export("nvmlDeviceGetMemoryInfo")
def nvmlDeviceGetMemoryInfo(device: Int, memory: Int) abi("C") -> Int32:
    """Fill an nvmlMemory_t: total, free, used, in bytes."""
    var request = Request(OP_MEMORY_INFO)
    var code = request.call()
    at[Int](memory)[] = request.result(1)
    at[Int](memory + 8)[] = request.result(0)
    at[Int](memory + 16)[] = request.result(1) - request.result(0)
    return nvml_code(code)


@export("nvmlDeviceGetPciInfo_v3")
def nvmlDeviceGetPciInfo_v3(device: Int, info: Int) abi("C") -> Int32:
    """Fill an nvmlPciInfo_t: short bus id (16 bytes), five 32-bit numbers, bus id (32 bytes)."""
    _ = external_call["memset", Int](info, Int32(0), Int(68))
    copy_text("0000:00:00.0", info, 16)
    copy_text("00000000:00:00.0", info + 36, 32)
    return NVML_SUCCESS
