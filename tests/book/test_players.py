"""The book's two players show the results of autograd and the virtual GPU, react to keys, and show a picture without scripts."""

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


def set_inputs(browser, x: list[float], g: list[float], mistake: str) -> None:
    """Move the sliders and choose a wrong formula, as a reader would."""
    browser.run(
        f"(() => {{ const values = {json.dumps([*x, *g])};"
        "document.querySelectorAll('.player input').forEach((slider, i) => {"
        " slider.value = values[i]; slider.dispatchEvent(new Event('input')); });"
        f"const choice = document.querySelector('.player select'); choice.value = {json.dumps(mistake)};"
        "choice.dispatchEvent(new Event('change')); })()"
    )


def read_tensor(browser, name: str) -> torch.Tensor:
    return torch.tensor(
        json.loads(browser.run(f"document.querySelector('.player').dataset.{name}")), dtype=torch.float64
    )


def test_arrow_keys_move_a_slider_not_the_page(gradient):
    slider = "document.querySelector('.player input')"
    before, address = gradient.run(f"{slider}.focus(), {slider}.valueAsNumber"), gradient.run("location.href")
    dx = read_tensor(gradient, "dx")
    gradient.press("ArrowRight")
    assert gradient.run("location.href") == address
    assert gradient.run(f"{slider}.valueAsNumber") > before and not torch.equal(
        read_tensor(gradient, "dx"), dx
    )


@pytest.mark.parametrize("mistake", MISTAKES)
def test_player_gradient_matches_autograd(gradient, mistake):
    torch.manual_seed(len(mistake))
    for spread in (1.0, 0.003):
        x = (spread * torch.randn(8, dtype=torch.float64)).clamp(-3, 3).requires_grad_()
        g = torch.randn(8, dtype=torch.float64).clamp(-3, 3)
        set_inputs(gradient, x.tolist(), g.tolist(), mistake)
        x_hat = F.layer_norm(x, [8])
        (dx,) = torch.autograd.grad(x_hat, x, g)
        torch.testing.assert_close(read_tensor(gradient, "dx"), dx, rtol=1e-6, atol=1e-6)
        rstd = torch.rsqrt(x.detach().var(correction=0) + 1e-5)
        wrong = rstd * MISTAKES[mistake](g, x_hat.detach())
        torch.testing.assert_close(read_tensor(gradient, "wrong"), wrong, rtol=1e-6, atol=1e-6)
    assert gradient.errors == []


def test_buttons_set_the_described_inputs(gradient):
    def press(message: str) -> torch.Tensor:
        gradient.run(
            f"[...document.querySelectorAll('.player button')].find(b => b.innerText === {json.dumps(message)}).click()"
        )
        return read_tensor(gradient, "dx")

    assert press("g the same everywhere").abs().max() < 1e-12
    assert press("g = x̂").abs().max() < 1e-3, "0 except for eps"
    press("All x nearly equal")
    assert press("g = x̂").abs().max() > 10, "eps is as large as the variance"
    press("Reset")
    dx = press("One x far away")
    assert dx[0].abs() < 1e-5 < dx[1:].abs().max()
    assert "dx sums to 0.000" in gradient.run("document.querySelector('.player [role=status]').innerText")
    gradient.run(
        "(() => { const c = document.querySelector('.player select'); c.value = 'without c1'; c.dispatchEvent(new Event('change')); })()"
    )
    assert read_tensor(gradient, "wrong").sum().abs() < 1e-9, "sums to zero and is wrong"


def test_player_starts_as_the_still_picture(gradient):
    start = figures.player_start()
    values = gradient.run("[...document.querySelectorAll('.player input')].map(s => Number(s.value))")
    assert values == start["x"] + start["g"] and len(values) == 16


def test_block_orders_match_the_virtual_gpu_record(blocks):
    def read_sum() -> int:
        return int(blocks.run("document.querySelector('[data-player=block-orders]').dataset.sum"))

    def press(number: int) -> int:
        blocks.run(f"document.querySelectorAll('[data-player=block-orders] button')[{number}].click()")
        return read_sum()

    for number, name in enumerate(("race_natural", "race_reversed")):
        assert f"cleared inside the kernel: {press(number)}.0 of 16" in outputs.load(name).text
    assert "15 additions are lost" in blocks.run("document.querySelector('.player [role=status]').innerText")
    blocks.run("document.querySelector('.player input[type=checkbox]').click()")
    assert read_sum() == press(2) == 16, "cleared by a separate launch: correct in every order"


def test_block_moves_by_keys_and_taps(blocks):
    def read_order() -> list[str]:
        return blocks.run("[...document.querySelectorAll('.player-blocks b')].map(b => b.innerText)")

    blocks.run("document.querySelector('.player-blocks > div').focus()")
    blocks.press("ArrowRight")
    blocks.press("ArrowRight")
    assert read_order()[:4] == ["1", "2", "0", "3"]
    assert blocks.run("document.activeElement.innerText").startswith("0"), "the block keeps the focus"
    assert "2 additions are lost" in blocks.run("document.querySelector('.player [role=status]').innerText")
    blocks.press("End")
    assert read_order()[-1] == "0"
    blocks.press("ArrowRight")
    assert read_order()[-1] == "0", "the last block cannot move right"
    tap = "document.querySelectorAll('.player-blocks > div')[{}].click()"
    blocks.run(tap.format(15))
    blocks.run(tap.format(0))
    assert read_order() == [str(block) for block in range(16)] and blocks.errors == []


@pytest.mark.parametrize("page", [GRADIENT, "races.html"])
def test_still_picture_without_scripts(site, page):
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
