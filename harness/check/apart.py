"""A rung in Python judged in a process of its own: a learner's code that leaves, crashes or never ends costs a verdict.

The process stays warm: it imports the rung's checker once, keeps truth and baseline, and answers check after check. Where a
gate's code has ended it, that gate is wrong, and the gates after it get another process. It is a fork where the system is
Linux and the interpreter has one thread and no torch; else it comes from a server, as ranks do.
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
from harness.check.results import Cases, GateIds, GateResult, OnFirst, wanted_gates
from harness.console import tell
from harness.devices.processes import GRACE, PRELOADED, START, line_in, start_server
from harness.errors import DamagedFile, WorkbookError
from harness.learner.work import Work
from harness.spec.catalogue import PUZZLES, find_puzzle
from harness.spec.puzzle import Case
from harness.spec.rungs import NumpyRung, Rung

SECONDS = "WORKBOOK_GATE_SECONDS"
"""Environment variable: for how many seconds a file, or a gate of it, may run; without it the checker says."""


class Gone(Exception):
    """The process has ended, or hangs; the words say how, and where."""


class Apart:
    """The checker of a rung in Python, in another process; `options` are the keywords of that checker.

    `at_terminal`: the code may read from the terminal that this process reads from, as `input()` and `breakpoint()` do.
    """

    def __init__(self, work: Work, *, at_terminal: bool = False, **options: object):
        self.work = work
        self.terminal = terminal_here() if at_terminal else ""
        self.options = options
        self._process: JudgingProcess | None = None

    def check(
        self, path: Path, gates: GateIds = None, cases: Cases = None, *, on_first: OnFirst = None
    ) -> list[GateResult]:
        """The verdict on each gate; one whose code ends the process, or does not end in time, is wrong.

        Raises what the rung's checker raises, and DamagedFile where the file does so before any gate.
        """
        wanted = [gate.id for gate in wanted_gates(self.work.puzzle, self.work.rung, gates)]
        verdicts: dict[str, GateResult] = {}
        while left := [id for id in wanted if id not in verdicts]:
            self._process = judge = self._process or JudgingProcess(self.work, self.options, self.terminal)
            try:
                judge.ask(path, left, cases, verdicts)
            except Gone as gone:
                self.close()
                if judge.gate is None:
                    raise DamagedFile(str(gone)) from gone
                hint = f"{self.work.ladder(judge.gate)}-1"
                wrong = GateResult(self.work.gate(judge.gate), "wrong", diagnosis=[str(gone)], hint=hint)
                verdicts[judge.gate] = wrong
            except WorkbookError:
                raise
            except BaseException:
                self.close()
                raise
        results = [verdicts[id] for id in wanted]
        blame_gates(results, self.work.rung.needs)
        return results

    def close(self) -> None:
        """Ends the process; the next check starts another."""
        if self._process:
            self._process.end()
        self._process = None


# ---- In the process that asks -------------------------------------------------------------------------------


class JudgingProcess:
    """A process that judges, as the one that started it sees it; `gate` is the gate that it is at, None before the first."""

    def __init__(self, work: Work, options: dict[str, object], terminal: str = ""):
        self.gate: str | None = None
        self.folder = tempfile.TemporaryDirectory()
        self.stack = Path(self.folder.name) / "stack"
        if may_fork():
            context = multiprocessing.get_context("fork")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(preloaded(work.rung))
            start_server()
        self.connection, theirs = context.Pipe()
        folders = [*importlib.import_module(PUZZLES).__path__]
        names = (work.puzzle.name, work.rung.id)
        arguments = (theirs, self.stack, folders, *names, options, dict(os.environ), terminal)
        self.process: BaseProcess = context.Process(target=serve, args=arguments)
        self.process.start()
        theirs.close()
        self.end = Finalize(self, end, (self.process, self.connection), exitpriority=10)

    def ask(
        self, path: Path, gates: list[str], cases: list[Case] | None, verdicts: dict[str, GateResult]
    ) -> None:
        """One check; adds each verdict as it comes. Raises Gone, and what the checker raises."""
        self.gate, seconds = None, START
        sys.stdout.flush()  # what the code prints stands after it
        with suppress(BrokenPipeError):  # `hear` says why
            self.connection.send((path, gates, cases, os.getcwd()))
        while True:
            kind, value = self.hear(path, seconds)
            if kind == "left":
                raise Gone(value)
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
            raise RuntimeError(f"the checker gives no verdict on {', '.join(silent)}")

    def hear(self, path: Path, seconds: float) -> tuple[str, Any]:
        """What the process says next. Raises Gone."""
        if not self.connection.poll(seconds):
            with suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, signal.SIGUSR1)
            raise Gone(
                f"{line_in(self.stack, path) or path}: stopped after {seconds:g} s, and it had not come to its end"
            )
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            where = line_in(self.stack, path) or path
            how = ending(exit_code(self.process, GRACE))
            raise Gone(f"{where}: {how}, and nothing of it was judged") from None


def preloaded(rung: Rung) -> list[str]:
    """What the server imports once for all that come from it. A process with torch will ask for judges and ranks that need it."""
    return [] if isinstance(rung, NumpyRung) and "torch" not in sys.modules else PRELOADED


def terminal_here() -> str:
    """The terminal that this process reads from; "" where there is none, or it has no name here."""
    try:
        return os.ttyname(0)
    except OSError:
        return ""


def may_fork() -> bool:
    """Whether a copy of this process is safe to go on in: threads, torch's among them, do not come along."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


def ending(code: int | None) -> str:
    """How a process has ended, by its exit code."""
    if code is None:
        return "the connection of the process was closed"
    if code >= 0:
        return f"the process ended with exit code {code}"
    memory = ", which the system sends where memory runs out" if code == -signal.SIGKILL else ""
    return f"the process ended by {signal.Signals(-code).name}{memory}"


def end(process: BaseProcess, connection: Connection) -> None:
    """Ends a process: one that waits for a question goes by itself."""
    connection.close()
    exit_code(process, GRACE / 4)
    process.kill()
    process.join()


def exit_code(process: BaseProcess, seconds: float) -> int | None:
    """The exit code of a process that is about to end; None where it does not. `join` may wait for ever for one without files."""
    until = time.monotonic() + seconds
    while process.exitcode is None and time.monotonic() < until:
        time.sleep(0.005)
    return process.exitcode


# ---- In the process that judges -----------------------------------------------------------------------------


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
    """Answers checks until the parent stops asking. Deaf to Ctrl-C: the parent ends it."""
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
            asked = find_puzzle(puzzle)
            checkers.append(asked.resolve(asked.rung(rung).checker)(asked, asked.rung(rung), **options))
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
            os._exit = telling(say, leave, path)
            try:
                say("done", check(path, gates, cases, folder))
            except WorkbookError as error:
                say("raised", error)
            except BaseException:
                say("raised", RuntimeError(traceback.format_exc()))
            finally:
                os._exit = leave
                sys.stdout.flush()


def telling(
    say: Callable[[str, object], None], leave: Callable[[int], Any], path: Path
) -> Callable[[int], Any]:
    """In the place of `os._exit`, which no `except` and no `finally` notices: says at which line of a file it was called."""
    us = os.getpid()

    def told(status: int) -> None:
        if os.getpid() == us:
            frames = [frame for frame in traceback.extract_stack() if frame.filename == str(path)]
            where = f"{path}:{frames[-1].lineno}: " if frames else f"{path}: "
            say("left", f"{where}os._exit({status}): {LEFT}")
        leave(status)

    return told


def end_with_parent(leave: Callable[[int], Any]) -> None:
    """Ends this process when the one that asks has ended, however it did."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        leave(1)
