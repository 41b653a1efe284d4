"""`--show` of a toy puzzle's wrong kernel: the text in the terminal, the page in a browser, and errors."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest

from harness.check.picture import Picture, make_picture
from harness.devices.recorder import RecordRequest, record_many
from harness.errors import UsageError
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.screens import picture_page, show, story
from harness.spec.catalogue import find_puzzle
from harness.spec.rungs import NumpyRung
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("toys", "book")]
import checkout as toys  # noqa: E402
from browser import DESKTOP, PHONE  # noqa: E402
from checkout import run_merged  # noqa: E402

FILE = "p90/op/square.mojo"
RIGHT, WRONG = "var value = x[from_row, c]", "var value = x[row, c]"


def solve(folder: Path, old: str = "", new: str = "", **bodies: str) -> None:
    """Fill all blanks with the solution after an edit, or some blanks with `bodies`."""
    solution = (folder / "solutions" / FILE).read_text()
    text = blanks.fill_blanks(blanks.make_skeleton(solution), solution.replace(old, new) if old else solution)
    if bodies:
        segments = blanks.split_blanks(blanks.make_skeleton(solution))
        text = blanks.join_segments(segments, {id: tuple(body.splitlines()) for id, body in bodies.items()})
    (folder / "problems" / FILE).write_text(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkout with the toys in which p90's first blank reads the wrong row."""
    checkout = tmp_path_factory.mktemp("checkout")
    toys.create(checkout)
    with toys.enter(checkout):
        solve(checkout, RIGHT, WRONG)
        yield checkout


@pytest.fixture(scope="module")
def kernels_in_cache(folder) -> None:
    """Record the learner's and the solution's kernels together into the cache."""
    puzzle = find_puzzle("p90")
    dims = tuple(dict.fromkeys(case.dims for case in puzzle.list_cases(None)))
    packages = (
        Exercise(puzzle, puzzle.find_rung("mojo")).package,
        roots.make_op_package(roots.get_solutions(), "p90"),
    )
    record_many([RecordRequest(package, "p90", dims, ("plain",), small_grid=True) for package in packages])


@pytest.fixture(scope="module")
def picture(kernels_in_cache) -> Picture:
    """Picture of the wrong gate."""
    puzzle = find_puzzle("p90")
    return make_picture(puzzle, Exercise(puzzle, puzzle.find_rung("mojo")).package, puzzle.gates[0])


@pytest.mark.compiles
def test_show_prints_element_thread_line_and_expected_reads(kernels_in_cache, folder, tmp_path):
    puzzle = find_puzzle("p90")
    arrays = puzzle.make_inputs(puzzle.list_cases(None)[0], "float32", 0)
    row = next(r for r in range(4) if arrays["order"][r] != r and arrays["mask"][r])
    page = tmp_path / "page.html"
    code, output = run_merged("p90", "--show", "square", "--html", page)
    assert code == 1
    got = 0.5 * arrays["input"][row, 0] ** 2
    expected = 0.5 * arrays["input"][arrays["order"][row], 0] ** 2
    assert f"output[{row}, 0] is {got:.6g}, expected {expected:.6g}" in output
    assert f"square, block {row}, thread 0 writes {got:.6g} into output[{row}, 0]" in output
    assert f"it reads input[{row}, 0], which the solution's thread does not" in output
    assert f"it never reads input[{arrays['order'][row]}, 0]" in output
    number = (folder / "problems" / FILE).read_text().splitlines().index(f"        {WRONG}.cast[accum]()") + 1
    assert f"square.mojo:{number}   {WRONG}" in output
    assert str(page) in output and page.read_text().startswith("<!doctype html>")


@pytest.mark.compiles
def test_first_failing_gate_is_shown_and_page_is_written(kernels_in_cache):
    code, output = run_merged("p90", "--show")
    assert code == 1 and "p90 · square" in output
    assert re.search(r"step by step, in a browser: \S+pictures/p90_square.html", output)


@pytest.mark.compiles
def test_correct_gate_is_reported(kernels_in_cache):
    code, output = run_merged("p90", "--show", "dsquare")
    assert code == 0 and "dsquare is correct" in output


@pytest.mark.compiles
def test_page_data_is_json(kernels_in_cache):
    code, out, err = toys.run(["p90", "--show", "square", "--json", "-"])
    data = json.loads(out)
    assert "p90 · square" in err
    assert code == 1 and data["title"] == "p90 · square" and not data["right"]
    learner_launches, expected = data["runs"]
    launch = learner_launches[data["followed"][0]]
    names = [tensor["name"] for tensor in data["tensors"]]
    step = next(s for s in launch["steps"] if s and s[0] == "W" and names[s[1]] == "output")
    assert len(launch["b"]) == len(launch["t"]) == len(launch["e"]) == len(launch["v"])
    assert launch["e"][step[3] : step[3] + step[4]] == [*range(32)], "8 columns of 4 rows, in one step"
    assert len(expected) == len(learner_launches) and all(
        s is None or s[2] == -1 for s in expected[0]["steps"]
    ), "without source lines"


@pytest.mark.compiles
def test_cells_show_differing_reads(picture):
    cells = picture_page.classify_cells(picture, picture.thread, "square")
    row, element = picture.thread.block, picture.root_cause.missing[0].index
    assert cells["input"] == {row * 8: "extra", element: "missing"}
    assert cells["output"] == {row * 8: "target"}


@pytest.mark.compiles
def test_long_page_is_limited_to_one_block(picture, monkeypatch):
    monkeypatch.setattr(picture_page, "MAX_ACCESSES", 40)
    data = picture_page.make_data(picture)
    launch = data["runs"][0][data["followed"][0]]
    assert set(launch["b"]) == {picture.thread.block} and len(launch["b"]) <= 40
    total = len(picture.learner.accesses.launches[data["followed"][0]].events.block)
    assert launch["cut"] == (
        f"{len(launch['b'])} of {total} accesses of this launch, those of block ({picture.thread.block}, 0, 0), are drawn"
    )


@pytest.mark.compiles
def test_omitted_accesses_are_reported(picture):
    launch = picture.learner.accesses.launches[0]
    changed = dataclasses.replace(launch.events, dropped=7)
    assert picture_page.select_accesses(dataclasses.replace(launch, events=changed), 0)[1].startswith(
        f"{len(changed.block)} of {len(changed.block) + 7} accesses"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("p90", "--show", "cube"), 2, "--show cube: unknown gate 'cube'; there is square, dsquare"),
        (("p91", "--show"), 2, "unrecognized arguments: --show"),
        (("p90", "--show", "--dims", "80", "80"), 2, "has 6,400 elements, 4,096 can be drawn"),
        (("p90", "--show", "--device", "gpu"), 2, "pictures are made on the virtual GPU"),
        (("p90", "--html", "x.html"), 2, "--html: only --show writes a page"),
        (("p90", "--show", "--html", "no/x.html"), 2, "--html no/x.html: No such file or directory"),
        (("p90", "--show", "--gate", "none"), 2, "unknown gate"),
    ],
)
def test_errors_are_one_line(folder, arguments, code, message):
    got, output = run_merged(*arguments)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert got == code and len(errors) == 1 and message in errors[0]


def test_untouched_blank_is_reported(folder):
    try:
        solve(folder, dsquare="    pass")
        code, output = run_merged("p90", "--show", "square")
        assert (
            code == 3
            and "error: --show square: nothing to show yet: the blank at problems/p90/op/square.mojo:"
            in output
        )
        solve(folder, square="")
        code, output = run_merged("p90", "--show")
        assert code == 3 and "no blank of problems/p90/op/square.mojo has been attempted" in output
    finally:
        solve(folder, RIGHT, WRONG)


def test_gate_without_a_kernel_is_rejected(folder):
    toy = find_puzzle("p90")
    numpy_gate = dataclasses.replace(toy.gates[0], id="sums", variant="")
    numpy = NumpyRung(file="in_numpy.py", gates=("sums",), returns={"sums": ("output",)})
    puzzle = dataclasses.replace(toy, gates=(*toy.gates, numpy_gate), rungs=(numpy, *toy.rungs))
    with pytest.raises(
        UsageError, match=r"--show sums: a gate of the NumPy rung, which has no kernel; there is square"
    ):
        show.find_kernel_gate(puzzle, "sums")


@pytest.fixture
def page(browser_process, picture, tmp_path):
    """The page in a browser at desktop width."""
    file = tmp_path / "page.html"
    file.write_text(picture_page.render_page(picture))
    browser_process.resize(DESKTOP)
    browser_process.errors.clear()
    browser_process.requests.clear()
    browser_process.open(file)
    yield browser_process
    assert browser_process.errors == []
    assert [url for url in browser_process.requests if not url.startswith(("file:", "data:"))] == []


def text(browser, id: str) -> str:
    """Return an element's text."""
    return browser.run(f"document.getElementById('{id}').textContent")


@pytest.mark.compiles
def test_page_opens_at_the_wrong_access(page, picture):
    line = picture.line
    assert text(page, "head").startswith(f"square.mojo:{line.number} (blank square)")
    assert WRONG in page.run("document.querySelector('#source .here').textContent")
    first = page.run("document.querySelector('#story li').textContent")
    assert first == story.tell_story(picture)[0].text
    assert page.run("document.querySelectorAll('.grid i.missing').length") == 1
    assert page.run("document.querySelectorAll('.grid i.target').length") == 1


@pytest.mark.compiles
def test_keys_step_and_notify_screen_readers(page):
    page.press("Home")
    assert text(page, "count").startswith("1 /") and text(page, "live").startswith("Step 1 of ")
    before = text(page, "now")
    page.press("ArrowRight")
    assert text(page, "count").startswith("2 /") and text(page, "now") != before
    assert page.run("document.getElementById('slider').getAttribute('aria-valuetext')") == text(page, "now")
    page.press("ArrowLeft")
    assert text(page, "now") == before
    page.press("End")
    steps = text(page, "count").split(" / ")
    assert steps[0] == steps[1]
    page.press("]")
    assert page.run("document.querySelectorAll('#launches button')[1].getAttribute('aria-pressed')") == "true"
    page.press("n")
    assert page.run("[...document.querySelectorAll('.grid')].every(g => g.getAttribute('aria-label'))")


@pytest.mark.compiles
def test_all_threads_and_solution_are_shown(page):
    num_cells = page.run("document.querySelectorAll('.grid i.W, .grid i.R').length")
    page.press("a")
    assert "all threads" in text(page, "whose") and page.run(
        "document.querySelectorAll('.grid i.W, .grid i.R').length"
    ) > max(num_cells, 1)
    grids = page.run("document.querySelectorAll('.grid').length")
    page.press("s")
    assert page.run("document.querySelectorAll('.grid').length") == 2 * grids
    assert "solution" in text(page, "grids")


@pytest.mark.compiles
def test_element_lists_its_accesses(page, picture):
    page.run("document.querySelector('.grid i.target').click()")
    assert text(page, "caption").startswith(
        f"Who touches output[{picture.thread.block}, 0] in this launch: 1 access"
    )
    assert f"block {picture.thread.block}, thread 0" in text(page, "rows")
    page.press("Escape")
    assert not text(page, "caption").startswith("Who")


@pytest.mark.compiles
@pytest.mark.parametrize(("size", "theme"), [(DESKTOP, "light"), (PHONE, "dark")], ids=["desktop", "phone"])
def test_page_fits_two_widths_and_themes(page, size, theme):
    page.resize(size)
    page.run(f"document.documentElement.dataset.theme = '{theme}'")
    assert page.run("document.documentElement.scrollWidth <= window.innerWidth"), (
        "wide content scrolls in its container"
    )
    small = page.run(
        "[...document.querySelectorAll('.transport button')].filter(b => b.offsetWidth < 44 || b.offsetHeight < 44).length"
    )
    assert small == 0, "touch targets need 44 pixels"
    ratios = page.run(CONTRAST)
    assert len(ratios) == 13
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


@pytest.mark.compiles
def test_swipe_steps(page):
    page.resize(PHONE)
    page.press("Home")
    page.run(
        "(() => { const g = document.getElementById('grids'), touch = x => new Touch({identifier: 1, target: g, clientX: x, clientY: 9});"
        " g.dispatchEvent(new TouchEvent('touchstart', {touches: [touch(300)]}));"
        " g.dispatchEvent(new TouchEvent('touchend', {changedTouches: [touch(200)]})); })()"
    )
    assert text(page, "count").startswith("2 /")


@pytest.mark.compiles
def test_focus_is_visible(page):
    page.press("Tab")
    assert page.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.run("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2


@pytest.mark.compiles
def test_story_is_readable_without_javascript(browser_process, picture, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(picture_page.render_page(picture))
    browser_process.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser_process.open(file)
    finally:
        browser_process.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser_process.run("document.getElementById('story').offsetHeight > 0")
    assert browser_process.run("document.querySelector('.transport').offsetHeight") == 0


CONTRAST = """(() => {
    const rgb = text => text.match(/[\\d.]+/g).map(Number);
    const light = c => { const [r, g, b] = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const back = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3]) return c; } return [255, 255, 255]; };
    const out = {};
    for (const name of ['h1', '.badge', 'header p', '#story li', '#story code', '#story code b', 'figcaption', 'figcaption span', '.chip', '.now', '.count', '.note', '.legend']) {
        const e = document.querySelector(name); if (!e) continue;
        const [a, b] = [light(rgb(getComputedStyle(e).color).slice(0, 3)), light(back(e).slice(0, 3))].sort((x, y) => y - x);
        out[name] = (a + 0.05) / (b + 0.05);
    }
    return out;
})()"""
