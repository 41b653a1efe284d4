"""Compute a candidate's errors against float64, and measure its memory."""

import gc
from collections.abc import Callable, Mapping

import torch

from harness.bench.benchmark import Call
from harness.check.compare import FLOOR
from harness.check.gradients import record_saved_tensors
from harness.nn.arguments import get_dtype_name

Tensor = torch.Tensor
Errors = dict[str, tuple[float, float]]


# ---- Correctness -------------------------------------------------------------------------------------------


def compute_errors(results: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Errors:
    """Return each quantity's relative Frobenius error, and maximum error relative to the maximum value."""
    by_quantity = {}
    for name, result in results.items():
        difference = result.double() - truth[name]
        norms = ((difference.norm(), truth[name].norm()), (difference.abs().max(), truth[name].abs().max()))
        by_quantity[name] = tuple(
            (numerator / denominator if denominator else numerator).item() for numerator, denominator in norms
        )
    return by_quantity


def describe_large_errors(errors: Errors, baseline: Errors, dtype: torch.dtype) -> list[str]:
    """Return a sentence for each error of a candidate that is too large.

    An error may be up to twice PyTorch's in the same dtype, plus the FLOOR shared by all checks.
    """
    floor = FLOOR[get_dtype_name(dtype)]
    return [
        f"{name} is off by {error:.1e} of its {kind}, PyTorch by {pytorch_error:.1e}"
        for name, pair in errors.items()
        for kind, error, pytorch_error in zip(("norm", "largest value"), pair, baseline[name], strict=True)
        if not error <= 2 * pytorch_error + floor
    ]


# ---- Memory ------------------------------------------------------------------------------------------------


def measure_saved_bytes(forward: Call, parameters: tuple[Tensor, ...]) -> int:
    """Return the bytes that autograd saves for the backward pass, except parameters and the output."""
    (output, *_), saved_tensors = record_saved_tensors(forward)
    excluded = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, output)}
    storages = (tensor.untyped_storage() for tensor in saved_tensors)
    return sum(storage.nbytes() for storage in storages if storage.data_ptr() not in excluded)


def measure_peak_bytes(call: Callable[[], object]) -> int:
    """Return a call's peak CUDA memory above the amount allocated before it."""
    torch.cuda.synchronize()
    gc.collect()  # frees memory of earlier calls now, not during the measurement
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - allocated
