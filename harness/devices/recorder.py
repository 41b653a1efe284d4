"""Record the launches of a puzzle without a device: PTX, geometry and exact argument bytes, by the recording
launcher.

The program is generated from the puzzle's spec (`record_program.py`); its launcher,
`recording/recorder.mojo`, prints the launches, and `parse` reads them. It needs only the Mojo compiler; no
MAX, no driver. A recording takes a few seconds and has source lines. The same launch functions run here and
in the custom op, so a recording shows what a GPU would get.

A check calls `record_dtypes`. It uses the cache, whole or in parts (`kernel_cache.py`), and compiles the
rest: single kernels if their launches are known, else everything (`record_many`).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from harness.devices.kernel_cache import (
    MARK,
    WHAT,
    Instance,
    Kernels,
    compile_together,
    mark_launches,
    plain_symbols,
)
from harness.devices.record_program import program_of
from harness.errors import CompileFailed
from harness.toolchain import roots
from harness.toolchain.cache import cache_folder, digest, keep_text, read_text, staging
from harness.toolchain.diagnostics import parse_diagnostics
from harness.toolchain.packages import OpPackage, compile_failed, run_mojo
from harness.vgpu.ptx.parser import plain_files

LAUNCHER = Path(__file__).with_name("recording") / "recorder.mojo"
# With so few blocks along y, a kernel that does not stride over the grid leaves rows out at the sizes of the cases
# already, not only beyond the 65,535 blocks that a GPU allows. Launches know the limit by this compile-time name.
SMALL_GRID = "-DMAX_GRID_Y=4"
# Placeholder for the dtype of the run; replaced by its name, so that one program can record several.
DTYPE_OF_RUN = 'get_defined_dtype["DTYPE", DType.float32]()'


# The recording launcher begins tensors on pages of their own, with an empty one between any two.
PAGE = 0x1000


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor, or a piece of scratch memory, at an address that means nothing but itself."""

    name: str
    address: int
    nbytes: int
    scratch: bool = False

    def offset(self, argument: bytes) -> int | None:
        """Return the byte offset of an argument from the tensor's start; None if it is not an address in its
        pages, of which the last is unused."""
        behind = int.from_bytes(argument, "little") - self.address
        room = -(-self.nbytes // PAGE) * PAGE + PAGE
        return behind if len(argument) == 8 and 0 <= behind < room else None


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch: its name in reports, the kernel's symbol, geometry, and the bytes of every argument.

    `shared` is dynamic shared memory in bytes.
    """

    name: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[bytes, ...]
    shared: int = 0


@dataclass
class Recording:
    """Launches of a puzzle in one dtype.

    `cases` maps (variant, dims) to its tensors and launches in order; `ptx` maps a kernel's symbol to its text.
    """

    cases: dict[tuple[str, tuple[int, ...]], list[RecordedTensor | RecordedLaunch]] = field(
        default_factory=dict
    )
    ptx: dict[str, str] = field(default_factory=dict)

    def launches(self) -> list[RecordedLaunch]:
        """Return every launch of every variant."""
        return [
            event for events in self.cases.values() for event in events if isinstance(event, RecordedLaunch)
        ]

    def arguments(self, launch: str) -> list[str]:
        """Return the tensors that the arguments of a launch point to, by name, in order; "" for other
        arguments."""
        for events in self.cases.values():
            tensors = [event for event in events if isinstance(event, RecordedTensor)]
            for event in events:
                if isinstance(event, RecordedLaunch) and event.name == launch:
                    return [
                        next((t.name for t in tensors if t.offset(argument) is not None), "")
                        for argument in event.arguments
                    ]
        return []

    def kernel_names(self) -> dict[str, str]:
        """Return the symbol of every kernel -> the name of its first launch."""
        names: dict[str, str] = {}
        for launch in self.launches():
            names.setdefault(launch.symbol, launch.name)
        return names


@dataclass(frozen=True)
class Order:
    """A request to record one package.

    Attributes:
        package: The op package.
        dims: The sizes of each case, as the puzzle names them.
        variants: Which ones, the fewer the faster; without any, those that the recording program takes by itself.
        small_grid: With SMALL_GRID, for checks.
        dtype: The dtype of the run, "float32", "bfloat16" or "float16".
    """

    package: OpPackage
    dims: tuple[tuple[int, ...], ...]
    variants: tuple[str, ...] = ()
    small_grid: bool = False
    dtype: str = "float32"

    @property
    def defines(self) -> tuple[str, ...]:
        """The compile-time values of the order, as flags of the compiler."""
        flags = (f"-DDTYPE={self.dtype}", *(f"-DVARIANT_{name}" for name in sorted(self.variants)))
        return (*flags, SMALL_GRID) if self.small_grid else flags


def record(
    package: OpPackage,
    puzzle: str,
    dtype: str,
    dims: Iterable[tuple[int, ...]],
    variants: Iterable[str] = (),
    *,
    small_grid: bool = False,
) -> Recording:
    """Record a package's launches in "float32", "bfloat16" or "float16", or load them from the cache.

    Raises CompileFailed with the compiler's diagnostics.
    """
    return record_one(Order(package, tuple(dims), tuple(variants), small_grid, dtype), puzzle)


def record_one(order: Order, puzzle: str) -> Recording:
    """Record a package's launches, as `record` does."""
    if read_text(_cache_file(order, puzzle)) is None and (parts := _from_parts(order, puzzle)):
        return parts
    return record_many([order], puzzle)[0]


def is_recorded(order: Order, puzzle: str) -> bool:
    """Check whether an order is answered without a compiler."""
    known = _read_plans(order, puzzle) is not None and not _missing(order, puzzle)
    return known or read_text(_cache_file(order, puzzle)) is not None


def is_planned(orders: Iterable[Order], puzzle: str) -> bool:
    """Check whether the launches of orders are cached, so that at most some kernels are compiled: seconds
    instead of up to a minute."""
    return all(
        read_text(_cache_file(order, puzzle)) is not None or _read_plans(order, puzzle) for order in orders
    )


def record_dtypes(orders: Sequence[Order], puzzle: str) -> list[Recording]:
    """Record one package in several dtypes; if its plans are cached, all new kernels are compiled together.

    Raises CompileFailed if one of them does not compile.
    """
    kernels = _kernels(orders[0])
    left = [order for order in orders if read_text(_cache_file(order, puzzle)) is None]
    if left and all(_read_plans(order, puzzle) for order in left):
        missing = [kernel for order in left for kernel in _missing(order, puzzle)]
        if missing:  # a program without a kernel would take its second too
            kernels.compile(list(dict.fromkeys(missing)))
    elif len(left) > 1:
        record_many(left, puzzle)
    return [record_one(order, puzzle) for order in orders]


def record_many(orders: Sequence[Order], puzzle: str, dtype: str = "") -> list[Recording]:
    """Record packages of one puzzle, all in `dtype` if it is given; later calls of `record` find them in the
    cache.

    Shared parts are planned and compiled once, by programs for all packages, since starting a program takes
    longer than a package.

    Raises CompileFailed for the first package that does not compile.
    """
    orders = [replace(order, dtype=dtype or order.dtype) for order in orders]
    kept = {order: _cache_file(order, puzzle) for order in orders}
    missing = [order for order, file in kept.items() if read_text(file) is None]
    recordings: dict[Order, Recording] = {}
    for small in (False, True):
        together = [order for order in missing if order.variants and order.small_grid == small]
        if len(together) > 1:
            recordings |= _put_together(together, puzzle)
    rest: dict[tuple[str, ...], list[Order]] = {}
    for order in missing:
        if order not in recordings:
            rest.setdefault(order.defines, []).append(order)
    texts: dict[Order, str] = {}
    for alike in rest.values():
        if len(alike) > 1:
            texts.update(zip(alike, _run(alike, puzzle), strict=True))

    def make(order: Order) -> str:
        if order in texts:
            return texts[order]
        text = _run([order], puzzle)[0]
        _keep_parts(order, puzzle, text)
        return text

    for order, file in kept.items():
        if order not in recordings:
            recordings[order] = parse(keep_text(file, partial(make, order), WHAT))
    return [recordings[order] for order in orders]


def _put_together(orders: Sequence[Order], puzzle: str) -> dict[Order, Recording]:
    """Assemble the recordings of packages with the same grid from parts; leave out those for which that fails.

    One program plans: it launches, but compiles no kernel, and that for one package of each kind of host code, since
    most packages of a zoo differ in a kernel alone, with every variant that one of the orders has. Another compiles the
    kernels, each once however many packages have it.

    Raises CompileFailed.
    """
    variants = tuple(dict.fromkeys(variant for order in orders for variant in order.variants))
    hosts: dict[str, list[Order]] = {}
    for order in orders:
        hosts.setdefault(_host(order, puzzle), []).append(order)
    unplanned = []
    for alike in hosts.values():
        dims = tuple(dict.fromkeys(dims for order in alike for dims in order.dims))
        first = replace(alike[0], dims=dims, variants=variants)
        if _read_plans(first, puzzle) is None:
            unplanned.append(first)
    if unplanned:
        try:
            texts = _run(unplanned, puzzle, plan=True)
        except CompileFailed:  # an error is reported for the package as a whole
            return {}
        for order, text in zip(unplanned, texts, strict=True):
            _keep_parts(order, puzzle, text)
    requested: list[tuple[Kernels, list[Instance]]] = []
    listed: set[Path | None] = {None}
    for order in orders:
        kernels = _kernels(order)
        files = {kernel: kernels.file_of(kernel) for kernel in _missing(order, puzzle)}
        if new := [kernel for kernel, file in files.items() if file not in listed]:
            requested.append((kernels, new))
        listed.update(files.values())
    output = compile_together(requested) if requested else ""
    for kernels, new in requested if output else ():
        kernels.refuse(new, output)
    parts = {order: _from_parts(order, puzzle) for order in orders}
    return {order: recording for order, recording in parts.items() if recording}


def _cache_file(order: Order, puzzle: str) -> Path:
    """Return the cache file of a recording, named by all its inputs; the line table holds the package's path."""
    package = [order.package.digest, str(order.package.path.resolve())]
    key = digest([*package, *order.defines, repr(order.dims), *_programs(puzzle).values()])
    return cache_folder("recordings") / f"{key}.txt"


def _kernels(order: Order) -> Kernels:
    """Return the kernels of an order's package, one by one."""
    return Kernels(order.package, (SMALL_GRID,) if order.small_grid else ())


def _host(order: Order, puzzle: str) -> str:
    """Return a digest of the host code, by which packages that launch the same are recognised."""
    return digest([order.dtype, _kernels(order).host([*_programs(puzzle).values()])])


def _plan_files(order: Order, puzzle: str) -> dict[tuple[str, tuple[int, ...]], Path]:
    """Return the cache file of each variant's plan at each size."""
    host, folder = _host(order, puzzle), cache_folder("plans")
    return {
        (variant, dims): folder / f"{digest([host, variant, repr(dims)])}.txt"
        for dims in order.dims
        for variant in order.variants
    }


def _read_plans(order: Order, puzzle: str) -> tuple[str, dict[str, Instance]] | None:
    """Return the plans of an order as one text, and which kernel each symbol is; None if a plan is missing."""
    plans = [text for file in _plan_files(order, puzzle).values() if (text := read_text(file)) is not None]
    if not plans or len(plans) < len(order.dims) * len(order.variants):
        return None
    text = "\n".join(plans)
    instances = {}
    for line in text.splitlines():
        if line.startswith(f"{MARK}kernel "):
            symbol, function, *parameters = line.removeprefix(f"{MARK}kernel ").split(" ")
            instances[symbol] = Instance(function, tuple(parameters))
    return text, instances


def _missing(order: Order, puzzle: str) -> list[Instance]:
    """Return the kernels of the plans of an order that are not cached; none if a plan is missing."""
    kernels, planned = _kernels(order), _read_plans(order, puzzle)
    instances = planned[1] if planned else {}
    return list(dict.fromkeys(k for symbol, k in instances.items() if kernels.ptx(k, symbol) is None))


def _from_parts(order: Order, puzzle: str) -> Recording | None:
    """Assemble a recording from cached plans, compiling only new kernels; None without plans.

    Raises CompileFailed.
    """
    kernels, planned = _kernels(order), _read_plans(order, puzzle)
    if not planned:
        return None
    text, instances = planned
    missing = _missing(order, puzzle)
    if missing and not kernels.compile(missing):
        return None
    recording = parse(text)
    symbols = recording.kernel_names()
    recording.ptx = {symbol: kernels.ptx(instances[symbol], symbol) or "" for symbol in symbols}
    return recording if all(recording.ptx.values()) else None


def _keep_parts(order: Order, puzzle: str, text: str) -> None:
    """Cache a recording or a plan in parts: the plan of each variant at each size, and each kernel."""
    if not order.variants:
        return
    kernels, recording = _kernels(order), parse(text)
    instances: dict[str, Instance] = {}
    lines: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    case, announced = ("", ()), None
    for line in text.splitlines():
        what, *words = line.removeprefix(MARK).split(" ") if line.startswith(MARK) else [""]
        if what == "instance":
            announced = Instance(words[0], tuple(words[1:]))
        if what == "launch" and announced and announced.is_plain:
            instances[words[1]] = announced
        if what == "launch":
            announced = None
        case = (words[0], tuple(map(int, words[1:]))) if what == "case" else case
        if what in ("case", "tensor", "workspace", "launch"):
            lines.setdefault(case, []).append(line)
    for symbol, kernel in instances.items():
        if symbol in recording.ptx:
            kernels.keep_ptx(kernel, symbol, recording.ptx[symbol], order.package.path.resolve())
    for planned, file in _plan_files(order, puzzle).items():
        if planned in lines:
            kernels.keep_plan(file, lines[planned], instances)


def _programs(puzzle: str) -> dict[str, str]:
    """Return file name -> text of the program that records one package of a puzzle, and of its launcher."""
    program = program_of(puzzle, roots.solutions() / puzzle / "op")
    return {"record.mojo": program, LAUNCHER.name: LAUNCHER.read_text("utf-8")}


def _run(orders: list[Order], puzzle: str, *, marks: bool = True, plan: bool = False) -> list[str]:
    """Return the output of the recording launcher for each of these packages, which have the same variants
    and grid.

    With `marks` the launch code also names the kernel of each launch, unless that does not compile. For a
    `plan` no kernel is compiled, and each package is reduced to what its launches need.
    """
    with staging(cache_folder("recordings"), WHAT) as folder:
        folder = folder.resolve()
        result = run_mojo(
            "run", "-g1", "--diagnostic-format", "json", "--target-accelerator", "sm_90a",
            *orders[0].defines, *(["-DPLAN"] if plan else []),
            str(_write_program(folder, orders, puzzle, marks, plan)),
        )  # fmt: skip
        output = result.stdout + result.stderr
        refused = marks and any(
            f"{MARK}instance" in diagnostic.text for diagnostic in parse_diagnostics(output)
        )
        if result.returncode != 0 and (plan or (len(orders) == 1 and not refused)):
            path = orders[0].package.path
            raise compile_failed(path, _name_paths(output, folder, path))
    if result.returncode != 0 and refused:
        return _run(orders, puzzle, marks=False)
    if result.returncode != 0:  # a program for each package alone says which one is wrong, and why
        half = len(orders) // 2
        return [text for some in (orders[:half], orders[half:]) for text in _run(some, puzzle, marks=marks)]
    texts = re.split(rf"^{MARK}package\n", result.stdout, flags=re.MULTILINE)[1:]
    paths = [order.package.path.resolve() for order in orders]
    return [_name_paths(text, folder, path) for text, path in zip(texts, paths, strict=True)]


def _name_paths(text: str, folder: Path, package: Path) -> str:
    """Replace the copy's path, and `op` in a kernel's symbol, by the package's own."""
    text = re.sub(
        rf"{re.escape(str(folder))}/copy_\d+/op(?=/)", lambda match: str(package), plain_files(text)
    )
    return plain_symbols(text)


def _write_program(folder: Path, orders: list[Order], puzzle: str, marks: bool, cut: bool) -> Path:
    """Write a program that records several packages, one after the other.

    Each, or with `cut` what its launches need, is copied to a new package together with its recording program
    and the recording launcher; their imports of `op` and `recorder` are redirected to it.
    """
    imports, calls = [], []
    for number, order in enumerate(orders):
        copy = folder / f"copy_{number}"
        copy.mkdir()
        (copy / "__init__.mojo").touch()
        for name, text in _texts(order, puzzle, cut).items():
            target = copy / "op" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (target.parent / "__init__.mojo").touch()
            target.write_text(mark_launches(text) if marks else text, "utf-8", errors="surrogateescape")
        for name, text in _programs(puzzle).items():
            text = text.replace(DTYPE_OF_RUN, f"DType.{order.dtype}")
            text = re.sub(r"^from (?=(op|recorder)\b)", "from .", text, flags=re.MULTILINE)
            (copy / name).write_text(text, encoding="utf-8")
        imports.append(f"from {copy.name}.record import record_launches as record_{number}")
        imports.append(f"from {copy.name}.recorder import Recorder as Recorder_{number}")
        calls += [f'print("{MARK}package")', f"var recorder_{number} = Recorder_{number}()"]
        calls += [f"record_{number}(recorder_{number}, {list(dims)})" for dims in order.dims]
    main = folder / "main.mojo"
    lines = [*imports, "def main() raises:", *(f"    {call}" for call in calls), ""]
    main.write_text("\n".join(lines), encoding="utf-8")
    return main


def _texts(order: Order, puzzle: str, cut: bool) -> dict[str, str]:
    """File of an order's package -> its text, or with `cut` the part that its launches need."""
    if cut:
        return _kernels(order).launching(_programs(puzzle).values())
    files = ((str(file.relative_to(order.package.path)), file) for file in order.package.files)
    return {name: file.read_text("utf-8", errors="surrogateescape") for name, file in files}


def parse(text: str) -> Recording:
    """Parse the output of the recording launcher."""
    recording = Recording()
    events: list[RecordedTensor | RecordedLaunch] = []
    bodies: dict[str, list[str]] = {}
    body: list[str] = []
    for line in text.splitlines():
        if not line.startswith(MARK):
            body.append(line)
            continue
        what, *words = line.removeprefix(MARK).split()
        if what == "ptx":
            body = bodies[words[0]] = []
        elif what == "case":
            events = recording.cases[words[0], tuple(map(int, words[1:]))] = []
        elif what in ("tensor", "workspace"):
            events.append(RecordedTensor(words[0], int(words[1]), int(words[2]), what == "workspace"))
        elif what == "launch":
            name, symbol, *geometry, shared = words[:9]
            gx, gy, gz, bx, by, bz = map(int, geometry)
            arguments = tuple(bytes.fromhex(word) for word in words[9:])
            events.append(RecordedLaunch(name, symbol, (gx, gy, gz), (bx, by, bz), arguments, int(shared)))
    recording.ptx = {symbol: "\n".join(lines) for symbol, lines in bodies.items()}
    return recording
