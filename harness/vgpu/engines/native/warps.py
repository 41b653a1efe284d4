"""Warp instructions of the compiled runtime: shuffles, votes, matrix products of a warp.

The functions are compiled, not called, as those of runtime.py are. The lanes' operands and results lie in the states of
their threads.
"""

from __future__ import annotations

import numpy as np

from harness.vgpu.engines.opcodes import numeric

from .builtins import load, product_row, store, unlikely
from .runtime import (
    OPERANDS,
    RESULTS,
    SCRATCH,
    combined,
    f2,
    f4,
    f8,
    give_up,
    i8,
    shared_place,
    u2,
    u4,
    u8,
    variables,
)


def operand(warp, stride, lane, n: int):
    """Operand `n` of a lane's warp instruction."""
    return load(u8, warp + lane * stride + OPERANDS + u8(8 * n))


def give(warp, stride, lane, n: int, value):
    """Result `n` of a lane's warp instruction."""
    store(u8, warp + lane * stride + RESULTS + u8(8 * n), value)


@variables
def check_members(ctx, warp, stride, active, members, n: int):
    """Operand n of all lanes is a mask: who it names and who lives must be here."""
    lane = u8(0)
    while lane < u8(32):
        if active >> lane & u8(1) != u8(0):  # noqa: SIM102
            if operand(warp, stride, lane, n) & members & ~active != u8(0):
                give_up(ctx)
        lane += u8(1)


@variables
def shuffle(ctx, warp, stride, active, members, mode: str):
    """shfl.sync: operands value, amount, bounds, mask; results value and whether it is in range."""
    check_members(ctx, warp, stride, active, members, 3)
    lane = u8(0)
    while lane < u8(32):
        if active >> lane & u8(1) != u8(0):
            bounds = operand(warp, stride, lane, 2)
            shift = (operand(warp, stride, lane, 1) & u8(31)).astype(i8)
            clamp = (bounds & u8(31)).astype(i8)
            segment = (bounds >> u8(8) & u8(31)).astype(i8)
            me = lane.astype(i8)
            low = me & segment
            limit = low | (clamp & ~segment)
            if mode == "up":
                other = me - shift
            elif mode == "down":
                other = me + shift
            elif mode == "bfly":
                other = me ^ shift
            else:
                other = low | (shift & ~segment)
            inside = (other >= limit) if mode == "up" else (other <= limit)
            other = np.where(inside, other, me)
            if unlikely(active >> other.astype(u8) & u8(1) == u8(0)):
                give_up(ctx)
            give(warp, stride, lane, 0, operand(warp, stride, other.astype(u8), 0))
            give(warp, stride, lane, 1, inside.astype(u8))
        lane += u8(1)


@variables
def vote(ctx, warp, stride, active, members, mode: str):
    """vote.sync: operands predicate, mask."""
    check_members(ctx, warp, stride, active, members, 1)
    yes = u8(0)
    lane = u8(0)
    while lane < u8(32):
        if active >> lane & u8(1) != u8(0):
            yes = yes | (operand(warp, stride, lane, 0) & u8(1)) << lane
        lane += u8(1)
    lane = u8(0)
    while lane < u8(32):
        if active >> lane & u8(1) != u8(0):
            mask = operand(warp, stride, lane, 1)
            mine, named = yes & mask, active & mask
            if mode == "ballot":
                give(warp, stride, lane, 0, mine)
            elif mode == "any":
                give(warp, stride, lane, 0, (mine != u8(0)).astype(u8))
            elif mode == "all":
                give(warp, stride, lane, 0, (mine == named).astype(u8))
            else:
                give(warp, stride, lane, 0, ((mine == named) | (mine == u8(0))).astype(u8))
        lane += u8(1)


@variables
def match(ctx, warp, stride, active, members, mode: str):
    """match.sync: operands value, mask; results mask and predicate."""
    check_members(ctx, warp, stride, active, members, 1)
    lane = u8(0)
    while lane < u8(32):
        if active >> lane & u8(1) != u8(0):
            named = active & operand(warp, stride, lane, 1)
            value = operand(warp, stride, lane, 0)
            same = u8(0)
            other = u8(0)
            while other < u8(32):
                if named >> other & u8(1) != u8(0):
                    same = same | np.where(operand(warp, stride, other, 0) == value, u8(1), u8(0)) << other
                other += u8(1)
            if mode == "any":
                give(warp, stride, lane, 0, same)
                give(warp, stride, lane, 1, (same != u8(0)).astype(u8))
            else:
                whole = same == named
                give(warp, stride, lane, 0, np.where(whole, named, u8(0)))
                give(warp, stride, lane, 1, whole.astype(u8))
        lane += u8(1)


@variables
def redux(ctx, warp, stride, active, members, op: str, kind):
    """redux.sync: operands value, mask."""
    check_members(ctx, warp, stride, active, members, 1)
    lane = u8(0)
    while lane < u8(32):
        if active >> lane & u8(1) != u8(0):
            named = active & operand(warp, stride, lane, 1)
            out = kind(0)
            started = u8(0)
            other = u8(0)
            while other < u8(32):
                if named >> other & u8(1) != u8(0):
                    value = operand(warp, stride, other, 0).astype(kind)
                    out = np.where(started != u8(0), combined(op, out, value), value)
                    started = u8(1)
                other += u8(1)
            give(warp, stride, lane, 0, out.view(numeric.UNSIGNED[4]).astype(u8))
        lane += u8(1)


def warp_sync(ctx, warp, stride, active, members):
    """bar.warp.sync: operand mask."""
    check_members(ctx, warp, stride, active, members, 0)


@variables
def multiply(ctx, warp, stride, active, members, depth: int, kind: str, wide: bool):
    """mma.sync m16n8k(depth): the fragments to float64 matrices, the product, and back (fragments.py has the
    places).

    `wide`: sums in float32, else in float16. Products are exact; they are added in order, then the sum to C.
    """
    a = load(u8, ctx + SCRATCH)
    b, c = a + u8(16 * 16 * 8), a + u8(2 * 16 * 16 * 8)
    if active != u8(0xFFFFFFFF):
        give_up(ctx)
    lane = u8(0)
    while lane < u8(32):
        g, t = lane >> u8(2), lane & u8(3)
        if kind == "tf32":
            for n in range(depth // 2):
                place = a + ((g + u8(8 * (n & 1))) * u8(16) + t + u8(4 * (n >> 1))) * u8(8)
                store(f8, place, tf32(operand(warp, stride, lane, n)))
            for n in range(depth // 4):
                place = b + ((t + u8(4 * n)) * u8(8) + g) * u8(8)
                store(f8, place, tf32(operand(warp, stride, lane, depth // 2 + n)))
            first = depth // 2 + depth // 4
        else:
            for n in range(depth // 4):
                place = a + ((g + u8(8 * (n & 1))) * u8(16) + u8(2) * t + u8(8 * (n >> 1))) * u8(8)
                word = operand(warp, stride, lane, n)
                store(f8, place, half(word, kind))
                store(f8, place + u8(8), half(word >> u8(16), kind))
            for n in range(depth // 8):
                place = b + ((u8(2) * t + u8(8 * n)) * u8(8) + g) * u8(8)
                word = operand(warp, stride, lane, depth // 4 + n)
                store(f8, place, half(word, kind))
                store(f8, place + u8(64), half(word >> u8(16), kind))
            first = depth // 4 + depth // 8
        for n in range(2):
            place = c + ((g + u8(8 * n)) * u8(8) + u8(2) * t) * u8(8)
            if wide:
                store(f8, place, operand(warp, stride, lane, first + 2 * n).astype(u4).view(f4).astype(f8))
                store(
                    f8,
                    place + u8(8),
                    operand(warp, stride, lane, first + 2 * n + 1).astype(u4).view(f4).astype(f8),
                )
            else:
                word = operand(warp, stride, lane, first + n)
                store(f8, place, half(word, "f16"))
                store(f8, place + u8(8), half(word >> u8(16), "f16"))
        lane += u8(1)
    row = u8(0)
    while row < u8(16):
        product_row(a + row * u8(128), b, c + row * u8(64), depth)
        row += u8(1)
    lane = u8(0)
    while lane < u8(32):
        g, t = lane >> u8(2), lane & u8(3)
        for n in range(2):
            place = c + ((g + u8(8 * n)) * u8(8) + u8(2) * t) * u8(8)
            left, right = load(f8, place), load(f8, place + u8(8))
            if wide:
                give(warp, stride, lane, 2 * n, numeric.canonical(left.astype(f4)).view(u4).astype(u8))
                give(warp, stride, lane, 2 * n + 1, numeric.canonical(right.astype(f4)).view(u4).astype(u8))
            else:
                low = numeric.canonical(left.astype(f2)).view(u2).astype(u8)
                high = numeric.canonical(right.astype(f2)).view(u2).astype(u8)
                give(warp, stride, lane, n, low | high << u8(16))
        lane += u8(1)


def half(word, kind: str):
    """The low 16 bits of a word as float64."""
    bits = word.astype(u2)
    return bits.view(f2).astype(f8) if kind == "f16" else numeric.bf_to_f4(bits).astype(f8)


def tf32(word):
    """A tf32 operand as float64: the low 13 bits are not read."""
    return (word.astype(u4) & u4(0xFFFFE000)).view(f4).astype(f8)


@variables
def load_matrices(
    ctx, warp, stride, active, members, count: int, transpose: bool, shift: int, atomics: bool, races: bool
):
    """ldmatrix: lane 8 j + r has the address of row r of matrix j; every lane gets two elements of each."""
    if active != u8(0xFFFFFFFF):
        give_up(ctx)
    rows = load(u8, ctx + SCRATCH)
    lane = u8(0)
    while lane < u8(8 * count):
        mine = operand(warp, stride, lane, 1)
        place = shared_place(ctx, operand(warp, stride, lane, 0), mine, 16, "R", shift, atomics, races)
        store(u8, rows + lane * u8(16), load(u8, place))
        store(u8, rows + lane * u8(16) + u8(8), load(u8, place + u8(8)))
        lane += u8(1)
    lane = u8(0)
    while lane < u8(32):
        g, t = lane >> u8(2), lane & u8(3)
        for j in range(count):
            if transpose:
                place = rows + u8(128 * j) + t * u8(32) + g * u8(2)
                low, high = load(u2, place).astype(u8), load(u2, place + u8(16)).astype(u8)
                give(warp, stride, lane, j, low | high << u8(16))
            else:
                give(warp, stride, lane, j, load(u4, rows + u8(128 * j) + g * u8(16) + t * u8(4)).astype(u8))
        lane += u8(1)
