"""What the runtime is written with that Python has no word for: memory by address, and calls of the
translated kernel.

Each of these stands for a few instructions, which `INSTRUCTIONS` writes; they are never run by Python.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from .compiler import Frame
from .values import KINDS, Turns, Value, kind_named


def _never(*_) -> NoReturn:
    raise RuntimeError("this is a word of the compiled runtime, not a function")


def load(kind, address) -> Any:
    """The number of this kind at an address."""
    _never(kind, address)


def store(kind, address, value) -> None:
    """Put a number of this kind at an address."""
    _never(kind, address, value)


def copy_bytes(to, frm, count) -> None:
    """Copy bytes that do not overlap."""
    _never(to, frm, count)


def numbers(count) -> Any:
    """The numbers below one, for a loop."""
    _never(count)


def lanes(mask) -> Any:
    """The lanes of a mask, the lowest first, for a loop."""
    _never(mask)


def unlikely(condition) -> Any:
    """The condition, which is seldom true."""
    return condition


def product_row(a, b, c, depth) -> None:
    """c[0:8] += a[0:depth] @ b[0:depth, 0:8], all float64; the products are added in order before c is."""
    _never(a, b, c, depth)


def step(st, ctx, tid) -> Any:
    """Run a thread of the kernel until it waits or returns; its code."""
    _never(st, ctx, tid)


def perform(code, ctx, warp, stride, active, alive) -> None:
    """Execute the warp instruction with this code."""
    _never(code, ctx, warp, stride, active, alive)


def pointer(f: Frame, address) -> str:
    """An address as a pointer of LLVM."""
    return f.temp(f"inttoptr {f.value(address).typed} to ptr")


def _load(f: Frame, kind, address):
    k = kind_named(kind)
    return f.op(k, f"load {KINDS[k]}, ptr {pointer(f, address)}, align {1 if k == 'p' else k[1]}")


def _store(f: Frame, kind, address, value):
    k = kind_named(kind)
    value = f.cast(f.value(value, k), kind)
    f.emit(f"store {value.typed}, ptr {pointer(f, address)}, align {k[1]}")


def _copy_bytes(f: Frame, to, frm, count):
    name = f.unit.declare("void", "llvm.memcpy.p0.p0.i64", "ptr, ptr, i64, i1")
    f.emit(
        f"call void @{name}(ptr {pointer(f, to)}, ptr {pointer(f, frm)}, {f.value(count).typed}, i1 false)"
    )


def _product_row(f: Frame, a, b, c, depth: int):
    rows, left, out = pointer(f, b), pointer(f, a), pointer(f, c)
    row = "<8 x double>"
    total = "zeroinitializer"
    for k in range(depth):
        x = f.temp(f"load double, ptr {f.temp(f'getelementptr double, ptr {left}, i64 {k}')}, align 8")
        one = f.temp(f"insertelement {row} poison, double {x}, i64 0")
        many = f.temp(f"shufflevector {row} {one}, {row} poison, <8 x i32> zeroinitializer")
        y = f.temp(f"load {row}, ptr {f.temp(f'getelementptr double, ptr {rows}, i64 {8 * k}')}, align 8")
        total = f.temp(f"fadd {row} {total}, {f.temp(f'fmul {row} {many}, {y}')}")
    total = f.temp(f"fadd {row} {total}, {f.temp(f'load {row}, ptr {out}, align 8')}")
    f.emit(f"store {row} {total}, ptr {out}, align 8")


def _step(f: Frame, st, ctx, tid):
    return f.op("u8", f"call i64 @step({', '.join(f.value(x).typed for x in (st, ctx, tid))})")


def _perform(f: Frame, *given):
    f.emit(f"call void @perform({', '.join(f.value(x).typed for x in given)})")


def _numbers(f: Frame, count) -> Turns:
    return Turns(f.value(count))


def _lanes(f: Frame, mask) -> Turns:
    return Turns(f.value(np.uint64(32)), f.value(mask))


def _unlikely(f: Frame, condition) -> Value:
    return condition


INSTRUCTIONS = {
    load: _load, store: _store, copy_bytes: _copy_bytes, unlikely: _unlikely, product_row: _product_row,
    step: _step, perform: _perform, numbers: _numbers, lanes: _lanes,
}  # fmt: skip
