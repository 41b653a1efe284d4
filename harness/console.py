"""What every command shares: its parser of flags, its console, progress on long work, JSON, and paths as people read them."""

import argparse
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness.errors import BadUse


class Parser(argparse.ArgumentParser):
    """Raises BadUse with one line, in place of printing the usage and leaving."""

    def error(self, message: str) -> None:
        raise BadUse(message)


def make_console(stream) -> Console:
    """A console that prints plain, unwrapped text where nobody looks at a terminal."""
    piped = not stream.isatty()
    return Console(file=stream, highlight=False, emoji=False, width=200 if piped else None)


def print_lines(console: Console, lines: Iterable[Text | str]) -> None:
    """Lines as they are: nothing in them is read as markup."""
    for line in lines:
        console.print(line if isinstance(line, Text) else Text(line), soft_wrap=not console.is_terminal)


@contextmanager
def progress(console: Console) -> Iterator[tuple]:
    """Shows what compiles and for how long; in a pipe, one line for each compile. Yields the two callbacks."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    words = "Compiling the Mojo kernels for the {} (10 to 40 s once, then cached)"
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        tasks = {}

        def on_compile(target) -> None:
            tasks[target.kind] = bars.add_task(words.format(target.label))
            if not console.is_terminal:
                console.print(words.format(target.label) + " ...")

        def on_ready(target, program) -> None:
            if target.kind in tasks:
                bars.remove_task(tasks.pop(target.kind))

        yield on_compile, on_ready


def write_json(data: dict, target: str) -> None:
    """Writes JSON to a file, or to standard output for "-". Raises BadUse where the file cannot be written."""
    text = json.dumps(data, indent=2)
    if target == "-":
        print(text)
        return
    try:
        Path(target).write_text(text + "\n")
    except OSError as error:
        raise BadUse(f"--json {target}: {error.strerror}") from error


def shown(path: Path) -> str:
    """A path as short as it can be said from here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def relative(text: str) -> str:
    """Text with the paths of files below the current folder made relative."""
    return text.replace(f"{Path.cwd()}/", "")
