"""Count the costs of kernels on the virtual GPU: bytes, sectors, bank conflicts, atomics, flops; no times."""

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.devices.recorder import RecordedLaunch, RecordedTensor, RecordRequest, record
from harness.learner.exercise import Exercise
from harness.spec.puzzle import Dims
from harness.vgpu import Counters, Launch
from harness.vgpu.checks.counters import IssueCount, Site, sum_traffic
from harness.vgpu.checks.findings import format_count
from harness.vgpu.engine.reports import shorten_shared_name
from harness.vgpu.ptx.locations import find_user_location
from harness.vgpu.ptx.parser import Instr


@dataclass(frozen=True)
class LaunchProfile:
    """One launch: name, geometry, counters, and the sizes of the tensors that it reads and writes."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    counters: Counters
    input_bytes: int
    output_bytes: int
    shared_arrays: Mapping[str, str] = field(default_factory=dict[str, str])
    """Shared-memory array -> its name in the source."""

    @property
    def bytes_read(self) -> int:
        return self.counters.global_load.bytes

    @property
    def bytes_written(self) -> int:
        return self.counters.global_store.bytes + self.counters.global_atomic.bytes

    @property
    def bytes_moved(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def min_bytes(self) -> int:
        """The minimum traffic for these shapes: every input read once, every output written once."""
        return self.input_bytes + self.output_bytes


@dataclass(frozen=True)
class ReplayedVariant:
    """One variant's replayed launches, their recordings, and all events of the recording."""

    launches: list[Launch]
    recorded_launches: list[RecordedLaunch]
    events: Sequence[RecordedTensor | RecordedLaunch]


@dataclass(frozen=True)
class CountRequest:
    """A request to count each variant's costs, in its last `counted` case or, without any, its first case."""

    exercise: Exercise
    variants: tuple[str, ...]
    dims: Dims | None = None
    dtype: str = "float32"
    seed: int = 0
    blocks: str = "natural"

    def replay(self) -> dict[str, ReplayedVariant]:
        """Replay each variant's case on the virtual GPU.

        Raises a WorkbookError if the package does not compile or a kernel does not end.
        """
        from harness.check.reference import Reference
        from harness.devices import replay

        puzzle = self.exercise.puzzle
        cases = {
            variant: [*puzzle.list_cases(self.dims)[:1], *puzzle.list_limit_cases(variant, self.dims)][-1]
            for variant in self.variants
        }
        variants = puzzle.list_compiled_variants(self.variants)
        dims = tuple(dict.fromkeys(case.dims for case in cases.values()))
        order = RecordRequest(self.exercise.load_package(), puzzle.name, dims, variants, dtype=self.dtype)
        recording = record(order)
        replayer = replay.Replay(recording, puzzle, self.dtype, block_order=self.blocks)
        reference = Reference(puzzle, self.dtype, self.seed)
        runs: dict[str, ReplayedVariant] = {}
        for variant in self.variants:
            num_launches = len(replayer.gpu.launches)
            case = cases[variant]
            replayer.run(variant, case, reference.get_inputs(case))
            events = recording.cases[variant, case.dims]
            recorded_launches = [event for event in events if isinstance(event, RecordedLaunch)]
            launches = replayer.gpu.launches[num_launches:]
            count = count_needed_launches(launches, {*puzzle.forward, *puzzle.backward})
            runs[variant] = ReplayedVariant(launches[:count], recorded_launches[:count], events)
        return runs

    def profile_variants(self) -> dict[str, list[LaunchProfile]]:
        profiles: dict[str, list[LaunchProfile]] = {}
        for variant, run in self.replay().items():
            pairs = zip(run.launches, run.recorded_launches, strict=True)
            profiles[variant] = [profile_launch(*pair, run.events) for pair in pairs]
        return profiles


def count_needed_launches(launches: list[Launch], outputs: set[str]) -> int:
    """Return the number of launches up to the last one that writes an output."""
    for count in range(len(launches), 0, -1):
        traffic = launches[count - 1].counters.tensors
        if any((t.written or t.atomics) and name in outputs for name, t in traffic.items()):
            return count
    return len(launches)


def profile_launch(
    launch: Launch, recorded_launch: RecordedLaunch, events: Sequence[RecordedTensor | RecordedLaunch]
) -> LaunchProfile:
    """Return the profile of a replayed launch; sizes come from its recorded tensors."""
    sizes = {event.name: event.nbytes for event in events if isinstance(event, RecordedTensor)}
    traffic = launch.counters.tensors
    read = sum(sizes[name] for name, t in traffic.items() if t.read and name in sizes)
    written = sum(sizes[name] for name, t in traffic.items() if (t.written or t.atomics) and name in sizes)
    arrays = {shorten_shared_name(variable): name for variable, name in launch.kernel.shared_names.items()}
    return LaunchProfile(
        recorded_launch.name,
        recorded_launch.grid,
        recorded_launch.block,
        launch.counters,
        read,
        written,
        arrays,
    )


def format_table(profiles: dict[str, list[LaunchProfile]], width: int = 0) -> list[str]:
    """Return the profile as lines: one per launch, then the variants side by side.

    Columns beyond `width` continue in a further table; 0 means no limit.
    """
    lines: list[str] = []
    for variant, launches in profiles.items():
        lines += ["", f"{variant}: {format_count(len(launches), 'launch', 'launches')}"]
        lines += align_columns([HEADINGS, *map(format_cells, launches)], width)
    lines += ["", "side by side"]
    totals = [[label, *(f"{total(rows):,}" for rows in profiles.values())] for label, total in TOTALS.items()]
    lines += align_columns([["", *profiles], *totals], width)
    legend = (line for text in LEGEND for line in (textwrap.wrap(text, width) if width else [text]))
    return [*lines, "", *legend]


def align_columns(rows: list[list[str]], width: int) -> list[str]:
    """Align rows of cells, the first column left and the others right, in groups of columns that fit."""
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    first = 1
    while first < len(sizes):
        used, last = 3 + sizes[0], first
        while last < len(sizes) and (not width or last == first or used + 2 + sizes[last] <= width):
            used, last = used + 2 + sizes[last], last + 1
        for row in rows:
            pairs = zip(row[first:last], sizes[first:last], strict=True)
            cells = (f"  {cell:>{size}}" for cell, size in pairs)
            lines.append(f"   {row[0]:<{sizes[0]}}{''.join(cells)}")
        first = last
    return lines


def format_detail(profiles: dict[str, list[LaunchProfile]], width: int = 0) -> list[str]:
    """Return the traffic of each launch by tensor, array and source line."""
    lines: list[str] = []
    for variant, launches in profiles.items():
        for launch in launches:
            lines += ["", f"{variant}: {launch.name}, by tensor"]
            lines += align_columns([["", *DETAIL_HEADINGS], *list_tensor_rows(launch)], width)
            lines += ["", f"{variant}: {launch.name}, by line"]
            lines += align_columns([["", *DETAIL_HEADINGS, "issued"], *list_line_rows(launch)], width)
            lines += describe_issued(launch)
    legend = "issued: shuffles, matrix products and commits of copies by warps, barriers by blocks"
    return [*lines, "", legend]


DETAIL_HEADINGS = ["requests", "bytes", "B/request", "sectors", "bank"]


def list_tensor_rows(launch: LaunchProfile) -> Iterator[list[str]]:
    """Yield a row for each tensor and kind of access, shared-memory arrays last."""
    sites = [*launch.counters.sites.values()]
    for key in sorted({(site.space, site.tensor, site.verb) for site in sites}):
        space, tensor, verb = key
        selected = [site for site in sites if (site.space, site.tensor, site.verb) == key]
        name = launch.shared_arrays.get(tensor, tensor).replace(" ", "_")
        yield [f"{name}:{verb}" if space == "global" else f"{name}:{space}_{verb}", *format_traffic(selected)]


def list_line_rows(launch: LaunchProfile) -> Iterator[list[str]]:
    """Yield a row for each source line with memory accesses or collective instructions, in order."""
    by_line: dict[tuple[str, int], tuple[list[Site], list[IssueCount]]] = {}
    for site in launch.counters.sites.values():
        by_line.setdefault(find_source_line(site.instr), ([], []))[0].append(site)
    for issue in launch.counters.issues.values():
        by_line.setdefault(find_source_line(issue.instr), ([], []))[1].append(issue)
    for (file, number), (sites, issues) in sorted(by_line.items()):
        issued = sum(issue.count for issue in issues)
        yield [f"{Path(file).name}:{number}", *format_traffic(sites), f"{issued:,}"]


def find_source_line(instr: Instr) -> tuple[str, int]:
    location = find_user_location(instr.loc)
    return (location.file, location.line) if location else ("PTX", instr.line)


def format_traffic(sites: Sequence[Site]) -> list[str]:
    t = sum_traffic(sites)
    bytes_per_request = f"{t.bytes / t.requests:.0f}" if t.requests else "-"
    return [f"{t.requests:,}", f"{t.bytes:,}", bytes_per_request, f"{t.sectors:,}", f"{t.bank_conflicts:,}"]


def describe_issued(launch: LaunchProfile) -> list[str]:
    """Summarise the launch's collective instructions and the overlap of its copies; return [] without any."""
    c, blocks = launch.counters, math.prod(launch.grid)
    parts = {"shuffles": c.count_issues("shfl", "redux"), "mma": c.count_issues("mma")}
    parts |= {"wgmma": c.count_issues("wgmma"), "groups of copies": c.count_issues("cp")}
    descriptions = [f"{label} {count:,}" for label, count in parts.items() if count]
    if c.barriers:
        descriptions.append(f"barriers a block {c.barriers / blocks:g}")
    if c.copy_overlap is not None:
        descriptions.append(f"multiply-adds that hide a copy at least {c.copy_overlap:,}")
    return ["   " + ", ".join(descriptions)] if descriptions else []


HEADINGS = [
    "launch", "blocks", "threads", "read B", "written B", "predicted", "x", "sect/req", "bank", "atomics",
    "flops",
]  # fmt: skip


def format_cells(launch: LaunchProfile) -> list[str]:
    c = launch.counters
    ratio = f"{launch.bytes_moved / launch.min_bytes:.1f}" if launch.min_bytes else "-"
    traffic = math.prod(launch.grid), math.prod(launch.block), launch.bytes_read, launch.bytes_written
    conflicts = c.shared_load.bank_conflicts + c.shared_store.bank_conflicts
    numbers = [f"{number:,}" for number in (*traffic, launch.min_bytes)]
    sectors = f"{c.global_load.sectors_per_request:.1f}"
    return [launch.name, *numbers, ratio, sectors, f"{conflicts:,}", f"{c.atomics:,}", f"{c.flops:,}"]


TOTALS: dict[str, Callable[[list[LaunchProfile]], int]] = {
    "launches": len,
    "bytes moved": lambda launches: sum(launch.bytes_moved for launch in launches),
    "bytes the shapes predict": lambda launches: sum(launch.min_bytes for launch in launches),
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
