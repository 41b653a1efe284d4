"""The order of the tests: which ones one process keeps together, and `--shuffle SEED` for another order.

With `-n 2` (pytest-xdist, `--dist loadgroup`) a file's tests stay in one process, for they share what the file has
compiled; so do the files that share what takes long to compile, for which the other process would only wait. A shuffled run
takes the files in another order, and the tests in each.
"""

import os
import random
from pathlib import Path

import pytest

SHARED = {
    "cpu_graphs": "graphs",
    "graphs_of_runs": "graphs of runs",
    "module_on_virtual_gpu": "module",
    "public_ops": "public ops",
    "site": "site",
    "attention_cpu_graphs": "attention's graphs",
}
"""Fixture -> the group of the files with a test that takes it; the first one counts."""


def pytest_addoption(parser):
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="run files, and tests within them, in a random order"
    )


def pytest_configure(config):
    # pytest 9.1 collects a folder twice that is named again after another one, and its second time knows no conftest.py.
    config.args.sort(key=os.path.dirname)
    # In the order of collection: by the number of tests, the files with few long ones would come last, and one process
    # would end long before the other.
    if config.pluginmanager.hasplugin("xdist"):
        config.option.loadscopereorder = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    seed = config.getoption("--shuffle")
    if seed is not None:
        shuffle(items, random.Random(seed))
    if config.pluginmanager.hasplugin("xdist"):
        groups: dict[Path, str] = {}
        for name, group in SHARED.items():
            for item in items:
                if name in item.fixturenames:
                    groups.setdefault(item.path, group)
        for item in items:
            item.add_marker(pytest.mark.xdist_group(groups.get(item.path, item.nodeid.split("::")[0])))


def shuffle(items: list, generator: random.Random) -> None:
    """Puts the files in another order, and the tests of each, which stay together."""
    files: dict[Path, list] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = list(files.values())
    generator.shuffle(order)
    for tests in order:
        generator.shuffle(tests)
    items[:] = [item for tests in order for item in tests]
