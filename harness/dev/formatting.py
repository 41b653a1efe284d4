"""Format a checkout, or check its format, with ruff and `mojo format`, which has no check mode."""

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


def list_mojo_files(root: Path) -> list[Path]:
    """Return the Mojo files to format, without problems/, which is generated from solutions/."""
    return sorted(path for folder in MOJO_FOLDERS for path in (root / folder).rglob("*.mojo"))


def format_mojo(files: list[Path]) -> None:
    result = run_mojo("format", "-q", "-l", str(LINE_LENGTH), *map(str, files))
    if result.returncode:
        sys.exit(f"mojo format failed:\n{result.stderr}")


def diff_mojo(root: Path) -> list[str]:
    """Return the changes that `mojo format` would make, as a unified diff."""
    lines: list[str] = []
    files = list_mojo_files(root)
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / f"{number}.mojo" for number in range(len(files))]
        for file, copy in zip(files, copies, strict=True):
            shutil.copy(file, copy)
        format_mojo(copies)
        for file, copy in zip(files, copies, strict=True):
            name = str(file.relative_to(root))
            before, after = (path.read_text(encoding="utf-8").splitlines() for path in (file, copy))
            lines += difflib.unified_diff(before, after, name, f"{name} (formatted)", lineterm="")
    return lines


def run_ruff(root: Path, *arguments: str) -> int:
    folders = [folder for folder in PYTHON_FOLDERS if (root / folder).is_dir()]
    return subprocess.run([sys.executable, "-m", "ruff", *arguments, *folders], cwd=root).returncode


def write(root: Path) -> int:
    """Format the tree in place; return 1 if ruff finds errors that it cannot fix."""
    format_mojo(list_mojo_files(root))
    return run_ruff(root, "format", "-q") or run_ruff(root, "check", "-q", "--fix")


def check(root: Path) -> int:
    """Print the differences without changing a file; return 1 if there are any."""
    differences = diff_mojo(root)
    print(*differences, sep="\n", end="\n" if differences else "", flush=True)
    codes = run_ruff(root, "format", "--check", "-q"), run_ruff(root, "check", "-q")
    return max(int(bool(differences)), *codes)
