"""The records of measurements that are older than their kernels, listed at the end of `-m slow`."""

from book.measure import __main__ as runner
from book.measure import record


def old() -> list[str]:
    """A line for each record whose kernels are other ones now than those that were timed."""
    return [runner.state(name) for name in record.names() if record.read(name).changed]


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Lists them where the nightly tests are run."""
    if config.option.markexpr == "slow" and (lines := old()):
        terminalreporter.section("records of other kernels")
        terminalreporter.line(
            f"`python -m book.measure NAME` measures them anew on a GPU: {len(lines)} of {len(record.names())}"
        )
        for line in lines:
            terminalreporter.line(line)
