"""Replay recorded launches on the virtual GPU, without MAX or a driver."""

import math
from collections.abc import Collection

import numpy as np

from harness.devices.poison import make_poisoned
from harness.devices.recorder import RecordedLaunch, RecordedTensor, Recording
from harness.spec.puzzle import Arrays, Case, Puzzle
from harness.spec.rounding import get_dtype_name, get_stored_dtype
from harness.vgpu import Kernel, VirtualGPU


class Replay:
    """A virtual GPU with the kernels of one recording."""

    def __init__(self, recording: Recording, puzzle: Puzzle, dtype: str, **gpu_options):
        """Create the virtual GPU with the keyword arguments `gpu_options`: block_order, checks, arch."""
        self.recording = recording
        self.puzzle = puzzle
        self.dtype = dtype
        self.gpu = VirtualGPU(**gpu_options)
        self._kernels: dict[str, Kernel] = {}

    def get_kernel(self, symbol: str) -> Kernel:
        if symbol not in self._kernels:
            self._kernels[symbol] = self.gpu.load(self.recording.ptx[symbol]).kernels[symbol]
        return self._kernels[symbol]

    def run(
        self, variant: str, case: Case, inputs: Arrays, correct_values: Arrays | None = None,
        unwritten_names: Collection[str] = (),
    ) -> Arrays:  # fmt: skip
        """Run one variant on one case.

        Args:
            variant: The variant's name.
            case: A case whose dims have been recorded.
            inputs: The input tensors by name, stored in the dtype of the recording (`harness.spec.rounding`).
            correct_values: Values of written tensors that later launches read instead of the computed ones.
            unwritten_names: Names in `correct_values` that no launch writes; the first launch reads them too.

        Returns the written arrays by name, as stored. Outputs are poisoned first, workspaces left unwritten.
        """
        written: dict[str, int] = {}
        correct_bytes = {name: view_as_bytes(array) for name, array in (correct_values or {}).items()}
        computed_bytes: dict[str, np.ndarray] = {}
        addresses: dict[RecordedTensor, int] = {}
        shapes = self.puzzle.compute_shapes(case.dims)
        events = self.recording.cases[variant, case.dims]
        for event in events:
            if isinstance(event, RecordedLaunch):
                arguments, used_names = relocate(event.arguments, addresses)
                self._forbid_writes(variant, used_names, addresses)
                kernel = self.get_kernel(event.symbol)
                self.gpu.launch(kernel, event.grid, event.block, arguments, event.shared, name=event.name)
                for name in [name for name in correct_bytes if name in used_names]:
                    after = self.gpu.read(written[name], correct_bytes[name].nbytes)
                    # The first launch initialises a tensor; of later ones, take only the changed elements.
                    before = computed_bytes.get(name, after)
                    computed_bytes[name] = np.where(after != correct_bytes[name], after, before)
                    self.gpu.write(written[name], correct_bytes[name])
                continue
            address = self.gpu.allocate(event.nbytes, event.name)
            addresses[event] = address
            if event.is_workspace:
                continue
            if event.name in inputs:
                self._write_tensor(address, event, inputs[event.name])
            else:
                dtype = self.puzzle.get_output_dtype(event.name, self.dtype)
                poison = make_poisoned(shapes[event.name], dtype)
                self._write_tensor(address, event, poison)
                written[event.name] = address
                if event.name in correct_bytes and event.name in unwritten_names:
                    computed_bytes[event.name] = view_as_bytes(poison)  # remains unless a launch writes it
                    self.gpu.write(address, correct_bytes[event.name])
        for name, values in computed_bytes.items():
            self.gpu.write(written[name], values)
        outputs = {name: self._read(name, address, shapes[name]) for name, address in written.items()}
        for address in addresses.values():
            self.gpu.free(address)
        return outputs

    def _write_tensor(self, address: int, tensor: RecordedTensor, array: np.ndarray) -> None:
        self.gpu.name(address, tensor.nbytes, tensor.name, array.shape, get_dtype_name(array))
        self.gpu.write(address, view_as_bytes(array))

    def _forbid_writes(
        self, variant: str, used_names: set[str], addresses: dict[RecordedTensor, int]
    ) -> None:
        """Forbid stores to a launch's inputs, and atomics on results unless the puzzle declares them."""
        ops = [call.op for call in self.puzzle.variants[variant]]
        written = {name for op in ops for name in op.writes}
        read = {
            name for op in ops if used_names & op.writes.keys() for name in op.reads.keys() - op.writes.keys()
        }
        for tensor, address in addresses.items():
            if tensor.is_workspace:
                continue
            if tensor.name in read or tensor.name not in written:
                self.gpu.report_writes(address, "store to an input")
            else:
                is_declared = (variant, tensor.name) in self.puzzle.atomic_sums
                self.gpu.report_writes(address, "" if is_declared else "undeclared atomic")

    def _read(self, name: str, address: int, shape: tuple[int, ...]) -> np.ndarray:
        dtype = get_stored_dtype(self.puzzle.get_output_dtype(name, self.dtype))
        nbytes = math.prod(shape) * dtype.itemsize
        return self.gpu.read(address, nbytes).view(dtype).reshape(shape)


def view_as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def relocate(
    arguments: tuple[bytes, ...], addresses: dict[RecordedTensor, int]
) -> tuple[list[bytes], set[str]]:
    """Return recorded arguments with pointers relocated to real addresses, and their tensors' names."""
    relocated, used_names = [], set()
    for argument in arguments:
        for tensor, address in addresses.items():
            offset = tensor.get_offset(argument)
            if offset is not None:
                argument = encode_pointer(address + offset)
                used_names.add(tensor.name)
                break
        relocated.append(argument)
    return relocated, used_names


def encode_pointer(address: int) -> bytes:
    return address.to_bytes(8, "little")
