"""The columns of `--bench` that need a GPU, tested with a fake GPU on the CPU."""

import contextlib
import csv
import dataclasses
import gc
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from benches import EAGER, FLOOR, TINY, get_output, make_bench

from harness.bench import machine, metrics, runner, timing
from harness.bench.benchmark import COLUMNS, AutogradCandidate, Candidate
from harness.puzzles.p22 import candidates
from harness.puzzles.p22.candidates import BENCHMARK, Sizes

pytestmark = pytest.mark.usefixtures("short_bursts")


def test_graph_without_writes_is_detected(monkeypatch):
    """Outputs are filled with NaN before a replay."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    problem = candidates.make_problem(TINY, torch.float32, torch.device("cpu"))
    ready = runner.CheckedCandidate(EAGER, EAGER.build(problem), {})

    class Replay(timing.Graph):
        def __init__(self, writes):
            self.writes = writes
            self.outputs = ready.built.prepare("both")()

        def __call__(self):
            if self.writes:
                for tensor, value in zip(self.outputs, ready.built.prepare("both")(), strict=True):
                    tensor.copy_(value)

    run = make_bench(EAGER)
    run.check_graph(Replay(True), ready, problem, "both")
    with pytest.raises(runner.WrongGraphResult, match="does not write what a plain call writes"):
        run.check_graph(Replay(False), ready, problem, "both")


class FakeDevice:
    """A device of type "cuda" whose tensors are on the CPU."""

    type = "cuda"


@pytest.fixture
def fake_gpu(monkeypatch):
    """Replace torch.cuda by fakes that run on the CPU; each timed burst takes 0.05 ms."""

    class Event:
        clock = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.clock += 0.05
            self.at = Event.clock

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at  # 0.05 ms

    class Stream:
        def wait_stream(self, other):
            pass

    class CUDAGraph:
        outputs: tuple[torch.Tensor, ...]
        call: Callable[[], tuple[torch.Tensor, ...]]

        def replay(self):
            for tensor, value in zip(self.outputs, self.call(), strict=True):
                tensor.detach().copy_(value.detach())

    @contextlib.contextmanager
    def capture(graph, stream):
        state["capturing"] = True
        yield
        state["capturing"] = False

    state = {"capturing": False, "memory": 0}
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "graph": capture,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": Stream,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda device: "Pretend GPU",
        "memory_allocated": lambda: 100,
        "max_memory_allocated": lambda: 1700,
        "reset_peak_memory_stats": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    original = timing.Graph.__init__

    def initialize(self, prepare):
        original(self, prepare)
        self.graph.outputs, self.graph.call = self.outputs, self.call

    monkeypatch.setattr(timing.Graph, "__init__", initialize)
    for name in ("randn", "randint", "empty"):
        monkeypatch.setattr(torch, name, move_to_cpu(getattr(torch, name)))
    monkeypatch.setattr(runner, "CEILING_GEMMS", ((2, 2, 2), (8, 8, 16), (4, 4, 4)))
    monkeypatch.setattr(runner, "CEILING_BYTES", 2**10)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 2**10)
    monkeypatch.setattr(machine, "get_driver_version", lambda: "1.2")
    return state


def move_to_cpu(function):
    """Wrap a function: replace each FakeDevice argument by the CPU."""

    def call(*arguments, **candidates_by_name):
        arguments = [torch.device("cpu") if isinstance(a, FakeDevice) else a for a in arguments]
        if isinstance(candidates_by_name.get("device"), FakeDevice):
            candidates_by_name["device"] = torch.device("cpu")
        return function(*arguments, **candidates_by_name)

    return call


def test_all_gpu_columns_are_measured(fake_gpu, monkeypatch):
    """A candidate that cannot be captured in a graph has a note and loop times."""
    monkeypatch.setattr(timing, "MAX_REPEATS", 1)  # every burst takes the same time here
    gradients = {}

    class NoCapture(AutogradCandidate):
        def prepare(self, direction):
            call = super().prepare(direction)

            def call_outside_capture():
                gradients[direction] = torch.is_grad_enabled()
                if fake_gpu["capturing"]:
                    fake_gpu["capturing"] = False
                    raise RuntimeError("cannot be captured in a CUDA graph")
                return call()

            return call_outside_capture

    def build(problem):
        return NoCapture(candidates.eager, problem.leaves, problem.grad_output, note="a detour")

    selected = (FLOOR, EAGER, Candidate("mine", "ours", build))
    benchmark = dataclasses.replace(
        BENCHMARK, make_problem=move_to_cpu(candidates.make_problem), cpu_bound_sizes=Sizes(3, 2, 4)
    )
    run = make_bench(*selected, columns=COLUMNS, benchmark=benchmark, device=FakeDevice())
    run.run()
    assert run.num_failures == 0, get_output(run)
    cells = {(row["candidate"], row["pass"], row["column"]): row for row in run.rows}
    for direction in ("forward", "backward", "both"):
        for name in ("bare GEMMs", "eager"):
            graph = cells[name, direction, "graph"]
            assert float(graph["median_us"]) == pytest.approx(50.0) and graph["device"] == "Pretend GPU"
            assert graph["driver"] == "1.2" and "60-80 ms idle" in str(graph["protocol"])
            assert float(cells[name, direction, "cold"]["median_us"]) > 0
            assert float(graph["ratio_to_floor"]) == pytest.approx(1)
        not_captured = cells["mine", direction, "graph"]
        assert not_captured["note"] == "cannot be captured: RuntimeError: cannot be captured in a CUDA graph"
        assert not_captured["median_us"] == ""
        assert float(cells["mine", direction, "loop"]["median_us"]) == pytest.approx(50.0)
        assert cells["mine", direction, "loop"]["note"] == "a detour"
    assert gradients == {"inference": False, "forward": True, "backward": True, "both": True}
    for direction in ("inference", "forward", "both"):
        host = cells["eager", direction, "host"]
        assert (host["M"], host["H"], host["O"]) == (3, 2, 4) and float(host["median_us"]) > 0
        assert host["ratio_to_floor"] == host["tflops"] == ""
    memory = cells["eager", "both", "memory"]
    assert memory["peak_bytes"] == 1600
    ceiling, copy = (cells[name, "", "ceiling"] for name in ("matmul ceiling", "copy ceiling"))
    # Every burst takes the same time here, so the largest product is the fastest.
    assert ceiling["note"] == "8 rows, 8 -> 16" and ceiling["M"] == copy["note"] == ""
    for row, rate, work in ((ceiling, "tflops", 2 * 8 * 8 * 16 / 1e12), (copy, "gbs", 2 * 2**10 / 1e9)):
        assert float(row[rate]) == pytest.approx(work / float(row["median_us"]) / 1e-6, rel=0.02)
    assert "matmul ceiling of this run" in get_output(run)


def test_memory_of_earlier_calls_is_not_counted(monkeypatch):
    """The call collects an earlier reference cycle that owns memory."""
    allocated = [100]

    class Cycle:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            allocated[0] -= 40

    def call():
        gc.collect()
        allocated[0] += 30
        return (torch.empty(0),)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated[0])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: allocated[0])
    Cycle()
    assert metrics.measure_peak_bytes(call) == 30


@pytest.mark.gpu
def test_graph_and_memory_columns_can_be_combined(tmp_path):
    file = tmp_path / "rows.csv"
    options = ["--bench", "--sizes", "1,2,64,64,1", "--columns", "memory,graph", "--csv", str(file)]
    completed = subprocess.run(
        [sys.executable, "-m", "harness", "p23", *options], capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    timed = {row["candidate"] for row in rows if row["column"] == "graph" and row["median_us"]}
    assert timed >= {"attention", "portable", "flash"}, [row["note"] for row in rows]
