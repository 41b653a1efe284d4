"""Count the costs of kernels on the virtual GPU: bytes, sectors, bank conflicts, atomics, flops; no times.

A launch touches the bytes of every tensor that it reads or writes once; further traffic is repeated. The
bytes predicted by the shapes are so the least that any kernel with the same inputs and outputs could move.
"""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.devices.recorder import RecordedLaunch, RecordedTensor, record
from harness.learner.work import Work
from harness.spec.puzzle import Dims
from harness.vgpu import Counters, Launch
from harness.vgpu.checks.counters import Issued, Site, sum_traffic
from harness.vgpu.checks.findings import plural
from harness.vgpu.engine.reports import shared_name
from harness.vgpu.ptx.parser import Instr
from harness.vgpu.ptx.places import user_location


@dataclass(frozen=True)
class LaunchProfile:
    """One launch: its name and geometry, its counters, and the bytes of the tensors it reads and of those it writes."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    counters: Counters
    touched_read: int
    touched_written: int
    arrays: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of the shared-memory arrays in the source."""

    @property
    def read(self) -> int:
        """Bytes that loads request."""
        return self.counters.global_load.bytes

    @property
    def written(self) -> int:
        """Bytes that stores and atomics send."""
        return self.counters.global_store.bytes + self.counters.global_atomic.bytes

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def touched(self) -> int:
        """Return the least traffic by the shapes: every input read once, every output written once."""
        return self.touched_read + self.touched_written


@dataclass(frozen=True)
class Replayed:
    """The launches of one variant as they ran, each with its recording, and every event of the recording."""

    launches: list[Launch]
    recorded: list[RecordedLaunch]
    events: Sequence[RecordedTensor | RecordedLaunch]


@dataclass(frozen=True)
class Counting:
    """The first case of some variants of a package, to be counted; without `dims` it is the puzzle's."""

    work: Work
    variants: tuple[str, ...]
    dims: Dims | None = None
    dtype: str = "float32"
    seed: int = 0
    blocks: str = "natural"

    def replay(self) -> dict[str, Replayed]:
        """Replay the case on the virtual GPU, variant by variant.

        Raises a WorkbookError if the package does not compile or a kernel does not end.
        """
        from harness.check.reference import Reference
        from harness.devices import replay

        puzzle = self.work.puzzle
        case = puzzle.cases(self.dims)[0]
        requested = puzzle.compiled_with(self.variants)
        recording = record(self.work.whole_package(), puzzle.name, self.dtype, [case.dims], requested)
        player = replay.Replay(recording, puzzle, self.dtype, blocks=self.blocks)
        inputs = Reference(puzzle, self.dtype, self.seed).inputs(case)
        runs: dict[str, Replayed] = {}
        for variant in self.variants:
            before = len(player.gpu.launches)
            player.run(variant, case, inputs)
            events = recording.cases[variant, case.dims]
            recorded = [event for event in events if isinstance(event, RecordedLaunch)]
            launches = player.gpu.launches[before:]
            count = count_needed(launches, {*puzzle.forward, *puzzle.backward})
            runs[variant] = Replayed(launches[:count], recorded[:count], events)
        return runs

    def profile(self) -> dict[str, list[LaunchProfile]]:
        """Return the counters: variant -> its launches, in order."""
        return {
            variant: [
                measure(launch, recorded, run.events)
                for launch, recorded in zip(run.launches, run.recorded, strict=True)
            ]
            for variant, run in self.replay().items()
        }


def count_needed(launches: list[Launch], outputs: set[str]) -> int:
    """Return how many launches it takes until every output is written; later ones only show intermediates to
    a gate."""
    writers = [
        number
        for number, launch in enumerate(launches, start=1)
        if any((t.written or t.atomics) and name in outputs for name, t in launch.counters.tensors.items())
    ]
    return max(writers, default=len(launches))


def measure(
    launch: Launch, recorded: RecordedLaunch, events: Sequence[RecordedTensor | RecordedLaunch]
) -> LaunchProfile:
    """Return the profile of a replayed launch; sizes come from its recorded tensors."""
    sizes = {event.name: event.nbytes for event in events if isinstance(event, RecordedTensor)}
    traffic = launch.counters.tensors
    read = sum(sizes[name] for name, t in traffic.items() if t.read and name in sizes)
    written = sum(sizes[name] for name, t in traffic.items() if (t.written or t.atomics) and name in sizes)
    arrays = {shared_name(variable): name for variable, name in launch.kernel.shared_names.items()}
    return LaunchProfile(recorded.name, recorded.grid, recorded.block, launch.counters, read, written, arrays)


def table(profiles: dict[str, list[LaunchProfile]], width: int = 0) -> list[str]:
    """Return the profile as lines: one per launch, then the variants side by side. Columns beyond `width`
    continue in a further table; 0 means no limit."""
    lines: list[str] = []
    for variant, launches in profiles.items():
        lines += ["", f"{variant}: {plural(len(launches), 'launch', 'launches')}"]
        lines += align([HEADS, *map(cells, launches)], width)
    lines += ["", "side by side"]
    totals = [[what, *(f"{total(each):,}" for each in profiles.values())] for what, total in TOTALS.items()]
    lines += align([["", *profiles], *totals], width)
    return [
        *lines,
        "",
        *(line for text in LEGEND for line in (textwrap.wrap(text, width) if width else [text])),
    ]


def align(rows: list[list[str]], width: int) -> list[str]:
    """Align rows of cells, the first column left and the others right, in groups of columns that fit."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    first = 1
    while first < len(sizes):
        used, last = 3 + sizes[0], first
        while last < len(sizes) and (not width or last == first or used + 2 + sizes[last] <= width):
            used, last = used + 2 + sizes[last], last + 1
        for row in rows:
            cells = "".join(
                f"  {cell:>{size}}" for cell, size in zip(row[first:last], sizes[first:last], strict=True)
            )
            lines.append(f"   {row[0]:<{sizes[0]}}{cells}")
        first = last
    return lines


def detail(profiles: dict[str, list[LaunchProfile]], width: int = 0) -> list[str]:
    """Return the traffic of each launch by tensor, array and source line."""
    lines: list[str] = []
    for variant, launches in profiles.items():
        for launch in launches:
            lines += ["", f"{variant}: {launch.name}, by tensor"]
            lines += align([["", *DETAILS], *by_tensor(launch)], width)
            lines += ["", f"{variant}: {launch.name}, by line"]
            lines += align([["", *DETAILS, "issued"], *by_line(launch)], width)
            lines += count_issued(launch)
    return [
        *lines,
        "",
        "issued: shuffles, matrix products and commits of copies by warps, barriers by blocks",
    ]


DETAILS = ["requests", "bytes", "B/request", "sectors", "bank"]


def by_tensor(launch: LaunchProfile) -> Iterator[list[str]]:
    """Yield a row for each tensor and kind of access, shared-memory arrays last."""
    sites = [*launch.counters.sites.values()]
    for key in sorted({(site.space, site.tensor, site.verb) for site in sites}):
        space, tensor, verb = key
        mine = [site for site in sites if (site.space, site.tensor, site.verb) == key]
        name = launch.arrays.get(tensor, tensor).replace(" ", "_")
        yield [f"{name}:{verb}" if space == "global" else f"{name}:shared_{verb}", *moved_by(mine)]


def by_line(launch: LaunchProfile) -> Iterator[list[str]]:
    """Yield a row for each line that moves or issues something, in the order of the source."""
    done: dict[tuple[str, int], tuple[list[Site], list[Issued]]] = {}
    for site in launch.counters.sites.values():
        done.setdefault(line_of(site.instr), ([], []))[0].append(site)
    for each in launch.counters.issued.values():
        done.setdefault(line_of(each.instr), ([], []))[1].append(each)
    for (file, number), (sites, others) in sorted(done.items()):
        yield [f"{Path(file).name}:{number}", *moved_by(sites), f"{sum(each.count for each in others):,}"]


def line_of(instr: Instr) -> tuple[str, int]:
    """Return the file and line, outside the library, of an instruction."""
    at = user_location(instr.loc)
    return (at.file, at.line) if at else ("PTX", instr.line)


def moved_by(sites: Sequence[Site]) -> list[str]:
    """Return the cells of some sites together."""
    t = sum_traffic(sites)
    each = f"{t.bytes / t.requests:.0f}" if t.requests else "-"
    return [f"{t.requests:,}", f"{t.bytes:,}", each, f"{t.sectors:,}", f"{t.bank_conflicts:,}"]


def count_issued(launch: LaunchProfile) -> list[str]:
    """Summarise the instructions that warps issue together in a launch and the overlap of copies; empty if
    there are none."""
    c, blocks = launch.counters, launch.grid[0] * launch.grid[1] * launch.grid[2]
    parts = {
        "shuffles": c.issues("shfl", "redux"),
        "mma": c.issues("mma"),
        "wgmma": c.issues("wgmma"),
        "groups of copies": c.issues("cp"),
    }
    words = [f"{what} {count:,}" for what, count in parts.items() if count]
    if c.barriers:
        words.append(f"barriers a block {c.barriers / blocks:g}")
    if c.copy_overlap is not None:
        words.append(f"multiply-adds that hide a copy at least {c.copy_overlap:,}")
    return ["   " + ", ".join(words)] if words else []


HEADS = [
    "launch", "blocks", "threads", "read B", "written B", "predicted", "x", "sect/req", "bank", "atomics",
    "flops",
]  # fmt: skip


def cells(launch: LaunchProfile) -> list[str]:
    """Return the cells of one launch's line."""
    c = launch.counters
    again = f"{launch.moved / launch.touched:.1f}" if launch.touched else "-"
    return [
        launch.name,
        f"{launch.grid[0] * launch.grid[1] * launch.grid[2]:,}",
        f"{launch.block[0] * launch.block[1] * launch.block[2]:,}",
        f"{launch.read:,}",
        f"{launch.written:,}",
        f"{launch.touched:,}",
        again,
        f"{c.global_load.sectors_per_request:.1f}",
        f"{c.shared_load.bank_conflicts + c.shared_store.bank_conflicts:,}",
        f"{c.atomics:,}",
        f"{c.flops:,}",
    ]


TOTALS: dict[str, Callable[[list[LaunchProfile]], int]] = {
    "launches": len,
    "bytes moved": lambda launches: sum(launch.moved for launch in launches),
    "bytes the shapes predict": lambda launches: sum(launch.touched for launch in launches),
    "32-byte sectors": lambda launches: sum(
        t.sectors for launch in launches for t in (launch.counters.global_load, launch.counters.global_store)
    ),
    "atomics": lambda launches: sum(launch.counters.atomics for launch in launches),
    "most atomics on one address": lambda launches: max(
        launch.counters.atomics_per_address for launch in launches
    ),
    "barriers": lambda launches: sum(launch.counters.barriers for launch in launches),
    "flops": lambda launches: sum(launch.counters.flops for launch in launches),
}

LEGEND = [
    "predicted: every tensor of the launch moved once; x: how many times that is really moved (caches not counted)",
    "sect/req: 32-byte sectors for one load of a warp, 4 if 32 threads read 32 neighbouring floats",
    "bank: extra cycles of shared memory because threads of a warp met in a bank",
    "Counted on the virtual GPU (sm_90a), which has no clock: none of this is a time.",
]
