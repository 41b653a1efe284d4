"""Runs attention of sequences behind one another under `vgpu exec` (extension_runs.py): `varlen_run.py MODULE`.

Prints, as JSON, the largest error of every result over the largest value, by case, and what is refused; batches of one size are parts
of their own. The truth is NumPy's, in float64, sequence by sequence. Rows of no sequence must keep what lay there.
"""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
from extension_runs import part
from max.driver import CPU, Accelerator, Buffer
from sixteen_bits import decode, encode

from harness.toolchain import extension

module = extension.load(Path(sys.argv[1]), "attention")
device, random = Accelerator(), np.random.default_rng(0)
gpu = module.open(0)
EVERY_KEY = 2**31 - 2**20
BEFORE = 0x7FFF  # a NaN, of bfloat16 and of float16
# N, G, d, diagonal; lengths of queries and keys; rows that no sequence has, of queries and keys; the dtype.
CASES = {
    "lengths of all kinds": ((1, 1, 64, EVERY_KEY), (130, 1, 0, 200, 5), (70, 3, 9, 0, 130), (0, 0), "bfloat16"),
    "causal, shared heads": ((4, 2, 64, 0), (65, 150), (65, 150), (3, 40), "bfloat16"),
    "causal, more keys": ((1, 1, 40, 0), (140, 20), (300, 7), (0, 2), "float16"),
    "wide": ((2, 1, 128, EVERY_KEY), (1, 129, 30), (270, 31, 64), (130, 0), "bfloat16"),
    "wide, causal": ((1, 1, 72, 0), (140, 33), (140, 33), (0, 0), "float16"),
    "more sequences than lanes": ((1, 1, 8, 0), (7,) * 40 + (0,) * 30 + (3,), (7,) * 40 + (0,) * 30 + (3,), (1, 1), "bfloat16"),
}  # fmt: skip


def on_device(array):
    """A buffer on the virtual GPU."""
    return Buffer.from_numpy(np.ascontiguousarray(array)).to(device)


def back(buffer):
    """What is in a buffer on the virtual GPU."""
    return buffer.to(CPU()).to_numpy()


def truth(Q, K, V, dO, diagonal):
    """Output, lse and the gradients of one sequence [length, heads, d], whose query heads share those of key and value."""
    group, scale = Q.shape[1] // K.shape[1], Q.shape[2] ** -0.5
    Q, dO = Q.swapaxes(0, 1), dO.swapaxes(0, 1)
    K, V = (each.swapaxes(0, 1).repeat(group, 0) for each in (K, V))
    s, t = np.ogrid[: Q.shape[1], : K.shape[1]]
    scores = np.where(t <= s + diagonal, scale * Q @ K.swapaxes(1, 2), -np.inf)
    largest = scores.max(-1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - largest)
    total = weights.sum(-1, keepdims=True)
    P = weights / np.where(total == 0, 1, total)
    dS = P * (dO @ V.swapaxes(1, 2) - (dO * (P @ V)).sum(-1, keepdims=True))

    def shared(gradient):
        return gradient.reshape(len(gradient) // group, group, *gradient.shape[1:]).sum(1).swapaxes(0, 1)

    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0].T
    return {
        "output": (P @ V).swapaxes(0, 1),
        "lse": lse,
        "grad_query": (scale * dS @ K).swapaxes(0, 1),
        "grad_key": shared(scale * dS.swapaxes(1, 2) @ Q),
        "grad_value": shared(P.swapaxes(1, 2) @ dO),
    }


def run(dims, lengths_q, lengths_k, spare, dtype, wrong=None):
    """Both passes; the error of each result. With `wrong` offsets in the place of those of the lengths nothing is compared."""
    N, G, d, diagonal = dims
    starts = [np.concatenate([[0], np.cumsum(lengths)]) for lengths in (lengths_q, lengths_k)]
    totals = [int(start[-1]) + more for start, more in zip(starts, spare, strict=True)]
    shapes = {"q": (totals[0], N, d), "g": (totals[0], N, d), "k": (totals[1], G, d), "v": (totals[1], G, d)}
    bits = {name: encode(random.standard_normal(shape) + 0.25, dtype) for name, shape in shapes.items()}
    given = {name: on_device(each) for name, each in bits.items()}
    written = {
        name: on_device(np.full(shapes[like], BEFORE, np.uint16))
        for name, like in (("output", "q"), ("grad_query", "q"), ("grad_key", "k"), ("grad_value", "v"))
    }
    lse, delta = (on_device(np.full((N, totals[0]), np.nan, np.float32)) for _ in range(2))
    offsets = on_device((np.stack(starts) if wrong is None else np.array(wrong)).astype(np.int32))
    front = (2 if dtype == "bfloat16" else 3, 0, 1, N, G, *totals, d, diagonal, 0, 0, 0, 0, len(lengths_q))
    rows, keys = ((0, d, heads * d) for heads in (N, G))
    at = {name: buffer._data_ptr() for name, buffer in (written | given).items()}
    inputs = [at[name] for name in "qkv"]
    nowhere = (gpu, 0, 0, 0)
    module.varlen_forward(
        *(*nowhere, *front, d**-0.5, at["output"], lse._data_ptr(), *inputs, offsets._data_ptr()),
        *(*rows, *keys, *keys, *rows),
    )
    module.delta(*nowhere, *front, delta._data_ptr(), at["g"], at["output"], 0, *rows, *rows)
    module.varlen_backward(
        *(*nowhere, *front, d**-0.5, at["grad_query"], at["grad_key"], at["grad_value"], at["g"], *inputs),
        *(lse._data_ptr(), delta._data_ptr(), offsets._data_ptr()),
        *(*rows, *keys, *keys, *rows, *rows, *keys, *keys),
    )
    device.synchronize()
    if wrong is not None:
        return {}
    got = {name: back(buffer) for name, buffer in written.items()}
    sums = back(lse).T.astype(np.float64)
    values = {name: decode(each, dtype) for name, each in bits.items()}
    apart, largest = {}, {}
    for (s0, s1), (t0, t1) in zip(*map(itertools.pairwise, starts), strict=True):
        right = truth(
            values["q"][s0:s1], values["k"][t0:t1], values["v"][t0:t1], values["g"][s0:s1], diagonal
        )
        for name, exact in right.items():
            own = slice(t0, t1) if name in ("grad_key", "grad_value") else slice(s0, s1)
            result = sums[own] if name == "lse" else decode(got[name][own], dtype)
            assert np.array_equal(np.isfinite(exact), np.isfinite(result)), name
            exact, result = (np.where(np.isfinite(exact), each, 0) for each in (exact, result))
            apart[name] = max(apart.get(name, 0), np.abs(result - exact).max(initial=0))
            largest[name] = max(largest.get(name, 0), np.abs(exact).max(initial=0))
    ends = {
        "output": starts[0][-1],
        "grad_query": starts[0][-1],
        "grad_key": starts[1][-1],
        "grad_value": starts[1][-1],
    }
    assert all((got[name][end:] == BEFORE).all() for name, end in ends.items())
    return {name: float(apart[name] / largest[name]) for name in apart}


part("cases")
errors = {name: run(*case) for name, case in CASES.items()}
part("outside")
OUTSIDE = [[-5, 20, 90, 999], [-8, 0, 200, 411]]
run((1, 1, 8, EVERY_KEY), (60, 60, 60), (70, 70, 70), (0, 0), "bfloat16", OUTSIDE)
for name, lengths in {"one": (1024,), "eight": (128,) * 8, "many": (16,) * 64}.items():
    part(name)
    run((1, 1, 8, EVERY_KEY), lengths, lengths, (0, 0), "bfloat16")
refused = []
# The dtype's number, elements of a head, sequences, scale.
calls = ((0, 64, 1, 1.0), (2, 136, 1, 1.0), (2, 60, 1, 1.0), (2, 64, 0, 1.0), (2, 64, 1, -1.0))
for kind, d, count, scale in calls:
    try:
        sizes = (1, 1, 1, 64, 64, d, EVERY_KEY, 0, 0, 0, 0, count)
        module.varlen_forward(gpu, 0, 0, 0, kind, 0, *sizes, scale, *[0] * 18)
    except Exception as error:
        refused.append(str(error))
print(json.dumps({"errors": errors, "refused": refused}))
