"""Recognise a wrong tensor that is a simple function of the correct one, such as a constant times it.

A family must reproduce every value of every failing case up to rounding; enough values rule out coincidence.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, product

import numpy as np

from harness.check.compare import Evidence, max_abs
from harness.spec.puzzle import Puzzle, Symptom
from harness.spec.rounding import round_to_dtype

MIN_VALUES = 3
"""Minimum number of values that a constant must explain."""
CONCLUSIVE_FACTOR = 16
"""A value is conclusive if it is this many times as large as the effect of rounding."""
BLOCK_SIZES = (32, 64, 128, 256)
"""Common numbers of threads in a warp or a block."""
CONSTANTS = {math.log(2): "ln 2", 1 / math.log(2): "1 / ln 2", math.e: "e"}

Fit = Callable[[Evidence], np.ndarray]
"""A function from a case's evidence to the values that a family predicts, in the tensor's shape."""
Axes = int | tuple[int, ...]


def find_family(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Return the symptom of a family that explains a quantity in all finite failing cases, or None."""
    evidence = [e for e in evidence if np.isfinite(e.got).all() and np.isfinite(e.truth).all()]
    if not evidence:
        return None
    with np.errstate(all="ignore"):
        if all(not e.got.any() for e in evidence):
            return Symptom("zero", "is 0 in every element")
        symptom = find_constant_ratio(puzzle, evidence)
        if not all(e.got.ndim for e in evidence):
            return symptom
        return (
            symptom
            or find_related_step(puzzle, quantity, evidence)
            or find_constant_offset(evidence)
            or find_axis_pattern(puzzle, quantity, evidence)
            or find_misplaced_values(puzzle, quantity, evidence)
            or find_rounded_step(puzzle, quantity, evidence)
        )


def fits_every_case(fit: Fit, evidence: Sequence[Evidence]) -> bool:
    return all(e.match_formula(fit(e)) is not None for e in evidence)


def is_conclusive(values: np.ndarray, e: Evidence) -> bool:
    """Check that enough values are large and different enough to rule out a coincidence."""
    large = np.abs(values[np.isfinite(values)])
    large = large[large > CONCLUSIVE_FACTOR * e.tolerance]
    return len(large) >= MIN_VALUES and np.ptp(large) > CONCLUSIVE_FACTOR * e.tolerance


# ---- Constants ----------------------------------------------------------------------------------------------


def find_constant_ratio(puzzle: Puzzle, evidence: Sequence[Evidence]) -> Symptom | None:
    """Recognise a constant factor: one for all cases, equal to a size, or a different one in each case."""
    all_scalar = len(evidence) >= MIN_VALUES and all(e.truth.size == 1 for e in evidence)  # a factor per case
    if not all_scalar and not any(is_conclusive(e.truth, e) for e in evidence):
        return None
    ratios = [fit_ratio(e.got, e.truth) for e in evidence]
    by_case = {e.case.name: r for e, r in zip(evidence, ratios, strict=True)}
    if not fits_every_case(lambda e: by_case[e.case.name] * e.truth, evidence):
        return None
    conclusive = [(e, r) for e, r in zip(evidence, ratios, strict=True) if max_abs(e.truth)]
    first = max(conclusive, key=lambda pair: is_conclusive(pair[0].truth, pair[0]))[1]
    sizes = [(compute_sizes(puzzle, e), r) for e, r in conclusive]
    fitting = [text for text in sizes[0][0] if all(is_close(values[text], r) for values, r in sizes)]
    if all(is_close(first, r) for _, r in conclusive):
        if is_close(first, -1):
            return Symptom("negated", "has the opposite sign in every element, and is right otherwise")
        low = next((name for number, name in CONSTANTS.items() if is_close(number, first)), f"{first:.6g}")
        note = f", which is {' or '.join(fitting[:2])} here" if fitting else ""
        return Symptom("times-a-constant", f"is exactly {low} times what it should be{note}")
    (lowest, low), (highest, high) = (select(conclusive, key=lambda pair: pair[1]) for select in (min, max))
    example = f"{low:.6g} times in '{lowest.case.name}', {high:.6g} in '{highest.case.name}'"
    if fitting:
        return Symptom("times-a-constant", f"is exactly {fitting[0]} times what it should be: {example}")
    description = f"is a constant times what it should be, another one in each case: {example}"
    return None if all_scalar else Symptom("times-a-constant", description)


def fit_ratio(got: np.ndarray, truth: np.ndarray) -> float:
    numbers = np.isfinite(got) & np.isfinite(truth)
    square = float((truth[numbers] ** 2).sum())
    return float((got[numbers] * truth[numbers]).sum()) / square if square else 0.0


def is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=2e-3 if abs(b) < 1e-3 else 2e-4)


def compute_sizes(puzzle: Puzzle, e: Evidence) -> dict[str, float]:
    """Return a case's sizes, and their products, quotients and roots, each by its formula in words."""
    named_sizes = dict(zip(puzzle.dim_names, e.case.dims, strict=False))
    pairs = [*combinations(named_sizes.items(), 2)]
    sizes: dict[str, float] = {}
    for formula, value in (*named_sizes.items(), *((f"{a} * {b}", m * n) for (a, m), (b, n) in pairs)):
        sizes[formula] = value
        sizes[f"1 / {formula}" if formula.isidentifier() else f"1 / ({formula})"] = 1 / value
    for formula, value in named_sizes.items():
        sizes |= {f"sqrt({formula})": math.sqrt(value), f"1 / sqrt({formula})": 1 / math.sqrt(value)}
        for block in BLOCK_SIZES:
            sizes |= {f"{formula} / {block}": value / block, f"{block} / {formula}": block / value}
    for (a, m), (b, n) in pairs:
        sizes |= {f"{a} / {b}": m / n, f"{b} / {a}": n / m}
    return sizes


def find_constant_offset(evidence: Sequence[Evidence]) -> Symptom | None:
    """Recognise one number added to every element."""
    if not any(is_conclusive(e.truth - np.mean(e.truth), e) for e in evidence):
        return None
    shift = {e.case.name: float(np.nanmean(e.got - e.truth)) for e in evidence}
    if not fits_every_case(lambda e: e.truth + shift[e.case.name], evidence):
        return None
    numbers = list(shift.values())
    if all(math.isclose(number, numbers[0], rel_tol=2e-4) for number in numbers):
        description = f"is what it should be {format_signed(numbers[0])} in every element"
        return Symptom("off-by-a-constant", description)
    name = next(iter(shift))
    return Symptom(
        "off-by-a-constant",
        f"is off by the same number in every element, another one in each case: {format_signed(shift[name])} in '{name}'",
    )


def format_signed(number: float) -> str:
    return f"{'-' if number < 0 else '+'} {abs(number):.6g}"


# ---- Other steps --------------------------------------------------------------------------------------------


def find_related_step(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Recognise the correct tensor times, over, plus, minus or replaced by an input or derivation step."""
    all_steps = [compute_steps(puzzle, quantity, e) for e in evidence]
    by_case = {e.case.name: steps for e, steps in zip(evidence, all_steps, strict=True)}
    for name in all_steps[0]:
        if not all(
            name in steps and can_broadcast(steps[name], e)
            for steps, e in zip(all_steps, evidence, strict=True)
        ):
            continue
        title = puzzle.get_printed_name(name)

        def get_step(e: Evidence, name: str = name) -> np.ndarray:
            return by_case[e.case.name][name]

        if any(get_step(e).shape == e.got.shape and is_conclusive(e.got, e) for e in evidence):
            ratio = fit_ratio(evidence[0].got, np.broadcast_to(get_step(evidence[0]), evidence[0].got.shape))
            if fits_every_case(lambda e, step=get_step, k=ratio: k * step(e), evidence):
                multiplier = "" if is_close(ratio, 1) else f"{ratio:.6g} * "
                return Symptom("another-step", f"is exactly {multiplier}{title}, and nothing else")
        if not any(has_variety(get_step(e), e) and is_conclusive(e.got, e) for e in evidence):
            continue
        if fits_every_case(lambda e, step=get_step: e.truth * step(e), evidence):
            return Symptom("times-a-step", f"is exactly {title} times what it should be")
        if fits_every_case(lambda e, step=get_step: divide_by_step(e, step(e)), evidence):
            return Symptom("over-a-step", f"is what it should be divided by {title}: that factor is missing")
        largest = max(evidence, key=lambda e: e.got.size)
        factor = fit_ratio(largest.got - largest.truth, np.broadcast_to(get_step(largest), largest.got.shape))
        if fits_every_case(lambda e, step=get_step, k=factor: e.truth + k * step(e), evidence):
            multiplier = "" if is_close(abs(factor), 1) else f"{abs(factor):.6g} * "
            side = "plus" if factor > 0 else "minus"
            return Symptom("plus-a-step", f"is exactly what it should be {side} {multiplier}{title}")
    return None


def find_rounded_step(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Recognise the tensor computed with an input, or the first possible step, rounded to 16 bits."""
    if any(e.dtype not in ("float32", "float64") for e in evidence):
        return None
    evidence = sorted(evidence, key=lambda e: e.got.size)
    by_case = {e.case.name: compute_steps(puzzle, quantity, e) for e in evidence}
    for name, dtype in product(by_case[evidence[0].case.name], ("bfloat16", "float16")):

        def compute_rounded(e: Evidence, name: str = name, dtype: str = dtype) -> np.ndarray:
            rounded = round_to_dtype(by_case[e.case.name][name], dtype)
            return getattr(puzzle.derive(e.arrays, {name: lambda v: rounded}), quantity)

        if all(name in steps for steps in by_case.values()) and fits_every_case(compute_rounded, evidence):
            title = puzzle.get_printed_name(name)
            description = f"is right but for {title}, which is rounded to {dtype} on the way"
            return Symptom(f"{name}-rounded-to-{dtype}", description)
    return None


def compute_steps(puzzle: Puzzle, quantity: str, e: Evidence) -> dict[str, np.ndarray]:
    """Return the correct values of the inputs and of the steps that a quantity is computed from."""
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


def can_broadcast(step: np.ndarray, e: Evidence) -> bool:
    sizes = zip(step.shape[::-1], e.got.shape[::-1], strict=False)
    return step.ndim <= e.got.ndim and all(a in (1, b) for a, b in sizes)


def has_variety(step: np.ndarray, e: Evidence) -> bool:
    numbers = step[np.isfinite(step)]
    factor = CONCLUSIVE_FACTOR * e.result.limit
    return len(numbers) >= MIN_VALUES and np.ptp(numbers) > factor * np.abs(numbers).max()


def divide_by_step(e: Evidence, step: np.ndarray) -> np.ndarray:
    return np.where(step == 0, e.got, e.truth / np.where(step == 0, 1.0, step))


# ---- Rows, columns, and positions --------------------------------------------------------------------------


def find_axis_pattern(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Recognise a different factor or offset for each row, or for each column."""
    if any(e.got.ndim < 2 for e in evidence):
        return None
    evidence_2d = [e for e in evidence if min(e.got.shape[-1], e.got.size // e.got.shape[-1]) >= MIN_VALUES]
    if not evidence_2d:
        return None
    for axis, axis_label in ((-1, "row"), (0, "column")):
        axes = -1 if axis else tuple(range(evidence_2d[0].got.ndim - 1))
        if not any(is_conclusive(e.truth - e.truth.mean(axes, keepdims=True), e) for e in evidence_2d):
            continue

        def compute_factors(e: Evidence, axes: Axes = axes) -> np.ndarray:
            square = (e.truth**2).sum(axes, keepdims=True)
            return (e.got * e.truth).sum(axes, keepdims=True) / np.where(square == 0, 1.0, square)

        def compute_offsets(e: Evidence, axes: Axes = axes) -> np.ndarray:
            return (e.got - e.truth).mean(axes, keepdims=True)

        for compute, combine, description, kind in (
            (compute_factors, np.multiply, "times what it should be", "factor"),
            (compute_offsets, np.add, "away from what it should be", "summand"),
        ):
            if fits_every_case(
                lambda e, compute=compute, combine=combine: combine(e.truth, compute(e)), evidence
            ):
                if kind == "factor" and all(is_zero_or_one(compute(e)) for e in evidence_2d):
                    return None  # the zeros are already reported
                values = compute(evidence_2d[0])
                scale, bounds = float(np.abs(values).max()), (float(values.min()), float(values.max()))
                low, high = (scale * round(bound / scale, 6) + 0.0 for bound in bounds)
                return Symptom(
                    f"{kind}-of-each-{axis_label}",
                    f"is in each {axis_label} a constant {description}, from {low:.4g} to {high:.4g} in '{evidence_2d[0].case.name}': a {kind} "
                    f"that belongs to a whole {axis_label} is wrong or missing",
                )
    return None


def is_zero_or_one(factors: np.ndarray) -> bool:
    """Check whether factors are only 0 and 1: a part is missing, and the rest is correct."""
    return bool(np.minimum(np.abs(factors), np.abs(factors - 1)).max() < 1e-3)


def find_misplaced_values(puzzle: Puzzle, quantity: str, evidence: Sequence[Evidence]) -> Symptom | None:
    """Recognise correct values at wrong positions, or running sums of them."""
    count = evidence[0].got.ndim
    if any(e.got.ndim != count for e in evidence) or not any(is_conclusive(e.truth, e) for e in evidence):
        return None
    names = puzzle.get_axis_names(quantity, count)
    axes = [name if isinstance(name, str) else f"axis {name}" for name in names]
    for number, axis in enumerate(axes):
        fits: tuple[tuple[str, Fit], ...] = (
            ("in reverse order", lambda e, n=number: np.flip(e.truth, n)),
            ("one place too far", lambda e, n=number: np.roll(e.truth, 1, n)),
            ("one place too early", lambda e, n=number: np.roll(e.truth, -1, n)),
        )
        for description, fit in fits:
            if fits_every_case(fit, evidence):
                return Symptom("moved", f"is right, but {description} along {axis}")
        for step in (1, *BLOCK_SIZES):
            if fits_every_case(
                lambda e, n=number, step=step: compute_running_sums(e.truth, step, n), evidence
            ):
                addend = "the one" if step == 1 else f"the one {step} places"
                description = f"has in each element {addend} before along {axis} added"
                return Symptom("sum-goes-on", f"{description}: its sum is not set back to 0")
    for first, second in combinations(range(count), 2):
        description = (
            f"holds the right values at the wrong places: {axes[first]} and {axes[second]} are exchanged"
        )
        pair = first, second
        if fits_every_case(lambda e, pair=pair: e.truth.swapaxes(*pair).reshape(e.truth.shape), evidence):
            return Symptom("axes-exchanged", description)
    return None


def compute_running_sums(values: np.ndarray, step: int, axis: int) -> np.ndarray:
    """Add to each value along an axis the values at every multiple of `step` positions before it."""
    sums = np.moveaxis(values, axis, 0).copy()
    for position in range(step, len(sums)):
        sums[position] += sums[position - step]
    return np.moveaxis(sums, 0, axis)
