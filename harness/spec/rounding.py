"""Rounding of float64 arrays to what a narrower type holds, bfloat16 included, which NumPy does not know."""

import numpy as np


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest values that `dtype` holds, in float64, with the strides kept."""
    if dtype == "float64":
        return array
    if array.size and 0 in array.strides:  # a conversion would lay the repeated elements out one by one
        base = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
        return np.broadcast_to(rounded(base.copy(), dtype), array.shape)
    if dtype == "bfloat16":
        bits = np.asarray(array, np.float32).view(np.uint32)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)  # to nearest, ties to even
        return (nearest & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    return array.astype(dtype).astype(np.float64)
