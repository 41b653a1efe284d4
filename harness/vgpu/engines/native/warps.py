"""Warp instructions of the compiled runtime: shuffles, votes, matrix products of a warp.

The functions are compiled, not called, as those of runtime.py are. The lanes' operands and results lie in the states of
their threads.
"""

from __future__ import annotations

import numpy as np

from harness.vgpu.engines.opcodes import fragments, numeric

from .builtins import lanes, load, numbers, product_row, store, unlikely
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
    for lane in lanes(active):
        if operand(warp, stride, lane, n) & members & ~active != u8(0):
            give_up(ctx)


@variables
def shuffle(ctx, warp, stride, active, members, mode: str):
    """shfl.sync: operands value, amount, bounds, mask; results value and whether it is in range."""
    check_members(ctx, warp, stride, active, members, 3)
    for lane in lanes(active):
        amount, bounds = operand(warp, stride, lane, 1), operand(warp, stride, lane, 2)
        source, inside = numeric.shuffle_source(mode, lane.astype(i8), amount, bounds)
        other = source.astype(u8)
        if unlikely(active >> other & u8(1) == u8(0)):
            give_up(ctx)
        give(warp, stride, lane, 0, operand(warp, stride, other, 0))
        give(warp, stride, lane, 1, inside.astype(u8))


@variables
def vote(ctx, warp, stride, active, members, mode: str):
    """vote.sync: operands predicate, mask."""
    check_members(ctx, warp, stride, active, members, 1)
    yes = u8(0)
    for lane in lanes(active):
        yes = yes | (operand(warp, stride, lane, 0) & u8(1)) << lane
    for lane in lanes(active):
        mask = operand(warp, stride, lane, 1)
        give(warp, stride, lane, 0, numeric.voted(mode, yes & mask, active & mask).astype(u8))


@variables
def match(ctx, warp, stride, active, members, mode: str):
    """match.sync: operands value, mask; results mask and predicate."""
    check_members(ctx, warp, stride, active, members, 1)
    for lane in lanes(active):
        named = active & operand(warp, stride, lane, 1)
        value = operand(warp, stride, lane, 0)
        same = u8(0)
        for other in lanes(named):
            same = same | np.where(operand(warp, stride, other, 0) == value, u8(1), u8(0)) << other
        mask, agree = numeric.matched(mode, same, named)
        give(warp, stride, lane, 0, mask)
        give(warp, stride, lane, 1, agree.astype(u8))


@variables
def redux(ctx, warp, stride, active, members, op: str, kind):
    """redux.sync: operands value, mask."""
    check_members(ctx, warp, stride, active, members, 1)
    for lane in lanes(active):
        out = kind(0)
        started = u8(0)
        for other in lanes(active & operand(warp, stride, lane, 1)):
            value = operand(warp, stride, other, 0).astype(kind)
            out = np.where(started != u8(0), combined(op, out, value), value)
            started = u8(1)
        give(warp, stride, lane, 0, out.view(u4).astype(u8))


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
    registers = depth // (2 if kind == "tf32" else 4)  # of A; B has half as many
    for lane in lanes(u8(0xFFFFFFFF)):
        g, t = lane >> u8(2), lane & u8(3)
        for n in range(depth // 2):
            row, column = fragments.place_in_a(kind, n, g, t)
            store(f8, a + (row * u8(16) + column) * u8(8), element(warp, stride, lane, 0, n, kind))
        for n in range(depth // 4):
            row, column = fragments.place_in_b(kind, n, g, t)
            store(f8, b + (row * u8(8) + column) * u8(8), element(warp, stride, lane, registers, n, kind))
        for n in range(4):
            row, column = fragments.place_in_c(kind, n, g, t)
            x = element(warp, stride, lane, registers + registers // 2, n, "f32" if wide else "f16")
            store(f8, c + (row * u8(8) + column) * u8(8), x)
    for row in numbers(u8(16)):
        product_row(a + row * u8(128), b, c + row * u8(64), depth)
    for lane in lanes(u8(0xFFFFFFFF)):
        for n in range(2):
            row, column = fragments.place_in_c(kind, 2 * n, lane >> u8(2), lane & u8(3))
            place = c + (row * u8(8) + column) * u8(8)
            left, right = load(f8, place), load(f8, place + u8(8))
            if wide:
                give(warp, stride, lane, 2 * n, numeric.canonical(left.astype(f4)).view(u4).astype(u8))
                give(warp, stride, lane, 2 * n + 1, numeric.canonical(right.astype(f4)).view(u4).astype(u8))
            else:
                low = numeric.canonical(left.astype(f2)).view(u2).astype(u8)
                high = numeric.canonical(right.astype(f2)).view(u2).astype(u8)
                give(warp, stride, lane, n, low | high << u8(16))


def element(warp, stride, lane, first: int, n: int, kind: str):
    """Element n of the fragment that begins with operand `first`, as float64; two of 16 bits share an operand."""
    if kind in ("f32", "tf32"):
        return numeric.decoded(operand(warp, stride, lane, first + n).astype(u4), kind)
    return numeric.decoded((operand(warp, stride, lane, first + n // 2) >> u8(16 * (n & 1))).astype(u2), kind)


@variables
def load_matrices(
    ctx, warp, stride, active, members, count: int, transpose: bool, shift: int, atomics: bool, races: bool
):
    """ldmatrix: lane 8 j + r has the address of row r of matrix j; every lane gets two elements of each."""
    if active != u8(0xFFFFFFFF):
        give_up(ctx)
    rows = load(u8, ctx + SCRATCH)
    for lane in numbers(u8(8 * count)):
        mine = operand(warp, stride, lane, 1)
        place = shared_place(ctx, operand(warp, stride, lane, 0), mine, 16, "R", shift, atomics, races)
        store(u8, rows + lane * u8(16), load(u8, place))
        store(u8, rows + lane * u8(16) + u8(8), load(u8, place + u8(8)))
    for lane in numbers(u8(32)):
        g, t = lane >> u8(2), lane & u8(3)
        for j in range(count):
            if transpose:
                place = rows + u8(128 * j) + t * u8(32) + g * u8(2)
                low, high = load(u2, place).astype(u8), load(u2, place + u8(16)).astype(u8)
                give(warp, stride, lane, j, low | high << u8(16))
            else:
                give(warp, stride, lane, j, load(u4, rows + u8(128 * j) + g * u8(16) + t * u8(4)).astype(u8))
