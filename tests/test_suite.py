"""The suite's own machinery: quick runs, other orders, time by folder; each tried on small suites in a process of their own."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import order
import pytest
from typed import stand_in

from harness.devices.targets import Target

TESTS = Path(__file__).resolve().parent


@pytest.fixture
def suite(tmp_path):
    """Files of a small suite by name, and arguments of pytest -> the finished run with the plugins of this folder."""

    def run(files: dict[str, str], *arguments: str, start=("tests",)) -> subprocess.CompletedProcess:
        for name, text in files.items():
            path = tmp_path / "tests" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\naddopts = -p no:cacheprovider\npythonpath = " + str(TESTS)
        )
        plugins = ("-p", "folder_times", "-p", "order", "-p", "quick_run")
        command = [sys.executable, "-m", "pytest", *plugins, *start, *arguments]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


COMPILES = """
import subprocess
import sys
import pytest

def mojo(*arguments):
    program = "import sys; from mojo.run import subprocess_run_mojo as run; sys.exit(run(sys.argv[1:]).returncode)"
    return subprocess.run([sys.executable, "-c", program, *arguments]).returncode

def test_calls_the_compiler(): assert mojo("build", "x.mojo") != 0
def test_has_a_failed_call_swallowed(): mojo("run", "x.mojo")
def test_asks_for_its_version(): assert mojo("--version") == 0

@pytest.mark.compiler
def test_says_so(): assert mojo("build", "x.mojo") == 0

@pytest.mark.long
def test_says_that_it_takes_long(): pytest.fail("not left out")

@pytest.fixture
def started(): pytest.fail("a browser starts")

@pytest.fixture
def page(started): return started

def test_reads_a_page(page): pass

def test_compiles_a_graph():
    import max.engine
    with pytest.raises(RuntimeError, match="compiles nothing"):
        max.engine.InferenceSession().load("no graph")
"""


def test_in_a_quick_run_nothing_compiles_in_secret(suite):
    whole = "import pytest\npytestmark = [pytest.mark.compiler]\nraise ImportError('is imported')\n"
    models = "import pytest\npytestmark = pytest.mark.long\nraise ImportError('is imported too')\n"
    named = "import pytest\n@pytest.mark.parametrize('seed', range(2))\ndef test_random_modules(seed): assert seed == 0\n"
    files = {
        "test_some.py": COMPILES,
        "test_whole.py": whole,
        "test_models.py": models,
        "nn/test_patching_random.py": named,
    }
    done = suite(files, "--quick", "-rE")
    assert done.returncode == 1, done.stdout
    failed = re.findall(
        r"^ERROR tests/test_some.py::(\w+) - Failed: compiles, but", done.stdout, re.MULTILINE
    )
    assert failed == ["test_calls_the_compiler", "test_has_a_failed_call_swallowed", "test_compiles_a_graph"]
    assert "4 deselected" in done.stdout and "mojo build x.mojo" in done.stdout


ORDERED = "import pytest\n@pytest.mark.parametrize('number', range(6))\ndef test_one(number): pass\n"


def order_of(done) -> list[str]:
    """The tests in the order in which they would run."""
    return re.findall(r"^tests/\w+/(test_\w+\.py::test_one\[\d\])$", done.stdout, re.MULTILINE)


def shuffled(seed: int) -> list[str]:
    """Six tests of each of four files in the order of a seed."""
    items = [
        SimpleNamespace(path=name, nodeid=f"test_{name}.py::test_one[{number}]")
        for name in "abcd"
        for number in range(6)
    ]
    order.shuffle(items, random.Random(seed))
    return [item.nodeid for item in items]


def test_a_folder_that_is_named_again_after_another_one_keeps_its_fixtures(suite):
    files = {
        "book/conftest.py": "import pytest\n@pytest.fixture\ndef site(): pass",
        "test_other.py": "def test(): pass",
    }
    files |= {f"book/test_{name}.py": "def test(site): pass" for name in ("a", "b")}
    run = suite(files, "tests/book/test_a.py", "tests/test_other.py", "tests/book/test_b.py", start=())
    assert run.returncode == 0 and "3 passed" in run.stdout, run.stdout


def test_a_shuffled_run_keeps_files_together_and_can_be_repeated(suite):
    first, again, other = shuffled(1), shuffled(1), shuffled(2)
    assert len(set(first)) == 24 and sorted(first) == sorted(other)
    assert first == again and first != sorted(first) and first != other
    names = [test.split("::")[0] for test in first]
    assert [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name] == list(
        dict.fromkeys(names)
    )
    files = {f"{name}/test_{name}.py": ORDERED for name in "abcd"}
    assert order_of(suite(files, "--collect-only", "-q", "--shuffle", "1")) == first


SHARES = """
import pytest

@pytest.fixture
def cpu_graphs(): pass

def test_one(cpu_graphs): pass
"""


def test_processes_take_files_in_the_order_of_collection_and_keep_together_who_shares(suite):
    files = {f"{name}/test_{name}.py": "def test_one(): pass\n" * 3 for name in "bd"}
    files |= {f"{name}/test_{name}.py": SHARES for name in "ac"}
    files["b/test_b.py"] = ORDERED
    done = suite(files, "-p", "xdist", "-n", "1", "--dist", "loadgroup", "-v")
    assert done.returncode == 0, done.stdout
    passed = re.findall(r"PASSED tests/(\w)/", done.stdout)
    assert "".join(dict.fromkeys(passed)) == "acbd", "not the one with the most tests first"


SPENDS = """
import subprocess
import sys
def test_in_a_process():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.7: pass"])
def test_itself():
    import time
    until = time.process_time() + 0.7
    while time.process_time() < until: pass
"""


@pytest.mark.long
def test_time_is_told_by_folder_that_of_other_processes_too(suite):
    workers = ("-p", "xdist", "-n", "2", "--dist", "loadgroup")
    done = suite({"p90/test_a.py": SPENDS, "p91/test_b.py": "def test_nothing(): pass\n"}, *workers)
    assert done.returncode == 0, done.stdout
    rows = re.findall(r"^(\S+) +(\d+) +([\d.]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert [(name, count) for name, count, _, _ in rows] == [
        ("tests/p90", "2"),
        ("tests/p91", "1"),
        ("all", "3"),
    ]
    assert float(rows[0][3]) >= 1.4 > float(rows[1][3])


MAKES = """
import subprocess
import sys
from harness.toolchain.cache import cache_folder, keep

def make(name):
    keep(cache_folder("things") / name, lambda path: path.write_text("x"), "a thing")

def test_makes_each_once():
    make("one"); make("one"); make("two")

def test_makes_one_in_another_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    make("one")
"""
AGAIN = """
from harness.toolchain.cache import cache_folder, discard, keep

def test_makes_one_again():
    for _ in range(2):
        discard(cache_folder("things") / "three")
        keep(cache_folder("things") / "three", lambda path: path.write_text("x"), "a thing")
"""


def test_a_run_that_makes_the_same_twice_fails(suite, monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    plugin = ("-p", "compiles")
    done = suite({"test_makes.py": MAKES}, *plugin)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "made in caches: 3; graphs compiled in more than one unit: 0; in another cache again: a thing 1"
        in done.stdout
    )
    done = suite({"test_remakes.py": AGAIN}, *plugin, "-p", "xdist", "-n", "2")
    assert done.returncode == 1 and "3 passed" in done.stdout, done.stdout
    assert f"made twice: a thing, {tmp_path}/cache/things/three" in done.stdout


def test_a_stand_in_has_only_what_its_class_has():
    target = stand_in(Target, kind="gpu")
    assert isinstance(target, Target) and target.label == "GPU"
    with pytest.raises(AttributeError, match="a Target has no in_mux"):
        stand_in(Target, kind="cpu", in_mux=None)


@pytest.mark.parametrize("inherited", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_a_run_in_the_background_starts_hears_ctrl_c(inherited):
    """A shell ignores SIGINT for what it runs in the background; without the tests' own mend, a child is deaf to it as well."""
    child = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT)"]
    code = (
        f"import conftest, subprocess; print(subprocess.run({child!r}, stderr=subprocess.DEVNULL).returncode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, inherited),
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{-signal.SIGINT}\n", done.stderr
