"""Check a candidate: the errors of its results against float64, and the memory it holds."""

import gc
from collections.abc import Callable, Mapping

import torch

from harness.bench.benchmark import Call
from harness.check.compare import FLOOR
from harness.check.gradients import saved_by_autograd
from harness.nn.arguments import plain

Tensor = torch.Tensor
Errors = dict[str, tuple[float, float]]


# ---- Right or wrong -----------------------------------------------------------------------------------------


def errors(results: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Errors:
    """Return the relative Frobenius error of each quantity, and its largest error over its largest value."""
    by_quantity = {}
    for name, result in results.items():
        difference = result.double() - truth[name]
        norms = ((difference.norm(), truth[name].norm()), (difference.abs().max(), truth[name].abs().max()))
        by_quantity[name] = tuple((top / bottom if bottom else top).item() for top, bottom in norms)
    return by_quantity


def wrong(measured: Errors, baseline: Errors, dtype: torch.dtype) -> list[str]:
    """Return a sentence for each quantity of a candidate whose error is too large.

    Either error may be twice PyTorch's own in the same dtype, plus the floor that every check of the workbook has.
    """
    floor = FLOOR[plain(dtype)]
    return [
        f"{name} is off by {error:.1e} of its {kind}, PyTorch by {own:.1e}"
        for name, pair in measured.items()
        for kind, error, own in zip(("norm", "largest value"), pair, baseline[name], strict=True)
        if not error <= 2 * own + floor
    ]


# ---- Memory -------------------------------------------------------------------------------------------------


def saved_bytes(forward: Call, parameters: tuple[Tensor, ...]) -> int:
    """Return the bytes that autograd keeps between forward and backward, each storage once, without parameters and output."""
    (output, *_), saved = saved_by_autograd(forward)
    left_out = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, output)}
    memory = (tensor.untyped_storage() for tensor in saved)
    return sum(each.nbytes() for each in memory if each.data_ptr() not in left_out)


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak memory of a call, in addition to the memory in use before. CUDA only."""
    torch.cuda.synchronize()
    gc.collect()  # memory of an earlier call must not be freed while this one is measured
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
