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
    CACHE_CONTENTS,
    LINE_PREFIX,
    KernelCache,
    KernelInstance,
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
# Limit on the blocks along y for the launch functions, so low that a kernel without a grid-stride loop skips
# rows in the test cases, and not only beyond a GPU's limit of 65,535 blocks.
SMALL_GRID_FLAG = "-DMAX_GRID_Y=4"
# The program's dtype and variants, which each request replaces, so that one program can record several.
DTYPE_PLACEHOLDER = 'get_defined_dtype["DTYPE", DType.float32]()'
VARIANT_PLACEHOLDER = re.compile(r'is_defined\["VARIANT_(\w+)"\]\(\)')


# The recording launcher aligns tensors to pages and leaves an empty page after each.
PAGE_BYTES = 0x1000


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor or workspace; its address is synthetic and only identifies it in a launch's arguments."""

    name: str
    address: int
    nbytes: int
    is_workspace: bool = False

    def get_offset(self, argument: bytes) -> int | None:
        """Return an argument's byte offset in the tensor, or None if it is not a pointer into its pages."""
        offset = int.from_bytes(argument, "little") - self.address
        size = -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
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


RecordedEvents = list[RecordedTensor | RecordedLaunch]


@dataclass
class Recording:
    """Launches of a puzzle in one dtype.

    `cases` maps (variant, dims) to its tensors and launches in order; `ptx` maps kernel symbols to PTX.
    """

    cases: dict[tuple[str, tuple[int, ...]], "RecordedEvents"] = field(default_factory=dict)
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
class RecordRequest:
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
        return (SMALL_GRID_FLAG,) if self.small_grid else ()

    def specialize(self, program: str) -> str:
        """Return a recording program for this request's dtype and variants."""
        program = program.replace(DTYPE_PLACEHOLDER, f"DType.{self.dtype}")
        return VARIANT_PLACEHOLDER.sub(lambda match: str(match[1] in self.variants), program)


def record(request: RecordRequest) -> Recording:
    """Record a package's launches, or load them from the cache. Raises CompileFailed."""
    if read_cached_text(_cache_file(request)) is None and (parts := _assemble_from_cache(request)):
        return parts
    return record_many([request])[0]


def is_recorded(request: RecordRequest) -> bool:
    has_cached_parts = _read_plans(request) is not None and not _find_missing(request)
    return has_cached_parts or read_cached_text(_cache_file(request)) is not None


def is_cached(requests: Iterable[RecordRequest]) -> bool:
    """Return whether all recordings, or at least their plans, are cached, so that recording takes seconds."""
    return all(
        read_cached_text(_cache_file(request)) is not None or _read_plans(request) for request in requests
    )


def record_dtypes(requests: Sequence[RecordRequest]) -> list[Recording]:
    """Record one package in several dtypes; if its plans are cached, compile all new kernels together.

    Raises CompileFailed if one of them does not compile.
    """
    kernels = _get_kernels(requests[0])
    uncached = [request for request in requests if read_cached_text(_cache_file(request)) is None]
    if uncached and all(_read_plans(request) for request in uncached):
        missing = [kernel for request in uncached for kernel in _find_missing(request)]
        if missing:  # even an empty program takes a second to compile
            kernels.compile(list(dict.fromkeys(missing)))
    elif len(uncached) > 1:
        record_many(uncached)
    return [record(request) for request in requests]


def record_many(requests: Sequence[RecordRequest]) -> list[Recording]:
    """Record packages and cache the recordings for `record`.

    One program records several packages, because starting a program takes longer than recording a package,
    and shared parts are compiled once. Raises CompileFailed for the first package that does not compile.
    """
    files = {request: _cache_file(request) for request in requests}
    missing = [request for request, file in files.items() if read_cached_text(file) is None]
    recordings: dict[RecordRequest, Recording] = {}
    for is_small in (False, True):
        group = [request for request in missing if request.variants and request.small_grid == is_small]
        if len(group) > 1:
            recordings |= _assemble_together(group)
    by_flags: dict[tuple[str, ...], list[RecordRequest]] = {}
    for request in missing:
        if request not in recordings:
            by_flags.setdefault(request.flags, []).append(request)
    texts: dict[RecordRequest, str] = {}
    for group in by_flags.values():
        if len(group) > 1:
            texts.update(zip(group, _run_launcher(group), strict=True))

    def make_text(request: RecordRequest) -> str:
        if request in texts:
            return texts[request]
        text = _run_launcher([request])[0]
        _cache_parts(request, text)
        return text

    for request, file in files.items():
        if request not in recordings:
            recordings[request] = parse(cache_text(file, partial(make_text, request), CACHE_CONTENTS))
    return [recordings[request] for request in requests]


def _assemble_together(requests: Sequence[RecordRequest]) -> dict[RecordRequest, Recording]:
    """Assemble recordings of packages with the same grid limit from parts; omit those for which that fails.

    One program makes the plans, without compiling kernels: it records every variant for one package per
    distinct host code, because most known-bad solutions differ only in a kernel. Another program compiles
    each kernel once, however many packages share it.

    Raises CompileFailed.
    """
    variants: dict[str, dict[str, None]] = {}
    by_host_code: dict[str, list[RecordRequest]] = {}
    for request in requests:
        variants.setdefault(request.puzzle, {}).update(dict.fromkeys(request.variants))
        by_host_code.setdefault(_compute_host_digest(request), []).append(request)
    without_plans = []
    for group in by_host_code.values():
        dims = tuple(dict.fromkeys(dims for request in group for dims in request.dims))
        first = replace(group[0], dims=dims, variants=tuple(variants[group[0].puzzle]))
        if _read_plans(first) is None:
            without_plans.append(first)
    if without_plans:
        try:
            texts = _run_launcher(without_plans, plan=True)
        except CompileFailed:  # recording the packages as a whole will report the error
            return {}
        for request, text in zip(without_plans, texts, strict=True):
            _cache_parts(request, text)
    requested: list[tuple[KernelCache, list[KernelInstance]]] = []
    queued_files: set[Path | None] = {None}
    for request in requests:
        kernels = _get_kernels(request)
        files = {kernel: kernels.get_cache_file(kernel) for kernel in _find_missing(request)}
        if new_kernels := [kernel for kernel, file in files.items() if file not in queued_files]:
            requested.append((kernels, new_kernels))
        queued_files.update(files.values())
    output = compile_together(requested) if requested else ""
    for kernels, new_kernels in requested if output else ():
        kernels.raise_package_error(new_kernels, output)
    parts = {request: _assemble_from_cache(request) for request in requests}
    return {request: recording for request, recording in parts.items() if recording}


def _cache_file(request: RecordRequest) -> Path:
    """Return a recording's cache file; its name covers all inputs, and the package's path in the PTX."""
    package = [request.package.digest, str(request.package.path.resolve())]
    programs = map(request.specialize, _generate_programs(request.puzzle).values())
    key = compute_digest([*package, *request.flags, repr(request.dims), *programs])
    return get_cache_folder("recordings") / f"{key}.txt"


def _get_kernels(request: RecordRequest) -> KernelCache:
    return KernelCache(request.package, request.flags)


def _compute_host_digest(request: RecordRequest) -> str:
    """Return a digest of the host code; packages with equal digests have equal launches."""
    programs = [*_generate_programs(request.puzzle).values()]
    return compute_digest([request.dtype, _get_kernels(request).compute_host_digest(programs)])


def _get_plan_files(request: RecordRequest) -> dict[tuple[str, tuple[int, ...]], Path]:
    host, folder = _compute_host_digest(request), get_cache_folder("plans")
    return {
        (variant, dims): folder / f"{compute_digest([host, variant, repr(dims)])}.txt"
        for dims in request.dims
        for variant in request.variants
    }


def _read_plans(request: RecordRequest) -> tuple[str, dict[str, KernelInstance]] | None:
    """Return (a request's plans as one text, symbol -> kernel), or None if a plan is missing."""
    plans = [
        text for file in _get_plan_files(request).values() if (text := read_cached_text(file)) is not None
    ]
    if not plans or len(plans) < len(request.dims) * len(request.variants):
        return None
    text = "\n".join(plans)
    instances = {}
    for line in text.splitlines():
        if line.startswith(f"{LINE_PREFIX}kernel "):
            symbol, function, *parameters = line.removeprefix(f"{LINE_PREFIX}kernel ").split(" ")
            instances[symbol] = KernelInstance(function, tuple(parameters))
    return text, instances


def _find_missing(request: RecordRequest) -> list[KernelInstance]:
    """Return the kernels of a request's plans that are not cached; [] if a plan is missing."""
    kernels, plans = _get_kernels(request), _read_plans(request)
    instances = plans[1] if plans else {}
    return list(dict.fromkeys(k for symbol, k in instances.items() if kernels.read_ptx(k, symbol) is None))


def _assemble_from_cache(request: RecordRequest) -> Recording | None:
    """Assemble a recording from cached plans, compiling only new kernels; None if a plan is missing.

    Raises CompileFailed.
    """
    kernels, plans = _get_kernels(request), _read_plans(request)
    if not plans:
        return None
    text, instances = plans
    missing = _find_missing(request)
    if missing and not kernels.compile(missing):
        return None
    recording = parse(text)
    symbols = recording.map_kernel_names()
    recording.ptx = {symbol: kernels.read_ptx(instances[symbol], symbol) or "" for symbol in symbols}
    return recording if all(recording.ptx.values()) else None


def _cache_parts(request: RecordRequest, text: str) -> None:
    """Cache a recording in parts: the plan of each variant and size, and each kernel."""
    if not request.variants:
        return
    kernels, recording = _get_kernels(request), parse(text)
    instances: dict[str, KernelInstance] = {}
    lines: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    case, instance = ("", ()), None
    for line in text.splitlines():
        record_kind, *fields = (
            line.removeprefix(LINE_PREFIX).split(" ") if line.startswith(LINE_PREFIX) else [""]
        )
        if record_kind == "instance":
            instance = KernelInstance(fields[0], tuple(fields[1:]))
        if record_kind == "launch" and instance and instance.has_source_text:
            instances[fields[1]] = instance
        if record_kind == "launch":
            instance = None
        case = (fields[0], tuple(map(int, fields[1:]))) if record_kind == "case" else case
        if record_kind in ("case", "tensor", "workspace", "launch"):
            lines.setdefault(case, []).append(line)
    for symbol, kernel in instances.items():
        if symbol in recording.ptx:
            kernels.cache_ptx(kernel, symbol, recording.ptx[symbol], request.package.path.resolve())
    for plans, file in _get_plan_files(request).items():
        if plans in lines:
            kernels.cache_plan(file, lines[plans], instances)


def _generate_programs(puzzle: str) -> dict[str, str]:
    """Return file name -> text for the recording program of a puzzle's package, and for its launcher."""
    program = generate_program_for(puzzle, roots.get_solutions() / puzzle / "op")
    return {"record.mojo": program, LAUNCHER.name: LAUNCHER.read_text("utf-8")}


def _run_launcher(requests: list[RecordRequest], *, marks: bool = True, plan: bool = False) -> list[str]:
    """Return the output of the recording launcher for packages with the same flags.

    With `marks`, the launch code also prints the kernel of each launch, unless that does not compile. With
    `plan`, kernels are not compiled, and each package is reduced to the code that its launches need.
    """
    with create_staging_folder(get_cache_folder("recordings"), CACHE_CONTENTS) as folder:
        folder = folder.resolve()
        result = run_mojo(
            "run", "-g1", "--diagnostic-format", "json", "--target-accelerator", "sm_90a",
            *requests[0].flags, *(["-DPLAN"] if plan else []),
            str(_write_program(folder, requests, marks, plan)),
        )  # fmt: skip
        output = result.stdout + result.stderr
        marks_rejected = marks and any(
            f"{LINE_PREFIX}instance" in message.text for message in parse_diagnostics(output)
        )
        if result.returncode != 0 and (plan or (len(requests) == 1 and not marks_rejected)):
            path = requests[0].package.path
            raise make_compile_error(path, _restore_paths(output, folder, path))
    if result.returncode != 0 and marks_rejected:
        return _run_launcher(requests, marks=False)
    if result.returncode != 0:  # bisect the requests to find the package that fails
        half = len(requests) // 2
        return [
            text for part in (requests[:half], requests[half:]) for text in _run_launcher(part, marks=marks)
        ]
    texts = re.split(rf"^{LINE_PREFIX}package\n", result.stdout, flags=re.MULTILINE)[1:]
    paths = [request.package.path.resolve() for request in requests]
    return [_restore_paths(text, folder, path) for text, path in zip(texts, paths, strict=True)]


def _restore_paths(text: str, folder: Path, package: Path) -> str:
    """Replace the copy's path by the package's path, and remove the copy's prefix from symbols."""
    copy = re.compile(rf"{re.escape(str(folder))}/copy_\d+/op(?=/)")
    return strip_copy_prefixes(copy.sub(lambda match: str(package), decode_file_names(text)))


def _write_program(folder: Path, requests: list[RecordRequest], marks: bool, reduced: bool) -> Path:
    """Write a program that records several packages in sequence.

    Each package (with `reduced`, only the code that its launches need) is copied to a new package, with its
    recording program and launcher, whose imports of `op` and `recorder` become relative.
    """
    imports, calls = [], []
    for number, request in enumerate(requests):
        copy = folder / f"copy_{number}"
        copy.mkdir()
        (copy / "__init__.mojo").touch()
        for name, text in _read_texts(request, reduced).items():
            target = copy / "op" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (target.parent / "__init__.mojo").touch()
            target.write_text(mark_launches(text) if marks else text, "utf-8", errors="surrogateescape")
        for name, text in _generate_programs(request.puzzle).items():
            text = re.sub(
                r"^from (?=(op|recorder)\b)", "from .", request.specialize(text), flags=re.MULTILINE
            )
            (copy / name).write_text(text, encoding="utf-8")
        imports.append(f"from {copy.name}.record import record_launches as record_{number}")
        imports.append(f"from {copy.name}.recorder import Recorder as Recorder_{number}")
        calls += [f'print("{LINE_PREFIX}package")', f"var recorder_{number} = Recorder_{number}()"]
        calls += [f"record_{number}(recorder_{number}, {list(dims)})" for dims in request.dims]
    main = folder / "main.mojo"
    lines = [*imports, "def main() raises:", *(f"    {call}" for call in calls), ""]
    main.write_text("\n".join(lines), encoding="utf-8")
    return main


def _read_texts(request: RecordRequest, reduced: bool) -> dict[str, str]:
    """Return file -> text of a request's package, with `reduced` only the code that its launches need."""
    if reduced:
        return _get_kernels(request).extract_launch_code(_generate_programs(request.puzzle).values())
    files = ((str(file.relative_to(request.package.path)), file) for file in request.package.files)
    return {name: file.read_text("utf-8", errors="surrogateescape") for name, file in files}


def parse(text: str) -> Recording:
    recording = Recording()
    events: RecordedEvents = []
    bodies: dict[str, list[str]] = {}
    body: list[str] = []
    for line in text.splitlines():
        if not line.startswith(LINE_PREFIX):
            body.append(line)
            continue
        record_kind, *fields = line.removeprefix(LINE_PREFIX).split()
        if record_kind == "ptx":
            body = bodies[fields[0]] = []
        elif record_kind == "case":
            events = recording.cases[fields[0], tuple(map(int, fields[1:]))] = []
        elif record_kind in ("tensor", "workspace"):
            events.append(
                RecordedTensor(fields[0], int(fields[1]), int(fields[2]), record_kind == "workspace")
            )
        elif record_kind == "launch":
            name, symbol, *geometry, shared = fields[:9]
            gx, gy, gz, bx, by, bz = map(int, geometry)
            arguments = tuple(bytes.fromhex(word) for word in fields[9:])
            events.append(RecordedLaunch(name, symbol, (gx, gy, gz), (bx, by, bz), arguments, int(shared)))
    recording.ptx = {symbol: "\n".join(lines) for symbol, lines in bodies.items()}
    return recording
