"""Helpers for hand-written PTX: kernels whose threads read one element of each input, and their launches."""

from __future__ import annotations

import numpy as np
from kernel_tools import Bench

WIDTH = {"u1": 1, "u2": 2, "i2": 2, "f2": 2, "u4": 4, "i4": 4, "f4": 4, "u8": 8, "i8": 8, "f8": 8}
HEADER = ".version 8.5\n.target sm_90a\n.address_size 64\n"
REGISTERS = """.reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<32>, %i, %t<4>; .reg .b64 %d<16>, %a<16>;"""
THREAD = """mov.u32 %t0, %ctaid.x; mov.u32 %t1, %ntid.x; mov.u32 %t2, %tid.x; mad.lo.s32 %i, %t0, %t1, %t2;"""


def covers(*opcodes: str):
    """Mark a test as covering these opcodes, for the table in OPCODES.md."""

    def decorate(f):
        f.covers = opcodes
        return f

    return decorate


def make_kernel(
    body: str, widths_in=(), widths_out=(4,), *, declare: str = "", module: str = "", store: bool = True
) -> str:
    """Return a kernel: thread i loads element i of the inputs into %x0 ... and stores %y0 ... to the outputs.

    %i is the thread number (b32), %t0 the block, %t2 the thread in its block; %p, %r, %d, %h are scratch registers (pred,
    b32, b64, b16); %a<k> is the address of array k's element, outputs first. `declare` is inserted before the code, `module`
    before the kernel. Without `store` the results are not stored.
    """
    widths = [*widths_out, *widths_in]
    params = ",\n".join(f".param .u64 q{k}" for k in range(len(widths)))
    lines = [REGISTERS]
    for name, type_widths in (("x", widths_in), ("y", widths_out)):
        lines += [f".reg .b{max(8 * w, 16)} %{name}{k};" for k, w in enumerate(type_widths)]
    lines += [declare, THREAD]
    for k, width in enumerate(widths):
        lines += [f"ld.param.u64 %a{k}, [q{k}];", f"mad.wide.u32 %a{k}, %i, {width}, %a{k};"]
    for k, width in enumerate(widths_in):
        lines.append(f"ld.global.b{8 * width} %x{k}, [%a{k + len(widths_out)}];")
    lines.append(body)
    if store:
        lines += [f"st.global.b{8 * width} [%a{k}], %y{k};" for k, width in enumerate(widths_out)]
    text = "\n".join([*lines, "ret;"])
    return f"{HEADER}{module}.visible .entry k(\n{params}\n)\n{{\n{text}\n}}\n"


def run_ptx(
    body: str, inputs: list[np.ndarray], outputs: list[str], *, block=64, declare="", module="", bench=None, **options
) -> list[np.ndarray]:  # fmt: skip
    """Run `body` for every element of the inputs; return the output arrays (kinds like "u4")."""
    n = len(inputs[0]) if inputs else block
    widths = [x.itemsize for x in inputs], [WIDTH[k] for k in outputs]
    text = make_kernel(body, *widths, declare=declare, module=module)
    bench = bench or Bench()
    out = [bench.empty(f"out{k}", n, np.dtype(kind)) for k, kind in enumerate(outputs)]
    arguments = [bench.upload(f"in{k}", x) for k, x in enumerate(inputs)]
    block = min(block, n)
    assert n % block == 0
    bench.run(text, n // block, block, *out, *arguments, **options)
    assert not bench.errors(), "\n".join(f.format() for f in bench.errors())
    return [bench.download(o) for o in out]


def find_errors(
    body: str, grid: int = 1, block: int = 32, *, cells: int = 64, value: int = 0, declare: str = "",
    module: str = "", bench: Bench | None = None, **options,
) -> list:  # fmt: skip
    """Return the errors of a kernel on `cells` 32-bit words of one value at %d0; %a0 is the thread's word."""
    bench = bench or Bench()
    text = make_kernel("ld.param.u64 %d0, [q0];" + body, declare=declare, module=module, store=False)
    bench.run(text, grid, block, bench.upload("cells", np.full(cells, value, np.uint32)), **options)
    return bench.errors()
