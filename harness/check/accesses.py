"""Tabulate the memory accesses of a replayed run: thread, tensor, element, step, line and blank.

Pictures of a run are drawn from these tables, and `blame` compares those of the learner's run and the
solution's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.learner.blanks import Blank
from harness.vgpu import Events, Finding
from harness.vgpu.checks.counters import bank_cycles
from harness.vgpu.checks.events import Step, Tensor
from harness.vgpu.ptx.parser import Instr
from harness.vgpu.ptx.places import user_location

if TYPE_CHECKING:
    from harness.vgpu import Launch  # which loads the engines

SECTOR = 32
"""Bytes that global memory moves at least."""


@dataclass(frozen=True)
class Line:
    """A line of source; `blank` is the id of the blank that holds it, or ""."""

    file: str
    number: int
    blank: str = ""


@dataclass(frozen=True)
class Source:
    """The file with the blanks; other files of a package are known by their paths only."""

    path: Path
    blanks: Mapping[str, Blank] = field(default_factory=dict[str, Blank])

    def line(self, instr: Instr | None) -> Line | None:
        """Return the source line of an instruction that helps a learner: in a blank, else in this file, else
        anywhere."""
        if instr is None or instr.loc is None:
            return None
        frames = [frame for frame in instr.loc.chain() if Path(frame.file) == self.path and frame.line]
        for frame in frames:
            for id, blank in self.blanks.items():
                if blank.line <= frame.line < blank.line + max(len(blank.body), 1):
                    return Line(str(self.path), frame.line, id)
        at = frames[0] if frames else user_location(instr.loc)
        return Line(at.file, at.line) if at and at.line else None


@dataclass(frozen=True, order=True)
class Thread:
    """One thread of a launch: the launch's number in the run, the block's in the grid, its own in the block."""

    launch: int
    block: int
    thread: int


@dataclass(frozen=True)
class Place:
    """One element of a tensor; `block` is the owner's where the memory is shared, else -1, `launch` likewise."""

    tensor: str
    element: int
    launch: int = -1
    block: int = -1


@dataclass(frozen=True)
class Access:
    """One access: step in the run, thread, kind ("R", "W", "A"), place and value."""

    step: int
    who: Thread
    kind: str
    place: Place
    value: float


@dataclass
class LaunchTrace:
    """One launch of a run with its events: name, geometry, the first step's number in the run, findings."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    events: Events
    first_step: int
    findings: list[Finding]
    shuffles: bool

    def block_index(self, number: int) -> tuple[int, int, int]:
        """Return a block's number as (x, y, z)."""
        return index3(number, self.grid)

    def thread_index(self, number: int) -> tuple[int, int, int]:
        """Return a thread's number in its block as (x, y, z)."""
        return index3(number, self.block)


def index3(number: int, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return a number, x first, as (x, y, z)."""
    x, y, _ = sizes
    return number % x, number // x % y, number // (x * y)


class Accesses:
    """A run's accesses as columns, one row an access, in the order of execution."""

    def __init__(self, launches: "Sequence[Launch]", source: Source):
        """Index the accesses of `launches`; launches without events are skipped."""
        self.source = source
        self.launches: list[LaunchTrace] = []
        first = 0
        for launch in launches:
            if launch.events is None:
                continue
            shuffles = any(i.op in ("shfl", "redux") for i in launch.kernel.function.body)
            self.launches.append(
                LaunchTrace(
                    launch.name, launch.grid, launch.block, launch.events, first, launch.findings, shuffles
                )
            )
            first += len(launch.events.steps)
        self.steps: list[Step] = [step for launch in self.launches for step in launch.events.steps]
        self.dropped = sum(launch.events.dropped for launch in self.launches)
        self.lines = [source.line(step.instr) for step in self.steps]
        self._columns()

    def _columns(self) -> None:
        names: dict[tuple[int, str], int] = {}
        codes: list[int] = []
        for number, launch in enumerate(self.launches):
            for step in launch.events.steps:
                tensor = launch.events.tensors.get(step.tensor)
                own = number if tensor is not None and tensor.space == "shared" else -1
                codes.append(names.setdefault((own, step.tensor), len(names)))
        self.names = list(names)  # code -> (launch of shared memory or -1, name)
        lengths = np.array([step.last - step.first for step in self.steps], np.int64)
        regions = {"": 0} | {id: n for n, id in enumerate(self.source.blanks, start=1)}
        region = [regions[line.blank] if line else 0 for line in self.lines]

        def column(values: Sequence[int] | Sequence[str], kind: str = "i4") -> np.ndarray:
            return np.repeat(np.array(values, kind), lengths)

        def join(parts: list[np.ndarray], kind: str) -> np.ndarray:
            return np.concatenate([*parts, np.zeros(0, kind)])

        self.step = np.repeat(np.arange(len(self.steps)), lengths)
        owners = [n for n, launch in enumerate(self.launches) for _ in launch.events.steps]
        self.launch = column(owners)
        self.kind = column([step.kind[0] for step in self.steps], "U1")
        self.tensor = column(codes)
        self.region = column(region)
        events = [launch.events for launch in self.launches]
        self.block = join([e.block for e in events], "i4")
        self.thread = join([e.thread for e in events], "i4")
        self.element = join([e.element for e in events], "i8")
        self.value = join([e.value for e in events], "f8")
        self.regions = list(regions)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is touched, by name; of shared memory the last launch's."""
        return {name: tensor for launch in self.launches for name, tensor in launch.events.tensors.items()}

    # -- questions ------------------------------------------------------------------------------------------
    def at(self, place: Place) -> np.ndarray:
        """Return which rows touch a place: a mask."""
        key = (place.launch, place.tensor)
        if key not in self.names:
            return np.zeros(len(self.step), bool)
        mask = (self.tensor == self.names.index(key)) & (self.element == place.element)
        return mask & (self.block == place.block) if place.block >= 0 else mask

    def by(self, who: Thread) -> np.ndarray:
        """Return which rows are a thread's: a mask."""
        return (self.launch == who.launch) & (self.block == who.block) & (self.thread == who.thread)

    def place(self, row: int) -> Place:
        """Return the place that a row touches."""
        launch, name = self.names[int(self.tensor[row])]
        return Place(name, int(self.element[row]), launch, int(self.block[row]) if launch >= 0 else -1)

    def access(self, row: int) -> Access:
        """Return a row, with names."""
        thread = Thread(int(self.launch[row]), int(self.block[row]), int(self.thread[row]))
        return Access(
            int(self.step[row]), thread, str(self.kind[row]), self.place(row), float(self.value[row])
        )

    def line(self, step: int) -> Line | None:
        """Return the source line of a step."""
        return self.lines[step]

    def blank(self, step: int) -> str:
        """Return the blank that a step belongs to, or ""."""
        line = self.lines[step]
        return line.blank if line else ""

    def launch_of(self, step: int) -> int:
        """Return the number of the launch of a step."""
        numbers = [launch.first_step for launch in self.launches]
        return int(np.searchsorted(numbers, step, "right")) - 1


# ---- Costs of a step ----------------------------------------------------------------------------------------


def bank_conflicts(events: Events, step: Step) -> int:
    """Return the extra cycles of a step on shared memory from bank conflicts."""
    warp, lane, byte, nbytes = requests(events, step)
    if not len(warp):
        return 0
    shift = max(nbytes.bit_length() - 1, 2)
    parts = 1 << (shift - 2)
    order = np.lexsort((lane, warp))
    group = warp[order] * parts + lane[order] * parts // 32
    cycles = bank_cycles(group, byte[order] >> shift, 32 // parts)
    return int((cycles - 1).sum())


def sectors(events: Events, step: Step) -> tuple[int, int]:
    """Return the 32-byte sectors that a step on global memory moves, and the least that its bytes would fit
    into."""
    warp, _, byte, nbytes = requests(events, step)
    if not len(warp):
        return 0, 0
    moved = len(np.unique(np.stack([warp, byte // SECTOR]), axis=1)[0])
    least = 0
    for number in np.unique(warp):
        distinct = len(np.unique(byte[warp == number]))
        least += -(-distinct * nbytes // SECTOR)
    return moved, least


def requests(events: Events, step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Return (warp, lane, byte, bytes) of a step's threads; bytes is per thread."""
    rows = slice(step.first, step.last, step.count)
    itemsize = events.tensors[step.tensor].itemsize
    warp = events.block[rows].astype(np.int64) * 32 + (events.thread[rows] >> 5)
    return warp, events.thread[rows] & 31, events.element[rows] * itemsize, itemsize * step.count
