"""The custom ops of puzzle 19, the ramp."""

from .ops import RampAtomic, RampCast, RampIndex, RampMap, RampReduce, RampRmsnorm, RampStages, RampTile
