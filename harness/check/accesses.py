"""Tabulate the memory accesses of a replayed run, for pictures and for blame.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.learner.blanks import Blank
from harness.vgpu import Events, Finding
from harness.vgpu.checks.counters import compute_bank_cycles
from harness.vgpu.checks.events import Step, Tensor
from harness.vgpu.ptx.locations import find_user_location
from harness.vgpu.ptx.parser import Instr

if TYPE_CHECKING:
    from harness.vgpu import Launch  # importing it loads the engine

SECTOR_BYTES = 32
"""Size of the smallest transfer from global memory."""


@dataclass(frozen=True)
class Line:
    """A source line; `blank` is the id of the blank that contains it, or ""."""

    file: str
    number: int
    blank: str = ""


@dataclass(frozen=True)
class Source:
    """The file with the blanks; the source line of an instruction is looked up here first."""

    path: Path
    blanks: Mapping[str, Blank] = field(default_factory=dict[str, Blank])

    def find_line(self, instr: Instr | None) -> Line | None:
        """Return an instruction's source line: in a blank if possible, else in this file, else in another."""
        if instr is None or instr.loc is None:
            return None
        frames = [frame for frame in instr.loc.list_frames() if Path(frame.file) == self.path and frame.line]
        for frame in frames:
            for id, blank in self.blanks.items():
                if blank.line <= frame.line < blank.line + max(len(blank.body), 1):
                    return Line(str(self.path), frame.line, id)
        frame = frames[0] if frames else find_user_location(instr.loc)
        return Line(frame.file, frame.line) if frame and frame.line else None


@dataclass(frozen=True, order=True)
class Thread:
    """Index of a thread: its launch in the run, its block in the grid, its position in the block."""

    launch: int
    block: int
    thread: int


@dataclass(frozen=True)
class Element:
    """One element of a tensor; `launch` and `block` are its owners in shared memory, else -1."""

    tensor: str
    index: int
    launch: int = -1
    block: int = -1


@dataclass(frozen=True)
class Access:
    """One access: its step in the run, thread, kind ("R", "W", or "A" for an atomic), element and value."""

    step: int
    thread: Thread
    kind: str
    element: Element
    value: float


@dataclass
class LaunchTrace:
    """One launch of a run; `first_step` is the index of its first step in the run."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    events: Events
    first_step: int
    findings: list[Finding]
    shuffles: bool

    def get_block_index(self, flat_index: int) -> tuple[int, int, int]:
        return unflatten_index(flat_index, self.grid)

    def get_thread_index(self, flat_index: int) -> tuple[int, int, int]:
        return unflatten_index(flat_index, self.block)


def unflatten_index(flat_index: int, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    x, y, _ = sizes
    return flat_index % x, flat_index // x % y, flat_index // (x * y)


class Accesses:
    """A table of a run's accesses: one column per attribute, one row per access, in order of execution."""

    def __init__(self, launches: "Sequence[Launch]", source: Source):
        """Index the accesses of `launches`; launches without events are skipped."""
        self.source = source
        self.launches: list[LaunchTrace] = []
        first_step = 0
        for launch in launches:
            if launch.events is None:
                continue
            shuffles = any(i.op in ("shfl", "redux") for i in launch.kernel.function.body)
            geometry = launch.name, launch.grid, launch.block
            self.launches.append(LaunchTrace(*geometry, launch.events, first_step, launch.findings, shuffles))
            first_step += len(launch.events.steps)
        self.steps: list[Step] = [step for launch in self.launches for step in launch.events.steps]
        self.num_dropped = sum(launch.events.dropped for launch in self.launches)
        self.lines = [source.find_line(step.instr) for step in self.steps]
        self._build_columns()

    def _build_columns(self) -> None:
        tensor_keys: dict[tuple[int, str], int] = {}
        codes: list[int] = []
        for launch_index, launch in enumerate(self.launches):
            for step in launch.events.steps:
                tensor = launch.events.tensors.get(step.tensor)
                key_launch = launch_index if tensor is not None and tensor.space == "shared" else -1
                codes.append(tensor_keys.setdefault((key_launch, step.tensor), len(tensor_keys)))
        self.tensor_keys = list(tensor_keys)  # code -> (launch for shared memory, else -1, name)
        lengths = np.array([step.last - step.first for step in self.steps], np.int64)
        blank_ids = {"": 0} | {id: n for n, id in enumerate(self.source.blanks, start=1)}
        blank_code = [blank_ids[line.blank] if line else 0 for line in self.lines]

        def repeat_per_access(values: Sequence[int] | Sequence[str], dtype: str = "i4") -> np.ndarray:
            return np.repeat(np.array(values, dtype), lengths)

        def concatenate(arrays: list[np.ndarray], dtype: str) -> np.ndarray:
            return np.concatenate([*arrays, np.zeros(0, dtype)])

        self.step = np.repeat(np.arange(len(self.steps)), lengths)
        launch_indices = [n for n, launch in enumerate(self.launches) for _ in launch.events.steps]
        self.launch = repeat_per_access(launch_indices)
        self.kind = repeat_per_access([step.kind[0] for step in self.steps], "U1")
        self.tensor = repeat_per_access(codes)
        self.region = repeat_per_access(blank_code)
        events = [launch.events for launch in self.launches]
        self.block = concatenate([e.block for e in events], "i4")
        self.thread = concatenate([e.thread for e in events], "i4")
        self.element = concatenate([e.element for e in events], "i8")
        self.value = concatenate([e.value for e in events], "f8")
        self.regions = list(blank_ids)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for launch in self.launches for name, tensor in launch.events.tensors.items()}

    # -- queries --------------------------------------------------------------------------------------------
    def select_element(self, element: Element) -> np.ndarray:
        key = (element.launch, element.tensor)
        if key not in self.tensor_keys:
            return np.zeros(len(self.step), bool)
        mask = (self.tensor == self.tensor_keys.index(key)) & (self.element == element.index)
        return mask & (self.block == element.block) if element.block >= 0 else mask

    def select_thread(self, thread: Thread) -> np.ndarray:
        return (self.launch == thread.launch) & (self.block == thread.block) & (self.thread == thread.thread)

    def get_element(self, row: int) -> Element:
        launch, name = self.tensor_keys[int(self.tensor[row])]
        return Element(name, int(self.element[row]), launch, int(self.block[row]) if launch >= 0 else -1)

    def get_access(self, row: int) -> Access:
        thread = Thread(int(self.launch[row]), int(self.block[row]), int(self.thread[row]))
        return Access(
            int(self.step[row]), thread, str(self.kind[row]), self.get_element(row), float(self.value[row])
        )

    def get_line(self, step: int) -> Line | None:
        return self.lines[step]

    def get_blank(self, step: int) -> str:
        line = self.lines[step]
        return line.blank if line else ""

    def find_launch(self, step: int) -> int:
        numbers = [launch.first_step for launch in self.launches]
        return int(np.searchsorted(numbers, step, "right")) - 1


# ---- Costs of a step ----------------------------------------------------------------------------------------


def count_bank_conflicts(events: Events, step: Step) -> int:
    """Count the extra cycles of a shared-memory step due to bank conflicts."""
    warp, lane, byte, nbytes = locate_requests(events, step)
    if not len(warp):
        return 0
    shift = max(nbytes.bit_length() - 1, 2)
    parts = 1 << (shift - 2)
    order = np.lexsort((lane, warp))
    group = warp[order] * parts + lane[order] * parts // 32
    cycles = compute_bank_cycles(group, byte[order] >> shift, 32 // parts)
    return int((cycles - 1).sum())


def count_sectors(events: Events, step: Step) -> tuple[int, int]:
    """Return the number of 32-byte sectors that a global-memory step transfers, and the possible minimum."""
    warp, _, byte, nbytes = locate_requests(events, step)
    if not len(warp):
        return 0, 0
    transferred = len(np.unique(np.stack([warp, byte // SECTOR_BYTES]), axis=1)[0])
    minimum = 0
    for warp_index in np.unique(warp):
        distinct = len(np.unique(byte[warp == warp_index]))
        minimum += -(-distinct * nbytes // SECTOR_BYTES)
    return transferred, minimum


def locate_requests(events: Events, step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return the warp, lane and byte offset of each thread of a step, and the bytes accessed per thread."""
    rows = slice(step.first, step.last, step.count)
    itemsize = events.tensors[step.tensor].itemsize
    warp = events.block[rows].astype(np.int64) * 32 + (events.thread[rows] >> 5)
    return warp, events.thread[rows] & 31, events.element[rows] * itemsize, itemsize * step.count
