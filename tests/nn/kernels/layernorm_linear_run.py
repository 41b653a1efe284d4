"""Runs an extension module under `vgpu exec` (extension_runs.py): `layernorm_linear_run.py MODULE [hopper]`.

Prints the largest relative error of every result, by case, as JSON, or "untouched" for one that was not written, and
the error for scratch memory that is a byte too small. The truth is NumPy's, in float64. With "hopper" the device is one
of sm_90a, and the sizes are those of its own kernels.
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np
from extension_runs import part
from max.driver import CPU, Accelerator, Buffer

from harness.toolchain import extension

module = extension.load(Path(sys.argv[1]))
device, random = Accelerator(), np.random.default_rng(0)
gpu, stream = module.open(0), 0
# Rows, H and O above what the module does in one launch; rows too long for registers; rows of dY in two stages.
LARGER, VECTORS, WIDE, MANY = (5, 257, 27), (4, 272, 32), (3, 16392, 8), (1030, 16, 24)


def on_device(array):
    """A buffer on the virtual GPU."""
    return Buffer.from_numpy(np.ascontiguousarray(array)).to(device)


def scratch(need):
    """Scratch memory, full of NaN: nobody clears it for the kernels."""
    return on_device(np.full(max(1, need), 0xFF, np.uint8))


class Bfloat16:
    """NumPy has no bfloat16: its bits are the upper half of a float32's."""

    itemsize = 2

    @staticmethod
    def encode(array):
        return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    @staticmethod
    def decode(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32)


class Plain:
    """A dtype that NumPy has."""

    def __init__(self, dtype):
        self.itemsize = np.dtype(dtype).itemsize
        self.encode = self.decode = lambda array: array.astype(dtype)


def run(rows, H, O, wanted=15, offset=0, kind=0):
    """Both passes on random tensors; the error of each result."""
    coders = (Plain(np.float32), Plain(np.float32), Bfloat16, Plain(np.float16), Plain(np.float64))
    coder = (*coders, Plain(np.float32))[kind]
    wide = Plain(np.float64 if kind == 4 else np.float32)

    def draw(*shape):
        """Random values that the dtype can hold."""
        return coder.decode(coder.encode(random.standard_normal(shape)))

    def blank(coder, *shape):
        """Memory that nobody has written: NaN."""
        return on_device(coder.encode(np.full(shape, np.nan)))

    def address(*buffers):
        return [buffer._data_ptr() for buffer in buffers]

    x, gamma, beta, W, bias, dy = draw(rows, H), draw(H), draw(H), draw(O, H), draw(O), draw(rows, O)
    y, mean, rstd = blank(coder, rows, O), blank(wide, rows), blank(wide, rows)
    # `offset` elements in front of x make its address one that no vector begins at.
    shifted = on_device(coder.encode(np.concatenate([np.zeros(offset), x.ravel()])))
    given = [on_device(coder.encode(each)) for each in (gamma, beta, W, bias)]
    X = shifted._data_ptr() + coder.itemsize * offset
    sizes = (kind, rows, H, O)
    forward = (*sizes, 1e-5, *address(y, mean, rstd), X, *address(*given))
    need = module.forward(0, 0, 0, 0, *forward)
    lent = scratch(need)
    used = module.forward(gpu, stream, lent._data_ptr(), need, *forward)
    # dW has room for a copy of W with aligned rows.
    room = O * (H + 63)
    results = [blank(coder, rows, H), blank(coder, H), blank(coder, H), blank(coder, room), blank(coder, O)]
    DY = on_device(coder.encode(dy))
    backward = (
        *sizes,
        wanted,
        *address(*results),
        *address(DY),
        X,
        *address(mean, rstd),
        *address(*given[:3]),
        *(0, 0, 0),
    )
    need_backward = module.backward(0, 0, 0, 0, *backward)
    lent_backward = scratch(need_backward)
    used_backward = module.backward(gpu, stream, lent_backward._data_ptr(), need_backward, *backward)
    assert (used, used_backward) == (need, need_backward)
    # What counts ahead of time knows no addresses.
    assert offset or need == module.forward(0, 0, 0, 0, *sizes, 1e-5, *[0] * 8)
    assert offset or need_backward == module.backward(0, 0, 0, 0, *sizes, wanted, *[0] * 15)

    x, gamma, beta, W, bias, dy = (each.astype(np.float64) for each in (x, gamma, beta, W, bias, dy))
    m, r = x.mean(1, keepdims=True), 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    x_hat = (x - m) * r
    dln = dy @ W
    g = dln * gamma
    dx = r * (g - g.mean(1, keepdims=True) - x_hat * (g * x_hat).mean(1, keepdims=True))
    truth = [(x_hat * gamma + beta) @ W.T + bias, m[:, 0], r[:, 0]]
    truth += [dx, (dln * x_hat).sum(0), dln.sum(0), dy.T @ (x_hat * gamma + beta), dy.sum(0)]
    errors = {}
    names = ("output", "mean", "rstd", "dx", "dgamma", "dbeta", "dW", "db")
    for name, got, exact in zip(names, [y, mean, rstd, *results], truth, strict=True):
        got = (wide if name in ("mean", "rstd") else coder).decode(got.to(CPU()).to_numpy())
        if name == "dW":
            got = got[: O * H].reshape(O, H)
        errors[name] = error_of(got, exact)
    return errors


def run_rows(rows, H, O, wanted=15, kind=0, padding=0, few=False, transposed=False):
    """What lies around the products, which are NumPy's here; the error of each result. Rows of what goes into a product and
    comes out of it may be longer than H; where they are `few`, one launch without scratch memory makes what is left of the
    backward pass. The backward pass's ln_out may be wanted `transposed`."""
    dtype = np.float64 if kind == 4 else np.float32
    stride = H + padding

    def draw(*shape):
        """Random values."""
        return random.standard_normal(shape).astype(dtype)

    x, gamma, beta, W, dy = draw(rows, H), draw(H), draw(H), draw(O, H), draw(rows, O)
    shapes = {"ln_out": (rows, stride), "mean": (rows,), "rstd": (rows,)}
    shapes |= {"dx": (rows, H), "dgamma": (H,), "dbeta": (H,), "ln_out again": (rows, stride), "db": (O,)}
    if transposed:
        shapes["ln_out again"] = (H, rows)
    got = {name: on_device(np.full(shape, np.nan, dtype)) for name, shape in shapes.items()}
    dln = np.full((rows, stride), np.nan, dtype)
    dln[:, :H] = dy @ W
    given = {"x": x, "gamma": gamma, "beta": beta, "dy": dy, "dln": dln}
    given = {name: on_device(array) for name, array in given.items()}
    address = {name: buffer._data_ptr() for name, buffer in {**got, **given}.items()} | {"none": 0}
    # The caller's product dW has this project's ln_out; that of dln is given.
    parts = (
        wanted & ~1
        | (32 if wanted & 1 else 0)
        | (16 if wanted & 12 else 0)
        | (64 if few else 0)
        | (128 if transposed else 0)
    )
    for launch, extra, names in (
        (module.forward_rows, 1e-5, "ln_out mean rstd x gamma beta"),
        (module.backward, parts, "dx dgamma dbeta none db dy x mean rstd gamma beta none dln ln_out_again"),
    ):
        addresses = [address[name.replace("_again", " again")] for name in names.split()]
        arguments = (kind, rows, H, O, extra, *addresses, stride)
        need = launch(0, 0, 0, 0, *arguments)
        assert not few or need == 0
        lent = scratch(need)
        assert launch(gpu, stream, lent._data_ptr(), need, *arguments) == need
        assert launch(0, 0, 0, 0, kind, rows, H, O, extra, *[0] * len(addresses), 0) >= need

    x, gamma, beta, W, dy = (each.astype(np.float64) for each in (x, gamma, beta, W, dy))
    mean, rstd = x.mean(1), 1 / np.sqrt(x.var(1) + 1e-5)
    x_hat = (x - mean[:, None]) * rstd[:, None]
    dln = dy @ W
    g = dln * gamma
    dx = g - g.mean(1, keepdims=True) - x_hat * (g * x_hat).mean(1, keepdims=True)
    ln_out = np.pad(x_hat * gamma + beta, ((0, 0), (0, padding)))
    truth = {"ln_out": ln_out, "mean": mean, "rstd": rstd, "dx": rstd[:, None] * dx}
    truth |= {"dgamma": (dln * x_hat).sum(0), "dbeta": dln.sum(0), "db": dy.sum(0)}
    truth["ln_out again"] = ln_out.T if transposed else ln_out
    return {name: error_of(got[name].to(CPU()).to_numpy(), exact) for name, exact in truth.items()}


def error_of(got, exact):
    """The largest error by the largest value, or "untouched"."""
    return "untouched" if np.isnan(got).all() else float(np.abs(got - exact).max() / np.abs(exact).max())


def run_maps():
    """A forward pass the first time, the second, and with fewer rows at the same addresses."""
    H, O = 264, 64
    need = module.forward(0, 0, 0, 0, 2, 16, H, O, 1e-5, *[0] * 8)
    memory = on_device(np.zeros(1 << 20, np.uint8))
    lent, *tensors = (memory._data_ptr() + (1 << 16) * place for place in range(9))

    for which, rows in (("first", 16), ("second", 16), ("third", 8)):
        part(f"maps, {which}")
        module.forward(gpu, stream, lent, need, 2, rows, H, O, 1e-5, *tensors)


def run_hopper():
    """Sizes that divide nothing, whole tiles, several steps and tiles; rows at any address, and what is wanted of them."""
    cases = {
        "ragged": ((133, 136, 136), 2),
        "whole tiles": ((128, 128, 128), 3),
        "several steps": ((130, 520, 264), 2),
        "rows at any address": ((133, 137, 139), 2),
        "rows of x at any address": ((70, 134, 136), 3),
        "rows of y at any address": ((70, 136, 134), 3),
        "long rows": ((3, 8200, 24), 2),
        "longest rows": ((2, 16384, 24), 2),
        "many long rows": ((529, 8200, 8), 3),
        "longer than the longest": ((2, 16392, 8), 2),
        "several turns at any address": ((2200, 203, 24), 2),
        # As many threads a row as there are, from one warp to the whole block.
        "longer rows at any address": ((5, 1031, 26), 2),
        "two rows a block at any address": ((400, 2055, 8), 3),
        "long rows at any address": ((3, 4099, 27), 2),
        "longest rows at any address": ((2, 12293, 24), 2),
        "whole block at any address": ((134, 8193, 8), 2),
    }
    errors = {name: run(*sizes, kind=kind) for name, (sizes, kind) in cases.items()}
    for wanted in (1, 2, 4, 8, 7, 11, 13, 14):
        errors[f"wanted {wanted}"] = run(35, 139, 130, wanted=wanted, kind=2)
    # Tiles of 192 columns, two for some blocks: an odd number of stores each.
    errors["wanted 0"] = run(2, 8, 33800, wanted=0, kind=2)
    errors["x at any address"] = run(9, 136, 128, kind=2, offset=1)
    pairs = {
        "ragged": run(133, 136, 136, kind=5),
        "several steps and tiles": run(130, 520, 264, kind=5),
        "dx alone": run(70, 136, 200, kind=5, wanted=4),
        "dW alone": run(70, 136, 200, kind=5, wanted=1),
        # Where tiles of 128 columns would be more than the multiprocessors, there are 192.
        "wide tiles of the output": run(2, 8, 33800, kind=5, wanted=0),
        "wide tiles of the gradients": run(2, 33800, 8, kind=5),
    }
    errors["two vectors a lane at any address"] = run(6, 309, 40, kind=2)
    errors["four vectors a lane at any address"] = run(9, 813, 10, kind=2)
    for wanted in (257, 268, 271):
        errors[f"wanted {wanted}"] = run(1030, 136, 24, wanted=wanted, kind=2)
    run_maps()
    return {
        "errors": errors,
        "pairs": pairs,
        "narrow": [name for name, (_, kind) in cases.items() if kind == 3],
    }


if sys.argv[2:] == ["hopper"]:
    print(json.dumps(run_hopper()))
    sys.exit()

case = functools.partial
CASES = {
    "small": case(run, 6, 9, 5),
    "small, other sizes": case(run, 1, 200, 3),
    "small, frozen": case(run, 6, 9, 5, wanted=12),
    "small, frozen weight": case(run, 6, 9, 5, wanted=14),
    "small, frozen input": case(run, 6, 9, 5, wanted=11),
    "small, frozen norm": case(run, 6, 9, 5, wanted=7),
    "small, dW alone": case(run, 6, 9, 5, wanted=1),
    "small, bfloat16": case(run, 6, 9, 5, kind=2),
    "small, float64": case(run, 6, 9, 5, kind=4),
    "no whole vectors": case(run, *LARGER),
    "whole vectors": case(run, *VECTORS),
    "again": case(run, *VECTORS),
    "unaligned": case(run, *VECTORS, offset=1),
    "frozen": case(run, *LARGER, wanted=12),
    "frozen weight": case(run, *LARGER, wanted=14),
    "frozen norm": case(run, *VECTORS, wanted=7),
    "frozen input": case(run, *VECTORS, wanted=11),
    "dx alone": case(run, *VECTORS, wanted=4),
    "any row, dx alone": case(run, *LARGER, wanted=4),
    "dgamma alone": case(run, *VECTORS, wanted=8),
    "any row, dgamma alone": case(run, *LARGER, wanted=8),
    "dW alone": case(run, *VECTORS, wanted=1),
    "any row, dW alone": case(run, *LARGER, wanted=1),
    "wide rows, bfloat16": case(run, *WIDE, kind=2),
    "many rows": case(run, *MANY),
    "few shares": case(run, *MANY, wanted=271),
    "no whole vectors, few shares": case(run, *LARGER, wanted=271),
    "few shares, frozen weight": case(run, *VECTORS, wanted=270),
    "few shares, dW alone": case(run, *VECTORS, wanted=257),
    "few shares, dgamma alone": case(run, *LARGER, wanted=264),
    "tf32": case(run, *LARGER, kind=1),
    "bfloat16": case(run, *LARGER, kind=2),
    "float16": case(run, *LARGER, kind=3),
    "float64": case(run, *LARGER, kind=4),
    "rows": case(run_rows, 6, 9, 5),
    "rows, frozen bias": case(run_rows, *VECTORS, wanted=13),
    "rows, padded": case(run_rows, *LARGER, padding=7),
    "rows, db alone": case(run_rows, *LARGER, wanted=2, padding=7),
    "rows, ln_out alone": case(run_rows, *MANY, wanted=1),
    "rows, padded, ln_out alone": case(run_rows, *LARGER, wanted=1, padding=7),
    "whole vectors, padded, ln_out alone": case(run_rows, *VECTORS, wanted=1, padding=4),
    "rows, frozen input": case(run_rows, *VECTORS, wanted=11),
    "rows, few shares": case(run_rows, *LARGER, wanted=271),
    "rows, float64": case(run_rows, *LARGER, kind=4),
    "rows, ln_out transposed": case(run_rows, 70, 45, 8, transposed=True),
    "rows, all transposed, float64": case(run_rows, 33, 64, 8, kind=4, transposed=True),
    "rows, transposed, ln_out alone": case(run_rows, 70, 45, 8, wanted=1, transposed=True),
    "few rows": case(run_rows, *VECTORS, few=True),
    "few rows, padded": case(run_rows, *LARGER, padding=7, few=True),
    "few rows, frozen bias": case(run_rows, *MANY, wanted=13, few=True),
    "few rows, frozen weight": case(run_rows, *VECTORS, wanted=14, few=True),
    "few rows, dx alone": case(run_rows, *VECTORS, wanted=4, few=True),
    "few rows, dgamma alone": case(run_rows, *VECTORS, wanted=8, few=True),
    "few rows, float64": case(run_rows, *LARGER, kind=4, few=True),
}
errors = {}
for name, call in CASES.items():
    part(name)
    errors[name] = call()
need = module.forward(0, 0, 0, 0, 0, *LARGER, 1e-5, *[0] * 8)
try:
    module.forward(gpu, stream, 256, need - 1, 0, *LARGER, 1e-5, *[256] * 8)
    refused = ""
except Exception as error:
    refused = str(error)
print(json.dumps({"errors": errors, "refused": refused}))
