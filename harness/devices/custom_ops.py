"""Call the ops of a Mojo package from PyTorch: on a GPU through MAX, otherwise on the virtual GPU.

Run as a program, this module is the worker under `vgpu exec`; it exchanges tensors through a file.
"""

import contextlib
import functools
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

CALL_DONE = "workbook: the op has run"
"""The line that the worker prints after each call; kernels may print other lines."""
MAX_QUOTED_CHARACTERS = 400
"""Number of characters quoted from a failed worker's log."""


class MojoOps:
    """The ops of a package, called as in MAX's `CustomOpLibrary`: `ops.scale(y, x, w)`, outputs first.

    Ops on GPU tensors run on that GPU, ops on CPU tensors on the virtual GPU. An op is compiled once for its
    tensors' dtypes and ranks; sizes are passed at run time.
    """

    def __init__(self, package: str | Path):
        self.package = Path(package).resolve()

    def __getattr__(self, name: str) -> "MojoOp":
        if name.startswith("_"):
            raise AttributeError(name)
        return MojoOp(self.package, name)


@dataclass(frozen=True)
class MojoOp:
    """One op; `op[{"tile": 32}]` binds compile-time parameters."""

    package: Path
    name: str
    parameters: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, parameters: Mapping[str, Any]) -> "MojoOp":
        return replace(self, parameters=tuple(parameters.items()))

    def __call__(self, *tensors: Tensor) -> None:
        if any(t.requires_grad or not t.is_contiguous() for t in tensors):
            raise ValueError(
                f"{self.name} takes contiguous tensors without a gradient: pass t.detach().contiguous()"
            )
        device = tensors[0].device
        if device.type != "cpu":
            from harness.devices import on_max

            on_max.run(*compile_and_bind(self, tensors, on_max.get_max_device(device)), device, self.name)
            return
        with Worker.lock:
            worker = Worker.workers.get(self.package) or Worker(self.package)
            for tensor, result in zip(tensors, worker.run(self, tensors), strict=True):
                if result is not None:
                    tensor.copy_(result)


class Worker:
    """A process under `vgpu exec` that runs a package's ops."""

    workers: ClassVar[dict[Path, "Worker"]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, package: Path):
        self.folder = tempfile.TemporaryDirectory()
        self.call_file, self.report_file, self.log_file = (
            Path(self.folder.name) / name for name in ("call", "json", "log")
        )
        self.ops: dict[str, str] = {}  # a kernel's label -> the op that launched it
        python = [sys.executable, "-m"]
        vgpu = [*python, "harness.vgpu.cli", "exec", "--verbose", "--json", str(self.report_file), "--"]
        program, pipe = [*python, __name__, str(self.call_file)], subprocess.PIPE
        with self.log_file.open("w") as log:
            self.process = subprocess.Popen([*vgpu, *program], stdin=pipe, stdout=pipe, stderr=log, text=True)
        self.workers[package] = self

    def run(self, op: MojoOp, tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Run an op; return its tensors, with None for unchanged ones. Raises RuntimeError if it fails."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin and stdout
        start = self.log_file.stat().st_size
        torch.save((str(op.package), op.name, op.parameters, [t.clone() for t in tensors]), self.call_file)
        with contextlib.suppress(BrokenPipeError):  # a dead worker is reported below
            print(file=stdin, flush=True)
        has_completed = any(line.rstrip() == CALL_DONE for line in stdout)
        log = self.log_file.read_bytes()[start:].decode(errors="replace")
        self.ops |= dict.fromkeys(re.findall(r"^virtual GPU: ran (.+?) grid=", log, re.MULTILINE), op.name)
        if not has_completed:
            code = self.process.wait()
            raise RuntimeError(
                f"{op.name}: the process on the virtual GPU exited with {code}: {log[-MAX_QUOTED_CHARACTERS:]}"
            )
        reply = torch.load(self.call_file)
        if isinstance(reply, str):
            raise RuntimeError(reply)
        return reply

    def finish(self) -> list[str]:
        self.process.communicate()
        report = (
            json.loads(self.report_file.read_text())
            if self.report_file.exists()
            else {"failures": [], "findings": []}
        )
        self.folder.cleanup()
        lines = list(report["failures"])
        for entry in filter(lambda finding: finding["error"], report["findings"]):
            op = self.ops.get(entry["kernel"], entry["kernel"])
            lines.append(f"in {op}: {entry['kind']} at {entry['where']}: {entry['message']}")
        return lines


def finish_all() -> list[str] | None:
    workers = list(Worker.workers.values())
    Worker.workers.clear()
    return [line for worker in workers for line in worker.finish()] if workers else None


# ---- Devices of an op --------------------------------------------------------------------------------------


def compile_and_bind(op: MojoOp, tensors: Sequence[Tensor], device: Any) -> tuple[Any, dict[str, Tensor]]:
    program = compile_op(op, tuple((str(t.dtype).removeprefix("torch."), t.dim()) for t in tensors), device)
    if isinstance(program, Exception):
        raise program
    return program, dict(zip(program.arguments, tensors, strict=True))


@functools.cache
def compile_op(op: MojoOp, argument_types: tuple[tuple[str, int], ...], device: Any) -> Any:
    """Compile an op with symbolic sizes for arguments of (dtype, rank); return a Program or an exception."""
    from max.driver import CPU
    from max.engine import InferenceSession
    from max.graph import BufferType, DeviceRef, Graph, TensorType, ops

    from harness.devices.graphs import DTYPES, Program, compile_graph, load_kernel_library
    from harness.toolchain.packages import OpPackage

    try:
        package, device_ref = OpPackage(op.package), DeviceRef.from_device(device)
        library = load_kernel_library(package)
        if op.name not in library:
            raise AttributeError(f"{op.package} registers no op {op.name}")
        signature = library._analysis.kernel_torch_info(op.name)
        names, count = list(signature.tensor_arg_names), signature.num_dps_outputs
        if len(names) != len(argument_types):
            raise TypeError(
                f"{op.name} takes {len(names)} tensors ({', '.join(names)}), got {len(argument_types)}"
            )
        types = []
        for name, (dtype, rank) in zip(names, argument_types, strict=True):
            axes = [f"{name}{axis}" for axis in range(rank)]
            types.append(TensorType(DTYPES[dtype], axes, device=device_ref))
        buffer_types = [BufferType(t.dtype, t.shape, t.device) for t in types[:count]]
        with Graph(op.name, input_types=[*buffer_types, *types[count:]], kernel_library=library) as graph:
            inputs = [t.tensor for t in graph.inputs[count:]]
            results = ops.custom(op.name, device_ref, inputs, types[:count], parameters=dict(op.parameters))
            for graph_input, result in zip(graph.inputs, results, strict=False):
                graph_input.buffer[...] = result.tensor
            graph.output()
        session = InferenceSession(devices=[CPU(), device])
        (model,) = session.init_all(compile_graph(session, graph.module, package)).values()
    except Exception as error:
        return error
    return Program(names, model, "", cached=False)


def serve(file: Path) -> None:
    """Run the call in `file` on this process's accelerator for each line of standard input."""
    from max.driver import CPU, Accelerator, Buffer

    device = Accelerator()
    for _ in sys.stdin:
        package, name, parameters, tensors = torch.load(file)
        try:
            program, arguments = compile_and_bind(MojoOp(Path(package), name, parameters), tensors, device)
            buffers = {argument: Buffer.from_dlpack(t).to(device) for argument, t in arguments.items()}
            program.run(buffers)
            results = [torch.from_dlpack(buffers[argument].to(CPU())) for argument in arguments]
            bits = [
                [t.flatten().view(torch.uint8) for t in pair] for pair in zip(results, tensors, strict=True)
            ]
            reply = [None if torch.equal(*pair) else t for pair, t in zip(bits, results, strict=True)]
        except Exception as error:
            reply = f"{type(error).__name__}: {error}"
        torch.save(reply, file)
        print(CALL_DONE, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
