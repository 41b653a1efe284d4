"""What the commands that check a puzzle do: have it judged, print the verdicts, write the data, remember what has passed."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from harness.check.options import NARROW, Options
from harness.check.results import exit_code
from harness.check.warm import WarmFirst, start
from harness.console import page_width, print_lines, shown, write_json
from harness.errors import WorkbookError
from harness.learner.progress import Progress
from harness.screens import report
from harness.screens.live import compile_callbacks, live
from harness.screens.work import is_solved, next_step

if TYPE_CHECKING:
    from harness.check.gates import RungChecker


def check(console: Console, options: Options) -> int:
    """What a puzzle's command line asks for: each file that is meant is judged, and the kernels gate by gate or as a whole."""
    files, codes, data = options.files, list[int](), dict[str, dict[str, object]]()
    for each in files:
        rung = each.work.rung
        headed = len(files) > 1 and not each.work.in_package
        if headed:
            console.print(Text(f"{rung.words}:", style="bold"), soft_wrap=True)
        code, data[rung.id] = (check_gates if each.by_gate else check_kernels)(console, each)
        codes.append(code)
        if headed:
            console.print()
    code = next(code for code in (1, 3, 6, 0) if code in codes)
    if options.json:
        (first, *others) = data.values()
        every = {"puzzle": options.puzzle.name, "exit_code": code, "rungs": data}
        write_json(every if others else first, options.json)
    return code


def check_gates(console: Console, options: Options) -> tuple[int, dict[str, object]]:
    """Checks a file's gates, or the one that is asked for, and prints the verdict of each; the exit code, and the data.

    What the learner's file passes in the puzzle's own cases is remembered.
    """
    work, puzzle, cases = options.work, options.puzzle, options.cases
    rung, gates = work.rung, [options.gate] if options.gate else None
    blanks = work.blanks()

    def checker_made() -> "RungChecker":
        from harness.check.gates import checker_of  # not needed where a warm process answers

        return checker_of(work, at_terminal=True, **options.of_checker)

    checker = WarmFirst(checker_made)
    target = work.target
    if gates and work.in_package:
        ran = work.package
        narrow = "dtype" not in options.of_checker and any(
            case.in_16_bits for case in cases or puzzle.cases(None)
        )
        dtypes = f"{options.dtype}, then {NARROW}" if narrow else options.dtype
        about = f"ran {shown(ran.path)} (hash {ran.digest[:8]}), {dtypes}, seed {options.seed}, on the virtual GPU"
        print_lines(console, [Text(f"   {about}", style="dim")])
    first = (lambda first: print_lines(console, report.first_lines(first))) if gates else None
    # A gate in Python may be one that prints, or that stops in a debugger: it has the terminal to itself.
    with live(console, ticking=work.in_package) if work.in_package or not gates else nullcontext():
        results = checker.check(target, gates, cases, on_first=first if work.in_package else None)
    wanted = gates or rung.gates
    judged = {result.gate.id for result in results}
    if silent := [id for id in wanted if id not in judged]:
        raise WorkbookError(f"{shown(target)}: no verdict on {', '.join(silent)}")
    noted, counts = Progress.load(), options.root == "problems"
    was_solved = counts and is_solved(work, noted)
    for result in results:
        if counts and cases is None and options.dtype == "float32":
            noted.note(work.key(result.gate.id), blanks[result.gate.id], result.state == "correct")
        print_lines(console, report.verdict_lines(result, puzzle, work.path, blanks))
        if options.verbose:
            print_lines(console, report.case_lines(result))
    if counts and (cases is not None or options.dtype != "float32"):
        words = "these sizes" if cases is not None else options.dtype
        print_lines(console, [Text(f"   (not noted as passed: only {words} were checked)", style="dim")])
    elif counts and (not was_solved or not gates) and (step := next_step(work, noted)):
        print_lines(console, [Text(f"   {step}", style="green")])
    start()
    code = exit_code(results, wanted)
    about = {"rung": rung.id, "file": str(work.path), "dtype": options.dtype, "seed": options.seed}
    return code, report.gates_json(results, puzzle, **about, exit_code=code)


def check_kernels(console: Console, options: Options) -> tuple[int, dict[str, object]]:
    """A whole run of the kernels on every device that is asked for, and its report; the exit code, and the data."""
    from harness.check import runs

    with live(console) as bars:
        on_compile, on_ready = compile_callbacks(console, bars)
        run = runs.run(options, on_compile=on_compile, on_ready=on_ready)
    report.write(console, run, verbose=options.verbose)
    if options.root == "problems" and not options.dims and options.dtype == "float32":
        noted = Progress.load()
        for gate, right in runs.judged_gates(run).items():
            noted.note(f"{options.puzzle.name} {gate}", run.blanks[gate], right)
    if not options.backward and not options.puzzle.separate:
        from harness.bench import forward_times

        print_lines(console, forward_times.describe(run))
    return run.exit_code(), report.as_json(run)


def count(console: Console, options: Options) -> int:
    """--profile: the kernels of the first case on the virtual GPU, counted."""
    from harness.check import profile

    console.print("Recording the launches (a few seconds where they are not cached) ...")
    lines = profile.table(profile.profile(options), page_width(console))
    console.print(*lines, sep="\n", soft_wrap=True, markup=False)
    return 0
