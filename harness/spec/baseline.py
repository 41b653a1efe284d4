"""Measure PyTorch's worst error over several summation orders, as a baseline independent of any one order.

Where terms cancel, the order of the columns changes the rounding error up to fivefold: a kernel is not
rejected for an error that PyTorch makes in another order, or by an equivalent formula.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing torch takes seconds, and listing puzzles does not need it
    from torch import Tensor

    Tensors = dict[str, Tensor]

NUM_ORDERS = 8


def sum_sequentially(terms: "Tensor") -> "Tensor":
    """Sum over the last axis one term at a time, the least accurate order; keep the axis."""
    total = terms[..., :1].clone()
    for k in range(1, terms.shape[-1]):
        total += terms[..., k : k + 1]
    return total


def compute_worst_baseline(
    formula: "Callable[[Tensors], Tensors]",
    tensors: "Tensors",
    columns: tuple[str, ...],
    column_results: Collection[str],
    is_large: bool = False,
    other_formulas: "Sequence[Callable[[Tensors], Tensors]]" = (),
) -> "Tensors":
    """Return PyTorch's results by name, each from the column order with the largest error against float64.

    The columns are the last axis of the tensors named in `columns`, and of `column_results`. One order is
    enough in float64, and if `is_large`, because errors average out in long sums. `other_formulas` are
    equivalent formulas for some of the results.
    """
    import torch

    def compute_in_order(
        tensors: "Tensors", order: "Tensor", formula: "Callable[[Tensors], Tensors]" = formula
    ) -> "Tensors":
        reordered = {name: tensors[name].detach()[..., order] for name in columns}
        result = formula({**tensors, **reordered})
        return {name: t[..., order.argsort()] if name in column_results else t for name, t in result.items()}

    count = tensors[columns[0]].shape[-1]
    identity = torch.arange(count, device=tensors[columns[0]].device)
    default_result = compute_in_order(tensors, identity)
    if is_large or any(t.dtype == torch.float64 for t in tensors.values()):
        return default_result
    rolled = [torch.roll(identity, k * count // NUM_ORDERS) for k in range(0, NUM_ORDERS, 2)]
    orders = [order for roll in rolled for order in (roll, roll.flip(0))]
    results = [default_result, *(compute_in_order(tensors, order) for order in orders[1:])]
    results += [compute_in_order(tensors, order, formula) for formula in other_formulas for order in orders]
    float64_tensors = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    truth = compute_in_order(float64_tensors, identity)

    def compute_error(name: str, result: "Tensors") -> float:
        finite = truth[name].isfinite() & result[name].isfinite()
        errors = (result[name].double() - truth[name]).abs()
        return float(torch.where(finite, errors, 0.0).max()) if errors.numel() else 0.0

    return {
        name: max((result for result in results if name in result), key=partial(compute_error, name))[name]
        for name in default_result
    }
