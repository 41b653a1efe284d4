"""The built book in a real browser: no error, no network, both themes, phone width, folding, search, stepper."""

import re
from pathlib import Path

import pytest
from book_paths import BOOK, ROOT
from browser import DESKTOP, PHONE, find_browser
from typed import present

from book.build import reading

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)"
)

PAGES = [Path(page).with_suffix(".html") for page in reading.pages(BOOK / "src")]
P22 = "puzzle_22/backward_pass.html"
DERIVATION = "puzzle_22/derivation.html"


def test_every_page_opens_clean_and_fits(browser, site):
    """Wide things scroll in their own boxes, the page never does; at desktop width no table, on a phone no figure either."""
    wide = "[...document.querySelectorAll('{}')].filter(e => e.scrollWidth > e.clientWidth + 2).map(e => e.innerText)"
    for page in PAGES:
        browser.resize(DESKTOP)
        browser.open(site / page)
        assert browser.run("[...document.querySelectorAll('main details')].every(d => !d.open)"), page
        for size, what in ((DESKTOP, ".table-wrapper"), (PHONE, "main figure")):
            browser.resize(size)
            browser.wait_for("document.querySelector('main').clientWidth > 300")  # the sidebar takes its time
            assert browser.run("document.documentElement.scrollWidth <= window.innerWidth"), (page, size)
            assert browser.run(wide.format(what)) == [], (page, size)
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("theme", ["light", "navy"])
def test_a_theme_is_remembered_from_page_to_page(browser, site, theme):
    browser.run(f"localStorage.setItem('mdbook-theme', '{theme}')")
    for page in PAGES[:3]:
        browser.open(site / page)
        assert theme in browser.run("document.documentElement.className"), page
    assert browser.errors == []


@pytest.mark.parametrize("theme", ["light", "rust", "coal", "navy", "ayu"])
def test_text_formulas_and_labels_are_legible(browser, site, theme):
    """Contrast of 4.5 and more, by the WCAG formula, for what the workbook's own style sheet colours."""
    browser.run(f"localStorage.setItem('mdbook-theme', '{theme}')")
    for page, count in ((P22, 7), (DERIVATION, 7)):
        browser.open(site / page)
        ratios = browser.run(CONTRAST)
        assert len(ratios) == count, page
        assert all(ratio >= 4.5 for ratio in ratios.values()), ratios


CONTRAST = """(() => {
    function rgba(text) { const n = text.match(/[\\d.]+/g).map(Number); return n.length === 4 ? n : [...n, 1]; }
    function luminance(c) {
        const [r, g, b] = c.map(v => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    }
    function background(e) {
        for (; e; e = e.parentElement) {
            const c = rgba(getComputedStyle(e).backgroundColor);
            if (c[3] > 0) { return c; }
        }
        return [255, 255, 255, 1];
    }
    const out = {};
    for (const selector of ['main p', 'main p a', '.math', '.formula-name', '.output-source', 'figcaption', '.hint summary',
        '.sidebar .active']) {
        const element = document.querySelector(selector);
        if (!element) { continue; }
        const back = background(element);
        const style = getComputedStyle(element), color = rgba(style.color);
        const alpha = color[3] * Number(style.opacity);
        const seen = color.slice(0, 3).map((v, i) => v * alpha + back[i] * (1 - alpha));
        const [a, b] = [luminance(seen), luminance(back.slice(0, 3))].sort((x, y) => y - x);
        out[selector] = (a + 0.05) / (b + 0.05);
    }
    return out;
})()"""


def search(browser, site, words: str) -> list[str]:
    """The links that the book's own search shows for some words."""
    browser.open(site / "index.html")
    browser.run("document.getElementById('mdbook-search-toggle').click()")
    browser.run(
        f"""(() => {{
            const bar = document.getElementById('mdbook-searchbar');
            bar.value = {words!r};
            bar.dispatchEvent(new Event('input', {{bubbles: true}}));
            bar.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}}));
        }})()"""
    )
    browser.wait_for("document.getElementById('mdbook-searchresults-header').textContent.length > 0")
    return browser.run(
        "[...document.querySelectorAll('#mdbook-searchresults a')].map(a => a.getAttribute('href'))"
    )


def solution_only_words() -> set[str]:
    """Names that stand in the solution's blanks and nowhere else in the book or in the problem file."""
    from harness.learner import blanks

    op = ROOT / "solutions" / "p22" / "op" / "layernorm_linear.mojo"
    bodies = "\n".join("\n".join(blank.body) for blank in blanks.find(op.read_text()).values())
    visible = "".join(page.read_text() for page in (BOOK / "src").rglob("*.md")) + blanks.skeleton(
        op.read_text()
    )
    name = r"\b[a-z]+_[a-z_]+\b"  # with an underscore: the search reduces plain words to their stems
    return set(re.findall(name, bodies)) - set(re.findall(name, visible))


def test_search_finds_the_text_but_no_solution(browser, site):
    assert any("derivation" in link for link in search(browser, site, "diagonal"))
    hidden = solution_only_words()
    assert hidden, "no word to look for"
    for word in sorted(hidden)[:3]:
        assert word in (site / P22).read_text() or word in (site / "puzzle_22/forward_pass.html").read_text()
        assert search(browser, site, word) == [], word
    assert browser.errors == []


def test_without_javascript_everything_can_be_read(browser, site):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(site / P22)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.run("[...document.querySelectorAll('.step')].every(e => !e.hidden)")


def test_folds_are_open_on_paper_and_closed_again(browser, site):
    folds = "[...document.querySelectorAll('main details')].filter(fold => fold.open).length"
    browser.open(site / P22)
    assert browser.run(folds) == 0
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run(folds) == browser.run("document.querySelectorAll('main details').length") > 10
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    assert browser.run(folds) == 0


def test_a_table_on_a_phone_has_whole_names_a_header_that_stays_and_an_edge_that_fades(browser, site):
    browser.resize(PHONE)
    browser.open(site / "fast" / "sizes.html")
    browser.run("document.querySelectorAll('details').forEach(fold => { fold.open = true; })")
    browser.run(
        "window.box = [...document.querySelectorAll('.table-wrapper')].find(box => "
        "box.innerText && box.scrollHeight > box.clientHeight + 150 && box.scrollWidth > box.clientWidth + 2); true"
    )
    assert browser.run(
        "[...box.querySelectorAll('td:first-child')].every(cell => { const range = document.createRange(); "
        "range.selectNodeContents(cell); return range.getClientRects().length === 1; })"
    )
    more = "new Promise(done => setTimeout(done, 200)).then(() => box.classList.contains('more'))"
    assert browser.run(more) is True
    browser.run("box.scrollTo(1e5, 200)")
    assert browser.run(more) is False and browser.run("box.scrollTop") > 100
    away = "box.querySelector('th').getBoundingClientRect().top - box.getBoundingClientRect().top"
    assert abs(browser.run(away)) < 2
    browser.resize(DESKTOP)
    assert browser.run(more) is False


def test_a_formula_that_is_wider_than_a_phone_has_an_edge_that_fades(browser, site):
    browser.resize(PHONE)
    browser.open(site / "puzzle_22" / "derivation.html")
    faded = (
        "new Promise(done => setTimeout(done, 200)).then(() => [...document.querySelectorAll('.math-display')].every("
        "box => box.classList.contains('more') === box.scrollWidth > box.clientWidth + 2))"
    )
    wide = "document.querySelectorAll('.math-display.more').length"
    assert browser.run(faded) and browser.run(wide) > 0
    browser.resize(DESKTOP)
    assert browser.run(faded) and browser.run(wide) == 0


def test_a_formula_is_out_of_sight_and_can_be_copied(browser, site):
    browser.open(site / DERIVATION)
    spoken = "document.querySelector('#formula-dx .math-spoken')"
    assert (
        browser.run(f"{spoken}.querySelector('math') !== null && {spoken}.getBoundingClientRect().width") == 1
    )
    copied = browser.run(
        "(() => { const s = getSelection(); s.selectAllChildren(document.querySelector('#formula-dx')); return s.toString(); })()"
    )
    assert "".join(copied.split()).startswith("dx𝑖=rstd(𝑔𝑖")


def test_the_search_index_is_small_and_finds_what_mdbook_s_own_finds(browser, site):
    (index,) = site.glob("searchindex*.js")
    assert index.stat().st_size < 1_000_000
    assert any("races" in link for link in search(browser, site, "atomics"))
    assert "softmaxs-jacobian" in search(browser, site, "Jacobians")[0], "a title counts double"
    assert browser.run("window.search.index.documentStore.length") > 500
    assert browser.run("window.search.index.index.body.root.df") == 0, "the empty word is no word"
    links = browser.run("document.querySelector('#mdbook-searchresults a').innerText")
    assert "»" in links, "a result names the page that it is on"
    assert browser.errors == []


def button(words: str) -> str:
    """The button of a page's first stepper with these words on it."""
    return f"[...document.querySelectorAll('.stepper-controls button')].find(b => b.innerText === '{words}')"


def test_stepper_walks_through_the_five_phases(browser, site):
    browser.open(site / P22)
    visible = "[...document.querySelectorAll('.step')].map(s => s.offsetParent !== null)"
    next_button = button("Next")
    for phase in range(5):
        assert browser.run(visible) == [i == phase for i in range(5)]
        assert f"{phase + 1} of 5." in browser.run("document.querySelector('.stepper-controls').innerText")
        assert browser.run(f"{next_button}.disabled") == (phase == 4)
        browser.run(f"{next_button}.click()")
    browser.run(f"{button('Back')}.click()")
    assert browser.run(visible)[3]
    browser.run(f"{button('Start')}.click()")
    assert browser.run(visible)[0]
    assert browser.errors == []


def test_a_row_of_data_lights_up_with_its_code_and_formula(browser, site):
    browser.open(site / P22)
    browser.run("document.querySelectorAll('.step details').forEach(fold => { fold.open = true; })")
    step = "document.querySelectorAll('.step')[3]"
    browser.run(f"for (let i = 0; i < 3; i++) {button('Next')}.click()")
    lit = f"[...{step}.querySelectorAll('.code-line.lit')].map(line => line.innerText.trim())"
    assert browser.run(lit) == []
    browser.run(f"{step}.querySelectorAll('tr')[2].focus()")  # dln * x_hat
    assert browser.run(lit) == ["atomic_add(grad_ln_weight, h, dln * x_hat)"]
    assert browser.run(f"{step}.querySelector('.math-display').classList.contains('lit')")
    browser.run("document.activeElement.blur()")
    assert browser.run(lit) == []
    # Every row has its lines, but for those of the first step, whose formula alone speaks of them.
    rows = "[...document.querySelectorAll('.step')].flatMap(s => [...s.querySelectorAll('tr')].map(r => {"
    counts = browser.run(
        rows
        + " r.focus(); r.dispatchEvent(new Event('focus')); const n = s.querySelectorAll('.code-line.lit').length;"
        " r.dispatchEvent(new Event('blur')); return [r.dataset.names, n]; }))"
    )
    assert len(counts) == 13 and browser.errors == []
    assert [names for names, lines in counts if not lines] == ["x", "x_hat"]


def test_a_wide_figure_is_enlarged_on_a_phone_and_whole_again(browser, site):
    browser.resize(PHONE)
    browser.open(site / "races.html")
    width = "document.querySelector('figure.enlarges > svg').getBoundingClientRect().width"
    tap = "document.querySelector('figure.enlarges > svg').dispatchEvent(new Event('click'))"
    whole = browser.run(width)
    browser.run(tap)
    assert whole <= 390 < 700 < browser.run(width)
    assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    browser.run("document.querySelector('figure.enlarges > svg').focus()")
    browser.press("Enter")
    assert browser.run(width) == whole
    browser.resize(DESKTOP)
    browser.run(tap)
    assert not browser.run("document.querySelector('figure.enlarged')")


def test_mojo_is_highlighted(browser, site):
    browser.open(site / P22)
    assert browser.run("document.querySelectorAll('code.language-mojo .hljs-keyword').length") > 20


def test_print_page_shows_every_chapter(browser, site):
    browser.open(site / "print.html")
    headings = browser.run("[...document.querySelectorAll('main h1')].map(h => h.innerText.trim())")
    chapters = [(BOOK / "src" / page).with_suffix(".md").read_text() for page in PAGES]
    titles = {present(re.search(r"^# (.+)$", chapter, re.M))[1].replace("`", "") for chapter in chapters}
    assert titles <= set(headings)
    assert browser.errors == []
