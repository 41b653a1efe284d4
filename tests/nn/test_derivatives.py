"""No derivative is silently 0: of the loss, forward mode and torch.func are
refused by the name of the argument, and what is computed without a graph refuses whoever differentiates it.
`ring_attention` is asked in tests/p25/test_ring_attention.py.
"""

import inspect
import re

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from harness.nn import (
    derivatives,
    linear_cross_entropy,
)

X = torch.randn(1, 2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
ROWS = X[..., 0]
CALLS = {
    linear_cross_entropy: (
        "linear_cross_entropy",
        "torch.nn.functional.linear and cross_entropy",
        {"input": X, "weight": X[0, 0], "bias": ROWS[0, 0]},
    ),
}
MORE = {
    linear_cross_entropy: {"target": torch.zeros(1, 2, 6, dtype=torch.int64)},
}
"""What they want beside their floating-point tensors."""
ARGUMENTS = [
    pytest.param(function, name, id=f"{function.__name__}-{name}")
    for function, (*_, given) in CALLS.items()
    for name in given
]


def of_one(function, name):
    """The function of one of its arguments, the others given."""
    given = CALLS[function][-1]

    def call(tensor):
        arguments = {**given, name: tensor, **MORE.get(function, {})}
        names = list(inspect.signature(function).parameters)
        results = function(*(arguments.get(each) for each in names[: max(map(names.index, arguments)) + 1]))
        return results if isinstance(results, torch.Tensor) else results[0]

    return call, given[name]


@pytest.mark.parametrize("function", [linear_cross_entropy])
def test_a_checkpoint_gives_the_same_gradient(function):
    """It hands out what is saved once only: who reads that twice fails."""
    call, x = of_one(function, next(iter(CALLS[function][-1])))
    gradients = []
    for way in (call, lambda x: checkpoint(call, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        way(leaf).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


def made_dual(call, tensor):
    with forward_ad.dual_level():
        return call(forward_ad.make_dual(tensor, torch.ones_like(tensor)))


FORWARD = {
    "dual": made_dual,
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "jacfwd": lambda call, x: torch.func.jacfwd(call)(x),
    "jvp of vmap": lambda call, x: torch.func.jvp(torch.func.vmap(call), (x[None],), (x[None],)),
    "jacobian": lambda call, x: torch.autograd.functional.jacobian(
        call, x, vectorize=True, strategy="forward-mode"
    ),
}
REVERSE = {
    "grad": lambda call, x: torch.func.grad(lambda x: call(x).sum())(x),
    "vjp": lambda call, x: torch.func.vjp(call, x),
    "jacrev": lambda call, x: torch.func.jacrev(call)(x),
    "hessian": lambda call, x: torch.func.hessian(lambda x: call(x).sum())(x),
    "grad of vmap": lambda call, x: torch.func.grad(lambda x: torch.func.vmap(call)(x[None]).sum())(x),
    "vmap of grad": lambda call, x: torch.func.vmap(torch.func.grad(lambda x: call(x).sum()))(x[None]),
}


@pytest.mark.parametrize(("function", "name"), ARGUMENTS)
def test_every_derivative_but_the_first_is_refused(function, name):
    """Of every argument, in one line that begins with its name."""
    call, x = of_one(function, name)
    its_name, instead, _ = CALLS[function]
    for transforms, words in (
        (FORWARD, f"{name}: {its_name} has no forward-mode derivative; use {instead} where one is needed"),
        (
            REVERSE,
            f"{name}: {its_name} has no rule for the gradients of torch.func; use torch.autograd.grad, or {instead}",
        ),
    ):
        for transform in transforms.values():
            with pytest.raises(NotImplementedError) as raised:
                transform(call, x)
            assert str(raised.value) == words


# ---- Without a graph ----------------------------------------------------------------------------------------

CUBES = derivatives.FirstOnly("cubes", "torch.pow")
REFUSED = re.escape(
    "cubes has no double backward: its gradients cannot be differentiated again; use torch.pow where a second derivative "
    "is needed"
)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, exponent):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @CUBES.once
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad, None


@CUBES.once
def cube(x):
    return x**3


def test_a_gradient_that_is_computed_once_is_right():
    x = torch.tensor([2.0], requires_grad=True)
    for create_graph in (False, True):
        (gradient,) = torch.autograd.grad(Cube.apply(x, 3).sum(), x, create_graph=create_graph)
        assert gradient.tolist() == [12.0] and gradient.requires_grad is create_graph
    assert cube(x.detach()).tolist() == [8.0] and not cube(x.detach()).requires_grad
    with torch.no_grad():
        assert not cube(x).requires_grad


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "beside another term"])
def test_who_differentiates_it_is_refused(alone):
    """Autograd goes only where a path leads to what it is asked for: there is one."""
    x = torch.tensor([2.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(Cube.apply(x, 3).sum(), x, create_graph=True)
    for result in (gradient, cube(x)):
        for differentiate in (torch.Tensor.backward, lambda loss: torch.autograd.grad(loss, x)):
            loss = result.sum() if alone else x.square().sum() + result.sum()
            with pytest.raises(NotImplementedError, match=REFUSED):
                differentiate(loss)
