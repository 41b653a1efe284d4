"""Run a function in several processes that communicate through torch.distributed (gloo).

The processes are forked from a server that has imported torch. If a rank fails, times out or crashes, the run
ends.
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

START_TIMEOUT_S = 300.0
"""Time limit for the start of a process; importing torch is slow on a busy machine."""
# Computing a gradient imports the second module, which takes longer than most cases.
PRELOADED_MODULES = ["torch.distributed", "torch.fx.experimental.symbolic_shapes"]
GRACE_PERIOD_S = 1.0
"""Time limit for a process to report an error or its position, or to exit."""


class RankError(Exception):
    """Raised if a rank fails, times out or crashes; the message contains the rank and, if known, the line."""


def run_ranks(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], *,
    format_error: Callable[[Exception], str] = repr, source_file: Path | None = None, timeout_s: float = 60.0,
) -> list[Any]:  # fmt: skip
    """Call `function(*arguments[rank])` in one process for each element of `arguments`; return the results.

    Args:
        function: Picklable, as are its arguments and result. The default process group is initialized.
        arguments: One tuple for each rank.
        format_error: Formats an exception in the process that raised it; picklable.
        source_file: The file whose line is reported for a hanging rank.
        timeout_s: Time limit of the ranks, once all have started.

    Raises RankError.
    """
    context = multiprocessing.get_context("forkserver")
    # Otherwise each rank would import the function's module separately.
    context.set_forkserver_preload([*PRELOADED_MODULES, function.__module__])
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            for rank, rank_arguments in enumerate(arguments):
                parent_end, rank_end = context.Pipe()
                start = (rank_end, Path(folder), rank, len(arguments), timeout_s)
                call = (*start, function, rank_arguments, format_error)
                process = context.Process(target=run_rank, args=call, daemon=True)
                process.start()
                rank_end.close()
                ranks.append((process, parent_end))
            collect_results(ranks, START_TIMEOUT_S, folder, source_file)
            return collect_results(ranks, timeout_s, folder, source_file)
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
    connection: Connection, folder: Path, rank: int, size: int, timeout_s: float,
    function: Callable[..., Any], arguments: tuple, format_error: Callable[[Exception], str],
) -> None:  # fmt: skip
    """Join the process group, report that, call the function, and send its result."""
    # Without the watcher, this process would wait for the other ranks forever if the parent were killed.
    watcher = threading.Thread(target=end_with_parent, args=(connection,), daemon=True)
    watcher.start()
    import torch
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage] (it is documented)

    for module in PRELOADED_MODULES:
        importlib.import_module(module)

    if not folder.is_dir():
        return  # the parent was interrupted meanwhile
    with (folder / f"stack {rank}").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        store = FileStore(str(folder / "store"), size)
        # Let the run time out before the process group, whose error does not name a rank.
        timeout = datetime.timedelta(seconds=START_TIMEOUT_S + 2 * timeout_s)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        connection.send((True, None))
        try:
            connection.send((True, function(*arguments)))
        except Exception as error:
            connection.send((False, format_error(error)))
        # If this rank exited, the other ranks' connections would break, and they would fail instead of hang.
        watcher.join()


def end_with_parent(connection: Connection) -> None:
    """End this process when the parent's end of its pipe closes, for example because the parent ended."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os._exit(1)


def collect_results(
    ranks: Sequence[tuple[BaseProcess, Connection]], timeout_s: float, folder: str, source_file: Path | None
) -> list[Any]:
    """Return one answer from each rank, in order. Raises RankError if a rank fails or times out."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout_s
    pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while pending and (remaining := deadline - time.monotonic()) > 0:
        ready = wait(list(pending), remaining)
        for connection in [connection for connection in pending if connection in ready]:
            rank = pending.pop(connection)
            try:
                succeeded, value = connection.recv()
            except EOFError:
                process = ranks[rank][0]
                process.join()
                succeeded, value = False, f"ended without an answer (exit code {process.exitcode})"
            (results if succeeded else errors)[rank] = value
            deadline = deadline if succeeded else min(deadline, time.monotonic() + GRACE_PERIOD_S)
    size = len(ranks)
    if errors:
        raise RankError("; ".join(f"rank {rank} of {size}: {errors[rank]}" for rank in sorted(errors)))
    if pending:
        lines = {
            r: format_hang_location(ranks[r][0], r, folder, source_file) for r in sorted(pending.values())
        }
        messages = [f"rank {rank} of {size} hangs{line}" for rank, line in lines.items()]
        raise RankError(f"{'; '.join(messages)} (timed out after {timeout_s:g} s)")
    return [results[rank] for rank in range(size)]


def format_hang_location(process: BaseProcess, rank: int, folder: str, source_file: Path | None) -> str:
    """Return " at FILE:LINE" with the source line of a hanging rank, or "" if it is unknown."""
    if process.pid is None or source_file is None:
        return ""
    os.kill(process.pid, signal.SIGUSR1)
    line = find_stack_line(Path(folder) / f"stack {rank}", source_file)
    return line and f" at {line}"


def find_stack_line(stack: Path, source_file: Path) -> str:
    """Return the first line of `source_file` in a process's stack dump as "FILE:LINE", or ""."""
    deadline = time.monotonic() + GRACE_PERIOD_S
    while time.monotonic() < deadline:
        for file, line in re.findall(r'File "(.*)", line (\d+)', stack.read_text()):
            if Path(file) == source_file:
                return f"{source_file}:{line}"
        time.sleep(0.05)
    return ""
