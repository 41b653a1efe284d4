"""The graphs of the layer that its tests use on the CPU, compiled as one unit: alone each costs nearly what all cost."""

import pytest
import torch

KEYS = [(algorithm, torch.float32) for algorithm in ("unfused", "fused", "fast")]
KEYS += [("fast", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)]


@pytest.fixture(scope="session")
def layer_graphs():
    """Puts both passes of every algorithm in float32, and of the fast one in other dtypes, where the layer looks."""
    from max.driver import CPU

    from harness.devices.graphs import load_each
    from harness.nn import autograd
    from harness.nn.ops import BACKWARD, FORWARD
    from harness.spec.ops import Call

    calls, dtypes = {}, {}
    for algorithm, dtype in KEYS:
        for direction, op in (("forward", FORWARD), ("backward", BACKWARD)):
            name = f"{direction}_{algorithm}_{autograd.DTYPES[dtype]}"
            calls[name] = (Call(op, (("algorithm", algorithm),)),)
            dtypes[name] = autograd.DTYPES[dtype]
    loaded = load_each(autograd.package(), calls, dtypes, CPU())
    for algorithm, dtype in KEYS:
        autograd.programs[algorithm, dtype, torch.device("cpu")] = {
            direction: loaded[f"{direction}_{algorithm}_{autograd.DTYPES[dtype]}"]
            for direction in ("forward", "backward")
        }


@pytest.fixture(autouse=True)
def compiled_together(request):
    """For every test that compiles."""
    if request.node.get_closest_marker("compiler"):
        request.getfixturevalue("layer_graphs")
