"""Op packages: which folders are one, what names their content, and what a package that does not compile says."""

import json
import subprocess

import mojo.run
import pytest

from harness.errors import BadUse, CompileFailed, DamagedFile
from harness.toolchain.diagnostics import parse_diagnostics
from harness.toolchain.packages import OpPackage, compile_failed, run_mojo


def diagnostic(file="a.mojo", line=3, column=7, kind="error", message="no such name"):
    """One line of the compiler's JSON output."""
    return json.dumps(
        {
            "diagnostic": {"file": file, "location": {"line": line, "column": column}},
            "kind": kind,
            "message": message,
        }
    )


def test_a_missing_folder_is_bad_use(tmp_path):
    with pytest.raises(BadUse, match=r"no op package at .*/nowhere: it is not a folder"):
        OpPackage(tmp_path / "nowhere")


def test_a_folder_without_init_is_bad_use(tmp_path):
    with pytest.raises(BadUse, match=r"no op package at .*: it has no __init__\.mojo"):
        OpPackage(tmp_path)


def test_the_digest_names_content_and_not_place(copied_package, solution):
    assert OpPackage(copied_package.path).digest == solution.digest
    copied_package.replace("comptime TILE = 16", "comptime TILE = 32")
    changed = OpPackage(copied_package.path).digest
    assert changed != solution.digest
    (copied_package.path / "shared" / "common.mojo").rename(copied_package.path / "common.mojo")
    assert OpPackage(copied_package.path).digest not in (changed, solution.digest)


@pytest.fixture
def linked(tmp_path):
    """A package that links to one file, and to a folder that holds another and leads back to the package."""
    package, shared = tmp_path / "solutions" / "op", tmp_path / "shared"
    package.mkdir(parents=True)
    shared.mkdir()
    (package / "__init__.mojo").write_text("")
    (tmp_path / "given.mojo").write_text("given")
    (shared / "common.mojo").write_text("shared")
    (package / "given.mojo").symlink_to("../../given.mojo")
    (package / "shared").symlink_to("../../shared")
    (shared / "back").symlink_to("../solutions/op")
    return package


def test_the_digest_follows_links(linked, tmp_path):
    package = OpPackage(linked)
    assert [str(file.relative_to(linked)) for file in package.files] == [
        "__init__.mojo", "given.mojo", "shared/common.mojo",
    ]  # fmt: skip
    for file in ("given.mojo", "shared/common.mojo"):
        before = OpPackage(linked).digest
        (tmp_path / file).write_text("changed")
        assert OpPackage(linked).digest != before


@pytest.mark.parametrize("name", ["given.mojo", "shared"])
def test_a_link_that_leads_nowhere_is_one_clear_line(linked, tmp_path, name):
    (tmp_path / name).rename(tmp_path / "moved")
    with pytest.raises(DamagedFile) as raised:
        _ = OpPackage(linked).digest
    assert str(raised.value) == f"{linked / name} links to ../../{name}, which is not there"


def test_diagnostics_are_read_and_other_output_is_passed_over():
    output = "\n".join(
        ["warming up", diagnostic(), '{"kind": "note"}', "[1]", diagnostic(kind="note", line=9)]
    )
    messages = parse_diagnostics(output)
    assert [str(d) for d in messages] == ["a.mojo:3:7: error: no such name", "a.mojo:9:7: note: no such name"]


def test_a_failure_shows_the_first_error_and_keeps_the_rest(tmp_path):
    output = "\n".join([diagnostic(kind="warning"), diagnostic(line=4), diagnostic(line=5)])
    failure = compile_failed(tmp_path, output)
    assert str(failure) == (
        f"{tmp_path} does not compile\na.mojo:4:7: error: no such name\nalso a.mojo:5:7: error: no such name"
    )
    assert failure.details.splitlines() == [
        "a.mojo:3:7: warning: no such name",
        "a.mojo:4:7: error: no such name",
        "a.mojo:5:7: error: no such name",
    ]


def test_a_failure_without_located_messages_shows_what_was_said(tmp_path):
    assert str(compile_failed(tmp_path, "cannot link\n")).endswith("does not compile\ncannot link")


@pytest.mark.compiles
def test_the_compiler_names_file_and_line_of_a_broken_kernel(copied_package):
    file = copied_package.path / "shared" / "common.mojo"
    file.write_text(file.read_text() + "\n\ndef broken():\n    no_such_name()\n")
    line = file.read_text().count("\n")
    with pytest.raises(CompileFailed) as raised:
        OpPackage(copied_package.path).compile()
    text = str(raised.value)
    assert f"{file}:{line}:" in text
    assert "unknown declaration 'no_such_name'" in text and "\n    no_such_name()\n    ^" in text, text
    assert text.count("\n") <= 4
    assert raised.value.exit_code == 4


@pytest.mark.compiles
def test_compiling_again_takes_the_same_file(solution):
    first = solution.compile()
    written = first.stat().st_mtime_ns
    assert solution.digest in first.name
    assert OpPackage(solution.path).compile() == first
    assert first.stat().st_mtime_ns == written


MOVED = "/some where/bin/mojo: error: No such file or directory\n"
AS_JSON = '{"kind":"error","message":"No such file or directory"}\n'
MISSING = "/bin/mojo: error: cannot open input file 'x.mojo': No such file or directory\n"


@pytest.mark.parametrize(
    ("says", "runs", "code"),
    [
        pytest.param([MOVED, ""], 2, 0, id="its cache moved once"),
        pytest.param([AS_JSON, ""], 2, 0, id="and says it as JSON"),
        pytest.param([MOVED, MOVED], 2, 1, id="its cache moved twice"),
        pytest.param([MISSING], 1, 1, id="a file is missing"),
        pytest.param([""], 1, 0, id="it compiles"),
    ],
)
def test_the_compiler_runs_again_only_where_its_cache_moved(monkeypatch, says, runs, code):
    calls = []

    def answer(arguments, **options):
        calls.append(arguments)
        said = says[len(calls) - 1]
        return subprocess.CompletedProcess(arguments, bool(said), "", said)

    monkeypatch.setattr(mojo.run, "subprocess_run_mojo", answer)
    assert run_mojo("run", "x.mojo").returncode == code
    assert calls == [["run", "x.mojo"]] * runs
