"""LLVM IR for NumPy's functions, and for the few of numeric.py that LLVM has an instruction for.

Everything else of numeric.py is compiled from its source. Each entry does to one number what NumPy does to an
array; what rounds or treats NaN differently on this processor is not here, so that the launch goes to the
NumPy engine."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from harness.vgpu.engines.opcodes import numeric

from .compiler import Frame
from .values import KINDS, Refused, Value


def _where(f: Frame, condition, x, y):
    return f.select(condition, x, y)


def _extreme(word: str, keep_number: bool):
    """np.minimum and np.maximum (a NaN wins), np.fmin and np.fmax (a number wins)."""

    def write(f: Frame, x, y):
        a, b = f.alike(x, y)
        if a.kind[0] != "f":
            test = f.compare(ast.Lt if word == "min" else ast.Gt, a, b)
            return f.select(test, a, b)
        first = f.compare(ast.LtE if word == "min" else ast.GtE, a, b)
        odd = b if keep_number else a
        first = f.binary(ast.BitOr, first, f.compare(ast.NotEq, odd, odd))
        return f.select(first, a, b)

    return write


def _clip(f: Frame, x, low, high):
    return _extreme("min", False)(f, _extreme("max", False)(f, x, low), high)


def _abs(f: Frame, x):
    x = f.value(x)
    if x.kind[0] == "u":
        return x
    if x.kind[0] == "f":
        name = f"llvm.fabs.{_suffix(x)}"
        return _intrinsic(f, name, x)
    return f.select(f.compare(ast.Lt, x, 0), _negative(f, x), x)


def _negative(f: Frame, x):
    x = f.value(x)
    return f.op(x.kind, f"fneg {x.typed}" if x.kind[0] == "f" else f"sub {KINDS[x.kind]} 0, {x.text}")


def _suffix(x: Value) -> str:
    return f"f{8 * x.size}" if x.kind[0] == "f" else f"i{8 * x.size}"


def _intrinsic(f: Frame, name: str, *arguments: Value) -> Value:
    kind = arguments[0].kind
    f.unit.declare(KINDS[kind], name, ", ".join(KINDS[a.kind] for a in arguments))
    return f.op(kind, f"call {KINDS[kind]} @{name}({', '.join(a.typed for a in arguments)})")


def _rounding(word: str):
    def write(f: Frame, x):
        x = f.value(x)
        if x.kind == "f2":
            return f.cast(write(f, f.cast(x, "f4")), "f2")
        if x.kind[0] != "f":
            raise Refused(f"{word} of {x.kind}")
        return _intrinsic(f, f"llvm.{word}.{_suffix(x)}", x)

    return write


def _library(word: str):
    """A function of the C library: only in float64, whose last bit does not matter after rounding to
    float32."""

    def write(f: Frame, x):
        x = f.value(x)
        if x.kind != "f8":
            raise Refused(f"{word} of {x.kind}")
        return _intrinsic(f, word, x)

    return write


def _copysign(f: Frame, x, y):
    a, b = f.alike(x, y)
    return _intrinsic(f, f"llvm.copysign.{_suffix(a)}", a, b)


def _against_infinity(word: str):
    """How the magnitude compares with infinity, as bits."""

    def write(f: Frame, x):
        x = f.value(x)
        infinity = {"f2": 0x7C00, "f4": 0x7F800000, "f8": 0x7FF0 << 48}[x.kind]
        bits = f.view(_abs(f, x), f"u{x.size}")
        return f.op("p", f"icmp {word} {bits.typed}, {infinity}")

    return write


def _signbit(f: Frame, x):
    x = f.value(x)
    return f.compare(ast.Lt, f.view(x, f"i{x.size}"), 0)


def _next_after(f: Frame, x, towards):
    """The neighbour of x in the direction of an infinity."""
    x = f.value(x)
    up = bool(towards > 0)
    unsigned = f"u{x.size}"
    bits = f.view(x, unsigned)
    negative = _signbit(f, x)
    one = f.value(1, unsigned)
    more, less = f.binary(ast.Add, bits, one), f.binary(ast.Sub, bits, one)
    moved = f.select(negative, less, more) if up else f.select(negative, more, less)
    tiny = f.value(1 if up else (1 << (8 * x.size - 1)) | 1, unsigned)
    moved = f.select(f.compare(ast.Eq, x, 0.0), tiny, moved)
    stay = f.binary(ast.BitOr, f.compare(ast.NotEq, x, x), f.compare(ast.Eq, x, float(towards)))
    return f.view(f.select(stay, bits, moved), x.kind)


def _fmod(f: Frame, x, y):
    a, b = f.alike(x, y)
    if a.kind[0] != "i":
        raise Refused("np.fmod of floats")
    minus = f.compare(ast.Eq, b, -1)  # the processor traps at the lowest number by -1
    safe = f.select(minus, f.value(1, b.kind), b)
    return f.op(a.kind, f"srem {a.typed}, {safe.text}")


def _bit_count(f: Frame, x):
    x = f.value(x)
    return f.cast(_intrinsic(f, f"llvm.ctpop.{_suffix(x)}", x), "u1")


# -- of numeric.py ------------------------------------------------------------------------------------------
def _canonical(f: Frame, x):
    x = f.value(x)
    if x.kind not in ("f2", "f4"):
        return x
    same = f.compare(ast.Eq, x, x)
    return f.select(same, x, numeric.CANONICAL_F4 if x.kind == "f4" else numeric.CANONICAL_F2)


def _quiet(f: Frame, x):
    x = f.value(x)
    bits = f.view(x, "u8")
    return f.select(f.compare(ast.Eq, x, x), x, f.view(f.binary(ast.BitOr, bits, np.uint64(1 << 51)), "f8"))


def _reverse(f: Frame, x):
    x = f.value(x)
    return _intrinsic(f, f"llvm.bitreverse.{_suffix(x)}", x)


def _highest(f: Frame, x, shift_amount: bool):
    x = f.value(x)
    bits = 8 * x.size
    if x.kind[0] == "i":
        x = f.select(f.compare(ast.Lt, x, 0), f.op(x.kind, f"xor {x.typed}, -1"), x)
    name = f.unit.declare(KINDS[x.kind], f"llvm.ctlz.{_suffix(x)}", f"{KINDS[x.kind]}, i1")
    zeros = f.cast(f.op(f"u{x.size}", f"call {KINDS[x.kind]} @{name}({x.typed}, i1 false)"), "u4")
    place = zeros if shift_amount else f.binary(ast.Sub, np.uint32(bits - 1), zeros)
    return f.select(f.compare(ast.Eq, x, 0), np.uint32(0xFFFFFFFF), place)


def _fused(f: Frame, a, b, c):
    return _intrinsic(f, "llvm.fma.f32", *(f.value(x) for x in (a, b, c)))


def _divide(f: Frame, x, y):
    """Division of integers toward zero; by zero all ones; the lowest number by -1 is itself."""
    a, b = f.alike(x, y)
    zero = f.compare(ast.Eq, b, 0)
    ones, one = f.value(-1 if a.kind[0] == "i" else (1 << 8 * a.size) - 1, a.kind), f.value(1, a.kind)
    if a.kind[0] == "u":
        return f.select(zero, ones, f.op(a.kind, f"udiv {a.typed}, {f.select(zero, one, b).text}"))
    minus = f.compare(ast.Eq, b, -1)
    safe = f.select(f.binary(ast.BitOr, zero, minus), one, b)
    plain = f.op(a.kind, f"sdiv {a.typed}, {safe.text}")
    return f.select(zero, ones, f.select(minus, _negative(f, a), plain))


def _dtype_info(what):
    def write(f: Frame, x):
        return what(np.dtype(x))

    return write


def _operator(op: type):
    return lambda f, x, y: f.binary(op, x, y)


INTRINSICS: dict[Any, Any] = {
    np.add: _operator(ast.Add), np.bitwise_and: _operator(ast.BitAnd), np.bitwise_or: _operator(ast.BitOr),
    np.bitwise_xor: _operator(ast.BitXor),
    np.where: _where, np.minimum: _extreme("min", False), np.maximum: _extreme("max", False),
    np.fmin: _extreme("min", True), np.fmax: _extreme("max", True), np.clip: _clip, np.abs: _abs,
    np.negative: _negative,
    np.copysign: _copysign, np.sqrt: _rounding("sqrt"), np.rint: _rounding("roundeven"),
    np.trunc: _rounding("trunc"),
    np.floor: _rounding("floor"), np.ceil: _rounding("ceil"), np.exp2: _library("exp2"),
    np.log2: _library("log2"),
    np.sin: _library("sin"), np.cos: _library("cos"), np.tanh: _library("tanh"), np.isfinite: _against_infinity("ult"),
    np.isinf: _against_infinity("eq"), np.signbit: _signbit, np.nextafter: _next_after, np.fmod: _fmod,
    np.bitwise_count: _bit_count,
    np.iinfo: _dtype_info(np.iinfo), np.finfo: _dtype_info(np.finfo),
    numeric.canonical: _canonical, numeric.quiet: _quiet, numeric.brev: _reverse, numeric.bfind: _highest,
    numeric.fma_f4: _fused, numeric.idiv: _divide,
}  # fmt: skip
