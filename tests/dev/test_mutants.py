"""`workbook dev check --mutants`: mutations of a line, survivors, and their explanations."""

import sys
from pathlib import Path

import pytest

from harness.dev import mutants, mutation
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.spec.catalogue import find_puzzle, list_puzzle_names

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "toys"))
import checkout as toys  # noqa: E402


@pytest.fixture
def in_checkout(tmp_path):
    """Enter a checkout with the toy puzzles."""
    toys.create(tmp_path)
    with toys.enter(tmp_path):
        yield tmp_path


def run_mutants(*arguments: str) -> tuple[int, str, str]:
    """Run `dev check --mutants`; return exit code, standard output and standard error."""
    return toys.run(["dev", "check", "--mutants", *arguments])


# ---- Mutations of a line ---------------------------------------------------------------------------------


def list_mutated_lines(body: str, edits) -> set[str]:
    """Return each mutant's changed line, or all lines if several changed."""
    start, end = "# BLANK-START a: a task", "# BLANK-END a"
    lines = [f"    {line}" for line in (start, *body.split("\n"), end)]
    text = "\n".join(["def f(a, b, n):", *lines, "    return a", ""])
    (blank,) = blanks.find_blanks(text).values()
    return {mutants.make_mutant(text, blank, edit).new for edit in edits(text, blank)}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("a = b + 1", {"a = b - 1", "a = b + 2"}),
        ("a = b @ n", {"a = b * n"}),
        ("a = -b if n <= 2.5 else b", {
            "a = b if n <= 2.5 else b", "a = -b if n < 2.5 else b", "a = -b if n <= 5.0 else b",
            "a = -b if (not (n <= 2.5)) else b",
        }),
        ("a += b", {"a -= b", "a = b", "pass"}),
        ("a = b and n", {"a = b or n", "a = b", "a = n"}),
        ("a = b is not None", {"a = b is None"}),
        ("a = f(b, n, dim=-1)", {"a = f(n, b, dim=-1)", "a = f(b, n)", "a = f(b, n, dim=1)", "a = f(b, n, dim=-2)"}),
        ("a = max(b, n).item()", {"a = min(b, n).item()", "a = max(b, n)"}),
        ("a = [i for i in b if not i]", {"a = [i for i in b if i]", "a = [i for i in b if (not (not i))]"}),
        ("a = b\nn = a", {"n = a a = b"}),
        ("a = b\nn = b", set()),
        ("a[n] = b\nb[n] = n", {"b[n] = n a[n] = b"}),
        ("a[n] = n\nb[n] = n", set()),
        ("a = zip(b, strict=True)", set()),
        ("f(b)\nn += 1", {"pass", "n -= 1", "n = 1", "n += 2"}),
        ('"""Words."""\nf(keep=True)', {"f(keep=False)", "f()", "pass"}),
    ],
)  # fmt: skip
def test_mutations_of_a_python_line(body, expected):
    assert list_mutated_lines(body, mutants.list_python_edits) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("var t = b + n * 2", {"var t = b - n * 2", "var t = b + n / 2", "var t = b + n * 3"}),
        ("a[i, j] += max(b, 0.5)", {
            "a[i, j] -= max(b, 0.5)", "a[i, j] = max(b, 0.5)", "a[i, j] += min(b, 0.5)", "a[i, j] += max(b, 1.0)",
            "a[j, i] += max(b, 0.5)", "a[i, j] += max(0.5, b)", "pass",
        }),
        ("if i < n and thread_idx.x == 0:", {
            "if i <= n and thread_idx.x == 0:", "if i < n and thread_idx.x != 0:", "if i < n and thread_idx.x == 1:",
            "if i < n and thread_idx.y == 0:", "if i < n or thread_idx.x == 0:", "if True:",
            "if not (i < n and thread_idx.x == 0):",
        }),
        ("while i < n:  # a + b", {"while i <= n:", "while not (i < n):", "while False:"}),
        ("a[i] = b\nbarrier()", {"pass", "barrier() a[i] = b"}),
        ("a[i] = b\nc[i] = n", {"pass"}),
        ("f(\n    b, n,\n    b + n\n)", {"b - n"}),
    ],
)  # fmt: skip
def test_mutations_of_a_mojo_line(body, expected):
    assert {
        now.partition("  #")[0].partition(" # ")[0]
        for now in list_mutated_lines(body, mutants.list_mojo_edits)
    } == expected


def test_mutant_is_a_parsable_file_with_a_location(in_checkout):
    (exercise, *_) = mutation.list_exercises(find_puzzle("p91"))
    text = exercise.solution.read_text()
    all_mutants = mutants.list_mutants(exercise)
    assert {(mutant.gate, mutant.line, mutant.old) for mutant in all_mutants} == {
        ("dcube", 7, "return 3 * input**2 * grad_output")
    }
    assert len({mutant.text for mutant in all_mutants}) == len(all_mutants) == 5 and text not in {
        mutant.text for mutant in all_mutants
    }


# ---- The command --------------------------------------------------------------------------------------------

LINE = "return 3 * input**2 * grad_output"
SURVIVOR = f'[["numpy.dcube"]]\nwas = "{LINE}"\nnow = "NOW"\nwhy = "a reason"\n'


def format_counts(total: int, *, rejected: int, explained=0, survivors=0, unchecked=0, share: float) -> str:
    """Return the command's expected last line."""
    return (
        f"p91 numpy: {total} mutants: {rejected} rejected, {explained} explained, {survivors} survived, "
        f"{unchecked} could not be checked; {share} % of those checked rejected\n"
    )


def test_all_mutants_are_rejected(in_checkout):
    code, out, err = run_mutants("p91", "--rung", "numpy")
    assert (code, out) == (0, format_counts(5, rejected=5, share=100.0))
    assert err == "p91 numpy: 5 of 5 mutants checked\n"


IMPORT_TIME_BLANK = """
def dcube(grad_output, input):
    return FACTOR * input**2 * grad_output

# BLANK-START dcube: a number used at import
FACTOR = {1: 3}[1]
# BLANK-END dcube
"""


def solve(in_checkout: Path, body: str) -> None:
    """Replace the body of the toy's NumPy solution."""
    path = in_checkout / "solutions/p91/in_numpy.py"
    path.write_text(path.read_text().replace(LINE, body.replace("\n", "\n    ")))


def test_survivor_is_listed_until_explained(in_checkout):
    solve(in_checkout, "factor = max(3, 0)\nreturn factor * input**2 * grad_output")
    survivor_line = (
        "solutions/p91/in_numpy.py:7: dcube passes with `factor = max(3, 1)` for `factor = max(3, 0)`\n"
    )
    code, out, _ = run_mutants("p91", "--rung", "numpy")
    assert (code, out) == (1, survivor_line + format_counts(7, rejected=6, survivors=1, share=85.7))
    explanation = SURVIVOR.replace(LINE, "factor = max(3, 0)").replace("NOW", "factor = max(3, 1)")
    (in_checkout / "solutions/p91/survivors.toml").write_text(explanation)
    code, out, _ = run_mutants("p91", "--rung", "numpy")
    assert (code, out) == (0, format_counts(7, rejected=6, explained=1, share=85.7))


def test_unchecked_mutant_is_not_counted_as_rejected(in_checkout):
    path = in_checkout / "solutions/p91/in_numpy.py"
    path.write_text(IMPORT_TIME_BLANK)
    code, out, _ = run_mutants("p91", "--rung", "numpy")
    assert (code, out) == (0, format_counts(3, rejected=1, unchecked=2, share=100.0))


def test_exiting_and_hanging_mutants_are_rejected(in_checkout, monkeypatch):
    monkeypatch.setenv("WORKBOOK_GATE_SECONDS", "5")
    solve(
        in_checkout,
        "n = 0\nif n != 0:\n    raise SystemExit\nwhile n < 3:\n    n += 3\nreturn n * input**2 * grad_output",
    )
    code, out, _ = run_mutants("p91", "--rung", "numpy")
    assert code == 1 and [line.partition(" passes with ")[2] for line in out.splitlines()[:-1]] == [
        "`pass` for `raise SystemExit`", "`n = 3` for `n += 3`",
    ]  # fmt: skip


def test_wrong_solution_is_reported(in_checkout):
    solve(in_checkout, "return 4 * input")
    code, out, err = run_mutants("p91", "--rung", "numpy")
    assert (code, out) == (2, "") and "in_numpy.py is not correct, so its mutants cannot be checked" in err


@pytest.mark.parametrize("flag", [("--rung", "numpy"), ("--most", "3"), ("--seed", "1")])
def test_flags_without_mutants_are_a_usage_error(command_line, flag):
    result = command_line("dev", "check", "p22", *flag)
    assert result.code == 2 and "--rung, --most and --seed belong to --mutants" in result.err


def test_unknown_rung_is_rejected(command_line):
    result = command_line("dev", "check", "p19", "--mutants", "--rung", "numpy")
    assert result.code == 2 and "p19 has no NumPy rung" in result.err


def test_unused_explanation_is_reported(in_checkout):
    (in_checkout / "solutions/p91/survivors.toml").write_text(SURVIVOR.replace("NOW", "return 7"))
    code, out, _ = run_mutants("p91", "--rung", "numpy")
    assert code == 1
    assert out.startswith(
        f"solutions/p91/survivors.toml: numpy.dcube has no mutant `{LINE}` -> `return 7`\np91 numpy: 5 mutants"
    )


def test_sample_is_seeded(in_checkout):
    samples = {}
    for seed in range(3):
        (exercise,) = mutation.list_exercises(find_puzzle("p91"), ["numpy"])
        samples[seed] = [sample.new for sample in mutation.sample_mutants(exercise, seed=seed, max_mutants=2)]
    assert all(len(sample) == 2 for sample in samples.values()) and len({*map(tuple, samples.values())}) > 1
    assert mutation.sample_mutants(exercise, seed=0, max_mutants=9) == mutants.list_mutants(exercise)
    code, out, _ = run_mutants("p91", "--rung", "numpy", "--most", "2", "--seed", "1")
    assert (code, out) == (0, format_counts(2, rejected=2, share=100.0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "survivors.toml: "),
        ('[["numpy.dcube"]]\nwas = "a"\n', "an entry of numpy.dcube needs was, now and why"),
        ('["numpy.dcube"]\nwas = "a"\n', "an entry of numpy.dcube needs was, now and why"),
        (SURVIVOR.replace(".dcube", ""), "an entry of numpy needs was, now and why"),
    ],
)
def test_damaged_survivor_list_is_reported(in_checkout, text, message):
    (in_checkout / "solutions/p91/survivors.toml").write_text(text)
    with pytest.raises(DamagedFile, match=message):
        mutation.load_explanations("p91")


@pytest.mark.slow
@pytest.mark.compiles
def test_broken_kernel_in_a_batch_has_no_result(in_checkout):
    (exercise,) = mutation.list_exercises(find_puzzle("p90"))
    text = exercise.solution.read_text()
    old = "var value = x[from_row, c].cast[accum]()"
    lines = [f"{old} {suffix}" for suffix in ("+ 1", "+ nothing", "* 1")]
    batch = [mutants.Mutant("square", 41, old, new, text.replace(old, new)) for new in lines]
    results = mutation.check_mutants(exercise, batch)
    assert [(mutant.new, passes) for mutant, passes in results] == list(
        zip(lines, (False, None, True), strict=True)
    )


# ---- The puzzles ----------------------------------------------------------------------------------------------

RUNGS = {
    "p20": ("derive", "torch", "register"), "p21": ("catch",), "p22": ("derive", "numpy"), "p23": ("numpy", "torch"),
    "p24": ("numpy", "torch"), "p25": ("numpy",), "p26": ("printer", "fold", "match", "swap"), "p27": ("numpy", "tape"),
}  # fmt: skip
"""Rungs with mutants that are checked within seconds."""
FULLY_CHECKED = ("p22-derive", "p22-numpy", "p23-numpy", "p24-numpy", "p24-torch")
CHECKED_BY_SAMPLE = ("p21-catch", "p26-fold", "p26-match", "p26-swap", "p27-numpy", "p27-tape")
"""Rungs with at least a hundred mutants: only a sample is checked."""
ALL_RUNGS = [f"{puzzle}-{rung}" for puzzle, rungs in RUNGS.items() for rung in rungs]


def assert_survivors_explained(name, seed, max_mutants):
    """Assert that every mutant of a rung, or a sample of `max_mutants`, is rejected or explained."""
    puzzle, _, rung = name.partition("-")
    (exercise,) = mutation.list_exercises(find_puzzle(puzzle), [rung])
    summary = mutation.run(exercise, seed=seed, max_mutants=max_mutants)
    survivors = [(mutant.line, mutant.new) for mutant in summary.survivors]
    assert summary.num_rejected and not survivors, (name, survivors)


@pytest.mark.parametrize("name", FULLY_CHECKED)
def test_survivors_are_explained(name):
    assert_survivors_explained(name, 0, 8)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.timeout(1200)
def test_survivors_of_another_seed_are_explained():
    for name in (*ALL_RUNGS, "p19-mojo", "p23-mojo"):
        assert_survivors_explained(
            name, 1, 8 if name in (*CHECKED_BY_SAMPLE, "p19-mojo", "p23-mojo") else None
        )


@pytest.mark.parametrize("name", list_puzzle_names())
def test_explanations_belong_to_existing_mutants(name):
    assert mutation.find_outdated(find_puzzle(name)) == []
