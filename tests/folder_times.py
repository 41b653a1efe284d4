"""Where a test run's time goes: wall and processor seconds of each folder of tests/, at the end of the run, and in one line
the folders that take most.

Processor seconds are those of the test process and of every process that it started and that has ended. A puzzle's
folder may take at most three minutes of them with empty caches.
"""

import resource
from collections import defaultdict

import pytest

SPENT = pytest.StashKey[float]()


def spent() -> float:
    """Processor seconds so far, of this process and its children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.config.stash[SPENT] = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Notes in each report what its phase, setup, call or teardown, has cost."""
    report = yield
    before, item.config.stash[SPENT] = item.config.stash[SPENT], spent()
    report.processor_seconds = item.config.stash[SPENT] - before
    return report


def folder_of(nodeid: str) -> str:
    """tests/p22/test_fast.py::test_x -> tests/p22"""
    return nodeid.split("::")[0].rpartition("/")[0]


def pytest_terminal_summary(terminalreporter):
    wall, processor, tests = defaultdict(float), defaultdict(float), defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "processor_seconds"):
                folder = folder_of(report.nodeid)
                wall[folder] += report.duration
                processor[folder] += report.processor_seconds
                tests[folder].add(report.nodeid)
    if len(tests) < 2:
        return
    write = terminalreporter.write_line
    terminalreporter.section("time by folder")
    write(f"{'':24}{'tests':>6}{'seconds':>10}{'processor':>12}")
    for folder in sorted(tests, key=lambda name: -processor[name]):
        write(f"{folder:24}{len(tests[folder]):6}{wall[folder]:10.1f}{processor[folder]:12.1f}")
    total = sum(map(len, tests.values()))
    write(f"{'all':24}{total:6}{sum(wall.values()):10.1f}{sum(processor.values()):12.1f}")
    most = sorted(tests, key=lambda name: -processor[name])[:8]
    parts = ", ".join(f"{name.removeprefix('tests/')} {processor[name]:.0f}" for name in most)
    write(f"{total} tests, {sum(processor.values()):.0f} s of processor time: {parts}")
