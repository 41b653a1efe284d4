"""The layers that models import, with the workbook's kernels.

`LayerNormLinear(x)` runs these steps for a 16-bit x on a Hopper GPU, where the plan selects this project's GEMM.
Where the plan selects cuBLAS (float32 unless algorithm="pairs"; a transposed weight; some sizes),
`workbook_layernorm_linear_rows` launches only the LayerNorm, and PyTorch's matmul follows. Small sizes run
`launch_forward_small` instead of `launch_forward_hopper`.

| step | file | function |
|---|---|---|
| check the arguments | layers.py | `LayerNormLinear.forward`, `fused_layernorm_linear` |
| build and load the operator, once | host/__init__.py | `load` |
| use the kernels or PyTorch's operations; autograd | host/layernorm_linear.cpp | `call_operator` |
| select the matmuls | kernels/layernorm_linear/plan.mojo | `choose` |
| allocate the output | host/layernorm_linear.cpp | `forward_device` |
| call the Mojo library twice: for the size of the workspace, then to launch | host/host.h | `Library.launch` |
| decode the arguments | kernels/layernorm_linear/library.mojo | `workbook_layernorm_linear_forward` |
| launch the kernels in order | kernels/layernorm_linear/launches.mojo | `launch_forward_hopper` |
| choose the matmul's tiles | kernels/common/gemm_hopper_launches.mojo | `launch_gemm_hopper` |
| launch a kernel on the stream | kernels/common/stream_launcher.mojo | `StreamLauncher.launch` |

The kernels are `layernorm_rows` in kernels/layernorm_linear/forward.mojo and `gemm_hopper_kernel` in
kernels/common/gemm_hopper.mojo.

Attention has attention_layer.py, host/attention.cpp and kernels/attention (selection: choice.mojo);
cross-entropy has cross_entropy.py, host/cross_entropy.cpp and kernels/cross_entropy. Modules are loaded on
first use, so that `import harness.nn` does not import PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# ruff: noqa: F401 (MODULES, for type checkers)
if TYPE_CHECKING:
    from harness.nn.attention_layer import (
        Part,
        attention,
        attention_backward,
        attention_block,
        attention_block_backward,
        attention_delta,
        attention_varlen,
        attention_with_lse,
    )
    from harness.nn.compile.backend import mojo_workbook
    from harness.nn.cross_entropy import LinearCrossEntropy, linear_cross_entropy
    from harness.nn.layers import LayerNormLinear, fused_layernorm_linear
    from harness.nn.replacing import replace
    from harness.nn.ring import ring_attention

MODULES = {
    name: module
    for module, names in {
        "attention_layer": "Part attention attention_backward attention_block attention_block_backward attention_delta "
        "attention_varlen attention_with_lse",
        "compile.backend": "mojo_workbook",
        "cross_entropy": "LinearCrossEntropy linear_cross_entropy",
        "layers": "LayerNormLinear fused_layernorm_linear",
        "replacing": "replace",
        "ring": "ring_attention",
    }.items()
    for name in names.split()
}
__all__ = [*MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name in MODULES:
        return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
