"""Argument checks with messages that begin with the argument's name, and dtypes. Imports torch alone."""

import operator
from typing import Any, TypeVar, cast

import torch

Tensor = torch.Tensor
DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
"""Those that there are kernels for, and their names."""


def plain(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums, statistics, lse and losses."""
    return torch.float64 if dtype == torch.float64 else torch.float32


Tensors = TypeVar("Tensors", bound=tuple[Any, ...])


def in_autocast_dtype(tensors: Tensors) -> Tensors:
    """Cast tensors as `torch.autocast` does on the first one's device; float64 stays, as in PyTorch's layers."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else ""
    # Asked of these two only, because autocast is not defined for every device ("meta" raises).
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def in_dtype(tensor: Any) -> Any:
        narrow = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64
        return tensor.to(dtype) if narrow else tensor

    return cast(Tensors, tuple(map(in_dtype, tensors)))


def check_attended(query: object, key: object, value: object) -> None:
    """Raise unless these are dense tensors of one supported dtype on one device."""
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        check_dense(name, tensor, query)
    assert isinstance(query, Tensor)  # the loop has asked
    if query.dtype not in DTYPES:
        raise TypeError(f"query: expected {', '.join(DTYPES.values())}, got {plain(query.dtype)}")
    for name, tensor in tensors.items():
        check_dtype(name, tensor, "query", query)


def check_tensor(name: str, tensor: object, instead: str) -> None:
    """Raise TypeError unless an argument is a dense tensor; `instead` ends the message for others."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name}: expected a dense tensor, got a {kind} one; {instead}")


def check_dense(name: str, tensor, query, anywhere: bool = False) -> None:
    """Raise unless an argument is a dense tensor on query's device, or `anywhere`."""
    check_tensor(name, tensor, "`attention_varlen` takes sequences of unequal lengths")
    if not anywhere and tensor.device != query.device:
        raise ValueError(f"{name}: expected it on {query.device}, as query, got {tensor.device}")


def check_dtype(name: str, tensor, other: str, like) -> None:
    """Raise TypeError if a tensor has another dtype than the argument `other`."""
    if tensor.dtype != like.dtype:
        raise TypeError(f"{name}: expected {plain(like.dtype)}, as {other}, got {plain(tensor.dtype)}")


def check_scale(scale: object) -> None:
    """Raise TypeError unless the scale is a number or None."""
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale: expected a number or None, got {type(scale).__name__}")


def check_flag(name: str, value: object) -> None:
    """Raise TypeError unless an argument is True or False: `"no"` would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")


def check_whole(name: str, value: object, least: int) -> int:
    """Return an argument as an int; raise TypeError if it is not one (4.0, True), ValueError below `least`."""
    try:
        number = operator.index(None if isinstance(value, bool) else value)  # pyright: ignore[reportArgumentType] (it asks)
    except TypeError as error:
        raise TypeError(f"{name}: expected a whole number, got {value!r}") from error
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number
