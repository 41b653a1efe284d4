"""The line that moves while a check goes on: what compiles, which case of how many, and for how long."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness.check.live import listening
from harness.devices.targets import Target

THROUGH_MAX = "Compiling the Mojo kernels for the {} through MAX (half a minute, on a busy machine minutes; then cached)"
RECORDED = "Compiling the Mojo kernels for the {} (seconds, on a busy machine more; then cached)"


@contextmanager
def live(console: Console, *, ticking: bool = True) -> Iterator[Progress]:
    """Shows on a terminal what a check tells, in one line that goes away; in a pipe nothing.

    Without `ticking` it moves only where the check tells something: a learner's code may print and read meanwhile.
    """
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=ticking,
        disable=not console.is_terminal,
    ) as bars:
        task = bars.add_task("", visible=False)

        def show(words: str) -> None:
            bars.update(task, description=f"checking: {words}", visible=True, refresh=not ticking)

        with listening(show):
            yield bars


def compile_callbacks(
    console: Console, bars: Progress
) -> tuple[Callable[[Target], None], Callable[[Target], None]]:
    """Two callbacks, for kernels that begin to compile and for compiled ones: a line each, which stays in a pipe."""
    tasks = {}

    def on_compile(target: Target) -> None:
        words = (RECORDED if target.kind == "virtual" else THROUGH_MAX).format(target.label)
        tasks[target.kind] = bars.add_task(words)
        if not console.is_terminal:
            console.print(words + " ...")

    def on_ready(target: Target) -> None:
        if target.kind in tasks:
            bars.remove_task(tasks.pop(target.kind))

    return on_compile, on_ready
