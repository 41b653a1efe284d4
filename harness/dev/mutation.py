"""Implement `workbook dev check pNN --mutants`: check all mutants of a solution, and list those that pass.

A mutant that passes because it is equivalent needs an entry in `solutions/pNN/survivors.toml`:

    [["fold.exact"]]          # rung and gate
    was = "if a < b:"
    now = "if a <= b:"
    why = "where a is b, both branches give 0"
"""

import os
import random
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.check.checker import RungChecker, create_checker
from harness.check.subprocess_checker import TIME_LIMIT_VARIABLE, SubprocessChecker
from harness.dev.mutants import Mutant, list_mutants
from harness.devices.recorder import RecordRequest, record_many
from harness.errors import CompileFailed, DamagedFile, UsageError, WorkbookError
from harness.learner.exercise import Exercise
from harness.spec.puzzle import Puzzle
from harness.toolchain import roots
from harness.vgpu.checks.findings import format_count

BATCH_SIZE = 12
"""Number of kernel mutants per compiler run."""
NUM_FIRST_CASES = 3
"""Number of cases in which a kernel's mutant is checked first; most mutants fail in these."""
EXTRA_TIMEOUT_S = 10.0
"""Time limit of a mutant's gate, in addition to the time for the whole solution."""
Key = tuple[str, str, str, str]


@dataclass
class MutationSummary:
    """Results of mutants: numbers of those rejected, explained in survivors.toml, or unchecked (for example
    because they do not compile), and the unexplained survivors."""

    num_rejected: int = 0
    num_explained: int = 0
    num_unchecked: int = 0
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def num_checked(self) -> int:
        return self.num_rejected + self.num_explained + len(self.survivors)

    def __str__(self) -> str:
        percent = 100 * self.num_rejected / max(self.num_checked, 1)
        percentage = f"; {percent:.1f} % of those checked rejected" if self.num_checked else ""
        numbers = (
            f"{self.num_rejected} rejected, {self.num_explained} explained, {len(self.survivors)} survived"
        )
        total = format_count(self.num_checked + self.num_unchecked, "mutant")
        return f"{total}: {numbers}, {self.num_unchecked} could not be checked{percentage}"


def list_exercises(puzzle: Puzzle, rungs: Sequence[str] | None = None) -> list[Exercise]:
    """Return the solutions of all rungs, or of the named ones. Raises UsageError for an unknown name."""
    selected = [puzzle.find_rung(id) for id in rungs] if rungs else puzzle.rungs
    return [Exercise(puzzle, rung, roots.get_solutions()) for rung in selected]


def run(exercise: Exercise, *, seed: int = 0, max_mutants: int | None = None) -> MutationSummary:
    """Check a rung's mutants, or a random sample of `max_mutants`, and print progress to standard error.

    Raises UsageError if the solution itself does not pass, DamagedFile if survivors.toml cannot be read.
    """
    summary, explanations = MutationSummary(), load_explanations(exercise.puzzle.name)
    selected = sample_mutants(exercise, seed=seed, max_mutants=max_mutants)
    unexplained = [m for m in selected if make_key(exercise, m) not in explanations]
    summary.num_explained = len(selected) - len(unexplained)
    for count, (mutant, passes) in enumerate(check_mutants(exercise, unexplained), 1):
        progress = f"{exercise.puzzle.name} {exercise.rung.id}: {count} of {len(unexplained)} mutants checked"
        print_progress(progress, count == len(unexplained))
        if passes:
            summary.survivors.append(mutant)
        elif passes is None:
            summary.num_unchecked += 1
        else:
            summary.num_rejected += 1
    return summary


def sample_mutants(exercise: Exercise, *, seed: int, max_mutants: int | None) -> list[Mutant]:
    mutants = list_mutants(exercise)
    if max_mutants is None or max_mutants >= len(mutants):
        return mutants
    return [mutants[k] for k in sorted(random.Random(seed).sample(range(len(mutants)), max_mutants))]


def print_progress(message: str, is_last: bool) -> None:
    """Update one line of a terminal; elsewhere, print only the last message."""
    terminal = sys.stderr.isatty()
    if terminal or is_last:
        print(
            f"\r{message}" if terminal else message, end="\n" if is_last else "", file=sys.stderr, flush=True
        )


# ---- Known survivors ---------------------------------------------------------------------------------------


def make_key(exercise: Exercise, mutant: Mutant) -> Key:
    return exercise.rung.id, mutant.gate, mutant.old, mutant.new


def load_explanations(puzzle: str) -> dict[Key, str]:
    """Load the reasons why mutants pass from survivors.toml. Raises DamagedFile if an entry is incomplete."""
    path = roots.get_solutions() / puzzle / "survivors.toml"
    if not path.is_file():
        return {}
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise DamagedFile(f"{path}: {error}") from error
    explanations = {}
    for name, mutants in entries.items():
        rung, _, gate = name.partition(".")
        for entry in mutants if isinstance(mutants, list) else [{}]:
            if entry.keys() != {"was", "now", "why"} or not gate:
                raise DamagedFile(f'{path}: an entry of {name} needs was, now and why, under [["rung.gate"]]')
            explanations[rung, gate, entry["was"], entry["now"]] = entry["why"]
    return explanations


def find_outdated(puzzle: Puzzle) -> list[str]:
    """Return a line for each entry about a mutant that no longer exists. Raises DamagedFile."""
    explanations = load_explanations(puzzle.name)
    exercises = list_exercises(puzzle) if explanations else []
    existing = {make_key(exercise, mutant) for exercise in exercises for mutant in list_mutants(exercise)}
    return [
        f"solutions/{puzzle.name}/survivors.toml: {rung}.{gate} has no mutant `{old}` -> `{new}`"
        for rung, gate, old, new in explanations
        if (rung, gate, old, new) not in existing
    ]


# ---- Check -------------------------------------------------------------------------------------------------


def check_mutants(exercise: Exercise, unexplained: Sequence[Mutant]) -> Iterator[tuple[Mutant, bool | None]]:
    """Yield whether each mutant passes its own gate, checked first, and all others; None if it is unchecked.

    Raises UsageError if the solution itself does not pass.
    """
    checker = create_checker(exercise)
    started = time.monotonic()
    if unexplained and not check_file(checker, exercise, exercise.target):
        raise UsageError(f"{exercise.solution} is not correct, so its mutants cannot be checked")
    old_limit = os.environ.get(TIME_LIMIT_VARIABLE)
    os.environ[TIME_LIMIT_VARIABLE] = old_limit or f"{EXTRA_TIMEOUT_S + time.monotonic() - started:.0f}"
    try:
        for start in range(0, len(unexplained), BATCH_SIZE):
            batch = unexplained[start : start + BATCH_SIZE]
            compilable = set(find_compilable(exercise, batch)) if exercise.is_mojo else set(batch)
            for mutant in batch:
                path = mutant.make_wrong_kernel(exercise).build_target()
                yield (
                    mutant,
                    check_file(checker, exercise, path, mutant.gate) if mutant in compilable else None,
                )
    finally:
        os.environ.pop(TIME_LIMIT_VARIABLE)
        if old_limit:
            os.environ[TIME_LIMIT_VARIABLE] = old_limit
        if isinstance(checker, SubprocessChecker):
            checker.close()


def check_file(checker: RungChecker, exercise: Exercise, path: Path, gate: str | None = None) -> bool | None:
    """Check whether every gate of a file is correct, `gate` first; None if it cannot be checked."""
    first_cases = exercise.puzzle.list_cases(None)[:NUM_FIRST_CASES] if exercise.is_mojo else None
    first = [([gate], first_cases)] if gate and (first_cases or len(exercise.rung.gates) > 1) else []
    try:
        return all(
            result.state == "correct"
            for gates, cases in (*first, (None, None))
            for result in checker.check(path, gates, cases)
        )
    except WorkbookError:
        return None


def find_compilable(exercise: Exercise, mutants: Sequence[Mutant]) -> Iterable[Mutant]:
    """Record mutants' launches, which caches them, and return the mutants that compile."""
    cases = exercise.puzzle.list_cases(None)
    sizes = {"float32": cases, "bfloat16": [case for case in cases if case.in_16_bits]}
    orders = [
        RecordRequest(
            mutant.make_wrong_kernel(exercise).build_package(),
            exercise.puzzle.name,
            tuple(dict.fromkeys(case.dims for case in dtype_cases)),
            (exercise.find_gate(mutant.gate).variant,),
            small_grid=True,
            dtype=dtype,
        )
        for mutant in mutants
        for dtype, dtype_cases in sizes.items()
        if dtype_cases
    ]
    try:
        record_many(orders)
    except CompileFailed as error:
        packages = {mutant: mutant.make_wrong_kernel(exercise).build_package() for mutant in mutants}
        failing = [mutant for mutant in mutants if str(packages[mutant].path) in error.details]
        if 0 < len(failing) < len(mutants):
            return find_compilable(exercise, [mutant for mutant in mutants if mutant not in failing])
        half = len(mutants) // 2
        return (
            [*find_compilable(exercise, mutants[:half]), *find_compilable(exercise, mutants[half:])]
            if half
            else []
        )
    return mutants
