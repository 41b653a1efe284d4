"""The launches of a puzzle without a device: PTX, geometry and exact argument bytes, by the recording launcher.

Needs the Mojo compiler only; no MAX, no driver. A recording takes a few seconds and carries source lines. The same
launch functions run here and in the custom op, so that a recording shows what a GPU would be given.
"""

import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from harness.toolchain import roots
from harness.toolchain.cache import STAGING, cache_folder, digest, keep, whole, writing
from harness.toolchain.packages import OpPackage, compile_failed, run_mojo

LAUNCHER = Path(__file__).with_name("recording") / "recorder.mojo"
MARK = "//@ "
WHAT = "the recorded launches"
# With so few blocks along y, a kernel that does not stride over the grid leaves rows out at the sizes of the cases
# already, not only beyond the 65,535 blocks that a GPU allows. Launches know the limit by this compile-time name.
SMALL_GRID = "-DMAX_GRID_Y=4"


@dataclass(frozen=True)
class RecordedTensor:
    """A tensor, or a piece of scratch memory, at an address that means nothing but itself."""

    name: str
    address: int
    nbytes: int
    scratch: bool = False


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch: what reports call it, the kernel's symbol, geometry, and the bytes of every argument.

    `shared` is shared memory beyond what the kernel declares, in bytes.
    """

    name: str
    symbol: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[bytes, ...]
    shared: int = 0


@dataclass
class Recording:
    """What a puzzle launches in one dtype.

    `cases` maps (variant, dims) to its tensors and launches in order; `ptx` maps a kernel's symbol to its text.
    """

    cases: dict[tuple[str, tuple[int, ...]], list[RecordedTensor | RecordedLaunch]] = field(
        default_factory=dict
    )
    ptx: dict[str, str] = field(default_factory=dict)

    def launches(self) -> list[RecordedLaunch]:
        """Every launch of every variant."""
        return [
            event for events in self.cases.values() for event in events if isinstance(event, RecordedLaunch)
        ]

    def kernel_names(self) -> dict[str, str]:
        """The symbol of every kernel -> the name of its first launch."""
        names: dict[str, str] = {}
        for launch in self.launches():
            names.setdefault(launch.symbol, launch.name)
        return names


@dataclass(frozen=True)
class Order:
    """What is to be recorded of one package.

    Attributes:
        package: The op package; the recording program is the solution's, so that nobody has to keep one.
        dims: The sizes of each case, as the puzzle names them.
        variants: Which ones, the fewer the faster; without any, those that the recording program takes by itself.
        small_grid: With SMALL_GRID, for checks.
    """

    package: OpPackage
    dims: tuple[tuple[int, ...], ...]
    variants: tuple[str, ...] = ()
    small_grid: bool = False

    @property
    def defines(self) -> tuple[str, ...]:
        """The compile-time values of the order, as flags of the compiler."""
        flags = (f"-DVARIANT_{name}" for name in sorted(self.variants))
        return (*flags, SMALL_GRID) if self.small_grid else tuple(flags)


def record(
    package: OpPackage,
    puzzle: str,
    dtype: str,
    dims: Iterable[tuple[int, ...]],
    variants: Iterable[str] = (),
    *,
    small_grid: bool = False,
) -> Recording:
    """Records a package's launches in "float32", "bfloat16" or "float16", from the cache where it holds them.

    Raises CompileFailed with the compiler's diagnostics.
    """
    return record_many([Order(package, tuple(dims), tuple(variants), small_grid)], puzzle, dtype)[0]


def record_many(orders: Sequence[Order], puzzle: str, dtype: str) -> list[Recording]:
    """Records packages of one puzzle; what `record` asks for later is found in the cache.

    Packages with the same variants and grid are compiled as one Mojo program: its start costs more than a package does.

    Raises CompileFailed for the first package that does not compile.
    """
    kept = {order: _cache_file(order, puzzle, dtype) for order in orders}
    missing: dict[tuple[str, ...], list[Order]] = {}
    for order, file in kept.items():
        if not whole(file):
            missing.setdefault(order.defines, []).append(order)
    texts: dict[Order, str] = {}
    for together in missing.values():
        if len(together) > 1:
            texts.update(zip(together, _run(together, puzzle, dtype), strict=True))

    def make(staged: Path, order: Order) -> None:
        text = texts[order] if order in texts else _run([order], puzzle, dtype)[0]
        staged.write_text(text, encoding="utf-8")

    for order, file in kept.items():
        keep(file, partial(make, order=order), WHAT)
    return [parse(kept[order].read_text(encoding="utf-8")) for order in orders]


def _cache_file(order: Order, puzzle: str, dtype: str) -> Path:
    """Where a recording is kept, named by all that it is made from; the line table holds the package's path."""
    sources = [path.read_bytes() for path in (_program(puzzle), LAUNCHER)]
    package = [order.package.digest, str(order.package.path.resolve())]
    key = digest([*package, dtype, *order.defines, repr(order.dims), *sources])
    return cache_folder("recordings") / f"{key}.txt"


def _program(puzzle: str) -> Path:
    """What records the launches of one package of a puzzle."""
    return roots.solutions() / puzzle / "record.mojo"


def _run(orders: list[Order], puzzle: str, dtype: str) -> list[str]:
    """What the recording launcher prints for each of these packages, which have the same variants and grid."""
    cache = cache_folder("recordings")
    with writing(cache, WHAT), tempfile.TemporaryDirectory(prefix=STAGING, dir=cache) as staging:
        folder = Path(staging).resolve()
        result = run_mojo(
            "run", "-g1", "--diagnostic-format", "json", "--target-accelerator", "sm_90a", "-D", f"DTYPE={dtype}",
            *orders[0].defines, str(_write_program(folder, orders, puzzle)),
        )  # fmt: skip
        if result.returncode != 0 and len(orders) == 1:
            path = orders[0].package.path
            raise compile_failed(path, _named(result.stdout + result.stderr, folder, path), cache)
    if result.returncode != 0:  # which of them it is, and what is wrong with it, its own program says
        half = len(orders) // 2
        return _run(orders[:half], puzzle, dtype) + _run(orders[half:], puzzle, dtype)
    texts = re.split(rf"^{MARK}package\n", result.stdout, flags=re.MULTILINE)[1:]
    paths = [order.package.path.resolve() for order in orders]
    return [_named(text, folder, path) for text, path in zip(texts, paths, strict=True)]


def _named(text: str, folder: Path, package: Path) -> str:
    """The text with the package's own path, and `op` in a kernel's symbol, where it names the copy."""
    text = re.sub(rf"{re.escape(str(folder))}/copy_\d+/op(?=/)", lambda match: str(package), text)
    return re.sub(r"\bcopy_\d+_op_", "op_", text)


def _write_program(folder: Path, orders: list[Order], puzzle: str) -> Path:
    """Writes a program that records several packages, one after the other.

    Each is linked into a package of its own, beside its recording program and the recording launcher, whose imports
    of `op` and `recorder` are made to mean these neighbours.
    """
    imports, calls = [], []
    for number, order in enumerate(orders):
        copy = folder / f"copy_{number}"
        copy.mkdir()
        (copy / "__init__.mojo").touch()
        (copy / "op").symlink_to(order.package.path.resolve(), target_is_directory=True)
        for source in (_program(puzzle), LAUNCHER):
            text = re.sub(
                r"^from (?=(op|recorder)\b)", "from .", source.read_text("utf-8"), flags=re.MULTILINE
            )
            (copy / source.name).write_text(text, encoding="utf-8")
        imports.append(f"from {copy.name}.record import record_launches as record_{number}")
        imports.append(f"from {copy.name}.recorder import Recorder as Recorder_{number}")
        calls += [f'print("{MARK}package")', f"var recorder_{number} = Recorder_{number}()"]
        calls += [f"record_{number}(recorder_{number}, {list(dims)})" for dims in order.dims]
    main = folder / "main.mojo"
    lines = [*imports, "def main() raises:", *(f"    {call}" for call in calls), ""]
    main.write_text("\n".join(lines), encoding="utf-8")
    return main


def parse(text: str) -> Recording:
    """Reads what the recording launcher prints."""
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
