"""Runs attention's extension module under `vgpu exec` (extension_runs.py): `attention_run.py MODULE`.

Prints, as JSON, the largest error of every result over the largest value, by case. The truth is NumPy's, in float64.
Results are memory full of NaN before.
"""

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
gpu, stream = module.open(0), 0
EVERY_KEY = 2**31 - 2**20
KINDS = {"bfloat16": 2, "float16": 3}
# B, N, S, T, d, heads of key and value, diagonal; the dtype.
CASES = {
    "ragged, causal from the bottom right, shared heads": ((1, 2, 70, 150, 64, 1, 80), "bfloat16"),
    "more than a block of queries": ((1, 1, 200, 64, 40, 1, EVERY_KEY), "float16"),
    "queries that see no key": ((1, 1, 130, 64, 64, 1, -70), "bfloat16"),
    "wide, causal, shared heads": ((1, 2, 140, 200, 128, 1, 0), "bfloat16"),
    "a large scale, hidden rows": ((1, 1, 100, 40, 8, 1, -20), "bfloat16"),
    "wide, three steps": ((1, 1, 130, 270, 128, 1, EVERY_KEY), "bfloat16"),
    "wide, ragged": ((1, 1, 70, 130, 88, 1, EVERY_KEY), "float16"),
    "of 192, causal, shared heads": ((1, 2, 70, 200, 136, 1, 100), "bfloat16"),
    "of 256, ragged": ((1, 1, 130, 200, 256, 1, EVERY_KEY), "float16"),
}
SCALES = {"a large scale, hidden rows": 1.0}
"""Where it is not one over the root of the head dimension."""
# The sizes; those of an additive mask; the dtype. Rows of 75 numbers are not for wgmma.
MASKED = {
    "mask of every head, ragged": ((2, 2, 70, 75, 64, 1, EVERY_KEY), (1, 2, 70, 75), "bfloat16"),
    "the same in boxes": ((2, 2, 70, 88, 64, 1, EVERY_KEY), (1, 2, 70, 88), "bfloat16"),
    "wide, of every batch": ((2, 1, 140, 200, 72, 1, EVERY_KEY), (2, 1, 140, 200), "float16"),
    "padding": ((2, 2, 70, 328, 64, 1, EVERY_KEY), (2, 2, 1, 328), "float16"),
    "of 256, forward alone": ((1, 2, 140, 136, 256, 2, EVERY_KEY), (1, 2, 140, 136), "bfloat16"),
    "of 192, forward alone": ((1, 1, 70, 264, 136, 1, EVERY_KEY), (1, 1, 1, 264), "float16"),
    "padding, wide": ((2, 2, 70, 136, 128, 2, EVERY_KEY), (2, 1, 1, 136), "bfloat16"),
}


def on_device(array):
    """A buffer on the virtual GPU."""
    return Buffer.from_numpy(np.ascontiguousarray(array)).to(device)


def heads_inside(shape, dtype):
    """A tensor [B, heads, length, d] as models make it, [B, length, heads, d] in memory: values, buffer, strides."""
    B, heads, length, d = shape
    bits = encode(random.standard_normal((B, length, heads, d)) + 0.25, dtype)
    return decode(bits, dtype).swapaxes(1, 2), on_device(bits), (length * heads * d, d, heads * d)


def truth(Q, K, V, dO, visible, scale, mask):
    """Output, lse and the gradients, in float64; `visible` [S, T] says which queries see which keys, and the mask is added."""
    group = Q.shape[1] // K.shape[1]
    K, V = K.repeat(group, 1), V.repeat(group, 1)
    scores = np.where(visible, scale * Q @ K.swapaxes(2, 3) + mask, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0))
    total = weights.sum(-1, keepdims=True)
    P = weights / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isfinite(largest), largest, 0) + np.log(total))[..., 0]
    dS = P * (dO @ V.swapaxes(2, 3) - (dO * (P @ V)).sum(-1, keepdims=True))

    def shared(gradient):
        B, _, T, d = gradient.shape
        return gradient.reshape(B, -1, group, T, d).sum(2)

    axes = tuple(axis for axis in range(mask.ndim) if mask.shape[axis] == 1)
    of_mask = {"grad_mask": dS.sum(axes, keepdims=True)} if mask.ndim == 4 else {}
    return of_mask | {
        "output": P @ V,
        "lse": lse,
        "grad_query": scale * dS @ K,
        "grad_key": shared(scale * dS.swapaxes(2, 3) @ Q),
        "grad_value": shared(P.swapaxes(2, 3) @ dO),
    }


def run(dims, dtype, visible, scale=None, mask_sizes=()):
    """Both passes; the error of each result. There may be an additive mask of some sizes."""
    B, N, S, T, d, G, diagonal = dims
    added = random.standard_normal(mask_sizes) if mask_sizes else np.zeros(1)
    if mask_sizes:
        added[random.random(mask_sizes) < 0.3] = -np.inf
        added[..., 64:128] = -np.inf  # tiles without a key
    bits = encode(added, dtype)
    bias, added = on_device(bits), decode(bits, dtype)
    pairs = zip(bits.shape, bits.strides, strict=True)
    bias_strides = [0 if size == 1 else stride // 2 for size, stride in pairs]
    (Q, q, q_strides), (dO, g, g_strides) = (heads_inside((B, N, S, d), dtype) for _ in range(2))
    (K, k, k_strides), (V, v, v_strides) = (heads_inside((B, G, T, d), dtype) for _ in range(2))
    rows, keys = (N * S * d, S * d, d), (G * T * d, T * d, d)
    if not mask_sizes:  # results with heads inside of rows too, as the inputs
        rows, keys = q_strides, k_strides
    of_mask = (*bias_strides, 1) if mask_sizes else (0, 0, 0, 0, 0)
    front = (KINDS[dtype], 0, B, N, G, S, T, d, diagonal, *of_mask)
    names = ("grad_query", "grad_key", "grad_value")
    blank = {
        name: on_device(np.full(shape, 0xFFFF, np.uint16))
        for name, shape in (
            ("output", (B, N, S, d)),
            ("grad_query", (B, N, S, d)),
            ("grad_key", (B, G, T, d)),
            ("grad_value", (B, G, T, d)),
        )
    }
    lse, delta = (on_device(np.full((B, N, S), np.nan, np.float32)) for _ in range(2))
    scratch = on_device(np.full(B * N * 2 * 4 * (-(-S // 64) * 64), 0xFF, np.uint8))
    at = {name: buffer._data_ptr() for name, buffer in blank.items()}
    inputs = [buffer._data_ptr() for buffer in (q, k, v)]
    given = (*q_strides, *k_strides, *v_strides)
    scale = scale or d**-0.5
    nowhere = (gpu, stream, 0, 0)
    read = bias._data_ptr() if mask_sizes else 0
    module.forward(*nowhere, *front, scale, at["output"], lse._data_ptr(), *inputs, read, *given, *rows)
    module.delta(*nowhere, *front, delta._data_ptr(), g._data_ptr(), at["output"], 0, *g_strides, *rows)
    module.backward(
        *(gpu, stream, scratch._data_ptr(), scratch.num_elements, *front, scale),
        *(at["grad_query"], at["grad_key"], at["grad_value"], g._data_ptr(), *inputs),
        *(lse._data_ptr(), delta._data_ptr(), read, *given, *g_strides, *rows, *keys, *keys),
    )
    if mask_sizes and d <= 128:  # for wider heads it wants contiguous tensors
        blank["grad_mask"] = on_device(np.full_like(bits, 0xFFFF))
        module.mask_gradient(
            *(*nowhere, *front, scale, blank["grad_mask"]._data_ptr(), g._data_ptr(), *inputs),
            *(lse._data_ptr(), delta._data_ptr(), read, *given, *g_strides),
        )
    again = {name: on_device(np.full_like(blank[name].to(CPU()).to_numpy(), 0xFFFF)) for name in names}
    scratch = on_device(np.full(scratch.num_elements, 0xFF, np.uint8))
    module.gradients(
        *(gpu, stream, scratch._data_ptr(), scratch.num_elements, *front, scale),
        *(again[name]._data_ptr() for name in names),
        *(g._data_ptr(), *inputs, at["output"], lse._data_ptr(), read, *given, *g_strides),
        *(*rows, *rows, *keys, *keys),
    )
    device.synchronize()
    for name in names:
        first, second = (each[name].to(CPU()).to_numpy() for each in (blank, again))
        assert np.array_equal(first, second), name
    device.synchronize()
    got = {name: decode(buffer.to(CPU()).to_numpy(), dtype) for name, buffer in blank.items()}
    if not mask_sizes:
        got = {name: of.reshape(*np.take(of.shape, (0, 2, 1, 3))).swapaxes(1, 2) for name, of in got.items()}
    got["lse"] = lse.to(CPU()).to_numpy().astype(np.float64)
    errors = {}
    for name, right in truth(Q, K, V, dO, visible, scale, added).items():
        if name not in got:
            continue
        finite = np.isfinite(right)
        assert np.array_equal(finite, np.isfinite(got[name])), name
        apart = np.abs(np.where(finite, got[name], 0) - np.where(finite, right, 0))
        errors[name] = float(apart.max() / np.abs(right[finite]).max())
    return errors


def run_maps():
    """A forward pass and a backward pass: the first time, the second, with fewer keys, and with another mask at the same
    addresses."""
    memory = on_device(np.zeros(1 << 20, np.uint8))
    lent, *at = (memory._data_ptr() + (1 << 16) * place for place in range(12))
    rows = (64 * 64, 64 * 64, 64)

    def passes(T, mask_row=0):
        front = (
            KINDS["bfloat16"],
            0,
            1,
            1,
            1,
            64,
            T,
            64,
            EVERY_KEY,
            0,
            0,
            mask_row,
            1 if mask_row else 0,
            1 if mask_row else 0,
        )
        module.forward(gpu, stream, 0, 0, *front, 1.0, *at[:6], *rows * 4)
        module.gradients(
            gpu, stream, lent, 1 << 16, *front, 1.0, *at[6:9], at[9], *at[2:5], at[0], at[1], at[5], *rows * 8
        )

    each = ((64,), (64,), (40,), (40, 40), (40, 64))
    for number, sizes in enumerate(each):
        part(f"maps {number}")
        passes(*sizes)


errors = {}
part("cases")
for name, (dims, dtype) in CASES.items():
    s, t = np.ogrid[: dims[2], : dims[3]]
    errors[name] = run(dims, dtype, t <= s + dims[-1], scale=SCALES.get(name))
for name, (dims, sizes, dtype) in MASKED.items():
    part(name)
    errors[name] = run(dims, dtype, np.True_, mask_sizes=sizes)
run_maps()
print(json.dumps({"errors": errors, "masked": list(MASKED)}))
