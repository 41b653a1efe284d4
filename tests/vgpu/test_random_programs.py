"""Random PTX programs compared with an interpreter that runs each thread on Python integers.

Programs have nested branches and loops with early exits. Between these are shuffles and exchanges through shared memory,
for which all threads must have reconverged.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_tools import run_ptx

M = (1 << 32) - 1
THREADS = 64
REGS = 4


def to_signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


OPS = {
    "add.u32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "min.u32": min,
    "max.s32": lambda a, b: a if to_signed(a) > to_signed(b) else b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "shr.s32": lambda a, b: to_signed(a) >> min(b, 31),
    "rem.u32": lambda a, b: a % b if b else a,
}
COMPARE = {
    "eq.u32": lambda a, b: a == b,
    "lt.u32": lambda a, b: a < b,
    "ge.s32": lambda a, b: to_signed(a) >= to_signed(b),
    "ne.u32": lambda a, b: a != b,
}

register = st.integers(0, REGS - 1)
operand = st.one_of(register.map(lambda r: ("r", r)), st.integers(0, 40).map(lambda k: ("k", k)))
assign = st.tuples(st.just("op"), register, st.sampled_from(sorted(OPS)), operand, operand)
guarded = st.tuples(st.just("guarded"), st.sampled_from(sorted(COMPARE)), operand, operand, assign)
break_if = st.tuples(st.just("break"), st.sampled_from(sorted(COMPARE)), operand, operand)
statement = st.recursive(
    st.one_of(assign, assign, guarded),
    lambda inner: st.one_of(
        st.tuples(
            st.just("if"), st.sampled_from(sorted(COMPARE)), operand, operand, st.lists(inner, max_size=3),
            st.lists(inner, max_size=2),
        ),
        st.tuples(st.just("loop"), register, st.lists(st.one_of(inner, break_if), min_size=1, max_size=3)),
    ),
    max_leaves=8,
)  # fmt: skip
collective = st.one_of(
    st.tuples(st.just("shuffle"), register, register, st.integers(1, 31)),
    st.tuples(st.just("exchange"), register, register, st.integers(1, THREADS - 1)),
)
program = st.lists(st.one_of(statement, statement, collective), min_size=1, max_size=7)


class Emitter:
    """Generates the PTX of a program."""

    def __init__(self):
        self.lines: list[str] = []
        self.labels = 0

    def make_label(self) -> str:
        self.labels += 1
        return f"L{self.labels}"

    def format_operand(self, o) -> str:
        return f"%r{o[1]}" if o[0] == "r" else str(o[1])

    def emit_test(self, cmp, a, b) -> None:
        self.lines.append(
            f"mov.u32 %r20, {self.format_operand(a)}; setp.{cmp} %p1, %r20, {self.format_operand(b)};"
        )

    def emit(self, s, exit_label=None):
        kind = s[0]
        if kind == "op":
            _, d, op, a, b = s
            self.lines.append(
                f"mov.u32 %r20, {self.format_operand(a)}; {op} %r{d}, %r20, {self.format_operand(b)};"
            )
        elif kind == "guarded":
            _, cmp, a, b, (_, d, op, x, y) = s
            self.emit_test(cmp, a, b)
            self.lines.append(
                f"mov.u32 %r20, {self.format_operand(x)}; @%p1 {op} %r{d}, %r20, {self.format_operand(y)};"
            )
        elif kind == "break":
            if exit_label:
                self.emit_test(*s[1:])
                self.lines.append(f"@%p1 bra {exit_label};")
        elif kind == "if":
            _, cmp, a, b, then, otherwise = s
            end, no = self.make_label(), self.make_label()
            self.emit_test(cmp, a, b)
            self.lines.append(f"@!%p1 bra {no};")
            for x in then:
                self.emit(x, exit_label)
            self.lines.append(f"bra {end};\n{no}:")
            for x in otherwise:
                self.emit(x, exit_label)
            self.lines.append(f"{end}:")
        elif kind == "loop":
            _, r, body = s
            top, end, count = self.make_label(), self.make_label(), f"%c{self.labels}"
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


class Break(Exception):
    """Raised by a `break` in the interpreter."""


def interpret(s, v: list[int], depth: int = 0):
    """Execute a statement for one thread."""

    def evaluate(o):
        return v[o[1]] if o[0] == "r" else o[1]

    kind = s[0]
    if kind == "op":
        v[s[1]] = OPS[s[2]](evaluate(s[3]), evaluate(s[4])) & M
    elif kind == "guarded":
        if COMPARE[s[1]](evaluate(s[2]), evaluate(s[3])):
            interpret(s[4], v)
    elif kind == "break":
        if depth and COMPARE[s[1]](evaluate(s[2]), evaluate(s[3])):
            raise Break
    elif kind == "if":
        for x in s[4] if COMPARE[s[1]](evaluate(s[2]), evaluate(s[3])) else s[5]:
            interpret(x, v, depth)
    else:
        for _ in range(v[s[1]] & 3):
            try:
                for x in s[2]:
                    interpret(x, v, depth + 1)
            except Break:
                break


def compute_expected(statements, x: np.ndarray) -> list[list[int]]:
    """Return the final registers of every thread."""
    threads = [[int(x[t]), t, t * 7 % 5, 3] for t in range(THREADS)]
    for s in statements:
        if s[0] == "shuffle":
            before = [v[s[2]] for v in threads]
            for t, v in enumerate(threads):
                v[s[1]] = before[t - t % 32 + (t % 32 ^ s[3])]
        elif s[0] == "exchange":
            before = [v[s[2]] for v in threads]
            for t, v in enumerate(threads):
                v[s[1]] = before[(t + s[3]) % THREADS]
        else:
            for v in threads:
                interpret(s, v)
    return threads


def emit_program(statements) -> str:
    """Return the statements' PTX between initializations and stores of the registers."""
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
def test_random_programs_match_the_interpreter(statements, seed):
    x = np.random.default_rng(seed).integers(0, 1 << 32, THREADS, np.uint64).astype(np.uint32)
    x[::3] %= 9
    declare = f".shared .align 4 .b8 s[{4 * THREADS}];"
    got = run_ptx(emit_program(statements), [x], ["u4"] * REGS, declare=declare)
    expected = np.array(compute_expected(statements, x), np.uint32).T
    np.testing.assert_array_equal(got, expected)
