"""Runs drawn calls of attention's extension module under `vgpu exec` (extension_runs.py), and asks `explain` about each:
`explained_run.py MODULE`.

Prints, as JSON, for each call what it is, and what `explain` says; each is a part of its own. The tensors that `explain` sees lie
as those that the kernels get: strides, and where in 16 bytes they begin.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from extension_runs import part
from max.driver import Accelerator, Buffer

from harness.nn import attention_direct, extension_kernels
from harness.nn.attention_plan import KINDS, mask_sizes
from harness.toolchain import extension

module = extension.load(Path(sys.argv[1]), "attention")
device, draw = Accelerator(), random.Random(5)
gpu, EVERY_KEY, BYTES = module.open(0), 2**31 - 2**20, 1 << 16
memory = Buffer.from_numpy(np.zeros(16 * BYTES, np.uint8)).to(device)
lent = Buffer.from_numpy(np.zeros(1 << 24, np.uint8)).to(device)
extension_kernels.DEVICE = "cpu"
attention_direct.is_hopper = lambda device: True
vars(attention_direct.kernels)["table"] = {-1: module}  # that there is one is all that is asked


def laid(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor [B, heads, length, d] without gaps, with heads inside of rows, in wider rows, one element late, or repeated."""
    B, heads, length, d = shape
    kind = draw.choice([*["plain", "inside", "wider"] * 4, "late", "repeated"])
    if kind == "plain":
        return torch.zeros(shape, dtype=dtype)
    if kind == "repeated":
        return torch.zeros(B, 1, length, d, dtype=dtype).expand(shape)
    if kind == "inside":
        return torch.zeros(B, length, heads, d, dtype=dtype).transpose(1, 2)
    return torch.zeros(B, heads, length, d + (8 if kind == "wider" else 1), dtype=dtype)[..., -d:]


def placed(place: int, tensor: torch.Tensor) -> int:
    """An address in the virtual GPU's memory that begins where the tensor does in 16 bytes."""
    return memory._data_ptr() + place * BYTES + tensor.data_ptr() % 16


def call() -> dict:
    """One drawn call: both passes launched, and explained."""
    dtype = draw.choice([torch.bfloat16, torch.float16])
    B, G, d = draw.choice([1, 2]), draw.choice([1, 2]), draw.choice([8, 20, 64, 64, 72, 136])
    N, S, T = 2, draw.choice([3, 9]), draw.choice([5, 16])
    query, key, value = laid((B, N, S, d), dtype), laid((B, G, T, d), dtype), laid((B, G, T, d), dtype)
    masks = {
        "none": None,
        "rows": torch.zeros(1, N, S, 16, dtype=dtype)[..., :T],
        "short rows": torch.zeros(B, 1, S, 9, dtype=dtype)[..., :T] if T <= 9 else None,
        "padding": torch.zeros(B, 1, 1, 16, dtype=dtype)[..., :T],
        "one number": torch.zeros(1, 1, S, 1, dtype=dtype),
        "blocks": torch.zeros(1, 1, 1, 1, dtype=dtype),
    }
    kind = draw.choice(["none", "none", *masks])
    mask, blocks = masks[kind], 16 if kind == "blocks" else None
    scale, portable = draw.choice([*[d**-0.5] * 6, 0.0, -0.5]), draw.random() < 0.2
    choice = attention_direct.PORTABLE if portable else attention_direct.BEST
    with attention_direct.portable_kernels(portable):
        said = attention_direct.explain(
            query, attn_mask=mask, key=key, value=value, scale=scale, blocks=blocks
        )
    output = torch.empty(query.shape, dtype=dtype)
    front = (KINDS[dtype], choice, B, N, G, S, T, d, EVERY_KEY, *mask_sizes(mask, blocks or 1), scale)
    at = [placed(place, tensor) for place, tensor in enumerate([query, key, value, output])]
    spare = [memory._data_ptr() + place * BYTES for place in range(4, 8)]
    read = placed(8, output if mask is None else mask)
    strides = attention_direct.row_strides(query, key, value)
    rows, keys = (list(torch.empty(each.shape).stride()[:3]) for each in (query, key))
    scratch = lent._data_ptr(), 1 << 24
    module.forward(gpu, 0, *scratch, *front, at[3], spare[3], *at[:3], read, *strides, *rows)
    module.gradients(
        *(gpu, 0, *scratch, *front, *spare[:3], at[3], *at[:3], at[3], spare[3], read),
        *(*strides, *rows, *rows, *rows, *keys, *keys),
    )
    device.synchronize()
    what = f"{dtype} {[B, N, G, S, T, d]} {kind} {scale} {portable} {strides}"
    return {"call": what, "said": said}


calls = []
for number in range(60):
    part(f"call {number}")
    calls.append(call())
print(json.dumps(calls))
