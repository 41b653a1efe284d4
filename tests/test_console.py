"""Standard streams: ASCII forms without UTF-8, closed, full and broken outputs, and the width of lines."""

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from harness import console
from harness.console import (
    ASCII_SYMBOLS,
    make_console,
    prepare_streams,
    print_lines,
    replace_symbol,
    wrap_hanging,
)

ROOT = Path(__file__).resolve().parents[1]
LIST = (sys.executable, "-m", "harness", "list", "--all")


def encode_text(text: str, encoding: str) -> str:
    """Return text after a stream with this encoding has written it."""
    data = io.BytesIO()
    with io.TextIOWrapper(data, encoding=encoding, errors="workbook-plain-signs", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        return data.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("encoding", "text", "expected"),
    [
        ("ascii", "dx ✅ dW ❌ db ⏳ GPU ⏭ · a → b", "dx ok dW FAIL db todo GPU skip - a -> b"),
        ("latin-1", "dx ✅ · a → b, né", "dx ok · a -> b, né"),
        ("cp1252", "✅ … é", "ok … é"),
        ("ascii", "né ½ 字", "ne 12 ?"),
        ("utf-8", "dx ✅ → 字", "dx ✅ → 字"),
    ],
)
def test_unsupported_characters_are_replaced(encoding, text, expected):
    assert encode_text(text, encoding) == expected


def test_undecodable_file_name_bytes_are_preserved():
    assert replace_symbol(UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogate")) == (b"\xff", 2)
    with pytest.raises(UnicodeDecodeError):
        replace_symbol(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "not text"))


def test_all_printed_symbols_have_an_ascii_form():
    """Collect the symbols from the source; accented letters need no table entry."""
    used = {
        sign
        for file in (ROOT / "harness").rglob("*.py")
        for sign in file.read_text("utf-8")
        if ord(sign) > 126
    }
    assert used
    unknown = {sign for sign in used if replace_symbol(UnicodeEncodeError("ascii", sign, 0, 1, ""))[0] == "?"}
    assert not unknown
    assert all(plain.isascii() for plain in ASCII_SYMBOLS.values())


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"TERM": "dumb"},
    ],
    ids=lambda value: " ".join(value),
)
def test_terminal_without_utf8(environment):
    completed = subprocess.run(
        LIST, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, timeout=120
    )
    assert completed.returncode == 0, completed.stderr.decode()
    text = completed.stdout.decode("latin-1")
    assert "Mojo kernels" in text and " dgamma " in text and not completed.stderr


def run_in_shell(command: str) -> subprocess.CompletedProcess:
    """Run a shell command after replacing LIST by `workbook list`."""
    line = command.replace("LIST", f"'{sys.executable}' -m harness list")
    return subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_dumb_terminal_uses_columns_variable(monkeypatch):
    class Dumb(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "60")
    assert make_console(Dumb()).width == 60


def test_dumb_terminal_uses_its_width(monkeypatch):
    """A terminal without a reported width, such as a serial console, has 80 columns."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("COLUMNS", raising=False)
    parent_end, child_end = os.openpty()
    with open(child_end, "w") as stream, open(parent_end):
        widths = []
        for columns in (60, 0):
            fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
            widths.append(make_console(stream).width)
    assert widths == [60, 80]


@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("{ LIST; echo $? >&2; } | true", ["broken pipe"]),
        ("exec 3>&2; { LIST 2>&1; echo $? >&3; } | true", []),
    ],
    ids=["standard output", "both outputs"],
)
def test_broken_pipe_is_at_most_one_line_and_exits_with_130(command, lines):
    assert run_in_shell(command).stderr.splitlines() == [*lines, "130"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_full_disk_is_one_line_and_exits_with_5():
    result = run_in_shell("LIST > /dev/full")
    assert result.returncode == 5
    assert result.stderr == "error: standard output: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_stream_is_ignored(closed):
    result = run_in_shell(f"LIST {closed}")
    assert (result.returncode, result.stderr) == (0, "")
    assert ("Mojo kernels" in result.stdout) == (">&- " not in f" {closed} " or closed == "2>&-")


def test_file_error_is_a_single_line(command_line, monkeypatch):
    def fail(arguments):
        raise OSError(5, "Input/output error", "/some/file")

    monkeypatch.setattr("harness.cli.run", fail)
    result = command_line("list")
    assert (result.code, result.err) == (5, "error: /some/file: Input/output error\n")


def test_rich_does_not_handle_a_broken_pipe():
    class BrokenPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        make_console(BrokenPipe()).print("a line")


def test_streams_keep_their_error_handler(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    monkeypatch.setattr(console.sys, "stdout", stream)
    prepare_streams()
    assert stream.errors == "replace"


def print_rows(*lines: Text, terminal: bool = True) -> list[str]:
    """Return the rows that a 40-column terminal, or a pipe, shows for some lines."""
    stream = io.StringIO()
    print_lines(Console(file=stream, force_terminal=terminal, width=40, highlight=False), lines)
    return [re.sub(r"\x1b\[[0-9;]*m", "", row).rstrip() for row in stream.getvalue().splitlines()]


def test_long_line_is_indented():
    line = Text("      your dx equals the reference without the mean term")
    assert print_rows(line) == ["      your dx equals the reference", "      without the mean term"]
    assert print_rows(line, terminal=False) == [line.plain]
    finding = Text("✅ cache  a folder with a name that is not short")
    narrow = Console(file=io.StringIO(), width=24)
    assert [row.plain.rstrip() for row in wrap_hanging(narrow, finding, 9)] == [
        "✅ cache  a folder with",
        "          a name that is",
        "          not short",
    ]


def test_unwrapped_text_is_truncated():
    title = Text("The bug hunt: wrong backward passes, and tests that catch them")
    assert len(print_rows(title)) == 2
    title.no_wrap, title.overflow = True, "ellipsis"
    assert print_rows(title) == ["The bug hunt: wrong backward passes, an…"]
    assert print_rows(title, terminal=False) == [title.plain]


def test_piped_list_uses_columns_variable():
    environment = {**os.environ, "COLUMNS": "60"}
    completed = subprocess.run(LIST, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert max(map(cell_len, completed.stdout.splitlines())) <= 60
