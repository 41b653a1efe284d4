"""Every arithmetic, bit, comparison and conversion instruction against Python integers, fractions and NumPy.

The oracles are written on Python numbers, one element at a time, from the PTX manual's description of each
instruction; the virtual GPU works on arrays. Inputs mix special values with random ones.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_tools import run
from typed import present

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
INTS = {
    "u2": [0, 1, 2, 0x7FFF, 0x8000, 0xFFFF, 77],
    "u4": [0, 1, 2, 3, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF, 0x00FF00FF],
    "u8": [0, 1, 2, 63, 64, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, M64, 0x0123456789ABCDEF],
}
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    2.5,
    -2.5,
    3.7,
    1e-3,
    1e10,
    -1e10,
    3e38,
    1e-40,
    math.inf,
    -math.inf,
    math.nan,
]


def samples(kind: str, seed: int, n: int = 128) -> np.ndarray:
    """n values: the special ones in an order that depends on the seed, then random ones."""
    rng = np.random.default_rng(seed)
    if kind[0] == "f":
        with np.errstate(over="ignore"):
            special = np.array(FLOATS).astype(kind)
            values = rng.normal(0, 10.0, n).astype(kind)
    else:
        unsigned = "u" + kind[1]
        special = np.array(INTS[unsigned], np.uint64).astype(unsigned)
        values = (
            rng.integers(0, 1 << 8 * int(kind[1]), n, np.uint64, endpoint=False)
            if kind[1] != "8"
            else rng.integers(0, M64, n, np.uint64, endpoint=True)
        )
        small = rng.random(n) < 0.3
        values = np.where(small, values % np.uint64(64), values).astype(unsigned).view(kind)
        special = special.view(kind)
    special = np.tile(rng.permutation(special), 4)[: n // 2]
    values[: len(special)] = special
    return rng.permutation(values)


@dataclass
class Case:
    """`text`: instruction with %x0 ... and %y0; `kinds`: of the inputs; `out`: of the result; `f`: oracle on scalars."""

    text: str
    kinds: tuple[str, ...]
    out: str
    f: Callable | None
    close: float = 0.0  # relative tolerance, where hardware approximates too

    @property
    def op(self) -> str:
        return self.text.split(".")[0].split()[0]


def signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def trunc_div(a: int, b: int, bits: int) -> int:
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) if b else -1


def bf(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", int(bits) << 16))[0]


def to_bf(x: float) -> int:
    """A real number (float or Fraction) to bfloat16 bits, to nearest even."""
    return round_bits(x, 8, 8)


def to_f16(x: float) -> int:
    return round_bits(x, 5, 11)


def round_bits(x, exponent_bits: int, precision: int) -> int:
    """Exact rounding of a float or Fraction to an IEEE-like format, as its bits."""
    mantissa = precision - 1
    sign = 1 << (exponent_bits + mantissa)
    if isinstance(x, float):
        if math.isnan(x):
            return 0x7FFF
        negative = math.copysign(1, x) < 0
        if math.isinf(x):
            return (sign if negative else 0) | ((1 << exponent_bits) - 1) << mantissa
        x = Fraction(x)
    else:
        negative = x < 0
    x = abs(x)
    bias = (1 << (exponent_bits - 1)) - 1
    out = sign if negative else 0
    if x == 0:
        return out
    e = 0
    while x >= Fraction(2) ** (e + 1):
        e += 1
    while x < Fraction(2) ** e:
        e -= 1
    e = max(e, 1 - bias)
    scaled = x / Fraction(2) ** (e - mantissa)
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1):
        whole += 1
    if whole >> precision:
        whole >>= 1
        e += 1
    if e > bias:
        return out | ((1 << exponent_bits) - 1) << mantissa
    biased = e + bias if whole >> mantissa else 0
    return out | biased << mantissa | (whole & ((1 << mantissa) - 1))


def fused(a: float, b: float, c: float, kind: str):
    """a * b + c rounded once."""
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    if kind == "f8":
        try:
            return float(exact)
        except OverflowError:
            return math.copysign(math.inf, exact)
    bits = round_bits(exact, *{"f4": (8, 24), "f2": (5, 11), "bf": (8, 8)}[kind])
    if kind == "f4":
        return struct.unpack("<f", struct.pack("<I", bits))[0]
    return bits


def prmt(a, b, c):
    both = a | b << 32
    out = 0
    for k in range(4):
        n = c >> 4 * k & 15
        byte = both >> 8 * (n & 7) & 255
        if n & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << 8 * k
    return out


def bfe(a, pos, length, bits, is_signed):
    pos, length = pos & 255, length & 255
    a &= (1 << bits) - 1
    sign = 0
    if is_signed and length:
        sign = a >> min(pos + length - 1, bits - 1) & 1
    out = 0
    for i in range(bits):
        bit = a >> (pos + i) & 1 if i < length and pos + i < bits else sign
        out |= bit << i
    return out


def bfi(a, b, pos, length, bits):
    pos, length = pos & 255, length & 255
    out = b
    for i in range(length):
        if pos + i < bits:
            out = out & ~(1 << pos + i) | (a >> i & 1) << pos + i
    return out


def bfind(a, bits, is_signed):
    if is_signed and signed(a, bits) < 0:
        a = ~a
    a &= (1 << bits) - 1
    return (a.bit_length() - 1) & M32


def fmin(a, b, larger=False):
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    if a == b == 0:
        return a if (math.copysign(1, a) > 0) == larger else b
    return max(a, b) if larger else min(a, b)


def clamp(x, low, high):
    return max(low, min(high, x))


def float_to_int(x: float, rounding, low: int, high: int, nan: int = 0) -> int:
    if math.isnan(x):
        return nan
    if math.isinf(x):
        return high if x > 0 else low
    return clamp(rounding(x), low, high)


def half_even(x: float) -> int:
    return round(Fraction(x))


I32, I64 = (-(1 << 31), (1 << 31) - 1), (-(1 << 63), (1 << 63) - 1)
C = Case
CASES = [
    C("add.s32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: a + b),
    C("add.s64 %y0, %x0, %x1;", ("u8", "u8"), "u8", lambda a, b: a + b),
    C("add.u16 %y0, %x0, %x1;", ("u2", "u2"), "u2", lambda a, b: a + b),
    C("add.sat.s32 %y0, %x0, %x1;", ("i4", "i4"), "i4", lambda a, b: clamp(a + b, *I32)),
    C("sub.s32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: a - b),
    C("sub.u64 %y0, %x0, 7;", ("u8",), "u8", lambda a: a - 7),
    C("mul.lo.s32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: a * b),
    C("mul.lo.s64 %y0, %x0, %x1;", ("u8", "u8"), "u8", lambda a, b: a * b),
    C("mul.hi.u32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: a * b >> 32),
    C("mul.hi.s32 %y0, %x0, %x1;", ("i4", "i4"), "i4", lambda a, b: a * b >> 32),
    C("mul.hi.u64 %y0, %x0, %x1;", ("u8", "u8"), "u8", lambda a, b: a * b >> 64),
    C("mul.hi.s64 %y0, %x0, %x1;", ("i8", "i8"), "i8", lambda a, b: a * b >> 64),
    C("mul.wide.s32 %y0, %x0, %x1;", ("i4", "i4"), "i8", lambda a, b: a * b),
    C("mul.wide.u32 %y0, %x0, %x1;", ("u4", "u4"), "u8", lambda a, b: a * b),
    C("mul.wide.u16 %y0, %x0, %x1;", ("u2", "u2"), "u4", lambda a, b: a * b),
    C("mad.lo.s32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", lambda a, b, c: a * b + c),
    C("mad.hi.u32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", lambda a, b, c: (a * b >> 32) + c),
    C("mad.wide.s32 %y0, %x0, %x1, %x2;", ("i4", "i4", "i8"), "i8", lambda a, b, c: signed(a * b + c, 64)),
    C("mul24.lo.u32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    C("mad24.lo.s32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
    C("div.s32 %y0, %x0, %x1;", ("i4", "i4"), "i4", lambda a, b: signed(trunc_div(a, b, 32), 32)),
    C("div.u32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: a // b if b else M32),
    C("div.s64 %y0, %x0, %x1;", ("i8", "i8"), "i8", lambda a, b: signed(trunc_div(a, b, 64), 64)),
    C("div.u64 %y0, %x0, %x1;", ("u8", "u8"), "u8", lambda a, b: a // b if b else M64),
    C("rem.s32 %y0, %x0, %x1;", ("i4", "i4"), "i4", lambda a, b: a - b * trunc_div(a, b, 32) if b else a),
    C("rem.u64 %y0, %x0, %x1;", ("u8", "u8"), "u8", lambda a, b: a % b if b else a),
    C("min.s32 %y0, %x0, %x1;", ("i4", "i4"), "i4", min),
    C("max.u64 %y0, %x0, %x1;", ("u8", "u8"), "u8", max),
    C("abs.s32 %y0, %x0;", ("i4",), "u4", abs),
    C("neg.s64 %y0, %x0;", ("u8",), "u8", lambda a: -a),
    C("and.b32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: a & b),
    C("or.b64 %y0, %x0, %x1;", ("u8", "u8"), "u8", lambda a, b: a | b),
    C("xor.b16 %y0, %x0, %x1;", ("u2", "u2"), "u2", lambda a, b: a ^ b),
    C("not.b32 %y0, %x0;", ("u4",), "u4", lambda a: ~a),
    C("cnot.b32 %y0, %x0;", ("u4",), "u4", lambda a: int(a == 0)),
    C("shl.b32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, s: a << s if s < 32 else 0),
    C("shl.b64 %y0, %x0, 13;", ("u8",), "u8", lambda a: a << 13),
    C("shr.u32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, s: a >> s if s < 32 else 0),
    C("shr.s64 %y0, %x0, %x1;", ("i8", "u4"), "i8", lambda a, s: a >> min(s, 63)),
    C("shf.l.wrap.b32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", lambda a, b, s: (b << 32 | a) << (s & 31) >> 32),
    C("shf.r.clamp.b32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", lambda a, b, s: (b << 32 | a) >> min(s, 32)),
    C("popc.b64 %y0, %x0;", ("u8",), "u4", lambda a: a.bit_count()),
    C("clz.b32 %y0, %x0;", ("u4",), "u4", lambda a: 32 - a.bit_length()),
    C("brev.b32 %y0, %x0;", ("u4",), "u4", lambda a: int(f"{a:032b}"[::-1], 2)),
    C("brev.b64 %y0, %x0;", ("u8",), "u8", lambda a: int(f"{a:064b}"[::-1], 2)),
    C("bfind.u32 %y0, %x0;", ("u4",), "u4", lambda a: bfind(a, 32, False)),
    C("bfind.s64 %y0, %x0;", ("u8",), "u4", lambda a: bfind(a, 64, True)),
    C("bfe.u32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", lambda a, p, n: bfe(a, p, n, 32, False)),
    C("bfe.s32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", lambda a, p, n: bfe(a, p, n, 32, True)),
    C("bfe.s64 %y0, %x0, %x1, %x2;", ("u8", "u4", "u4"), "u8", lambda a, p, n: bfe(a, p, n, 64, True)),
    C("bfi.b32 %y0, %x0, %x1, %x2, %x3;", ("u4", "u4", "u4", "u4"), "u4", lambda a, b, p, n: bfi(a, b, p, n, 32)),
    C("lop3.b32 %y0, %x0, %x1, %x2, 0x96;", ("u4", "u4", "u4"), "u4", lambda a, b, c: a ^ b ^ c),
    C("lop3.b32 %y0, %x0, %x1, %x2, 0xE8;", ("u4",) * 3, "u4", lambda a, b, c: a & b | a & c | b & c),
    C("prmt.b32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", prmt),
    C("sad.u32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", lambda a, b, c: abs(a - b) + c),
    C("szext.wrap.s32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, n: bfe(a, 0, n & 31, 32, True)),
    C(
        "dp4a.s32.s32 %y0, %x0, %x1, %x2;", ("u4", "u4", "i4"), "i4",
        lambda a, b, c: signed(c + sum(signed(a >> 8 * k, 8) * signed(b >> 8 * k, 8) for k in range(4)), 32),
    ),
    C("selp.b32 %y0, %x0, %x1, %p1;", ("u4", "u4"), "u4", None),
    C("slct.b32.s32 %y0, %x0, %x1, %x2;", ("u4", "u4", "i4"), "u4", lambda a, b, c: a if c >= 0 else b),
    C("mov.b32 %y0, %x0;", ("u4",), "u4", lambda a: a),
    C("mov.b64 {%r1, %r2}, %x0; mov.b64 %y0, {%r2, %r1};", ("u8",), "u8", lambda a: a >> 32 | a << 32),
    C("mov.b32 {%h1, %h2}, %x0; mov.b32 %y0, {%h2, %h1};", ("u4",), "u4", lambda a: a >> 16 | a << 16),
    # floats
    C("add.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", lambda a, b: np.float32(a) + np.float32(b)),
    C("sub.rn.f64 %y0, %x0, %x1;", ("f8", "f8"), "f8", lambda a, b: a - b),
    C("mul.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", lambda a, b: np.float32(a) * np.float32(b)),
    C("add.sat.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", lambda a, b: 0.0 if math.isnan(a + b) else clamp(np.float32(a) + np.float32(b), 0.0, 1.0)),
    C("mul.ftz.f32 %y0, %x0, 0f3F000000;", ("f4",), "f4", lambda a: math.copysign(0, a) if abs(a) / 2 < 2**-126 else a / 2),
    C("fma.rn.f32 %y0, %x0, %x1, %x2;", ("f4", "f4", "f4"), "f4", lambda a, b, c: fused(a, b, c, "f4")),
    C("fma.rn.f64 %y0, %x0, %x1, %x2;", ("f8", "f8", "f8"), "f8", lambda a, b, c: fused(a, b, c, "f8")),
    C("div.rn.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", lambda a, b: np.float32(a) / np.float32(b)),
    C("div.full.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", lambda a, b: np.float32(a) / np.float32(b), 2e-7),
    C("rcp.rn.f64 %y0, %x0;", ("f8",), "f8", lambda a: np.float64(1) / np.float64(a)),
    C("sqrt.rn.f32 %y0, %x0;", ("f4",), "f4", lambda a: np.sqrt(np.float32(a))),
    C("rsqrt.approx.f32 %y0, %x0;", ("f4",), "f4", lambda a: 1 / np.sqrt(np.float64(a)), 2e-7),
    C("ex2.approx.f32 %y0, %x0;", ("f4",), "f4", lambda a: np.exp2(np.float64(a)), 2e-7),
    C("lg2.approx.f32 %y0, %x0;", ("f4",), "f4", lambda a: np.log2(np.float64(a)), 2e-7),
    C("sin.approx.f32 %y0, %x0;", ("f4",), "f4", lambda a: np.sin(np.float64(a)), 2e-7),
    C("cos.approx.f32 %y0, %x0;", ("f4",), "f4", lambda a: np.cos(np.float64(a)), 2e-7),
    C("tanh.approx.f32 %y0, %x0;", ("f4",), "f4", lambda a: np.tanh(np.float64(a)), 2e-7),
    C("min.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", fmin),
    C("max.f64 %y0, %x0, %x1;", ("f8", "f8"), "f8", lambda a, b: fmin(a, b, True)),
    C("max.NaN.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", lambda a, b: a + b if a != a or b != b else fmin(a, b, True)),
    C("abs.f32 %y0, %x0;", ("f4",), "f4", abs),
    C("neg.f64 %y0, %x0;", ("f8",), "f8", lambda a: -a),
    C("copysign.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", lambda a, b: math.copysign(b, a)),
    C("add.f16 %y0, %x0, %x1;", ("f2", "f2"), "f2", lambda a, b: np.float16(a) + np.float16(b)),
    C("fma.rn.f16 %y0, %x0, %x1, %x2;", ("f2", "f2", "f2"), "u2", lambda a, b, c: h16(a, b, c)),
    C("fma.rn.bf16 %y0, %x0, %x1, %x2;", ("u2", "u2", "u2"), "u2", lambda a, b, c: fused_bf(a, b, c)),
    C("mul.bf16 %y0, %x0, %x1;", ("u2", "u2"), "u2", lambda a, b: exact_bf(bf(a) * bf(b))),
    C("add.f16x2 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: pair(a, b, lambda x, y: x + y)),
    # comparisons
    C("setp.lt.s32 %p1, %x0, %x1; selp.u32 %y0, 1, 0, %p1;", ("i4", "i4"), "u4", lambda a, b: int(a < b)),
    C("setp.hi.u32 %p1, %x0, %x1; selp.u32 %y0, 1, 0, %p1;", ("u4", "u4"), "u4", lambda a, b: int(a > b)),
    C("setp.ne.f32 %p1, %x0, %x1; selp.u32 %y0, 1, 0, %p1;", ("f4", "f4"), "u4", lambda a, b: int(a < b or a > b)),
    C("setp.neu.f32 %p1, %x0, %x1; selp.u32 %y0, 1, 0, %p1;", ("f4", "f4"), "u4", lambda a, b: int(a != b)),
    C("setp.geu.f64 %p1, %x0, %x1; selp.u32 %y0, 1, 0, %p1;", ("f8", "f8"), "u4", lambda a, b: int(not a < b)),
    C("setp.nan.f32 %p1, %x0, %x1; selp.u32 %y0, 1, 0, %p1;", ("f4", "f4"), "u4", lambda a, b: int(a != a or b != b)),
    C("setp.equ.f32 %p1, %x0, %x1; selp.u32 %y0, 1, 0, %p1;", ("f4", "f4"), "u4", lambda a, b: int(not (a < b or a > b))),
    C(
        "setp.gt.s32 %p2, %x2, 0; setp.eq.and.s32 %p1|%p3, %x0, %x1, %p2;"
        " selp.u32 %r1, 1, 0, %p1; selp.u32 %r2, 2, 0, %p3; or.b32 %y0, %r1, %r2;",
        ("i4", "i4", "i4"), "u4", lambda a, b, c: int(a == b and c > 0) | 2 * int(a != b and c > 0),
    ),
    C("set.gt.u32.f32 %y0, %x0, %x1;", ("f4", "f4"), "u4", lambda a, b: M32 if a > b else 0),
    C("testp.finite.f32 %p1, %x0; selp.u32 %y0, 1, 0, %p1;", ("f4",), "u4", lambda a: int(math.isfinite(a))),
    C("testp.subnormal.f32 %p1, %x0; selp.u32 %y0, 1, 0, %p1;", ("f4",), "u4", lambda a: int(0 < abs(a) < 2**-126)),
    # conversions
    C("cvt.s64.s32 %y0, %x0;", ("i4",), "i8", lambda a: a),
    C("cvt.u64.u32 %y0, %x0;", ("u4",), "u8", lambda a: a),
    C("cvt.u32.u64 %y0, %x0;", ("u8",), "u4", lambda a: a),
    C("cvt.s32.s8 %y0, %x0;", ("u4",), "i4", lambda a: signed(a, 8)),
    C("cvt.sat.u8.s32 %y0, %x0;", ("i4",), "u4", lambda a: clamp(a, 0, 255)),
    C("cvt.rzi.s32.f32 %y0, %x0;", ("f4",), "i4", lambda a: float_to_int(a, math.trunc, *I32)),
    C("cvt.rni.s64.f64 %y0, %x0;", ("f8",), "i8", lambda a: float_to_int(a, half_even, *I64, nan=-(1 << 63))),
    C("cvt.rmi.u32.f32 %y0, %x0;", ("f4",), "u4", lambda a: float_to_int(a, math.floor, 0, M32)),
    C("cvt.rpi.f32.f32 %y0, %x0;", ("f4",), "f4", lambda a: np.ceil(np.float32(a))),
    C("cvt.rn.f32.s32 %y0, %x0;", ("i4",), "f4", np.float32),
    C("cvt.rz.f32.u32 %y0, %x0;", ("u4",), "f4", lambda a: toward_zero(a)),
    C("cvt.rn.f32.u64 %y0, %x0;", ("u8",), "f4", lambda a: unbits(round_bits(Fraction(a), 8, 24))),
    C("cvt.rn.f64.s64 %y0, %x0;", ("i8",), "f8", float),
    C("cvt.f64.f32 %y0, %x0;", ("f4",), "f8", lambda a: a),
    C("cvt.rn.f32.f64 %y0, %x0;", ("f8",), "f4", np.float32),
    C("cvt.rz.f32.f64 %y0, %x0;", ("f8",), "f4", lambda a: toward_zero(a)),
    C("cvt.rn.f16.f32 %y0, %x0;", ("f4",), "f2", np.float16),
    C("cvt.f32.f16 %y0, %x0;", ("f2",), "f4", np.float32),
    C("cvt.rn.bf16.f32 %y0, %x0;", ("f4",), "u2", to_bf),
    C("cvt.f32.bf16 %y0, %x0;", ("u2",), "u4", lambda a: a << 16),
    C("cvt.rn.bf16x2.f32 %y0, %x0, %x1;", ("f4", "f4"), "u4", lambda a, b: to_bf(a) << 16 | to_bf(b)),
    C("cvt.rn.relu.f16x2.f32 %y0, %x0, %x1;", ("f4", "f4"), "u4", lambda a, b: relu16(a) << 16 | relu16(b)),
    C("cvt.rna.tf32.f32 %y0, %x0;", ("u4",), "u4", lambda a: a + 0x1000 * (a & 0x7FFFFFFF <= 0x7F800000) & 0xFFFFE000),
]  # fmt: skip


def unbits(b: int) -> float:
    return struct.unpack("<f", struct.pack("<I", b))[0]


def toward_zero(a) -> float:
    """A number to float32, rounded toward zero."""
    if isinstance(a, float) and not math.isfinite(a):
        return a
    near = np.float32(a)
    if math.isinf(near):
        return math.copysign(float(np.finfo(np.float32).max), a)
    return (
        float(np.nextafter(near, np.float32(0)))
        if abs(Fraction(float(near))) > abs(Fraction(a))
        else float(near)
    )


def relu16(x: float) -> int:
    bits = to_f16(x)
    return 0 if bits & 0x8000 and not math.isnan(x) else bits


def h16(a, b, c):
    out = fused(float(a), float(b), float(c), "f2")
    return out if isinstance(out, int) else to_f16(out) if not math.isnan(out) else 0x7FFF


def exact_bf(x: float) -> int:
    return to_bf(float(x))


def fused_bf(a, b, c):
    out = fused(bf(a), bf(b), bf(c), "bf")
    return out if isinstance(out, int) else to_bf(out)


def pair(a, b, f):
    halves = []
    for s in (0, 16):
        x, y = (np.array([v >> s & 0xFFFF], np.uint16).view(np.float16)[0] for v in (a, b))
        halves.append(int(np.array([f(x, y)]).view(np.uint16)[0]))
    return halves[0] | halves[1] << 16


def nan16(bits: np.ndarray, op: str) -> np.ndarray:
    """NaN payloads are not compared: every 16-bit NaN becomes one value."""
    top = 0x7F80 if "bf16" in op else 0x7C00
    return np.where((bits & 0x7FFF) > top, 0x7FFF, bits)


@pytest.mark.parametrize("case", [c for c in CASES if c.f], ids=lambda c: c.text[:40])
def test_value(case: Case):
    inputs = [samples(kind, 7 * k + 1) for k, kind in enumerate(case.kinds)]
    (got,) = run(case.text, inputs, [case.out])
    with np.errstate(all="ignore"):
        want = [present(case.f)(*(x.item() for x in row)) for row in zip(*inputs, strict=True)]
        if case.out[0] == "f":
            want = np.array([float(w) for w in want]).astype(case.out)
            if case.close:
                np.testing.assert_allclose(got, want, rtol=case.close, atol=1e-44)
                return
            np.testing.assert_array_equal(got, want)
            # the sign of zero counts
            np.testing.assert_array_equal(np.signbit(got[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))
            return
    mask = (1 << 8 * int(case.out[1])) - 1
    want = np.array([int(w) & mask for w in want], np.uint64).astype("u" + case.out[1])
    got = got.view("u" + case.out[1])
    if any(t in case.text for t in ("f16", "bf16")):
        if case.out == "u2":
            got, want = nan16(got, case.text), nan16(want, case.text)
        else:
            got, want = ([nan16(x >> s & 0xFFFF, case.text) for s in (0, 16)] for x in (got, want))
    np.testing.assert_array_equal(got, want)


def test_selp_takes_the_predicate():
    x = [np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32) + 100]
    (got,) = run("setp.lt.u32 %p1, %i, 20; selp.b32 %y0, %x0, %x1, %p1;", x, ["u4"])
    np.testing.assert_array_equal(got, np.where(np.arange(64) < 20, x[0], x[1]))


_SPECIAL = st.sampled_from([0.0, -0.0, 1.0, 2.0**-126, 2.0**-149, 1 + 2.0**-23, 3.4e38, 2.0**-24, 1.5])
_FLOAT = st.one_of(_SPECIAL, st.floats(width=32, allow_nan=False, allow_infinity=False))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(_FLOAT, _FLOAT, _FLOAT), min_size=1, max_size=40))
def test_fma_rounds_once(rows):
    """Including ties, cancellation and subnormal results."""
    x = [np.array(c, np.float32) for c in zip(*rows, strict=True)]
    (got,) = run("fma.rn.f32 %y0, %x0, %x1, %x2;", x, ["f4"])
    want = [fused(a.item(), b.item(), c.item(), "f4") for a, b, c in zip(*x, strict=True)]
    np.testing.assert_array_equal(got, np.array(want).astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, M32)] * 3), min_size=1, max_size=40), st.integers(0, 255))
def test_lop3_every_table(rows, table):
    x = [np.array(c, np.uint32) for c in zip(*rows, strict=True)]
    (got,) = run(f"lop3.b32 %y0, %x0, %x1, %x2, {table};", x, ["u4"])
    want = [
        sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))
        for a, b, c in rows
    ]
    np.testing.assert_array_equal(got, want)
