"""Op packages: valid folders, digests, and messages of compile errors."""

import json
import subprocess

import mojo.run
import pytest

from harness.errors import DamagedFile, UsageError
from harness.toolchain.diagnostics import parse_diagnostics
from harness.toolchain.packages import OpPackage, make_compile_error, run_mojo


def format_diagnostic(file="a.mojo", line=3, column=7, kind="error", message="no such name"):
    return json.dumps(
        {
            "diagnostic": {"file": file, "location": {"line": line, "column": column}},
            "kind": kind,
            "message": message,
        }
    )


def test_folder_without_init_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"no op package at .*: it has no __init__\.mojo"):
        OpPackage(tmp_path)


def test_digest_depends_on_content_only(copied_package, solution):
    assert OpPackage(copied_package.path).digest == solution.digest
    copied_package.replace("comptime TILE = 16", "comptime TILE = 32")
    changed = OpPackage(copied_package.path).digest
    assert changed != solution.digest
    (copied_package.path / "shared" / "common.mojo").rename(copied_package.path / "common.mojo")
    assert OpPackage(copied_package.path).digest not in (changed, solution.digest)


@pytest.fixture
def linked_package(tmp_path):
    """A package with links to a file and to a folder that links back to the package."""
    package, shared = tmp_path / "solutions" / "op", tmp_path / "shared"
    package.mkdir(parents=True)
    shared.mkdir()
    (package / "__init__.mojo").write_text("")
    (tmp_path / "file.mojo").write_text("file")
    (shared / "common.mojo").write_text("shared")
    (package / "file.mojo").symlink_to("../../file.mojo")
    (package / "shared").symlink_to("../../shared")
    (shared / "back").symlink_to("../solutions/op")
    return package


def test_digest_follows_links(linked_package, tmp_path):
    package = OpPackage(linked_package)
    assert [str(file.relative_to(linked_package)) for file in package.files] == [
        "__init__.mojo", "file.mojo", "shared/common.mojo",
    ]  # fmt: skip
    for file in ("file.mojo", "shared/common.mojo"):
        before = OpPackage(linked_package).digest
        (tmp_path / file).write_text("changed")
        assert OpPackage(linked_package).digest != before


@pytest.mark.parametrize("name", ["file.mojo", "shared"])
def test_broken_link_is_reported_in_one_line(linked_package, tmp_path, name):
    (tmp_path / name).rename(tmp_path / "moved")
    with pytest.raises(DamagedFile) as raised:
        _ = OpPackage(linked_package).digest
    assert str(raised.value) == f"{linked_package / name} links to ../../{name}, which is not there"


def test_diagnostics_are_parsed_and_other_output_is_ignored():
    output = "\n".join(
        ["warming up", format_diagnostic(), '{"kind": "note"}', "[1]", format_diagnostic(kind="note", line=9)]
    )
    messages = parse_diagnostics(output)
    assert [str(d) for d in messages] == ["a.mojo:3:7: error: no such name", "a.mojo:9:7: note: no such name"]


def test_failure_shows_the_first_error_with_details(tmp_path):
    output = "\n".join(
        [format_diagnostic(kind="warning"), format_diagnostic(line=4), format_diagnostic(line=5)]
    )
    failure = make_compile_error(tmp_path, output)
    assert str(failure) == (
        f"{tmp_path} does not compile\na.mojo:4:7: error: no such name\nalso a.mojo:5:7: error: no such name"
    )
    assert failure.details.splitlines() == [
        "a.mojo:3:7: warning: no such name",
        "a.mojo:4:7: error: no such name",
        "a.mojo:5:7: error: no such name",
    ]


def test_failure_without_locations_shows_the_output(tmp_path):
    assert str(make_compile_error(tmp_path, "cannot link\n")).endswith("does not compile\ncannot link")


CACHE_MOVED = "/some where/bin/mojo: error: No such file or directory\n"
CACHE_MOVED_JSON = '{"kind":"error","message":"No such file or directory"}\n'
FILE_MISSING = "/bin/mojo: error: cannot open input file 'x.mojo': No such file or directory\n"


@pytest.mark.parametrize(
    ("outputs", "runs", "code"),
    [
        pytest.param([CACHE_MOVED, ""], 2, 0, id="cache moved once"),
        pytest.param([CACHE_MOVED_JSON, ""], 2, 0, id="cache moved, JSON"),
        pytest.param([CACHE_MOVED, CACHE_MOVED], 2, 1, id="cache moved twice"),
        pytest.param([FILE_MISSING], 1, 1, id="file missing"),
        pytest.param([""], 1, 0, id="compiles"),
    ],
)
def test_compiler_is_rerun_only_if_its_cache_moved(monkeypatch, outputs, runs, code):
    calls = []

    def fake_run(arguments, **options):
        calls.append(arguments)
        output = outputs[len(calls) - 1]
        return subprocess.CompletedProcess(arguments, bool(output), "", output)

    monkeypatch.setattr(mojo.run, "subprocess_run_mojo", fake_run)
    assert run_mojo("run", "x.mojo").returncode == code
    assert calls == [["run", "x.mojo"]] * runs
