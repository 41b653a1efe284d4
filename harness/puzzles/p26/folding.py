"""Checks of constant folding: every value of small dtypes, and functions with bit-exact results."""

import itertools
import operator

import torch
from torch import Tensor

from harness.puzzles.p26.compile_cases import (
    CheckError,
    CompileCase,
    Module,
    X,
    capture_graph,
    check_equal,
    make_numbers,
    make_special_values,
)
from harness.puzzles.p26.nodes import CALLS


def in_place_product(x: Tensor) -> Tensor:
    y = x * 2.0
    y *= 3.0
    return y


def written_product(x: Tensor) -> Tensor:
    x = x.clone()
    y = x * 2.0
    x.add_(1.0)
    y.mul_(x)
    return y * 3.0


def also_used(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2.0
    return y.sin(), y * 3.0


def write_to_copy(x: Tensor) -> Tensor:
    y = x * 1.0
    y.add_(1.0)
    return y


def sine_and_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 1.0
    return y.sin(), y.view(-1)


def written_source(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone()
    y = x * 1.0
    x.add_(1.0)
    return x, y + 2.0


def make_exact_case(label, function, expected_ops, x=None, **options) -> CompileCase:
    return CompileCase(
        label, function, (make_numbers() if x is None else x,), expected_ops, bit_exact=True, **options
    )


WRAPPING_INTEGERS = torch.tensor([2**24 + 1, 7, -(2**31) - 3, 2**62], dtype=torch.int64)
"""Integers that float32 cannot represent, and one whose product wraps."""


CHAIN_CASES = (
    make_exact_case("x * 2.0 * 3.0", lambda x: x * 2.0 * 3.0, ("mul",)),
    make_exact_case("3.0 * (x * 2.0), the constant in front", lambda x: 3.0 * (x * 2.0), ("mul",)),
    make_exact_case("x * 2.0 * 4.0 * 3.0 * 8.0, a long chain", lambda x: x * 2.0 * 4.0 * 3.0 * 8.0, ("mul",), num_changes=3),
    make_exact_case("torch.mul(x.mul(2.0), 3.0)", lambda x: torch.mul(x.mul(2.0), 3.0), ("mul",)),
    make_exact_case("x * 2.0 * 3.0 at both ends of float32", lambda x: x * 2.0 * 3.0, ("mul",), make_special_values(),
         gradients=False),
    make_exact_case("x * 2.0 * 3.0, with x * 2.0 used twice", also_used, ("mul", "sin", "mul"), kind="erased-in-use"),
    make_exact_case("x * 2 * 3 of integers", lambda x: x * 2 * 3, ("mul",), make_numbers(torch.int32),
         kind="integer-through-float"),
    make_exact_case("x * 4 * 0.5 of integers that wrap", lambda x: x * 4 * 0.5, ("mul", "mul"),
         torch.tensor([2**30, 5], dtype=torch.int32), kind="integer-through-float"),
    make_exact_case("x * 3 * 2.0 of int64, which is rounded to float32 only after it has wrapped", lambda x: x * 3 * 2.0,
         ("mul", "mul"), WRAPPING_INTEGERS, kind="integer-through-float"),
    make_exact_case("x * 100 * 3 of int8, whose product does not fit", lambda x: x * 100 * 3, ("mul", "mul"),
         make_numbers(torch.int8), kind="integer-through-float"),
    make_exact_case("x * 2 * 3 of bools, which become integers", lambda x: x * 2 * 3, None, make_numbers() > 0),
    make_exact_case("x * 0.1 * 3.0, which rounds twice", lambda x: x * 0.1 * 3.0, ("mul", "mul"), kind="rounds"),
    make_exact_case("x * 1e30 * 1e-30, which overflows first", lambda x: x * 1e30 * 1e-30, ("mul", "mul"), make_special_values(),
         kind="rounds", gradients=False),
    make_exact_case("x * 3.0 * 5.0 in bfloat16", lambda x: x * 3.0 * 5.0, ("mul", "mul"), make_numbers(torch.bfloat16, 50),
         kind="rounds"),
    make_exact_case("y *= 3.0, which writes", in_place_product, ("mul", "imul"), kind="across-mutation"),
    make_exact_case("x * 2.0, then a write to the product, then * 3.0", written_product, None, kind="across-mutation",
         gradients=False),
    CompileCase("x * rows * 2.0 * 4.0 with a symbolic number of rows", lambda x: x * x.shape[0] * 2.0 * 4.0,
        (make_numbers(rows=4),), more_inputs=((make_numbers(rows=7),),), dynamic=True, bit_exact=True, kind="shape-baked"),
)  # fmt: skip

NEUTRAL_CASES = (
    make_exact_case("sin(x * 1.0)", lambda x: (x * 1.0).sin(), ("sin",)),
    make_exact_case("cos(1 * x)", lambda x: (1 * x).cos(), ("cos",)),
    make_exact_case("sin(x * 1.0) + cos(x * 1.0)", lambda x: (x * 1.0).sin() + (x * 1.0).cos(), ("sin", "cos", "add"),
         num_changes=2),
    make_exact_case("1 / (x + 0.0), where x is -0.0", lambda x: 1 / (x + 0.0), None, make_special_values(), kind="minus-zero",
         gradients=False),
    make_exact_case("x * 1.0 of integers", lambda x: (x * 1.0).exp(), None, make_numbers(torch.int32), kind="dtype"),
    make_exact_case("x * 1.0 + 2 of integers, a float32", lambda x: x * 1.0 + 2, None, WRAPPING_INTEGERS, kind="dtype"),
    make_exact_case("(x * 1) + (x * 1) of bools, an integer", lambda x: (x * 1) + (x * 1), None, make_numbers() > 0,
         kind="dtype"),
    make_exact_case("sin(x * -1.0)", lambda x: (x * -1.0).sin(), ("mul", "sin")),
    make_exact_case("exp(x * 1.5)", lambda x: (x * 1.5).exp(), ("mul", "exp")),
    make_exact_case("x * 1 of integers", lambda x: (x * 1).abs(), ("abs",), make_numbers(torch.int32)),
    make_exact_case("x * 1.0, returned", lambda x: x * 1.0, None, kind="aliased"),
    make_exact_case("a view of x * 1.0, returned", lambda x: (x * 1.0).view(-1), None, kind="aliased"),
    make_exact_case("sin of x * 1.0 and a view of it", sine_and_view, ("mul", "sin", "view"), kind="aliased"),
    make_exact_case("x * 1.0, then a write to it", write_to_copy, None, kind="aliased", gradients=False, num_changes=0),
    make_exact_case("x * 1.0, then a write to x", written_source, None, kind="aliased", gradients=False),
    make_exact_case("x * 0.0, which keeps NaN", lambda x: (x * 0.0).cos(), None, make_special_values(), gradients=False),
)  # fmt: skip


def unused_chain(x: Tensor) -> Tensor:
    y = x.sin() * 2
    y.cos()
    return x + 1


def written_and_unused(x: Tensor) -> Tensor:
    y = x * 2
    y.add_(1)
    return y


def out_and_unused(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    torch.neg(x, out=y)
    return y


def item_written(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = 3.0
    return y


SWEEP_CASES = (
    make_exact_case("sin(x) * 2 and cos of it, which nothing uses", unused_chain, ("add",), num_changes=3),
    make_exact_case("y.add_(1), whose result nothing uses", written_and_unused, None, kind="mutation-dropped",
         gradients=False),
    make_exact_case("torch.neg(x, out=y)", out_and_unused, None, kind="mutation-dropped", gradients=False),
    make_exact_case("y[0] = 3", item_written, None, kind="mutation-dropped", gradients=False),
)  # fmt: skip


def check_unused_input(m: Module) -> None:
    """Check that an unused input is not erased, since the graph's caller still passes it."""
    gm = torch.fx.symbolic_trace(lambda x, y: x.sin())
    m["sweep"](gm)
    names = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    check_equal(names, ["x", "y"], "the inputs of a graph of (x, y) that does not use y", "input-erased")


FACTOR_CASES = (
    ("x * 2.0", lambda x: x * 2.0, 2.0),
    ("2.0 * x", lambda x: 2.0 * x, 2.0),
    ("x * 3", lambda x: x * 3, 3),
    ("torch.mul(x, -0.5)", lambda x: torch.mul(x, -0.5), -0.5),
    ("x.mul(2.0)", lambda x: x.mul(2.0), 2.0),
    ("x * x", lambda x: x * x, None),
    ("x + 2.0", lambda x: x + 2.0, None),
    ("x.clone().mul_(2.0)", lambda x: x.clone().mul_(2.0), None),
    ("y *= 2.0", lambda x: operator.imul(x.clone(), 2.0), None),
    ("torch.mul(x, 2.0, out=y)", lambda x: torch.mul(x, 2.0, out=torch.empty_like(x)), None),
    ("x * True", lambda x: x * True, None),
    ("x.shape[0] * 2, a number", lambda x: x.shape[0] * 2, None),
)


def check_factors(m: Module) -> None:
    """Check which nodes `factor` recognizes as a product with a number."""
    for spelling, function, expected in FACTOR_CASES:
        gm = capture_graph(function, X.detach(), dynamic=True)
        *_, node = [n for n in gm.graph.nodes if n.op in CALLS]
        got = m["factor"](node)
        if expected is None:
            check_equal(got, None, f"{spelling}: factor(node)", "factor")
            continue
        if got is None:
            raise CheckError("not-rewritten", f"{spelling}: factor(node) is None, expected x and {expected}")
        x, c = got
        actual, description = (getattr(x, "op", x), c), f"{spelling}: the tensor's op and the number"
        check_equal(actual, ("placeholder", expected), description, "factor")


MUST_FOLD = (
    (2.0, 3.0, torch.float32),
    (3.0, 4.0, torch.bfloat16),
    (-8.0, 3.0, torch.float16),
    (1.0, 3.0, torch.float32),
    (2047.0, 32.0, torch.float16),  # the largest finite float16
    (1, -128, torch.int8),
    (2, 3, torch.float64),
    (2, 3, torch.int8),
    (-5, 7, torch.int64),
)
CONSTANTS = (1.0, 2.0, 3.0, 1.5, 0.5, 0.1, 4.0, -2.0, 5.0, 0.0, 1e30, 1e-30, 2.0**100, float("inf"))
INTEGERS = (0, 1, 2, 3, -4, 11, 100, 2**20)


def list_values(dtype: torch.dtype) -> Tensor:
    """Return every value of a 16-bit float or 8-bit dtype, or a sample of another, with `SPECIAL_VALUES` if float."""
    if dtype in (torch.int8, torch.uint8):
        return torch.arange(256).to(dtype)
    if dtype in (torch.float16, torch.bfloat16):
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(3)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (4000,), generator=generator, dtype=dtype)
    info = torch.finfo(dtype)
    fractions = torch.linspace(-1, 1, 4000, dtype=torch.float64)
    max_exponent = torch.log2(torch.tensor(info.max)).item()
    values = (torch.rand(4000, generator=generator, dtype=torch.float64) + 1) * 2.0 ** (
        fractions * (max_exponent - 1)
    )
    return torch.cat([values.to(dtype), make_special_values(dtype)])


def check_exact_folds(m: Module) -> None:
    """Check folds on all values of 16-bit dtypes and a sample of others, and that MUST_FOLD is allowed."""
    for a, b, dtype in MUST_FOLD:
        check_equal(bool(m["exact"](a, b, dtype)), True, f"exact({a}, {b}, {dtype})", "too-careful")
    floats = (torch.bfloat16, torch.float16, torch.float32)
    for dtype in (*floats, torch.int8, torch.int32):
        x = list_values(dtype)
        constants = CONSTANTS if dtype.is_floating_point else INTEGERS
        for a, b in itertools.product(constants, constants):
            if not m["exact"](a, b, dtype):
                continue
            sequential, folded = x * a * b, x * (a * b)
            is_equal = (sequential == folded) | (sequential != sequential) & (folded != folded)
            if sequential.dtype != folded.dtype or not is_equal.all():
                k = int((~is_equal).nonzero()[0]) if not is_equal.all() else 0
                message = f"exact({a}, {b}, {dtype}) is true, and {x[k].item()!r} * {a} * {b} is {sequential[k].item()!r}"
                raise CheckError("rounds", f"{message}, times {a * b} {folded[k].item()!r}")
    m["exact"](2, 3, torch.bool)  # both answers are correct: x * 2 is not a bool
    complex_product = "exact(2.0, 3.0, torch.complex64), where an overflow of x * 2 makes NaN"
    check_equal(bool(m["exact"](2.0, 3.0, torch.complex64)), False, complex_product, "rounds")
    for a, b, dtype in ((2, 0.5, torch.int32), (2.0, 3.0, torch.int64), (100, 3, torch.int8)):
        check_equal(
            bool(m["exact"](a, b, dtype)), False, f"exact({a}, {b}, {dtype})", "integer-through-float"
        )
