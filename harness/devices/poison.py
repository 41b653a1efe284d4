"""The poison that output buffers are filled with, to detect elements that a kernel never writes."""

import numpy as np

from harness.spec.rounding import name_of_dtype, stored_dtype

# Signalling NaNs: all arithmetic makes them quiet, so an element that still holds one was not even added to.
# Whole numbers have no such value: theirs is far from every index.
POISON = {
    "float64": 0x7FF0_0000_DEAD_BEEF,
    "float32": 0x7F80_DEAD,
    "float16": 0x7CAD,
    "bfloat16": 0x7FAD,
    "int64": 0x7FF8_0000_DEAD_BEEF,
    "int32": 0x7FC0_DEAD,
    "uint8": 0xAD,
    "bool": 0xAD,
}


def make_poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Make an output buffer filled with the poison of its dtype."""
    kind = stored_dtype(dtype)
    return np.full(shape, POISON[dtype], f"u{kind.itemsize}").view(kind)


def unwritten(array: np.ndarray) -> np.ndarray:
    """True where a stored array still holds the poison."""
    return array.view(f"u{array.itemsize}") == POISON[name_of_dtype(array)]
