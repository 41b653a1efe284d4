"""Puzzle 22's solution kernels on the virtual GPU, launched one by one: right values, no finding, byte counts as predicted."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import kept

from harness.vgpu.speed import ROOT, Puzzle, Sizes, case, puzzle_ptx


@pytest.fixture(scope="module")
def ptx():
    op = ROOT / "solutions" / "p22" / "op"
    sources = [*sorted(op.glob("*.mojo")), ROOT / "harness" / "vgpu" / "speed_kernels.mojo"]
    text = kept("puzzle", sources, lambda: "".join(f"//=={n}\n{p}" for n, p in puzzle_ptx().items()))
    return {p.partition("\n")[0]: p.partition("\n")[2] for p in text.split("//==")[1:]}


def truth(c: dict[str, np.ndarray], eps: float = 1e-5) -> dict[str, np.ndarray]:
    """Forward and backward in float64."""
    x, gamma, beta, W, bias, dy = (c[k] for k in ("x", "gamma", "beta", "W", "bias", "dy"))
    mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + eps)
    x_hat = (x - mean[:, None]) * rstd[:, None]
    ln = x_hat * gamma + beta
    dln = dy @ W
    g = dln * gamma
    c1, c2 = (g * x_hat).mean(1, keepdims=True), g.mean(1, keepdims=True)
    return {
        "output": ln @ W.T + bias, "mean": mean, "rstd": rstd, "dx": rstd[:, None] * (g - c2 - x_hat * c1),
        "dgamma": (dln * x_hat).sum(0), "dbeta": dln.sum(0), "dW": dy.T @ ln, "db": dy.sum(0),
    }  # fmt: skip


def rounded(c: dict, dtype: str) -> dict:
    """The case as the device sees it."""
    out = {}
    for name, v in c.items():
        bits = v.astype(np.float32).view(np.uint32)
        if dtype == "bfloat16":
            bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
        out[name] = bits.view(np.float32).astype(np.float64)
    return out


@pytest.mark.parametrize("order", ["natural", "reversed", "shuffled:1"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "sizes,dtype",
    [
        (Sizes(4, 4, 8, 16), "float32"),
        (Sizes(4, 4, 8, 16), "bfloat16"),
        (Sizes(3, 5, 33, 17), "float32"),  # odd sizes: every tile edge is ragged
        (Sizes(1, 1, 1, 1), "float32"),
    ],
)
def test_forward_and_backward(ptx, sizes, dtype, fused, order):
    if order != "natural" and (sizes.S != 4 or dtype != "float32"):
        pytest.skip("block orders are tried on the chapter's case")
    puzzle = Puzzle(ptx, sizes, dtype, blocks=order)
    c = case(sizes)
    for name, values in c.items():
        puzzle.put(name, values)
    puzzle.forward(fused)
    puzzle.backward(fused)
    want = truth(rounded(c, dtype))
    for name, value in want.items():
        got = puzzle.get(name)
        limit = 3e-2 if dtype == "bfloat16" else 2e-5
        scale = max(np.abs(value).max(), 1e-6)
        if sizes.H == 1 and name in ("dx", "dgamma", "rstd"):
            continue  # x_hat is 0 / 0-like with one column: only rounding noise is left
        assert np.abs(got - value).max() <= limit * scale, (name, np.abs(got - value).max(), scale)
    assert not puzzle.gpu.findings, puzzle.gpu.findings[0].text()


def test_bytes_as_the_shapes_predict(ptx):
    """The fused kernel reads W once for every row; the unfused matmul reads it once for every tile of rows."""
    sizes = Sizes(4, 4, 8, 16)
    puzzle = Puzzle(ptx, sizes)
    for name, values in case(sizes).items():
        puzzle.put(name, values)
    puzzle.forward(True)
    fused = puzzle.gpu.launches[-1].counters
    rows, W = 16, 16 * 8 * 4
    assert fused.tensors["W"].read == rows * W
    assert fused.tensors["output"].written == rows * 16 * 4
    assert fused.tensors["mean"].written == rows * 4
    puzzle.forward(False)
    matmul = next(x for x in puzzle.gpu.launches if x.name == "matmul").counters
    assert matmul.tensors["W_t"].read == W and matmul.tensors["output"].written == rows * 16 * 4
    assert matmul.barriers == 2


def test_backward_atomics(ptx):
    sizes = Sizes(4, 4, 8, 16)
    puzzle = Puzzle(ptx, sizes)
    for name, values in case(sizes).items():
        puzzle.put(name, values)
    puzzle.forward(True)
    puzzle.backward(True)
    c = next(x for x in puzzle.gpu.launches if x.name == "fused_backward").counters
    rows = 16
    assert c.atomics == rows * (16 + 16 * 8 + 2 * 8)
    assert c.atomics_per_address == rows


def test_forgotten_clear_is_reported(ptx):
    """Without the clearing launch the atomics add to memory that nobody has written."""
    sizes = Sizes(2, 2, 8, 16)
    puzzle = Puzzle(ptx, sizes)
    for name, values in case(sizes).items():
        puzzle.put(name, values)
    puzzle.forward(True)
    launch = puzzle.launch
    puzzle.launch = lambda kernel, *args: None if kernel == "clear" else launch(kernel, *args)
    puzzle.backward(True)
    found = {(f.kind, f.tensor) for f in puzzle.gpu.findings if f.is_error}
    assert found == {("uninitialised read", t) for t in ("dgamma", "dbeta", "dW", "db")}
