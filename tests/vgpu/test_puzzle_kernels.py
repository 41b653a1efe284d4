"""Puzzle 22's solution kernels on the virtual GPU, recorded and replayed: right values, no finding, bytes as predicted."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import kept

from harness.vgpu.speed import RECORDER, ROOT, Case, Replay, main, parse, record, to_device

CHAPTER = (4, 4, 8, 16)


@pytest.fixture(scope="module")
def recording():
    sources = [*sorted((ROOT / "solutions" / "p22" / "op").glob("*.mojo")), RECORDER]
    return parse(kept("puzzle", sources, record))


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


def as_seen(case: Case) -> dict[str, np.ndarray]:
    """The inputs after rounding to the device's type, in float64."""
    out = {}
    for name, values in case.inputs().items():
        raw = to_device(values, case.dtype)
        out[name] = (
            (raw.astype(np.uint32) << 16).view(np.float32) if raw.dtype == np.uint16 else raw
        ).astype(float)
    return out


@pytest.mark.parametrize("variant", ["unfused", "fused"])
@pytest.mark.parametrize(
    "dtype,sizes,order",
    [
        ("float32", CHAPTER, "natural"),
        ("float32", CHAPTER, "reversed"),
        ("float32", CHAPTER, "shuffled:1"),
        ("bfloat16", CHAPTER, "natural"),
        ("float32", (3, 5, 33, 17), "natural"),  # odd sizes: every tile edge is ragged
        ("float32", (1, 1, 1, 1), "natural"),
    ],
)
def test_forward_and_backward(recording, dtype, sizes, order, variant):
    case = recording.case(variant, dtype, *sizes)
    replay = Replay(recording, blocks=order)
    replay.run(case)
    for name, want in truth(as_seen(case)).items():
        if sizes == (1, 1, 1, 1) and name in ("dx", "dgamma"):
            continue  # one column has no variance: these are 0 but for rounding, times rstd = 316
        got = replay.get(name, case)
        limit = 3e-2 if dtype == "bfloat16" else 2e-5
        error = np.abs(got - want).max()
        assert error <= limit * np.abs(want).max(), (name, error)
    assert not replay.gpu.findings, replay.gpu.findings[0].text()


def test_bytes_as_the_shapes_predict(recording):
    """The fused kernel reads W once for every row; the unfused matmul reads it once for every tile of rows."""
    rows, O, W = 16, 16, 16 * 8 * 4
    counters = {}
    for variant in ("fused", "unfused"):
        replay = Replay(recording)
        replay.run(recording.case(variant, "float32", *CHAPTER))
        for launch in replay.gpu.launches:
            counters.setdefault((variant, launch.name), launch.counters)
    fused = next(c for (v, name), c in counters.items() if v == "fused" and "forward" in name)
    assert fused.tensors["W"].read == rows * W
    assert fused.tensors["output"].written == rows * O * 4
    assert fused.tensors["mean"].written == rows * 4
    matmul = counters["unfused", "matmul"]
    assert matmul.tensors["linear_weight_t"].read == W and matmul.tensors["output"].written == rows * O * 4
    assert matmul.barriers == 2
    backward = next(c for (v, name), c in counters.items() if v == "fused" and "backward" in name)
    assert backward.atomics == rows * (16 + 16 * 8 + 2 * 8)
    assert backward.atomics_per_address == rows


def test_forgotten_clear_is_reported(recording):
    """Without the clearing launch the atomics add to memory that nobody has written."""
    replay = Replay(recording)
    replay.run(recording.case("fused", "float32", *CHAPTER), skip=("clear_gradients",))
    kinds = {f.kind for f in replay.gpu.findings if f.is_error}
    assert kinds == {"uninitialised read"}
    assert {f.tensor for f in replay.gpu.findings} == {
        "sums_ln_weight",
        "sums_ln_bias",
        "sums_weight",
        "sums_bias",
    }


def test_speed_command(recording, monkeypatch, capsys):
    """The command runs what it says; times are printed, not judged."""
    import harness.vgpu.speed as speed

    monkeypatch.setattr(speed, "record", lambda: "")
    monkeypatch.setattr(speed, "parse", lambda text: recording)
    monkeypatch.setattr(Replay, "matmul", lambda self, m, k, n: small(self, m, k, n))
    errors = []
    original = Replay.__dict__["matmul"]

    def small(self, *sizes):
        seconds, error = plain(self, *(s // 8 for s in sizes))
        errors.append(error)
        return seconds, error

    assert original is not plain
    assert main(["--repeat", "1"]) == 0
    assert max(errors) < 1e-5
    assert "tiled matmul M=256 K=256 N=256" in capsys.readouterr().out


plain = Replay.matmul
