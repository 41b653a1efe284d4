"""Run a function in several processes that communicate through torch.distributed (gloo).

They are forked from a server that has imported torch. If a rank fails, hangs or dies, the run ends.
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
"""Seconds that a process may take to start; importing torch is slow on a busy machine."""
# Computing a gradient imports the second module, which takes longer than most cases.
PRELOADED = ["torch.distributed", "torch.fx.experimental.symbolic_shapes"]
GRACE = 1.0
"""Seconds that a process has to report an error or its position, or to exit."""


class RankFailed(Exception):
    """Raised if a rank fails, hangs or dies; the message names the rank and, if known, the source line."""


def run_ranks(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    describe: Callable[[Exception], str] = repr,
    source: Path | None = None,
    seconds: float = 60.0,
) -> list[Any]:
    """Call `function(*arguments[rank])` in one process for each element of `arguments`; return the results.

    Args:
        function: Picklable, as are its arguments and result. The default process group is initialized.
        arguments: One tuple for each rank.
        describe: Formats an exception in the process that raised it; picklable.
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
            for rank, rank_arguments in enumerate(arguments):
                ours, rank_end = context.Pipe()
                start = (rank_end, Path(folder), rank, len(arguments), seconds)
                call = (*start, function, rank_arguments, describe)
                process = context.Process(target=run_rank, args=call, daemon=True)
                process.start()
                rank_end.close()
                ranks.append((process, ours))
            collect_answers(ranks, START, folder, source)
            return collect_answers(ranks, seconds, folder, source)
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                connection.close()


def start_server() -> None:
    """Start the fork server with SIGINT blocked, which its processes inherit: only their parent ends them.

    A Ctrl-C during the start reaches this process afterwards, because the signal is blocked, not ignored.
    """
    resource_tracker.ensure_running()  # if started later, it would unblock SIGINT
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def run_rank(
    answer: Connection,
    folder: Path,
    rank: int,
    size: int,
    seconds: float,
    function: Callable[..., Any],
    arguments: tuple,
    describe: Callable[[Exception], str],
) -> None:
    """Join the process group, report that, call the function, and send its result."""
    # Without the watcher, this process would wait for the other ranks forever if the parent were killed.
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
        # Let the run time out before the process group, whose error does not name a rank.
        limit = datetime.timedelta(seconds=START + 2 * seconds)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        answer.send((True, None))
        try:
            answer.send((True, function(*arguments)))
        except Exception as error:
            answer.send((False, describe(error)))
        # If this rank exited, the other ranks' connections would break, and they would fail instead of hang.
        watcher.join()


def end_with_parent(answer: Connection) -> None:
    """End this process when the parent's end of its pipe closes, for example because the parent ended."""
    with contextlib.suppress(EOFError, OSError):
        answer.recv()
    os._exit(1)


def collect_answers(
    ranks: Sequence[tuple[BaseProcess, Connection]], seconds: float, folder: str, source: Path | None
) -> list[Any]:
    """Return one answer from each rank, in order. Raises RankFailed if a rank fails or times out."""
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        ready = wait(list(waiting), remaining)
        for connection in [connection for connection in waiting if connection in ready]:
            rank = waiting.pop(connection)
            try:
                ok, value = connection.recv()
            except EOFError:
                process = ranks[rank][0]
                process.join()
                ok, value = False, f"ended without an answer (exit code {process.exitcode})"
            (results if ok else failed)[rank] = value
            deadline = deadline if ok else min(deadline, time.monotonic() + GRACE)
    size = len(ranks)
    if failed:
        raise RankFailed("; ".join(f"rank {rank} of {size}: {failed[rank]}" for rank in sorted(failed)))
    if waiting:
        lines = {r: format_hang_location(ranks[r][0], r, folder, source) for r in sorted(waiting.values())}
        messages = [f"rank {rank} of {size} hangs{line}" for rank, line in lines.items()]
        raise RankFailed(f"{'; '.join(messages)} (timed out after {seconds:g} s)")
    return [results[rank] for rank in range(size)]


def format_hang_location(process: BaseProcess, rank: int, folder: str, source: Path | None) -> str:
    """Return " at FILE:LINE" with the source line of a hanging rank, or "" if it is unknown."""
    if process.pid is None or source is None:
        return ""
    os.kill(process.pid, signal.SIGUSR1)
    line = find_stack_line(Path(folder) / f"stack {rank}", source)
    return line and f" at {line}"


def find_stack_line(stack: Path, source: Path) -> str:
    """Return the first line of `source` in a process's stack dump as "FILE:LINE", or ""."""
    until = time.monotonic() + GRACE
    while time.monotonic() < until:
        for file, line in re.findall(r'File "(.*)", line (\d+)', stack.read_text()):
            if Path(file) == source:
                return f"{source}:{line}"
        time.sleep(0.05)
    return ""
