"""Private names of torch that the layer calls for their speed, each with a public stand-in for a torch that lacks it.

They come and go between versions; a layer that is slower, or that takes the longer way, is better than an import that
fails. Where no public name says the same, the stand-in gives the careful answer.
"""

from collections.abc import Callable
from functools import reduce

import torch


def private(path: str, stand_in: Callable) -> Callable:
    """What `path` below torch names, or the stand-in where there is no such thing."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return stand_in


def empty_on_gpu(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor on the current GPU."""
    return torch.empty_strided(size, strides, dtype=dtype, device="cuda")


def raw_stream(index: int) -> int:
    """The address of torch's current stream on a GPU."""
    return torch.cuda.current_stream(index).cuda_stream


def product_precision(backend: str, operation: str) -> str:
    """ "tf32" where torch's products of float32 on CUDA may round their operands to TF32."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def capturing() -> bool:
    """Whether torch's current stream captures a CUDA graph."""
    return torch.cuda.is_current_stream_capturing()


def autocast_on() -> bool:
    """Whether `torch.autocast` is on for any device that the layer runs on."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def function_modes() -> bool:
    """Whether a mode sees torch's Python functions, other than the one of the default device."""
    return len_function_modes() > 0 and any(
        type(mode).__module__ != "torch.utils._device" for mode in stack_of_function_modes()
    )


# What torch's own compiled graphs allocate and ask with: a fraction of the host time of the public names.
empty_strided = private("_C._dynamo.guards._empty_strided_cuda", empty_on_gpu)
current_stream = private("_C._cuda_getCurrentRawStream", raw_stream)
current_device = private("_C._cuda_getDevice", torch.cuda.current_device)
clear_product_workspaces = private("_C._cuda_clearCublasWorkspaces", lambda: None)
is_capturing = private("_C._cuda_isCurrentStreamCapturing", capturing)
fp32_precision = private("_C._get_fp32_precision_getter", product_precision)
any_autocast = private("_C._is_any_autocast_enabled", autocast_on)
# Modes and transforms that watch operators: where nobody can say, there may be one.
dispatch_modes = private("_C._len_torch_dispatch_stack", lambda: 1)
transforms_active = private("_C._are_functorch_transforms_active", lambda: True)
# What torch.func's transforms have made of a tensor: where nobody can say, it is taken for a plain one.
is_wrapped = private("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: False)
is_grad_tracking = private("_C._functorch.is_gradtrackingtensor", lambda tensor: False)
is_batched = private("_C._functorch.is_batchedtensor", lambda tensor: False)
get_unwrapped = private("_C._functorch.get_unwrapped", lambda tensor: tensor)
is_tracing = private("_C._is_tracing", lambda: True)
len_function_modes = private("_C._len_torch_function_stack", lambda: 1)
stack_of_function_modes = private("overrides._get_current_function_mode_stack", lambda: [None])
# Of all modules: where nobody can say, there may be one.
hooks_of_all_modules = private("nn.modules.module._has_any_global_hook", lambda: True)
# On what autograd saves, the innermost pair: where nobody can say, it is never the same one.
hooks_on_saved = private("_C._autograd._top_saved_tensors_default_hooks", lambda tracing: object())
