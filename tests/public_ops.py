"""A package's public ops as MAX's own PyTorch binding calls them, the graphs of several calls compiled as one unit.

The binding makes a graph for each op, parameters and shapes and compiles each alone, though nearly all of the time of a
compile goes into the unit. Here it makes its graphs as ever; only the compile waits until all of them are there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_public_ops(package: Path, calls: Callable[[Any], None]) -> Any:
    """The `CustomOpLibrary` of a package.

    Args:
        package: The folder of the op package.
        calls: Calls each op once, with tensors of the shapes to come; nothing is executed. What is called with others
            later is compiled then.
    """
    from max.experimental import torch as binding

    library: Any = binding
    ops, unit = library.CustomOpLibrary(package), Unit()
    session, graph = ops._session, library.torch.Graph
    ops._session, library.torch.Graph = unit, unit.graph
    try:
        calls(ops)
    finally:
        ops._session, library.torch.Graph = session, graph
    models = session.load_all(unit.last)
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
