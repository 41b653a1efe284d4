"""`pNN --bench`: compared quantities, rejected options, errors and CSV columns; times are not asserted."""

import csv
import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from benches import EAGER, TINY, get_output, make_bench
from typed import unwrap

from harness.bench import command, metrics, runner
from harness.bench.benchmark import PASSES, AutogradCandidate, Candidate, Unavailable, find_benchmark
from harness.errors import UsageError
from harness.puzzles.p22 import candidates
from harness.puzzles.p22.candidates import BENCHMARK, Sizes

pytestmark = pytest.mark.usefixtures("short_bursts")
FIELDS = [
    "device", "driver", "torch", "triton", "max", "date", "protocol", "M", "H", "O", "dtype", "pass",
    "candidate", "role", "column", "median_us", "p20_us", "p80_us", "samples", "ratio_to_floor",
    "ratio_to_fastest_peer", "fastest_peer", "tflops", "gbs", "error", "saved_bytes", "peak_bytes", "note",
]  # fmt: skip
"""Columns of the CSV, a format shared with the book's tools and stored measurements."""


def read_rows(path):
    """Return the rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def make_scaled_candidate(factor, quantity):
    """Create a candidate like eager with one gradient or the output multiplied by a factor."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor, forward, backward):
            ctx.factor = backward
            return tensor * forward

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.factor, None, None

    def build(problem):
        def function(*leaves):
            names = candidates.QUANTITIES[1:]
            pairs = zip(names, leaves, strict=True)
            leaves = [Scale.apply(leaf, 1.0, factor if name == quantity else 1.0) for name, leaf in pairs]
            return Scale.apply(candidates.eager(*leaves), factor if quantity == "output" else 1.0, 1.0)

        return AutogradCandidate(function, problem.leaves, problem.grad_output)

    return Candidate("scaled", "peer", build)


# ---- Compared quantities ---------------------------------------------------------------------------------------


def test_each_pass_returns_its_quantities():
    problem = candidates.make_problem(TINY, torch.float32, torch.device("cpu"))
    truth = BENCHMARK.compute_truth(problem)
    calls = EAGER.build(problem)
    for direction in PASSES:
        prepared = calls.prepare(direction)
        with torch.set_grad_enabled(direction != "inference"):
            first, second = prepared(), prepared()
        names = BENCHMARK.list_quantities(direction)
        assert len(first) == len(names)
        for name, a, b in zip(names, first, second, strict=True):
            assert torch.equal(a, b)
            assert torch.allclose(a.detach().double(), truth[name], rtol=1e-4, atol=1e-4)
        assert direction in ("backward", "both") or first[0].requires_grad == (direction == "forward")


def test_saved_bytes_exclude_parameters_and_output():
    problem = candidates.make_problem(TINY, torch.float32, torch.device("cpu"))
    calls = EAGER.build(problem)
    M, H = TINY.M, TINY.H
    saved = metrics.measure_saved_bytes(calls.prepare("forward"), problem.leaves[1:])
    assert saved == 4 * (2 * M * H + 2 * M), "x, the LayerNorm output, mean and rstd"


def test_counting_saved_bytes_frees_the_graph():
    """A leftover AccumulateGrad node stays bound to its stream and would break later graph capture."""
    leaf = torch.randn(1, 1, 4, 8, requires_grad=True)

    def get_metadata() -> dict:
        accumulator = unwrap(unwrap(leaf.view(4, 8).grad_fn).next_functions[0][0])
        metadata: Any = accumulator.metadata  # torch's stubs wrongly declare this attribute as a method
        return metadata

    graph = leaf.view(4, 8)
    get_metadata()["kept"] = True
    assert "kept" in get_metadata(), "the accumulator lives as long as a graph"
    del graph
    metrics.measure_saved_bytes(
        lambda: (torch.nn.functional.scaled_dot_product_attention(leaf, leaf, leaf),), ()
    )
    assert "kept" not in get_metadata()


# ---- Correctness -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", candidates.QUANTITIES)
def test_wrong_candidate_is_not_timed(quantity):
    run = make_bench(EAGER, make_scaled_candidate(1.001, quantity))
    run.run()
    assert run.num_failures == 1
    rows = [row for row in run.rows if row["candidate"] == "scaled"]
    assert [row["column"] for row in rows] == ["all"]
    assert str(rows[0]["note"]).startswith(f"WRONG: {quantity} is off by 1.0e-03 of its norm")
    assert "scaled: WRONG" in get_output(run)
    assert rows[0]["median_us"] == "" and float(rows[0]["error"]) == pytest.approx(1e-3, rel=0.05)


def test_correct_candidate_is_timed():
    run = make_bench(EAGER, make_scaled_candidate(1.0, "output"))
    run.run()
    assert run.num_failures == 0
    assert {row["candidate"] for row in run.rows if row["column"] == "loop"} == {"eager", "scaled"}


def test_one_wrong_element_or_nan_fails():
    problem = candidates.make_problem(Sizes(400, 64, 96), torch.float32, torch.device("cpu"))
    truth = BENCHMARK.compute_truth(problem)
    eager_errors = metrics.compute_errors(BENCHMARK.compute_results(EAGER.build(problem)), truth)
    result = {name: tensor.clone() for name, tensor in truth.items()}
    assert (
        metrics.describe_large_errors(metrics.compute_errors(result, truth), eager_errors, torch.float32)
        == []
    )
    result["output"][7, 3] += 1e-4 * truth["output"].abs().max()
    faults = metrics.describe_large_errors(metrics.compute_errors(result, truth), eager_errors, torch.float32)
    assert any("output is off by 1.0e-04 of its largest value" in fault for fault in faults)
    result["grad_bias"][0] = float("nan")
    faults = metrics.describe_large_errors(metrics.compute_errors(result, truth), eager_errors, torch.float32)
    assert any("grad_bias is off by nan" in fault for fault in faults)


def test_errors_are_absolute_where_truth_is_zero():
    zero = torch.zeros(3)
    assert metrics.compute_errors({"dx": zero}, {"dx": zero.double()}) == {"dx": (0.0, 0.0)}
    assert metrics.compute_errors({"dx": zero + 2}, {"dx": zero.double()})["dx"][1] == 2.0


# ---- Rejected runs -----------------------------------------------------------------------------------------------


def test_launch_bound_times_have_no_ratio():
    times = {"bare GEMMs": [30.0, 40.0], "ours": [33.0, 44.0], "peer": [60.0, 80.0], "tiny": [19.0, 20.0]}
    assert runner.compute_ratios("ours", times, "bare GEMMs", "peer") == {
        "fastest_peer": "peer",
        "ratio_to_floor": "1.1000",
        "ratio_to_fastest_peer": "0.5500",
    }
    reason = runner.compute_ratios("tiny", times, "bare GEMMs", "peer")
    assert "launch-bound" in str(reason["note"])
    assert not {"ratio_to_floor", "ratio_to_fastest_peer"} & set(reason)
    assert "ratio_to_fastest_peer" not in runner.compute_ratios("ours", times, "bare GEMMs", "tiny")
    times["bare GEMMs"] = [5.0, 5.0]
    assert "ratio_to_floor" not in runner.compute_ratios("ours", times, "bare GEMMs", "peer")
    assert runner.compute_ratios("ours", {"ours": [50.0]}, "", "") == {"fastest_peer": ""}


def test_candidates_that_cannot_run_are_listed_with_a_reason():
    def raise_import_error(problem):
        raise ImportError("No module named 'peer'")

    def raise_unavailable(problem):
        raise Unavailable("needs a GPU")

    def raise_os_error(problem):
        raise OSError("libpeer.so: cannot open shared object file\nsecond line")

    def raise_runtime_error(problem):
        raise RuntimeError("launch failed")

    peers = {"absent": raise_import_error, "elsewhere": raise_unavailable, "broken": raise_os_error}
    others = [Candidate(name, "peer", build) for name, build in peers.items()]
    run = make_bench(EAGER, *others, Candidate("crash", "ours", raise_runtime_error))
    run.run()
    notes = {row["candidate"]: row["note"] for row in run.rows if row["column"] == "all"}
    assert notes == {
        "absent": "skipped: not installed (No module named 'peer')",
        "elsewhere": "skipped: needs a GPU",
        "broken": "skipped: OSError: libpeer.so: cannot open shared object file second line",
        "crash": "FAILED: RuntimeError: launch failed",
    }
    assert "   absent: skipped: not installed" in get_output(run)
    assert run.num_failures == 1, "only an exception in our variant is a fault"


def test_failure_in_one_column_does_not_stop_the_others():
    class ForwardOnly(AutogradCandidate):
        def prepare(self, direction):
            if direction == "backward":
                raise RuntimeError("no double run")
            return super().prepare(direction)

    def build(problem):
        return ForwardOnly(candidates.eager, problem.leaves, problem.grad_output)

    candidate = Candidate("half", "ours", build)
    run = make_bench(EAGER, candidate, columns=("loop",))
    run.run()
    assert run.num_failures == 1
    candidate = {(row["pass"], row["column"]): row for row in run.rows if row["candidate"] == "half"}
    assert candidate["backward", "loop"]["note"] == "FAILED: RuntimeError: no double run"
    assert (
        candidate["backward", "loop"]["median_us"] == "" and float(candidate["both", "loop"]["median_us"]) > 0
    )


def test_out_of_memory_reports_the_size():
    def raise_out_of_memory(*arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    run = make_bench(EAGER, benchmark=dataclasses.replace(BENCHMARK, make_problem=raise_out_of_memory))
    run.run()
    assert "can't allocate memory" in str(run.rows[0]["note"]) and len(run.rows) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["p99"], "unknown puzzle 'p99'; there is "),
        (["p22", "--sizes", "12,0,4"], "--sizes: '12,0,4' is neither"),
        (["p22", "--sizes", "S0;S9"], "--sizes: 'S9' is neither"),
        (["p22", "--columns", "blue"], "--columns: 'blue' is not one of graph, loop"),
        (["p22", "--csv", "/nonexistent/times.csv"], "--csv /nonexistent/times.csv: No such file"),
        (["p22", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["p22", "--fastest"], "unrecognized arguments: --fastest"),
    ],
)
def test_usage_error_prints_one_line_and_exits_with_2(command_line, arguments, message):
    result = command_line(*arguments, "--bench")
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and message in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize(
    "arguments", [["--dtype", "tf32"], ["--columns", "graph"], ["--columns", "cold,host"]]
)
def test_gpu_only_options_are_rejected_on_a_cpu(command_line, arguments):
    result = command_line("p22", "--bench", *arguments)
    assert result.code == 2 and "needs a GPU, and PyTorch sees none" in result.err


def test_random_sizes_are_seeded_and_cover_all_magnitudes():
    sizes = command.parse_sizes(BENCHMARK, "drawn")
    assert len(sizes) == 20 and sizes == candidates.draw_sizes(12) != candidates.draw_sizes(13)
    many_sizes = candidates.draw_sizes(1, 400)
    for name, low, high in (("M", 16, 32768), ("H", 64, 16384), ("O", 64, 16384)):
        values = [getattr(size, name) for size in many_sizes]
        assert low <= min(values) and max(values) <= high
        # The median is near the geometric mean of the bounds.
        assert 0.4 < sum(value < (low * high) ** 0.5 for value in values) / len(values) < 0.6
        assert name == "M" or sum(value % 64 == 0 for value in values) > 0.3 * len(values)
        assert any(value % 2 for value in values)


def test_sizes_are_parsed_from_names_and_numbers():
    assert command.parse_sizes(BENCHMARK, "S0; 16,8 , 4") == [Sizes(4096, 768, 3072), Sizes(16, 8, 4)]
    assert command.parse_sizes(BENCHMARK, "climb")[-1:] == command.parse_sizes(BENCHMARK, "gpt2")


# ---- From end to end ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_end_to_end_on_the_cpu(command_line, cpu_graphs, tmp_path):
    cpu_graphs()
    target = tmp_path / "bench.csv"
    flags = ("--sizes", "24,16,32", "--columns", "loop,memory,waited", "--csv", target)
    result = command_line("p22", "--bench", *flags)
    assert result.code == 0
    assert "No GPU here: these are times of the CPU paths" in result.out
    assert "24 rows, 16 -> 32, both, loop" in result.out and "\x1b" not in result.out
    rows = read_rows(target)
    assert list(rows[0]) == FIELDS
    timed = [row for row in rows if row["column"] in ("loop", "waited")]
    names = ("bare GEMMs", "fast", "eager", "compile")
    synchronized_only = ("fused through MAX", "unfused through MAX")
    assert {(row["candidate"], row["pass"], row["column"]) for row in timed} == {
        (name, direction, column)
        for column, column_candidates in (("loop", names), ("waited", names + synchronized_only))
        for name in column_candidates
        for direction in ("forward", "backward", "both")
    }
    for row in timed:
        assert (row["M"], row["H"], row["O"], row["dtype"]) == ("24", "16", "32", "float32")
        assert row["device"].startswith("CPU ") and row["torch"] == torch.__version__ and row["max"]
        assert 0 < float(row["p20_us"]) <= float(row["median_us"]) <= float(row["p80_us"])
        assert row["samples"] == "7" and row["protocol"] == "200 ms of calls, 7 shuffled rounds"
        tflops = 2 * 24 * 16 * 32 * candidates.NUM_GEMMS[row["pass"]] / float(row["median_us"]) / 1e6
        assert float(row["tflops"]) == pytest.approx(tflops, rel=0.01)
        if row["role"] != "floor":
            assert 0 <= float(row["error"]) < 1e-5
        if row["candidate"] == row["fastest_peer"] and row["ratio_to_fastest_peer"]:
            assert float(row["ratio_to_fastest_peer"]) == 1
    memory = {row["candidate"]: int(row["saved_bytes"]) for row in rows if row["column"] == "memory"}
    x, statistics = 4 * 24 * 16, 8 * 24
    # Without kernels the layer falls back to PyTorch.
    assert memory["fast"] == memory["eager"] == 2 * x + statistics
    notes = {row["candidate"]: row["note"] for row in rows if row["column"] == "all"}
    assert notes == {
        "least memory": "skipped: only the kernels choose between time and memory",
        "liger": "skipped: its Triton kernels need a GPU",
    }
    assert f"{len(rows)} rows, in {target}" in result.out


def test_waited_column_waits_after_each_call(monkeypatch):
    """The candidate logs calls of `wait`."""
    order = []

    class AsynchronousCalls(AutogradCandidate):
        def prepare(self, direction):
            call = super().prepare(direction)
            return lambda: order.append("call") or call()

        def wait(self):
            order.append("wait")

    asynchronous = Candidate(
        "late",
        "ours",
        lambda problem: AsynchronousCalls(candidates.eager, problem.leaves, problem.grad_output),
    )
    run = make_bench(EAGER, asynchronous, columns=("waited",))
    run.run()
    calls = order[order.index("wait") - 1 :]
    assert calls[:6] == ["call", "wait"] * 3


def test_puzzle_without_benchmark_is_rejected(puzzle):
    with pytest.raises(UsageError, match="p22 --bench: p22 has no benchmark"):
        find_benchmark(dataclasses.replace(puzzle, bench=""))


def test_wrong_candidate_exits_with_1(command_line, monkeypatch):
    candidates_to_run = (EAGER, Candidate("fast", "ours", make_scaled_candidate(1.01, "grad_input").build))
    monkeypatch.setattr(candidates, "BENCHMARK", dataclasses.replace(BENCHMARK, candidates=candidates_to_run))
    result = command_line("p22", "--bench", "--sizes", "8,4,4", "--columns", "memory")
    assert result.code == 1
    assert "fast: WRONG: grad_input" in result.out and "1 wrong or failed" in result.out


def test_interrupt_saves_the_rows_and_exits_with_130(tmp_path):
    """Use a new process, because the command line exits immediately."""
    target = tmp_path / "rows.csv"
    program = f"""
import dataclasses, sys
from harness import cli
from harness.bench import runner
from harness.puzzles.p22 import candidates

def measure(self, problem, ready, direction, column):
    if direction == "backward":
        raise KeyboardInterrupt
    original(self, problem, ready, direction, column)

original, runner.BenchmarkRun.measure = runner.BenchmarkRun.measure, measure
candidates.BENCHMARK = dataclasses.replace(
    candidates.BENCHMARK, candidates=tuple(one for one in candidates.CANDIDATES if one.name in ("bare GEMMs", "eager"))
)
sys.exit(cli.main(["p22", "--bench", "--sizes", "8,4,4", "--columns", "loop", "--csv", {str(target)!r}]))
"""
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert completed.returncode == 130, completed.stderr
    assert f"interrupted after 2 rows, in {target}" in completed.stdout
    assert [(row["candidate"], row["pass"]) for row in read_rows(target)] == [
        ("bare GEMMs", "forward"),
        ("eager", "forward"),
    ]


def test_help_lists_the_benchmark_flags(command_line):
    result = command_line("p22", "--bench", "--help")
    assert result.code == 0
    flags = "--bench --help --sizes --dtype --columns --csv"
    assert set(re.findall(r"--\w+", result.out)) == {*flags.split()}
