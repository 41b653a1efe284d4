"""Find the learner's files and the solutions: in a checkout, in a folder created by `init`, or inside the
wheel."""

import os
from pathlib import Path

from harness.errors import BadUse
from harness.invocation import command
from harness.toolchain.packages import OpPackage

HERE = Path(__file__).resolve().parents[1]
MARK = ".workbook.json"
"""The marker file of a folder created by `init`."""
FOLDER = "WORKBOOK_FOLDER"
"""Environment variable with the working folder, for child processes."""
CHECKOUT = Path(os.environ.get(FOLDER) or HERE.parent)
"""The folder of problems/ and solutions/: the checkout of this file, or the folder that `enter` found."""
CARRIED = HERE / "_solutions"
CARRIED_BOOK = HERE / "_book"


def enter(folder: Path) -> None:
    """Switch to the nearest folder created by `init`, the current one or a parent."""
    global CHECKOUT
    for place in (folder, *folder.parents):
        if (place / MARK).is_file():
            CHECKOUT = place  # pyright: ignore[reportConstantRedefinition]
            os.environ[FOLDER] = str(place)
            return


def origin() -> Path:
    """Return the solutions that this program came with: of its checkout, else those that the wheel carries."""
    folder = HERE.parent / "solutions"
    return folder if folder.is_dir() else CARRIED


def solutions() -> Path:
    """Return the solutions: next to the learner's files, else those of the package."""
    folder = CHECKOUT / "solutions"
    return folder if folder.is_dir() else CARRIED


def problems() -> Path:
    """Return the learner's files, or their path for `reset` if the folder is missing. Raises BadUse outside
    of a workbook."""
    folder = CHECKOUT / "problems"
    if not (folder.is_dir() or (CHECKOUT / "solutions").is_dir()):
        raise BadUse(
            f"not a workbook folder: `{command('init')}` makes one in ./workbook, `cd` leads into it; --solution "
            "runs the solutions anywhere"
        )
    return folder


def book() -> Path:
    """Return the book's folder: next to the learner's files, else that of the wheel."""
    folder = CHECKOUT / "book"
    return folder if (folder / "src").is_dir() else CARRIED_BOOK


def op_package(root: Path, puzzle: str) -> OpPackage:
    """Return the op package of one puzzle under a root."""
    return OpPackage(root / puzzle / "op")
