"""Diagnosis of wrong values: error positions and kinds, known mistakes, findings of the virtual GPU."""

import functools

import numpy as np
import pytest

from harness.check import diagnose as d
from harness.check.compare import compare
from harness.check.diagnose import Evidence
from harness.puzzles.p22 import spec as p22
from harness.puzzles.p22.mistakes import MISTAKES, derive
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.cases import CANCELLING, is_nonfinite
from harness.spec.rounding import round_to_dtype
from harness.vgpu import Finding
from harness.vgpu.checks.findings import KINDS

CASE_NAMES = ("hard values", "odd sizes", "wide", "wide output", "many rows")
CASES = [case for case in p22.cases() if case.name in CASE_NAMES]
ARRAYS = {case.name: p22.inputs(case, "float32", 0) for case in p22.cases()}
GRADIENTS = ("grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")
QUANTITIES = ("output", "mean", "rstd", *GRADIENTS, "row_sums")


@functools.cache
def get_reference(case: str) -> dict[str, np.ndarray]:
    return {
        quantity: np.asarray(array, np.float64)
        for quantity, array in p22.PUZZLE.compute_exact(ARRAYS[case]).items()
    }


def zero(_) -> np.ndarray:
    return np.zeros(())


def make_evidence(case, quantity, got, unwritten=None):
    """Create evidence for a kernel's output, rounded to float32."""
    arrays = ARRAYS[case.name]
    expected = get_reference(case.name)[quantity]
    got = np.asarray(got, np.float32).astype(np.float64)
    unwritten = np.zeros(expected.shape, bool) if unwritten is None else unwritten
    baseline = expected.astype(np.float32).astype(np.float64)
    result = compare(got, expected, baseline, "float32", unwritten_mask=unwritten)
    return Evidence(case, arrays, got, expected, unwritten, result)


def diagnose(case, quantity, got, unwritten=None, **options):
    return d.diagnose(PUZZLE, quantity, [make_evidence(case, quantity, got, unwritten)], **options)


def get_truth(case, quantity="grad_input"):
    return get_reference(case.name)[quantity].copy()


# ---- The derivation -----------------------------------------------------------------------------------------


def test_unknown_step_raises_attribute_error():
    with pytest.raises(AttributeError, match="no step 'dz'"):
        _ = derive(ARRAYS["chapter"]).dz


# ---- Known mistakes -----------------------------------------------------------------------------------------


def test_mistakes_have_unique_ids():
    assert len({mistake.id for mistake in MISTAKES}) == len(MISTAKES)


def compute_mistaken_values(mistake, case, quantity):
    """Return the values that a mistake's last alternative produces, or None if they are correct."""
    with np.errstate(all="ignore"):
        values = np.asarray(getattr(derive(ARRAYS[case.name], mistake.changes), quantity))
    expected = get_truth(case, quantity)
    values = values[-1] if values.ndim > expected.ndim else values
    error = np.abs(values - expected).max() / np.abs(expected).max()
    return values if np.isfinite(error) and error > 1e-4 else None


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_mistakes_are_identified_in_every_affected_quantity(mistake):
    affected = 0
    for quantity in QUANTITIES:
        values_by_case = [(case, compute_mistaken_values(mistake, case, quantity)) for case in CASES]
        cases = [
            make_evidence(case, quantity, values) for case, values in values_by_case if values is not None
        ]
        if not cases:
            continue
        affected += 1
        diagnosis = d.diagnose(PUZZLE, quantity, cases, gate="G")
        diagnoses = next(m for m in MISTAKES if m.id == diagnosis.mistake)
        for case, values in values_by_case:
            if values is not None:  # naming another mistake is correct only if its values are equal
                other = np.asarray(getattr(derive(ARRAYS[case.name], diagnoses.changes), quantity))
                error = np.abs(values - other)
                error = error.min(0) if other.ndim > values.ndim else error
                assert error.max() <= 1e-6 * np.abs(values).max(), (quantity, diagnosis.mistake)
        assert diagnosis.hint == f"G-{diagnoses.hint}"
        assert f"equals the reference {diagnoses.description}, " in diagnosis.sentence
    assert affected, "a mistake must change some quantity"


def test_mistake_must_explain_every_failing_case():
    first, second = CASES[:2]
    without_c2 = derive(ARRAYS[first.name], {"c2": zero}).grad_input
    cases = [
        make_evidence(first, "grad_input", without_c2),
        make_evidence(second, "grad_input", 1.01 * get_truth(second)),
    ]
    assert d.diagnose(PUZZLE, "grad_input", cases[:1]).mistake == "mean-term-dropped"
    assert d.diagnose(PUZZLE, "grad_input", cases).mistake is None


def test_no_hint_without_a_gate():
    without_c2 = derive(ARRAYS["wide"], {"c2": zero}).grad_input
    diagnosis = diagnose(CASES[2], "grad_input", without_c2)
    assert diagnosis.hint is None and not any("hint" in line for line in diagnosis.lines)


def test_float32_result_rounded_to_16_bits_is_identified():
    for dtype in ("float16", "bfloat16"):
        got = round_to_dtype(get_truth(CASES[1], "output"), dtype)
        diagnosis = diagnose(CASES[1], "output", got, gate="forward")
        assert diagnosis.mistake == f"rounded-to-{dtype}"
        assert f"the digits of {dtype}:" in diagnosis.sentence


@pytest.mark.parametrize(
    ("relative_error", "other_cases", "expected"),
    [(2.0**-8, (), True), (0.1, (), False), (2.0**-8, CASES[:1], False)],
)
def test_sum_rounded_to_16_bits_is_identified_if_only_it_is_wrong(relative_error, other_cases, expected):
    """A larger error, or an error in another case, has a different cause."""
    cancels = next(case for case in p22.cases() if case.values == CANCELLING)
    size = np.abs(ARRAYS[cancels.name]["grad_output"]).sum((0, 1))
    noise = size * np.random.default_rng(0).uniform(-relative_error, relative_error, size.shape)
    cases = [
        make_evidence(case, "grad_bias", get_truth(case, "grad_bias") + noise[0]) for case in other_cases
    ]
    cases.append(make_evidence(cancels, "grad_bias", get_truth(cancels, "grad_bias") + noise))
    diagnosis = d.diagnose(PUZZLE, "grad_bias", cases)
    assert (diagnosis.mistake == "rounded-in-a-sum") == expected
    assert ("a term of it, is rounded on the way" in diagnosis.sentence) == expected


def test_cancellation_is_recognised_by_the_affected_rows():
    case = CASES[1]
    x = ARRAYS[case.name]["input"]
    noisy_rows = get_truth(case) * (1 + 1e-3 * (np.abs(x.mean(-1)) > 10 * x.std(-1)))[..., None]
    diagnosis = diagnose(case, "grad_input", noisy_rows)
    assert diagnosis.mistake == "cancellation" and "E[x^2] - mean^2" in diagnosis.sentence
    everywhere = diagnose(case, "grad_input", get_truth(case) * 1.001)
    assert everywhere.mistake != "cancellation"


# ---- NaN and infinity in the inputs ------------------------------------------------------------------------


NONFINITE_CASES = [case for case in p22.cases() if is_nonfinite(case.values)]


@pytest.mark.parametrize("case", NONFINITE_CASES, ids=lambda case: case.name)
def test_dropped_or_propagated_nan_is_identified(case):
    mistakes = set()
    for quantity in QUANTITIES:
        expected = get_truth(case, quantity)
        if not np.isfinite(expected).all():
            dropped = make_evidence(case, quantity, np.where(np.isfinite(expected), expected, 0.5))
            assert dropped.result.num_nonfinite and not dropped.result.ok
            mistakes.add(d.diagnose(PUZZLE, quantity, [dropped], gate="dx").mistake)
        if np.isfinite(expected).any():
            propagated = make_evidence(case, quantity, np.full(expected.shape, np.nan))
            mistakes.add(d.diagnose(PUZZLE, quantity, [propagated], gate="dx").mistake)
    assert mistakes == {"nan-swallowed", "nan-spread"}


def test_expected_nan_does_not_hide_a_known_mistake():
    """dx without c2 is wrong in the finite rows, and NaN where NaN is expected."""
    cases = [CASES[0], next(case for case in NONFINITE_CASES if case.name == "NaN in dy")]
    cases_of_dx = [
        make_evidence(case, "grad_input", derive(ARRAYS[case.name], {"c2": zero}).grad_input)
        for case in cases
    ]
    diagnosis = d.diagnose(PUZZLE, "grad_input", cases_of_dx, gate="dx")
    assert diagnosis.mistake == "mean-term-dropped"
    assert "where in 'hard values'" in " ".join(diagnosis.lines), "the message is about a finite case"


def test_finite_case_is_shown_before_a_case_with_nan():
    case = next(case for case in NONFINITE_CASES if case.name == "NaN in x")
    dropped = make_evidence(case, "output", np.nan_to_num(get_truth(case, "output")))
    scaled = make_evidence(CASES[1], "output", get_truth(CASES[1], "output") * 1.01)
    diagnosis = d.diagnose(PUZZLE, "output", [dropped, scaled])
    assert diagnosis.mistake == "times-a-constant" and any(
        f"where in '{CASES[1].name}'" in line for line in diagnosis.lines
    )


# ---- Elements -----------------------------------------------------------------------------------------------


def test_first_wrong_elements_are_listed():
    case = CASES[0]
    got = get_truth(case)
    got[1, 2, 3] += 1
    got[2, 0, 5] += 1
    lines = diagnose(case, "grad_input", got, name="dx").lines
    expected = get_truth(case)
    values = f"got {np.float32(got[1, 2, 3]):.7g}, expected {expected[1, 2, 3]:.7g}"
    ratio = got[1, 2, 3] / expected[1, 2, 3]
    assert lines[0] == f"dx[1, 2, 3] {values}: {ratio:.4g} times that (B 1, S 2, H 3)"
    assert lines[1].startswith("dx[2, 0, 5] got") and lines[1].endswith(" times that")
    assert not any("... " in line for line in lines)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("one row", "chapter", "NaN in x"), "chapter"),
        (("one row", "square", "odd sizes"), "square"),
        (("hard values", "chapter"), "hard values"),  # the first one executed of equal sizes
        (("one row", "NaN in x"), "one row"),
    ],
)
def test_smallest_representative_case_is_shown(names, expected):
    """A case with several rows is preferred over one with mostly singleton dimensions."""
    cases = {case.name: case for case in p22.cases()}
    wrong = [
        make_evidence(cases[name], "grad_input", get_truth(cases[name], "grad_input") * 3) for name in names
    ]
    assert d.choose_example(wrong, PUZZLE.dims).case.name == expected


def test_ratio_is_omitted_if_not_informative():
    case = CASES[0]
    got = get_truth(case)
    got[0, 0, 0], got[0, 0, 1], got[0, 0, 3] = 0.0, np.nan, -2 * got[0, 0, 3]
    got[0, 0, 2] *= 1 + 1e-6
    e = make_evidence(case, "grad_input", got)
    assert [d.describe_ratio(e, (0, 0, k)) for k in range(4)] == ["", "", "", ": -2 times that"]


def test_number_of_wrong_elements_is_shown():
    case = CASES[0]
    lines = diagnose(case, "grad_input", get_truth(case) + 1).values
    assert lines[4] == "... 128 of 128 elements are wrong"


def test_unwritten_nan_and_wrong_values_are_distinguished():
    case = CASES[0]
    poison = np.zeros((4, 4, 8), bool)
    poison[0, 0, 0] = True
    got = np.where(poison, np.nan, get_truth(case))
    unwritten = diagnose(case, "grad_input", got, poison, name="dx")
    assert unwritten.mistake == "never-written"
    assert unwritten.values[0] == "1 of 128 elements of dx were never written"
    assert unwritten.values[1].startswith("dx[0, 0, 0] never written, expected ")
    nan = diagnose(case, "grad_input", got, name="dx")
    assert nan.mistake == "not-finite" and nan.values[0] == "1 of 128 elements of dx are NaN"
    infinite = diagnose(case, "grad_input", np.where(poison, np.inf, get_truth(case)), name="dx")
    assert (
        infinite.mistake == "not-finite"
        and infinite.values[0] == "1 of 128 elements of dx are infinite or NaN"
    )


# ---- Positions -------------------------------------------------------------------------------------------------


def make_mask(shape, *indices):
    """Create a mask that is True at these indices."""
    mask = np.zeros(shape, bool)
    for index in indices:
        mask[index] = True
    return mask


@pytest.mark.parametrize(
    ("mask", "letters", "message"),
    [
        (np.ones((2, 3), bool), "OH", "every element"),
        (make_mask((2, 3), (1, 2)), "OH", "one element, [1, 2]"),
        (make_mask((4, 5), (3, slice(None))), "OH", "only O = 3 (the last)"),
        (make_mask((4, 5), (slice(None), 0)), "OH", "only H = 0 (the first)"),
        (make_mask((4, 5), (slice(None), 2)), "OH", "only H = 2"),
        (make_mask((2, 3, 4), (1, 2)), "BSH", "only B = 1 (the last), only S = 2 (the last)"),
        (make_mask((40,), (slice(32, None))), "H", "the last tile of 32 along H, from 32"),
        (make_mask((20, 3), (slice(16, None))), "OH", "the last tile of 16 along O, from 16"),
        (make_mask((131,), (slice(128, None))), "H", "the last tile of 128 along H, from 128"),
        (make_mask((9,), (slice(5, None))), "H", "H from 5 to the end"),
        (make_mask((9,), (slice(2, 5))), "H", "H from 2 to 4"),
        (make_mask((9,), (slice(2, None, 3))), "H", "H = 2, 5, ... (every 3)"),
        (make_mask((9,), 1, 2, 6), "H", "3 of 9 along H"),
        (make_mask((2, 2), (0, 0), (1, 1)), "OH", "spread over the tensor, 50% of the elements"),
        (~make_mask((2, 2, 5), (0, 0, slice(None))), "BSH", "everything but B = 0 (the first), S = 0 (the first)"),
        (~make_mask((4, 8), (slice(0, 2), slice(4, 8))), "OH", "everything but O from 0 to 1, H from 4 to the end"),
        (make_mask((4, 4), (2, 0), (3, 1), (3, 0)), "OH", "O from 2 to the end, H from 0 to 1 (75% of the elements there)"),
        (np.zeros((2, 2), bool), "OH", "the tensor as a whole"),
    ],
)  # fmt: skip
def test_error_positions_are_described(mask, letters, message):
    assert d.describe_location(mask, tuple(letters)) == message


def test_axes_of_fixed_size_are_numbered():
    assert (
        d.describe_location(make_mask((4, 2), (slice(None), 1)), ("rows", 2)) == "only axis 1 = 1 (the last)"
    )
    assert d.describe_location(make_mask((4, 2), (1, slice(None))), ("rows", 2)) == "only rows = 1"


# ---- Findings -----------------------------------------------------------------------------------------------


TWO_STORES = "x[0]: a store by thread (0, 0, 0) and a store by thread (1, 0, 0) of the same block"


def make_finding(kind, message="", other="", kernel="k"):
    """Create a finding with the fields that the diagnosis uses."""
    access_kinds = frozenset(verb for verb in ("a load", "a store", "an atomic") if f"{verb} by" in message)
    return Finding(kind, message, "a.mojo:1:1", kernel, other_location=other, access_kinds=access_kinds)


STORES = "x: a store by A and a store by B"
ATOMIC_STORE = ("global race", "x: an atomic by A and a store by B", "b.mojo:2:2")


@pytest.mark.parametrize(
    ("findings", "mistake"),
    [
        (["shared race"], "missing-barrier"),
        (["out-of-bounds store"], "out-of-bounds-store"),
        (["uninitialised read"], "uninitialised-read"),
        ([("global race", STORES)], "overwritten"),
        ([("global race", "x: a load by A and a store by B", "a.mojo:1:9")], "missing-atomic"),
        ([ATOMIC_STORE], "zeroed-in-the-kernel"),
        # zeroed at one line, read back at another
        ([ATOMIC_STORE, ("global race", "x: an atomic by A and a load by B", "b.mojo:5:2")], "zeroed-in-the-kernel"),
        # a non-atomic `+=` and an atomic
        ([ATOMIC_STORE, ("global race", "x: an atomic by A and a store by B (or a load by B)", "b.mojo:2:2")], "missing-atomic"),
        (["store to an input", ("global race", STORES)], "input-overwritten"),
        (["misaligned load", "uninitialised read"], "misaligned-vector"),
        # missing threads explain all other findings
        (["uninitialised read", "early return"], "barrier-divergence"),
        (["shared race", "barrier divergence"], "barrier-divergence"),
        ([("global race", STORES), "warp divergence"], "warp-divergence"),
        (["uninitialised read", "shuffle from an absent thread"], "warp-divergence"),
        (["uninitialised read", "shared race"], "missing-barrier"),
        ([("race inside a block", TWO_STORES)], "several-writers"),
        ([("shared race", TWO_STORES), "uninitialised read"], "several-writers"),
        ([("shared race", "x[0]: a load by thread 1 and a store by thread 2")], "missing-barrier"),
        ([("shared race", TWO_STORES), ("shared race", "a load and a store")], "missing-barrier"),
        (["trap", "uninitialised read"], "trap"),
        (["null pointer atomic", "shared race"], "null-pointer"),
        (["atomic scope"], "atomic-scope"),
        (["undeclared atomic"], "undeclared-atomic"),
        (["store to constant memory"], None),
        ([], None),
    ],
)  # fmt: skip
def test_findings_are_attributed_to_a_cause(findings, mistake):
    arguments = [finding if isinstance(finding, tuple) else (finding,) for finding in findings]
    cause = d.find_cause([make_finding(*argument) for argument in arguments])
    assert (cause and cause[0]) == mistake


def test_explained_kinds_are_kinds_of_findings():
    assert set(d.CAUSES) < set(KINDS)


def test_consequences_of_an_out_of_bounds_access_are_omitted():
    out_of_bounds = make_finding("out-of-bounds load")
    consequences = [*map(make_finding, ("uninitialised read", "global race", "output never written"))]
    other_kernel = make_finding("global race", kernel="another")
    assert d.drop_secondary_findings([*consequences, out_of_bounds, other_kernel]) == [
        out_of_bounds,
        other_kernel,
    ]
    assert d.drop_secondary_findings(consequences) == consequences, (
        "without an out-of-bounds access they are causes"
    )
    divergence = make_finding("barrier divergence")
    assert d.drop_secondary_findings([divergence, *consequences]) == [divergence]
