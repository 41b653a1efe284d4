"""A checkout with the toy puzzles in it, made of new files alone.

The harness is this checkout's own: it is told of one more folder with puzzles, and where solutions/ and problems/ are.
"""

import contextlib
import importlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from harness import cli
from harness.learner import blanks
from harness.toolchain import roots

TOYS = Path(__file__).resolve().parent
SHARED = TOYS.parents[1] / "solutions" / "shared"


def make(folder: Path) -> None:
    """Write the checkout: solutions/ with the toys and what kernels share, and problems/ generated from it."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TOYS / "puzzles", folder / "puzzles", ignore=ignored)
    shutil.copytree(TOYS / "solutions", folder / "solutions", ignore=ignored)
    shutil.copytree(SHARED, folder / "solutions" / "shared")
    (folder / "solutions" / "p90" / "op" / "shared").symlink_to("../../shared")
    blanks.generate(folder / "solutions", folder / "problems")


@contextlib.contextmanager
def enter(folder: Path) -> Iterator[None]:
    """Let the harness find the toys, and their solutions and problems, and work in that folder."""
    puzzles = importlib.import_module("harness.puzzles")
    before = roots.CHECKOUT, os.getcwd()
    puzzles.__path__.append(str(folder / "puzzles"))
    roots.CHECKOUT = folder
    os.chdir(folder)
    try:
        yield
    finally:
        puzzles.__path__.remove(str(folder / "puzzles"))
        roots.CHECKOUT = before[0]
        os.chdir(before[1])


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Call a command line; return exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as stop:  # --help
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()
