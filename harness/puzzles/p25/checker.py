"""Checkers of puzzle 25's rungs: each blank separately, in a ring whose other blanks are the solution's.

The ring's output and all gradients are compared with attention on one device. The NumPy rung runs in this
process, with a list for the ranks; the PyTorch rung in as many processes as the largest case has ranks,
started once for a gate.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.check.diagnose import Evidence, sentence
from harness.check.python_files import CaseChecker, describe, explain
from harness.check.reference import Reference
from harness.check.results import GateResult
from harness.devices.processes import START, RankFailed, run_ranks
from harness.puzzles.p25 import layout
from harness.puzzles.p25.ranks import PATIENCE, Answer, Part, changed_input, functions_of, run_cases
from harness.puzzles.p25.spec import EVERY, dtype_of, is_transposed, symptom
from harness.spec.puzzle import Arrays, Case, Gate, Puzzle
from harness.spec.rungs import Rung
from harness.toolchain import roots

TENSORS = ("query", "key", "value", "grad_output")
FOLLOWS = f"is {sentence('output')}"
"""The words for gradients, and nothing else."""
SECONDS = 120.0
"""Time limit of the ranks; a rank that waits in vain gives up long before."""


class Failed(Exception):
    """A case that ended without values; `mistake` is the known mistake that explains it, or ""."""

    def __init__(self, words: str, mistake: str = ""):
        super().__init__(words)
        self.mistake = mistake


class RingChecker(CaseChecker):
    """Checks the gates of one file, of either rung; truth and baseline of a case are computed once."""

    waits: tuple[str, ...] = ()
    """The gates whose code may read a block before it arrives."""

    def __init__(self, puzzle: Puzzle, rung: Rung, *, seed: int = 0):
        super().__init__(puzzle, rung, seed=seed)
        self.references = {dtype: Reference(puzzle, dtype, seed) for dtype in ("float32", "bfloat16")}

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        result = GateResult(gate, "correct")
        ladder = self.puzzle.ladder(self.rung, gate.id)
        solution = roots.solutions() / self.puzzle.name / self.rung.file
        wrong: dict[str, list[Evidence]] = {}
        failure: Failed | None = None
        try:
            if gate.id == "balanced":
                check_chunks(module["chunks"], path)
            for case, outputs in self._run(gate, path, solution, cases):
                # Other errors then follow from it.
                own = {name: in_dtype(case, outputs[name]) for name in gate.quantities}
                self._compare(result, case, own, wrong)
            alone = merged_alone(module["merge"], path, self.tensor) if gate.id == "merge" else None
            if alone and (alone.mistake or not wrong):
                wrong.clear()  # single rows explain it better
                raise alone
        except Failed as error:
            failure = error
        if wrong:
            puzzle = replace(self.puzzle, symptom=functools.partial(symptom, gate.id in self.waits))
            first = {"output": wrong["output"]} if "output" in wrong else wrong
            explain(result, puzzle, first, ladder)
            result.diagnosis += [
                f"{puzzle.printed_name(name)} {FOLLOWS}" for name in wrong if name not in first
            ]
        if failure:
            result.state = "wrong"
            result.diagnosis.append(str(failure))
            result.mistake = result.mistake or failure.mistake or None
            result.hint = result.hint or f"{ladder}-2"
        if result.state == "correct":
            result.summary = self.about(cases)
        return result

    def _reference_of(self, case: Case) -> Reference:
        return self.references[dtype_of(case)]

    def tensor(self, values: object):
        """Convert to the array type of the rung."""
        raise NotImplementedError

    def arrays(self, case: Case) -> Arrays:
        return self._reference_of(case).arrays(case)

    def about(self, cases: list[Case]) -> str:
        """Return the text that follows "correct"."""
        return ""

    def _run(self, gate: Gate, path: Path, solution: Path, cases: list[Case]):
        """Yield (case, output and gradients of the whole sequence). Raise Failed."""
        raise NotImplementedError


def in_dtype(case: Case, array: np.ndarray):
    """Convert an array of a case to a tensor of its dtype."""
    import torch

    return torch.from_numpy(array).to(getattr(torch, dtype_of(case)))


LAYOUTS = (
    (2, 8), (4, 16), (4, 64), (3, 19), (4, 3), (1, 5), (5, 20), (5, 23), (6, 31), (7, 6), (8, 67), (9, 100),
)  # fmt: skip
"""Arguments of `chunks`: ranks and lengths."""


def check_chunks(chunks, path: Path) -> None:
    """Compare the ranges that `chunks` returns for the balanced layout. Raise Failed."""
    for size, length in LAYOUTS:
        for rank in range(size):
            right = layout.held(rank, size, length, True)
            call = f"chunks({rank}, {size}, {length}, True)"
            try:
                got = [tuple(map(int, each)) for each in chunks(rank, size, length, True)]
            except Exception as error:  # an exception of the learner's code is a result
                raise Failed(f"{call}: {describe(error, path)}") from error
            if got == right:
                continue
            held = [int(p) for each in got for p in range(*each)]
            work = [
                sum(p + 1 for each in chunks(r, size, length, True) for p in range(*each))
                for r in range(size)
            ]
            words = f"{call} is {got}, expected {right}"
            if len(held) == sum(stop - start for start, stop in right) and max(work) > 1.1 * min(work):
                most, least = work.index(max(work)), work.index(min(work))
                raise Failed(
                    f"{words}: rank {most} has {max(work)} scores to compute, rank {least} has {min(work)}",
                    "not-mirrored",
                )
            raise Failed(words, "wrong-chunks")


@dataclass(frozen=True)
class Merged:
    """A row for a merge in isolation.

    Attributes:
        out, lse, block_out, block_lse: The arguments of `merge`.
        right: The expected out and lse.
        words: The cause of a result that is not finite, and `mistake` its name; "".
        other: The same for a result that is another number.
    """

    out: float
    lse: float
    block_out: float
    block_lse: float
    right: tuple[float, float]
    words: str = ""
    mistake: str = ""
    other: tuple[str, str] = ("", "")


NOTHING = "-inf - -inf is no number"
SHARE = (
    "a side that has seen no key has no share at all: exp(-inf) is 0, and no limit or small number may change it",
    "share-of-nothing",
)
OVERFLOW = (
    "exp(800) is infinite, exp(-800) is 0 and its logarithm -inf: take exponentials of differences only",
    "merge-overflows",
)
NAN_KEPT = ("what is no number must stay so: it says that an input was none", "nan-swallowed")
inf, nan = np.inf, np.nan
ROWS = (
    Merged(1, 0.5, 2, 1.5, (1 + 1 / (1 + np.exp(-1)), np.logaddexp(0.5, 1.5))),
    Merged(1, 0.5, 2, 0.5, (1.5, 0.5 + np.log(2))),
    Merged(0, -inf, 5, 0.75, (5, 0.75), NOTHING, "nothing-visible", SHARE),
    Merged(3, 0.25, 0, -inf, (3, 0.25), NOTHING, "nothing-visible", SHARE),
    Merged(0, -inf, 0, -inf, (0, -inf), NOTHING, "nothing-visible"),
    Merged(1, 800, 2, 800, (1.5, 800 + np.log(2)), *OVERFLOW),
    Merged(1, -800, 2, -800, (1.5, -800 + np.log(2)), *OVERFLOW),
    Merged(1, 800, 2, -800, (1, 800), *OVERFLOW),
    Merged(1, -800, 2, 800, (2, 800), *OVERFLOW),
    Merged(1, 0.5, nan, nan, (nan, nan), other=NAN_KEPT),
    Merged(nan, nan, 2, 0.5, (nan, nan), other=NAN_KEPT),
)
"""Rows of every kind; the first wrong one is reported."""


def merged_alone(merge: Callable, path: Path, tensor: Callable) -> Failed | None:
    """Check rows whose result is known, merged in one call; return the failure or None."""
    columns = np.array([(row.out, row.lse, row.block_out, row.block_lse) for row in ROWS]).T
    out, lse, block_out, block_lse = (tensor(column[None, None]) for column in columns)
    try:
        with np.errstate(all="ignore"):
            results = merge(out[..., None], lse, block_out[..., None], block_lse)
            merged = [np.asarray(result, np.float64).ravel() for result in results]
    except Exception as error:  # an exception of the learner's code is a result
        return Failed(f"merge: {describe(error, path)}")
    if [len(values) for values in merged] != [len(ROWS)] * 2:
        return Failed(
            f"merge of {len(ROWS)} rows: expected an out and an lse for each, got {list(map(len, merged))}"
        )
    for row, *got in zip(ROWS, *merged, strict=True):
        # A wrong number next to one that is not finite, and should be, has the same cause.
        none = any(
            not np.isfinite(value) and not np.array_equal(value, right, equal_nan=True)
            for value, right in zip(got, row.right, strict=True)
        )
        for name, value, right in zip(("out", "lse"), got, row.right, strict=True):
            if np.isclose(value, right, rtol=1e-12, atol=0, equal_nan=True):
                continue
            words, mistake = (row.words, row.mistake) if none else row.other
            return Failed(
                f"merge of out {row.out:g}, lse {row.lse:g} with {row.block_out:g}, {row.block_lse:g}: "
                f"{name} is {value:.13g}, expected {right:.13g}{': ' if words else ''}{words}",
                mistake,
            )
    return None


def ring_arguments(case: Case, arrays: Arrays) -> tuple[int, float, bool, bool]:
    S, d = case.dims[-2:]
    return S, d**-0.5, bool(arrays["causal"]), bool(arrays["balanced"])


class ListChecker(RingChecker):
    """The NumPy rung: a list instead of ranks."""

    def tensor(self, values: object):
        return np.asarray(values, np.float64)

    def _run(self, gate: Gate, path: Path, solution: Path, cases: list[Case]):
        module = functions_of(path, solution, gate.id)
        for case in cases:
            arrays = self.arrays(case)
            size = case.world_size
            length, scale, causal, balanced = ring_arguments(case, arrays)
            parts = {name: layout.split(arrays[name], size, balanced) for name in TENSORS}
            ranges = [layout.held(rank, size, length, balanced) for rank in range(size)]
            qkv = [parts[name] for name in TENSORS[:3]]
            arguments = {name: [part.copy() for part in own] for name, own in parts.items()}
            try:
                with np.errstate(all="ignore"):
                    output, lse = module["ring_forward"](*qkv, ranges, scale, causal)
                    gradients = module["ring_backward"](
                        parts["grad_output"], *qkv, output, lse, ranges, scale, causal
                    )
                by_rank: dict[str, list[np.ndarray]] = dict(zip(EVERY, (output, *gradients), strict=True))
                check_shapes(by_rank, parts)
                for name, own in parts.items():
                    if not all(map(np.array_equal, own, arguments[name])):
                        raise Failed(f"in case '{case.name}': {changed_input(name)}", "changed-input")
                whole = {name: layout.join_parts(each, balanced) for name, each in by_rank.items()}
            except Failed:
                raise
            except Exception as error:  # an exception of the learner's code is a result
                raise Failed(f"in case '{case.name}': {describe(error, path, longest=300)}") from error
            with np.errstate(over="ignore"):  # an overflow in float32 is infinite
                yield case, {name: array.astype(np.float32) for name, array in whole.items()}


def check_shapes(by_rank: dict[str, list[np.ndarray]], parts: dict[str, list[np.ndarray]]) -> None:
    """Raise ValueError if a rank's part of a result has another shape than its input."""
    for name, own in zip(EVERY, ("query", "query", "key", "value"), strict=True):
        if by_rank[name] is None or len(by_rank[name]) != len(parts[own]):
            raise ValueError(f"{name} should be a list with an array for each rank")
        for rank, (got, like) in enumerate(zip(by_rank[name], parts[own], strict=True)):
            if np.shape(got) != like.shape:
                raise ValueError(
                    f"{name} of rank {rank} has shape {list(np.shape(got))}, expected {list(like.shape)}"
                )


class RanksChecker(RingChecker):
    """The PyTorch rung: processes on gloo, with a timeout of `patience` seconds."""

    patience = PATIENCE
    waits = ("steps", "exchange", "home")

    def limit(self, cases: list[Case]) -> float:
        return START + 2 * SECONDS

    def tensor(self, values: object):
        import torch

        return torch.tensor(values, dtype=torch.float64)

    def about(self, cases: list[Case]) -> str:
        ranks, cores = max(case.world_size for case in cases), os.cpu_count() or 1
        return f"{ranks} processes shared {cores} cores" if ranks > cores else f"{ranks} processes"

    def _run(self, gate: Gate, path: Path, solution: Path, cases: list[Case]):
        world = max(case.world_size for case in cases)
        work = [self._parts(case, world) for case in cases]
        parts = [[each[rank] for each in work] for rank in range(world)]
        arguments = [(path, solution, gate.id, own, self.patience) for own in parts]
        describing = functools.partial(describe, path=path)
        try:
            answers = run_ranks(run_cases, arguments, describe=describing, source=path, seconds=SECONDS)
        except RankFailed as error:
            raise Failed(str(error)) from error
        for number in range(len(answers[0])):
            case = cases[number]
            of_case = [each[number] for each in answers[world - case.world_size :]]
            if any(answer.words for answer in of_case):
                words, mistake = blame(of_case)
                raise Failed(f"in case '{case.name}': {words}", mistake)
            balanced = bool(self.arrays(case)["balanced"])
            yield (
                case,
                {
                    name: layout.join_parts([answer.values[name] for answer in of_case], balanced)
                    for name in EVERY
                },
            )

    def _parts(self, case: Case, world: int) -> list[Part]:
        """Return the part of each process in a case: the last ones hold the ranks, the others nothing."""
        arrays, size = self.arrays(case), case.world_size
        arguments = ring_arguments(case, arrays)
        split = {name: layout.split(arrays[name], size, arguments[-1]) for name in TENSORS}
        turned = is_transposed(case)
        idle = [Part(case.name, size, dtype_of(case), {}, arguments, turned) for _ in range(world - size)]
        return idle + [
            Part(
                case.name,
                size,
                dtype_of(case),
                {name: parts[rank].astype(np.float32) for name, parts in split.items()},
                arguments,
                turned,
            )
            for rank in range(size)
        ]


def blame(answers: list[Answer]) -> tuple[str, str]:
    """Return the cause of a failed case in a line, and the known mistake, from the ranks' answers."""
    failed = [(rank, answer) for rank, answer in enumerate(answers) if answer.words]
    size = len(answers)
    # A rank that reports its mistake comes before those that waited for it.
    sure = [(rank, answer) for rank, answer in failed if answer.stuck is None]
    if sure:
        rank, answer = min(sure, key=lambda each: (not each[1].mistake, each[0]))
        return f"rank {rank} of {size}: {answer.words}", answer.mistake
    words = "; ".join(f"rank {rank} of {size} {answer.words}" for rank, answer in failed)
    stuck = {rank: answer.stuck for rank, answer in failed if answer.stuck}
    if len(stuck) == size and all(kind == "send" and not begun for kind, _, begun in stuck.values()):
        return (
            f"deadlock: every rank sends before it receives, and no send ends before it is received: {words}",
            "sends-first",
        )
    if len(stuck) == size and all(kind == "receive" for kind, _, _ in stuck.values()):
        return f"deadlock: every rank receives before it sends: {words}", "receives-first"
    for rank, (kind, other, _) in stuck.items():
        begun = stuck[other][2] if other in stuck else ()
        if kind == "send" and begun and rank not in begun:
            return (
                f"rank {rank} of {size} sends to rank {other}, which receives from rank {begun[0]}",
                "wrong-neighbour",
            )
    return words, ""
