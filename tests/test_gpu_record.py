"""The record of the last run on a real GPU: a missing one and failed tests in it fail here; an older one than what it covers warns."""

import json
import warnings

import gpu_runs
import pytest

MARKED = "import pytest\n@pytest.mark.gpu\ndef test_on_a_gpu(): pass\n"


def judge(path) -> None:
    """Fails for the record at a path where there is none, or tests failed, and warns where files have changed since.

    Whoever changes a kernel may have no GPU at hand, so that an old record is no failure.
    """
    assert path.is_file(), "no run on a GPU is recorded: python3 tests/gpu_runs.py"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert not record["failed"], (
        f"{record['failed']} tests failed on {record['device']}: {record['which_failed']}"
    )
    assert record["passed"], "no test has run on a GPU"
    if changed := gpu_runs.changed_since(record):
        warnings.warn(
            f"the tests on a GPU last ran on {record['date'][:10]}; changed since: {', '.join(changed)}",
            stacklevel=1,
        )


def test_no_test_failed_on_the_gpu_of_the_record():
    judge(gpu_runs.RECORD)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Writes a record of the files as they are, with changes."""
    monkeypatch.setattr(gpu_runs, "ROOT", tmp_path)
    for path in ("solutions/p22/op/a.mojo", "tests/nn/test_direct.py", "tests/nn/test_other.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(MARKED if "direct" in path else "# without the mark")

    def write(**changes):
        entries = {
            "date": "2026-01-02T03:04:05",
            "device": "some GPU",
            "passed": 3,
            "failed": 0,
            "which_failed": [],
        }
        path = tmp_path / "record.json"
        path.write_text(json.dumps({**entries, "files": gpu_runs.covered(), **changes}))
        return path

    return write


def test_a_record_of_today_is_silent(record):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        judge(record())


@pytest.mark.parametrize("path", ["solutions/p22/op/a.mojo", "tests/nn/test_direct.py"])
def test_a_changed_kernel_or_test_is_named(record, tmp_path, path):
    kept = record()
    (tmp_path / path).write_text(f"{MARKED}# changed")
    with pytest.warns(UserWarning, match=f"last ran on 2026-01-02; changed since: {path}$"):
        judge(kept)


def test_other_files_are_not_covered(record):
    assert list(json.loads(record().read_text())["files"]) == [
        "solutions/p22/op/a.mojo",
        "tests/nn/test_direct.py",
    ]


def test_no_record_and_failed_tests_are_failures(record, tmp_path):
    with pytest.raises(AssertionError, match="no run on a GPU is recorded"):
        judge(tmp_path / "none.json")
    with pytest.raises(AssertionError, match="2 tests failed on some GPU"):
        judge(record(failed=2, which_failed=["a", "b"]))
    with pytest.raises(AssertionError, match="no test has run on a GPU"):
        judge(record(passed=0))


@pytest.mark.long
def test_a_run_writes_what_came_of_it(record, tmp_path, monkeypatch, capsys):
    """On a machine with a stand-in for the GPU's name: one test passes, one skips, one fails."""
    (tmp_path / "tests" / "nn" / "test_direct.py").unlink()
    (tmp_path / "tests" / "test_some.py").write_text(
        "import pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('what', ['passes', 'skips', 'fails'])\n"
        "def test_one(what):\n    pytest.skip('no') if what == 'skips' else None\n    assert what == 'passes'\n"
        "def test_without_the_mark():\n    assert False\n"
    )
    monkeypatch.setattr(gpu_runs, "RECORD", tmp_path / "tests" / "gpu_record.json")
    monkeypatch.setattr(gpu_runs, "gpus", lambda: ["some GPU"])
    assert gpu_runs.main(["-q", "-p", "gpu_runs", f"--rootdir={tmp_path}"]) == 1
    written = json.loads(gpu_runs.RECORD.read_text())
    assert (written["passed"], written["skipped"], written["failed"]) == (1, 1, 1)
    assert written["which_failed"] == ["tests/test_some.py::test_one[fails]"]
    assert written["device"] == "some GPU" and written["commit"] == "unknown"
    monkeypatch.setattr(gpu_runs, "gpus", list)
    assert gpu_runs.main([]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err
    assert json.loads(gpu_runs.RECORD.read_text()) == written
