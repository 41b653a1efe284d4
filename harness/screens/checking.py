"""Run the commands that check a puzzle: print results, write JSON, and save which gates have passed."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress as Bars
from rich.text import Text

from harness.check.checker import create_checker
from harness.check.options import Options
from harness.check.results import LOW_PRECISION_DTYPE, GateResult, compute_exit_code
from harness.console import format_path, get_page_width, print_lines, show_progress, write_json
from harness.devices.targets import Target
from harness.errors import WorkbookError
from harness.learner.exercise import Exercise
from harness.learner.progress import Progress
from harness.screens import report
from harness.screens.exercise import describe_next_step, describe_unsaved, is_solved
from harness.spec.puzzle import Case

if TYPE_CHECKING:
    from harness.check.profile import CountRequest

COMPILING_GRAPH_MESSAGE = "Compiling the Mojo kernels for the {} through MAX (half a minute, on a busy machine minutes; then cached)"
COMPILING_PTX_MESSAGE = "Compiling the Mojo kernels for the {} (seconds, on a busy machine more; then cached)"


def check(console: Console, options: Options) -> int:
    """Check each selected file, gate by gate or in a full run of the kernels; return the exit code."""
    files, codes, data = options.file_options, list[int](), dict[str, dict[str, object]]()
    for file in files:
        rung = file.exercise.rung
        has_headings = len(files) > 1 and not file.exercise.is_mojo
        if has_headings:
            console.print(Text(f"{rung.label}:", style="bold"), soft_wrap=True)
        if file.is_gate_check:
            gate_check = GateCheck(file.exercise, file.gate, file.cases, file.checker_options, file.verbose)
            code, data[rung.id] = gate_check.run(console)
        else:
            code, data[rung.id] = check_kernels(console, file)
        codes.append(code)
        if has_headings:
            console.print()
    code = next(code for code in (1, 3, 6, 0) if code in codes)
    if options.json:
        (first, *others) = data.values()
        all_data = {"puzzle": options.puzzle.name, "exit_code": code, "rungs": data}
        write_json(all_data if others else first, options.json)
    return code


@dataclass(frozen=True)
class GateCheck:
    """A check of one gate of a file (default: all gates) in some cases (default: the puzzle's)."""

    exercise: Exercise
    gate: str | None = None
    cases: list[Case] | None = None
    checker_options: Mapping[str, object] = field(default_factory=lambda: {"seed": 0})
    verbose: bool = False

    def run(self, console: Console) -> tuple[int, dict[str, object]]:
        """Print each gate's result and save the passed gates; return the exit code and the JSON data."""
        exercise, puzzle, rung = self.exercise, self.exercise.puzzle, self.exercise.rung
        gates = [self.gate] if self.gate else None
        dtype, seed = self.checker_options.get("dtype", "float32"), self.checker_options.get("seed", 0)
        blanks = exercise.read_blanks()
        if gates and exercise.is_mojo:
            print_lines(console, [Text(f"   {self.describe_run(dtype, seed)}", style="dim")])
        results = self.check_gates(console, gates)
        requested = gates or rung.gates
        checked = {result.gate.id for result in results}
        if missing := [id for id in requested if id not in checked]:
            raise WorkbookError(f"{format_path(exercise.target)}: no result for {', '.join(missing)}")
        progress, records_progress = Progress.load(), exercise.is_learner_file
        was_solved = records_progress and is_solved(exercise, progress)
        for result in results:
            if records_progress and self.cases is None and dtype == "float32":
                key, blank = exercise.get_progress_key(result.gate.id), blanks[result.gate.id]
                progress.record_result(key, blank, result.state == "correct")
            print_lines(console, report.format_gate(result, puzzle, exercise.path, blanks))
            if self.verbose:
                print_lines(console, report.format_cases(result))
        print_lines(console, describe_unsaved(progress))
        if records_progress and (self.cases is not None or dtype != "float32"):
            scope = "these sizes" if self.cases is not None else dtype
            print_lines(console, [Text(f"   (not saved as passed: only {scope} were checked)", style="dim")])
        elif (
            records_progress
            and (not was_solved or not gates)
            and (step := describe_next_step(exercise, progress))
        ):
            print_lines(console, [Text(f"   {step}", style="green")])
        code = compute_exit_code(results, requested)
        metadata = {"rung": rung.id, "file": str(exercise.path), "dtype": dtype, "seed": seed}
        return code, report.make_gates_json(results, puzzle, **metadata, exit_code=code)

    def check_gates(self, console: Console, gates: list[str] | None) -> list[GateResult]:
        is_mojo = self.exercise.is_mojo

        def print_first_results(results: list[GateResult]) -> None:
            print_lines(console, report.format_first_results(results))

        checker = create_checker(self.exercise, interactive=True, **self.checker_options)
        # Python code may print or stop in a debugger, so nothing else is written to the terminal.
        with show_progress(console, auto_refresh=is_mojo) if is_mojo or not gates else nullcontext():
            return checker.check(
                self.exercise.target,
                gates,
                self.cases,
                on_first_case=print_first_results if gates and is_mojo else None,
            )

    def describe_run(self, dtype: object, seed: object) -> str:
        package = self.exercise.package
        uses_low_precision = any(
            case.in_16_bits for case in self.cases or self.exercise.puzzle.list_cases(None)
        )
        suffix = (
            f", then {LOW_PRECISION_DTYPE}"
            if uses_low_precision and "dtype" not in self.checker_options
            else ""
        )
        return f"ran {format_path(package.path)} (hash {package.digest[:8]}), {dtype}{suffix}, seed {seed}, on the virtual GPU"


def check_kernels(console: Console, options: Options) -> tuple[int, dict[str, object]]:
    """Run the kernels on every requested device; print the report, return the exit code and the JSON data."""
    from harness.check import runs

    with show_progress(console) as bars:
        on_compile, on_ready = make_compile_callbacks(console, bars)
        with runs.start_run(options, on_compile=on_compile, on_ready=on_ready) as run:
            report.write_report(console, run, verbose=options.verbose)
    if options.exercise.is_learner_file and not options.dims and options.dtype == "float32":
        progress = Progress.load()
        for gate, is_correct in runs.collect_gate_states(run).items():
            progress.record_result(f"{options.puzzle.name} {gate}", run.blanks[gate], is_correct)
        print_lines(console, describe_unsaved(progress))
    uses_max = any(device.kind != "virtual" for device in run.devices)
    if uses_max and not options.backward and not options.puzzle.has_separate_variants:
        from harness.bench import forward_times

        print_lines(console, forward_times.describe_times(run))
    return run.compute_exit_code(), report.make_json(run)


def print_counters(console: Console, request: "CountRequest", by_line: bool = False) -> int:
    """Print the counters of a case's kernels, with `by_line` also for each tensor and line."""
    from harness.check.profile import format_detail, format_table

    console.print("Recording the launches (a few seconds where they are not cached) ...")
    profiles, width = request.profile_variants(), get_page_width(console)
    lines = [*(format_detail(profiles, width) if by_line else []), *format_table(profiles, width)]
    console.print(*lines, sep="\n", soft_wrap=True, markup=False)
    return 0


def make_compile_callbacks(
    console: Console, bars: Bars
) -> tuple[Callable[[Target], None], Callable[[Target], None]]:
    """Return callbacks that show a line while kernels compile and, on a terminal, remove it afterwards."""
    tasks = {}

    def on_compile(target: Target) -> None:
        message = (COMPILING_PTX_MESSAGE if target.kind == "virtual" else COMPILING_GRAPH_MESSAGE).format(
            target.label
        )
        tasks[target.kind] = bars.add_task(message)
        if not console.is_terminal:
            console.print(message + " ...")

    def on_ready(target: Target) -> None:
        if target.kind in tasks:
            bars.remove_task(tasks.pop(target.kind))

    return on_compile, on_ready
