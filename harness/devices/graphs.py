"""Compile calls of a package's ops into one MAX graph and run it on MAX buffers.

Every size is symbolic, so one compiled graph serves every shape. Outputs are written in place into the
caller's buffers, which may be filled beforehand to detect elements that a kernel never wrote. Compiled graphs
are cached. torch is imported only to run a graph.
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
from harness.toolchain.cache import cache_folder, digest, discard, keep, keep_text, read_text
from harness.toolchain.disk import disk_full
from harness.toolchain.packages import OpPackage

if TYPE_CHECKING:  # the layers import this module, which must not import puzzles
    import torch

    from harness.devices.targets import Target
    from harness.spec.puzzle import Arrays, Dims, Puzzle

T = TypeVar("T")
DTYPES = {
    "float32": DType.float32,
    "float64": DType.float64,
    "bfloat16": DType.bfloat16,
    "float16": DType.float16,
    "bool": DType.bool,
    "uint8": DType.uint8,
    "int32": DType.int32,
    "int64": DType.int64,
}


@dataclass
class Program:
    """A compiled graph: `run` executes its calls in order. `dtype` is that of the run."""

    arguments: list[str]
    model: Model
    dtype: str
    cached: bool
    seconds: float = field(default=0.0)

    def run(self, buffers: Mapping[str, Buffer | DLPackArray]) -> None:
        """Execute every call; `buffers` maps each name in `arguments` to a Buffer (or a tensor that MAX takes)."""
        self.model.execute(*(buffers[name] for name in self.arguments))


def argument_types(
    calls: tuple[Call, ...], dtype: str, device: DeviceRef
) -> dict[str, TensorType | BufferType]:
    """Return the graph's inputs by name: buffers for written tensors, tensors for those that are only read."""
    types: dict[str, TensorType | BufferType] = {}
    for call in calls:
        for name, argument in call.op.writes.items():
            element = DTYPES[argument.dtype_in(dtype)]
            types[label(call, name)] = BufferType(element, list(argument.shape), device=device)
    for call in calls:
        for name, argument in call.op.reads.items():
            if label(call, name) not in types:
                element = DTYPES[argument.dtype_in(dtype)]
                types.setdefault(name, TensorType(element, list(argument.shape), device=device))
        for name, scalar in call.op.scalars.items():
            types.setdefault(name, TensorType(DTYPES[scalar.dtype], [], device=DeviceRef.CPU()))
    return types


def label(call: Call, name: str) -> str:
    """Return the graph-wide name of a call's argument."""
    return f"{call.prefix}.{name}" if call.prefix else name


def build(
    name: str,
    package: OpPackage,
    calls: tuple[Call, ...],
    dtype: str,
    device: DeviceRef,
    module: Module | None = None,
    library: KernelLibrary | None = None,
) -> tuple[Graph, list[str]]:
    """Return the graph of the calls, in order, and the names of its inputs.

    Args:
        module: A module with other graphs to add it to; by default a new one.
        library: The package as loaded by MAX, which takes more than a second; loaded by default.

    Raises CompileFailed for a missing op.
    """
    library = library or kernel_library(package)
    for call in calls:
        if call.op.name not in library:
            raise CompileFailed(f"{package.path} registers no op {call.op.name!r}")
    types = argument_types(calls, dtype, device)
    graph = Graph(name, input_types=list(types.values()), kernel_library=library, module=module)
    with graph:
        values = dict(zip(types, graph.inputs, strict=True))

        def read_value(call: Call, argument: str):
            written = values.get(label(call, argument)) if call.prefix else None
            if written is not None and isinstance(types[label(call, argument)], BufferType):
                return ops.buffer_load(written.buffer)
            return values[argument].tensor

        for call in calls:
            operands = [values[label(call, argument)].buffer for argument in call.op.writes]
            operands += [read_value(call, argument) for argument in call.op.reads]
            operands += [values[name].tensor for name in call.op.scalars]
            ops.inplace_custom(call.op.name, device, operands, parameters=dict(call.parameters))
        graph.output()
    return graph, list(types)


def kernel_library(package: OpPackage) -> KernelLibrary:
    """Load the ops of a package for graphs."""
    for _ in range(2):
        path = package.compile()
        library = KernelLibrary()
        library.load_paths([path])
        try:
            _ = "" in library  # reads the file
            return library
        except ValueError:
            discard(path)
    raise CompileFailed(f"{package.path}: MAX cannot read the compiled package")


def load(package: OpPackage, calls: tuple[Call, ...], dtype: str, device: Device, **options: Any) -> Program:
    """Return the compiled graph of `calls` on `device`: `load_each` for one graph."""
    return load_each(package, {"graph": calls}, dtype, device, **options)["graph"]


def load_each(
    package: OpPackage,
    graphs: Mapping[str, tuple[Call, ...]],
    dtype: str | Mapping[str, str],
    device: Device,
    *,
    kind: str = "",
    on_compile: Callable[[], None] = lambda: None,
    before_init: Callable[[], None] = lambda: None,
) -> dict[str, Program]:
    """Return compiled graphs on `device`, by name, from the cache or compiled now.

    They are compiled as one unit: nearly all of the time is per unit, so that two take as long as one. A
    graph for the CPU that was compiled in a larger unit is found there.

    Args:
        package: The op package.
        graphs: The calls of each graph, in order.
        dtype: A key of DTYPES, or one for each graph.
        device: The device of the kernels.
        kind: Part of the cache key, for devices with code of their own ("virtual").
        on_compile: Called before a compilation of ten seconds or more, if nothing is cached.
        before_init: Called before the kernels are passed to the device.

    Raises CompileFailed, with the compiler's message, if the package or a graph does not compile, and
    EnvironmentProblem if the cache cannot be written.
    """
    started = time.monotonic()
    host = device.label == "cpu"
    target = host_identity() if host else f"{device.api} {device.architecture_name}"
    dtypes = {name: dtype if isinstance(dtype, str) else dtype[name] for name in graphs}
    parts = [dtype if isinstance(dtype, str) else repr(sorted(dtypes.items())), repr(sorted(graphs.items()))]
    key = digest([package.digest, version("max"), target, kind, *parts])
    path = cache_folder("graphs") / f"{key}.mef"
    session = InferenceSession(devices=[CPU()] if host else [CPU(), device])
    compiled, named = read_cached(path), {name: name for name in graphs}
    entries = {
        name: digest([package.digest, version("max"), target, kind, dtypes[name], repr(calls)])
        for name, calls in graphs.items()
    }
    if compiled is None and host:
        compiled, named = read_larger(path.parent, entries)
    cached = compiled is not None
    if compiled is None:
        named = {name: name for name in graphs}
        on_compile()
        module: Module | None = None
        library, where = kernel_library(package), DeviceRef.from_device(device)
        for name, calls in graphs.items():
            graph, _ = build(f"g{key}_{name}", package, calls, dtypes[name], where, module, library)
            module = graph.module
        assert module is not None  # there is a graph
        compiled = compile_graph(session, module, package)
    before_init()
    models = plain_names(session.init_all(compiled))
    if not cached:
        keep(path, lambda staged: export(compiled, staged), "the compiled graph")
        if len(graphs) > 1:
            for name, entry in entries.items():
                keep_entry(path.parent / f"{entry}.unit", f"{path.name} {name}")
    return {
        name: Program(
            list(argument_types(calls, dtypes[name], DeviceRef.CPU())),
            models[named[name]],
            dtypes[name],
            cached,
            time.monotonic() - started,
        )
        for name, calls in graphs.items()
    }


def plain_names(models: Mapping[str, T]) -> dict[str, T]:
    """Remove the prefix of `load_each` from the names of models.

    It may be the prefix of an earlier call: if nothing else has changed, MAX returns models from its own
    cache under the names of the first time.
    """
    return {name.partition("_")[2]: model for name, model in models.items()}


def read_cached(path: Path) -> CompiledModel | None:
    """Return a graph from the cache, or None if there is none or it cannot be read."""
    if not path.exists():
        return None
    try:
        return read(path)
    except RuntimeError:
        discard(path)
        return None


def read_larger(folder: Path, entries: Mapping[str, str]) -> tuple[CompiledModel | None, dict[str, str]]:
    """Return the cached unit that contains graphs, and their names in it; None if there is none.

    Args:
        entries: Name of a graph -> the cache entry of its last compilation.
    """
    files = {name: folder / f"{entry}.unit" for name, entry in entries.items()}
    texts = {name: text for name, file in files.items() if (text := read_text(file)) is not None}
    if len(texts) < len(files):
        return None, {}
    places = {name: text.split(" ", 1) for name, text in texts.items()}
    units = {unit for unit, _ in places.values()}
    if len(units) > 1:
        return None, {}
    return read_cached(folder / units.pop()), {name: there for name, (_, there) in places.items()}


def keep_entry(file: Path, text: str) -> None:
    """Note in which unit a graph is stored; a later unit takes the place of an earlier one."""
    discard(file)
    keep_text(file, lambda: text, "the compiled graph")


def export(compiled: CompiledModel, path: Path) -> None:
    """Write a compiled graph. Raises OSError if that fails."""
    try:
        compiled.export_mef(path)
    except ValueError as error:  # MAX raises this for every failed write
        raise OSError(errno.EIO, str(error)) from error


def compile_graph(session: InferenceSession, module: Module, package: OpPackage) -> CompiledModel:
    """Compile the graphs of a module; MAX's failure becomes CompileFailed, the Mojo compiler's message first."""
    compiled = failure = None
    with captured_stderr() as captured:
        try:
            compiled = session.compile(module, custom_extensions=[package.compile()])
        except RuntimeError as error:
            failure = error
    # MAX may print an error of the target's code generator and still return a graph.
    if compiled and not re.search(r"^error: |: error: ", captured.text, re.MULTILINE):
        return compiled
    text = f"{captured.text}\n{(failure.__cause__ or failure) if failure else ''}"
    lines = [line.strip() for line in text.splitlines()]
    located = [
        line for line in lines if re.search(r"\.mojo:\d+:\d+: (error: |note: constraint failed)", line)
    ]
    if not located and (full := disk_full(text)):
        raise full from failure
    reason = (located or [line for line in lines if "error:" in line] or [str(failure)])[0]
    raise CompileFailed(f"{package.path} does not compile\n{reason}", text.strip()) from failure


class Captured:
    """Text written to standard error while `captured_stderr` was on."""

    text: str = ""


@contextmanager
def captured_stderr() -> Iterator[Captured]:
    """Capture the standard error of the process, including the compiler's native code.

    Compilations in several threads share one capture: the first opens it, the last closes it, and each gets
    everything.
    """
    captured = Captured()
    with _capture_lock:
        if not _capture_users:
            sys.stderr.flush()
            _capture_saved.append((os.dup(2), tempfile.TemporaryFile()))  # noqa: SIM115 (closed by the last out)
            os.dup2(_capture_saved[0][1].fileno(), 2)
        _capture_users.append(captured)
    try:
        yield captured
    finally:
        with _capture_lock:
            original, file = _capture_saved[0]
            captured.text = os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")
            _capture_users.remove(captured)
            if not _capture_users:
                os.dup2(original, 2)
                os.close(original)
                file.close()
                _capture_saved.clear()


_capture_lock = threading.Lock()
_capture_users: list[Captured] = []
_capture_saved: list[tuple[int, IO[bytes]]] = []


def host_identity() -> str:
    """Return the architecture and the instruction sets of this machine, on which compiled CPU code depends."""
    try:
        flags = next(
            line
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith(("flags", "Features"))
        )
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{platform.system()} {platform.machine()} {digest([flags])}"


def to_device(tensor: DLPackArray | Buffer, device: Device) -> Buffer:
    """Return a buffer on `device` from a NumPy array or a CPU torch tensor; on the CPU it shares the memory."""
    buffer = tensor if isinstance(tensor, Buffer) else Buffer.from_dlpack(tensor)
    return buffer if device.label == "cpu" else buffer.to(device)


# ---- The tensors of a run -----------------------------------------------------------------------------------


def sizes_of(puzzle: Puzzle, inputs: dict[str, torch.Tensor]) -> Dims:
    """Return the sizes of a case by the shapes of its inputs."""
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
    """Return the poisoned outputs of a program on the CPU, and a buffer on the target for every argument,
    both by name.

    `dims` are the case's sizes, None to infer them from the inputs. A scalar that is not among the inputs has
    the op's default.
    """
    import torch

    from harness.devices.poison import make_poisoned

    shapes = puzzle.shapes(dims or sizes_of(puzzle, inputs))
    scalars = {name: scalar for call in puzzle.calls for name, scalar in call.op.scalars.items()}
    outputs: dict[str, torch.Tensor] = {}
    buffers: dict[str, Buffer] = {}
    for name in program.arguments:
        quantity = name.split(".")[-1]
        if "." in name:
            dtype = puzzle.written_dtype(quantity, program.dtype)
            outputs[name] = as_tensor(make_poisoned(shapes[quantity], dtype))
            buffers[name] = to_device(outputs[name], target.device)
        elif name in scalars:
            value = inputs.get(name, scalars[name].value)
            buffers[name] = Buffer.from_dlpack(
                torch.as_tensor(value, dtype=getattr(torch, scalars[name].dtype))
            )
        else:
            buffers[name] = to_device(inputs[name], target.device)
    return outputs, buffers


def execute(
    puzzle: Puzzle,
    program: Program,
    target: Target,
    inputs: Arrays,
    dims: Dims | None = None,
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
