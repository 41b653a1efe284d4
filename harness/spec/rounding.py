"""Round float64 arrays to narrower types, including bfloat16, and convert arrays as devices store them."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""NumPy has no bfloat16: a stored array is a record array of the bits, so that arithmetic on it fails."""


def round_to_dtype(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return the nearest values that `dtype` can represent, in float64, with the same strides."""
    if dtype == "float64":
        return array
    if array.size and 0 in array.strides:  # a conversion would materialise the repeated elements
        base = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
        return np.broadcast_to(round_to_dtype(base.copy(), dtype), array.shape)
    if dtype == "bfloat16":
        bits = np.asarray(array, np.float32).view(np.uint32)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
        return (nearest & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return array.astype(dtype).astype(np.float64)


def get_stored_dtype(dtype: str) -> np.dtype:
    return BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)


def get_dtype_name(array: np.ndarray) -> str:
    return array.dtype.names[0] if array.dtype.names else array.dtype.name


def convert_to_stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return a contiguous copy in the form that a device stores, rounded to nearest."""
    with np.errstate(over="ignore"):  # overflow to infinity is intended
        if dtype != "bfloat16":
            return array.astype(dtype, order="C")
        bits = round_to_dtype(array, dtype).astype(np.float32, order="C").view(np.uint32)
        return (bits >> 16).astype(np.uint16).view(BFLOAT16)


def to_float64(array: np.ndarray) -> np.ndarray:
    if array.dtype == BFLOAT16:
        array = (array["bfloat16"].astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # for a signalling NaN, such as the poison
        return array.astype(np.float64)


def as_tensor(array: np.ndarray) -> "torch.Tensor":
    """Return a torch tensor that shares a stored array's memory."""
    import torch

    if array.dtype == BFLOAT16:
        return torch.as_tensor(array["bfloat16"]).view(torch.bfloat16)
    return torch.as_tensor(array)


def as_array(tensor: "torch.Tensor") -> np.ndarray:
    """Return a stored array that shares the memory of a torch tensor on the CPU."""
    import torch

    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(BFLOAT16)
    return tensor.numpy()
