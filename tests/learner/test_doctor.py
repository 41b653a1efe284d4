"""The doctor: what it finds on this machine, and what it says of a part that is missing or broken."""

import re
import tomllib

import pytest
from checkouts import ROOT

from harness.cli import main
from harness.console import listening
from harness.errors import BadUse
from harness.screens import doctor


def test_doctor_finds_this_machine_well(checkout):
    finished = checkout.run("doctor")
    assert finished.returncode == 0, finished.stdout
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
        assert re.search(rf"^[✅·] {re.escape(part)} ", finished.stdout, re.MULTILINE), part


def test_doctor_compares_versions_with_what_is_wanted(monkeypatch):
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [f"{name}{versions}" for name, versions in doctor.required_versions().items()] == lines
    monkeypatch.setattr(doctor, "required_versions", lambda: {"numpy": "==0.0.1", "no-such-thing": ">=3,<4"})
    by_part = {finding.part: finding for finding in doctor.packages()}
    assert by_part["numpy"].state == "broken" and "==0.0.1 is required" in by_part["numpy"].remedy
    assert by_part["no-such-thing"].state == "broken"
    assert by_part["no-such-thing"].words == "not installed, >=3,<4 is required"


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
def test_doctor_knows_ranges_of_versions(version, versions, allowed):
    assert doctor.satisfies(version, versions) is allowed


def test_doctor_exits_5_where_a_part_is_broken(monkeypatch, tmp_path, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(blocked / "cache"))
    assert main(["doctor"]) == 5
    assert "❌ caches" in capsys.readouterr().out.replace("workbook cache", "caches")


def test_doctor_goes_on_behind_a_check_that_fails(monkeypatch):
    def fails():
        raise RuntimeError("no luck")
        yield

    monkeypatch.setattr(doctor, "PARTS", {"one": fails, "two": doctor.python})
    told = []
    with listening(told.append):
        findings = list(doctor.findings())
    assert told == ["one", "two"], "what the moving line says"
    assert (findings[0].part, findings[0].state) == ("one", "broken") and "no luck" in findings[0].words
    assert findings[1].part == "Python"


@pytest.mark.parametrize("built", [True, False])
def test_doctor_advises_the_book_that_there_is(built, monkeypatch, tmp_path):
    """A wheel without a built book is not told to put one into the folder."""

    def built_book():
        if not built:
            raise BadUse(
                "--book: there is no built book; this package was made without one; leave out --book"
            )
        return tmp_path

    for folder in ("problems", "solutions"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(doctor.roots, "CHECKOUT", tmp_path)
    monkeypatch.setattr(doctor.workspace, "built_book", built_book)
    book = next(finding for finding in doctor.files() if finding.part == "book")
    assert (book.state, book.words) == ("note", "not built here")
    assert ("update --book" in book.remedy) == built
    assert built or book.remedy == "this package was made without one"
