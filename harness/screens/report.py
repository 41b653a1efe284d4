"""Format the results of every check, as text or as JSON.

Nothing is printed here. The lines of a whole run follow its order: each part is computed after the line that
announces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from harness import invocation
from harness.check.compare import Repeats, TensorResult
from harness.check.limits import amount
from harness.check.options import Options
from harness.check.results import NARROW, Comparison, GateResult, VariantResult
from harness.console import printable, relative, shown
from harness.devices.targets import LABELS, Skipped
from harness.learner import layout
from harness.learner.blanks import Blank
from harness.spec.puzzle import Case, Puzzle

if TYPE_CHECKING:  # a list of gates needs no run
    from harness.check.runs import DeviceResult, Run

MARKS = {"correct": "✅", "wrong": "❌", "unsolved": "⏳"}
NAMED = 4
"""Cases in which a gate is wrong that are named at most."""
RULE = "=" * 60
THIN_RULE = "-" * 57
STATES = {"wrong": "❌ INCORRECT", "unsolved": "⏳ UNSOLVED", "correct": "✅ CORRECT"}
"""Words for a state; a group has the first of these states that one of its members has."""
OVERALL = {
    0: "✅ ALL CORRECT",
    1: "❌ INCORRECT",
    3: "⏳ UNSOLVED, nothing attempted is wrong",
    6: "✅ CPU CORRECT, GPU NOT RUN",
}
"""Words for the result of a whole run, by its exit code."""
NOT_RUN = "⏭ GPU NOT RUN"
"""Words for a run without a device for its kernels."""


# ---- Gates --------------------------------------------------------------------------------------------------


def result_lines(
    result: GateResult, puzzle: Puzzle, source: Path, blanks: Mapping[str, Blank]
) -> Iterator[Text]:
    """Yield the lines of one gate: the result, then the errors, then the command for the hint.

    Args:
        result: The result.
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
            yield Text(f"      the provided code is wrong{where_wrong(result)}:")
            yield from explanation_lines(result, puzzle)
        return
    cases = len(result.comparisons)
    if result.state == "correct":
        where = f" in {format_count(cases, 'case')}; {describe_worst(result)}" if cases else ""
        yield Text(f"{head} correct{where}{result.summary and f': {result.summary}'}", style="green")
        more = (*repeat_lines(result.repeats, puzzle), *result.picture)
        yield from (Text(f"      {line}") for line in more)
        return
    yield Text(f"{head} wrong{where_wrong(result)}", style="bold red")
    yield from explanation_lines(result, puzzle)


def where_wrong(result: GateResult) -> str:
    """Return the number of cases in which a gate is wrong, and their names; empty if nothing was compared."""
    cases = len(result.comparisons)
    bad = [c.case.name for c in result.comparisons if not all(v.ok for v in c.verdicts.values())]
    if bad and len(bad) == cases:
        return f" in {'every case' if cases == 1 else f'all {cases} cases'}"
    right = [c.case.name for c in result.comparisons if c.case.name not in bad]
    few = ", ".join(bad)
    if len(bad) > NAMED:  # listing the correct ones is shorter
        few = f"all but {' and '.join(right)}" if len(right) <= 2 else f"{', '.join(bad[:NAMED])}, ..."
    return f" in {len(bad)} of {cases} cases ({few})" if bad else ""


def explanation_lines(result: GateResult, puzzle: Puzzle) -> Iterator[Text]:
    """Yield the errors of a gate, and the command for the hint."""
    for line in (*result.diagnosis, *repeat_lines(result.repeats, puzzle), *result.picture):
        yield Text(f"      {printable(relative(line))}")
    if result.hint:
        # Where no mistake has a name, no rung is the one that helps: the next that was not read.
        hint = result.hint if result.mistake else result.hint.rpartition("-")[0]
        yield Text(f"      next: {invocation.command(f'hint {puzzle.name} {hint}')}", style="dim")


def case_lines(result: GateResult) -> Iterator[Text]:
    """Yield the lines of --verbose: every case of a gate, with each quantity's error and limit, and every
    finding."""
    for comparison in result.comparisons:
        for quantity, outcome in comparison.verdicts.items():
            mark = MARKS["correct" if outcome.ok else "wrong"]
            words = f"error {outcome.error:.1e}, the limit {outcome.limit:.1e}"
            yield Text(f"      {mark} {comparison.case.name}: {quantity}: {words}", style="dim")
    for finding in result.findings:
        yield from (Text(f"      {relative(line)}", style="dim") for line in finding.text().splitlines())


def first_lines(results: Iterable[GateResult]) -> Iterator[Text]:
    """Yield the result of the first case while the others run; mistakes are named once all cases are known."""
    for result in results:
        if result.state == "unsolved":
            continue
        right = result.state == "correct"
        name = f" ({result.comparisons[0].case.name})" if result.comparisons else ""
        lines = [line for line in result.diagnosis if "see hint" not in line]
        element = f": {printable(relative(lines[0]))}" if lines else ""
        head = f"{MARKS[result.state]} {result.gate.id:<9}"
        words = f"{head} {'right' if right else 'wrong'} in the first case{name}{'' if right else element}"
        yield Text(f"{words}; the other cases follow ...", style="green" if right else "bold red")


def format_count(count: int, what: str) -> str:
    """Return "1 case", "2 cases"."""
    return f"{count} {what}{'s' * (count != 1)}"


def name_width(puzzle: Puzzle) -> int:
    """Return the width of a column with the gates of a puzzle."""
    return max([9, *(len(gate.id) for gate in puzzle.gates)])


def in_every_case(comparisons: Iterable[Comparison], quantity: str) -> list[tuple[TensorResult, Case]]:
    """Return the comparison of a quantity in each case."""
    return [(c.verdicts[quantity], c.case) for c in comparisons if quantity in c.verdicts]


def hardest(pairs: Iterable[tuple[TensorResult, Case]]) -> tuple[TensorResult, Case]:
    """Return the comparison nearest to its limit, and its case."""
    return max(pairs, key=lambda pair: pair[0].error / pair[0].limit)


def describe_worst(result: GateResult) -> str:
    """Return how near to the limit the hardest case of a gate came."""
    outcome, _ = hardest((v, c.case) for c in result.comparisons for v in c.verdicts.values())
    return f"largest error {outcome.error:.1e}, the limit there {outcome.limit:.1e}"


def repeat_lines(repeats: Mapping[str, Repeats], puzzle: Puzzle) -> list[str]:
    """Return a line for each quantity of repeated runs."""
    return [f"{puzzle.printed_name(name)}: {repeat_words(each)}" for name, each in repeats.items()]


def repeat_words(repeats: Repeats) -> str:
    """Describe the repeated runs of one quantity, and whether the result is acceptable."""
    what = "bit-equal" if repeats.bit_equal else f"spread of {repeats.spread_ulps:.1f} ulp"
    wrong = f", ❌ wrong in {repeats.wrong_runs}" if repeats.wrong_runs else ""
    return f"{what} in {repeats.runs} runs ({expected_spread(repeats)}){wrong}"


def expected_spread(repeats: Repeats) -> str:
    """Return the allowed spread of repeated runs, and whether it is kept."""
    if not repeats.atomic:
        must = "it must be: the order of its sums is fixed"
        return f"as {must}" if repeats.bit_equal else f"❌ bit-equal is what {must}"
    may = "blocks add with atomics, in any order, and the sum is rounded once: the last bit may differ"
    return may if repeats.spread_ulps <= 1 else f"{may}, here more: terms cancel, or a sum is kept in float32"


# ---- A run of kernels ---------------------------------------------------------------------------------------


Line = str | Text
"""A line to print verbatim, without markup."""


def write(console: Console, run: Run, *, verbose: bool = False) -> None:
    """Write a run to a console as it proceeds; piped output is the same text, plain and unwrapped."""
    for line in lines(run, verbose):
        console.print(line if isinstance(line, Text) else Text(line), soft_wrap=True)


def lines(run: Run, verbose: bool = False) -> Iterator[Line]:
    """Yield the whole report."""
    yield from header(run)
    for names in groups(run):
        yield from sections(run, names)
    yield from own_cases(run)
    yield from wrong_gates(run)
    yield from findings(run, verbose)
    yield from unsolved_lines(run)
    yield from ledger(run)
    yield from costs(run)
    yield from summary(run)


def header(run: Run) -> Iterator[Line]:
    """Yield the sizes and files of the run."""
    options, puzzle = run.options, run.options.puzzle
    dimensions = f"Testing with dimensions: {puzzle.say_dims(run.cases[0].dims)}"
    yield dimensions
    yield "✅ Loaded Mojo operations library"
    hashed = f"ran {shown(run.package.path)} (hash {run.package.digest[:8]})"
    yield f"   {hashed}, {options.dtype}, seed {options.seed}"
    if options.root == "problems":
        yield from (f"   note: {relative(note)}" for note in layout.notes(puzzle.name))
    if options.backward:
        yield RULE
        yield f"{'':11}Comprehensive Backward Pass Test"
        yield f"{'':11}Testing Custom {puzzle.subject or puzzle.title} Gradients"
        yield RULE
        yield dimensions


def groups(run: Run) -> list[tuple[str, ...]]:
    """Return the variants that share a section: all if each is a step by itself, else each alone."""
    variants = run.options.variants
    return [variants] if run.options.puzzle.separate else [(name,) for name in variants]


def sections(run: Run, names: Sequence[str]) -> Iterator[Line]:
    """Yield the sections of some variants, a device after the other; skipped ones by their reason, once."""
    separate = run.options.puzzle.separate
    for place in in_order(run):
        skipped = isinstance(place, Skipped)
        if skipped and main_variant(run) not in names and not separate:
            continue
        yield ""
        yield Text(f"Testing {LABELS[place.kind]} {what(run)} Pass{suffix_of(run, names)}:", style="bold")
        if skipped:
            yield f"   ⏭ SKIPPED ({place.reason})"
        else:
            yield from section(run, place, names)


def section(run: Run, device: DeviceResult, names: Sequence[str]) -> Iterator[Line]:
    """Yield a section: compute some variants on one device, and report each quantity."""
    label, passes, separate = device.target.label, what(run), run.options.puzzle.separate
    if not separate:
        yield ""
        yield f"Testing {label} {passes} Implementation - {passes} Pass{suffix_of(run, names)}"
        yield THIN_RULE
    yield "   Computing PyTorch autograd reference..."
    run.compute_reference(device, names)
    yield f"   Computing Mojo {passes.lower()} implementation ({label})..."
    run.compute_kernels(device, names)
    if names[0] == run.options.variants[0]:
        yield f"   on {label}: {device.target.detail}, {describe_build(device)}"
    if separate:
        yield from parts(run, device)
        return
    if device.kind != "cpu":
        yield ""
    yield f"✅ {label} {passes} Implementation {passes.lower()} completed"
    yield from quantities(run, device.variants[names[0]])


def describe_build(device: DeviceResult) -> str:
    """Describe whether a device's kernels were cached, or how long they took to compile."""
    how = "cached" if device.cached else f"compiled in {device.compile_seconds:.1f} s"
    return f"{'kernels' if device.kind == 'virtual' else 'graph'} {how}"


def parts(run: Run, device: DeviceResult) -> Iterator[Line]:
    """Yield one device of a puzzle whose variants are separate: a line for each quantity."""
    yield "   largest difference from PyTorch in the chapter's case, and the verdict on all cases:"
    for name, variant in device.variants.items():
        written = run.options.puzzle.writes(name)
        yield from (f"   {q}: {figure(variant, q)}" for q in run.quantities if q in written)
        yield from wrong(run, variant)
        yield from repeats(run, variant)
    yield from errors(run, *device.variants.values())
    yield f"   Overall: {state_of(run, device, device.variants)}"


def quantities(run: Run, variant: VariantResult) -> Iterator[Line]:
    """Yield one variant on one device: the published lines with the details between."""
    puzzle = run.options.puzzle
    written = puzzle.writes(variant.variant)
    forward = [q for q in puzzle.forward if q in run.quantities]
    gradients = [q for q in puzzle.backward if q in run.quantities and q in written]
    outputs = [quantity for quantity in puzzle.forward if quantity in written]
    for output in outputs[:1]:
        yield f"   Forward max difference: {figure(variant, output, tick=False)}"
    for quantity in gradients or [q for q in puzzle.intermediate if q in run.quantities and q in written]:
        yield f"   {puzzle.printed_name(quantity)}: {figure(variant, quantity)}"
    yield from wrong(run, variant)
    yield from errors(run, variant)
    yield from repeats(run, variant)
    yield ""
    if outputs:
        yield f"   Forward pass: {STATES[variant.state(forward)]}"
    if gradients:
        yield f"   Gradients:    {STATES[variant.state([*gradients, *puzzle.intermediate])]}"
    yield f"   Overall:      {STATES[variant.state(run.quantities)]}"


def figure(variant: VariantResult, quantity: str, tick: bool = True) -> str:
    """Return the published figure of a quantity: the largest difference from PyTorch in the chapter's case."""
    if quantity in variant.unsolved:
        return f"⏳ UNSOLVED (blank {', '.join(variant.unsolved[quantity])})"
    chapter = variant.comparisons[0].verdicts if variant.comparisons else {}
    if quantity not in chapter:
        return "not compared"
    mark = (" ✅" if variant.ok(quantity) else " ❌") if tick else ""
    return f"{chapter[quantity].difference:.2e}{mark}"


def wrong(run: Run, variant: VariantResult) -> Iterator[Line]:
    """Yield the wrong quantities: in which case, by how much and why; gates with a diagnosis of their own
    come later."""
    puzzle = run.options.puzzle
    gates = [result for result in variant.gates if result.state == "wrong"]
    reports = {quantity for result in gates for quantity in (*result.gate.own, *result.gate.given)}
    for quantity in run.quantities:
        bad = [pair for pair in in_every_case(variant.comparisons, quantity) if not pair[0].ok]
        if bad:
            outcome, case = hardest(bad)
            cases = f"{len(bad)} of {len(variant.comparisons)} cases"
            where = f"wrong in {cases}, most in '{case.name}' ({case.why})"
            yield Text(f"   ❌ {puzzle.printed_name(quantity)} is {where}", style="red")
            yield f"      {explain(outcome)}"
            diagnosis = variant.diagnoses.get(quantity) if quantity not in reports else None
            yield from (f"      {text}" for text in (diagnosis.lines if diagnosis else ()))
    if variant.failure and not gates:
        yield Text(f"   ❌ {variant.failure}", style="red")


def own_cases(run: Run) -> Iterator[Line]:
    """Yield the correct gates in the further cases of a check of gates; these are computed after the line
    that announces them."""
    if left := run.gates_left():
        yield ""
        yield f"Checking {format_count(len(left), 'gate')} in further cases and in {NARROW} (Virtual GPU)..."
        run.compute_gates()
        names = ", ".join(result.gate.id for result in run.rejected)
        yield f"   {STATES['wrong']}: {names}" if names else f"   {STATES['correct']}"


def wrong_gates(run: Run) -> Iterator[Line]:
    """Yield the result of each wrong gate, as in a check of gates; call it when all results of the device
    are known."""
    of_devices = [r for device in run.devices for variant in device.variants.values() for r in variant.gates]
    for result in (*of_devices, *run.rejected):
        if result.state == "wrong":
            yield ""
            yield from result_lines(result, run.options.puzzle, run.source, run.blanks)


def errors(run: Run, *variants: VariantResult) -> Iterator[Line]:
    """Yield a table of the worst case of every quantity of some variants: its error, PyTorch's, and the
    limit."""
    cases = [comparison.case.name for comparison in variants[0].comparisons]
    yield Text(f"   {format_count(len(cases), 'case')}: {', '.join(cases)}", style="dim")
    row = "   {:20} {:>8} {:>10} {:>7} {:>8}  {}".format
    heading = row("error against truth", "ours", "PyTorch's", "ratio", "limit", "in the hardest case")
    for quantity in run.quantities:
        pairs = [pair for variant in variants for pair in in_every_case(variant.comparisons, quantity)]
        if not pairs:
            continue
        result, case = hardest(pairs)
        if heading:
            yield Text(heading, style="dim")
            heading = ""
        name, ratio = run.options.puzzle.printed_name(quantity), f"{result.ratio:.1f}x"
        ours, theirs, limit = (f"{x:.1e}" for x in (result.error, result.baseline, result.limit))
        yield row(name, ours, theirs, ratio, limit, case.name)


def repeats(run: Run, variant: VariantResult) -> Iterator[Line]:
    """Yield a line on the repeated runs of each gradient."""
    yield from (f"   {line}" for line in repeat_lines(variant.repeats, run.options.puzzle))


def findings(run: Run, verbose: bool) -> Iterator[Line]:
    """Yield the number of findings of the virtual GPU, and those that no gate has reported."""
    for device in run.devices:
        if device.kind != "virtual":
            continue
        variants = device.variants.values()
        errors = [finding for variant in variants for finding in variant.errors]
        reports = [f for variant in variants for result in variant.gates for f in result.findings]
        notes = sum(not finding.is_error for finding in device.findings)
        yield ""
        yield Text(
            f"Virtual GPU, memory and race check: {format_count(len(errors), 'finding') if errors else 'no findings'}"
            + (f", {format_count(notes, 'note')} on library code" if notes else ""),
            style="bold",
        )
        for finding in device.findings if verbose else [f for f in errors if f not in reports]:
            for text in finding.text().splitlines():
                yield Text(f"   {relative(text)}", style="red" if finding.is_error else "dim")


def unsolved_lines(run: Run) -> Iterator[Line]:
    """Yield the places of the untouched blanks."""
    if run.unsolved:
        of_all = f"{len(run.unsolved)} of {len(run.options.puzzle.kernel_gates)}"
        yield ""
        yield Text(f"Unsolved blanks ({of_all}):", style="bold")
    for gate in run.unsolved:
        yield f"   {gate:9}{shown(run.source)}:{run.blanks[gate].line}  {run.blanks[gate].task}"


def ledger(run: Run) -> Iterator[Line]:
    """Yield the bytes saved for the backward pass and allocated in between, from the shapes."""
    bytes_of = run.ledger
    format_count = [name for name in run.options.variants if bytes_of and name in bytes_of.between]
    if not run.options.backward or bytes_of is None or not format_count:
        return
    dimensions = run.options.puzzle.say_dims(run.cases[0].dims)
    yield ""
    yield f"Bytes kept for the backward pass, parameters left out ({dimensions}):"
    yield f"   PyTorch eager: {describe_bytes(bytes_of.saved_eager)}"
    yield f"   ours:          {describe_bytes(bytes_of.saved_ours)}"
    own = [name for name in format_count if name in bytes_of.saved_by]
    yield from (f"   {name + ':':14} {describe_bytes(bytes_of.saved_by[name])}" for name in own)
    yield "Bytes allocated in between on a GPU:"
    yield from (f"   {name + ':':14} {describe_bytes(bytes_of.between[name])}" for name in format_count)


def costs(run: Run) -> Iterator[Line]:
    """Yield the kernel costs of every gate with limits, next to those of the blank's initial code."""
    limited = [gate for gate in run.options.puzzle.kernel_gates if gate.limits]
    variants = [variant for device in run.devices for variant in device.variants.values()]
    gates = [result for variant in variants for result in variant.gates]
    measured = {(result.gate.id, cost.limit.id): cost for result in gates for cost in result.costs}
    if not limited or not any(device.kind == "virtual" for device in run.devices):
        return
    yield ""
    yield Text("Counters, in the case in which they are held to their limits:", style="bold")
    row = "   {:10} {:27} {:>8} {:>8} {:>8}  {}".format
    yield Text(row("gate", "", "given", "yours", "at most", "").rstrip(), style="dim")
    for gate in limited:
        for limit in gate.limits:
            cost, first = measured.get((gate.id, limit.id)), limit.first.get(run.options.dtype)
            yours = amount(cost.value) if cost else "-"
            mark = MARKS["correct" if cost.ok else "wrong"] if cost else MARKS["unsolved"]
            arguments = "-" if first is None else amount(first)
            yield row(gate.id, limit.short, arguments, yours, amount(limit.most), mark)
    if run.options.puzzle.after_costs:
        right = [variant for variant in variants if any(result.costs for result in variant.gates)]
        launches = {variant.variant: variant.launches for variant in right}
        yield from run.options.puzzle.resolve(run.options.puzzle.after_costs)(launches, run.options.dtype)


def summary(run: Run) -> Iterator[Line]:
    """Yield the final result, a line for each device and variant, `   - CPU Backward:  ✅ CORRECT`, and one
    for all."""
    yield ""
    yield Text(f"{what(run)} Pass Test Summary:", style="bold")
    for names in groups(run):
        for place in in_order(run):
            head = f"   - {LABELS[place.kind]} {what(run)}{suffix_of(run, names)}: "
            if not isinstance(place, Skipped):
                yield f"{head} {state_of(run, place, names)}"
            elif run.options.variants[0] in names:
                yield f"{head} ⏭ SKIPPED ({place.reason})"
    yield ""
    overall = OVERALL[run.exit_code()] if run.devices else NOT_RUN
    yield Text(f"   Overall Result: {overall}", style="bold")
    if run.exit_code() in (1, 3):
        yield f"   Run this again: {command(run)}"
    yield ""
    yield f"{what(run).upper()} PASS Test Completed!"


def what(run: Run) -> str:
    """Return the subject of the run for headings."""
    return "Backward" if run.options.backward else "Forward"


def state_of(run: Run, device: DeviceResult, names: Iterable[str]) -> str:
    """Return the state of some variants together on one device."""
    states = {device.variants[name].state(run.quantities) for name in names}
    return next(words for state, words in STATES.items() if state in states)


def in_order(run: Run) -> list[DeviceResult | Skipped]:
    """Return the devices of a run and those that it leaves out, in the order in which reports name them."""
    return sorted([*run.devices, *run.skipped], key=lambda place: [*LABELS].index(place.kind))


def main_variant(run: Run) -> str:
    """Return the puzzle's first variant."""
    return next(iter(run.options.puzzle.variants))


def suffix_of(run: Run, names: Sequence[str]) -> str:
    """Return a variant's name as a suffix of its lines; "" for a main variant that covers the whole puzzle,
    and for variants that are reported together."""
    puzzle, name = run.options.puzzle, names[0]
    everything = {*puzzle.forward, *puzzle.backward} <= puzzle.writes(name)
    return "" if puzzle.separate or (name == main_variant(run) and everything) else f" ({name})"


def explain(verdict: TensorResult) -> str:
    """Describe why a comparison is not ok, in a line."""
    at = list(verdict.worst)
    if verdict.unwritten:
        return f"{verdict.unwritten} elements were never written, the first wrong one at {at}"
    if verdict.nonfinite:
        where = "NaN or infinite where the reference is not (or the reverse)"
        words = f"{verdict.nonfinite} elements are {where}, one at {at}"
        return f"{words}: not a wrong gradient but a value that is none"
    times = f"{verdict.ratio:.3g} times PyTorch's own {verdict.baseline:.2e}"
    return f"error {verdict.error:.2e}, {times} (limit {verdict.limit:.2e}), worst at {at}"


def describe_bytes(parts: Mapping[str, int]) -> str:
    """Return a sum of bytes with its parts."""
    if not parts:
        return "none"
    return f"{sum(parts.values()):,} ({', '.join(f'{name} {count:,}' for name, count in parts.items())})"


def command(run: Run) -> str:
    """Return the command that runs the failing part again."""
    options = run.options
    bad = [
        (device.kind, name)
        for device in run.devices
        for name, variant in device.variants.items()
        if variant.state(run.quantities) == "wrong"
    ]
    kinds, names = {kind for kind, _ in bad}, {name for _, name in bad}
    parts = [options.puzzle.name, *(["--backward"] if options.backward else [])]
    if len(names) == 1 or (options.variants != options.puzzle.default_variants and not options.gate):
        parts += [f"--{name}" for name in (names if len(names) == 1 else options.variants)]
    device = kinds.pop() if len(kinds) == 1 else options.device
    parts += [f"--device {device}"] if device != "auto" else []
    parts += {"problems": [], "solutions": ["--solution"]}.get(options.root, [f"--ops {options.root}"])
    parts += [f"--dims {' '.join(map(str, options.dims))}"] if options.dims else []
    for flag in ("dtype", "seed", "gate", "repeat", "blocks"):
        value = getattr(options, flag)
        parts += [f"--{flag} {value}"] if value != getattr(Options, flag) else []
    return invocation.command(" ".join(parts))


# ---- The same as data ---------------------------------------------------------------------------------------


GATE = "state mistake hint lines=diagnosis summary"
VERDICT = "ok error pytorch_error=baseline limit difference nonfinite unwritten"


def plain(value: object, names: str) -> dict[str, object]:
    """Return attributes of a value as plain data; "lines=diagnosis" renames one."""
    pairs = (name.partition("=") for name in names.split())
    return {key: getattr(value, attribute or key) for key, _, attribute in pairs}


def gates_json(results: Iterable[GateResult], puzzle: Puzzle, **about: object) -> dict[str, object]:
    """Return the results of some gates as plain data, quantities under their printed names; `about` has
    further keys."""
    gates: dict[str, object] = {}
    for result in results:
        quantities = {*result.repeats, *(name for c in result.comparisons for name in c.verdicts)}
        names = {quantity: puzzle.printed_name(quantity) for quantity in quantities}
        repeat, cases = repeats_json(result.repeats, names), cases_json(result.comparisons, names)
        gates[result.gate.id] = {
            **plain(result, GATE),
            "repeat": repeat,
            "cases": cases,
            **costs_json(result),
        }
    return {"puzzle": puzzle.name, **about, "gates": gates}


def costs_json(result: GateResult) -> dict[str, object]:
    """Return the costs of a gate by its limits, as plain data; empty without limits."""
    costs = [{**plain(c, "value ok line dtype"), **plain(c.limit, "id counter most")} for c in result.costs]
    return {"costs": costs} if costs else {}


def repeats_json(repeats: Mapping[str, Repeats], names: Mapping[str, str]) -> dict[str, object]:
    """Return the results of repeated runs by printed name, as plain data."""
    return {
        names[name]: {
            **plain(each, "runs bit_equal spread_ulps wrong_runs"),
            "must_be_equal": not each.atomic,
        }
        for name, each in repeats.items()
    }


def cases_json(comparisons: Sequence[Comparison], names: Mapping[str, str]) -> dict[str, object]:
    """Return case -> printed name -> result, as plain data, for the quantities with a printed name."""
    return {
        c.case.name: {names[q]: plain(result, VERDICT) for q, result in c.verdicts.items() if q in names}
        for c in comparisons
    }


def as_json(run: Run) -> dict[str, Any]:
    """Return the run as plain data, gradients under their printed names."""
    return {
        "puzzle": run.options.puzzle.name,
        "ops": str(run.package.path),
        "hash": run.package.digest,
        "dtype": run.options.dtype,
        "dims": list(run.cases[0].dims),
        "seed": run.options.seed,
        "backward": run.options.backward,
        "exit_code": run.exit_code(),
        "unsolved": run.unsolved,
        "rejected": {result.gate.id: plain(result, GATE) for result in run.rejected},
        "skipped": {s.kind: s.reason for s in run.skipped},
        "ledger": run.ledger and plain(run.ledger, "saved_eager saved_ours saved_by between"),
        "devices": [
            {
                "device": device.kind,
                "detail": device.target.detail,
                "cached": device.cached,
                "compile_seconds": round(device.compile_seconds, 3),
                "findings": [
                    {**plain(f, "kind error=is_error where count"), "text": f.text()} for f in device.findings
                ],
                "variants": {name: variant_json(variant, run) for name, variant in device.variants.items()},
            }
            for device in run.devices
        ],
    }


def variant_json(variant: VariantResult, run: Run) -> dict[str, object]:
    """Return one variant on one device as plain data."""
    names = {quantity: run.options.puzzle.printed_name(quantity) for quantity in run.quantities}
    return {
        "state": variant.state(run.quantities),
        "unsolved": {names[quantity]: list(ids) for quantity, ids in variant.unsolved.items()},
        "repeat": repeats_json(variant.repeats, names),
        "gates": {result.gate.id: plain(result, GATE) | costs_json(result) for result in variant.gates},
        "diagnosis": {
            names[quantity]: plain(diagnosis, "mistake hint lines")
            for quantity, diagnosis in variant.diagnoses.items()
            if quantity in names
        },
        "cases": cases_json(variant.comparisons, names),
    }
