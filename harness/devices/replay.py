"""Replays recorded launches on the virtual GPU: no MAX, no driver, one process, a second for a puzzle's cases."""

import math
from collections.abc import Collection

import numpy as np

from harness.devices.poison import make_poisoned
from harness.devices.recorder import RecordedLaunch, RecordedTensor, Recording
from harness.spec.puzzle import Arrays, Case, Puzzle
from harness.spec.rounding import name_of_dtype, stored_dtype
from harness.vgpu import Kernel, VirtualGPU


class Replay:
    """A virtual GPU with the kernels of one recording."""

    def __init__(self, recording: Recording, puzzle: Puzzle, dtype: str, **machine):
        """`machine` holds keywords for VirtualGPU: blocks, checks, arch."""
        self.recording = recording
        self.puzzle = puzzle
        self.dtype = dtype
        self.gpu = VirtualGPU(**machine)
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, symbol: str) -> Kernel:
        """Return a kernel of the recording, loaded on first use: most runs have one variant."""
        if symbol not in self._kernels:
            self._kernels[symbol] = self.gpu.load(self.recording.ptx[symbol]).kernels[symbol]
        return self._kernels[symbol]

    def run(
        self,
        variant: str,
        case: Case,
        inputs: Arrays,
        corrected: Arrays | None = None,
        unmade: Collection[str] = (),
    ) -> Arrays:
        """Run one variant on one case.

        Args:
            variant: Its name.
            case: Its dims must have been recorded.
            inputs: The input tensors by name, stored in the dtype of the recording (`harness.spec.rounding`).
            corrected: Values of written tensors for the launches that read them, in place of the written
                ones.
            unmade: Those of them that no launch writes: the first that takes one reads it.

        Returns the written arrays by name, stored too; outputs start out poisoned, workspaces unwritten.
        """
        written: dict[str, int] = {}
        stood = {name: raw(array) for name, array in (corrected or {}).items()}
        computed: dict[str, np.ndarray] = {}
        real: dict[RecordedTensor, int] = {}
        shapes = self.puzzle.shapes(case.dims)
        events = self.recording.cases[variant, case.dims]
        for event in events:
            if isinstance(event, RecordedLaunch):
                arguments, taken = relocate(event.arguments, real)
                self._forbid(variant, taken, real)
                kernel = self.kernel(event.symbol)
                self.gpu.launch(kernel, event.grid, event.block, arguments, event.shared, name=event.name)
                for name in [name for name in stood if name in taken]:
                    now = self.gpu.read(written[name], stood[name].nbytes)
                    # The first launch that takes a tensor initialises it; later ones count only where they write again.
                    computed[name] = (
                        np.where(now != stood[name], now, computed[name]) if name in computed else now
                    )
                    self.gpu.write(written[name], stood[name])
                continue
            address = self.gpu.allocate(event.nbytes, event.name)
            real[event] = address
            if event.scratch:
                continue
            if event.name in inputs:
                self._place(address, event, inputs[event.name])
            else:
                dtype = self.puzzle.written_dtype(event.name, self.dtype)
                poison = make_poisoned(shapes[event.name], dtype)
                self._place(address, event, poison)
                written[event.name] = address
                if event.name in stood and event.name in unmade:
                    computed[event.name] = raw(poison)  # compared later
                    self.gpu.write(address, stood[event.name])
        for name, values in computed.items():
            self.gpu.write(written[name], values)
        outputs = {name: self._read(name, address, shapes[name]) for name, address in written.items()}
        for address in real.values():
            self.gpu.free(address)
        return outputs

    def _place(self, address: int, tensor: RecordedTensor, array: np.ndarray) -> None:
        self.gpu.name(address, tensor.nbytes, tensor.name, array.shape, name_of_dtype(array))
        self.gpu.write(address, raw(array))

    def _forbid(self, variant: str, taken: set[str], real: dict[RecordedTensor, int]) -> None:
        """Forbid writes of a launch: to inputs of the case, to inputs of the op, and without atomics to the
        results of declared sums by plain stores."""
        ops = [call.op for call in self.puzzle.variants[variant]]
        written = {name for op in ops for name in op.writes}
        read = {name for op in ops if taken & op.writes.keys() for name in op.reads.keys() - op.writes.keys()}
        for tensor, address in real.items():
            if tensor.scratch:
                continue
            if tensor.name in read or tensor.name not in written:
                self.gpu.forbid(address, "store to an input")
            else:
                declared = (variant, tensor.name) in self.puzzle.atomic
                self.gpu.forbid(address, "" if declared else "undeclared atomic")

    def _read(self, name: str, address: int, shape: tuple[int, ...]) -> np.ndarray:
        dtype = stored_dtype(self.puzzle.written_dtype(name, self.dtype))
        nbytes = math.prod(shape) * dtype.itemsize
        return self.gpu.read(address, nbytes).view(dtype).reshape(shape)


def raw(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a stored array."""
    return array.reshape(-1).view(np.uint8)


def relocate(arguments: tuple[bytes, ...], real: dict[RecordedTensor, int]) -> tuple[list[bytes], set[str]]:
    """Return recorded arguments with the real addresses of tensors and of places in them, and which tensors they are."""
    out, taken = [], set()
    for argument in arguments:
        for tensor, address in real.items():
            offset = tensor.offset(argument)
            if offset is not None:
                argument = pointer(address + offset)
                taken.add(tensor.name)
                break
        out.append(argument)
    return out, taken


def pointer(address: int) -> bytes:
    """Return an address as a kernel argument."""
    return address.to_bytes(8, "little")
