"""The launches of a puzzle without a device: PTX, geometry and exact argument bytes, by the recording launcher.

Needs the Mojo compiler only; no MAX, no driver. A recording takes a few seconds and carries source lines. The same
launch functions run here and in the custom op, so that a recording shows what a GPU would be given.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.toolchain import roots
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.packages import OpPackage, compile_failed, run_mojo

LAUNCHER = Path(__file__).with_name("recording")
MARK = "//@ "


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


def record(
    package: OpPackage, puzzle: str, dtype: str, dims: list[tuple[int, ...]], variants: Sequence[str] = ()
) -> Recording:
    """Records a package's launches, from the cache where it holds them.

    Args:
        package: The op package; the recording program is the solution's, so that nobody has to keep one.
        puzzle: "p20", whose recording program is run.
        dtype: "float32", "bfloat16" or "float16".
        dims: The sizes of each case, as the puzzle names them.
        variants: Which ones, the fewer the faster; without any, those that the recording program takes by itself.

    Raises CompileFailed with the compiler's diagnostics.
    """
    program = roots.solutions() / puzzle / "record.mojo"
    launcher = LAUNCHER / "recorder.mojo"
    sources = [program.read_bytes(), launcher.read_bytes()]
    key = digest(
        [package.digest, str(package.path.resolve()), dtype, *sorted(variants), repr(dims), *sources]
    )

    def make(staged: Path) -> None:
        folder = staged.parent
        # The program imports the package as `op`, whatever its folder is called. Mojo looks beside the program
        # first: there a copy stands, so that no other `op` is found.
        (folder / "op").symlink_to(package.path.resolve(), target_is_directory=True)
        started = shutil.copy(program, folder)
        result = run_mojo(
            "run", "-g1", "--diagnostic-format", "json", "--target-accelerator", "sm_90a", "-D", f"DTYPE={dtype}", *(f"-DVARIANT_{name}" for name in variants),
            "-I", str(LAUNCHER), started, *(str(size) for sizes in dims for size in sizes),
        )  # fmt: skip
        if result.returncode != 0:
            said = (result.stdout + result.stderr).replace(f"{folder}/op", str(package.path))
            raise compile_failed(package.path, said, folder.parent)
        text = result.stdout.replace(f"{folder}/op", str(package.path.resolve()))
        staged.write_text(text, encoding="utf-8")

    kept = keep(cache_folder("recordings") / f"{key}.txt", make, "the recorded launches")
    return parse(kept.read_text(encoding="utf-8"))


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
            sizes = tuple(map(int, words[2:8]))
            arguments = tuple(bytes.fromhex(word) for word in words[9:])
            events.append(RecordedLaunch(*words[:2], sizes[:3], sizes[3:], arguments, int(words[8])))
    recording.ptx = {symbol: "\n".join(lines) for symbol, lines in bodies.items()}
    return recording
