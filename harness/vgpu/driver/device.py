"""Execute the CUDA driver calls that the stand-in libraries encode as requests of sixteen words."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from harness.vgpu.errors import VirtualGPUError
from harness.vgpu.machine import Kernel, Module, VirtualGPU
from harness.vgpu.memory import tensor_map

from .interface import RESULT_CODES, Op
from .kernel_names import KernelNames

# (multiprocessors, threads per multiprocessor, opt-in limit of shared bytes per block, shared bytes per
# multiprocessor), from the CUDA programming guide's table of compute capabilities and the most common product
# of each.
ARCHITECTURES = {
    "sm_75": (40, 1024, 65536, 65536),
    "sm_80": (108, 2048, 166912, 167936),
    "sm_86": (84, 1536, 101376, 102400),
    "sm_89": (128, 1536, 101376, 102400),
    "sm_90": (132, 2048, 232448, 233472),
}
MAX_STATIC_SHARED_BYTES = 49152  # bytes per block, unless FuncAttribute raises the limit

# The supported CUDA function attributes.
MAX_THREADS_PER_BLOCK, SHARED_SIZE_BYTES, PTX_VERSION, BINARY_VERSION, MAX_DYNAMIC_SHARED = 0, 1, 5, 6, 8


def get_compute_capability(arch: str) -> tuple[int, int]:
    target = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    assert target is not None, arch
    number = int(target[1])
    return number // 10, number % 10


def get_device_attributes(arch: str) -> dict[int, int]:
    """Return values by CUdevice_attribute; missing attributes are zero."""
    key = re.sub(r"[a-z]$", "", arch)
    if key not in ARCHITECTURES:
        raise ValueError(
            f"unknown virtual GPU {arch!r}: choose one of {', '.join(ARCHITECTURES)} (or sm_90a)"
        )
    num_sms, threads, max_shared_optin, shared_per_sm = ARCHITECTURES[key]
    major, minor = get_compute_capability(arch)
    return {
        1: 1024,  # threads per block
        2: 1024,
        3: 1024,
        4: 64,  # block dimensions x, y, z
        5: 2**31 - 1,
        6: 65535,
        7: 65535,  # grid dimensions x, y, z
        8: MAX_STATIC_SHARED_BYTES,
        9: 65536,  # constant memory
        10: 32,  # warp size
        11: 2**31 - 1,  # memory pitch
        12: 65536,  # registers per block
        13: 1_000_000,  # clock in kHz: nominal, nothing is timed by it
        15: 1,  # can copy and compute at once
        16: num_sms,
        31: 1,  # concurrent kernels
        36: 1_000_000,  # memory clock in kHz: nominal
        37: 4096,  # memory bus width in bits: nominal
        38: 50 * 2**20,  # L2 bytes: nominal
        39: threads,
        40: 1,  # copy engines
        41: 1,  # unified addressing
        75: major,
        76: minor,
        78: 1,  # stream priorities
        81: shared_per_sm,
        82: 65536,  # registers per multiprocessor
        97: max_shared_optin,
        106: 32,  # blocks per multiprocessor
        111: 1024,  # shared bytes reserved per block
        115: 1,  # memory pools
        120: int(major >= 9),  # cluster launch
    }


class DriverError(VirtualGPUError):
    """Raised for an invalid driver call; `cuda` is the name of the CUDA error."""

    def __init__(self, cuda: str, message: str):
        super().__init__(message)
        self.cuda = cuda


@dataclass
class Function:
    """A kernel that the program has looked up by name."""

    kernel: Kernel
    label: str
    layout: list[tuple[int, int]]  # (offset, size) of each parameter in the packed argument buffer
    dynamic_shared_limit: int


def compute_parameter_layout(sizes: list[int]) -> list[tuple[int, int]]:
    """Return (offset, size) of parameters in a packed buffer: parameters of 1, 2 and 4 bytes are aligned to
    their size, others to eight bytes."""
    layout, offset = [], 0
    for size in sizes:
        align = size if size in (1, 2, 4) else 8
        offset = -(-offset // align) * align
        layout.append((offset, size))
        offset += size
    return layout


@dataclass
class Device:
    """The device side of the driver: executes driver calls on one virtual GPU.

    `errors` collects the exceptions of failed calls, in order, because the program gets only a CUDA result
    code. `log` gets one line per failed call and, if `verbose`, one per module and launch.
    """

    gpu: VirtualGPU
    arch: str = "sm_90a"
    log: Callable[[str], None] = lambda line: None
    verbose: bool = False
    names: KernelNames = field(default_factory=KernelNames)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self):
        self.attributes = get_device_attributes(self.arch)
        self._ids = itertools.count(1)
        self._modules: dict[int, Module] = {}
        self._functions: dict[int, Function] = {}
        self._sizes: dict[int, int] = {}  # address -> bytes of every live allocation
        self._kernel_arguments: set[int] = set()  # addresses of allocations passed to a kernel
        self._reported_functions: set[str] = set()
        self._handlers = {op: getattr(self, f"_{op.name.lower()}") for op in Op}

    def handle(
        self, operation: int, arguments: list[int], data, output_size: int
    ) -> tuple[int, tuple, bytes]:
        """Execute one driver call. Return (CUDA result code, up to four results, output bytes).

        `data` is the input as a bytes-like object, `output_size` the size of the caller's output buffer.
        Every exception becomes a result code, and its message is logged.
        """
        try:
            results, output = self._handlers[Op(operation)](arguments, data, output_size)
            return 0, results, output[:output_size]
        except Exception as error:
            self.errors.append(error)
            return self._fail(error, output_size)

    def _fail(self, error: Exception, output_size: int) -> tuple[int, tuple, bytes]:
        """Convert an exception to a result code; log its message and return it as output (a JIT log)."""
        name = getattr(error, "cuda", "CUDA_ERROR_UNKNOWN")
        message = str(error).removesuffix(f" [{name}]")
        if not isinstance(error, VirtualGPUError):  # a bug of the virtual GPU: log the traceback
            message = f"{type(error).__name__}: {message}"
        self.log(f"{name}: {message}")
        output = message.encode()[: output_size - 1] + b"\0" if output_size else b""
        return RESULT_CODES.get(name, 999), (), output

    # -- device ---------------------------------------------------------------------------------------------
    def _hello(self, arguments, data, output_size):
        return (), b""

    def _attribute(self, arguments, data, output_size):
        return (self.attributes.get(arguments[0], 0),), b""

    def _device_name(self, arguments, data, output_size):
        return (), f"virtual GPU ({self.arch})".encode()[: output_size - 1] + b"\0"

    def _memory_info(self, arguments, data, output_size):
        total = self.gpu.arena.size
        return (total - sum(self._sizes.values()), total), b""

    def _clock(self, arguments, data, output_size):
        return (time.monotonic_ns(),), b""

    def _unsupported(self, arguments, data, output_size):
        name = bytes(data).decode()
        if name not in self._reported_functions:
            self._reported_functions.add(name)
            self.log(f"the program called {name}, which the virtual GPU does not implement")
        return (), b""

    def _encode_tensor_map(self, arguments, data, output_size):
        """Encode a tensor map. Input, in words: 5 dimensions, 4 strides, 5 tile sizes, 5 element strides."""
        data_type, rank, address, interleave, swizzle, promotion, fill = arguments[:7]
        words = np.frombuffer(data, "<i8").tolist()
        dims, strides = words[:rank], words[5 : 4 + rank]
        box, element_strides = words[9 : 9 + rank], words[14 : 14 + rank]
        try:
            new_map = tensor_map.encode_tiled(
                data_type, address, dims, strides, box, element_strides,
                interleave=interleave, swizzle=swizzle, promotion=promotion, fill=fill,
            )  # fmt: skip
        except tensor_map.InvalidTensorMap as error:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", f"cuTensorMapEncodeTiled: {error}") from None
        except NotImplementedError as error:
            raise DriverError(
                "CUDA_ERROR_NOT_SUPPORTED", f"the virtual GPU does not simulate {error}"
            ) from None
        if self.verbose:
            self.log("encoded a tensor map")
        return (), new_map.encode()

    # -- memory ---------------------------------------------------------------------------------------------
    def _allocate(self, arguments, data, output_size):
        size = arguments[0]
        if size <= 0:
            raise DriverError("CUDA_ERROR_INVALID_VALUE", f"an allocation of {size} bytes was requested")
        address = self.gpu.allocate(size)
        self._sizes[address] = size
        return (address,), b""

    def _free(self, arguments, data, output_size):
        address = arguments[0]
        if address:
            self.gpu.free(address)
            self._sizes.pop(address, None)
            self._kernel_arguments.discard(address)
        return (), b""

    def _find_allocation(self, address: int) -> int:
        """Return the start of the live allocation that contains an address."""
        extent = self.gpu.arena.find(address)
        if extent is None:
            raise DriverError(
                "CUDA_ERROR_INVALID_VALUE", f"{address:#x} is not an address of the virtual GPU"
            )
        return extent.allocation

    def _address_range(self, arguments, data, output_size):
        base = self._find_allocation(arguments[0])
        return (base, self._sizes.get(base, 0)), b""

    def _write(self, arguments, data, output_size):
        if len(data):
            self.gpu.write(arguments[0], data)
        return (), b""

    def _read(self, arguments, data, output_size):
        """Copy device to host. Unwritten elements are a finding only in memory that was passed to a kernel,
        because Mojo's `map_to_host` copies new buffers to the host before the program fills them."""
        if not output_size:
            return (), b""
        address = arguments[0]
        if self._find_allocation(address) in self._kernel_arguments:
            return (), self.gpu.read(address, output_size).data
        offset = self.gpu.get_offset(address, output_size, "read")
        return (), self.gpu.arena.data[offset : offset + output_size].data

    def _copy(self, arguments, data, output_size):
        target, source, size = arguments[:3]
        if size:
            self.gpu.copy(target, source, size)
        return (), b""

    def _fill(self, arguments, data, output_size):
        address, value, width, count = arguments[:4]
        if count:
            self.gpu.fill(address, value.to_bytes(width, "little"), count)
        return (), b""

    # -- modules and launches -------------------------------------------------------------------------------
    def _load_module(self, arguments, data, output_size):
        image = bytes(data)
        if image[:4] == b"\x7fELF" or not image.lstrip().startswith((b"//", b".version")):
            raise DriverError(
                "CUDA_ERROR_INVALID_IMAGE",
                "this kernel was compiled to machine code, and the virtual GPU executes PTX: compile it again"
                " with MODULAR_NVPTX_COMPILER_PATH as `vgpu exec` sets it",
            )
        module = self.gpu.load(image.decode())
        handle = next(self._ids)
        self._modules[handle] = module
        if self.verbose:
            self.log(f"loaded {', '.join(module.kernels)}")
        return (handle,), b""

    def _get_module(self, handle: int) -> Module:
        if handle not in self._modules:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", f"module handle {handle} is not loaded")
        return self._modules[handle]

    def _unload_module(self, arguments, data, output_size):
        self._get_module(arguments[0])
        del self._modules[arguments[0]]
        return (), b""

    def _find_function(self, arguments, data, output_size):
        module, name = self._get_module(arguments[0]), bytes(data).decode()
        if name not in module.kernels:
            raise DriverError("CUDA_ERROR_NOT_FOUND", f"the module has no kernel named {name}")
        kernel = module.kernels[name]
        layout = compute_parameter_layout(list(kernel.param_sizes))
        if len(layout) * 16 > output_size:
            raise DriverError("CUDA_ERROR_NOT_SUPPORTED", f"kernel {name} has {len(layout)} parameters")
        handle = next(self._ids)
        self._functions[handle] = Function(
            kernel, self.names.get_label(name), layout, MAX_STATIC_SHARED_BYTES
        )
        encoded = b"".join(word.to_bytes(8, "little") for pair in layout for word in pair)
        return (handle,), encoded

    def _get_function(self, handle: int) -> Function:
        if handle not in self._functions:
            raise DriverError("CUDA_ERROR_INVALID_HANDLE", f"kernel handle {handle} is unknown")
        return self._functions[handle]

    def _find_global(self, arguments, data, output_size):
        module, name = self._get_module(arguments[0]), bytes(data).decode()
        address = module.addresses.get(name)
        if address is None:
            raise DriverError("CUDA_ERROR_NOT_FOUND", f"the module has no variable named {name}")
        extent = self.gpu.arena.find(address)
        assert extent is not None  # loading the module has allocated it
        return (address, extent.end - extent.start), b""

    def _function_attribute(self, arguments, data, output_size):
        function, attribute = self._get_function(arguments[0]), arguments[1]
        major, minor = get_compute_capability(self.arch)
        values = {
            MAX_THREADS_PER_BLOCK: function.kernel.max_threads,
            SHARED_SIZE_BYTES: function.kernel.shared_bytes,
            PTX_VERSION: 10 * major + minor,
            BINARY_VERSION: 10 * major + minor,
            MAX_DYNAMIC_SHARED: function.dynamic_shared_limit,
        }
        return (values.get(attribute, 0),), b""

    def _set_function_attribute(self, arguments, data, output_size):
        function, attribute, value = self._get_function(arguments[0]), arguments[1], arguments[2]
        if attribute == MAX_DYNAMIC_SHARED:
            limit = self.attributes[97] - function.kernel.shared_bytes
            if not 0 <= value <= limit:
                message = f"{value} bytes of dynamic shared memory requested, the limit is {limit}"
                raise DriverError("CUDA_ERROR_INVALID_VALUE", f"{function.label}: {message}")
            function.dynamic_shared_limit = value
        return (), b""

    def _occupancy(self, arguments, data, output_size):
        """Return the blocks per multiprocessor, limited by threads and shared memory but not by registers."""
        function, threads, dynamic = self._get_function(arguments[0]), max(arguments[1], 1), arguments[2]
        shared = function.kernel.shared_bytes + dynamic + self.attributes[111]
        blocks = min(self.attributes[106], self.attributes[39] // threads, self.attributes[81] // shared)
        return (blocks,), b""

    def _launch(self, arguments, data, output_size):
        function = self._get_function(arguments[0])
        grid, block = tuple(arguments[1:4]), tuple(arguments[4:7])
        shared, cluster = arguments[7], tuple(max(size, 1) for size in arguments[8:11])
        if shared > function.dynamic_shared_limit:
            raise DriverError(
                "CUDA_ERROR_INVALID_VALUE",
                f"{function.label}: {shared} bytes of dynamic shared memory, but a launch gets at most "
                f"{function.dynamic_shared_limit} unless FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES allows"
                " more",
            )
        packed = bytes(data)
        # Any word of the arguments may be an address.
        for word in np.frombuffer(packed[: len(packed) // 8 * 8], "<u8").tolist():
            if extent := self.gpu.arena.find(word):
                self._kernel_arguments.add(extent.allocation)
        args = [packed[offset : offset + size] for offset, size in function.layout]
        launch = self.gpu.launch(
            function.kernel, grid, block, args, shared_bytes=shared, cluster=cluster, name=function.label
        )
        if self.verbose:
            self.log(
                f"ran {function.label} grid={grid} block={block}: {launch.counters.instructions} thread"
                f" instructions in {1e3 * launch.duration_s:.1f} ms"
            )
        return (), b""
