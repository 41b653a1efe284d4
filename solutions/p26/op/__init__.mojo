"""The custom ops of puzzle 26, which a rewrite of a graph puts in: SiLU, forward and backward."""

from .silu import SiluTrain, SiluTrainBackward
