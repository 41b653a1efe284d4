"""`workbook dev check pNN --mutants`: check every mutant of a solution as a learner's file, list survivors.

A mutant that passes because it computes the same values has an entry in `solutions/pNN/survivors.toml`:

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
from harness.devices.recorder import Order, record_many
from harness.errors import CompileFailed, DamagedFile, UsageError, WorkbookError
from harness.learner.work import Work
from harness.spec.puzzle import Puzzle
from harness.toolchain import roots
from harness.vgpu.checks.findings import format_count

TOGETHER = 12
"""Number of kernel mutants recorded per compiler run."""
FEW = 3
"""Number of cases on which a kernel's mutant is checked first, since most mutants fail them already."""
PATIENCE = 10.0
"""Seconds allowed for a mutant's gate in addition to the time of the whole solution."""
Key = tuple[str, str, str, str]


@dataclass
class Tally:
    """Numbers of mutants that were rejected, passed with an explanation, or could not be checked (for example
    because they do not compile), and the mutants that passed without an explanation."""

    rejected: int = 0
    explained: int = 0
    unchecked: int = 0
    survived: list[Mutant] = field(default_factory=list)

    @property
    def checked(self) -> int:
        return self.rejected + self.explained + len(self.survived)

    def __str__(self) -> str:
        percent = 100 * self.rejected / max(self.checked, 1)
        share = f"; {percent:.1f} % of those checked rejected" if self.checked else ""
        numbers = f"{self.rejected} rejected, {self.explained} explained, {len(self.survived)} survived"
        total = format_count(self.checked + self.unchecked, "mutant")
        return f"{total}: {numbers}, {self.unchecked} could not be checked{share}"


def list_works(puzzle: Puzzle, rungs: Sequence[str] | None = None) -> list[Work]:
    """Return the solution of each rung, or only of the named rungs. Raises UsageError for an unknown name."""
    chosen = [puzzle.find_rung(id) for id in rungs] if rungs else puzzle.rungs
    return [Work(puzzle, rung, roots.solutions()) for rung in chosen]


def run(work: Work, *, seed: int = 0, most: int | None = None) -> Tally:
    """Check a rung's mutants, all or a random sample of `most`, and report progress on standard error.

    Raises UsageError if the solution itself does not pass, DamagedFile if survivors.toml cannot be read.
    """
    tally, known = Tally(), load_explanations(work.puzzle.name)
    chosen = draw_mutants(work, seed=seed, most=most)
    requested = [m for m in chosen if make_key(work, m) not in known]
    tally.explained = len(chosen) - len(requested)
    for count, (mutant, passes) in enumerate(check_mutants(work, requested), 1):
        progress = f"{work.puzzle.name} {work.rung.id}: {count} of {len(requested)} mutants checked"
        print_progress(progress, count == len(requested))
        if passes:
            tally.survived.append(mutant)
        elif passes is None:
            tally.unchecked += 1
        else:
            tally.rejected += 1
    return tally


def draw_mutants(work: Work, *, seed: int, most: int | None) -> list[Mutant]:
    listed = list_mutants(work)
    if most is None or most >= len(listed):
        return listed
    return [listed[k] for k in sorted(random.Random(seed).sample(range(len(listed)), most))]


def print_progress(words: str, last: bool) -> None:
    """Print progress on one line of a terminal; elsewhere print only the last message."""
    terminal = sys.stderr.isatty()
    if terminal or last:
        print(f"\r{words}" if terminal else words, end="\n" if last else "", file=sys.stderr, flush=True)


# ---- Known survivors ---------------------------------------------------------------------------------------


def make_key(work: Work, mutant: Mutant) -> Key:
    return work.rung.id, mutant.gate, mutant.was, mutant.now


def load_explanations(puzzle: str) -> dict[Key, str]:
    """Return mutant -> why it passes, from survivors.toml. Raises DamagedFile if an entry is incomplete."""
    path = roots.solutions() / puzzle / "survivors.toml"
    if not path.is_file():
        return {}
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise DamagedFile(f"{path}: {error}") from error
    known = {}
    for name, listed in entries.items():
        rung, _, gate = name.partition(".")
        for entry in listed if isinstance(listed, list) else [{}]:
            if entry.keys() != {"was", "now", "why"} or not gate:
                raise DamagedFile(f'{path}: an entry of {name} needs was, now and why, under [["rung.gate"]]')
            known[rung, gate, entry["was"], entry["now"]] = entry["why"]
    return known


def find_outdated(puzzle: Puzzle) -> list[str]:
    """Return a line for each explanation of a mutant that no longer exists. Raises DamagedFile."""
    known = load_explanations(puzzle.name)
    works = list_works(puzzle) if known else []
    existing = {make_key(work, mutant) for work in works for mutant in list_mutants(work)}
    return [
        f"solutions/{puzzle.name}/survivors.toml: {rung}.{gate} has no mutant `{was}` -> `{now}`"
        for rung, gate, was, now in known
        if (rung, gate, was, now) not in existing
    ]


# ---- Check -------------------------------------------------------------------------------------------------


def check_mutants(work: Work, requested: Sequence[Mutant]) -> Iterator[tuple[Mutant, bool | None]]:
    """Check each mutant, its own gate first, then all; yield whether it passes, None if it cannot be checked.

    Raises UsageError if the solution itself does not pass.
    """
    checker = create_checker(work)
    began = time.monotonic()
    if requested and not check_file(checker, work, work.target):
        raise UsageError(f"{work.solution} is not correct, so its mutants cannot be checked")
    old_limit = os.environ.get(TIME_LIMIT_VARIABLE)
    os.environ[TIME_LIMIT_VARIABLE] = old_limit or f"{PATIENCE + time.monotonic() - began:.0f}"
    try:
        for start in range(0, len(requested), TOGETHER):
            batch = requested[start : start + TOGETHER]
            compiling = set(find_compiling(work, batch)) if work.in_package else set(batch)
            for mutant in batch:
                path = mutant.make_wrong_kernel(work).build_target()
                yield mutant, check_file(checker, work, path, mutant.gate) if mutant in compiling else None
    finally:
        os.environ.pop(TIME_LIMIT_VARIABLE)
        if old_limit:
            os.environ[TIME_LIMIT_VARIABLE] = old_limit
        if isinstance(checker, SubprocessChecker):
            checker.close()


def check_file(checker: RungChecker, work: Work, path: Path, gate: str | None = None) -> bool | None:
    """Check whether every gate of a file is correct, `gate` first; None if it cannot be checked."""
    first_cases = work.puzzle.cases(None)[:FEW] if work.in_package else None
    first = [([gate], first_cases)] if gate and (first_cases or len(work.rung.gates) > 1) else []
    try:
        return all(
            result.state == "correct"
            for gates, cases in (*first, (None, None))
            for result in checker.check(path, gates, cases)
        )
    except WorkbookError:
        return None


def find_compiling(work: Work, some: Sequence[Mutant]) -> Iterable[Mutant]:
    """Return the mutants that compile, and cache their recordings."""
    cases = work.puzzle.cases(None)
    sizes = {"float32": cases, "bfloat16": [case for case in cases if case.in_16_bits]}
    orders = [
        Order(
            mutant.make_wrong_kernel(work).build_package(),
            work.puzzle.name,
            tuple(dict.fromkeys(case.dims for case in of)),
            (work.find_gate(mutant.gate).variant,),
            small_grid=True,
            dtype=dtype,
        )
        for mutant in some
        for dtype, of in sizes.items()
        if of
    ]
    try:
        record_many(orders)
    except CompileFailed as error:
        packages = {mutant: mutant.make_wrong_kernel(work).build_package() for mutant in some}
        failing = [mutant for mutant in some if str(packages[mutant].path) in error.details]
        if 0 < len(failing) < len(some):
            return find_compiling(work, [each for each in some if each not in failing])
        half = len(some) // 2
        return [*find_compiling(work, some[:half]), *find_compiling(work, some[half:])] if half else []
    return some
