"""Private names of torch that the layers call for their speed: torch's own compiled graphs allocate and ask with these, in a
fraction of the host time of the public names. Every supported torch has them; torch without CUDA lacks some, and calls none."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch


def private(path: str) -> Callable[..., Any]:
    """What `path` below torch names. Raises ImportError where this torch has no such name."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError as error:
        raise ImportError(f"torch.{path} is missing in torch {torch.__version__}: {error}") from error


def of_cuda(name: str) -> Callable[..., Any]:
    """What a torch with CUDA names so."""
    return getattr(torch._C, name, None)  # pyright: ignore[reportReturnType] (None where there is no GPU to call it for)


empty_strided = private("_C._dynamo.guards._empty_strided_cuda")
current_stream = of_cuda("_cuda_getCurrentRawStream")
current_device = of_cuda("_cuda_getDevice")
clear_product_workspaces = of_cuda("_cuda_clearCublasWorkspaces")
is_capturing = of_cuda("_cuda_isCurrentStreamCapturing")
fp32_precision = private("_C._get_fp32_precision_getter")
any_autocast = private("_C._is_any_autocast_enabled")
dispatch_modes = private("_C._len_torch_dispatch_stack")
transforms_active = private("_C._are_functorch_transforms_active")
# What torch.func's transforms have made of a tensor.
is_wrapped = private("_C._functorch.is_functorch_wrapped_tensor")
is_grad_tracking = private("_C._functorch.is_gradtrackingtensor")
is_batched = private("_C._functorch.is_batchedtensor")
get_unwrapped = private("_C._functorch.get_unwrapped")
