"""The custom ops of puzzle 28, make it fast."""

from .ops import (
    FastDgamma,
    FastDx,
    FastEpilogue,
    FastLayerNorm,
    FastLayouts,
    FastProduct,
)
