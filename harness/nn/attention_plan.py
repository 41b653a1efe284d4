"""What follows from shapes, strides and options of a call of attention on tensor cores, worked out once, and both passes by it.

A small attention costs its host time: with a plan there is little left to do but to allocate the results.
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch

from harness.nn.extension_kernels import KINDS, OnDevice, contiguous_strides
from harness.nn.private import current_stream, empty_strided

Tensor = torch.Tensor
TENSOR_CORES = (torch.bfloat16, torch.float16)
WIDEST = 256
"""The largest head dimension of the kernels."""
BOX = 64
"""Rows and elements of a row that the kernels with wgmma take at once."""


def dense_strides(size: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Of a result [B, N, S, d] without gaps, in the order of a tensor with other strides: where that has the heads of a row side by
    side, as models split them, the result has them so too, and joining them copies nothing."""
    if strides[1] >= strides[2]:
        return contiguous_strides(size)
    _, N, S, d = size
    return (N * S * d, d, N * d, 1)


def numbers_of_queries(B: int, N: int, S: int) -> int:
    """Bytes of two numbers for each query, in whole boxes."""
    return -(-B * N * 2 * 4 * (-(-S // BOX) * BOX) // 256) * 256


EVERY_KEY = 2**31 - 2**20
"""The diagonal of a query that sees all keys: more than there can be."""
NO_MASK = (0, 0, 0, 0, 0)
LARGEST_CACHE = 4096
"""Plans that are kept."""


def mask_sizes(mask: Tensor | None, mask_block: int) -> tuple[int, ...]:
    """The strides of a mask [B, N, S, T], 0 along an axis of one place, and the side of its blocks."""
    if mask is None:
        return NO_MASK
    pairs = zip(mask.stride(), mask.shape, strict=True)
    return (*(0 if size == 1 else stride for stride, size in pairs), mask_block)


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What follows from shapes, strides and options of a call: the integers that the module takes around the addresses. Of equal calls
    there is one."""

    dtype: torch.dtype
    size: tuple[int, ...]
    """Of the output; it and the gradients lie in the order of query, key and value."""
    strides: tuple[int, ...]
    rows: tuple[int, int, int]
    row_strides: tuple[int, int, int]
    key_size: tuple[int, ...]
    key_strides: tuple[tuple[int, ...], tuple[int, ...]]
    """Of the gradients of key and value."""
    diagonal: int
    scale: float
    mask: tuple[int, ...]
    """What `mask_sizes` says."""
    front: tuple[float, ...]
    """Kind, sizes and scale, as the module takes them."""
    given: tuple[int, ...]
    """The strides of query, key and value,"""
    written: tuple[int, ...]
    """and of the output and the three gradients."""
    scratch: int
    """Bytes that the backward pass may want: delta, and what goes with it on a Hopper."""


@functools.lru_cache(maxsize=LARGEST_CACHE)
def make_plan(
    sizes: tuple[torch.Size, ...],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    diagonal: int,
    scale: float | None,
    enable_gqa: bool,
    choice: int,
    mask: tuple[int, ...] = NO_MASK,
) -> AttentionPlan | None:
    """The plan for query [B, N, S, d] and key and value [B, G, T, d], of each its size, strides and dtype; None for what is not done
    directly.

    `mask` is what `mask_sizes` says of it.
    """
    query, key, value = sizes
    query_strides, key_strides, value_strides = strides
    dtype, *others = dtypes
    if not (
        others == [dtype, dtype]
        and dtype in TENSOR_CORES
        and not torch.version.hip
        and len(query) == 4 == len(key)
        and key == value
    ):
        return None
    if query[3] != 1 and not query_strides[3] == key_strides[3] == value_strides[3] == 1:
        return None
    B, N, S, d = query
    G, T = key[1:3]
    shares = N == G or (enable_gqa and G and N % G == 0)
    if not (shares and (B, d) == (key[0], key[3]) and 0 < d <= WIDEST and B * N * S * T):
        return None
    output_strides = dense_strides(query, query_strides)
    gradient_strides = dense_strides(key, key_strides), dense_strides(key, value_strides)
    factor = d**-0.5 if scale is None else float(scale)
    return AttentionPlan(
        dtype,
        tuple(query),
        output_strides,
        (B, N, S),
        (N * S, S, 1),
        tuple(key),
        gradient_strides,
        diagonal,
        factor,
        mask,
        (KINDS[dtype], choice, B, N, G, S, T, d, diagonal, *mask, factor),
        (*query_strides[:3], *key_strides[:3], *value_strides[:3]),
        (*output_strides[:3], *output_strides[:3], *gradient_strides[0][:3], *gradient_strides[1][:3]),
        numbers_of_queries(B, N, S),
    )


class PlannedKernels(OnDevice):
    """The module of puzzle 23 on one GPU.

    Attributes:
        no_mask: By dtype, what stands for no mask. Made once: a CUDA graph must not own it.
    """

    def __init__(self, module: ModuleType, device: torch.device):
        super().__init__(module, device)
        self.no_mask = {dtype: torch.zeros(1, 1, 1, 1, dtype=dtype, device=device) for dtype in TENSOR_CORES}

    def mask_or_zero(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The mask, or the 0 that stands for none."""
        return self.no_mask[dtype] if mask is None else mask


def lies_as_planned(plan: AttentionPlan, query, key, value, output, lse, mask: Tensor | None) -> bool:
    """Whether what autograd has kept lies as the forward pass had it: a hook on saved tensors, as `save_on_cpu`, may bring it back
    without its gaps or in another order."""
    strides = [tensor.stride() for tensor in (query, key, value)]
    inputs = (*strides[0][:3], *strides[1][:3], *strides[2][:3]) == plan.given
    inputs &= plan.size[3] == 1 or all(stride[3] == 1 for stride in strides)
    results = output.stride() == plan.strides and lse.stride() == plan.row_strides
    return inputs and results and mask_sizes(mask, plan.mask[-1]) == plan.mask


def forward_of(
    plan: AttentionPlan, kernels: PlannedKernels, query, key, value, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output and lse. The GPU is the current one; the tensors lie as planned."""
    output = empty_strided(plan.size, plan.strides, plan.dtype)
    lse = empty_strided(plan.rows, plan.row_strides, torch.float32)
    arguments = (
        *plan.front,
        output.data_ptr(),
        lse.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        kernels.mask_or_zero(mask, plan.dtype).data_ptr(),
        *plan.given,
        *plan.strides[:3],
    )
    kernels.module.forward(kernels.gpu, current_stream(kernels.index), 0, 0, *arguments)
    return output, lse


def backward_of(
    plan: AttentionPlan, kernels: PlannedKernels, grad_out, query, key, value, output, lse, mask
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. The GPU is the current one; all but grad_out lies as planned."""
    if grad_out.stride(3) != 1:
        grad_out = grad_out.contiguous()
    grad_query = empty_strided(plan.size, plan.strides, plan.dtype)
    grad_key, grad_value = (empty_strided(plan.key_size, strides, plan.dtype) for strides in plan.key_strides)
    arguments = (
        *plan.front,
        grad_query.data_ptr(),
        grad_key.data_ptr(),
        grad_value.data_ptr(),
        grad_out.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        output.data_ptr(),
        lse.data_ptr(),
        kernels.mask_or_zero(mask, plan.dtype).data_ptr(),
        *plan.given,
        *grad_out.stride()[:3],
        *plan.written,
    )
    lent = empty_strided((plan.scratch,), (1,), torch.uint8)
    kernels.module.gradients(
        kernels.gpu, current_stream(kernels.index), lent.data_ptr(), plan.scratch, *arguments
    )
    return grad_query, grad_key, grad_value
