"""Attention's dropout mask in PyTorch, with the Philox generator of harness/nn/kernels/attention/dropout.mojo."""

import torch

Tensor = torch.Tensor
NUM_VALUES = 65536
"""Number of 16-bit values; probabilities are multiples of 1 / NUM_VALUES."""
ROUNDS = 7
WORD_MASK = 2**32 - 1
"""Mask of 32 bits."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
"""Philox4x32's multipliers, and the increments of its key per round."""


def draw_philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four output words of Philox4x32 for a counter and a key (Salmon et al., 2011).

    Words are int64 from 0 to 2**32 - 1, in shapes that broadcast. Products overflow only in unused bits.
    """
    c0, c1, c2, c3 = counter
    for i in range(ROUNDS):
        key0, key1 = ((word + i * step) & WORD_MASK for word, step in zip(key, KEY_INCREMENTS, strict=True))
        product0, product2 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (product2 >> 32 & WORD_MASK) ^ c1 ^ key0, product2 & WORD_MASK
        c2, c3 = (product0 >> 32 & WORD_MASK) ^ c3 ^ key1, product0 & WORD_MASK
    return c0, c1, c2, c3


def draw_keep_mask(state: Tensor, size: tuple[int, ...], threshold: int) -> Tensor:
    """Return a bool mask [B, N, S, T]: True where dropout keeps a probability.

    32 elements share four draws: queries q + 8 * i and q + 1 + 8 * i of 32, keys k + 8 * j and k + 1 + 8 * j
    of 16, q and k even. Each of the sixteen words has one bit of every element's 16-bit number, lowest first.
    """
    B, N, S, T = size
    query, key = (torch.arange(length, device=state.device) for length in (-(-S // 32) * 4, -(-T // 16) * 4))
    head = torch.arange(B * N, device=state.device)[:, None, None]
    halves = state[0] & WORD_MASK, state[0] >> 32 & WORD_MASK
    bits = torch.arange(32, device=state.device)[:, None, None, None]
    numbers = torch.zeros((), dtype=torch.int64, device=state.device)
    for draw in range(4):
        words = draw_philox((key * 4 + draw, query[:, None], head, state[1] & WORD_MASK), halves)
        for bit, word in enumerate(words, 4 * draw):
            numbers = numbers + ((word >> bits & 1) << bit)
    # Axes of the bits: query and query + 1, 16s of 32, key and key + 1, 8s of 16 queries, 8s of 16 keys.
    numbers = numbers.reshape(2, 2, 2, 2, 2, B * N, len(query) // 4, 4, len(key) // 4, 4)
    padded = numbers.permute(5, 6, 1, 3, 7, 0, 8, 4, 9, 2).reshape(B, N, len(query) * 8, len(key) * 4)
    return padded[:, :, :S, :T] < threshold
