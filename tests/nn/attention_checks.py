"""Helpers for tests of `harness.nn.attention`: inputs, and comparison with PyTorch in float64."""

import torch
import torch.nn.functional as F

from harness.nn import attention

NAMES = ("query", "key", "value")


def make_inputs(
    *, B=2, N=2, G=None, S=5, T=7, d=8, dv=None, dtype=torch.float32, seed=0
) -> list[torch.Tensor]:
    """Return query [B, N, S, d], key [B, G, T, d] and value [B, G, T, dv], with nonzero means."""
    generator = torch.Generator("cpu").manual_seed(seed)
    shapes = ((B, N, S, d), (B, G or N, T, d), (B, G or N, T, dv or d))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64, device="cpu") + 0.5 for s in shapes]
    return [tensor.to(torch.get_default_device(), dtype) for tensor in tensors]


def differentiate(function, tensors, grad_out=None, **options) -> list[torch.Tensor]:
    """Return the output and the gradients of query, key, value, and of a mask that requires one.

    By default the incoming gradient is a ramp along the output.
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


def convert_mask_to_float64(options: dict) -> dict:
    """Return the options with an additive mask converted to float64; keep PyTorch's causal mask."""
    mask = options.get("attn_mask")
    if mask is None or type(mask) is not torch.Tensor or not mask.is_floating_point():
        return options
    return options | {"attn_mask": mask.detach().double().requires_grad_(mask.requires_grad)}


def pytorch_attention(query, key, value, attn_mask=None, **options):
    """Run PyTorch's attention with the mask expanded along the keys, as its fused kernels require."""
    if type(attn_mask) is torch.Tensor and attn_mask.shape[-1] == 1:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-1], key.shape[-2]).contiguous()
    return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)


def assert_as_accurate_as_pytorch(tensors, grad_out=None, **options) -> None:
    """Assert that errors are at most four times PyTorch's, plus a few units in the last place.

    With one key, the gradients of query and key are differences of equal terms of order 1. In float64, the
    reference is not more accurate than the kernel.
    """
    got = differentiate(attention, tensors, grad_out, **options)
    baseline_results = differentiate(pytorch_attention, tensors, grad_out, **options)
    doubles = [tensor.double() for tensor in tensors]
    exact = differentiate(pytorch_attention, doubles, grad_out, **convert_mask_to_float64(options))
    assert len(got) == len(baseline_results) == len(exact)
    dtype = tensors[0].dtype
    floor = (4096 if dtype == torch.float64 else 32) * torch.finfo(dtype).eps
    for name, actual, eager, truth in zip(
        ("output", *NAMES, "mask"), got, baseline_results, exact, strict=False
    ):
        assert actual.dtype == dtype and actual.shape == truth.shape, name
        size = max(float(truth.abs().max()) if truth.numel() else 0.0, 0.1)
        error, torch_error = ((t.double() - truth).abs().max() if t.numel() else 0.0 for t in (actual, eager))
        assert error <= 4 * torch_error + floor * size, f"{name}: error {error}, PyTorch's {torch_error}"


def compute_attention(query, key, value):
    """Return attention computed from its definition; leading dimensions broadcast."""
    return torch.softmax(query @ key.mT / query.shape[-1] ** 0.5, -1) @ value
