"""Compile and cache op packages, which are folders of Mojo files that register custom ops."""

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from harness.errors import CompileFailed, DamagedFile, EnvironmentProblem, UsageError, WorkbookError
from harness.toolchain import translate
from harness.toolchain.cache import cache_file, compute_digest, get_cache_folder
from harness.toolchain.diagnostics import parse_diagnostics
from harness.toolchain.disk import find_disk_full_error


@dataclass(frozen=True)
class OpPackage:
    """The op package in a folder, identified by the contents of its files."""

    path: Path

    def __post_init__(self):
        if not self.path.is_dir():
            raise UsageError(f"no op package at {self.path}: it is not a folder")
        if not (self.path / "__init__.mojo").is_file():
            raise UsageError(f"no op package at {self.path}: it has no __init__.mojo")

    @cached_property
    def files(self) -> list[Path]:
        """The Mojo files of the package, in a fixed order. Raises DamagedFile for a broken link."""
        for parent, folders, names in walk(self.path):
            for path in (Path(parent) / name for name in sorted([*folders, *names])):
                if not path.exists():
                    raise DamagedFile(f"{path} links to {os.readlink(path)}, which is not there")
        return list_mojo_files(self.path)

    @cached_property
    def digest(self) -> str:
        parts: list[str | bytes] = [get_mojo_version()]
        for file in self.files:
            parts += [str(file.relative_to(self.path)), file.read_bytes()]
        return compute_digest(parts)

    def find_registered_ops(self) -> set[str]:
        texts = (file.read_text(encoding="utf-8", errors="replace") for file in self.files)
        return {name for text in texts for name in re.findall(r'\bregister\("(\w+)"\)', text)}

    def compile(self) -> Path:
        """Compile the package, or load it from the cache. Raises CompileFailed with the diagnostics."""
        # The compiler names the module after the file, so `cache_file` stages it under its final name.

        def make(staging_path: Path) -> None:
            result = run_mojo(
                "precompile", "--diagnostic-format", "json", str(self.path), "-o", str(staging_path)
            )
            if result.returncode != 0:
                raise make_compile_error(self.path, result.stdout + result.stderr)

        return cache_file(
            get_cache_folder("packages") / f"ops_{self.digest}.mojoc", make, "the compiled op package"
        )


def walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder like `os.walk`, in a fixed order; follow links, but visit each folder only once.

    Skip hidden names, because editors create broken hidden links as lock files.
    """
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if (real_path := os.path.realpath(parent)) in visited:
            folders.clear()
            continue
        visited.add(real_path)
        yield parent, folders, [name for name in names if not name.startswith(".")]


def list_mojo_files(folder: Path) -> list[Path]:
    """Return the Mojo files in a folder and in linked folders, in a fixed order."""
    paths = (Path(parent) / name for parent, _, names in walk(folder) for name in names)
    return sorted(path for path in paths if path.suffix == ".mojo" and path.is_file())


def get_mojo_version() -> str:
    """Return the Mojo compiler's version from a folder's name, because importlib.metadata takes 20 ms."""
    mojo = find_spec("mojo")
    for location in (mojo.submodule_search_locations or ()) if mojo else ():
        for name in ("mojo", "mojo_compiler"):
            for folder in Path(location).parent.glob(f"{name}-*.dist-info"):
                return folder.name.removesuffix(".dist-info").removeprefix(f"{name}-")
    raise EnvironmentProblem("Mojo is not installed: run `uv sync`, or start through `uv run` or `pixi run`")


# The compiler's message if another process has just moved an entry of its cache. With two concurrent compiles,
# this happens once in tens of thousands.
CACHE_MOVED = re.compile(r'(.*mojo: error: |{"kind":"error","message":")No such file or directory("})?\s*')


def run_mojo(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the Mojo compiler and capture its output; retry once if an entry of its cache was moved."""
    from mojo.run import subprocess_run_mojo  # pyright: ignore[reportMissingTypeStubs] (it has no types)

    os.environ.setdefault("MALLOC_CONF", "thp:always")  # huge pages save 6 to 10% of its CPU time

    def run() -> subprocess.CompletedProcess[str]:
        return cast(
            "subprocess.CompletedProcess[str]",
            subprocess_run_mojo(
                list(arguments), capture_output=True, text=True, encoding="utf-8", errors="replace", **options
            ),
        )

    result = run()
    return run() if result.returncode and CACHE_MOVED.fullmatch(result.stderr) else result


def make_compile_error(path: Path, output: str) -> WorkbookError:
    """Return the error for a package that does not compile, with an explanation of the first diagnostic."""
    diagnostics = parse_diagnostics(output)
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.kind == "error"]
    if not errors and (disk_full := find_disk_full_error(output)):
        return disk_full
    text = "\n".join(map(str, diagnostics)) or output.strip()
    return CompileFailed(
        f"{path} does not compile\n{translate.describe_failure(diagnostics, output, path)}", text
    )
