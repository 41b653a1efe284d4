"""What the tests of `harness.nn.attention` share: inputs, and comparisons with PyTorch's own function in float64."""

import torch
import torch.nn.functional as F

from harness.nn import attention

NAMES = ("query", "key", "value")


def inputs(*, B=2, N=2, G=None, S=5, T=7, d=8, dv=None, dtype=torch.float32, seed=0) -> list[torch.Tensor]:
    """query [B, N, S, d], key [B, G, T, d] and value [B, G, T, dv], with means far from 0."""
    generator = torch.Generator("cpu").manual_seed(seed)
    shapes = ((B, N, S, d), (B, G or N, T, d), (B, G or N, T, dv or d))
    drawn = [
        torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") + 0.5 for shape in shapes
    ]
    return [each.to(torch.get_default_device(), dtype) for each in drawn]


def output_and_gradients(function, tensors, grad_out=None, **options) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value, and of a mask that needs one.

    The gradient coming in follows the output where none is given.
    """
    leaves = [tensor.detach().clone().as_subclass(torch.Tensor).requires_grad_() for tensor in tensors]
    mask = options.get("attn_mask")
    if mask is not None and mask.requires_grad:
        leaves.append(mask.detach().clone().requires_grad_())
        options["attn_mask"] = leaves[-1]
    output = function(*leaves[:3], **options)
    if grad_out is None:
        grad_out = 0.5 + torch.linspace(-1, 1, output.numel(), dtype=torch.float64).reshape(output.shape)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_out.to(output))]


def wide(options: dict) -> dict:
    """Options with an additive mask in float64; one of PyTorch's causal ones has no numbers, and stays."""
    mask = options.get("attn_mask")
    if mask is None or type(mask) is not torch.Tensor or not mask.is_floating_point():
        return options
    return options | {"attn_mask": mask.detach().double().requires_grad_(mask.requires_grad)}


def torchs_own(query, key, value, attn_mask=None, **options):
    """Run PyTorch's attention, whose fused kernels refuse a mask that is broadcast along the keys."""
    if type(attn_mask) is torch.Tensor and attn_mask.shape[-1] == 1:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[-2]).contiguous()
    return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)


def assert_as_exact_as_torch(tensors, grad_out=None, **options) -> None:
    """Output and gradients are within four times PyTorch's own error of float64, plus a few units in the last place.

    Of one key the gradients of query and key are differences of equal terms, of the order of 1. Float64 is no more exact
    than the kernel in float64.
    """
    got = output_and_gradients(attention, tensors, grad_out, **options)
    theirs = output_and_gradients(torchs_own, tensors, grad_out, **options)
    wider = [tensor.double() for tensor in tensors]
    exact = output_and_gradients(torchs_own, wider, grad_out, **wide(options))
    assert len(got) == len(theirs) == len(exact)
    dtype = tensors[0].dtype
    floor = (4096 if dtype == torch.float64 else 32) * torch.finfo(dtype).eps
    for name, ours, baseline, truth in zip(("output", *NAMES, "mask"), got, theirs, exact, strict=False):
        assert ours.dtype == dtype and ours.shape == truth.shape, name
        size = max(float(truth.abs().max()) if truth.numel() else 0.0, 0.1)
        apart, allowed = ((t.double() - truth).abs().max() if t.numel() else 0.0 for t in (ours, baseline))
        assert apart <= 4 * allowed + floor * size, f"{name}: {apart} beside {allowed}"


def written_out(query, key, value):
    """Attention from PyTorch's own products, of any leading axes that broadcast."""
    return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) @ value
