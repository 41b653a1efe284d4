"""Op packages: a folder of Mojo files that registers custom ops, compiled once for each content."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from harness.errors import BadUse, CompileFailed, DamagedFile, EnvironmentProblem, WorkbookError
from harness.toolchain import translate
from harness.toolchain.cache import cache_folder, digest, keep
from harness.toolchain.diagnostics import parse_diagnostics
from harness.toolchain.disk import disk_full


@dataclass(frozen=True)
class OpPackage:
    """The op package in one folder, identified by what its files hold."""

    path: Path

    def __post_init__(self):
        if not self.path.is_dir():
            raise BadUse(f"no op package at {self.path}: it is not a folder")
        if not (self.path / "__init__.mojo").is_file():
            raise BadUse(f"no op package at {self.path}: it has no __init__.mojo")

    @cached_property
    def files(self) -> list[Path]:
        """The Mojo files of the package, in a fixed order. Raises DamagedFile for a link that leads nowhere."""
        for parent, folders, names in walk(self.path):
            for path in (Path(parent) / name for name in sorted([*folders, *names])):
                if not path.exists():
                    raise DamagedFile(f"{path} links to {os.readlink(path)}, which is not there")
        return mojo_files(self.path)

    @cached_property
    def digest(self) -> str:
        """A hash of the names and contents of the files, and of the Mojo version."""
        parts: list[str | bytes] = [mojo_version()]
        for file in self.files:
            parts += [str(file.relative_to(self.path)), file.read_bytes()]
        return digest(parts)

    def registers(self) -> set[str]:
        """Return the names of the ops that its text registers."""
        texts = (file.read_text(encoding="utf-8", errors="replace") for file in self.files)
        return {name for text in texts for name in re.findall(r'\bregister\("(\w+)"\)', text)}

    def compile(self) -> Path:
        """Compile the package, or load it from the cache. Raises CompileFailed with the diagnostics."""
        # The compiler takes the module's name from the file's: the one that `keep` gives it is the final one.

        def make(staged: Path) -> None:
            result = run_mojo("precompile", "--diagnostic-format", "json", str(self.path), "-o", str(staged))
            if result.returncode != 0:
                raise compile_failed(self.path, result.stdout + result.stderr)

        return keep(cache_folder("packages") / f"ops_{self.digest}.mojoc", make, "the compiled op package")


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` in a fixed order, through links to folders; each folder once, so that no circle of links is endless.

    Hidden names are left out: editors lock files with links of such names that lead nowhere.
    """
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if (real := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(real)
        yield parent, folders, [name for name in names if not name.startswith(".")]


def mojo_files(folder: Path) -> list[Path]:
    """Return the Mojo files in a folder and its links, in a fixed order."""
    paths = (Path(parent) / name for parent, _, names in walk(folder) for name in names)
    return sorted(path for path in paths if path.suffix == ".mojo" and path.is_file())


def mojo_version() -> str:
    """Return the version of the installed Mojo compiler, by a folder's name: importlib.metadata takes 20 ms to load."""
    mojo = find_spec("mojo")
    for place in (mojo.submodule_search_locations or ()) if mojo else ():
        for name in ("mojo", "mojo_compiler"):
            for folder in Path(place).parent.glob(f"{name}-*.dist-info"):
                return folder.name.removesuffix(".dist-info").removeprefix(f"{name}-")
    raise EnvironmentProblem("Mojo is not installed: run `uv sync`, or start through `uv run` or `pixi run`")


# What the compiler says, with no file named, where another process has just moved an entry of its cache away. Rare: one
# compile in tens of thousands, with two at a time.
CACHE_MOVED = re.compile(r'(.*mojo: error: |{"kind":"error","message":")No such file or directory("})?\s*')


def run_mojo(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the installed Mojo compiler and capture its output; run it again if its cache moved meanwhile."""
    from mojo.run import subprocess_run_mojo  # pyright: ignore[reportMissingTypeStubs] (it has no types)

    os.environ.setdefault("MALLOC_CONF", "thp:always")  # on huge pages it takes 6 to 10% less processor time

    def run() -> subprocess.CompletedProcess[str]:
        return cast(
            "subprocess.CompletedProcess[str]",
            subprocess_run_mojo(
                list(arguments), capture_output=True, text=True, encoding="utf-8", errors="replace", **options
            ),
        )

    finished = run()
    return run() if finished.returncode and CACHE_MOVED.fullmatch(finished.stderr) else finished


def compile_failed(path: Path, output: str) -> WorkbookError:
    """Return the error for a package that does not compile: the first error explained, the whole output in `details`."""
    diagnostics = parse_diagnostics(output)
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.kind == "error"]
    if not errors and (full := disk_full(output)):
        return full
    text = "\n".join(map(str, diagnostics)) or output.strip()
    return CompileFailed(
        f"{path} does not compile\n{translate.failure_text(diagnostics, output, path)}", text
    )
