"""Record the launches of a puzzle without a device: PTX, geometry and exact argument bytes.

A program generated from the spec (`record_program.py`) calls the launch functions with a launcher,
`recording/recorder.mojo`, that prints the launches, and `parse` parses its output. Only the Mojo compiler is
needed. The custom op calls the same launch functions, so a recording has exactly the launches of a GPU.

A check calls `record_dtypes`, which loads recordings from the cache, whole or in parts (`kernel_cache.py`),
and compiles the rest.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from harness.devices.kernel_cache import (
    CONTENTS,
    MARK,
    Instance,
    Kernels,
    compile_together,
    mark_launches,
    strip_copy_prefixes,
)
from harness.devices.record_program import generate_program_for
from harness.errors import CompileFailed
from harness.toolchain import roots
from harness.toolchain.cache import (
    cache_text,
    compute_digest,
    create_staging_folder,
    get_cache_folder,
    read_cached_text,
)
from harness.toolchain.diagnostics import parse_diagnostics
from harness.toolchain.packages import OpPackage, make_compile_error, run_mojo
from harness.vgpu.ptx.parser import decode_file_names

LAUNCHER = Path(__file__).with_name("recording") / "recorder.mojo"
# A limit on the blocks along y, read by the launch functions: so low that a kernel without a grid-stride loop
# skips rows at the sizes of the cases, and not only beyond a GPU's limit of 65,535 blocks.
SMALL_GRID = "-DMAX_GRID_Y=4"
# The program's dtype and variants, which are replaced by each order's, so that one program can record several.
DTYPE_OF_RUN = 'get_defined_dtype["DTYPE", DType.float32]()'
VARIANT_OF_RUN = re.compile(r'is_defined\["VARIANT_(\w+)"\]\(\)')


# The recording launcher aligns tensors to pages and leaves an empty page after each.
PAGE = 0x1000


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor or workspace; its address is synthetic and only identifies it in a launch's arguments."""

    name: str
    address: int
    nbytes: int
    scratch: bool = False

    def get_offset(self, argument: bytes) -> int | None:
        """Return an argument's byte offset in the tensor, or None if it is not a pointer into its pages."""
        offset = int.from_bytes(argument, "little") - self.address
        size = -(-self.nbytes // PAGE) * PAGE + PAGE
        return offset if len(argument) == 8 and 0 <= offset < size else None


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch: its name in reports, the kernel's symbol, grid, block, and each argument's bytes.

    `shared` is dynamic shared memory in bytes.
    """

    name: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[bytes, ...]
    shared: int = 0


Events = list[RecordedTensor | RecordedLaunch]


@dataclass
class Recording:
    """Launches of a puzzle in one dtype.

    `cases` maps (variant, dims) to its tensors and launches in order; `ptx` maps kernel symbols to PTX.
    """

    cases: dict[tuple[str, tuple[int, ...]], "Events"] = field(default_factory=dict)
    ptx: dict[str, str] = field(default_factory=dict)

    def list_launches(self) -> list[RecordedLaunch]:
        events = (event for events in self.cases.values() for event in events)
        return [event for event in events if isinstance(event, RecordedLaunch)]

    def list_argument_names(self, launch: str) -> list[str]:
        """Return the name of the tensor that each argument of a launch points to, or "" for a scalar."""
        for events in self.cases.values():
            tensors = [event for event in events if isinstance(event, RecordedTensor)]
            for event in events:
                if isinstance(event, RecordedLaunch) and event.name == launch:
                    return [
                        next((t.name for t in tensors if t.get_offset(argument) is not None), "")
                        for argument in event.arguments
                    ]
        return []

    def map_kernel_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for launch in self.list_launches():
            names.setdefault(launch.symbol, launch.name)
        return names


@dataclass(frozen=True)
class Order:
    """A request to record one package of a puzzle.

    Without `variants`, the default variants are recorded; fewer variants compile faster.
    """

    package: OpPackage
    puzzle: str
    dims: tuple[tuple[int, ...], ...]
    variants: tuple[str, ...] = ()
    small_grid: bool = False
    dtype: str = "float32"

    @property
    def flags(self) -> tuple[str, ...]:
        return (SMALL_GRID,) if self.small_grid else ()

    def fill_in(self, program: str) -> str:
        """Return a recording program for this order's dtype and variants."""
        program = program.replace(DTYPE_OF_RUN, f"DType.{self.dtype}")
        return VARIANT_OF_RUN.sub(lambda match: str(match[1] in self.variants), program)


def record(order: Order) -> Recording:
    """Record a package's launches, or load them from the cache. Raises CompileFailed."""
    if read_cached_text(_cache_file(order)) is None and (parts := _assemble_from_cache(order)):
        return parts
    return record_many([order])[0]


def is_recorded(order: Order) -> bool:
    in_parts = _read_plans(order) is not None and not _find_missing(order)
    return in_parts or read_cached_text(_cache_file(order)) is not None


def is_cached(orders: Iterable[Order]) -> bool:
    """Return whether all recordings, or at least their plans, are cached, so that recording takes seconds."""
    return all(read_cached_text(_cache_file(order)) is not None or _read_plans(order) for order in orders)


def record_dtypes(orders: Sequence[Order]) -> list[Recording]:
    """Record one package in several dtypes; if its plans are cached, compile all new kernels together.

    Raises CompileFailed if one of them does not compile.
    """
    kernels = _get_kernels(orders[0])
    uncached = [order for order in orders if read_cached_text(_cache_file(order)) is None]
    if uncached and all(_read_plans(order) for order in uncached):
        missing = [kernel for order in uncached for kernel in _find_missing(order)]
        if missing:  # even an empty program takes a second to compile
            kernels.compile(list(dict.fromkeys(missing)))
    elif len(uncached) > 1:
        record_many(uncached)
    return [record(order) for order in orders]


def record_many(orders: Sequence[Order]) -> list[Recording]:
    """Record packages and cache the recordings for `record`.

    One program records several packages, because starting a program takes longer than recording a package,
    and shared parts are compiled once. Raises CompileFailed for the first package that does not compile.
    """
    files = {order: _cache_file(order) for order in orders}
    missing = [order for order, file in files.items() if read_cached_text(file) is None]
    recordings: dict[Order, Recording] = {}
    for small in (False, True):
        together = [order for order in missing if order.variants and order.small_grid == small]
        if len(together) > 1:
            recordings |= _assemble_together(together)
    by_flags: dict[tuple[str, ...], list[Order]] = {}
    for order in missing:
        if order not in recordings:
            by_flags.setdefault(order.flags, []).append(order)
    texts: dict[Order, str] = {}
    for alike in by_flags.values():
        if len(alike) > 1:
            texts.update(zip(alike, _run_launcher(alike), strict=True))

    def make(order: Order) -> str:
        if order in texts:
            return texts[order]
        text = _run_launcher([order])[0]
        _cache_parts(order, text)
        return text

    for order, file in files.items():
        if order not in recordings:
            recordings[order] = parse(cache_text(file, partial(make, order), CONTENTS))
    return [recordings[order] for order in orders]


def _assemble_together(orders: Sequence[Order]) -> dict[Order, Recording]:
    """Assemble recordings of packages with the same grid limit from parts; omit those for which that fails.

    One program makes the plans, without compiling kernels: it records every variant for one package per
    distinct host code, because most known-bad solutions differ only in a kernel. Another program compiles
    each kernel once, however many packages share it.

    Raises CompileFailed.
    """
    variants: dict[str, dict[str, None]] = {}
    hosts: dict[str, list[Order]] = {}
    for order in orders:
        variants.setdefault(order.puzzle, {}).update(dict.fromkeys(order.variants))
        hosts.setdefault(_compute_host_digest(order), []).append(order)
    unplanned = []
    for alike in hosts.values():
        dims = tuple(dict.fromkeys(dims for order in alike for dims in order.dims))
        first = replace(alike[0], dims=dims, variants=tuple(variants[alike[0].puzzle]))
        if _read_plans(first) is None:
            unplanned.append(first)
    if unplanned:
        try:
            texts = _run_launcher(unplanned, plan=True)
        except CompileFailed:  # recording the packages as a whole will report the error
            return {}
        for order, text in zip(unplanned, texts, strict=True):
            _cache_parts(order, text)
    requested: list[tuple[Kernels, list[Instance]]] = []
    listed: set[Path | None] = {None}
    for order in orders:
        kernels = _get_kernels(order)
        files = {kernel: kernels.get_cache_file(kernel) for kernel in _find_missing(order)}
        if new := [kernel for kernel, file in files.items() if file not in listed]:
            requested.append((kernels, new))
        listed.update(files.values())
    output = compile_together(requested) if requested else ""
    for kernels, new in requested if output else ():
        kernels.raise_own_error(new, output)
    parts = {order: _assemble_from_cache(order) for order in orders}
    return {order: recording for order, recording in parts.items() if recording}


def _cache_file(order: Order) -> Path:
    """Return a recording's cache file; its name covers all inputs, and the package's path in the PTX."""
    package = [order.package.digest, str(order.package.path.resolve())]
    programs = map(order.fill_in, _generate_programs(order.puzzle).values())
    key = compute_digest([*package, *order.flags, repr(order.dims), *programs])
    return get_cache_folder("recordings") / f"{key}.txt"


def _get_kernels(order: Order) -> Kernels:
    return Kernels(order.package, order.flags)


def _compute_host_digest(order: Order) -> str:
    """Return a digest of the host code; packages with equal digests have equal launches."""
    programs = [*_generate_programs(order.puzzle).values()]
    return compute_digest([order.dtype, _get_kernels(order).compute_host_digest(programs)])


def _get_plan_files(order: Order) -> dict[tuple[str, tuple[int, ...]], Path]:
    host, folder = _compute_host_digest(order), get_cache_folder("plans")
    return {
        (variant, dims): folder / f"{compute_digest([host, variant, repr(dims)])}.txt"
        for dims in order.dims
        for variant in order.variants
    }


def _read_plans(order: Order) -> tuple[str, dict[str, Instance]] | None:
    """Return (an order's plans as one text, symbol -> kernel), or None if a plan is missing."""
    plans = [text for file in _get_plan_files(order).values() if (text := read_cached_text(file)) is not None]
    if not plans or len(plans) < len(order.dims) * len(order.variants):
        return None
    text = "\n".join(plans)
    instances = {}
    for line in text.splitlines():
        if line.startswith(f"{MARK}kernel "):
            symbol, function, *parameters = line.removeprefix(f"{MARK}kernel ").split(" ")
            instances[symbol] = Instance(function, tuple(parameters))
    return text, instances


def _find_missing(order: Order) -> list[Instance]:
    """Return the kernels of an order's plans that are not cached; [] if a plan is missing."""
    kernels, planned = _get_kernels(order), _read_plans(order)
    instances = planned[1] if planned else {}
    return list(dict.fromkeys(k for symbol, k in instances.items() if kernels.read_ptx(k, symbol) is None))


def _assemble_from_cache(order: Order) -> Recording | None:
    """Assemble a recording from cached plans, compiling only new kernels; None if a plan is missing.

    Raises CompileFailed.
    """
    kernels, planned = _get_kernels(order), _read_plans(order)
    if not planned:
        return None
    text, instances = planned
    missing = _find_missing(order)
    if missing and not kernels.compile(missing):
        return None
    recording = parse(text)
    symbols = recording.map_kernel_names()
    recording.ptx = {symbol: kernels.read_ptx(instances[symbol], symbol) or "" for symbol in symbols}
    return recording if all(recording.ptx.values()) else None


def _cache_parts(order: Order, text: str) -> None:
    """Cache a recording in parts: the plan of each variant and size, and each kernel."""
    if not order.variants:
        return
    kernels, recording = _get_kernels(order), parse(text)
    instances: dict[str, Instance] = {}
    lines: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    case, instance = ("", ()), None
    for line in text.splitlines():
        record_kind, *fields = line.removeprefix(MARK).split(" ") if line.startswith(MARK) else [""]
        if record_kind == "instance":
            instance = Instance(fields[0], tuple(fields[1:]))
        if record_kind == "launch" and instance and instance.is_spellable:
            instances[fields[1]] = instance
        if record_kind == "launch":
            instance = None
        case = (fields[0], tuple(map(int, fields[1:]))) if record_kind == "case" else case
        if record_kind in ("case", "tensor", "workspace", "launch"):
            lines.setdefault(case, []).append(line)
    for symbol, kernel in instances.items():
        if symbol in recording.ptx:
            kernels.cache_ptx(kernel, symbol, recording.ptx[symbol], order.package.path.resolve())
    for planned, file in _get_plan_files(order).items():
        if planned in lines:
            kernels.cache_plan(file, lines[planned], instances)


def _generate_programs(puzzle: str) -> dict[str, str]:
    """Return file name -> text for the recording program of a puzzle's package, and for its launcher."""
    program = generate_program_for(puzzle, roots.get_solutions() / puzzle / "op")
    return {"record.mojo": program, LAUNCHER.name: LAUNCHER.read_text("utf-8")}


def _run_launcher(orders: list[Order], *, marks: bool = True, plan: bool = False) -> list[str]:
    """Return the output of the recording launcher for packages with the same flags.

    With `marks`, the launch code also prints the kernel of each launch, unless that does not compile. With
    `plan`, kernels are not compiled, and each package is reduced to the code that its launches need.
    """
    with create_staging_folder(get_cache_folder("recordings"), CONTENTS) as folder:
        folder = folder.resolve()
        result = run_mojo(
            "run", "-g1", "--diagnostic-format", "json", "--target-accelerator", "sm_90a",
            *orders[0].flags, *(["-DPLAN"] if plan else []),
            str(_write_program(folder, orders, marks, plan)),
        )  # fmt: skip
        output = result.stdout + result.stderr
        refused = marks and any(f"{MARK}instance" in message.text for message in parse_diagnostics(output))
        if result.returncode != 0 and (plan or (len(orders) == 1 and not refused)):
            path = orders[0].package.path
            raise make_compile_error(path, _name_paths(output, folder, path))
    if result.returncode != 0 and refused:
        return _run_launcher(orders, marks=False)
    if result.returncode != 0:  # bisect the orders to find the package that fails
        half = len(orders) // 2
        return [text for part in (orders[:half], orders[half:]) for text in _run_launcher(part, marks=marks)]
    texts = re.split(rf"^{MARK}package\n", result.stdout, flags=re.MULTILINE)[1:]
    paths = [order.package.path.resolve() for order in orders]
    return [_name_paths(text, folder, path) for text, path in zip(texts, paths, strict=True)]


def _name_paths(text: str, folder: Path, package: Path) -> str:
    """Replace the copy's path by the package's path, and remove the copy's prefix from symbols."""
    copy = re.compile(rf"{re.escape(str(folder))}/copy_\d+/op(?=/)")
    return strip_copy_prefixes(copy.sub(lambda match: str(package), decode_file_names(text)))


def _write_program(folder: Path, orders: list[Order], marks: bool, cut: bool) -> Path:
    """Write a program that records several packages in sequence.

    Each package (with `cut`, only the code that its launches need) is copied to a new package, together with
    its recording program and launcher, whose imports of `op` and `recorder` become relative.
    """
    imports, calls = [], []
    for number, order in enumerate(orders):
        copy = folder / f"copy_{number}"
        copy.mkdir()
        (copy / "__init__.mojo").touch()
        for name, text in _read_texts(order, cut).items():
            target = copy / "op" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (target.parent / "__init__.mojo").touch()
            target.write_text(mark_launches(text) if marks else text, "utf-8", errors="surrogateescape")
        for name, text in _generate_programs(order.puzzle).items():
            text = re.sub(r"^from (?=(op|recorder)\b)", "from .", order.fill_in(text), flags=re.MULTILINE)
            (copy / name).write_text(text, encoding="utf-8")
        imports.append(f"from {copy.name}.record import record_launches as record_{number}")
        imports.append(f"from {copy.name}.recorder import Recorder as Recorder_{number}")
        calls += [f'print("{MARK}package")', f"var recorder_{number} = Recorder_{number}()"]
        calls += [f"record_{number}(recorder_{number}, {list(dims)})" for dims in order.dims]
    main = folder / "main.mojo"
    lines = [*imports, "def main() raises:", *(f"    {call}" for call in calls), ""]
    main.write_text("\n".join(lines), encoding="utf-8")
    return main


def _read_texts(order: Order, cut: bool) -> dict[str, str]:
    """Return file -> text of an order's package, with `cut` only the code that its launches need."""
    if cut:
        return _get_kernels(order).extract_launch_code(_generate_programs(order.puzzle).values())
    files = ((str(file.relative_to(order.package.path)), file) for file in order.package.files)
    return {name: file.read_text("utf-8", errors="surrogateescape") for name, file in files}


def parse(text: str) -> Recording:
    recording = Recording()
    events: Events = []
    bodies: dict[str, list[str]] = {}
    body: list[str] = []
    for line in text.splitlines():
        if not line.startswith(MARK):
            body.append(line)
            continue
        record_kind, *words = line.removeprefix(MARK).split()
        if record_kind == "ptx":
            body = bodies[words[0]] = []
        elif record_kind == "case":
            events = recording.cases[words[0], tuple(map(int, words[1:]))] = []
        elif record_kind in ("tensor", "workspace"):
            events.append(RecordedTensor(words[0], int(words[1]), int(words[2]), record_kind == "workspace"))
        elif record_kind == "launch":
            name, symbol, *geometry, shared = words[:9]
            gx, gy, gz, bx, by, bz = map(int, geometry)
            arguments = tuple(bytes.fromhex(word) for word in words[9:])
            events.append(RecordedLaunch(name, symbol, (gx, gy, gz), (bx, by, bz), arguments, int(shared)))
    recording.ptx = {symbol: "\n".join(lines) for symbol, lines in bodies.items()}
    return recording
