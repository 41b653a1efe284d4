"""Puzzle 22's public ops through MAX's PyTorch binding, with all graphs compiled as one unit.

The binding makes a graph per op, parameters and shapes, and compiles each separately, although compile time
is nearly all per unit. Here it makes its graphs as usual, but compiles them together once all exist.
"""

from typing import Any

import pytest


def call_public_ops(ops: Any) -> None:
    """Trace each op with the shapes used by its tests and by `in_torch.py`, without executing it."""
    import torch

    row, column, weight = torch.empty(8), torch.empty(16), torch.empty(16, 8)
    fused, unfused, wrong = {"algorithm": "fused"}, {"algorithm": "unfused"}, {"output_dim": 15}
    calls = {
        (4, 4): ((fused, fused | wrong), ({}, unfused)),
        (16, 8): ((fused, unfused), (fused, unfused)),
    }
    for (B, S), (forward, backward) in calls.items():
        x, y = torch.empty(B, S, 8), torch.empty(B, S, 16)
        sizes = {"batch_size": B, "seq_len": S, "hidden_dim": 8, "output_dim": 16}
        for more in forward:
            ops.layernorm_linear[sizes | more](y, x, row, row, weight, column)
        for more in backward:
            ops.layernorm_linear_backward[sizes | more](x, row, row, weight, column, y, x, row, row, weight)


@pytest.fixture(scope="session")
def public_ops(solution) -> Any:
    """The `CustomOpLibrary` of puzzle 22's solution; calls with other shapes compile on demand."""
    from max.engine import InferenceSession
    from max.experimental import torch as binding

    library: Any = binding
    ops = library.CustomOpLibrary(solution.compile())
    session, graph, unit = ops._session, library.torch.Graph, Unit()
    library.torch.Graph, ops._session = unit.graph, unit
    try:
        call_public_ops(ops)
    finally:
        library.torch.Graph, ops._session = graph, session
    models = InferenceSession().load_all(unit.last.module, custom_extensions=[solution.compile()])
    for name, waiting in unit.models.items():
        waiting.execute = models[name].execute
    return ops


class Unit:
    """Stub of a library's session that collects the graphs to compile."""

    def __init__(self):
        self.models: dict[str, Model] = {}
        self.last: Any = None

    def graph(self, name: str, **options):
        """Create a uniquely named graph in the shared module."""
        from max.graph import Graph

        module = self.last.module if self.last else None
        self.last = Graph(f"g{len(self.models)}_{name}", module=module, **options)
        return self.last

    def load(self, graph) -> "Model":
        """Return a placeholder for a graph's model."""
        self.models[graph.name] = model = Model()
        return model


class Model:
    """Placeholder that does nothing until the graphs are compiled."""

    def execute(self, *buffers) -> Any:
        """Do nothing."""
