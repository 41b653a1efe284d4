"""The gallery shows every wrong solution, and its recorded losses are reproducible."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from book_paths import BOOK
from typed import unwrap

from harness.check import zoo
from harness.errors import DamagedFile
from harness.spec.catalogue import list_puzzle_names


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    from book.build import museum

    return {name: make() for name, make in museum.FILES.items()}


def test_each_wrong_solution_is_on_its_page_and_in_the_chart(pages):
    for puzzle in list_puzzle_names():
        names = [wrong.name for wrong in zoo.load_wrong_solutions(puzzle)]
        page, gallery = f"puzzle_{puzzle.removeprefix('p')}/museum.md", pages[f"museum_{puzzle}.md"]
        assert f"generated/museum_{puzzle}.md" in (BOOK / "src" / page).read_text()
        rows = re.findall(r'<tr id="(\w+)"><td><details data-exhibit="(\w+)">', gallery)
        assert sorted(rows) == [(name, name) for name in names], puzzle
        assert f"({page}) | {len(names)} |" in pages["museum.md"]
        assert all(f'href="puzzle_{puzzle[1:]}/museum.html#{name}"' in pages["rooms.html"] for name in names)


def read_entries(page: str) -> dict[str, str]:
    return json.loads(page.split('id="exhibits">')[1].split("</script>")[0])


@pytest.mark.parametrize(
    ("name", "changed"), [("dweight_x_hat_forgotten", "grad_weight"), ("dlayernorm_diagonal", "grad_input")]
)
def test_formula_changes_what_the_gate_checks(name, changed):
    from book.build import museum

    (wrong,) = (wrong for wrong in zoo.load_wrong_solutions("p20") if wrong.name == name)
    assert list(unwrap(museum.formula(wrong)).changes) == [changed]


def test_gallery_shows_ten_entries_with_details(pages):
    for puzzle in list_puzzle_names():
        page = pages[f"museum_{puzzle}.md"]
        assert page.count('<div class="exhibit">') == 10
        assert sorted(read_entries(page)) == [wrong.name for wrong in zoo.load_wrong_solutions(puzzle)]
        script = page.split('id="exhibits">')[1].split("</script>")[0]
        assert not re.search(r"[<$`]|\\\\|\{\{", script), "the preprocessor or browser would interpret it"
        assert '<code class="language-diff">' not in page.replace(script, ""), (
            "a line of the solution is visible"
        )


def test_table_row_has_thread_check_and_lines(pages):
    words, lines = read_entries(pages["museum_p22.md"])["dx_mean_term_doubled"].split("<pre>")
    link = (
        '<a href="https://github.com/tenstorrent/tt-metal/issues/53204">tenstorrent/tt-metal issue 53204</a>'
    )
    assert link in words
    assert "equal to the reference with the mean term c2 subtracted twice" in words
    assert re.search(r"^- .*g - c2 - x_hat \* c1", lines, re.M) and "BLANK" not in lines
    assert re.search(r"^\+ .*g - 2 \* c2 - x_hat \* c1", lines, re.M)


def test_error_is_computed_on_the_hardest_inputs():
    from book.build import museum

    (wrong,) = [wrong for wrong in zoo.load_wrong_solutions("p22") if wrong.name == "dx_mean_term_doubled"]
    puzzle, sizes = museum.find_puzzle("p22"), []
    for case in puzzle.list_cases(None):
        a = {
            name: np.asarray(array, np.float64)
            for name, array in puzzle.make_inputs(case, "float32", 0).items()
        }
        with np.errstate(all="ignore"):
            g = (a["grad_output"] @ a["linear_weight"]) * a["ln_weight"]
            rstd = 1 / np.sqrt(a["input"].var(-1, keepdims=True) + 1e-5)
            expected = np.asarray(puzzle.derive(a, {}).grad_input)
            size = np.abs(rstd * g.mean(-1, keepdims=True)).max() / np.abs(expected).max()
        if puzzle.count_multiply_adds(case.dims) <= museum.LARGEST and np.isfinite(size):
            sizes.append(size)
    assert museum.mark(wrong).size == pytest.approx(max(sizes), rel=1e-3) and max(sizes) > 0.1
    assert museum.mark(wrong).hidden == (sizes[0] <= museum.SEEN)


@pytest.mark.parametrize(
    ("puzzle", "name", "check"),
    [
        ("p19", "atomic_missing", "machine"),
        ("p22", "db_overwritten", "formula"),
        ("p27", "embedding_overwrites", "rule"),
    ],
)
def test_mark_shows_what_rejects_a_wrong_sum(puzzle, name, check):
    from book.build import museum

    (wrong,) = [wrong for wrong in zoo.load_wrong_solutions(puzzle) if wrong.name == name]
    assert museum.mark(wrong).check == check


def test_backticks_are_code_and_special_characters_are_escaped():
    from book.build import museum

    assert museum.in_html("x < y and `a_b[0]`, $c$") == "x &lt; y and <code>a_b[0]</code>, &#36;c&#36;"


def test_provided_wrong_code_is_shown_as_the_edit():
    from book.build import museum

    (blank,) = [
        wrong for wrong in zoo.load_wrong_solutions("p21") if wrong.name == "softmax_probabilities_twice"
    ]
    assert not blank.old
    lines = museum.lines(blank).splitlines()
    assert any(line.startswith("- ") for line in lines) and any(line.startswith("+ ") for line in lines)
    assert not any("BLANK" in line for line in lines)


def test_outdated_edit_fails_the_build(monkeypatch):
    from book.build import museum

    stale = replace(zoo.load_wrong_solutions("p22")[0], old="a line that was rewritten")
    monkeypatch.setattr(zoo, "load_wrong_solutions", lambda puzzle: [stale])
    with pytest.raises(DamagedFile, match="no longer applies"):
        museum.page("p22")


def test_sources_are_permanent_links():
    sources = {
        wrong.name: wrong.source
        for puzzle in list_puzzle_names()
        for wrong in zoo.load_wrong_solutions(puzzle)
    }
    assert [
        name for name, source in sources.items() if re.search(r"/(tree|blob)/(?![0-9a-f]{40}/)", source)
    ] == []


def test_source_without_url_is_shown_as_text():
    from book.build import museum

    assert museum.seen_in("texts that say a_b") == "<p><em>Seen in</em> texts that say a_b.</p>"
    assert museum.seen_in("") == ""
    both = "https://github.com/a/b/issues/1, https://stackoverflow.com/questions/2/x"
    assert museum.seen_in(both) == (
        '<p><em>Similar to</em> <a href="https://github.com/a/b/issues/1">a/b issue 1</a>, '
        '<a href="https://stackoverflow.com/questions/2/x">stackoverflow.com</a>.</p>'
    )
    assert museum.seen_in("https://github.com/a/b/blob/12ab/c.py").startswith("<p><em>Seen in</em> <a ")


# ---- The training runs --------------------------------------------------------------------------------------


def test_correct_run_matches_autograd_and_adam():
    import torch

    from book.measure import wrong_training as w

    random = np.random.default_rng(22)
    teacher, p = ({n: torch.tensor(a) for n, a in make(random).items()} for make in (w.teacher, w.start))

    def layer(of, u):
        x = torch.nn.functional.layer_norm(u @ of["matrix"].T, (w.H,), of["ln_weight"], of["ln_bias"], 1e-5)
        return x @ of["linear_weight"].T + of["linear_bias"]

    adam = torch.optim.Adam([t.requires_grad_() for t in p.values()], lr=w.RATE)
    losses = []
    for _ in range(20):
        u = torch.tensor(1 + random.standard_normal((w.B, w.S, w.D)))
        loss = (layer(p, u) - layer(teacher, u)).square().mean() / 2
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert w.losses(steps=20) == pytest.approx(losses, rel=1e-6)
    assert losses[-1] < losses[0]


def test_recorded_losses_are_reproducible():
    from book.measure import record
    from book.measure import wrong_training as w

    recorded: dict[str, list[tuple[float, float]]] = {}
    for row in record.rows("museum_curves"):
        if row["seed"] == str(w.SEEDS[0]):
            recorded.setdefault(row["bug"], []).append((float(row["right"]), float(row["wrong"])))
    kernels = {wrong.name: pair for wrong in zoo.load_wrong_solutions("p22") if (pair := w.chosen(wrong))}
    differing = {name for name, pair in kernels.items() if w.losses(*pair, steps=3) != w.losses(steps=3)}
    assert differing == set(recorded), "run `python -m book.measure museum_curves`"
    expected = w.windows(w.losses())
    for name in ("dx_variance_term_dropped", "dgamma_gamma_twice"):
        fresh = w.windows(w.losses(*kernels[name]))
        assert recorded[name] == [pytest.approx(pair, rel=2e-3) for pair in zip(expected, fresh, strict=True)]
    last = {row["seed"]: row for row in record.rows("museum_curves") if row["bug"] == "dgamma_gamma_twice"}
    assert set(last) == set(map(str, w.SEEDS))
    mistake, spoiled = kernels["dgamma_gamma_twice"]
    later = [w.losses(seed=w.SEEDS[1]), w.losses(mistake, spoiled, seed=w.SEEDS[1])]
    ends = [w.windows(curve)[-1] for curve in later]
    last_losses = last[str(w.SEEDS[1])]
    assert [float(last_losses["right"]), float(last_losses["wrong"])] == pytest.approx(ends, rel=2e-3)


def test_wrong_run_differs_only_in_the_checked_gradient():
    from book.measure import wrong_training as w

    known, spoiled = unwrap(
        w.chosen(next(k for k in zoo.load_wrong_solutions("p22") if k.name == "dx_variance_term_dropped"))
    )
    assert spoiled == {"grad_input"}
    assert w.losses(known, set(), steps=5) == w.losses(steps=5)
    assert w.losses(known, spoiled, steps=5)[:1] == w.losses(steps=1), (
        "the first loss precedes the first gradient"
    )
    assert w.losses(known, spoiled, steps=5)[2:] != w.losses(steps=5)[2:]
