"""The order of the tests: which ones one process keeps together, and `--shuffle SEED` for another order.

With `-n 2` (pytest-xdist, `--dist loadgroup`) a file's tests stay in one process, for they share what the file has
compiled; so do the files that share the puzzle's graphs. A shuffled run takes the files in another order, and the tests
in each.
"""

import random
from pathlib import Path

import pytest

SHARED = {"program": "graphs", "public_ops": "public ops", "site": "site"}
"""Fixture -> the group of the files with a test that takes it."""


def pytest_addoption(parser):
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files, and tests within them, in a random order"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    seed = config.getoption("--shuffle")
    if seed is not None:
        shuffle(items, random.Random(seed))
    if config.pluginmanager.hasplugin("xdist"):
        groups = {item.path: SHARED[name] for item in items for name in item.fixturenames if name in SHARED}
        for item in items:
            item.add_marker(pytest.mark.xdist_group(groups.get(item.path, item.nodeid.split("::")[0])))


def shuffle(items: list[pytest.Item], generator: random.Random) -> None:
    """Puts the files in another order, and the tests of each, which stay together."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = list(files.values())
    generator.shuffle(order)
    for tests in order:
        generator.shuffle(tests)
    items[:] = [item for tests in order for item in tests]
