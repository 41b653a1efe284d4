"""The drawings in steps: they show what the runs say, keys and fingers move them, and without scripts one step stands still."""

import json
import math
import re
from itertools import permutations

import numpy as np
import pytest
from book_paths import BOOK
from browser import PHONE, find_browser

from book.figures import attention_heroes, heroes, online_steps, tape_figures
from book.measure import outputs
from harness.puzzles.p24 import orders
from harness.puzzles.p24.counting import count

PLACES = {
    "barrier": "puzzle_19/puzzle_19.html",
    "clock": "puzzle_19/each_alone.html",
    "graph": "puzzle_20/puzzle_20.html",
    "graph_of_product": "puzzle_20/graph.html",
    "checks": "puzzle_21/puzzle_21.html",
    "printed": "puzzle_22/puzzle_22.html",
    "one_row": "puzzle_23/puzzle_23.html",
    "tiles": "essays/flash_attention_backward.html",
    "reads": "puzzle_24/puzzle_24.html",
    "walk": "puzzle_24/curve.html",
    "ring_steps": "puzzle_25/puzzle_25.html",
    "rewriting": "puzzle_26/puzzle_26.html",
    "swapping": "puzzle_26/real_one.html",
    "tape_steps": "puzzle_27/tape.html",
    "writes": "puzzle_27/puzzle_27.html",
}
needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)"
)


def words(name: str) -> list[str]:
    return re.findall(r"<li>(.*?)</li>", heroes.HEROES[name]())


def test_every_hero_has_its_page():
    assert set(PLACES) == set(heroes.HEROES)
    for name, page in PLACES.items():
        assert f"hero_{name}.html" in (BOOK / "src" / page).with_suffix(".md").read_text(), name


@pytest.mark.parametrize("name", heroes.HEROES)
def test_a_hero_is_complete_without_scripts(name):
    """One step is visible, the words of all stand below, and no part is shown at a step that there is not."""
    drawing = heroes.HEROES[name]()
    groups = re.findall(r'data-from="(\d+)" data-to="(\d+)" visibility="(\w+)"', drawing)
    count = len(words(name))
    assert {"visible", "hidden"} == {shown for *_, shown in groups}
    assert all(0 <= int(first) <= int(last) < count for first, last, _ in groups)
    assert drawing.count("\n") == 1, "a page includes it as one line"


def test_without_a_barrier_half_of_the_numbers_are_wrong_in_every_order_and_with_it_none():
    """As the page says; and the recorded runs: one race more, and the same numbers."""
    others = heroes.opposite()
    assert others == [3, 2, 1, 0]
    for order in permutations(range(4)):
        bare, held = heroes.arrivals(order, others)
        assert bare[-1].count("wrong") == 2 and held[-1] == ["right"] * 4 and len(bare) == len(held) == 9
        assert all("right" not in states for states in held[:-1]), "nobody passes before the last has arrived"
    race, mended = outputs.load("mirrored_race").text, outputs.load("mirrored_mended").text
    assert race.count("32 of 32 are right") == mended.count("32 of 32 are right") == 4
    assert "shared race" in race and "0 errors" in mended and len(words("barrier")) == 9


def test_the_clock_has_the_virtual_gpu_s_sectors():
    text = outputs.load("profile").text
    assert re.search(r"row_statistics .* 16\.0 +\d+$", text, re.M) and heroes.sectors("row_statistics") == 16
    assert heroes.sectors("layernorm") == 1 and len(words("clock")) == 17


def test_the_walk_over_the_graph_has_the_slope_of_its_function():
    slope = (6 * 2.0 + 6) * 1.0  # of 3 (x^2 + 2x) at 2
    assert (
        f"Added up they are {slope:g}" in words("graph")[-1]
        and "only the last to come survives: 12." in words("graph")[-2]
    )
    assert len(words("graph")) == 5 + 4 + 2
    product = 3 * 3 * 2.0 * 2.0**2  # 6 x^3, at 2
    assert f"Added up they are {product:g}" in words("graph_of_product")[-1]


def test_the_cells_are_the_matrix_s():
    text = outputs.load("hunt_matrix").text
    totals = {name: int(checks) for name, checks in re.findall(r"^(.+): sees (\d+) of 46$", text, re.M)}
    bugs, matrix = heroes.seen_by_checks()
    assert len(bugs) == 46 and bugs[0] == "addbias first rows" and all(bug in heroes.checks() for bug in bugs)
    assert {name: sum(checks) for name, checks in matrix.items()} == totals and len(totals) == 7
    unseen = sum("seen" not in line for line in text.splitlines() if "·" in line)
    assert words("checks")[-1].endswith(f"{unseen} of 46 go through every one of them.")


def test_the_gradient_by_differences_is_the_formula_s_and_the_printed_one_is_not():
    x = np.array([0.5, -1.2, 2.0, 0.3])
    g, n = np.array([1.0, -2.0, 0.5, 3.0]), 4
    rstd = 1 / np.sqrt(x.var() + 1e-5)
    x_hat = (x - x.mean()) * rstd
    J = heroes.slopes(heroes.x_hat, x, 1e-4)
    np.testing.assert_allclose(J.T @ g, rstd * (g - g.mean() - x_hat * (g * x_hat).mean()), atol=1e-7)
    np.testing.assert_allclose(np.diag(J), rstd * (1 - 1 / n - x_hat**2 / n), atol=1e-7)
    assert "adds up to 0." in words("printed")[-1] and "adds up to 0." not in words("printed")[-2]
    assert heroes.printed().count('stroke-width="3"') == 2, "the two of which the sentence speaks"


def test_the_swap_begins_and_ends_with_the_recorded_graphs():
    drawing = heroes.swapping()
    groups = re.findall(r'data-from="(\d+)" data-to="(\d+)" visibility="\w+">(.*?)</g>', drawing)

    def named(step: int) -> list[str]:
        parts = [part for first, last, part in groups if int(first) <= step <= int(last)]
        return sorted(name for part in parts for name in re.findall(r">([\w.]+)</text>", part))

    for step, graph in ((0, 0), (len(words("swapping")) - 1, 1)):
        nodes = [
            name.removesuffix("_default").removesuffix("_1")
            for name, *_ in heroes.printed_graphs(heroes.SWAP)[graph]
        ]
        assert named(step) == sorted(nodes), step
    assert "layer_norm" in named(6) and "getitem" in named(5) and "getitem" not in named(4)


def test_the_ring_ends_with_one_device_s_output_and_gradients():
    errors, where, backward, back_errors = attention_heroes.ring_run()
    assert min(errors[:-1]) > 0.1 and errors[-1] < 1e-12
    assert min(back_errors[:-2]) > 0.1 and max(back_errors[-2:]) < 1e-12
    assert where[1] == [3, 0, 1, 2], "the block of the rank before"
    assert all(sorted(parts) == [0, 1, 2, 3] for parts in backward[-1])
    assert backward[-1][0] == backward[-2][3], "the last transfer brings the sum of rank 0 from rank 3"


def test_a_tile_s_weights_are_the_softmax_s_and_its_owner_s_sum_ends_exact():
    exact = attention_heroes.head()["probabilities"]
    walk = list(attention_heroes.tiles_walk())
    assert len(walk) == 32
    for what, s, t, weights, error in walk:
        np.testing.assert_allclose(weights, exact[s : s + 2, t : t + 2], atol=1e-6)
        ends = t == 6 if what == "dQ" else s == 6
        assert (error < 1e-5) >= ends, (what, s, t, error)
    assert max(error for *_, error in walk) > 0.1


def test_the_row_is_attention_s_by_its_definition():
    """Each row of numbers follows from those before it."""
    of, s = attention_heroes.head(), attention_heroes.QUERY
    scores = of["query"][s] @ of["key"].T / np.sqrt(of["key"].shape[1]) + online_steps.arrays()["mask"][s]
    weights = np.exp(scores - scores.max())
    np.testing.assert_allclose(of["probabilities"][s], weights / weights.sum(), atol=1e-6)
    P, dP = of["probabilities"][s], of["value"] @ of["grad_output"][s]
    dS = P * (dP - P @ dP)
    np.testing.assert_allclose(of["grad_probabilities"][s], dP, rtol=1e-5)
    np.testing.assert_allclose(of["grad_scores"][s], dS, atol=1e-5)
    np.testing.assert_allclose(of["grad_query"][s], dS @ of["key"] / np.sqrt(of["key"].shape[1]), atol=1e-5)
    assert all(
        f">{round(float(value), 2) + 0.0:.2f}<".replace("-", "−") in attention_heroes.one_row()
        for value in (*P, *dP, *dS)
    )
    assert f"delta, {P @ dP:.2f}" in words("one_row")[4] and words("one_row")[5].endswith("the sum is 0.")


def test_the_tiles_that_are_read_are_those_that_the_puzzle_counts():
    totals = [count(orders.ORDERS[name](32, 32), 32, 4, 16).pairs for name in ("row-major", "hilbert")]
    assert f"So far {totals[0]} and {totals[1]} tiles" in words("reads")[-1] and len(words("reads")) == 64
    cells = np.array([0, 1, 2, 5, 9])
    path = "M0 0h6v2H0zM2 2h2v2H2zM2 4h2v2H2z"  # of a grid of 4 x 4 cells, 2 pixels each
    assert attention_heroes.runs(cells, 4, 2, 0, 0) == path


def test_the_walk_ends_in_a_square_patch():
    """And the rectangles in between are as large as the page says."""
    assert "2 x 8 row by row, and 4 x 4 along the curve" in words("walk")[-1]
    walked = [re.findall(r"(\d+) x (\d+)", said) for said in words("walk")[15:]]
    assert [max(int(a) * int(b) for a, b in side) for side in zip(*walked, strict=True)] == [3 * 8, 7 * 4]


def test_the_rewrite_is_the_printed_one():
    before, after = heroes.printed_graphs("gelu: with x**3")
    assert [name for name, *_ in after] == ["x", "gelu", "output"] and len(before) == 10
    x = heroes.AT
    gelu = x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert heroes.values_at(before, x)["output"] == pytest.approx(gelu, rel=1e-9)
    assert words("rewriting")[-1].endswith(f"What comes out is still {gelu:.4f}.")
    told = " ".join(words("rewriting"))
    assert all(name in told for name, _, _, sign in before if sign == "-")


def test_the_pile_is_the_recorded_tape():
    run, told = tape_figures.live(), words("tape_steps")
    assert len(run) == len(told) == 14
    assert all(f"{held:g} KiB" in said for (_, held), said in zip(run, told, strict=True))
    assert "peak" in told[6] and run[6][0] == "loss"


@needs_browser
@pytest.mark.parametrize("name", PLACES)
def test_keys_move_a_hero_and_stay_in_the_chapter(browser, site, name):
    browser.open(site / PLACES[name])
    place = browser.run("location.href")
    hero = "document.querySelector('.hero')"
    browser.run(f"{hero}.closest('details')?.setAttribute('open', '')")  # puzzle 21's waits for a prediction
    browser.run(f"{hero}.focus()")
    assert browser.run(f"{hero}.dataset.step") == "0"
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run(f"{hero}.dataset.step === {hero}.dataset.still"), "paper has its still"
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    assert browser.run(f"{hero}.dataset.step") == "0"
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.run("location.href") == place and browser.run(f"{hero}.dataset.step") == "2"
    said = browser.run(f"{hero}.querySelector('[aria-live=polite]').textContent")
    assert said == f"3 of {len(words(name))}. " + browser.run(
        f"{hero}.querySelectorAll('.hero-steps > li')[2].textContent"
    )
    shown = f"""[...{hero}.querySelectorAll('[data-from]')].every(g => (g.getAttribute('visibility') === 'visible') ===
        (g.dataset.from <= 2 && 2 <= g.dataset.to))"""
    assert browser.run(shown)
    browser.run(f"{hero}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'End', bubbles: true}}))")
    assert browser.run(f"{hero}.querySelectorAll('button')[2].disabled")
    browser.run(f"{hero}.querySelectorAll('button')[1].click()")
    assert browser.run(f"{hero}.dataset.step") == str(len(words(name)) - 2)
    slider = f"{hero}.querySelector('input')"
    assert browser.run(f"{slider} !== null") == (len(words(name)) > 8)
    if len(words(name)) > 8:
        browser.run(f"(() => {{ const s = {slider}; s.value = 1; s.dispatchEvent(new Event('input')); }})()")
        assert browser.run(f"{hero}.dataset.step") == "1"
    assert browser.errors == []


@needs_browser
@pytest.mark.parametrize("name", PLACES)
def test_a_hero_fits_a_phone_whole(browser, site, name):
    browser.resize(PHONE)
    browser.open(site / PLACES[name])
    assert json.loads(
        browser.run(
            "JSON.stringify([...document.querySelectorAll('.hero, .hero *')].map(e => e.getBoundingClientRect().right)"
            ".filter(right => right > document.documentElement.clientWidth + 1))"
        )
    ) == []  # fmt: skip


@needs_browser
def test_the_online_softmax_stands_before_the_solution_and_its_keys_stay(browser, site):
    browser.open(site / "puzzle_23/flash_attention.html")
    stepper = "document.querySelector('.stepper')"
    assert browser.run(f"{stepper}.closest('details') === null && {stepper}.offsetParent !== null")
    assert browser.run(f"{stepper}.querySelector('pre').closest('details.solution-details') !== null")
    place = browser.run("location.href")
    browser.run(f"{stepper}.focus()")
    browser.press("ArrowRight")
    assert browser.run("location.href") == place
    assert (
        browser.run(f"{stepper}.querySelector('[aria-live=polite]').textContent") == "2 of 5. Keys 2 and 3."
    )


def test_of_six_rings_the_fourth_alone_is_right():
    positions = attention_heroes.LENGTH
    exact = np.tril(np.ones((positions, positions))) / np.arange(1, positions + 1)[:, None]
    right = [
        np.allclose(attention_heroes.weights_of(name), exact, atol=1e-12)
        for name in attention_heroes.SIX_RINGS
    ]
    assert right == [False, False, False, True, False, False]


def test_of_six_slopes_the_second_is_right_and_the_fourth_only_for_a_gradient_of_one():
    x = np.linspace(-4, 4, 161)
    exact = tape_figures.slope_of("", x)
    assert tape_figures.SIX_SLOPES[1] == ""
    ones, twos = (
        [np.abs(tape_figures.slope_of(name, x, dx) - dx * exact).max() for name in tape_figures.SIX_SLOPES]
        for dx in (1.0, 2.0)
    )
    assert ones[1] == ones[3] == twos[1] == 0 and twos[3] > 0.1
    assert 0 < ones[4] < 0.03 and min(ones[0], ones[2], ones[5]) > 0.2
    first, _, third, _, _, last = (tape_figures.slope_of(name, x) for name in tape_figures.SIX_SLOPES)
    assert first.min() >= 0 and math.isclose(third[80], 0.9, abs_tol=0.01) and abs(last[-1]) < 0.01
