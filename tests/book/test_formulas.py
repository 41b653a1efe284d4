"""The named formulas of the book's derivation match autograd and finite differences.

Formulas are written as in the book, with indices and explicit sums (einsum subscripts are the book's indices), in
float64. Autograd differentiates the forward definition; central differences of a NumPy forward pass are an
independent check.
"""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from book_paths import BOOK
from typed import unwrap

B, S, H, O = 2, 3, 5, 4
EPS = 1e-5
DERIVATION = (BOOK / "src" / "puzzle_22" / "derivation.md").read_text(encoding="utf-8")
NAMED = re.findall(r"\{#([\w-]+)\}", DERIVATION)


class Sample:
    """Random inputs and all intermediate results of the forward pass."""

    def __init__(self, seed: int, eps: float = EPS):
        random = np.random.default_rng(seed)
        self.eps = eps
        self.x = 3 + random.standard_normal((B, S, H))
        self.gamma, self.beta = 1 + random.standard_normal(H), random.standard_normal(H)
        self.W, self.b = random.standard_normal((O, H)), random.standard_normal(O)
        self.dy = 1 + random.standard_normal((B, S, O))
        self.mean = self.x.sum(-1) / H
        self.variance = ((self.x - self.mean[..., None]) ** 2).sum(-1) / H
        self.rstd = 1 / np.sqrt(self.variance + eps)
        self.x_hat = (self.x - self.mean[..., None]) * self.rstd[..., None]
        self.ln_out = self.gamma * self.x_hat + self.beta
        self.dln = np.einsum("bso,oh->bsh", self.dy, self.W)
        self.g = self.dln * self.gamma

    def compute_gradients(self, *names: str) -> list[np.ndarray]:
        """Return autograd's gradients of L = sum(dy * output) with respect to the named tensors."""
        t = {n: torch.tensor(getattr(self, n), requires_grad=True) for n in ("x", "gamma", "beta", "W", "b")}
        t["ln_out"] = F.layer_norm(t["x"], [H], t["gamma"], t["beta"], self.eps)
        output = F.linear(t["ln_out"], t["W"], t["b"])
        gradients = torch.autograd.grad(output, [t[n] for n in names], torch.tensor(self.dy))
        return [gradient.numpy() for gradient in gradients]

    def compute_loss(self, name: str, value: np.ndarray) -> float:
        """Compute L from its definition, with tensor `name` replaced by `value`."""
        t = {n: getattr(self, n) for n in ("x", "gamma", "beta", "W", "b")} | {name: value}
        centred = t["x"] - t["x"].mean(-1, keepdims=True)
        x_hat = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.eps)
        return float((self.dy * ((x_hat * t["gamma"] + t["beta"]) @ t["W"].T + t["b"])).sum())

    def check_gradient(self, name: str, claimed: np.ndarray) -> None:
        """Check a gradient formula against autograd and finite differences of the loss."""
        np.testing.assert_allclose(claimed, self.compute_gradients(name)[0], rtol=1e-10, atol=1e-10)
        differences = compute_central_differences(
            lambda value: self.compute_loss(name, value), getattr(self, name)
        )
        np.testing.assert_allclose(claimed, differences, rtol=1e-5, atol=1e-6)


def compute_central_differences(function, at: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Return a function's numerical Jacobian at `at`, in the shape value.shape + at.shape."""
    columns = []
    for index in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[index] += step
        down[index] -= step
        columns.append((np.asarray(function(up)) - np.asarray(function(down))) / (2 * step))
    return np.stack(columns, -1).reshape(columns[0].shape + at.shape)


def normalize(x: np.ndarray, eps: float = EPS, mean=None, rstd=None) -> np.ndarray:
    """Return x_hat of one row; passing statistics makes them constant, to isolate other gradient paths."""
    mean = x.mean() if mean is None else mean
    rstd = 1 / np.sqrt(((x - x.mean()) ** 2).mean() + eps) if rstd is None else rstd
    return (x - mean) * rstd


def check_forward(name: str, s: Sample) -> None:
    """Check the forward formulas against PyTorch's operators."""
    x = torch.tensor(s.x)
    variance, mean = torch.var_mean(x, -1, correction=0)
    ln_out = F.layer_norm(x, [H], torch.tensor(s.gamma), torch.tensor(s.beta), EPS)
    output = F.linear(ln_out, torch.tensor(s.W), torch.tensor(s.b))
    claimed, truth = {
        "mean": (s.mean, mean),
        "variance": (s.variance, variance),
        "rstd": (s.rstd, torch.rsqrt(variance + EPS)),
        "x_hat": (s.x_hat, F.layer_norm(x, [H], eps=EPS)),
        "ln_out": (s.ln_out, ln_out),
        "output": (np.einsum("oh,bsh->bso", s.W, s.ln_out) + s.b, output),
    }[name]
    np.testing.assert_allclose(claimed, truth.numpy(), rtol=1e-10, atol=1e-12)


def check_dln(s: Sample) -> None:
    np.testing.assert_allclose(s.dln, s.compute_gradients("ln_out")[0], rtol=1e-12)
    loss = lambda ln_out: (s.dy * (ln_out @ s.W.T + s.b)).sum()  # noqa: E731
    np.testing.assert_allclose(s.dln, compute_central_differences(loss, s.ln_out), rtol=1e-6, atol=1e-7)


def check_g(s: Sample) -> None:
    x_hat = torch.tensor(s.x_hat, requires_grad=True)
    output = F.linear(x_hat * torch.tensor(s.gamma) + torch.tensor(s.beta), torch.tensor(s.W))
    np.testing.assert_allclose(s.g, torch.autograd.grad(output, x_hat, torch.tensor(s.dy))[0], rtol=1e-12)
    loss = lambda x_hat: (s.dy * ((x_hat * s.gamma + s.beta) @ s.W.T)).sum()  # noqa: E731
    np.testing.assert_allclose(s.g, compute_central_differences(loss, s.x_hat), rtol=1e-6, atol=1e-7)


def check_db(s: Sample) -> None:
    s.check_gradient("b", np.einsum("bso->o", s.dy))


def check_dW(s: Sample) -> None:
    s.check_gradient("W", np.einsum("bso,bsh->oh", s.dy, s.ln_out))


def check_dgamma(s: Sample) -> None:
    s.check_gradient("gamma", np.einsum("bsh,bsh->h", s.dln, s.x_hat))


def check_dbeta(s: Sample) -> None:
    s.check_gradient("beta", np.einsum("bsh->h", s.dln))


def compute_row_jacobian(s: Sample) -> np.ndarray:
    """Return autograd's d x_hat_j / d x_i of row [0, 0], indexed [i, j]."""
    row = torch.tensor(s.x[0, 0])
    return torch.autograd.functional.jacobian(lambda x: F.layer_norm(x, [H], eps=EPS), row).numpy().T


def check_chain(s: Sample) -> None:
    np.testing.assert_allclose(
        compute_row_jacobian(s) @ s.g[0, 0], s.compute_gradients("x")[0][0, 0], rtol=1e-9, atol=1e-11
    )


def check_direct(s: Sample) -> None:
    x, mean, rstd = s.x[0, 0], s.mean[0, 0], s.rstd[0, 0]
    differences = compute_central_differences(lambda x: normalize(x, mean=mean, rstd=rstd), x)
    np.testing.assert_allclose(np.eye(H) * rstd, differences.T, atol=1e-8)


def check_dmean(s: Sample) -> None:
    np.testing.assert_allclose(
        np.full(H, 1 / H), compute_central_differences(lambda x: x.mean(), s.x[0, 0]), rtol=1e-7
    )


def check_through_mean(s: Sample) -> None:
    x, rstd = s.x[0, 0], s.rstd[0, 0]
    both = compute_central_differences(lambda x: normalize(x, rstd=rstd), x)
    direct = compute_central_differences(lambda x: normalize(x, mean=s.mean[0, 0], rstd=rstd), x)
    np.testing.assert_allclose(np.full((H, H), -rstd / H), (both - direct).T, atol=1e-7)


def check_dvariance(s: Sample) -> None:
    x, mean = s.x[0, 0], s.mean[0, 0]
    middle = 2 / H * (x - mean) - 2 / H**2 * (x - mean).sum()
    end = 2 / H * (x - mean)
    differences = compute_central_differences(lambda x: x.var(), x)
    row = torch.tensor(x, requires_grad=True)
    (autograd,) = torch.autograd.grad(row.var(correction=0), row)
    for claimed in (middle, end):
        np.testing.assert_allclose(claimed, autograd.numpy(), rtol=1e-10, atol=1e-14)
        np.testing.assert_allclose(claimed, differences, rtol=1e-6, atol=1e-9)


def check_drstd(s: Sample) -> None:
    variance, rstd = s.variance[0, 0], s.rstd[0, 0]
    t = torch.tensor(variance, requires_grad=True)
    (autograd,) = torch.autograd.grad(torch.rsqrt(t + EPS), t)
    difference = compute_central_differences(lambda v: 1 / np.sqrt(v + EPS), np.asarray(variance))
    for claimed in (-0.5 * (variance + EPS) ** -1.5, -0.5 * rstd**3):
        np.testing.assert_allclose(claimed, autograd.item(), rtol=1e-12)
        np.testing.assert_allclose(claimed, difference, rtol=1e-6)


def check_through_variance(s: Sample) -> None:
    x, mean, rstd, x_hat = s.x[0, 0], s.mean[0, 0], s.rstd[0, 0], s.x_hat[0, 0]
    middle = np.einsum("j,i->ij", x - mean, -0.5 * rstd**3 * 2 / H * (x - mean))
    end = -rstd / H * np.einsum("i,j->ij", x_hat, x_hat)
    # The path through rstd is the total minus the two other paths.
    everything = compute_central_differences(normalize, x)
    others = compute_central_differences(lambda x: normalize(x, rstd=rstd), x)
    for claimed in (middle, end):
        np.testing.assert_allclose(claimed, (everything - others).T, atol=1e-7)


def check_jacobian_entry(s: Sample) -> None:
    rstd, x_hat = s.rstd[0, 0], s.x_hat[0, 0]
    entry = [[rstd * ((i == j) - 1 / H - x_hat[i] * x_hat[j] / H) for j in range(H)] for i in range(H)]
    np.testing.assert_allclose(entry, compute_row_jacobian(s), rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(entry, compute_central_differences(normalize, s.x[0, 0]).T, atol=1e-7)


def check_jacobian(s: Sample) -> None:
    rstd, x_hat, one = s.rstd[0, 0], s.x_hat[0, 0], np.ones(H)
    matrix = rstd * (np.eye(H) - np.outer(one, one) / H - np.outer(x_hat, x_hat) / H)
    np.testing.assert_allclose(matrix, matrix.T)
    np.testing.assert_allclose(matrix, compute_row_jacobian(s), rtol=1e-9, atol=1e-11)


def check_dx(s: Sample) -> None:
    c2 = s.g.sum(-1, keepdims=True) / H
    c1 = (s.g * s.x_hat).sum(-1, keepdims=True) / H
    s.check_gradient("x", s.rstd[..., None] * (s.g - c2 - s.x_hat * c1))


def check_sum_zero(s: Sample) -> None:
    dx = s.compute_gradients("x")[0]
    np.testing.assert_allclose(dx.sum(-1), 0, atol=1e-12 * np.abs(dx).max() * H)


def check_scale(s: Sample) -> None:
    for eps in (0.5, 1e-2, EPS):  # both sides shrink with eps, so test large values, too
        other = Sample(7, eps)
        left = (other.compute_gradients("x")[0] * other.x_hat).sum(-1)
        right = eps * other.rstd**3 * (other.g * other.x_hat).sum(-1)
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-12)


def check_parts(s: Sample) -> None:
    """c2, c1 x_hat and dx / rstd add up to g, and dx / rstd is orthogonal to 1 and x_hat."""
    s = Sample(5, eps=0.0)
    c2, c1 = s.g.mean(-1, keepdims=True), (s.g * s.x_hat).mean(-1, keepdims=True)
    rest = s.compute_gradients("x")[0] / s.rstd[..., None]
    np.testing.assert_allclose(c2 + c1 * s.x_hat + rest, s.g, rtol=1e-10)
    np.testing.assert_allclose([rest.sum(-1), (rest * s.x_hat).sum(-1)], 0, atol=1e-10)


CHECKS = {
    **{
        name: (lambda s, name=name: check_forward(name, s))
        for name in ("mean", "variance", "rstd", "x_hat", "ln_out", "output")
    },
    "dln": check_dln,
    "g": check_g,
    "db": check_db,
    "dW": check_dW,
    "dgamma": check_dgamma,
    "dbeta": check_dbeta,
    "chain": check_chain,
    "direct": check_direct,
    "dmean": check_dmean,
    "through-mean": check_through_mean,
    "dvariance": check_dvariance,
    "drstd": check_drstd,
    "through-variance": check_through_variance,
    "jacobian-entry": check_jacobian_entry,
    "jacobian": check_jacobian,
    "dx": check_dx,
    "sum-zero": check_sum_zero,
    "scale": check_scale,
    "parts": check_parts,
}


@pytest.mark.parametrize("name", NAMED)
def test_formula_matches_autograd(name):
    for seed in range(3):
        CHECKS[name](Sample(seed))


def test_each_display_formula_is_named_and_checked():
    assert len(re.findall(r"^\$\$.*\$\$", DERIVATION, re.M)) == len(NAMED) == len(set(NAMED))
    assert set(NAMED) == set(CHECKS)


def test_diagonal_approximation_is_wrong():
    s = Sample(0)
    diagonal = s.g * s.rstd[..., None] * (1 - 1 / H - s.x_hat**2 / H)
    truth = s.compute_gradients("x")[0]
    assert np.abs(diagonal - truth).max() > 0.1 * np.abs(truth).max()


def test_documented_kernel_mistakes_change_the_result():
    """Check dW computed from x_hat instead of the LayerNorm output, and dx without gamma."""
    s = Sample(0)
    wrong_dW = np.einsum("bso,bsh->oh", s.dy, s.x_hat)
    assert not np.allclose(wrong_dW, s.compute_gradients("W")[0], rtol=1e-2)
    c1, c2 = (s.dln * s.x_hat).mean(-1, keepdims=True), s.dln.mean(-1, keepdims=True)
    assert not np.allclose(
        s.rstd[..., None] * (s.dln - c2 - s.x_hat * c1), s.compute_gradients("x")[0], rtol=1e-2
    )


@pytest.mark.parametrize(
    ("first", "second"), [(0.0, 1.0), (2.0, 1.884), (3.0, 3.0 + 1e-4), (0.5, 0.5), (-40.0, 7.0)]
)
def test_layernorm_of_two_columns(first, second):
    """The dx of a row of two numbers, {#two}, matches autograd, and the page's numbers are correct."""
    page = (BOOK / "src" / "puzzle_22" / "derive.md").read_text(encoding="utf-8")
    assert "{#two}" in page and r"\tfrac12\,\varepsilon\,\mathrm{rstd}^3\,(g_1 - g_2)" in page
    g = np.array([1.7, -0.4])
    row = torch.tensor([first, second], dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(F.layer_norm(row, [2], eps=EPS), row, torch.tensor(g))
    rstd = 1 / np.sqrt(((first - second) / 2) ** 2 + EPS)
    claimed = EPS * rstd**3 * (g[0] - g[1]) / 2
    np.testing.assert_allclose(dx.numpy(), [claimed, -claimed], rtol=1e-6, atol=1e-9)
    factor = dx[0].item() / ((g[0] - g[1]) / 2)
    if (first, second) == (0.0, 1.0):
        assert f"${factor:.5f}\\,(g_1 - g_2)/2$" in page
    if first == second:
        assert f"${factor:.0f}\\,(g_1 - g_2)/2$" in page
    assert f"{2 * np.sqrt(EPS):.4f}" == unwrap(re.search(r"2\\sqrt\\varepsilon = ([\d.]+)", page))[1]


def test_last_gates_formula_matches_autograd():
    """The gradient of RMSNorm + Linear matches autograd and finite differences."""
    page = (BOOK / "src" / "puzzle_22" / "transfer.md").read_text(encoding="utf-8")
    assert re.findall(r"\{#([\w-]+)\}", page) == ["rms-dx"]
    s = Sample(0)

    def normalize_by_rms(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.einsum("bsk,bsk->bs", x, x) / H + EPS)[..., None]

    rstd = 1 / np.sqrt(np.einsum("bsk,bsk->bs", s.x, s.x) / H + EPS)[..., None]
    x_hat = normalize_by_rms(s.x)
    claimed = rstd * (s.g - x_hat * (np.einsum("bsj,bsj->bs", s.g, x_hat) / H)[..., None])
    x = torch.tensor(s.x, requires_grad=True)
    output = F.linear(F.rms_norm(x, [H], torch.tensor(s.gamma), EPS), torch.tensor(s.W))
    by_autograd = torch.autograd.grad(output, x, torch.tensor(s.dy))[0].numpy()
    np.testing.assert_allclose(claimed, by_autograd, rtol=1e-10, atol=1e-10)
    differences = compute_central_differences(
        lambda value: float((s.dy * ((normalize_by_rms(value) * s.gamma) @ s.W.T)).sum()), s.x
    )
    np.testing.assert_allclose(claimed, differences, rtol=1e-5, atol=1e-6)


def read_page(name: str, *formulas: str) -> str:
    """Return a page's text after asserting that `formulas` are all its named formulas."""
    text = (BOOK / "src" / name).read_text(encoding="utf-8")
    assert re.findall(r"\$\$ \{#([\w-]+)\}", text) == list(formulas)
    return text


def test_local_derivatives_match_finite_differences():
    """The derivatives {#local} of one row match finite differences."""
    read_page("puzzle_22/derive.md", "local", "two")
    s = Sample(3)
    ln = s.ln_out[0, 0]
    by_W = compute_central_differences(lambda W: W @ ln + s.b, s.W)  # [o, o', h]
    np.testing.assert_allclose(by_W, np.einsum("oi,h->oih", np.eye(O), ln), atol=1e-8)
    np.testing.assert_allclose(compute_central_differences(lambda b: s.W @ ln + b, s.b), np.eye(O), atol=1e-8)
    x_hat = s.x_hat[0, 0]
    by_gamma = compute_central_differences(lambda gamma: gamma * x_hat + s.beta, s.gamma)
    np.testing.assert_allclose(by_gamma, np.diag(x_hat), atol=1e-8)
    by_beta = compute_central_differences(lambda beta: s.gamma * x_hat + beta, s.beta)
    np.testing.assert_allclose(by_beta, np.eye(H), atol=1e-8)


def test_layernorm_after_the_product():
    """The formulas {#after} and {#dw-after} of the page on fusing are correct, and its numbers follow from the shapes."""
    text = read_page("fast/why_not_fused.md", "after", "dw-after")
    s = Sample(4)
    folded = s.gamma * s.W
    bracket = np.einsum("bsh,oh->bso", s.x, folded) - s.mean[..., None] * folded.sum(1)
    claimed = s.rstd[..., None] * bracket + s.W @ s.beta + s.b
    np.testing.assert_allclose(claimed, np.einsum("oh,bsh->bso", s.W, s.ln_out) + s.b, rtol=1e-12)
    scaled = s.dy * s.rstd[..., None]
    products = np.einsum("bso,bsh->oh", scaled, s.x) - np.einsum("bso,bs->o", scaled, s.mean)[:, None]
    s.check_gradient("W", s.gamma * products + np.einsum("h,bso->oh", s.beta, s.dy))

    rows, hidden, outputs, widest = 4096, 768, 3072, 256
    recomputed = rows * hidden * outputs // widest
    assert (
        f"{outputs // widest} blocks" in text
        and f"{recomputed / 10**6:.0f} million elements instead of" in text
    )
    # A conversion, two multiply-adds, and half a conversion of two values.
    assert f"{3.5 * recomputed / (132 * 128 * 1.98e9) * 1e6:.1f} µs" in text


def test_layernorm_hides_scale_but_not_sign():
    read_page("essays/step_that_unlearns.md", "scaled")
    v = 3 * torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for a in (-20.0, -0.5, 0.5, 20.0):
        torch.testing.assert_close(
            F.layer_norm(a * v, [64]), np.sign(a) * F.layer_norm(v, [64]), rtol=1e-4, atol=1e-4
        )
