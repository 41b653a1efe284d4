"""Runs the extension module under `vgpu exec` (extension_runs.py): `cross_entropy_run.py MODULE`.

Prints as JSON the largest relative error of each result of each case. The truth of the rows is `rows_by_torch` in float64,
which other tests hold to autograd.
"""

import json
import sys
from pathlib import Path

import torch
from max.driver import CPU, Accelerator, Buffer

from harness.nn.arguments import wide
from harness.nn.cross_entropy_chunks import Loss, rows_by_torch
from harness.nn.extension_kernels import KINDS, padded
from harness.toolchain import extension

module = extension.load(Path(sys.argv[1]), "cross_entropy")
device = Accelerator()
gpu, stream = module.open(0), 0
IGNORED = -7


def on_device(tensor):
    """A buffer on the virtual GPU; 16-bit elements as integers, for the driver copies bits."""
    bits = tensor.contiguous().view(torch.uint16) if tensor.dtype.itemsize == 2 else tensor.contiguous()
    return Buffer.from_numpy(bits.numpy()).to(device)


def from_device(buffer, dtype):
    """What a buffer holds."""
    return torch.from_numpy(buffer.to(CPU()).to_numpy().copy()).view(dtype)


def error_of(got, exact):
    """The largest error by the largest value, infinite where a NaN is not one in both."""
    got, exact = got.double(), exact.double()
    if not torch.equal(got.isnan(), exact.isnan()):
        return float("inf")
    scale = exact.nan_to_num().abs().max()
    return float((got - exact).nan_to_num().abs().max() / (scale or 1))


def run_rows(rows, classes, dtype, loss, *, one_scale=False, wanted=True):
    """Losses and gradient; the first row is ignored, and of several the target of the last is no class, and the one before it
    has a NaN."""
    generator = torch.Generator().manual_seed(rows * classes)
    pitch, sums = padded(classes, dtype), wide(dtype)
    logits = (3 * torch.randn(rows, pitch, generator=generator, dtype=torch.float64)).to(dtype)
    logits[:, classes:] = torch.nan
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[0] = IGNORED
    if rows > 3:
        logits[-2, 0] = torch.nan
    scales = torch.rand(1 if one_scale else rows, generator=generator).to(sums)
    exact, losses = logits[:, :classes].double().clone(), torch.empty(rows, dtype=torch.float64)
    rows_by_torch(exact, losses, target, scales.double(), loss, wanted)
    if rows > 2:
        target[-1] = classes
        losses[-1] = exact[-1] = torch.nan
    given = [on_device(each) for each in (logits, torch.full((rows,), torch.nan, dtype=sums), target, scales)]
    step = 0 if one_scale else 1
    sizes = (KINDS[dtype], rows, classes, pitch, step, int(wanted), loss.ignore_index)
    options = (loss.label_smoothing, loss.z_loss, loss.softcap)
    addresses = [buffer._data_ptr() for buffer in given]
    module.cross_entropy_rows(gpu, stream, 0, 0, *sizes, *options, *addresses)
    after = from_device(given[0], dtype).view(rows, pitch)
    errors = {"losses": error_of(from_device(given[1], sums), losses)}
    if wanted:
        assert (after[:-1, classes:] == 0).all()
        errors["gradient"] = error_of(after[:, :classes], exact)
    else:
        assert torch.equal(after.view(torch.uint8), logits.view(torch.uint8))
    return errors


def run_scale(count, factor):
    """Values times a number on the GPU."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)).bfloat16()
    given = [on_device(values), on_device(torch.tensor([factor]))]
    addresses = [buffer._data_ptr() for buffer in given]
    module.scale_unless_one(gpu, stream, 0, 0, KINDS[values.dtype], count, *addresses)
    return {"values": error_of(from_device(given[0], values.dtype), (values.float() * factor).bfloat16())}


PLAIN = Loss(IGNORED, 0.0, 0.0, 0.0)
ALL = Loss(IGNORED, 0.1, 0.01, 4.0)
bfloat16, float16, float32, float64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
cases = {
    "one class": run_rows(2, 1, bfloat16, PLAIN),
    "few classes": run_rows(5, 37, bfloat16, ALL),
    "whole vectors": run_rows(4, 64, float32, ALL),
    "one scale": run_rows(4, 203, float16, PLAIN, one_scale=True),
    "float64": run_rows(3, 301, float64, ALL),
    "many threads": run_rows(3, 4099, bfloat16, ALL),
    "many vectors": run_rows(5, 8221, float32, PLAIN),
    "several turns": run_rows(2, 33001, bfloat16, PLAIN),
    "several turns under a cap": run_rows(4, 2040, float32, ALL),
    "no gradient": run_rows(3, 90, float32, ALL, wanted=False),
    "scaled": run_scale(4107, 0.75),
    "not scaled": run_scale(4107, 1.0),
}
print(json.dumps(cases))
