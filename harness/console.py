"""Share the flag parser, streams and console, JSON, paths and the progress line of all commands.

On a terminal without UTF-8 all output uses ASCII in place of other signs.
"""

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

from harness.errors import BadUse, EnvironmentProblem
from harness.toolchain.disk import write_target

if TYPE_CHECKING:
    from rich.progress import Progress

INTERRUPTED = 130
VERDICT = r" *(?:[✅❌⏳] \S+ +)?"
"""The start of a line before its words: spaces, and for a result a sign and the gate."""
NARROWEST = 20
"""Columns; nothing can be laid out in fewer, and COLUMNS is then not obeyed."""
PLAIN = {
    **{"✅": "ok", "❌": "FAIL", "⏳": "todo", "⏭": "skip", "✎": "edit"},
    **{"✓": "ok", "✗": "FAIL", "▶": ">", "←": "<-", "⋮": ":", "├": "+", "█": "#"},
    **{"┌": "+", "┐": "+", "└": "+", "┘": "+", "■": "#", "•": "*"},
    **{"·": "-", "│": "|", "─": "-", "→": "->", "×": "x", "–": "-", "—": "-", "…": "..."},
}
"""Replacements of signs that cannot be printed."""


class Finished(SystemExit):
    """The end of a command that only prints its help. Any other SystemExit comes from a learner's code."""


class Parser(argparse.ArgumentParser):
    """Takes flags by their whole names; raises BadUse with one line, in place of printing the usage and leaving."""

    def __init__(self, *, allow_abbrev: bool = False, **options: Any):
        super().__init__(allow_abbrev=allow_abbrev, **options)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise Finished(status)

    def error(self, message: str) -> None:
        raise BadUse(message)


# ---- Streams ------------------------------------------------------------------------------------------------


def plain_signs(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handle encoding errors of the standard streams: replace a sign that their encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    sign = error.object[error.start]
    if "\udc80" <= sign <= "\udcff":  # a byte of a file name that is not UTF-8
        return bytes([ord(sign) - 0xDC00]), error.start + 1
    letter = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
    return PLAIN.get(sign) or letter or "?", error.start + 1


codecs.register_error("workbook-plain-signs", plain_signs)


def prepare_streams() -> None:
    """Prepare the standard streams: replace closed ones by the null device, and encode every sign."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (for the life of the process)
    for stream in (sys.stdout, sys.stderr):
        changeable = isinstance(stream, io.TextIOWrapper)  # not a replacement by a program
        if changeable and stream.errors in ("strict", "surrogateescape", "backslashreplace"):
            stream.reconfigure(errors="workbook-plain-signs")


def output_lost(error: OSError) -> int:
    """Print one line and return the exit code if standard output is closed, or another file fails
    unexpectedly."""
    try:
        sys.stdout.flush()
    except OSError:  # discard the rest of the buffer, or the interpreter reports an error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        try:
            print("broken pipe", file=sys.stderr, flush=True)
        except OSError:  # it went where the output did
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        return INTERRUPTED
    print(f"error: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
    return EnvironmentProblem.exit_code


def printable(text: str) -> str:
    """Text whose control characters are written out, `\\x1b`: a terminal would obey them. Lines and tabs stay."""
    return "".join(
        ascii(sign)[1:-1] if unicodedata.category(sign) == "Cc" and sign not in "\n\t" else sign
        for sign in text
    )


class PipedConsole(Console):
    """A console that leaves the end of a pipe to the command line; rich would exit with 1, "a wrong result"."""

    wraps = False
    """Wrap lines although the output is not a terminal."""

    def on_broken_pipe(self) -> None:
        raise  # the error that is being handled


def make_console(stream, *, paged: bool = False) -> Console:
    """Return a console that prints plain, unwrapped text if the output is not a terminal.

    COLUMNS also applies to a dumb terminal, and to a pipe if the text is `paged`.
    """
    piped = not stream.isatty()
    obeyed = paged if piped else os.environ.get("TERM") in ("dumb", "unknown")
    requested = requested_width() if obeyed else 0
    width = requested or (200 if piped else None)
    console = PipedConsole(
        file=stream, highlight=False, emoji=False, width=width, height=25 if requested else None
    )
    console.wraps = paged and bool(requested)
    return console


def requested_width() -> int:
    """Return the environment variable COLUMNS, which a pipe to a pager may set; 0 if it is not set."""
    words = os.environ.get("COLUMNS", "")
    return int(words) if words.isdecimal() and int(words) >= NARROWEST else 0


def page_width(console: Console) -> int:
    """Return the width for tables and pictures: that of the terminal or the requested one; 0 for no limit."""
    return console.width if console.is_terminal else requested_width()


def print_lines(console: Console, lines: Iterable[Text | str]) -> None:
    """Print lines verbatim, without markup."""
    for line in lines:
        text = line if isinstance(line, Text) else Text(printable(line))
        if not (console.is_terminal or (isinstance(console, PipedConsole) and console.wraps)):
            console.print(text, soft_wrap=True)
            continue
        for row in hanging(console, text):  # rich forgets a text's own wrapping when it prints
            console.print(row, no_wrap=row.no_wrap, overflow=row.overflow)


def hanging(console: Console, line: Text, column: int | None = None) -> list[Text]:
    """Split a line for a terminal; continuation lines are indented to the line's own start, or to a column.

    A result starts after its sign and the gate's name.
    """
    if column is None:
        beginning = re.match(VERDICT, line.plain)
        column = beginning.end() if beginning else 0
    if not column or line.no_wrap or line.cell_len <= console.width or column > console.width // 2:
        return [line]
    head = line[:column]
    first, *rest = line[column:].wrap(console, console.width - head.cell_len)
    return [head + first, *(Text(" " * head.cell_len) + row for row in rest)]


def write_json(data: dict, target: str) -> None:
    """Write JSON to a file, or to standard output for "-". Raises BadUse if the file cannot be written."""
    text = json.dumps(data, indent=2)
    if target == "-":
        print(text)
    else:
        write_target("--json", target, text + "\n")


def shown(path: Path) -> str:
    """Return a path relative to the current folder if that is shorter; a link by its own name."""
    try:
        return str(Path(os.path.abspath(path)).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def relative(text: str) -> str:
    """Make the paths of files below the current folder relative."""
    return text.replace(f"{Path.cwd()}/", "")


# ---- Progress line of a check -------------------------------------------------------------------------------


Listener = Callable[[str], None]
_listeners: list[Listener] = []


def tell(words: str) -> None:
    """Report progress, "case 3 of 18 (wide)", to the newest listener, in the calling thread."""
    if _listeners:
        _listeners[-1](words)


@contextmanager
def listening(listener: Listener) -> Generator[None, None, None]:
    """Receive progress reports from any thread until the block ends."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def live(console: Console, *, ticking: bool = True) -> Generator["Progress", None, None]:
    """Show progress on a terminal in one line that is erased; in a pipe nothing.

    Without `ticking` it is redrawn only at a report: a learner's code may print and read meanwhile.
    """
    # Not at the start: most commands show no bar.
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

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
