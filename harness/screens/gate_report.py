"""What the gates of a learner's puzzle look like on a terminal: verdicts, diagnoses, progress. Computes nothing."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from harness.check.compare import Repeats, Verdict
from harness.check.results import Comparison, GateResult
from harness.console import printable, relative, shown
from harness.invocation import command
from harness.learner.blanks import Blank
from harness.learner.hints import Hint
from harness.spec.puzzle import Puzzle

MARKS = {"correct": "✅", "wrong": "❌", "unsolved": "⏳"}
NAMED = 4
"""Of the cases in which a gate is wrong, so many are named."""
STATES = {
    "passed": ("✅", "passed"),
    "changed": ("✎", "changed since it passed"),
    "begun": ("✎", "begun, not passed yet"),
    "unsolved": ("·", "unsolved"),
}


def verdict_lines(
    result: GateResult, puzzle: Puzzle, source: Path, blanks: Mapping[str, Blank]
) -> Iterator[Text]:
    """One gate: a line with the verdict, then what is wrong, then the command for the hint.

    Args:
        result: The verdict.
        puzzle: The puzzle.
        source: The file with the blanks.
        blanks: Its blanks.
    """
    gate = result.gate
    head = f"{MARKS[result.state]} {gate.id:<{name_width(puzzle)}}"
    if result.state == "unsolved":
        blank = blanks[gate.id]
        yield Text(f"{head} unsolved   {shown(source)}:{blank.line}")
        yield Text(f"             {blank.task}", style="dim")
        if result.diagnosis:
            yield Text(f"      what is given is wrong{where_wrong(result)}:")
            yield from explanation_lines(result, puzzle)
        return
    cases = len(result.comparisons)
    if result.state == "correct":
        counted = f" in {cases} case{'s' * (cases != 1)}; {describe_worst(hardest(result))}" if cases else ""
        yield Text(f"{head} correct{counted}{result.summary and f': {result.summary}'}", style="green")
        yield from (Text(f"      {line}") for line in (*repeat_lines(result, puzzle), *result.picture))
        return
    yield Text(f"{head} wrong{where_wrong(result)}", style="bold red")
    yield from explanation_lines(result, puzzle)


def where_wrong(result: GateResult) -> str:
    """In how many cases a gate is wrong, and in which; empty where nothing was compared."""
    cases = len(result.comparisons)
    bad = [c.case.name for c in result.comparisons if not all(v.ok for v in c.verdicts.values())]
    if bad and len(bad) == cases:
        return f" in {'every case' if cases == 1 else f'all {cases} cases'}"
    few = [*bad[:NAMED], *(["..."] if len(bad) > NAMED else [])]
    return f" in {len(bad)} of {cases} cases ({', '.join(few)})" if bad else ""


def explanation_lines(result: GateResult, puzzle: Puzzle) -> Iterator[Text]:
    """What is wrong with a gate, and the command for the hint."""
    for line in (*result.diagnosis, *repeat_lines(result, puzzle), *result.picture):
        yield Text(f"      {printable(relative(line))}")
    if result.hint:
        # Where no mistake has a name, no rung is the one that helps: the next that was not read.
        hint = result.hint if result.mistake else result.hint.rpartition("-")[0]
        yield Text(f"      next: {command(f'hint {puzzle.name} {hint}')}", style="dim")


def case_lines(result: GateResult) -> Iterator[Text]:
    """Every case of a gate, with each quantity's error and its limit, and every finding: what --verbose adds."""
    for comparison in result.comparisons:
        for quantity, verdict in comparison.verdicts.items():
            mark = MARKS["correct" if verdict.ok else "wrong"]
            words = f"error {verdict.error:.1e}, the limit {verdict.limit:.1e}"
            yield Text(f"      {mark} {comparison.case.name}: {quantity}: {words}", style="dim")
    for finding in result.findings:
        yield from (Text(f"      {relative(line)}", style="dim") for line in finding.text().splitlines())


def first_lines(results: Iterable[GateResult]) -> Iterator[Text]:
    """What the first case has shown, while the others are running. Mistakes are named when all cases are known."""
    for result in results:
        if result.state == "unsolved":
            continue
        right = result.state == "correct"
        case = (
            f"the first case ({result.comparisons[0].case.name})" if result.comparisons else "the first case"
        )
        element = f": {printable(relative(result.diagnosis[0]))}" if result.diagnosis else ""
        head = f"{MARKS[result.state]} {result.gate.id:<9}"
        words = f"{head} right in {case}" if right else f"{head} wrong in {case}{element}"
        yield Text(f"{words}; the other cases follow ...", style="green" if right else "bold red")


def name_width(puzzle: Puzzle) -> int:
    """The width of a column with the gates of a puzzle."""
    return max([9, *(len(gate.id) for gate in puzzle.gates)])


def hardest(result: GateResult) -> Verdict:
    """The verdict that comes nearest to its limit."""
    verdicts = [verdict for comparison in result.comparisons for verdict in comparison.verdicts.values()]
    return max(verdicts, key=lambda verdict: verdict.error / verdict.limit)


def describe_worst(verdict: Verdict) -> str:
    """How near to the limit the hardest case came."""
    return f"largest error {verdict.error:.1e}, the limit there {verdict.limit:.1e}"


def progress_bar(done: int, total: int, width: int = 20) -> str:
    """`[########------------] 3/7`."""
    filled = round(width * done / total) if total else 0
    return f"[{'#' * filled}{'-' * (width - filled)}] {done}/{total}"


def hint_lines(hint: Hint, number: int, total: int, width: int = 0) -> Iterator[Text]:
    """A rung: its name and place in the ladder, the paragraph, the code; `width` columns wide, or as long as it is."""
    yield Text(f"Hint {hint.id} ({number} of {total})", style="bold")
    yield from (Text(line) for line in (wrapped(hint.text, width) if width else [hint.text]))
    for line in hint.code.splitlines():
        yield Text(f"    {line}", style="cyan")


def wrapped(text: str, width: int) -> list[str]:
    """A paragraph in lines; no line ends within `code`."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\xa0"), text)
    lines = textwrap.wrap(whole, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def repeat_lines(result: GateResult, puzzle: Puzzle) -> list[str]:
    """What repeated runs showed of a gate's quantities, a line for each."""
    return [f"{puzzle.printed(name)}: {repeat_words(repeats)}" for name, repeats in result.repeats.items()]


def repeat_words(repeats: Repeats) -> str:
    """What repeated runs of one quantity showed, and whether it is as it must be."""
    what = "bit-equal" if repeats.bit_equal else f"spread of {repeats.spread_ulps:.1f} ulp"
    wrong = f", ❌ wrong in {repeats.wrong_runs}" if repeats.wrong_runs else ""
    return f"{what} in {repeats.runs} runs ({expected_spread(repeats)}){wrong}"


def expected_spread(repeats: Repeats) -> str:
    """What the spread of repeated runs should be, and whether it is."""
    if not repeats.atomic:
        must = "it must be: the order of its sums is fixed"
        return f"as {must}" if repeats.bit_equal else f"❌ bit-equal is what {must}"
    may = "blocks add with atomics, in any order, and the sum is rounded once: the last bit may differ"
    return may if repeats.spread_ulps <= 1 else f"{may}, here more: terms cancel, or a sum is kept in float32"


# ---- The same as data ---------------------------------------------------------------------------------------


def gates_json(results: Iterable[GateResult], puzzle: Puzzle, **about: object) -> dict:
    """The verdicts on some gates as plain data, quantities under their printed names; `about` says of what."""
    names = {quantity: puzzle.printed(quantity) for result in results for quantity in quantities(result)}
    return {
        "puzzle": puzzle.name,
        **about,
        "gates": {
            result.gate.id: {
                **gate_json(result),
                "repeat": {names[name]: repeat_json(repeats) for name, repeats in result.repeats.items()},
                "cases": cases_json(result.comparisons, names),
            }
            for result in results
        },
    }


def gate_json(result: GateResult) -> dict:
    """What a gate comes to, as plain data."""
    return {
        "state": result.state,
        "mistake": result.mistake,
        "hint": result.hint,
        "lines": result.diagnosis,
        "summary": result.summary,
    }


def quantities(result: GateResult) -> set[str]:
    """What was compared for a gate."""
    return {*result.repeats, *(name for comparison in result.comparisons for name in comparison.verdicts)}


def repeat_json(repeats: Repeats) -> dict:
    """What repeated runs showed, as plain data."""
    return {
        "runs": repeats.runs,
        "bit_equal": repeats.bit_equal,
        "spread_ulps": repeats.spread_ulps,
        "wrong_runs": repeats.wrong_runs,
        "must_be_equal": not repeats.atomic,
    }


def cases_json(comparisons: Sequence[Comparison], names: Mapping[str, str]) -> dict:
    """Case -> printed name -> verdict, as plain data, of the quantities that have a name."""
    return {
        comparison.case.name: {
            names[quantity]: {
                "ok": verdict.ok,
                "error": verdict.error,
                "pytorch_error": verdict.baseline,
                "limit": verdict.limit,
                "difference": verdict.difference,
                "nonfinite": verdict.nonfinite,
                "unwritten": verdict.unwritten,
            }
            for quantity, verdict in comparison.verdicts.items()
            if quantity in names
        }
        for comparison in comparisons
    }
