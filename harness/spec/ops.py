"""Describe training ops as data: names, arguments, and the calls of a graph, without MAX or torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Shape = tuple[str | int, ...]
"""A symbolic shape: the name of a size, or a fixed size, for each axis: ("rows", 2)."""

RUN_DTYPE = "run"
"""`Argument.dtype` for the dtype of the run."""
ACCUM_DTYPE = "accum"
"""`Argument.dtype` for the accumulation dtype of the run, as for statistics and sums."""


def get_accum_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def get_itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


@dataclass(frozen=True)
class Argument:
    """A tensor that an op reads or writes: its symbolic shape, and its dtype.

    `dtype` is RUN_DTYPE, ACCUM_DTYPE, or a fixed dtype: "int32" for an index map, "bool" for a mask. The
    elements of a bitmask are bit patterns, for which a numeric error is meaningless.
    """

    shape: Shape
    dtype: str = RUN_DTYPE
    is_bitmask: bool = False

    def resolve_dtype(self, run_dtype: str) -> str:
        return {RUN_DTYPE: run_dtype, ACCUM_DTYPE: get_accum_dtype(run_dtype)}.get(self.dtype, self.dtype)


@dataclass(frozen=True)
class Scalar:
    """A number that an op takes by value: its default and its dtype."""

    value: float
    dtype: str = "float64"


@dataclass(frozen=True)
class OpSpec:
    """A training op: its registered name and its arguments in order.

    The op fills `writes` in place; they come first, then `reads`, then `scalars`. A name denotes the same
    size, tensor or scalar in all ops of a graph.
    """

    name: str
    writes: Mapping[str, Argument]
    reads: Mapping[str, Argument]
    scalars: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])


@dataclass(frozen=True)
class Call:
    """One call of an op in a graph.

    `prefix` is put before the names of results ("fused" -> "fused.output"), and of arguments that an earlier
    call with the same prefix has written. `launch` is the Mojo call in a recording, with the abbreviations of
    `harness/devices/record_program.py`.
    """

    op: OpSpec
    parameters: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    launch: str = ""
