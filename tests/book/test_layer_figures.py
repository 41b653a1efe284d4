"""Figures of the layer's pages: what is drawn is what was computed, recorded or measured, and a phone can show it."""

import ast
import csv
import re
from xml.etree import ElementTree

import figures
import layer_figures
import ledger
import numpy as np
import pytest
from book_paths import BOOK, ROOT

SETS = [layer_figures]
DRAWN = {name: draw for module in SETS for name, draw in module.FILES.items() if name.endswith(".svg")}
PHONE = 350
"""Pixels that a page of 390 leaves for a figure."""
SMALLEST = 9
"""Pixels of the smallest letters there."""


def texts(svg: str) -> list[ElementTree.Element]:
    """The words of a drawing as elements."""
    return [element for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


def words(svg: str) -> list[str]:
    """The words of a drawing."""
    return ["".join(element.itertext()) for element in texts(svg)]


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_legible_on_a_phone_says_what_it_shows_and_is_the_same_each_time(name):
    svg = DRAWN[name]()
    drawing = ElementTree.fromstring(svg)
    width = float(drawing.attrib["width"])
    assert width <= figures.NARROW and drawing.attrib["class"] == "narrow"
    assert len(drawing.attrib["aria-label"]) > 60
    assert svg == DRAWN[name]() and "\n" not in svg.strip()
    for element in texts(svg):
        size, said = float(element.attrib["font-size"]), "".join(element.itertext())
        assert size * min(1, PHONE / width) >= SMALLEST, said
        if "x" in element.attrib:  # what is turned round has its place elsewhere
            letters = len(said) * size * (0.62 if "font-family" in element.attrib else 0.5)
            share = {"start": 0, "middle": 0.5, "end": 1}[element.attrib["text-anchor"]]
            left = float(element.attrib["x"]) - share * letters
            assert left > -6 and left + letters < width + 6, said


def test_every_figure_stands_on_a_page_with_a_caption():
    pages = "".join(page.read_text() for page in (BOOK / "src").rglob("*.md"))
    for name in DRAWN:
        assert re.search(rf"generated/{re.escape(name)}\}}\}}\n+<figcaption>\S", pages), name


def test_the_introduction_draws_a_gradient_for_each_thing_that_went_in():
    drawn = words(layer_figures.two_halves())
    assert {"x", "γ", "β", "W", "b"} < set(drawn) and {"dx", "dγ", "dβ", "dW", "db"} < set(drawn)


def test_gradients_on_the_graph_are_products_of_what_stands_on_its_edges():
    found = layer_figures.recorded_graph()
    x, w, b = found["x"][0], found["w"][0], found["b"][0]
    difference = {
        "x": ((w * (x + 1e-6) + b) ** 2 - (w * (x - 1e-6) + b) ** 2) / 2e-6,
        "w": (((w + 1e-6) * x + b) ** 2 - ((w - 1e-6) * x + b) ** 2) / 2e-6,
    }
    drawn = layer_figures.autograd_nodes()
    for name, slope in difference.items():
        assert abs(found[name][1] - slope) < 1e-6
        assert f"gradient {found[name][1]:g}" in words(drawn)
    assert {"×2", "×3", "×1", "×14"} <= set(words(drawn))


def test_the_launches_in_the_picture_are_those_of_the_ledger():
    drawn = words(layer_figures.through_memory())
    assert [step.name for step in ledger.LAUNCHES["forward", "unfused"]] == drawn[3:8]
    assert {"mean, rstd", "ln_out", "W transposed", "output"} <= set(drawn)


def test_one_column_of_the_jacobian():
    x, change = layer_figures.column_change(2)
    x_hat = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    column = (np.eye(8)[2] - 1 / 8 - x_hat * x_hat[2] / 8) / np.sqrt(x.var() + 1e-5)
    np.testing.assert_allclose(change, column, atol=1e-8)


def test_the_shares_of_the_rows_add_up_to_what_the_program_printed():
    recorded = re.findall(r"dW +(\[\[.*\]\])", (BOOK / "outputs" / "parameter_gradients.txt").read_text())
    first, whole = (np.array(ast.literal_eval(numbers)) for numbers in recorded)
    shares = layer_figures.row_shares()
    np.testing.assert_allclose(shares[0], first, atol=6e-4)
    np.testing.assert_allclose(shares[0] + shares[1], whole, atol=6e-4)


def test_what_is_kept_is_what_the_operator_saves():
    kept, dropped = layer_figures.saved_names()
    assert kept == ["x", "statistics", "ln_weight", "ln_bias", "linear_weight"]
    assert not set(kept) & set(dropped)
    drawn = words(layer_figures.kept_between())
    assert drawn[drawn.index("x") + 1] == "25.2 MB"


def test_the_chart_of_errors_has_the_recorded_numbers():
    found = layer_figures.algebra_errors("float32")
    assert found["in order"][-1] == (1000, 8.3e-5) and found["one-pass variance"][-1] == (1000, 0.16)
    assert set(layer_figures.WAYS) <= set(found) and all(len(points) == 4 for points in found.values())


def test_sizes_that_are_drawn_were_measured():
    svg = layer_figures.drawn_sizes()
    with (BOOK / "measurements" / "h200_drawn_sizes.csv").open() as file:
        sizes = {(row["M"], row["H"], row["O"]) for row in csv.DictReader(file) if row["median_us"]}
    models = {tuple(map(str, size)) for size in layer_figures.every_size.MODELS} | {("", "", "")}
    assert svg.count("<circle") == svg.count("<polygon") == len(sizes - models) > 15


def test_as_many_wrong_solutions_as_there_are_files():
    drawn = words(layer_figures.rooms())
    for puzzle in (ROOT / "solutions").glob("p*"):
        count = len(list((puzzle / "wrong").glob("*.toml")))
        assert drawn[drawn.index(f"puzzle {puzzle.name[1:]}") + 1] == str(count)


def test_pixels_that_race_are_those_of_the_report():
    report = (BOOK / "outputs" / "brightest_race.txt").read_text()
    (places,) = re.findall(r"\((\d+) places\)", report)
    assert f"stored without order: {places} pixels" in words(layer_figures.racing_warps())


def test_the_compiled_pair_keeps_what_was_recorded():
    drawn = words(layer_figures.compiled_pair())
    recorded = re.findall(r"([\d.]+) MB", (BOOK / "outputs" / "compile_saved.txt").read_text())
    assert [said for said in drawn if said.endswith(" MB")] == [f"{size} MB" for size in recorded]
    assert "1 kernel" in "".join(drawn)
