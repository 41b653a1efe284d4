"""What a model imports: the layers, made of the workbook's kernels.

Nothing is loaded before it is asked for, so that `import harness.nn` does not import PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.nn.compile.backend import mojo_workbook
    from harness.nn.layers import LayerNormLinear, fused_layernorm_linear
    from harness.nn.patching import patch
    from harness.nn.ring import ring_attention

HOMES = {
    "LayerNormLinear": "harness.nn.layers",
    "fused_layernorm_linear": "harness.nn.layers",
    "mojo_workbook": "harness.nn.compile.backend",
    "patch": "harness.nn.patching",
    "ring_attention": "harness.nn.ring",
}
__all__ = ["LayerNormLinear", "fused_layernorm_linear", "mojo_workbook", "patch", "ring_attention"]


def __getattr__(name: str):
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
