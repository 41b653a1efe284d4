"""Training ops as data: their names and arguments, and the calls of a graph. Needs neither MAX nor torch."""

from collections.abc import Mapping
from dataclasses import dataclass


def accum_dtype(dtype: str) -> str:
    """The dtype of sums and statistics: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


@dataclass(frozen=True)
class OpSpec:
    """A training op: its registered name and its arguments in order, name -> symbolic shape.

    `writes` are filled in place and come first, then `reads`, then `eps`, a float64 scalar, where `eps` is set.
    Arguments in `statistics` have the accumulation dtype, the others the dtype of the graph.
    """

    name: str
    writes: Mapping[str, str]
    reads: Mapping[str, str]
    eps: bool = False
    statistics: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call of an op in a graph.

    `prefix` comes before the names of what the call writes ("fused" makes "fused.output"), and of what it reads
    and an earlier call of the same prefix has written.
    """

    op: OpSpec
    parameters: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
