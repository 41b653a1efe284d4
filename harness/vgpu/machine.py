"""The simulated device: memory, modules, launches, findings and counters; the public interface.

>>> gpu = VirtualGPU()
>>> kernel = next(iter(gpu.load(ptx_text).kernels.values()))
>>> x = gpu.allocate(4096, "x")
>>> gpu.write(x, numpy_array)
>>> launch = gpu.launch(kernel, grid=(4, 1, 1), block=(256, 1, 1), args=[x.to_bytes(8, "little")])
>>> launch.findings, launch.counters

Reports call it "virtual GPU (sm_90a)", never a GPU. It has no time, only counts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from harness.vgpu.checks.counters import Counters
from harness.vgpu.checks.events import Events
from harness.vgpu.checks.findings import Checks, Finding, Findings, index_text, mark_name, plural
from harness.vgpu.engine.launch import Run
from harness.vgpu.engine.opcodes import (  # noqa: F401  (they register their emitters)
    arithmetic_ops,
    hopper_ops,
    memory_ops,
)
from harness.vgpu.engine.opcodes.codegen import Code
from harness.vgpu.memory.arena import DEFAULT_BASE, Arena, OutOfSpace
from harness.vgpu.ptx import parser
from harness.vgpu.ptx.program import LinkError, Program
from harness.vgpu.ptx.source_names import shared_names

from .errors import InvalidAddress, InvalidPTX, LaunchError, OutOfDeviceMemory, UnsupportedPTXVersion

STATIC_SHARED_LIMIT = 48 << 10
SHARED_LIMIT = 227 << 10
RED_ZONE = 256
FIRST_SHARED = 1024


@dataclass(eq=False)
class Kernel:
    """A loaded kernel: `params` are the sizes of its parameters in bytes."""

    name: str
    params: list[int]
    shared_bytes: int
    max_threads: int
    function: parser.Function
    module: Module
    shared_map: dict[str, tuple[int, int]] = field(default_factory=dict)

    @functools.cached_property
    def code(self) -> Code:
        """The kernel's control-flow graph and generated code. Raises InvalidPTX."""
        try:
            program = Program(self.module.parsed, self.function)
        except LinkError as error:
            raise InvalidPTX(f"kernel {self.name}: {error}") from None
        return Code(program, self.module.addresses, self.shared_map)

    @functools.cached_property
    def shared_names(self) -> dict[str, str]:
        """The source names of variables in shared memory, where known."""
        return shared_names(self.code.program, self.shared_map)


@dataclass(eq=False)
class Module:
    """Loaded PTX: its kernels by name, and the device addresses of its variables."""

    parsed: parser.Module
    text: str = ""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Launch:
    """One finished launch.

    `events` holds every access to global and shared memory, if gpu.keep_events is set.
    """

    name: str
    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    counters: Counters = field(init=False)
    findings: list[Finding] = field(default_factory=list)
    events: Events | None = None
    seconds: float = 0.0


class VirtualGPU:
    """One simulated device.

    memory: the bytes of the whole device memory (uint8), or None to reserve some. base: device address of its
    first byte. blocks: order of the thread blocks, "natural", "reversed", "shuffled" or "shuffled:SEED";
    orders other than natural run the grid in several batches, so that values which depend on the order
    differ.

    Attributes to set: `keep_events` (accesses of a launch to record, 0 for none), `steps` (budget of
    basic-block executions for one launch), `batch_threads` (threads that run together), `echo` (print what
    kernels print)."""

    def __init__(
        self, arch="sm_90a", *, memory=None, base=DEFAULT_BASE, checks: Checks | None = None, blocks="natural"
    ):
        if base % 256:
            raise ValueError("base must be a multiple of 256")
        order, _, seed = blocks.partition(":")
        if order not in ("natural", "reversed", "shuffled") or (seed and not seed.isdigit()):
            raise ValueError(f"blocks is '{blocks}', expected natural, reversed or shuffled[:SEED]")
        self.arch, self.checks, self.blocks = arch, checks or Checks(), blocks
        self.arena = Arena(memory, base)
        self.findings: Findings = Findings()
        self.launches: list[Launch] = []
        self.modules: list[Module] = []
        self.output: list[str] = []
        self.echo, self.keep_events, self.steps, self.batch_threads = True, 0, 3_000_000, 65536

    @property
    def title(self) -> str:
        """The name of this device in reports."""
        return f"virtual GPU ({self.arch})"

    # -- memory ---------------------------------------------------------------------------------------------
    def allocate(self, nbytes: int, name: str = "") -> int:
        """Return a device address, a multiple of 256, with a guard zone after it. Raise OutOfDeviceMemory."""
        try:
            return self.arena.allocate(nbytes, name)
        except OutOfSpace:
            raise OutOfDeviceMemory(
                f"no room for {nbytes} bytes in the device memory of {self.arena.size} bytes of the"
                f" {self.title}"
            ) from None

    def free(self, address: int) -> None:
        """Free an allocation. Raise InvalidAddress."""
        if not self.arena.free(address):
            raise InvalidAddress(f"there is no allocation at {address:#x} to free")

    def name(self, address: int, nbytes: int, name: str, shape=(), dtype="") -> None:
        """Label a range inside an allocation as one exact tensor, for bounds and reports."""
        self.offset(address, nbytes, "label")
        self.arena.label(address, nbytes, name, shape, str(dtype))

    def forbid(self, address: int, kind: str) -> None:
        """Forbid writes to the tensor at an address, by the kind of finding: "store to an input", "undeclared
        atomic", or "" for none. An input is restored after a launch that wrote it."""
        tensor = self.arena.find(address)
        if tensor is not None:
            tensor.forbids = kind

    def offset(self, address: int, nbytes: int, what: str) -> int:
        """Return the offset in device memory of bytes to `what`. Raise InvalidAddress if they are not inside
        one allocation."""
        offset = self.arena.offset(address, nbytes)
        if offset is None:
            raise InvalidAddress(
                f"cannot {what} {nbytes} bytes at {address:#x}: that is not inside one allocation"
            )
        return offset

    def write(self, address: int, data) -> None:
        """Copy host to device."""
        raw = (
            np.frombuffer(data, np.uint8)
            if isinstance(data, (bytes, bytearray, memoryview))
            else np.asarray(data)
        )
        raw = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        offset = self.offset(address, len(raw), "write")
        self.arena.data[offset : offset + len(raw)] = raw
        self._wrote(address, len(raw))

    def _wrote(self, address: int, nbytes: int):
        offset = address - self.arena.base
        self.arena.written[offset : offset + nbytes] = 1
        self.arena.refresh(address, nbytes)

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """Copy device to host, as uint8. Unwritten elements are a finding."""
        offset = self.offset(address, nbytes, "read")
        self.check_written(address, nbytes)
        return self.arena.data[offset : offset + nbytes].copy()

    def check_written(self, address: int, nbytes: int) -> None:
        """Record a finding for every tensor in the range with unwritten elements."""
        if not self.checks.uninitialised or not nbytes:
            return
        missing = self.arena.unwritten(address, nbytes)
        if not len(missing):
            return
        at = address + missing
        number, ends = self.arena.locate(at.astype(np.uint64))
        inside = at < ends.astype(np.int64)  # padding between labelled tensors is not an output
        at, number = at[inside], number[inside]
        for k in np.unique(number).tolist():
            e = self.arena.extents[k]
            mine = at[number == k]
            size = max(e.end - e.start, 1)
            index = e.index(int(mine[0]), 1)
            unit = "" if e.dtype else "byte "
            finding = Finding(
                "output never written",
                f"the host reads {mark_name(e.name)}, but {unit}{mark_name(e.name)}{index_text(index)} was never"
                " written"
                f" ({len(mine)} of {plural(size, 'byte')} missing)",
                tensor=e.name,
                index=index,
                kernel=e.writer,
            )
            self.findings.record(finding, ("unwritten", e.name, e.start))

    def fill(self, address: int, value: bytes, count: int) -> None:
        """Repeat `value` (1, 2 or 4 bytes) `count` times."""
        self.write(address, np.tile(np.frombuffer(value, np.uint8), count))

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy device to device; unwritten bytes stay unwritten."""
        to, frm = self.offset(dst, nbytes, "copy to"), self.offset(src, nbytes, "copy from")
        for bytes_ in (self.arena.data, self.arena.written):
            bytes_[to : to + nbytes] = bytes_[frm : frm + nbytes].copy()
        for e in self.arena.extents:
            if e.start < dst + nbytes and e.end > dst:
                e.ready = False
        self.arena.refresh(dst, nbytes)

    # -- modules --------------------------------------------------------------------------------------------
    def load(self, text: str) -> Module:
        """Load PTX. Raise InvalidPTX, or UnsupportedPTXVersion for an unknown version."""
        try:
            parsed = parser.parse(text)
        except parser.PtxError as error:
            raise InvalidPTX(str(error)) from None
        if not (6, 0) <= parsed.version < (10, 0):
            raise UnsupportedPTXVersion(
                f"PTX version {parsed.version[0]}.{parsed.version[1]} is not known to the {self.title}"
            )
        if not parsed.target.startswith("sm_"):
            raise InvalidPTX(f"PTX target '{parsed.target}' is not known to the {self.title}")
        module = Module(parsed, text)
        for v in parsed.variables.values():
            if v.space in ("global", "const") and v.nbytes:
                address = module.addresses[v.name] = self.allocate(v.nbytes, v.name)
                extent = self.arena.find(address)
                assert extent is not None  # just allocated
                extent.forbids = "store to constant memory" if v.space == "const" else ""
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
                module.kernels[f.name] = self._kernel(module, f)
        self.modules.append(module)
        return module

    def _kernel(self, module: Module, f: parser.Function) -> Kernel:
        layout: dict[str, tuple[int, int]] = {}
        at = FIRST_SHARED
        static = 0
        used = [
            v
            for g in module.parsed.functions.values()
            for v in g.variables.values()
            if g is f or not g.is_entry
        ]
        for v in [*module.parsed.variables.values(), *used]:
            if v.space == "shared" and v.nbytes:
                at = -(-at // v.align) * v.align
                layout[v.name] = (at, v.nbytes)
                at += v.nbytes + RED_ZONE
                static += v.nbytes
        dynamic = [v for v in module.parsed.variables.values() if v.space == "shared" and not v.nbytes]
        align = max([128, *(v.align for v in dynamic)])
        at = -(-at // align) * align
        for v in dynamic:
            layout[v.name] = (at, 0)
        if static > STATIC_SHARED_LIMIT:
            raise InvalidPTX(
                f"kernel {f.name} declares {static} bytes of static shared memory, the limit is"
                f" {STATIC_SHARED_LIMIT}"
                " (use dynamic shared memory)"
            )
        return Kernel(f.name, [p.nbytes for p in f.params], static, f.max_threads or 1024, f, module, layout)

    # -- launches -------------------------------------------------------------------------------------------
    def launch(self, kernel: Kernel, grid, block, args, shared_bytes=0, cluster=(1, 1, 1), name="") -> Launch:
        """Run a kernel to its end and return its Launch, which is also appended to `launches`.

        args: the bytes of each parameter. Raise LaunchError before anything runs, UnsupportedInstruction,
        StepBudgetExceeded. Faults of the kernel are findings, not exceptions.
        """
        grid, block, cluster = (_triple(sizes) for sizes in (grid, block, cluster))
        self._check_launch(kernel, grid, block, args, shared_bytes, cluster)
        launch = Launch(name or kernel.name, kernel, grid, block)
        run = Run(self, launch, kernel, args, shared_bytes, cluster)
        self.launches.append(launch)
        run.execute()
        return launch

    def _check_launch(self, kernel, grid, block, args, shared_bytes, cluster):
        threads = block[0] * block[1] * block[2]
        for what, sizes, limits in (
            ("grid", grid, (2**31 - 1, 65535, 65535)),
            ("block", block, (1024, 1024, 64)),
        ):
            for axis, size, limit in zip("xyz", sizes, limits, strict=True):
                if not 1 <= size <= limit:
                    raise LaunchError(f"{what} dimension {axis} is {size}, allowed are 1 to {limit}")
        if threads > 1024:
            raise LaunchError(f"{threads} threads in a block, the limit is 1024")
        if threads > kernel.max_threads:
            raise LaunchError(
                f"{threads} threads in a block, but {kernel.name} was compiled for at most"
                f" {kernel.max_threads}",
                "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
            )
        if shared_bytes < 0 or kernel.shared_bytes + shared_bytes > SHARED_LIMIT:
            raise LaunchError(
                f"{kernel.shared_bytes} + {shared_bytes} bytes of shared memory, the limit is {SHARED_LIMIT}"
                " per block"
            )
        if len(args) != len(kernel.params):
            raise LaunchError(f"{kernel.name} takes {len(kernel.params)} arguments, {len(args)} were given")
        for k, (arguments, size) in enumerate(zip(args, kernel.params, strict=True)):
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


def _triple(sizes: Iterable[int]) -> tuple[int, int, int]:
    try:
        x, y, z = (int(size) for size in sizes)
    except ValueError:
        raise LaunchError("grid, block and cluster need three dimensions") from None
    return x, y, z
