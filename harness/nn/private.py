"""Private names of torch, for what no public name says. Every supported torch has them; torch without CUDA lacks some, and calls none."""

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


clear_product_workspaces = of_cuda("_cuda_clearCublasWorkspaces")
transforms_active = private("_C._are_functorch_transforms_active")
# What torch.func's transforms have made of a tensor.
is_wrapped = private("_C._functorch.is_functorch_wrapped_tensor")
is_grad_tracking = private("_C._functorch.is_gradtrackingtensor")
is_batched = private("_C._functorch.is_batchedtensor")
get_unwrapped = private("_C._functorch.get_unwrapped")
