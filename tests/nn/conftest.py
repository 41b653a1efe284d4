"""The tests of the layer that compile share its graphs; pairs of patch(model) are counted without a kernel."""

import pytest


@pytest.fixture(autouse=True)
def compiled_together(request):
    """For every test that compiles."""
    if request.node.get_closest_marker("compiler"):
        request.getfixturevalue("layer_graphs")


@pytest.fixture
def pairs(monkeypatch):
    """The algorithms of the pairs that were computed, one after the other; no kernel is compiled."""
    from patch_checks import Pair

    from harness.nn import patching

    calls = []

    def compute(*arguments, algorithm, memory):
        calls.append(algorithm)
        return Pair.apply(*arguments)

    monkeypatch.setattr(patching, "fused_layernorm_linear", compute)
    return calls
