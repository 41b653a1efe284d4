"""Share graphs, a stand-in for the extension module and the first GPU's kernels among the layers' tests."""

import warnings

import pytest
import torch
from direct_module import TorchModule, forget_plans, stand_in

from harness.nn import layernorm_direct, layernorm_plan


@pytest.fixture(autouse=True)
def compiled_together(request):
    """For every test that compiles."""
    if request.node.get_closest_marker("compiles"):
        request.getfixturevalue("layer_graphs")


@pytest.fixture
def module(monkeypatch):
    """The stand-in, which every tensor on the CPU goes to."""
    return stand_in(TorchModule(), monkeypatch)


@pytest.fixture
def no_operator(monkeypatch):
    """The registered forward operator must not be called."""

    def refuse(*arguments):
        raise AssertionError("went through the registered operator")

    monkeypatch.setattr("harness.nn.layers.layernorm_linear", refuse)


@pytest.fixture
def library(module, monkeypatch):
    """Every product of float32 and float64 is torch's own."""
    forget_plans()
    for name in ("LIBRARY_FROM", "LIBRARY_FROM_IN_A_LOOP"):
        monkeypatch.setattr(layernorm_plan, name, 1)
    yield
    forget_plans()


@pytest.fixture
def chosen(module, monkeypatch):
    """Sets the choice of every plan from now on."""

    def choose(output, dln, dW, *, graph=None):
        forget_plans()
        loop = layernorm_plan.Products(output, dln, dW)
        choice = layernorm_plan.Choice(loop, loop if graph is None else layernorm_plan.Products(*graph))
        monkeypatch.setattr(layernorm_plan, "choose", lambda *sizes, **facts: choice)

    yield choose
    forget_plans()


@pytest.fixture(scope="module")
def kernels():
    """The kernels of the first GPU, and no warning on the way to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = layernorm_direct.kernels(torch.device("cuda", 0))
    assert opened is not None
    return opened


@pytest.fixture
def counted(kernels, monkeypatch):
    """How often the module was called to launch a whole pass, that a graph's kernels may be loaded aside."""
    calls = []
    monkeypatch.setattr(kernels, "is_first", lambda plan, wanted=0: False)
    for name in ("launch_forward", "launch_backward"):
        launch = getattr(kernels, name)

        def spy(*arguments, launch=launch, name=name):
            if arguments[0]:
                calls.append(name)
            return launch(*arguments)

        monkeypatch.setattr(kernels, name, spy)
    return calls
