"""Format the results of checks as text or JSON; each part of a run is computed after its heading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from harness import invocation
from harness.check.compare import Repeats, TensorResult
from harness.check.limits import format_amount
from harness.check.options import Options
from harness.check.results import LOW_PRECISION_DTYPE, Comparison, GateResult, VariantResult
from harness.console import escape_controls, format_path, make_relative
from harness.devices.targets import DEVICE_LABELS, SkippedDevice
from harness.learner import layout
from harness.learner.blanks import Blank
from harness.spec.puzzle import Case, Puzzle

if TYPE_CHECKING:  # not needed to list gates
    from harness.check.runs import DeviceResult, Run

MARKS = {"correct": "✅", "wrong": "❌", "unsolved": "⏳"}
MAX_LISTED_CASES = 4
"""Maximum number of a gate's wrong cases listed by name."""
SEPARATOR = "=" * 60
THIN_SEPARATOR = "-" * 57
STATES = {"wrong": "❌ INCORRECT", "unsolved": "⏳ UNSOLVED", "correct": "✅ CORRECT"}
"""State -> label, worst first; a group has the worst state of its members."""
OVERALL = {
    0: "✅ ALL CORRECT",
    1: "❌ INCORRECT",
    3: "⏳ UNSOLVED, nothing attempted is wrong",
    6: "✅ CPU CORRECT, GPU NOT RUN",
}
"""Exit code -> status line of a full run."""
NOT_RUN = "⏭ GPU NOT RUN"
"""Status line of a run if no device runs its kernels."""


# ---- Gates --------------------------------------------------------------------------------------------------


def format_gate(
    result: GateResult, puzzle: Puzzle, source: Path, blanks: Mapping[str, Blank]
) -> Iterator[Text]:
    """Yield the lines of one gate: the result, the errors, and the command for the hint."""
    gate = result.gate
    label = f"{MARKS[result.state]} {gate.id:<{compute_name_width(puzzle)}}"
    if result.state == "unsolved":
        blank = blanks[gate.id]
        yield Text(f"{label} unsolved   {format_path(source)}:{blank.line}")
        yield Text(f"             {blank.task}", style="dim")
        if result.diagnosis:
            problem = "is slow" if result.costs else f"is wrong{describe_wrong_cases(result)}"
            yield Text(f"      the provided code {problem}:")
            yield from format_errors(result, puzzle)
        return
    cases = len(result.comparisons)
    if result.state == "correct":
        summary = f" in {format_count(cases, 'case')}; {describe_worst(result)}" if cases else ""
        yield Text(f"{label} correct{summary}{result.summary and f': {result.summary}'}", style="green")
        details = (*format_repeats(result.repeats, puzzle), *result.picture)
        yield from (Text(f"      {line}") for line in details)
        return
    yield Text(f"{label} wrong{describe_wrong_cases(result)}", style="bold red")
    yield from format_errors(result, puzzle)


def describe_wrong_cases(result: GateResult) -> str:
    """Describe the wrong cases of a gate, such as " in 2 of 9 cases (wide, zeros)"; return "" if none."""
    cases = len(result.comparisons)
    failing = [c.case.name for c in result.comparisons if not all(v.ok for v in c.results.values())]
    if failing and len(failing) == cases:
        return f" in {'every case' if cases == 1 else f'all {cases} cases'}"
    correct = [c.case.name for c in result.comparisons if c.case.name not in failing]
    case_list = ", ".join(failing)
    if len(failing) > MAX_LISTED_CASES:  # list the correct ones if they are few
        case_list = (
            f"all but {' and '.join(correct)}"
            if len(correct) <= 2
            else f"{', '.join(failing[:MAX_LISTED_CASES])}, ..."
        )
    return f" in {len(failing)} of {cases} cases ({case_list})" if failing else ""


def format_errors(result: GateResult, puzzle: Puzzle) -> Iterator[Text]:
    """Yield the errors of a gate, and the command for the hint."""
    for line in (*result.diagnosis, *format_repeats(result.repeats, puzzle), *result.picture):
        yield Text(f"      {escape_controls(make_relative(line))}")
    if result.hint:
        # Without a known mistake, suggest the next unread hint.
        hint = result.hint if result.mistake else result.hint.rpartition("-")[0]
        yield Text(f"      next: {invocation.format_command(f'hint {puzzle.name} {hint}')}", style="dim")


def format_cases(result: GateResult) -> Iterator[Text]:
    """Yield the lines of --verbose: each quantity's error and limit in every case, and every finding."""
    for comparison in result.comparisons:
        for quantity, outcome in comparison.results.items():
            mark = MARKS["correct" if outcome.ok else "wrong"]
            error = f"error {outcome.error:.1e}, the limit {outcome.limit:.1e}"
            yield Text(f"      {mark} {comparison.case.name}: {quantity}: {error}", style="dim")
    for finding in result.findings:
        yield from (
            Text(f"      {make_relative(line)}", style="dim") for line in finding.format().splitlines()
        )


def format_first_results(results: Iterable[GateResult]) -> Iterator[Text]:
    """Yield the results of the first case, to print while others run; mistakes are diagnosed afterwards."""
    for result in results:
        if result.state == "unsolved":
            continue
        name = f" ({result.comparisons[0].case.name})" if result.comparisons else ""
        if result.state == "correct":  # not green yet: other cases may show a race, or cost too much
            text, style = f"   {result.gate.id:<9} nothing wrong in the first case{name}", "dim"
        else:
            lines = [line for line in result.diagnosis if "see hint" not in line]
            element = f": {escape_controls(make_relative(lines[0]))}" if lines else ""
            text = f"{MARKS[result.state]} {result.gate.id:<9} wrong in the first case{name}{element}"
            style = "bold red"
        yield Text(f"{text}; the other cases follow ...", style=style)


def format_count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def compute_name_width(puzzle: Puzzle) -> int:
    return max([9, *(len(gate.id) for gate in puzzle.gates)])


def collect_results(comparisons: Iterable[Comparison], quantity: str) -> list[tuple[TensorResult, Case]]:
    return [(c.results[quantity], c.case) for c in comparisons if quantity in c.results]


def find_hardest(pairs: Iterable[tuple[TensorResult, Case]]) -> tuple[TensorResult, Case]:
    return max(pairs, key=lambda pair: pair[0].error / pair[0].limit)


def describe_worst(result: GateResult) -> str:
    outcome, _ = find_hardest((v, c.case) for c in result.comparisons for v in c.results.values())
    return f"largest error {outcome.error:.1e}, the limit there {outcome.limit:.1e}"


def format_repeats(repeats: Mapping[str, Repeats], puzzle: Puzzle) -> list[str]:
    return [
        f"{puzzle.get_printed_name(name)}: {describe_repeats(outcome)}" for name, outcome in repeats.items()
    ]


def describe_repeats(repeats: Repeats) -> str:
    """Describe the variation of one quantity over repeated runs, and whether it is acceptable."""
    outcome = "bit-equal" if repeats.bit_equal else f"spread of {repeats.spread_ulps:.1f} ulp"
    wrong = f", ❌ wrong in {repeats.wrong_runs}" if repeats.wrong_runs else ""
    return f"{outcome} in {repeats.runs} runs ({describe_expected_spread(repeats)}){wrong}"


def describe_expected_spread(repeats: Repeats) -> str:
    if not repeats.atomic:
        reason = "it must be: the order of its sums is fixed"
        return f"as {reason}" if repeats.bit_equal else f"❌ bit-equal is what {reason}"
    reason = "blocks add with atomics, in any order, and the sum is rounded once: the last bit may differ"
    return (
        reason
        if repeats.spread_ulps <= 1
        else f"{reason}, here more: terms cancel, or a sum is kept in float32"
    )


# ---- A run of kernels ---------------------------------------------------------------------------------------


Line = str | Text
"""A line to print verbatim, without markup."""


def write_report(console: Console, run: Run, *, verbose: bool = False) -> None:
    """Print a run's report as it proceeds; piped output is the same text, plain and unwrapped."""
    for line in format_report(run, verbose):
        console.print(line if isinstance(line, Text) else Text(line), soft_wrap=True)


def format_report(run: Run, verbose: bool = False) -> Iterator[Line]:
    yield from format_header(run)
    for names in group_variants(run):
        yield from format_sections(run, names)
    yield from check_further_cases(run)
    yield from format_wrong_gates(run)
    yield from format_findings(run, verbose)
    yield from format_unsolved(run)
    yield from format_memory(run)
    yield from format_costs(run)
    yield from format_summary(run)


def format_header(run: Run) -> Iterator[Line]:
    """Yield the sizes and files of the run."""
    options, puzzle = run.options, run.options.puzzle
    dimensions = f"Testing with dimensions: {puzzle.format_dims(run.cases[0].dims)}"
    yield dimensions
    yield "✅ Loaded Mojo operations library"
    package_line = f"ran {format_path(run.package.path)} (hash {run.package.digest[:8]})"
    yield f"   {package_line}, {options.dtype}, seed {options.seed}"
    if options.root == "problems":
        yield from (f"   note: {make_relative(note)}" for note in layout.check_layout(puzzle.name))
    if options.backward:
        yield SEPARATOR
        yield f"{'':11}Comprehensive Backward Pass Test"
        yield f"{'':11}Testing Custom {puzzle.subject or puzzle.title} Gradients"
        yield SEPARATOR
        yield dimensions


def group_variants(run: Run) -> list[tuple[str, ...]]:
    variants = run.options.variants
    return [variants] if run.options.puzzle.has_separate_variants else [(name,) for name in variants]


def format_sections(run: Run, names: Sequence[str]) -> Iterator[Line]:
    """Yield the sections of some variants, by device; a skipped device is listed once, with the reason."""
    separate = run.options.puzzle.has_separate_variants
    for device in sort_devices(run):
        skipped = isinstance(device, SkippedDevice)
        if skipped and get_main_variant(run) not in names and not separate:
            continue
        yield ""
        heading = (
            f"Testing {DEVICE_LABELS[device.kind]} {get_pass_name(run)} Pass{format_suffix(run, names)}:"
        )
        yield Text(heading, style="bold")
        if skipped:
            yield f"   ⏭ SKIPPED ({device.reason})"
        else:
            yield from format_section(run, device, names)


def format_section(run: Run, device: DeviceResult, names: Sequence[str]) -> Iterator[Line]:
    """Compute some variants on one device, and yield the lines of each quantity."""
    label, pass_name, separate = (
        device.target.label,
        get_pass_name(run),
        run.options.puzzle.has_separate_variants,
    )
    if not separate:
        yield ""
        yield f"Testing {label} {pass_name} Implementation - {pass_name} Pass{format_suffix(run, names)}"
        yield THIN_SEPARATOR
    yield "   Computing PyTorch autograd reference..."
    run.compute_reference(device, names)
    yield f"   Computing Mojo {pass_name.lower()} implementation ({label})..."
    run.compute_kernels(device, names)
    if names[0] == run.options.variants[0]:
        yield f"   on {label}: {device.target.device_name}, {describe_build(device)}"
    if separate:
        yield from format_separate_variants(run, device)
        return
    if device.kind != "cpu":
        yield ""
    yield f"✅ {label} {pass_name} Implementation {pass_name.lower()} completed"
    yield from format_quantities(run, device.variants[names[0]])


def describe_build(device: DeviceResult) -> str:
    status = "cached" if device.cached else f"compiled in {device.compile_seconds:.1f} s"
    return f"{'kernels' if device.kind == 'virtual' else 'graph'} {status}"


def format_separate_variants(run: Run, device: DeviceResult) -> Iterator[Line]:
    """Yield one device's results for a puzzle with separate variants, one line per quantity."""
    yield "   largest difference from PyTorch in the chapter's case, and the verdict on all cases:"
    for name, variant in device.variants.items():
        written = run.options.puzzle.list_outputs(name)
        yield from (f"   {q}: {format_difference(variant, q)}" for q in run.quantities if q in written)
        yield from format_wrong_quantities(run, variant)
        yield from format_variant_repeats(run, variant)
    yield from format_error_table(run, *device.variants.values())
    yield f"   Overall: {describe_state(run, device, device.variants)}"


def format_quantities(run: Run, variant: VariantResult) -> Iterator[Line]:
    """Yield one variant's results on one device: the lines of the published report, and details."""
    puzzle = run.options.puzzle
    written = puzzle.list_outputs(variant.variant)
    forward = [q for q in puzzle.forward if q in run.quantities]
    gradients = [q for q in puzzle.backward if q in run.quantities and q in written]
    outputs = [quantity for quantity in puzzle.forward if quantity in written]
    for output in outputs[:1]:
        yield f"   Forward max difference: {format_difference(variant, output, with_mark=False)}"
    for quantity in gradients or [q for q in puzzle.intermediate if q in run.quantities and q in written]:
        yield f"   {puzzle.get_printed_name(quantity)}: {format_difference(variant, quantity)}"
    yield from format_wrong_quantities(run, variant)
    yield from format_error_table(run, variant)
    yield from format_variant_repeats(run, variant)
    yield ""
    if outputs:
        yield f"   Forward pass: {STATES[variant.get_state(forward)]}"
    if gradients:
        yield f"   Gradients:    {STATES[variant.get_state([*gradients, *puzzle.intermediate])]}"
    yield f"   Overall:      {STATES[variant.get_state(run.quantities)]}"


def format_difference(variant: VariantResult, quantity: str, with_mark: bool = True) -> str:
    """Return a quantity's largest difference from PyTorch in the default case."""
    if quantity in variant.unsolved:
        return f"⏳ UNSOLVED (blank {', '.join(variant.unsolved[quantity])})"
    default_results = variant.comparisons[0].results if variant.comparisons else {}
    if quantity not in default_results:
        return "not compared"
    mark = (" ✅" if variant.is_correct(quantity) else " ❌") if with_mark else ""
    return f"{default_results[quantity].difference:.2e}{mark}"


def format_wrong_quantities(run: Run, variant: VariantResult) -> Iterator[Line]:
    """Yield each wrong quantity's worst case and error, and its diagnosis unless a gate reports it later."""
    puzzle = run.options.puzzle
    gates = [result for result in variant.gates if result.state == "wrong"]
    reported_quantities = {
        quantity
        for result in gates
        for quantity in (*result.gate.own_quantities, *result.gate.provided_quantities)
    }
    for quantity in run.quantities:
        failing = [pair for pair in collect_results(variant.comparisons, quantity) if not pair[0].ok]
        if failing:
            outcome, case = find_hardest(failing)
            cases = f"{len(failing)} of {len(variant.comparisons)} cases"
            where = f"wrong in {cases}, most in '{case.name}' ({case.purpose})"
            yield Text(f"   ❌ {puzzle.get_printed_name(quantity)} is {where}", style="red")
            yield f"      {explain_failure(outcome)}"
            diagnosis = variant.diagnoses.get(quantity) if quantity not in reported_quantities else None
            yield from (f"      {text}" for text in (diagnosis.lines if diagnosis else ()))
    if variant.failure and not gates:
        yield Text(f"   ❌ {variant.failure}", style="red")


def check_further_cases(run: Run) -> Iterator[Line]:
    """Check the correct gates in further cases; yield a heading before that and the result after it."""
    if remaining := run.list_remaining_gates():
        yield ""
        yield f"Checking {format_count(len(remaining), 'gate')} in further cases and in {LOW_PRECISION_DTYPE} (Virtual GPU)..."
        run.compute_gates()
        names = ", ".join(result.gate.id for result in run.rejected_gates)
        yield f"   {STATES['wrong']}: {names}" if names else f"   {STATES['correct']}"


def format_wrong_gates(run: Run) -> Iterator[Line]:
    """Yield the result of each gate that is wrong on any device or in further cases."""
    device_results = [
        r for device in run.devices for variant in device.variants.values() for r in variant.gates
    ]
    for result in (*device_results, *run.rejected_gates):
        if result.state == "wrong":
            yield ""
            yield from format_gate(result, run.options.puzzle, run.source, run.blanks)


def format_error_table(run: Run, *variants: VariantResult) -> Iterator[Line]:
    """Yield a table of each quantity's error, PyTorch's error, and the limit, in the worst case."""
    cases = [comparison.case.name for comparison in variants[0].comparisons]
    yield Text(f"   {format_count(len(cases), 'case')}: {', '.join(cases)}", style="dim")
    row = "   {:20} {:>8} {:>10} {:>7} {:>8}  {}".format
    heading = row("error against truth", "ours", "PyTorch's", "ratio", "limit", "in the hardest case")
    for quantity in run.quantities:
        pairs = [pair for variant in variants for pair in collect_results(variant.comparisons, quantity)]
        if not pairs:
            continue
        result, case = find_hardest(pairs)
        if heading:
            yield Text(heading, style="dim")
            heading = ""
        name, ratio = run.options.puzzle.get_printed_name(quantity), f"{result.ratio:.1f}x"
        our_error, baseline_error, limit = (f"{x:.1e}" for x in (result.error, result.baseline, result.limit))
        yield row(name, our_error, baseline_error, ratio, limit, case.name)


def format_variant_repeats(run: Run, variant: VariantResult) -> Iterator[Line]:
    yield from (f"   {line}" for line in format_repeats(variant.repeats, run.options.puzzle))


def format_findings(run: Run, verbose: bool) -> Iterator[Line]:
    """Yield the number of findings of the virtual GPU, and the findings that no gate reports."""
    for device in run.devices:
        if device.kind != "virtual":
            continue
        variants = device.variants.values()
        errors = [finding for variant in variants for finding in variant.errors]
        reported_findings = [f for variant in variants for result in variant.gates for f in result.findings]
        notes = sum(not finding.is_error for finding in device.findings)
        yield ""
        summary = format_count(len(errors), "finding") if errors else "no findings"
        summary += f", {format_count(notes, 'note')} on library code" if notes else ""
        yield Text(f"Virtual GPU, memory and race check: {summary}", style="bold")
        for finding in device.findings if verbose else [f for f in errors if f not in reported_findings]:
            for text in finding.format().splitlines():
                yield Text(f"   {make_relative(text)}", style="red" if finding.is_error else "dim")


def format_unsolved(run: Run) -> Iterator[Line]:
    """Yield the location and task of each unsolved blank."""
    if run.unsolved:
        count = f"{len(run.unsolved)} of {len(run.options.puzzle.kernel_gates)}"
        yield ""
        yield Text(f"Unsolved blanks ({count}):", style="bold")
    width = max([9, *(len(gate) + 1 for gate in run.unsolved)])
    for gate in run.unsolved:
        yield f"   {gate:{width}}{format_path(run.source)}:{run.blanks[gate].line}  {run.blanks[gate].task}"


def format_memory(run: Run) -> Iterator[Line]:
    """Yield the bytes saved for the backward pass and the bytes of temporaries, computed from the shapes."""
    ledger = run.ledger
    variants = [name for name in run.options.variants if ledger and name in ledger.temporaries]
    if not run.options.backward or ledger is None or not variants:
        return
    dimensions = run.options.puzzle.format_dims(run.cases[0].dims)
    yield ""
    yield f"Bytes kept for the backward pass, parameters left out ({dimensions}):"
    yield f"   PyTorch eager: {describe_bytes(ledger.eager_saved)}"
    yield f"   ours:          {describe_bytes(ledger.our_saved)}"
    separate = [name for name in variants if name in ledger.saved_by_variant]
    yield from (f"   {name + ':':14} {describe_bytes(ledger.saved_by_variant[name])}" for name in separate)
    yield "Bytes allocated in between on a GPU:"
    yield from (f"   {name + ':':14} {describe_bytes(ledger.temporaries[name])}" for name in variants)


def format_costs(run: Run) -> Iterator[Line]:
    """Yield the kernel costs of each gate with limits, and the costs of the initially provided code."""
    gates_with_limits = [gate for gate in run.options.puzzle.kernel_gates if gate.limits]
    variants = [variant for device in run.devices for variant in device.variants.values()]
    gates = [result for variant in variants for result in variant.gates]
    costs_by_limit = {(result.gate.id, cost.limit.id): cost for result in gates for cost in result.costs}
    if not gates_with_limits or not any(device.kind == "virtual" for device in run.devices):
        return
    yield ""
    yield Text("Counters, in the case in which they are held to their limits:", style="bold")
    row = "   {:10} {:29} {:>8} {:>8} {:>8}  {}".format
    yield Text("   (a gate's own counter first; it must not raise the indented ones again)", style="dim")
    yield Text(row("gate", "", "given", "yours", "at most", "").rstrip(), style="dim")
    for gate in gates_with_limits:
        for limit in gate.limits:
            cost, initial = (
                costs_by_limit.get((gate.id, limit.id)),
                limit.initial_costs.get(run.options.dtype),
            )
            amount = format_amount(cost.value) if cost else "-"
            mark = MARKS["correct" if cost.ok else "wrong"] if cost else MARKS["unsolved"]
            initial_text = "-" if initial is None else format_amount(initial)
            name = limit.table_label if limit is gate.limits[0] else f"  {limit.table_label}"
            yield row(gate.id, name, initial_text, amount, format_amount(limit.maximum), mark)
    if run.options.puzzle.after_costs:
        correct = [variant for variant in variants if any(result.costs for result in variant.gates)]
        launches = {variant.variant: variant.launches for variant in correct}
        yield from run.options.puzzle.resolve(run.options.puzzle.after_costs)(launches, run.options.dtype)


def format_summary(run: Run) -> Iterator[Line]:
    """Yield a line for each device and variant, and the overall result."""
    yield ""
    yield Text(f"{get_pass_name(run)} Pass Test Summary:", style="bold")
    for names in group_variants(run):
        for device in sort_devices(run):
            label = f"   - {DEVICE_LABELS[device.kind]} {get_pass_name(run)}{format_suffix(run, names)}: "
            if not isinstance(device, SkippedDevice):
                yield f"{label} {describe_state(run, device, names)}"
            elif run.options.variants[0] in names:
                yield f"{label} ⏭ SKIPPED ({device.reason})"
    yield ""
    overall = OVERALL[run.compute_exit_code()] if run.devices else NOT_RUN
    yield Text(f"   Overall Result: {overall}", style="bold")
    if run.compute_exit_code() in (1, 3):
        yield f"   Run this again: {format_rerun_command(run)}"
    yield ""
    yield f"{get_pass_name(run).upper()} PASS Test Completed!"


def get_pass_name(run: Run) -> str:
    return "Backward" if run.options.backward else "Forward"


def describe_state(run: Run, device: DeviceResult, names: Iterable[str]) -> str:
    states = {device.variants[name].get_state(run.quantities) for name in names}
    return next(label for state, label in STATES.items() if state in states)


def sort_devices(run: Run) -> list[DeviceResult | SkippedDevice]:
    """Return the devices of a run, including skipped ones, in the order of LABELS."""
    return sorted([*run.devices, *run.skipped], key=lambda device: [*DEVICE_LABELS].index(device.kind))


def get_main_variant(run: Run) -> str:
    return next(iter(run.options.puzzle.variants))


def format_suffix(run: Run, names: Sequence[str]) -> str:
    """Return the variant's name in parentheses, or "" for a heading that covers the whole puzzle."""
    puzzle, name = run.options.puzzle, names[0]
    has_all_outputs = {*puzzle.forward, *puzzle.backward} <= puzzle.list_outputs(name)
    covers_puzzle = puzzle.has_separate_variants or (name == get_main_variant(run) and has_all_outputs)
    return "" if covers_puzzle else f" ({name})"


def explain_failure(result: TensorResult) -> str:
    """Describe a failed comparison in one line."""
    index = list(result.worst)
    if result.num_unwritten:
        return f"{result.num_unwritten} elements were never written, the first wrong one at {index}"
    if result.num_nonfinite:
        condition = "NaN or infinite where the reference is not (or the reverse)"
        description = f"{result.num_nonfinite} elements are {condition}, one at {index}"
        return f"{description}: not a wrong gradient but a value that is none"
    times = f"{result.ratio:.3g} times PyTorch's own {result.baseline:.2e}"
    return f"error {result.error:.2e}, {times} (limit {result.limit:.2e}), worst at {index}"


def describe_bytes(parts: Mapping[str, int]) -> str:
    if not parts:
        return "none"
    return f"{sum(parts.values()):,} ({', '.join(f'{name} {count:,}' for name, count in parts.items())})"


def format_rerun_command(run: Run) -> str:
    """Return the command that runs the failing part again."""
    options = run.options
    failing = [
        (device.kind, name)
        for device in run.devices
        for name, variant in device.variants.items()
        if variant.get_state(run.quantities) == "wrong"
    ]
    kinds, names = {kind for kind, _ in failing}, {name for _, name in failing}
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
    return invocation.format_command(" ".join(parts))


# ---- JSON --------------------------------------------------------------------------------------------------


GATE_RESULT = "state mistake hint lines=diagnosis summary"
TENSOR_RESULT = (
    "ok error pytorch_error=baseline limit difference nonfinite=num_nonfinite unwritten=num_unwritten"
)


def select_attributes(value: object, names: str) -> dict[str, object]:
    """Return attributes of a value by name; "lines=diagnosis" stores the attribute `diagnosis` as "lines"."""
    pairs = (name.partition("=") for name in names.split())
    return {key: getattr(value, attribute or key) for key, _, attribute in pairs}


def make_gates_json(results: Iterable[GateResult], puzzle: Puzzle, **metadata: object) -> dict[str, object]:
    """Return the results of some gates as JSON data, with the keys of `metadata`."""
    gates: dict[str, object] = {}
    for result in results:
        quantities = {*result.repeats, *(name for c in result.comparisons for name in c.results)}
        names = {quantity: puzzle.get_printed_name(quantity) for quantity in quantities}
        gates[result.gate.id] = {
            **select_attributes(result, GATE_RESULT),
            "repeat": make_repeats_json(result.repeats, names),
            "cases": make_cases_json(result.comparisons, names),
            **make_costs_json(result),
        }
    return {"puzzle": puzzle.name, **metadata, "gates": gates}


def make_costs_json(result: GateResult) -> dict[str, object]:
    costs = [
        select_attributes(c, "value ok line dtype")
        | select_attributes(c.limit, "id counter=label most=maximum")
        for c in result.costs
    ]
    return {"costs": costs} if costs else {}


def make_repeats_json(repeats: Mapping[str, Repeats], names: Mapping[str, str]) -> dict[str, object]:
    """Return the results of repeated runs by printed name, as JSON data."""
    attributes = "runs bit_equal spread_ulps wrong_runs"
    return {
        names[name]: {**select_attributes(outcome, attributes), "must_be_equal": not outcome.atomic}
        for name, outcome in repeats.items()
    }


def make_cases_json(comparisons: Sequence[Comparison], names: Mapping[str, str]) -> dict[str, object]:
    """Map case -> printed name -> result as JSON data, for the quantities in `names`."""
    return {
        c.case.name: {
            names[q]: select_attributes(result, TENSOR_RESULT)
            for q, result in c.results.items()
            if q in names
        }
        for c in comparisons
    }


def make_json(run: Run) -> dict[str, Any]:
    """Return the run as JSON data; quantities have their printed names."""
    return {
        "puzzle": run.options.puzzle.name,
        "ops": str(run.package.path),
        "hash": run.package.digest,
        "dtype": run.options.dtype,
        "dims": list(run.cases[0].dims),
        "seed": run.options.seed,
        "backward": run.options.backward,
        "exit_code": run.compute_exit_code(),
        "unsolved": run.unsolved,
        "rejected": {result.gate.id: select_attributes(result, GATE_RESULT) for result in run.rejected_gates},
        "skipped": {s.kind: s.reason for s in run.skipped},
        "ledger": run.ledger
        and select_attributes(
            run.ledger,
            "saved_eager=eager_saved saved_ours=our_saved saved_by=saved_by_variant between=temporaries",
        ),
        "devices": [
            {
                "device": device.kind,
                "detail": device.target.device_name,
                "cached": device.cached,
                "compile_seconds": round(device.compile_seconds, 3),
                "findings": [
                    {**select_attributes(f, "kind error=is_error where=location count"), "text": f.format()}
                    for f in device.findings
                ],
                "variants": {
                    name: make_variant_json(variant, run) for name, variant in device.variants.items()
                },
            }
            for device in run.devices
        ],
    }


def make_variant_json(variant: VariantResult, run: Run) -> dict[str, object]:
    names = {quantity: run.options.puzzle.get_printed_name(quantity) for quantity in run.quantities}
    return {
        "state": variant.get_state(run.quantities),
        "unsolved": {names[quantity]: list(ids) for quantity, ids in variant.unsolved.items()},
        "repeat": make_repeats_json(variant.repeats, names),
        "gates": {
            result.gate.id: select_attributes(result, GATE_RESULT) | make_costs_json(result)
            for result in variant.gates
        },
        "diagnosis": {
            names[quantity]: select_attributes(diagnosis, "mistake hint lines")
            for quantity, diagnosis in variant.diagnoses.items()
            if quantity in names
        },
        "cases": make_cases_json(variant.comparisons, names),
    }
