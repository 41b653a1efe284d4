"""Each named formula of puzzle 23's chapters, compared with autograd and finite differences in float64."""

import re

import pytest
import torch
import torch.nn.functional as F

from harness.toolchain.roots import CHECKOUT

PAGES = [
    CHECKOUT / "book" / "src" / f"{name}.md"
    for name in (
        "puzzle_23/softmax_jacobian",
        "puzzle_23/flash_attention",
        "puzzle_23/flash_kernels",
        "layers",
        "puzzle_25/puzzle_25",
    )
]
S, T, D = 4, 6, 3


class Sample:
    """Random inputs of one head, with attention's values and gradients from autograd."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.s, self.dp = normal(T), 1 + normal(T)
        self.p = torch.softmax(self.s, 0)
        self.jacobian = torch.autograd.functional.jacobian(lambda s: torch.softmax(s, 0), self.s)
        self.ds = self.dp @ self.jacobian
        lengths = (S, T, T)
        self.Q, self.K, self.V = (normal(n, D).requires_grad_() for n in lengths)
        self.dO = 1 + normal(S, D)
        self.scores = self.Q @ self.K.T / D**0.5
        self.P = torch.softmax(self.scores, -1)
        self.O = F.scaled_dot_product_attention(self.Q[None], self.K[None], self.V[None])[0]
        (self.dQ, self.dK, self.dV) = torch.autograd.grad(
            self.O, (self.Q, self.K, self.V), self.dO, retain_graph=True
        )
        self.dS, self.dP = torch.autograd.grad(self.P @ self.V, (self.scores, self.P), self.dO)


def softmax(v):
    weights = [torch.exp(s) for s in v.s]
    return [(weights[j] / sum(weights), v.p[j]) for j in range(T)]


def shifted(v):
    weights = torch.exp(v.s - v.s.max())
    return [(weights / weights.sum(), v.p)]


def entry(v):
    return [(v.p[j] * (float(i == j) - v.p[i]), v.jacobian[j, i]) for i in range(T) for j in range(T)]


def chain(v):
    """Compare with central differences of sum(dp * softmax(s))."""
    step, ones = 1e-6, torch.eye(T, dtype=torch.float64)

    def loss(s):
        return (v.dp * torch.softmax(s, 0)).sum()

    slopes = [(loss(v.s + step * ones[i]) - loss(v.s - step * ones[i])) / (2 * step) for i in range(T)]
    return [(sum(v.dp[j] * v.jacobian[j, i] for j in range(T)), slopes[i]) for i in range(T)]


def ds(v):
    mean = sum(v.dp[j] * v.p[j] for j in range(T))
    return [(v.p[i] * (v.dp[i] - mean), v.ds[i]) for i in range(T)]


def dot(v):
    return [((v.dP * v.P).sum(-1), (v.dO * v.O).sum(-1))]


def rows(v):
    return [(v.dS.sum(-1), torch.zeros(S, dtype=torch.float64))]


def values(v):
    return [(v.dV.sum(0), v.dO.sum(0))]


def even(v):
    return [((v.Q * v.dQ).sum(), (v.K * v.dK).sum())]


def keys(v):
    return [(v.dK.sum(0), torch.zeros(D, dtype=torch.float64))]


class OnlineState:
    """Online softmax state (m, l, a) of the first row after `count` keys, computed from the definitions."""

    def __init__(self, v, count):
        scores, value = v.scores[0, :count].detach(), v.V.detach()
        self.m = scores.max()
        weights = [torch.exp(s - self.m) for s in scores]
        self.l = sum(weights, torch.zeros(()))
        self.a = sum((w * value[j] for j, w in enumerate(weights)), torch.zeros(D))


def seen(v):
    """Compare a / l after all keys with the output: the subtracted maximum cancels."""
    last = OnlineState(v, T)
    return [(last.a / last.l, v.O[0])]


def factor(v):
    m, final_max = OnlineState(v, 1).m, OnlineState(v, T).m
    return [(torch.exp(v.scores[0] - m) * torch.exp(m - final_max), torch.exp(v.scores[0] - final_max))]


def step(v):
    """Check every step between two numbers of keys, with and without a new maximum."""
    pairs, grows = [], set()
    for old in range(1, T):
        for new in range(old + 1, T + 1):
            previous, current = OnlineState(v, old), OnlineState(v, new)
            grows.add(bool(current.m > previous.m))
            rescale = torch.exp(previous.m - current.m)
            weights = torch.exp(v.scores[0, old:new] - current.m)
            pairs.append((previous.l * rescale + weights.sum(), current.l))
            pairs.append((previous.a * rescale + weights @ v.V[old:new], current.a))
    assert grows == {True, False}
    return pairs


def quotient(v):
    last = OnlineState(v, T)
    return [(last.a[c] / last.l, v.O[0, c]) for c in range(D)]


def lse(v):
    last = OnlineState(v, T)
    return [(last.m + torch.log(last.l), torch.logsumexp(v.scores[0], 0))]


def again(v):
    return [(torch.exp(v.scores - torch.logsumexp(v.scores, -1, keepdim=True)), v.P)]


def sums(v):
    root = D**0.5
    return [
        (v.dS @ v.K / root, v.dQ),
        (sum(v.dS[s, :, None] * v.Q[s] for s in range(S)) / root, v.dK),
        (sum(v.P[s, :, None] * v.dO[s] for s in range(S)), v.dV),
    ]


def mask(v):
    """Compare two heads with the mask's gradient from PyTorch's `scaled_dot_product_attention`."""
    M = torch.zeros(1, T, dtype=torch.float64, requires_grad=True)
    Q, dO = (torch.stack([t.detach(), 0.5 - t.detach()]) for t in (v.Q, v.dO))
    K, V = (t.detach().expand(2, T, D) for t in (v.K, v.V))
    (gradient,) = torch.autograd.grad(F.scaled_dot_product_attention(Q, K, V, attn_mask=M), M, dO)
    scores = (Q @ K.mT / D**0.5).requires_grad_()
    (dS,) = torch.autograd.grad(torch.softmax(scores, -1) @ V, scores, dO)
    return [(sum(dS[n, s] for n in range(2) for s in range(S)), gradient[0])]


def parts(v):
    outputs, logs = [], []
    for keys in (slice(0, 2), slice(2, T)):
        logs.append(torch.logsumexp(v.scores[:, keys], -1))
        outputs.append(torch.softmax(v.scores[:, keys], -1) @ v.V[keys])
    L = torch.log(torch.exp(logs[0]) + torch.exp(logs[1]))
    shares = [torch.exp(log - L)[:, None] * output for log, output in zip(logs, outputs, strict=True)]
    return [(sum(shares), v.O)]


def halves(v):
    """Split numbers into two float16 parts; the product of the low parts is as small as the page states."""

    def split(x):
        high = x.half().double()
        return high, (x - high).half().double()

    (x_h, x_l), (y_h, y_l) = split(v.s), split(v.dp)
    assert x_l.all() and y_l.all()
    assert ((x_l * y_l).abs() <= 2.0**-22 * (x_h * y_h).abs()).all()
    torch.testing.assert_close(x_h + x_l, v.s, rtol=2.0**-22, atol=0)
    return [(x_h * y_h + x_h * y_l + x_l * y_h + x_l * y_l, (x_h + x_l) * (y_h + y_l))]


def slots(v):
    """Check that every sequence has enough blocks, and at most one extra."""
    lengths, r = torch.tensor([5, 0, 64, 65, 1, 200, 63, 128]), 64
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    first = torch.floor(offsets / r) + torch.arange(len(offsets))
    unused = first.diff() - torch.ceil(lengths / r)
    assert (unused >= 0).all() and (unused <= 1).all()
    return [(first[-1], float(lengths.sum() // r + len(lengths)))]


def dropout(v):
    """Compare the gradients when dropout zeroes some probabilities; D is still the row sum of dO * O."""
    Z, p = (torch.arange(S * T).reshape(S, T) % 3 != 0).double(), 0.25
    scores = v.scores.detach().requires_grad_()
    P = torch.softmax(scores, -1)
    O = (P * Z) / (1 - p) @ v.V
    dS, dP = torch.autograd.grad(O, (scores, P), v.dO)
    formula = (v.dO @ v.V.T) * Z / (1 - p)
    D = (v.dO * O).sum(-1, keepdim=True)
    return [(formula, dP), (P * (formula - D), dS)]


SOFTMAX_FORMULAS = (softmax, shifted, entry, chain, ds, dot, rows, values, even, keys)
FLASH_FORMULAS = (seen, factor, step, quotient, lse, again, sums, mask, slots, dropout, halves, parts)
FORMULAS = {f.__name__: f for f in (*SOFTMAX_FORMULAS, *FLASH_FORMULAS)}


def test_each_named_formula_has_a_check():
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert re.findall(r"(?<!\{)\{#([\w-]+)\}", pages) == list(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_holds(name):
    pairs = FORMULAS[name](Sample())
    assert pairs
    for claimed, expected in pairs:
        torch.testing.assert_close(
            torch.as_tensor(claimed).detach(), torch.as_tensor(expected).detach(), rtol=1e-7, atol=1e-9
        )
