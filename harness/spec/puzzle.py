"""What a puzzle is: its ops, variants, blanks, cases and reference, as data for the rest of the harness."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from harness.spec.derivation import Derivation, Mistake, Step
from harness.spec.ops import Call, OpSpec, accum_dtype

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One set of input tensors: what it is called, why it is there, its sizes, and how its values are drawn."""

    name: str
    why: str
    dims: tuple[int, ...]
    values: str


@dataclass(frozen=True)
class Gate:
    """One checked quantity with the blank that decides it.

    `variant` is the variant whose kernel holds the blank; `quantities` are the outputs that the blank alone makes.
    `given` are what code outside the blanks makes on the way: wrong only where somebody changed that code.
    """

    id: str
    variant: str
    quantities: tuple[str, ...]
    about: str
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class NumpyRung:
    """The puzzle in NumPy, before the kernels: one Python file with a function for each of some gates, of the gate's name.

    A function asks for steps of the puzzle's derivation by the names of its arguments.

    Attributes:
        file: Relative to the puzzle's folder.
        names: Argument, or "gate.argument" for one gate alone -> step of the derivation, where they differ.
        returns: Gate -> the quantities that its function returns, in order.
        pack: Quantity -> what makes one array of everything its function returns.
    """

    file: str
    names: Mapping[str, str]
    returns: Mapping[str, tuple[str, ...]]
    pack: Mapping[str, Callable[..., np.ndarray]]


@dataclass(frozen=True)
class Demo:
    """A demonstration of a puzzle: its flag without dashes, what it shows, and what runs it.

    `run` is "module:function", imported when it is asked for; the function takes a rich Console and returns the exit
    code.
    """

    flag: str
    about: str
    run: str


@dataclass(frozen=True)
class Puzzle:
    """Everything the harness needs to know about one puzzle.

    Attributes:
        name: "p22"; the folder in problems/ and solutions/.
        title: What it is about, in a few words.
        variants: Variant name -> the calls of one graph that run it, forward and backward.
        gates: The gates, in the order in which a learner should take them.
        source: The file with the blanks, relative to the op package.
        depends: (variant, quantity) -> the blanks that a GPU kernel needs for it.
        atomic: (variant, quantity) pairs whose sums are made with atomics on a GPU, in no fixed order.
        forward: The forward outputs, op argument -> printed name.
        backward: The gradients, likewise.
        intermediate: What the graph makes visible besides, for a gate of its own.
        dims: The chapter's sizes; dim_names: what --dims takes.
        cases: dims or None -> the cases of a run.
        inputs: case, dtype, seed -> the input arrays as float64, already rounded to the dtype.
        shapes: dims -> shape of every output.
        reference: input tensors (torch, any dtype and device) -> outputs and gradients by autograd.
        exact: input arrays -> outputs and gradients in NumPy longdouble.
        multiply_adds: dims -> how many the forward pass needs; what decides whether the CPU path is run.
        ledger: dims and dtype -> the bytes saved for backward and allocated in between.
        terms: input arrays -> the size of the terms whose difference a quantity is, where they can cancel.
        derive: input arrays and changed steps -> the puzzle's mathematics in NumPy, for the diagnosis.
        mistakes: Known mistakes, as changes of the derivation, the likeliest first.
        numpy_rung: The puzzle in NumPy, or None.
        on_request: Variants that run only where they are asked for by name.
        bench: The module of the puzzle's bench candidates, "harness.puzzles.pNN.candidates", imported when it is asked
            for; "" where nothing is timed, and `--bench` is then an unknown flag.
        demos: The demonstrations, each with a flag of its own.
    """

    name: str
    title: str
    variants: Mapping[str, tuple[Call, ...]]
    gates: tuple[Gate, ...]
    source: str
    depends: Mapping[tuple[str, str], tuple[str, ...]]
    atomic: frozenset[tuple[str, str]]
    forward: Mapping[str, str]
    backward: Mapping[str, str]
    intermediate: tuple[str, ...]
    dims: tuple[int, ...]
    dim_names: tuple[str, ...]
    cases: Callable[[tuple[int, ...] | None], list[Case]]
    inputs: Callable[[Case, str, int], Arrays]
    shapes: Callable[[tuple[int, ...]], dict[str, tuple[int, ...]]]
    reference: Callable[[dict], dict]
    exact: Callable[[Arrays], Arrays]
    multiply_adds: Callable[[tuple[int, ...]], int]
    ledger: Callable[[tuple[int, ...], str], "Ledger"]
    derive: Callable[[Arrays, Mapping[str, Step]], Derivation] | None = None
    mistakes: tuple[Mistake, ...] = ()
    numpy_rung: NumpyRung | None = None
    terms: Callable[[Arrays], dict[str, float]] = lambda arrays: {}
    on_request: tuple[str, ...] = ()
    bench: str = ""
    demos: tuple[Demo, ...] = ()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of every variant, in order."""
        return self.calls_of(self.variants)

    def calls_of(self, variants: Iterable[str]) -> tuple[Call, ...]:
        """The calls of some variants, in order."""
        return tuple(call for name in variants for call in self.variants[name])

    @property
    def default_variants(self) -> tuple[str, ...]:
        """The variants of a run that names none."""
        return tuple(name for name in self.variants if name not in self.on_request)

    def compiled_with(self, variants: tuple[str, ...]) -> tuple[str, ...]:
        """The variants that one graph or recording holds where `variants` are asked for.

        All default ones go together, so that a run of one of them finds what a run of all has compiled.
        """
        default = self.default_variants if set(variants) & set(self.default_variants) else ()
        return tuple(name for name in self.variants if name in default or name in variants)

    def op(self, quantity: str) -> OpSpec:
        """The op that writes a quantity."""
        return next(call.op for call in self.calls if quantity in call.op.writes)

    def written_dtype(self, quantity: str, dtype: str) -> str:
        """The dtype in which an op writes a quantity, in a run of `dtype`."""
        return accum_dtype(dtype) if quantity in self.op(quantity).statistics else dtype

    def saved(self, variant: str) -> list[str]:
        """What one call of a variant writes and another reads as an argument: the statistics."""
        calls = self.variants[variant]
        read = {name for call in calls for name in call.op.reads}
        return [name for call in calls for name in call.op.writes if name in read]

    def gate_of(self, variant: str, quantity: str) -> str | None:
        """The gate whose blank makes a quantity, or None where given code does."""
        gates = (g.id for g in self.gates if g.variant == variant and quantity in g.quantities)
        return next(gates, None)

    def printed(self, quantity: str) -> str:
        """The name that reports print."""
        return {**self.forward, **self.backward}.get(quantity, quantity)


@dataclass(frozen=True)
class Ledger:
    """Bytes, by tensor name: kept from forward to backward, and allocated inside one pass and given back."""

    saved_eager: Mapping[str, int]
    saved_ours: Mapping[str, int]
    between: Mapping[str, Mapping[str, int]]
