"""The virtual GPU's public interface: memory, modules, launches, findings and counters.

>>> gpu = VirtualGPU()
>>> kernel = next(iter(gpu.load(ptx_text).kernels.values()))
>>> x = gpu.allocate(4096, "x")
>>> gpu.write(x, numpy_array)
>>> launch = gpu.launch(kernel, grid=(4, 1, 1), block=(256, 1, 1), args=[x.to_bytes(8, "little")])
>>> launch.findings, launch.counters

Reports call the device "virtual GPU (sm_90a)", never "GPU". It counts work but does not measure time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from harness.vgpu.checks.counters import Counters
from harness.vgpu.checks.events import Events
from harness.vgpu.checks.findings import Checks, Finding, Findings, format_count, format_index, mark_name
from harness.vgpu.engine.launch import Run
from harness.vgpu.engine.opcodes import arithmetic_ops, hopper_ops, memory_ops  # noqa: F401  (the emitters)
from harness.vgpu.engine.opcodes.codegen import Code
from harness.vgpu.memory.arena import DEFAULT_BASE, Arena, OutOfSpace
from harness.vgpu.ptx import parser
from harness.vgpu.ptx.program import LinkError, Program
from harness.vgpu.ptx.source_names import find_shared_names

from .errors import InvalidAddress, InvalidPTX, LaunchError, OutOfDeviceMemory, UnsupportedPTXVersion

MAX_STATIC_SHARED_BYTES = 48 << 10
MAX_SHARED_BYTES = 227 << 10
RED_ZONE_BYTES = 256
FIRST_SHARED_OFFSET = 1024


@dataclass(eq=False)
class Kernel:
    """A loaded kernel; `param_sizes` are the sizes of the parameters in bytes, `shared_layout` maps names to (offset, size)."""

    name: str
    param_sizes: list[int]
    shared_bytes: int
    max_threads: int
    function: parser.Function
    module: Module
    shared_layout: dict[str, tuple[int, int]] = field(default_factory=dict)

    @functools.cached_property
    def code(self) -> Code:
        """The kernel's control-flow graph and generated code. Raises InvalidPTX."""
        try:
            program = Program(self.module.parsed, self.function)
        except LinkError as error:
            raise InvalidPTX(f"kernel {self.name}: {error}") from None
        return Code(program, self.module.addresses, self.shared_layout)

    @functools.cached_property
    def shared_names(self) -> dict[str, str]:
        return find_shared_names(self.code.program, self.shared_layout)


@dataclass(eq=False)
class Module:
    """A loaded PTX module: its kernels by name, and the device addresses of its variables."""

    parsed: parser.Module
    text: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Launch:
    """One finished launch.

    `events` are its accesses to global and shared memory, recorded if gpu.max_events is set.
    """

    name: str
    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    counters: Counters = field(init=False)
    findings: list[Finding] = field(default_factory=list)
    events: Events | None = None
    duration_s: float = 0.0


class VirtualGPU:
    """One simulated device.

    memory: the whole device memory (uint8), or None to reserve it. base: device address of its first byte.
    block_order: order of the thread blocks, "natural", "reversed", "shuffled" or "shuffled:SEED"; orders other than
    natural run the grid in several batches, to expose results that depend on the order.

    Settable attributes: `max_events` (maximum number of accesses to record per launch), `max_steps` (budget of
    basic-block executions per launch), `max_batch_threads` (maximum number of threads per batch), `echo` (print
    the output of kernels)."""

    def __init__(
        self, arch="sm_90a", *, memory=None, base=DEFAULT_BASE, checks: Checks | None = None,
        block_order="natural",
    ):  # fmt: skip
        if base % 256:
            raise ValueError("base must be a multiple of 256")
        order, _, seed = block_order.partition(":")
        if order not in ("natural", "reversed", "shuffled") or (seed and not seed.isdigit()):
            raise ValueError(f"block_order is '{block_order}', expected natural, reversed or shuffled[:SEED]")
        self.arch, self.checks, self.block_order = arch, checks or Checks(), block_order
        self.arena = Arena(memory, base)
        self.findings: Findings = Findings()
        self.launches: list[Launch] = []
        self.modules: list[Module] = []
        self.output: list[str] = []
        self.echo, self.max_events, self.max_steps, self.max_batch_threads = True, 0, 3_000_000, 65536

    @property
    def title(self) -> str:
        return f"virtual GPU ({self.arch})"

    # -- memory ---------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int, name: str = "") -> int:
        """Return a device address that is a multiple of 256. Raises OutOfDeviceMemory."""
        try:
            return self.arena.allocate(nbytes, name)
        except OutOfSpace:
            raise OutOfDeviceMemory(
                f"cannot allocate {nbytes} bytes: the {self.title} has {self.arena.size} bytes of device memory"
            ) from None

    def free(self, address: int) -> None:
        if not self.arena.free(address):
            raise InvalidAddress(f"there is no allocation at {address:#x} to free")

    def name(self, address: int, nbytes: int, name: str, shape=(), dtype="") -> None:
        """Label a range inside an allocation as one tensor, for bounds checks and reports."""
        self.get_offset(address, nbytes, "label")
        self.arena.label(address, nbytes, name, shape, str(dtype))

    def report_writes(self, address: int, kind: str) -> None:
        """Report writes to the tensor at an address as findings of a kind: "store to an input", "undeclared
        atomic", or "" for none. An input is restored after a launch that wrote to it."""
        tensor = self.arena.find(address)
        if tensor is not None:
            tensor.write_violation = kind

    def get_offset(self, address: int, nbytes: int, action: str) -> int:
        """Return the offset of a range in device memory. Raises InvalidAddress if the range is not
        inside one allocation; `action` is for its message."""
        offset = self.arena.get_offset(address, nbytes)
        if offset is None:
            raise InvalidAddress(
                f"cannot {action} {nbytes} bytes at {address:#x}: that is not inside one allocation"
            )
        return offset

    def write(self, address: int, data) -> None:
        """Copy host to device."""
        is_buffer = isinstance(data, (bytes, bytearray, memoryview))
        raw = np.frombuffer(data, np.uint8) if is_buffer else np.asarray(data)
        raw = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        offset = self.get_offset(address, len(raw), "write")
        self.arena.data[offset : offset + len(raw)] = raw
        self.arena.written[offset : offset + len(raw)] = 1
        self.arena.update_fully_written(address, len(raw))

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """Copy device to host, as uint8; report unwritten elements."""
        offset = self.get_offset(address, nbytes, "read")
        self.check_written(address, nbytes)
        return self.arena.data[offset : offset + nbytes].copy()

    def check_written(self, address: int, nbytes: int) -> None:
        """Record a finding for every tensor with unwritten elements in the range."""
        if not self.checks.uninitialised or not nbytes:
            return
        missing = self.arena.find_unwritten(address, nbytes)
        if not len(missing):
            return
        addresses = address + missing
        number, ends = self.arena.locate(addresses.astype(np.uint64))
        inside = addresses < ends.astype(np.int64)  # leave out padding between labelled tensors
        addresses, number = addresses[inside], number[inside]
        for k in np.unique(number).tolist():
            extent = self.arena.extents[k]
            hits = addresses[number == k]
            size = max(extent.end - extent.start, 1)
            index = extent.index(int(hits[0]), 1)
            unit = "" if extent.dtype else "byte "
            name, missing = mark_name(extent.name), f"({len(hits)} of {format_count(size, 'byte')} missing)"
            message = (
                f"the host reads {name}, but {unit}{name}{format_index(index)} was never written {missing}"
            )
            finding = Finding(
                "output never written", message, tensor=extent.name, index=index, kernel=extent.last_writer
            )
            self.findings.record(finding, ("unwritten", extent.name, extent.start))

    def fill(self, address: int, value: bytes, count: int) -> None:
        """Fill memory with `count` copies of `value` (1, 2 or 4 bytes)."""
        self.write(address, np.tile(np.frombuffer(value, np.uint8), count))

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy device to device; unwritten bytes stay unwritten."""
        target_offset, source_offset = (
            self.get_offset(dst, nbytes, "copy to"),
            self.get_offset(src, nbytes, "copy from"),
        )
        for bytes_ in (self.arena.data, self.arena.written):
            bytes_[target_offset : target_offset + nbytes] = bytes_[
                source_offset : source_offset + nbytes
            ].copy()
        for extent in self.arena.extents:
            if extent.start < dst + nbytes and extent.end > dst:
                extent.fully_written = False
        self.arena.update_fully_written(dst, nbytes)

    # -- modules --------------------------------------------------------------------------------------------
    def load(self, text: str) -> Module:
        """Load PTX. Raises InvalidPTX, or UnsupportedPTXVersion for an unknown version."""
        try:
            parsed = parser.parse(text)
        except parser.PtxError as error:
            raise InvalidPTX(str(error)) from None
        if not (6, 0) <= parsed.version < (10, 0):
            raise UnsupportedPTXVersion(
                f"PTX version {parsed.version[0]}.{parsed.version[1]} is not supported by the {self.title}"
            )
        if not parsed.target.startswith("sm_"):
            raise InvalidPTX(f"PTX target '{parsed.target}' is not supported by the {self.title}")
        module = Module(parsed, text)
        for v in parsed.variables.values():
            if v.space in ("global", "const") and v.nbytes:
                address = module.addresses[v.name] = self.allocate(v.nbytes, v.name)
                extent = self.arena.find(address)
                assert extent is not None  # just allocated
                extent.write_violation = "store to constant memory" if v.space == "const" else ""
        for v in parsed.variables.values():
            if v.name in module.addresses:
                data = bytearray(v.data or bytes(v.nbytes))
                for offset, symbol, addend in v.pointers:
                    if symbol not in module.addresses:
                        raise InvalidPTX(f"variable {v.name} points to {symbol}, which is not a variable")
                    value = module.addresses[symbol] + addend
                    data[offset : offset + 8] = value.to_bytes(8, "little")
                self.write(module.addresses[v.name], bytes(data))
        for f in parsed.functions.values():
            if f.is_entry and f.has_body:
                module.kernels[f.name] = self._create_kernel(module, f)
        self.modules.append(module)
        return module

    def _create_kernel(self, module: Module, f: parser.Function) -> Kernel:
        layout: dict[str, tuple[int, int]] = {}
        offset = FIRST_SHARED_OFFSET
        static = 0
        used = [g for g in module.parsed.functions.values() if g is f or not g.is_entry]
        for v in (v for scope in (module.parsed, *used) for v in scope.variables.values()):
            if v.space == "shared" and v.nbytes:
                offset = -(-offset // v.align) * v.align
                layout[v.name] = (offset, v.nbytes)
                offset += v.nbytes + RED_ZONE_BYTES
                static += v.nbytes
        dynamic = [v for v in module.parsed.variables.values() if v.space == "shared" and not v.nbytes]
        align = max([128, *(v.align for v in dynamic)])
        offset = -(-offset // align) * align
        for v in dynamic:
            layout[v.name] = (offset, 0)
        if static > MAX_STATIC_SHARED_BYTES:
            raise InvalidPTX(
                f"kernel {f.name} declares {static} bytes of static shared memory, the limit is"
                f" {MAX_STATIC_SHARED_BYTES} (use dynamic shared memory)"
            )
        return Kernel(f.name, [p.nbytes for p in f.params], static, f.max_threads or 1024, f, module, layout)

    # -- launches -------------------------------------------------------------------------------------------
    def launch(self, kernel: Kernel, grid, block, args, shared_bytes=0, cluster=(1, 1, 1), name="") -> Launch:
        """Run a kernel to completion and return its Launch, which is also appended to `launches`.

        args: the bytes of each parameter. Raises LaunchError for an invalid launch, UnsupportedInstruction or
        StepBudgetExceeded. Errors in the kernel are reported as findings, not raised.
        """
        grid, block, cluster = (_parse_dimensions(sizes) for sizes in (grid, block, cluster))
        self._check_launch(kernel, grid, block, args, shared_bytes, cluster)
        launch = Launch(name or kernel.name, kernel, grid, block)
        run = Run(self, launch, kernel, args, shared_bytes, cluster)
        self.launches.append(launch)
        run.execute()
        return launch

    def _check_launch(self, kernel, grid, block, args, shared_bytes, cluster):
        threads = block[0] * block[1] * block[2]
        grid_limits, block_limits = (2**31 - 1, 65535, 65535), (1024, 1024, 64)
        for subject, sizes, limits in (("grid", grid, grid_limits), ("block", block, block_limits)):
            for axis, size, limit in zip("xyz", sizes, limits, strict=True):
                if not 1 <= size <= limit:
                    raise LaunchError(f"{subject} dimension {axis} is {size}, must be from 1 to {limit}")
        if threads > 1024:
            raise LaunchError(f"{threads} threads in a block, the limit is 1024")
        if threads > kernel.max_threads:
            raise LaunchError(
                f"{threads} threads in a block, but {kernel.name} was compiled for at most"
                f" {kernel.max_threads}",
                "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
            )
        if shared_bytes < 0 or kernel.shared_bytes + shared_bytes > MAX_SHARED_BYTES:
            raise LaunchError(
                f"{kernel.shared_bytes} + {shared_bytes} bytes of shared memory, the limit is {MAX_SHARED_BYTES}"
                " per block"
            )
        if len(args) != len(kernel.param_sizes):
            raise LaunchError(
                f"{kernel.name} takes {len(kernel.param_sizes)} arguments, {len(args)} were given"
            )
        for k, (arguments, size) in enumerate(zip(args, kernel.param_sizes, strict=True)):
            if len(arguments) != size:
                raise LaunchError(
                    f"argument {k} of {kernel.name} has {size} bytes, {len(arguments)} were given"
                )
        size = cluster[0] * cluster[1] * cluster[2]
        if size < 1 or size > 16 or any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise LaunchError(
                f"cluster {cluster} does not divide grid {grid}, or has more than 16 blocks",
                "CUDA_ERROR_INVALID_CLUSTER_SIZE",
            )

    def print(self, text: str) -> None:
        self.output.append(text)
        if self.echo:
            sys.stdout.write(text)
            sys.stdout.flush()


def _parse_dimensions(sizes: Iterable[int]) -> tuple[int, int, int]:
    try:
        x, y, z = (int(size) for size in sizes)
    except ValueError:
        raise LaunchError("grid, block and cluster need three dimensions") from None
    return x, y, z
