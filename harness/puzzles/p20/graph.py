"""Checker of puzzle 20's first rung, and the drawing of the learner's graph with values and gradients."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from harness.check.compare import distinct_digits
from harness.check.python_files import PythonChecker, describe
from harness.check.results import GateResult
from harness.spec.puzzle import Case, Gate

NODES = ("y", "c", "a", "b", "x")
EDGES = ("x->a", "x->b", "a->c", "b->c", "c->y")
POINTS = (2.0, -3.0, 0.0, 0.5)
"""The points of both checks; the first is the default."""
STEEP: Mapping[str, float] = dict(zip(EDGES, (2.0, 3.0, 5.0, 7.0, 11.0), strict=True))
"""Derivatives along the edges of another graph of this shape, none of which is 1."""

KNOWN = {
    "value-for-derivative": "that is x itself, at every x: the edge carries the derivative of x^2",
    "constant-edge": "that is the same number at every x: how fast x^2 grows is another question at each x",
    "one-path-only": "that is what arrives through b alone: x is used twice, and both parts add up",
    "other-path-only": "that is what arrives through a alone: x is used twice, and both parts add up",
}
"""Known mistake -> its description."""

Numbers = Mapping[str, float]


def expected_edges(v: Numbers) -> dict[str, float]:
    """Return the derivative along every edge of y = (x^2 + 2x) * 3, by central differences of each node's
    formula."""
    step = 1e-6

    def slope(formula, at: float) -> float:
        return (formula(at + step) - formula(at - step)) / (2 * step)

    return {
        "x->a": slope(lambda x: x**2, v["x"]),
        "x->b": slope(lambda x: 2 * x, v["x"]),
        "a->c": slope(lambda a: a + v["b"], v["a"]),
        "b->c": slope(lambda b: v["a"] + b, v["b"]),
        "c->y": slope(lambda c: c * 3, v["c"]),
    }


def expected_gradients(d: Numbers) -> dict[str, float]:
    """Return the gradient of y at every node, by autograd in float64, with these derivatives along the edges."""
    import torch

    leaf = torch.ones((), dtype=torch.float64, requires_grad=True)
    a, b = d["x->a"] * leaf, d["x->b"] * leaf
    c = d["a->c"] * a + d["b->c"] * b
    y = d["c->y"] * c
    gradients = torch.autograd.grad(y, (y, c, a, b, leaf))
    return {name: gradient.item() for name, gradient in zip(NODES, gradients, strict=True)}


def difference(got: object, expected: Numbers, what: str) -> str | None:
    """Describe the first wrong number; None if all are correct."""
    if not isinstance(got, Mapping):
        return f"{what} returns {type(got).__name__}, expected a dict of numbers"
    if missing := [name for name in expected if name not in got]:
        return f"{what} has no {missing[0]!r}"
    if extra := [name for name in got if name not in expected]:
        return f"{what} has an entry {extra[0]!r}, which is not in the graph"
    for name, number in expected.items():
        value = got[name]
        if not isinstance(value, int | float | np.number):
            return f"{what}: {name} is {type(value).__name__}, expected a number"
        if not math.isclose(value, number, rel_tol=1e-6, abs_tol=1e-6):
            is_now, should_be = distinct_digits(float(value), round(number, 6), 6)
            return f"{what}: {name} is {is_now}, expected {should_be}"
    return None


class GraphChecker(PythonChecker):
    """Checks both functions of the file; each gets correct inputs."""

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        result = self._check_file(gate, module, path)
        if gate.id == "backward":
            result.picture = draw_learner_graph(module)
        return result

    def _check_file(self, gate: Gate, module: dict, path: Path) -> GateResult:
        for x in (*POINTS, None) if gate.id == "backward" else POINTS:
            try:
                line = self._wrong_at(gate.id, module, x)
            except Exception as error:  # an exception of the learner's code is a result
                line = describe(error, path)
            if line and x is None:
                arguments = ", ".join(f"{edge} {number:g}" for edge, number in STEEP.items())
                return self.wrong(gate, [f"along other edges ({arguments}): {line}"])
            if line:
                known = known_mistake(gate.id, module)
                lines = [f"at x = {x:g}: {line}", *([KNOWN[known]] if known else [])]
                return self.wrong(gate, lines, known)
        return GateResult(gate, "correct", summary=f"right at x = {', '.join(f'{x:g}' for x in POINTS)}")

    def _wrong_at(self, gate: str, module: dict, x: float | None) -> str | None:
        if x is None:
            return difference(module["backward"](dict(STEEP)), expected_gradients(STEEP), "backward")
        values = module["forward"](x)
        if gate == "edges":
            return difference(module["edges"](dict(values)), expected_edges(values), "edges")
        d = expected_edges(values)
        return difference(module["backward"](dict(d)), expected_gradients(d), "backward")


def known_mistake(gate: str, module: dict) -> str | None:
    """Return the known mistake that explains the numbers at all points; None without one, or if a function
    raises."""
    try:
        if gate == "edges":
            slopes = [module["edges"](dict(module["forward"](x)))["x->a"] for x in POINTS]
            if np.allclose(slopes, POINTS):
                return "value-for-derivative"
            return "constant-edge" if np.ptp(slopes) == 0 else None
        along = expected_edges(module["forward"](POINTS[0]))
        at_x = module["backward"](dict(along))["x"]
        for id, node in (("one-path-only", "b"), ("other-path-only", "a")):
            if math.isclose(at_x, along["c->y"] * along[f"{node}->c"] * along[f"x->{node}"], rel_tol=1e-6):
                return id
    except Exception:  # the result reports it
        pass
    return None


def draw_learner_graph(module: dict) -> list[str]:
    """Draw the results of the learner's functions at the default x; nothing if one raises or lacks a node."""
    try:
        values = module["forward"](POINTS[0])
        along = module["edges"](dict(values))
        return drawing(values, along, module["backward"](dict(along)))
    except Exception:  # the result reports it
        return []


def drawing(values: Numbers, along: Numbers, gradients: Numbers) -> list[str]:
    """Draw the graph in lines of text: values going up, gradients of y going back, and derivatives along the
    edges."""

    def node(name: str, formula: str) -> str:
        return f"{name} = {formula} = {values[name]:g}   gradient {gradients[name]:g}"

    def edge(name: str) -> str:
        return f"times {along[name]:g}"

    return [
        node("y", "3c"),
        f"└─ {edge('c->y')} ─ " + node("c", "a + b"),
        f"   ├─ {edge('a->c')} ─ " + node("a", "x^2"),
        f"   │  └─ {edge('x->a')} ─ x   brings {gradients['a'] * along['x->a']:g}",
        f"   └─ {edge('b->c')} ─ " + node("b", "2x"),
        f"      └─ {edge('x->b')} ─ x   brings {gradients['b'] * along['x->b']:g}",
        f"x = {values['x']:g}   gradient {gradients['x']:g}",
    ]
