"""The diagnosis: where errors sit, what kind they are, and every known mistake told from every other one."""

import functools

import numpy as np
import pytest

from harness.check import diagnose as d
from harness.check.compare import compare
from harness.check.diagnose import Evidence
from harness.puzzles.p22 import spec as p22
from harness.puzzles.p22.mistakes import MISTAKES, derive
from harness.puzzles.p22.spec import PUZZLE
from harness.spec.cases import CANCELLING, is_not_finite
from harness.spec.rounding import round_to_dtype
from harness.vgpu import Finding
from harness.vgpu.checks.findings import KINDS

CASES = [
    case
    for case in p22.cases()
    if case.name in ("hard values", "odd sizes", "wide", "wide output", "many rows")
]
ARRAYS = {case.name: p22.inputs(case, "float32", 0) for case in p22.cases()}
GRADIENTS = ("grad_input", "grad_ln_weight", "grad_ln_bias", "grad_weight", "grad_bias")
QUANTITIES = ("output", "mean", "rstd", *GRADIENTS, "row_sums")


@functools.cache
def exactly(case: str) -> dict[str, np.ndarray]:
    """What the puzzle's exact reference says of a case, computed once."""
    return {
        quantity: np.asarray(array, np.float64) for quantity, array in p22.PUZZLE.exact(ARRAYS[case]).items()
    }


def nothing(_) -> np.ndarray:
    """A step that is 0."""
    return np.zeros(())


def evidence(case, quantity, got, unwritten=None):
    """Evidence for values that a kernel might have written, in float32."""
    arrays = ARRAYS[case.name]
    truth = exactly(case.name)[quantity]
    got = np.asarray(got, np.float32).astype(np.float64)
    unwritten = np.zeros(truth.shape, bool) if unwritten is None else unwritten
    round_to_dtype = truth.astype(np.float32).astype(np.float64)
    verdict = compare(got, truth, round_to_dtype, "float32", poison=unwritten)
    return Evidence(case, arrays, got, truth, unwritten, verdict)


def truth(case, quantity="grad_input"):
    """What is right."""
    return exactly(case.name)[quantity].copy()


# ---- The derivation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", p22.cases(), ids=lambda case: case.name)
def test_the_steps_agree_with_the_exact_reference(case):
    exact = p22.PUZZLE.exact(ARRAYS[case.name])
    steps = derive(ARRAYS[case.name])
    for quantity in QUANTITIES:
        finite = np.isfinite(exact[quantity])
        got = getattr(steps, quantity)
        assert np.array_equal(np.isfinite(got), finite), quantity
        apart = np.abs(got[finite] - exact[quantity][finite]).max(initial=0)
        assert apart <= 1e-11 * np.abs(exact[quantity][finite]).max(initial=0), quantity


def test_an_unknown_step_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no step 'dz'"):
        _ = derive(ARRAYS["chapter"]).dz


def test_mistakes_have_ids_of_their_own_and_a_rung():
    assert len({mistake.id for mistake in MISTAKES}) == len(MISTAKES)
    assert {mistake.hint for mistake in MISTAKES} <= {1, 2, 3}


# ---- Known mistakes -----------------------------------------------------------------------------------------


def by_formula(mistake, case, quantity):
    """What the mistake gives, or None where it gives what is right. Of alternatives the last."""
    with np.errstate(all="ignore"):
        values = np.asarray(getattr(derive(ARRAYS[case.name], mistake.changes), quantity))
    right = truth(case, quantity)
    values = values[-1] if values.ndim > right.ndim else values
    apart = np.abs(values - right).max() / np.abs(right).max()
    return values if np.isfinite(apart) and apart > 1e-4 else None


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.id)
def test_every_mistake_is_named_in_every_quantity_that_it_spoils(mistake):
    spoiled = 0
    for quantity in QUANTITIES:
        spoiled_cases = [(case, by_formula(mistake, case, quantity)) for case in CASES]
        cases = [evidence(case, quantity, values) for case, values in spoiled_cases if values is not None]
        if not cases:
            continue
        spoiled += 1
        diagnosis = d.diagnose(PUZZLE, quantity, cases, gate="G")
        named = next(m for m in MISTAKES if m.id == diagnosis.mistake)
        for case, values in spoiled_cases:
            if values is not None:  # the name may be another's only where that one gives the same numbers
                other = np.asarray(getattr(derive(ARRAYS[case.name], named.changes), quantity))
                apart = np.abs(values - other)
                apart = apart.min(0) if other.ndim > values.ndim else apart
                assert apart.max() <= 1e-6 * np.abs(values).max(), (quantity, diagnosis.mistake)
        assert diagnosis.hint == f"G-{named.hint}"
        assert f"equals the reference {named.words}, " in diagnosis.sentence
    assert spoiled, "a mistake that spoils nothing cannot be found"


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_noise_is_no_known_mistake(quantity):
    random = np.random.default_rng(0)
    cases = [
        evidence(
            case,
            quantity,
            truth(case, quantity) * (1 + 0.01 * random.standard_normal(truth(case, quantity).shape)),
        )
        for case in CASES
    ]
    diagnosis = d.diagnose(PUZZLE, quantity, cases, gate="dx")
    assert diagnosis.mistake is None and diagnosis.hint == "dx-1"
    assert diagnosis.sentence == "no known mistake gives these values: see hint dx-1"


def test_a_mistake_must_explain_every_failing_case():
    first, second = CASES[:2]
    dropped = derive(ARRAYS[first.name], {"c2": nothing}).grad_input
    cases = [evidence(first, "grad_input", dropped), evidence(second, "grad_input", 1.01 * truth(second))]
    assert d.diagnose(PUZZLE, "grad_input", cases[:1]).mistake == "mean-term-dropped"
    assert d.diagnose(PUZZLE, "grad_input", cases).mistake is None


def test_without_a_gate_there_is_no_hint():
    dropped = derive(ARRAYS["wide"], {"c2": nothing}).grad_input
    diagnosis = d.diagnose(PUZZLE, "grad_input", [evidence(CASES[2], "grad_input", dropped)])
    assert diagnosis.hint is None and not any("hint" in line for line in diagnosis.lines)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_float32_result_with_the_digits_of_16_bits(kind):
    case = CASES[1]
    got = round_to_dtype(truth(case, "output"), kind)
    diagnosis = d.diagnose(PUZZLE, "output", [evidence(case, "output", got)], gate="forward")
    assert diagnosis.mistake == f"rounded-to-{kind}" and f"the digits of {kind}:" in diagnosis.sentence


@pytest.mark.parametrize(
    ("off", "others", "named"), [(2.0**-8, (), True), (0.1, (), False), (2.0**-8, CASES[:1], False)]
)
def test_a_sum_that_16_bits_have_rounded_is_named_where_it_alone_is_wrong(off, others, named):
    """An error of `off` times what is added up; not where it is larger, nor where another case is wrong too."""
    cancels = next(case for case in p22.cases() if case.values == CANCELLING)
    size = np.abs(ARRAYS[cancels.name]["grad_output"]).sum((0, 1))
    noise = size * np.random.default_rng(0).uniform(-off, off, size.shape)
    cases = [evidence(case, "grad_bias", truth(case, "grad_bias") + noise[0]) for case in others]
    cases.append(evidence(cancels, "grad_bias", truth(cancels, "grad_bias") + noise))
    diagnosis = d.diagnose(PUZZLE, "grad_bias", cases)
    assert (diagnosis.mistake == "rounded-in-a-sum") == named
    assert ("a term of it, is rounded on the way" in diagnosis.sentence) == named


def test_cancellation_is_seen_by_the_rows_that_it_spoils():
    case = CASES[1]
    x = ARRAYS[case.name]["input"]
    spoiled = truth(case) * (1 + 1e-3 * (np.abs(x.mean(-1)) > 10 * x.std(-1)))[..., None]
    diagnosis = d.diagnose(PUZZLE, "grad_input", [evidence(case, "grad_input", spoiled)])
    assert diagnosis.mistake == "cancellation" and "E[x^2] - mean^2" in diagnosis.sentence
    everywhere = d.diagnose(PUZZLE, "grad_input", [evidence(case, "grad_input", truth(case) * 1.001)])
    assert everywhere.mistake != "cancellation"


# ---- NaN and infinity in the inputs ------------------------------------------------------------------------


NOT_FINITE = [case for case in p22.cases() if is_not_finite(case.values)]


@pytest.mark.parametrize("case", NOT_FINITE, ids=lambda case: case.name)
def test_what_swallows_or_spreads_nan_is_named(case):
    named = set()
    for quantity in QUANTITIES:
        right = truth(case, quantity)
        if not np.isfinite(right).all():
            swallowed = evidence(case, quantity, np.where(np.isfinite(right), right, 0.5))
            assert swallowed.verdict.nonfinite and not swallowed.verdict.ok
            named.add(d.diagnose(PUZZLE, quantity, [swallowed], gate="dx").mistake)
        if np.isfinite(right).any():
            spread = evidence(case, quantity, np.full(right.shape, np.nan))
            named.add(d.diagnose(PUZZLE, quantity, [spread], gate="dx").mistake)
    assert named == {"nan-swallowed", "nan-spread"}


def test_nan_that_is_right_does_not_hide_a_known_mistake():
    """dx without c2 is wrong in the rows that hold numbers, and NaN in the one where it must be."""
    cases = [CASES[0], next(case for case in NOT_FINITE if case.name == "NaN in dy")]
    shown = [
        evidence(case, "grad_input", derive(ARRAYS[case.name], {"c2": nothing}).grad_input) for case in cases
    ]
    diagnosis = d.diagnose(PUZZLE, "grad_input", shown, gate="dx")
    assert diagnosis.mistake == "mean-term-dropped"
    assert "where in 'hard values'" in " ".join(diagnosis.lines), "the words are about a case of numbers"


def test_a_finite_case_is_shown_before_one_that_holds_nan():
    wild = next(case for case in NOT_FINITE if case.name == "NaN in x")
    swallowed = evidence(wild, "output", np.nan_to_num(truth(wild, "output")))
    off = evidence(CASES[1], "output", truth(CASES[1], "output") * 1.01)
    diagnosis = d.diagnose(PUZZLE, "output", [swallowed, off])
    assert diagnosis.mistake == "times-a-constant" and any(
        f"where in '{CASES[1].name}'" in line for line in diagnosis.lines
    )


# ---- Elements -----------------------------------------------------------------------------------------------


def test_the_first_wrong_elements_with_index_got_and_expected():
    case = CASES[0]
    got = truth(case)
    got[1, 2, 3] += 1
    got[2, 0, 5] += 1
    lines = d.diagnose(PUZZLE, "grad_input", [evidence(case, "grad_input", got)], name="dx").lines
    right = truth(case)
    values = f"got {np.float32(got[1, 2, 3]):.7g}, expected {right[1, 2, 3]:.7g}"
    ratio = got[1, 2, 3] / right[1, 2, 3]
    assert lines[0] == f"dx[1, 2, 3] {values}: {ratio:.4g} times that (B 1, S 2, H 3)"
    assert lines[1].startswith("dx[2, 0, 5] got") and lines[1].endswith(" times that")
    assert not any("... " in line for line in lines)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("one row", "chapter", "NaN in x"), "chapter"),
        (("one row", "square", "odd sizes"), "square"),
        (("hard values", "chapter"), "hard values"),  # the first of these sizes that was run
        (("one row", "NaN in x"), "one row"),
    ],
)
def test_the_smallest_case_that_shows_it_plainly_is_shown(names, shown):
    """Not one row, in which most axes have one element, while the chapter's sizes show it as well."""
    there = {case.name: case for case in p22.cases()}
    wrong = [evidence(there[name], "grad_input", truth(there[name], "grad_input") * 3) for name in names]
    assert d.most_telling(wrong, PUZZLE.dims).case.name == shown


def test_the_ratio_is_left_out_where_it_says_nothing():
    case = CASES[0]
    got = truth(case)
    got[0, 0, 0], got[0, 0, 1], got[0, 0, 3] = 0.0, np.nan, -2 * got[0, 0, 3]
    got[0, 0, 2] *= 1 + 1e-6
    e = evidence(case, "grad_input", got)
    assert [d.times(e, (0, 0, k)) for k in range(4)] == ["", "", "", ": -2 times that"]


def test_more_wrong_elements_than_are_shown():
    case = CASES[0]
    lines = d.diagnose(PUZZLE, "grad_input", [evidence(case, "grad_input", truth(case) + 1)]).values
    assert lines[4] == "... 128 of 128 elements are wrong"


def test_unwritten_nan_and_wrong_are_told_apart():
    case = CASES[0]
    poison = np.zeros((4, 4, 8), bool)
    poison[0, 0, 0] = True
    got = np.where(poison, np.nan, truth(case))
    never = d.diagnose(PUZZLE, "grad_input", [evidence(case, "grad_input", got, poison)], name="dx")
    assert never.mistake == "never-written"
    assert never.values[0] == "1 of 128 elements of dx were never written"
    assert never.values[1].startswith("dx[0, 0, 0] never written, expected ")
    nan = d.diagnose(PUZZLE, "grad_input", [evidence(case, "grad_input", got)], name="dx")
    assert nan.mistake == "not-finite" and nan.values[0] == "1 of 128 elements of dx are NaN"
    infinite = d.diagnose(
        PUZZLE, "grad_input", [evidence(case, "grad_input", np.where(poison, np.inf, truth(case)))], name="dx"
    )
    assert (
        infinite.mistake == "not-finite"
        and infinite.values[0] == "1 of 128 elements of dx are infinite or NaN"
    )


# ---- Places -------------------------------------------------------------------------------------------------


def marked(shape, *indices):
    """A mask with some indices set."""
    mask = np.zeros(shape, bool)
    for index in indices:
        mask[index] = True
    return mask


@pytest.mark.parametrize(
    ("mask", "letters", "words"),
    [
        (np.ones((2, 3), bool), "OH", "every element"),
        (marked((2, 3), (1, 2)), "OH", "one element, [1, 2]"),
        (marked((4, 5), (3, slice(None))), "OH", "only O = 3 (the last)"),
        (marked((4, 5), (slice(None), 0)), "OH", "only H = 0 (the first)"),
        (marked((4, 5), (slice(None), 2)), "OH", "only H = 2"),
        (marked((2, 3, 4), (1, 2)), "BSH", "only B = 1 (the last), only S = 2 (the last)"),
        (marked((40,), (slice(32, None))), "H", "the last tile of 32 along H, from 32"),
        (marked((20, 3), (slice(16, None))), "OH", "the last tile of 16 along O, from 16"),
        (marked((131,), (slice(128, None))), "H", "the last tile of 128 along H, from 128"),
        (marked((9,), (slice(5, None))), "H", "H from 5 to the end"),
        (marked((9,), (slice(2, 5))), "H", "H from 2 to 4"),
        (marked((9,), (slice(2, None, 3))), "H", "H = 2, 5, ... (every 3)"),
        (marked((9,), 1, 2, 6), "H", "3 of 9 along H"),
        (marked((2, 2), (0, 0), (1, 1)), "OH", "spread over the tensor, 50% of the elements"),
        (~marked((2, 2, 5), (0, 0, slice(None))), "BSH", "everything but B = 0 (the first), S = 0 (the first)"),
        (~marked((4, 8), (slice(0, 2), slice(4, 8))), "OH", "everything but O from 0 to 1, H from 4 to the end"),
        (marked((4, 4), (2, 0), (3, 1), (3, 0)), "OH", "O from 2 to the end, H from 0 to 1 (75% of the elements there)"),
        (np.zeros((2, 2), bool), "OH", "the tensor as a whole"),
    ],
)  # fmt: skip
def test_where_errors_sit(mask, letters, words):
    assert d.place(mask, tuple(letters)) == words


def test_axes_of_a_fixed_size_have_no_name():
    assert d.place(marked((4, 2), (slice(None), 1)), ("rows", 2)) == "only axis 1 = 1 (the last)"
    assert d.place(marked((4, 2), (1, slice(None))), ("rows", 2)) == "only rows = 1"


# ---- Findings -----------------------------------------------------------------------------------------------


TWO_STORES = "x[0]: a store by thread (0, 0, 0) and a store by thread (1, 0, 0) of the same block"


def finding(kind, message="", where="a.mojo:1:1", other="", kernel="k"):
    """As much of a finding as the diagnosis reads."""
    verbs = frozenset(verb for verb in ("a load", "a store", "an atomic") if f"{verb} by" in message)
    return Finding(kind, message, where, kernel, other=other, verbs=verbs)


@pytest.mark.parametrize(
    ("findings", "mistake"),
    [
        ([finding("shared race")], "missing-barrier"),
        ([finding("out-of-bounds store")], "out-of-bounds-store"),
        ([finding("uninitialised read")], "uninitialised-read"),
        ([finding("global race", "x: a store by A and a store by B")], "overwritten"),
        ([finding("global race", "x: a load by A and a store by B", other="a.mojo:1:9")], "missing-atomic"),
        (
            [finding("global race", "x: an atomic by A and a store by B", other="b.mojo:2:2")],
            "zeroed-in-the-kernel",
        ),
        (  # zeroed here, read back there
            [
                finding("global race", "x: an atomic by A and a store by B", other="b.mojo:2:2"),
                finding("global race", "x: an atomic by A and a load by B", other="b.mojo:5:2"),
            ],
            "zeroed-in-the-kernel",
        ),
        (  # a plain `+=` beside an atomic
            [
                finding("global race", "x: an atomic by A and a store by B", other="b.mojo:2:2"),
                finding(
                    "global race", "x: an atomic by A and a store by B (or a load by B)", other="b.mojo:2:2"
                ),
            ],
            "missing-atomic",
        ),
        (
            [finding("store to an input"), finding("global race", "x: a store by A and a store by B")],
            "input-overwritten",
        ),
        ([finding("misaligned load"), finding("uninitialised read")], "misaligned-vector"),
        # threads that are missing explain what else is found, however often that is seen
        ([finding("uninitialised read"), finding("early return")], "barrier-divergence"),
        ([finding("shared race"), finding("barrier divergence")], "barrier-divergence"),
        (
            [finding("global race", "x: a store by A and a store by B"), finding("warp divergence")],
            "warp-divergence",
        ),
        ([finding("uninitialised read"), finding("shuffle from an absent thread")], "warp-divergence"),
        ([finding("uninitialised read"), finding("shared race")], "missing-barrier"),
        ([finding("race inside a block", TWO_STORES)], "several-writers"),
        ([finding("shared race", TWO_STORES), finding("uninitialised read")], "several-writers"),
        ([finding("shared race", "x[0]: a load by thread 1 and a store by thread 2")], "missing-barrier"),
        (
            [finding("shared race", TWO_STORES), finding("shared race", "a load and a store")],
            "missing-barrier",
        ),
        ([finding("trap"), finding("uninitialised read")], "trap"),
        ([finding("null pointer atomic"), finding("shared race")], "null-pointer"),
        ([finding("atomic scope")], "atomic-scope"),
        ([finding("undeclared atomic")], "undeclared-atomic"),
        ([finding("store to constant memory")], None),
        ([], None),
    ],
)
def test_what_findings_mean(findings, mistake):
    explained = d.from_findings(findings)
    assert (explained and explained[0]) == mistake


def test_every_explained_kind_is_one_that_the_virtual_gpu_finds():
    assert set(d.FOUND) < set(KINDS)


def test_what_only_follows_from_an_index_that_leaves_its_tensor_is_left_out():
    outside = finding("out-of-bounds load")
    follows = [finding("uninitialised read"), finding("global race"), finding("output never written")]
    elsewhere = finding("global race", kernel="another")
    assert d.first_causes([*follows, outside, elsewhere]) == [outside, elsewhere]
    assert d.first_causes(follows) == follows, "by themselves they are causes"
    missed = finding("barrier divergence")
    assert d.first_causes([missed, *follows]) == [missed]
