"""`vgpu exec`: run a program and serve its driver calls from this process, the executor.

The program finds the stand-in libraries through LD_LIBRARY_PATH; they connect to a Unix socket in the
abstract namespace. Each process that opens the device gets its own virtual GPU.
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
from .interface import FIRST_ARGUMENT, REQUEST_WORDS

_REQUEST = struct.Struct(f"<{REQUEST_WORDS}q")
_ANSWER = struct.Struct("<6q")  # result code, four results, output length
_PR_SET_CHILD_SUBREAPER = 36
INTERRUPTED, TIMED_OUT = 130, 124


class ProgramNotFound(Exception):
    """Raised if the program does not exist or is not executable."""


class _Interrupted(BaseException):
    """Raised by a signal handler, even during a launch. `code` is the exit code, None after a normal exit."""

    def __init__(self, code: int | None):
        super().__init__(code)
        self.code = code


class Executor:
    """The server of one program.

    `make_device()` creates a `Device` for each process that connects; `devices` collects them for the report.
    """

    def __init__(self, make_device: Callable[[], Device], driver: Driver):
        self.make_device = make_device
        self.driver = driver
        self.devices: list[Device] = []
        self._child: subprocess.Popen | None = None

    def run(self, program: list[str], timeout_s: float | None = None) -> int:
        """Run a program to completion. Return its exit code (128 + n after signal n), 124 after
        `timeout_s`, or 130 after Ctrl-C. Raises ProgramNotFound."""
        socket_name = f"workbook-vgpu-{os.getpid()}-{secrets.token_hex(8)}"
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
            selectors.DefaultSelector() as selector,
        ):
            listener.bind("\0" + socket_name)
            listener.listen()
            selector.register(listener, selectors.EVENT_READ)
            stop_code = self._serve_program(program, socket_name, timeout_s, selector, listener)
            for key in list(selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket) and key.fileobj is not listener:
                    key.fileobj.close()
        if stop_code is not None:
            return stop_code
        assert self._child is not None  # started, and exited normally
        code = self._child.wait()
        return code if code >= 0 else 128 - code

    def _serve_program(self, program, socket_name, timeout_s, selector, listener) -> int | None:
        """Start the program and serve its requests. Return None if it exited normally; otherwise kill it and
        all its descendants, and return the exit code."""
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # adopt the program's orphans, to find and reap them
        try:
            with _handle_signals(self, timeout_s):
                self._start(program, socket_name)
                self._serve(selector, listener)
            return None
        except _Interrupted as interruption:
            return None if interruption.code is None else self._stop(interruption.code)
        except KeyboardInterrupt:
            return self._stop(INTERRUPTED)
        except BaseException:
            if self._child is not None:  # otherwise all child processes are the caller's
                self._stop(0)
            raise
        finally:
            prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _start(self, program: list[str], socket_name: str) -> None:
        paths = [str(self.driver.folder), os.environ.get("LD_LIBRARY_PATH", "")]
        env = {
            **os.environ, **self.driver.environment(), "WORKBOOK_VGPU_SOCKET": socket_name,
            "LD_LIBRARY_PATH": ":".join(path for path in paths if path),
        }  # fmt: skip
        try:
            self._child = subprocess.Popen(program, env=env)
        except OSError as error:
            raise ProgramNotFound(f"cannot run {program[0]}: {error.strerror}") from None

    def has_ended(self) -> bool:
        return self._child is not None and self._child.poll() is not None

    def _serve(self, selector: selectors.BaseSelector, listener: socket.socket) -> None:
        # A signal handler raises when the program ends; the timeout covers a signal just before `select`.
        while not self.has_ended():
            for key, _ in selector.select(timeout=0.5):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)  # nothing else is registered
                if connection is listener:
                    self._accept(selector, listener)
                elif not _serve_request(connection, key.data):
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
        """Kill the program and its descendants, first with SIGTERM."""
        for signal_number, timeout_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
            if signal_number == signal.SIGTERM and code == INTERRUPTED and self._wait_for_end(0.5):
                break  # Ctrl-C in a terminal reaches the program as well
            for pid in find_descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
            if self._wait_for_end(timeout_s):
                break
        return code

    def _wait_for_end(self, timeout_s: float) -> bool:
        """Wait until no descendant is left, and reap orphans; return False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.has_ended()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not find_descendants(os.getpid()):
                return True
            time.sleep(0.02)
        return False


def find_descendants(pid: int) -> list[int]:
    processes = []
    with contextlib.suppress(OSError):
        for listing in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listing.read_text(encoding="utf-8").split()):
                processes += [child, *find_descendants(child)]
    return processes


@contextlib.contextmanager
def _handle_signals(executor: Executor, timeout_s: float | None):
    """Raise _Interrupted in the context at the program's end, the time limit, or SIGTERM."""

    pending = True  # raise only once: a second interruption must not disturb the cleanup

    def interrupt(code: int | None):
        nonlocal pending
        if pending:
            pending = False
            raise _Interrupted(code)

    def on_child(signal_number, frame):
        if executor.has_ended():
            interrupt(None)

    handlers = {
        signal.SIGCHLD: on_child,
        signal.SIGALRM: lambda signal_number, frame: interrupt(TIMED_OUT),
        signal.SIGTERM: lambda signal_number, frame: interrupt(128 + signal.SIGTERM),
    }
    previous = {
        signal_number: signal.signal(signal_number, handler) for signal_number, handler in handlers.items()
    }
    if timeout_s:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)


def _serve_request(connection: socket.socket, device: Device) -> bool:
    """Serve one request; return False if the client has closed the connection."""
    try:
        request = _REQUEST.unpack(_receive(connection, _REQUEST.size))
        data = _receive(connection, request[2])
        code, results, output = device.handle(request[0], list(request[FIRST_ARGUMENT:]), data, request[4])
        connection.sendall(_ANSWER.pack(code, *(*results, 0, 0, 0, 0)[:4], len(output)))
        connection.sendall(output)
    except (EOFError, ConnectionError):
        return False
    return True


def _receive(connection: socket.socket, count: int) -> bytearray:
    """Receive exactly `count` bytes. Raises EOFError if the client has closed the connection."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


def log(line: str) -> None:
    """Print one line to standard error, because standard output belongs to the program."""
    print(f"virtual GPU: {line}", file=sys.stderr, flush=True)
