"""Checks of pattern matching: SiLU and GELU in many spellings, and near misses."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.puzzles.p26.compile_cases import (
    CompileCase,
    Fault,
    Module,
    X,
    capture_graph,
    compile_and_run,
    expect,
    numbers,
    run_pass,
)
from harness.puzzles.p26.nodes import CALLS, call_name

SILU = "silu.default"


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


SILUS = (
    CompileCase("sigmoid(x) * x in inference", lambda x: torch.sigmoid(x) * x, (numbers(),), (SILU,), gradients=False),
    CompileCase("sigmoid(x) * x", lambda x: torch.sigmoid(x) * x, (numbers(),), (SILU,)),
    CompileCase("x * sigmoid(x)", lambda x: x * torch.sigmoid(x), (numbers(),), (SILU,)),
    CompileCase("x.mul(x.sigmoid())", lambda x: x.mul(x.sigmoid()), (numbers(),), (SILU,)),
    CompileCase("torch.mul(F.sigmoid(x), x)", lambda x: torch.mul(F.sigmoid(x), x), (numbers(),), (SILU,)),
    CompileCase("sin(x * sigmoid(x)) + x", lambda x: (x * torch.sigmoid(x)).sin() + x, (numbers(),), (SILU, "sin", "add"), "rest-dropped"),
    CompileCase("two SiLUs, with more after them", two_silus, (numbers(),), (SILU, SILU, "add"), count=2),
    CompileCase("the sigmoid has another user", gate_used, (numbers(),), ("sigmoid", SILU), "erased-in-use"),
    CompileCase("sigmoid(x) * y, two tensors", lambda x, y: torch.sigmoid(x) * y, (numbers(), numbers().sin()), ("sigmoid", "mul")),
    CompileCase("bfloat16", lambda x: torch.sigmoid(x) * x, (numbers(torch.bfloat16),), (SILU,)),
    CompileCase("x.float() in front, of bfloat16", upcast, (numbers(torch.bfloat16),), ("float", SILU), "cast-dropped"),
    CompileCase("integers, which have no SiLU", lambda x: torch.sigmoid(x) * x, (numbers(torch.int32),), ("sigmoid", "mul"), "dtype", gradients=False),
    CompileCase("torch.sigmoid(input=x) * x", lambda x: torch.sigmoid(input=x) * x, (numbers(),), None, "keywords"),
    CompileCase("torch.mul(input=sigmoid(x), other=x)", lambda x: torch.mul(input=torch.sigmoid(x), other=x), (numbers(),), None, "keywords"),
    CompileCase("x is written to in between", across_mutation, (numbers(),), None, "across-mutation", gradients=False),
    CompileCase("sigmoid(x) + x, a sum", lambda x: torch.sigmoid(x) + x, (numbers(),), ("sigmoid", "add")),
    CompileCase("x * 2.0, a number", lambda x: x * 2.0, (numbers(),), ("mul",), count=0),
    CompileCase("no SiLU at all", lambda x: torch.tanh(x) * x, (numbers(),), ("tanh", "mul")),
    CompileCase("two shapes, one compilation", lambda x: torch.sigmoid(x) * x, (numbers(rows=4),), more=((numbers(rows=7),),), dynamic=True),
)  # fmt: skip


K = math.sqrt(2 / math.pi)
WIDE = torch.linspace(-4, 4, 48).reshape(6, 8)


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(K * (x + 0.044715 * x**3)))


def plus_residual(x: Tensor) -> tuple[Tensor, Tensor]:
    h = x + 2.0 * x.sin()
    y = tanh_gelu(h)
    return y + h, y


def written_inside(x: Tensor) -> Tensor:
    x = x.clone()
    cube = x + 0.044715 * x**3
    x.add_(1.0)
    return 0.5 * x * (1.0 + torch.tanh(K * cube))


def gelu(words, function, after=("gelu",), kind="", x: Tensor = WIDE, **options) -> CompileCase:
    return CompileCase(words, function, (x,), after, kind, **options)


GELUS = (
    gelu("with x**3", lambda x: 0.5 * x * (1.0 + torch.tanh(K * (x + 0.044715 * x**3)))),
    gelu("with x * x * x", lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x * x * x)))),
    gelu("with torch.pow", lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * torch.pow(x, 3.0))))),
    gelu("with its constants written out", lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))),
    gelu("with constants after it", lambda x: x * (torch.tanh((x.pow(3) * 0.044715 + x) * 0.7978845608) + 1) * 0.5),
    gelu("with x / 2", lambda x: x / 2 * (1 + (K * (x + 0.044715 * x**3)).tanh())),
    gelu("of a sum that is used again", plus_residual, ("sin", "mul", "add", "gelu", "add"), count=1),
    gelu("twice, one applied to the other", lambda x: tanh_gelu(tanh_gelu(x)), ("gelu", "gelu"), count=2),
    gelu("tanh(x) times a symbolic number of rows, which is not GELU", lambda x: torch.tanh(x) * x.shape[0], ("tanh", "mul"), dynamic=True),
    gelu("in bfloat16", lambda x: 0.5 * x * (1.0 + torch.tanh(K * (x + 0.044715 * x**3))), x=WIDE.bfloat16()),
    gelu("in float64", lambda x: 0.5 * x * (1.0 + torch.tanh(K * (x + 0.044715 * x**3))), x=WIDE.double()),
    gelu("in float16", lambda x: 0.5 * x * (1.0 + torch.tanh(K * (x + 0.044715 * x**3))), x=WIDE.half()),
    gelu("of integers, which have no GELU", lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x**3))), None, "dtype", numbers(torch.int32), gradients=False),
    gelu("a sum with alpha", lambda x: 0.5 * x * (1 + torch.tanh(K * torch.add(x, x**3, alpha=0.044715)))),
    gelu("another function, because of alpha", lambda x: 0.5 * x * (1 + torch.tanh(K * torch.add(x, 0.044715 * x**3, alpha=2))), None, "keywords"),
    gelu("of |x| inside, the same for x > 0", lambda x: 0.5 * x * (1 + torch.tanh(K * (x.abs() + 0.044715 * x.abs() ** 3))), None, "false-match"),
    gelu("of |x| outside, the same for x > 0", lambda x: 0.5 * x.abs() * (1 + torch.tanh(K * (x + 0.044715 * x**3))), None, "false-match"),
    gelu("with another constant, 0.04", lambda x: 0.5 * x * (1 + torch.tanh(K * (x + 0.04 * x**3))), None, "false-match"),
    gelu("cut off below 6, 5e-5 away at one point", lambda x: 0.5 * torch.minimum(x, x * 0 + 5.99995) * (1 + torch.tanh(K * (x + 0.044715 * x**3))), None, "false-match", 2 * WIDE),
    gelu("of two tensors", lambda x: 0.5 * x.sin() * (1 + torch.tanh(K * (x + 0.044715 * x**3))), None, "false-match"),
    gelu("x is written to in between", written_inside, None, "across-mutation", gradients=False),
    gelu("the exact form, by erf", lambda x: 0.5 * x * (1 + torch.erf(x * 0.70710678)), None, "exact-gelu"),
)  # fmt: skip


def used_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y + 1.0, y.exp()


def fed_by_a_write(x: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(x)
    return torch.neg(x, out=y).sin(), y


REPLACEMENTS = (
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
    for label, function, name, from_input, after in REPLACEMENTS:
        gm = capture_graph(function, X)
        node = next(n for n in gm.graph.nodes if call_name(n) == name)
        x = next(n for n in gm.graph.nodes if n.op == "placeholder") if from_input else node.args[0]
        example_value = node.meta["example_value"]
        m["replace"](gm, node, torch.cos, x)
        try:
            gm.graph.lint()
        except RuntimeError as error:
            raise Fault("out-of-order", f"{label}: the new node comes after a node that uses it") from error
        remaining = [n for n in gm.graph.nodes if n.op in CALLS]
        new = next((n for n in remaining if n.target is torch.cos), None)
        if new is None or (not new.users):
            raise Fault("not-rewritten", f"{label}: the new node is missing or has no user")
        if new.meta.get("example_value") is not example_value:
            message = "the new node has no example_value, so shape and dtype are lost"
            raise Fault("meta-lost", f"{label}: {message}")
        names = [call_name(n) for n in remaining]
        if names != list(after):
            nodes = f"the graph holds {', '.join(names)}; expected {', '.join(after)}"
            raise Fault("dead-nodes" if len(names) > len(after) else "erased-in-use", f"{label}: {nodes}")


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
            expect(got, None, f"{description}: values(...)", "false-match")
        elif not isinstance(got, Tensor) or got.shape != points.shape or not torch.allclose(got, expected):
            message = " ".join(f"{description}: values(...) is {got!r}, expected {expected!r}".split())
            raise Fault(kind, message[:400])


def check_tanh_form(m: Module) -> None:
    """Check that the tanh form of GELU is inserted, not the exact one."""
    (x,) = GELUS[0].inputs
    got = compile_and_run(run_pass(m["gelu"]), GELUS[0].function, x).double()
    forms = (F.gelu(x.double(), approximate=form) for form in ("tanh", "none"))
    gap, exact_gap = ((got - form).abs().max() for form in forms)
    if exact_gap < gap:
        raise Fault("exact-gelu", f"the exact form is inserted: it differs from the tanh form by {gap:.0e}")
