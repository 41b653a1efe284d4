"""Record the kernels that tests of several files check in one program, because starting a program is slow.

Each of these files defines `list_orders`, which maps any name to a recording request for its selected tests,
of the solution or of packages that it writes to a folder. The tests use the fixture `recorded`.
"""

from contextlib import suppress
from typing import Any

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "recorded" in item.fixturenames:
            item.add_marker(pytest.mark.timeout(1800))  # the first test waits for all recordings


def make_order(puzzle: str, cases, variants, package=None, dtype: str = "float32") -> Any:
    """Return the recording request of a package (default: the solution) for the sizes of some cases."""
    from harness.devices.recorder import RecordRequest
    from harness.toolchain import roots

    package = package or roots.make_op_package(roots.get_solutions(), puzzle)
    dims = tuple(dict.fromkeys(case.dims for case in cases))
    return RecordRequest(package, puzzle, dims, tuple(variants), small_grid=True, dtype=dtype)


@pytest.fixture(scope="session")
def orders(request, tmp_path_factory) -> dict[Any, dict[str, Any]]:
    """Record the requests of all selected files in the checkers' cache; return them by file and name."""
    from harness.devices.recorder import record_many
    from harness.errors import CompileFailed

    tests: dict[Any, list[pytest.Item]] = {}
    for item in request.session.items:
        if "recorded" in getattr(item, "fixturenames", ()):
            tests.setdefault(item.module, []).append(item)
    by_file = {file: file.list_orders(tmp_path_factory.mktemp("kernels"), tests[file]) for file in tests}
    try:
        record_many(list(dict.fromkeys(order for named in by_file.values() for order in named.values())))
    except CompileFailed:  # only the tests of that package fail, when they compile it
        for named in by_file.values():
            with suppress(CompileFailed):
                record_many([*named.values()])
    return by_file


@pytest.fixture(scope="module")
def recorded(orders, request) -> dict[str, Any]:
    """Return the file's orders by name, recorded."""
    return orders[request.module]
