"""The virtual GPU inside this Python process: what the harness uses.

`start()` loads the stand-in libraries by absolute path before MAX looks for the real ones, and gives them one ctypes
callback. From then on `max.driver.Accelerator()` is the virtual GPU. MAX calls from its own threads while the main
thread waits without the interpreter lock; the machine itself is guarded by `Device`'s lock.
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
from pathlib import Path

from . import build
from .device import FIRST_ARGUMENT, RESULT_CODES, WORDS, Device, device_attributes

_Callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)
_session: _Session | None = None
_LAUNCH_FAILED = RESULT_CODES["CUDA_ERROR_LAUNCH_FAILED"]
_INTERRUPTED = -2  # the library then repeats the signal for Python's main thread (transport.mojo)


class VirtualGPUUnavailable(Exception):
    """The virtual GPU cannot be switched on in this process; the message says why."""


class _Session:
    """What must stay alive while the libraries may call: libraries, callback, device."""

    def __init__(self, device: Device, driver: build.Driver):
        self.device = device
        self.interrupt = _Interrupt()
        # ctypes.CDLL with RTLD_GLOBAL: MAX's own dlopen("libcuda.so.1") then finds ours by its soname.
        self.libraries = [
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in (driver.libnvml, driver.libcuda)
        ]
        self.callback = _Callback(self._answer)
        self.set_callback = self.libraries[1].workbook_vgpu_set_callback
        self.set_callback.argtypes = [ctypes.c_void_p]
        if self.set_callback(ctypes.cast(self.callback, ctypes.c_void_p)) != 0:
            raise VirtualGPUUnavailable(
                "the virtual GPU's driver found its memory page taken by something else"
            )

    def _answer(self, address: int) -> int:
        """Called by the libraries, on any thread: read the request, answer it, write the results back."""
        words = (ctypes.c_int64 * WORDS).from_address(address)
        source, length, target, room = words[1:FIRST_ARGUMENT]
        data = memoryview((ctypes.c_uint8 * length).from_address(source)).cast("B") if length else b""
        try:
            with self.interrupt.watched():
                code, results, output = self.device.handle(words[0], words[FIRST_ARGUMENT:], data, room)
        except KeyboardInterrupt:
            # On another thread: the main one has its own KeyboardInterrupt waiting.
            return _INTERRUPTED if threading.current_thread() is threading.main_thread() else _LAUNCH_FAILED
        for number, result in enumerate(results):
            words[FIRST_ARGUMENT + number] = result
        words[4] = len(output)
        if output:
            ctypes.memmove(target, bytes(output), len(output))
        return code

    def close(self) -> None:
        """After this the libraries answer "not initialised": nobody calls into an interpreter that has ended."""
        self.set_callback(None)
        self.interrupt.close()


class _Interrupt:
    """Ctrl-C during a long launch.

    Python handles signals on the main thread only, which waits inside MAX while the launch runs on another one. A
    wake-up socket tells a watcher thread of the signal, and the watcher raises KeyboardInterrupt in the launch.
    """

    def __init__(self):
        self._running: set[int] = set()  # identifiers of the threads inside the callback
        self._lock = threading.Lock()
        self._writer = None
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        if previous != -1:  # an event loop has it: leave it alone, Ctrl-C then waits for the launch
            signal.set_wakeup_fd(previous)
            return
        self._writer = writer
        threading.Thread(target=self._watch, args=[reader], name="virtual-gpu-interrupt", daemon=True).start()

    @contextlib.contextmanager
    def watched(self):
        """Marks the calling thread as one that Ctrl-C must stop."""
        me = threading.get_ident()
        if me == threading.main_thread().ident:  # gets its KeyboardInterrupt from Python
            yield
            return
        with self._lock:
            self._running.add(me)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(me)

    def _watch(self, reader: socket.socket) -> None:
        while received := reader.recv(64):
            if signal.SIGINT in received and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                with self._lock:
                    for thread in self._running:
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(
                            ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt)
                        )

    def close(self) -> None:
        """Give the wake-up descriptor back and end the watcher."""
        if self._writer is None:
            return
        if threading.current_thread() is threading.main_thread():
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._writer.fileno()):  # somebody took it over since
                signal.set_wakeup_fd(current)
        self._writer.close()  # the watcher reads the end of the stream
        self._writer = None


def start(arch: str = "sm_90a", blocks: str = "natural", verbose: bool = False, **machine):
    """Switch the virtual GPU on for this process and return its `VirtualGPU`.

    `arch` is the NVIDIA target (sm_75 ... sm_90a), `blocks` the block order ("natural", "reversed",
    "shuffled[:seed]"); further keywords go to `VirtualGPU`. Call it before the first `max.driver.Accelerator()`.
    A second call with the device on returns the same machine. Raises VirtualGPUUnavailable where MAX has opened a
    real driver already, `build.DriverBuildError` where the libraries cannot be built.
    """
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
    from ..machine import VirtualGPU

    driver = build.build()
    os.environ.update(driver.environment())
    device = Device(VirtualGPU(arch, blocks=blocks, **machine), arch, log=_to_stderr, verbose=verbose)
    _session = _Session(device, driver)
    atexit.register(_session.close)
    return device.gpu


def active() -> bool:
    """Whether this process runs with the virtual GPU."""
    return _session is not None


def device() -> Device | None:
    """The driver side: `.errors` (exceptions behind failed CUDA calls), `.catalogue` (names for kernels)."""
    return _session.device if _session else None


def _to_stderr(line: str) -> None:
    print(f"virtual GPU: {line}", file=sys.stderr)
