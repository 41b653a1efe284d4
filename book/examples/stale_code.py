"""A graph that is changed without `recompile()`: what the graph says, what its code says, and what the module computes."""

import operator

from torch.fx import GraphModule, symbolic_trace


def say(when: str, gm: GraphModule) -> None:
    """One line: the operation in the graph, the line of generated code, the result at 3."""
    (node,) = [node for node in gm.graph.nodes if node.op == "call_function"]
    line = next(line for line in gm.code.splitlines() if "=" in line).split(";")[0].strip()
    print(f"{when:<17} graph: {node.target.__name__}   code: {line:<11}   f(3) = {gm(3)}")


# ANCHOR: pass
gm = symbolic_trace(lambda x: x * 2)
say("as captured", gm)
for node in gm.graph.nodes:
    if node.target is operator.mul:
        node.target = operator.add
say("graph changed", gm)
gm.recompile()
say("after recompile()", gm)
# ANCHOR_END: pass
