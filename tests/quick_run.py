"""`pytest --quick`: everything that needs neither a compiler nor a browser nor many seconds.

A test that compiles Mojo, or a MAX graph, bears the mark `compiler`, one that takes seconds without it the mark `long`; a
quick run leaves them out, as it does nightly ones (tests/tiers.py) and those that ask for the fixtures `started`, the browser,
and `site`, the whole book. That the others do not compile is not believed: in a quick run every cache
of the workbook is empty and the Mojo compiler is a script that refuses, in this process and in those that it starts. A test
that called it fails, whatever it made of the refusal.
"""

import os
import re
import shlex
from pathlib import Path

import pytest

REFUSE = """\
#!/bin/sh
# Stands in for the Mojo compiler in a quick run: answers questions about itself and formats, but compiles nothing.
case "$*" in
*--print-supported-accelerators*|--version|format*) exec {mojo} "$@" ;;
esac
echo "mojo $*" >> {calls}
echo "error: a quick run compiles nothing" >&2
exit 1
"""
LEFT_OUT = {"started", "site"}
"""Fixtures: who asks for one is left out."""
WHOLE_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.compiler\b", re.MULTILINE)
CALLS = pytest.StashKey[Path]()


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out every test that needs a compiler, a browser or seconds",
    )


@pytest.hookimpl(trylast=True)  # the folder for temporary files must be there
def pytest_configure(config):
    config.addinivalue_line("markers", "compiler: compiles Mojo or a MAX graph; a quick run leaves it out")
    config.addinivalue_line(
        "markers", "long: takes seconds without a compiler; a quick run leaves it out too"
    )
    if not config.getoption("--quick"):
        return
    from mojo.run import _mojo_env

    folder = config._tmp_path_factory.mktemp("quick")
    config.stash[CALLS] = folder / "calls"
    stand_in = folder / "mojo"
    mojo = _mojo_env()["MODULAR_MOJO_MAX_DRIVER_PATH"]
    stand_in.write_text(REFUSE.format(mojo=shlex.quote(mojo), calls=shlex.quote(str(config.stash[CALLS]))))
    stand_in.chmod(0o755)
    os.environ["MODULAR_MOJO_MAX_DRIVER_PATH"] = str(stand_in)
    os.environ["WORKBOOK_CACHE"] = str(folder / "cache")


def pytest_ignore_collect(collection_path: Path, config):
    """A quick run does not even import a file that bears the mark as a whole: some import much."""
    if config.getoption("--quick") and collection_path.suffix == ".py":
        return True if WHOLE_FILE.search(collection_path.read_text(encoding="utf-8")) else None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        left_out = {
            item
            for item in items
            if item.get_closest_marker("compiler")
            or item.get_closest_marker("long")
            or item.get_closest_marker("nightly")
            or LEFT_OUT.intersection(item.fixturenames)
        }
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def compiles_nothing(request, monkeypatch):
    """In a quick run: fails a test that called the compiler."""
    calls = request.config.stash.get(CALLS, None)
    if calls is None:
        yield
        return
    from max.engine import InferenceSession

    monkeypatch.setattr(InferenceSession, "compile", refuse(calls))
    monkeypatch.setattr(InferenceSession, "load", refuse(calls))
    yield
    if calls.exists():
        called = calls.read_text()
        calls.unlink()
        pytest.fail(f"compiles, but does not bear the mark `compiler`:\n{called}", pytrace=False)


def refuse(calls: Path):
    """What stands in for the compiler of MAX graphs."""

    def compile_graph(*arguments, **options):
        calls.write_text("a MAX graph\n")
        raise RuntimeError("a quick run compiles nothing")

    return compile_graph
