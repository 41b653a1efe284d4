"""Checker of puzzle 20's first rung, which also draws the learner's graph with values and gradients."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from harness.check.compare import format_distinct
from harness.check.python_files import PythonChecker, describe_exception
from harness.check.results import GateResult
from harness.spec.puzzle import Case, Gate

NODES = ("y", "c", "a", "b", "x")
EDGES = ("x->a", "x->b", "a->c", "b->c", "c->y")
CHECKED_POINTS = (2.0, -3.0, 0.0, 0.5)
"""Values of x at which both gates are checked; the first is the default."""
OTHER_EDGES: Mapping[str, float] = dict(zip(EDGES, (2.0, 3.0, 5.0, 7.0, 11.0), strict=True))
"""Edge derivatives of another graph of the same shape, none of them 1."""

KNOWN_MISTAKES = {
    "value-for-derivative": "that is x itself, at every x: the edge carries the derivative of x^2",
    "constant-edge": "that is the same number at every x: the slope of x^2 depends on x",
    "one-path-only": "that is what arrives through b alone: x is used twice, and both parts add up",
    "other-path-only": "that is what arrives through a alone: x is used twice, and both parts add up",
}
"""Known mistake -> its description."""

Numbers = Mapping[str, float]


def compute_expected_edges(v: Numbers) -> dict[str, float]:
    """Return the derivative along every edge of y = (x^2 + 2x) * 3, by central differences."""
    step = 1e-6

    def differentiate(formula, point: float) -> float:
        return (formula(point + step) - formula(point - step)) / (2 * step)

    return {
        "x->a": differentiate(lambda x: x**2, v["x"]),
        "x->b": differentiate(lambda x: 2 * x, v["x"]),
        "a->c": differentiate(lambda a: a + v["b"], v["a"]),
        "b->c": differentiate(lambda b: v["a"] + b, v["b"]),
        "c->y": differentiate(lambda c: c * 3, v["c"]),
    }


def compute_expected_gradients(d: Numbers) -> dict[str, float]:
    """Return y's gradient at every node, by float64 autograd, given the derivatives `d` along the edges."""
    import torch

    leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
    a, b = d["x->a"] * leaf, d["x->b"] * leaf
    c = d["a->c"] * a + d["b->c"] * b
    y = d["c->y"] * c
    gradients = torch.autograd.grad(y, (y, c, a, b, leaf))
    return {name: gradient.item() for name, gradient in zip(NODES, gradients, strict=True)}


def describe_difference(got: object, expected: Numbers, function_name: str) -> str | None:
    """Describe the first wrong number that a function returned; return None if all are correct."""
    if not isinstance(got, Mapping):
        return f"{function_name} returns {type(got).__name__}, expected a dict of numbers"
    if missing := [name for name in expected if name not in got]:
        return f"{function_name} has no {missing[0]!r}"
    if extra := [name for name in got if name not in expected]:
        return f"{function_name} has an entry {extra[0]!r}, which is not in the graph"
    for name, number in expected.items():
        value = got[name]
        if not isinstance(value, int | float | np.number):
            return f"{function_name}: {name} is {type(value).__name__}, expected a number"
        if not math.isclose(value, number, rel_tol=1e-6, abs_tol=1e-6):
            got_digits, expected_digits = format_distinct(float(value), round(number, 6), 6)
            return f"{function_name}: {name} is {got_digits}, expected {expected_digits}"
    return None


class GraphChecker(PythonChecker):
    """Checks both functions of the file, each with correct inputs."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        result = self._check_file(gate, module, path)
        if gate.id == "backward":
            result.picture = draw_learner_graph(module)
        return result

    def _check_file(self, gate: Gate, module: dict, path: Path) -> GateResult:
        for x in (*CHECKED_POINTS, None) if gate.id == "backward" else CHECKED_POINTS:
            try:
                line = self._describe_error_at(gate.id, module, x)
            except Exception as error:  # an exception in the learner's code is a result
                line = describe_exception(error, path)
            if line and x is None:
                arguments = ", ".join(f"{edge} {number:g}" for edge, number in OTHER_EDGES.items())
                return self.make_wrong_result(gate, [f"along other edges ({arguments}): {line}"])
            if line:
                known = find_known_mistake(gate.id, module)
                lines = [f"at x = {x:g}: {line}", *([KNOWN_MISTAKES[known]] if known else [])]
                return self.make_wrong_result(gate, lines, known)
        return GateResult(
            gate, "correct", summary=f"correct at x = {', '.join(f'{x:g}' for x in CHECKED_POINTS)}"
        )

    def _describe_error_at(self, gate: str, module: dict, x: float | None) -> str | None:
        if gate == "edges":
            values = module["forward"](x)
            return describe_difference(module["edges"](dict(values)), compute_expected_edges(values), "edges")
        d = OTHER_EDGES if x is None else compute_expected_edges(module["forward"](x))
        return describe_difference(module["backward"](dict(d)), compute_expected_gradients(d), "backward")


def find_known_mistake(gate: str, module: dict) -> str | None:
    """Return the id of the known mistake that explains the numbers at all points, or None."""
    try:
        if gate == "edges":
            slopes = [module["edges"](dict(module["forward"](x)))["x->a"] for x in CHECKED_POINTS]
            if np.allclose(slopes, CHECKED_POINTS):
                return "value-for-derivative"
            return "constant-edge" if np.ptp(slopes) == 0 else None
        derivatives = compute_expected_edges(module["forward"](CHECKED_POINTS[0]))
        got = module["backward"](dict(derivatives))["x"]
        for id, node in (("one-path-only", "b"), ("other-path-only", "a")):
            path_gradient = derivatives["c->y"] * derivatives[f"{node}->c"] * derivatives[f"x->{node}"]
            if math.isclose(got, path_gradient, rel_tol=1e-6):
                return id
    except Exception:  # reported by the check
        pass
    return None


def draw_learner_graph(module: dict) -> list[str]:
    """Draw the learner's results at the default x; return [] if a function raises or omits a node."""
    try:
        values = module["forward"](CHECKED_POINTS[0])
        derivatives = module["edges"](dict(values))
        return draw_graph(values, derivatives, module["backward"](dict(derivatives)))
    except Exception:  # reported by the check
        return []


def draw_graph(values: Numbers, derivatives: Numbers, gradients: Numbers) -> list[str]:
    """Draw the graph as lines of text, with values, gradients of y, and edge derivatives."""

    def format_node(name: str, formula: str) -> str:
        return f"{name} = {formula} = {values[name]:g}   gradient {gradients[name]:g}"

    def format_edge(name: str) -> str:
        return f"times {derivatives[name]:g}"

    return [
        format_node("y", "3c"),
        f"└─ {format_edge('c->y')} ─ " + format_node("c", "a + b"),
        f"   ├─ {format_edge('a->c')} ─ " + format_node("a", "x^2"),
        f"   │  └─ {format_edge('x->a')} ─ x   brings {gradients['a'] * derivatives['x->a']:g}",
        f"   └─ {format_edge('b->c')} ─ " + format_node("b", "2x"),
        f"      └─ {format_edge('x->b')} ─ x   brings {gradients['b'] * derivatives['x->b']:g}",
        f"x = {values['x']:g}   gradient {gradients['x']:g}",
    ]
