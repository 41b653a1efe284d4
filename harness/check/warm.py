"""Asks the warm process that judges kernels, `harness.server`: it has torch and what is right already.

A command asks before it imports anything, so that the compiler runs meanwhile. One that found no such process starts it once
it has its verdict. Nothing depends on it: where it is not there, is older than the code, or is lost, the command judges by
itself, as it does with --no-server.
"""

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedRWPair
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import WorkbookError
from harness.invocation import command
from harness.toolchain.cache import cache_folder, digest

if TYPE_CHECKING:  # the rest is imported while the warm process judges
    from harness.check.checker import RungChecker
    from harness.check.results import Cases, GateIds, GateResult, OnFirst

FLAG = "--no-server"
VARIABLE = "WORKBOOK_SERVER"
"""Environment variable: "off" does what --no-server does, for every command."""
PATIENCE = 5.0
"""Seconds that the process may take for its first word: it may be at another check."""
LONGEST = 100
"""Bytes that the address of a socket may have; systems allow 104 or 108."""
MATTER = (
    "WORKBOOK_",
    "MODULAR_",
    "MOJO",
    "TORCH",
    "OMP_",
    "MKL_",
    "CUDA",
    "PYTHON",
    "HOME",
    "PATH",
    "TMPDIR",
)
"""Beginnings of the environment variables that the process must share with the command that asks."""
OTHERWISE = {FLAG, "--show", "--profile", "--bench", "-h", "--help"}
"""Flags of commands that are not for it."""


class Asked:
    """What this process has asked, where, and the answer as it comes: None where no process listens."""

    connection: socket.socket
    """Made by the command that asks: most do not."""

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self.place: Path | None = None
        self.answer: BufferedRWPair | None = None


ASKED = Asked()


def ask(arguments: Sequence[str]) -> None:
    """Sends the command line of this process to the warm one, where it is about one gate."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    by_gate = len(words) > 1 or any(argument.startswith("--gate") for argument in arguments)
    if not by_gate or words[0][:1] != "p" or OTHERWISE & {*arguments} or os.environ.get(VARIABLE) == "off":
        return
    ASKED.arguments = [*arguments]
    with suppress(OSError, WorkbookError):
        ASKED.place = place = address()
        if place.stat().st_uid == os.getuid():
            ASKED.connection = socket.socket(socket.AF_UNIX)
            ASKED.connection.settimeout(PATIENCE)
            ASKED.connection.connect(str(place))
            ASKED.answer = ASKED.connection.makefile("rwb")
            say(ASKED.answer, ASKED.arguments)


def address() -> Path:
    """Where the warm process of this folder, this Python and this environment listens. Raises OSError where there can be none."""
    shared = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(MATTER))
    place = cache_folder("servers") / digest(
        [sys.executable, __file__, os.getcwd(), command("list"), *shared]
    )
    if len(os.fsencode(place)) > LONGEST:
        raise OSError(f"{place} is too long a name for a socket")
    return place


def say(stream: BufferedRWPair, words: object) -> None:
    """Sends a value to the other side."""
    pickle.dump(words, stream)
    stream.flush()


def heard(stream: BufferedRWPair) -> tuple[str, Any]:
    """What the other side says next, or that it is lost."""
    try:
        return pickle.load(stream)
    except (OSError, EOFError, pickle.UnpicklingError):
        return "lost", None


class WarmFirst:
    """A checker that takes the answer of the warm process; where it gives none, that of one which is made here."""

    def __init__(self, make: "Callable[[], RungChecker]"):
        self.make = make

    def check(
        self, path: Path, gates: "GateIds" = None, cases: "Cases" = None, *, on_first: "OnFirst" = None
    ) -> "list[GateResult]":
        """As every checker does, for the gate that the command line names."""
        from harness.console import tell  # rich takes longer than the question

        while ASKED.answer:
            kind, value = heard(ASKED.answer)
            ASKED.connection.settimeout(None)
            if kind == "told":
                tell(value)
            elif kind == "first":
                if on_first:
                    on_first(value)
            elif kind == "done":
                return value
            elif kind == "raised":
                raise value
            else:
                ASKED.answer = None
        return self.make().check(path, gates, cases, on_first=on_first)


def start() -> None:
    """Starts the process that the next such command will find, where this one found none."""
    if not ASKED.place or ASKED.answer:
        return
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-m", "harness.server", str(ASKED.place), sys.argv[0], *ASKED.arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
