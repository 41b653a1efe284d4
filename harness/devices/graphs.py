"""Compile calls of a package's ops into one MAX graph, cached, and run it on MAX buffers.

All sizes are symbolic, so one graph serves all shapes. Outputs are written to the caller's buffers, which can
be filled beforehand to detect unwritten elements. torch is imported only to run a graph.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession, Model, read
from max.engine.api import DLPackArray
from max.graph import BufferType, DeviceRef, Graph, KernelLibrary, Module, TensorType, ops

from harness.errors import CompileFailed
from harness.spec.ops import Call
from harness.spec.rounding import as_array, as_tensor
from harness.toolchain.cache import (
    cache_file,
    cache_text,
    compute_digest,
    discard,
    get_cache_folder,
    read_cached_text,
)
from harness.toolchain.disk import find_disk_full_error
from harness.toolchain.packages import OpPackage

if TYPE_CHECKING:  # the layers import this module, which must not import puzzles
    import torch

    from harness.devices.targets import Target
    from harness.spec.puzzle import Arrays, Dims, Puzzle

T = TypeVar("T")
DTYPES = {
    name: DType[name]
    for name in ("float32", "float64", "bfloat16", "float16", "bool", "uint8", "int32", "int64")
}


@dataclass
class Program:
    """A compiled graph: `run` executes its calls in order."""

    arguments: list[str]
    model: Model
    dtype: str
    cached: bool
    load_time_s: float = field(default=0.0)

    def run(self, buffers: Mapping[str, Buffer | DLPackArray]) -> None:
        """Execute every call; `buffers` maps each name in `arguments` to a Buffer or a DLPack tensor."""
        self.model.execute(*(buffers[name] for name in self.arguments))


def get_argument_types(
    calls: tuple[Call, ...], dtype: str, device: DeviceRef
) -> dict[str, TensorType | BufferType]:
    """Return the graph's inputs by name: buffers for written tensors, tensors for the others."""
    types: dict[str, TensorType | BufferType] = {}
    for call in calls:
        for name, argument in call.op.writes.items():
            element = DTYPES[argument.resolve_dtype(dtype)]
            types[qualify_name(call, name)] = BufferType(element, list(argument.shape), device=device)
    for call in calls:
        for name, argument in call.op.reads.items():
            if qualify_name(call, name) not in types:
                element = DTYPES[argument.resolve_dtype(dtype)]
                types.setdefault(name, TensorType(element, list(argument.shape), device=device))
        for name, scalar in call.op.scalars.items():
            types.setdefault(name, TensorType(DTYPES[scalar.dtype], [], device=DeviceRef.CPU()))
    return types


def qualify_name(call: Call, name: str) -> str:
    return f"{call.prefix}.{name}" if call.prefix else name


def build_graph(
    name: str,
    package: OpPackage,
    calls: tuple[Call, ...],
    dtype: str,
    device: DeviceRef,
    module: Module | None = None,
    library: KernelLibrary | None = None,
) -> tuple[Graph, list[str]]:
    """Return the graph of the calls, in order, and its inputs' names. Raises CompileFailed for a missing op.

    The graph is added to `module`, if given. `library` is the package as loaded by MAX, which takes over 1 s.
    """
    library = library or load_kernel_library(package)
    for call in calls:
        if call.op.name not in library:
            raise CompileFailed(f"{package.path} registers no op {call.op.name!r}")
    types = get_argument_types(calls, dtype, device)
    graph = Graph(name, input_types=list(types.values()), kernel_library=library, module=module)
    with graph:
        values = dict(zip(types, graph.inputs, strict=True))

        def read_value(call: Call, argument: str):
            buffer = values.get(qualify_name(call, argument)) if call.prefix else None
            if buffer is not None and isinstance(types[qualify_name(call, argument)], BufferType):
                return ops.buffer_load(buffer.buffer)
            return values[argument].tensor

        for call in calls:
            operands = [values[qualify_name(call, argument)].buffer for argument in call.op.writes]
            operands += [read_value(call, argument) for argument in call.op.reads]
            operands += [values[name].tensor for name in call.op.scalars]
            ops.inplace_custom(call.op.name, device, operands, parameters=dict(call.parameters))
        graph.output()
    return graph, list(types)


def load_kernel_library(package: OpPackage) -> KernelLibrary:
    for _ in range(2):
        path = package.compile()
        library = KernelLibrary()
        library.load_paths([path])
        try:
            _ = "" in library  # makes MAX read the file
            return library
        except ValueError:
            discard(path)
    raise CompileFailed(f"{package.path}: MAX cannot read the compiled package")


def load(package: OpPackage, calls: tuple[Call, ...], dtype: str, device: Device, **options: Any) -> Program:
    return load_graphs(package, {"graph": calls}, dtype, device, **options)["graph"]


def load_graphs(
    package: OpPackage,
    graphs: Mapping[str, tuple[Call, ...]],
    dtype: str | Mapping[str, str],
    device: Device,
    *,
    kind: str = "",
    on_compile: Callable[[], None] = lambda: None,
    before_init: Callable[[], None] = lambda: None,
) -> dict[str, Program]:
    """Return graphs compiled for `device`, by name, from the cache if possible.

    They are compiled as one unit, because the compile time hardly depends on the number of graphs. CPU graphs
    that were compiled as part of a larger unit are loaded from that unit.

    Args:
        package: The op package.
        graphs: The calls of each graph, in order.
        dtype: A key of DTYPES, or a mapping from graph names to such keys.
        device: The device to compile for.
        kind: Part of the cache key, for devices that need separate code ("virtual").
        on_compile: Called before compiling, which takes ten seconds or more, if nothing is cached.
        before_init: Called before the kernels are passed to the device.

    Raises CompileFailed, with the compiler's message, if the package or a graph does not compile, and
    EnvironmentProblem if the cache cannot be written.
    """
    started = time.monotonic()
    is_cpu = device.label == "cpu"
    target = get_host_identity() if is_cpu else f"{device.api} {device.architecture_name}"
    dtypes = {name: dtype if isinstance(dtype, str) else dtype[name] for name in graphs}
    key_parts = [
        dtype if isinstance(dtype, str) else repr(sorted(dtypes.items())),
        repr(sorted(graphs.items())),
    ]
    key = compute_digest([package.digest, version("max"), target, kind, *key_parts])
    path = get_cache_folder("graphs") / f"{key}.mef"
    session = InferenceSession(devices=[CPU()] if is_cpu else [CPU(), device])
    compiled, names_in_unit = read_cached(path), {name: name for name in graphs}
    entries = {
        name: compute_digest([package.digest, version("max"), target, kind, dtypes[name], repr(calls)])
        for name, calls in graphs.items()
    }
    if compiled is None and is_cpu:
        compiled, names_in_unit = find_cached_unit(path.parent, entries)
    cached = compiled is not None
    if compiled is None:
        names_in_unit = {name: name for name in graphs}
        on_compile()
        module: Module | None = None
        library, device_ref = load_kernel_library(package), DeviceRef.from_device(device)
        for name, calls in graphs.items():
            graph, _ = build_graph(
                f"g{key}_{name}", package, calls, dtypes[name], device_ref, module, library
            )
            module = graph.module
        assert module is not None  # there is at least one graph
        compiled = compile_graph(session, module, package)
    before_init()
    models = strip_prefixes(session.init_all(compiled))
    if not cached:
        cache_file(path, lambda staged: export_graph(compiled, staged), "the compiled graph")
        if len(graphs) > 1:
            for name, entry in entries.items():
                write_unit_name(path.parent / f"{entry}.unit", f"{path.name} {name}")
    load_time_s = time.monotonic() - started
    arguments = {name: get_argument_types(graphs[name], dtypes[name], DeviceRef.CPU()) for name in graphs}
    return {
        name: Program(list(arguments[name]), models[names_in_unit[name]], dtypes[name], cached, load_time_s)
        for name in graphs
    }


def strip_prefixes(models: Mapping[str, T]) -> dict[str, T]:
    """Remove the prefix that `load_graphs` added to the models' names.

    The prefix may be from an earlier call: MAX returns unchanged models from its own cache, under the names
    they had when they were first compiled.
    """
    return {name.partition("_")[2]: model for name, model in models.items()}


def read_cached(path: Path) -> CompiledModel | None:
    """Return a graph from the cache; None if it is missing or cannot be read."""
    if not path.exists():
        return None
    try:
        return read(path)
    except RuntimeError:
        discard(path)
        return None


def find_cached_unit(folder: Path, entries: Mapping[str, str]) -> tuple[CompiledModel | None, dict[str, str]]:
    """Return the cached unit that contains all these graphs (None if none does), and their names in it.

    Args:
        entries: Name of a graph -> name of its cache entry, a file that contains the unit's name.
    """
    files = {name: folder / f"{entry}.unit" for name, entry in entries.items()}
    texts = {name: text for name, file in files.items() if (text := read_cached_text(file)) is not None}
    if len(texts) < len(files):
        return None, {}
    entries_in_unit = {name: text.split(" ", 1) for name, text in texts.items()}
    units = {unit for unit, _ in entries_in_unit.values()}
    if len(units) > 1:
        return None, {}
    return read_cached(folder / units.pop()), {
        name: name_in_unit for name, (_, name_in_unit) in entries_in_unit.items()
    }


def write_unit_name(file: Path, text: str) -> None:
    """Record which unit contains a graph, replacing an earlier record."""
    discard(file)
    cache_text(file, lambda: text, "the compiled graph")


def export_graph(compiled: CompiledModel, path: Path) -> None:
    try:
        compiled.export_mef(path)
    except ValueError as error:  # MAX raises ValueError for every failed write
        raise OSError(errno.EIO, str(error)) from error


# MAX's message if another process has just moved an entry of Mojo's cache.
CACHE_RACE_ERROR = "could not lower LIT to KGEN: No such file or directory"


def compile_graph(session: InferenceSession, module: Module, package: OpPackage) -> CompiledModel:
    """Compile a module's graphs; retry once if an entry of Mojo's cache was moved meanwhile.

    Raises CompileFailed with the Mojo compiler's message, or else MAX's.
    """
    compiled, failure, text = compile_once(session, module, package)
    if not compiled and CACHE_RACE_ERROR in text:
        compiled, failure, text = compile_once(session, module, package)
    if compiled:
        return compiled
    lines = [line.strip() for line in text.splitlines()]
    located = [
        line for line in lines if re.search(r"\.mojo:\d+:\d+: (error: |note: constraint failed)", line)
    ]
    if not located and (disk_full_error := find_disk_full_error(text)):
        raise disk_full_error from failure
    reason = (located or [line for line in lines if "error:" in line] or [str(failure)])[0]
    raise CompileFailed(f"{package.path} does not compile\n{reason}", text.strip()) from failure


def compile_once(
    session: InferenceSession, module: Module, package: OpPackage
) -> tuple[CompiledModel | None, RuntimeError | None, str]:
    """Return (compiled model or None, MAX's error or None, the compilers' output)."""
    compiled = failure = None
    with capture_stderr() as captured:
        try:
            compiled = session.compile(module, custom_extensions=[package.compile()])
        except RuntimeError as error:
            failure = error
    # MAX may print an error of the GPU's code generator and still return a graph.
    if compiled and not re.search(r"^error: |: error: ", captured.text, re.MULTILINE):
        return compiled, None, captured.text
    return None, failure, f"{captured.text}\n{(failure.__cause__ or failure) if failure else ''}"


class CapturedOutput:
    """Text written to standard error while `capture_stderr` was active."""

    text: str = ""


@contextmanager
def capture_stderr() -> Iterator[CapturedOutput]:
    """Capture the standard error of the process, including the compiler's native code.

    Compilations in several threads share one capture: the first opens it, the last closes it, and each gets
    the output of all.
    """
    captured = CapturedOutput()
    with _capture_lock:
        if not _capture_users:
            sys.stderr.flush()
            _saved_stderr.append((os.dup(2), tempfile.TemporaryFile()))  # noqa: SIM115 (closed by the last user)
            os.dup2(_saved_stderr[0][1].fileno(), 2)
        _capture_users.append(captured)
    try:
        yield captured
    finally:
        with _capture_lock:
            original, file = _saved_stderr[0]
            captured.text = os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")
            _capture_users.remove(captured)
            if not _capture_users:
                os.dup2(original, 2)
                os.close(original)
                file.close()
                _saved_stderr.clear()


_capture_lock = threading.Lock()
_capture_users: list[CapturedOutput] = []
_saved_stderr: list[tuple[int, IO[bytes]]] = []


def get_host_identity() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{platform.system()} {platform.machine()} {compute_digest([flags])}"


def copy_to_device(tensor: DLPackArray | Buffer, device: Device) -> Buffer:
    """Return a buffer on `device` from a CPU array or tensor; on the CPU the two share memory."""
    buffer = tensor if isinstance(tensor, Buffer) else Buffer.from_dlpack(tensor)
    return buffer if device.label == "cpu" else buffer.to(device)


# ---- The tensors of a run ----------------------------------------------------------------------------------


def infer_sizes(puzzle: Puzzle, inputs: dict[str, torch.Tensor]) -> Dims:
    sizes = {
        name: size
        for call in puzzle.calls
        for argument, spec in call.op.reads.items()
        if argument in inputs
        for name, size in zip(spec.shape, inputs[argument].shape, strict=True)
    }
    return tuple(sizes[name] for name in puzzle.dim_names)


def make_buffers(
    puzzle: Puzzle,
    program: Program,
    target: Target,
    inputs: dict[str, torch.Tensor],
    dims: Dims | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Buffer]]:
    """Return a program's poisoned outputs on the CPU, and a buffer on the target for every argument.

    `dims` are the case's sizes, None to infer them from the inputs. A scalar missing from the inputs takes
    the op's default.
    """
    import torch

    from harness.devices.poison import make_poisoned

    shapes = puzzle.compute_shapes(dims or infer_sizes(puzzle, inputs))
    scalars = {name: scalar for call in puzzle.calls for name, scalar in call.op.scalars.items()}
    outputs: dict[str, torch.Tensor] = {}
    buffers: dict[str, Buffer] = {}
    for name in program.arguments:
        quantity = name.split(".")[-1]
        if "." in name:
            dtype = puzzle.get_output_dtype(quantity, program.dtype)
            outputs[name] = as_tensor(make_poisoned(shapes[quantity], dtype))
            buffers[name] = copy_to_device(outputs[name], target.device)
        elif name in scalars:
            value = inputs.get(name, scalars[name].value)
            buffers[name] = Buffer.from_dlpack(
                torch.as_tensor(value, dtype=getattr(torch, scalars[name].dtype))
            )
        else:
            buffers[name] = copy_to_device(inputs[name], target.device)
    return outputs, buffers


def execute(
    puzzle: Puzzle, program: Program, target: Target, inputs: Arrays, dims: Dims | None = None
) -> Arrays:
    """Run every variant on one case; return the written arrays by "variant.quantity".

    `dims` are the case's sizes, None to infer them from the inputs.
    """
    import torch

    tensors = {name: as_tensor(array) for name, array in inputs.items()}
    outputs, buffers = make_buffers(puzzle, program, target, tensors, dims)
    program.run(buffers)
    if target.kind != "cpu":
        outputs = {name: torch.from_dlpack(buffers[name].to(CPU())) for name in outputs}
    return {name: as_array(tensor) for name, tensor in outputs.items()}
