"""Times of attention beside PyTorch's kernels where a call could fall off a cliff: `python -m book.measure attention_options`.

Four batches of 12 heads, 1,024 queries and keys, forward and backward pass, on a GPU. A row for each dtype, head dimension and
option: the median time of one CUDA graph of both passes, in shuffled turns after a pause, and that of the fastest kernel of
PyTorch's `scaled_dot_product_attention` that takes the same call, by name.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from book.measure.shared import capture, medians, write
from harness.nn import attention

BATCHES, HEADS, LENGTH = 4, 12, 1024
DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 72, 128, 160, 256)
OPTIONS = ("none", "causal", "causal, dropout", "padding", "bool S x S", "bias", "bias with gradient")
DROPOUT = 0.1
PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
ROUNDS = 5
Step = Callable[[], object]


def mask_of(option: str, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask of an option: padding hides the last keys of each batch, up to three quarters of them."""
    shape = (BATCHES, 1, LENGTH, LENGTH)
    if option == "padding":
        lengths = torch.linspace(LENGTH // 4, LENGTH, BATCHES, device="cuda").int()
        return (torch.arange(LENGTH, device="cuda") < lengths[:, None])[:, None, None, :]
    if option == "bool S x S":
        return torch.rand(shape, device="cuda") < 0.7
    if option.startswith("bias"):
        bias = torch.randn(1, HEADS, LENGTH, LENGTH, device="cuda", dtype=dtype)
        return bias.requires_grad_(option.endswith("gradient"))
    return None


def both_passes(function: Callable[..., torch.Tensor], leaves, gradient, **options) -> Step:
    """A forward and a backward pass, with the gradient of a mask that needs one."""
    mask = options.get("attn_mask")
    wanted = [*leaves, *([mask] if mask is not None and mask.requires_grad else [])]

    def step():
        return torch.autograd.grad(function(*leaves, **options), wanted, gradient)

    return step


def by_peer(backend: SDPBackend, *arguments, **options) -> torch.Tensor:
    """PyTorch's function by one of its kernels. Raises RuntimeError where that one does not take the call."""
    with sdpa_kernel([backend]):
        return F.scaled_dot_product_attention(*arguments, **options)


def candidates(dtype: torch.dtype, width: int, option: str) -> Iterator[tuple[str, Step]]:
    """The graph of this project's function, "ours", and of each of PyTorch's kernels that takes the call."""
    torch.manual_seed(0)
    leaves = [
        torch.randn(BATCHES, HEADS, LENGTH, width, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    ]
    options = {"attn_mask": mask_of(option, dtype), "is_causal": option.startswith("causal")}
    if option.endswith("dropout"):
        options["dropout_p"] = DROPOUT
    gradient = torch.randn_like(leaves[0])
    yield "ours", capture(both_passes(attention, leaves, gradient, **options))
    for name, backend in PEERS.items():
        try:
            yield name, capture(both_passes(partial(by_peer, backend), leaves, gradient, **options))
        except RuntimeError:
            torch.cuda.synchronize()


def rows() -> Iterator[dict]:
    """A row for each dtype, head dimension and option."""
    for dtype, width, option in itertools.product(DTYPES, WIDTHS, OPTIONS):
        times = medians(dict(candidates(dtype, width, option)), ROUNDS, burst=4_000, pause=0.04)
        ours = times.pop("ours")
        peer = min(times, key=times.__getitem__)
        yield {
            "dtype": str(dtype).removeprefix("torch."), "d": width, "option": option, "ours_ms": f"{ours / 1e3:.4f}",
            "peer": peer, "peer_ms": f"{times[peer] / 1e3:.4f}", "ratio": f"{ours / times[peer]:.2f}",
        }  # fmt: skip


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit(__doc__)
    warnings.simplefilter("ignore")
    write(rows())
