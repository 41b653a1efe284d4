"""The custom ops of the toy puzzle."""

from .square import SquareTrain, SquareTrainBackward
