"""What a model imports: the layers, made of the workbook's kernels.

From `LayerNormLinear(H, O)(x)` to the launches on a GPU, ten files in order. A file without a folder is in
this one:

 1  layers.py. fused_layernorm_linear calls layernorm_linear_directly, past PyTorch's dispatcher. At every
    call that looks at the tensors' types and devices, and at PyTorch's modes. checked_plan, cached by shapes
    and dtypes, has the rest checked on meta tensors, and makes the plan. DirectLayerNormLinear.forward takes
    a call that needs a gradient; another goes straight to LayerNormKernels.forward. Where
    layernorm_linear_directly returns None, the operator `layernorm_linear` does it, or says what is wrong.
    check_types runs before that operator, under autocast, in torch.compile and for subclasses of Tensor; not
    in a plain call.
 2  autograd.py. `check` refuses what no way takes, such as parameters of another dtype than x. The operators
    are for compiled models and whoever watches operators. Without the extension module they run a MAX graph
    (on_max.py).
 3  layernorm_plan.py. make_plan: sizes, and who multiplies (`choose`, see below). The constants above Plan,
    and the estimates of time after `choose`, can wait.
 4  layernorm_direct.py. LayerNormKernels.forward takes memory from PyTorch's allocator and calls the
    extension module, which extension_kernels.py opens once on each GPU, and whose functions launch_forward
    and launch_backward are. Where the library multiplies, forward_with_library has the module launch the rows
    alone. `hopper` is whether the module is one for sm_90a. `Way.explain` puts the plan into words.
 5  kernels/layernorm_linear/extension.mojo. `call`, `run` and run_forward: the dtype, and what is launched: small passes
    by kernels/layernorm_linear/small.mojo, float32 by pairs of float16 by pairs.mojo, all else by
    the next.
 6  kernels/layernorm_linear/launches.mojo. launch_forward_fast launches rows, then the product. In 16 bits on a Hopper it
    calls launch_forward_hopper, except for small products of unaligned rows. Else kernels/common/gemm.mojo
    chooses.
 7  kernels/layernorm_linear/forward.mojo. The kernels of LayerNorm's rows: layernorm_rows where a row fits a
    block, layernorm_shared for unaligned rows on a Hopper, layernorm_any for others.
 8  kernels/common/gemm_hopper_launches.mojo. plan_tiles cuts the product into tiles, launch_gemm_hopper
    launches.
 9  kernels/common/gemm_hopper.mojo. The product's kernel.
10  kernels/common/stream_launcher.mojo. StreamLauncher puts each kernel on PyTorch's stream, and takes
    scratch memory out of what Python lends. Its `wgmma` is known when the module is compiled: whether that is
    for sm_90a.

Who multiplies (OWN is this project's kernel, else PyTorch's library; a weight that lies transposed is its):

- float32 and float64: OWN below 3 * 2^27 multiply-adds; in a CUDA graph, or of more than 8192 rows, below
  2^24.
- 16 bits, unaligned rows: OWN below 2^16; from there on a Hopper OWN, or the library on padded copies where
  that is estimated to be faster, elsewhere the library.
- 16 bits, aligned rows: OWN; on a Hopper, above 2^15 (SMALL), who is estimated to be faster, but in plain
  calls OWN as long as its three products are estimated to take less than 350 microseconds (HOST): a loop of
  those waits for the host.
- small.mojo makes all of an OWN forward pass, in one launch, where H <= 256, H * O <= 2^14 and
  rows * H * O <= 2^20. Its backward pass ends at rows * H * O = 2^15 too.

The backward pass takes the same files: DirectLayerNormLinear.backward, LayerNormKernels.backward,
run_backward, and launch_gradients in launches.mojo, for whose rows backward_launches.mojo chooses.

Attention goes the same way through attention_autograd.py, attention_plan.py and attention_direct.py,
cross-entropy through cross_entropy.py and cross_entropy_chunks.py.

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
    from harness.nn.replacing import replace
    from harness.nn.ring import ring_attention
    from harness.nn.varlen import attention_varlen

HOMES = {
    name: module
    for module, names in {
        "attention_autograd": "Part attention attention_backward attention_block attention_block_backward attention_delta "
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
