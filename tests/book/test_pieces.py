"""Interactive figures: their data is reproducible, and they work with mouse, keyboard and touch."""

import ast
import builtins
import itertools
import json
import math
import re
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from browser import DESKTOP, PHONE, find_browser

from book.figures import gradcheck_matrix, worklog_results
from book.figures.bench_results import time_text
from book.measure import hunt_versions, outputs, record, unlearning
from book.measure.gradcheck_calls import list_rejecting
from book.measure.gradient_edits import row
from book.measure.hunt_versions import versions
from book.measure.shared import import_cases
from harness.check.gradient_checks import gradcheck_float64
from harness.check.gradients import DTYPES
from harness.puzzles.p21.hunt import USUAL_CHECKS
from harness.puzzles.p27.autograd import Model
from harness.testing import CHECKS
from harness.testing.problem import make_problem
from harness.toolchain.roots import CHECKOUT

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)"
)
VERSIONS = {(version.gate, version.name): version for version in versions()}
SAMPLE = list(VERSIONS)[::6]
RECORDED = {(line["gate"], line["version"]): line for line in record.rows("gradient_edits")}
GRADCHECK = "essays/gradcheck_misses.html"
PRESS = (
    "[...document.querySelectorAll('.player-buttons button')].find(b => b.innerText.startsWith('{}')).click()"
)


def open_and_focus_player(browser, page, state: str) -> None:
    """Open a page, wait until its animation reaches another `state`, and focus the slider."""
    browser.open(page)
    first = browser.run(state)
    browser.wait_for(f"{state} !== '{first}'")
    browser.run("document.querySelector('.player input[type=range]').focus()")


def test_record_has_every_version():
    assert RECORDED.keys() == VERSIONS.keys()
    assert all(RECORDED[key]["kind"] == version.kind for key, version in VERSIONS.items())


def check_version(key: tuple[str, str], folder) -> None:
    """Check that a version has the recorded results."""
    measured = row(VERSIONS[key], folder)
    expected = {name: RECORDED[key][name] for name in measured}
    assert {name: str(value) for name, value in measured.items()} == expected, key


@pytest.mark.parametrize("key", SAMPLE, ids=" ".join)
def test_sampled_results_are_reproducible(key, tmp_path):
    check_version(key, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("gate", dict.fromkeys(gate for gate, _ in VERSIONS))
def test_all_recorded_results_are_reproducible(gate, tmp_path):
    for key in [key for key in VERSIONS if key[0] == gate and key not in SAMPLE]:
        check_version(key, tmp_path)


def test_each_bug_has_six_edits_including_the_solution():
    bugs = gradcheck_matrix.bugs()
    assert (len(gradcheck_matrix.reports()), len(bugs)) == (24, 70) and not any(bug["right"] for bug in bugs)
    assert len({bug["hidden"] for bug in bugs}) == len(bugs)
    for bug in bugs:
        lines = bug["code"].splitlines()
        assert not any(lines[line].strip() in ("", "@staticmethod") for line in bug["lines"]), bug["name"]
    for bug in [bug for bug in bugs if "report" not in bug]:
        diffs = [json.dumps(edit["diff"]) for edit in bug["edits"]]
        assert len(set(diffs)) == len(diffs) == gradcheck_matrix.EDITS and "[]" not in diffs, bug["name"]
        assert any(edit["right"] for edit in bug["edits"]) and not all(edit["right"] for edit in bug["edits"])


def test_page_names_the_existing_checks():
    assert tuple(USUAL_CHECKS) == gradcheck_matrix.USUAL
    page = (CHECKOUT / "book/src" / GRADCHECK).with_suffix(".md").read_text(encoding="utf-8")
    assert f"makes up to {len(CHECKS)} *checks*" in page


UNFIT = {
    "PaddedEmbedding corrected": {"gradcheck float64", "gradcheck float32", "random directions"},
    "EntropyOfRows corrected": {"opcheck"},
}
"""Checks that reject a correct function."""


def test_each_bug_is_compared_with_a_correct_function():
    rows = {line["version"]: line for line in record.rows("gradcheck_calls")}
    every = gradcheck_matrix.every()
    right = {line["right"] for line in every}
    assert rows.keys() == {*(line["version"] for line in every), *right}
    assert len([name for name in right if name.startswith("p21 ")]) == 13
    for name in right:
        rejecting = {check for check in USUAL_CHECKS if rows[name][check] == "1"}
        assert rejecting == UNFIT.get(name, set()) and not rows[name]["calls"], name
    for line in gradcheck_matrix.own():
        assert rows[line["version"]]["gradcheck float64"] == line["gradcheck float64"], line["version"]
    padded = next(line for line in every if line["version"] == "pytorch/pytorch#28716")
    assert gradcheck_matrix.state(padded, "gradcheck float64") == "unfit"


@pytest.mark.slow
def test_calls_accept_correct_functions_except_at_known_places():
    """A loss is one number, and slopes at 800 are inaccurate for squares."""
    cases, faults = import_cases("zoo_cases"), import_cases("faults")
    rejected = {}
    for case in [*cases.list_p21_solutions(), *faults.list_corrected()]:
        problem = make_problem(case.make(), case.reference, case.inputs, DTYPES, "cpu")
        if gradcheck_float64(problem) is None and (calls := list_rejecting(problem, problem.function)):
            rejected[case.name] = "; ".join(calls)
    of_one_number = "concatenated; transposed; many rows"
    losses = ("p21 crossentropy", "CrossEntropy corrected", "SummedEntropy corrected")
    others = {"EntropyOfRows corrected": "transposed", "Distances corrected": "edges"}
    assert rejected == dict.fromkeys(losses, of_one_number) | others


def test_reports_show_complete_code_and_a_correction():
    for name, report in hunt_versions.reports().items():
        module = ast.parse("\n".join([report["wrong"], *report["called"]]))
        (own,) = (node for node in module.body if isinstance(node, ast.ClassDef))
        methods = [node.name for node in own.body if isinstance(node, ast.FunctionDef)]
        assert methods == ["forward", "setup_context", "backward"], name
        known = {"torch", "F", "Function", "Tensor", "EPS", "ctx", *dir(builtins)}
        used = {
            node.id
            for node in ast.walk(module)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        stored = {
            node.id
            for node in ast.walk(module)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        arguments = {node.arg for node in ast.walk(module) if isinstance(node, ast.arg)}
        functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        assert used <= known | stored | arguments | functions, name
    assert all(bug["correction"] and bug["story"] for bug in gradcheck_matrix.bugs() if "report" in bug)


def test_code_of_the_page_runs_as_printed(capsys):
    """Run the page's blocks in one namespace, up to `check_backward`."""
    page = (CHECKOUT / "book/src" / GRADCHECK).with_suffix(".md").read_text(encoding="utf-8")
    namespace: dict = {}
    torch.manual_seed(0)
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[:-1]:
        exec(re.sub(r"\{\{#include \.\./\.\./(\S+):(\w+)\}\}", include_anchor, block), namespace)
    assert capsys.readouterr().out == outputs.load("friendly_call").text
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(namespace, "SiLU", type("Right", (), {"apply": F.silu}))
        exec(block_of("friendly_call", "others"), namespace)
    assert capsys.readouterr().out == "", "these calls accept a correct function"


def include_anchor(match: re.Match) -> str:
    """Return the part of a file that mdBook includes."""
    return block_of(match[1].partition("/")[2].removesuffix(".py"), match[2])


def block_of(example: str, anchor: str) -> str:
    """Return the code between the anchors of an example."""
    text = (CHECKOUT / f"book/examples/{example}.py").read_text(encoding="utf-8")
    return text.partition(f"# ANCHOR: {anchor}\n")[2].partition(f"# ANCHOR_END: {anchor}")[0]


def test_solution_passes_and_kinds_cover_all_bugs():
    assert all(line["check_backward"] == "0" for line in gradcheck_matrix.rows("solution").values())
    assert {
        gradcheck_matrix.kind_of(line) for line in gradcheck_matrix.every()
    } == gradcheck_matrix.KINDS.keys()


def test_columns_show_which_call_of_gradcheck_finds_which_bug():
    """Together they find what the record says, only where one call does not."""
    groups = gradcheck_matrix.GROUPS
    named = {name for line in record.rows("gradcheck_calls") for name in line["calls"].split("; ") if name}
    assert all(sum(name.startswith(tuple(begins)) for begins in groups.values()) == 1 for name in named)
    for line in gradcheck_matrix.every():
        states = {gradcheck_matrix.state(line, name) for name in groups}
        assert ("found" in states) == bool(gradcheck_matrix.calls_of(line["version"])["calls"]), line[
            "version"
        ]
        assert (states == {"untried"}) == (line["gradcheck float64"] == "1"), line["version"]


@needs_browser
def test_square_opens_its_bug_and_edit_shows_the_result(browser, site):
    browser.open(site / GRADCHECK)
    browser.run(PRESS.format("Show all 70"))
    bugs = gradcheck_matrix.bugs()
    is_visible = """(({top, bottom}) => top >= 0 && bottom <= innerHeight)(
        document.querySelector('.catches-verdict').getBoundingClientRect())"""
    numbers = [number for number, bug in enumerate(bugs) if bug["edits"] and bug["lines"]]
    own = gradcheck_matrix.CHECKS.index("check_backward") + 1
    for number, size in ((numbers[0], DESKTOP), (numbers[7], DESKTOP), (numbers[-1], PHONE)):
        browser.resize(size)
        row = f"document.querySelectorAll('.catches tbody tr:not(.kind)')[{number}]"
        _, _, mistake = bugs[number]["name"].partition(": ")
        assert mistake not in browser.run(f"{row}.innerText"), "it would give the bug away"
        browser.run(f"{row}.cells[{own}].firstChild.click()")
        dialog = browser.run("document.querySelector('.catches-dialog').innerText")
        assert bugs[number]["hidden"] in dialog and mistake not in dialog, "it would give the bug away"
        description = browser.run("document.querySelector('.catches-dialog > p').innerText")
        assert description == "check_backward finds this mistake."
        effect = "document.querySelector('.catches-edits > p').checkVisibility()"
        assert browser.run(effect) is False, "it would give the bug away"
        if number == numbers[0]:
            assert browser.run("document.activeElement.tagName") == "PRE"
        hint, choices = (
            f"document.querySelector('.catches-bug {part}')" for part in ("details", ".catches-choices")
        )
        assert browser.run(f"{hint}.open") is False and browser.run(f"{choices}.checkVisibility()") is False
        lines, skip = (
            "document.querySelectorAll('.catches-lines > code')",
            "document.querySelector('.catches-dialog > p button')",
        )
        ask = "document.querySelector('.catches-dialog strong[role=status]').innerText"
        browser.run(f"[...{lines}].find(line => line.innerText.includes('@staticmethod')).click()")
        assert browser.run(ask) == "Click on the line that is wrong."
        for line, answer in (
            (1, "No, not this line."),
            (1, "No, not this line."),
            (bugs[number]["lines"][0], "Yes: a correction changes"),
        ):
            assert browser.run(f"{skip}.checkVisibility()") is (answer[0] == "Y"), "after two guesses"
            browser.run(f"{lines}[{line}].click()")
            assert browser.run(ask).startswith(answer)
        assert browser.run(f"{choices}.checkVisibility()") is True
        assert browser.run(f"{lines}[0].checkVisibility()") is (size == DESKTOP), (
            "a phone shows the method alone"
        )
        assert browser.run(f"{lines}[{bugs[number]['lines'][0]}].checkVisibility()")
        for index, edit in enumerate(bugs[number]["edits"]):
            browser.run(f"document.querySelectorAll('.catches-choices button')[{index}].click()")
            message = browser.run("document.querySelector('.catches-verdict').innerText")
            wrong = "As PyTorch’s own dropout" if edit["stricter"] else "Still wrong."
            assert message.startswith("Fixed." if edit["right"] else wrong)
            assert (
                edit["said"] in " ".join(message.split()) and browser.run(is_visible) and browser.run(effect)
            )
        assert bugs[number]["name"] in browser.run("document.querySelector('.catches-dialog').innerText")
        assert bugs[number]["name"] in browser.run(f"{row}.innerText")
    assert browser.run("document.querySelector('[data-player=catches]').dataset.mended") == "3"
    assert browser.run("document.querySelector('.catches-said').innerText").endswith(" You have solved 3.")
    assert browser.run("document.querySelectorAll('.catches tr.mended').length") == 3
    assert browser.errors == []


@needs_browser
def test_matrix_works_by_keyboard(browser, site):
    browser.resize(PHONE)
    browser.open(site / GRADCHECK)
    message = browser.run("document.querySelector('.catches-said').innerText")
    assert message == "After all these calls of gradcheck, 8 of 39 are left."
    totals = browser.run("document.querySelector('.catches thead .total').innerText").split()
    assert totals[-1] == "39" and totals[-7:-1] == ["5", "11", "4", "4", "3", "6"], "check_backward finds all"
    fits = "document.querySelector('.catches').scrollWidth <= document.querySelector('.catches').closest('figure').clientWidth"
    assert browser.run(fits)
    browser.run("document.querySelector('.catches button').focus()")
    for key in ("ArrowDown", "ArrowRight"):
        browser.press(key)
    name = gradcheck_matrix.bugs()[1]["hidden"]
    label = browser.run("document.activeElement.getAttribute('aria-label')")
    assert label.startswith(name) and "square shapes" in label, "the first column that is shown"
    assert browser.run("location.pathname").endswith(GRADCHECK), "arrow keys do not turn the page"
    browser.run("document.activeElement.click()")
    assert browser.run("document.querySelector('.catches-dialog').open")
    browser.run("document.querySelector('.catches-dialog').close()")
    browser.run(PRESS.format("Show all 70"))
    assert browser.run(fits) and browser.errors == []


@needs_browser
def test_matrix_begins_with_what_gradcheck_does_not_find(browser, site):
    bugs, every = gradcheck_matrix.bugs(), gradcheck_matrix.every()
    accepted = [
        number for number, row in enumerate(every) if not gradcheck_matrix.finds(row, "gradcheck float64")
    ]
    browser.open(site / GRADCHECK)
    rows = "[...document.querySelectorAll('.catches tbody tr:not(.kind)')]"
    visible_rows = f"JSON.stringify({rows}.flatMap((row, i) => row.offsetParent ? [i] : []))"
    assert json.loads(browser.run(visible_rows)) == accepted
    checks = [
        name
        for name in gradcheck_matrix.CHECKS
        if any(gradcheck_matrix.finds(every[number], name) for number in accepted)
    ]
    heads = "JSON.stringify([...document.querySelectorAll('.catches thead span')].filter(head => head.offsetParent).map(head => head.innerText))"
    assert json.loads(browser.run(heads)) == checks and len(checks) == 10
    for part in ("thead .total", "tfoot"):
        totals = f"document.querySelector('.catches {part}').innerText.split(/\\s+/).join(' ')"
        assert browser.run(totals).startswith(f"finds, of {len(accepted)} 2 ")
    browser.run(PRESS.format("Let me try one"))
    names = [bugs[number]["name"] for number in accepted]
    assert browser.run("document.querySelector('[data-player=catches]').dataset.open") in names
    browser.run("document.querySelector('.catches-dialog').close()")
    above, below = next((a, b) for a, b in itertools.pairwise(accepted) if b > a + 1)
    browser.run(f"{rows}[{above}].cells[4].firstChild.focus()")
    browser.press("ArrowDown")
    name = bugs[below]["hidden"]
    assert browser.run("document.activeElement.getAttribute('aria-label')").startswith(name)
    browser.run("document.activeElement.click()")
    description = browser.run("document.querySelector('.catches-dialog > p').innerText")
    assert (
        description
        == f"square shapes {gradcheck_matrix.STATES[gradcheck_matrix.state(every[below], 'square shapes')].removesuffix(' it')} this mistake."
    )
    browser.run("document.querySelector('.catches-dialog').close()")
    browser.run(PRESS.format("Show all 70"))
    assert json.loads(browser.run(heads)) == [*gradcheck_matrix.CHECKS]
    totals = browser.run("document.querySelector('.catches tfoot').innerText").split()
    assert totals[:4] == ["finds,", "of", "70", "31"]
    assert len(json.loads(browser.run(visible_rows))) == len(bugs)
    browser.run(PRESS.format("Only"))
    assert json.loads(browser.run(visible_rows)) == accepted and browser.errors == []


@needs_browser
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_matrix_fills_once_when_it_comes_into_view(browser, site, size):
    """It begins and ends complete; nothing moves but the squares and their totals."""
    assert "to-come" not in gradcheck_matrix.matrix(), "without scripts it is complete"
    table, empty = (
        "document.querySelector('.catches')",
        "document.querySelectorAll('.catches .to-come').length",
    )
    totals, place = f"{table}.tFoot.innerText", f"JSON.stringify({table}.getBoundingClientRect())"
    watch = f"""(() => {{
        window.seen = [];
        new MutationObserver(() => {{
            const columns = [...{table}.tFoot.rows[0].cells].filter(cell => cell.cellIndex && cell.offsetParent);
            seen.push([{table}.offsetWidth, {table}.offsetHeight,
                ...columns.map(cell => {table}.querySelectorAll(`td.to-come:nth-child(${{cell.cellIndex + 1}})`).length)]);
        }}).observe({table}, {{ attributes: true, attributeFilter: ["class"], subtree: true }});
        {table}.scrollIntoView();
    }})()"""
    browser.resize(size)
    browser.open(site / GRADCHECK)
    complete = browser.run(totals)
    assert browser.run(empty) == 0 and complete.split()[-1] == "39"
    browser.run(watch)
    browser.wait_for(f"{empty} > 0")
    browser.wait_for(f"{empty} === 0")
    assert browser.run(totals) == complete
    frames = json.loads(browser.run("JSON.stringify(seen)"))
    assert len({tuple(frame[:2]) for frame in frames}) == 1 and len(frames) > 10
    assert sum(frames[0][2:]) > sum(frames[len(frames) // 2][2:]) > 0 == sum(frames[-1][2:])
    assert all(
        after == 39 for _, _, *empties in frames for before, after in itertools.pairwise(empties) if before
    ), "from the left"
    browser.run("scrollTo(0, 0)")
    browser.run(f"{table}.scrollIntoView()")
    browser.run("new Promise(done => setTimeout(done, 300))")
    assert browser.run(empty) == 0, "it plays once"
    browser.open(site / GRADCHECK)
    browser.run(f"{table}.scrollIntoView()")
    browser.wait_for(f"{empty} > 0")
    before = browser.run(place)
    browser.run("document.querySelector('.catches-said').click()")
    assert (browser.run(empty), browser.run(totals), browser.run(place)) == (0, complete, before)
    assert browser.errors == []


@needs_browser
def test_matrix_stays_complete_for_reduced_motion(browser, site):
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.call("Emulation.setEmulatedMedia", features=features)
    browser.open(site / GRADCHECK)
    browser.run("document.querySelector('.catches').scrollIntoView()")
    browser.run("new Promise(done => setTimeout(done, 300))")
    assert browser.run("document.querySelectorAll('.catches .to-come').length") == 0
    browser.call("Emulation.setEmulatedMedia", features=[])


@needs_browser
def test_report_hides_its_story_and_correction_until_the_right_click(browser, site):
    browser.open(site / GRADCHECK)
    place = "document.querySelector('[data-player=catches]')"
    solved = 0
    for number, bug in enumerate(gradcheck_matrix.bugs()):
        if "report" in bug:
            row = f"document.querySelectorAll('.catches tbody tr:not(.kind)')[{number}]"
            browser.run(f"{row}.cells[0].firstChild.click()")
            assert browser.run("document.querySelector('.catches-edits').innerText").strip() == ""
            title = bug["name"]
            assert title not in browser.run("document.querySelector('.catches-dialog').innerText")
            browser.run(f"document.querySelectorAll('.catches-lines > code')[{bug['lines'][0]}].click()")
            solved += 1
            assert browser.run(f"{place}.dataset.mended") == str(solved)
            text = " ".join(browser.run("document.querySelector('.catches-edits').innerText").split())
            assert bug["story"].replace("`", "") in text and f"{bug['report']}." in text
            assert all(" ".join(line.split()) in text for _, line in bug["correction"])
            assert bug["name"] in browser.run("document.querySelector('.catches-dialog').innerText")
    padded = next(
        number
        for number, row in enumerate(gradcheck_matrix.every())
        if row["version"] == "pytorch/pytorch#28716"
    )
    browser.run(
        f"document.querySelectorAll('.catches tbody tr:not(.kind)')[{padded}].cells[1].firstChild.click()"
    )
    description = browser.run("document.querySelector('.catches-dialog > p').innerText")
    assert description == "gradcheck float64 rejects the correct version too."
    for _ in range(2):
        browser.run("document.querySelector('.catches-lines > code').click()")
    browser.run("document.querySelector('.catches-dialog > p button').click()")
    assert browser.run("document.querySelector('.catches-edits .correction').checkVisibility()")
    assert browser.errors == []


def test_gradgradcheck_accepts_a_wrong_function_with_a_strided_gradient():
    """It compares derivatives of `backward` with slopes of `backward`."""
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    namespace: dict = {}
    exec(block_of("gradcheck_calls", "silu"), namespace)
    assert torch.autograd.gradgradcheck(namespace["SiLU"].apply, x, gen_non_contig_grad_outputs=True)
    strided = torch.testing.make_tensor(3, 5, dtype=x.dtype, device="cpu", noncontiguous=True)
    wrong, right = (torch.autograd.grad(f(x), x, strided)[0] for f in (namespace["SiLU"].apply, F.silu))
    assert (wrong - right).abs().max() > 0.1


def test_layout_figure_counts_what_a_kernel_reads():
    """Read memory as the kernel does."""
    gradient = torch.arange(1, 13).view(3, 4)
    after_cat = torch.cat((gradient, 0 * gradient[:, :2]), -1)[:, :4]
    for name, strided in (("torch.cat", after_cat), ("transpose", gradient.mT.contiguous().mT)):
        read = torch.as_strided(strided, (12,), (1,))
        assert gradcheck_matrix.LAYOUTS[name][1][:12] == read.tolist()
        right = int((read == gradient.flatten()).sum())
        assert f"reads {right} of the 12 elements correctly" in gradcheck_matrix.layout()
    assert torch.ones(()).expand(3, 4).untyped_storage().nbytes() == 4, "one number in memory"


# ---- A step that unlearns -----------------------------------------------------------------------------------

UNLEARNING = "essays/step_that_unlearns.html"


def test_followed_run_is_reproducible():
    """Compare only the first updates, which determine the others."""
    run = unlearning.Run(*unlearning.FOLLOWED)
    batches = run.batches()
    for _ in range(4):
        run.update(run.gradients(next(batches))[1])
    again = unlearning.Run(*unlearning.FOLLOWED)
    for batch, _ in zip(again.batches(), range(4), strict=False):
        loss, grads = again.gradients(batch)
        leaf = Model(records_parts=False).loss(batch[:, :-1], batch[:, 1:], again.p)
        assert loss == pytest.approx(float(leaf), abs=1e-5)
        again.update(grads)
    assert all(torch.equal(tensor, again.p[name]) for name, tensor in run.p.items()), (
        "runs with the same seed are equal"
    )


def test_update_matches_pytorch_adamw():
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


def test_path_record_has_the_jump_and_the_turn():
    points = {float(line["place_updates"]): line for line in record.rows("unlearning_path")}
    before, after, back = (float(points[at]["loss"]) for at in (14.0, 15.0, 16.0))
    assert after > math.log(256) > before and abs(back - before) < 0.1
    assert float(points[14.0]["along_size"]) > 0 > float(points[15.0]["along_size"])
    (row,) = (
        row
        for row in record.rows("unlearning_fractions")
        if (row["size"], row["seed"]) == ("small", "8") and row["warm_up"] == "1"
    )
    for name, at in (("before", 14.0), ("eighth", 14.125), ("half", 14.5), ("after", 15.0)):
        assert float(row[f"{name}_loss"]) == pytest.approx(float(points[at]["loss"]), abs=0.01)


@needs_browser
def test_vector_plays_and_moves_by_keys_and_dragging(browser, site):
    loss = "document.querySelector('[data-player=unlearning]').dataset.loss"
    open_and_focus_player(browser, site / UNLEARNING, loss)
    press = "[...document.querySelectorAll('.player-buttons button')].find(b => b.innerText === '{}').click()"
    browser.run(press.format("After 15"))
    assert float(browser.run(loss)) == max(float(line["loss"]) for line in record.rows("unlearning_path"))
    browser.press("ArrowRight")
    assert float(browser.run(loss)) < 8 and browser.run("location.pathname").endswith(UNLEARNING)
    browser.run(press.format("After 15"))

    def drag(selector: str, far: int) -> float:
        """Drag the middle of an element so many pixels to the right, and return the loss there."""
        place = f"document.querySelector('{selector}')"
        browser.run(f"{place}.scrollIntoView({{block: 'center'}})")
        box = json.loads(browser.run(f"JSON.stringify({place}.getBoundingClientRect())"))
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        for kind, at in (
            ("mousePressed", x),
            ("mouseMoved", x + far / 2),
            ("mouseMoved", x + far),
            ("mouseReleased", x + far),
        ):
            browser.call(
                "Input.dispatchMouseEvent", type=kind, x=at, y=y, button="left", buttons=1, clickCount=1
            )
        return float(browser.run(loss))

    losses = [drag(".unlearning-plane .tip", far) for far in (60, 60, -90)]
    assert 8 > losses[0] > losses[1] < losses[2], "dragged away from the worst place, further, and back"
    assert drag(".plane-first > svg:last-child .tip", 30) != losses[2], (
        "the dot on the loss can be dragged too"
    )
    assert browser.run("getSelection().toString()") == ""
    ring = browser.run("document.querySelector('.unlearning-plane .ring').getBBox().x")
    assert float(ring) >= 0 and browser.errors == []


@needs_browser
def test_vector_stops_at_the_question_its_answer_and_the_jump(browser, site):
    loss = "document.querySelector('[data-player=unlearning]').dataset.loss"
    drawn = "document.querySelector('[data-player=unlearning] .plane-first > svg:last-child polyline').points.length"
    points = record.rows("unlearning_path")
    initial, half = (float(row["loss"]) for row in points if row["place_updates"] in ("14.000", "14.375"))
    most, last = max(float(line["loss"]) for line in points), float(points[-1]["loss"])

    def press(words: str):
        browser.run(
            f"[...document.querySelectorAll('.player-buttons button')].find(b => b.innerText === '{words}').click()"
        )

    browser.open(site / UNLEARNING)
    browser.wait_for(f"{loss} === '{initial}'")
    assert browser.run(drawn) == 14 * unlearning.PARTS + 1, "the jump is not drawn before an answer"
    press("still 3.40")
    browser.wait_for(f"{loss} === '{half}'")
    message = browser.run("document.querySelector('[data-player=unlearning]').innerText")
    assert f"No: it is {half:.2f}." in message
    pressed = browser.run("document.querySelector('.player-buttons [aria-pressed=true]').innerText")
    assert pressed == "still 3.40"
    browser.run("new Promise(done => setTimeout(done, 400))")
    assert float(browser.run(loss)) == half, "it rests at the place of the question"
    press("Play")
    browser.wait_for(f"{loss} === '{most}'")
    browser.run("new Promise(done => setTimeout(done, 400))")
    assert float(browser.run(loss)) == most, "it does not play past the jump"
    press("Play")
    browser.wait_for(f"{loss} === '{last}'")
    assert browser.run(drawn) == len(points)
    assert browser.errors == []


@needs_browser
def test_scale_slider_shows_the_recorded_losses_and_shares(browser, site):
    browser.open(site / UNLEARNING)
    rows = record.rows("unlearning_scales")
    scales = "document.querySelector('[data-player=scales]')"
    browser.run(f"{scales}.querySelector('input').focus()")
    assert f"{float(rows[0]['loss']):.2f}" in browser.run(
        f"{scales}.querySelector('[role=status]').innerText"
    )
    browser.press("End")
    assert float(browser.run(f"{scales}.dataset.loss")) == float(rows[-1]["loss"]) > math.log(256)
    assert browser.run(f"{scales}.querySelectorAll('output')[0].innerText") == "<0.001%"
    assert float(rows[-1]["of_20"]) < 1e-5 and browser.errors == []


# ---- Make it fast, backwards too ----------------------------------------------------------------------------

WORKLOG = "puzzle_28/puzzle_28.html"


def test_worklog_table_has_the_recorded_counters_and_times():
    lines = worklog_results.step_table("rows").splitlines()
    (reported,) = re.findall(
        r"^   rows +sectors / fewest +(\S+) +(\S+) +(\S+) ", outputs.load("fast_steps").text, re.M
    )
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == [
        f"sectors moved, times the fewest possible (at most {reported[2]})",
        *reported[:2],
    ]
    assert time_text(worklog_results.median("solution", "rows")) in lines[3]
    assert len(worklog_results.all_steps().splitlines()) == 2 + 1 + 12


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [(21, 1, "21 times as fast"), (4, 2, "2.0 times as fast"), (100, 81, "19% less time"), (100, 101, "no change in time"), (100, 110, "10% more time")],
)  # fmt: skip
def test_time_changes_are_described_in_words(before, after, message):
    assert worklog_results.change(before, after) == message


@needs_browser
def test_climb_plays_and_stops_at_a_key(browser, site):
    step = "document.querySelector('[data-player=climb]').dataset.step"
    browser.open(site / WORKLOG)
    assert int(browser.run(step)) < 2
    height = browser.run("document.querySelector('[data-player=climb]').offsetHeight")
    browser.wait_for(f"{step} === '12'")
    assert browser.run("document.querySelector('[data-player=climb]').offsetHeight") == height
    browser.run("new Promise(done => setTimeout(done, 1500))")
    assert browser.run(step) == "12", "it plays once"
    browser.run("document.querySelector('[data-player=climb] button').click()")
    browser.wait_for(f"{step} !== '12'")
    browser.run("document.querySelector('.player input[type=range]').focus()")
    browser.press("End")
    status = browser.run("document.querySelector('.player [role=status]').textContent")
    assert browser.run(step) == "12" and time_text(worklog_results.passes()[-1]) in status
    assert browser.run("document.querySelectorAll('.climb-picture svg').length") == 1
    link = browser.run("document.querySelector('.climb-title').hash")
    assert browser.run(f"document.getElementById('{link[1:]}').textContent").startswith("12. ")
    assert browser.run("location.pathname").endswith(WORKLOG) and browser.errors == []


@needs_browser
def test_climb_opens_on_the_last_step_for_reduced_motion(browser, site):
    features = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.call("Emulation.setEmulatedMedia", features=features)
    browser.open(site / WORKLOG)
    assert browser.run("document.querySelector('[data-player=climb]').dataset.step") == "12"
    browser.call("Emulation.setEmulatedMedia", features=[])


@needs_browser
def test_step_pictures_open_on_the_code_before(browser, site):
    browser.open(site / WORKLOG)
    assert browser.run("document.querySelectorAll('.pair').length") == 12
    words = "[...document.querySelectorAll('.pair > div > div:first-child > p')].map(p => p.textContent.slice(0, 7))"
    assert json.loads(browser.run(f"JSON.stringify({words})")) == ["Before:"] * 12
    assert browser.run(
        "[...document.querySelectorAll('.hero')].every(h => h.dataset.step === '0' && Number(h.dataset.still) < 16)"
    )


@pytest.mark.parametrize("step", worklog_results.STEPS)
def test_step_picture_has_two_different_drawings(step):
    drawings = re.findall(r"<svg.*?</svg>", worklog_results.FILES[f"pair_worklog_{step}.html"]())
    before, after = ([element.attrib for element in ElementTree.fromstring(svg).iter()] for svg in drawings)
    assert len(before) > 5 and len(after) > 5 and before != after


@pytest.mark.parametrize(
    ("step", "before", "after"),
    [("rows", "{} × what was asked for", "{} × what was asked for"), ("once", "{} readings of", "{} reading;"),
     ("vectors", "{} requests", "{} request,"), ("registers", "multiply-add: {} bytes", "multiply-adds: {} bytes")],
)  # fmt: skip
def test_step_picture_matches_the_virtual_gpu_counters(step, before, after):
    picture = worklog_results.FILES[f"pair_worklog_{step}.html"]()
    _, initial, own, _ = worklog_results.counters(step)[0]
    assert before.format(initial) in picture and after.format(own) in picture
