"""The task `format`: `mojo format` and ruff over the tree; with --check it changes nothing and exits 1 on a difference.

`mojo format` has no check mode, so that the check formats a copy and compares.
"""

import argparse
import difflib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.toolchain.packages import run_mojo

MOJO_FOLDERS = ("solutions", "harness", "tests")
PYTHON_FOLDERS = ("harness", "tests", "solutions", "book")
LINE_LENGTH = 110


def mojo_files(root: Path) -> list[Path]:
    """The Mojo files that are formatted; problems/ is made from solutions/ and so follows."""
    return sorted(
        path
        for folder in MOJO_FOLDERS
        if (root / folder).is_dir()
        for path in (root / folder).rglob("*.mojo")
    )


def format_mojo(files: list[Path]) -> None:
    """Formats files in place."""
    result = run_mojo("format", "-q", "-l", str(LINE_LENGTH), *map(str, files))
    if result.returncode:
        sys.exit(f"mojo format failed:\n{result.stderr}")


def mojo_differences(root: Path) -> list[str]:
    """What `mojo format` would change, as a unified diff."""
    lines: list[str] = []
    files = mojo_files(root)
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / f"{number}.mojo" for number in range(len(files))]
        for file, copy in zip(files, copies, strict=True):
            shutil.copy(file, copy)
        format_mojo(copies)
        for file, copy in zip(files, copies, strict=True):
            name = str(file.relative_to(root))
            before, after = (
                file.read_text(encoding="utf-8").splitlines(),
                copy.read_text(encoding="utf-8").splitlines(),
            )
            lines += difflib.unified_diff(before, after, name, f"{name} (formatted)", lineterm="")
    return lines


def ruff(*arguments: str) -> int:
    """Runs ruff over the Python folders and returns its exit code."""
    folders = [folder for folder in PYTHON_FOLDERS if Path(folder).is_dir()]
    return subprocess.run([sys.executable, "-m", "ruff", *arguments, *folders]).returncode


def main(argv: list[str] | None = None) -> int:
    """Formats, or checks the format of, the tree in the current folder."""
    parser = argparse.ArgumentParser(prog="format", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 where something differs")
    if not parser.parse_args(argv).check:
        format_mojo(mojo_files(Path.cwd()))
        return ruff("format", "-q") or ruff("check", "-q", "--fix")
    differences = mojo_differences(Path.cwd())
    print(*differences, sep="\n", end="\n" if differences else "")
    return max(int(bool(differences)), ruff("format", "--check", "-q"), ruff("check", "-q"))


if __name__ == "__main__":
    sys.exit(main())
