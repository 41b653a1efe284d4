"""Prints a run for a person, or gives it as JSON. Computes nothing but the words."""

from collections.abc import Collection, Iterable, Mapping

from rich.console import Console
from rich.text import Text

from harness import invocation
from harness.check.compare import Verdict
from harness.check.results import VariantResult
from harness.check.runs import DeviceResult, Run
from harness.console import relative, shown
from harness.devices.targets import LABELS
from harness.learner import layout
from harness.learner.blanks import Blank
from harness.screens.gate_report import cases_json, gate_json, repeat_json, repeat_words, verdict_lines
from harness.vgpu.checks.findings import plural

RULE = "=" * 60
THIN_RULE = "-" * 57
STATES = {"correct": "✅ CORRECT", "wrong": "❌ INCORRECT", "unsolved": "⏳ UNSOLVED"}


class Report:
    """Writes a run to a console; piped output is the same text, plain and unwrapped."""

    def __init__(self, console: Console, *, verbose: bool = False):
        self.console = console
        self.verbose = verbose

    def line(self, text: str = "", style: str = "") -> None:
        """One line, as it is: nothing in it is read as markup, and nothing wraps."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def run(self, run: Run) -> None:
        """The whole report."""
        self.header(run)
        first = run.options.variants[0]
        if run.options.puzzle.separate:
            self.parts(run)
        else:
            for name in run.options.variants:
                self.devices(run, name)
        self.findings(run)
        self.unsolved(run)
        self.ledger(run)
        self.summary(run, first)

    def header(self, run: Run) -> None:
        """What is run: sizes, files, and how the graphs came about."""
        puzzle = run.options.puzzle
        dimensions = puzzle.say_dims(run.cases[0].dims)
        self.line(f"Testing with dimensions: {dimensions}")
        self.line("✅ Loaded Mojo operations library")
        self.line(
            f"   ran {shown(run.package.path)} (hash {run.package.digest[:8]}), {run.options.dtype}, seed {run.options.seed}"
        )
        if run.options.root == "problems":
            for note in layout.notes(run.options.puzzle.name):
                self.line(f"   note: {relative(note)}")
        for device in run.devices:
            how = "cached" if device.cached else f"compiled in {device.compile_seconds:.1f} s"
            what = "kernels" if device.target.kind == "virtual" else "graph"
            self.line(f"   on {device.target.label}: {device.target.detail}, {what} {how}")
        if run.options.backward:
            for text in (
                RULE,
                f"{'':11}Comprehensive Backward Pass Test",
                f"{'':11}Testing Custom {puzzle.subject or puzzle.title} Gradients",
                RULE,
            ):
                self.line(text)
            self.line(f"Testing with dimensions: {dimensions}")

    def devices(self, run: Run, name: str) -> None:
        """The sections of one variant, a device after the other, skipped ones by their reason."""
        main = name == main_variant(run)
        suffix = suffix_of(run, name)
        what = "Backward" if run.options.backward else "Forward"
        for kind in ("cpu", "gpu", "virtual"):
            device = next((d for d in run.devices if d.target.kind == kind), None)
            skipped = next((s for s in run.skipped if s.kind == kind), None)
            if device or (skipped and main):
                self.line()
                self.line(f"Testing {LABELS[kind]} {what} Pass{suffix}:", style="bold")
            if skipped and not device and main:
                self.line(f"   ⏭ SKIPPED ({skipped.reason})")
            if device:
                self.section(run, device, name, what)

    def parts(self, run: Run) -> None:
        """The sections of a puzzle whose variants are separate: one for each device, a line for each quantity in it."""
        what = "Backward" if run.options.backward else "Forward"
        for skipped in run.skipped:
            self.line()
            self.line(f"Testing {LABELS[skipped.kind]} {what} Pass:", style="bold")
            self.line(f"   ⏭ SKIPPED ({skipped.reason})")
        for device in run.devices:
            self.line()
            self.line(f"Testing {LABELS[device.target.kind]} {what} Pass:", style="bold")
            self.line(
                "   largest difference from PyTorch in the chapter's case, and the verdict on all cases:"
            )
            for variant in device.variants.values():
                written = run.options.puzzle.writes(variant.variant)
                for quantity in run.quantities:
                    if quantity in written:
                        self.line(f"   {quantity}: {self.figure(variant, quantity)}")
                self.wrong(run, variant)
                self.repeats(run, variant)
            self.errors(run, *device.variants.values())
            states = {variant.state(run.quantities) for variant in device.variants.values()}
            self.line(f"   Overall: {STATES[worst(states)]}")

    def section(self, run: Run, device: DeviceResult, name: str, what: str) -> None:
        """One variant on one device: the published lines, then the details."""
        label, variant = device.target.label, device.variants[name]
        puzzle = run.options.puzzle
        written = puzzle.writes(name)
        forward = [q for q in puzzle.forward if q in run.quantities]
        gradients = [q for q in puzzle.backward if q in run.quantities and q in written]
        self.line()
        self.line(f"Testing {label} {what} Implementation - {what} Pass{suffix_of(run, name)}")
        self.line(THIN_RULE)
        self.line("   Computing PyTorch autograd reference...")
        self.line(f"   Computing Mojo {what.lower()} implementation ({label})...")
        if device.target.kind != "cpu":
            self.line()
        self.line(f"✅ {label} {what} Implementation {what.lower()} completed")
        outputs = [quantity for quantity in puzzle.forward if quantity in written]
        for output in outputs[:1]:
            self.line(f"   Forward max difference: {self.figure(variant, output, tick=False)}")
        for quantity in gradients or [q for q in puzzle.intermediate if q in run.quantities and q in written]:
            self.line(f"   {puzzle.printed(quantity)}: {self.figure(variant, quantity)}")
        self.wrong(run, variant)
        self.errors(run, variant)
        self.repeats(run, variant)
        self.line()
        if outputs:
            self.line(f"   Forward pass: {STATES[variant.state(forward)]}")
        if gradients:
            self.line(f"   Gradients:    {STATES[variant.state([*gradients, *puzzle.intermediate])]}")
        self.line(f"   Overall:      {STATES[variant.state(run.quantities)]}")

    def figure(self, variant: VariantResult, quantity: str, tick: bool = True) -> str:
        """The published figure of a quantity: the largest difference from PyTorch in the chapter's case."""
        if quantity in variant.unsolved:
            return f"⏳ UNSOLVED (blank {', '.join(variant.unsolved[quantity])})"
        chapter = variant.comparisons[0].verdicts if variant.comparisons else {}
        if quantity not in chapter:
            return "not compared"
        mark = (" ✅" if variant.ok(quantity) else " ❌") if tick else ""
        return f"{chapter[quantity].difference:.2e}{mark}"

    def wrong(self, run: Run, variant: VariantResult) -> None:
        """The quantities that are wrong in some case, where, by how much and why; the gates say why of their own."""
        names = printed_names(run)
        gates = [result for result in variant.gates if result.state == "wrong"]
        told = {quantity for result in gates for quantity in (*result.gate.own, *result.gate.given)}
        for quantity in run.quantities:
            bad = [
                (c, c.verdicts[quantity])
                for c in variant.comparisons
                if quantity in c.verdicts and not c.verdicts[quantity].ok
            ]
            if bad:
                comparison, verdict = max(bad, key=lambda pair: pair[1].error / pair[1].limit)
                cases = f"{len(bad)} of {len(variant.comparisons)} cases"
                self.line(
                    f"   ❌ {names[quantity]} is wrong in {cases}, most in '{comparison.case.name}' ({comparison.case.why})",
                    style="red",
                )
                self.line(f"      {explain(verdict)}")
                diagnosis = variant.diagnoses.get(quantity) if quantity not in told else None
                for text in diagnosis.lines if diagnosis else ():
                    self.line(f"      {text}")
        for result in gates:
            for line in verdict_lines(result, run.options.puzzle, run.source, run.blanks):
                self.console.print(Text("   ") + line, soft_wrap=True)
        if variant.failure and not gates:
            self.line(f"   ❌ {variant.failure}", style="red")

    def errors(self, run: Run, *variants: VariantResult) -> None:
        """A table of the worst case of every quantity of some variants: its error, PyTorch's, and the limit."""
        names = printed_names(run)
        cases = [comparison.case.name for comparison in variants[0].comparisons]
        self.line(f"   {plural(len(cases), 'case')}: {', '.join(cases)}", style="dim")
        row = "   {:20} {:>8} {:>10} {:>7} {:>8}  {}".format
        heading = row("error against truth", "ours", "PyTorch's", "ratio", "limit", "in the hardest case")
        for quantity in run.quantities:
            judged = [
                (c.verdicts[quantity], c)
                for variant in variants
                for c in variant.comparisons
                if quantity in c.verdicts
            ]
            if not judged:
                continue
            verdict, comparison = max(judged, key=lambda pair: pair[0].error / pair[0].limit)
            if heading:
                self.line(heading, style="dim")
                heading = ""
            figures = [
                f"{verdict.error:.1e}",
                f"{verdict.baseline:.1e}",
                f"{verdict.ratio:.1f}x",
                f"{verdict.limit:.1e}",
            ]
            self.line(row(names[quantity], *figures, comparison.case.name))

    def repeats(self, run: Run, variant: VariantResult) -> None:
        """What repeated runs showed, a line for each gradient."""
        names = printed_names(run)
        for quantity, repeats in variant.repeats.items():
            self.line(f"   {names[quantity]}: {repeat_words(repeats)}")

    def findings(self, run: Run) -> None:
        """How much the virtual GPU found besides the values, and what of it no gate has told."""
        for device in run.devices:
            if device.target.kind != "virtual":
                continue
            variants = device.variants.values()
            errors = [finding for variant in variants for finding in variant.errors]
            told = [f for variant in variants for result in variant.gates for f in result.findings]
            notes = sum(not finding.is_error for finding in device.findings)
            self.line()
            self.line(
                f"Virtual GPU, memory and race check: {len(errors) or 'no'} finding{'s' * (len(errors) != 1)}"
                + (f", {plural(notes, 'note')} on library code" if notes else ""),
                style="bold",
            )
            for finding in device.findings if self.verbose else [f for f in errors if f not in told]:
                for text in finding.text().splitlines():
                    self.line(f"   {relative(text)}", style="red" if finding.is_error else "dim")

    def unsolved(self, run: Run) -> None:
        """Where the untouched blanks are."""
        if not run.unsolved:
            return
        self.line()
        self.line(
            f"Unsolved blanks ({len(run.unsolved)} of {len(run.options.puzzle.kernel_gates)}):", style="bold"
        )
        source = shown(run.source)
        for gate in run.unsolved:
            blank: Blank = run.blanks[gate]
            self.line(f"   {gate:9}{source}:{blank.line}  {blank.task}")

    def ledger(self, run: Run) -> None:
        """Bytes kept for the backward pass and allocated in between, from the shapes."""
        counted = [name for name in run.options.variants if run.ledger and name in run.ledger.between]
        if not run.options.backward or run.ledger is None or not counted:
            return
        dimensions = run.options.puzzle.say_dims(run.cases[0].dims)
        self.line()
        self.line(f"Bytes kept for the backward pass, parameters left out ({dimensions}):")
        self.line(f"   PyTorch eager: {describe_bytes(run.ledger.saved_eager)}")
        self.line(f"   ours:          {describe_bytes(run.ledger.saved_ours)}")
        for name in [name for name in counted if name in run.ledger.saved_by]:
            self.line(f"   {name + ':':14} {describe_bytes(run.ledger.saved_by[name])}")
        self.line("Bytes allocated in between on a GPU:")
        for name in counted:
            self.line(f"   {name + ':':14} {describe_bytes(run.ledger.between[name])}")

    def summary(self, run: Run, first: str) -> None:
        """The verdict, a line for each device and variant, and one for all."""
        what = "Backward" if run.options.backward else "Forward"
        self.line()
        self.line(f"{what} Pass Test Summary:", style="bold")
        for text in summary_lines(run, what, first):
            self.line(text)
        self.line()
        self.line(f"   Overall Result: {overall(run)}", style="bold")
        if run.exit_code() in (1, 3):
            self.line(f"   Run this again: {command(run)}")
        self.line()
        self.line(f"{what.upper()} PASS Test Completed!")


def summary_lines(run: Run, what: str, first: str) -> Iterable[str]:
    """`   - CPU Backward:  ✅ CORRECT`, for the first variant; the others follow with their names."""
    if run.options.puzzle.separate:
        for device in run.devices:
            states = {variant.state(run.quantities) for variant in device.variants.values()}
            yield f"   - {device.target.label} {what}:  {STATES[worst(states)]}"
        for skipped in run.skipped:
            yield f"   - {LABELS[skipped.kind]} {what}:  ⏭ SKIPPED ({skipped.reason})"
        return
    for name in (first, *(v for v in run.options.variants if v != first)):
        suffix = suffix_of(run, name)
        for kind in ("cpu", "gpu", "virtual"):
            for device in run.devices:
                if device.target.kind == kind:
                    state = device.variants[name].state(run.quantities)
                    yield f"   - {device.target.label} {what}{suffix}:  {STATES[state]}"
            for skipped in run.skipped:
                if skipped.kind == kind and name == first:
                    yield f"   - {LABELS[kind]} {what}{suffix}:  ⏭ SKIPPED ({skipped.reason})"


def worst(states: Collection[str]) -> str:
    """The verdict on several things together, by the verdict on each."""
    return next(state for state in ("wrong", "unsolved", "correct") if state in states)


def main_variant(run: Run) -> str:
    """The puzzle's first variant."""
    return next(iter(run.options.puzzle.variants))


def suffix_of(run: Run, name: str) -> str:
    """A variant's name after its lines; none for the main one, if it makes everything that the puzzle is about."""
    puzzle = run.options.puzzle
    everything = {*puzzle.forward, *puzzle.backward} <= puzzle.writes(name)
    return "" if name == main_variant(run) and everything else f" ({name})"


def overall(run: Run) -> str:
    """The verdict on the whole run in a few words."""
    return {
        0: "✅ ALL CORRECT",
        1: "❌ INCORRECT",
        3: "⏳ UNSOLVED, nothing attempted is wrong",
        6: "✅ CPU CORRECT, GPU NOT RUN",
    }[run.exit_code()]


def explain(verdict: Verdict) -> str:
    """Why a verdict is not ok, in a line."""
    if verdict.unwritten:
        return (
            f"{verdict.unwritten} elements were never written, the first wrong one at {list(verdict.worst)}"
        )
    if verdict.nonfinite:
        return (
            f"{verdict.nonfinite} elements are NaN or infinite where the reference is not (or the reverse), "
            f"one at {list(verdict.worst)}: not a wrong gradient but a value that is none"
        )
    return (
        f"error {verdict.error:.2e}, {verdict.ratio:.3g} times PyTorch's own {verdict.baseline:.2e} "
        f"(limit {verdict.limit:.2e}), worst at {list(verdict.worst)}"
    )


def printed_names(run: Run) -> dict[str, str]:
    """Op argument -> the name that reports print, of what a run is about."""
    return {quantity: run.options.puzzle.printed(quantity) for quantity in run.quantities}


def describe_bytes(parts: Mapping[str, int]) -> str:
    """A sum of bytes with its parts."""
    if not parts:
        return "none"
    return f"{sum(parts.values()):,} ({', '.join(f'{name} {count:,}' for name, count in parts.items())})"


def command(run: Run) -> str:
    """The command that runs the failing part again."""
    options = run.options
    wrong = [
        (device.target.kind, name)
        for device in run.devices
        for name, variant in device.variants.items()
        if variant.state(run.quantities) == "wrong"
    ]
    parts = [options.puzzle.name]
    parts += ["--backward"] if options.backward else []
    if wrong and len({name for _, name in wrong}) == 1:
        parts.append(f"--{wrong[0][1]}")
    elif options.variants != options.puzzle.default_variants and not options.gate:
        parts += [f"--{name}" for name in options.variants]
    if wrong and len({kind for kind, _ in wrong}) == 1:
        parts.append(f"--device {wrong[0][0]}")
    elif options.device != "auto":
        parts.append(f"--device {options.device}")
    parts += {"problems": [], "solutions": ["--solution"]}.get(options.root, [f"--ops {options.root}"])
    parts += [f"--dims {' '.join(map(str, options.dims))}"] if options.dims else []
    parts += [f"--dtype {options.dtype}"] if options.dtype != "float32" else []
    parts += [f"--seed {options.seed}"] if options.seed else []
    parts += [f"--gate {options.gate}"] if options.gate else []
    parts += [f"--repeat {options.repeat}"] if options.repeat > 1 else []
    parts += [f"--blocks {options.blocks}"] if options.blocks != "natural" else []
    return invocation.command(" ".join(parts))


def as_json(run: Run) -> dict:
    """The run as plain data, gradients under their printed names."""
    names = printed_names(run)
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
        "skipped": {s.kind: s.reason for s in run.skipped},
        "ledger": run.ledger
        and {
            "saved_eager": dict(run.ledger.saved_eager),
            "saved_ours": dict(run.ledger.saved_ours),
            "saved_by": {name: dict(parts) for name, parts in run.ledger.saved_by.items()},
            "between": {name: dict(parts) for name, parts in run.ledger.between.items()},
        },
        "devices": [
            {
                "device": device.target.kind,
                "detail": device.target.detail,
                "cached": device.cached,
                "compile_seconds": round(device.compile_seconds, 3),
                "findings": [
                    {
                        "kind": f.kind,
                        "error": f.is_error,
                        "where": f.where,
                        "count": f.count,
                        "text": f.text(),
                    }
                    for f in device.findings
                ],
                "variants": {
                    name: variant_json(variant, run, names) for name, variant in device.variants.items()
                },
            }
            for device in run.devices
        ],
    }


def variant_json(variant: VariantResult, run: Run, names: dict[str, str]) -> dict:
    """One variant on one device as plain data."""
    return {
        "state": variant.state(run.quantities),
        "unsolved": {names[quantity]: list(ids) for quantity, ids in variant.unsolved.items()},
        "repeat": {names[quantity]: repeat_json(repeats) for quantity, repeats in variant.repeats.items()},
        "gates": {result.gate.id: gate_json(result) for result in variant.gates},
        "diagnosis": {
            names[quantity]: {"mistake": diagnosis.mistake, "hint": diagnosis.hint, "lines": diagnosis.lines}
            for quantity, diagnosis in variant.diagnoses.items()
            if quantity in names
        },
        "cases": cases_json(variant.comparisons, names),
    }
