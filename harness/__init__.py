"""Run the puzzles, check every gradient, and provide the layer, which imports PyTorch on first use."""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.nn.layers import LayerNormLinear, fused_layernorm_linear

START_TIME = time.time()
"""Start time of the process."""

__all__ = ["LayerNormLinear", "fused_layernorm_linear"]


def __getattr__(name: str):
    if name in __all__:
        from harness.nn import layers

        return getattr(layers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
