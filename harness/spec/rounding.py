"""Rounding of float64 arrays to narrower types, bfloat16 included, and arrays as devices store them."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""NumPy has no bfloat16: a stored array is one of records with its bits, so that nothing computes with them."""


def round_to_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return the nearest values that `dtype` can represent, in float64, with the same strides."""
    if dtype == "float64":
        return array
    if array.size and 0 in array.strides:  # a conversion would lay the repeated elements out one by one
        base = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
        return np.broadcast_to(round_to_dtype(base.copy(), dtype), array.shape)
    if dtype == "bfloat16":
        bits = np.asarray(array, np.float32).view(np.uint32)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
        return (nearest & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return array.astype(dtype).astype(np.float64)


def stored_dtype(dtype: str) -> np.dtype:
    """Return the NumPy dtype of a stored array."""
    return BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)


def name_of_dtype(array: np.ndarray) -> str:
    """Return the name of a stored array's dtype."""
    return array.dtype.names[0] if array.dtype.names else array.dtype.name


def to_stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """Copy an array to a contiguous one as a device stores it, rounded to nearest."""
    with np.errstate(over="ignore"):  # too large values become infinite
        if dtype != "bfloat16":
            return array.astype(dtype, order="C")
        bits = round_to_dtype(array, dtype).astype(np.float32, order="C").view(np.uint32)
        return (bits >> 16).astype(np.uint16).view(BFLOAT16)


def values(array: np.ndarray) -> np.ndarray:
    """Return the values of a stored array in float64."""
    if array.dtype == BFLOAT16:
        array = (array["bfloat16"].astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # of a signalling NaN, as the poison is
        return array.astype(np.float64)


def as_tensor(array: np.ndarray) -> "torch.Tensor":
    """Return a torch tensor of a stored array; it shares the memory."""
    import torch

    if array.dtype == BFLOAT16:
        return torch.as_tensor(array["bfloat16"]).view(torch.bfloat16)
    return torch.as_tensor(array)


def as_array(tensor: "torch.Tensor") -> np.ndarray:
    """Return a stored array of a torch tensor on the CPU; it shares the memory."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.numpy()
