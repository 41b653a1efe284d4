"""Values of bfloat16 and float16 as their bits, which the driver of the virtual GPU copies."""

import numpy as np


def encode(array, dtype):
    """The bits of values in a dtype; NumPy has no bfloat16, whose bits are the upper half of a float32's."""
    if dtype == "float16":
        return array.astype(np.float16).view(np.uint16)
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def decode(bits, dtype):
    """The values of such bits, in float64."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
