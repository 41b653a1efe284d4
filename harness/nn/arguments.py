"""Check arguments, with error messages that begin with the argument's name; list the supported dtypes."""

from typing import Any, TypeVar, cast

import torch

Tensor = torch.Tensor
DTYPE_NAMES = ("float32", "float64", "bfloat16", "float16")
DTYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPE_NAMES}
"""Supported dtype -> name."""


def get_dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def get_accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


TensorTuple = TypeVar("TensorTuple", bound=tuple[Any, ...])


def cast_for_autocast(tensors: TensorTuple) -> TensorTuple:
    """Cast tensors as `torch.autocast` does on the first tensor's device; float64 tensors are not cast."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else ""
    # Autocast is not defined for every device ("meta" raises).
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast_tensor(tensor: Any) -> Any:
        is_cast = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if is_cast else tensor

    return cast(TensorTuple, tuple(map(cast_tensor, tensors)))


def check_qkv(query: Any, key: Any, value: Any) -> None:
    """Raise unless all three are dense tensors of one supported dtype on one device."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        check_dense(name, tensor, query)
    if query.dtype not in DTYPES:
        raise TypeError(f"query: expected {', '.join(DTYPES.values())}, got {get_dtype_name(query.dtype)}")
    for name, tensor in tensors.items():
        if tensor.dtype != query.dtype:
            raise TypeError(
                f"{name}: expected {get_dtype_name(query.dtype)}, as query, got {get_dtype_name(tensor.dtype)}"
            )


def check_dense(name: str, tensor, query, any_device: bool = False) -> None:
    """Raise unless an argument is a dense tensor, on query's device unless `any_device`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        alternative = "`attention_varlen` takes sequences of unequal lengths"
        raise TypeError(f"{name}: expected a dense tensor, got a {kind} one; {alternative}")
    if not any_device and tensor.device != query.device:
        raise ValueError(f"{name}: expected it on {query.device}, as query, got {tensor.device}")


def check_scale(scale: object) -> None:
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless an argument is a bool; `"no"` would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
