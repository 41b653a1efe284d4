"""`workbook doctor` on this machine, and with missing or broken dependencies."""

import re
import tomllib

import pytest
from checkouts import ROOT

from harness.cli import main
from harness.console import receive_progress
from harness.errors import UsageError
from harness.screens import doctor


def test_doctor_passes_on_this_machine(checkout):
    result = checkout.run("doctor")
    assert result.code == 0, result.out
    for part in (
        "Python",
        "max",
        "mojo",
        "torch",
        "Mojo compiler",
        "GPU",
        "virtual GPU",
        "workbook cache",
        "C compiler",
    ):
        assert re.search(rf"^[✅·] {re.escape(part)} ", result.out, re.MULTILINE), part


def test_doctor_compares_versions_with_requirements(monkeypatch):
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [f"{name}{versions}" for name, versions in doctor.read_required_versions().items()] == lines
    monkeypatch.setattr(
        doctor, "read_required_versions", lambda: {"numpy": "==0.0.1", "no-such-thing": ">=3,<4"}
    )
    by_part = {finding.part: finding for finding in doctor.check_packages()}
    assert by_part["numpy"].state == "broken" and "==0.0.1 is required" in by_part["numpy"].remedy
    assert by_part["no-such-thing"].state == "broken"
    assert by_part["no-such-thing"].description == "not installed, >=3,<4 is required"


@pytest.mark.parametrize(
    ("version", "versions", "allowed"),
    [
        ("2.15.0+cpu", ">=2.11,<2.16", True),
        ("2.11", ">=2.11,<2.16", True),
        ("2.10.9", ">=2.11,<2.16", False),
        ("2.16.0", ">=2.11,<2.16", False),
        ("26.7.0", "==26.7.0", True),
        ("26.7", "==26.7.0", True),
        ("26.7.1", "==26.7.0", False),
    ],
)
def test_doctor_accepts_version_ranges(version, versions, allowed):
    assert doctor.is_satisfied(version, versions) is allowed


def test_doctor_exits_with_5_if_a_check_fails(monkeypatch, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(blocked / "cache"))
    assert main(["doctor"]) == 5
    assert "❌ caches" in capsys.readouterr().out.replace("workbook cache", "caches")


def test_doctor_continues_after_a_failed_check(monkeypatch):
    def fails():
        raise RuntimeError("no luck")
        yield

    monkeypatch.setattr(doctor, "PARTS", {"one": fails, "two": doctor.check_python})
    messages = []
    with receive_progress(messages.append):
        findings = list(doctor.collect_findings())
    assert messages == ["one", "two"]
    assert (findings[0].part, findings[0].state) == ("one", "broken") and "no luck" in findings[0].description
    assert findings[1].part == "Python"


@pytest.mark.parametrize("has_book", [True, False])
def test_doctor_points_to_the_built_book(has_book, monkeypatch, tmp_path):
    """Without a built book in the wheel, the doctor does not suggest adding one."""

    def find_built_book():
        if not has_book:
            raise UsageError(
                "--book: there is no built book; this package was made without one; leave out --book"
            )
        return tmp_path

    for folder in ("problems", "solutions"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(doctor.roots, "CHECKOUT", tmp_path)
    monkeypatch.setattr(doctor.workspace, "find_built_book", find_built_book)
    book = next(finding for finding in doctor.check_workbook() if finding.part == "book")
    assert (book.state, book.description) == ("note", "not built here")
    assert ("update --book" in book.remedy) == has_book
    assert has_book or book.remedy == "this package was made without one"
