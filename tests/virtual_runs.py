"""Tests that run on the virtual GPU: what bears the mark `on_virtual_gpu` runs in one process of its own for each file.

    pytestmark = pytest.mark.on_virtual_gpu("attention")

Such a test is written as any other. The mark's arguments name the layers whose operators take the tests' CPU tensors: their memory is
pinned memory there, which the virtual GPU's kernels read and write with every access checked. Each operator is C++ that calls
kernels in Mojo, both built in the workbook's cache. `arch="sm_80"` takes another virtual GPU; a file has one.

The process that collects the tests starts `vgpu exec` with pytest in it, for all tests of a file that were chosen, and hands each one's
outcome on. A test fails too where the virtual GPU found a fault in what it launched. The fixture `launched` counts launches.

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
"""Names the file in which a process on the virtual GPU finds what it has printed."""
OUTCOMES = "WORKBOOK_TEST_OUTCOMES"
"""Names the file to which it writes the outcome of each test."""
INSIDE = LOG in os.environ
REAL = "WORKBOOK_TEST_GPU"
"""Set where the tests are to run on the GPU of this machine."""
DEFAULTS = {"arch": "sm_90a"}
RAN = re.compile(r"virtual GPU: ran (?P<name>.+) grid=\((?P<grid>[\d, ]+)\) .*: \d+ thread instructions")


# ---- Inside ---------------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One launch: the kernel's name and its grid."""

    name: str
    grid: tuple[int, ...]


PINNED: dict[str, ctypes.CDLL] = {}
"""The library with the allocator of pinned memory, where it is loaded."""


class Launched:
    """The launches that the virtual GPU has run since the test began, or since `forget`."""

    def __init__(self):
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.start = Path(os.environ[LOG]).stat().st_size

    def __call__(self) -> list[Launch]:
        """Return the launches in their order."""
        with open(os.environ[LOG], encoding="utf-8", errors="replace") as file:
            file.seek(self.start)
            found = filter(None, map(RAN.match, file))
            return [Launch(one["name"], tuple(map(int, one["grid"].split(",")))) for one in found]

    @property
    def names(self) -> list[str]:
        """Return the names of the kernels, in their order."""
        return [launch.name for launch in self()]


@pytest.fixture
def launched() -> Launched:
    """Return what the test has launched; skips on a real GPU, which does not say it."""
    if not INSIDE:
        pytest.skip("a real GPU does not say what it ran")
    return Launched()


@pytest.fixture
def peak() -> Callable[[Callable[[], object]], int]:
    """Return what counts the most bytes of tensors that live at a time in a call, beyond those before it."""
    return most_bytes if INSIDE else most_bytes_on_gpu


def most_bytes(call: Callable[[], object]) -> int:
    """Count the bytes of pinned memory."""
    before = PINNED["library"].pinned_begin()
    call()
    return PINNED["library"].pinned_most() - before


def most_bytes_on_gpu(call: Callable[[], object]) -> int:
    """Count the bytes of PyTorch's allocator."""
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
    """Let CPU tensors, pinned from now on, go to the operators of layers."""
    import torch  # noqa: F401 (its libraries are what the pinned allocator is linked with)

    from harness.nn import host
    from harness.toolchain.libraries import load_runtime, torch_library

    load_runtime()
    _, library = torch_library("pinned", [ROOT / "tests" / "nn" / "pinned.cpp"]).load()
    for name in ("pinned_begin", "pinned_most"):
        getattr(library, name).restype = ctypes.c_int64
    PINNED["library"] = library
    host.DEVICE, host.DEFINES, host.architecture = "cpu", ("WORKBOOK_DEVICE=CPU",), lambda index: arch
    host.warn = end
    for layer in layers:
        host.load(layer, "cpu")


def end(what: str, error: Exception) -> None:
    """End the process: with PyTorch's own operations in the place of the kernels the tests would test nothing."""
    print(f"{what}: {error}", file=sys.stderr, flush=True)
    os._exit(3)


def pytest_runtest_logreport(report):
    """Inside, writes a report for the process outside."""
    if INSIDE:
        skip = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        line = {"test": report.nodeid, "outcome": report.outcome, "when": report.when, "skip": skip}
        line |= {"text": report.longreprtext, "xfail": getattr(report, "wasxfail", None)}
        with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


# ---- Outside --------------------------------------------------------------------------------------------------------


class Failure(Exception):
    """The text of a failure inside."""


class Relayed(pytest.Item):
    """A test whose outcome comes from a process on the virtual GPU."""

    origin: pytest.Item

    @classmethod
    def of(cls, item: pytest.Item) -> "Relayed":
        """Return what stands in a test's place."""
        assert item.parent is not None
        relayed = cls.from_parent(item.parent, name=item.name, nodeid=item.nodeid)
        relayed.own_markers += item.own_markers
        relayed.keywords.update(item.keywords)
        relayed.add_marker(pytest.mark.timeout(1800))  # the first test of a file waits for all
        relayed.origin = item
        return relayed

    def runtest(self) -> None:
        """Fail, skip or pass as the test did."""
        run = runs(self.session)[self.path]
        reports = run.by_test.get(self.origin.nodeid.partition("@")[0])
        if not reports:
            raise Failure(f"the process on the virtual GPU did not get to this test:\n{run.said}")
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
        """Return the text alone."""
        return str(excinfo.value) if excinfo.errisinstance(Failure) else super().repr_failure(excinfo)

    def reportinfo(self):
        """Return where the test stands."""
        return self.origin.reportinfo()


@dataclass
class FileRun:
    """The outcome of a file's tests by their names, the findings, and the end of what was printed."""

    by_test: dict[str, list[dict[str, Any]]]
    findings: str
    said: str


class Runs(dict):
    """File -> its run, at the first question."""

    def __init__(self, session: pytest.Session):
        super().__init__()
        self.session = session

    def __missing__(self, path: Path) -> FileRun:
        items = [item for item in self.session.items if isinstance(item, Relayed) and item.path == path]
        self[path] = run_file(items)
        return self[path]


RUNS = pytest.StashKey[Runs]()


def runs(session: pytest.Session) -> Runs:
    """Return the runs of a session."""
    return session.stash.setdefault(RUNS, Runs(session))


def settings(item: pytest.Item) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the layers that a test's marks name, and the virtual GPU's options."""
    marks = [*item.iter_markers("on_virtual_gpu")]
    layers = tuple(dict.fromkeys(layer for mark in marks for layer in mark.args))
    return layers, DEFAULTS | {key: value for mark in reversed(marks) for key, value in mark.kwargs.items()}


def run_file(items: list[Relayed]) -> FileRun:
    """Run tests of one file in a process on the virtual GPU."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the virtual GPU's driver is for Linux")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log, outcomes, found = folder / "log", folder / "outcomes", folder / "found.json"
        outcomes.touch()
        vgpu = ["harness.vgpu.cli", "exec", "--verbose", "--arch", settings(items[0])[1]["arch"]]
        tests = [item.origin.nodeid.partition("@")[0] for item in items]
        pytest_options = ["-s", "-p", "no:cacheprovider", "-o", "addopts=", "--strict-markers", "-m", ""]
        command = [sys.executable, "-m", *vgpu, "--json", str(found), "--", sys.executable, "-m", "pytest"]
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
        findings = json.loads(found.read_text())["findings"] if found.exists() else []
        said = log.read_text(errors="replace")[-4000:] + done.stdout[-4000:]
    return FileRun(by_test, "\n".join(map(json.dumps, findings)), said)


# ---- Both -----------------------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Outside, puts what relays an outcome in the place of a marked test; inside, opens the layers."""
    marked = [i for i, item in enumerate(items) if item.get_closest_marker("on_virtual_gpu")]
    if INSIDE and marked:
        layers, options = settings(items[marked[0]])
        open_layers(layers, options["arch"])
    elif REAL not in os.environ:
        for i in marked:
            items[i] = Relayed.of(items[i])
