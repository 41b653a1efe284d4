"""The custom ops of puzzle 27."""

from .ops import (
    AdamW,
    Clip,
    CrossEntropy,
    CrossEntropyBackward,
    EmbeddingBackward,
    Gelu,
    GeluBackward,
    MeanLoss,
)
