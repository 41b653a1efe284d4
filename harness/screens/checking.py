"""What the commands that check a puzzle do: have it judged, print the verdicts, write the data, remember what has passed."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness.check.checkers import judge_of
from harness.check.options import Options, package_of
from harness.check.results import exit_code
from harness.console import page_width, print_lines, shown, write_json
from harness.errors import BadUse, WorkbookError
from harness.learner.progress import Progress
from harness.learner.work import Work, package_blanks
from harness.screens import gate_report
from harness.screens.live import compile_callbacks, live
from harness.screens.work import is_solved, next_step
from harness.spec.puzzle import Case
from harness.spec.rungs import name_of
from harness.toolchain.disk import check_target

NATURAL = {"dtype": "float32", "blocks": "natural", "repeat": 1}
"""The options of kernels that a checker takes, as they are where nothing is asked for."""


def check(console: Console, options: Options) -> int:
    """What a puzzle's command line asks for: its files in Python, a picture, a profile, a gate, or a run of the kernels."""
    puzzle = options.puzzle
    if options.json not in (None, "-"):
        check_target("--json", options.json)
    in_python = options.gate is not None and puzzle.rung_of(options.gate).language == "Python"
    every = puzzle.every_rung and not (options.rung or options.gate is not None or options.dims)
    if not puzzle.variants and every:
        return check_rungs(console, options)
    if not puzzle.variants or options.rung not in (None, "mojo") or (options.rung is None and in_python):
        return check_rung(console, options)
    if options.show is not None:
        from harness.screens.show import show

        return show(console, options)
    if options.html:
        raise BadUse("--html: only --show writes a page")
    if options.profile:
        return count(console, options)
    if options.one_gate:
        cases = puzzle.cases(options.dims) if options.dims else None
        code, data = check_gates(console, options.work, options, cases)
        return written(code, data, options)
    alone = options.root not in ("problems", "solutions") or options.json
    before = check_rungs(console, options) if every and not alone else 0
    return check_kernels(console, options, before)


def check_gates(
    console: Console, work: Work, options: Options, cases: list[Case] | None = None
) -> tuple[int, dict]:
    """Checks a file's gates, or the one that is asked for, and prints the verdict of each; the exit code, and the data.

    What the learner's file passes in the puzzle's own cases is remembered.

    Args:
        console: Where it prints.
        work: The file.
        options: The gate, the seed, an op package instead of the file's, and how its kernels run.
        cases: None for the puzzle's.
    """
    puzzle, gates = work.puzzle, [options.gate] if options.gate else None
    package = None if options.root in ("problems", "solutions") else package_of(puzzle, Path(options.root))
    blanks = package_blanks(package, puzzle) if package else work.blanks()
    more = {name: value for name, there in NATURAL.items() if (value := getattr(options, name)) != there}
    checker = judge_of(work, at_terminal=True, seed=options.seed, **more)
    target = package.path if package else work.target
    if gates and work.in_package:
        ran = package or work.package
        about = f"ran {shown(ran.path)} (hash {ran.digest[:8]}), {options.dtype}, seed {options.seed}, on the virtual GPU"
        print_lines(console, [Text(f"   {about}", style="dim")])
    first = (lambda first: print_lines(console, gate_report.first_lines(first))) if gates else None
    # A gate in Python may be one that prints, or that stops in a debugger: it has the terminal to itself.
    with live(console, ticking=work.in_package) if work.in_package or not gates else nullcontext():
        results = checker.check(target, gates, cases, on_first=first if work.in_package else None)
    wanted = gates or work.rung.gates
    judged = {result.gate.id for result in results}
    if silent := [id for id in wanted if id not in judged]:
        raise WorkbookError(f"{shown(target)}: no verdict on {', '.join(silent)}")
    source = package.path / puzzle.source if package else work.path
    noted, counts = Progress.load(), work.root is None and package is None
    was_solved = counts and is_solved(work, noted)
    for result in results:
        if counts and cases is None and options.dtype == "float32":
            noted.note(work.key(result.gate.id), blanks[result.gate.id], result.state == "correct")
        print_lines(console, gate_report.verdict_lines(result, puzzle, source, blanks))
        if options.verbose:
            print_lines(console, gate_report.case_lines(result))
    if counts and (cases is not None or options.dtype != "float32"):
        words = "these sizes" if cases is not None else options.dtype
        print_lines(console, [Text(f"   (not noted as passed: only {words} were checked)", style="dim")])
    elif counts and (not was_solved or not gates) and (step := next_step(work, noted)):
        print_lines(console, [Text(f"   {step}", style="green")])
    code = exit_code(results, wanted)
    about = {"rung": work.rung.id, "file": str(source), "dtype": options.dtype, "seed": options.seed}
    return code, gate_report.gates_json(results, puzzle, **about, exit_code=code)


def written(code: int, data: dict, options: Options) -> int:
    """Writes the data where --json asks for them; returns the exit code."""
    if options.json:
        write_json(data, options.json)
    return code


def check_kernels(console: Console, options: Options, before: int = 0) -> int:
    """A whole run of the kernels on every device that is asked for; `before` is the exit code of the rungs before."""
    from harness.check import runs
    from harness.screens.report import Report, as_json

    with live(console) as bars:
        on_compile, on_ready = compile_callbacks(console, bars)
        run = runs.run(options, on_compile=on_compile, on_ready=on_ready)
    Report(console, verbose=options.verbose).run(run)
    if options.root == "problems" and not options.dims and options.dtype == "float32":
        noted = Progress.load()
        for gate, right in runs.judged_gates(run).items():
            noted.note(f"{options.puzzle.name} {gate}", run.blanks[gate], right)
    if not options.backward and not options.puzzle.separate:
        from harness.bench import forward_times

        print_lines(console, forward_times.describe(run))
    code = next(code for code in (1, 3, 6, 0) if code in (before, run.exit_code()))
    return written(code, as_json(run), options)


def check_rungs(console: Console, options: Options) -> int:
    """A puzzle's rungs in Python, one after the other; returns their exit code."""
    codes, data = [0], {}
    for rung in options.puzzle.rungs:
        if rung.language == "Python":
            console.print(Text(f"{rung.words}:", style="bold"), soft_wrap=True)
            code, data[rung.id] = check_gates(
                console, replace(options, rung=rung.id).work, options, chosen_cases(options)
            )
            codes.append(code)
            console.print()
    code = next(code for code in (1, 3, 0) if code in codes)
    return written(code, {"puzzle": options.puzzle.name, "exit_code": code, "rungs": data}, options)


def check_rung(console: Console, options: Options) -> int:
    """The gates of a rung in Python, or one of them."""
    work, gate = options.work, options.gate
    if gate is not None and gate not in work.rung.gates:
        whose, there = f"the {name_of(work.rung.id)} rung", ", ".join(work.rung.gates)
        raise BadUse(f"--gate {gate or repr('')}: {whose} has no gate {gate!r}; there is {there}")
    return written(*check_gates(console, work, options, chosen_cases(options)), options)


def chosen_cases(options: Options) -> list[Case] | None:
    """The cases of --dims and --ranks; None, for the puzzle's own, without either."""
    if not options.dims and not options.ranks:
        return None
    ranks, cases = options.ranks, options.puzzle.cases(options.dims)
    return [replace(case, world_size=ranks) if ranks and case.world_size > 1 else case for case in cases]


def count(console: Console, options: Options) -> int:
    """--profile: the kernels of the first case on the virtual GPU, counted."""
    from harness.check import profile

    console.print("Recording the launches (a few seconds where they are not cached) ...")
    lines = profile.table(profile.profile(options), page_width(console))
    console.print(*lines, sep="\n", soft_wrap=True, markup=False)
    return 0
