"""Puzzle 26, first rung: a backend that prints its graphs, and changes nothing.

`torch.compile(model, backend=Printer())` calls the printer once for each graph that Dynamo captures. A backend gets
the graph (`gm.graph.nodes`, in execution order) and example inputs, and returns its replacement: a function of the same
inputs that returns a tuple. `workbook p26 --rung printer` checks the four parts.
"""

from torch._guards import CompileContext

from harness.puzzles.p26.nodes import CALLS, call_name, is_tensor, pointwise, shape, value


def rows(gm):
    """Return [(operation, shape, dtype)] of every call in a graph, such as ("mul", (2, 3), "float32"), in order.

    For a result that is not a tensor, the shape is None and the dtype is the name of its type: ("size", None, "int").
    """
    # BLANK-START rows: one triple per node that computes something; its fake result is in node.meta["example_value"]
    found = []
    for node in gm.graph.nodes:
        if node.op not in CALLS:
            continue
        if is_tensor(node):
            found.append((call_name(node), shape(node), str(value(node).dtype).removeprefix("torch.")))
        else:
            found.append((call_name(node), None, type(node.meta.get("example_value")).__name__))
    return found
    # BLANK-END rows


def groups(gm):
    """Return the groups of nodes that a compiler could fuse into one loop: lists of two or more nodes.

    Pointwise nodes that use each other's results are in one group, unless a path between them contains a node that is
    not pointwise. So every node has a stage: the number of non-pointwise nodes that must run before it. All nodes of a
    group have the same stage.
    """
    # BLANK-START groups: give every node its stage, then join each pointwise node to its inputs of the same stage
    stage = {}
    found = []
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        stage[node] = max((stage[n] + (n.op in CALLS and not pointwise(n)) for n in inputs), default=0)
        if not pointwise(node):
            continue
        feeding = {n for n in inputs if pointwise(n) and stage[n] == stage[node]}
        joined = [group for group in found if feeding & set(group)]
        found = [group for group in found if group not in joined]
        found.append([n for group in joined for n in group] + [node])
    return [group for group in found if len(group) > 1]
    # BLANK-END groups


def eager(gm, example_inputs):
    """Return the graph as a function that returns a tuple, without compiling it."""
    return gm.forward


class Printer:
    """A backend that prints every graph and passes it to its tail.

    Attributes:
        ids: (frame, compilation) of every graph, in order of compilation; see `history`.
    """

    def __init__(self, write=print, tail=eager):
        self.write = write
        self.tail = tail
        self.ids = []

    def __call__(self, gm, example_inputs):
        """Print "Graph 0/0: N ops, M fusable groups" and a line for each operation."""
        # BLANK-START show: note the id, write the head and the rows, and return what the tail makes of the graph
        id = CompileContext.current_compile_id()
        self.ids.append((id.frame_id, id.frame_compile_id))
        table = rows(gm)
        self.write(f"Graph {id}: {len(table)} ops, {len(groups(gm))} fusable groups")
        for name, size, dtype in table:
            self.write(f"    {name:<16} {size or ''} {dtype}")
        return self.tail(gm, example_inputs)
        # BLANK-END show


def history(ids):
    """Return (graph breaks, recompilations) of one function, from the ids of its graphs.

    An id is (frame, compilation). A break splits a function into frames with different numbers. A recompilation
    has the same frame and a larger second number. One compilation may call the backend twice.
    """
    # BLANK-START history: frames are counted once, and so is each id
    frames = {frame for frame, _ in ids}
    return max(0, len(frames) - 1), len(set(ids)) - len(frames)
    # BLANK-END history
