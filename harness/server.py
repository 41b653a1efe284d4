"""The warm process that judges kernels for `pNN --gate ID`; a command that found none starts it (`harness.check.warm`).

It has imported torch and what judges, and keeps what PyTorch says is right. It answers one command after the other, gives
up a check whose command has gone, and ends after ten idle minutes, or as soon as the code has changed.
"""

import fcntl
import os
import pickle
import socket
import sys
from contextlib import suppress
from functools import partial
from io import BufferedRWPair
from pathlib import Path

from harness.check.checker import RungChecker, make_checker
from harness.check.options import Options, parse
from harness.check.warm import say
from harness.console import listening
from harness.errors import WorkbookError
from harness.toolchain import roots

IDLE = 600.0
"""Seconds without a question after which it ends."""
KEPT = 4
"""Checkers that are kept, the last ones used: a learner is at one puzzle, or at two."""


def main(address: str, program: str, *arguments: str) -> None:
    """Serves the folder that it is started in, at an address; `arguments` are the command line to be ready for."""
    sys.argv[0] = program  # messages name commands as they are typed in the command that asks
    roots.enter(Path.cwd())
    place = Path(address)
    with place.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another one serves, or is about to
        server = Server()
        with suppress(WorkbookError):
            server.prepare([*arguments])
        with suppress(FileNotFoundError):
            place.unlink()  # of one that was killed
        with socket.socket(socket.AF_UNIX) as listener:
            os.umask(0o077)
            listener.bind(str(place))
            listener.listen()
            listener.settimeout(IDLE)
            try:
                server.serve(listener)
            finally:
                place.unlink(missing_ok=True)


class Server:
    """Checkers by what was asked of them, and the state of the code that they are made of."""

    def __init__(self) -> None:
        self.checkers: dict[object, RungChecker] = {}
        self.code = state_of_the_code()

    def serve(self, listener: socket.socket) -> None:
        """Answers until no command has asked for a while, or the code has changed."""
        with suppress(TimeoutError):
            while True:
                connection, _ = listener.accept()
                if state_of_the_code() != self.code:
                    connection.close()
                    return
                # Whoever asked may have gone, which the end of the stream, written once more, would say again.
                with (
                    suppress(OSError, EOFError, pickle.UnpicklingError),
                    connection,
                    connection.makefile("rwb") as stream,
                ):
                    self.answer(stream)

    def answer(self, stream: BufferedRWPair) -> None:
        """Judges what a command line asks for, and says all that comes of it."""

        def told(kind: str, value: object) -> None:
            say(stream, (kind, value))

        try:
            options = parse(pickle.load(stream))
            if not is_for_us(options):
                return
            with listening(partial(told, "told")):
                results = self.checker(options).check(
                    options.work.target, [options.gate or ""], options.cases, on_first=partial(told, "first")
                )
            told("done", results)
        except WorkbookError as error:
            told("raised", error)

    def prepare(self, arguments: list[str]) -> None:
        """Imports all, and runs a first case, so that the next check finds everything warm."""
        options = parse(arguments)
        if is_for_us(options):
            cases = options.cases or options.puzzle.cases(None)
            self.checker(options).check(options.work.target, [options.gate or ""], cases[:1])

    def checker(self, options: Options) -> RungChecker:
        """The checker of a file and the options that it takes; it is now the last used."""
        work = options.work
        key = work.path, work.rung.id, tuple(options.of_checker.items())
        checker = self.checkers.pop(key, None) or make_checker(work, **options.of_checker)
        self.checkers[key] = checker
        while len(self.checkers) > KEPT:
            del self.checkers[next(iter(self.checkers))]
        return checker


def is_for_us(options: Options) -> bool:
    """Whether a command is about one gate of kernels, by recorded launches."""
    return bool(options.gate and options.by_gate and options.work.in_package and not options.demo)


def state_of_the_code() -> list[tuple[str, int]]:
    """The files that were imported, or may be read once, each with its last change; packages count by their folder."""
    folders = [roots.HERE, roots.solutions()]
    files = [path for folder in folders for pattern in ("*.py", "*.toml") for path in folder.rglob(pattern)]
    places = [Path(place) for place in sys.path if place.endswith("site-packages")]
    return sorted((str(path), path.stat().st_mtime_ns) for path in (*files, *places))


if __name__ == "__main__":
    main(*sys.argv[1:])
