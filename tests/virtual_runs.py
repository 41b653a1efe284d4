"""Plugin for tests on the virtual GPU: tests marked `on_virtual_gpu` run in a separate process for each file.

    pytestmark = pytest.mark.on_virtual_gpu("attention")

The mark's arguments are the layers to load. Their operators are built to accept CPU tensors, which are
allocated in pinned memory, and the virtual GPU checks every access of their kernels. `arch="sm_80"` selects
another GPU.

The collecting process starts pytest under `vgpu exec` for a file's selected tests, and relays each outcome.
Tests also fail if the virtual GPU reports a finding. The fixture `launch_log` lists the launches.

The fixture `device` is "cpu" in that process. `tests/gpu_runs.py` runs the same tests on a GPU: "cuda".
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOG_VARIABLE = "WORKBOOK_TEST_LOG"
"""Environment variable with the path of the inner process's log."""
OUTCOMES_VARIABLE = "WORKBOOK_TEST_OUTCOMES"
"""Environment variable with the path of the file for the inner process's test reports."""
IS_INNER_PROCESS = LOG_VARIABLE in os.environ
REAL_GPU_VARIABLE = "WORKBOOK_TEST_GPU"
"""Environment variable that is set if the tests run on a real GPU."""
DEFAULT_OPTIONS = {"arch": "sm_90a"}
LAUNCH_LINE = re.compile(
    r"virtual GPU: ran (?P<name>.+) grid=\((?P<grid>[\d, ]+)\) .*: \d+ thread instructions"
)


# ---- Inner process --------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """A kernel launch."""

    name: str
    grid: tuple[int, ...]


PINNED_LIBRARY: dict[str, ctypes.CDLL] = {}
"""The loaded library with the pinned-memory allocator, if any."""


class LaunchLog:
    """Launches on the virtual GPU since the start of the test or the last `clear`."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        """Discard the launches so far."""
        self.start = Path(os.environ[LOG_VARIABLE]).stat().st_size

    def __call__(self) -> list[Launch]:
        """Return the launches in chronological order."""
        with open(os.environ[LOG_VARIABLE], encoding="utf-8", errors="replace") as file:
            file.seek(self.start)
            matches = filter(None, map(LAUNCH_LINE.match, file))
            return [Launch(match["name"], tuple(map(int, match["grid"].split(",")))) for match in matches]

    @property
    def names(self) -> list[str]:
        """Return the kernels' names in launch order."""
        return [launch.name for launch in self()]


@pytest.fixture
def launch_log() -> LaunchLog:
    """Return the test's launch log; skip the test on a real GPU, which has none."""
    if not IS_INNER_PROCESS:
        pytest.skip("a real GPU does not report its launches")
    return LaunchLog()


@pytest.fixture
def measure_peak() -> Callable[[Callable[[], object]], int]:
    """Return a function that measures the peak memory in bytes that a call adds."""
    return measure_peak_bytes if IS_INNER_PROCESS else measure_peak_bytes_on_gpu


def measure_peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak of pinned memory that a call adds."""
    before = PINNED_LIBRARY["library"].pinned_begin()
    call()
    return PINNED_LIBRARY["library"].pinned_most() - before


def measure_peak_bytes_on_gpu(call: Callable[[], object]) -> int:
    """Return the peak of PyTorch's CUDA memory that a call adds."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device of the tests' tensors."""
    return "cpu" if IS_INNER_PROCESS else "cuda"


@pytest.fixture
def default_device(device):
    """Create tensors on the test's device by default."""
    import torch

    with torch.device(device):
        yield


def load_layers(layers: tuple[str, ...], arch: str) -> None:
    """Allocate CPU tensors in pinned memory from now on, and let the layers' operators accept them."""
    import torch  # noqa: F401 (the pinned allocator links to its libraries)

    from harness.nn import host
    from harness.toolchain.libraries import load_runtime, make_torch_library

    load_runtime()
    _, library = make_torch_library("pinned", [ROOT / "tests" / "nn" / "pinned.cpp"]).load()
    for name in ("pinned_begin", "pinned_most"):
        getattr(library, name).restype = ctypes.c_int64
    PINNED_LIBRARY["library"] = library
    host.DEVICE, host.DEFINES, host.get_architecture = "cpu", ("WORKBOOK_DEVICE=CPU",), lambda index: arch
    host.warn_of_fallback = exit_process
    for layer in layers:
        host.load(layer, "cpu")


def exit_process(label: str, error: Exception) -> None:
    """Exit the process, because the PyTorch fallback would leave the kernels untested."""
    print(f"{label}: {error}", file=sys.stderr, flush=True)
    os._exit(3)


def pytest_runtest_logreport(report):
    """Write a report for the outer process."""
    if IS_INNER_PROCESS:
        skip = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        line = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "skip": skip}
        line |= {"text": report.longreprtext, "xfail": getattr(report, "wasxfail", None)}
        with open(os.environ[OUTCOMES_VARIABLE], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


# ---- Outer process --------------------------------------------------------------------------------------------------


class Failure(Exception):
    """The failure report of the inner process."""


class RelayedTest(pytest.Item):
    """A test whose outcome is reported by a process on the virtual GPU."""

    origin: pytest.Item

    @classmethod
    def from_item(cls, item: pytest.Item) -> "RelayedTest":
        """Create a relayed copy of a test."""
        assert item.parent is not None
        relayed = cls.from_parent(item.parent, name=item.name, nodeid=item.nodeid)
        relayed.own_markers += item.own_markers
        relayed.keywords.update(item.keywords)
        relayed.add_marker(pytest.mark.timeout(1800))  # a file's first test waits for all of them
        relayed.origin = item
        return relayed

    def runtest(self) -> None:
        """Fail, skip or pass like the test in the inner process."""
        run = get_runs(self.session)[self.path]
        reports = run.by_test.get(self.origin.nodeid.partition("@")[0])
        if not reports:
            raise Failure(f"the process on the virtual GPU exited before this test:\n{run.output}")
        for report in reports:
            if report["xfail"] is not None and report["outcome"] == "skipped":
                pytest.xfail(report["xfail"])
            if report["outcome"] == "skipped":
                pytest.skip(report["skip"])
            if report["outcome"] == "failed":
                raise Failure(report["text"])
        if run.findings:
            raise Failure(f"the virtual GPU reported findings in this file's launches:\n{run.findings}")

    def repr_failure(self, excinfo, style=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the inner process's report without a traceback of this one."""
        return str(excinfo.value) if excinfo.errisinstance(Failure) else super().repr_failure(excinfo)

    def reportinfo(self):
        """Return the location of the test."""
        return self.origin.reportinfo()


@dataclass
class FileRun:
    """Reports of a file's tests by node id, the virtual GPU's findings, and the end of the output."""

    by_test: dict[str, list[dict[str, Any]]]
    findings: str
    output: str


class Runs(dict):
    """Test file -> its run, started on first access."""

    def __init__(self, session: pytest.Session):
        super().__init__()
        self.session = session

    def __missing__(self, path: Path) -> FileRun:
        items = [item for item in self.session.items if isinstance(item, RelayedTest) and item.path == path]
        self[path] = run_file(items)
        return self[path]


RUNS = pytest.StashKey[Runs]()


def get_runs(session: pytest.Session) -> Runs:
    """Return the runs of a session."""
    return session.stash.setdefault(RUNS, Runs(session))


def get_settings(item: pytest.Item) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the layers and the virtual GPU's options from a test's marks."""
    marks = [*item.iter_markers("on_virtual_gpu")]
    layers = tuple(dict.fromkeys(layer for mark in marks for layer in mark.args))
    return layers, DEFAULT_OPTIONS | {
        key: value for mark in reversed(marks) for key, value in mark.kwargs.items()
    }


def run_file(items: list[RelayedTest]) -> FileRun:
    """Run one file's tests in a process on the virtual GPU."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the virtual GPU's driver is for Linux")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, outcomes, report_file = folder / "log", folder / "outcomes", folder / "found.json"
        outcomes.touch()
        vgpu = ["harness.vgpu.cli", "exec", "--verbose", "--arch", get_settings(items[0])[1]["arch"]]
        tests = [item.origin.nodeid.partition("@")[0] for item in items]
        pytest_options = ["-s", "-p", "no:cacheprovider", "-o", "addopts=", "--strict-markers", "-m", ""]
        command = [
            sys.executable,
            "-m",
            *vgpu,
            "--json",
            str(report_file),
            "--",
            sys.executable,
            "-m",
            "pytest",
        ]
        with open(log, "w") as file:
            completed = subprocess.run(
                [*command, *pytest_options, *tests],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=ROOT,
                env={**os.environ, LOG_VARIABLE: str(log), OUTCOMES_VARIABLE: str(outcomes)},
            )
        by_test: dict[str, list[dict[str, Any]]] = {}
        for report in map(json.loads, outcomes.read_text(encoding="utf-8").splitlines()):
            by_test.setdefault(report["test"], []).append(report)
        findings = json.loads(report_file.read_text())["findings"] if report_file.exists() else []
        output = log.read_text(errors="replace")[-4000:] + completed.stdout[-4000:]
    return FileRun(by_test, "\n".join(map(json.dumps, findings)), output)


# ---- Both processes -------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Load the layers in the inner process; in the outer one, relay the outcomes of marked tests."""
    marked = [i for i, item in enumerate(items) if item.get_closest_marker("on_virtual_gpu")]
    if IS_INNER_PROCESS and marked:
        layers, options = get_settings(items[marked[0]])
        load_layers(layers, options["arch"])
    elif REAL_GPU_VARIABLE not in os.environ:
        for i in marked:
            items[i] = RelayedTest.from_item(items[i])
