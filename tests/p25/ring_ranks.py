"""Functions that the ranks in test_ring_attention.py run; this file does not import pytest."""

import torch
import torch.distributed as dist
from typed import as_triple

from harness.nn import ring_attention


def make_tensors(*shape, dtype=torch.float64, requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    shape = shape or (1, 2, 5, 4)
    return as_triple(
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad) for _ in range(3)
    )


def run_model(*arrays):
    """Run a rank's ring attention; return output and gradients."""
    *inputs, grad = (torch.from_numpy(array) for array in arrays)
    leaves = as_triple(leaf.requires_grad_() for leaf in inputs)
    out = ring_attention(*leaves, is_causal=True, scale=0.3)
    gradients = torch.autograd.grad(out, leaves, grad)
    return [tensor.detach().numpy() for tensor in (out, *gradients)]


def compute_gradient_penalty(loss):
    """Return the gradients of a loss that depends on inner gradients and the output."""
    leaves = make_tensors(requires_grad=True)
    out = ring_attention(*leaves)
    inner = torch.autograd.grad(loss(out), leaves, create_graph=True)
    outer = out.sum() + sum(gradient.square().sum() for gradient in inner)
    return torch.autograd.grad(outer, leaves)


def run_penalty(squared):
    """Return a rank's error message for a second derivative, or "silence"."""
    try:
        compute_gradient_penalty(lambda out: out.square().sum() if squared else out.sum())
    except NotImplementedError as error:
        return str(error)
    return "silence"


def run_bad_arguments(kinds):
    """Return a rank's error message for each invalid argument, which rank 1 passes."""
    messages = []
    for kind in kinds:
        query, key, value = make_tensors()
        options = {}
        if dist.get_rank() == 1:
            if kind == "dtype":
                key = key.float()
            elif kind == "requires_grad":
                query.requires_grad_()
            else:
                options = {kind: {"is_causal": True, "scale": 0.5, "balanced": True}[kind]}
        try:
            ring_attention(query, key, value, **options)
            messages.append("silence")
        except (TypeError, ValueError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages
