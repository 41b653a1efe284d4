"""The small transformer over bytes that measurements train, with the LayerNorm + Linear pair left to the caller."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Pair = Callable[[int, int], nn.Module]


def plain_pair(in_features: int, out_features: int) -> nn.Module:
    """LayerNorm and Linear as PyTorch has them."""
    return nn.Sequential(nn.LayerNorm(in_features), nn.Linear(in_features, out_features))


class Block(nn.Module):
    """A pre-norm transformer block. Both of its LayerNorms feed a Linear, so both are pairs."""

    def __init__(self, width: int, heads: int, pair: Pair):
        super().__init__()
        self.heads = heads
        self.queries_keys_values = pair(width, 3 * width)
        self.join_heads = nn.Linear(width, width)
        self.widen = pair(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.attention: Callable[..., torch.Tensor] | None = None
        """In the place of `scaled_dot_product_attention`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, sequence, width] to the same shape."""
        x = x + self.join_heads(self.attend(x))
        return x + self.narrow(F.gelu(self.widen(x)))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention of every head, side by side: [batch, sequence, width]."""
        split = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attention = self.attention or F.scaled_dot_product_attention
        return attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


class CharacterModel(nn.Module):
    """Predicts the next character at every position.

    Args:
        vocabulary: How many characters there are.
        context: The longest sequence.
        width: Of the residual stream, divisible by heads.
        heads: Of attention.
        blocks: How many.
        pair: Makes a LayerNorm + Linear from its two sizes.
    """

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, blocks: int, pair: Pair):
        super().__init__()
        self.character = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, pair) for _ in range(blocks)))
        self.head = pair(width, vocabulary)
        self.places: torch.Tensor | None = None
        """The place of each character in its sequence, [sequence]; None for 0, 1, 2, ..."""

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """characters [batch, sequence], int64, to logits [batch, sequence, vocabulary]."""
        positions = self.places
        if positions is None:
            positions = torch.arange(characters.shape[1], device=characters.device)
        return self.head(self.blocks(self.character(characters) + self.position(positions)))
