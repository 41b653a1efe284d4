"""A compiler's error as a learner needs it: in whose blank it is, and the slip in the text where the compiler names no line."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.check.source_faults import faults
from harness.errors import CompileFailed
from harness.learner.work import package_blanks
from harness.spec.puzzle import Puzzle
from harness.toolchain.packages import OpPackage

ERROR = re.compile(r"^(.+?):(\d+):\d+: error: ", re.MULTILINE)


@contextmanager
def said_of_blanks(package: OpPackage, puzzle: Puzzle, wanted: Collection[str]) -> Iterator[None]:
    """Adds to a CompileFailed of the block what the blanks of the package tell; `wanted` are the gates that were asked for."""
    try:
        yield
    except CompileFailed as error:
        lines = list(what_blanks_tell(error, package, puzzle, wanted))
        if not lines:
            raise
        raise CompileFailed("\n".join([str(error), *lines]), error.details) from error


def what_blanks_tell(
    error: CompileFailed, package: OpPackage, puzzle: Puzzle, wanted: Collection[str]
) -> Iterator[str]:
    """Whose blank the first error is in, where others were asked for too; without a line in any, slips in the blanks."""
    source = (package.path / puzzle.source).resolve()
    blanks = package_blanks(package, puzzle)
    placed = ERROR.search(error.details)
    line = int(placed[2]) if placed and Path(placed[1]).resolve() == source else 0
    for id, blank in blanks.items():
        if blank.line <= line < blank.line + len(blank.body):
            if list(wanted) != [id]:
                yield f"   this line is in {id}'s blank: as long as it does not compile, no gate of the file can be judged"
            return
    for blank in blanks.values():
        for slip in faults(source, blank):
            yield f"   {source}:{slip.line}: {slip.words}"
