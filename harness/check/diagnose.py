"""Describe a wrong tensor: by how much, where, and which known mistake gives these values.

The learner's values are compared with those of each known mistake of the puzzle, computed in NumPy on the
inputs of the failing cases. A mistake is named only if it explains every failing case.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.check.compare import NEARER, Evidence, describe_wrong_bits, got_and_expected, largest, severity
from harness.check.families import family
from harness.check.results import UNKNOWN, Diagnosis, GateResult
from harness.spec.cases import CANCELLING, is_not_finite
from harness.spec.derivation import Mistake
from harness.spec.ops import Shape
from harness.spec.puzzle import Dims, Puzzle, Symptom
from harness.spec.rounding import round_to_dtype
from harness.vgpu import Finding

SHOWN = 4
TILES = (128, 32, 16)
# Above this many multiply-adds the NumPy formulas are slow: only the place of the errors is reported.
LARGEST = 2**26
# Mistakes that are named together where all of them give the same values in every failing case.
ALIKE = 3
# A formula that explains only the numbers must explain this many wrong elements.
NUMBERS = 4
# Distances up to this are rounding, and are not compared with each other.
TIGHT = 1e-6
# An error of this many limits is plain to see, and the smallest such case is shown.
PLAIN = 1000
# Rounding error of the largest of many terms in 16 bits: a few units in the last place of bfloat16.
SIXTEEN_BITS = 2.0**-6
# An error that some roundings to float32 may have; of the largest value.
SINGLE = 2.0**-19


@dataclass(frozen=True)
class Explanation:
    """Known mistakes that give the same values, the likeliest first, and the largest distance of the result
    from theirs.

    `numbers_only`: NaN elements of the result are not explained. `finite_only`: cases with NaN or infinity
    are not explained.
    """

    mistakes: tuple[Mistake, ...]
    distance: float
    numbers_only: bool = False
    finite_only: bool = False

    @property
    def words(self) -> str:
        """End the sentence "your dx equals the reference ..."."""
        first, *others = dict.fromkeys(mistake.words for mistake in self.mistakes)
        near = f"to {self.distance:.0e}" if self.distance else "exactly"
        words = f"{first}, {near}"
        words += "".join(f"; or {other}, which gives the same here" for other in others[: ALIKE - 1])
        return words + (
            ", wherever it is a number; the rest is 0 / 0, -inf - -inf, 0 * inf or an overflow"
            if self.numbers_only
            else ", but not where an input is NaN or infinite"
            if self.finite_only
            else ""
        )


def diagnose(
    puzzle: Puzzle,
    quantity: str,
    evidence: Sequence[Evidence],
    *,
    name: str = "",
    gate: str | None = None,
    right: Collection[str] = (),
) -> Diagnosis:
    """Describe what is wrong with a quantity.

    Args:
        puzzle: Its derivation and known mistakes.
        quantity: The op argument.
        evidence: The cases in which it is wrong, at least one.
        name: The quantity's name in reports.
        gate: The gate whose hints help; None without a blank.
        right: Other quantities of the run that are correct in every case.
    """
    name = name or quantity
    worst = most_telling(evidence, puzzle.dims)
    axes = puzzle.axes(quantity, worst.got.ndim)
    argument = puzzle.written(quantity)
    reports = elements(worst, name, axes, bits=argument is not None and argument.bits)
    values = [*reports, f"where in '{worst.case.name}': {place(worst.wrong, axes)}"]
    known = explanation(puzzle, quantity, evidence, right)
    symptom = None if known else describe_unexplained(puzzle, quantity, evidence, worst)
    rung = known.mistakes[0].hint if known else 2 if symptom and symptom.mistake in NO_NUMBERS else 1
    hint = f"{gate}-{rung}" if gate else None
    see = f": see hint {hint}" if hint else ""
    if known:
        first = known.mistakes[0]
        sentence = f"your {name} equals the reference {known.words}{see}"
        return Diagnosis(sentence, values, first.id, hint, frozenset(first.changes))
    if symptom:
        words = "a part of your {} is never written" if symptom.mistake == UNWRITTEN.mistake else "your {} {}"
        return Diagnosis(words.format(name, symptom.words) + see, values, symptom.mistake, hint)
    return Diagnosis((hint and f"{UNKNOWN}{see}") or "", values, None, hint)


NO_NUMBERS = ("not-finite", "infinite-at-first", "nan-swallowed", "nan-at-infinity", "nan-spread")
"""Symptoms of a shift or a guard that is missing: of the part that is most often missed, which is a ladder's second rung."""
UNWRITTEN = Symptom("never-written", "is in part never written")


def describe_unexplained(
    puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence], worst: Evidence
) -> Symptom | None:
    """Describe a result that no known mistake gives."""
    with np.errstate(all="ignore"):
        symptom = (
            find_misplaced(evidence, worst)
            or coarse(max(evidence, key=lambda e: e.error / e.scale) if worst.dtype == "float64" else worst)
            or rounded_inside(puzzle, quantity, evidence)
            or puzzle.symptom(quantity, worst.arrays, worst.got, worst.truth)
        )
    if symptom:
        return symptom
    if worst.verdict.unwritten:
        return UNWRITTEN
    if worst.verdict.nonfinite:
        return Symptom(
            "not-finite",
            "holds values that are no numbers: a division by 0, a logarithm of 0, an overflow, a row that is all -inf, or, in a kernel, "
            "a sum added to memory that nothing has cleared",
        )
    if any(puzzle.multiply_adds(e.case.dims) > LARGEST for e in evidence):
        return None
    return family(puzzle, quantity, evidence)


def most_telling(evidence: Sequence[Evidence], dims: Dims = ()) -> Evidence:
    """Return the case to show: preferably finite, and the smallest that is clearly wrong.

    `dims` are the default sizes, which are preferred; a case with a size of 1 that they do not have shows too
    little.
    """
    plain = min(PLAIN, max(severity(e) for e in evidence))
    few = min(SHOWN, max(e.got.size for e in evidence) - 1)  # a norm is one number in every case

    def rank(e: Evidence) -> tuple[bool, bool, bool, bool, bool, float]:
        narrow = any(size == 1 != usual for size, usual in zip(e.case.dims, dims, strict=False))
        shown = bool(largest(e.truth)) and e.got.size > few and severity(e) >= plain and not narrow
        broken = bool(e.verdict.nonfinite or e.verdict.unwritten)
        size = sum(array.size for array in e.arrays.values())
        return (
            bool(np.isfinite(e.truth).all()),
            (shown or broken) and not any_unusual(e),
            broken,
            shown,
            shown and e.case.dims == dims,
            -size if shown else severity(e),
        )

    return max(evidence, key=rank)


def elements(evidence: Evidence, name: str, axes: Shape, bits: bool = False) -> Iterator[str]:
    """Yield the first few wrong elements: result, expected value, their ratio and the kind of error. For
    words of `bits` only the first is shown.

    The index of the first is also given by the names of the `axes`.
    """
    wrong = np.argwhere(evidence.wrong)
    if evidence.verdict.unwritten:
        count = int(evidence.unwritten.sum())
        yield f"{count} of {evidence.got.size} elements of {name} were never written"
    nonfinite = ~np.isfinite(evidence.got) & np.isfinite(evidence.truth) & ~evidence.unwritten
    if nonfinite.any():
        kinds = "NaN" if np.isnan(evidence.got[nonfinite]).all() else "infinite or NaN"
        yield f"{int(nonfinite.sum())} of {evidence.got.size} elements of {name} are {kinds}"
    for number, index in enumerate(wrong[:SHOWN].tolist()):
        at = tuple(index)
        got, truth = float(evidence.got[at]), float(evidence.truth[at])
        if bits and not evidence.unwritten[at]:
            text = describe_wrong_bits(got, truth)
        elif evidence.unwritten[at]:
            text = f"never written, expected {truth:.7g}"
        else:
            text = got_and_expected(got, truth, evidence.verdict.limit * evidence.scale)
        line = f"{name}{index or ''} {text}{times(evidence, at)}"
        words = index_words(index, axes)
        yield f"{line} ({words})" if words and not number else line
    if len(wrong) > SHOWN:
        yield f"... {len(wrong)} of {evidence.got.size} elements are wrong"


def times(evidence: Evidence, at: tuple[int, ...]) -> str:
    """Return the ratio of an element to the expected value in words, or "" if it says nothing."""
    got, truth = float(evidence.got[at]), float(evidence.truth[at])
    whole = "float" not in evidence.dtype  # of masks and indices
    if whole or evidence.unwritten[at] or not (got and truth and np.isfinite([got, truth]).all()):
        return ""
    words = f"{got / truth:.4g}"
    return "" if words == "1" else f": {words} times that"


def index_words(index: Sequence[int], axes: Shape) -> str:
    """Return an index by the names of its axes, "row 1, column 2", or "" without names."""
    if not all(isinstance(name, str) for name in axes):
        return ""
    names = [re.sub(r"(?<=[a-z]{2})s$", "", str(name)) for name in axes]
    return ", ".join(f"{name} {at}" for name, at in zip(names, index, strict=True))


def place(wrong: np.ndarray, axes: Shape) -> str:
    """Describe where the wrong elements of a tensor are; `axes` names its axes, as ("rows", 2)."""
    if wrong.all():
        return "every element"
    if wrong.sum() == 0:
        return "the tensor as a whole"
    if wrong.sum() == 1:
        return f"one element, {np.argwhere(wrong)[0].tolist()}"
    parts, block = along_axes(wrong, axes)
    if parts:
        return ", ".join(parts) + ("" if block.all() else f" ({block.mean():.0%} of the elements there)")
    rest, block = along_axes(~wrong, axes)
    if rest and block.all():
        return f"everything but {', '.join(part.removeprefix('only ') for part in rest)}"
    return f"spread over the tensor, {wrong.mean():.0%} of the elements"


def along_axes(marked: np.ndarray, axes: Shape) -> tuple[list[str], np.ndarray]:
    """Return the positions of some elements along each axis, and the smallest block that contains them."""
    hits = [
        np.flatnonzero(marked.any(tuple(k for k in range(marked.ndim) if k != axis)))
        for axis in range(marked.ndim)
    ]
    parts = [
        along(hit, marked.shape[axis], size if isinstance(size, str) else f"axis {axis}")
        for axis, (hit, size) in enumerate(zip(hits, axes, strict=True))
    ]
    return [part for part in parts if part], marked[np.ix_(*hits)]


def along(hit: np.ndarray, size: int, axis: str) -> str:
    """Describe which indices of one axis have wrong elements; "" if all do."""
    if len(hit) == size:
        return ""
    first, last = int(hit[0]), int(hit[-1])
    if len(hit) == 1:
        where = " (the last)" if first == size - 1 else " (the first)" if first == 0 else ""
        return f"only {axis} = {first}{where}"
    if last - first + 1 != len(hit):
        steps = np.diff(hit)
        if len(hit) > 2 and (steps == steps[0]).all():
            return f"{axis} = {first}, {first + int(steps[0])}, ... (every {int(steps[0])})"
        return f"{len(hit)} of {size} along {axis}"
    if last == size - 1:
        tile = next((t for t in TILES if first and first % t == 0 and size - first <= t), None)
        if tile:
            return f"the last tile of {tile} along {axis}, from {first}"
        return f"{axis} from {first} to the end"
    return f"{axis} from {first} to {last}"


def explanation(
    puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence], right: Collection[str] = ()
) -> Explanation | None:
    """Return the known mistakes that give these values in every failing case.

    A mistake made `together` with another is skipped if a quantity that it changes is among the `right` ones.
    If none explains every value, one that explains all numbers is accepted, or all values of the finite
    cases: NaN and infinity may depend on how a formula is written.
    """
    if not puzzle.mistakes or any(puzzle.multiply_adds(e.case.dims) > LARGEST for e in evidence):
        return None
    if not any(np.isfinite(e.got).any() for e in evidence):
        return None  # without a number, too many formulas fit
    steps = puzzle.derive(evidence[0].arrays, {})
    with np.errstate(all="ignore"):
        getattr(steps, quantity)
    requested = [
        mistake
        for mistake in puzzle.mistakes
        if not mistake.changes.keys().isdisjoint(
            vars(steps)
        )  # else the quantity does not depend on the change
        and not (mistake.together and not mistake.changes.keys().isdisjoint(right))
    ]
    if all(is_not_finite(e.case.values) for e in evidence):
        requested = [
            mistake for mistake in requested if not shows_in_numbers(puzzle, quantity, evidence[0], mistake)
        ]
    small_first = sorted(evidence, key=lambda e: e.got.size)
    fit = fitting(puzzle, quantity, small_first, requested, numbers_only=False)
    numbers = sum(int((e.wrong & np.isfinite(e.got)).sum()) for e in evidence)
    if (
        not fit
        and numbers >= NUMBERS
        and any((np.isfinite(e.truth) & ~np.isfinite(e.got)).any() for e in evidence)
    ):
        fit = fitting(puzzle, quantity, small_first, requested, numbers_only=True)
    finite = [e for e in small_first if not is_not_finite(e.case.values) and np.isfinite(e.truth).all()]
    if not fit and 0 < len(finite) < len(evidence):
        fit = fitting(puzzle, quantity, finite, requested, numbers_only=False)
        return fit and replace(fit, finite_only=True)
    return fit


def shows_in_numbers(puzzle: Puzzle, quantity: str, e: Evidence, mistake: Mistake) -> bool:
    """Check whether a mistake changes a quantity of finite numbers too; it is ruled out if only cases with
    NaN or infinity fail."""
    arrays = {name: np.where(np.isfinite(array), array, 1) for name, array in e.arrays.items()}
    with np.errstate(all="ignore"):
        right, wrong = (
            getattr(puzzle.derive(arrays, changes), quantity) for changes in (None, mistake.changes)
        )
        return not np.allclose(right, wrong, rtol=1e-3, atol=0)


def fitting(
    puzzle: Puzzle,
    quantity: str,
    evidence: Sequence[Evidence],
    requested: Sequence[Mistake],
    numbers_only: bool,
) -> Explanation | None:
    """Return the mistakes that give a quantity's values in every case, or all that are numbers."""
    fits: list[tuple[Mistake, float]] = []
    for mistake in requested:
        distances: list[float] = []
        for e in evidence:
            with np.errstate(all="ignore"):
                formula = getattr(puzzle.derive(e.arrays, mistake.changes), quantity)
                distance = e.equals(formula, numbers_only)
            if distance is None:
                break
            distances.append(distance)
        else:
            fits.append((mistake, max(distances)))
    if not fits:
        return None
    nearest = min(distance for _, distance in fits)
    fits = [
        fit for fit in fits if fit[1] <= max(NEARER * nearest, TIGHT)
    ]  # another that is near may be near this one
    return Explanation(tuple(mistake for mistake, _ in fits), fits[0][1], numbers_only)


# Finding kind -> the mistake that causes it and what it means. Causes stand before what follows from them: threads that are
# not where they must be leave memory unwritten and come into each other's way.
FOUND = {
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
        f"{what} {access}": (mistake.format(access), words.format(access))
        for what, mistake, words in (
            ("out-of-bounds", "out-of-bounds-{}", "an index lies outside of a tensor ({})"),
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
    "uninitialised read": ("uninitialised-read", "the kernel reads memory that nothing has written"),
}  # fmt: skip
DIVERGENCE = list(FOUND)[:4]
FIRST = [
    *DIVERGENCE,
    "hang",
    "trap",
    "store to an input",
    *(kind for kind in FOUND if kind.startswith(("misaligned", "null pointer"))),
]
"""Kinds of findings that are the cause, whatever else was found."""
FIRST_CAUSES = {FOUND[kind][0] for kind in FIRST}
"""The mistakes that cause them; they take precedence over explanations by values."""


OUTSIDE = tuple(kind for kind in FOUND if kind.startswith("out-of-bounds"))
FOLLOWS = ("uninitialised read", "output never written", "global race", "race inside a block", "shared race")
"""Findings that follow from threads with wrong indices: unwritten memory, and races."""


SURE = ("barrier-divergence", "warp-divergence", "endless-loop")
"""Mistakes that no slip of an index explains."""


def first_causes(findings: Sequence[Finding]) -> list[Finding]:
    """Remove findings that may only follow from others: after an index outside its tensor, or a missed
    barrier, unwritten memory and races are not reported."""
    astray = {finding.kernel for finding in findings if finding.kind in (*OUTSIDE, *DIVERGENCE)}
    return [f for f in findings if f.kernel not in astray or f.kind not in FOLLOWS]


def from_findings(findings: Sequence[Finding]) -> tuple[str, str] | None:
    """Return the mistake that causes the findings of the virtual GPU, and what it means."""
    kinds = {finding.kind for finding in findings}
    if cause := next((FOUND[kind] for kind in FIRST if kind in kinds), None):
        return cause
    races = [finding for finding in findings if finding.kind == "global race"]
    # A line that both loads and stores what is raced for adds to it by a plain `+=`. One of two places may be an atomic's:
    # then the other does both.
    added = any(
        race.verbs >= {"a load", "a store"}
        and ("an atomic" in race.verbs or race.where.split(":")[:-1] == race.other.split(":")[:-1])
        for race in races
    )
    if not added and any("atomic" in race.message and "store" in race.message for race in races):
        return (
            "zeroed-in-the-kernel",
            "one block stores to what other blocks add to, and nothing orders the blocks of a grid",
        )
    if added:
        return (
            "missing-atomic",
            "blocks read, add and write the same element without an atomic: additions get lost",
        )
    if races:
        return "overwritten", (
            "blocks store to the same element and the last one wins: nothing is added up, or an index is the same in every block, as "
            "thread_idx is"
        )
    met = [finding for finding in findings if finding.kind in ("shared race", "race inside a block")]
    if (
        met
        and kinds <= {*FOLLOWS}
        and all(
            finding.message.count(": a store by ") + finding.message.count(" and a store by ") == 2
            for finding in met
        )
    ):
        return (
            "several-writers",
            "several threads of a block store to the same element: one of them should, or each to an element of its own",
        )
    # Most frequent first, but unwritten memory may follow from the others.
    ordered = sorted(findings, key=lambda finding: finding.kind == "uninitialised read")
    return next((FOUND[finding.kind] for finding in ordered if finding.kind in FOUND), None)


def find_misplaced(evidence: Sequence[Evidence], worst: Evidence) -> Symptom | None:
    """Check whether NaN and infinity propagate differently from PyTorch; used if no finite case is wrong."""
    if not all(any_unusual(e) for e in evidence):
        return None
    if (np.isfinite(worst.got) & ~np.isfinite(worst.truth)).any():
        return Symptom(
            "nan-swallowed",
            "is finite where PyTorch's is NaN or infinite: a comparison, a select or a maximum drops the NaN",
        )
    if not (np.isfinite(worst.truth) & ~np.isfinite(worst.got) & ~worst.unwritten).any():
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


def any_unusual(e: Evidence) -> bool:
    """Check whether an input or the expected result has a NaN or infinity."""
    return not (np.isfinite(e.truth).all() and all(np.isfinite(array).all() for array in e.arrays.values()))


def coarse(e: Evidence) -> Symptom | None:
    """Check whether all elements have only the digits of a 16-bit type although the kernel writes a wider
    one; in float64, whether the error is only that of float32."""
    if e.dtype not in ("float32", "float64") or not np.isfinite(e.got).all():
        return None
    if e.dtype == "float64" and e.error <= SINGLE * e.scale:
        return Symptom(
            "single-precision",
            "is off by a rounding of float32: somewhere it is computed in less than float64",
        )
    if e.got.size < 4:
        return None
    for kind in ("bfloat16", "float16"):
        if (round_to_dtype(e.got, kind) == e.got).all() and severity(e) < 1e5:
            return Symptom(
                f"rounded-to-{kind}", f"has only the digits of {kind}: somewhere it is rounded to 16 bits"
            )
    return None


def rounded_inside(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Check whether only sums that cancel are wrong, and by no more than rounding their terms to 16 bits."""
    for e in evidence:
        if e.case.values != CANCELLING or not np.isfinite(e.got).all():
            return None
        sizes = {name: np.abs(a) if a.dtype.kind == "f" else a for name, a in e.arrays.items()}
        summed = np.abs(getattr(puzzle.derive(sizes, {}), quantity))
        terms = max(summed.max(initial=0.0), puzzle.terms(e.arrays).get(quantity, 0.0))
        if np.abs(e.got - e.truth).max(initial=0.0) > SIXTEEN_BITS * terms:
            return None
    return Symptom(
        "rounded-in-a-sum",
        "is off by a rounding to 16 bits, and only where a sum cancels: the sum, or a term of it, is rounded on the way; add up in "
        "float32, and round once",
    )


# ---- Errors that follow from earlier ones -------------------------------------------------------------------

# Of those that one wrong value spoils, only the first is explained. Gates and quantities alike have names, and a spec says
# which are computed from which. One whose values are those of a mistake in its own last step, and right otherwise, is wrong
# by itself, whatever is before it.
Needs = Mapping[str, Sequence[str]]
"""Name -> the names that it is computed from."""


def first_wrong(name: str, needs: Needs, wrong: Collection[str]) -> str | None:
    """Return the first wrong quantity that another is computed from, directly or not; None if there is none."""
    before = next((each for each in needs.get(name, ()) if each in wrong), None)
    return before and (first_wrong(before, needs, wrong) or before)


def sentence(before: str) -> str:
    """Describe a quantity that is computed from a wrong one."""
    return f"computed from {before}, which is wrong: fix that first"


def blame_gates(results: Sequence[GateResult], needs: Needs) -> None:
    """Let a wrong gate that is computed from another wrong one say that and nothing else; `needs` maps gates."""
    wrong = {result.gate.id: result for result in results if result.state == "wrong"}
    for id, result in wrong.items():
        before = first_wrong(id, needs, wrong)
        if before and not result.by_itself:
            result.diagnosis, result.findings = [sentence(before)], []
            result.mistake, result.hint = None, wrong[before].hint


def blame_quantities(diagnoses: dict[str, Diagnosis], puzzle: Puzzle, variant: str) -> None:
    """Describe the wrong quantities of a variant that are computed from wrong inputs of their op."""
    calls = puzzle.variants[variant]
    needs = {quantity: tuple(call.op.reads) for call in calls for quantity in call.op.writes}
    for quantity, diagnosis in diagnoses.items():
        before = first_wrong(quantity, needs, diagnoses)
        if before and not diagnosis.by_itself(quantity):
            diagnoses[quantity] = Diagnosis(sentence(puzzle.printed_name(before)))


def point_back(diagnoses: dict[str, Diagnosis], puzzle: Puzzle) -> None:
    """Let a quantity that shows the same mistake as an earlier one of the same run say that and nothing else."""
    named: dict[str, str] = {}
    for quantity, diagnosis in diagnoses.items():
        if diagnosis.steps and diagnosis.mistake:
            first = named.setdefault(diagnosis.mistake, quantity)
            if first != quantity:
                words = f"the mistake is the same as that in {puzzle.printed_name(first)}: fix that first"
                diagnoses[quantity] = Diagnosis(words)
