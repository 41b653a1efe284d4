"""The virtual GPU inside this Python process: what the harness uses.

`start()` loads the stand-in libraries by absolute path before MAX looks for the real ones, and gives them one
ctypes callback. From then on `max.driver.Accelerator()` is the virtual GPU. MAX calls from its own threads
while the main thread waits without the interpreter lock; the machine itself is guarded by `Device`'s lock.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from harness.errors import EnvironmentProblem

from . import build
from .device import Device, device_attributes
from .interface import FIRST_ARGUMENT, WORDS, Op

_Callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_session: _Session | None = None
# What the library needs to keep a pending exception apart from the callback, in its order (transport.mojo).
_PYTHON_FUNCTIONS = ("PyGILState_Ensure", "PyErr_Fetch", "PyErr_Restore", "PyGILState_Release")
_INTERRUPTED = -2  # the library then repeats the signal for Python's main thread (transport.mojo)


class VirtualGPUUnavailable(EnvironmentProblem):
    """The virtual GPU cannot be switched on in this process; the message says why."""


class _Session:
    """What must stay alive while the libraries may call: libraries, callback, device."""

    def __init__(self, device: Device, driver: build.Driver):
        self.device = device
        # ctypes.CDLL with RTLD_GLOBAL: MAX's own dlopen("libcuda.so.1") then finds ours by its soname.
        self.libraries = [
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in (driver.libnvml, driver.libcuda)
        ]
        self.interrupt = _Interrupt(self.libraries[1].workbook_vgpu_main_is_inside)
        self.callback = _Callback(self._answer)
        self.set_callback = self.libraries[1].workbook_vgpu_set_callback
        self.set_callback.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        python = [getattr(ctypes.pythonapi, name) for name in _PYTHON_FUNCTIONS]
        functions = (ctypes.c_void_p * len(python))(*(ctypes.cast(f, ctypes.c_void_p).value for f in python))
        if self.set_callback(ctypes.cast(self.callback, ctypes.c_void_p), functions) != 0:
            raise VirtualGPUUnavailable(
                "the virtual GPU's driver found its memory page taken by something else"
            )

    def _answer(self, address: int) -> int:
        """Called by the libraries, on any thread."""
        code = self._respond((ctypes.c_int64 * WORDS).from_address(address))
        return _INTERRUPTED if self.interrupt.take_postponed() else code

    def _respond(self, words) -> int:
        """Answer one request and write the results back into it."""
        if words[0] == Op.LAUNCH and self.interrupt.stopping:
            return 0
        source, length, target, room = words[1:FIRST_ARGUMENT]
        data = memoryview((ctypes.c_uint8 * length).from_address(source)).cast("B") if length else b""
        try:
            with self.interrupt.allowed():
                code, results, output = self.device.handle(words[0], words[FIRST_ARGUMENT:], data, room)
        except KeyboardInterrupt:
            # Success, although the call is not complete: an error from MAX would hide the KeyboardInterrupt,
            # which the main thread gets as soon as it is back in Python, before anybody can use the result.
            return 0
        for number, result in enumerate(results):
            words[FIRST_ARGUMENT + number] = result
        words[4] = len(output)
        if output:
            memoryview((ctypes.c_uint8 * len(output)).from_address(target)).cast("B")[:] = output
        return code

    def close(self) -> None:
        """After this the libraries answer "not initialised": nobody calls into an interpreter that has
        ended."""
        self.set_callback(None, None)
        self.interrupt.close()


class _Interrupt:
    """Ctrl-C during a long launch.

    Python handles signals on the main thread only, and no exception passes through the C frames of MAX. So:
    - The main thread is inside the callback: the launch is broken off by KeyboardInterrupt, other calls are
      finished; then the library repeats the signal (`take_postponed`), and Python raises once it is out of
      MAX.
    - It waits inside MAX while a launch runs on another thread: a wake-up socket tells a watcher thread of
      the signal. If the main thread does not handle it at once, the watcher raises KeyboardInterrupt in the
      launch, and further launches are skipped until the main thread is back in Python."""

    PROMPT = 0.05  # seconds that the main thread gets to handle the signal by itself
    RECENT = 0.5  # a signal handled so short a time ago may be the one that the watcher just heard of

    def __init__(self, main_is_inside: Callable[[], int]):
        self._main_is_inside = main_is_inside  # asked of the library: a Python frame may not exist yet
        self.stopping = False
        self._handled_at = 0.0
        self._postponed = False  # a signal came while the main thread was inside the callback
        self._main = threading.main_thread().ident
        self._running: set[int] = set()  # identifiers of the threads whose call may be broken off
        self._lock = threading.Lock()
        self._writer = None
        on_main = threading.get_ident() == self._main
        if not on_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return  # the program has its own idea of Ctrl-C: it then waits for the launch
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # an event loop has it
            signal.set_wakeup_fd(previous)
            return
        self._writer = writer
        signal.signal(signal.SIGINT, self._handle)
        threading.Thread(target=self._watch, args=[reader], name="virtual-gpu-interrupt", daemon=True).start()

    def _handle(self, number, frame):
        """Python's own handling of Ctrl-C, on the main thread."""
        if not self._main_is_inside():
            self._handled_at = time.monotonic()
            self.stopping = False
            raise KeyboardInterrupt
        self._postponed = True
        if self._main in self._running:
            raise KeyboardInterrupt

    def take_postponed(self) -> bool:
        """Whether a signal waits for the main thread, which is about to leave the callback."""
        if threading.get_ident() != self._main or not self._postponed:
            return False
        self._postponed = False
        return True

    @contextlib.contextmanager
    def allowed(self):
        """While this lasts, the calling thread may be interrupted by KeyboardInterrupt."""
        me = threading.get_ident()
        self._running.add(me)
        try:
            yield
        finally:
            self._running.discard(me)
            if me != self._main:
                with self._lock:
                    _raise_in(me, None)

    def _watch(self, reader: socket.socket) -> None:
        while received := reader.recv(64):
            if signal.SIGINT not in received:
                continue
            time.sleep(self.PROMPT)
            if self._postponed and self._main not in self._running:  # came too late for `take_postponed`
                self._postponed = False
                signal.raise_signal(signal.SIGINT)
            with self._lock:
                others = self._running - {self._main}
                if others and time.monotonic() - self._handled_at > self.RECENT + self.PROMPT:
                    self.stopping = True
                    for thread in others:
                        _raise_in(thread, KeyboardInterrupt)

    def close(self) -> None:
        """Give Ctrl-C back and end the watcher."""
        if self._writer is None:
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writer.fileno()):  # somebody took it over since
                signal.set_wakeup_fd(current)
        self._writer.close()  # the watcher reads the end of the stream
        self._writer = None


def _raise_in(thread: int, exception: type[BaseException] | None) -> None:
    """Raise an exception in another thread at its next bytecode; None takes back one that has not been
    raised."""
    pointer = ctypes.py_object(exception) if exception else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), pointer)


def start(arch: str = "sm_90a", blocks: str = "natural", verbose: bool = False, **machine):
    """Switch the virtual GPU on for this process and return its `VirtualGPU`.

    `arch` is the NVIDIA target (sm_75 ... sm_90a), `blocks` the block order ("natural", "reversed",
    "shuffled[:seed]"); further keywords go to `VirtualGPU`. Call it before the first
    `max.driver.Accelerator()`. A second call with the device on returns the same machine. Raises
    VirtualGPUUnavailable where MAX has opened a real driver already, other EnvironmentProblems where the
    libraries cannot be built."""
    global _session
    if _session is not None:
        if _session.device.arch != arch:
            raise VirtualGPUUnavailable(
                f"the virtual GPU runs as {_session.device.arch}: one target a process"
            )
        return _session.device.gpu
    if "libcuda.so" in Path("/proc/self/maps").read_text():
        raise VirtualGPUUnavailable(
            "a CUDA driver is loaded already: start the virtual GPU before MAX or torch uses it"
        )
    device_attributes(arch)  # an unknown target fails here, before anything is loaded
    from harness.vgpu.machine import VirtualGPU

    driver = build.build()
    os.environ.update(driver.environment())
    device = Device(VirtualGPU(arch, blocks=blocks, **machine), arch, log=_to_stderr, verbose=verbose)
    session = _Session(device, driver)
    try:
        _check_that_max_sees_it()
    except VirtualGPUUnavailable:
        session.close()
        raise
    _session = session
    atexit.register(session.close)
    return device.gpu


def _check_that_max_sees_it() -> None:
    """MAX looks for devices once in a process: what it did not find then it never finds."""
    driver = sys.modules.get("max.driver")
    if driver is not None and driver.accelerator_count() == 0:
        raise VirtualGPUUnavailable(
            "MAX has looked for GPUs already: start the virtual GPU before asking MAX for them"
        )


def gpu_present() -> bool:
    """Whether the system shows a GPU (NVIDIA, AMD, or Windows' through WSL). Asked without MAX, which looks
    once in a process only: where it found none, the virtual GPU could not be started any more. Linux only."""
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def active() -> bool:
    """Whether this process runs with the virtual GPU."""
    return _session is not None


def device() -> Device | None:
    """The driver side: `.errors` (the exceptions that made CUDA calls fail), `.catalogue` (names for kernels)."""
    return _session.device if _session else None


def _to_stderr(line: str) -> None:
    print(f"virtual GPU: {line}", file=sys.stderr)
