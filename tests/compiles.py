"""What a run of the tests makes in the caches of the workbook, by all of its processes: nothing in one cache twice.

Every entry's name is made from all that goes into it, so that a second one of a name is the same compile again: then the run
fails. What the tests' own caches (in temporary folders) repeat, and graphs that were compiled in two units, is counted at the
end. A test that cuts entries on purpose does so in a cache of its own.
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from harness.toolchain.cache import LOG, cache_folder

FILE = pytest.StashKey[Path]()


@pytest.hookimpl(trylast=True)  # the folder for temporary files must be there
def pytest_configure(config):
    """Names the log, for the workers and for every process that a test starts."""
    if not hasattr(config, "workerinput"):
        config.stash[FILE] = config._tmp_path_factory.mktemp("compiles") / "made"
        os.environ[LOG] = str(config.stash[FILE])


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    file = session.config.stash.get(FILE, None)
    if file is not None and repeated(made(file), cache_folder()) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    file = config.stash.get(FILE, None)
    entries = made(file) if file is not None else []
    if not entries:
        return
    for what, path in repeated(entries, cache_folder()):
        terminalreporter.write_line(f"made twice: {what}, {path}", red=True)
    terminalreporter.write_line(summary(entries, cache_folder()))


def made(file: Path) -> list[tuple[str, Path]]:
    """The entries of a log, in order: what each is, and its path."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [(what, Path(path)) for what, _, path in (line.partition("\t") for line in lines)]


def repeated(entries: list[tuple[str, Path]], root: Path) -> list[tuple[str, Path]]:
    """The entries of a cache that were made more than once; a note of the unit in which a graph is found is none."""
    counts = Counter(entries)
    return [
        (what, path)
        for (what, path), times in counts.items()
        if times > 1 and path.is_relative_to(root) and path.suffix != ".unit"
    ]


def summary(entries: list[tuple[str, Path]], root: Path) -> str:
    """One line: how much was made, and what of it in vain."""
    units = Counter(path for _, path in entries if path.suffix == ".unit" and path.is_relative_to(root))
    names = {path.name for _, path in entries if path.is_relative_to(root)}
    elsewhere = Counter(
        what for what, path in entries if path.name in names and not path.is_relative_to(root)
    )
    again = ", ".join(f"{what} {count}" for what, count in elsewhere.most_common())
    return (
        f"made in caches: {len(entries)}; graphs compiled in more than one unit: {sum(n > 1 for n in units.values())}; "
        f"in another cache again: {again or 'nothing'}"
    )
