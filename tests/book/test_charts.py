"""Charts and drawings are single-line SVG in the text color and show correct numbers."""

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from book.build import check_site, generate
from book.figures import data_charts, heroes, kernel_drawings, online_steps
from book.figures.charts import Axis, Series, bars, plot, rows_of_bars, spans
from harness.puzzles.p23 import spec as p23
from harness.puzzles.p24 import orders
from harness.puzzles.p24.counting import count_costs

CHARTS = {
    "plot": lambda: plot(
        "Two lines.",
        [Series("first", [(1, 2), (10, 3)]), Series("", [(1, 0.5)], "", "o", True)],
        Axis("step"),
        Axis("loss", ticks={0.5: "half", 2: "two"}),
        level=1,
        notes=[((10, 3), "the last")],
    ),
    "bars": lambda: bars(
        "Bars.", {"a group": [("ours", 1.25, "1.25 ms", True), ("theirs", 2, "2 ms", False)]}, "time", level=1
    ),
    "rows": lambda: rows_of_bars("Rows.", {"up": [1, 2], "down": [-1, 0.5]}, [1]),
    "spans": lambda: spans("Spans.", {"GPU 0": [(0, 1, 0.5)], "GPU 1": [(1, 2.5, 0.5)]}, "ms"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_chart_is_reproducible_and_in_the_text_colour(name):
    svg = CHARTS[name]()
    root = ElementTree.fromstring(svg.replace("xlink:href", "href"))
    assert svg.count("\n") == 1 and root.attrib["aria-label"] and svg == CHARTS[name]()
    assert check_site.Page(svg).colours == [] and "<style" not in svg and "<image" not in svg
    assert not re.search(r"<g id|<metadata|20\d\d-", svg)


def test_labels_are_text_and_bars_match_their_numbers():
    svg = CHARTS["bars"]()
    assert {"a group", "ours", "theirs", "1.25 ms", "2 ms", "time"} <= {
        text.strip() for text in re.findall(r"<text[^>]*>([^<]+)</text>", svg)
    }
    boxes = re.findall(
        r'<path d="M ([\d.]+) [\d.]+ L ([\d.]+) [^"]*" [^>]*style="[^"]*opacity: (0\.\d+)', svg
    )
    lengths = {shade: float(right) - float(left) for left, right, shade in boxes}
    assert lengths["0.7"] / lengths["0.3"] == pytest.approx(1.25 / 2, rel=0.01)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in generate.FILES
        if name.startswith("hero_") or name[5:-5] in ("worklog_shuffles", "worklog_dgamma")
    ],
)
def test_stepped_drawing_shows_one_step_without_scripts(name):
    drawing = generate.FILES[name]()
    groups = re.findall(r'data-from="(\d+)" data-to="(\d+)" visibility="(\w+)"', drawing)
    steps = drawing.count("<li>")
    assert {"visible", "hidden"} == {shown for *_, shown in groups} and drawing.count("\n") == 1
    assert all(0 <= int(first) <= int(last) < steps for first, last, _ in groups)


def test_drawn_ballot_has_the_printed_bits():
    svg = kernel_drawings.ballot()
    bits = re.findall(r">([01])</text>", svg)
    assert len(bits) == 32 and bits[-5:] == ["0"] * 5
    assert f"mask = 0x{int(''.join(reversed(bits)), 2):08x}" in svg


def test_online_softmax_threads_compute_the_lse():
    svg = kernel_drawings.row_in_one_pass()
    cells = [float(text.replace("−", "-")) for text in re.findall(r">(−?\d+\.\d)</text>", svg)]
    columns = [cells[4 * t : 4 * t + 3] for t in range(4)]  # its logits, then its m
    lse = float(np.logaddexp.reduce(np.concatenate(columns)))
    assert cells[3::4] == [max(column) for column in columns] and f" = {lse:.3f}</text>" in svg


def test_online_softmax_sums_are_rescaled():
    tiles = online_steps.tiles()
    for number, tile in enumerate(tiles):
        svg = online_steps.picture(tiles, number)
        outlined, rescaled = (
            [float(width) for width in re.findall(rf'x="200" [^>]*? width="([\d.]+)" height="10" [^>]*?opacity="{shade}"', svg)]
            for shade in ("0", "0.45")
        )  # fmt: skip
        assert len(rescaled) == 5 and rescaled == pytest.approx(
            [was * tile.rescale for was in outlined], abs=1e-3
        )
    assert any(rescaled)


# ---- The numbers --------------------------------------------------------------------------------------------


def test_barrier_makes_every_order_correct():
    others = heroes.opposite()
    for order in itertools.permutations(range(4)):
        bare, held = heroes.arrivals(order, others)
        assert bare[-1].count("wrong") == 2 and held[-1] == ["right"] * 4
        assert all("right" not in states for states in held[:-1])


def test_slopes_match_the_formula():
    x, g = np.array([0.5, -1.2, 2.0, 0.3]), np.array([1.0, -2.0, 0.5, 3.0])
    rstd = 1 / np.sqrt(x.var() + 1e-5)
    x_hat = (x - x.mean()) * rstd
    J = data_charts.slopes(data_charts.x_hat, x, 1e-4)
    np.testing.assert_allclose(J.T @ g, rstd * (g - g.mean() - x_hat * (g * x_hat).mean()), atol=1e-7)


def test_ring_ends_with_the_output_and_gradients_of_one_device():
    errors, _, backward, back_errors = heroes.ring_run()
    assert min(errors[:-1]) > 0.1 and errors[-1] < 1e-12
    assert min(back_errors[:-2]) > 0.1 and max(back_errors[-2:]) < 1e-12
    assert all(sorted(parts) == [0, 1, 2, 3] for parts in backward[-1])


def test_tile_weights_match_softmax_and_sums_are_exact():
    exact = heroes.head()["probabilities"]
    for what, s, t, weights, errors in heroes.tiles_walk():
        np.testing.assert_allclose(weights, exact[s : s + 2, t : t + 2], atol=1e-6)
        assert (max(errors) < 1e-5) >= (t == 6 if what == "dQ" else s == 6), (what, s, t, errors)


def test_loaded_tiles_match_the_puzzles_count():
    totals = [
        count_costs(orders.ORDERS[name](32, 32), 32, 4, 16).tile_pairs for name in ("row-major", "hilbert")
    ]
    assert f"So far, {totals[0]} and {totals[1]} tiles" in heroes.reads()


def test_online_softmax_ends_with_the_exact_row():
    position, last = online_steps.row(), online_steps.tiles()[-1]
    exact = p23.PUZZLE.compute_exact(online_steps.arrays())
    np.testing.assert_allclose(last.sums / last.total, np.float64(exact["output"][position]), rtol=1e-12)
    np.testing.assert_allclose(last.largest + np.log(last.total), float(exact["lse"][position]), rtol=1e-12)


@pytest.mark.parametrize(("pair", "share"), [((2.0, 3.0), 1), ((2.0, 0.5), 0.968), ((3.0, 5.0), 0.723)])
def test_folding_two_products_changes_the_drawn_bits(pair, share):
    assert data_charts.same_bits(*pair) == pytest.approx(share, abs=0.001)
