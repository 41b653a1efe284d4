"""The picture of a rewrite: what went, what came, what is next to it, as text and as SVG."""

import re
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn

from harness.nn import mojo_workbook
from harness.nn.compile.picture import Rewrite, Snapshot


def graph_of(function, x):
    kept = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda gm, inputs: kept.append(gm) or gm.forward)(x)
    return kept[0].graph


@pytest.fixture
def rewrite():
    """exp -> sin -> + 1 with sin replaced by cos, far behind it another chain."""
    graph = graph_of(lambda x: (x.exp().sin() + 1.0, x.abs().neg().abs()), torch.randn(2, 3))
    before = Snapshot.of(graph)
    (sine,) = (node for node in graph.nodes if node.target == "sin")
    with graph.inserting_before(sine):
        cosine = graph.call_method("cos", sine.args)
    cosine.meta = dict(sine.meta)
    sine.replace_all_uses_with(cosine)
    graph.erase_node(sine)
    return Rewrite("sin becomes cos", before, Snapshot.of(graph))


@pytest.mark.long
def test_what_went_and_what_came(rewrite):
    assert rewrite.gone == {"sin", "add"} and rewrite.come == {"cos", "add"}
    lines = rewrite.text()
    assert lines[0] == "sin becomes cos"
    assert "   - sin = sin [2, 3] <- exp" in lines and "   + cos = cos [2, 3] <- exp" in lines
    assert "     exp = exp [2, 3] <- x" in lines and "   + add = add(1.0) [2, 3] <- cos" in lines


def test_near_leaves_out_what_is_far_away(rewrite):
    near = rewrite.near()
    assert [line.name for line in near.after.lines] == ["exp", "cos", "add", "output"]
    assert any("neg" in line for line in rewrite.text()) and not any("neg" in line for line in near.text())


def test_the_svg_is_well_formed_and_marks_both(rewrite):
    root = ET.fromstring(rewrite.svg())
    space = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{space}rect")
    assert [("stroke-dasharray" in box.attrib) for box in boxes] == [True] * 2 + [False] * 2
    words = [text.text for text in root.findall(f"{space}text")]
    assert "sin = sin [2, 3]" in words and "cos = cos [2, 3]" in words
    reads = sum(len(line.reads) for s in (rewrite.before, rewrite.after) for line in s.lines)
    assert len(root.findall(f"{space}path")) == reads
    assert "sin becomes cos" in root.attrib["aria-label"]


@pytest.mark.compiler
def test_the_backend_hands_every_swap_to_whoever_asks():
    rewrites = []
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 4))
    torch._dynamo.reset()
    options = {"tail": "eager", "pictures": rewrites.append}
    torch.compile(model, backend=mojo_workbook, options=options)(torch.randn(3, 8))
    assert [rewrite.title for rewrite in rewrites] == [
        "swapped  1: 3 rows, 8 -> 6, float32",
        "swapped  4: 3 rows, 6 -> 4, float32",
    ]
    first, second = ("\n".join(rewrite.text()) for rewrite in rewrites)
    assert re.search(r"- \w+ = layer_norm\(1e-05\) \[3, 8\] <- args.0, \S*0.weight, \S*0.bias", first), first
    assert "layernorm_linear.default" in second and "3.weight" in second and "0.weight" not in second
