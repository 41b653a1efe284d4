"""Puzzle 26, a torch.compile backend: its rungs, each a part of the backend, and their gates."""

from harness.spec.puzzle import Demo, Gate, Puzzle
from harness.spec.rungs import Rung

RUNGS = {
    "printer": ("The printer", {
        "rows": "names, shapes and dtypes of a graph",
        "groups": "operations that one loop could compute",
        "show": "a backend that prints each graph",
        "history": "graph breaks and recompilations",
    }),
    "fold": ("Folding constants", {
        "factor": "a product with a number, in any spelling",
        "exact": "whether two constants fold, bit for bit",
        "chain": "x * 2.0 * 3.0 becomes x * 6.0",
        "neutral": "x * 1.0 removed if it makes no difference",
        "sweep": "dead code removed, except writes",
    }),
    "match": ("Finding a formula", {
        "replace": "one node replaced by another",
        "silu": "sigmoid(x) * x becomes an operator",
        "values": "the values that a part of a graph computes",
        "gelu": "the tanh form of GELU, in any spelling",
    }),
    "compose": ("From passes to a backend", {
        "rewrite": "passes, lint, recompile",
        "backend": "on to Inductor, with mode and options",
        "aot": "the two graphs after AOTAutograd",
    }),
    "swap": ("The real one", {
        "find": "LayerNorm -> Linear in a graph",
        "refuse": "pairs that must not be swapped",
        "swap": "the pair replaced by the operator",
        "whole": "the backend, with its report",
    }),
}  # fmt: skip
"""Rung, which is also its file's name -> its title, and a description of each gate."""

PUZZLE = Puzzle(
    name="p26",
    title="A torch.compile backend of your own",
    subject="torch.compile backend",
    gates=tuple(Gate(id, description=about) for _, gates in RUNGS.values() for id, about in gates.items()),
    rungs=tuple(
        Rung(id=id, file=f"{id}.py", gates=tuple(gates), checker=".checker:BackendChecker", title=title)
        for id, (title, gates) in RUNGS.items()
    ),
    every_rung=True,
    demos=(
        Demo("rewrites", "show graphs before and after the solution's rewrites", ".shows:show_rewrites"),
        Demo("symptoms", "show the message for each wrong backend of the museum", ".shows:show_symptoms"),
    ),
)
