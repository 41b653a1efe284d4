"""The figures of the pages that stand by themselves: their data is what the checks say, and they work by mouse, keys and on a phone."""

import json
import time

import pytest
from browser import PHONE, find_browser

from book.figures import gradcheck_matrix
from book.measure import record
from book.measure.gradient_edits import row, versions

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)"
)
VERSIONS = {(version.gate, version.name): version for version in versions()}
RECORDED = {(line["gate"], line["version"]): line for line in record.rows("gradient_edits")}
GRADCHECK = "essays/gradcheck_misses.html"


def test_the_record_has_every_version():
    assert RECORDED.keys() == VERSIONS.keys()
    assert all(RECORDED[key]["kind"] == version.kind for key, version in VERSIONS.items())


def check(key: tuple[str, str], folder) -> None:
    """Run all checks on a version again, and compare with the record."""
    found = row(VERSIONS[key], folder)
    assert {name: str(value) for name, value in found.items()} == {
        name: RECORDED[key][name] for name in found
    }


@pytest.mark.parametrize("key", list(VERSIONS)[::6], ids=" ".join)
def test_a_recorded_verdict_is_what_the_checks_say(key, tmp_path):
    check(key, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("key", VERSIONS, ids=" ".join)
def test_every_recorded_verdict_is_what_the_checks_say(key, tmp_path):
    check(key, tmp_path)


def test_each_wrong_one_has_six_different_edits_and_one_of_them_is_the_solution():
    bugs = gradcheck_matrix.bugs()
    assert len(bugs) == 46 and not any(bug["right"] for bug in bugs)
    for bug in bugs:
        diffs = [json.dumps(edit["diff"]) for edit in bug["edits"]]
        assert len(set(diffs)) == len(diffs) == gradcheck_matrix.EDITS and "[]" not in diffs, bug["name"]
        assert any(edit["right"] for edit in bug["edits"]) and not all(edit["right"] for edit in bug["edits"])


def test_the_solution_is_right_and_the_kinds_cover_every_wrong_one():
    assert all(line["check_backward"] == "0" for line in gradcheck_matrix.rows("solution").values())
    assert gradcheck_matrix.kinds_table().count("\n") == len(gradcheck_matrix.KINDS) + 2


@needs_browser
def test_a_square_opens_its_bug_and_an_edit_says_what_the_checks_said(browser, site):
    begun = time.monotonic()
    browser.open(site / GRADCHECK)
    assert time.monotonic() - begun < 2, "opens from disk in two seconds"
    bugs = gradcheck_matrix.bugs()
    for number in (0, 7, 45):
        browser.run(f"document.querySelectorAll('.catches tbody tr')[{number}].cells[8].firstChild.click()")
        assert bugs[number]["name"] in browser.run("document.querySelector('.catches-dialog').innerText")
        for place, edit in enumerate(bugs[number]["edits"]):
            browser.run(f"document.querySelectorAll('.catches-edits button')[{place}].click()")
            verdict = browser.run("document.querySelector('.catches-verdict').innerText")
            assert verdict.startswith("Mended." if edit["right"] else "Still wrong.")
            assert edit["said"] in " ".join(verdict.split())
    assert browser.run("document.querySelector('[data-piece=catches]').dataset.mended") == "3"
    assert browser.errors == []


@needs_browser
def test_the_matrix_moves_by_itself_and_works_by_keys(browser, site):
    browser.resize(PHONE)
    browser.open(site / GRADCHECK)
    browser.wait_for("document.querySelector('.catches').dataset.shown === '8'")
    assert (
        browser.run("document.querySelector('.catches-said').innerText") == "check_backward finds 46 of 46."
    )
    fits = "document.querySelector('.catches').scrollWidth <= document.querySelector('.catches').closest('figure').clientWidth"
    assert browser.run(fits)
    browser.run("document.querySelector('.catches button').focus()")
    for key in ("ArrowDown", "ArrowRight"):
        browser.press(key)
    name = gradcheck_matrix.bugs()[1]["name"]
    assert browser.run("document.activeElement.getAttribute('aria-label')").startswith(name)
    assert browser.run("location.pathname").endswith(GRADCHECK), "the arrow keys turn no page"
    browser.run("document.activeElement.click()")
    assert browser.run("document.querySelector('.catches-dialog').open")
    assert browser.errors == []
