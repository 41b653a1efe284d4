"""A checkout with the toy puzzles, created from new files only.

It uses this checkout's harness, with an additional folder of puzzles and other solutions/ and problems/.
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


def create(folder: Path) -> None:
    """Write solutions/ with the toys and shared kernel code, and generate problems/."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TOYS / "puzzles", folder / "puzzles", ignore=ignored)
    shutil.copytree(TOYS / "solutions", folder / "solutions", ignore=ignored)
    shutil.copytree(SHARED, folder / "solutions" / "shared")
    (folder / "solutions" / "p90" / "op" / "shared").symlink_to("../../shared")
    blanks.generate_problems(folder / "solutions", folder / "problems")


@contextlib.contextmanager
def enter(folder: Path) -> Iterator[None]:
    """Make the harness use the toys' puzzles, solutions and problems, and enter `folder`."""
    puzzles = importlib.import_module("harness.puzzles")
    previous = roots.CHECKOUT, os.getcwd()
    puzzles.__path__.append(str(folder / "puzzles"))
    roots.CHECKOUT = folder
    os.chdir(folder)
    try:
        yield
    finally:
        puzzles.__path__.remove(str(folder / "puzzles"))
        roots.CHECKOUT = previous[0]
        os.chdir(previous[1])


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Run a command; return exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as stop:  # --help
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def run_merged(*arguments: object) -> tuple[int, str]:
    """Run a command; return exit code and both outputs as one string."""
    code, out, err = run([str(argument) for argument in arguments])
    return code, out + err
