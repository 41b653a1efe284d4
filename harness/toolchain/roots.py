"""Find the learner's files and the solutions in a checkout, a folder created by `init`, or the wheel."""

import os
from pathlib import Path

from harness.errors import UsageError
from harness.invocation import format_command
from harness.toolchain.packages import OpPackage

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
MARKER_FILE = ".workbook.json"
"""The marker file of a folder created by `init`."""
FOLDER_VARIABLE = "WORKBOOK_FOLDER"
"""Environment variable with the working folder, for child processes."""
CHECKOUT = Path(os.environ.get(FOLDER_VARIABLE) or PACKAGE_ROOT.parent)
"""The folder with problems/ and solutions/: this file's checkout, or the folder set by `enter_workbook`."""
BUNDLED_SOLUTIONS = PACKAGE_ROOT / "_solutions"
BUNDLED_BOOK = PACKAGE_ROOT / "_book"


def enter_workbook(folder: Path) -> None:
    """Set the working folder to the nearest folder created by `init`, among `folder` and its parents."""
    global CHECKOUT
    for parent in (folder, *folder.parents):
        if (parent / MARKER_FILE).is_file():
            CHECKOUT = parent  # pyright: ignore[reportConstantRedefinition]
            os.environ[FOLDER_VARIABLE] = str(parent)
            return


def get_program_solutions() -> Path:
    """Return the solutions in this program's checkout, else those in the wheel."""
    folder = PACKAGE_ROOT.parent / "solutions"
    return folder if folder.is_dir() else BUNDLED_SOLUTIONS


def get_solutions() -> Path:
    """Return the solutions next to the learner's files, else those in the wheel."""
    folder = CHECKOUT / "solutions"
    return folder if folder.is_dir() else BUNDLED_SOLUTIONS


def get_problems() -> Path:
    """Return the problems' folder, which may be missing. Raises UsageError outside a workbook."""
    folder = CHECKOUT / "problems"
    if not (folder.is_dir() or (CHECKOUT / "solutions").is_dir()):
        raise UsageError(
            f"not a workbook folder: `{format_command('init')}` makes one in ./workbook, `cd` leads into it; --solution "
            "runs the solutions anywhere"
        )
    return folder


def get_book() -> Path:
    """Return the book's folder next to the learner's files, else the one in the wheel."""
    folder = CHECKOUT / "book"
    return folder if (folder / "src").is_dir() else BUNDLED_BOOK


def make_op_package(root: Path, puzzle: str) -> OpPackage:
    return OpPackage(root / puzzle / "op")
