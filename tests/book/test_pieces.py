"""The figures of the pages that stand by themselves: their data is what the checks say, and they work by mouse, keys and on a phone."""

import json
import math
import re

import pytest
import torch
from browser import PHONE, find_browser

from book.figures import gradcheck_matrix, worklog_results
from book.figures.bench_results import time_text
from book.measure import outputs, record, unlearning
from book.measure.gradient_edits import row
from book.measure.hunt_versions import versions
from harness.puzzles.p21.hunt import USUAL
from harness.puzzles.p27.autograd import Model
from harness.testing import TRIES

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)"
)
VERSIONS = {(version.gate, version.name): version for version in versions()}
SAMPLE = list(VERSIONS)[::6]
RECORDED = {(line["gate"], line["version"]): line for line in record.rows("gradient_edits")}
GRADCHECK = "essays/gradcheck_misses.html"


def test_the_record_has_every_version():
    assert RECORDED.keys() == VERSIONS.keys()
    assert all(RECORDED[key]["kind"] == version.kind for key, version in VERSIONS.items())


def check(key: tuple[str, str], folder) -> None:
    """Run all checks on a version again, and compare with the record."""
    found = row(VERSIONS[key], folder)
    expected = {name: RECORDED[key][name] for name in found}
    assert {name: str(value) for name, value in found.items()} == expected, key


@pytest.mark.parametrize("key", SAMPLE, ids=" ".join)
def test_a_recorded_verdict_is_what_the_checks_say(key, tmp_path):
    check(key, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("gate", dict.fromkeys(gate for gate, _ in VERSIONS))
def test_every_recorded_verdict_is_what_the_checks_say(gate, tmp_path):
    for key in [key for key in VERSIONS if key[0] == gate and key not in SAMPLE]:
        check(key, tmp_path)


def test_each_wrong_one_has_six_different_edits_and_one_of_them_is_the_solution():
    bugs = gradcheck_matrix.bugs()
    assert len(bugs) == 46 and not any(bug["right"] for bug in bugs)
    for bug in bugs:
        diffs = [json.dumps(edit["diff"]) for edit in bug["edits"]]
        assert len(set(diffs)) == len(diffs) == gradcheck_matrix.EDITS and "[]" not in diffs, bug["name"]
        assert any(edit["right"] for edit in bug["edits"]) and not all(edit["right"] for edit in bug["edits"])


def test_the_page_names_the_checks_that_there_are():
    assert tuple(USUAL) == gradcheck_matrix.USUAL
    assert len(TRIES) > 40, "as the page says"


def test_the_solution_is_right_and_the_kinds_cover_every_wrong_one():
    assert all(line["check_backward"] == "0" for line in gradcheck_matrix.rows("solution").values())
    assert gradcheck_matrix.kinds_table().count("\n") == len(gradcheck_matrix.KINDS) + 2


@needs_browser
def test_a_square_opens_its_bug_and_an_edit_says_what_the_checks_said(browser, site):
    browser.open(site / GRADCHECK)
    bugs = gradcheck_matrix.bugs()
    for number in (0, 7, 45):
        browser.run(f"document.querySelectorAll('.catches tbody tr')[{number}].cells[8].firstChild.click()")
        assert bugs[number]["name"] in browser.run("document.querySelector('.catches-dialog').innerText")
        for place, edit in enumerate(bugs[number]["edits"]):
            browser.run(f"document.querySelectorAll('.catches-edits button')[{place}].click()")
            verdict = browser.run("document.querySelector('.catches-verdict').innerText")
            assert verdict.startswith("Fixed." if edit["right"] else "Still wrong.")
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


# ---- A step that unlearns -----------------------------------------------------------------------------------

UNLEARNING = "essays/step_that_unlearns.html"


def test_the_run_of_the_picture_can_be_made_again():
    """Its first updates; all that comes later follows from them."""
    run = unlearning.Run(*unlearning.FOLLOWED)
    batches = run.batches()
    for _ in range(4):
        run.update(run.gradients(next(batches))[1])
    again = unlearning.Run(*unlearning.FOLLOWED)
    for batch, _ in zip(again.batches(), range(4), strict=False):
        loss, grads = again.gradients(batch)
        leaf = Model(recording=False).loss(batch[:, :-1], batch[:, 1:], again.p)
        assert loss == pytest.approx(float(leaf), abs=1e-5)
        again.update(grads)
    assert all(torch.equal(tensor, again.p[name]) for name, tensor in run.p.items()), (
        "the same seed, the same run"
    )


def test_its_update_is_pytorch_s_adamw():
    run = unlearning.Run("PyTorch", "small", 1, 3)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in run.p.items()}
    groups = [
        {"params": [leaf for leaf in leaves.values() if (leaf.dim() > 1) is matrices], "weight_decay": decay}
        for matrices, decay in ((True, unlearning.DECAY), (False, 0.0))
    ]
    optimiser = torch.optim.AdamW(groups, lr=unlearning.RATE, betas=unlearning.BETAS, eps=unlearning.EPS)
    for batch, _ in zip(run.batches(), range(3), strict=False):
        grads = run.gradients(batch)[1]
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        optimiser.step()
        run.update(grads)
        for name, leaf in leaves.items():
            torch.testing.assert_close(run.p[name], leaf.detach(), rtol=1e-4, atol=1e-6)


def test_the_picture_s_record_has_the_jump_and_the_turn():
    points = {float(line["place_updates"]): line for line in record.rows("unlearning_path")}
    before, after, back = (float(points[at]["loss"]) for at in (14.0, 15.0, 16.0))
    assert after > math.log(256) > before and abs(back - before) < 0.1
    assert float(points[14.0]["along_size"]) > 0 > float(points[15.0]["along_size"])


@needs_browser
def test_the_vector_moves_by_itself_by_keys_and_by_dragging(browser, site):
    browser.open(site / UNLEARNING)
    loss = "document.querySelector('[data-piece=unlearning]').dataset.loss"
    first = browser.run(loss)
    browser.wait_for(f"{loss} !== '{first}'")
    press = "[...document.querySelectorAll('.player-buttons button')].find(b => b.innerText === '{}').click()"
    browser.run(press.format("After it"))
    assert float(browser.run(loss)) == max(float(line["loss"]) for line in record.rows("unlearning_path"))
    browser.run("document.querySelector('.player input[type=range]').focus()")
    browser.press("ArrowRight")
    assert float(browser.run(loss)) < 8 and browser.run("location.pathname").endswith(UNLEARNING)
    browser.run(press.format("After it"))
    box = browser.run(
        "JSON.stringify(document.querySelector('.unlearning-plane .tip').getBoundingClientRect())"
    )
    tip = json.loads(box)
    x, y = tip["x"] + tip["width"] / 2, tip["y"] + tip["height"] / 2
    for kind, along in (("mousePressed", 0), ("mouseMoved", 60), ("mouseMoved", 120), ("mouseReleased", 120)):
        browser.call(
            "Input.dispatchMouseEvent", type=kind, x=x + along, y=y, button="left", buttons=1, clickCount=1
        )
    assert float(browser.run(loss)) < 8, "dragged away from the worst place"
    assert browser.errors == []


# ---- Make it fast, backwards too ----------------------------------------------------------------------------

WORKLOG = "puzzle_28/puzzle_28.html"


def test_a_worklog_s_table_has_the_recorded_counters_and_times():
    lines = worklog_results.step_table("rows").splitlines()
    (reported,) = re.findall(
        r"^   rows +sectors / fewest +(\S+) +(\S+) ", outputs.load("fast_steps").text, re.M
    )
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["sectors / fewest", *reported]
    assert time_text(worklog_results.median("solution", "rows")) in lines[3]
    assert len(worklog_results.all_steps().splitlines()) == 2 + 1 + 12


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [(21, 1, "21 times as fast"), (4, 2, "2.0 times as fast"), (100, 81, "19% less time"), (100, 101, "no change in time"), (100, 110, "10% more time")],
)  # fmt: skip
def test_a_change_of_a_time_in_words(before, after, words):
    assert worklog_results.change(before, after) == words


@needs_browser
def test_the_climb_moves_by_itself_and_stops_at_a_key(browser, site):
    browser.open(site / WORKLOG)
    step = "document.querySelector('[data-piece=climb]').dataset.step"
    first = browser.run(step)
    browser.wait_for(f"{step} !== '{first}'")
    browser.run("document.querySelector('.player input[type=range]').focus()")
    browser.press("End")
    status = browser.run("document.querySelector('.player [role=status]').textContent")
    assert browser.run(step) == "12" and time_text(worklog_results.passes()[-1]) in status
    assert browser.run("document.querySelectorAll('.climb-picture svg').length") == 1
    assert browser.run("location.pathname").endswith(WORKLOG) and browser.errors == []


@needs_browser
def test_each_step_has_a_picture_that_opens_on_its_last_frame(browser, site):
    browser.open(site / WORKLOG)
    assert browser.run("document.querySelectorAll('.hero').length") == 12
    assert browser.run(
        "[...document.querySelectorAll('.hero')].every(h => h.dataset.step === h.dataset.still && Number(h.dataset.still) < 16)"
    )


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [("rows", "{} × what was asked for", "{} × what was asked for"), ("once", "{} readings of", "{} reading;"),
     ("vectors", "{} requests", "{} request,"), ("registers", "multiply-add: {} bytes", "multiply-adds: {} bytes")],
)  # fmt: skip
def test_a_step_s_picture_counts_what_the_virtual_gpu_counted(step, before, after):
    picture = worklog_results.FILES[f"hero_worklog_{step}.html"]()
    _, given, own = worklog_results.counters(step)[0]
    assert before.format(given) in picture and after.format(own) in picture
