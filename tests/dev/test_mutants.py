"""`harness dev check --mutants`: what becomes of a blank, what is listed, and that no slip passes unexplained."""

import sys
from pathlib import Path

import pytest

from harness.dev import mutants, mutation
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.spec.catalogue import find_puzzle, puzzle_names

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "toys"))
import checkout as toys  # noqa: E402


@pytest.fixture
def here(tmp_path):
    """A checkout with the toys, and work in it."""
    toys.make(tmp_path)
    with toys.enter(tmp_path):
        yield tmp_path


def call(*arguments: str) -> tuple[int, str, str]:
    """`dev check --mutants` of some arguments: exit code, standard output and standard error."""
    return toys.run(["dev", "check", "--mutants", *arguments])


# ---- What becomes of a line ---------------------------------------------------------------------------------


def slips(body: str, edits) -> set[str]:
    """What becomes of the one blank of a file, given its body; the lines that changed, or where two did the whole."""
    start, end = "# BLANK-START a: a task", "# BLANK-END a"
    lines = [f"    {line}" for line in (start, *body.split("\n"), end)]
    text = "\n".join(["def f(a, b, n):", *lines, "    return a", ""])
    (blank,) = blanks.find(text).values()
    return {mutants.mutant_of(text, blank, edit).now for edit in edits(text, blank)}


@pytest.mark.parametrize(
    ("body", "wanted"),
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
def test_a_line_of_python(body, wanted):
    assert slips(body, mutants.python_edits) == wanted


@pytest.mark.parametrize(
    ("body", "wanted"),
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
def test_a_line_of_mojo(body, wanted):
    assert {now.partition("  #")[0].partition(" # ")[0] for now in slips(body, mutants.mojo_edits)} == wanted


def test_each_mutant_is_one_whole_file_that_can_be_parsed_and_has_its_place(here):
    (work, *_) = mutation.works(find_puzzle("p91"))
    text = work.solution.read_text()
    all_mutants = mutants.mutants(work)
    assert {(each.gate, each.line, each.was) for each in all_mutants} == {
        ("dcube", 7, "return 3 * input**2 * grad_output")
    }
    assert len({each.text for each in all_mutants}) == len(all_mutants) == 5 and text not in {
        each.text for each in all_mutants
    }


# ---- The command --------------------------------------------------------------------------------------------

LINE = "return 3 * input**2 * grad_output"
SURVIVOR = f'[["numpy.dcube"]]\nwas = "{LINE}"\nnow = "NOW"\nwhy = "a reason"\n'


def counted(total: int, *, rejected: int, explained=0, survived=0, unjudged=0, share: float) -> str:
    """The last line of the command."""
    return (
        f"p91 numpy: {total} mutants: {rejected} rejected, {explained} explained, {survived} survived, "
        f"{unjudged} could not be checked; {share} % of those checked rejected\n"
    )


def test_every_slip_is_rejected(here):
    code, out, err = call("p91", "--rung", "numpy")
    assert (code, out) == (0, counted(5, rejected=5, share=100.0))
    assert err == "p91 numpy: 5 of 5 mutants checked\n"


ON_ITS_OWN = """
def dcube(grad_output, input):
    return FACTOR * input**2 * grad_output

# BLANK-START dcube: a number that the file needs as it is imported
FACTOR = {1: 3}[1]
# BLANK-END dcube
"""


def solve(here: Path, body: str) -> None:
    """Another solution of the toy in NumPy."""
    path = here / "solutions/p91/in_numpy.py"
    path.write_text(path.read_text().replace(LINE, body.replace("\n", "\n    ")))


def test_a_slip_that_no_case_shows_is_listed_until_it_is_explained(here):
    solve(here, "factor = max(3, 0)\nreturn factor * input**2 * grad_output")
    listed = "solutions/p91/in_numpy.py:7: dcube passes with `factor = max(3, 1)` for `factor = max(3, 0)`\n"
    code, out, _ = call("p91", "--rung", "numpy")
    assert (code, out) == (1, listed + counted(7, rejected=6, survived=1, share=85.7))
    known = SURVIVOR.replace(LINE, "factor = max(3, 0)").replace("NOW", "factor = max(3, 1)")
    (here / "solutions/p91/survivors.toml").write_text(known)
    code, out, _ = call("p91", "--rung", "numpy")
    assert (code, out) == (0, counted(7, rejected=6, explained=1, share=85.7))


def test_a_slip_after_which_the_file_cannot_be_judged_is_not_counted_as_rejected(here):
    path = here / "solutions/p91/in_numpy.py"
    path.write_text(ON_ITS_OWN)
    code, out, _ = call("p91", "--rung", "numpy")
    assert (code, out) == (0, counted(3, rejected=1, unjudged=2, share=100.0))


def test_what_leaves_and_what_never_ends_is_rejected(here, monkeypatch):
    monkeypatch.setenv("WORKBOOK_GATE_SECONDS", "2")
    solve(
        here,
        "n = 0\nif n != 0:\n    raise SystemExit\nwhile n < 3:\n    n += 3\nreturn n * input**2 * grad_output",
    )
    code, out, _ = call("p91", "--rung", "numpy")
    assert code == 1 and [line.partition(" passes with ")[2] for line in out.splitlines()[:-1]] == [
        "`pass` for `raise SystemExit`", "`n = 3` for `n += 3`",
    ]  # fmt: skip


def test_a_solution_that_is_not_right_is_said(here):
    solve(here, "return 4 * input")
    code, out, err = call("p91", "--rung", "numpy")
    assert (code, out) == (2, "") and "in_numpy.py is not correct, so its mutants cannot be checked" in err


@pytest.mark.parametrize("flag", [("--rung", "numpy"), ("--most", "3"), ("--seed", "1")])
def test_a_flag_of_mutants_alone_is_bad_use(command_line, flag):
    finished = command_line("dev", "check", "p22", *flag)
    assert finished.code == 2 and "--rung, --most and --seed belong to --mutants" in finished.err


def test_a_rung_that_there_is_not(command_line):
    finished = command_line("dev", "check", "p19", "--mutants", "--rung", "numpy")
    assert finished.code == 2 and "p19 has no NumPy rung" in finished.err


def test_an_explanation_of_nothing_is_listed(here):
    (here / "solutions/p91/survivors.toml").write_text(SURVIVOR.replace("NOW", "return 7"))
    code, out, _ = call("p91", "--rung", "numpy")
    assert code == 1
    assert out.startswith(
        f"solutions/p91/survivors.toml: numpy.dcube has no mutant `{LINE}` -> `return 7`\np91 numpy: 5 mutants"
    )


def test_some_are_drawn_by_a_seed(here):
    drawn = {}
    for seed in range(3):
        (work,) = mutation.works(find_puzzle("p91"), ["numpy"])
        drawn[seed] = [each.now for each in mutation.drawn(work, seed=seed, most=2)]
    assert all(len(each) == 2 for each in drawn.values()) and len({*map(tuple, drawn.values())}) > 1
    assert mutation.drawn(work, seed=0, most=9) == mutants.mutants(work)
    code, out, _ = call("p91", "--rung", "numpy", "--most", "2", "--seed", "1")
    assert (code, out) == (0, counted(2, rejected=2, share=100.0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x", "survivors.toml: "),
        ('[["numpy.dcube"]]\nwas = "a"\n', "an entry of numpy.dcube needs was, now and why"),
        ('["numpy.dcube"]\nwas = "a"\n', "an entry of numpy.dcube needs was, now and why"),
        (SURVIVOR.replace(".dcube", ""), "an entry of numpy needs was, now and why"),
    ],
)
def test_a_damaged_list_is_said(here, text, words):
    (here / "solutions/p91/survivors.toml").write_text(text)
    with pytest.raises(DamagedFile, match=words):
        mutation.explanations("p91")


@pytest.mark.compiles
def test_kernels_are_judged_together_and_one_that_does_not_compile_has_no_verdict(here):
    (work,) = mutation.works(find_puzzle("p90"))
    text = work.solution.read_text()
    old = "var value = x[from_row, c].cast[accum]()"
    lines = [f"{old} {more}" for more in ("+ 1", "+ nothing", "* 1")]
    some = [mutants.Mutant("square", 41, old, new, text.replace(old, new)) for new in lines]
    judged = mutation.check_mutants(work, some)
    assert [(mutant.now, passes) for mutant, passes in judged] == list(
        zip(lines, (False, None, True), strict=True)
    )


# ---- The puzzles ----------------------------------------------------------------------------------------------

RUNGS = {
    "p20": ("derive", "torch", "register"), "p21": ("catch",), "p22": ("derive", "numpy"), "p23": ("numpy", "torch"),
    "p24": ("numpy", "torch"), "p25": ("numpy",), "p26": ("printer", "fold", "match", "swap"), "p27": ("numpy", "tape"),
}  # fmt: skip
"""Whose mutants are judged in seconds."""
FEW = ("p22-derive", "p22-numpy", "p23-numpy", "p24-numpy", "p24-torch")
MANY = ("p21-catch", "p26-fold", "p26-match", "p26-swap", "p27-numpy", "p27-tape")
"""Those that have a hundred or hundreds: some are drawn."""
SAMPLES = [
    pytest.param(name, rung, seed, id=f"{name}-{rung}-{seed}")
    for seed in (0, 1)
    for name, rungs in RUNGS.items()
    for rung in rungs
    if seed or f"{name}-{rung}" in FEW
]
KERNELS = [
    pytest.param(name, "mojo", 1, marks=pytest.mark.compiles, id=f"{name}-mojo-1") for name in ("p19", "p23")
]


@pytest.mark.parametrize(("name", "rung", "seed"), SAMPLES + KERNELS)
def test_no_slip_passes_unexplained(name, rung, seed):
    (work,) = mutation.works(find_puzzle(name), [rung])
    some = seed == 0 or rung == "mojo" or f"{name}-{rung}" in MANY
    tally = mutation.run(work, seed=seed, most=8 if some else None)
    assert tally.rejected and not tally.survived, [(mutant.line, mutant.now) for mutant in tally.survived]


@pytest.mark.parametrize("name", puzzle_names())
def test_every_explanation_is_of_a_mutant_that_there_is(name):
    assert mutation.find_outdated(find_puzzle(name)) == []
