"""Run the commands that check a puzzle: print results, write JSON, and record which gates have passed."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress as Bars
from rich.text import Text

from harness.check.checker import create_checker
from harness.check.options import Options
from harness.check.results import NARROW, GateResult, compute_exit_code
from harness.console import format_path, get_page_width, print_lines, show_progress, write_json
from harness.devices.targets import Target
from harness.errors import WorkbookError
from harness.learner.progress import Progress
from harness.learner.work import Work
from harness.screens import report
from harness.screens.work import describe_next_step, describe_unsaved, is_solved
from harness.spec.puzzle import Case

if TYPE_CHECKING:
    from harness.check.profile import CountRequest

COMPILING_WITH_MAX = "Compiling the Mojo kernels for the {} through MAX (half a minute, on a busy machine minutes; then cached)"
COMPILING_PTX = "Compiling the Mojo kernels for the {} (seconds, on a busy machine more; then cached)"


def check(console: Console, options: Options) -> int:
    """Check each selected file, kernels by gate or in a whole run, and return the exit code."""
    files, codes, data = options.per_file, list[int](), dict[str, dict[str, object]]()
    for file in files:
        rung = file.work.rung
        headings = len(files) > 1 and not file.work.in_package
        if headings:
            console.print(Text(f"{rung.label}:", style="bold"), soft_wrap=True)
        if file.checks_gates:
            checking = GateCheck(file.work, file.gate, file.cases, file.checker_options, file.verbose)
            code, data[rung.id] = checking.run(console)
        else:
            code, data[rung.id] = check_kernels(console, file)
        codes.append(code)
        if headings:
            console.print()
    code = next(code for code in (1, 3, 6, 0) if code in codes)
    if options.json:
        (first, *others) = data.values()
        whole = {"puzzle": options.puzzle.name, "exit_code": code, "rungs": data}
        write_json(whole if others else first, options.json)
    return code


@dataclass(frozen=True)
class GateCheck:
    """A check of one gate of a file (default: all gates) in some cases (default: the puzzle's).

    `settings` are the checker's keyword arguments, from `Options.checker_options`.
    """

    work: Work
    gate: str | None = None
    cases: list[Case] | None = None
    settings: Mapping[str, object] = field(default_factory=lambda: {"seed": 0})
    verbose: bool = False

    def run(self, console: Console) -> tuple[int, dict[str, object]]:
        """Print each gate's result and save passes as progress; return the exit code and the JSON data."""
        work, puzzle, rung = self.work, self.work.puzzle, self.work.rung
        gates = [self.gate] if self.gate else None
        dtype, seed = self.settings.get("dtype", "float32"), self.settings.get("seed", 0)
        blanks = work.read_blanks()
        if gates and work.in_package:
            print_lines(console, [Text(f"   {self.describe_run(dtype, seed)}", style="dim")])
        results = self.check_gates(console, gates)
        requested = gates or rung.gates
        checked = {result.gate.id for result in results}
        if missing := [id for id in requested if id not in checked]:
            raise WorkbookError(f"{format_path(work.target)}: no result for {', '.join(missing)}")
        progress, counts = Progress.load(), work.is_learners
        was_solved = counts and is_solved(work, progress)
        for result in results:
            if counts and self.cases is None and dtype == "float32":
                key, blank = work.get_progress_key(result.gate.id), blanks[result.gate.id]
                progress.record_result(key, blank, result.state == "correct")
            print_lines(console, report.format_gate(result, puzzle, work.path, blanks))
            if self.verbose:
                print_lines(console, report.format_cases(result))
        print_lines(console, describe_unsaved(progress))
        if counts and (self.cases is not None or dtype != "float32"):
            scope = "these sizes" if self.cases is not None else dtype
            print_lines(console, [Text(f"   (not saved as passed: only {scope} were checked)", style="dim")])
        elif counts and (not was_solved or not gates) and (step := describe_next_step(work, progress)):
            print_lines(console, [Text(f"   {step}", style="green")])
        code = compute_exit_code(results, requested)
        metadata = {"rung": rung.id, "file": str(work.path), "dtype": dtype, "seed": seed}
        return code, report.make_gates_json(results, puzzle, **metadata, exit_code=code)

    def check_gates(self, console: Console, gates: list[str] | None) -> list[GateResult]:
        in_package = self.work.in_package

        def print_first(results: list[GateResult]) -> None:
            print_lines(console, report.format_first_results(results))

        checker = create_checker(self.work, at_terminal=True, **self.settings)
        # Python code may print or stop in a debugger, so nothing else is written to the terminal.
        with show_progress(console, ticking=in_package) if in_package or not gates else nullcontext():
            return checker.check(
                self.work.target, gates, self.cases, on_first=print_first if gates and in_package else None
            )

    def describe_run(self, dtype: object, seed: object) -> str:
        package = self.work.package
        narrow = any(case.in_16_bits for case in self.cases or self.work.puzzle.cases(None))
        then = f", then {NARROW}" if narrow and "dtype" not in self.settings else ""
        return f"ran {format_path(package.path)} (hash {package.digest[:8]}), {dtype}{then}, seed {seed}, on the virtual GPU"


def check_kernels(console: Console, options: Options) -> tuple[int, dict[str, object]]:
    """Run the kernels on every requested device and print the report; return the exit code and the JSON data."""
    from harness.check import runs

    with show_progress(console) as bars:
        on_compile, on_ready = compile_callbacks(console, bars)
        with runs.start_run(options, on_compile=on_compile, on_ready=on_ready) as run:
            report.write_report(console, run, verbose=options.verbose)
    if options.work.is_learners and not options.dims and options.dtype == "float32":
        progress = Progress.load()
        for gate, is_correct in runs.collect_gate_states(run).items():
            progress.record_result(f"{options.puzzle.name} {gate}", run.blanks[gate], is_correct)
        print_lines(console, describe_unsaved(progress))
    through_max = any(device.kind != "virtual" for device in run.devices)
    if through_max and not options.backward and not options.puzzle.has_separate_variants:
        from harness.bench import forward_times

        print_lines(console, forward_times.describe(run))
    return run.compute_exit_code(), report.make_json(run)


def print_counters(console: Console, counting: "CountRequest", by_line: bool = False) -> int:
    """Print the counters of a case's kernels; with `by_line` also by tensor and line."""
    from harness.check.profile import format_detail, format_table

    console.print("Recording the launches (a few seconds where they are not cached) ...")
    profiles, width = counting.profile_variants(), get_page_width(console)
    lines = [*(format_detail(profiles, width) if by_line else []), *format_table(profiles, width)]
    console.print(*lines, sep="\n", soft_wrap=True, markup=False)
    return 0


def compile_callbacks(
    console: Console, bars: Bars
) -> tuple[Callable[[Target], None], Callable[[Target], None]]:
    """Return callbacks that show and remove a progress line while kernels compile; piped output keeps it."""
    tasks = {}

    def on_compile(target: Target) -> None:
        message = (COMPILING_PTX if target.kind == "virtual" else COMPILING_WITH_MAX).format(target.label)
        tasks[target.kind] = bars.add_task(message)
        if not console.is_terminal:
            console.print(message + " ...")

    def on_ready(target: Target) -> None:
        if target.kind in tasks:
            bars.remove_task(tasks.pop(target.kind))

    return on_compile, on_ready
