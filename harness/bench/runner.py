"""Run a benchmark: check and time the candidates, print the rows, and pass them to `on_row`."""

import functools
import gc
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

import torch
from rich.console import Console
from rich.text import Text

from harness.bench import metrics, timing
from harness.bench.benchmark import (
    DTYPES,
    PASSES,
    AutogradCandidate,
    Benchmark,
    BuiltCandidate,
    Call,
    Candidate,
    Problem,
    Sizes,
    Unavailable,
    make_eager,
)
from harness.bench.machine import describe_machine

ROUNDS = 7
"""Number of measurements per candidate."""
LAUNCH_BOUND_US = 20.0
"""Shorter times are bound by launch latency, and therefore inconclusive."""
CEILING_GEMMS, CEILING_BYTES = ((8192, 8192, 8192), (16384, 4096, 12288)), 2**30
"""Sizes (rows, inner, columns) of large GEMMs and of a copy, which measure the GPU's maximum rates."""
MACHINE_COLUMNS = ("device", "driver", "torch", "triton", "max", "date", "protocol")
RESULT_COLUMNS = (
    *("dtype", "pass", "candidate", "role", "column"),
    *("median_us", "p20_us", "p80_us", "samples"),
    *("ratio_to_floor", "ratio_to_fastest_peer", "fastest_peer"),
    *("tflops", "gbs", "error", "saved_bytes", "peak_bytes", "note"),
)
"""The CSV's columns are MACHINE_COLUMNS, the size names, then RESULT_COLUMNS."""
Row = dict[str, str | int | float]
"""A row of the CSV: column -> value."""


class WrongGraphResult(Exception):
    """Raised if the results of a CUDA graph differ from those of the captured call."""


@dataclass
class CheckedCandidate:
    """A candidate that is correct at one size, as built for this size, and its errors by quantity."""

    candidate: Candidate
    built: BuiltCandidate
    errors: metrics.Errors

    def get_error(self, names: Iterable[str]) -> float:
        """Return the largest relative Frobenius error of these quantities; NaN for the floor."""
        return max((self.errors[name][0] for name in names if name in self.errors), default=float("nan"))


@dataclass
class BenchmarkRun:
    """A run of a benchmark: settings and results."""

    benchmark: Benchmark
    sizes: list[Sizes]
    dtype: str
    columns: tuple[str, ...]
    device: torch.device
    console: Console
    on_row: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)
    num_failures: int = 0

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def fields(self) -> tuple[str, ...]:
        return (*MACHINE_COLUMNS, *self.benchmark.size_names, *RESULT_COLUMNS)

    def print_text(self, text: str = "", style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    def run(self) -> None:
        """Measure the requested columns at all sizes."""
        timed_columns = [column for column in self.columns if column != "host"]
        if self.is_cuda and self.sizes and {"graph", "loop", "cold"} & set(timed_columns):
            self.measure_ceilings()
        for sizes in self.sizes if timed_columns else ():
            self.run_size(sizes, timed_columns)
        if "host" in self.columns:
            self.run_size(self.benchmark.cpu_bound_sizes, ["host"])

    def run_size(self, sizes: Sizes, columns: list[str]) -> None:
        """Measure these columns at one size, then free its tensors."""
        if "torch._dynamo" in sys.modules:  # otherwise nothing is cached, and importing it takes seconds
            torch.compiler.reset()
        try:
            problem = self.benchmark.make_problem(sizes, DTYPES[self.dtype], self.device)
            truth = self.benchmark.compute_truth(problem)
            eager_errors = metrics.compute_errors(self.benchmark.compute_results(make_eager(problem)), truth)
        except (RuntimeError, MemoryError) as error:  # torch reports out of memory as RuntimeError
            all_candidates = Candidate("all candidates", "", make_eager)
            self.record_omission(sizes, all_candidates, "all", f"skipped: {format_error(error)}")
            return
        self.print_text(f"{sizes}: checking the candidates ...")
        selected = [entry for entry in self.benchmark.candidates if set(entry.columns) & set(columns)]
        prepared = (self.prepare(candidate, problem, truth, eager_errors) for candidate in selected)
        checked = [entry for entry in prepared if entry]
        del truth
        if "memory" in columns:
            self.measure_memory(problem, checked)
        for column in (column for column in columns if column != "memory"):
            for direction in PASSES if column == "host" else PASSES[1:]:
                if (column, direction) != ("host", "backward"):  # autograd calls it, not the user
                    self.measure(problem, checked, direction, column)
        del problem, checked
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    # ---- Candidates, checked

    def prepare(
        self, candidate: Candidate, problem: Problem, truth, eager_errors: metrics.Errors
    ) -> CheckedCandidate | None:
        """Build and check one candidate; report and return None if it is missing, fails, or is wrong."""
        try:
            calls = candidate.build(problem)
            if candidate.role == "floor":
                return CheckedCandidate(candidate, calls, {})
            measured = metrics.compute_errors(self.benchmark.compute_results(calls), truth)
        except (Unavailable, ImportError) as reason:
            description = f"not installed ({reason})" if isinstance(reason, ImportError) else reason
            self.record_omission(problem.sizes, candidate, "all", f"skipped: {description}")
            return None
        except Exception as error:  # a peer or an incomplete package may raise anything
            is_ours = candidate.role == "ours"
            self.num_failures += is_ours
            description = f"{'FAILED' if is_ours else 'skipped'}: {format_error(error)}"
            self.record_omission(problem.sizes, candidate, "all", description)
            return None
        if large_errors := metrics.describe_large_errors(measured, eager_errors, problem.dtype):
            self.num_failures += 1
            worst = max(pair[0] for pair in measured.values())
            self.record_omission(
                problem.sizes, candidate, "all", f"WRONG: {'; '.join(large_errors)}", error=worst
            )
            return None
        return CheckedCandidate(candidate, calls, measured)

    # ---- Columns

    def measure(self, problem: Problem, checked: list[CheckedCandidate], direction: str, column: str) -> None:
        """Measure one pass in one column, for all candidates in turns."""
        with torch.set_grad_enabled(direction != "inference"):
            calls = self.make_calls(problem, checked, direction, column)
            protocol = self.choose_protocol(column)
            times = timing.time_interleaved(calls, self.choose_clock(column), protocol)
        rows = self.make_rows(problem.sizes, checked, direction, column, times, protocol)
        for row in rows:
            self.add_row(row)
        if rows:
            self.print_table(f"{problem.sizes}, {direction}, {column}", rows)

    def make_calls(
        self, problem: Problem, checked: list[CheckedCandidate], direction: str, column: str
    ) -> dict:
        """Return the calls to time by candidate; report those that fail or cannot be captured."""
        calls = {}
        for entry in (entry for entry in checked if column in entry.candidate.columns):
            prepare = functools.partial(entry.built.prepare, direction)
            try:
                if column == "graph":
                    calls[entry.candidate.name] = graph = timing.Graph(prepare)
                    self.check_graph(graph, entry, problem, direction)
                elif column == "waited":
                    calls[entry.candidate.name] = make_synchronized_call(prepare(), entry.built)
                else:
                    calls[entry.candidate.name] = prepare()
            except Exception as error:  # as in `prepare`
                calls.pop(entry.candidate.name, None)
                not_captured = column == "graph" and not isinstance(error, WrongGraphResult)
                failure = "cannot be captured" if not_captured else "FAILED"
                self.num_failures += entry.candidate.role == "ours" and not not_captured
                reason = f"{failure}: {format_error(error)}"
                self.record_omission(problem.sizes, entry.candidate, column, reason, direction)
        return calls

    def check_graph(
        self, graph: timing.Graph, entry: CheckedCandidate, problem: Problem, direction: str
    ) -> None:
        """Raise WrongGraphResult if a replay's results differ from the eager ones, as when a launch was not captured."""
        expected = [tensor.clone() for tensor in entry.built.prepare(direction)()]
        for tensor in graph.outputs:
            tensor.detach().fill_(float("nan"))
        graph()
        torch.cuda.synchronize()
        tolerance = 2 * torch.finfo(problem.dtype).eps + 1e-4  # a captured GEMM may use another algorithm
        for got, eager in zip(graph.outputs, expected, strict=True):
            difference = (got.detach().float() - eager.detach().float()).norm()
            if not difference <= tolerance * eager.detach().float().norm():
                raise WrongGraphResult("the replayed graph does not write what a plain call writes")

    def choose_clock(self, column: str):
        if not self.is_cuda or column == "waited":
            return timing.WallClock()
        if column == "host":
            return timing.LaunchClock(timing.CudaClock())
        return timing.ColdClock(self.device) if column == "cold" else timing.CudaClock()

    def choose_protocol(self, column: str) -> timing.TimingProtocol:
        if column == "graph":
            return timing.TimingProtocol(ROUNDS, burst_us=4_000, pause_s=(0.06, 0.08))
        if column == "host":
            return timing.TimingProtocol(ROUNDS, burst_us=2_000)
        return timing.TimingProtocol(ROUNDS, burst_us=20_000 if self.is_cuda else 200_000)

    def make_rows(
        self,
        sizes: Sizes,
        checked: list[CheckedCandidate],
        direction: str,
        column: str,
        times: dict[str, list[float]],
        protocol: timing.TimingProtocol,
    ) -> list[Row]:
        """Return the CSV rows of one pass in one column."""
        roles = {entry.candidate.name: entry.candidate.role for entry in checked}
        medians = {name: timing.summarize(samples).median for name, samples in times.items()}
        peers = {name: medians[name] for name in times if roles[name] == "peer"}
        fastest_peer = min(peers, key=lambda name: peers[name], default="")
        rows = []
        for entry in (entry for entry in checked if entry.candidate.name in times):
            samples = times[entry.candidate.name]
            row = self.start_row(sizes, entry.candidate, direction, column)
            row |= {"protocol": str(protocol), "samples": len(samples), **format_times(samples)}
            row["note"] = entry.built.note or entry.candidate.get_version()
            error = entry.get_error(self.benchmark.list_quantities(direction))
            row["error"] = f"{error:.2e}" if entry.errors else ""
            if column != "host":
                microseconds = medians[entry.candidate.name]
                row["tflops"] = f"{sizes.count_flops(direction) / microseconds / 1e6:.4g}"
                row |= compute_ratios(entry.candidate.name, times, self.benchmark.floor, fastest_peer)
            rows.append(row)
        return rows

    def start_row(self, sizes: Sizes | None, candidate: Candidate, direction: str, column: str) -> Row:
        return {
            **describe_machine(self.device),
            **(asdict(sizes) if sizes else {}),
            "dtype": self.dtype,
            "pass": direction,
            "candidate": candidate.name,
            "role": candidate.role,
            "column": column,
        }

    def measure_ceilings(self) -> None:
        """Measure the rates of large GEMMs and of a large copy on this GPU; add a row for each ceiling."""
        dtype, device = DTYPES[self.dtype], self.device
        calls: dict[tuple[int, int, int] | str, Call] = {}
        for rows, inner, columns in CEILING_GEMMS:
            a = torch.randn(rows, inner, device=device).to(dtype)
            b = torch.randn(columns, inner, device=device).to(dtype)
            calls[rows, inner, columns] = lambda a=a, b=b: (torch.mm(a, b.T),)
        source = torch.randint(255, (CEILING_BYTES,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        calls["copy"] = lambda: (target.copy_(source),)
        protocol = self.choose_protocol("graph")
        times = timing.time_interleaved(calls, timing.CudaClock(), protocol)
        medians = {name: timing.summarize(samples).median for name, samples in times.items()}
        best = max(CEILING_GEMMS, key=lambda sizes: math.prod(sizes) / medians[sizes])
        best_sizes = "{:,} rows, {:,} -> {:,}".format(*best)
        ceilings = (
            (best, "matmul ceiling", "tflops", 2 * math.prod(best) / medians[best] / 1e6),
            ("copy", "copy ceiling", "gbs", 2 * source.nbytes / medians["copy"] / 1e3),
        )
        for key, name, unit, rate in ceilings:
            row = self.start_row(None, Candidate(name, "ceiling", make_eager), "", "ceiling")
            row |= {"protocol": str(protocol), "samples": len(times[key]), **format_times(times[key])}
            self.add_row(row | {unit: f"{rate:.4g}", "note": best_sizes if key == best else ""})
            self.print_text(f"{name} of this run: {rate:,.0f} {'TFLOP/s' if unit == 'tflops' else 'GB/s'}")

    def measure_memory(self, problem: Problem, checked: list[CheckedCandidate]) -> None:
        """Add a row for each candidate: bytes saved for the backward pass, and peak memory of both passes."""
        rows = []
        for entry in checked:
            if not isinstance(entry.built, AutogradCandidate):
                continue
            forward, both = entry.built.prepare("forward"), entry.built.prepare("both")
            row = self.start_row(problem.sizes, entry.candidate, "both", "memory")
            try:
                both()
                row["saved_bytes"] = metrics.measure_saved_bytes(forward, entry.built.leaves[1:])
                if self.is_cuda:
                    row["peak_bytes"] = metrics.measure_peak_bytes(both)
            except Exception as error:  # as in `prepare`
                self.record_omission(
                    problem.sizes, entry.candidate, "memory", f"fails: {format_error(error)}"
                )
                continue
            rows.append(row)
            self.add_row(row)
        self.print_text(f"{problem.sizes}, memory in MiB, without parameters and output", style="bold")
        for row in rows:
            cells = (row.get(name, "") for name in ("saved_bytes", "peak_bytes"))
            sizes = (f"{float(cell) / 2**20:,.2f}" if cell != "" else "-" for cell in cells)
            self.print_text(f"   {row['candidate']:<20}{'{:>12}{:>12}'.format(*sizes)} (saved, peak)")

    # ---- Rows

    def record_omission(
        self,
        sizes: Sizes,
        candidate: Candidate,
        column: str,
        reason: str,
        direction: str = "",
        error: float | None = None,
    ) -> None:
        """Add a row and print a line with the reason why a candidate is not measured."""
        row = self.start_row(sizes, candidate, direction, column) | {"note": reason}
        if error is not None:
            row["error"] = f"{error:.2e}"
        self.add_row(row)
        suffix = f" ({direction})" if direction else ""
        self.print_text(f"   {candidate.name}{suffix}: {reason}")

    def add_row(self, row: Row) -> None:
        row = {name: row.get(name, "") for name in self.fields}
        self.rows.append(row)
        self.on_row(row)

    def print_table(self, title: str, rows: list[Row]) -> None:
        """Print the candidates of one pass in one column, fastest first."""
        self.print_text(f"{title}, {self.dtype}: {rows[0]['protocol']}", style="bold")
        headings = ("median us", "p20", "p80", "/ floor", "/ best peer", "TFLOP/s")
        names = ("median_us", "p20_us", "p80_us", "ratio_to_floor", "ratio_to_fastest_peer", "tflops")
        self.print_text(
            f"   {'candidate':<20}" + "".join(f"{head:>12}" for head in headings) + f"{'error':>11}"
        )
        for row in sorted(rows, key=lambda row: float(row["median_us"])):
            cells = "".join(f"{row.get(name) or '-':>12}" for name in names)
            note = f"   {row['note']}" if row["note"] else ""
            line = f"   {row['candidate']:<20}{cells}{row['error'] or '-':>11}{note}"
            self.print_text(line, style="bold" if row["role"] == "ours" else "")


def make_synchronized_call(call: Call, calls: BuiltCandidate) -> Call:
    """Return a callable that runs the call and waits until it has finished."""

    def wait() -> tuple[torch.Tensor, ...]:
        results = call()
        calls.wait()
        return results

    return wait


def format_times(times: list[float]) -> Row:
    return {f"{name}_us": f"{value:.2f}" for name, value in asdict(timing.summarize(times)).items()}


def compute_ratios(name: str, times: dict[str, list[float]], floor: str, fastest_peer: str) -> Row:
    """Return a candidate's median ratios over the rounds; omit ratios of launch-bound times."""

    def is_conclusive(candidate: str) -> bool:
        return candidate in times and statistics.median(times[candidate]) >= LAUNCH_BOUND_US

    row: Row = {"fastest_peer": fastest_peer}
    if not is_conclusive(name):
        return row | {"note": f"launch-bound: below {LAUNCH_BOUND_US:g} us nothing is concluded"}
    if is_conclusive(floor):
        row["ratio_to_floor"] = f"{timing.compute_ratio(times[name], times[floor]):.4f}"
    if is_conclusive(fastest_peer):
        row["ratio_to_fastest_peer"] = f"{timing.compute_ratio(times[name], times[fastest_peer]):.4f}"
    return row


def format_error(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
