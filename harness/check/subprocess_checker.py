"""Run a Python checker in a subprocess: code that exits, crashes or hangs fails its gate only.

The process stays warm: it imports the rung's checker once, caches truth and baseline, and runs one check
after another. If a gate's code ends the process, that gate is wrong, and the next gates get a new process. It
is a fork on Linux if the interpreter has one thread and no torch; otherwise a fork server starts it, as for
ranks.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from harness.check.diagnose import blame_gates
from harness.check.python_files import LEFT
from harness.check.results import Cases, GateIds, GateResult, OnFirst, requested_gates
from harness.console import tell
from harness.devices.processes import GRACE, PRELOADED, START, line_in, start_server
from harness.errors import DamagedFile, WorkbookError
from harness.learner.work import Work
from harness.spec.catalogue import PUZZLES, find_puzzle
from harness.spec.puzzle import Case
from harness.spec.rungs import NumpyRung, Rung

SECONDS = "WORKBOOK_GATE_SECONDS"
"""Environment variable: the time limit in seconds of a file or a gate, instead of the checker's."""


class WorkerDied(Exception):
    """The worker exited or timed out; the message says how and where."""


class SubprocessChecker:
    """The checker of a Python rung, in another process; `options` are the keywords of that checker.

    `at_terminal`: the code may read from the terminal that this process reads from, as `input()` and
    `breakpoint()` do.
    """

    def __init__(self, work: Work, *, at_terminal: bool = False, **options: object):
        self.work = work
        self.terminal = current_terminal() if at_terminal else ""
        self.options = options
        self._process: Worker | None = None

    def check(
        self, path: Path, gates: GateIds = None, cases: Cases = None, *, on_first: OnFirst = None
    ) -> list[GateResult]:
        """Return the result of each gate; one whose code ends the process or times out is wrong.

        Raises what the rung's checker raises, and DamagedFile if the file does so before any gate.
        """
        requested = [gate.id for gate in requested_gates(self.work.puzzle, self.work.rung, gates)]
        outcomes: dict[str, GateResult] = {}
        while left := [id for id in requested if id not in outcomes]:
            self._process = judge = self._process or Worker(self.work, self.options, self.terminal)
            try:
                judge.request(path, left, cases, outcomes)
            except WorkerDied as gone:
                self.close()
                if judge.gate is None:
                    raise DamagedFile(str(gone)) from gone
                hint = f"{self.work.ladder(judge.gate)}-1"
                wrong = GateResult(self.work.gate(judge.gate), "wrong", diagnosis=[str(gone)], hint=hint)
                outcomes[judge.gate] = wrong
            except WorkbookError:
                raise
            except BaseException:
                self.close()
                raise
        results = [outcomes[id] for id in requested]
        blame_gates(results, self.work.rung.needs)
        return results

    def close(self) -> None:
        """End the process; the next check starts another."""
        if self._process:
            self._process.end()
        self._process = None


# ---- In the parent process ----------------------------------------------------------------------------------


class Worker:
    """A worker process, as its parent sees it; `gate` is the gate being checked, None before the first."""

    def __init__(self, work: Work, options: dict[str, object], terminal: str = ""):
        self.gate: str | None = None
        self.folder = tempfile.TemporaryDirectory()
        self.stack = Path(self.folder.name) / "stack"
        if can_fork():
            context = multiprocessing.get_context("fork")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(server_imports(work.rung))
            start_server()
        self.connection, theirs = context.Pipe()
        folders = [*importlib.import_module(PUZZLES).__path__]
        names = (work.puzzle.name, work.rung.id)
        arguments = (theirs, self.stack, folders, *names, options, dict(os.environ), terminal)
        self.process: BaseProcess = context.Process(target=serve, args=arguments)
        self.process.start()
        theirs.close()
        self.end = Finalize(self, end, (self.process, self.connection), exitpriority=10)

    def request(
        self, path: Path, gates: list[str], cases: list[Case] | None, verdicts: dict[str, GateResult]
    ) -> None:
        """Run one check and append each result as it arrives. Raises WorkerDied, and what the checker raises."""
        self.gate, seconds = None, START
        sys.stdout.flush()  # the code's own output comes after it
        with suppress(BrokenPipeError):  # `receive` says why
            self.connection.send((path, gates, cases, os.getcwd()))
        while True:
            kind, value = self.receive(path, seconds)
            if kind == "left":
                raise WorkerDied(value)
            if kind == "raised":
                raise value
            if kind == "done":
                break
            if kind == "begun":
                self.gate, seconds = value
                if self.gate in gates:
                    tell(f"{self.gate}, gate {gates.index(self.gate) + 1} of {len(gates)}")
                seconds = float(os.environ.get(SECONDS) or seconds)
            else:
                verdicts[value.gate.id] = value
        verdicts |= {result.gate.id: result for result in value}
        if silent := [id for id in gates if id not in verdicts]:
            raise RuntimeError(f"the checker returned no result for {', '.join(silent)}")

    def receive(self, path: Path, seconds: float) -> tuple[str, Any]:
        """Return the next message of the worker. Raises WorkerDied."""
        if not self.connection.poll(seconds):
            with suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, signal.SIGUSR1)
            raise WorkerDied(f"{line_in(self.stack, path) or path}: timed out after {seconds:g} s")
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            where = line_in(self.stack, path) or path
            how = describe_exit(exit_code(self.process, GRACE))
            raise WorkerDied(f"{where}: {how}, so it was not checked") from None


def server_imports(rung: Rung) -> list[str]:
    """Return the fork server's imports: torch if a worker needs it or this process has it."""
    return [] if isinstance(rung, NumpyRung) and "torch" not in sys.modules else PRELOADED


def current_terminal() -> str:
    """Return the terminal that this process reads from; "" if it has none, or one without a name here."""
    try:
        return os.ttyname(0)
    except OSError:
        return ""


def can_fork() -> bool:
    """Return whether this process can be forked safely: threads, torch's among them, are not copied."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


def describe_exit(code: int | None) -> str:
    """Return how a process ended, by its exit code."""
    if code is None:
        return "the connection of the process was closed"
    if code >= 0:
        return f"the process ended with exit code {code}"
    memory = " (probably out of memory)" if code == -signal.SIGKILL else ""
    return f"the process ended by {signal.Signals(-code).name}{memory}"


def end(process: BaseProcess, connection: Connection) -> None:
    """Stop a worker: one that waits for a request exits by itself."""
    connection.close()
    exit_code(process, GRACE / 4)
    process.kill()
    process.join()


def exit_code(process: BaseProcess, seconds: float) -> int | None:
    """Return the exit code of a process that is about to end; None if it does not. `join` may block forever
    for one without files."""
    until = time.monotonic() + seconds
    while process.exitcode is None and time.monotonic() < until:
        time.sleep(0.005)
    return process.exitcode


# ---- In the worker ------------------------------------------------------------------------------------------


def serve(
    connection: Connection,
    stack: Path,
    folders: list[str],
    puzzle: str,
    rung: str,
    options: dict[str, object],
    environment: dict[str, str],
    terminal: str = "",
) -> None:
    """Serve checks until the parent closes the connection. Ignores Ctrl-C: the parent ends it."""
    if terminal:  # `multiprocessing` gives a process an empty input
        with suppress(OSError):  # one that may not be opened again stays unread
            os.dup2(os.open(terminal, os.O_RDONLY), 0)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process lives)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    there = importlib.import_module(PUZZLES).__path__
    for folder in folders:
        if folder not in there:
            there.append(folder)
    leave, us = os._exit, os.getpid()
    threading.Thread(target=end_with_parent, args=(leave,), daemon=True).start()

    def say(kind: str, value: object) -> None:
        if os.getpid() != us:
            leave(1)  # a copy of this process that the learner's code has made
        connection.send((kind, value))

    checkers: list[Any] = []

    def check(path: Path, gates: list[str], cases: list[Case] | None, folder: str) -> list[GateResult]:
        os.chdir(folder)
        if not checkers:
            owner = find_puzzle(puzzle)
            checkers.append(owner.resolve(owner.rung(rung).checker)(owner, owner.rung(rung), **options))
            checkers[0].on_step = say
        return checkers[0].check(path, gates, cases)

    with stack.open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        while True:
            try:
                path, gates, cases, folder = connection.recv()
            except (EOFError, OSError):
                return
            os._exit = report_exit(say, leave, path)
            try:
                say("done", check(path, gates, cases, folder))
            except WorkbookError as error:
                say("raised", error)
            except BaseException:
                say("raised", RuntimeError(traceback.format_exc()))
            finally:
                os._exit = leave
                sys.stdout.flush()


def report_exit(
    say: Callable[[str, object], None], leave: Callable[[int], Any], path: Path
) -> Callable[[int], Any]:
    """Return a replacement of `os._exit`, which no `except` and no `finally` sees: it reports the line that
    called it."""
    us = os.getpid()

    def report(status: int) -> None:
        if os.getpid() == us:
            frames = [frame for frame in traceback.extract_stack() if frame.filename == str(path)]
            where = f"{path}:{frames[-1].lineno}: " if frames else f"{path}: "
            say("left", f"{where}os._exit({status}): {LEFT}")
        leave(status)

    return report


def end_with_parent(leave: Callable[[int], Any]) -> None:
    """End this process when its parent has ended, however it did."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        leave(1)
