"""Describe a puzzle as data: its gates, rungs, ops, variants, cases and reference."""

import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from harness.errors import UsageError
from harness.spec.derivation import Derive, Mistake
from harness.spec.limits import Limit
from harness.spec.ops import Argument, Call, Shape
from harness.spec.rungs import MojoRung, NumpyRung, Rung, TorchRung, get_rung_name

if TYPE_CHECKING:  # importing torch takes seconds, and listing puzzles does not need it
    from torch import Tensor

Arrays = dict[str, np.ndarray]
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One set of inputs: its name, its purpose, its sizes, and how its values are drawn.

    `world_size` processes run the case; only Python rungs support more than one. A case `in_16_bits` is also
    checked in bfloat16, so that kernels pass only if they compile and accumulate correctly in dtypes other
    than float32. A case with a `variant` is for that variant only. A case that `checks_limits` also measures
    the cost of kernels and compares it with the gates' limits.
    """

    name: str
    purpose: str
    dims: Dims
    values: str
    world_size: int = 1
    in_16_bits: bool = False
    variant: str = ""
    checks_limits: bool = False


@dataclass(frozen=True)
class Gate:
    """A blank, and the quantities computed by it that are checked.

    Attributes:
        id: The id of the blank.
        variant: The variant whose kernel contains the blank; "" for a gate without a kernel.
        quantities: The outputs that only this blank computes.
        description: A few words that describe them.
        provided_quantities: Results of code outside the blanks, wrong only if that code was changed.
        recorded_quantities: Further outputs, of calls made only in recordings, not in graphs.
        limits: Limits on the cost of its kernels on the virtual GPU, in cases that check them.
    """

    id: str
    variant: str = ""
    quantities: tuple[str, ...] = ()
    description: str = ""
    provided_quantities: tuple[str, ...] = ()
    recorded_quantities: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()

    @property
    def own_quantities(self) -> tuple[str, ...]:
        return (*self.quantities, *self.recorded_quantities)


def list_gate_ids(gates: Iterable[Gate]) -> tuple[str, ...]:
    return tuple(gate.id for gate in gates)


@dataclass(frozen=True)
class Demo:
    """A demonstration of a puzzle: its flag without dashes, its description, and its function.

    `run` is ".module:function" of the puzzle's folder, imported on first use; the function takes a rich
    Console and returns the exit code. With `options` it also takes the rest of the command line as a list,
    including --help. A `finale` is suggested once the whole puzzle has passed.
    """

    flag: str
    description: str
    run: str
    options: bool = False
    finale: bool = False

    @property
    def dest(self) -> str:
        return self.flag.replace("-", "_")


@dataclass(frozen=True)
class Ledger:
    """Bytes by tensor name: of tensors saved for the backward pass and, by variant, of temporaries.

    `saved_by_variant` lists only variants that save something other than `our_saved`.
    """

    eager_saved: Mapping[str, int]
    our_saved: Mapping[str, int]
    temporaries: Mapping[str, Mapping[str, int]]
    saved_by_variant: Mapping[str, Mapping[str, int]] = field(default_factory=dict[str, Mapping[str, int]])


@dataclass(frozen=True)
class Symptom:
    """The symptom of a wrong result without a known mistake: an id, and the end of a sentence, "your dx ..."."""

    mistake: str
    description: str


def raise_missing(*_: object, **__: object) -> NoReturn:
    raise NotImplementedError("the puzzle's spec leaves this function out")


def map_printed_names(*quantities: str, **others: str) -> dict[str, str]:
    """Map each quantity to its name in reports: its own for `quantities`, the given one for `others`."""
    return {**{quantity: quantity for quantity in quantities}, **others}


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    """Everything the harness needs to know about one puzzle.

    Attributes:
        name: "p20", also the name of its folder in problems/ and solutions/.
        title: What it is about, in a few words.
        subject: A short form for headings, "Custom {subject} Gradients".
        gates: The gates, in the order in which a learner should solve them.
        rungs: The ways to solve them, in order. The main rung, the default of --rung, is the one with
            kernels, or the last if no rung has any.
        every_rung: Whether a run without --rung checks all rungs: the Python files, then the kernels.

        dims: The default sizes; `dim_names` are the names that --dims uses, such as "B" or "rows".
        list_cases: The sizes of --dims, or None -> the cases of a run.
        make_inputs: case, dtype, seed -> the input arrays: floats as float64, already rounded to the dtype,
            index maps and masks as integers and bools. A 0-d array overrides the default of an op's scalar.
        gate_cases: Further cases, each for one variant's gates only; a graph runs all variants on its cases.
        compute_derived_sizes: dims -> further sizes in the shapes of ops. Dims beyond `dim_names` affect the
            shapes only through these.
        compute_reference: torch tensors, of any dtype and device -> outputs, and gradients by autograd. For a
            variant that saves less than autograd, "variant.quantity" is its baseline, computed from what it saves.
        derive: input arrays, changed steps, dtype -> the puzzle's mathematics in NumPy, for the diagnosis
            and, in longdouble, for `compute_exact`.
        mistakes: Known mistakes, as changes of the derivation, the likeliest first.
        find_symptom: quantity, input arrays, result, truth -> a description of the wrong result, or None.
        compute_propagated_errors: input arrays, a variant's saved arrays -> for each quantity computed from
            these, the largest change due to their rounding, an error of another launch.
        compute_term_magnitudes: input arrays -> for each difference whose terms can cancel, their magnitude.

        forward: The forward outputs, op argument -> printed name. If there are none, every run checks the
            gradients.
        backward: The gradients, likewise.
        intermediate: Intermediate results that a graph also outputs, for gates of their own.

        variants: Variant name -> its calls in a graph, forward and backward. Each variant has a flag.
        variant_help: Variant -> the help of its flag; by default "only the fused kernels".
        optional_variants: Variants that run only if requested by name.
        cpu_variants: Variants whose ops also have a CPU path; the others run only on a GPU, real or virtual.
        atomic_sums: (variant, quantity) pairs summed by atomics on a GPU, in no fixed order.
        count_terms: dims -> number of terms that atomics add to one element.
        count_multiply_adds: dims -> multiply-adds of the forward pass; slow devices skip large runs.
        make_ledger: dims, dtype -> bytes saved for the backward pass and of temporaries; None if not counted.
        format_custom_dims: dims -> their text in reports; by default "rows = 4, columns = 8".

        bench: The module of the puzzle's bench candidates, "harness.puzzles.pNN.candidates", imported on
            demand; "" if nothing is timed, which makes `--bench` an unknown flag.
        after_costs: ".module:function"; it takes the launches of limit cases, by variant and case, and the
            dtype, and returns lines to print after a report's counters.
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
    list_cases: Callable[[Dims | None], list[Case]] = lambda dims: []
    gate_cases: tuple[Case, ...] = ()
    make_inputs: Callable[[Case, str, int], Arrays] = raise_missing
    compute_derived_sizes: Callable[[Dims], Mapping[str, int]] = lambda dims: {}
    compute_reference: "Callable[[dict[str, Tensor]], dict[str, Tensor]]" = raise_missing
    derive: Derive = raise_missing
    mistakes: tuple[Mistake, ...] = ()
    find_symptom: Callable[[str, Arrays, np.ndarray, np.ndarray], Symptom | None] = (
        lambda name, arrays, got, right: None
    )
    compute_propagated_errors: Callable[[Arrays, Arrays], dict[str, float]] = lambda arrays, saved: {}
    compute_term_magnitudes: Callable[[Arrays], dict[str, float]] = lambda arrays: {}

    forward: Mapping[str, str] = field(default_factory=dict[str, str])
    backward: Mapping[str, str] = field(default_factory=dict[str, str])
    intermediate: tuple[str, ...] = ()

    variants: Mapping[str, tuple[Call, ...]] = field(default_factory=dict[str, tuple[Call, ...]])
    variant_help: Mapping[str, str] = field(default_factory=dict[str, str])
    optional_variants: tuple[str, ...] = ()
    cpu_variants: tuple[str, ...] = ()
    atomic_sums: frozenset[tuple[str, str]] = frozenset()
    count_terms: Callable[[Dims], int] = lambda dims: 1
    count_multiply_adds: Callable[[Dims], int] = math.prod
    make_ledger: Callable[[Dims, str], Ledger] | None = None
    format_custom_dims: Callable[[Dims], str] | None = None

    bench: str = ""
    after_costs: str = ""
    demos: tuple[Demo, ...] = ()

    # ---- Rungs and gates ------------------------------------------------------------------------------------

    @property
    def main_rung(self) -> Rung:
        """The rung with kernels, or the last if there is none."""
        return self.mojo_rung or self.rungs[-1]

    def resolve(self, name: str) -> Any:
        return pkgutil.resolve_name(f"harness.puzzles.{self.name}{name}" if name[0] == "." else name)

    def find_rung(self, id: str) -> Rung:
        for rung in self.rungs:
            if rung.id == id:
                return rung
        raise UsageError(f"{self.name} has no {get_rung_name(id)} rung")

    def find_gate_rung(self, gate: str) -> Rung:
        """Return the last rung with a gate, or the main rung if none has it."""
        return next((rung for rung in reversed(self.rungs) if gate in rung.gates), self.main_rung)

    def list_gates(self, rung: Rung) -> list[Gate]:
        by_id = {gate.id: gate for gate in self.gates}
        return [by_id[id] for id in rung.gates]

    def get_ladder_name(self, rung: Rung, gate: str) -> str:
        """Return the name of a gate's hint ladder: "dx" in the last rung with the gate, else "numpy-dx"."""
        return gate if rung.id == self.find_gate_rung(gate).id else f"{rung.id}-{gate}"

    @property
    def mojo_rung(self) -> MojoRung | None:
        return next((rung for rung in self.rungs if isinstance(rung, MojoRung)), None)

    @property
    def source(self) -> str:
        """The file with the kernels' blanks, relative to the op package. Raises UsageError without one."""
        if self.mojo_rung is None:
            raise UsageError(f"{self.name} has no Mojo rung")
        return self.mojo_rung.source

    @property
    def kernel_gates(self) -> list[Gate]:
        return self.list_gates(self.mojo_rung) if self.mojo_rung else []

    # ---- Mathematics ----------------------------------------------------------------------------------------

    @property
    def quantities(self) -> tuple[str, ...]:
        """Steps of the derivation that are checked: results of ops, gates and Python functions."""
        names = [name for call in self.calls for name in call.op.writes]
        names += [name for gate in self.gates for name in gate.own_quantities]
        for rung in self.rungs:
            if isinstance(rung, NumpyRung):
                names += [name for returned in rung.returns.values() for name in returned]
            if isinstance(rung, TorchRung):
                for function in rung.functions.values():
                    names += [*function.returns, *function.gradients.values()]
        return tuple(dict.fromkeys(names))

    def compute_exact(self, arrays: Arrays) -> Arrays:
        """Return every quantity as the derivation computes it in NumPy longdouble."""
        v = self.derive(arrays, dtype=np.longdouble)
        return {name: np.asarray(getattr(v, name)) for name in self.quantities}

    # ---- Variants and ops -----------------------------------------------------------------------------------

    def list_limit_cases(self, variant: str, dims: Dims | None = None) -> list[Case]:
        """Return the cases that check a variant's limits: its own, or else those of all variants."""
        limit_cases = [case for case in self.list_cases(dims) if case.checks_limits]
        own_cases = [case for case in limit_cases if case.variant == variant]
        return own_cases or [case for case in limit_cases if not case.variant]

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of every variant, in order, including those made only in recordings."""
        return tuple(call for calls in self.variants.values() for call in calls)

    def list_calls(self, variants: Iterable[str]) -> tuple[Call, ...]:
        recorded_only = {quantity for gate in self.gates for quantity in gate.recorded_quantities}
        calls = (call for name in variants for call in self.variants[name])
        return tuple(call for call in calls if not recorded_only & call.op.writes.keys())

    @property
    def has_separate_variants(self) -> bool:
        """True if every variant writes its own forward outputs, in which case variants cannot be compared."""
        quantities = [quantity for call in self.calls for quantity in call.op.writes]
        return len(self.variants) > 1 and not self.backward and len(set(quantities)) == len(quantities)

    @property
    def default_variants(self) -> tuple[str, ...]:
        return tuple(name for name in self.variants if name not in self.optional_variants)

    def list_compiled_variants(self, variants: tuple[str, ...]) -> tuple[str, ...]:
        """Return the variants that one graph or recording compiles for `variants`.

        All default variants are compiled together, so that a run of one reuses what a run of all compiled.
        """
        default = self.default_variants if set(variants) & set(self.default_variants) else ()
        return tuple(name for name in self.variants if name in default or name in variants)

    def find_output_argument(self, quantity: str) -> Argument | None:
        ops = (call.op for call in self.calls)
        return next((op.writes[quantity] for op in ops if quantity in op.writes), None)

    def get_output_dtype(self, quantity: str, dtype: str) -> str:
        """Return the dtype of a quantity in a run of `dtype`: its op argument's, or `dtype` without an op."""
        argument = self.find_output_argument(quantity)
        return argument.resolve_dtype(dtype) if argument else dtype

    def get_input_dtype(self, name: str, array: np.ndarray, dtype: str) -> str:
        """Return an input's dtype in a run of `dtype`: its own for integers and bools, else the op's."""
        if array.dtype.kind != "f":
            return array.dtype.name
        ops = (call.op for call in self.calls)
        argument = next((op.reads[name] for op in ops if name in op.reads), None)
        return argument.resolve_dtype(dtype) if argument else dtype

    def get_axis_names(self, quantity: str, count: int) -> Shape:
        """Return the names of a quantity's axes in its op, or numbers if no op writes `count` axes."""
        argument = self.find_output_argument(quantity)
        return argument.shape if argument and len(argument.shape) == count else tuple(range(count))

    def list_outputs(self, variant: str) -> set[str]:
        return {name for call in self.variants[variant] for name in call.op.writes}

    def list_saved_quantities(self, variant: str) -> list[str]:
        """Return the quantities that one call of a variant writes and another reads, such as statistics."""
        calls = self.variants[variant]
        read = {name for call in calls for name in call.op.reads}
        return [name for call in calls for name in call.op.writes if name in read]

    def compute_shapes(self, dims: Dims) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the ops write, by op argument."""
        sizes = {**dict(zip(self.dim_names, dims, strict=False)), **self.compute_derived_sizes(dims)}
        return {
            name: tuple(size if isinstance(size, int) else sizes[size] for size in argument.shape)
            for call in self.calls
            for name, argument in call.op.writes.items()
        }

    # ---- Names ----------------------------------------------------------------------------------------------

    def get_printed_name(self, quantity: str) -> str:
        return {**self.forward, **self.backward}.get(quantity, quantity)

    def format_dims(self, dims: Dims) -> str:
        if self.format_custom_dims:
            return self.format_custom_dims(dims)
        return ", ".join(f"{name} = {size}" for name, size in zip(self.dim_names, dims, strict=True))
