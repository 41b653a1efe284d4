"""PTX arithmetic that is not a single NumPy operation.

All functions accept arrays and NumPy scalars. Floating point follows PTX: results are rounded to nearest
even, fused multiply-add rounds once, and 16- and 32-bit NaNs are the canonical NaN that GPUs return
(measured; see tests/vgpu/data). Instructions that are approximate on hardware (ex2, lg2, sin, cos, tanh, rcp,
rsqrt, sqrt, div `.approx`) are computed in float64 and rounded once: more accurate than on a GPU.
"""

from __future__ import annotations

import numpy as np

u1, u2, u4, u8 = np.uint8, np.uint16, np.uint32, np.uint64
i1, i2, i4, i8 = np.int8, np.int16, np.int32, np.int64
f2, f4, f8 = np.float16, np.float32, np.float64

UNSIGNED = {1: u1, 2: u2, 4: u4, 8: u8}
SIGNED = {1: i1, 2: i2, 4: i4, 8: i8}


# -- shifts and bits ----------------------------------------------------------------------------------------
def shl(a, s):
    """Return `a << s` for uint32 s, or 0 if s is at least the width."""
    bits = a.dtype.itemsize * 8
    return np.where(s < bits, a << (s & u4(bits - 1)).astype(a.dtype), a.dtype.type(0))


def shr(a, s):
    """Return `a >> s`; if s is at least the width, 0, or for signed a all sign bits."""
    bits = a.dtype.itemsize * 8
    if a.dtype.kind == "i":
        return a >> np.minimum(s, u4(bits - 1)).astype(a.dtype)
    return np.where(s < bits, a >> (s & u4(bits - 1)).astype(a.dtype), a.dtype.type(0))


def funnel_shift(low, high, s, left: bool, wrap: bool):
    """Compute shf.l or shf.r of the 64-bit value high:low; the amount is taken modulo 32 if `wrap`, else
    clamped."""
    s = (s & u4(31)) if wrap else np.minimum(s, u4(32))
    value = (high.astype(u8) << u8(32)) | low.astype(u8)
    s = s.astype(u8)
    return ((value << s) >> u8(32)).astype(u4) if left else (value >> s).astype(u4)


def mulhi(a, b):
    """Return the upper half of the double-width product."""
    size = a.dtype.itemsize
    if size < 8:
        wide = (SIGNED if a.dtype.kind == "i" else UNSIGNED)[size * 2]
        return (a.astype(wide) * b.astype(wide) >> wide(size * 8)).astype(a.dtype)
    x, y = a.view(u8), b.view(u8)
    mask, half = u8(0xFFFFFFFF), u8(32)
    xl, xh, yl, yh = x & mask, x >> half, y & mask, y >> half
    middle = xh * yl + (xl * yl >> half)
    other = xl * yh + (middle & mask)
    out = xh * yh + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":
        out = out - np.where(a < 0, y, u8(0)) - np.where(b < 0, x, u8(0))
        return out.view(i8)
    return out


def idiv(a, b):
    """Divide integers, rounded toward zero; division by zero returns all ones."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // safe)
    q = a // safe
    q = q + ((q < 0) & (q * safe != a)).astype(a.dtype)  # floor -> truncate
    return np.where(b == 0, a.dtype.type(-1), q)


def irem(a, b):
    """Return the remainder with the sign of the dividend, or the dividend if the divisor is zero."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    if a.dtype.kind == "u":
        return np.where(b == 0, a, a % safe)
    return np.where(b == 0, a, np.fmod(a, safe))


def popc(a):
    return np.bitwise_count(a).astype(u4)


def brev(a):
    bits = a.dtype.itemsize * 8
    t = a.dtype.type
    for step, mask in ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F)):
        m = t(mask & ((1 << bits) - 1))
        a = ((a >> t(step)) & m) | ((a & m) << t(step))
    return np.asarray(a).byteswap() if np.ndim(a) else t(np.asarray(a).byteswap()[()])


def bfind(a, shift_amount: bool):
    """Return the position of the highest bit that differs from the sign, or 0xFFFFFFFF if there is none."""
    bits = a.dtype.itemsize * 8
    if a.dtype.kind == "i":
        a = np.where(a < 0, ~a, a)
    a = a.view(UNSIGNED[bits // 8])
    position = np.full(np.shape(a), -1, i8)
    for k in range(bits):
        position = np.where(a >> a.dtype.type(k) & a.dtype.type(1) != 0, k, position)
    if shift_amount:
        position = np.where(position >= 0, bits - 1 - position, position)
    return position.astype(u4)


def clz(a):
    return u4(a.dtype.itemsize * 8 - 1) - bfind(a, False)


def bfe(a, pos, length):
    """Extract a bit field; `pos` and `length` are the low bytes of uint32 values."""
    bits = a.dtype.itemsize * 8
    pos, length = (pos & u4(255)).astype(i8), (length & u4(255)).astype(i8)
    unsigned = a.view(UNSIGNED[bits // 8]).astype(u8)
    shifted = np.where(pos < bits, unsigned >> np.minimum(pos, 63).astype(u8), u8(0))
    mask = np.where(length >= 64, ~u8(0), (u8(1) << np.minimum(length, 63).astype(u8)) - u8(1))
    out = shifted & mask
    if a.dtype.kind == "i":
        top = np.minimum(pos + length - 1, bits - 1)
        sign = (unsigned >> np.maximum(top, 0).astype(u8)) & u8(1)
        available = np.clip(np.minimum(length, bits - pos), 0, 64)
        fill = np.where(available >= 64, u8(0), ~u8(0) << np.minimum(available, 63).astype(u8))
        out = np.where((sign != 0) & (length != 0), out | fill, out)
    return out.astype(UNSIGNED[bits // 8])


def bfi(a, b, pos, length):
    """Insert the low `length` bits of a into b at `pos`."""
    bits = a.dtype.itemsize * 8
    t = a.dtype.type
    pos, length = (pos & u4(255)).astype(i8), (length & u4(255)).astype(i8)
    ones = np.where(length >= bits, ~t(0), (t(1) << np.minimum(length, bits - 1).astype(t)) - t(1))
    mask = np.where(pos < bits, ones << np.minimum(pos, bits - 1).astype(t), t(0))
    return (b & ~mask) | (np.where(pos < bits, a << np.minimum(pos, bits - 1).astype(t), t(0)) & mask)


def lop3(a, b, c, table: int):
    """Compute a boolean function of three words, given by its 8-bit truth table."""
    out = a & u4(0)
    for k in range(8):
        if table >> k & 1:
            out = out | ((a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c))
    return out


def prmt(a, b, selector, mode: str):
    """Permute the bytes of b:a; `mode` is "" or one of f4e, b4e, rc8, ecl, ecr, rc16."""
    source = a.astype(u8) | (b.astype(u8) << u8(32))
    out = (a & u4(0)).astype(u8)
    s = selector & u4(3)
    for k in range(4):
        if mode == "":
            nibble = (selector >> u4(4 * k)) & u4(15)
            index, sign = nibble & u4(7), nibble & u4(8)
        else:
            sign = u4(0)
            index = {
                "f4e": lambda k: s + u4(k),
                "b4e": lambda k: (s - u4(k)) & u4(7),
                "rc8": lambda k: s,
                "ecl": lambda k: np.maximum(s, u4(k)),
                "ecr": lambda k: np.minimum(s, u4(k)),
                "rc16": lambda k: ((s & u4(1)) << u4(1)) + u4(k & 1),
            }[mode](k)
        byte = (source >> (index.astype(u8) * u8(8))) & u8(255)
        byte = np.where(sign != 0, np.where(byte & u8(128) != 0, u8(255), u8(0)), byte)
        out = out | (byte << u8(8 * k))
    return out.astype(u4)


# -- floats -------------------------------------------------------------------------------------------------
CANONICAL_NAN_F32, CANONICAL_NAN_F16 = u4(0x7FFFFFFF).view(f4), u2(0x7FFF).view(f2)
#: The bits of infinity by type.
INFINITY = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000}


def canonicalize_nan(x):
    """Replace NaNs by the GPU's canonical NaN of the type; float64 NaNs keep their payload."""
    if x.dtype == f4:
        if x.ndim == 0:
            return x if x == x else CANONICAL_NAN_F32
        nan = x != x
        return np.where(nan, CANONICAL_NAN_F32, x) if np.count_nonzero(nan) else x
    if x.dtype == f2:
        nan = (x.view(u2) & u2(0x7FFF)) > u2(0x7C00)
        return np.where(nan, CANONICAL_NAN_F16, x) if np.count_nonzero(nan) else x
    return x


def quiet_nan(x):
    return x * f8(1)


def abs_or_neg_bits(bits, op: str, infinity: int):
    """Compute abs or neg of f16, bf16 or f32 bits; NaN becomes the canonical NaN."""
    sign, mask = (u4(0x80000000), u4(0x7FFFFFFF)) if bits.dtype == u4 else (u2(0x8000), u2(0x7FFF))
    magnitude = bits & mask
    nan = magnitude > infinity
    out = magnitude if op == "abs" else bits ^ sign
    return np.where(nan, mask, out) if np.count_nonzero(nan) else out


def abs_or_neg_f64(x, op: str):
    """Compute abs or neg of float64; a NaN becomes quiet and keeps its sign."""
    return np.where(x == x, np.abs(x) if op == "abs" else np.negative(x), quiet_nan(x))


def bf16_to_f32(a):
    return (a.astype(u4) << u4(16)).view(f4)


def f32_to_bf16(x):
    """Convert float32 to bfloat16 bits, rounded to nearest even; NaN becomes 0x7FFF as on a GPU."""
    b = x.view(u4)
    r = (b + (u4(0x7FFF) + ((b >> u4(16)) & u4(1)))) >> u4(16)
    return np.where(x != x, u4(0x7FFF), r).astype(u2)


def f64_to_bf16(x):
    """Convert float64 to bfloat16 bits with one rounding: float32 rounded to odd, then to nearest even."""
    return f32_to_bf16(_narrow_to_odd(x))


def cvt_f64_to_bf16(x):
    """Convert float64 to bfloat16 bits as `cvt` does: NaN keeps its sign and the top bits of its payload."""
    return np.where(x == x, f64_to_bf16(x), (x.astype(f4).view(u4) >> u4(16)).astype(u2))


def int_to_bf16(a):
    """Convert an integer to bfloat16 bits, rounded once: from 2^53 up, a sticky bit replaces the low 11."""
    if a.dtype.itemsize < 8:
        return f64_to_bf16(a.astype(f8))
    size = np.abs(a).view(u8) if a.dtype.kind == "i" else a
    sticky = (size & u8(0x7FF) != 0).astype(u8)
    large = ((size >> u8(11)) | sticky).astype(f8) * 2048.0
    x = np.where(size >> u8(53) != 0, large, size.astype(f8))
    return f64_to_bf16(np.where(a < 0, -x, x))


def _narrow_to_odd(x):
    """Convert float64 to float32, rounded to odd, so that rounding again to a narrower type is correct."""
    y = x.astype(f4)
    back = y.astype(f8)
    bits = y.view(u4)
    inexact = (back != x) & np.isfinite(back)
    # round toward zero, then set the last bit
    bits = np.where(inexact & (np.abs(back) > np.abs(x)), bits - u4(1), bits)
    return np.where(inexact, bits | u4(1), bits).view(f4)


def _two_sum(a, b):
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def add_rounded_to_odd(p, c):
    """Return the float64 sum p + c, rounded to odd."""
    s, e = _two_sum(p, c)
    bits = s.view(u8)
    fix = (e != 0) & (bits & u8(1) == 0) & np.isfinite(s)
    # e is the true sum minus s: move to the odd neighbour in its direction
    up = (e > 0) == (s > 0)
    return np.where(fix, np.where(up, bits + u8(1), bits - u8(1)), bits).view(f8)


# The float64 bits beyond float32's precision, and their value half-way between two float32 values.
_BELOW_F32, _HALFWAY = u8(0x1FFFFFFF), u8(0x10000000)
_SMALLEST_F32 = f8(2.4e-38)


def fma_f32(a, b, c):
    """Return a * b + c in float32, rounded once; the product is exact in float64."""
    p = a.astype(f8) * b
    s = p + c
    # Double rounding can only be wrong if the float64 sum is half-way between two float32 values, or
    # subnormal in float32. A sum of 0 is exact.
    inexact = (s.view(u8) & _BELOW_F32) == _HALFWAY
    small = np.abs(s) < _SMALLEST_F32
    if np.count_nonzero(small):
        inexact = inexact | (small & (s != 0))
    out = s.astype(f4)
    if not np.count_nonzero(inexact):
        return out
    if out.ndim == 0:
        return add_rounded_to_odd(p, c.astype(f8)).astype(f4)
    p, c = np.broadcast_to(p, out.shape)[inexact], np.broadcast_to(c, out.shape)[inexact]
    out[inexact] = add_rounded_to_odd(p, c.astype(f8)).astype(f4)
    return out


def fma_f16(a, b, c):
    return add_rounded_to_odd(a.astype(f8) * b.astype(f8), c.astype(f8)).astype(f2)


def fma_bf16(a, b, c):
    return f64_to_bf16(
        add_rounded_to_odd(bf16_to_f32(a).astype(f8) * bf16_to_f32(b), bf16_to_f32(c).astype(f8))
    )


def fma_f64(a, b, c):
    """Return a * b + c in float64, rounded once (Boldo and Melquiond's algorithm, with round-to-odd)."""
    k = f8(134217729.0)
    p = a * b
    ah = k * a - (k * a - a)
    bh = k * b - (k * b - b)
    al, bl = a - ah, b - bh
    ul = al * bl - (((p - ah * bh) - al * bh) - ah * bl)
    th, tl = _two_sum(c, ul)
    vh, vl = _two_sum(p, th)
    z = add_rounded_to_odd(tl, vl)
    exact = vh + z
    rounded_twice = c + p  # in this order, a NaN in c takes precedence over one in the product
    size = np.abs(a) + np.abs(b)
    return np.where(
        np.isfinite(exact) & (size < 1e290) & ((np.abs(p) > 1e-270) | (p == 0)), exact, rounded_twice
    )


def fmin(a, b):
    """Return the minimum, ignoring a single NaN; -0 is below +0."""
    return np.where((a == b) & (a == 0), np.where(np.signbit(a), a, b), np.fmin(a, b))


def fmax(a, b):
    """Return the maximum, ignoring a single NaN; +0 is above -0."""
    return np.where((a == b) & (a == 0), np.where(np.signbit(a), b, a), np.fmax(a, b))


def propagate_nan(a, b, x):
    return np.where((a != a) | (b != b), x.dtype.type(np.nan), x)


def flush(x):
    """Flush subnormal float32 to zero of the same sign (`.ftz`)."""
    return np.where(np.abs(x) < f4(1.1754943508222875e-38), np.copysign(x.dtype.type(0), x), x)


def saturate(x):
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0)).astype(x.dtype)


def round_int(x, mode: str):
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](x)


def to_int(x, dtype):
    """Convert an integral float to an integer type, clamped to its range.

    NaN becomes 0, or in conversions from float64 or to 64 bits the value with only the highest bit set.
    """
    info = np.iinfo(dtype)
    bits = dtype().itemsize * 8
    nan = 1 << (bits - 1) if x.dtype == f8 or bits == 64 else 0
    x = x.astype(f8)
    low, high = f8(info.min), f8(info.max)
    inside = np.where((x > low) & (x < high), x, f8(0)).astype(dtype)
    out = np.where(x >= high, dtype(info.max), np.where(x <= low, dtype(info.min), inside)).astype(dtype)
    return np.where(x == x, out, UNSIGNED[bits // 8](nan).view(dtype))


def int_to_float(a, dtype, mode: str = "rn"):
    """Convert an integer to float, rounded once, with rounding mode rn, rz, rm or rp."""
    out = a.astype(f8).astype(f2) if dtype is f2 and a.dtype.itemsize > 2 else a.astype(dtype)
    if mode == "rn":
        return out
    exact = out.astype(f8)
    info = np.iinfo(a.dtype)
    # Compare as integers, because no float type has 64 bits of precision, except values out of range.
    above, below = exact >= 2.0 ** (info.bits - (a.dtype.kind == "i")), exact < f8(info.min)
    back = np.where(above | below, f8(0), exact).astype(a.dtype)
    over, under = above | (~below & (back > a)), below | (~above & (back < a))
    return _round_directed(out, a, over, under, mode)


def narrow(x, dtype, mode: str):
    """Convert a float to a narrower one with rounding mode rn, rz, rm or rp."""
    out = x.astype(dtype)
    if mode == "rn":
        return out
    back = out.astype(f8)
    x64 = x.astype(f8)
    return _round_directed(out, x64, back > x64, back < x64, mode)


def _round_directed(out, x, over, under, mode: str):
    """Return `out`, the float nearest to x, or its neighbour if `out` is `over` or `under` x and the mode
    (rz, rm, rp) rounds the other way."""
    down = over & ((x > 0) if mode == "rz" else mode == "rm")
    up = under & ((x < 0) if mode == "rz" else mode == "rp")
    inf = out.dtype.type(np.inf)
    return np.where(down, np.nextafter(out, -inf), np.where(up, np.nextafter(out, inf), out))


def f32_to_bf16_rz(x):
    b = x.view(u4) >> u4(16)
    return np.where(x != x, u4(0x7FFF), b).astype(u2)


def div_approx(a, b):
    """Compute `div.approx.f32`: accurate, but 0 (NaN if a is infinite) for finite |b| > 2^126."""
    large = (np.abs(b) > f4(2.0**126)) & np.isfinite(b)
    return np.where(large, a * np.copysign(f4(0), b), a / b)


def rcp_approx_f64(x):
    """Compute `rcp.approx.ftz.f64`, which uses only upper words and flushes subnormals."""
    tiny, upper = f8(2.2250738585072014e-308), u8(0xFFFFFFFF00000000)
    x = (x.view(u8) & upper).view(f8)
    x = np.where(np.abs(x) < tiny, np.copysign(f8(0), x), x)
    out = ((1.0 / x).view(u8) & upper).view(f8)
    out = np.where(np.abs(out) < tiny, np.copysign(f8(0), out), out)
    return np.where(x == x, out, u8(0x7FFFFFFF00000000).view(f8))


def rsqrt(x):
    return 1.0 / np.sqrt(x)


def dot_bytes(a, b, c, a_signed: bool, b_signed: bool):
    """Compute dp4a: the sum of four byte products plus c."""
    out = c.astype(i8)
    for k in range(4):
        x = ((a >> u4(8 * k)) & u4(255)).astype(u1)
        y = ((b >> u4(8 * k)) & u4(255)).astype(u1)
        x = x.view(i1) if a_signed else x
        y = y.view(i1) if b_signed else y
        out = out + x.astype(i8) * y.astype(i8)
    return out.astype(i4)


def clamp_int(a, dtype):
    info = np.iinfo(dtype)
    source = np.iinfo(a.dtype)
    low, high = max(info.min, source.min), min(info.max, source.max)
    return np.clip(a, a.dtype.type(low), a.dtype.type(high)).astype(dtype)


def relu_bits(bits, infinity: int):
    """Apply .relu to float bits: negative values become +0, NaN the canonical NaN."""
    t = bits.dtype.type
    sign = t(1 << (8 * bits.dtype.itemsize - 1))
    return np.where(bits & ~sign > t(infinity), ~sign, np.where(bits & sign != 0, t(0), bits))


def to_tf32(bits, mode: str, relu: bool, finite: bool):
    """Round float32 bits to tf32 (rna: ties away from zero, rn: to even, rz: toward zero), low 13 bits zero.

    NaN becomes the canonical NaN, except that rna keeps its bits. `finite` replaces infinity and NaN by the
    bit pattern one unit lower, as the hardware does.
    """
    mask, sign = u4(0xFFFFE000), u4(0x80000000)
    nan = bits & ~sign > u4(INFINITY["f32"])
    if mode == "rna":
        out = np.where(nan, bits, bits + u4(0x1000)) & mask
    elif mode == "rz":
        out = np.where(nan, ~sign, bits) & mask
    else:
        out = np.where(nan, ~sign, bits + (u4(0xFFF) + ((bits >> u4(13)) & u4(1)))) & mask
    if finite:
        out = np.where(out & ~sign >= u4(INFINITY["f32"]), out - u4(0x2000), out)
    return np.where((out & sign != 0) & relu, u4(0), out)


# -- elements of matrices -----------------------------------------------------------------------------------
def decode_elements(bits, kind: str):
    if kind == "f64":
        return bits.view(f8)
    if kind == "f32":
        return bits.view(f4).astype(f8)
    if kind == "tf32":  # the low 13 bits are not read
        return (bits & u4(0xFFFFE000)).view(f4).astype(f8)
    return (bits.view(f2) if kind == "f16" else bf16_to_f32(bits)).astype(f8)


# -- warp-wide operations ------------------------------------------------------------------------------------
COMBINE = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
           "xor": np.bitwise_xor}  # fmt: skip


def combine(op: str, old, value):
    """Combine an old value with an operand, as an atomic or reduction does."""
    new = COMBINE[op](old, value)
    return canonicalize_nan(new) if op == "add" else new


def compute_shuffle_sources(mode: str, lane, amount, bounds):
    """Return the source lane of each lane (int64) in a shfl.sync, its own if out of range, and whether it is
    in range."""
    shift, clamp = (amount & u4(31)).astype(i8), (bounds & u4(31)).astype(i8)
    segment = ((bounds >> u4(8)) & u4(31)).astype(i8)
    low = lane & segment
    limit = low | (clamp & ~segment)
    if mode == "up":
        other = lane - shift
    elif mode == "down":
        other = lane + shift
    elif mode == "bfly":
        other = lane ^ shift
    else:
        other = low | (shift & ~segment)
    inside = (other >= limit) if mode == "up" else (other <= limit)
    return np.where(inside, other, lane), inside


def compute_vote(mode: str, yes, members):
    """Compute vote.sync from the mask of lanes with a true predicate, and the mask of all members."""
    if mode == "ballot":
        return yes
    if mode == "any":
        return yes != 0
    return (yes == members) if mode == "all" else (yes == members) | (yes == 0)


def compute_match(mode: str, same, members):
    """Compute match.sync, (mask, predicate), from the mask of lanes with the same value, and the mask of all
    members."""
    if mode == "any":
        return same, same != 0
    return np.where(same == members, members, members ^ members), same == members
