"""The built book in a real browser: errors, network, themes, phone width, folding, search, stepper."""

import re
from pathlib import Path

import pytest
from book_paths import BOOK, ROOT
from browser import DESKTOP, PHONE, find_browser

from book.build import reading

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)"
)

PAGES = [Path(page).with_suffix(".html") for page in reading.pages(BOOK / "src")]
# The sidebar opens and closes with an animation.
SETTLED = """new Promise(done => {
    const look = () => document.querySelector('main').clientWidth > 300 ? done() : requestAnimationFrame(look); look(); })"""
P22 = "puzzle_22/backward_pass.html"


def test_every_page_opens_without_errors_and_fits(browser, site):
    """Wide content scrolls in its container, and nothing is loaded from the network."""
    for page in PAGES:
        browser.open(site / page)
        for theme in ("light", "navy"):
            browser.run(f"document.getElementById('mdbook-theme-{theme}').click()")
            assert theme in browser.run("document.documentElement.className"), page
            for size in (DESKTOP, PHONE):
                browser.resize(size)
                fits = "scrollWidth <= window.innerWidth"
                assert browser.run(f"{SETTLED}.then(() => document.documentElement.{fits})"), (
                    page,
                    theme,
                    size,
                )
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []


def search(browser, site, query: str) -> list[str]:
    """Return the links of the book's search results."""
    browser.open(site / "index.html")
    browser.run("document.getElementById('mdbook-search-toggle').click()")
    browser.run(
        f"""(() => {{
            const bar = document.getElementById('mdbook-searchbar');
            bar.value = {query!r};
            bar.dispatchEvent(new Event('input', {{bubbles: true}}));
            bar.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}}));
        }})()"""
    )
    browser.wait_for("document.getElementById('mdbook-searchresults-header').textContent.length > 0")
    return browser.run(
        "[...document.querySelectorAll('#mdbook-searchresults a')].map(a => a.getAttribute('href'))"
    )


def list_solution_only_names() -> set[str]:
    """Return names that occur only in the solution's blanks, not in the book or problem file."""
    from harness.learner import blanks

    op = ROOT / "solutions" / "p22" / "op" / "layernorm_linear.mojo"
    bodies = "\n".join("\n".join(blank.body) for blank in blanks.find_blanks(op.read_text()).values())
    visible = "".join(page.read_text() for page in (BOOK / "src").rglob("*.md")) + blanks.make_skeleton(
        op.read_text()
    )
    name = r"\b[a-z]+_[a-z_]+\b"  # with an underscore, since the search stems other words
    return set(re.findall(name, bodies)) - set(re.findall(name, visible))


def test_search_finds_text_but_not_solutions(browser, site):
    assert any("derivation" in link for link in search(browser, site, "diagonal"))
    hidden = list_solution_only_names()
    assert hidden, "no search term"
    for word in sorted(hidden)[:3]:
        assert word in (site / P22).read_text()
        assert search(browser, site, word) == [], word
    assert browser.errors == []


def test_pages_are_readable_without_javascript(browser, site):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(site / P22)
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.run("[...document.querySelectorAll('.step')].every(e => !e.hidden)")


def test_search_index_is_small_and_equals_mdbooks_results(browser, site):
    (index,) = site.glob("searchindex*.js")
    assert index.stat().st_size < 1_000_000
    assert any("races" in link for link in search(browser, site, "atomics"))
    assert "softmaxs-jacobian" in search(browser, site, "Jacobians")[0], "titles have twice the weight"
    assert browser.run("window.search.index.documentStore.length") > 300
    assert browser.run("window.search.index.index.body.root.df") == 0, "the empty string is not indexed"
    for letter, name in (("γ", "gamma"), ("dγ", "dgamma")):
        results = [search(browser, site, word) for word in (letter, name)]
        by_letter, by_name = ([re.sub(r"\?[^#]*", "", link) for link in links] for links in results)
        assert by_letter == by_name != []
    links = browser.run("document.querySelector('#mdbook-searchresults a').innerText")
    assert "»" in links, "a result shows its page"
    assert browser.errors == []


def find_button(label: str) -> str:
    """Return a JavaScript expression for the first stepper's button with this label."""
    return f"[...document.querySelectorAll('.stepper-controls button')].find(b => b.innerText === '{label}')"


def test_stepper_shows_the_five_phases(browser, site):
    browser.open(site / P22)
    visible = "[...document.querySelectorAll('.step')].map(s => s.offsetParent !== null)"
    next_button = find_button("Next")
    for phase in range(5):
        assert browser.run(visible) == [i == phase for i in range(5)]
        assert f"{phase + 1} of 5." in browser.run("document.querySelector('.stepper-controls').innerText")
        assert browser.run(f"{next_button}.disabled") == (phase == 4)
        browser.run(f"{next_button}.click()")
    browser.run(f"{find_button('Back')}.click()")
    assert browser.run(visible)[3]
    browser.run(f"{find_button('Start')}.click()")
    assert browser.run(visible)[0]
    assert browser.errors == []


@pytest.mark.parametrize(
    ("page", "status"),
    [("puzzle_19/puzzle_19", "1 of 9."), ("puzzle_20/puzzle_20", "1 of 11."), ("puzzle_22/puzzle_22", "1 of 5."),
     ("puzzle_23/puzzle_23", "1 of 7."), ("puzzle_23/flash_attention", "1 of 5."), ("puzzle_24/puzzle_24", "1 of 16."),
     ("puzzle_25/puzzle_25", "1 of 9.")],
)  # fmt: skip
def test_stepper_opens_on_its_first_step(browser, site, page, status):
    browser.open(site / f"{page}.html")
    assert browser.run("document.querySelector('.stepper-controls [role=status]').textContent").startswith(
        status
    )


def test_choice_shows_its_reply_and_no_other(browser, site):
    browser.open(site / "puzzle_19" / "puzzle_19.html")
    shown = "[...document.querySelectorAll('.choice li span')].map(reply => !reply.hidden)"
    assert browser.run(shown) == [False, False, False]
    browser.run("document.querySelectorAll('.choice button')[0].click()")
    assert browser.run(shown) == [True, False, False]
    assert browser.run("document.querySelectorAll('.choice li')[0].innerText").split("Yes.")[0].strip() == (
        "Whatever the shared memory contained before"
    )
    assert browser.errors == []


def test_long_line_of_code_hangs_and_keeps_its_text(browser, site):
    source = BOOK / "examples" / "mirrored_row.mojo"
    kernel = source.read_text().split("# ANCHOR: kernel\n")[1].split("# ANCHOR_END")[0]
    browser.resize(PHONE)
    browser.open(site / "puzzle_19" / "puzzle_19.html")
    code = "document.querySelector('code.language-mojo')"
    assert (
        browser.run(f"{code}.textContent").strip()
        == browser.run(f"{code}.innerText").strip()
        == kernel.strip()
    )
    assert browser.run(f"{code}.scrollWidth <= {code}.clientWidth")
    line = f"[...{code}.querySelectorAll('.code-line')].find(line => line.getClientRects()[0].height > 30)"
    starts = browser.run(
        f"(() => {{ const range = document.createRange(); range.selectNodeContents({line});"
        "return [...range.getClientRects()].map(r => r.left); })()"
    )
    assert max(starts) > starts[0], "the rest of the line begins further to the right"


def test_keys_step_a_drawing_without_turning_the_page(browser, site):
    browser.open(site / "puzzle_25/puzzle_25.html")
    address, hero = browser.run("location.href"), "document.querySelector('.hero')"
    browser.run(f"{hero}.focus()")
    browser.press("Home")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.run("location.href") == address and browser.run(f"{hero}.dataset.step") == "2"
    shown = f"""[...{hero}.querySelectorAll('[data-from]')].every(g => (g.getAttribute('visibility') === 'visible') ===
        (g.dataset.from <= 2 && 2 <= g.dataset.to))"""
    assert browser.run(shown)
    browser.press("End")
    assert browser.run(f"{hero}.querySelectorAll('button')[2].disabled") and browser.errors == []


def test_link_opens_its_row_and_click_shows_the_lines(browser, site):
    from harness.check import zoo

    first, second = [wrong.name for wrong in zoo.load_wrong_solutions("p22")][:2]
    browser.open(site / "puzzle_22/museum.html")
    browser.run(f"location.hash = '{first}'")
    lines = "document.querySelectorAll('#{} pre code .hljs-addition').length"
    browser.wait_for(lines.format(first) + " > 0")
    assert browser.run(lines.format(second)) == 0
    browser.run(f"document.querySelector('#{second} summary').click()")
    browser.wait_for(lines.format(second) + " > 0")
    shown = f"document.querySelector('#{second} pre code').innerText"
    assert len(browser.run(shown).splitlines()) > 2, "the table wraps other code, but not these lines"
    browser.open(site / "puzzle_21/museum.html")
    name = "dropout_infinity_times_zero"  # its title contains code
    browser.run(f"document.querySelector('#{name} summary').click()")
    browser.wait_for(lines.format(name) + " > 0")
    assert browser.run("document.querySelectorAll('summary pre').length") == 0
    assert browser.errors == []
