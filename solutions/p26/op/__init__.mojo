"""The custom ops of puzzle 26, which a rewrite inserts into a graph: SiLU, forward and backward."""

from .silu import SiluTrain, SiluTrainBackward
