"""Random PTX programs against a plain interpreter: every thread by itself, on Python integers.

Programs have nested branches, loops with early exits, and between them, where all threads are together again,
shuffles and exchanges through shared memory. A thread that took another path must be back for those.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_tools import run

M = (1 << 32) - 1
THREADS = 64
REGS = 4


def s32(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


OPS = {
    "add.u32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "min.u32": min,
    "max.s32": lambda a, b: a if s32(a) > s32(b) else b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.s32": lambda a, b: s32(a) >> min(b, 31),
    "rem.u32": lambda a, b: a % b if b else a,
}
COMPARE = {
    "eq.u32": lambda a, b: a == b,
    "lt.u32": lambda a, b: a < b,
    "ge.s32": lambda a, b: s32(a) >= s32(b),
    "ne.u32": lambda a, b: a != b,
}

register = st.integers(0, REGS - 1)
operand = st.one_of(register.map(lambda r: ("r", r)), st.integers(0, 40).map(lambda k: ("k", k)))
assign = st.tuples(st.just("op"), register, st.sampled_from(sorted(OPS)), operand, operand)
guarded = st.tuples(st.just("guarded"), st.sampled_from(sorted(COMPARE)), operand, operand, assign)
leave = st.tuples(st.just("break"), st.sampled_from(sorted(COMPARE)), operand, operand)
statement = st.recursive(
    st.one_of(assign, assign, guarded),
    lambda inner: st.one_of(
        st.tuples(
            st.just("if"), st.sampled_from(sorted(COMPARE)), operand, operand, st.lists(inner, max_size=3),
            st.lists(inner, max_size=2),
        ),
        st.tuples(st.just("loop"), register, st.lists(st.one_of(inner, leave), min_size=1, max_size=3)),
    ),
    max_leaves=8,
)  # fmt: skip
together = st.one_of(
    st.tuples(st.just("shuffle"), register, register, st.integers(1, 31)),
    st.tuples(st.just("exchange"), register, register, st.integers(1, THREADS - 1)),
)
program = st.lists(st.one_of(statement, statement, together), min_size=1, max_size=7)


class Emitter:
    """Writes the PTX of a program."""

    def __init__(self):
        self.lines: list[str] = []
        self.labels = 0

    def label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def value(self, o) -> str:
        return f"%r{o[1]}" if o[0] == "r" else str(o[1])

    def test(self, cmp, a, b) -> None:
        self.lines.append(f"mov.u32 %r20, {self.value(a)}; setp.{cmp} %p1, %r20, {self.value(b)};")

    def emit(self, s, exit_label=None):
        kind = s[0]
        if kind == "op":
            _, d, op, a, b = s
            self.lines.append(f"mov.u32 %r20, {self.value(a)}; {op} %r{d}, %r20, {self.value(b)};")
        elif kind == "guarded":
            _, cmp, a, b, (_, d, op, x, y) = s
            self.test(cmp, a, b)
            self.lines.append(f"mov.u32 %r20, {self.value(x)}; @%p1 {op} %r{d}, %r20, {self.value(y)};")
        elif kind == "break":
            if exit_label:
                self.test(*s[1:])
                self.lines.append(f"@%p1 bra {exit_label};")
        elif kind == "if":
            _, cmp, a, b, then, other = s
            end, no = self.label(), self.label()
            self.test(cmp, a, b)
            self.lines.append(f"@!%p1 bra {no};")
            for x in then:
                self.emit(x, exit_label)
            self.lines.append(f"bra {end};\n{no}:")
            for x in other:
                self.emit(x, exit_label)
            self.lines.append(f"{end}:")
        elif kind == "loop":
            _, r, body = s
            top, end, count = self.label(), self.label(), f"%c{self.labels}"
            self.lines.append(
                f".reg .b32 {count}; and.b32 {count}, %r{r}, 3;\n{top}: setp.eq.u32 %p2, {count}, 0; @%p2 bra {end};"
            )
            for x in body:
                self.emit(x, end)
            self.lines.append(f"sub.u32 {count}, {count}, 1; bra {top};\n{end}:")
        elif kind == "shuffle":
            self.lines.append(f"shfl.sync.bfly.b32 %r{s[1]}, %r{s[2]}, {s[3]}, 31, -1;")
        else:
            _, d, r, shift = s
            self.lines.append(
                f"""mov.u32 %r21, s; mad.lo.u32 %r22, %t2, 4, %r21; st.shared.u32 [%r22], %r{r}; bar.sync 0;
                add.u32 %r23, %t2, {shift}; rem.u32 %r23, %r23, {THREADS}; mad.lo.u32 %r22, %r23, 4, %r21;
                ld.shared.u32 %r{d}, [%r22]; bar.sync 0;"""
            )


class Leave(Exception):
    """A `break` of the interpreter."""


def interpret(s, v: list[int], depth: int = 0):
    """Execute a statement for one thread."""

    def value(o):
        return v[o[1]] if o[0] == "r" else o[1]

    kind = s[0]
    if kind == "op":
        v[s[1]] = OPS[s[2]](value(s[3]), value(s[4])) & M
    elif kind == "guarded":
        if COMPARE[s[1]](value(s[2]), value(s[3])):
            interpret(s[4], v)
    elif kind == "break":
        if depth and COMPARE[s[1]](value(s[2]), value(s[3])):
            raise Leave
    elif kind == "if":
        for x in s[4] if COMPARE[s[1]](value(s[2]), value(s[3])) else s[5]:
            interpret(x, v, depth)
    else:
        for _ in range(v[s[1]] & 3):
            try:
                for x in s[2]:
                    interpret(x, v, depth + 1)
            except Leave:
                break


def expected(statements, x: np.ndarray) -> list[list[int]]:
    """Final registers of every thread."""
    threads = [[int(x[t]), t, t * 7 % 5, 3] for t in range(THREADS)]
    for s in statements:
        if s[0] == "shuffle":
            old = [v[s[2]] for v in threads]
            for t, v in enumerate(threads):
                v[s[1]] = old[t - t % 32 + (t % 32 ^ s[3])]
        elif s[0] == "exchange":
            old = [v[s[2]] for v in threads]
            for t, v in enumerate(threads):
                v[s[1]] = old[(t + s[3]) % THREADS]
        else:
            for v in threads:
                interpret(s, v)
    return threads


def ptx_of(statements) -> str:
    """The statements as PTX, with the registers that a thread begins with before them and its results behind them."""
    e = Emitter()
    e.lines.append(
        "mov.u32 %r0, %x0; mov.u32 %r1, %i; mul.lo.u32 %r2, %i, 7; rem.u32 %r2, %r2, 5; mov.u32 %r3, 3;"
    )
    for s in statements:
        e.emit(s)
    e.lines += [f"mov.u32 %y{k}, %r{k};" for k in range(REGS)]
    return "\n".join(e.lines)


@settings(max_examples=120, deadline=None)
@given(program, st.integers(0, 1000))
def test_random_program(statements, seed):
    x = np.random.default_rng(seed).integers(0, 1 << 32, THREADS, np.uint64).astype(np.uint32)
    x[::3] %= 9
    declare = f".shared .align 4 .b8 s[{4 * THREADS}];"
    got = run(ptx_of(statements), [x], ["u4"] * REGS, declare=declare)
    want = np.array(expected(statements, x), np.uint32).T
    np.testing.assert_array_equal(got, want)
