"""Runs float32 attention of puzzle 23's extension module on the virtual GPU: `p23_pairs_run.py MODULE ARCHITECTURE`.

Prints, as JSON, by case the errors of every result over the largest value and the names of the launches, whether a NaN takes
the plain path, and the findings. The truth is PyTorch's, in float64. Results are memory full of NaN before.
"""

import json
import sys
from pathlib import Path

import numpy as np

from harness.toolchain import extension
from harness.vgpu.checks.findings import Checks
from harness.vgpu.driver import inprocess

virtual = inprocess.start(arch=sys.argv[2], checks=Checks(counters=False))

import torch  # noqa: E402
from max.driver import CPU, Accelerator, Buffer  # noqa: E402
from test_p23_fast import inputs, truth  # noqa: E402

module = extension.load(Path(sys.argv[1]), "p23")
device = Accelerator()
gpu, stream = module.open(0), 0
FACTORS = ("query", "key", "value")
# B, N, S, T, d, heads of key and value, diagonal, 1 for a mask; the order of the blocks; the choice of kernels.
CASES = {
    "whole tiles": ((1, 1, 128, 192, 64, 1, 192, 0), "natural", 0),
    "ragged, causal from the bottom right, shared heads": ((2, 2, 70, 150, 64, 1, 80, 0), "natural", 0),
    "the same in another order": ((2, 2, 70, 150, 64, 1, 80, 0), "shuffled:3", 0),
    "the same by the portable kernels": ((2, 2, 70, 150, 64, 1, 80, 0), "natural", 1),
    "queries that see no key, odd head": ((1, 1, 130, 70, 13, 1, -70, 0), "natural", 0),
    "two boxes, whole tiles": ((1, 1, 128, 192, 128, 1, 192, 0), "natural", 0),
    "two boxes, causal from the bottom right, shared heads": ((1, 2, 70, 150, 101, 1, 80, 0), "natural", 0),
    "a box and a half, queries that see no key": ((1, 1, 130, 70, 72, 1, -70, 0), "natural", 0),
    "mask, causal, shared heads": ((2, 4, 70, 77, 64, 2, 20, 1), "natural", 0),
    "two boxes, mask, shared heads": ((2, 2, 70, 77, 128, 1, 77, 1), "natural", 0),
    "four boxes, whole tiles": ((1, 1, 128, 192, 256, 1, 192, 0), "natural", 0),
    "three boxes, causal from the bottom right": ((1, 1, 70, 150, 160, 1, 80, 0), "natural", 0),
    "four boxes, mask, causal, shared heads": ((1, 2, 70, 77, 200, 1, 20, 1), "natural", 0),
}


def on_device(array):
    """A buffer on the virtual GPU."""
    return Buffer.from_numpy(np.ascontiguousarray(array)).to(device)


def call(function, choice, *arguments):
    """Calls it with as much scratch memory as it counts, full of NaN."""
    count = function(0, 0, 0, 0, 0, choice, *arguments)
    scratch = on_device(np.full(max(count, 1), 0xFF, np.uint8))
    function(gpu, stream, scratch._data_ptr(), count, 0, choice, *arguments)
    device.synchronize()


def run(dims, choice, given):
    """Both passes: what they wrote."""
    B, N, S, T, d, G, diagonal, masked = dims
    read = {name: on_device(tensor.numpy()) for name, tensor in given.items()}
    rows, keys = (N * S * d, S * d, d), (G * T * d, T * d, d)
    shapes = {"output": (B, N, S, d), "lse": (B, N, S), "delta": (B, N, S), "grad_query": (B, N, S, d)}
    shapes |= {"grad_key": (B, G, T, d), "grad_value": (B, G, T, d)}
    shapes |= {"grad_attn_mask": given["attn_mask"].shape} if masked else {}
    blank = {name: on_device(np.full(shape, np.nan, np.float32)) for name, shape in shapes.items()}
    at = {name: buffer._data_ptr() for name, buffer in (read | blank).items()}
    sizes, scale = (B, N, G, S, T, d, diagonal, 0, 0, masked * T, masked, masked), d**-0.5
    factors = [at[name] for name in FACTORS]
    call(
        *(module.forward, choice, *sizes, scale, at["output"], at["lse"], *factors, at["attn_mask"]),
        *(*rows, *keys, *keys, *rows),
    )
    if choice == 0:
        call(
            *(module.gradients, choice, *sizes, scale, at["grad_query"], at["grad_key"], at["grad_value"]),
            *(at["grad_output"], *factors, at["output"], at["lse"], at["attn_mask"]),
            *(*rows, *keys, *keys, *rows, *rows, *rows, *keys, *keys),
        )
        gradients = {f"grad_{name}": blank[f"grad_{name}"].to(CPU()).to_numpy() for name in FACTORS}
    call(*(module.delta, choice, *sizes, at["delta"], at["grad_output"], at["output"], 0, *rows, *rows))
    call(
        *(module.backward, choice, *sizes, scale, at["grad_query"], at["grad_key"], at["grad_value"]),
        *(at["grad_output"], *factors, at["lse"], at["delta"], at["attn_mask"]),
        *(*rows, *keys, *keys, *rows, *rows, *keys, *keys),
    )
    if masked:
        call(
            *(module.mask_gradient, choice, *sizes, scale, at["grad_attn_mask"], at["grad_output"], *factors),
            *(at["output"], at["lse"], at["delta"], at["attn_mask"], *rows, *keys, *keys, *rows),
        )
    written = {name: torch.from_numpy(buffer.to(CPU()).to_numpy()) for name, buffer in blank.items()}
    if choice == 0:  # delta made while tensors are split: rounded elsewhere
        for name, gradient in gradients.items():
            assert np.allclose(gradient, written[name], rtol=1e-4, atol=1e-5, equal_nan=True), name
    return written


def inputs_of(dims):
    """Random tensors, with the single 0 that stands for no mask."""
    given = inputs(dims, torch.float32)
    return given if dims[7] else given | {"attn_mask": torch.zeros(1)}


def errors(dims, choice):
    """The error of each result."""
    given = inputs_of(dims)
    written, apart = run(dims, choice, given), {}
    for name, right in truth(dims, inputs(dims, torch.float32)).items():
        finite = right.isfinite()
        assert torch.equal(finite, written[name].isfinite()), name
        off = (written[name].double() - right)[finite].abs().max()
        apart[name] = float(off / right[finite].abs().max())
    return apart


by_case, launches = {}, {}
for name, (dims, order, choice) in CASES.items():
    virtual.blocks = order
    before = len(virtual.launches)
    by_case[name] = errors(dims, choice)
    launches[name] = sorted({launch.name for launch in virtual.launches[before:]})
dims = CASES["whole tiles"][0]
given = inputs_of(dims)
given["value"][0, 0, 3, 5] = torch.nan
paths = [run(dims, choice, given) for choice in (0, 2)]
given = inputs_of(dims)
given["grad_output"][0, 0, 3, 5] = torch.inf
assert run(dims, 0, given)["grad_query"][0, 0, 3].isnan().all()
same = all(torch.equal(*(path[name].nan_to_num() for path in paths)) for name in ("output", "grad_query"))
findings = [finding.text() for finding in virtual.findings]
print(json.dumps({"errors": by_case, "launches": launches, "plain": same, "findings": findings}))
