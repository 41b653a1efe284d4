"""Fill output buffers with poison, to detect elements that a kernel never writes."""

import numpy as np

from harness.spec.rounding import get_dtype_name, get_stored_dtype

# Signaling NaNs: any arithmetic quiets them, so an element that is still poison was never written or updated.
# Integers have no NaN; their poison is far from any valid index.
POISON = {"float64": 0x7FF0_0000_DEAD_BEEF, "float32": 0x7F80_DEAD, "float16": 0x7CAD, "bfloat16": 0x7FAD}
POISON |= {"int64": 0x7FF8_0000_DEAD_BEEF, "int32": 0x7FC0_DEAD, "uint8": 0xAD, "bool": 0xAD}


def make_poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    kind = get_stored_dtype(dtype)
    return np.full(shape, POISON[dtype], f"u{kind.itemsize}").view(kind)


def find_unwritten(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}") == POISON[get_dtype_name(array)]
