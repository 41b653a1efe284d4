"""The poison that output buffers are filled with, so that what a kernel never writes is seen."""

import torch

# Signalling NaNs: all arithmetic makes them quiet, so what still holds one after a run was not even added to.
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
BITS = {
    "float64": torch.int64,
    "float32": torch.int32,
    "float16": torch.int16,
    "bfloat16": torch.int16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.uint8,
}


def poisoned(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """An output buffer filled with the poison of its dtype."""
    return torch.full(shape, POISON[dtype], dtype=BITS[dtype]).view(getattr(torch, dtype))


def unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """True where a tensor on the CPU still holds the poison."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return tensor.view(BITS[dtype]) == POISON[dtype]
