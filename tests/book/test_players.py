"""The two players of the book: what they show is what autograd and the virtual GPU say; keys work, and a still picture without scripts."""

import json

import pytest
import torch
import torch.nn.functional as F
from browser import PHONE, find_browser

from book.figures import figures
from book.measure import outputs

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium or Chrome on this machine (Debian: apt-get install chromium)"
)

GRADIENT = "puzzle_22/derivation.html"
MISTAKES = {
    "the diagonal of J alone": lambda g, x_hat: g * (1 - 1 / 8 - x_hat**2 / 8),
    "without c1": lambda g, x_hat: g - g.mean(),
    "without c2": lambda g, x_hat: g - x_hat * (g * x_hat).mean(),
    "without either": lambda g, x_hat: g,
}


@pytest.fixture
def gradient(browser, site):
    browser.open(site / GRADIENT)
    return browser


@pytest.fixture
def blocks(browser, site):
    browser.open(site / "races.html")
    return browser


def put(browser, x: list[float], g: list[float], mistake: str) -> None:
    """Moves the sliders and chooses a wrong formula, as a reader would."""
    browser.run(
        f"(() => {{ const values = {json.dumps([*x, *g])};"
        "document.querySelectorAll('.player input').forEach((slider, i) => {"
        " slider.value = values[i]; slider.dispatchEvent(new Event('input')); });"
        f"const choice = document.querySelector('.player select'); choice.value = {json.dumps(mistake)};"
        "choice.dispatchEvent(new Event('change')); })()"
    )


def shown(browser, name: str) -> torch.Tensor:
    return torch.tensor(
        json.loads(browser.run(f"document.querySelector('.player').dataset.{name}")), dtype=torch.float64
    )


def test_arrow_keys_move_a_slider_and_do_not_turn_the_page(gradient):
    slider = "document.querySelector('.player input')"
    before, place = gradient.run(f"{slider}.focus(), {slider}.valueAsNumber"), gradient.run("location.href")
    dx = shown(gradient, "dx")
    gradient.press("ArrowRight")
    assert gradient.run("location.href") == place
    assert gradient.run(f"{slider}.valueAsNumber") > before and not torch.equal(shown(gradient, "dx"), dx)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_player_s_gradient_is_autograd_s(gradient, mistake):
    torch.manual_seed(len(mistake))
    for spread in (1.0, 0.003):
        x = (spread * torch.randn(8, dtype=torch.float64)).clamp(-3, 3).requires_grad_()
        g = torch.randn(8, dtype=torch.float64).clamp(-3, 3)
        put(gradient, x.tolist(), g.tolist(), mistake)
        x_hat = F.layer_norm(x, [8])
        (dx,) = torch.autograd.grad(x_hat, x, g)
        torch.testing.assert_close(shown(gradient, "dx"), dx, rtol=1e-6, atol=1e-6)
        rstd = torch.rsqrt(x.detach().var(correction=0) + 1e-5)
        wrong = rstd * MISTAKES[mistake](g, x_hat.detach())
        torch.testing.assert_close(shown(gradient, "wrong"), wrong, rtol=1e-6, atol=1e-6)
    assert gradient.errors == []


def test_what_the_page_says_of_its_buttons_is_so(gradient):
    def press(words: str) -> torch.Tensor:
        gradient.run(
            f"[...document.querySelectorAll('.player button')].find(b => b.innerText === {json.dumps(words)}).click()"
        )
        return shown(gradient, "dx")

    assert press("g the same everywhere").abs().max() < 1e-12
    assert press("g = x̂").abs().max() < 1e-3, "but for eps"
    press("All x nearly equal")
    assert press("g = x̂").abs().max() > 10, "eps is as large as the variance"
    press("As it began")
    dx = press("One x far away")
    assert dx[0].abs() < 1e-5 < dx[1:].abs().max()
    assert "adds up to 0.000" in gradient.run("document.querySelector('.player [role=status]').innerText")
    gradient.run(
        "(() => { const c = document.querySelector('.player select'); c.value = 'without c1'; c.dispatchEvent(new Event('change')); })()"
    )
    assert shown(gradient, "wrong").sum().abs() < 1e-9, "sums to zero and is wrong"


def test_it_begins_as_the_still_picture(gradient):
    start = figures.player_start()
    values = gradient.run("[...document.querySelectorAll('.player input')].map(s => Number(s.value))")
    assert values == start["x"] + start["g"] and len(values) == 16


def test_blocks_in_natural_and_reverse_order_are_what_the_virtual_gpu_recorded(blocks):
    def total() -> int:
        return int(blocks.run("document.querySelector('[data-player=block-orders]').dataset.sum"))

    def press(number: int) -> int:
        blocks.run(f"document.querySelectorAll('[data-player=block-orders] button')[{number}].click()")
        return total()

    for number, name in enumerate(("race_natural", "race_reversed")):
        assert f"cleared inside the kernel: {press(number)}.0 of 16" in outputs.load(name).text
    assert "15 additions are gone" in blocks.run("document.querySelector('.player [role=status]').innerText")
    blocks.run("document.querySelector('.player input[type=checkbox]').click()")
    assert total() == press(2) == 16, "cleared by a launch of its own: right in every order"


def test_a_block_is_moved_by_keys_and_by_taps(blocks):
    def order() -> list[str]:
        return blocks.run("[...document.querySelectorAll('.player-blocks b')].map(b => b.innerText)")

    blocks.run("document.querySelector('.player-blocks > div').focus()")
    blocks.press("ArrowRight")
    blocks.press("ArrowRight")
    assert order()[:4] == ["1", "2", "0", "3"]
    assert blocks.run("document.activeElement.innerText").startswith("0"), "the block keeps the focus"
    assert "2 additions are gone" in blocks.run("document.querySelector('.player [role=status]').innerText")
    blocks.press("End")
    assert order()[-1] == "0"
    blocks.press("ArrowRight")
    assert order()[-1] == "0", "no place behind the last"
    tap = "document.querySelectorAll('.player-blocks > div')[{}].click()"
    blocks.run(tap.format(15))
    blocks.run(tap.format(0))
    assert order() == [str(block) for block in range(16)] and blocks.errors == []


@pytest.mark.parametrize("page", [GRADIENT, "races.html"])
def test_without_scripts_there_is_a_still_picture(site, page):
    html = (site / page).read_text(encoding="utf-8")
    player = html.split('class="player"')[1]
    assert "<svg" in player.split("</figure>")[0] and "<button" not in player.split("</figure>")[0]


@pytest.mark.parametrize("page", [GRADIENT, "races.html"])
def test_players_fit_a_phone(browser, site, page):
    browser.resize(PHONE)
    browser.open(site / page)
    widths = browser.run(
        "[...document.querySelectorAll('.player, .player *')].map(e => e.getBoundingClientRect().right)"
        ".filter(right => right > document.documentElement.clientWidth + 1)"
    )
    assert widths == []
