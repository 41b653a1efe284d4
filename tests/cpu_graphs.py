"""The graphs for the CPU that several tests share, those of puzzle 22, in one unit.

Nearly all of the time of a compile goes into the unit: alone each graph costs what a dozen cost together. They come from
and go to the workbook's own cache, where the processes that the tests start find them too.
"""

import functools
import itertools
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import pytest

DTYPES = ("float32", "bfloat16", "float16", "float64")


def unbound(op, parameters=()):
    """Make a call of an op with each size a symbol of its own, so that the op itself must compare them; arguments are OP/NAME."""
    from harness.spec.ops import Argument, Call

    symbols = (f"{op.name}_{number}" for number in itertools.count())

    def renamed(arguments):
        return {
            f"{op.name}/{name}": Argument(tuple(next(symbols) for _ in argument.shape), argument.dtype)
            for name, argument in arguments.items()
        }

    return Call(replace(op, writes=renamed(op.writes), reads=renamed(op.reads)), parameters)


def dtype_of(graph: str) -> str:
    """Return the dtype that a graph's name ends in, else float32."""
    last = re.split("[_ ]", graph)[-1]
    return last if last in DTYPES else "float32"


def load_as_one(name: str, package, calls: dict) -> "Units":
    """Compile graphs as one unit, by name, but for those in float16: slow tests alone ask for them, a unit of their own.

    The first process of the run compiles them, the others read them.
    """
    from filelock import FileLock
    from max.driver import CPU

    from harness.devices.graphs import load_each
    from harness.toolchain.cache import cache_folder

    def load(graphs: dict) -> dict:
        with FileLock(cache_folder("tests") / f"{name}.lock"):
            return load_each(package, graphs, {graph: dtype_of(graph) for graph in graphs}, CPU())

    later = {graph: call for graph, call in calls.items() if dtype_of(graph) == "float16"}
    return Units(
        load({graph: call for graph, call in calls.items() if graph not in later}),
        later,
        partial(load, later),
    )


class Units(dict):
    """Graphs by name; those of `later` are loaded, together, when the first of them is asked for."""

    def __init__(self, loaded: dict, later: Collection[str], load: Callable[[], dict]):
        super().__init__(loaded)
        self.later, self.load = later, load

    def __missing__(self, graph: str):
        if graph not in self.later:
            raise KeyError(graph)
        self.update(self.load())
        return self[graph]


@pytest.fixture(scope="session")
def cpu_graphs() -> Callable:
    """Return a function of the graphs of puzzle 22 by name, all but the command line's own, which the README's first command compiles.

    They are named DTYPE (the default variants), unbound, and VARIANT WAY (the benchmark's candidates).
    """
    return functools.cache(load_cpu_graphs)


def load_cpu_graphs():
    """Compile or read the graphs of `cpu_graphs`."""
    from harness.bench import max_graph
    from harness.puzzles.p22.candidates import IN_MAX
    from harness.puzzles.p22.spec import BACKWARD, FORWARD, PUZZLE, ROW_SUMS
    from harness.toolchain.roots import op_package, solutions

    calls = {dtype: PUZZLE.calls_of(PUZZLE.default_variants) for dtype in DTYPES[1:]}
    calls |= max_graph.calls_of(PUZZLE, IN_MAX)
    fused = (("algorithm", "fused"),)
    calls["unbound"] = (unbound(FORWARD, fused), unbound(BACKWARD, fused), unbound(ROW_SUMS))
    return load_as_one("cpu_graphs", op_package(solutions(), "p22"), calls)
