"""The public ops of the puzzles' packages as MAX's own PyTorch binding calls them, their graphs compiled as one unit.

The binding makes a graph for each op, parameters and shapes and compiles each alone, though nearly all of the time of a
compile goes into the unit. Here it makes its graphs as ever; only the compile waits until all of them are there.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from harness.toolchain.packages import OpPackage
from harness.toolchain.roots import op_package, solutions


def calls_of_p20(ops: Any) -> None:
    """Rows of 9, and the bits of 45 elements."""
    import torch

    x, mask = torch.empty(5, 9), torch.empty(2, dtype=torch.int32)
    ops.relu_mask(x, mask, x)
    ops.relu_mask_backward(x, x, mask)
    ops.softmax(x, x)
    ops.softmax_backward(x, x, x)


def calls_of_p22(ops: Any) -> None:
    """Those of test_public_ops.py."""
    import torch

    x, row, y, column = torch.empty(4, 4, 8), torch.empty(8), torch.empty(4, 4, 16), torch.empty(16)
    weight = torch.empty(16, 8)
    sizes = {"batch_size": 4, "seq_len": 4, "hidden_dim": 8, "output_dim": 16}
    for output_dim in (16, 15):
        parameters = {"algorithm": "fused", **sizes, "output_dim": output_dim}
        ops.layernorm_linear[parameters](y, x, row, row, weight, column)
    for parameters in (sizes, {**sizes, "algorithm": "unfused"}):
        ops.layernorm_linear_backward[parameters](x, row, row, weight, column, y, x, row, row, weight)


def calls_of_p23(ops: Any) -> None:
    """5 queries, 7 keys, heads of 4 elements; and 6 keys, which do not fit the values."""
    import torch

    query, key, few = (torch.empty(2, 3, length, 4) for length in (5, 7, 6))
    ops.attention(query, query, key, key)
    ops.attention(query, query, few, key)
    ops.attention_backward(query, key, key, query, query, key, key)


def calls_of_p24(ops: Any) -> None:
    """12 cells, 5 features."""
    import torch

    x, order = torch.empty(2, 3, 12, 5), torch.empty(12, dtype=torch.int32)
    ops.hilbert_gather(x, x, order)
    ops.hilbert_scatter(x, x, order)


CALLS = {"p20": calls_of_p20, "p22": calls_of_p22, "p23": calls_of_p23, "p24": calls_of_p24}
"""Puzzle -> what calls each of its public ops once, with tensors of the shapes of its tests; nothing is executed. What is called
with others later is compiled then."""


@pytest.fixture(scope="session")
def public_ops_by_puzzle(request) -> dict[str, Any]:
    """Puzzle -> the `CustomOpLibrary` of its solution, of those that the run tests."""
    items = (item for item in request.session.items if "public_ops" in item.fixturenames)
    taken = {item.path.parent.name for item in items}
    return load_public_ops({puzzle: CALLS[puzzle] for puzzle in CALLS if puzzle in taken})


@pytest.fixture(scope="module")
def public_ops(public_ops_by_puzzle, request) -> Any:
    """The `CustomOpLibrary` of the folder's puzzle."""
    return public_ops_by_puzzle[request.path.parent.name]


def load_public_ops(calls: Mapping[str, Callable[[Any], None]]) -> dict[str, Any]:
    """The libraries of the puzzles' packages, no two of which register an op of the same name."""
    from max.engine import InferenceSession
    from max.experimental import torch as binding

    library: Any = binding
    packages: dict[str, OpPackage] = {puzzle: op_package(solutions(), puzzle) for puzzle in calls}
    ops = {puzzle: library.CustomOpLibrary(package.compile()) for puzzle, package in packages.items()}
    unit, graph = Unit(), library.torch.Graph
    library.torch.Graph = unit.graph
    try:
        for puzzle, of_puzzle in ops.items():
            session, of_puzzle._session = of_puzzle._session, unit
            calls[puzzle](of_puzzle)
            of_puzzle._session = session
    finally:
        library.torch.Graph = graph
    paths = [package.compile() for package in packages.values()]
    models = InferenceSession().load_all(unit.last.module, custom_extensions=paths)
    for name, waiting in unit.models.items():
        waiting.execute = models[name].execute
    return ops


class Unit:
    """In the place of a library's session: gathers the graphs that it is to load."""

    def __init__(self):
        self.models: dict[str, Model] = {}
        self.last: Any = None

    def graph(self, name: str, **options):
        """A graph in the module of those before it, under a name of its own."""
        from max.graph import Graph

        module = self.last.module if self.last else None
        self.last = Graph(f"g{len(self.models)}_{name}", module=module, **options)
        return self.last

    def load(self, graph) -> "Model":
        """What stands for the model of a graph."""
        self.models[graph.name] = model = Model()
        return model


class Model:
    """A model that does nothing until it has been compiled."""

    def execute(self, *buffers) -> Any:
        """Nothing."""
