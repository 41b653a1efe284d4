"""Describe a puzzle as data: its gates, rungs, ops, variants, cases and reference.

A puzzle without Mojo kernels omits their fields (`variants`, `atomic`, `ledger`, ...), and its command line
has no flags for them.
"""

import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from harness.errors import BadUse
from harness.spec.derivation import Derive, Mistake
from harness.spec.limits import Limit
from harness.spec.ops import Argument, Call, Shape
from harness.spec.rungs import MojoRung, NumpyRung, Rung, TorchRung, name_of

if TYPE_CHECKING:  # torch takes seconds, and a list of puzzles needs none
    from torch import Tensor

Arrays = dict[str, np.ndarray]
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One set of inputs: its name, its purpose, its sizes, and how its values are drawn.

    With a `world_size` above 1 that many processes run the case; only Python rungs support it. A case
    `in_16_bits` is also checked in bfloat16, so that a correct gate of kernels compiles and accumulates in
    other dtypes than float32. A case of a `variant` is for that variant only. In a `counted` case kernels are
    checked against the gates' limits.
    """

    name: str
    why: str
    dims: Dims
    values: str
    world_size: int = 1
    in_16_bits: bool = False
    variant: str = ""
    counted: bool = False


@dataclass(frozen=True)
class Gate:
    """One checked quantity with the blank that computes it.

    Attributes:
        id: The id of the blank.
        variant: The variant of the kernel with the blank; "" for a gate without a kernel.
        quantities: The outputs that only this blank computes.
        about: Their description in a few words.
        given: Intermediate results of code outside the blanks: wrong only if somebody changed that code.
        recorded: Further outputs, of launches in a recording but in no op of a graph.
        limits: The largest costs of its kernels, on the virtual GPU, in counted cases.
    """

    id: str
    variant: str = ""
    quantities: tuple[str, ...] = ()
    about: str = ""
    given: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()

    @property
    def own(self) -> tuple[str, ...]:
        """Quantities that the gate checks."""
        return (*self.quantities, *self.recorded)


def ids(gates: Iterable[Gate]) -> tuple[str, ...]:
    """Return the ids of some gates, as a rung holds them."""
    return tuple(gate.id for gate in gates)


@dataclass(frozen=True)
class Demo:
    """A demonstration of a puzzle: its flag without dashes, its description, and its function.

    `run` is ".module:function" of the puzzle's folder, imported on first use; the function takes a rich
    Console and returns the exit code. If the demonstration has `options` it also takes the rest of the
    command line, as a list, --help included. A `finale` follows the puzzle's last gate.
    """

    flag: str
    about: str
    run: str
    options: bool = False
    finale: bool = False

    @property
    def dest(self) -> str:
        """The name of its flag as a parser keeps it."""
        return self.flag.replace("-", "_")


@dataclass(frozen=True)
class Ledger:
    """Bytes, by tensor name: saved from forward to backward, and allocated and freed inside one pass.

    `saved_by` holds the variants that save something else than `saved_ours`.
    """

    saved_eager: Mapping[str, int]
    saved_ours: Mapping[str, int]
    between: Mapping[str, Mapping[str, int]]
    saved_by: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])


@dataclass(frozen=True)
class Symptom:
    """Appearance of a wrong result that no known mistake explains: an id, and words after "your dx ..."."""

    mistake: str
    words: str


def raise_missing(*_: object, **__: object) -> NoReturn:
    """Raise for a function that a puzzle's spec leaves out."""
    raise NotImplementedError("the puzzle's spec leaves this function out")


def printed_names(*quantities: str, **others: str) -> dict[str, str]:
    """Map quantities to the names that reports print: their own, or for `others` another."""
    return {**{quantity: quantity for quantity in quantities}, **others}


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """Everything the harness needs to know about one puzzle.

    Attributes:
        name: "p20"; the folder in problems/ and solutions/.
        title: What it is about, in a few words.
        subject: The same as headings say it, "Custom {subject} Gradients".
        gates: The gates, in the order in which a learner should take them.
        rungs: The ways to solve them, in the order in which they are taken. The one that the puzzle is about, and that
            a command means which names none, is the one with its kernels; without kernels, the last.
        every_rung: Whether a run of the kernels that names no rung checks the rungs in Python first.

        dims: The chapter's sizes; `dim_names` is what --dims takes, "B" or "rows".
        cases: dims or None -> the cases of a run.
        inputs: case, dtype, seed -> the input arrays: numbers as float64, already rounded to the dtype, index maps and
            masks as integers and bools. A scalar of the ops may be among them, as an array without axes, for a
            case that has another than the ops' own.
        gate_cases: Further cases, each of a variant, that its gates alone have: a graph runs all variants on the same.
        derived_sizes: dims -> sizes that follow from them and that shapes of the ops name. A case may have more dims than
            have names; they come here.
        reference: input tensors (torch, any dtype and device) -> outputs and gradients by autograd. Where a variant keeps
            less than autograd does, "variant.quantity" is what PyTorch makes of the same: that variant's baseline.
        derive: input arrays, changed steps and a dtype -> the puzzle's mathematics in NumPy, for the diagnosis and, in
            longdouble, for `exact`.
        mistakes: Known mistakes, as changes of the derivation, the likeliest first.
        symptom: quantity, input arrays, what was got, what it should be -> what a wrong result looks like, or None.
        propagated: input arrays, what a variant saved -> how far at most the rounding of the latter moves a quantity that
            is computed from it: an error of another launch.
        terms: input arrays -> the size of the terms whose difference a quantity is, where they can cancel.

        forward: The forward outputs, op argument -> printed name. Of a puzzle without any, every run checks the
            gradients.
        backward: The gradients, likewise.
        intermediate: What the graph also makes visible, for a gate of its own.

        variants: Variant name -> the calls of one graph that run it, forward and backward. Each has a flag.
        about_variants: Variant -> what its flag's help says; "only the fused kernels" without.
        on_request: Variants that run only if they are requested by name.
        on_cpu: Variants whose ops have a CPU path too; the others run on a GPU, real or virtual, alone.
        atomic: (variant, quantity) pairs whose sums are made with atomics on a GPU, in no fixed order.
        summands: dims -> how many terms the atomics add up in one element.
        multiply_adds: dims -> how many the forward pass needs; what decides whether a slow device is run.
        ledger: dims and dtype -> the bytes saved for backward and allocated in between; None if none are counted.
        describe_dims: dims -> how a report says them; "rows = 4, columns = 8" without.

        bench: The module of the puzzle's bench candidates, "harness.puzzles.pNN.candidates", imported when it is asked
            for; "" if nothing is timed, and `--bench` is then an unknown flag.
        after_costs: ".module:function", which gives the lines that a report ends its counters with, from the counted launches
            by variant and case, and the dtype.
        demos: The demonstrations, each with a flag of its own.
    """

    name: str
    title: str
    subject: str = ""
    gates: tuple[Gate, ...]
    rungs: tuple[Rung, ...]
    every_rung: bool = False

    dims: Dims = ()
    dim_names: tuple[str, ...] = ()
    cases: Callable[[Dims | None], list[Case]] = lambda dims: []
    gate_cases: tuple[Case, ...] = ()
    inputs: Callable[[Case, str, int], Arrays] = raise_missing
    derived_sizes: Callable[[Dims], Mapping[str, int]] = lambda dims: {}
    reference: "Callable[[dict[str, Tensor]], dict[str, Tensor]]" = raise_missing
    derive: Derive = raise_missing
    mistakes: tuple[Mistake, ...] = ()
    symptom: Callable[[str, Arrays, np.ndarray, np.ndarray], Symptom | None] = (
        lambda name, arrays, got, right: None
    )
    propagated: Callable[[Arrays, Arrays], dict[str, float]] = lambda arrays, saved: {}
    terms: Callable[[Arrays], dict[str, float]] = lambda arrays: {}

    forward: Mapping[str, str] = field(default_factory=dict[str, str])
    backward: Mapping[str, str] = field(default_factory=dict[str, str])
    intermediate: tuple[str, ...] = ()

    variants: Mapping[str, tuple[Call, ...]] = field(default_factory=dict[str, tuple[Call, ...]])
    about_variants: Mapping[str, str] = field(default_factory=dict[str, str])
    on_request: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()
    atomic: frozenset[tuple[str, str]] = frozenset()
    summands: Callable[[Dims], int] = lambda dims: 1
    multiply_adds: Callable[[Dims], int] = math.prod
    ledger: Callable[[Dims, str], Ledger] | None = None
    describe_dims: Callable[[Dims], str] | None = None

    bench: str = ""
    after_costs: str = ""
    demos: tuple[Demo, ...] = ()

    # ---- Rungs and gates ------------------------------------------------------------------------------------

    @property
    def main_rung(self) -> Rung:
        """The rung that the puzzle is about: its kernels, or the last if it has none."""
        return self.mojo_rung or self.rungs[-1]

    def resolve(self, name: str) -> Any:
        """Import "module:name"; ".module:name" is in the puzzle's own folder."""
        return pkgutil.resolve_name(f"harness.puzzles.{self.name}{name}" if name[0] == "." else name)

    def rung(self, id: str) -> Rung:
        """Return a rung by its id. Raises BadUse for an unknown one."""
        for rung in self.rungs:
            if rung.id == id:
                return rung
        raise BadUse(f"{self.name} has no {name_of(id)} rung")

    def rung_of(self, gate: str) -> Rung:
        """Return the last rung with a gate, the main one if none has it."""
        return next((rung for rung in reversed(self.rungs) if gate in rung.gates), self.main_rung)

    def gates_of(self, rung: Rung) -> list[Gate]:
        """Return the gates whose blanks a rung's file holds, in its order."""
        by_id = {gate.id: gate for gate in self.gates}
        return [by_id[id] for id in rung.gates]

    def ladder(self, rung: Rung, gate: str) -> str:
        """Return the name of a gate's hint ladder: the gate's own in the last rung that holds it, else "numpy-dx"."""
        return gate if rung.id == self.rung_of(gate).id else f"{rung.id}-{gate}"

    @property
    def mojo_rung(self) -> MojoRung | None:
        """The rung with the kernels, or None."""
        return next((rung for rung in self.rungs if isinstance(rung, MojoRung)), None)

    @property
    def source(self) -> str:
        """The file with the kernels' blanks, relative to the op package. Raises BadUse for a puzzle without kernels."""
        if self.mojo_rung is None:
            raise BadUse(f"{self.name} has no Mojo rung")
        return self.mojo_rung.source

    @property
    def kernel_gates(self) -> list[Gate]:
        """The gates of the Mojo rung."""
        return self.gates_of(self.mojo_rung) if self.mojo_rung else []

    # ---- Mathematics ----------------------------------------------------------------------------------------

    @property
    def quantities(self) -> tuple[str, ...]:
        """Steps of the derivation that are checked: results of ops, gates and Python functions."""
        names = [name for call in self.calls for name in call.op.writes]
        names += [name for gate in self.gates for name in gate.own]
        for rung in self.rungs:
            if isinstance(rung, NumpyRung):
                names += [name for returned in rung.returns.values() for name in returned]
            if isinstance(rung, TorchRung):
                for function in rung.functions.values():
                    names += [*function.returns, *function.gradients.values()]
        return tuple(dict.fromkeys(names))

    def exact(self, arrays: Arrays) -> Arrays:
        """Return every quantity in NumPy longdouble, by the steps of the derivation."""
        v = self.derive(arrays, dtype=np.longdouble)
        return {name: np.asarray(getattr(v, name)) for name in self.quantities}

    # ---- Variants and ops -----------------------------------------------------------------------------------

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of every variant, in order, those that a recording alone has too."""
        return tuple(call for calls in self.variants.values() for call in calls)

    def calls_of(self, variants: Iterable[str]) -> tuple[Call, ...]:
        """Return the calls of a graph of some variants, in order."""
        recorded = {quantity for gate in self.gates for quantity in gate.recorded}
        calls = (call for name in variants for call in self.variants[name])
        return tuple(call for call in calls if not recorded & call.op.writes.keys())

    @property
    def separate(self) -> bool:
        """True if every variant has forward outputs of its own, so that there is nothing to compare."""
        written = [quantity for call in self.calls for quantity in call.op.writes]
        return len(self.variants) > 1 and not self.backward and len(set(written)) == len(written)

    @property
    def default_variants(self) -> tuple[str, ...]:
        """The variants of a run that names none."""
        return tuple(name for name in self.variants if name not in self.on_request)

    def compiled_with(self, variants: tuple[str, ...]) -> tuple[str, ...]:
        """Return the variants that one graph or recording compiles for `variants`.

        All default ones are compiled together, so that a run of one of them reuses what a run of all has
        compiled.
        """
        default = self.default_variants if set(variants) & set(self.default_variants) else ()
        return tuple(name for name in self.variants if name in default or name in variants)

    def written(self, quantity: str) -> Argument | None:
        """Return a quantity as its op writes it, None if no op does."""
        ops = (call.op for call in self.calls)
        return next((op.writes[quantity] for op in ops if quantity in op.writes), None)

    def written_dtype(self, quantity: str, dtype: str) -> str:
        """Return the dtype in which a quantity is written, in a run of `dtype`."""
        argument = self.written(quantity)
        return argument.dtype_in(dtype) if argument else dtype

    def input_dtype(self, name: str, array: np.ndarray, dtype: str) -> str:
        """Return the dtype of an input in a run of `dtype`: its own for integers and bools, else as the ops read it."""
        if array.dtype.kind != "f":
            return array.dtype.name
        ops = (call.op for call in self.calls)
        argument = next((op.reads[name] for op in ops if name in op.reads), None)
        return argument.dtype_in(dtype) if argument else dtype

    def axes(self, quantity: str, count: int) -> Shape:
        """Return the names of a quantity's axes in its op; numbers if no op writes it with so many."""
        argument = self.written(quantity)
        return argument.shape if argument and len(argument.shape) == count else tuple(range(count))

    def writes(self, variant: str) -> set[str]:
        """Return the quantities that the calls of a variant write."""
        return {name for call in self.variants[variant] for name in call.op.writes}

    def saved_quantities(self, variant: str) -> list[str]:
        """Return the quantities that one call of a variant writes and another reads as an argument: the
        statistics."""
        calls = self.variants[variant]
        read = {name for call in calls for name in call.op.reads}
        return [name for call in calls for name in call.op.writes if name in read]

    def shapes(self, dims: Dims) -> dict[str, tuple[int, ...]]:
        """Return the shape of everything the ops write, by op argument."""
        sizes = {**dict(zip(self.dim_names, dims, strict=False)), **self.derived_sizes(dims)}
        return {
            name: tuple(size if isinstance(size, int) else sizes[size] for size in argument.shape)
            for call in self.calls
            for name, argument in call.op.writes.items()
        }

    # ---- Words ----------------------------------------------------------------------------------------------

    def printed_name(self, quantity: str) -> str:
        """Return the name that reports print."""
        return {**self.forward, **self.backward}.get(quantity, quantity)

    def say_dims(self, dims: Dims) -> str:
        """Format sizes for a report."""
        if self.describe_dims:
            return self.describe_dims(dims)
        return ", ".join(f"{name} = {size}" for name, size in zip(self.dim_names, dims, strict=True))
