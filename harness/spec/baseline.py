"""PyTorch's worst-case error over several summation orders, as a baseline that does not depend on one order.

No result of a row-wise function depends on the order of its columns, but rounding errors do, by a factor of
five if terms cancel. So PyTorch computes each result in ORDERS orders, and the one with the largest error
counts: a kernel is not rejected for an error that PyTorch has in another order.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch takes seconds, and a list of puzzles needs none
    from torch import Tensor

    Tensors = dict[str, Tensor]

ORDERS = 8


def unluckiest(
    by_autograd: "Callable[[Tensors], Tensors]",
    tensors: "Tensors",
    columns: tuple[str, ...],
    back: Collection[str],
    large: bool = False,
) -> "Tensors":
    """Return PyTorch's results by name, each from the order of the columns with the largest error against
    float64.

    The columns are the last axis of the tensors named in `columns`, and of the results named in `back`. One
    order is enough in float64, and for `large` tensors, whose long sums average errors out.
    """
    import torch

    def in_order(tensors: "Tensors", order: "Tensor") -> "Tensors":
        moved = {name: tensors[name].detach()[..., order] for name in columns}
        answer = by_autograd({**tensors, **moved})
        return {name: t[..., order.argsort()] if name in back else t for name, t in answer.items()}

    count = tensors[columns[0]].shape[-1]
    plain = torch.arange(count, device=tensors[columns[0]].device)
    first = in_order(tensors, plain)
    if large or any(t.dtype == torch.float64 for t in tensors.values()):
        return first
    rolled = [torch.roll(plain, k * count // ORDERS) for k in range(0, ORDERS, 2)]
    orders = [order for roll in rolled for order in (roll, roll.flip(0))]
    answers = [first, *(in_order(tensors, order) for order in orders[1:])]
    wide = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
    truth = in_order(wide, plain)

    def error(name: str, answer: "Tensors") -> float:
        finite = truth[name].isfinite() & answer[name].isfinite()
        apart = (answer[name].double() - truth[name]).abs()
        return float(torch.where(finite, apart, 0.0).max()) if apart.numel() else 0.0

    return {name: max(answers, key=partial(error, name))[name] for name in first}
