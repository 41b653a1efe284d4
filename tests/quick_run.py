"""`pytest --quick`: everything that needs neither a compiler nor a browser.

A test that compiles Mojo, or a MAX graph, bears the mark `compiler`; a quick run leaves it out, as it does those that ask
for the fixture `started`, which is the browser. That the others do not compile is not believed: in a quick run every cache
of the workbook is empty and the Mojo compiler is a script that refuses, in this process and in those that it starts. A test
that called it fails, whatever it made of the refusal.
"""

import os
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
BROWSER = "started"
"""The fixture that starts one."""
CALLS = pytest.StashKey[Path]()


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="leave out every test that needs a compiler or a browser"
    )


@pytest.hookimpl(trylast=True)  # the folder for temporary files must be there
def pytest_configure(config):
    config.addinivalue_line("markers", "compiler: compiles Mojo or a MAX graph; a quick run leaves it out")
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


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        left_out = {
            item for item in items if item.get_closest_marker("compiler") or BROWSER in item.fixturenames
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
