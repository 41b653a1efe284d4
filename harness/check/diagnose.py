"""Describe a wrong tensor: the size of the error, its location, and the known mistake that reproduces it.

The learner's values are compared with those of each known mistake of the puzzle, computed in NumPy on the
inputs of the failing cases. A mistake is reported only if it explains every failing case.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.check.compare import (
    MIN_IMPROVEMENT,
    Evidence,
    compute_severity,
    describe_wrong_bits,
    format_got_and_expected,
    max_abs,
)
from harness.check.families import find_family
from harness.check.results import UNKNOWN, Diagnosis, GateResult
from harness.spec.cases import CANCELLING, is_nonfinite
from harness.spec.derivation import Mistake
from harness.spec.ops import Shape
from harness.spec.puzzle import Dims, Puzzle, Symptom
from harness.spec.rounding import round_to_dtype
from harness.vgpu import Finding

MAX_ELEMENTS = 4
TILE_SIZES = (128, 32, 16)
# Above this many multiply-adds the NumPy formulas are slow, and only the location of the errors is reported.
MAX_MULTIPLY_ADDS = 2**26
# Maximum number of mistakes reported together, if all give the same values in every failing case.
MAX_MISTAKES = 3
# A formula that explains only the finite elements must explain this many wrong ones.
MIN_FINITE_ELEMENTS = 4
# Distances up to this are rounding, and do not rank mistakes.
ROUNDING_DISTANCE = 1e-6
# An error of this many times its limit is clear; the smallest case with a clear error is shown.
CLEAR_SEVERITY = 1000
# Rounding error of the largest of many terms in 16 bits: a few units in the last place of bfloat16.
ROUNDING_ERROR_16_BIT = 2.0**-6
# An error that several roundings to float32 may cause, relative to the largest value.
ROUNDING_ERROR_FLOAT32 = 2.0**-19


@dataclass(frozen=True)
class Explanation:
    """Known mistakes that give the same values, likeliest first, and the result's largest distance from them.

    `finite_elements_only`: NaN elements of the result are not explained. `finite_cases_only`: cases with NaN
    or infinity are not explained.
    """

    mistakes: tuple[Mistake, ...]
    distance: float
    finite_elements_only: bool = False
    finite_cases_only: bool = False

    @property
    def description(self) -> str:
        """The end of the sentence "your dx equals the reference ..."."""
        first, *alternatives = dict.fromkeys(mistake.description for mistake in self.mistakes)
        precision = f"to {self.distance:.0e}" if self.distance else "exactly"
        text = f"{first}, {precision}"
        text += "".join(
            f"; or {other}, which gives the same here" for other in alternatives[: MAX_MISTAKES - 1]
        )
        if self.finite_elements_only:
            text += ", wherever it is a number; the rest is 0 / 0, -inf - -inf, 0 * inf or an overflow"
        elif self.finite_cases_only:
            text += ", but not where an input is NaN or infinite"
        return text


def diagnose(
    puzzle: Puzzle,
    quantity: str,
    evidence: Sequence[Evidence],
    *,
    name: str = "",
    gate: str | None = None,
    correct: Collection[str] = (),
) -> Diagnosis:
    """Describe what is wrong with a quantity.

    `evidence`: the failing cases. `gate`: the gate whose hints to suggest. `correct`: other quantities of the
    run, correct in every case.
    """
    name = name or quantity
    worst = choose_example(evidence, puzzle.dims)
    axes = puzzle.get_axis_names(quantity, worst.got.ndim)
    argument = puzzle.find_output_argument(quantity)
    reports = describe_elements(worst, name, axes, bits=argument is not None and argument.is_bitmask)
    values = [*reports, f"where in '{worst.case.name}': {describe_location(worst.wrong_mask, axes)}"]
    explanation = find_explanation(puzzle, quantity, evidence, correct)
    symptom = None if explanation else describe_unexplained(puzzle, quantity, evidence, worst)
    number = 2 if symptom and symptom.mistake in NONFINITE_SYMPTOMS else 1
    hint = f"{gate}-{explanation.mistakes[0].hint if explanation else number}" if gate else None
    suffix = f": see hint {hint}" if hint else ""
    if explanation:
        first = explanation.mistakes[0]
        sentence = f"your {name} equals the reference {explanation.description}{suffix}"
        return Diagnosis(sentence, values, first.id, hint, frozenset(first.changes))
    if symptom:
        is_unwritten = symptom.mistake == UNWRITTEN.mistake
        sentence = (
            f"a part of your {name} is never written"
            if is_unwritten
            else f"your {name} {symptom.description}"
        )
        return Diagnosis(sentence + suffix, values, symptom.mistake, hint)
    return Diagnosis((hint and f"{UNKNOWN}{suffix}") or "", values, None, hint)


NONFINITE_SYMPTOMS = ("not-finite", "infinite-at-first", "nan-swallowed", "nan-at-infinity", "nan-spread")
"""Symptoms of a missing shift or guard, the topic of a ladder's second hint."""
UNWRITTEN = Symptom("never-written", "is in part never written")


def describe_unexplained(
    puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence], worst: Evidence
) -> Symptom | None:
    """Describe a result that no known mistake explains."""
    with np.errstate(all="ignore"):
        least_precise = max(evidence, key=lambda e: e.error / e.scale) if worst.dtype == "float64" else worst
        symptom = (
            find_nonfinite_mismatch(evidence, worst)
            or find_low_precision(least_precise)
            or find_rounded_terms(puzzle, quantity, evidence)
            or puzzle.find_symptom(quantity, worst.arrays, worst.got, worst.truth)
        )
    if symptom:
        return symptom
    if worst.result.num_unwritten:
        return UNWRITTEN
    if worst.result.num_nonfinite:
        return Symptom(
            "not-finite",
            "holds values that are no numbers: a division by 0, a logarithm of 0, an overflow, a row that is all -inf, or, in a kernel, "
            "a sum added to memory that nothing has cleared",
        )
    if any(puzzle.count_multiply_adds(e.case.dims) > MAX_MULTIPLY_ADDS for e in evidence):
        return None
    return find_family(puzzle, quantity, evidence)


def choose_example(evidence: Sequence[Evidence], dims: Dims = ()) -> Evidence:
    """Return the case to show: preferably finite, and the smallest that is clearly wrong.

    The default sizes, `dims`, are preferred; a case that has size 1 on an axis where the default is
    larger is not informative.
    """
    clear = min(CLEAR_SEVERITY, max(compute_severity(e) for e in evidence))
    small = min(MAX_ELEMENTS, max(e.got.size for e in evidence) - 1)  # a norm is one number in every case

    def rank(e: Evidence) -> tuple[bool, bool, bool, bool, bool, float]:
        thin = any(size == 1 != default for size, default in zip(e.case.dims, dims, strict=False))
        typical = bool(max_abs(e.truth)) and e.got.size > small and compute_severity(e) >= clear and not thin
        incomplete = bool(e.result.num_nonfinite or e.result.num_unwritten)
        size = sum(array.size for array in e.arrays.values())
        finite, all_finite = bool(np.isfinite(e.truth).all()), not has_nonfinite_values(e)
        has_default_dims, tie_breaker = (
            typical and e.case.dims == dims,
            -size if typical else compute_severity(e),
        )
        return (
            finite,
            (typical or incomplete) and all_finite,
            incomplete,
            typical,
            has_default_dims,
            tie_breaker,
        )

    return max(evidence, key=rank)


def describe_elements(evidence: Evidence, name: str, axes: Shape, bits: bool = False) -> Iterator[str]:
    """Yield lines about the first few wrong elements: result, expected value and ratio, or the wrong bits.

    The index of the first is also spelled out with the names of the `axes`.
    """
    wrong_indices = np.argwhere(evidence.wrong_mask)
    if evidence.result.num_unwritten:
        count = int(evidence.unwritten_mask.sum())
        yield f"{count} of {evidence.got.size} elements of {name} were never written"
    nonfinite = ~np.isfinite(evidence.got) & np.isfinite(evidence.truth) & ~evidence.unwritten_mask
    if nonfinite.any():
        kinds = "NaN" if np.isnan(evidence.got[nonfinite]).all() else "infinite or NaN"
        yield f"{int(nonfinite.sum())} of {evidence.got.size} elements of {name} are {kinds}"
    for number, index in enumerate(wrong_indices[:MAX_ELEMENTS].tolist()):
        position = tuple(index)
        got, truth = float(evidence.got[position]), float(evidence.truth[position])
        if bits and not evidence.unwritten_mask[position]:
            text = describe_wrong_bits(got, truth)
        elif evidence.unwritten_mask[position]:
            text = f"never written, expected {truth:.7g}"
        else:
            text = format_got_and_expected(got, truth, evidence.result.limit * evidence.scale)
        line = f"{name}{index or ''} {text}{describe_ratio(evidence, position)}"
        index_description = describe_index(index, axes)
        yield f"{line} ({index_description})" if index_description and not number else line
    if len(wrong_indices) > MAX_ELEMENTS:
        yield f"... {len(wrong_indices)} of {evidence.got.size} elements are wrong"


def describe_ratio(evidence: Evidence, index: tuple[int, ...]) -> str:
    """Return the ratio of an element to its expected value in words, or "" if it is meaningless."""
    got, truth = float(evidence.got[index]), float(evidence.truth[index])
    is_integer = "float" not in evidence.dtype  # masks and indices
    is_unwritten = evidence.unwritten_mask[index]
    if is_integer or is_unwritten or not (got and truth and np.isfinite([got, truth]).all()):
        return ""
    ratio = f"{got / truth:.4g}"
    return "" if ratio == "1" else f": {ratio} times that"


def describe_index(index: Sequence[int], axes: Shape) -> str:
    """Return an index in words, "row 1, column 2", or "" if an axis has no name."""
    if not all(isinstance(name, str) for name in axes):
        return ""
    names = [re.sub(r"(?<=[a-z]{2})s$", "", str(name)) for name in axes]
    return ", ".join(f"{name} {position}" for name, position in zip(names, index, strict=True))


def describe_location(wrong: np.ndarray, axes: Shape) -> str:
    """Describe where a tensor's wrong elements are; an axis in `axes` is a name or, if unnamed, a size."""
    if wrong.all():
        return "every element"
    if wrong.sum() == 0:
        return "the tensor as a whole"
    if wrong.sum() == 1:
        return f"one element, {np.argwhere(wrong)[0].tolist()}"
    parts, block = describe_axes(wrong, axes)
    if parts:
        return ", ".join(parts) + ("" if block.all() else f" ({block.mean():.0%} of the elements there)")
    rest, block = describe_axes(~wrong, axes)
    if rest and block.all():
        return f"everything but {', '.join(part.removeprefix('only ') for part in rest)}"
    return f"spread over the tensor, {wrong.mean():.0%} of the elements"


def describe_axes(mask: np.ndarray, axes: Shape) -> tuple[list[str], np.ndarray]:
    """Return descriptions of where marked elements are along each axis, and their bounding block."""
    indices = [
        np.flatnonzero(mask.any(tuple(k for k in range(mask.ndim) if k != axis))) for axis in range(mask.ndim)
    ]
    descriptions = [
        describe_axis(hit, mask.shape[axis], size if isinstance(size, str) else f"axis {axis}")
        for axis, (hit, size) in enumerate(zip(indices, axes, strict=True))
    ]
    return [part for part in descriptions if part], mask[np.ix_(*indices)]


def describe_axis(indices: np.ndarray, size: int, axis: str) -> str:
    """Describe which indices of one axis have wrong elements; "" if all do."""
    if len(indices) == size:
        return ""
    first, last = int(indices[0]), int(indices[-1])
    if len(indices) == 1:
        note = " (the last)" if first == size - 1 else " (the first)" if first == 0 else ""
        return f"only {axis} = {first}{note}"
    if last - first + 1 != len(indices):
        steps = np.diff(indices)
        if len(indices) > 2 and (steps == steps[0]).all():
            return f"{axis} = {first}, {first + int(steps[0])}, ... (every {int(steps[0])})"
        return f"{len(indices)} of {size} along {axis}"
    if last == size - 1:
        tile = next((t for t in TILE_SIZES if first and first % t == 0 and size - first <= t), None)
        if tile:
            return f"the last tile of {tile} along {axis}, from {first}"
        return f"{axis} from {first} to the end"
    return f"{axis} from {first} to {last}"


def find_explanation(
    puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence], correct: Collection[str] = ()
) -> Explanation | None:
    """Return the known mistakes that give these values in every failing case.

    A mistake with `together` is skipped if a quantity that it changes is among the `correct` ones. If none
    explains every value, accept one that explains all finite values, or all values of the finite cases: NaN
    and infinity may depend on how a formula is written.
    """
    if not puzzle.mistakes or any(
        puzzle.count_multiply_adds(e.case.dims) > MAX_MULTIPLY_ADDS for e in evidence
    ):
        return None
    if not any(np.isfinite(e.got).any() for e in evidence):
        return None  # without a finite value, too many formulas fit
    steps = puzzle.derive(evidence[0].arrays, {})
    with np.errstate(all="ignore"):
        getattr(steps, quantity)
    all_nonfinite = all(is_nonfinite(e.case.values) for e in evidence)
    candidates = [
        mistake
        for mistake in puzzle.mistakes
        if not mistake.changes.keys().isdisjoint(vars(steps))  # the quantity depends on the change
        and not (mistake.needs_all_wrong and not mistake.changes.keys().isdisjoint(correct))
        and not (all_nonfinite and changes_finite_values(puzzle, quantity, evidence[0], mistake))
    ]
    smallest_first = sorted(evidence, key=lambda e: e.got.size)
    explanation = find_matching_mistakes(puzzle, quantity, smallest_first, candidates)
    finite_wrong = sum(int((e.wrong_mask & np.isfinite(e.got)).sum()) for e in evidence)
    has_lost = any((np.isfinite(e.truth) & ~np.isfinite(e.got)).any() for e in evidence)
    if not explanation and has_lost and finite_wrong >= MIN_FINITE_ELEMENTS:
        explanation = find_matching_mistakes(
            puzzle, quantity, smallest_first, candidates, finite_elements_only=True
        )
    finite_cases = [
        e for e in smallest_first if not is_nonfinite(e.case.values) and np.isfinite(e.truth).all()
    ]
    if not explanation and 0 < len(finite_cases) < len(evidence):
        explanation = find_matching_mistakes(puzzle, quantity, finite_cases, candidates)
        return explanation and replace(explanation, finite_cases_only=True)
    return explanation


def changes_finite_values(puzzle: Puzzle, quantity: str, e: Evidence, mistake: Mistake) -> bool:
    """Check whether a mistake also changes a quantity if all inputs are finite."""
    arrays = {name: np.where(np.isfinite(array), array, 1) for name, array in e.arrays.items()}
    with np.errstate(all="ignore"):
        correct, mistaken = (
            getattr(puzzle.derive(arrays, changes), quantity) for changes in (None, mistake.changes)
        )
        return not np.allclose(correct, mistaken, rtol=1e-3, atol=0)


def find_matching_mistakes(
    puzzle: Puzzle,
    quantity: str,
    evidence: Sequence[Evidence],
    candidates: Sequence[Mistake],
    finite_elements_only: bool = False,
) -> Explanation | None:
    """Return the mistakes that give a quantity's values, or just the finite ones, in every case."""
    matches: list[tuple[Mistake, float]] = []
    for mistake in candidates:
        distances: list[float] = []
        for e in evidence:
            with np.errstate(all="ignore"):
                formula = getattr(puzzle.derive(e.arrays, mistake.changes), quantity)
                distance = e.match_formula(formula, finite_elements_only)
            if distance is None:
                break
            distances.append(distance)
        else:
            matches.append((mistake, max(distances)))
    if not matches:
        return None
    nearest = min(distance for _, distance in matches)
    farthest = max(
        MIN_IMPROVEMENT * nearest, ROUNDING_DISTANCE
    )  # a mistake close to this one may fit as well
    matches = [fit for fit in matches if fit[1] <= farthest]
    return Explanation(tuple(mistake for mistake, _ in matches), matches[0][1], finite_elements_only)


# Finding kind -> the mistake that causes it and what it means. Causes come before their effects: threads that
# diverge leave memory unwritten and race with each other.
CAUSES = {
    "barrier divergence": ("barrier-divergence",
        "some threads of a block never reach a barrier(), or a collective such as block.sum that "
        "contains one: it is in a branch that only some of them take, or after a return"),
    "early return": ("barrier-divergence",
        "threads return early, and what they should have written for the others of their block is missing"),
    "warp divergence": ("warp-divergence",
        "a warp-wide operation (warp.sum, a shuffle) is not reached by all threads of the warp, or by one that its mask leaves out"),
    "shuffle from an absent thread": ("warp-divergence",
        "a warp-wide operation (warp.sum, a shuffle) reads from threads that do not take part"),
    "store to an input": ("input-overwritten",
        "the kernel writes to an input: PyTorch, and every kernel that reads it after this "
        "launch, gets the wrong values"),
    "hang": ("endless-loop", "a loop does not end"),
    "trap": ("trap", "an assertion has stopped the kernel, or it has reached a line that it never should"),
    **{
        f"{kind} {access}": (mistake.format(access), description.format(access))
        for kind, mistake, description in (
            ("out-of-bounds", "out-of-bounds-{}", "an index is outside of a tensor ({})"),
            ("misaligned", "misaligned-vector",
             "a GPU stops at an access whose address is not a multiple of its size: a vector of four "
             "elements may begin only at every fourth element of memory, whatever the row"),
            ("null pointer", "null-pointer", "the kernel uses a pointer that points to nothing"),
        )
        for access in ("load", "store", "atomic")
    },
    "undeclared atomic": ("undeclared-atomic",
        "this result must be the same in every run, and a sum by atomics is not: add up in a fixed order"),
    "shared race": ("missing-barrier",
        "threads of one block use the same shared memory with no barrier() between them"),
    "race inside a block": ("missing-barrier", "threads of one block use the same memory with no barrier()"),
    "atomic scope": ("atomic-scope",
        "an atomic of block scope protects only against threads of the same block, and several "
        "blocks use it: additions get lost"),
    "unfinished copy": ("copy-not-waited-for",
        "the kernel reads shared memory before it has waited for the asynchronous copy to it: first the wait for its "
        "group, then barrier()"),
    "uninitialised read": ("uninitialised-read", "the kernel reads memory that nothing has written"),
}  # fmt: skip
DIVERGENCE_KINDS = list(CAUSES)[:4]
PRIMARY_KINDS = [
    *(*DIVERGENCE_KINDS, "hang", "trap", "store to an input"),
    *(kind for kind in CAUSES if kind.startswith(("misaligned", "null pointer"))),
]
"""Kinds of findings that count as the cause, regardless of other findings."""
PRIMARY_MISTAKES = {CAUSES[kind][0] for kind in PRIMARY_KINDS}
"""The mistakes behind PRIMARY_KINDS, which take precedence over explanations by values."""


OUT_OF_BOUNDS_KINDS = tuple(kind for kind in CAUSES if kind.startswith("out-of-bounds"))
BLOCK_RACE_KINDS = ("shared race", "race inside a block")
SECONDARY_KINDS = {"uninitialised read", "output never written", "global race", *BLOCK_RACE_KINDS}
"""Findings that may follow from divergence or a wrong index: unwritten memory, and races."""


CERTAIN_MISTAKES = ("barrier-divergence", "warp-divergence", "endless-loop")
"""Mistakes that a wrong index cannot cause."""


def drop_secondary_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Remove findings that may be effects of others, such as unwritten memory after a missed barrier."""
    kernels = {f.kernel for f in findings if f.kind in (*OUT_OF_BOUNDS_KINDS, *DIVERGENCE_KINDS)}
    return [f for f in findings if f.kernel not in kernels or f.kind not in SECONDARY_KINDS]


def find_cause(findings: Sequence[Finding]) -> tuple[str, str] | None:
    """Return the mistake that causes the findings of the virtual GPU, and what it means."""
    kinds = {finding.kind for finding in findings}
    if cause := next((CAUSES[kind] for kind in PRIMARY_KINDS if kind in kinds), None):
        return cause
    races = [finding for finding in findings if finding.kind == "global race"]
    # A plain `+=` loads and stores the element in one line: the line of both accesses or, if one of them is
    # an atomic, the line of the other.
    has_plain_addition = any(
        race.access_kinds >= {"a load", "a store"}
        and (
            "an atomic" in race.access_kinds
            or race.location.split(":")[:-1] == race.other_location.split(":")[:-1]
        )
        for race in races
    )
    if not has_plain_addition and any("atomic" in race.message and "store" in race.message for race in races):
        description = "one block stores to what other blocks add to, and nothing orders the blocks of a grid"
        return "zeroed-in-the-kernel", description
    if has_plain_addition:
        description = "blocks read, add and write the same element without an atomic: additions get lost"
        return "missing-atomic", description
    if races:
        return "overwritten", (
            "blocks store to the same element and the last one wins: nothing is added up, or an index is the same in every block, as "
            "thread_idx is"
        )
    messages = [finding.message for finding in findings if finding.kind in BLOCK_RACE_KINDS]
    both_store = all(m.count(": a store by ") + m.count(" and a store by ") == 2 for m in messages)
    if messages and both_store and kinds <= SECONDARY_KINDS:
        return "several-writers", (
            "several threads of a block store to the same element: one of them should, or each to an element of its own"
        )
    # The order is by frequency, but unwritten memory may be an effect of the others.
    ordered = sorted(findings, key=lambda finding: finding.kind == "uninitialised read")
    return next((CAUSES[finding.kind] for finding in ordered if finding.kind in CAUSES), None)


def find_nonfinite_mismatch(evidence: Sequence[Evidence], worst: Evidence) -> Symptom | None:
    """Check whether NaN and infinity propagate differently from PyTorch, if no finite case is wrong."""
    if not all(has_nonfinite_values(e) for e in evidence):
        return None
    if (np.isfinite(worst.got) & ~np.isfinite(worst.truth)).any():
        return Symptom(
            "nan-swallowed",
            "is finite where PyTorch's is NaN or infinite: a comparison, a select or a maximum drops the NaN",
        )
    if not (np.isfinite(worst.truth) & ~np.isfinite(worst.got) & ~worst.unwritten_mask).any():
        return None
    inputs = np.concatenate([array.ravel() for e in evidence for array in e.arrays.values()])
    if not (np.isnan(inputs) | np.isposinf(inputs)).any():
        return Symptom(
            "nan-at-infinity",
            "is NaN or infinite where PyTorch's is finite, and only where an input is -inf: a guard is missing (-inf - -inf, 0 / 0), "
            "a sign or an axis is wrong, or an element is read that is not needed (0 * inf) or that nothing has written",
        )
    return Symptom(
        "nan-spread",
        "is NaN or infinite where PyTorch's is finite: an element is read that is not needed (0 * NaN), a value is multiplied by 0 "
        "that should be left out (0 * inf), or a guard is missing (inf - inf, inf / inf)",
    )


def has_nonfinite_values(e: Evidence) -> bool:
    return not (np.isfinite(e.truth).all() and all(np.isfinite(array).all() for array in e.arrays.values()))


def find_low_precision(e: Evidence) -> Symptom | None:
    """Check whether all elements are values of a 16-bit type or, in float64, have an error as in float32."""
    if e.dtype not in ("float32", "float64") or not np.isfinite(e.got).all():
        return None
    if e.dtype == "float64" and e.error <= ROUNDING_ERROR_FLOAT32 * e.scale:
        description = "is off by a rounding of float32: somewhere it is computed in less than float64"
        return Symptom("single-precision", description)
    if e.got.size < 4:
        return None
    for dtype in ("bfloat16", "float16"):
        if (round_to_dtype(e.got, dtype) == e.got).all() and compute_severity(e) < 1e5:
            description = f"has only the digits of {dtype}: somewhere it is rounded to 16 bits"
            return Symptom(f"rounded-to-{dtype}", description)
    return None


def find_rounded_terms(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Check whether only cancelling sums are wrong, with errors as if their terms were rounded to 16 bits."""
    for e in evidence:
        if e.case.values != CANCELLING or not np.isfinite(e.got).all():
            return None
        absolute_inputs = {name: np.abs(a) if a.dtype.kind == "f" else a for name, a in e.arrays.items()}
        magnitudes = np.abs(getattr(puzzle.derive(absolute_inputs, {}), quantity))
        scale = max(magnitudes.max(initial=0.0), puzzle.compute_term_magnitudes(e.arrays).get(quantity, 0.0))
        if np.abs(e.got - e.truth).max(initial=0.0) > ROUNDING_ERROR_16_BIT * scale:
            return None
    return Symptom(
        "rounded-in-a-sum",
        "is off by a rounding to 16 bits, and only where a sum cancels: the sum, or a term of it, is rounded on the way; add up in "
        "float32, and round once",
    )


# ---- Errors that follow from earlier ones -------------------------------------------------------------------

# If one wrong value affects several gates or quantities, only the first is explained; a spec lists their
# dependencies. A quantity whose values match a mistake in its own last step is wrong by itself, even if a
# dependency is wrong too.
Dependencies = Mapping[str, Sequence[str]]
"""Name -> the names that it is computed from."""


def find_first_wrong(name: str, dependencies: Dependencies, wrong: Collection[str]) -> str | None:
    """Return the first wrong dependency of `name`, direct or indirect, or None."""
    first = next((dependency for dependency in dependencies.get(name, ()) if dependency in wrong), None)
    return first and (find_first_wrong(first, dependencies, wrong) or first)


def format_pointer(dependency: str) -> str:
    return f"computed from {dependency}, which is wrong: fix that first"


def redirect_gates(results: Sequence[GateResult], dependencies: Dependencies) -> None:
    """Replace the diagnosis of each wrong gate that is computed from a wrong gate with a pointer to it."""
    wrong = {result.gate.id: result for result in results if result.state == "wrong"}
    for id, result in wrong.items():
        first = find_first_wrong(id, dependencies, wrong)
        if first and not result.is_own_mistake:
            result.diagnosis, result.findings = [format_pointer(first)], []
            result.mistake, result.hint = None, wrong[first].hint


def redirect_quantities(diagnoses: dict[str, Diagnosis], puzzle: Puzzle, variant: str) -> None:
    """Replace the diagnosis of each quantity whose op reads a wrong quantity with a pointer to it."""
    calls = puzzle.variants[variant]
    dependencies = {quantity: tuple(call.op.reads) for call in calls for quantity in call.op.writes}
    for quantity, diagnosis in diagnoses.items():
        first = find_first_wrong(quantity, dependencies, diagnoses)
        if first and not diagnosis.is_own_step(quantity):
            diagnoses[quantity] = Diagnosis(format_pointer(puzzle.get_printed_name(first)))


def redirect_repeats(diagnoses: dict[str, Diagnosis], puzzle: Puzzle) -> None:
    """Replace each diagnosis that repeats an earlier quantity's mistake with a pointer to that quantity."""
    first_by_mistake: dict[str, str] = {}
    for quantity, diagnosis in diagnoses.items():
        if diagnosis.changed_steps and diagnosis.mistake:
            first = first_by_mistake.setdefault(diagnosis.mistake, quantity)
            if first != quantity:
                message = (
                    f"the mistake is the same as that in {puzzle.get_printed_name(first)}: fix that first"
                )
                diagnoses[quantity] = Diagnosis(message)
