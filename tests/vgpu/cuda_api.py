"""Program that calls the CUDA driver API directly, without MAX; run by the driver's tests.

Expects the virtual GPU's libraries on LD_LIBRARY_PATH (`vgpu exec`). Prints the results as JSON.
"""

import ctypes
import json
from concurrent.futures import ThreadPoolExecutor

# y[i] = k * x[i] for i < n, written by hand.
PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 y, .param .u64 x, .param .f32 k, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .f32 %f<4>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [y];
    ld.param.u64 %rd2, [x];
    ld.param.f32 %f1, [k];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd4, %rd5;
    add.s64 %rd7, %rd3, %rd5;
    ld.global.f32 %f2, [%rd6];
    mul.f32 %f3, %f2, %f1;
    st.global.f32 [%rd7], %f3;
DONE:
    ret;
}
"""
N = 6
Address = ctypes.c_uint64


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("dimensions", ctypes.c_uint32 * 7),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("count", ctypes.c_uint32),
    ]


class DriverError(Exception):
    """A driver call failed with the CUresult `code`."""

    def __init__(self, name: str, code: int):
        super().__init__(f"{name}: {code}")
        self.code = code


class Cuda:
    """Wrapper of the driver API; calling an instance raises DriverError if the function fails."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")

    def get_code(self, function: str, *arguments) -> int:
        return getattr(self.library, function)(*arguments)

    def __call__(self, function: str, *arguments) -> None:
        if code := self.get_code(function, *arguments):
            raise DriverError(function, code)

    def get_error(self, function: str, *arguments) -> str:
        """Call a function and return the name of its result."""
        text = ctypes.c_char_p()
        self.library.cuGetErrorName(self.get_code(function, *arguments), ctypes.byref(text))
        assert text.value is not None
        return text.value.decode()

    def allocate(self, count: int) -> Address:
        address = Address()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(count))
        return address

    def upload(self, data) -> Address:
        """Copy a ctypes array to new memory."""
        address = self.allocate(ctypes.sizeof(data))
        self("cuMemcpyHtoD_v2", address, data, ctypes.c_size_t(ctypes.sizeof(data)))
        return address

    def upload_floats(self, values: list[float]) -> Address:
        return self.upload((ctypes.c_float * len(values))(*values))

    def download(self, address: Address, kind, count: int) -> list:
        data = (kind * count)()
        self("cuMemcpyDtoH_v2", data, address, ctypes.c_size_t(ctypes.sizeof(data)))
        return list(data)

    def get_function(self, ptx: bytes, name: bytes) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuModuleLoadDataEx", ctypes.byref(module), ptx, 0, None, None)
        self("cuModuleGetFunction", ctypes.byref(function), module, name)
        return function

    def launch(self, function, grid, block, arguments, shared=0) -> str:
        values = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        return self.get_error("cuLaunchKernel", function, *grid, *block, shared, None, values, None)


def check_memory(cuda: Cuda) -> dict:
    """Return results of fills, copies and ranges, and the errors for wrong sizes and addresses."""
    a = cuda.allocate(64)
    cuda("cuMemsetD8_v2", a, 7, ctypes.c_size_t(64))
    cuda("cuMemsetD32_v2", Address(a.value + 8), 0x01020304, ctypes.c_size_t(2))
    cuda("cuMemsetD16_v2", Address(a.value + 16), 0x0506, ctypes.c_size_t(2))
    size_t = ctypes.c_size_t
    cuda("cuMemsetD2D32_v2", Address(a.value + 24), size_t(16), 9, size_t(1), size_t(2))
    b = cuda.allocate(64)
    cuda("cuMemcpyDtoD_v2", b, a, ctypes.c_size_t(64))
    base, size = Address(), ctypes.c_size_t()
    cuda("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), Address(b.value + 12))
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    host = ctypes.create_string_buffer(65)
    out = {
        "bytes": cuda.download(b, ctypes.c_uint8, 64),
        "range": [base.value - b.value, size.value],
        "used": total.value - free.value,
        "write past the end": cuda.get_error("cuMemcpyHtoD_v2", b, host, ctypes.c_size_t(65)),
        "read past the end": cuda.get_error("cuMemcpyDtoH_v2", host, b, ctypes.c_size_t(65)),
        "fill past the end": cuda.get_error("cuMemsetD32_v2", b, 1, ctypes.c_size_t(17)),
        "copy to host memory": cuda.get_error(
            "cuMemcpyDtoD_v2", Address(ctypes.addressof(host)), a, ctypes.c_size_t(4)
        ),
        "empty allocation": cuda.get_error("cuMemAlloc_v2", ctypes.byref(Address()), ctypes.c_size_t(0)),
        "too large": cuda.get_error("cuMemAlloc_v2", ctypes.byref(Address()), ctypes.c_size_t(1 << 44)),
        "free": cuda.get_error("cuMemFree_v2", b),
        "free twice": cuda.get_error("cuMemFree_v2", b),
        "free null": cuda.get_error("cuMemFree_v2", Address(0)),
        "use after free": cuda.get_error("cuMemcpyDtoH_v2", host, b, ctypes.c_size_t(4)),
    }
    cuda("cuMemFree_v2", a)
    return out


class Rectangle(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (f"{side}_{name}", kind)
        for side in ("source", "target")
        for name, kind in (
            ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_uint64), ("host", ctypes.c_void_p),
            ("device", Address), ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]  # fmt: skip


HOST, DEVICE, ARRAY, UNIFIED = 1, 2, 3, 4


def copy_rectangles(cuda: Cuda) -> dict:
    """Copy a rectangle of 3 x 2 bytes from a 4 x 5 image on the host to a pitched allocation, a dense one, and back."""
    image = (ctypes.c_uint8 * 20)(*range(20))
    result = (ctypes.c_uint8 * 20)()
    pitched, pitch = Address(), ctypes.c_size_t()
    size = ctypes.c_size_t(5), ctypes.c_size_t(4)
    cuda("cuMemAllocPitch_v2", ctypes.byref(pitched), ctypes.byref(pitch), *size, 4)
    dense = cuda.allocate(20)
    cuda("cuMemsetD8_v2", dense, 0, ctypes.c_size_t(20))
    to_device = Rectangle(source_x=1, source_y=1, source_type=HOST, source_host=ctypes.addressof(image), source_pitch=5,
                      target_y=2, target_type=DEVICE, target_device=pitched, target_pitch=pitch.value, width=3, height=2)  # fmt: skip
    cuda("cuMemcpy2D_v2", ctypes.byref(to_device))
    between_devices = Rectangle(source_y=2, source_type=UNIFIED, source_device=pitched, source_pitch=pitch.value,
                   target_x=2, target_type=DEVICE, target_device=dense, target_pitch=5, width=3, height=2)  # fmt: skip
    cuda("cuMemcpy2DAsync_v2", ctypes.byref(between_devices), None)
    to_host = Rectangle(source_type=DEVICE, source_device=dense, source_pitch=5,
                     target_type=HOST, target_host=ctypes.addressof(result), target_pitch=5, width=5, height=4)  # fmt: skip
    cuda("cuMemcpy2DUnaligned_v2", ctypes.byref(to_host))
    too_high = Rectangle(source_type=DEVICE, source_device=dense, source_pitch=5,
                     target_type=HOST, target_host=ctypes.addressof(result), target_pitch=5, width=5, height=5)  # fmt: skip
    array = Rectangle(source_type=ARRAY, target_type=DEVICE, target_device=dense, width=1, height=1)
    return {
        "pitch": pitch.value,
        "back": list(result),
        "past the end": cuda.get_error("cuMemcpy2D_v2", ctypes.byref(too_high)),
        "array": cuda.get_error("cuMemcpy2D_v2", ctypes.byref(array)),
    }


def check_pinned_memory(cuda: Cuda) -> dict:
    """Return the 16 bytes of pinned host memory after each fill and copy, and the errors."""
    n, stream, size = 16, None, ctypes.c_size_t
    memory = ctypes.c_void_p()
    cuda("cuMemAllocHost_v2", ctypes.byref(memory), size(n))
    start = memory.value
    assert start is not None
    host, device = Address(start), cuda.allocate(n)
    source = (ctypes.c_uint8 * n)(*range(n))
    out = {}

    def call_and_read(name: str, *arguments) -> None:
        cuda(name, *arguments)
        out[name] = list(ctypes.string_at(start, n))
        ctypes.memset(start, 0, n)

    for bits, value in ((8, 0x11), (16, 0x2233), (32, 0x44556677)):
        call_and_read(f"cuMemsetD{bits}_v2", host, value, size(8 * n // bits))
        call_and_read(f"cuMemsetD{bits}Async", host, value, size(8 * n // bits), stream)
        call_and_read(f"cuMemsetD2D{bits}_v2", host, size(8), value, size(1), size(2))
        call_and_read(f"cuMemsetD2D{bits}Async", host, size(8), value, size(1), size(2), stream)
    cuda("cuMemcpyHtoD_v2", device, source, size(n))
    call_and_read("cuMemcpy", host, device, size(n))
    call_and_read("cuMemcpyAsync", host, device, size(n), stream)
    call_and_read("cuMemcpyDtoD_v2", host, device, size(n))
    call_and_read("cuMemcpyDtoDAsync_v2", host, device, size(n), stream)
    call_and_read("cuMemcpyDtoH_v2", memory, device, size(n))
    call_and_read("cuMemcpyHtoD_v2", host, source, size(n))
    call_and_read("cuMemcpyHtoDAsync_v2", host, source, size(n), stream)
    # host to host and host to device
    other = ctypes.c_void_p()
    cuda("cuMemHostAlloc", ctypes.byref(other), size(n), 0)
    assert other.value is not None
    ctypes.memmove(other, source, n)
    call_and_read("cuMemcpyPeer", host, None, Address(other.value), None, size(n))
    cuda("cuMemsetD8_v2", device, 0, size(n))
    cuda("cuMemcpyDtoD_v2", device, Address(other.value), size(n))
    call_and_read("cuMemcpyDtoHAsync_v2", memory, device, size(n), stream)

    out["past the end"] = cuda.get_error("cuMemsetD8_v2", host, 1, size(n + 1))
    raw = Address(ctypes.addressof(source))
    cuda("cuMemHostRegister_v2", source, size(n), 0)
    cuda("cuMemsetD8_v2", raw, 5, size(n))
    out["registered"] = list(source)
    cuda("cuMemHostUnregister", source)
    out["unregistered"] = cuda.get_error("cuMemsetD8_v2", raw, 6, size(n))
    cuda("cuMemFreeHost", memory)
    cuda("cuMemFreeHost", other)
    out["freed twice"] = cuda.get_error("cuMemFreeHost", memory)
    return out


def check_launches(cuda: Cuda) -> dict:
    """Return results of the three launch functions, and the errors of invalid launches."""
    scale = cuda.get_function(PTX, b"scale")
    x = cuda.upload_floats([float(i) for i in range(N)])
    y = cuda.upload_floats([0.0] * N)
    arguments = [y, x, ctypes.c_float(0.5), ctypes.c_uint32(N)]
    out: dict[str, object] = {"launch": cuda.launch(scale, (2, 1, 1), (4, 1, 1), arguments)}
    out["by pointers"] = cuda.download(y, ctypes.c_float, N)

    # The same arguments as one packed buffer: key 1 = its address, key 2 = address of its size, key 0 = end.
    class Packed(ctypes.Structure):
        _fields_ = [("y", Address), ("x", Address), ("k", ctypes.c_float), ("n", ctypes.c_uint32)]

    packed = Packed(y, x, 3.0, N)
    size = ctypes.c_size_t(ctypes.sizeof(packed))
    extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), None)
    cuda("cuLaunchKernel", scale, 2, 1, 1, 4, 1, 1, 0, None, None, extra)
    out["by buffer"] = cuda.download(y, ctypes.c_float, N)

    arguments[2] = ctypes.c_float(2.0)
    values = (ctypes.c_void_p * 4)(*(ctypes.addressof(a) for a in arguments))
    cluster = LaunchAttribute(4, 0, (ctypes.c_uint32 * 16)(2, 1, 1))
    config = LaunchConfig((ctypes.c_uint32 * 7)(2, 1, 1, 4, 1, 1, 0), None, ctypes.pointer(cluster), 1)
    cuda("cuLaunchKernelEx", ctypes.byref(config), scale, values, None)
    out["by config"] = cuda.download(y, ctypes.c_float, N)

    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    layout = []
    for i in range(4):
        cuda("cuFuncGetParamInfo", scale, ctypes.c_size_t(i), ctypes.byref(offset), ctypes.byref(size))
        layout.append([offset.value, size.value])
    out["parameters"] = layout
    out["fifth parameter"] = cuda.get_error(
        "cuFuncGetParamInfo", scale, ctypes.c_size_t(4), ctypes.byref(offset), ctypes.byref(size)
    )
    one = (1, 1, 1)
    out |= {
        "empty grid": cuda.launch(scale, (0, 1, 1), one, arguments),
        "grid y": cuda.launch(scale, (1, 65536, 1), one, arguments),
        "block": cuda.launch(scale, one, (1025, 1, 1), arguments),
        "block z": cuda.launch(scale, one, (1, 1, 65), arguments),
        "shared without attribute": cuda.launch(scale, one, one, arguments, shared=49153),
        "attribute too large": cuda.get_error("cuFuncSetAttribute", scale, 8, 1 << 20),
        "attribute": cuda.get_error("cuFuncSetAttribute", scale, 8, 65536),
        "shared with attribute": cuda.launch(scale, one, one, arguments, shared=49153),
        "no arguments": cuda.get_error("cuLaunchKernel", scale, *one, *one, 0, None, None, None),
    }
    return out


def check_modules(cuda: Cuda) -> dict:
    """Return the errors of invalid images and names, with the text of the JIT log buffer."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuModuleLoadDataEx", ctypes.byref(module), PTX, 0, None, None)
    other = ctypes.c_void_p()
    log = ctypes.create_string_buffer(500)
    options = (ctypes.c_int * 2)(5, 6)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))

    def load(image: bytes) -> list[str]:
        log.value = b""
        code = cuda.get_error("cuModuleLoadDataEx", ctypes.byref(other), image, 2, options, values)
        return [code, log.value.decode()]

    return {
        "machine code": load(b"\x7fELF\x02\x01\x01\x00"),
        "not PTX": load(b"hello"),
        "unknown version": load(PTX.replace(b".version 8.0", b".version 99.0")),
        "unknown kernel": cuda.get_error("cuModuleGetFunction", ctypes.byref(function), module, b"nothing"),
        "unknown variable": cuda.get_error("cuModuleGetGlobal_v2", None, None, module, b"nothing"),
        "unload": cuda.get_error("cuModuleUnload", module),
        "unload twice": cuda.get_error("cuModuleUnload", module),
        "graphs": cuda.get_error("cuGraphCreate"),
        "second device": cuda.get_error("cuDeviceGet", ctypes.byref(ctypes.c_int()), 1),
    }


def run_threads(cuda: Cuda) -> int:
    """Allocate, write, read and free in eight threads; return the number of correct round trips."""

    def count_round_trips(seed: int) -> int:
        correct = 0
        for i in range(25):
            values = [float(seed * 100 + i)] * (10 + i)
            address = cuda.upload_floats(values)
            correct += cuda.download(address, ctypes.c_float, len(values)) == values
            cuda("cuMemFree_v2", address)
        return correct

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(count_round_trips, range(8)))


def main() -> None:
    cuda = Cuda()
    cuda("cuInit", 0)
    out: dict[str, object] = {
        "memory": check_memory(cuda),
        "rectangles": copy_rectangles(cuda),
        "pinned": check_pinned_memory(cuda),
        "launches": check_launches(cuda),
        "modules": check_modules(cuda),
    }
    out["threads"] = run_threads(cuda)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
