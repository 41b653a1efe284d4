"""Mark slow tests, and group the tests that run in one process: those of a file, of files that share slow
compilations, and of a puzzle's wrong solutions in Python.

The slow tests are those that compile the same code again (in float16 if there is the same test in bfloat16,
or with a second seed), and all but one of a gate's wrong solutions.
"""

import re
from typing import Any

import pytest

SHARED = (
    "cpu_graphs",
    "public_ops",
    "recorded",
    "site",
)
"""Fixtures whose tests all run in one process."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    ids, visited, groups, zoo = {item.nodeid for item in items}, set(), {}, {}
    for item in items:
        twin = re.sub(r"(?<![a-z])float16", "bfloat16", item.nodeid)
        wrong = next(
            (value for value in get_parameters(item).values() if type(value).__name__ == "WrongSolution"),
            None,
        )
        gate = wrong and (item.nodeid.partition("[")[0], wrong.puzzle, wrong.rung, wrong.gate)
        again = get_parameters(item).get("seed") or (twin != item.nodeid and twin in ids)
        if gate in visited or (again and compiles(item) and not item.get_closest_marker("gpu")):
            item.add_marker("slow")
        if wrong:
            visited.add(gate)
            if "recorded" not in item.fixturenames:
                zoo[item] = f"{item.path.name} {wrong.puzzle}"
        shared = next((name for name in SHARED if name in item.fixturenames), None)
        groups[item.path] = groups.get(item.path) or shared
    if config.pluginmanager.hasplugin("xdist"):
        names = {item: zoo.get(item) or groups[item.path] or item.path.name for item in items}
        for item, name in names.items():
            item.add_marker(pytest.mark.xdist_group(name))
        # Groups that take minutes start first: at the end a worker would wait for another's.
        compiling = {name for item, name in names.items() if compiles(item)}
        items.sort(key=lambda item: (names[item] not in SHARED, names[item] not in compiling))


def compiles(item: pytest.Item) -> bool:
    """Return whether a test compiles, by its marks."""
    return any(item.get_closest_marker(name) for name in ("compiles", "on_virtual_gpu"))


def get_parameters(item: pytest.Item) -> dict[str, Any]:
    """Return a test's parametrize arguments by name."""
    return getattr(getattr(item, "callspec", None), "params", {})


def list_values(items: list[pytest.Item], argument: str) -> list:
    """Return an argument's values in some tests, without duplicates: all that must be compiled for them."""
    values = [params[argument] for item in items if argument in (params := get_parameters(item))]
    return [value for i, value in enumerate(values) if value not in values[:i]]
