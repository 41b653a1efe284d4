"""Compute and cache inputs, truth and baseline of a run.

Kernels read and write stored arrays (`harness.spec.rounding`). PyTorch's results are cached, so that torch is
imported only for a missing one.
"""

import hashlib
import os
import pickle
import platform
import shutil
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness import STARTED
from harness.check.compare import Evidence, Repeats, TensorResult, allowance, compare, spread_in_ulps
from harness.devices.poison import unwritten
from harness.devices.targets import Target
from harness.errors import EnvironmentProblem
from harness.spec.puzzle import Arrays, Case, Puzzle
from harness.spec.rounding import to_stored, values
from harness.toolchain.cache import STALE, cache_folder, digest, discard, keep
from harness.toolchain.roots import HERE

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

SMALL = 2**16
"""PyTorch computes a case with one thread up to this many input elements."""


@contextmanager
def few_threads(tensors: "Tensors") -> Generator[None, None, None]:
    """Yield one thread of PyTorch for small tensors: on a busy machine more of them take thirty times as
    long, waiting."""
    import torch

    before = torch.get_num_threads()
    if sum(tensor.numel() for tensor in tensors.values()) <= SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def torch_device(target: Target) -> str:
    """Return PyTorch's device for the baseline: that of the kernels if torch has it."""
    if target.kind != "gpu":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- Kept answers -------------------------------------------------------------------------------------------


def code_of(puzzle: str) -> list[Path]:
    """Return the files that the reference results depend on."""
    own = Path(sys.modules[f"harness.puzzles.{puzzle}"].__file__ or "").parent
    shared = ("puzzles/*.py", "spec/*.py", "nn/*_ops.py", "check/reference.py")
    return sorted([*own.rglob("*.py"), *(path for pattern in shared for path in HERE.glob(pattern))])


@cache
def code_digest(puzzle: str) -> str:
    """Return the digest of these files; "" if one of them is newer than the code loaded here."""
    files = code_of(puzzle)
    loaded = all(file.stat().st_mtime <= STARTED for file in files)
    return digest([file.read_bytes() for file in files]) if loaded else ""


def settings() -> list[str]:
    """Return what else PyTorch's results depend on: versions, the number of threads, and environment
    variables."""
    torch = find_spec("torch")  # which is not imported
    version = Path(torch.origin or "").with_name("version.py").read_text("utf-8") if torch else ""
    named = (
        f"{name}={os.environ[name]}"
        for name in sorted(os.environ)
        if name.startswith(("OMP_", "MKL_", "ATEN_"))
    )
    threads = str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())
    return [version, np.__version__, platform.machine(), threads, *named]


def load_answer(file: Path) -> tuple[Arrays, Arrays] | None:
    """Load the truth and the baseline of a case; None if they are not cached, or damaged."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    return pickle.loads(data[32:]) if hashlib.sha256(data[32:]).digest() == data[:32] else None


def save_answer(file: Path, answer: tuple[Arrays, Arrays]) -> None:
    """Save the truth and the baseline of a case, if the cache is writable."""
    data = pickle.dumps(answer, protocol=5)
    with suppress(EnvironmentProblem):
        discard(file)
        keep(
            file, lambda staged: staged.write_bytes(hashlib.sha256(data).digest() + data), "PyTorch's answers"
        )


@dataclass
class Reference:
    """Inputs, truth and baseline of the cases of one run, each computed once.

    With `kept` results are read from and written to the cache: never in a process that runs a learner's
    Python.
    """

    puzzle: Puzzle
    dtype: str
    seed: int
    kept: bool = False
    _inputs: dict[Case, Arrays] = field(default_factory=dict)
    _truth: dict[Case, Arrays] = field(default_factory=dict)
    _baseline: dict[tuple[Case, str], Arrays] = field(default_factory=dict)
    _terms: dict[Case, dict[str, float]] = field(default_factory=dict)

    def inputs(self, case: Case) -> Arrays:
        """Return the inputs of a case as kernels take them, each in the dtype that it has in this run."""
        return {
            name: to_stored(array, self.puzzle.input_dtype(name, array, self.dtype))
            for name, array in self.arrays(case).items()
        }

    def strided_inputs(self, case: Case) -> "Tensors":
        """Return the inputs as torch tensors with the strides of the arrays, for code that accepts any
        strides."""
        return self._tensors(self.arrays(case), self.dtype)

    def arrays(self, case: Case) -> Arrays:
        """Return the input arrays of a case: numbers in float64, index maps and masks unchanged."""
        if case not in self._inputs:
            self._inputs[case] = self.puzzle.inputs(case, self.dtype, self.seed)
        return self._inputs[case]

    def truth(self, case: Case, target: Target) -> Arrays:
        """Return the same function in float64 by autograd; for float64 kernels in longdouble."""
        if case not in self._truth:
            self._answer(case, torch_device(target))
        return self._truth[case]

    def baseline(self, case: Case, target: Target) -> Arrays:
        """Return PyTorch's result in the dtype of the run, on the device of the kernels if torch has it; in
        float64."""
        key = case, torch_device(target)
        if key not in self._baseline:
            self._answer(*key)
        return self._baseline[key]

    def prepare(self, cases: Sequence[Case], target: Target, done: Callable[[], bool]) -> None:
        """Answer one case after the other, until something else is done."""
        for case in cases:
            if done():
                break
            self.truth(case, target)

    def _answer(self, case: Case, device: str) -> None:
        """Load or compute truth and baseline of a case."""
        file = self._folder / digest([repr(case)]) if self._folder and device == "cpu" else None
        answer = load_answer(file) if file else None
        if not answer:
            arrays = self.arrays(case)
            truth = self._truth.get(case) or (
                self.puzzle.exact(arrays)
                if self.dtype == "float64"
                else self._autograd(arrays, "float64", device)
            )
            answer = truth, self._autograd(arrays, self.dtype, device)
            if file:
                save_answer(file, answer)
        self._truth.setdefault(case, answer[0])
        self._baseline[case, device] = answer[1]

    @cached_property
    def _folder(self) -> Path | None:
        """Return the cache folder of this run's results.

        None for a puzzle outside the package, and if the code is newer than what this process has loaded.
        """
        name = self.puzzle.name
        package = sys.modules.get(f"harness.puzzles.{name}")
        if not self.kept or getattr(package, "PUZZLE", None) is not self.puzzle or not code_digest(name):
            return None
        with suppress(EnvironmentProblem):
            others = cache_folder("answers", name)
            mine = digest([code_digest(name), *settings(), self.dtype, str(self.seed)])
            if not (others / mine).is_dir():
                for old in others.iterdir():
                    if time.time() - old.stat().st_mtime > STALE:
                        shutil.rmtree(old, ignore_errors=True)
            return cache_folder("answers", name, mine)

    def terms(self, case: Case) -> dict[str, float]:
        """Return the size of the terms that cancel in a quantity, for those that have any."""
        if case not in self._terms:
            self._terms[case] = self.puzzle.terms(self.arrays(case))
        return self._terms[case]

    def saved_arrays(self, case: Case, target: Target, variant: str) -> Arrays:
        """Return the correct saved quantities of a variant's forward pass, in the dtypes of the run."""
        truth = self.truth(case, target)
        kinds = {
            name: self.puzzle.written_dtype(name, self.dtype)
            for name in self.puzzle.saved_quantities(variant)
        }
        return {name: to_stored(truth[name], kind) for name, kind in kinds.items()}

    # ---- Comparison with device outputs ------------------------------------------------------------------------

    def compare_quantity(
        self,
        case: Case,
        target: Target,
        quantity: str,
        got: np.ndarray,
        allowance: float = 1.0,
        variant: str = "",
        propagated: float = 0.0,
    ) -> TensorResult:
        """Compare one quantity of a case, on the CPU; `allowance` and `propagated` are those of
        `harness.check.compare.compare`.

        A `variant` with a reference result of its own is compared with that.
        """
        baseline = self.baseline(case, target)
        return compare(
            values(got),
            self.truth(case, target)[quantity],
            baseline.get(f"{variant}.{quantity}", baseline[quantity]),
            self.puzzle.written_dtype(quantity, self.dtype),
            allowance=allowance,
            poison=unwritten(got),
            terms=self.terms(case).get(quantity, 0.0),
            propagated=propagated,
        )

    def compare_all(
        self, case: Case, target: Target, variant: str, outputs: Arrays, quantities: Sequence[str]
    ) -> dict[str, TensorResult]:
        """Compare some quantities of a variant; `outputs` holds its results.

        A quantity beyond its limit is compared again with the propagated rounding of the saved quantities, if
        these are correct.
        """
        puzzle = self.puzzle

        def compare_one(quantity: str, propagated: float = 0.0) -> TensorResult:
            atomic = target.kind != "cpu" and (variant, quantity) in puzzle.atomic
            s = allowance(atomic, puzzle.summands(case.dims))
            return self.compare_quantity(case, target, quantity, outputs[quantity], s, variant, propagated)

        results = {quantity: compare_one(quantity) for quantity in quantities if quantity in outputs}
        wrong = [quantity for quantity, each in results.items() if not each.ok and not each.nonfinite]
        if wrong:
            kept = {q: values(outputs[q]) for q in puzzle.saved_quantities(variant) if compare_one(q).ok}
            moved = puzzle.propagated(self.arrays(case), kept)
            results |= {q: compare_one(q, moved[q]) for q in wrong if q in moved}
        return results

    def compare_repeats(
        self,
        run: Callable[[], Arrays],
        case: Case,
        target: Target,
        variant: str,
        quantities: Sequence[str],
        runs: int,
    ) -> dict[str, Repeats]:
        """Run one case repeatedly: per quantity, bit-equal or the spread in ulps, and the number of wrong
        runs.

        `run` returns the outputs of the variant, by quantity.
        """
        low: Arrays = {}
        high: Arrays = {}
        wrong = dict.fromkeys(quantities, 0)
        for _ in range(runs):
            outputs = run()
            results = self.compare_all(case, target, variant, outputs, quantities)
            for quantity in quantities:
                got = values(outputs[quantity])
                low[quantity] = np.minimum(low.get(quantity, got), got)
                high[quantity] = np.maximum(high.get(quantity, got), got)
                wrong[quantity] += not results[quantity].ok
        return {
            q: Repeats(
                runs,
                bool(np.array_equal(low[q], high[q])),
                spread_in_ulps(low[q], high[q], self.puzzle.written_dtype(q, self.dtype)),
                wrong[q],
                target.kind != "cpu" and (variant, q) in self.puzzle.atomic,
            )
            for q in quantities
        }

    def evidence(
        self, case: Case, target: Target, quantity: str, got: np.ndarray, verdict: TensorResult
    ) -> Evidence:
        """Return the evidence for the diagnosis of a wrong quantity in one case."""
        truth = np.asarray(self.truth(case, target)[quantity], np.float64)
        kind = self.puzzle.written_dtype(quantity, self.dtype)
        return Evidence(case, self.arrays(case), values(got), truth, unwritten(got), verdict, kind)

    def _autograd(self, arrays: Arrays, dtype: str, device: str) -> Arrays:
        import torch

        tensors = self._tensors(arrays, dtype, device)
        with few_threads(tensors):
            outputs = self.puzzle.reference(tensors)
        return {name: tensor.to("cpu", torch.float64).numpy() for name, tensor in outputs.items()}

    def _tensors(self, arrays: Arrays, dtype: str, device: str = "cpu") -> "Tensors":
        """Return inputs as torch tensors of a run of `dtype`; the truth takes every number as float64."""
        import torch

        def kind(name: str, array: np.ndarray) -> torch.dtype:
            wide = dtype == "float64" and array.dtype.kind == "f"
            return getattr(torch, "float64" if wide else self.puzzle.input_dtype(name, array, dtype))

        return {name: add_strides(array, kind(name, array), device) for name, array in arrays.items()}


def add_strides(array: np.ndarray, dtype: "torch.dtype | None" = None, device: str = "cpu") -> "torch.Tensor":
    """Return a tensor with the array's strides, stride 0 included, so that PyTorch sees an expanded tensor.

    It shares no memory with the array. The default dtype is float64.
    """
    import torch

    base = torch.tensor(array).to(device, dtype or torch.float64)  # contiguous
    if 0 in array.strides:
        return base[tuple(slice(0, 1) if s == 0 else slice(None) for s in array.strides)].expand(array.shape)
    order = np.argsort([-s for s in array.strides], kind="stable")
    back = np.argsort(order)
    return base.permute(tuple(order)).contiguous().permute(tuple(back))
