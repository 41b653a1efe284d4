"""Puzzle 26, a torch.compile backend: rungs and gates. Every rung is a part of it, and all are in Python."""

from harness.spec.puzzle import Demo, Gate, Puzzle
from harness.spec.rungs import Rung

CHECKER = "harness.puzzles.p26.checker:BackendChecker"

PRINTER = (
    Gate("rows", about="names, shapes and dtypes of a graph"),
    Gate("groups", about="what one loop could compute"),
    Gate("show", about="a backend that writes down each graph"),
    Gate("history", about="graph breaks and recompilations"),
)
FOLD = (
    Gate("factor", about="a product with a number, however written"),
    Gate("exact", about="whether two constants fold, bit for bit"),
    Gate("chain", about="x * 2.0 * 3.0 becomes x * 6.0"),
    Gate("neutral", about="x * 1.0 removed where nobody can tell"),
    Gate("sweep", about="dead code, and no write among it"),
)
MATCH = (
    Gate("replace", about="one node instead of another"),
    Gate("silu", about="sigmoid(x) * x becomes an operator"),
    Gate("values", about="what a part of a graph computes"),
    Gate("gelu", about="the tanh form of GELU, however spelled"),
)
COMPOSE = (
    Gate("rewrite", about="passes, lint, recompile"),
    Gate("backend", about="on to Inductor, with mode and options"),
    Gate("aot", about="the two graphs after AOTAutograd"),
)
SWAP = (
    Gate("find", about="LayerNorm -> Linear in a graph"),
    Gate("refuse", about="pairs that have to stay"),
    Gate("swap", about="the operator instead of both"),
    Gate("whole", about="the backend, with its report"),
)


def rung(id: str, gates: tuple[Gate, ...], title: str) -> Rung:
    """A rung whose file has its name."""
    return Rung(id=id, file=f"{id}.py", gates=tuple(g.id for g in gates), checker=CHECKER, title=title)


PUZZLE = Puzzle(
    name="p26",
    title="A torch.compile backend of your own",
    subject="torch.compile backend",
    gates=(*PRINTER, *FOLD, *MATCH, *COMPOSE, *SWAP),
    rungs=(
        rung("printer", PRINTER, "The printer"),
        rung("fold", FOLD, "Folding constants"),
        rung("match", MATCH, "Finding a formula"),
        rung("compose", COMPOSE, "From passes to a backend"),
        rung("swap", SWAP, "The real one"),
    ),
    every_rung=True,
    demos=(
        Demo(
            "rewrites",
            "show graphs before and after the solution's rewrites, as text and SVG",
            "harness.puzzles.p26.shows:show_rewrites",
            options=True,
        ),
        Demo(
            "symptoms",
            "show what each wrong backend of the zoo is seen by",
            "harness.puzzles.p26.shows:show_symptoms",
        ),
    ),
)
