"""Dropout in attention: which probabilities become 0 follows from two random integers, and is worked out anew in each pass.

`keep_mask` says which are kept, by the same Philox as attention's kernels (`dropout.mojo`), which store no mask; on a Hopper they
keep a bit for each probability while a pass runs, if these take at most a GiB (`hopper_dropout.mojo`). The state,
two integers from PyTorch's generator, lies where the kernels read it: nobody waits for it, and a CUDA graph draws another for each
replay. Two operators are registered, `mojo_workbook::attention_dropout` and its backward pass. Where there is no extension module they
take PyTorch's products and the whole mask.
"""

import torch

from harness.nn.attention_direct import (
    FIRST_ONLY,
    AttentionKernels,
    aligned,
    backward_buffers,
    forward_buffers,
    kernels_for,
    left_to_torch,
    row_strides,
    sizes,
)
from harness.nn.attention_formula import gradients_of, masked_scores, probabilities, widened
from harness.nn.attention_plan import mask_sizes
from harness.nn.operators import registered

Tensor = torch.Tensor
ONE = 65536
"""Values of 16 bits: so many elements a probability is a share of."""
ROUNDS = 7
WORD = 2**32 - 1
"""All bits of a word."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
"""What Philox4x32 multiplies by, and adds to its key from round to round."""


def kept_of(dropout_p: float) -> int:
    """How many elements of ONE are kept. Raises TypeError for what is no number, ValueError for no probability."""
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise TypeError(f"dropout_p: expected a number, got {type(dropout_p).__name__}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: expected a probability from 0 to 1, got {dropout_p}")
    return ONE - round(dropout_p * ONE)


def rescale(kept: int) -> float:
    """What the probabilities that are kept are multiplied by."""
    return ONE / kept if kept else 0.0


# ---- The draws ----------------------------------------------------------------------------------------------


def new_state(device: torch.device) -> Tensor:
    """Two random integers, int64 [2], from PyTorch's generator of a device."""
    return torch.randint(2**62, (2,), device=device)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32 (Salmon et al., 2011), of ROUNDS rounds: four random words of four words and a key of two.

    Words are int64 from 0 to 2**32 - 1, in any shapes that broadcast. Products lose what lies above 64 bits, which nobody reads.
    """
    c0, c1, c2, c3 = counter
    for turn in range(ROUNDS):
        key0, key1 = ((word + turn * step) & WORD for word, step in zip(key, STEPS, strict=True))
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (second >> 32 & WORD) ^ c1 ^ key0, second & WORD
        c2, c3 = (first >> 32 & WORD) ^ c3 ^ key1, first & WORD
    return c0, c1, c2, c3


def keep_mask(state: Tensor, size: tuple[int, ...], kept: int) -> Tensor:
    """Which probabilities of a size [B, N, S, T] are kept: bool.

    32 share four draws: the queries q + 8 * i and q + 1 + 8 * i of a 32 and the keys k + 8 * j and k + 1 + 8 * j of a 16, with q and k even.
    Each of the sixteen words has a digit of every number, 16 bits each, the lowest first.
    """
    B, N, S, T = size
    query, key = (torch.arange(length, device=state.device) for length in (-(-S // 32) * 4, -(-T // 16) * 4))
    head = torch.arange(B * N, device=state.device)[:, None, None]
    halves = state[0] & WORD, state[0] >> 32 & WORD
    bits = torch.arange(32, device=state.device)[:, None, None, None]
    numbers = torch.zeros((), dtype=torch.int64, device=state.device)
    for draw in range(4):
        words = philox((key * 4 + draw, query[:, None], head, state[1] & WORD), halves)
        for place, word in enumerate(words, 4 * draw):
            numbers = numbers + ((word >> bits & 1) << place)
    # The bits: query and query + 1, 16s of the 32, key and key + 1, 8s of the 16 queries, 8s of the 16 keys.
    numbers = numbers.reshape(2, 2, 2, 2, 2, B * N, len(query) // 4, 4, len(key) // 4, 4)
    whole = numbers.permute(5, 6, 1, 3, 7, 0, 8, 4, 9, 2).reshape(B, N, len(query) * 8, len(key) * 4)
    return whole[:, :, :S, :T] < kept


# ---- The operators ------------------------------------------------------------------------------------------


def dropout_kernels(query: Tensor, key: Tensor) -> AttentionKernels | None:
    """Return the kernels with dropout, where they take these tensors; None elsewhere."""
    fits = query.numel() and key.numel() and left_to_torch(query, None, True) is None
    return kernels_for(query) if fits else None


@registered(
    "attention_dropout",
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor state, float scale, SymInt diagonal,"
    " SymInt kept) -> (Tensor, Tensor)",
)
def forward_operator(query, key, value, attn_mask, state, scale, diagonal, kept):
    """Returns output [B, N, S, d], of probabilities with dropout, and lse [B, N, S], of all of them.

    The arguments are those of `mojo_workbook::attention`, whose mask has no blocks, with the state, int64 [2], and how many elements of
    ONE are kept, fewer than all.
    """
    output, lse = forward_buffers(query)
    kernels = dropout_kernels(query, key)
    if kernels is None:
        Q, K, V = widened(query, key, value)
        scores = masked_scores(Q, K, attn_mask, scale, diagonal)
        sums = torch.logsumexp(scores, -1)
        P = probabilities(scores, sums)
        kept_ones = keep_mask(state, P.shape, kept).to(P.dtype) * rescale(kept)
        return output.copy_(P * kept_ones @ V), lse.copy_(sums)
    tensors = [aligned(tensor) for tensor in (query, key, value)]
    given = sizes(query, key, diagonal, mask_sizes(attn_mask, 1)), scale, (output, lse), tensors
    read = kernels.mask_or_zero(attn_mask, query.dtype), state, kept
    kernels.launch_forward(kernels.module.dropout_forward, *given, *read, scratch=None)
    return output, lse


@registered(
    "attention_dropout_backward",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor? attn_mask,"
    " Tensor state, float scale, SymInt diagonal, SymInt kept) -> (Tensor, Tensor, Tensor)",
)
def backward_operator(grad_out, query, key, value, out, lse, attn_mask, state, scale, diagonal, kept):
    """Returns the gradients of query, key and value; the arguments are those of the forward operator and its results."""
    gradients = backward_buffers(grad_out, query, key, value)
    kernels = dropout_kernels(query, key)
    if kernels is None:
        Q, K, V, dO, O = widened(query, key, value, grad_out, out)
        P = probabilities(masked_scores(Q, K, attn_mask, scale, diagonal), lse)
        kept_ones = keep_mask(state, P.shape, kept).to(P.dtype) * rescale(kept)
        dS = P * (dO @ V.mT * kept_ones - (dO * O).sum(-1, keepdim=True))
        return gradients_of(dO, Q, K, P * kept_ones, dS, scale, gradients)
    tensors = [aligned(tensor) for tensor in (grad_out, query, key, value, out)]
    strides = row_strides(*tensors[1:4], tensors[0], tensors[4], *gradients)
    read = lse.contiguous(), kernels.mask_or_zero(attn_mask, query.dtype), *strides, state.contiguous(), kept
    of_call = *sizes(query, key, diagonal, mask_sizes(attn_mask, 1)), scale
    kernels.call(
        kernels.module.dropout_backward, query.dtype, *of_call, *gradients, *tensors, *read, scratch=None
    )
    return gradients


def keep_for_backward(ctx, inputs, output) -> None:
    """Keeps query, key, value, the mask, the state, the output and lse."""
    query, key, value, attn_mask, state, ctx.scale, ctx.diagonal, ctx.kept = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # nobody reads zeros as the gradient of lse
    ctx.save_for_backward(query, key, value, *output, attn_mask, state)


def backward(ctx, grad_out, grad_lse):
    """The gradients of query, key and value; none of an output that nothing comes of."""
    if grad_out is None:
        return (None,) * 8
    gradients = backward_operator(grad_out, *ctx.saved_tensors, ctx.scale, ctx.diagonal, ctx.kept)
    return *gradients, None, None, None, None, None


forward_operator.register_fake(forward_buffers)
backward_operator.register_fake(backward_buffers)
forward_operator.register_autograd(backward, setup_context=keep_for_backward)
backward_operator.register_autograd(FIRST_ONLY.refuse_double_backward)
