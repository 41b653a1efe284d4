"""What a model imports: the layers, made of the workbook's kernels.

From `LayerNormLinear(H, O)(x)` to the launches on a GPU, in order; a file without a folder is in this one:

| file | what it does |
|---|---|
| layers.py | the module, and `fused_layernorm_linear`: checks, then one call of the operator, or of PyTorch's own layers |
| host/__init__.py | builds and loads the operator, and the parts of kernels that it asks for |
| host/layernorm_linear.cpp | the operator: whether the kernels fit, autograd, autocast, memory, and PyTorch's products |
| host/host.h | what the operators share: Mojo libraries, launches, streams, memory |
| kernels/layernorm_linear/library.mojo | the C functions that the operator calls, for one part: a dtype |
| kernels/layernorm_linear/plan.mojo | who multiplies: the table that C++, `explain` and the tests ask |
| kernels/layernorm_linear/launches.mojo | what is launched, in which order |
| kernels/layernorm_linear/forward.mojo, backward.mojo | the kernels of rows |
| kernels/common/gemm_hopper_launches.mojo, gemm_hopper.mojo | the products on a Hopper |
| kernels/common/stream_launcher.mojo | puts each kernel on PyTorch's stream |

Elsewhere than on a Hopper, and in float32, the products are PyTorch's, between row kernels of this project's. What the
kernels do not take is PyTorch's own operations: other dtypes and devices, second derivatives, forward mode, torch.func.

Attention is attention_layer.py, host/attention.cpp and kernels/attention/library.mojo; which kernels a call takes
stands in kernels/attention/choice.mojo. Cross-entropy goes through cross_entropy.py and host/cross_entropy.cpp.

Nothing is loaded before it is asked for, so that `import harness.nn` does not import PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# ruff: noqa: F401 (what type checkers see in the place of HOMES)
if TYPE_CHECKING:
    from harness.nn.attention_layer import (
        Part,
        attention,
        attention_backward,
        attention_block,
        attention_block_backward,
        attention_delta,
        attention_with_lse,
    )
    from harness.nn.compile.backend import mojo_workbook
    from harness.nn.cross_entropy import LinearCrossEntropy, linear_cross_entropy
    from harness.nn.layers import LayerNormLinear, fused_layernorm_linear
    from harness.nn.replacing import replace
    from harness.nn.ring import ring_attention
    from harness.nn.varlen import attention_varlen

HOMES = {
    name: module
    for module, names in {
        "attention_layer": "Part attention attention_backward attention_block attention_block_backward attention_delta "
        "attention_with_lse",
        "compile.backend": "mojo_workbook",
        "cross_entropy": "LinearCrossEntropy linear_cross_entropy",
        "layers": "LayerNormLinear fused_layernorm_linear",
        "replacing": "replace",
        "ring": "ring_attention",
        "varlen": "attention_varlen",
    }.items()
    for name in names.split()
}
__all__ = [*HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name in HOMES:
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
