"""Find the learner's files and the solutions in a checkout, a folder created by `init`, or the wheel."""

import os
from pathlib import Path

from harness.errors import UsageError
from harness.invocation import format_command
from harness.toolchain.packages import OpPackage

HERE = Path(__file__).resolve().parents[1]
MARK = ".workbook.json"
"""The marker file of a folder created by `init`."""
FOLDER = "WORKBOOK_FOLDER"
"""Environment variable that passes the working folder to child processes."""
CHECKOUT = Path(os.environ.get(FOLDER) or HERE.parent)
"""The folder with problems/ and solutions/: this file's checkout, or the folder that `enter` found."""
CARRIED = HERE / "_solutions"
CARRIED_BOOK = HERE / "_book"


def enter(folder: Path) -> None:
    """Make the nearest folder created by `init`, `folder` or a parent of it, the working folder."""
    global CHECKOUT
    for parent in (folder, *folder.parents):
        if (parent / MARK).is_file():
            CHECKOUT = parent  # pyright: ignore[reportConstantRedefinition]
            os.environ[FOLDER] = str(parent)
            return


def find_origin() -> Path:
    """Return the solutions of this program's checkout, else those of the wheel."""
    folder = HERE.parent / "solutions"
    return folder if folder.is_dir() else CARRIED


def solutions() -> Path:
    """Return the solutions next to the learner's files, else those of the wheel."""
    folder = CHECKOUT / "solutions"
    return folder if folder.is_dir() else CARRIED


def problems() -> Path:
    """Return the learner's folder, which `reset` may have to create. Raises UsageError outside a workbook."""
    folder = CHECKOUT / "problems"
    if not (folder.is_dir() or (CHECKOUT / "solutions").is_dir()):
        raise UsageError(
            f"not a workbook folder: `{format_command('init')}` makes one in ./workbook, `cd` leads into it; --solution "
            "runs the solutions anywhere"
        )
    return folder


def book() -> Path:
    """Return the book's folder next to the learner's files, else that of the wheel."""
    folder = CHECKOUT / "book"
    return folder if (folder / "src").is_dir() else CARRIED_BOOK


def make_op_package(root: Path, puzzle: str) -> OpPackage:
    return OpPackage(root / puzzle / "op")
