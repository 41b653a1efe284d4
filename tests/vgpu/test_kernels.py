"""A tiled matmul in Mojo matches NumPy for all sizes and block orders."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import Bench, compile_kernels


@pytest.mark.compiles
@settings(max_examples=15, deadline=None)
@given(*[st.integers(1, 40)] * 3, st.sampled_from(["natural", "reversed", "shuffled:7"]), st.integers(0, 99))
def test_matmul_matches_numpy(m, n, k, order, seed):
    """Inputs are small integers, so float32 sums are exact in every order."""
    bench, rng = Bench(block_order=order), np.random.default_rng(seed)
    a = bench.upload("a", rng.integers(-9, 10, (m, k)).astype(np.float32))
    b = bench.upload("b", rng.integers(-9, 10, (k, n)).astype(np.float32))
    o = bench.empty("o", (m, n))
    blocks, steps = (-(-n // 16), -(-m // 16)), -(-k // 16)
    sizes = (np.int32(x) for x in (m, n, k))
    counters = bench.run(compile_kernels()["matmul_tiled"], blocks, (16, 16), o, a, b, *sizes).counters
    np.testing.assert_array_equal(bench.download(o), a @ b)
    assert not bench.errors()
    assert counters.barriers == blocks[0] * blocks[1] * 2 * steps
    assert counters.flops >= 2 * m * n * k
