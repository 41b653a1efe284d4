"""Hand-written PTX for tests: wraps a few instructions in a kernel that reads one element of each input per thread."""

from __future__ import annotations

import numpy as np
from kernel_tools import Bench

WIDTH = {"u1": 1, "u2": 2, "i2": 2, "f2": 2, "u4": 4, "i4": 4, "f4": 4, "u8": 8, "i8": 8, "f8": 8}
HEADER = ".version 8.5\n.target sm_90a\n.address_size 64\n"


def covers(*opcodes: str):
    """Marks a test as the one that covers these opcodes, for the table in OPCODES.md."""

    def mark(f):
        f.covers = opcodes
        return f

    return mark


def kernel(body: str, inputs: int, outputs: int, *, widths_in, widths_out, declare: str = "") -> str:
    """A kernel of `outputs` and `inputs` arrays. Thread i gets input element i in %x0, %x1 ... and stores %y0, %y1 ...

    %i is the thread number (b32), %p, %r, %d, %h are scratch registers (pred, b32, b64, b16), %a<k> the address of
    array k's element: outputs first.
    """
    params = ",\n".join(f".param .u64 q{k}" for k in range(inputs + outputs))
    regs = [
        ".reg .pred %p<8>;",
        ".reg .b16 %h<16>;",
        ".reg .b32 %r<32>, %i;",
        ".reg .b64 %d<16>, %a<16>;",
        ".reg .b32 %t<4>;",
    ]
    for name, widths in (("x", widths_in), ("y", widths_out)):
        regs += [f".reg .b{max(8 * w, 16)} %{name}{k};" for k, w in enumerate(widths)]
    lines = [
        "mov.u32 %t0, %ctaid.x;",
        "mov.u32 %t1, %ntid.x;",
        "mov.u32 %t2, %tid.x;",
        "mad.lo.s32 %i, %t0, %t1, %t2;",
    ]
    for k, width in enumerate([*widths_out, *widths_in]):
        lines += [f"ld.param.u64 %a{k}, [q{k}];", f"mad.wide.u32 %a{k}, %i, {width}, %a{k};"]
    for k, width in enumerate(widths_in):
        lines.append(f"ld.global.b{8 * width} %x{k}, [%a{k + outputs}];")
    lines.append(body)
    for k, width in enumerate(widths_out):
        lines.append(f"st.global.b{8 * width} [%a{k}], %y{k};")
    text = "\n".join([*regs, declare, *lines, "ret;"])
    return f"{HEADER}.visible .entry k(\n{params}\n)\n{{\n{text}\n}}\n"


def run(
    body: str,
    inputs: list[np.ndarray],
    outputs: list[str],
    *,
    block: int = 64,
    declare: str = "",
    bench=None,
    **options,
):
    """Run `body` for every element of the inputs; returns the output arrays (kinds like "u4")."""
    n = len(inputs[0]) if inputs else block
    text = kernel(
        body, len(inputs), len(outputs), widths_in=[x.dtype.itemsize for x in inputs],
        widths_out=[WIDTH[k] for k in outputs], declare=declare,
    )  # fmt: skip
    bench = bench or Bench(**options)
    out = [bench.empty(f"out{k}", n, np.dtype(kind)) for k, kind in enumerate(outputs)]
    given = [bench.place(f"in{k}", x) for k, x in enumerate(inputs)]
    block = min(block, n)
    assert n % block == 0
    bench.launch = bench.run(text, n // block, block, *out, *given)
    assert not bench.errors(), "\n".join(f.text() for f in bench.errors())
    return [bench.get(o) for o in out]
