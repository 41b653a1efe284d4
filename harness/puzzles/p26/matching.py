"""Checks of pattern matching: SiLU and GELU in many spellings, and near misses."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.puzzles.p26.compile_cases import (
    CheckError,
    CompileCase,
    Module,
    X,
    capture_graph,
    check_equal,
    compile_and_run,
    make_numbers,
    make_pass_backend,
)
from harness.puzzles.p26.nodes import CALLS, call_name

SILU_OP = "silu.default"


def two_silus(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * torch.sigmoid(x)
    z = torch.sigmoid(y) * y
    return z + 1.0, y


def gate_used(x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return s * x, s


def across_mutation(x: Tensor) -> Tensor:
    x = x.clone()
    s = torch.sigmoid(x)
    x.add_(1.0)
    return s * x


def upcast(x: Tensor) -> Tensor:
    y = x.float()
    return torch.sigmoid(y) * y


SILU_CASES = (
    CompileCase("sigmoid(x) * x in inference", lambda x: torch.sigmoid(x) * x, (make_numbers(),), (SILU_OP,), gradients=False),
    CompileCase("sigmoid(x) * x", lambda x: torch.sigmoid(x) * x, (make_numbers(),), (SILU_OP,)),
    CompileCase("x * sigmoid(x)", lambda x: x * torch.sigmoid(x), (make_numbers(),), (SILU_OP,)),
    CompileCase("x.mul(x.sigmoid())", lambda x: x.mul(x.sigmoid()), (make_numbers(),), (SILU_OP,)),
    CompileCase("torch.mul(F.sigmoid(x), x)", lambda x: torch.mul(F.sigmoid(x), x), (make_numbers(),), (SILU_OP,)),
    CompileCase("sin(x * sigmoid(x)) + x", lambda x: (x * torch.sigmoid(x)).sin() + x, (make_numbers(),), (SILU_OP, "sin", "add"), "rest-dropped"),
    CompileCase("two SiLUs, with more after them", two_silus, (make_numbers(),), (SILU_OP, SILU_OP, "add"), num_changes=2),
    CompileCase("the sigmoid has another user", gate_used, (make_numbers(),), ("sigmoid", SILU_OP), "erased-in-use"),
    CompileCase("sigmoid(x) * y, two tensors", lambda x, y: torch.sigmoid(x) * y, (make_numbers(), make_numbers().sin()), ("sigmoid", "mul")),
    CompileCase("bfloat16", lambda x: torch.sigmoid(x) * x, (make_numbers(torch.bfloat16),), (SILU_OP,)),
    CompileCase("x.float() in front, of bfloat16", upcast, (make_numbers(torch.bfloat16),), ("float", SILU_OP), "cast-dropped"),
    CompileCase("integers, which have no SiLU", lambda x: torch.sigmoid(x) * x, (make_numbers(torch.int32),), ("sigmoid", "mul"), "dtype", gradients=False),
    CompileCase("torch.sigmoid(input=x) * x", lambda x: torch.sigmoid(input=x) * x, (make_numbers(),), None, "keywords"),
    CompileCase("torch.mul(input=sigmoid(x), other=x)", lambda x: torch.mul(input=torch.sigmoid(x), other=x), (make_numbers(),), None, "keywords"),
    CompileCase("x is written to in between", across_mutation, (make_numbers(),), None, "across-mutation", gradients=False),
    CompileCase("sigmoid(x) + x, a sum", lambda x: torch.sigmoid(x) + x, (make_numbers(),), ("sigmoid", "add")),
    CompileCase("x * 2.0, a number", lambda x: x * 2.0, (make_numbers(),), ("mul",), num_changes=0),
    CompileCase("no SiLU at all", lambda x: torch.tanh(x) * x, (make_numbers(),), ("tanh", "mul")),
    CompileCase("two shapes, one compilation", lambda x: torch.sigmoid(x) * x, (make_numbers(rows=4),), more_inputs=((make_numbers(rows=7),),), dynamic=True),
)  # fmt: skip


SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
WIDE_INPUT = torch.linspace(-4, 4, 48).reshape(6, 8)


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3)))


def plus_residual(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x + 2.0 * x.sin()
    y = tanh_gelu(h)
    return y + h, y


def written_inside(x: Tensor) -> Tensor:
    x = x.clone()
    cube = x + 0.044715 * x**3
    x.add_(1.0)
    return 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * cube))


def make_gelu_case(
    label, function, expected_ops=("gelu",), kind="", x: Tensor = WIDE_INPUT, **options
) -> CompileCase:
    return CompileCase(label, function, (x,), expected_ops, kind, **options)


GELU_CASES = (
    make_gelu_case("with x**3", lambda x: 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3)))),
    make_gelu_case("with x * x * x", lambda x: 0.5 * x * (1 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x * x * x)))),
    make_gelu_case("with torch.pow", lambda x: 0.5 * x * (1 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * torch.pow(x, 3.0))))),
    make_gelu_case("with its constants written out", lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))),
    make_gelu_case("with constants after it", lambda x: x * (torch.tanh((x.pow(3) * 0.044715 + x) * 0.7978845608) + 1) * 0.5),
    make_gelu_case("with x / 2", lambda x: x / 2 * (1 + (SQRT_2_OVER_PI * (x + 0.044715 * x**3)).tanh())),
    make_gelu_case("of a sum that is used again", plus_residual, ("sin", "mul", "add", "gelu", "add"), num_changes=1),
    make_gelu_case("twice, one applied to the other", lambda x: tanh_gelu(tanh_gelu(x)), ("gelu", "gelu"), num_changes=2),
    make_gelu_case("tanh(x) times a symbolic number of rows, which is not GELU", lambda x: torch.tanh(x) * x.shape[0], ("tanh", "mul"), dynamic=True),
    make_gelu_case("in bfloat16", lambda x: 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))), x=WIDE_INPUT.bfloat16()),
    make_gelu_case("in float64", lambda x: 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))), x=WIDE_INPUT.double()),
    make_gelu_case("in float16", lambda x: 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))), x=WIDE_INPUT.half()),
    make_gelu_case("of integers, which have no GELU", lambda x: 0.5 * x * (1 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))), None, "dtype", make_numbers(torch.int32), gradients=False),
    make_gelu_case("a sum with alpha", lambda x: 0.5 * x * (1 + torch.tanh(SQRT_2_OVER_PI * torch.add(x, x**3, alpha=0.044715)))),
    make_gelu_case("another function, because of alpha", lambda x: 0.5 * x * (1 + torch.tanh(SQRT_2_OVER_PI * torch.add(x, 0.044715 * x**3, alpha=2))), None, "keywords"),
    make_gelu_case("of |x| inside, the same for x > 0", lambda x: 0.5 * x * (1 + torch.tanh(SQRT_2_OVER_PI * (x.abs() + 0.044715 * x.abs() ** 3))), None, "false-match"),
    make_gelu_case("of |x| outside, the same for x > 0", lambda x: 0.5 * x.abs() * (1 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))), None, "false-match"),
    make_gelu_case("with another constant, 0.04", lambda x: 0.5 * x * (1 + torch.tanh(SQRT_2_OVER_PI * (x + 0.04 * x**3))), None, "false-match"),
    make_gelu_case("cut off below 6, 5e-5 away at one point", lambda x: 0.5 * torch.minimum(x, x * 0 + 5.99995) * (1 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))), None, "false-match", 2 * WIDE_INPUT),
    make_gelu_case("of two tensors", lambda x: 0.5 * x.sin() * (1 + torch.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3))), None, "false-match"),
    make_gelu_case("x is written to in between", written_inside, None, "across-mutation", gradients=False),
    make_gelu_case("the exact form, by erf", lambda x: 0.5 * x * (1 + torch.erf(x * 0.70710678)), None, "exact-gelu"),
)  # fmt: skip


def used_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y + 1.0, y.exp()


def fed_by_a_write(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    return torch.neg(x, out=y).sin(), y


REPLACEMENT_CASES = (
    ("the last node", lambda x: (x * 2.0).sin(), "sin", False, ("mul", "cos")),
    ("a node with two users", used_twice, "sin", False, ("cos", "add", "exp")),
    ("a node that others feed", lambda x: x.sin().exp() + 1.0, "add", True, ("cos",)),
    ("a node whose input has another user", used_twice, "add", True, ("sin", "cos", "exp")),
    (
        "a node whose input writes to an out= tensor",
        fed_by_a_write,
        "sin",
        True,
        ("empty_like", "neg", "cos"),
    ),
)
"""Description, function, operation that cos replaces, whether cos reads the input, remaining operations."""


def check_replacement(m: Module) -> None:
    """Check that replacing a node copies its metadata, moves its users and erases dead nodes."""
    for label, function, replaced_op, from_input, expected_ops in REPLACEMENT_CASES:
        gm = capture_graph(function, X)
        node = next(n for n in gm.graph.nodes if call_name(n) == replaced_op)
        x = next(n for n in gm.graph.nodes if n.op == "placeholder") if from_input else node.args[0]
        example_value = node.meta["example_value"]
        m["replace"](gm, node, torch.cos, x)
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise CheckError(
                "out-of-order", f"{label}: the new node comes after a node that uses it"
            ) from error
        remaining = [n for n in gm.graph.nodes if n.op in CALLS]
        new = next((n for n in remaining if n.target is torch.cos), None)
        if new is None or (not new.users):
            raise CheckError("not-rewritten", f"{label}: the new node is missing or has no user")
        if new.meta.get("example_value") is not example_value:
            message = "the new node has no example_value, so shape and dtype are lost"
            raise CheckError("meta-lost", f"{label}: {message}")
        names = [call_name(n) for n in remaining]
        if names != list(expected_ops):
            nodes = f"the graph holds {', '.join(names)}; expected {', '.join(expected_ops)}"
            raise CheckError(
                "dead-nodes" if len(names) > len(expected_ops) else "erased-in-use", f"{label}: {nodes}"
            )


def check_values(m: Module) -> None:
    """Check `values`, which evaluates part of a graph as a function of one of its nodes."""
    points = torch.linspace(-2, 2, 9, dtype=torch.float64)
    gm = capture_graph(
        lambda x, y: (torch.tanh(x * 2.0 + 1.0).pow(2), x * y, torch.sub(x, x.sin(), alpha=2).neg()),
        X,
        X.cos(),
    )
    nodes = {call_name(n): n for n in gm.graph.nodes if n.op in CALLS}
    x, y = (n for n in gm.graph.nodes if n.op == "placeholder")
    product = next(n for n in nodes["pow"].graph.nodes if call_name(n) == "mul")
    for description, end, start, expected in (
        ("tanh(x * 2 + 1)^2 of x", nodes["pow"], x, torch.tanh(points * 2 + 1) ** 2),
        ("tanh(x * 2 + 1)^2 of x * 2", nodes["pow"], product, torch.tanh(points + 1) ** 2),
        ("tanh(x * 2 + 1)^2 of y, on which it does not depend", nodes["pow"], y, None),
        ("x * y of x", nodes["mul"], x, None),
        ("-torch.sub(x, sin(x), alpha=2) of x", nodes["neg"], x, 2 * points.sin() - points),
    ):
        kind = "keywords" if "alpha" in description else "value"
        got = m["values"](end, start, points)
        if expected is None:
            check_equal(got, None, f"{description}: values(...)", "false-match")
        elif not isinstance(got, Tensor) or got.shape != points.shape or not torch.allclose(got, expected):
            message = " ".join(f"{description}: values(...) is {got!r}, expected {expected!r}".split())
            raise CheckError(kind, message[:400])


def check_tanh_form(m: Module) -> None:
    """Check that the tanh form of GELU is inserted, not the exact one."""
    (x,) = GELU_CASES[0].inputs
    got = compile_and_run(make_pass_backend(m["gelu"]), GELU_CASES[0].function, x).double()
    forms = (F.gelu(x.double(), approximate=form) for form in ("tanh", "none"))
    error, exact_error = ((got - form).abs().max() for form in forms)
    if exact_error < error:
        raise CheckError(
            "exact-gelu", f"the exact form is inserted: it differs from the tanh form by {error:.0e}"
        )
