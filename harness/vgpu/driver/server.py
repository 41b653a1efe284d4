"""`vgpu exec`: run a program with the virtual GPU in a separate executor process.

The program finds the stand-in libraries through LD_LIBRARY_PATH and connects to this process through a socket
with an abstract name, so no file is left behind. Each process of the program that opens the device gets its
own virtual GPU. This process ends with the program and ends what it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .build import Driver
from .device import Device
from .interface import FIRST_ARGUMENT, WORDS

_REQUEST = struct.Struct(f"<{WORDS}q")
_ANSWER = struct.Struct("<6q")  # result code, four results, output length
_PR_SET_CHILD_SUBREAPER = 36
INTERRUPTED, TIMED_OUT = 130, 124


class ProgramNotFound(Exception):
    """The program to run does not exist or is not executable."""


class _Interrupted(BaseException):
    """Raised by a signal handler, also in the middle of a launch. `code` is the exit code, None if the
    program ended by itself."""

    def __init__(self, code: int | None):
        super().__init__(code)
        self.code = code


class Executor:
    """Serve one program.

    `make_device()` creates a `Device` for each process that connects; `devices` keeps all of them for the
    report.
    """

    def __init__(self, make_device: Callable[[], Device], driver: Driver):
        self.make_device = make_device
        self.driver = driver
        self.devices: list[Device] = []
        self._child: subprocess.Popen | None = None

    def run(self, program: list[str], timeout: float | None = None) -> int:
        """Run a program to its end. Return its exit code (128 + n after signal n), 124 after `timeout`
        seconds, 130 after Ctrl-C. Raise ProgramNotFound."""
        name = f"workbook-vgpu-{os.getpid()}-{secrets.token_hex(8)}"
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
            selectors.DefaultSelector() as selector,
        ):
            listener.bind("\0" + name)
            listener.listen()
            selector.register(listener, selectors.EVENT_READ)
            stop_code = self._serve_program(program, name, timeout, selector, listener)
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket) and key.fileobj is not listener:
                    key.fileobj.close()
        if stop_code is not None:
            return stop_code
        assert self._child is not None  # started, and ended by itself
        code = self._child.wait()
        return code if code >= 0 else 128 - code

    def _serve_program(self, program, name, timeout, selector, listener) -> int | None:
        """Start the program and answer it. Return None when it has ended by itself, else the exit code of
        what ended it; then all that it started has been killed."""
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the program become ours, so that we find them
        try:
            with _signals(self, timeout):
                self._start(program, name)
                self._serve(selector, listener)
            return None
        except _Interrupted as interruption:
            return None if interruption.code is None else self._stop(interruption.code)
        except KeyboardInterrupt:
            return self._stop(INTERRUPTED)
        except BaseException:
            if (
                self._child is not None
            ):  # else there is nothing of the program's, and the caller's processes are not ours
                self._stop(0)
            raise
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _start(self, program: list[str], name: str) -> None:
        paths = [str(self.driver.folder), os.environ.get("LD_LIBRARY_PATH", "")]
        env = {
            **os.environ,
            **self.driver.environment(),
            "WORKBOOK_VGPU_SOCKET": name,
            "LD_LIBRARY_PATH": ":".join(path for path in paths if path),
        }
        try:
            self._child = subprocess.Popen(program, env=env)
        except OSError as error:
            raise ProgramNotFound(f"cannot run {program[0]}: {error.strerror}") from None

    def has_ended(self) -> bool:
        return self._child is not None and self._child.poll() is not None

    def _serve(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        """Answer requests until the program has ended."""
        # The signal handler raises when the program ends; the time limit covers a signal just before the
        # wait.
        while not self.has_ended():
            for key, _ in selector.select(timeout=0.5):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)  # nothing else is registered
                if connection is listener:
                    self._accept(selector, listener)
                elif not _answer(connection, key.data):
                    selector.unregister(connection)
                    connection.close()

    def _accept(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():  # every process on the machine can connect to an abstract socket
            connection.close()
            return
        device = self.make_device()
        self.devices.append(device)
        selector.register(connection, selectors.EVENT_READ, device)

    def _stop(self, code: int) -> int:
        """End the program and everything it started, with SIGTERM first."""
        for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
            if number == signal.SIGTERM and code == INTERRUPTED and self._wait_for_end(0.5):
                break  # Ctrl-C in a terminal reaches the program as well
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            if self._wait_for_end(patience):
                break
        return code

    def _wait_for_end(self, seconds: float) -> bool:
        """Wait until no descendant is left, and reap orphans."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.has_ended()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not descendants(os.getpid()):
                return True
            time.sleep(0.02)
        return False


def descendants(pid: int) -> list[int]:
    """Return the process ids of all children, grandchildren and so on of a process (Linux)."""
    processes = []
    with contextlib.suppress(OSError):
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listing.read_text(encoding="utf-8").split()):
                processes += [child, *descendants(child)]
    return processes


@contextlib.contextmanager
def _signals(executor: Executor, timeout: float | None):
    """Interrupt this process at the program's end, the time limit and SIGTERM while the program runs."""

    pending = True  # another interruption must not disturb the cleanup

    def interrupt(code: int | None):
        nonlocal pending
        if pending:
            pending = False
            raise _Interrupted(code)

    def on_child(number, frame):
        if executor.has_ended():
            interrupt(None)

    handlers = {
        signal.SIGCHLD: on_child,
        signal.SIGALRM: lambda number, frame: interrupt(TIMED_OUT),
        signal.SIGTERM: lambda number, frame: interrupt(128 + signal.SIGTERM),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    if timeout:
        signal.setitimer(signal.ITIMER_REAL, timeout)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _answer(connection: socket.socket, device: Device) -> bool:
    """Answer one request; return False when the other side has closed."""
    try:
        words = _REQUEST.unpack(_receive(connection, _REQUEST.size))
        data = _receive(connection, words[2])
        code, results, output = device.handle(words[0], list(words[FIRST_ARGUMENT:]), data, words[4])
        connection.sendall(_ANSWER.pack(code, *(*results, 0, 0, 0, 0)[:4], len(output)))
        connection.sendall(output)
    except (EOFError, ConnectionError):
        return False
    return True


def _receive(connection: socket.socket, count: int) -> bytearray:
    """Receive exactly `count` bytes. Raise EOFError when the other side has closed."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


def log(line: str) -> None:
    """Print one line of the virtual GPU on standard error; standard output belongs to the program."""
    print(f"virtual GPU: {line}", file=sys.stderr, flush=True)
