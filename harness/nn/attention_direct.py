"""The kernels of attention's fast variant on torch tensors, by an extension module: on torch's current stream, without MAX.

Nothing waits for the GPU and nothing is allocated but the results, so that a CUDA graph can capture a step.
The kernels multiply 16-bit types on tensor cores, at any strides whose last is 1; every other call runs
PyTorch's own function (`left_to_torch`). `explain` says which kernels a call takes.

`by_plan` is the way of a plain call: past torch's dispatcher, by a plan.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad

from harness.nn import extension_kernels
from harness.nn.arguments import plain, wide
from harness.nn.attention_plan import (
    BOX,
    EVERY_KEY,
    NO_MASK,
    TENSOR_CORES,
    WIDEST,
    AttentionPlan,
    PlannedKernels,
    backward_of,
    dense_strides,
    forward_of,
    lies_as_planned,
    make_plan,
    mask_sizes,
    numbers_of_queries,
)
from harness.nn.derivatives import FirstOnly
from harness.nn.extension_kernels import KINDS, PLAIN, Opened, applied, is_hopper
from harness.nn.private import any_autocast, current_device, dispatch_modes, transforms_active

Tensor = torch.Tensor
LAYER = "attention"
FIRST_ONLY = FirstOnly("attention", "torch.nn.functional.scaled_dot_product_attention")

WIDE = 128
"""The largest head dimension of the kernels for a mask's gradient, for unequal lengths, and with dropout."""
CHUNK = 8
"""What the head dimension must be a multiple of for wgmma: 16 bytes."""
MOST_BLOCKS = 65535
"""Of a grid along an axis but the first: batches, or heads, that wgmma's kernels take."""
MOST_DRAWN = 2**33
"""Probabilities for which wgmma's kernels keep a bit each with dropout: a GiB."""
BEST, PORTABLE = 0, 1
"""How the module numbers what a call may take: the fastest kernels, those for every GPU on a Hopper too."""

MEASURED_LENGTH, MEASURED_MASKED = 512, 1024
FASTER_HEADS, FASTER_MASKED = (range(64, 65), range(129, 193)), (range(64, 193),)
"""Without a mask and with one: the fewest queries and keys for which the time of both passes is on record, and the head dimensions for
which they are as fast there as the fastest of PyTorch's kernels (`attention` and `attention_options` in book/records)."""


def on_tensor_cores(query: Tensor) -> bool:
    """Whether there are tiles for query's dtype and head dimension, where the GPU has tensor cores for them."""
    return query.dtype in TENSOR_CORES and query.shape[-1] <= WIDEST and not torch.version.hip


def on_hopper(query: Tensor) -> bool:
    """Whether the kernels with wgmma take query: on a Hopper, rows in whole chunks of 16 bytes."""
    return on_tensor_cores(query) and not query.shape[-1] % CHUNK and is_hopper(query.device)


def without_shift(scale: float | None, mask_block: int) -> str | None:
    """Return which argument keeps a call from kernels that find a row's maximum before they scale it."""
    if not (scale is None or scale > 0):
        return f"scale is {scale}, not above 0"
    return f"an element of the mask is a block of {mask_block} queries and keys" if mask_block > 1 else None


def without_mask_gradient(query: Tensor, mask: Tensor) -> str | None:
    """Return which argument keeps the kernels from the gradient of a mask; None where they make it."""
    d = query.shape[-1]
    if mask.shape[-1] == 1:
        return "attn_mask needs a gradient, and is one number for all keys"
    if d > WIDE:
        return f"attn_mask needs a gradient, and query has heads of {d} elements; for that they take up to {WIDE}"
    return f"query has heads of {d} elements, no multiple of {CHUNK}" if d % CHUNK else None


def left_to_torch(query: Tensor, mask: Tensor | None, dropped: bool) -> str | None:
    """Return why a call runs PyTorch's own function; None where the kernels take it."""
    d, widest = query.shape[-1], WIDE if dropped else WIDEST
    if query.device.type != extension_kernels.DEVICE or torch.version.hip:
        return f"query is on {query.device}; the kernels are for NVIDIA's GPUs"
    if query.dtype not in TENSOR_CORES:
        return f"query is of {plain(query.dtype)}; the kernels are for bfloat16 and float16"
    if d > widest:
        subject = "with dropout the kernels" if dropped else "the kernels"
        return f"query has heads of {d} elements; {subject} take up to {widest}"
    if mask is not None and mask.requires_grad:
        cause = "attn_mask needs a gradient; with dropout the kernels make none" if dropped else None
        if cause := cause or without_mask_gradient(query, mask):
            return cause
    if not torch.compiler.is_compiling() and kernels(query.device) is None:
        return "there is no extension module for this GPU"
    return None


def without_wgmma(
    query: Tensor, mask: Tensor | None, dropped: bool, scale: float | None = None, mask_block: int = 1
) -> str | None:
    """Which argument keeps a call on a Hopper from wgmma; None where none does. A mask is as the caller gave it: of a bool mask the
    kernels read a copy, whose rows begin where they should. With dropout they read a copy of heads that are no whole chunks."""
    d = query.shape[-1]
    if query.dtype not in TENSOR_CORES:
        return None
    if d % CHUNK and not dropped:
        return f"query has heads of {d} elements, no multiple of {CHUNK}"
    if cause := without_shift(scale, mask_block):
        return cause
    if mask is None:
        return None
    if d > WIDE:
        return (
            f"there is attn_mask, and query has heads of {d} elements; backward wgmma then takes up to {WIDE}"
        )
    if mask.shape[-1] == 1:
        return "attn_mask is one number for all keys"
    # Without the axes of one place: nothing takes their strides.
    if mask.dtype == torch.bool or in_chunks(mask.squeeze()):
        return None
    return "the rows of attn_mask do not begin at multiples of 16 bytes"


def without_boxes(name: str, tensor: Tensor) -> str | None:
    """What keeps the TMA, by which wgmma's kernels read, from a tensor [B, heads, length, d] in 16 bits; None where nothing does.
    Elements that are apart are copied before."""
    if max(tensor.shape[:-2], default=1) > MOST_BLOCKS:
        return f"{name} has a batch or heads above {MOST_BLOCKS:,}"
    if tensor.stride(-1) == 1 and not in_chunks(tensor):
        return f"the rows of {name} do not begin at multiples of 16 bytes"
    places = zip(tensor.shape[:-1], tensor.stride(), strict=False)
    repeats = tensor.stride(-1) == 1 and any(size > 1 and not stride for size, stride in places)
    return f"{name} has elements that stand for several" if repeats else None


@contextmanager
def portable_kernels(on: bool = True) -> Iterator[None]:
    """Meanwhile calls take the kernels for every GPU on a Hopper too: for comparisons."""
    before = AttentionKernels.choice
    AttentionKernels.choice = PORTABLE if on else before
    try:
        yield
    finally:
        AttentionKernels.choice = before


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that the kernels can read, whose rows are contiguous."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    return empty_in_order(tensor).copy_(tensor)


def in_chunks(tensor: Tensor) -> bool:
    """Whether every row begins where 16 bytes do, and its elements are neighbours."""
    *strides, nearest = tensor.stride()
    return nearest == 1 and not any(stride % CHUNK for stride in strides) and not tensor.data_ptr() % 16


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose rows all begin at multiples of 16 bytes."""
    tensor = readable(tensor)
    return tensor if in_chunks(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def empty_in_order(tensor: Tensor) -> Tensor:
    """Allocate a tensor of the same size and dtype for results, without gaps. What kernels write has
    `dense_strides`, other results are contiguous.
    """
    if tensor.device.type != extension_kernels.DEVICE or not on_tensor_cores(tensor):
        return tensor.new_empty(tensor.shape)
    return tensor.new_empty_strided(tensor.shape, dense_strides(tensor.shape, tensor.stride()))


def forward_buffers(query: Tensor, *rest) -> tuple[Tensor, Tensor]:
    """Allocates output and lse, which a forward pass over query returns."""
    return empty_in_order(query), query.new_empty(query.shape[:-1], dtype=wide(query.dtype))


def backward_buffers(grad_out, query, key, value, *rest) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the gradients of query, key and value, each in the order of its tensor."""
    return empty_in_order(query), empty_in_order(key), empty_in_order(value)


def row_strides(*tensors: Tensor) -> list[int]:
    """How far apart batches, heads and rows of each are, in elements."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def sizes(query: Tensor, key: Tensor, diagonal: int, of_mask: tuple[int, ...] = NO_MASK) -> tuple[int, ...]:
    """What the module takes as sizes: B, N, G, S, T, d, the diagonal, the strides of the mask, and its blocks' side; of sequences of
    unequal lengths their number in its place."""
    B, N, S, d = query.shape
    return (B, N, key.shape[1], S, key.shape[2], d, diagonal, *of_mask)


class AttentionKernels(PlannedKernels):
    """All that the module can do.

    Attributes:
        choice: BEST, or PORTABLE within `portable_kernels`.
    """

    choice = BEST

    def call(
        self,
        function: Callable[..., int],
        dtype: torch.dtype,
        *arguments,
        scratch: int | None = 0,
    ) -> None:
        """As `launch`, of the kernels for a dtype."""
        self.launch(function, KINDS[dtype], self.choice, *arguments, scratch=scratch)

    def forward(self, query, key, value, mask, scale: float, diagonal: int, mask_block: int):
        """Output [B, N, S, d], in the order of query, and lse [B, N, S], contiguous. None of the tensors is empty."""
        query, key, value = (readable(tensor) for tensor in (query, key, value))
        plan = planned(query, key, value, mask, diagonal, scale, True, mask_block)
        assert plan is not None  # `kernels_for` gives the kernels to what there is one for
        with self.current():
            return forward_of(plan, self, query, key, value, mask)

    def launch_forward(self, function, sizes, scale, results, tensors, read: Tensor, *rest, **how) -> None:
        """Launches a forward pass of the module.

        Args:
            function: The module's.
            sizes: As the function `sizes` gives them.
            scale: What the scores are multiplied by.
            results: Output and lse, to be written.
            tensors: Query, key and value.
            read: What the kernels read beside them: a mask, or offsets.
            rest: What the module takes after the strides.
            how: As in `call`.
        """
        strides = row_strides(*tensors, results[0])
        given = *results, *tensors, read, *strides, *rest
        self.call(function, tensors[0].dtype, *sizes, scale, *given, **how)

    def launch_backward(self, function, sizes, scale, results, tensors, lse, delta, *rest, **how) -> None:
        """As `launch_forward`, of the three gradients, and of what comes in: grad_out, query, key and value."""
        query, key, value = tensors[1:]
        rows = lse.contiguous(), delta.contiguous()
        read, *behind = rest
        strides = row_strides(query, key, value, tensors[0], *results)
        given = *results, *tensors, *rows, read, *strides, *behind
        self.call(function, query.dtype, *sizes, scale, *given, **how)

    def launch_aligned_backward(self, function, sizes, scale, results, tensors, out, *rest, **how) -> None:
        """As `launch_backward`, from the output in the place of delta, and of rows that begin anywhere."""
        tensors = [aligned(tensor) for tensor in tensors]
        lse, *others = rest
        delta = self.delta(tensors[0], aligned(out), None)
        self.launch_backward(function, sizes, scale, results, tensors, lse, delta, *others, **how)

    def delta(self, grad_out, output, grad_lse) -> Tensor:
        """rowsum(grad_out * output), less grad_lse where there is one: [B, N, S]."""
        grad_out, output = readable(grad_out), readable(output)
        delta = output.new_empty(output.shape[:-1], dtype=wide(output.dtype))
        rows = None if grad_lse is None else grad_lse.contiguous()
        self.call(
            self.module.delta,
            output.dtype,
            *sizes(output, output, 0),
            *(delta, grad_out, output, rows),
            *row_strides(grad_out, output),
        )
        return delta

    def backward(
        self,
        grad_out,
        query,
        key,
        value,
        lse,
        delta,
        mask,
        scale: float,
        diagonal: int,
        mask_block: int,
        gradients: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value, each in the order of its tensor. None of the tensors is empty.

        Args:
            gradients: Where to write them: any strides whose last is 1.
        """
        gradients = gradients or backward_buffers(grad_out, query, key, value)
        tensors = [readable(tensor) for tensor in (grad_out, query, key, value)]
        # On a Hopper two numbers for each query, in whole boxes.
        scratch = numbers_of_queries(*query.shape[:3])
        given = (
            sizes(query, key, diagonal, mask_sizes(mask, mask_block)),
            scale,
            gradients,
            tensors,
            lse,
            delta,
        )
        read = self.mask_or_zero(mask, query.dtype)
        self.launch_backward(self.module.backward, *given, read, scratch=scratch)
        return gradients

    def mask_gradient(
        self, grad_out, query, key, value, output, lse, grad_lse, mask, scale: float, diagonal: int
    ) -> Tensor:
        """The gradient of a mask, in its shape. None of the tensors is empty."""
        delta = self.delta(grad_out, output, grad_lse)
        tensors = grad_out, query, key, value
        if not all(map(in_chunks, tensors)):
            tensors = tuple(tensor.contiguous() for tensor in tensors)
        grad_out, query, key, value = tensors
        mask, lse = mask.contiguous(), lse.contiguous()
        gradient = torch.empty_like(mask)
        self.call(
            self.module.mask_gradient,
            query.dtype,
            *sizes(query, key, diagonal, mask_sizes(mask, 1)),
            scale,
            *(gradient, *tensors, lse, delta, mask),
            *row_strides(query, key, value, grad_out),
        )
        return gradient

    def gradients(
        self, grad_out, query, key, value, output, lse, mask, scale: float, diagonal: int, mask_block: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """`delta` and `backward` in one, without a gradient of lse; None of calls that have no plan."""
        plan = planned(query, key, value, mask, diagonal, scale, True, mask_block)
        if plan is None or output.stride() != plan.strides or not lse.is_contiguous():
            return None
        with self.current():
            return backward_of(plan, self, grad_out, query, key, value, output, lse, mask)

    def smallest_pass(self) -> None:
        ones = torch.ones(1, 1, 8, 8, device=extension_kernels.DEVICE, dtype=torch.float16)
        self.forward(ones, ones, ones, None, 1.0, 8, 1)


# ---- A plain call -------------------------------------------------------------------------------------------


def planned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    diagonal: int,
    scale: float | None,
    enable_gqa: bool,
    mask_block: int = 1,
) -> AttentionPlan | None:
    """Return the plan for some tensors, None where there is none."""
    return make_plan(
        (query.shape, key.shape, value.shape),
        (query.stride(), key.stride(), value.stride()),
        (query.dtype, key.dtype, value.dtype),
        diagonal,
        scale,
        enable_gqa,
        AttentionKernels.choice,
        mask_sizes(mask, mask_block),
    )


class DirectAttention(torch.autograd.Function):
    """One pass each way through the extension module, between tensors on one GPU, the current one."""

    @staticmethod
    def forward(ctx, query, key, value, mask, plan, kernels):
        output, lse = forward_of(plan, kernels, query, key, value, mask)
        ctx.save_for_backward(query, key, value, output, lse, mask)
        ctx.plan, ctx.kernels = plan, kernels
        return output

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, output, lse, mask = saved = ctx.saved_tensors
        plan, kernels = ctx.plan, ctx.kernels
        # create_graph=True: the operator is there to refuse a second derivative. And it reads tensors as they lie.
        if torch.is_grad_enabled() or not lies_as_planned(plan, *saved):
            gradients = torch.ops.mojo_workbook.attention_backward(
                grad_out, query, key, value, output, lse, None, mask, plan.scale, plan.diagonal, 1
            )
        else:
            with kernels.current():
                gradients = backward_of(
                    plan, kernels, grad_out.resolve_neg(), query, key, value, output, lse, mask
                )
        needed = zip(gradients, ctx.needs_input_grad, strict=False)
        return *(gradient if need else None for gradient, need in needed), None, None, None


apply_directly = applied(DirectAttention)


def attention_directly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """Attention of a caller's tensors by the direct way; None where the registered operator must do it, or must say what is wrong.
    Direct are tensors [B, N, S, d] for tensor cores, with or without a mask of as many axes that is added, on the current GPU, outside
    of autocast."""
    if type(is_causal) is not bool or type(enable_gqa) is not bool or any_autocast():
        return None
    if scale is not None and type(scale) not in (float, int):
        return None
    if mask is not None and (is_causal or not is_added(mask, query, key)):
        return None
    return by_plan(query, key, value, mask, 0 if is_causal else EVERY_KEY, scale, enable_gqa)


def is_added(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask has four axes and what else lets it be added as it is to the scores of query and key."""
    if not all(type(tensor) in PLAIN and tensor.dim() == 4 for tensor in (mask, query, key)):
        return False
    if not (mask.dtype == query.dtype and mask.layout is torch.strided):
        return False
    scores = (*query.shape[:3], key.shape[2])
    sizes = zip(mask.shape, scores, strict=True)
    return mask.get_device() == query.get_device() and all(size in (1, whole) for size, whole in sizes)


def by_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    diagonal: int,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor | None:
    """Attention past the registered operator; None where there is no plan for it.

    There is none for a subclass, a view that negates, a mode, a transform, a tangent that would be lost, and a mask that needs a
    gradient.
    """
    if not (
        type(query) in PLAIN
        and type(key) in PLAIN
        and type(value) in PLAIN
        and (mask is None or (type(mask) in PLAIN and not mask.requires_grad and not mask.is_neg()))
        and query.layout is torch.strided
        and not (query.is_neg() or key.is_neg() or value.is_neg())
        and dispatch_modes() == 0
        and not transforms_active()
        and forward_ad._current_level < 0
    ):
        return None
    index = query.get_device()
    opened = kernels.table.get(index)
    if opened is None and query.device.type != extension_kernels.DEVICE:
        return None
    if current_device() != index or not index == key.get_device() == value.get_device():
        return None
    plan = planned(query, key, value, mask, diagonal, scale, enable_gqa)
    if plan is None:
        return None
    if opened is None:
        opened = kernels(query.device)
        if opened is None:
            return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return apply_directly(query, key, value, mask, plan, opened)
    return forward_of(plan, opened, query, key, value, mask)[0]


# ---- Which GPUs have a module -------------------------------------------------------------------------------

kernels = Opened(LAYER, AttentionKernels, lambda device: "attention goes through PyTorch's own operations")
"""The kernels of a device."""


def kernels_for(query: Tensor) -> AttentionKernels | None:
    """Return the kernels of query's GPU where they take its dtype and heads; None elsewhere."""
    return kernels(query.device) if on_tensor_cores(query) else None


def narrow_kernels(query: Tensor, scale: float) -> AttentionKernels | None:
    """Return the kernels for unequal lengths, where they take query; None elsewhere."""
    d = query.shape[-1]
    return kernels_for(query) if d <= WIDE and d % CHUNK == 0 and scale > 0 else None


def explain(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    blocks: int | None = None,
) -> str:
    """Which kernels `attention` runs for the same arguments, or `attention_block` for a mask of so many queries and keys an element, and
    why, in one line: who routes a call asks the same questions. It may build the extension module, and
    launches nothing else.

    A key and a value that are not given are taken to lie as query, as is the gradient of the output. Where one pass takes wgmma and
    the other does not, the line is of the other. `is_causal` and `enable_gqa` change none.
    """
    dropped, mask_block = dropout_p > 0, blocks or 1
    if cause := left_to_torch(query, attn_mask, dropped):
        return f"PyTorch's own {'scaled_dot_product_attention' if blocks is None else 'operations'}: {cause}"
    hopper, cause = is_hopper(query.device) and AttentionKernels.choice != PORTABLE, None
    if hopper:
        cause = without_wgmma(query, attn_mask, dropped, scale, mask_block)
        tensors = {
            "query": query,
            "key": query if key is None else key,
            "value": query if value is None else value,
        }
        if not dropped:  # then they read copies, where it takes any
            cause = cause or next(filter(None, itertools.starmap(without_boxes, tensors.items())), None)
        elif drawn(query, tensors["key"]) > MOST_DRAWN:
            cause = cause or "the draws of dropout would take more than a GiB"
    by = "wgmma" if hopper and cause is None else "mma.sync"
    return f"{by}, through the extension module{f': {cause}' if cause else ''}"


def drawn(query: Tensor, key: Tensor) -> int:
    """The probabilities of a call, in whole tiles of BOX queries, and steps of twice as many keys."""
    boxes, steps = -(-query.shape[-2] // BOX), -(-key.shape[-2] // (2 * BOX))
    return query.shape[:-2].numel() * boxes * steps * 2 * BOX**2


def may_be_slower(query: Tensor, key: Tensor, attn_mask: Tensor | None, dropout_p: float) -> str | None:
    """Why PyTorch's own attention may be the faster one for both passes of a call, by what was measured; None where it is not."""
    d = query.shape[-1]
    if not on_hopper(query):
        return "it is faster only in 16 bits on a Hopper"
    if dropout_p:
        return "with dropout_p it would draw other numbers than PyTorch's"
    if not any(d in heads for heads in (FASTER_HEADS if attn_mask is None else FASTER_MASKED)):
        return f"PyTorch's takes {'' if attn_mask is None else 'attn_mask and '}heads of {d} elements in less time"
    if attn_mask is not None and (
        attn_mask.shape[-1] == 1 or (attn_mask.dtype != torch.bool and attn_mask.shape[-1] % CHUNK)
    ):
        return f"PyTorch's takes an attn_mask of rows of {attn_mask.shape[-1]} elements in less time"
    lengths = query.shape[-2], key.shape[-2]
    if not all(isinstance(length, int) for length in lengths):
        return "its lengths are known only when it is called"
    shortest = MEASURED_LENGTH if attn_mask is None else MEASURED_MASKED
    if min(lengths) < shortest:
        return f"it is measured from {shortest} queries and keys on"
    return None
