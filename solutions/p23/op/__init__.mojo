"""The custom ops of puzzle 23; importing the package registers them with MAX."""

from .ops import (
    Attention,
    AttentionBackward,
    AttentionDelta,
    AttentionOutput,
    AttentionOutputBackward,
    AttentionScores,
    AttentionScoresBackward,
    AttentionSoftmax,
    AttentionSoftmaxBackward,
    AttentionTrain,
    AttentionTrainBackward,
)
