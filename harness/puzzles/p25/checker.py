"""Checkers of puzzle 25's rungs: each blank is tested with the solution's code in all others.

Output and gradients are compared with attention on one device. The NumPy rung runs all ranks in one process,
on lists; the PyTorch rung starts one process per rank for each gate.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.check.diagnose import Evidence, format_pointer
from harness.check.python_files import CaseChecker, add_diagnoses, describe_exception
from harness.check.reference import Reference
from harness.check.results import GateResult
from harness.devices.processes import START_TIMEOUT_S, RankError, run_ranks
from harness.puzzles.p25 import layout
from harness.puzzles.p25.ranks import (
    TIMEOUT_S,
    Part,
    RankResult,
    describe_changed_input,
    load_functions,
    run_cases,
)
from harness.puzzles.p25.spec import RESULTS, explain_not_finite, get_dtype, is_transposed
from harness.spec.puzzle import Arrays, Case, Gate, Puzzle
from harness.spec.rungs import Rung
from harness.toolchain import roots

INPUT_NAMES = ("query", "key", "value", "grad_output")
CAUSED_BY_OUTPUT = f"is {format_pointer('output')}"
"""The message about gradients that are wrong only because the output is."""
TIME_LIMIT_S = 120.0
"""Time limit of a gate's processes; a rank that waits for another times out much earlier."""


class CaseError(Exception):
    """A case failed without results; `mistake` is the known mistake that explains it, or ""."""

    def __init__(self, message: str, mistake: str = ""):
        super().__init__(message)
        self.mistake = mistake


class RingChecker(CaseChecker):
    """Base class of both rungs' checkers; each case's reference and baseline are computed only once."""

    receiving_gates: tuple[str, ...] = ()
    """Gates whose code may read a block before it arrives."""

    def __init__(self, puzzle: Puzzle, rung: Rung, *, seed: int = 0):
        super().__init__(puzzle, rung, seed=seed)
        self.references = {dtype: Reference(puzzle, dtype, seed) for dtype in ("float32", "bfloat16")}

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        import torch

        result = GateResult(gate, "correct")
        ladder = self.puzzle.get_ladder_name(self.rung, gate.id)
        solution = roots.get_solutions() / self.puzzle.name / self.rung.file
        evidence: dict[str, list[Evidence]] = {}
        failure: CaseError | None = None
        try:
            if gate.id == "balanced":
                check_chunks(module["chunks"], path)
            for case, outputs in self._run(gate, path, solution, cases):
                # Errors in other quantities would only be consequences of errors in these.
                dtype = getattr(torch, get_dtype(case))
                gate_outputs = {name: torch.from_numpy(outputs[name]).to(dtype) for name in gate.quantities}
                self._compare(result, case, gate_outputs, evidence)
            row_failure = (
                check_merge_rows(module["merge"], path, self.make_tensor) if gate.id == "merge" else None
            )
            if row_failure and (row_failure.mistake or not evidence):
                evidence.clear()  # single rows explain the error better
                raise row_failure
        except CaseError as error:
            failure = error
        if evidence:
            symptom = functools.partial(explain_not_finite, gate.id in self.receiving_gates)
            puzzle = replace(self.puzzle, find_symptom=symptom)
            root_causes = {"output": evidence["output"]} if "output" in evidence else evidence
            add_diagnoses(result, puzzle, root_causes, ladder)
            consequences = (puzzle.get_printed_name(name) for name in evidence if name not in root_causes)
            result.diagnosis += [f"{name} {CAUSED_BY_OUTPUT}" for name in consequences]
        if failure:
            result.state = "wrong"
            result.diagnosis.append(str(failure))
            result.mistake = result.mistake or failure.mistake or None
            result.hint = result.hint or f"{ladder}-2"
        if result.state == "correct":
            result.summary = self.summarize(cases)
        return result

    def _get_reference(self, case: Case) -> Reference:
        return self.references[get_dtype(case)]

    def make_tensor(self, values: object):
        raise NotImplementedError

    def get_arrays(self, case: Case) -> Arrays:
        return self._get_reference(case).get_arrays(case)

    def summarize(self, cases: list[Case]) -> str:
        return ""

    def _run(self, gate: Gate, path: Path, solution: Path, cases: list[Case]):
        """Yield each case with the output and gradients of the whole sequence. Raises CaseError."""
        raise NotImplementedError


LAYOUTS = (
    (2, 8), (4, 16), (4, 64), (3, 19), (4, 3), (1, 5), (5, 20), (5, 23), (6, 31), (7, 6), (8, 67), (9, 100),
)  # fmt: skip
"""Arguments of `chunks` to check: number of ranks, and length."""


def check_chunks(chunks, path: Path) -> None:
    """Check the ranges that `chunks` returns for the balanced layout. Raises CaseError."""
    for size, length in LAYOUTS:
        for rank in range(size):
            expected = layout.get_ranges(rank, size, length, True)
            call = f"chunks({rank}, {size}, {length}, True)"
            try:
                got = [tuple(map(int, span)) for span in chunks(rank, size, length, True)]
            except Exception as error:  # an exception in the learner's code is a result
                raise CaseError(f"{call}: {describe_exception(error, path)}") from error
            if got == expected:
                continue
            positions = [int(p) for span in got for p in range(*span)]
            ranges = (chunks(r, size, length, True) for r in range(size))
            num_scores = [sum(p + 1 for span in spans for p in range(*span)) for spans in ranges]
            message = f"{call} is {got}, expected {expected}"
            if len(positions) == sum(stop - start for start, stop in expected) and max(
                num_scores
            ) > 1.1 * min(num_scores):
                max_rank, min_rank = num_scores.index(max(num_scores)), num_scores.index(min(num_scores))
                message += f": rank {max_rank} has {max(num_scores)} scores to compute, rank {min_rank} has {min(num_scores)}"
                raise CaseError(message, "not-mirrored")
            raise CaseError(message, "wrong-chunks")


@dataclass(frozen=True)
class MergeCase:
    """One row on which `merge` is tested.

    Attributes:
        out, lse, block_out, block_lse: The arguments of `merge`.
        expected: The expected out and lse.
        nonfinite_cause: The cause to report for an unexpected NaN or infinity, or ""; `mistake` is its id.
        other_error: The cause and mistake to report for any other wrong result.
    """

    out: float
    lse: float
    block_out: float
    block_lse: float
    expected: tuple[float, float]
    nonfinite_cause: str = ""
    mistake: str = ""
    other_error: tuple[str, str] = ("", "")


INF_MINUS_INF_CAUSE = "-inf - -inf is NaN"
EMPTY_SIDE_ERROR = (
    "a side with no visible key has weight exp(-inf) = 0: do not clamp it or add a small number",
    "share-of-nothing",
)
OVERFLOW_ERROR = (
    "exp(800) is infinite, exp(-800) is 0 and its logarithm -inf: take exponentials of differences only",
    "merge-overflows",
)
NAN_ERROR = ("NaN in an input must give NaN in the result", "nan-swallowed")
inf, nan = np.inf, np.nan
MERGE_CASES = (
    MergeCase(1, 0.5, 2, 1.5, (1 + 1 / (1 + np.exp(-1)), np.logaddexp(0.5, 1.5))),
    MergeCase(1, 0.5, 2, 0.5, (1.5, 0.5 + np.log(2))),
    MergeCase(0, -inf, 5, 0.75, (5, 0.75), INF_MINUS_INF_CAUSE, "nothing-visible", EMPTY_SIDE_ERROR),
    MergeCase(3, 0.25, 0, -inf, (3, 0.25), INF_MINUS_INF_CAUSE, "nothing-visible", EMPTY_SIDE_ERROR),
    MergeCase(0, -inf, 0, -inf, (0, -inf), INF_MINUS_INF_CAUSE, "nothing-visible"),
    MergeCase(1, 800, 2, 800, (1.5, 800 + np.log(2)), *OVERFLOW_ERROR),
    MergeCase(1, -800, 2, -800, (1.5, -800 + np.log(2)), *OVERFLOW_ERROR),
    MergeCase(1, 800, 2, -800, (1, 800), *OVERFLOW_ERROR),
    MergeCase(1, -800, 2, 800, (2, 800), *OVERFLOW_ERROR),
    MergeCase(1, 0.5, nan, nan, (nan, nan), other_error=NAN_ERROR),
    MergeCase(nan, nan, 2, 0.5, (nan, nan), other_error=NAN_ERROR),
)
"""Rows to merge; the first wrong row is reported."""


def check_merge_rows(merge: Callable, path: Path, make_tensor: Callable) -> CaseError | None:
    """Call `merge` once on all MERGE_CASES; return the first failure, or None."""
    columns = np.array([(row.out, row.lse, row.block_out, row.block_lse) for row in MERGE_CASES]).T
    out, lse, block_out, block_lse = (make_tensor(column[None, None]) for column in columns)
    try:
        with np.errstate(all="ignore"):
            results = merge(out[..., None], lse, block_out[..., None], block_lse)
            outputs = [np.asarray(result, np.float64).ravel() for result in results]
    except Exception as error:  # an exception in the learner's code is a result
        return CaseError(f"merge: {describe_exception(error, path)}")
    if [len(values) for values in outputs] != [len(MERGE_CASES)] * 2:
        message = f"expected an out and an lse for each, got {list(map(len, outputs))}"
        return CaseError(f"merge of {len(MERGE_CASES)} rows: {message}")
    for row, *got in zip(MERGE_CASES, *outputs, strict=True):
        # If out or lse is unexpectedly not finite, an error in the other has the same cause.
        not_finite = any(
            not np.isfinite(value) and not np.array_equal(value, expected, equal_nan=True)
            for value, expected in zip(got, row.expected, strict=True)
        )
        for name, value, expected in zip(("out", "lse"), got, row.expected, strict=True):
            if np.isclose(value, expected, rtol=1e-12, atol=0, equal_nan=True):
                continue
            message, mistake = (row.nonfinite_cause, row.mistake) if not_finite else row.other_error
            return CaseError(
                f"merge of out {row.out:g}, lse {row.lse:g} with {row.block_out:g}, {row.block_lse:g}: "
                f"{name} is {value:.13g}, expected {expected:.13g}{': ' if message else ''}{message}",
                mistake,
            )
    return None


def get_ring_arguments(case: Case, arrays: Arrays) -> tuple[int, float, bool, bool]:
    S, d = case.dims[-2:]
    return S, d**-0.5, bool(arrays["causal"]), bool(arrays["balanced"])


class ListChecker(RingChecker):
    """Checks the NumPy rung, whose functions take a list with one entry per rank."""

    def make_tensor(self, values: object):
        return np.asarray(values, np.float64)

    def _run(self, gate: Gate, path: Path, solution: Path, cases: list[Case]):
        module = load_functions(path, solution, gate.id)
        for case in cases:
            arrays = self.get_arrays(case)
            size = case.world_size
            length, scale, causal, balanced = get_ring_arguments(case, arrays)
            parts = {name: layout.split_array(arrays[name], size, balanced) for name in INPUT_NAMES}
            ranges = [layout.get_ranges(rank, size, length, balanced) for rank in range(size)]
            qkv = [parts[name] for name in INPUT_NAMES[:3]]
            arguments = {name: [part.copy() for part in rank_arrays] for name, rank_arrays in parts.items()}
            try:
                with np.errstate(all="ignore"):
                    output, lse = module["ring_forward"](*qkv, ranges, scale, causal)
                    saved = (parts["grad_output"], *qkv, output, lse)
                    gradients = module["ring_backward"](*saved, ranges, scale, causal)
                by_rank: dict[str, list[np.ndarray]] = dict(zip(RESULTS, (output, *gradients), strict=True))
                check_shapes(by_rank, parts)
                for name, rank_arrays in parts.items():
                    if not all(map(np.array_equal, rank_arrays, arguments[name])):
                        message = f"in case '{case.name}': {describe_changed_input(name)}"
                        raise CaseError(message, "changed-input")
                results = {name: layout.join_parts(shards, balanced) for name, shards in by_rank.items()}
            except CaseError:
                raise
            except Exception as error:  # an exception in the learner's code is a result
                message = describe_exception(error, path, max_length=300)
                raise CaseError(f"in case '{case.name}': {message}") from error
            with np.errstate(over="ignore"):  # overflow to infinity in float32
                yield case, {name: array.astype(np.float32) for name, array in results.items()}


def check_shapes(by_rank: dict[str, list[np.ndarray]], parts: dict[str, list[np.ndarray]]) -> None:
    """Raise ValueError if a rank's part of a result does not have its input's shape."""
    for name, input_name in zip(RESULTS, ("query", "query", "key", "value"), strict=True):
        if by_rank[name] is None or len(by_rank[name]) != len(parts[input_name]):
            raise ValueError(f"{name}: expected a list with one array per rank")
        for rank, (got, input_part) in enumerate(zip(by_rank[name], parts[input_name], strict=True)):
            if np.shape(got) != input_part.shape:
                shapes = f"has shape {list(np.shape(got))}, expected {list(input_part.shape)}"
                raise ValueError(f"{name} of rank {rank} {shapes}")


class RanksChecker(RingChecker):
    """Checks the PyTorch rung in gloo processes, with a timeout of `timeout_s` per transfer."""

    timeout_s = TIMEOUT_S
    receiving_gates = ("steps", "exchange", "home")

    def get_time_limit(self, cases: list[Case]) -> float:
        return START_TIMEOUT_S + 2 * TIME_LIMIT_S

    def make_tensor(self, values: object):
        import torch

        return torch.tensor(values, dtype=torch.float64)

    def summarize(self, cases: list[Case]) -> str:
        ranks, cores = max(case.world_size for case in cases), os.cpu_count() or 1
        return f"{ranks} processes shared {cores} cores" if ranks > cores else f"{ranks} processes"

    def _run(self, gate: Gate, path: Path, solution: Path, cases: list[Case]):
        world_size = max(case.world_size for case in cases)
        parts_by_case = [self._make_parts(case, world_size) for case in cases]
        parts = [[item[rank] for item in parts_by_case] for rank in range(world_size)]
        arguments = [(path, solution, gate.id, rank_parts, self.timeout_s) for rank_parts in parts]
        describe = functools.partial(describe_exception, path=path)
        try:
            results = run_ranks(
                run_cases, arguments, format_error=describe, source_file=path, timeout_s=TIME_LIMIT_S
            )
        except RankError as error:
            raise CaseError(str(error)) from error
        for case_index in range(len(results[0])):
            case = cases[case_index]
            case_results = [item[case_index] for item in results[world_size - case.world_size :]]
            if any(result.message for result in case_results):
                message, mistake = find_cause(case_results)
                raise CaseError(f"in case '{case.name}': {message}", mistake)
            balanced = bool(self.get_arrays(case)["balanced"])
            shards = {name: [result.values[name] for result in case_results] for name in RESULTS}
            yield case, {name: layout.join_parts(rank_parts, balanced) for name, rank_parts in shards.items()}

    def _make_parts(self, case: Case, world_size: int) -> list[Part]:
        """Return each process's part of a case: the last `case.world_size` are ranks, the others idle."""
        arrays, size = self.get_arrays(case), case.world_size
        arguments = get_ring_arguments(case, arrays)
        split = {name: layout.split_array(arrays[name], size, arguments[-1]) for name in INPUT_NAMES}
        rank_arrays = [
            {name: parts[rank].astype(np.float32) for name, parts in split.items()} for rank in range(size)
        ]
        return [
            Part(case.name, size, get_dtype(case), process_arrays, arguments, is_transposed(case))
            for process_arrays in [{}] * (world_size - size) + rank_arrays
        ]


def find_cause(results: list[RankResult]) -> tuple[str, str]:
    """Return a message with the cause of a failed case, and the known mistake, from the ranks' results."""
    failed = [(rank, result) for rank, result in enumerate(results) if result.message]
    size = len(results)
    # Prefer a rank that reports its own mistake to the ranks that waited for it.
    root_failures = [(rank, result) for rank, result in failed if result.blocked_wait is None]
    if root_failures:
        rank, result = min(root_failures, key=lambda item: (not item[1].mistake, item[0]))
        return f"rank {rank} of {size}: {result.message}", result.mistake
    message = "; ".join(f"rank {rank} of {size} {result.message}" for rank, result in failed)
    blocked = {rank: result.blocked_wait for rank, result in failed if result.blocked_wait}
    if len(blocked) == size and all(kind == "send" and not peers for kind, _, peers in blocked.values()):
        reason = "every rank sends before it receives, and a send ends only when it is received"
        return f"deadlock: {reason}: {message}", "sends-first"
    if len(blocked) == size and all(kind == "receive" for kind, _, _ in blocked.values()):
        return f"deadlock: every rank receives before it sends: {message}", "receives-first"
    for rank, (kind, peer, _) in blocked.items():
        peers = blocked[peer][2] if peer in blocked else ()
        if kind == "send" and peers and rank not in peers:
            message = f"rank {rank} of {size} sends to rank {peer}, which receives from rank {peers[0]}"
            return message, "wrong-neighbour"
    return message, ""
