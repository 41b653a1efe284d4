"""Provide helpers for all commands: flag parser, streams, console, JSON, paths and progress line."""

import argparse
import codecs
import io
import json
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.text import Text

from harness.errors import EnvironmentProblem, UsageError
from harness.toolchain.disk import write_target

if TYPE_CHECKING:
    from rich.progress import Progress

EXIT_INTERRUPTED = 130
RESULT_PREFIX = r" *(?:[✅❌⏳] \S+ +)?"
"""Pattern of the start of a line: spaces and, in a result's line, a sign and the gate."""
MIN_COLUMNS = 20
"""Minimum number of columns of a readable layout; a smaller value of COLUMNS is ignored."""
ASCII_SYMBOLS = {
    **{"✅": "ok", "❌": "FAIL", "⏳": "todo", "⏭": "skip", "✎": "edit"},
    **{"✓": "ok", "✗": "FAIL", "▶": ">", "←": "<-", "⋮": ":", "├": "+", "█": "#"},
    **{"┌": "+", "┐": "+", "└": "+", "┘": "+", "■": "#", "•": "*"},
    **{"·": "-", "│": "|", "─": "-", "→": "->", "×": "x", "–": "-", "—": "-", "…": "..."},
}
"""ASCII replacements for signs that the output's encoding lacks."""


class ParserExit(SystemExit):
    """Raised by a parser that has printed its help. Any other SystemExit comes from a learner's code."""


class Parser(argparse.ArgumentParser):
    """A parser without abbreviated flags that raises UsageError instead of printing its usage."""

    def __init__(self, *, allow_abbrev: bool = False, **options: Any):
        super().__init__(allow_abbrev=allow_abbrev, **options)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise ParserExit(status)

    def error(self, message: str) -> None:
        raise UsageError(message)


# ---- Streams ------------------------------------------------------------------------------------------------


def replace_symbol(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handle encoding errors of the standard streams: replace a sign that their encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    symbol = error.object[error.start]
    if "\udc80" <= symbol <= "\udcff":  # a byte of a file name that is not UTF-8
        return bytes([ord(symbol) - 0xDC00]), error.start + 1
    letter = unicodedata.normalize("NFKD", symbol).encode("ascii", "ignore").decode()
    return ASCII_SYMBOLS.get(symbol) or letter or "?", error.start + 1


codecs.register_error("workbook-plain-signs", replace_symbol)


def prepare_streams() -> None:
    """Replace closed standard streams with the null device, and let the others encode every sign."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for the life of the process)
    for stream in (sys.stdout, sys.stderr):
        is_reconfigurable = isinstance(stream, io.TextIOWrapper)  # False if a program has replaced the stream
        if is_reconfigurable and stream.errors in ("strict", "surrogateescape", "backslashreplace"):
            stream.reconfigure(errors="workbook-plain-signs")


def report_output_error(error: OSError) -> int:
    """Print one line for a closed standard output or a failing file, and return the exit code."""
    try:
        sys.stdout.flush()
    except OSError:  # discard the rest of the buffer, or the interpreter reports an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        try:
            print("broken pipe", file=sys.stderr, flush=True)
        except OSError:  # standard error is the same closed pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        return EXIT_INTERRUPTED
    print(f"error: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
    return EnvironmentProblem.exit_code


def escape_controls(text: str) -> str:
    """Escape the control characters of a text, which a terminal would interpret, except newlines and tabs."""
    return "".join(
        ascii(sign)[1:-1] if unicodedata.category(sign) == "Cc" and sign not in "\n\t" else sign
        for sign in text
    )


class PipedConsole(Console):
    """A console that leaves a broken pipe to `harness.cli`; rich would exit with 1 (a wrong result)."""

    wraps = False
    """True to wrap lines although the output is not a terminal."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich is handling


def make_console(stream, *, paged: bool = False) -> Console:
    """Return a console that prints plain, unwrapped text if the output is not a terminal.

    COLUMNS also applies to a dumb terminal, and to a pipe if the text is `paged`.
    """
    piped = not stream.isatty()
    dumb = not piped and os.environ.get("TERM") in ("dumb", "unknown")
    requested_width = get_requested_width() if dumb or (piped and paged) else 0
    # rich assumes 80 columns for a dumb terminal unless both sizes are set.
    width = requested_width or (200 if piped else get_terminal_width(stream) if dumb else None)
    console = PipedConsole(
        file=stream, highlight=False, emoji=False, width=width, height=25 if width else None
    )
    console.wraps = paged and bool(requested_width)
    return console


def get_terminal_width(stream) -> int | None:
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def get_requested_width() -> int:
    """Return the width in COLUMNS, which may be set for a pager; 0 if it is unset or below MIN_COLUMNS."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() and int(columns) >= MIN_COLUMNS else 0


def get_page_width(console: Console) -> int:
    """Return the width for tables and pictures, the terminal's or the requested one; 0 for no limit."""
    return console.width if console.is_terminal else get_requested_width()


def print_lines(console: Console, lines: Iterable[Text | str]) -> None:
    """Print lines verbatim, without markup."""
    for line in lines:
        text = line if isinstance(line, Text) else Text(escape_controls(line))
        if not (console.is_terminal or (isinstance(console, PipedConsole) and console.wraps)):
            console.print(text, soft_wrap=True)
            continue
        for row in wrap_hanging(console, text):  # rich ignores a text's own wrapping when it prints
            console.print(row, no_wrap=row.no_wrap, overflow=row.overflow)


def wrap_hanging(console: Console, line: Text, column: int | None = None) -> list[Text]:
    """Wrap a line for a terminal; continuation lines are indented to `column`.

    By default that is where the line's words start: in a result, after the sign and the gate's name.
    """
    if column is None:
        prefix = re.match(RESULT_PREFIX, line.plain)
        column = prefix.end() if prefix else 0
    if not column or line.no_wrap or line.cell_len <= console.width or column > console.width // 2:
        return [line]
    head = line[:column]
    first, *rest = line[column:].wrap(console, console.width - head.cell_len)
    return [head + first, *(Text(" " * head.cell_len) + row for row in rest)]


def write_json(data: dict, target: str) -> None:
    """Write JSON to a file, or to standard output for "-". Raises UsageError if the file is not writable."""
    text = json.dumps(data, indent=2)
    if target == "-":
        print(text)
    else:
        write_target("--json", target, text + "\n")


def format_path(path: Path) -> str:
    """Return a path relative to the current folder if it is inside; a link is not resolved."""
    try:
        return str(Path(os.path.abspath(path)).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def make_relative(text: str) -> str:
    return text.replace(f"{Path.cwd()}/", "")


# ---- Progress line of a check -------------------------------------------------------------------------------


Listener = Callable[[str], None]
_listeners: list[Listener] = []


def report_progress(message: str) -> None:
    """Report progress, such as "case 3 of 18 (wide)", to the newest listener, in the calling thread."""
    if _listeners:
        _listeners[-1](message)


@contextmanager
def receive_progress(listener: Listener) -> Generator[None, None, None]:
    """Receive progress reports from any thread until the block ends."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def show_progress(console: Console, *, auto_refresh: bool = True) -> Generator["Progress", None, None]:
    """Show progress in one line, erased at the end, if the console is a terminal.

    Without `auto_refresh` it is redrawn only at a report, since a learner's code may print and read meanwhile.
    """
    # Imported here since most commands show no progress.
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        auto_refresh=auto_refresh,
        disable=not console.is_terminal,
    ) as bars:
        task = bars.add_task("", visible=False)

        def show(message: str) -> None:
            bars.update(task, description=f"checking: {message}", visible=True, refresh=not auto_refresh)

        with receive_progress(show):
            yield bars
