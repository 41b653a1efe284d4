"""Provide the CPU graphs of puzzle 22 that several tests share, compiled as one unit.

Compiling a dozen graphs together takes little longer than compiling one. They are stored in the workbook's
cache, which processes started by the tests also use.
"""

import functools
import itertools
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import pytest

DTYPES = ("float32", "bfloat16", "float16", "float64")


def make_unbound_call(op, parameters=()):
    """Return a call with a new symbol for each size, so that the op compares sizes; arguments are OP/NAME."""
    from harness.spec.ops import Argument, Call

    symbols = (f"{op.name}_{number}" for number in itertools.count())

    def rename(arguments):
        return {
            f"{op.name}/{name}": Argument(tuple(next(symbols) for _ in argument.shape), argument.dtype)
            for name, argument in arguments.items()
        }

    return Call(replace(op, writes=rename(op.writes), reads=rename(op.reads)), parameters)


def get_dtype(graph: str) -> str:
    """Return the dtype at the end of a graph's name, or float32."""
    last = re.split("[_ ]", graph)[-1]
    return last if last in DTYPES else "float32"


def load_in_one_unit(name: str, package, calls: dict) -> "Units":
    """Compile the graphs `calls` as one unit, and the float16 ones, which only slow tests use, as a second
    one on demand.

    The first process of the run compiles them, the others load them.
    """
    from filelock import FileLock
    from max.driver import CPU

    from harness.devices.graphs import load_graphs
    from harness.toolchain.cache import get_cache_folder

    def load(graphs: dict) -> dict:
        with FileLock(get_cache_folder("tests") / f"{name}.lock"):
            return load_graphs(package, graphs, {graph: get_dtype(graph) for graph in graphs}, CPU())

    later = {graph: call for graph, call in calls.items() if get_dtype(graph) == "float16"}
    return Units(
        load({graph: call for graph, call in calls.items() if graph not in later}),
        later,
        partial(load, later),
    )


class Units(dict):
    """Graphs by name; those in `later` are loaded together on first use of any of them."""

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
    """Return a function that maps names to puzzle 22's graphs.

    The names are dtypes, for the default variants (those of the command line in float32), "unbound", and the
    benchmark's candidates.
    """
    return functools.cache(load_cpu_graphs)


def load_cpu_graphs():
    """Compile or load the graphs of `cpu_graphs`."""
    from harness.bench import max_graph
    from harness.puzzles.p22.candidates import MAX_VARIANTS
    from harness.puzzles.p22.spec import BACKWARD, FORWARD, PUZZLE, ROW_SUMS
    from harness.toolchain.roots import get_solutions, make_op_package

    default = PUZZLE.list_calls(PUZZLE.list_compiled_variants(PUZZLE.default_variants))
    calls = dict.fromkeys(DTYPES, default)
    calls |= max_graph.list_calls(PUZZLE, MAX_VARIANTS)
    fused = (("algorithm", "fused"),)
    calls["unbound"] = (
        make_unbound_call(FORWARD, fused),
        make_unbound_call(BACKWARD, fused),
        make_unbound_call(ROW_SUMS),
    )
    return load_in_one_unit("cpu_graphs", make_op_package(get_solutions(), "p22"), calls)
