"""Where op packages are found: `solutions/` and `problems/` of a checkout, or the solutions inside the wheel."""

from pathlib import Path

from harness.errors import BadUse
from harness.toolchain.packages import OpPackage

HERE = Path(__file__).resolve().parents[1]
CHECKOUT = HERE.parent
INSTALLED_SOLUTIONS = HERE / "_solutions"


def solutions() -> Path:
    """The solutions: of the checkout that this file lies in, else those that the wheel carries."""
    folder = CHECKOUT / "solutions"
    return folder if folder.is_dir() else INSTALLED_SOLUTIONS


def problems() -> Path:
    """The learner's files; only a checkout has them. Where the folder is gone, `reset` makes it anew."""
    folder = CHECKOUT / "problems"
    if not (folder.is_dir() or (CHECKOUT / "solutions").is_dir()):
        raise BadUse(
            "there is no problems/ folder here: run inside a checkout of the workbook, or use --solution"
        )
    return folder


def op_package(root: Path, puzzle: str) -> OpPackage:
    """The op package of one puzzle under a root."""
    return OpPackage(root / puzzle / "op")
