"""The museum: every wrong solution has its exhibit, made from its file and the code; its curves are those of a fresh run."""

import re
from dataclasses import replace

import numpy as np
import pytest
from book_paths import BOOK
from typed import present

from harness.check import zoo
from harness.errors import DamagedFile
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.catalogue import puzzle_names


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    from book.build import museum

    return {name: make() for name, make in museum.pages().items()}


@pytest.mark.long
def test_every_wrong_solution_is_in_the_room_of_its_puzzle(pages):
    for puzzle in puzzle_names():
        names = [wrong.name for wrong in zoo.load(puzzle)]
        page = BOOK / "src" / f"puzzle_{puzzle.removeprefix('p')}" / "museum.md"
        shown = re.findall(r"generated/(museum_\w+\.md)", page.read_text())
        ids = [id for name in shown for id in re.findall(r'class="exhibit" id="(\w+)"', pages[name])]
        assert sorted(ids) == names, puzzle
        assert f"({page.relative_to(BOOK / 'src')}) | {len(names)} |" in pages["museum.md"]


def test_a_visitor_guesses_a_gate_before_the_exhibits_and_the_question_does_not_say_which(pages):
    from book.build import museum

    for puzzle in puzzle_names():
        question, answer = pages[f"guess_{puzzle}.md"].split("<details")
        (wrong,) = [each for each in zoo.load(puzzle) if each.name == museum.GUESSED[puzzle]]
        effect = question.split("> ")[1].split("\n")[0]
        assert f"`{wrong.gate}`" in question and not re.search(rf"\b{wrong.gate}\b", effect), puzzle
        assert f"gate `{wrong.gate}`" in answer and f"(#{wrong.name})" in answer
        page = (BOOK / "src" / f"puzzle_{puzzle.removeprefix('p')}" / "museum.md").read_text()
        assert page.index(f"guess_{puzzle}.md") < page.index("generated/museum_")


def test_a_group_of_three_exhibits_begins_with_a_riddle_that_names_those_whom_it_asks_for(pages):
    from book.build import museum

    def answers(room: str, gate: str) -> list[str]:
        (group,) = re.findall(rf"^### `{gate}`.*?(?=^### |\Z)", pages[room], re.S | re.M)
        assert group.index("riddle") < group.index("exhibit-fold")
        return re.findall(r"\(#(\w+)\)", group.split("</div>")[0])

    hidden = ["dw_batch_sequence_swapped", "dw_beta_forgotten", "dw_from_x_hat"]
    assert answers("museum_p22.md", "dW") == hidden, "they need gamma, beta or B != S"
    sizes = {
        wrong.name: present(museum.mark(wrong).size) for wrong in zoo.load("p27") if wrong.gate == "dgelu"
    }
    furthest, least = (sizes[name] for name in answers("museum_p27.md", "dgelu"))
    assert (furthest, least) == (max(sizes.values()), min(sizes.values()))
    for puzzle in set(puzzle_names()) - {"p21"}:
        large = [gate for gate, group in museum.by_gate(puzzle).items() if len(group) >= museum.FEW]
        assert pages[f"museum_{puzzle}.md"].count('class="riddle"') == len(large) > 0, puzzle


def exhibit(page: str, name: str) -> str:
    """From its summary to the next one's."""
    (own,) = [part for part in page.split('<details class="exhibit-fold">') if f'id="{name}"' in part]
    return own


@pytest.mark.long
def test_an_exhibit_has_story_thread_check_error_and_folded_lines(pages):
    shown = exhibit(pages["museum_p22.md"], "dx_mean_term_doubled")
    words, lines = shown.split("<details")
    assert "<summary>The mean term c2 is subtracted twice.</summary>" in words
    assert "[tenstorrent/tt-metal issue 53204](https://github.com/tenstorrent/tt-metal/issues/53204)" in words
    assert (
        "the gate `dx`, which says “equal to the reference with the mean term c2 subtracted twice” and calls it `mean-term-doubled`"
        in words
    )
    assert "- grad_input[unsafe_offset" in lines or re.search(r"^- .*g - c2 - x_hat \* c1", lines, re.M)
    assert re.search(r"^\+ .*g - 2 \* c2 - x_hat \* c1", lines, re.M) and "BLANK" not in lines
    assert "c1)" not in words, "a line of the solution stands outside of the fold"


def test_every_exhibit_says_in_its_own_words_what_the_mistake_does(pages):
    rooms = "".join(page for name, page in pages.items() if name.startswith("museum_"))
    effects = [wrong.effect for puzzle in puzzle_names() for wrong in zoo.load(puzzle)]
    assert len(effects) == len(set(effects))
    for effect in effects:
        assert re.fullmatch(r"[^\n]{20,260}\.", effect), effect
        assert re.sub(r"([\\*_\[\]<>|$])", r"\\\1", re.split("`", effect)[0]) in rooms, effect


def test_words_between_backquotes_stay_code_and_no_other_sign_is_markdown():
    from book.build import museum

    assert museum.marked("x * y and `a_b[0]`, c_d") == r"x \* y and `a_b[0]`, c\_d"


def test_what_the_diagnosis_has_no_name_for_is_caught_by_its_values(pages):
    assert "*Rejected by* the gate `dgather`, in the case “odd sizes” alone, for its values." in exhibit(
        pages["museum_p24.md"], "dgather_first_eight_heads"
    )


def test_what_a_blank_is_given_with_is_the_edit(pages):
    (blank,) = [wrong for wrong in zoo.load("p21") if wrong.name == "softmax_probabilities_twice"]
    assert not blank.old
    lines = exhibit(pages["museum_given.md"], blank.name).split("```")[1].splitlines()
    assert any(line.startswith("- ") for line in lines) and any(line.startswith("+ ") for line in lines)
    assert not any("BLANK" in line for line in lines)


def test_an_edit_that_no_longer_applies_stops_the_build(monkeypatch):
    from book.build import museum

    stale = replace(zoo.load("p22")[0], old="a line that was rewritten")
    monkeypatch.setattr(zoo, "load", lambda puzzle: [stale])
    with pytest.raises(DamagedFile, match="no longer applies"):
        museum.room("p22")


def test_the_error_is_that_of_the_formula(pages):
    """Recomputed here from the definition: dx without its mean term, and dW from x_hat where gamma = 1 and beta = 0."""
    errors = []
    for case in PUZZLE.cases(None):
        arrays = PUZZLE.inputs(case, "float32", 0)
        x, gamma, W, dy = (arrays[n] for n in ("input", "ln_weight", "linear_weight", "grad_output"))
        if not all(np.isfinite(a).all() for a in (x, gamma, dy)):
            continue
        centred = x - x.mean(-1, keepdims=True)
        rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        g, x_hat = dy @ W * gamma, centred * rstd
        dx = rstd * (g - g.mean(-1, keepdims=True) - x_hat * (g * x_hat).mean(-1, keepdims=True))
        errors.append(np.abs(rstd * g.mean(-1, keepdims=True)).max() / np.abs(dx).max())
    facts = exhibit(pages["museum_p22.md"], "dx_mean_term_dropped")
    own, worst = present(
        re.search(r"element: (\S+) in the case “chapter”, up to (\S+) in all", facts)
    ).groups()
    assert float(own) == pytest.approx(errors[0], rel=0.06)
    assert float(worst.replace(",", "")) == pytest.approx(max(errors), rel=0.06)
    assert "element: none in the case “chapter”" in exhibit(pages["museum_p22.md"], "dw_from_x_hat")


def test_no_source_is_a_branch_that_moves():
    sources = {wrong.name: wrong.source for puzzle in puzzle_names() for wrong in zoo.load(puzzle)}
    assert [
        name for name, source in sources.items() if re.search(r"/(tree|blob)/(?![0-9a-f]{40}/)", source)
    ] == []


def test_a_source_in_words_stays_one_and_signs_of_markdown_are_escaped():
    from book.build import museum

    assert list(museum.seen_in("texts that say a_b")) == ["*Seen in* texts that say a\\_b."]
    assert list(museum.seen_in("")) == []
    both = "https://github.com/a/b/issues/1, https://stackoverflow.com/questions/2/x"
    assert list(museum.seen_in(both)) == [
        "*Seen in* [a/b issue 1](https://github.com/a/b/issues/1), "
        "[stackoverflow.com](https://stackoverflow.com/questions/2/x)."
    ]
    assert museum.plain("g_j * <x> | $") == r"g\_j \* \<x\> \| \$"
    assert museum.in_html("`a` < $b$ & c") == "&#96;a&#96; &lt; &#36;b&#36; &amp; c"


# ---- The training runs --------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_right_run_is_that_of_autograd_and_of_torchs_adam():
    import torch

    from book.measure import wrong_training as w

    random = np.random.default_rng(22)
    wanted, p = ({n: torch.tensor(a) for n, a in make(random).items()} for make in (w.teacher, w.start))

    def layer(of, u):
        x = torch.nn.functional.layer_norm(u @ of["matrix"].T, (w.H,), of["ln_weight"], of["ln_bias"], 1e-5)
        return x @ of["linear_weight"].T + of["linear_bias"]

    adam = torch.optim.Adam([t.requires_grad_() for t in p.values()], lr=w.RATE)
    losses = []
    for _ in range(20):
        u = torch.tensor(1 + random.standard_normal((w.B, w.S, w.D)))
        loss = (layer(p, u) - layer(wanted, u)).square().mean() / 2
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert w.losses(steps=20) == pytest.approx(losses, rel=1e-6)
    assert losses[-1] < losses[0]


@pytest.mark.long
def test_the_recorded_losses_are_those_of_a_fresh_run():
    from book.measure import record
    from book.measure import wrong_training as w

    recorded: dict[str, list[tuple[float, float]]] = {}
    for row in record.rows("museum_curves"):
        recorded.setdefault(row["bug"], []).append((float(row["right"]), float(row["wrong"])))
    kernels = {wrong.name: pair for wrong in zoo.load("p22") if (pair := w.chosen(wrong))}
    differing = {name for name, pair in kernels.items() if w.losses(*pair, steps=3) != w.losses(steps=3)}
    assert differing == set(recorded), "`python -m book.measure museum_curves` measures them anew"
    right = w.windows(w.losses())
    for name in ("dx_variance_term_dropped", "dgamma_gamma_twice"):
        fresh = w.windows(w.losses(*kernels[name]))
        assert recorded[name] == [pytest.approx(pair, rel=2e-3) for pair in zip(right, fresh, strict=True)]


def test_a_wrong_run_has_the_mistake_in_what_its_gate_checks_and_nowhere_else():
    from book.measure import wrong_training as w

    known, spoiled = present(
        w.chosen(next(k for k in zoo.load("p22") if k.name == "dx_variance_term_dropped"))
    )
    assert spoiled == {"grad_input"}
    assert w.losses(known, set(), steps=5) == w.losses(steps=5)
    assert w.losses(known, spoiled, steps=5)[:1] == w.losses(steps=1), "the first loss is before any gradient"
    assert w.losses(known, spoiled, steps=5)[2:] != w.losses(steps=5)[2:]


# ---- The chart ----------------------------------------------------------------------------------------------


def test_every_exhibit_has_its_mark_and_a_caption_in_numbers(pages):
    for puzzle in puzzle_names():
        names = sorted(wrong.name for wrong in zoo.load(puzzle))
        shown = pages[f"room_{puzzle}.html"]
        assert sorted(re.findall(r'<a href="#(\w+)"', shown)) == names
        assert f"of {len(names)} mistakes" in shown
        assert pages["rooms.html"].count(f'href="puzzle_{puzzle[1:]}/museum.html#') == len(names)


def test_a_mark_stands_at_its_error_in_the_row_of_its_gate():
    from book.build import museum
    from book.figures import museum_chart

    known = {wrong.name: museum.mark(wrong) for wrong in zoo.load("p22")}
    dropped, hidden, race = (
        known[name] for name in ("dx_mean_term_dropped", "dw_from_x_hat", "matmul_no_barrier_after_load")
    )
    assert (dropped.check, dropped.quiet, hidden.quiet) == ("formula", False, True)
    assert (race.check, race.size) == ("machine", None)
    marks = [
        museum_chart.Mark("#a", "A story.", "values", size) for size in (1e-9, 0.1, 1, 1, float("inf"), None)
    ]
    piles = museum_chart.piles(marks)
    at = [x - museum_chart.LEFT + museum_chart.BIN / 2 for x in piles]
    assert at[:4] == [0, 3 * museum_chart.DECADE, 4 * museum_chart.DECADE, 6 * museum_chart.DECADE]
    assert len(piles[museum_chart.RIGHT]) == 1 and [len(pile) for pile in piles.values()] == [1, 1, 2, 1, 1]
    assert "1 of them stays below 1%" in museum_chart.label(
        marks
    ) and "5 of 6 mistakes" in museum_chart.label(marks)


@pytest.mark.long
def test_the_recorded_verdicts_are_of_every_wrong_solution_in_python_and_of_a_fresh_run(
    monkeypatch, tmp_path
):
    import csv

    from book.build import museum
    from book.measure import zoo_verdicts
    from harness.spec.rungs import MojoRung

    python = {
        (puzzle, wrong.name)
        for puzzle in puzzle_names()
        for wrong in zoo.load(puzzle)
        if not isinstance(wrong.of_rung, MojoRung)
    }
    assert set(museum.verdicts()) == python, "`python -m book.measure zoo_verdicts` measures them anew"
    some = ("attention_no_mask", "embedding_assigned", "clip_up", "tape_view_alone")
    monkeypatch.setattr(
        zoo_verdicts.zoo, "load", lambda puzzle: [w for w in zoo_load(puzzle) if w.name in some]
    )
    monkeypatch.setattr(zoo_verdicts, "puzzle_names", lambda: ["p27"])
    monkeypatch.setattr("sys.argv", ["", str(tmp_path / "fresh.csv")])
    zoo_verdicts.main()
    with open(tmp_path / "fresh.csv", encoding="utf-8") as file:
        fresh = {row["wrong"]: float(row["error"]) for row in csv.DictReader(file)}
    assert fresh == {name: pytest.approx(museum.verdicts()["p27", name], rel=0.02) for name in some}
    assert fresh["tape_view_alone"] == -1


zoo_load = zoo.load


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("at [5]: got 0.844279, expected 12.6642, off by 9.3e-01 of the largest element", 0.93),
        ("output 0 is wrong: its error is 7.2e-01, eager mode's 2.3e-07", 0.72),
        ("loss[] got 225.299, expected 1.925633: 117 times that", 116),
        ("at x = 2: edges: x->a is 2, expected 4", 0.5),
        ("output 0 has 24 of 24 elements with other bits: 3.71347523 for 7.42695045", 0.5),
        ("1 of 1 elements of loss are NaN", float("inf")),
        ("output[2] is nan, expected 0.3", float("inf")),
        ("merge of out 1 with nan: out is 0, expected nan: it says", float("inf")),
        ("1 pairs found, expected 0", None),
        ("x * 2.0 * 4.0, a long chain: fold(gm) is 1, expected 3", None),
    ],
)
def test_the_size_of_an_error_is_read_from_a_verdict(line, size):
    from book.measure import zoo_verdicts

    assert zoo_verdicts.size(["a line before", line]) == (size and pytest.approx(size, rel=0.01))
