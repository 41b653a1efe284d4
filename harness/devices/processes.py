"""Run a function in several processes that communicate through torch.distributed (gloo), on this machine.

A fork server with torch imported starts them, so that a second run starts in milliseconds. A rank that fails,
hangs or dies ends the run and is reported, since the others may wait for it forever.
"""

import contextlib
import datetime
import faulthandler
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

START = 300.0
"""Seconds that a process may take to start: on a busy machine torch alone takes many."""
# The imports of a first gradient take longer than most cases.
PRELOADED = ["torch.distributed", "torch.fx.experimental.symbolic_shapes"]
GRACE = 1.0
"""Seconds that a process has to report an error or its position, or to exit."""


class RankFailed(Exception):
    """A rank raised, hangs or died; the message names the rank and, if known, the source line."""


def run_ranks(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    describe: Callable[[Exception], str] = repr,
    source: Path | None = None,
    seconds: float = 60.0,
) -> list[Any]:
    """Call `function(*arguments[rank])` in as many processes as there are arguments, and return the results.

    Args:
        function: Can be pickled, as can its arguments and result. The default process group is initialized.
        arguments: Of each rank.
        describe: Formats an exception, in the process that raised it; can be pickled.
        source: The file whose line is reported for a hanging rank.
        seconds: Time limit of the ranks, once all have started.

    Raises RankFailed.
    """
    context = multiprocessing.get_context("forkserver")
    # Otherwise each rank would import the function's module separately.
    context.set_forkserver_preload([*PRELOADED, function.__module__])
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank, own in enumerate(arguments):
                ours, theirs = context.Pipe()
                start = (theirs, Path(folder), rank, len(arguments), seconds)
                process = context.Process(
                    target=one_rank, args=(*start, function, own, describe), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append((process, ours))
            answers(ranks, START, folder, source)
            return answers(ranks, seconds, folder, source)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def start_server() -> None:
    """Start the fork server with Ctrl-C blocked, which its processes inherit: their parent ends them.

    A Ctrl-C meanwhile is heard afterwards: the signal is blocked, which a new process inherits, and not ignored.
    """
    resource_tracker.ensure_running()  # where it comes later, it lifts every block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def one_rank(
    answer: Connection,
    folder: Path,
    rank: int,
    size: int,
    seconds: float,
    function: Callable[..., Any],
    arguments: tuple,
    describe: Callable[[Exception], str],
) -> None:
    """Join the group, report it, call the function, and send its result."""
    # A signal that ends the starting process without clean-up would leave this one waiting for its neighbours.
    watcher = threading.Thread(target=end_with_parent, args=(answer,), daemon=True)
    watcher.start()
    import torch
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage] (it is documented)

    for module in PRELOADED:
        importlib.import_module(module)

    if not folder.is_dir():
        return  # the parent was interrupted meanwhile
    with (folder / f"stack {rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        store = FileStore(str(folder / "store"), size)
        # The run ends before the group's own limit, which names no rank.
        limit = datetime.timedelta(seconds=START + 2 * seconds)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        answer.send((True, None))
        try:
            answer.send((True, function(*arguments)))
        except Exception as error:
            answer.send((False, describe(error)))
        # A rank that ended would break the connections of the others, who would then fail and not hang.
        watcher.join()


def end_with_parent(answer: Connection) -> None:
    """End this process when the other end of its pipe is closed, as the system does when a process ends."""
    with contextlib.suppress(EOFError, OSError):
        answer.recv()
    os._exit(1)


def answers(
    ranks: Sequence[tuple[BaseProcess, Connection]], seconds: float, folder: str, source: Path | None
) -> list[Any]:
    """Return one answer of every rank, in order. Raises RankFailed if one fails or times out."""
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        ready = wait(list(waiting), left)
        for connection in [connection for connection in waiting if connection in ready]:
            rank = waiting.pop(connection)
            try:
                good, value = connection.recv()
            except EOFError:
                process = ranks[rank][0]
                process.join()
                good, value = False, f"ended without an answer (exit code {process.exitcode})"
            (results if good else failed)[rank] = value
            deadline = deadline if good else min(deadline, time.monotonic() + GRACE)
    size = len(ranks)
    if failed:
        raise RankFailed("; ".join(f"rank {rank} of {size}: {failed[rank]}" for rank in sorted(failed)))
    if waiting:
        hanging = sorted(waiting.values())
        words = [
            f"rank {rank} of {size} hangs{place(ranks[rank][0], rank, folder, source)}" for rank in hanging
        ]
        raise RankFailed(f"{'; '.join(words)} (timed out after {seconds:g} s)")
    return [results[rank] for rank in range(size)]


def place(process: BaseProcess, rank: int, folder: str, source: Path | None) -> str:
    """Return the source line of a hanging rank, " at FILE:LINE", or ""."""
    if process.pid is None or source is None:
        return ""
    os.kill(process.pid, signal.SIGUSR1)
    line = line_in(Path(folder) / f"stack {rank}", source)
    return line and f" at {line}"


def line_in(stack: Path, source: Path) -> str:
    """Return the line of a source, "FILE:LINE", in the stack that a process writes on request, or when it
    dies; "" without one."""
    until = time.monotonic() + GRACE
    while time.monotonic() < until:
        for file, line in re.findall(r'File "(.*)", line (\d+)', stack.read_text()):
            if Path(file) == source:
                return f"{source}:{line}"
        time.sleep(0.05)
    return ""
