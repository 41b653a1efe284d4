"""PyTorch's worst-case error in puzzle 23, the baseline of the kernels' errors.

dS = P * (dP - delta) is a difference of numbers that may be many times larger, and nearly equal where one key
dominates a row. Then a unit in the last place of delta is a hundred of dS, and its error depends on the
summation order of a few products: in one order PyTorch is accurate to a hundredth of that, in the next not to
twice. So it runs in many orders, and the largest error of each quantity counts: a kernel must not fail for an
error that PyTorch itself makes in another order.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ORDERS = 64
"""Orders of keys and elements in which PyTorch runs."""
SCORES = 2**21
"""Limit of the scores of all orders together: a large case has enough rows for the worst case."""
KEYS_LAST = ("scores", "probabilities", "grad_scores", "grad_probabilities", "grad_mask")
ELEMENTS_LAST = ("output", "grad_query", "grad_key", "grad_value")
KEYS_BEFORE_ELEMENTS = ("grad_key", "grad_value")


def reference(tensors: dict) -> dict:
    """Return PyTorch's results by the op's names, in the dtype and on the device of the tensors.

    For 16-bit types they are computed in float32 from the same inputs and rounded once: PyTorch's CPU kernels
    round in between, an error that could hide a wrong kernel. "fused.grad_query" is PyTorch's from output and
    lse.

    Args:
        tensors: query and grad_output [B, N, S, d], key and value [B, G, T, d], mask [S, T].
    """
    import torch

    key = tensors["key"]
    names = ("query", "key", "value", "mask", "grad_output")
    wide = {name: tensors[name].double() for name in names}
    own = {name: tensors[name] for name in names}
    plain = tuple(torch.arange(size, device=key.device)[None] for size in key.shape[-2:])
    truth = {name: tensor[0] for name, tensor in in_orders(wide, *plain).items()}
    answers = in_orders(own, *orders(tensors))
    product = own["query"].to(accum_of(own)).mT @ own["grad_output"].to(accum_of(own))
    return {
        **{name: worst_answer(answers[name], truth[name]) for name in truth},
        "transposed_product": product,
    }


def orders(tensors: dict) -> "tuple[Tensor, Tensor]":
    """Return orders of the keys [R, T] and of the elements of a head [R, d]: the natural one, then random
    permutations."""
    import torch

    B, N, S, _ = tensors["query"].shape
    T, d = tensors["key"].shape[-2:]
    count = min(ORDERS, max(1, SCORES // max(1, B * N * S * T)))
    generator = torch.Generator().manual_seed(0)

    def some(size: int) -> "Tensor":
        shuffled = torch.rand(count, size, generator=generator).argsort(-1)
        shuffled[0] = torch.arange(size)
        return shuffled.to(tensors["key"].device)

    return some(T), some(d)


def in_orders(tensors: dict, by_key: "Tensor", by_element: "Tensor") -> "dict[str, Tensor]":
    """Return PyTorch's results [R, ...] in R orders of the keys and of the elements, restored to the natural
    order."""
    import torch

    R = len(by_key)

    def along(tensor, axis: int, order):
        """Return the tensor [R, ...] with an axis in the order of its R."""
        shape = [1] * tensor.dim()
        shape[0], shape[axis] = order.shape
        return torch.take_along_dim(tensor, order.view(shape), axis)

    moved = {}
    for name, tensor in tensors.items():
        tensor = tensor.expand(R, *tensor.shape)
        if name in ("key", "value"):
            tensor = along(tensor, -2, by_key)
        moved[name] = along(tensor, -1, by_key if name == "mask" else by_element)
    moved["mask"] = moved["mask"][:, None, None]
    answers = {**by_autograd(moved), **recompute(moved)}
    key_back, element_back = by_key.argsort(-1), by_element.argsort(-1)
    for name, tensor in answers.items():
        quantity = name.split(".")[-1]
        if quantity in KEYS_BEFORE_ELEMENTS:
            tensor = along(tensor, -2, key_back)
        if quantity in (*KEYS_LAST, *ELEMENTS_LAST):
            tensor = along(tensor, -1, key_back if quantity in KEYS_LAST else element_back)
        answers[name] = tensor
    return answers


def accum_of(tensors: Mapping):
    """Return the dtype in which PyTorch computes."""
    import torch

    return torch.float64 if tensors["query"].dtype == torch.float64 else torch.float32


def by_autograd(tensors: dict) -> "dict[str, Tensor]":
    """Return autograd's results, from tensors [R, ...] and mask [R, 1, 1, S, T].

    `_safe_softmax` is what scaled_dot_product_attention uses: a fully masked row gives 0.
    """
    import torch

    names = ("query", "key", "value", "mask")
    dtype, accum = tensors["query"].dtype, accum_of(tensors)
    query, key, value, mask = (tensors[name].detach().to(accum).requires_grad_() for name in names)
    grad_output = tensors["grad_output"].to(accum)
    keys, values = (for_each_query_head(tensor, query) for tensor in (key, value))
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    probabilities = torch.ops.aten._safe_softmax(scores + mask, -1)
    output = probabilities @ values
    requested = (query, key, value, mask, scores, probabilities)
    dQ, dK, dV, dM, dS, dP = torch.autograd.grad(output, requested, grad_output)
    wide = {
        "scores": scores,
        "probabilities": probabilities,
        "lse": torch.logsumexp(scores + mask, -1),
        # From the saved output: rounded to 16 bits.
        "delta": (grad_output * output.to(dtype).to(accum)).sum(-1),
        "grad_mask": dM[:, 0, 0],
        "grad_scores": dS,
        "grad_probabilities": dP,
    }
    narrow = {"output": output, "grad_query": dQ, "grad_key": dK, "grad_value": dV}
    return {
        **{name: tensor.detach() for name, tensor in wide.items()},
        **{name: tensor.detach().to(dtype) for name, tensor in narrow.items()},
    }


def for_each_query_head(tensor: "Tensor", query: "Tensor") -> "Tensor":
    """Repeat key or value [R, B, G, T, d] for the heads of the query [R, B, N, S, d]."""
    return tensor.repeat_interleave(query.shape[2] // tensor.shape[2], 2)


def recompute(tensors: dict) -> "dict[str, Tensor]":
    """Return PyTorch's gradients from the output and lse, under "fused."; and under "fast.", with 16-bit
    factors and output, like PyTorch's flash kernels on tensor cores.

    Saved values have a rounding of their own that float64, the truth, does not show: lse of scores in the
    hundreds is off by a unit in its last place, and so is every probability of the row; delta is computed
    from the rounded output.
    """
    import torch

    dtype, accum = tensors["query"].dtype, accum_of(tensors)
    query, key, value, mask, grad_output = (
        tensors[name].to(accum) for name in ("query", "key", "value", "mask", "grad_output")
    )
    shared, each = key.shape[2], query.shape[2] // key.shape[2]
    key, value = (for_each_query_head(tensor, query) for tensor in (key, value))
    scale = query.shape[-1] ** -0.5
    masked = scale * (query @ key.mT) + mask
    output = (torch.ops.aten._safe_softmax(masked, -1) @ value).to(dtype).to(accum)
    lse = torch.logsumexp(masked, -1, keepdim=True)
    P = torch.exp(masked - lse.masked_fill(lse == -torch.inf, 0))
    dS = P * (grad_output @ value.mT - (grad_output * output).sum(-1, keepdim=True))

    def gradients(P, dS) -> "dict[str, Tensor]":
        grads = {
            "grad_query": scale * (dS @ key),
            "grad_key": scale * (dS.mT @ query),
            "grad_value": P.mT @ grad_output,
        }
        for name in ("grad_key", "grad_value"):
            grads[name] = grads[name].unflatten(2, (shared, each)).sum(3)
        return {name: tensor.to(dtype) for name, tensor in grads.items()}

    def narrow(factor):
        return factor.to(dtype).to(accum)

    # The exponentials are rounded before the row's sum divides them.
    largest = masked.amax(-1, keepdim=True)
    weights = torch.exp(masked - largest.masked_fill(largest.isinf(), 0))
    total = weights.sum(-1, keepdim=True)
    rounded_output = narrow(weights) @ value / total.masked_fill(total == 0, 1)
    fast = {"output": rounded_output.to(dtype), **gradients(narrow(P), narrow(dS))}
    return {
        **{f"fused.{name}": tensor for name, tensor in gradients(P, dS).items()},
        **{f"fast.{name}": tensor for name, tensor in fast.items()},
    }


def worst_answer(answers: "Tensor", truth: "Tensor") -> "Tensor":
    """Return the answer of [R, ...] with the largest error, not counting elements that are not finite."""
    import torch

    if not truth.numel():
        return answers[0]
    comparable = truth.isfinite() & answers.isfinite()
    errors = torch.where(comparable, (answers.double() - truth).abs(), 0.0).flatten(1)
    return answers[errors.amax(-1).argmax()]
