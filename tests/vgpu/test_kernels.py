"""Mojo kernels on the virtual GPU, compared with NumPy: values right, and no finding on right kernels."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import Bench, compiled

pytestmark = pytest.mark.compiles

F4, I4 = np.float32, np.int32


@pytest.fixture(scope="module")
def ptx():
    return compiled()


@pytest.fixture
def bench():
    b = Bench()
    yield b
    assert not b.errors(), "\n".join(f.text() for f in b.errors())


def rng(seed=0):
    return np.random.default_rng(seed)


def test_vector_access(ptx, bench):
    a, b = bench.place("a", rng().random(4096, F4)), bench.place("b", rng(1).random(4096, F4))
    o = bench.empty("o", 4096)
    launch = bench.run(ptx["vector_add_wide"], 4, 256, o, a, b, I4(4096))
    np.testing.assert_array_equal(bench.get(o), a + b)
    assert "ld.global.nc.v4" in ptx["vector_add_wide"] or "ld.global.v4" in ptx["vector_add_wide"]
    assert launch.counters.global_load.requests == 2 * 32
    assert launch.counters.global_load.sectors == 2 * 4096 * 4 // 32


def test_divergent_loop(ptx, bench):
    n = 1000
    o = bench.empty("o", n, I4)
    launch = bench.run(ptx["collatz"], 4, 256, o, I4(n))
    want = []
    for x in range(1, n + 1):
        steps = 0
        while x != 1:
            x = x // 2 if x % 2 == 0 else 3 * x + 1
            steps += 1
        want.append(steps)
    np.testing.assert_array_equal(bench.get(o), want)
    assert launch.counters.divergent_branches > 0


def test_transcendental_functions(ptx, bench):
    a = bench.place("a", rng().normal(0, 3, 500).astype(F4))
    o = bench.empty("o", (500, 4))
    bench.run(ptx["transcendental"], 2, 256, o, a, I4(500))
    x = a.astype(np.float64)
    want = np.stack([np.exp(x), 1 / np.sqrt(abs(x) + 1), np.tanh(x), np.sqrt(abs(x)) / (x + 10)], 1)
    np.testing.assert_allclose(bench.get(o), want, rtol=2e-6, atol=1e-7)


@settings(max_examples=15, deadline=None)
@given(*[st.integers(1, 40)] * 3, st.sampled_from(["natural", "reversed", "shuffled:7"]), st.integers(0, 99))
def test_matmul_of_any_size_and_order(ptx, m, n, k, order, seed):
    """Small integers, so that the float32 sums are exact in every order."""
    bench = Bench(blocks=order)
    a = bench.place("a", rng(seed).integers(-9, 10, (m, k)).astype(F4))
    b = bench.place("b", rng(seed + 1).integers(-9, 10, (k, n)).astype(F4))
    o = bench.empty("o", (m, n))
    blocks, steps = (-(-n // 16), -(-m // 16)), -(-k // 16)
    launch = bench.run(ptx["matmul_tiled"], blocks, (16, 16), o, a, b, I4(m), I4(n), I4(k))
    np.testing.assert_array_equal(bench.get(o), a @ b)
    assert not bench.errors()
    assert launch.counters.barriers == blocks[0] * blocks[1] * 2 * steps
    assert launch.counters.flops >= 2 * m * n * k


@pytest.mark.parametrize("order", ["natural", "reversed", "shuffled:3"])
def test_last_block_reduces_is_clean(ptx, order):
    bench = Bench(blocks=order)
    a = bench.place("a", rng().random(1000, F4))
    o, partials = bench.empty("o", 1), bench.empty("partials", 8)
    counter = bench.place("counter", np.zeros(1, I4))
    bench.run(ptx["last_block_reduces"], 8, 128, o, partials, counter, a, I4(1000))
    assert not bench.errors(), bench.errors()[0].text()
    np.testing.assert_allclose(bench.get(o), [a.sum(dtype=float)], rtol=1e-5)


def test_warp_synchronous_code_is_clean(ptx, bench):
    a = bench.place("a", rng().random((6, 32), F4))
    o = bench.empty("o", 6)
    bench.run(ptx["warp_tree"], 6, 32, o, a)
    np.testing.assert_allclose(bench.get(o), a.sum(1), rtol=1e-6)


def bf16(x):
    """float32 values rounded to bfloat16: (bits, values)."""
    bits = x.astype(F4).view(np.uint32)
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(F4)


def test_mma_tf32(ptx, bench):
    a, b = bench.place("a", rng().random((16, 8), F4)), bench.place("b", rng(1).random((8, 8), F4))
    o = bench.empty("o", (16, 8))
    bench.run(ptx["mma_tf32"], 1, 32, o, a, b)
    cut = [(x.view(np.uint32) & 0xFFFFE000).view(F4).astype(float) for x in (a, b)]
    np.testing.assert_allclose(bench.get(o), cut[0] @ cut[1].T, rtol=1e-6)


def test_ldmatrix(ptx, bench):
    a = bench.place("a", np.arange(256, dtype=np.uint16).reshape(16, 16))
    o = bench.empty("o", (32, 2, 4, 2), np.uint16)
    bench.run(ptx["matrix_load"], 1, 32, o, a)
    assert "ldmatrix" in ptx["matrix_load"]
    # lane l gives row l % 16, columns from 8 * (l // 16): matrix m is rows 8 * (m % 2), columns 8 * (m // 2)
    tiles = [a[8 * (m % 2) :, 8 * (m // 2) :][:8, :8] for m in range(4)]
    want = np.zeros((32, 2, 4, 2), np.uint16)
    for lane in range(32):
        for m, tile in enumerate(tiles):
            want[lane, 0, m] = tile[lane // 4, 2 * (lane % 4) :][:2]
            want[lane, 1, m] = tile.T[lane // 4, 2 * (lane % 4) :][:2]
    np.testing.assert_array_equal(bench.get(o), want)


def test_warp_functions(ptx, bench):
    a = bench.place("a", rng().integers(-50, 50, 64).astype(I4))
    o = bench.empty("o", (5, 64), I4)
    bench.run(ptx["warp_things"], 1, 64, o, a)
    w = a.reshape(2, 32)
    down = np.concatenate([w[:, 3:], w[:, 29:]], 1)
    want = [
        np.repeat(w.sum(1), 32),
        np.repeat(w.max(1), 32),
        (np.cumsum(w, 1) - w).ravel(),
        down.ravel(),
        np.repeat(w[:, 0], 32),
    ]
    np.testing.assert_array_equal(bench.get(o), want)


def test_local_array(ptx, bench):
    a = bench.place("a", rng().integers(0, 8, (40, 16)).astype(I4))
    o = bench.empty("o", 40, I4)
    bench.run(ptx["local_array"], 1, 40, o, a)
    np.testing.assert_array_equal(bench.get(o), [np.bincount(row, minlength=8).argmax() for row in a])


def test_bfloat16_and_float64(ptx, bench):
    bits, x = bf16(rng().normal(size=300))
    A, o = bench.place("a", bits), bench.empty("o", 300, np.uint16)
    bench.run(ptx["bfloat_scale"], 2, 256, o, A, F4(1.7), I4(300))
    exact = x.astype(np.float64) * np.float64(F4(1.7)) + 1
    np.testing.assert_array_equal(bench.get(o), bf16(exact.astype(F4))[0])
    d = bench.place("d", rng().random(300))
    e = bench.empty("e", 300, np.float64)
    bench.run(ptx["double_axpy"], 2, 256, e, d, np.float64(3.3), I4(300))
    fused = [float(Fraction(3.3) * Fraction(x) + Fraction(0.1)) for x in d.tolist()]  # rounded once
    np.testing.assert_array_equal(bench.get(e), fused)
