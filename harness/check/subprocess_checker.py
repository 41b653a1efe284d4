"""Run a Python checker in a subprocess, so that code which exits, crashes or hangs fails only its own gate.

The process stays warm: it imports the rung's checker once, caches truth and baseline, and runs one check
after another. If a gate's code ends the process, that gate is wrong, and the other gates get a new process.
The process is a fork on Linux if the interpreter has one thread and no torch; otherwise a fork server starts
it, as for ranks.
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

from harness.check.diagnose import redirect_gates
from harness.check.python_files import EXITED
from harness.check.results import Cases, FirstCaseCallback, GateIds, GateResult, select_gates
from harness.console import report_progress
from harness.devices.processes import (
    GRACE_PERIOD_S,
    PRELOADED_MODULES,
    START_TIMEOUT_S,
    find_stack_line,
    start_server,
)
from harness.errors import DamagedFile, WorkbookError
from harness.learner.exercise import Exercise
from harness.spec.catalogue import PUZZLES, find_puzzle
from harness.spec.puzzle import Case
from harness.spec.rungs import NumpyRung

TIME_LIMIT_VARIABLE = "WORKBOOK_GATE_SECONDS"
"""Environment variable that replaces the checker's time limit for a file or a gate, in seconds."""


class WorkerDied(Exception):
    """The worker exited or timed out, as the message describes."""


class SubprocessChecker:
    """Run a Python rung's checker, created with `options`, in another process.

    `interactive`: whether the code may read from this process's terminal, as `input()` and `breakpoint()` do.
    """

    def __init__(self, exercise: Exercise, *, interactive: bool = False, **options: object):
        self.exercise = exercise
        self.terminal = find_terminal() if interactive else ""
        self.options = options
        self._process: Worker | None = None

    def check(
        self,
        path: Path,
        gates: GateIds = None,
        cases: Cases = None,
        *,
        on_first_case: FirstCaseCallback = None,
    ) -> list[GateResult]:
        """Return the result of each gate; one whose code ends the process or times out is wrong.

        Raises the exceptions of the rung's checker, and DamagedFile if loading the file ends the process.
        """
        gate_ids = [gate.id for gate in select_gates(self.exercise.puzzle, self.exercise.rung, gates)]
        results_by_id: dict[str, GateResult] = {}
        while remaining := [id for id in gate_ids if id not in results_by_id]:
            self._process = worker = self._process or Worker(self.exercise, self.options, self.terminal)
            try:
                worker.run_check(path, remaining, cases, results_by_id)
            except WorkerDied as error:
                self.close()
                if worker.gate is None:
                    raise DamagedFile(str(error)) from error
                gate, hint = (
                    self.exercise.find_gate(worker.gate),
                    f"{self.exercise.get_ladder_name(worker.gate)}-1",
                )
                results_by_id[worker.gate] = GateResult(gate, "wrong", diagnosis=[str(error)], hint=hint)
            except WorkbookError:
                raise
            except BaseException:
                self.close()
                raise
        results = [results_by_id[id] for id in gate_ids]
        redirect_gates(results, self.exercise.rung.dependencies)
        return results

    def close(self) -> None:
        if self._process:
            self._process.end()
        self._process = None


# ---- In the parent process ----------------------------------------------------------------------------------


class Worker:
    """The parent's side of a worker process; `gate` is the gate being checked, None before the first."""

    def __init__(self, exercise: Exercise, options: dict[str, object], terminal: str = ""):
        self.gate: str | None = None
        self.folder = tempfile.TemporaryDirectory()
        self.stack = Path(self.folder.name) / "stack"
        if can_fork():
            context = multiprocessing.get_context("fork")
        else:
            context = multiprocessing.get_context("forkserver")
            needs_torch = not isinstance(exercise.rung, NumpyRung) or "torch" in sys.modules
            context.set_forkserver_preload(PRELOADED_MODULES if needs_torch else [])
            start_server()
        self.connection, worker_end = context.Pipe()
        folders = [*importlib.import_module(PUZZLES).__path__]
        names = (exercise.puzzle.name, exercise.rung.id)
        arguments = (worker_end, self.stack, folders, *names, options, dict(os.environ), terminal)
        self.process: BaseProcess = context.Process(target=serve, args=arguments)
        self.process.start()
        worker_end.close()
        self.end = Finalize(self, stop_worker, (self.process, self.connection), exitpriority=10)

    def run_check(
        self, path: Path, gates: list[str], cases: list[Case] | None, results: dict[str, GateResult]
    ) -> None:
        """Run one check and add each result as it arrives. Raises WorkerDied and the checker's exceptions."""
        self.gate, timeout_s = None, START_TIMEOUT_S
        sys.stdout.flush()  # so that the code's own output comes after it
        with suppress(BrokenPipeError):  # `receive` raises the reason
            self.connection.send((path, gates, cases, os.getcwd()))
        while True:
            kind, value = self.receive(path, timeout_s)
            if kind == "left":
                raise WorkerDied(value)
            if kind == "raised":
                raise value
            if kind == "done":
                break
            if kind == "begun":
                self.gate, timeout_s = value
                if self.gate in gates:
                    report_progress(f"{self.gate}, gate {gates.index(self.gate) + 1} of {len(gates)}")
                timeout_s = float(os.environ.get(TIME_LIMIT_VARIABLE) or timeout_s)
            else:
                results[value.gate.id] = value
        results |= {result.gate.id: result for result in value}
        if missing := [id for id in gates if id not in results]:
            raise RuntimeError(f"the checker returned no result for {', '.join(missing)}")

    def receive(self, path: Path, timeout_s: float) -> tuple[str, Any]:
        """Return the next message of the worker. Raises WorkerDied."""
        if not self.connection.poll(timeout_s):
            with suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, signal.SIGUSR1)
            raise WorkerDied(f"{find_stack_line(self.stack, path) or path}: timed out after {timeout_s:g} s")
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            location = find_stack_line(self.stack, path) or path
            reason = describe_exit(wait_for_exit(self.process, GRACE_PERIOD_S))
            raise WorkerDied(f"{location}: {reason}, so it was not checked") from None


def find_terminal() -> str:
    """Return the path of the terminal that this process reads from, or "" if there is none."""
    try:
        return os.ttyname(0)
    except OSError:
        return ""


def can_fork() -> bool:
    """Check whether this process can be forked safely: a fork would lose its threads, such as torch's."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


def describe_exit(code: int | None) -> str:
    """Describe how a process ended, from its exit code."""
    if code is None:
        return "the connection of the process was closed"
    if code >= 0:
        return f"the process ended with exit code {code}"
    memory = " (probably out of memory)" if code == -signal.SIGKILL else ""
    return f"the process ended by {signal.Signals(-code).name}{memory}"


def stop_worker(process: BaseProcess, connection: Connection) -> None:
    """Stop a worker; one that waits for a request exits when the connection closes."""
    connection.close()
    wait_for_exit(process, GRACE_PERIOD_S / 4)
    process.kill()
    process.join()


def wait_for_exit(process: BaseProcess, timeout_s: float) -> int | None:
    """Return the exit code of a process that is about to end, or None after `timeout_s` seconds.

    `join` may block forever if the process has closed its files.
    """
    deadline = time.monotonic() + timeout_s
    while process.exitcode is None and time.monotonic() < deadline:
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
    """Serve checks until the parent closes the connection. Ignores Ctrl-C: the parent ends this process."""
    if terminal:  # `multiprocessing` replaces the standard input with an empty one
        with suppress(OSError):  # the terminal may not open again
            os.dup2(os.open(terminal, os.O_RDONLY), 0)
            sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process lives)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    search_path = importlib.import_module(PUZZLES).__path__
    for folder in folders:
        if folder not in search_path:
            search_path.append(folder)
    exit_process, worker_pid = os._exit, os.getpid()
    threading.Thread(target=exit_with_parent, args=(exit_process,), daemon=True).start()

    def send_message(kind: str, value: object) -> None:
        if os.getpid() != worker_pid:
            exit_process(1)  # a fork made by the learner's code
        connection.send((kind, value))

    checkers: list[Any] = []

    def check(path: Path, gates: list[str], cases: list[Case] | None, folder: str) -> list[GateResult]:
        os.chdir(folder)
        if not checkers:
            spec = find_puzzle(puzzle)
            file_rung = spec.find_rung(rung)
            checkers.append(spec.resolve(file_rung.checker)(spec, file_rung, **options))
            checkers[0].on_step = send_message
        return checkers[0].check(path, gates, cases)

    with stack.open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        while True:
            try:
                path, gates, cases, folder = connection.recv()
            except (EOFError, OSError):
                return
            os._exit = make_exit_reporter(send_message, exit_process, path)
            try:
                send_message("done", check(path, gates, cases, folder))
            except WorkbookError as error:
                send_message("raised", error)
            except BaseException:
                send_message("raised", RuntimeError(traceback.format_exc()))
            finally:
                os._exit = exit_process
                sys.stdout.flush()


def make_exit_reporter(
    send: Callable[[str, object], None], exit_process: Callable[[int], Any], path: Path
) -> Callable[[int], Any]:
    """Return a replacement for `os._exit`, which no `except` catches, that reports the calling line."""
    worker_pid = os.getpid()

    def report(status: int) -> None:
        if os.getpid() == worker_pid:
            frames = [frame for frame in traceback.extract_stack() if frame.filename == str(path)]
            location = f"{path}:{frames[-1].lineno}: " if frames else f"{path}: "
            send("left", f"{location}os._exit({status}): {EXITED}")
        exit_process(status)

    return report


def exit_with_parent(exit_process: Callable[[int], Any]) -> None:
    """End this process when its parent has ended, however that happened."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        exit_process(1)
