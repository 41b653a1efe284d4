"""Integer, bit, comparison and conversion instructions compared with Python integers, fractions and NumPy.

The references follow the PTX manual on single Python numbers, whereas the virtual GPU uses arrays. Inputs are special and
random values.
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
from ptx_tools import run_ptx
from typed import unwrap

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
INTS = {
    "u2": [0, 1, 2, 0x7FFF, 0x8000, 0xFFFF, 77],
    "u4": [0, 1, 2, 3, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF, 0x00FF00FF],
    "u8": [0, 1, 2, 63, 64, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, M64, 0x0123456789ABCDEF],
}
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.7, 1e-3, 1e10, -1e10, 3e38, 1e-40]
FLOATS += [math.inf, -math.inf, math.nan]


def make_samples(kind: str, seed: int, n: int = 128) -> np.ndarray:
    """Return n special and random values, shuffled by the seed."""
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
    """An instruction `text` with inputs %x0 ... and result %y0, their types, and a reference function on scalars."""

    text: str
    operand_types: tuple[str, ...]
    result_type: str
    reference: Callable | None

    @property
    def op(self) -> str:
        return self.text.split(".")[0].split()[0]


def to_signed(x: int, bits: int) -> int:
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def divide_truncated(a: int, b: int, bits: int) -> int:
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1) if b else -1


def round_bits(x: Fraction, exponent_bits: int, precision: int) -> int:
    """Round a nonzero Fraction to an IEEE-like format; return its bits."""
    mantissa_bits = precision - 1
    negative, x = x < 0, abs(x)
    bias = (1 << (exponent_bits - 1)) - 1
    out = 1 << (exponent_bits + mantissa_bits) if negative else 0
    e = 0
    while x >= Fraction(2) ** (e + 1):
        e += 1
    while x < Fraction(2) ** e:
        e -= 1
    e = max(e, 1 - bias)
    scaled = x / Fraction(2) ** (e - mantissa_bits)
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1):
        whole += 1
    if whole >> precision:
        whole >>= 1
        e += 1
    if e > bias:
        return out | ((1 << exponent_bits) - 1) << mantissa_bits
    biased = e + bias if whole >> mantissa_bits else 0
    return out | biased << mantissa_bits | (whole & ((1 << mantissa_bits) - 1))


def compute_fma(a: float, b: float, c: float, kind: str):
    """Compute a * b + c with a single rounding."""
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
    return struct.unpack("<f", struct.pack("<I", round_bits(exact, 8, 24)))[0]


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
    if is_signed and to_signed(a, bits) < 0:
        a = ~a
    a &= (1 << bits) - 1
    return (a.bit_length() - 1) & M32


def clamp(x, low, high):
    return max(low, min(high, x))


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
    C("mad.wide.s32 %y0, %x0, %x1, %x2;", ("i4", "i4", "i8"), "i8", lambda a, b, c: to_signed(a * b + c, 64)),
    C("mul24.lo.u32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    C("mad24.lo.s32 %y0, %x0, %x1, %x2;", ("u4", "u4", "u4"), "u4", lambda a, b, c: to_signed(a, 24) * to_signed(b, 24) + c),
    C("div.s32 %y0, %x0, %x1;", ("i4", "i4"), "i4", lambda a, b: to_signed(divide_truncated(a, b, 32), 32)),
    C("div.u32 %y0, %x0, %x1;", ("u4", "u4"), "u4", lambda a, b: a // b if b else M32),
    C("div.s64 %y0, %x0, %x1;", ("i8", "i8"), "i8", lambda a, b: to_signed(divide_truncated(a, b, 64), 64)),
    C("div.u64 %y0, %x0, %x1;", ("u8", "u8"), "u8", lambda a, b: a // b if b else M64),
    C("rem.s32 %y0, %x0, %x1;", ("i4", "i4"), "i4", lambda a, b: a - b * divide_truncated(a, b, 32) if b else a),
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
        lambda a, b, c: to_signed(c + sum(to_signed(a >> 8 * k, 8) * to_signed(b >> 8 * k, 8) for k in range(4)), 32),
    ),
    C("selp.b32 %y0, %x0, %x1, %p1;", ("u4", "u4"), "u4", None),
    C("slct.b32.s32 %y0, %x0, %x1, %x2;", ("u4", "u4", "i4"), "u4", lambda a, b, c: a if c >= 0 else b),
    C("mov.b32 %y0, %x0;", ("u4",), "u4", lambda a: a),
    C("mov.b64 {%r1, %r2}, %x0; mov.b64 %y0, {%r2, %r1};", ("u8",), "u8", lambda a: a >> 32 | a << 32),
    C("mov.b32 {%h1, %h2}, %x0; mov.b32 %y0, {%h2, %h1};", ("u4",), "u4", lambda a: a >> 16 | a << 16),
    # floats without a rounding modifier; test_edge_values.py tests arithmetic and conversions
    C("add.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", lambda a, b: np.float32(a) + np.float32(b)),
    C("mul.f32 %y0, %x0, %x1;", ("f4", "f4"), "f4", lambda a, b: np.float32(a) * np.float32(b)),
    C("add.f16 %y0, %x0, %x1;", ("f2", "f2"), "f2", lambda a, b: np.float16(a) + np.float16(b)),
    C("fma.rn.f64 %y0, %x0, %x1, %x2;", ("f8", "f8", "f8"), "f8", lambda a, b, c: compute_fma(a, b, c, "f8")),
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
    C("cvt.s32.s8 %y0, %x0;", ("u4",), "i4", lambda a: to_signed(a, 8)),
    C("cvt.sat.u8.s32 %y0, %x0;", ("i4",), "u4", lambda a: clamp(a, 0, 255)),
]  # fmt: skip


@pytest.mark.parametrize("case", [c for c in CASES if c.reference], ids=lambda c: c.text[:40])
def test_instruction_matches_reference(case: Case):
    inputs = [make_samples(kind, 7 * k + 1) for k, kind in enumerate(case.operand_types)]
    (got,) = run_ptx(case.text, inputs, [case.result_type])
    with np.errstate(all="ignore"):
        expected = [unwrap(case.reference)(*(x.item() for x in row)) for row in zip(*inputs, strict=True)]
        if case.result_type[0] == "f":
            expected = np.array([float(w) for w in expected]).astype(case.result_type)
            np.testing.assert_array_equal(got, expected)
            # the sign of zero counts
            np.testing.assert_array_equal(
                np.signbit(got[~np.isnan(expected)]), np.signbit(expected[~np.isnan(expected)])
            )
            return
    mask = (1 << 8 * int(case.result_type[1])) - 1
    expected = np.array([int(w) & mask for w in expected], np.uint64).astype("u" + case.result_type[1])
    got = got.view("u" + case.result_type[1])
    np.testing.assert_array_equal(got, expected)


def test_selp_uses_the_predicate():
    x = [np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32) + 100]
    (got,) = run_ptx("setp.lt.u32 %p1, %i, 20; selp.b32 %y0, %x0, %x1, %p1;", x, ["u4"])
    np.testing.assert_array_equal(got, np.where(np.arange(64) < 20, x[0], x[1]))


_SPECIAL = st.sampled_from([0.0, -0.0, 1.0, 2.0**-126, 2.0**-149, 1 + 2.0**-23, 3.4e38, 2.0**-24, 1.5])
_FLOAT = st.one_of(_SPECIAL, st.floats(width=32, allow_nan=False, allow_infinity=False))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(_FLOAT, _FLOAT, _FLOAT), min_size=1, max_size=40))
def test_fma_rounds_once(rows):
    """The inputs include ties, cancellation and subnormal results."""
    x = [np.array(c, np.float32) for c in zip(*rows, strict=True)]
    (got,) = run_ptx("fma.rn.f32 %y0, %x0, %x1, %x2;", x, ["f4"])
    expected = [compute_fma(a.item(), b.item(), c.item(), "f4") for a, b, c in zip(*x, strict=True)]
    np.testing.assert_array_equal(got, np.array(expected).astype(np.float32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, M32)] * 3), min_size=1, max_size=40), st.integers(0, 255))
def test_lop3_of_every_table(rows, table):
    x = [np.array(c, np.uint32) for c in zip(*rows, strict=True)]
    (got,) = run_ptx(f"lop3.b32 %y0, %x0, %x1, %x2, {table};", x, ["u4"])
    expected = [
        sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))
        for a, b, c in rows
    ]
    np.testing.assert_array_equal(got, expected)
