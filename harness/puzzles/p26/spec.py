"""Puzzle 26, a torch.compile backend: rungs and gates. Every rung is a part of it, and all are in Python."""

from harness.spec.puzzle import Demo, Gate, Puzzle
from harness.spec.rungs import Rung

RUNGS = {
    "printer": ("The printer", {
        "rows": "names, shapes and dtypes of a graph",
        "groups": "what one loop could compute",
        "show": "a backend that writes down each graph",
        "history": "graph breaks and recompilations",
    }),
    "fold": ("Folding constants", {
        "factor": "a product with a number, however written",
        "exact": "whether two constants fold, bit for bit",
        "chain": "x * 2.0 * 3.0 becomes x * 6.0",
        "neutral": "x * 1.0 removed where nobody can tell",
        "sweep": "dead code, and no write among it",
    }),
    "match": ("Finding a formula", {
        "replace": "one node instead of another",
        "silu": "sigmoid(x) * x becomes an operator",
        "values": "what a part of a graph computes",
        "gelu": "the tanh form of GELU, however spelled",
    }),
    "compose": ("From passes to a backend", {
        "rewrite": "passes, lint, recompile",
        "backend": "on to Inductor, with mode and options",
        "aot": "the two graphs after AOTAutograd",
    }),
    "swap": ("The real one", {
        "find": "LayerNorm -> Linear in a graph",
        "refuse": "pairs that have to stay",
        "swap": "the operator instead of both",
        "whole": "the backend, with its report",
    }),
}  # fmt: skip
"""Rung (and file name) -> its title, and the subject of each gate."""

PUZZLE = Puzzle(
    name="p26",
    title="A torch.compile backend of your own",
    subject="torch.compile backend",
    gates=tuple(Gate(id, about=about) for _, gates in RUNGS.values() for id, about in gates.items()),
    rungs=tuple(
        Rung(id=id, file=f"{id}.py", gates=tuple(gates), checker=".checker:BackendChecker", title=title)
        for id, (title, gates) in RUNGS.items()
    ),
    every_rung=True,
    demos=(
        Demo("rewrites", "show graphs before and after the solution's rewrites", ".shows:show_rewrites"),
        Demo("symptoms", "show what each wrong backend of the museum is seen by", ".shows:show_symptoms"),
    ),
)
