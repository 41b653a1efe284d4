"""Tests on the virtual GPU: a file's tests with the mark `on_virtual_gpu` run in a separate process.

    pytestmark = pytest.mark.on_virtual_gpu("attention")

Such a test is written like any other. The mark's arguments name the layers whose operators accept the tests'
CPU tensors, which are in pinned memory; the virtual GPU checks every access of its kernels. Operators are C++
that calls Mojo kernels, built in the workbook's cache. `arch="sm_80"` selects another GPU.

The collecting process starts pytest under `vgpu exec` for a file's selected tests, and relays each outcome.
Tests also fail if the virtual GPU finds a fault in their launches. The fixture `launched` lists launches.

The fixture `device` is "cpu" there. `tests/gpu_runs.py` runs the same tests on a GPU: "cuda".
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
LOG = "WORKBOOK_TEST_LOG"
"""Names the file with the output of the process on the virtual GPU."""
OUTCOMES = "WORKBOOK_TEST_OUTCOMES"
"""Names the file to which that process writes each test's outcome."""
INSIDE = LOG in os.environ
REAL = "WORKBOOK_TEST_GPU"
"""Set if the tests run on this machine's GPU."""
DEFAULTS = {"arch": "sm_90a"}
LAUNCH_LINE = re.compile(
    r"virtual GPU: ran (?P<name>.+) grid=\((?P<grid>[\d, ]+)\) .*: \d+ thread instructions"
)


# ---- Inside ---------------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One launch: the kernel's name and its grid."""

    name: str
    grid: tuple[int, ...]


PINNED: dict[str, ctypes.CDLL] = {}
"""The library with the pinned-memory allocator, once it is loaded."""


class Launched:
    """The virtual GPU's launches since the test began, or since `forget`."""

    def __init__(self):
        self.forget()

    def forget(self) -> None:
        """Restart the list of launches here."""
        self.start = Path(os.environ[LOG]).stat().st_size

    def __call__(self) -> list[Launch]:
        """Return the launches in order."""
        with open(os.environ[LOG], encoding="utf-8", errors="replace") as file:
            file.seek(self.start)
            matches = filter(None, map(LAUNCH_LINE.match, file))
            return [Launch(one["name"], tuple(map(int, one["grid"].split(",")))) for one in matches]

    @property
    def names(self) -> list[str]:
        """Return the kernels' names in order."""
        return [launch.name for launch in self()]


@pytest.fixture
def launched() -> Launched:
    """Return the test's launches; skip on a real GPU, which does not report them."""
    if not INSIDE:
        pytest.skip("a real GPU does not report its launches")
    return Launched()


@pytest.fixture
def peak() -> Callable[[Callable[[], object]], int]:
    """Return a function that measures a call's peak bytes of live tensors, beyond those before it."""
    return measure_peak_bytes if INSIDE else measure_peak_bytes_on_gpu


def measure_peak_bytes(call: Callable[[], object]) -> int:
    """Return a call's peak bytes of pinned memory."""
    before = PINNED["library"].pinned_begin()
    call()
    return PINNED["library"].pinned_most() - before


def measure_peak_bytes_on_gpu(call: Callable[[], object]) -> int:
    """Return a call's peak bytes in PyTorch's allocator."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture(scope="session")
def device() -> str:
    """Return the device of the tests' tensors."""
    return "cpu" if INSIDE else "cuda"


@pytest.fixture
def on_the_device(device):
    """Create the test's tensors on its device by default."""
    import torch

    with torch.device(device):
        yield


def open_layers(layers: tuple[str, ...], arch: str) -> None:
    """Pin CPU tensors from now on, and let the layers' operators accept them."""
    import torch  # noqa: F401 (the pinned allocator links to its libraries)

    from harness.nn import host
    from harness.toolchain.libraries import load_runtime, make_torch_library

    load_runtime()
    _, library = make_torch_library("pinned", [ROOT / "tests" / "nn" / "pinned.cpp"]).load()
    for name in ("pinned_begin", "pinned_most"):
        getattr(library, name).restype = ctypes.c_int64
    PINNED["library"] = library
    host.DEVICE, host.DEFINES, host.get_architecture = "cpu", ("WORKBOOK_DEVICE=CPU",), lambda index: arch
    host.warn = exit_process
    for layer in layers:
        host.load(layer, "cpu")


def exit_process(what: str, error: Exception) -> None:
    """Exit the process: with PyTorch's operations instead of the kernels, the tests would test nothing."""
    print(f"{what}: {error}", file=sys.stderr, flush=True)
    os._exit(3)


def pytest_runtest_logreport(report):
    """Write a report for the process outside, if inside."""
    if INSIDE:
        skip = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        line = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "skip": skip}
        line |= {"text": report.longreprtext, "xfail": getattr(report, "wasxfail", None)}
        with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


# ---- Outside --------------------------------------------------------------------------------------------------------


class Failure(Exception):
    """A failure inside, as its text."""


class Relayed(pytest.Item):
    """A test whose outcome comes from a process on the virtual GPU."""

    origin: pytest.Item

    @classmethod
    def of(cls, item: pytest.Item) -> "Relayed":
        """Return the stand-in for a test."""
        assert item.parent is not None
        relayed = cls.from_parent(item.parent, name=item.name, nodeid=item.nodeid)
        relayed.own_markers += item.own_markers
        relayed.keywords.update(item.keywords)
        relayed.add_marker(pytest.mark.timeout(1800))  # a file's first test waits for all of them
        relayed.origin = item
        return relayed

    def runtest(self) -> None:
        """Fail, skip or pass like the test inside."""
        run = get_runs(self.session)[self.path]
        reports = run.by_test.get(self.origin.nodeid.partition("@")[0])
        if not reports:
            raise Failure(f"the process on the virtual GPU did not get to this test:\n{run.output}")
        for report in reports:
            if report["xfail"] is not None and report["outcome"] == "skipped":
                pytest.xfail(report["xfail"])
            if report["outcome"] == "skipped":
                pytest.skip(report["skip"])
            if report["outcome"] == "failed":
                raise Failure(report["text"])
        if run.findings:
            raise Failure(f"the virtual GPU found faults in this file's launches:\n{run.findings}")

    def repr_failure(self, excinfo, style=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return only the text."""
        return str(excinfo.value) if excinfo.errisinstance(Failure) else super().repr_failure(excinfo)

    def reportinfo(self):
        """Return the location of the test."""
        return self.origin.reportinfo()


@dataclass
class FileRun:
    """The outcomes of a file's tests by name, the virtual GPU's findings, and the end of the output."""

    by_test: dict[str, list[dict[str, Any]]]
    findings: str
    output: str


class Runs(dict):
    """File -> its run, started on first use."""

    def __init__(self, session: pytest.Session):
        super().__init__()
        self.session = session

    def __missing__(self, path: Path) -> FileRun:
        items = [item for item in self.session.items if isinstance(item, Relayed) and item.path == path]
        self[path] = run_file(items)
        return self[path]


RUNS = pytest.StashKey[Runs]()


def get_runs(session: pytest.Session) -> Runs:
    """Return the runs of a session."""
    return session.stash.setdefault(RUNS, Runs(session))


def get_settings(item: pytest.Item) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the layers named by a test's marks, and the virtual GPU's options."""
    marks = [*item.iter_markers("on_virtual_gpu")]
    layers = tuple(dict.fromkeys(layer for mark in marks for layer in mark.args))
    return layers, DEFAULTS | {key: value for mark in reversed(marks) for key, value in mark.kwargs.items()}


def run_file(items: list[Relayed]) -> FileRun:
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
            done = subprocess.run(
                [*command, *pytest_options, *tests],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                cwd=ROOT,
                env={**os.environ, LOG: str(log), OUTCOMES: str(outcomes)},
            )
        by_test: dict[str, list[dict[str, Any]]] = {}
        for report in map(json.loads, outcomes.read_text(encoding="utf-8").splitlines()):
            by_test.setdefault(report["test"], []).append(report)
        findings = json.loads(report_file.read_text())["findings"] if report_file.exists() else []
        output = log.read_text(errors="replace")[-4000:] + done.stdout[-4000:]
    return FileRun(by_test, "\n".join(map(json.dumps, findings)), output)


# ---- Both -----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Outside, replace marked tests with relays of their outcomes; inside, open the layers."""
    marked = [i for i, item in enumerate(items) if item.get_closest_marker("on_virtual_gpu")]
    if INSIDE and marked:
        layers, options = get_settings(items[marked[0]])
        open_layers(layers, options["arch"])
    elif REAL not in os.environ:
        for i in marked:
            items[i] = Relayed.of(items[i])
