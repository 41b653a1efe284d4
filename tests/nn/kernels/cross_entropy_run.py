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
from harness.puzzles.p27 import step_parts
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


# ---- The step --------------------------------------------------------------------------------------------------


def run_step(function, *arguments):
    """Tensors and numbers in the function's order; what the tensors hold afterwards."""
    given = [on_device(each) if isinstance(each, torch.Tensor) else each for each in arguments]
    flat = [each._data_ptr() if isinstance(each, Buffer) else each for each in given]
    scratch = function(0, 0, 0, 0, *flat)
    lent = on_device(torch.full((scratch,), 255, dtype=torch.uint8))  # NaN, in float32
    function(gpu, stream, lent._data_ptr() if scratch else 0, scratch, *flat)
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    buffers = [each for each in given if isinstance(each, Buffer)]
    return [
        from_device(buffer, each.dtype).view(each.shape)
        for buffer, each in zip(buffers, tensors, strict=True)
    ]


def normal(*shape, dtype=torch.float32, scale=1.0):
    """The same numbers for the same shape."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(dtype)


def run_gelu(count):
    """Both passes, beside torch's in float64."""
    x, dy = normal(count, dtype=torch.bfloat16, scale=3), normal(count + 8, dtype=torch.bfloat16)[:count]
    y, _ = run_step(module.gelu, torch.full_like(x, torch.nan), x, count)
    again, dx = run_step(module.gelu_backward, x, dy, count)
    exact, slope = step_parts.gelu_backward(x.double(), dy.double())
    return {"output": error_of(y, exact), "again": error_of(again, exact), "gradient": error_of(dx, slope)}


def run_add_with_sums(rows, channels):
    """The stream's gradient, and the sums of its columns."""
    stream, branch = (normal(rows + i, channels, dtype=torch.bfloat16)[:rows] for i in (0, 1))
    after, sums, _ = run_step(
        module.add_with_sums, stream, torch.full_like(stream[0], torch.nan), branch, rows, channels
    )
    exact = stream.double() + branch.double()
    return {"stream": error_of(after, exact), "sums": error_of(sums, exact.sum(0))}


def run_token_gradient(vocabulary, channels, places, often):
    """Tokens that come `often`, now and then, and never."""
    generator = torch.Generator().manual_seed(places)
    tokens = torch.randint(0, vocabulary - 1, (places,), generator=generator)
    tokens[torch.randperm(places, generator=generator)[:often]] = 1
    of_head, dx = normal(vocabulary, channels), normal(places, channels, dtype=torch.bfloat16)
    order, starts = step_parts.places_of_tokens(tokens, vocabulary)
    table = torch.full((vocabulary, channels), torch.nan, dtype=torch.bfloat16)
    tensors = (table, of_head, dx, tokens, order, starts)
    table, *_ = run_step(module.token_gradient, *tensors, places, vocabulary, channels)
    exact = of_head.double().index_add(0, tokens, dx.double())
    return {"table": error_of(table, exact)}


def run_norm(count):
    """The norm of many elements."""
    gradient = normal(count, dtype=torch.bfloat16)
    norm, _ = run_step(module.norm, torch.zeros(1), gradient, count)
    return {"norm": error_of(norm, gradient.double().norm()[None])}


def run_adamw(count, decayed, norm):
    """One update beside the one that torch's operations make of the same tensors, which another test holds to PyTorch's."""
    master, mean, square = normal(count), normal(count + 8)[:count] / 9, normal(count + 16)[:count].square()
    working, gradient = master.bfloat16(), normal(count + 24, dtype=torch.bfloat16)[:count]
    numbers, norms = torch.tensor([0.01, 0.19, 0.0975]), torch.tensor([norm])
    constants = (0.9, 0.95, 1e-8, 0.1, 1.0)
    tensors = (master, working, mean, square, gradient, numbers, norms)
    after = run_step(module.adamw, *constants, decayed, count, *tensors)
    options = step_parts.AdamW(*constants)
    step_parts.adamw(
        master, working, gradient, mean, square, numbers, norms, decayed=decayed, options=options
    )
    names = ("master", "working", "mean", "square")
    return {name: error_of(*pair) for name, *pair in zip(names, after, tensors, strict=False)}


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
    "GELU": run_gelu(4104),
    "a stream": run_add_with_sums(130, 520),
    "a table": run_token_gradient(9, 1032, 50, often=25),
    "a table of one chunk's places": run_token_gradient(5, 8, 32, often=32),
    "a table of many places": run_token_gradient(40, 264, 330, often=190),
    "a table of few places": run_token_gradient(5, 8, 3, often=1),
    "a norm": run_norm(2104),
    "a norm of many turns": run_norm(1_200_008),
    "AdamW, clipped": run_adamw(4112, 2064, 3.0),
    "AdamW": run_adamw(64, 0, 0.5),
    "AdamW, a norm that is NaN": run_adamw(64, 0, float("nan")),
}
print(json.dumps(cases))
