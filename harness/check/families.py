"""Recognise a wrong tensor that is a simple function of the correct one, such as a constant times it.

Each family is exact: it must give every value of every failing case to rounding, and some case must have
enough values to rule out chance.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

import numpy as np

from harness.check.compare import Evidence, largest
from harness.spec.puzzle import Puzzle, Symptom
from harness.spec.rounding import round_to_dtype

FEWEST = 3
"""Number of values that a constant has to explain."""
ENOUGH = 16
"""A value is conclusive if it is this many times as large as the effect of rounding."""
BLOCKS = (32, 64, 128, 256)
"""Common numbers of threads in a warp or a block."""
CONSTANTS = {math.log(2): "ln 2", 1 / math.log(2): "1 / ln 2", math.e: "e"}

Fit = Callable[[Evidence], np.ndarray]
"""The values of a family in a case, in the shape of the tensor."""
Axes = int | tuple[int, ...]
Size = Callable[[Evidence], float]
"""A size in a case, or a number computed from sizes."""


def family(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Return a family that explains a quantity in every failing case of finite numbers, or None."""
    evidence = [e for e in evidence if np.isfinite(e.got).all() and np.isfinite(e.truth).all()]
    if not evidence:
        return None
    with np.errstate(all="ignore"):
        if all(not e.got.any() for e in evidence):
            return Symptom("zero", "is 0 in every element")
        symptom = constant_ratio(puzzle, evidence)
        if not all(e.got.ndim for e in evidence):
            return symptom
        symptom = symptom or other_step(puzzle, quantity, evidence)
        return (
            symptom
            or constant_offset(evidence)
            or by_axis(puzzle, quantity, evidence)
            or find_moved(puzzle, quantity, evidence)
            or rounded_step(puzzle, quantity, evidence)
        )


def explains(fit: Fit, evidence: Sequence[Evidence]) -> bool:
    """Check whether a family gives the values of every case."""
    return all(e.equals(fit(e)) is not None for e in evidence)


def is_conclusive(values: np.ndarray, e: Evidence) -> bool:
    """Check that values are enough, large enough and different enough to tell a constant from chance."""
    large = np.abs(values[np.isfinite(values)])
    large = large[large > ENOUGH * e.tolerance]
    return len(large) >= FEWEST and np.ptp(large) > ENOUGH * e.tolerance


# ---- Constants ----------------------------------------------------------------------------------------------


def constant_ratio(puzzle: Puzzle, evidence: Sequence[Evidence]) -> Symptom | None:
    """Return the tensor times one number in each case, which is a number, a size, or just that."""
    numbers = len(evidence) >= FEWEST and all(e.truth.size == 1 for e in evidence)  # one in each case
    if not numbers and not any(is_conclusive(e.truth, e) for e in evidence):
        return None
    ratios = [ratio(e.got, e.truth) for e in evidence]
    times = {e.case.name: r for e, r in zip(evidence, ratios, strict=True)}
    if not explains(lambda e: times[e.case.name] * e.truth, evidence):
        return None
    conclusive = [(e, r) for e, r in zip(evidence, ratios, strict=True) if largest(e.truth)]
    first = max(conclusive, key=lambda pair: is_conclusive(pair[0].truth, pair[0]))[1]
    if all(same(first, r) for _, r in conclusive):
        if same(first, -1):
            return Symptom("negated", "has the opposite sign in every element, and is right otherwise")
        few = next((words for number, words in CONSTANTS.items() if same(number, first)), f"{first:.6g}")
        sizes = [words for words, value in sizes_of(puzzle) if all(same(value(e), r) for e, r in conclusive)]
        as_many = f", which is {' or '.join(sizes[:2])} here" if sizes else ""
        return Symptom("times-a-constant", f"is exactly {few} times what it should be{as_many}")
    (one, few), (other, many) = (pick(conclusive, key=lambda pair: pair[1]) for pick in (min, max))
    example = f"{few:.6g} times in '{one.case.name}', {many:.6g} in '{other.case.name}'"
    for words, value in sizes_of(puzzle):
        if all(same(value(e), r) for e, r in conclusive):
            return Symptom("times-a-constant", f"is exactly {words} times what it should be: {example}")
    words = f"is a constant times what it should be, another one in each case: {example}"
    return None if numbers else Symptom("times-a-constant", words)


def ratio(got: np.ndarray, truth: np.ndarray) -> float:
    """Return the factor that fits best between the truth and a result."""
    numbers = np.isfinite(got) & np.isfinite(truth)
    square = float((truth[numbers] ** 2).sum())
    return float((got[numbers] * truth[numbers]).sum()) / square if square else 0.0


def same(a: float, b: float) -> bool:
    """Check whether two factors are equal to rounding."""
    return math.isclose(a, b, rel_tol=2e-3 if abs(b) < 1e-3 else 2e-4)


def sizes_of(puzzle: Puzzle) -> Iterator[tuple[str, Size]]:
    """Yield sizes, products and roots of them, by the names that the puzzle gives them."""

    def size(name: str) -> Size:
        index = puzzle.dim_names.index(name)
        return lambda e: float(e.case.dims[index])

    def number(value: float) -> Size:
        return lambda e: value

    one = [(name, size(name)) for name in puzzle.dim_names]

    def root(of: Size) -> Size:
        return lambda e: math.sqrt(of(e))

    def over(above: Size, below: Size) -> Size:
        return lambda e: above(e) / below(e)

    def times(left: Size, right: Size) -> Size:
        return lambda e: left(e) * right(e)

    two = [(f"{a} * {b}", times(f, g)) for (a, f), (b, g) in combinations(one, 2)]
    for words, value in (*one, *two):
        yield words, value
        yield f"1 / {words}" if words.isidentifier() else f"1 / ({words})", over(number(1), value)
    for words, value in one:
        yield f"sqrt({words})", root(value)
        yield f"1 / sqrt({words})", over(number(1), root(value))
        for block in BLOCKS:
            yield f"{words} / {block}", over(value, number(block))
            yield f"{block} / {words}", over(number(block), value)
    for (a, f), (b, g) in combinations(one, 2):
        yield f"{a} / {b}", over(f, g)
        yield f"{b} / {a}", over(g, f)


def constant_offset(evidence: Sequence[Evidence]) -> Symptom | None:
    """Return the tensor with one number added to every element."""
    if not any(is_conclusive(e.truth - np.mean(e.truth), e) for e in evidence):
        return None
    added = {e.case.name: float(np.nanmean(e.got - e.truth)) for e in evidence}
    if not explains(lambda e: e.truth + added[e.case.name], evidence):
        return None
    numbers = list(added.values())
    if all(math.isclose(number, numbers[0], rel_tol=2e-4) for number in numbers):
        return Symptom(
            "off-by-a-constant", f"is what it should be {format_signed(numbers[0])} in every element"
        )
    name = next(iter(added))
    return Symptom(
        "off-by-a-constant",
        f"is off by the same number in every element, another one in each case: {format_signed(added[name])} in '{name}'",
    )


def format_signed(number: float) -> str:
    """Return "+ 2" or "- 2"."""
    return f"{'-' if number < 0 else '+'} {abs(number):.6g}"


# ---- Other steps --------------------------------------------------------------------------------------------


def other_step(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Return the tensor times, over, plus or minus an input or a step of the derivation, or such a one in its
    place."""
    known = [steps_of(puzzle, quantity, e) for e in evidence]
    at = {e.case.name: steps for e, steps in zip(evidence, known, strict=True)}
    for name in known[0]:
        if not all(name in steps and fits(steps[name], e) for steps, e in zip(known, evidence, strict=True)):
            continue
        words = puzzle.printed_name(name)

        def step(e: Evidence, name: str = name) -> np.ndarray:
            return at[e.case.name][name]

        if any(step(e).shape == e.got.shape and is_conclusive(e.got, e) for e in evidence):
            times = ratio(evidence[0].got, np.broadcast_to(step(evidence[0]), evidence[0].got.shape))
            if explains(lambda e, step=step, k=times: k * step(e), evidence):
                many = "" if same(times, 1) else f"{times:.6g} * "
                return Symptom("another-step", f"is exactly {many}{words}, and nothing else")
        if not any(has_variety(step(e), e) and is_conclusive(e.got, e) for e in evidence):
            continue
        if explains(lambda e, step=step: e.truth * step(e), evidence):
            return Symptom("times-a-step", f"is exactly {words} times what it should be")
        if explains(lambda e, step=step: divide(e, step(e)), evidence):
            return Symptom("over-a-step", f"is what it should be divided by {words}: that factor is missing")
        most = max(evidence, key=lambda e: e.got.size)
        factor = ratio(most.got - most.truth, np.broadcast_to(step(most), most.got.shape))
        if explains(lambda e, step=step, k=factor: e.truth + k * step(e), evidence):
            many = "" if same(abs(factor), 1) else f"{abs(factor):.6g} * "
            side = "plus" if factor > 0 else "minus"
            return Symptom("plus-a-step", f"is exactly what it should be {side} {many}{words}")
    return None


def rounded_step(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Return the tensor with an input, or a step that it is computed from, rounded to 16 bits; of several that
    give the same the first, which the others are computed from."""
    if any(e.dtype not in ("float32", "float64") for e in evidence):
        return None
    evidence = sorted(evidence, key=lambda e: e.got.size)
    at = {e.case.name: steps_of(puzzle, quantity, e) for e in evidence}
    for name, kind in product(at[evidence[0].case.name], ("bfloat16", "float16")):

        def fit(e: Evidence, name: str = name, kind: str = kind) -> np.ndarray:
            rounded = round_to_dtype(at[e.case.name][name], kind)
            return getattr(puzzle.derive(e.arrays, {name: lambda v: rounded}), quantity)

        if all(name in steps for steps in at.values()) and explains(fit, evidence):
            words = f"is right but for {puzzle.printed_name(name)}, which is rounded to {kind} on the way"
            return Symptom(f"{name}-rounded-to-{kind}", words)
    return None


def steps_of(puzzle: Puzzle, quantity: str, e: Evidence) -> dict[str, np.ndarray]:
    """Return the inputs, and the steps that the quantity is computed from, as they should be."""
    try:
        steps = puzzle.derive(e.arrays, {})
        getattr(steps, quantity)
    except (AttributeError, NotImplementedError):
        return {}
    return {
        name: array
        for name, array in vars(steps).items()
        if name != quantity and not name.startswith("_")
        and np.asarray(array).dtype.kind == "f" and np.ndim(array) and isinstance(array, np.ndarray)
    }  # fmt: skip


def fits(step: np.ndarray, e: Evidence) -> bool:
    """Check whether a step has the tensor's shape, or is constant along some of its axes."""
    sizes = zip(step.shape[::-1], e.got.shape[::-1], strict=False)
    return step.ndim <= e.got.ndim and all(a in (1, b) for a, b in sizes)


def has_variety(step: np.ndarray, e: Evidence) -> bool:
    """Check whether a step has enough different values to be told from a constant."""
    numbers = step[np.isfinite(step)]
    return len(numbers) >= FEWEST and np.ptp(numbers) > ENOUGH * e.verdict.limit * np.abs(numbers).max()


def divide(e: Evidence, step: np.ndarray) -> np.ndarray:
    """Return truth / step, and the truth where the step is 0."""
    return np.where(step == 0, e.got, e.truth / np.where(step == 0, 1.0, step))


# ---- Rows, columns, and places ------------------------------------------------------------------------------


def by_axis(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Fit a separate factor or summand for each row, or for each column."""
    matrices = [
        e
        for e in evidence
        if e.got.ndim > 1 and min(e.got.shape[-1], e.got.size // e.got.shape[-1]) >= FEWEST
    ]
    if not matrices or any(e.got.ndim < 2 for e in evidence):
        return None
    for axis, one in ((-1, "row"), (0, "column")):
        axes = -1 if axis else tuple(range(matrices[0].got.ndim - 1))
        if not any(is_conclusive(e.truth - e.truth.mean(axes, keepdims=True), e) for e in matrices):
            continue

        def factors(e: Evidence, axes: Axes = axes) -> np.ndarray:
            square = (e.truth**2).sum(axes, keepdims=True)
            return (e.got * e.truth).sum(axes, keepdims=True) / np.where(square == 0, 1.0, square)

        def summands(e: Evidence, axes: Axes = axes) -> np.ndarray:
            return (e.got - e.truth).mean(axes, keepdims=True)

        def fits_scale(e: Evidence, of: Fit = factors) -> np.ndarray:
            return of(e) * e.truth

        def fits_shift(e: Evidence, by: Fit = summands) -> np.ndarray:
            return e.truth + by(e)

        forms: tuple[tuple[Fit, Fit, str, str], ...] = (
            (factors, fits_scale, "times what it should be", "factor"),
            (summands, fits_shift, "away from what it should be", "summand"),
        )
        for values, fit, words, what in forms:
            if explains(fit, evidence):
                if what == "factor" and all(is_a_part(values(e)) for e in matrices):
                    return None  # the zeros are already reported
                each_one = values(matrices[0])
                size, ends = float(np.abs(each_one).max()), (float(each_one.min()), float(each_one.max()))
                low, high = (size * round(end / size, 6) + 0.0 for end in ends)
                return Symptom(
                    f"{what}-of-each-{one}",
                    f"is in each {one} a constant {words}, from {low:.4g} to {high:.4g} in '{matrices[0].case.name}': a {what} "
                    f"that belongs to a whole {one} is wrong or missing",
                )
    return None


def is_a_part(factors: np.ndarray) -> bool:
    """Check whether factors are only 0 and 1: a part is missing, and the rest is correct."""
    return bool(np.minimum(np.abs(factors), np.abs(factors - 1)).max() < 1e-3)


def find_moved(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Recognise correct values at other places."""
    count = evidence[0].got.ndim
    if any(e.got.ndim != count for e in evidence) or not any(is_conclusive(e.truth, e) for e in evidence):
        return None
    axes = [str(name) if isinstance(name, str) else f"axis {name}" for name in puzzle.axes(quantity, count)]
    for number, axis in enumerate(axes):
        fits: tuple[tuple[str, Fit], ...] = (
            ("in reverse order", lambda e, n=number: np.flip(e.truth, n)),
            ("one place too far", lambda e, n=number: np.roll(e.truth, 1, n)),
            ("one place too early", lambda e, n=number: np.roll(e.truth, -1, n)),
        )
        for words, fit in fits:
            if explains(fit, evidence):
                return Symptom("moved", f"is right, but {words} along {axis}")
        for step in (1, *BLOCKS):
            if explains(lambda e, n=number, step=step: running_sums(e.truth, step, n), evidence):
                before = "the one" if step == 1 else f"the one {step} places"
                words = (
                    f"has in each element {before} before along {axis} added: its sum is not set back to 0"
                )
                return Symptom("sum-goes-on", words)
    for first, second in combinations(range(count), 2):
        words = f"holds the right values at the wrong places: {axes[first]} and {axes[second]} are exchanged"
        if explains(lambda e, a=first, b=second: e.truth.swapaxes(a, b).reshape(e.truth.shape), evidence):
            return Symptom("axes-exchanged", words)
    return None


def running_sums(values: np.ndarray, step: int, axis: int) -> np.ndarray:
    """Add to each value along an axis those that are a multiple of `step` places before it."""
    sums = np.moveaxis(values, axis, 0).copy()
    for place in range(step, len(sums)):
        sums[place] += sums[place - step]
    return np.moveaxis(sums, 0, axis)
