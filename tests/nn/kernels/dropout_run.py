"""Runs attention with dropout under `vgpu exec` (extension_runs.py): `dropout_run.py MODULE`. Each case is a part.

Prints, as JSON, the largest error of every result over the largest value, by case, and what is refused. The truth is NumPy's, in
float64, of the mask that PyTorch draws from the same state. Results are memory full of NaN before.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from extension_runs import part
from max.driver import CPU, Accelerator, Buffer
from sixteen_bits import decode, encode

from harness.nn.attention_dropout import keep_mask
from harness.toolchain import extension

module = extension.load(Path(sys.argv[1]), "attention")
device, random = Accelerator(), np.random.default_rng(0)
gpu = module.open(0)
EVERY_KEY = 2**31 - 2**20
ONE = 65536
KINDS = {"bfloat16": 2, "float16": 3}
STATE = np.array([0x243F6A8885A308D3, 0x13198A2E03707344], np.int64)
# B, N, G, S, T, d, diagonal; the axes of a mask; elements of ONE that are kept; the dtype; the scale, 0 for the usual one.
CASES = {
    "two batches, shared heads, causal": ((2, 2, 1, 70, 90, 64, 0), "", 58982, "bfloat16", 0),
    "several blocks": ((1, 1, 1, 200, 330, 40, EVERY_KEY), "", 32768, "float16", 0),
    "a mask of every head": ((1, 2, 2, 70, 75, 64, EVERY_KEY), "nst", 58982, "bfloat16", 0),
    "the same in boxes": ((1, 4, 2, 70, 88, 64, EVERY_KEY), "nst", 58982, "float16", 0),
    "padding": ((2, 2, 1, 65, 328, 24, EVERY_KEY), "bt", 52429, "float16", 0),
    "a scale below 0": ((1, 1, 1, 33, 20, 8, EVERY_KEY), "", 49152, "bfloat16", -0.5),
    "wide, causal": ((1, 2, 1, 140, 130, 128, 0), "", 58982, "bfloat16", 0),
    "wide, padding": ((1, 2, 1, 140, 200, 72, EVERY_KEY), "t", 39322, "float16", 0),
    "nothing is kept": ((1, 1, 1, 20, 20, 64, 0), "", 0, "bfloat16", 0),
}  # fmt: skip


def on_device(array):
    """A buffer on the virtual GPU."""
    return Buffer.from_numpy(np.ascontiguousarray(array)).to(device)


def truth(Q, K, V, dO, visible, scale, mask, left):
    """Output, lse and the gradients of [B, N or G, length, d]; `left` [B, N, S, T] is what probabilities are multiplied by. A row that
    sees no key gives 0."""
    group = Q.shape[1] // K.shape[1]
    K, V = K.repeat(group, 1), V.repeat(group, 1)
    scores = np.where(visible, scale * Q @ K.swapaxes(2, 3) + mask, -np.inf)
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.maximum(largest, -1e300))
    total = weights.sum(-1, keepdims=True)
    P = weights / np.maximum(total, 1e-300)
    of_weights = dO @ V.swapaxes(2, 3) * left
    dS = P * (of_weights - (of_weights * P).sum(-1, keepdims=True))

    def shared(gradient):
        return gradient.reshape(gradient.shape[0], -1, group, *gradient.shape[2:]).sum(2)

    return {
        "output": P * left @ V,
        "lse": (largest + np.log(np.maximum(total, 1)))[..., 0],
        "grad_query": scale * dS @ K,
        "grad_key": shared(scale * dS.swapaxes(2, 3) @ Q),
        "grad_value": shared((P * left).swapaxes(2, 3) @ dO),
    }


def call(function, *arguments):
    """By the module, with as much scratch memory as it asks for, full of ones."""
    scratch = on_device(np.full(max(1, function(0, 0, 0, 0, *arguments)), 0xFF, np.uint8))
    function(gpu, 0, scratch._data_ptr(), scratch.num_elements, *arguments)
    device.synchronize()


def run(dims, axes, kept, dtype, scale, choice):
    """Run both passes by the fastest kernels, or the portable ones (`choice` 1); the error of each result."""
    B, N, G, S, T, d, diagonal = dims
    scale = scale or d**-0.5
    shapes = {"q": (B, N, S, d), "k": (B, G, T, d), "v": (B, G, T, d), "g": (B, N, S, d)}
    bits = {name: encode(random.standard_normal(shape) + 0.25, dtype) for name, shape in shapes.items()}
    mask = np.zeros([size if axis in axes else 1 for axis, size in zip("bnst", (B, N, S, T), strict=True)])
    if axes:
        mask[random.random(mask.shape) < 0.3] = -np.inf
        mask[..., 64:128] = -np.inf  # tiles without a key
        mask[..., :1] = 0
    bias = on_device(encode(mask, dtype))
    bias_strides = [
        0 if size == 1 else stride // 8 for size, stride in zip(mask.shape, mask.strides, strict=True)
    ]
    given = {name: on_device(each) for name, each in bits.items()}
    like = {"output": "q", "grad_query": "q", "grad_key": "k", "grad_value": "v"}
    written = {name: on_device(np.full(shapes[of], np.uint16(0xFFFF))) for name, of in like.items()}
    lse = on_device(np.full((B, N, S), np.nan, np.float32))
    state = on_device(STATE)
    at = {name: buffer._data_ptr() for name, buffer in (written | given).items()}
    inputs = [at[name] for name in "qkv"]
    sizes = (B, N, G, S, T, d, diagonal, *bias_strides, 1 if axes else 0)
    front = (KINDS[dtype], choice, *sizes)
    rows, keys = (N * S * d, S * d, d), (G * T * d, T * d, d)
    drawn = (state._data_ptr(), kept)
    call(
        module.dropout_forward,
        *(*front, scale, at["output"], lse._data_ptr(), *inputs, bias._data_ptr()),
        *(*rows, *keys, *keys, *rows, *drawn),
    )
    call(
        module.dropout_backward,
        *(*front, scale, at["grad_query"], at["grad_key"], at["grad_value"], at["g"], *inputs),
        *(at["output"], lse._data_ptr(), bias._data_ptr()),
        *(*rows, *keys, *keys, *rows, *rows, *rows, *keys, *keys, *drawn),
    )
    s, t = np.ogrid[:S, :T]
    left = keep_mask(torch.from_numpy(STATE), (B, N, S, T), kept).numpy() * (ONE / kept if kept else 0)
    Q, K, V, dO = (decode(bits[name], dtype) for name in "qkvg")
    errors = {}
    for name, right in truth(Q, K, V, dO, t <= s + diagonal, scale, mask, left).items():
        values = (lse if name == "lse" else written[name]).to(CPU()).to_numpy()
        values = values.astype(np.float64) if name == "lse" else decode(values, dtype)
        errors[name] = float(
            np.abs(np.where(values == right, 0, values - right)).max()
            / max(np.abs(right[np.isfinite(right)]).max(), 1e-9)
        )
    return errors


errors = {}
for choice, by in enumerate(("fastest", "portable")):
    for name, (dims, axes, kept, dtype, scale) in CASES.items():
        part(f"{name}, {by}")
        errors[f"{name}, {by}"] = run(dims, axes, kept, dtype, scale, choice)
refused = []
# The dtype's number, elements of a head, elements that are kept.
for kind, d, kept in ((0, 64, 1), (2, 136, 1), (2, 60, 1), (2, 64, -1), (2, 64, ONE)):
    for which, addresses in (("forward", 6 + 12), ("backward", 10 + 24)):
        try:
            sizes = (1, 1, 1, 64, 64, d, EVERY_KEY, 0, 0, 0, 0, 0)
            getattr(module, f"dropout_{which}")(gpu, 0, 0, 0, kind, 0, *sizes, 1.0, *[0] * addresses, 0, kept)
        except Exception as error:
            refused.append(str(error))
scratch = []
for length in (2**16, 2**17):
    sizes = (1, 1, 1, length, length, 64, EVERY_KEY, 0, 0, 0, 0, 0)
    scratch.append(module.dropout_forward(0, 0, 0, 0, 2, 0, *sizes, 1.0, *[64] * (6 + 12), 0, 1))
print(json.dumps({"errors": errors, "refused": refused, "scratch": scratch}))
