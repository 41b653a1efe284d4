"""`harness dev check pNN --mutants`: check every mutant of a solution as a learner's file, and list those
that pass.

A mutant that passes because it computes the same has an entry in `solutions/pNN/survivors.toml`:

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
from harness.check.subprocess_checker import SECONDS, SubprocessChecker
from harness.dev.mutants import Mutant, mutants
from harness.devices.recorder import Order, record_many
from harness.errors import BadUse, CompileFailed, DamagedFile, WorkbookError
from harness.learner.work import Work
from harness.spec.puzzle import Puzzle
from harness.toolchain import roots
from harness.vgpu.checks.findings import plural

TOGETHER = 12
"""Mutants of kernels that are recorded by one run of the compiler."""
FEW = 3
"""Cases that the mutant of a kernel is tried on before the rest: most are wrong at once."""
PATIENCE = 10.0
"""Seconds that a gate of a mutant may take, beyond those that the whole solution does."""
Key = tuple[str, str, str, str]


@dataclass
class Tally:
    """Outcome of mutants: how many were rejected, passed with an explanation, or have no result, such as
    those that do not compile; and which passed without an explanation."""

    rejected: int = 0
    explained: int = 0
    unjudged: int = 0
    survived: list[Mutant] = field(default_factory=list)

    @property
    def checked(self) -> int:
        """Number of mutants that have a result."""
        return self.rejected + self.explained + len(self.survived)

    def __str__(self) -> str:
        share = (
            f"; {100 * self.rejected / self.checked:.1f} % of those checked rejected" if self.checked else ""
        )
        numbers = f"{self.rejected} rejected, {self.explained} explained, {len(self.survived)} survived"
        total = plural(self.checked + self.unjudged, "mutant")
        return f"{total}: {numbers}, {self.unjudged} could not be checked{share}"


def works(puzzle: Puzzle, rungs: Sequence[str] | None = None) -> list[Work]:
    """Return the solution of each rung, or of the rungs of some names. Raises BadUse for a name that no rung has."""
    chosen = [puzzle.rung(id) for id in rungs] if rungs else puzzle.rungs
    return [Work(puzzle, rung, roots.solutions()) for rung in chosen]


def run(work: Work, *, seed: int = 0, most: int | None = None) -> Tally:
    """Check the mutants of a rung, all or `most` of them, drawn by a seed; report progress on standard error.

    Raises BadUse if the solution itself does not pass, DamagedFile if survivors.toml cannot be read.
    """
    tally, known = Tally(), explanations(work.puzzle.name)
    chosen = drawn(work, seed=seed, most=most)
    requested = [each for each in chosen if key_of(work, each) not in known]
    tally.explained = len(chosen) - len(requested)
    for count, (mutant, passes) in enumerate(check_mutants(work, requested), 1):
        tell(
            f"{work.puzzle.name} {work.rung.id}: {count} of {len(requested)} mutants checked",
            count == len(requested),
        )
        if passes:
            tally.survived.append(mutant)
        elif passes is None:
            tally.unjudged += 1
        else:
            tally.rejected += 1
    return tally


def drawn(work: Work, *, seed: int, most: int | None) -> list[Mutant]:
    """Return the mutants of a rung in the order of the file, all or `most` of them."""
    listed = mutants(work)
    if most is None or most >= len(listed):
        return listed
    return [listed[k] for k in sorted(random.Random(seed).sample(range(len(listed)), most))]


def tell(words: str, last: bool) -> None:
    """Print the progress on one line of a terminal; elsewhere only the last is written."""
    terminal = sys.stderr.isatty()
    if terminal or last:
        print(f"\r{words}" if terminal else words, end="\n" if last else "", file=sys.stderr, flush=True)


# ---- Known survivors ----------------------------------------------------------------------------------------


def key_of(work: Work, mutant: Mutant) -> Key:
    """Return the identity of a mutant: rung, gate, the old line and the new one."""
    return work.rung.id, mutant.gate, mutant.was, mutant.now


def explanations(puzzle: str) -> dict[Key, str]:
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
    """Return a line for each explanation of a mutant that no longer exists. Raises what `explanations` does."""
    known = explanations(puzzle.name)
    there = {key_of(work, mutant) for work in works(puzzle) for mutant in mutants(work)} if known else set()
    return [
        f"solutions/{puzzle.name}/survivors.toml: {rung}.{gate} has no mutant `{was}` -> `{now}`"
        for rung, gate, was, now in known
        if (rung, gate, was, now) not in there
    ]


# ---- Check --------------------------------------------------------------------------------------------------


def check_mutants(work: Work, requested: Sequence[Mutant]) -> Iterator[tuple[Mutant, bool | None]]:
    """Check each mutant, its own gate first, then every gate of the file; yield whether it passes, None if there is no result.

    Raises BadUse, as `run` says.
    """
    checker = create_checker(work)
    began = time.monotonic()
    if requested and not passes(checker, work, work.target):
        raise BadUse(f"{work.solution} is not correct, so its mutants cannot be checked")
    before = os.environ.get(SECONDS)
    os.environ[SECONDS] = before or f"{PATIENCE + time.monotonic() - began:.0f}"
    try:
        for start in range(0, len(requested), TOGETHER):
            batch = requested[start : start + TOGETHER]
            left = set(that_compile(work, batch)) if work.in_package else set(batch)
            for mutant in batch:
                path = mutant.as_wrong(work).target()
                yield mutant, passes(checker, work, path, mutant.gate) if mutant in left else None
    finally:
        os.environ.pop(SECONDS)
        if before:
            os.environ[SECONDS] = before
        if isinstance(checker, SubprocessChecker):
            checker.close()


def passes(checker: RungChecker, work: Work, path: Path, gate: str | None = None) -> bool | None:
    """Check whether every gate of a file is correct, `gate` first and, for a kernel, in few cases; None if
    the file cannot be checked."""
    few = work.puzzle.cases(None)[:FEW] if work.in_package else None
    first = [([gate], few)] if gate and (few or len(work.rung.gates) > 1) else []
    try:
        return all(
            result.state == "correct"
            for gates, cases in (*first, (None, None))
            for result in checker.check(path, gates, cases)
        )
    except WorkbookError:
        return None


def that_compile(work: Work, some: Sequence[Mutant]) -> Iterable[Mutant]:
    """Return the mutants that compile; their recordings are then cached. If the compiler names none, halves
    are tried."""
    cases = work.puzzle.cases(None)
    sizes = {"float32": cases, "bfloat16": [case for case in cases if case.in_16_bits]}
    orders = [
        Order(
            mutant.as_wrong(work).package(),
            tuple(dict.fromkeys(case.dims for case in of)),
            (work.gate(mutant.gate).variant,),
            small_grid=True,
            dtype=dtype,
        )
        for mutant in some
        for dtype, of in sizes.items()
        if of
    ]
    try:
        record_many(orders, work.puzzle.name)
    except CompileFailed as error:
        named = [each for each in some if str(each.as_wrong(work).package().path) in error.details]
        if 0 < len(named) < len(some):
            return that_compile(work, [each for each in some if each not in named])
        half = len(some) // 2
        return [*that_compile(work, some[:half]), *that_compile(work, some[half:])] if half else []
    return some
