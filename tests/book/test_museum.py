"""The museum: every wrong solution has its exhibit, made from its file and the code; recorded losses are those of a fresh run."""

import re
from dataclasses import replace

import numpy as np
import pytest
from book_paths import BOOK
from typed import present

from harness.check import zoo
from harness.errors import DamagedFile
from harness.spec.catalogue import puzzle_names


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    from book.build import museum

    return {name: make() for name, make in museum.pages().items()}


def test_every_wrong_solution_is_in_the_room_of_its_puzzle(pages):
    for puzzle in puzzle_names():
        names = [wrong.name for wrong in zoo.load(puzzle)]
        page = BOOK / "src" / f"puzzle_{puzzle.removeprefix('p')}" / "museum.md"
        shown = re.findall(r"generated/(museum_\w+\.md)", page.read_text())
        ids = [id for name in shown for id in re.findall(r'class="exhibit" id="(\w+)"', pages[name])]
        assert sorted(ids) == names, puzzle
        assert f"({page.relative_to(BOOK / 'src')}) | {len(names)} |" in pages["museum.md"]


def exhibit(page: str, name: str) -> str:
    """From its summary to the next one's."""
    (own,) = [part for part in page.split('<details class="exhibit-fold">') if f'id="{name}"' in part]
    return own


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


def test_words_between_backquotes_stay_code_and_no_other_sign_is_markdown():
    from book.build import museum

    assert museum.marked("x * y and `a_b[0]`, c_d") == r"x \* y and `a_b[0]`, c\_d"


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
