"""The tests of the layer that compile share its graphs."""

import pytest


@pytest.fixture(autouse=True)
def compiled_together(request):
    """For every test that compiles."""
    if request.node.get_closest_marker("compiler"):
        request.getfixturevalue("layer_graphs")
