"""The custom ops of puzzle 23; importing the package registers them with MAX."""

from .flash_ops import AttentionDelta, AttentionTrain, AttentionTrainBackward
from .public_ops import Attention, AttentionBackward
from .training_ops import (
    AttentionOutput,
    AttentionOutputBackward,
    AttentionScores,
    AttentionScoresBackward,
    AttentionSoftmax,
    AttentionSoftmaxBackward,
)
