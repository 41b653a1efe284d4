"""The last pass over a graph that Inductor compiles: bare operators in the place of those with a backward pass."""

import hashlib
from pathlib import Path

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from harness.nn.operators import bare_of


class Bare(CustomGraphPass):
    """Puts the bare twin of each of this project's operators in its place; AOT autograd has split the passes by then."""

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            node.target = bare_of(node.target)

    def uuid(self) -> str:
        """What Inductor's cache knows this pass by."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
