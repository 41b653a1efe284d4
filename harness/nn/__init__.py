"""What a model imports: the layers, made of the workbook's kernels.

From `LayerNormLinear(H, O)(x)` to the launch:

    layers.py    fused_layernorm_linear: checks of types, autocast's dtype; then layernorm_linear_directly, past PyTorch's
                 dispatcher. Where somebody watches operators, or there is no module, the operator `layernorm_linear` of
                 autograd.py instead; its `check` refuses what no way takes, such as parameters of another dtype than x
    layernorm_plan.py  make_plan, for both: sizes, and who multiplies (`choose`)
    layernorm_direct.py  LayerNormKernels.forward: memory, from PyTorch's allocator, and the call of the extension module, which
                 extension_kernels.py opens. Where the library multiplies, the module launches the rows alone. `Way.explain`
                 puts the plan into words
    solutions/p22/extension.mojo  the dtype, and what is launched: small.mojo, op/fast_pairs.mojo or op/fast.mojo
    op/fast.mojo  launch_forward_fast: rows (fast_forward.mojo chooses their kernel), then the product: for 16 bits on a Hopper
                 where wgmma pays op/shared/gemm_hopper_launches.mojo, which cuts it into tiles, otherwise gemm.mojo.
                 stream_launcher.mojo puts each kernel on PyTorch's stream, and takes scratch memory out of what Python has lent

The backward pass takes the same files: DirectLayerNormLinear.backward, LayerNormKernels.backward, and launch_gradients in
op/fast.mojo, for whose rows fast_backward_launches.mojo chooses.

Without a module the operator goes through a MAX graph (on_max.py). Attention goes the same way through attention_autograd.py,
attention_plan.py and attention_direct.py, cross-entropy through cross_entropy.py and cross_entropy_chunks.py.

Nothing is loaded before it is asked for, so that `import harness.nn` does not import PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

# ruff: noqa: F401 (what type checkers see in the place of HOMES)
if TYPE_CHECKING:
    from harness.nn.attention_autograd import (
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
    from harness.nn.orders import hilbert_order
    from harness.nn.patching import patch
    from harness.nn.ring import ring_attention
    from harness.nn.varlen import attention_varlen
    from harness.nn.window import GridWindow, window_attention

HOMES = {
    name: module
    for module, names in {
        "attention_autograd": "Part attention attention_backward attention_block attention_block_backward attention_delta "
        "attention_with_lse",
        "compile.backend": "mojo_workbook",
        "cross_entropy": "LinearCrossEntropy linear_cross_entropy",
        "layers": "LayerNormLinear fused_layernorm_linear",
        "orders": "hilbert_order",
        "patching": "patch",
        "ring": "ring_attention",
        "varlen": "attention_varlen",
        "window": "GridWindow window_attention",
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
