"""Training ops as data: their names and arguments, and the calls of a graph. Needs neither MAX nor torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Shape = tuple[str | int, ...]
"""A symbolic shape: the name of a size, or a fixed size, for each axis: ("rows", 2)."""

RUN = "run"
"""The dtype of an argument that has the dtype of the run."""
ACCUM = "accum"
"""The dtype of an argument that has the accumulation dtype of the run, as statistics and sums do."""


def accum_dtype(dtype: str) -> str:
    """Return the dtype of sums and statistics: float64 for float64, else float32."""
    return "float64" if dtype == "float64" else "float32"


def bytes_of(dtype: str) -> int:
    """Return the bytes of an element of a floating-point dtype."""
    return {"float64": 8, "float32": 4}.get(dtype, 2)


@dataclass(frozen=True)
class Argument:
    """A tensor that an op reads or writes: its symbolic shape, and its dtype.

    `dtype` is RUN, ACCUM, or a fixed dtype: "int32" for an index map, "bool" for a mask. If it holds `bits`,
    a numeric error says nothing.
    """

    shape: Shape
    dtype: str = RUN
    bits: bool = False

    def dtype_in(self, run: str) -> str:
        """Return the name of the dtype in a run of dtype `run`."""
        return {RUN: run, ACCUM: accum_dtype(run)}.get(self.dtype, self.dtype)


@dataclass(frozen=True)
class Scalar:
    """A number that an op takes by value: its default and its dtype."""

    value: float
    dtype: str = "float64"


@dataclass(frozen=True)
class OpSpec:
    """A training op: its registered name and its arguments in order.

    `writes` are filled in place and come first, then `reads`, then `scalars`, each by name. A size, a tensor or a scalar
    of the same name is the same in all ops of a graph.
    """

    name: str
    writes: Mapping[str, Argument]
    reads: Mapping[str, Argument]
    scalars: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])


@dataclass(frozen=True)
class Call:
    """One call of an op in a graph.

    `prefix` comes before the names of results ("fused" gives "fused.output"), and of arguments that an
    earlier call of the same prefix has written. `launch` is the call in a recording, in Mojo, with the
    abbreviations of `harness/devices/record_program.py`.
    """

    op: OpSpec
    parameters: tuple[tuple[str, str], ...] = ()
    prefix: str = ""
    launch: str = ""
