"""The layer under torch.func's transforms gives what PyTorch's own two layers give, or refuses in its own words."""

import pytest
import torch
from layer_checks import make_inputs, plain_torch

from harness.nn.layers import fused_layernorm_linear

INPUTS = [t.detach() for t in make_inputs(torch.float64)]
ALL = (0, 1, 2, 3, 4)


def losses(function):
    """A scalar of the output, with all five tensors as arguments."""
    return lambda *tensors: function(*tensors).sin().sum()


def both(transform):
    """What a transform makes of the layer, and of PyTorch's own operations."""
    return transform(fused_layernorm_linear), transform(plain_torch)


def assert_same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.compiler
def test_grad_of_every_argument():
    got, expected = both(lambda f: torch.func.grad(losses(f), argnums=ALL)(*INPUTS))
    assert_same(got, expected)


@pytest.mark.compiler
def test_vjp():
    dy = torch.randn(3, 5, 6, dtype=torch.float64)
    got, expected = both(lambda f: torch.func.vjp(f, *INPUTS)[1](dy))
    assert_same(got, expected)


@pytest.mark.compiler
@pytest.mark.parametrize("argument", [0, 3])
def test_jacrev(argument):
    small = [INPUTS[0][:1, :2], *INPUTS[1:]]
    got, expected = both(lambda f: torch.func.jacrev(f, argnums=argument)(*small))
    assert_same(got, expected)


@pytest.mark.compiler
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_over_inputs(axis):
    got, expected = both(
        lambda f: torch.func.vmap(f, in_dims=(axis, None, None, None, None), out_dims=1)(*INPUTS)
    )
    assert_same(got, expected)


@pytest.mark.compiler
def test_vmap_over_parameters():
    """An ensemble: each member has parameters of its own."""
    members = [INPUTS[0], *(torch.stack([t, 2 * t, t - 1]) for t in INPUTS[1:])]
    got, expected = both(lambda f: torch.func.vmap(f, in_dims=(None, 0, 0, 0, 0))(*members))
    assert_same(got, expected)


@pytest.mark.compiler
def test_gradients_of_single_samples():
    got, expected = both(
        lambda f: torch.func.vmap(
            torch.func.grad(losses(f), argnums=ALL), in_dims=(0, None, None, None, None)
        )(*INPUTS)
    )
    assert_same(got, expected)


@pytest.mark.compiler
def test_the_statistics_of_a_vmapped_call_are_read_where_they_lie():
    """Two levels of vmap over inputs, then the gradient: the statistics' axes must follow the batch."""
    x = torch.randn(2, 3, 4, 7, dtype=torch.float64)

    def total(f):
        inner = torch.func.vmap(
            torch.func.vmap(f, in_dims=(0, None, None, None, None)), in_dims=(1, None, None, None, None)
        )
        return lambda x: inner(x, *INPUTS[1:]).sin().sum()

    got, expected = both(lambda f: torch.func.grad(total(f))(x))
    assert_same(got, expected)


@pytest.mark.compiler
def test_a_second_derivative_is_refused_in_the_layers_words():
    def twice(x):
        return torch.func.grad(
            lambda x: torch.func.grad(losses(fused_layernorm_linear))(x, *INPUTS[1:]).sum()
        )(x)

    with pytest.raises(NotImplementedError, match="fused_layernorm_linear has no double backward"):
        twice(INPUTS[0])


def test_forward_mode_is_refused_in_the_layers_words():
    x, gamma, beta, W, b = INPUTS
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(lambda x: fused_layernorm_linear(x, gamma, beta, W, b), (x,), (x,))
