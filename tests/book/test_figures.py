"""Figures of the pages: what is drawn is what was computed, recorded or measured, and a phone can show it."""

import ast
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from book_paths import BOOK, ROOT
from typed import present

from book.figures import (
    attention_figures,
    attention_heroes,
    backward_figures,
    bench_results,
    essay_figures,
    figures,
    layer_figures,
    said,
    tape_figures,
    wrong_backends,
)
from book.measure import ledger, record, training_by_hand
from harness.learner import blanks

SETS = (essay_figures, layer_figures, backward_figures, attention_figures, tape_figures, wrong_backends)
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


@pytest.mark.parametrize("name", DRAWN)
def test_no_words_stand_on_a_strong_shade(name):
    elements = list(ElementTree.fromstring(DRAWN[name]()).iter())
    boxes = [element.attrib for element in elements if element.tag.endswith("rect")]
    for element in elements:
        if not element.tag.endswith("text") or "x" not in element.attrib:
            continue
        x, y = float(element.attrib["x"]), float(element.attrib["y"]) - 4
        x += {"start": 3, "middle": 0, "end": -3}[element.attrib["text-anchor"]]
        for box in boxes:
            inside = 0 < x - float(box["x"]) < float(box["width"]) and 0 < y - float(box["y"]) < float(
                box["height"]
            )
            assert not inside or float(box["fill-opacity"]) <= figures.LEGIBLE, element.text


def test_every_figure_stands_on_a_page_with_a_caption():
    pages = "".join(page.read_text() for page in (BOOK / "src").rglob("*.md"))
    for name in DRAWN:
        assert re.search(rf"generated/{re.escape(name)}\}}\}}\n+<figcaption>\S", pages), name


def test_the_introduction_draws_a_gradient_for_each_thing_that_went_in():
    drawn = words(layer_figures.two_halves())
    assert {"x", "γ", "β", "W", "b"} < set(drawn) and {"dx", "dγ", "dβ", "dW", "db"} < set(drawn)


def test_gradients_on_the_graph_are_products_of_what_stands_on_its_edges():
    graph = layer_figures.recorded_graph()
    x, w, b = graph["x"][0], graph["w"][0], graph["b"][0]
    difference = {
        "x": ((w * (x + 1e-6) + b) ** 2 - (w * (x - 1e-6) + b) ** 2) / 2e-6,
        "w": (((w + 1e-6) * x + b) ** 2 - ((w - 1e-6) * x + b) ** 2) / 2e-6,
    }
    drawn = layer_figures.autograd_nodes()
    for name, slope in difference.items():
        assert abs(graph[name][1] - slope) < 1e-6
        assert f"gradient {graph[name][1]:g}" in words(drawn)
    assert {"×2", "×3", "×1", "×14"} <= set(words(drawn))


def test_the_launches_in_the_picture_are_those_of_the_ledger():
    drawn = words(layer_figures.through_memory())
    assert [step.name for step in ledger.LAUNCHES["forward", "unfused"]] == drawn[3:8]
    assert {"mean, rstd", "ln_out", "W transposed", "output"} <= set(drawn)


def test_boxes_of_lifetimes_stand_in_the_order_of_the_names():
    """Names in the order of a set would make another file in each process."""
    written, read = "pqrstuvw", "wqvpusrt"
    steps = [ledger.launch("first", "", " ".join(written)), ledger.launch("second", " ".join(read), "out")]
    svg = figures.lifetimes(steps, ("out",))
    boxes = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="16"', svg)
    assert [float(x) for x in boxes[: len(written)]] == sorted(float(x) for x in boxes[: len(written)])
    at = dict(zip(written, boxes, strict=False))
    assert boxes[len(written) + 1 :] == [at[name] for name in read]


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
    errors = layer_figures.algebra_errors("float32")
    assert errors["in order"][-1] == (1000, 8.3e-5) and errors["one-pass variance"][-1] == (1000, 0.16)
    assert set(layer_figures.WAYS) <= set(errors) and all(len(points) == 4 for points in errors.values())


def test_sizes_that_are_drawn_were_measured():
    svg = layer_figures.drawn_sizes()
    sizes = {
        (row["M"], row["H"], row["O"])
        for row in record.rows("sizes")
        if row["median_us"] and row["column"] == "graph" and row["candidate"] == "fast"
    } - {tuple(map(str, size)) for size in layer_figures.every_size.MODELS}
    odd = sum(int(H) % 8 != 0 or int(O) % 8 != 0 for _, H, O in sizes)
    assert svg.count("<circle") == len(sizes) > 20
    assert svg.count('fill-opacity="0"') == odd > 8, "rows that fill no whole vectors are hollow"


def test_three_views_are_those_of_the_page():
    ratios = layer_figures.fused_over_unfused()
    page = (BOOK / "src" / "fusion.md").read_text()
    assert ratios["bytes that must move"] < 1 / 3 and "less than a third of the bytes" in page
    assert "times_faster('fused', 'unfused', GPT2)" in page
    assert said.times_faster("fused", "unfused", said.GPT2) == pytest.approx(ratios["time on an H200"])
    assert ratios["bytes that threads ask for"] == pytest.approx(122_752 / 29_568)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_waited_pass_has_all_three_and_no_floor(dtype):
    waited = bench_results.waited_passes(dtype)
    assert len(waited) == 2 * len({size for size, _ in waited}) > 2
    assert all(times.keys() == {"fused", "unfused", "eager"} for times in waited.values())


def test_kernels_of_the_ramp_have_two_to_six_lines_as_the_page_says():
    source = ROOT / "solutions" / "p19" / "op" / "ramp.mojo"
    counts = [
        sum(bool(line.split("#")[0].strip()) for line in blank.body)
        for blank in blanks.find(source.read_text()).values()
    ]
    assert len(counts) == 8 and min(counts) == 2 and max(counts) == 6
    assert "of two to six lines" in (BOOK / "src" / "puzzle_19" / "puzzle_19.md").read_text()


def test_pixels_that_race_are_those_of_the_report():
    report = (BOOK / "outputs" / "brightest_race.txt").read_text()
    (places,) = re.findall(r"\((\d+) places\)", report)
    assert f"stored without order: {places} pixels" in words(layer_figures.racing_warps())


def test_the_compiled_pair_keeps_what_was_recorded():
    drawn = words(layer_figures.compiled_pair())
    recorded = re.findall(r"([\d.]+) MB", (BOOK / "outputs" / "compile_saved.txt").read_text())
    assert [said for said in drawn if said.endswith(" MB")] == [f"{size} MB" for size in recorded]
    assert "1 kernel" in "".join(drawn)


def test_what_the_tape_keeps_is_what_the_solution_keeps():
    """Part by part in the order of a run, with as many tensors as the picture names."""
    import torch

    from harness.check.python_files import load
    from harness.puzzles.p27.autograd import parameters
    from harness.puzzles.p27.running import excerpt

    tape = (module := load(ROOT / "solutions" / "p27" / "tape.py"))["Tape"]()
    p = parameters(layers=1, width=8, vocabulary=7, context=6, seed=1, dtype=torch.float32)
    module["forward"](*excerpt(2, 5, 7, 1), tape, p)
    kept = [(name.removeprefix("block0."), len(tensors)) for name, tensors in tape.kept.items()]
    assert kept == [(name, len(words.split(","))) for name, words in reversed(tape_figures.PARTS)]


def test_the_step_by_hand_is_drawn_beside_pytorch_s_and_each_kind_beside_its_floor():
    rows = {row["what"]: row for row in record.rows("step_by_hand")}
    beside, kinds = words(tape_figures.by_hand_beside()), words(tape_figures.step_kinds())
    for way in ("autograd", "torch.compile", "by hand"):
        assert f"{float(rows[way]['median_us']) / 1e3:.1f} ms" in beside
        assert f"{int(rows[way]['peak_bytes']) / 2**30:.1f} GiB" in beside
    with_floor = {what: row for what, row in rows.items() if row["floor_us"]}
    assert [word for word in kinds if word in with_floor] == list(with_floor)
    for what, row in with_floor.items():
        times = float(row["median_us"]) / float(row["floor_us"])
        assert kinds[kinds.index(what) + 1] == f"{times:.1f} times" and times >= 1


def test_places_lie_sorted_as_the_label_says():
    label = tape_figures.sorted_places()
    by_row = dict(re.findall(r"row (\d) adds up the places ([\d, ]+|none)", label))
    tokens = tape_figures.TOKENS
    assert {int(row): places for row, places in by_row.items()} == {
        row: ", ".join(str(place) for place, token in enumerate(tokens) if token == row) or "none"
        for row in range(max(tokens) + 1)
    }


def test_the_jumps_of_the_loss_are_counted_from_the_record_and_the_heavy_run_turns_there_and_back():
    losses = {}
    for row in record.rows("first_steps"):
        losses.setdefault((row["rate"], row["seed"]), []).append(float(row["loss"]))
    jumping = [rate for (rate, _), run in losses.items() if max(np.diff(run)) > 1]
    assert [jumping.count("0.003"), jumping.count("0.0015")] == [said.jumps(), said.jumps(2)]
    assert said.at_the_jump("loss") - said.at_the_jump("loss", -1) > 1
    assert [said.at_the_jump("turn", later) < 0 for later in (-1, 0, 1, 2)] == [False, True, True, False]
    assert [said.first_block_at_the_jump(later) < 0 for later in (-1, 0, 1)] == [False, True, False]
    drawn = words(tape_figures.through_zero())
    assert f"{said.first_block_at_the_jump():.2f}" in drawn and len(drawn) == 2 * 7 + 1
    label = ElementTree.fromstring(tape_figures.loss_jumps()).attrib["aria-label"]
    assert f"in {said.jumps()} of them" in label and f"{said.at_the_jump('turn'):.2f}" in label


def test_the_losses_by_hand_are_those_of_the_record():
    losses = tape_figures.losses()
    first, last = (sum(part) / 10 for part in (losses[:10], losses[-10:]))
    drawn = words(tape_figures.loss_by_hand())
    assert {
        f"first ten steps: {first:.3f}",
        f"last ten: {last:.3f}",
        "knows nothing: log 256 = 5.545",
    } <= set(drawn)
    points = re.findall(
        r"[\d.]+,([\d.]+)", present(re.search(r'points="([^"]+)"', tape_figures.loss_by_hand()))[1]
    )
    assert len(points) == len(losses) == 600 and float(points[-1]) == pytest.approx(
        262 - 40 * losses[-1], abs=0.05
    )
    hundred = sum(losses[95:105]) / 10
    assert first - hundred > 2 / 3 * (first - last), "as the caption says"


def test_the_samples_are_the_record_s_and_each_is_one_piece_of_code():
    lines = tape_figures.samples_list().splitlines()
    assert [int(line.split()[2]) for line in lines] == [*training_by_hand.SAMPLES]
    assert all(line.count("`") == 2 for line in lines)


# ---- Puzzles 20, 21 and 26 ----------------------------------------------------------------------------------


def test_the_softmax_row_is_its_jacobian_times_what_arrives():
    drawn = [
        float(said.replace("−", "-"))
        for said in words(backward_figures.softmax_row())
        if re.fullmatch(r"−?\d\.\d\d", said)
    ]
    dS = attention_figures.softmax_jacobian() @ np.array(backward_figures.ARRIVES)
    np.testing.assert_allclose(drawn[12:], dS, atol=0.0051)
    assert abs(dS.sum()) < 1e-8


def test_bits_and_checks_are_those_of_the_recorded_runs():
    drawn = words(backward_figures.relu_ways())
    measured = (BOOK / "outputs" / "what_is_kept.txt").read_text()
    bits = dict(re.findall(r"^Relu\w+ +(.*\S) +[\d,]+ +[\d,]+ +([\d.]+)  right$", measured, re.M))
    assert {way: drawn[drawn.index(way) + 1].split()[0] for way in bits} == {
        way: f"{float(bits[way]):g}" for way in bits
    }
    assert len(bits) == 4
    assert re.search(r"sign and mean .*  off by ", measured) and "36 bytes" in drawn
    drawn = words(backward_figures.checks_see())
    matrix = (BOOK / "outputs" / "hunt_matrix.txt").read_text()
    rows = [line for line in matrix.splitlines()[1:] if ": sees" not in line]
    assert (
        drawn[drawn.index("repeat runs") + 1]
        == f"{sum(line.rstrip().endswith('seen') for line in rows)} of {len(rows)}"
    )


def test_what_four_functions_keep_is_the_record_s_and_only_relu_s_custom_pass_keeps_less():
    text, drawn = (BOOK / "outputs" / "worth_it.txt").read_text(), words(backward_figures.kept_by_way())
    kept = [float(said.split()[0]) for said in drawn if said.endswith("MB")]
    assert sorted({f"{size:.2f}" for size in kept}) == sorted(set(re.findall(r"([\d.]+) MB", text)))
    eager, custom = kept[::3], kept[2::3]
    assert [own < theirs for own, theirs in zip(custom, eager, strict=True)] == [True, False, False, False]


def test_what_a_block_keeps_adds_up_to_the_recorded_bytes_of_each_way():
    drawn = [
        float(said.split(": ")[1].split()[0])
        for said in words(backward_figures.block_kept())
        if said.endswith(" MB")
    ]
    measured = dict(
        re.findall(r"^(\S.*?) +([\d.]+) MB", (BOOK / "outputs" / "saving_less.txt").read_text(), re.M)
    )
    same = (
        ("everything kept", "compiled, budget 1"),
        ("compiled, budget 0.5",),
        ("checkpoint", "compiled, budget 0"),
    )
    assert [{float(measured[way]) for way in ways} for ways in same] == [{size} for size in drawn]


def test_a_tenth_of_the_bytes_costs_no_accuracy_and_half_of_them_in_sixteen_bits_a_thousandfold():
    lines = re.findall(
        r"^(\S.*?) +([\d.]+) MB +(\S+)$", (BOOK / "outputs" / "saving_less.txt").read_text(), re.M
    )
    ways = {way: (float(size), float(error)) for way, size, error in lines}
    (all_bytes, error), (tenth, same), (half, worse) = (
        ways[w] for w in ("everything kept", "checkpoint", "kept in bfloat16")
    )
    assert (
        round(all_bytes / tenth) == 10
        and same <= error
        and round(all_bytes / half) == 2
        and worse > 1000 * error
    )


def test_the_operator_s_parts_are_the_blanks_of_the_registration():
    blanks = re.findall(
        r"# BLANK-START (\w+)", (BOOK.parent / "solutions" / "p20" / "register.py").read_text()
    )
    assert [blank for _, blank, _ in backward_figures.ASKED] == blanks


def test_the_wrong_gradient_is_the_right_one_times_the_root_of_six():
    drawn = [
        float(said.replace("−", "-"))
        for said in words(backward_figures.wrong_dq())
        if re.fullmatch(r"−?[\d.]+", said)
    ]
    given, mended = np.array(drawn[:6]), np.array(drawn[6:])
    np.testing.assert_allclose(given, mended * 6**0.5, atol=0.02)
    assert np.abs(given).max() > 0.5


def test_the_vote_is_a_word_of_the_lanes_answers():
    svg = backward_figures.ballot()
    (word,) = re.findall(r"vote: (0x\w{8})", svg)
    assert int(word, 16).bit_count() == svg.count('fill-opacity="0.6"')


def test_errors_of_differences_fall_and_rise_again():
    errors = {
        name: dict(backward_figures.difference_errors(dtype))
        for name, dtype in (("32", np.float32), ("64", np.float64))
    }
    assert errors["64"][1e-6] < 1e-9 < 1e-3 < errors["32"][1e-6]
    assert errors["64"][0.1] > errors["64"][1e-3] > errors["64"][1e-5] < errors["64"][1e-9]
    # The formula's own error at a large step is eps^2 / 6 times the third derivative.
    x = np.linspace(-2, 2, 40)
    third = (6 * np.tanh(x) ** 2 - 2) * (1 - np.tanh(x) ** 2)
    np.testing.assert_allclose(errors["64"][1e-3], np.median(np.abs(third)) * 1e-6 / 6, rtol=0.01)


def test_the_layer_that_is_wrong_is_the_one_that_gradcheck_names():
    drawn = words(backward_figures.where_wrong())
    assert drawn[drawn.index("gate") + 2] == "mismatch" and drawn.count("passes") == 3


def test_nodes_are_counted_as_printed():
    assert [len(nodes) for nodes in backward_figures.level_nodes().values()] == [2, 6, 12, 11, 23]
    assert backward_figures.level_nodes()["Dynamo"] == ["layer_norm", "linear"]


def test_folds_that_keep_every_bit():
    assert backward_figures.same_bits(2, 3) == 1 > backward_figures.same_bits(3, 5)
    assert 0.9 < backward_figures.same_bits(2, 0.5) < 1, "the largest overflow on the way"
    assert backward_figures.percent(0.99999) == "99.9%"
    assert "76.4%" in words(backward_figures.folds()) and "96.8%" in words(backward_figures.folds()), (
        "rounded"
    )


def test_folds_are_counted_as_torch_multiplies():
    import torch

    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = torch.from_numpy(x[np.isfinite(x)])
    for first, second in backward_figures.PRODUCTS:
        twice, once = (y.view(torch.int16) for y in (x * first * second, x * (first * second)))
        assert backward_figures.same_bits(first, second) == pytest.approx((twice == once).double().mean())


def test_wrong_backends_and_sizes_are_all_there():
    label = ElementTree.fromstring(wrong_backends.chart()).attrib["aria-label"]
    wrong = list((ROOT / "solutions" / "p26" / "wrong").glob("*.toml"))
    assert label.startswith(f"{len(wrong)} wrong backends")
    timed = {
        (row["M"], row["H"], row["O"])
        for row in record.rows("sizes")
        if row["candidate"] == "compile" and row["pass"] == "both" and row["column"] == "graph"
    }
    assert backward_figures.swaps_chart().count("<circle") == len(timed) > 20
    assert backward_figures.inductor_counts()["LayerNorm, then Linear"] == (2, 1, 1)


def test_every_wrong_backend_is_seen_in_one_way_and_the_guessed_ones_by_their_numbers():
    found = wrong_backends.by_sight()
    assert sum(map(len, found.values())) == len(wrong_backends.verdicts())
    assert all(len(wrong) > 1 for wrong in found.values())
    (out, right), *others = (
        map(float, re.findall(r"([\d.]+) for ([\d.]+)$", wrong_backends.verdicts()[name])[0])
        for name in wrong_backends.GUESSED
    )
    assert out / right == pytest.approx(0.5)
    assert [out - right for out, right in others] == pytest.approx([-1, 1])


def test_what_the_swap_gains_is_the_record_s():
    step = {row["way"]: row for row in record.rows("gpt2_step") if row["setting"] == "autocast"}
    drawn = words(backward_figures.swap_gains())
    for way in ("torch.compile", "mojo_workbook, LayerNorms alone"):
        assert f"{int(step[way]['peak_mib']) / 1024:.1f} GiB" in drawn
        assert f"{float(step[way]['median_ms']):.1f} ms" in drawn


# ---- Puzzles 23, 24 and 25 ----------------------------------------------------------------------------------


def test_three_paths_add_up_to_the_jacobian_and_delta_s_two_ways_to_one_number():
    rows = re.findall(r"^ +(-?\d.*)$", (BOOK / "outputs" / "one_row.txt").read_text(), re.M)
    _, _, g, _, dx, _ = np.array([row.split() for row in rows], float).T
    rstd = float(present(re.search(r"rstd (\S+)", (BOOK / "outputs" / "one_row.txt").read_text()))[1])
    J = sum(layer_figures.three_parts().values(), np.zeros((8, 8)))
    np.testing.assert_allclose(rstd * J @ g, dx, atol=2e-3)
    sums = [said for said in words(attention_figures.collapse()) if said.startswith("sum")]
    assert len(sums) == 2 and len(set(sums)) == 1


def test_the_row_that_learns_by_the_gradient_is_the_one_that_autograd_moves():
    import torch

    source = (BOOK / "examples" / "row_descent.py").read_text()
    numbers = [re.search(rf"^{name} = np.array\((.*?)\)", source, re.M) for name in ("start", "target")]
    x, target = (torch.tensor(ast.literal_eval(present(line)[1]), dtype=torch.double) for line in numbers)
    recorded = {int(step): (loss, mean) for step, loss, mean, *_ in essay_figures.descents()}
    for step in range(max(recorded) + 1):
        x.requires_grad_()
        loss = (torch.nn.functional.layer_norm(x, (8,)) - target).square().sum() / 2
        if step in recorded:
            np.testing.assert_allclose(recorded[step], (loss.item(), x.mean().item()), atol=6e-4)
        (gradient,) = torch.autograd.grad(loss, x)
        x = (x - 0.5 * gradient).detach()
    assert "it ends at 0.025 by the gradient" in essay_figures.descent_mean()


def test_the_jacobian_of_softmax_has_rows_that_add_up_to_nothing():
    p, J = backward_figures.softmax(np.array(backward_figures.LOGITS)), attention_figures.softmax_jacobian()
    np.testing.assert_allclose(J, np.diag(p) - np.outer(p, p), atol=1e-9)
    assert f"{J[0, 0]:.3f}" in words(attention_figures.softmax_heat())


def test_pairs_of_tiles_and_times_of_orders():
    from harness.puzzles.p24 import orders
    from harness.puzzles.p24.counting import count

    drawn = words(attention_figures.tile_masks())
    for name in ("row-major", "hilbert"):
        counts = count(orders.ORDERS[name](64, 64), 64, 4, 64)
        assert drawn[drawn.index(name) + 1] == f"{counts.pairs} of {counts.all_pairs} pairs"
    rows = [
        row
        for row in record.rows("orders")
        if (row["side"], row["radius"], row["pass"]) == ("128", "4", "both")
    ]
    times = {row["candidate"]: f"{float(row['median_us']) / 1e3:.2f} ms" for row in rows if row["median_us"]}
    drawn = words(attention_figures.order_bars())
    assert drawn[drawn.index("hilbert") + 1] == times["Mojo, hilbert, 64"]


def test_the_gather_follows_the_curve():
    drawn = words(attention_figures.gather_and_scatter())
    label = ElementTree.fromstring(attention_figures.gather_and_scatter()).attrib["aria-label"]
    assert "o = 0, 1, 5, 4, 8, 12, 13, 9." in label and drawn.count("13") == 2


def test_blocks_find_the_rows_of_their_sequence_and_no_row_twice():
    assert attention_figures.slots((5, 3, 6), 4) == [(0, 4), (0, 1), (1, 3), (1, 0), (2, 4), (2, 2)]
    for lengths in ((0, 9), (1, 1, 1), (16, 4)):
        blocks = attention_figures.slots(lengths, 4)
        for sequence, length in enumerate(lengths):
            assert sum(rows for own, rows in blocks if own == sequence) == length


def test_shares_make_the_whole_softmax_of_its_blocks():
    whole, parts, shares = attention_figures.merged()
    np.testing.assert_allclose(
        np.concatenate([part * share for part, share in zip(parts, shares, strict=True)]), whole
    )
    assert shares.sum() == pytest.approx(1) and f"block A, share {shares[0]:.2f}" in words(
        attention_figures.merging()
    )


def test_the_ring_is_as_balanced_as_the_command_prints():
    drawn = words(attention_figures.balance_chart())
    recorded = (BOOK / "outputs" / "ring_balance.txt").read_text()
    sums = [re.findall(r"[\d,]+", line) for line in recorded.splitlines() if line.startswith("   sum")]
    assert [said for said in drawn if re.fullmatch(r"[\d,]+", said)] == sums[0][:4] + sums[1][:4]
    assert [f"the time of {each[-1]} tiles" in " ".join(drawn) for each in sums] == [True, True]


def test_blocks_go_round_as_the_page_says():
    text = (BOOK / "src" / "puzzle_25" / "puzzle_25.md").read_text()
    rows = re.findall(r"^\| (\d) \| (\d) \| (\d) \| (\d) \| (\d) \|$", text, re.M)
    assert [[int(rank) for rank in row] for row in rows] == [
        [step, *owners] for step, owners in enumerate(attention_heroes.ring_run()[1])
    ]


def test_two_numbers_of_float16_hold_all_but_the_last_digit_of_a_float32_one():
    digits = "".join(said for said in words(attention_figures.two_digits()) if said in "01")
    whole, high, low = (int(part, 2) for part in (digits[:24], digits[24:35], digits[35:]))
    assert len(digits) == 46 and whole == int(np.float32(np.pi).view(np.uint32)) & 0x7FFFFF | 0x800000
    assert abs(whole - (high << 13) - (low << 1)) == 1


def test_what_the_page_says_of_padding_is_what_is_drawn():
    page = (BOOK / "src" / "puzzle_23" / "lengths_and_dropout.md").read_text()
    rows, scores = map(int, re.findall(r"(\d+)% of the", attention_figures.padding()))
    assert f"or {100 - rows} %" in page and f"so {100 - scores} % of" in page
