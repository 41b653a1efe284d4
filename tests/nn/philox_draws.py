"""The draws of attention's dropout, by the same Philox as the kernels (harness/nn/kernels/attention/dropout.mojo), in PyTorch."""

import torch

Tensor = torch.Tensor
ONE = 65536
"""Values of 16 bits: so many elements a probability is a share of."""
ROUNDS = 7
WORD = 2**32 - 1
"""All bits of a word."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
"""What Philox4x32 multiplies by, and adds to its key from round to round."""


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
