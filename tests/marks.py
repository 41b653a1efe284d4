"""Marks of tests that are slow by rule, and groups of tests that share a process: a file's tests, the files that share what takes long to compile, and
the wrong solutions of a puzzle.

Slow by rule is what runs the same code once more: in float16 where a test runs in bfloat16 too, with another seed than the first,
and of the wrong solutions of a gate all but one.
"""

import re
from typing import Any

import pytest

SHARED = (
    "cpu_graphs",
    "public_ops",
    "site",
)
"""Fixtures whose users run in one process."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    ids, seen, groups, zoo = {item.nodeid for item in items}, set(), {}, {}
    for item in items:
        twin = re.sub(r"(?<![a-z])float16", "bfloat16", item.nodeid)
        wrong = next(
            (each for each in params_of(item).values() if type(each).__name__ == "WrongKernel"), None
        )
        gate = wrong and (item.nodeid.partition("[")[0], wrong.puzzle, wrong.rung, wrong.gate)
        again = params_of(item).get("seed") or (twin != item.nodeid and twin in ids)
        if gate in seen or (again and not item.get_closest_marker("gpu")):
            item.add_marker("slow")
        if wrong:
            seen.add(gate)
            zoo[item] = f"{item.path.name} {wrong.puzzle}"
        shared = next((name for name in SHARED if name in item.fixturenames), None)
        groups[item.path] = groups.get(item.path) or shared
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            group = zoo.get(item) or groups[item.path] or item.path.name
            item.add_marker(pytest.mark.xdist_group(group))


def params_of(item: pytest.Item) -> dict[str, Any]:
    """Return the arguments of a test's case by name; none where it has no cases."""
    return getattr(getattr(item, "callspec", None), "params", {})


def chosen(request: Any, argument: str) -> list:
    """Return the values of an argument in the tests of the file that this run takes: all that a fixture need compile."""
    cases = [params_of(item) for item in request.session.items if item.path == request.path]
    values = [params[argument] for params in cases if argument in params]
    return [value for i, value in enumerate(values) if value not in values[:i]]
