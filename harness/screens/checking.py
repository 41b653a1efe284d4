"""Run the commands that check a puzzle: check it, print the results, write the data, record what has passed."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress as Bars
from rich.text import Text

from harness.check.checker import create_checker
from harness.check.options import Options
from harness.check.results import NARROW, GateResult, exit_code
from harness.console import live, page_width, print_lines, shown, write_json
from harness.devices.targets import Target
from harness.errors import WorkbookError
from harness.learner.progress import Progress
from harness.learner.work import Work
from harness.screens import report
from harness.screens.work import is_solved, next_step, unsaved_lines
from harness.spec.puzzle import Case

if TYPE_CHECKING:
    from harness.check.profile import Counting

THROUGH_MAX = "Compiling the Mojo kernels for the {} through MAX (half a minute, on a busy machine minutes; then cached)"
RECORDED = "Compiling the Mojo kernels for the {} (seconds, on a busy machine more; then cached)"


def check(console: Console, options: Options) -> int:
    """Check each file that a puzzle's command line selects; kernels either per gate or as a whole."""
    files, codes, data = options.files, list[int](), dict[str, dict[str, object]]()
    for each in files:
        rung = each.work.rung
        headed = len(files) > 1 and not each.work.in_package
        if headed:
            console.print(Text(f"{rung.words}:", style="bold"), soft_wrap=True)
        if each.by_gate:
            checking = GateCheck(each.work, each.gate, each.cases, each.of_checker, each.verbose)
        else:
            checking = KernelCheck(each)
        code, data[rung.id] = checking.run(console)
        codes.append(code)
        if headed:
            console.print()
    code = next(code for code in (1, 3, 6, 0) if code in codes)
    if options.json:
        (first, *others) = data.values()
        every = {"puzzle": options.puzzle.name, "exit_code": code, "rungs": data}
        write_json(every if others else first, options.json)
    return code


@dataclass(frozen=True)
class GateCheck:
    """A check of a file, gate by gate: of all gates unless `gate` names one, in the puzzle's cases by
    default.

    `settings` are the keywords of its checker, as `Options.of_checker` returns them.
    """

    work: Work
    gate: str | None = None
    cases: list[Case] | None = None
    settings: Mapping[str, object] = field(default_factory=lambda: {"seed": 0})
    verbose: bool = False

    def run(self, console: Console) -> tuple[int, dict[str, object]]:
        """Print the result of each gate and write the data; return the exit code. Passes in the puzzle's own
        cases are saved as progress."""
        work, puzzle, rung = self.work, self.work.puzzle, self.work.rung
        gates = [self.gate] if self.gate else None
        dtype, seed = self.settings.get("dtype", "float32"), self.settings.get("seed", 0)
        blanks = work.blanks()
        if gates and work.in_package:
            print_lines(console, [Text(f"   {self.about(dtype, seed)}", style="dim")])
        results = self.check_gates(console, gates)
        requested = gates or rung.gates
        checked = {result.gate.id for result in results}
        if silent := [id for id in requested if id not in checked]:
            raise WorkbookError(f"{shown(work.target)}: no result for {', '.join(silent)}")
        noted, counts = Progress.load(), work.is_learners
        was_solved = counts and is_solved(work, noted)
        for result in results:
            if counts and self.cases is None and dtype == "float32":
                noted.note(work.key(result.gate.id), blanks[result.gate.id], result.state == "correct")
            print_lines(console, report.result_lines(result, puzzle, work.path, blanks))
            if self.verbose:
                print_lines(console, report.case_lines(result))
        print_lines(console, unsaved_lines(noted))
        if counts and (self.cases is not None or dtype != "float32"):
            words = "these sizes" if self.cases is not None else dtype
            print_lines(console, [Text(f"   (not noted as passed: only {words} were checked)", style="dim")])
        elif counts and (not was_solved or not gates) and (step := next_step(work, noted)):
            print_lines(console, [Text(f"   {step}", style="green")])
        code = exit_code(results, requested)
        about = {"rung": rung.id, "file": str(work.path), "dtype": dtype, "seed": seed}
        return code, report.gates_json(results, puzzle, **about, exit_code=code)

    def check_gates(self, console: Console, gates: list[str] | None) -> list[GateResult]:
        """Return the result of each gate."""
        packed = self.work.in_package
        first = (lambda first: print_lines(console, report.first_lines(first))) if gates and packed else None
        checker = create_checker(self.work, at_terminal=True, **self.settings)
        # A gate in Python may be one that prints, or that stops in a debugger: it has the terminal to itself.
        with live(console, ticking=packed) if packed or not gates else nullcontext():
            return checker.check(self.work.target, gates, self.cases, on_first=first)

    def about(self, dtype: object, seed: object) -> str:
        """Describe the check about to run, with its dtypes."""
        package = self.work.package
        narrow = any(case.in_16_bits for case in self.cases or self.work.puzzle.cases(None))
        then = f", then {NARROW}" if narrow and "dtype" not in self.settings else ""
        return f"ran {shown(package.path)} (hash {package.digest[:8]}), {dtype}{then}, seed {seed}, on the virtual GPU"


@dataclass(frozen=True)
class KernelCheck:
    """A whole run of the kernels on every requested device."""

    options: Options

    def run(self, console: Console) -> tuple[int, dict[str, object]]:
        """Print the report; the exit code, and the data."""
        from harness.check import runs

        options = self.options
        with live(console) as bars:
            on_compile, on_ready = compile_callbacks(console, bars)
            with runs.run(options, on_compile=on_compile, on_ready=on_ready) as run:
                report.write(console, run, verbose=options.verbose)
        if options.work.is_learners and not options.dims and options.dtype == "float32":
            noted = Progress.load()
            for gate, right in runs.checked_gates(run).items():
                noted.note(f"{options.puzzle.name} {gate}", run.blanks[gate], right)
            print_lines(console, unsaved_lines(noted))
        through_max = any(device.kind != "virtual" for device in run.devices)
        if through_max and not options.backward and not options.puzzle.separate:
            from harness.bench import forward_times

            print_lines(console, forward_times.describe(run))
        return run.exit_code(), report.as_json(run)


def count(console: Console, counting: "Counting", by_line: bool = False) -> int:
    """Print the counters of the first case's kernels on the virtual GPU, for --profile; `by_line` by tensor
    and line as well."""
    from harness.check.profile import detail, table

    console.print("Recording the launches (a few seconds where they are not cached) ...")
    profiles, width = counting.profile(), page_width(console)
    lines = [*(detail(profiles, width) if by_line else []), *table(profiles, width)]
    console.print(*lines, sep="\n", soft_wrap=True, markup=False)
    return 0


def compile_callbacks(
    console: Console, bars: Bars
) -> tuple[Callable[[Target], None], Callable[[Target], None]]:
    """Return two callbacks, for kernels that begin to compile and for compiled ones: a line each, which stays in a pipe."""
    tasks = {}

    def on_compile(target: Target) -> None:
        words = (RECORDED if target.kind == "virtual" else THROUGH_MAX).format(target.label)
        tasks[target.kind] = bars.add_task(words)
        if not console.is_terminal:
            console.print(words + " ...")

    def on_ready(target: Target) -> None:
        if target.kind in tasks:
            bars.remove_task(tasks.pop(target.kind))

    return on_compile, on_ready
