"""The standard streams of every command: plain signs where UTF-8 is not known, closed and full outputs, sizes that cannot be.

A line that another encoding spoils, a stream that is closed or takes no more: each in a process of its own, with a
command that imports little.
"""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from harness import console
from harness.console import (
    PLAIN,
    hanging,
    make_console,
    output_lost,
    plain_signs,
    prepare_streams,
    print_lines,
)

ROOT = Path(__file__).resolve().parents[1]
LIST = (sys.executable, "-m", "harness", "list", "--all")


def spelled(text: str, encoding: str) -> str:
    """What a stream of some encoding makes of a text."""
    data = io.BytesIO()
    with io.TextIOWrapper(data, encoding=encoding, errors="workbook-plain-signs", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        return data.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("encoding", "text", "plain"),
    [
        ("ascii", "dx ✅ dW ❌ db ⏳ GPU ⏭ · a → b", "dx ok dW FAIL db todo GPU skip - a -> b"),
        ("latin-1", "dx ✅ · a → b, né", "dx ok · a -> b, né"),
        ("cp1252", "✅ … é", "ok … é"),
        ("ascii", "né ½ 字", "ne 12 ?"),
        ("utf-8", "dx ✅ → 字", "dx ✅ → 字"),
    ],
)
def test_a_sign_that_an_encoding_lacks_becomes_a_plain_one(encoding, text, plain):
    assert spelled(text, encoding) == plain


def test_the_bytes_of_a_file_s_name_that_are_no_text_stay_what_they_are():
    assert plain_signs(UnicodeEncodeError("utf-8", "a\udcff", 1, 2, "surrogate")) == (b"\xff", 2)
    with pytest.raises(UnicodeDecodeError):
        plain_signs(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "not text"))


def test_every_sign_that_the_harness_prints_has_a_plain_one():
    """Those outside of ASCII in its own source; letters lose their accents by themselves."""
    used = {
        sign
        for file in (ROOT / "harness").rglob("*.py")
        for sign in file.read_text("utf-8")
        if ord(sign) > 126
    }
    assert used, "there are some"
    unknown = {sign for sign in used if plain_signs(UnicodeEncodeError("ascii", sign, 0, 1, ""))[0] == "?"}
    assert not unknown
    assert all(plain.isascii() for plain in PLAIN.values())


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
def test_a_terminal_without_utf_8_gets_all_of_it(environment):
    done = subprocess.run(LIST, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode("latin-1")
    assert "Mojo kernels" in text and " dgamma " in text and not done.stderr


# ---- Streams that are closed or take no more ----------------------------------------------------------------


def shell(command: str) -> subprocess.CompletedProcess:
    """`list` in a shell, which can close streams."""
    line = command.replace("LIST", f"'{sys.executable}' -m harness list")
    return subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_reader_of_output_and_errors_that_leaves_is_130_without_more_words():
    done = shell("set -o pipefail; exec 3>&2; { LIST 2>&1; echo $? >&3; } | true")
    assert done.stderr.splitlines() == ["130"]


def test_a_dumb_terminal_has_the_columns_that_are_asked_for(monkeypatch):
    class Dumb(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "60")
    assert make_console(Dumb()).width == 60


def test_a_reader_that_leaves_is_one_line_and_130():
    done = shell("set -o pipefail; { LIST; echo $? >&2; } | true")
    assert done.stderr.splitlines() == ["broken pipe", "130"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_to_a_full_disk_is_one_line_and_5():
    done = shell("LIST > /dev/full")
    assert done.returncode == 5
    assert done.stderr == "error: standard output: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_changes_nothing(closed):
    done = shell(f"LIST {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert ("Mojo kernels" in done.stdout) == (">&- " not in f" {closed} " or closed == "2>&-")


def test_another_file_that_fails_unexpectedly_is_named(capsys):
    assert output_lost(PermissionError(13, "Permission denied", "/some/file")) == 5
    assert capsys.readouterr().err == "error: /some/file: Permission denied\n"


def test_the_command_line_ends_in_one_line_where_a_file_fails(command_line, monkeypatch):
    def fail(arguments):
        raise OSError(5, "Input/output error", "/some/file")

    monkeypatch.setattr("harness.cli.run", fail)
    done = command_line("list")
    assert (done.code, done.err) == (5, "error: /some/file: Input/output error\n")


def test_rich_leaves_the_end_of_a_pipe_to_the_command_line():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        make_console(Gone()).print("a line")


def test_streams_keep_an_error_handler_that_somebody_chose(monkeypatch):
    chosen = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    monkeypatch.setattr(console.sys, "stdout", chosen)
    prepare_streams()
    assert chosen.errors == "replace"


def printed(*lines: Text, terminal: bool = True) -> list[str]:
    """What a terminal of 40 columns, or a pipe, shows of some lines."""
    stream = io.StringIO()
    print_lines(Console(file=stream, force_terminal=terminal, width=40, highlight=False), lines)
    return [re.sub(r"\x1b\[[0-9;]*m", "", row).rstrip() for row in stream.getvalue().splitlines()]


def test_a_long_line_goes_on_below_its_own_beginning():
    line = Text("      your dx equals the reference without the mean term")
    assert printed(line) == ["      your dx equals the reference", "      without the mean term"]
    assert printed(line, terminal=False) == [line.plain]
    finding = Text("✅ cache  a folder with a name that is not short")
    narrow = Console(file=io.StringIO(), width=24)
    assert [row.plain.rstrip() for row in hanging(narrow, finding, 9)] == [
        "✅ cache  a folder with",
        "          a name that is",
        "          not short",
    ]


def test_a_text_that_is_not_to_be_wrapped_is_cut_short():
    title = Text("The bug hunt: wrong backward passes, and tests that catch them")
    assert len(printed(title)) == 2
    title.no_wrap, title.overflow = True, "ellipsis"
    assert printed(title) == ["The bug hunt: wrong backward passes, an…"]
    assert printed(title, terminal=False) == [title.plain]


@pytest.mark.parametrize("columns", ["60", "12", "wide", ""])
def test_a_pipe_has_the_columns_that_are_asked_for(columns):
    """`list | less` in a narrow terminal; without a number that can be obeyed lines are as long as they are."""
    environment = {**os.environ, "COLUMNS": columns}
    done = subprocess.run(LIST, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    widest = max(map(cell_len, done.stdout.splitlines()))
    assert (widest <= 60) == (columns == "60"), widest
