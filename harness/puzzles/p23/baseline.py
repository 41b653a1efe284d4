"""PyTorch's worst-case error in puzzle 23 over many summation orders, the baseline of the kernels' errors.

If one key dominates a row, dS = P * (dP - delta) is a small difference of large numbers: one ulp of delta is a
hundred ulps of dS, and delta's error depends on its formula and on the order of a few additions.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_ORDERS = 64
"""Maximum number of summation orders in which PyTorch runs."""
MAX_SCORES = 2**21
"""Maximum number of scores in all orders together; a large case needs fewer orders to show the worst error."""
KEYS_LAST = ("scores", "probabilities", "grad_scores", "grad_probabilities", "grad_mask")
HEAD_DIM_LAST = ("output", "grad_query", "grad_key", "grad_value")
KEYS_THEN_HEAD_DIM = ("grad_key", "grad_value")


def reference(tensors: dict) -> dict:
    """Return PyTorch's results by output name, in the tensors' dtype and on their device.

    For 16-bit dtypes, they are computed in float32 and rounded once, since PyTorch's CPU kernels round
    intermediate results. "fused.grad_query" is computed from the output and lse. Shapes: query and grad_output
    [B, N, S, d], key and value [B, G, T, d], mask [S, T].
    """
    import torch

    key = tensors["key"]
    names = ("query", "key", "value", "mask", "grad_output")
    float64_inputs = {name: tensors[name].double() for name in names}
    inputs = {name: tensors[name] for name in names}
    identity_orders = tuple(torch.arange(size, device=key.device)[None] for size in key.shape[-2:])
    truth = {name: tensor[0] for name, tensor in compute_in_orders(float64_inputs, *identity_orders).items()}
    results = compute_in_orders(inputs, *draw_orders(tensors))
    query, grad_output = (inputs[name].to(get_accum_dtype(inputs)) for name in ("query", "grad_output"))
    worst = {name: select_worst(results[name], truth[name]) for name in truth}
    return {**worst, "transposed_product": query.mT @ grad_output}


def draw_orders(tensors: dict) -> "tuple[Tensor, Tensor]":
    """Return R orders of the keys [R, T] and of the head dimension [R, d], all but the first random."""
    import torch

    B, N, S, _ = tensors["query"].shape
    T, d = tensors["key"].shape[-2:]
    num_orders = min(MAX_ORDERS, max(1, MAX_SCORES // max(1, B * N * S * T)))
    generator = torch.Generator().manual_seed(0)

    def draw_permutations(size: int) -> "Tensor":
        permutations = torch.rand(num_orders, size, generator=generator).argsort(-1)
        permutations[0] = torch.arange(size)
        return permutations.to(tensors["key"].device)

    return draw_permutations(T), draw_permutations(d)


def compute_in_orders(tensors: dict, key_order: "Tensor", dim_order: "Tensor") -> "dict[str, Tensor]":
    """Return PyTorch's results [R, ...] of R orders, restored to the original order.

    Quantities with two formulas are [2 R, ...].
    """
    import torch

    R = len(key_order)

    def take_along(tensor, axis: int, order):
        shape = [1] * tensor.dim()
        shape[0], shape[axis] = order.shape
        return torch.take_along_dim(tensor, order.view(shape), axis)

    permuted = {}
    for name, tensor in tensors.items():
        tensor = tensor.expand(R, *tensor.shape)
        if name in ("key", "value"):
            tensor = take_along(tensor, -2, key_order)
        permuted[name] = take_along(tensor, -1, key_order if name == "mask" else dim_order)
    permuted["mask"] = permuted["mask"][:, None, None]
    key_inverse, dim_inverse = key_order.argsort(-1), dim_order.argsort(-1)

    def restore(name: str, tensor: "Tensor") -> "Tensor":
        quantity = name.split(".")[-1]
        if quantity in KEYS_THEN_HEAD_DIM:
            tensor = take_along(tensor, -2, key_inverse)
        if quantity in (*KEYS_LAST, *HEAD_DIM_LAST):
            tensor = take_along(tensor, -1, key_inverse if quantity in KEYS_LAST else dim_inverse)
        return tensor

    results = {**compute_with_autograd(permuted), **recompute_from_saved(permuted)}
    results = {name: restore(name, tensor) for name, tensor in results.items()}
    for name, tensor in compute_from_output(permuted).items():
        results[name] = torch.cat([results[name], restore(name, tensor)])
    return results


def get_accum_dtype(tensors: Mapping):
    import torch

    return torch.float64 if tensors["query"].dtype == torch.float64 else torch.float32


def compute_with_autograd(tensors: dict) -> "dict[str, Tensor]":
    """Return autograd's results, from tensors [R, ...] and mask [R, 1, 1, S, T].

    Like scaled_dot_product_attention, it uses `_safe_softmax`, which returns 0 for a fully masked row.
    """
    import torch

    names = ("query", "key", "value", "mask")
    dtype, accum = tensors["query"].dtype, get_accum_dtype(tensors)
    query, key, value, mask = (tensors[name].detach().to(accum).requires_grad_() for name in names)
    grad_output = tensors["grad_output"].to(accum)
    keys, values = (repeat_for_query_heads(tensor, query) for tensor in (key, value))
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    probabilities = torch.ops.aten._safe_softmax(scores + mask, -1)
    output = probabilities @ values
    grad_inputs = (query, key, value, mask, scores, probabilities)
    dQ, dK, dV, dM, dS, dP = torch.autograd.grad(output, grad_inputs, grad_output)
    accum_results = {
        "scores": scores,
        "probabilities": probabilities,
        "lse": torch.logsumexp(scores + mask, -1),
        # From the saved output, which is rounded to the dtype.
        "delta": (grad_output * output.to(dtype).to(accum)).sum(-1),
        "grad_mask": dM[:, 0, 0],
        "grad_scores": dS,
        "grad_probabilities": dP,
    }
    rounded_results = {"output": output, "grad_query": dQ, "grad_key": dK, "grad_value": dV}
    return {
        **{name: tensor.detach() for name, tensor in accum_results.items()},
        **{name: tensor.detach().to(dtype) for name, tensor in rounded_results.items()},
    }


def compute_from_output(tensors: dict) -> "dict[str, Tensor]":
    """Return PyTorch's gradients with delta computed from the unrounded output instead of the probabilities.

    Both formulas are correct, and in float32 each has rounding errors where the other has none.
    """
    import torch

    names = ("query", "key", "value", "mask", "grad_output")
    dtype, accum = tensors["query"].dtype, get_accum_dtype(tensors)
    query, key, value, mask, grad_output = (tensors[name].to(accum) for name in names)
    keys, values = (repeat_for_query_heads(tensor, query) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5
    P = torch.ops.aten._safe_softmax(scale * (query @ keys.mT) + mask, -1)
    dS = P * (grad_output @ values.mT - (grad_output * (P @ values)).sum(-1, keepdim=True))
    grad_key = (scale * (dS.mT @ query)).unflatten(2, (key.shape[2], -1)).sum(3)
    return {
        "grad_query": (scale * (dS @ keys)).to(dtype),
        "grad_key": grad_key.to(dtype),
        "grad_mask": dS.sum((1, 2)),
    }


def repeat_for_query_heads(tensor: "Tensor", query: "Tensor") -> "Tensor":
    return tensor.repeat_interleave(query.shape[2] // tensor.shape[2], 2)


def recompute_from_saved(tensors: dict) -> "dict[str, Tensor]":
    """Return PyTorch's gradients computed from the saved output and lse, "fused.*", and also with 16-bit factors
    and output, like PyTorch's flash kernels on tensor cores, "fast.*".

    Unlike the float64 reference, saved values are rounded: for scores in the hundreds, lse is off by one ulp,
    which shifts every probability of the row; delta is computed from the rounded output.
    """
    import torch

    names = ("query", "key", "value", "mask", "grad_output")
    dtype, accum = tensors["query"].dtype, get_accum_dtype(tensors)
    query, key, value, mask, grad_output = (tensors[name].to(accum) for name in names)
    key_heads, group = key.shape[2], query.shape[2] // key.shape[2]
    key, value = (repeat_for_query_heads(tensor, query) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5
    masked = scale * (query @ key.mT) + mask
    output = (torch.ops.aten._safe_softmax(masked, -1) @ value).to(dtype).to(accum)
    lse = torch.logsumexp(masked, -1, keepdim=True)
    P = torch.exp(masked - lse.masked_fill(lse == -torch.inf, 0))
    dS = P * (grad_output @ value.mT - (grad_output * output).sum(-1, keepdim=True))

    def compute_gradients(P, dS) -> "dict[str, Tensor]":
        grads = {
            "grad_query": scale * (dS @ key),
            "grad_key": scale * (dS.mT @ query),
            "grad_value": P.mT @ grad_output,
        }
        for name in ("grad_key", "grad_value"):
            grads[name] = grads[name].unflatten(2, (key_heads, group)).sum(3)
        return {name: tensor.to(dtype) for name, tensor in grads.items()}

    def round_factor(factor):
        return factor.to(dtype).to(accum)

    # Tensor cores round the exponentials before the division by the row's sum.
    row_max = masked.amax(-1, keepdim=True)
    weights = torch.exp(masked - row_max.masked_fill(row_max.isinf(), 0))
    total = weights.sum(-1, keepdim=True)
    rounded_output = round_factor(weights) @ value / total.masked_fill(total == 0, 1)
    low_precision = {
        "output": rounded_output.to(dtype),
        **compute_gradients(round_factor(P), round_factor(dS)),
    }
    return {
        **{f"fused.{name}": tensor for name, tensor in compute_gradients(P, dS).items()},
        **{f"fast.{name}": tensor for name, tensor in low_precision.items()},
    }


def select_worst(results: "Tensor", truth: "Tensor") -> "Tensor":
    """Return the result among R results [R, ...] with the largest error in a finite element."""
    import torch

    if not truth.numel():
        return results[0]
    finite = truth.isfinite() & results.isfinite()
    errors = torch.where(finite, (results.double() - truth).abs(), 0.0).flatten(1)
    return results[errors.amax(-1).argmax()]
