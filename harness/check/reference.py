"""Compute and cache the inputs, truth and baseline of a run; import torch only if a result is not cached."""

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

from harness import START_TIME
from harness.check.compare import (
    Evidence,
    Repeats,
    TensorResult,
    compare,
    compute_spread_in_ulps,
    compute_tolerance_factor,
)
from harness.devices.poison import find_unwritten
from harness.devices.targets import Target
from harness.errors import EnvironmentProblem
from harness.spec.puzzle import Arrays, Case, Puzzle
from harness.spec.rounding import convert_to_stored, to_float64
from harness.toolchain.cache import STALE_AFTER_S, cache_file, compute_digest, discard, get_cache_folder
from harness.toolchain.roots import PACKAGE_ROOT

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

MAX_SINGLE_THREAD_ELEMENTS = 2**16
"""Maximum number of input elements of a case that PyTorch computes with one thread."""


@contextmanager
def limit_threads(tensors: "Tensors") -> Generator[None, None, None]:
    """Limit PyTorch to one thread for small tensors: more are thirty times slower on a busy machine."""
    import torch

    num_threads = torch.get_num_threads()
    if sum(tensor.numel() for tensor in tensors.values()) <= MAX_SINGLE_THREAD_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def choose_torch_device(target: Target) -> str:
    """Return PyTorch's device for the baseline: the kernels' if PyTorch supports it, else the CPU."""
    if target.kind != "gpu":
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# ---- Cached results ----------------------------------------------------------------------------------------


def list_code_files(puzzle: str) -> list[Path]:
    folder = Path(sys.modules[f"harness.puzzles.{puzzle}"].__file__ or "").parent
    shared = ("puzzles/*.py", "spec/*.py", "nn/*_ops.py", "check/reference.py")
    return sorted(
        [*folder.rglob("*.py"), *(path for pattern in shared for path in PACKAGE_ROOT.glob(pattern))]
    )


@cache
def compute_code_digest(puzzle: str) -> str:
    """Return the digest of `list_code_files(puzzle)`, or "" if a file is newer than this process."""
    files = list_code_files(puzzle)
    loaded = all(file.stat().st_mtime <= START_TIME for file in files)
    return compute_digest([file.read_bytes() for file in files]) if loaded else ""


def list_settings() -> list[str]:
    """Return settings that affect PyTorch's results: versions, number of threads, environment variables."""
    torch = find_spec("torch")  # without importing torch
    version = Path(torch.origin or "").with_name("version.py").read_text("utf-8") if torch else ""
    names = (name for name in sorted(os.environ) if name.startswith(("OMP_", "MKL_", "ATEN_")))
    settings = (f"{name}={os.environ[name]}" for name in names)
    threads = str(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())
    return [version, np.__version__, platform.machine(), threads, *settings]


def load_results(file: Path) -> tuple[Arrays, Arrays] | None:
    """Load the truth and the baseline of a case; return None if they are not cached or are damaged."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    return pickle.loads(data[32:]) if hashlib.sha256(data[32:]).digest() == data[:32] else None


def save_results(file: Path, results: tuple[Arrays, Arrays]) -> None:
    data = pickle.dumps(results, protocol=5)
    with suppress(EnvironmentProblem):
        discard(file)
        cache_file(
            file, lambda staged: staged.write_bytes(hashlib.sha256(data).digest() + data), "PyTorch's answers"
        )


@dataclass
class Reference:
    """Inputs, truth and baseline of the cases of one run, each computed once.

    With `use_cache`, results are read from and written to the cache; a process that runs a learner's Python
    must not use it.
    """

    puzzle: Puzzle
    dtype: str
    seed: int
    use_cache: bool = False
    _inputs: dict[Case, Arrays] = field(default_factory=dict)
    _truth: dict[Case, Arrays] = field(default_factory=dict)
    _baseline: dict[tuple[Case, str], Arrays] = field(default_factory=dict)
    _terms: dict[Case, dict[str, float]] = field(default_factory=dict)

    def get_inputs(self, case: Case) -> Arrays:
        """Return the inputs of a case in the form that kernels read, each in its dtype in this run."""
        return {
            name: convert_to_stored(array, self.puzzle.get_input_dtype(name, array, self.dtype))
            for name, array in self.get_arrays(case).items()
        }

    def make_strided_inputs(self, case: Case) -> "Tensors":
        return self._make_tensors(self.get_arrays(case), self.dtype)

    def get_arrays(self, case: Case) -> Arrays:
        if case not in self._inputs:
            self._inputs[case] = self.puzzle.make_inputs(case, self.dtype, self.seed)
        return self._inputs[case]

    def get_truth(self, case: Case, target: Target) -> Arrays:
        """Return the truth: PyTorch's results in float64 or, for float64 kernels, NumPy's in longdouble."""
        if case not in self._truth:
            self._compute_case(case, choose_torch_device(target))
        return self._truth[case]

    def get_baseline(self, case: Case, target: Target) -> Arrays:
        """Return PyTorch's results in the run's dtype, computed on `choose_torch_device`, as float64."""
        key = case, choose_torch_device(target)
        if key not in self._baseline:
            self._compute_case(*key)
        return self._baseline[key]

    def prepare(self, cases: Sequence[Case], target: Target, is_done: Callable[[], bool]) -> None:
        for case in cases:
            if is_done():
                break
            self.get_truth(case, target)

    def _compute_case(self, case: Case, device: str) -> None:
        file = self._folder / compute_digest([repr(case)]) if self._folder and device == "cpu" else None
        results = load_results(file) if file else None
        if not results:
            arrays = self.get_arrays(case)
            truth = self._truth.get(case)
            if not truth and self.dtype == "float64":
                truth = self.puzzle.compute_exact(arrays)
            truth = truth or self._run_autograd(arrays, "float64", device)
            results = truth, self._run_autograd(arrays, self.dtype, device)
            if file:
                save_results(file, results)
        self._truth.setdefault(case, results[0])
        self._baseline[case, device] = results[1]

    @cached_property
    def _folder(self) -> Path | None:
        """The cache folder of this run's results.

        None without `use_cache`, for a puzzle outside the package, or if code is newer than this process.
        """
        name = self.puzzle.name
        package = sys.modules.get(f"harness.puzzles.{name}")
        if (
            not self.use_cache
            or getattr(package, "PUZZLE", None) is not self.puzzle
            or not compute_code_digest(name)
        ):
            return None
        with suppress(EnvironmentProblem):
            parent = get_cache_folder("answers", name)
            digest = compute_digest([compute_code_digest(name), *list_settings(), self.dtype, str(self.seed)])
            if not (parent / digest).is_dir():
                for folder in parent.iterdir():
                    if time.time() - folder.stat().st_mtime > STALE_AFTER_S:
                        shutil.rmtree(folder, ignore_errors=True)
            return get_cache_folder("answers", name, digest)

    def get_term_magnitudes(self, case: Case) -> dict[str, float]:
        """Return, for each quantity whose terms can cancel, the magnitude of these terms."""
        if case not in self._terms:
            self._terms[case] = self.puzzle.compute_term_magnitudes(self.get_arrays(case))
        return self._terms[case]

    def get_saved_arrays(self, case: Case, target: Target, variant: str) -> Arrays:
        """Return the correct saved quantities of a variant's forward pass, in the dtypes of the run."""
        truth = self.get_truth(case, target)
        names = self.puzzle.list_saved_quantities(variant)
        kinds = {name: self.puzzle.get_output_dtype(name, self.dtype) for name in names}
        return {name: convert_to_stored(truth[name], kind) for name, kind in kinds.items()}

    # ---- Comparison with device outputs ------------------------------------------------------------------------

    def compare_quantity(
        self,
        case: Case,
        target: Target,
        quantity: str,
        got: np.ndarray,
        tolerance_factor: float = 1.0,
        variant: str = "",
        propagated_error: float = 0.0,
    ) -> TensorResult:
        """Compare one quantity of a case; the factor and `propagated_error` are arguments of `compare`.

        A `variant` with its own baseline is compared with that one.
        """
        baseline = self.get_baseline(case, target)
        return compare(
            to_float64(got),
            self.get_truth(case, target)[quantity],
            baseline.get(f"{variant}.{quantity}", baseline[quantity]),
            self.puzzle.get_output_dtype(quantity, self.dtype),
            tolerance_factor=tolerance_factor,
            unwritten_mask=find_unwritten(got),
            term_magnitude=self.get_term_magnitudes(case).get(quantity, 0.0),
            propagated_error=propagated_error,
        )

    def compare_all(
        self, case: Case, target: Target, variant: str, outputs: Arrays, quantities: Sequence[str]
    ) -> dict[str, TensorResult]:
        """Compare some quantities among a variant's `outputs`.

        A quantity beyond its limit is compared again, allowing for the rounding propagated from those saved
        quantities that are correct.
        """
        puzzle = self.puzzle

        def compare_one(quantity: str, propagated_error: float = 0.0) -> TensorResult:
            atomic = target.kind != "cpu" and (variant, quantity) in puzzle.atomic_sums
            s = compute_tolerance_factor(atomic, puzzle.count_terms(case.dims))
            return self.compare_quantity(
                case, target, quantity, outputs[quantity], s, variant, propagated_error
            )

        results = {quantity: compare_one(quantity) for quantity in quantities if quantity in outputs}
        wrong = [
            quantity for quantity, result in results.items() if not result.ok and not result.num_nonfinite
        ]
        if wrong:
            correct_saved = {
                q: to_float64(outputs[q]) for q in puzzle.list_saved_quantities(variant) if compare_one(q).ok
            }
            propagated_errors = puzzle.compute_propagated_errors(self.get_arrays(case), correct_saved)
            results |= {q: compare_one(q, propagated_errors[q]) for q in wrong if q in propagated_errors}
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
        """Run one case repeatedly; return each quantity's bit-equality, spread in ulps, and wrong runs.

        `run` returns the outputs of the variant, by quantity.
        """
        low: Arrays = {}
        high: Arrays = {}
        wrong = dict.fromkeys(quantities, 0)
        for _ in range(runs):
            outputs = run()
            results = self.compare_all(case, target, variant, outputs, quantities)
            for quantity in quantities:
                got = to_float64(outputs[quantity])
                low[quantity] = np.minimum(low.get(quantity, got), got)
                high[quantity] = np.maximum(high.get(quantity, got), got)
                wrong[quantity] += not results[quantity].ok
        return {
            q: Repeats(
                runs,
                bool(np.array_equal(low[q], high[q])),
                compute_spread_in_ulps(low[q], high[q], self.puzzle.get_output_dtype(q, self.dtype)),
                wrong[q],
                target.kind != "cpu" and (variant, q) in self.puzzle.atomic_sums,
            )
            for q in quantities
        }

    def make_evidence(
        self, case: Case, target: Target, quantity: str, got: np.ndarray, result: TensorResult
    ) -> Evidence:
        truth = np.asarray(self.get_truth(case, target)[quantity], np.float64)
        kind = self.puzzle.get_output_dtype(quantity, self.dtype)
        return Evidence(
            case, self.get_arrays(case), to_float64(got), truth, find_unwritten(got), result, kind
        )

    def _run_autograd(self, arrays: Arrays, dtype: str, device: str) -> Arrays:
        import torch

        tensors = self._make_tensors(arrays, dtype, device)
        with limit_threads(tensors):
            outputs = self.puzzle.compute_reference(tensors)
        return {name: tensor.to("cpu", torch.float64).numpy() for name, tensor in outputs.items()}

    def _make_tensors(self, arrays: Arrays, dtype: str, device: str = "cpu") -> "Tensors":
        """Return inputs as torch tensors, in their dtypes in a run of `dtype`; float64 widens all floats."""
        import torch

        def get_torch_dtype(name: str, array: np.ndarray) -> torch.dtype:
            is_widened = dtype == "float64" and array.dtype.kind == "f"
            return getattr(
                torch, "float64" if is_widened else self.puzzle.get_input_dtype(name, array, dtype)
            )

        return {
            name: add_strides(array, get_torch_dtype(name, array), device) for name, array in arrays.items()
        }


def add_strides(array: np.ndarray, dtype: "torch.dtype | None" = None, device: str = "cpu") -> "torch.Tensor":
    """Return a copy as a tensor with the array's strides; a stride of 0 becomes an expanded tensor.

    The default dtype is float64.
    """
    import torch

    base = torch.tensor(array).to(device, dtype or torch.float64)  # contiguous
    if 0 in array.strides:
        return base[tuple(slice(0, 1) if s == 0 else slice(None) for s in array.strides)].expand(array.shape)
    order = np.argsort([-s for s in array.strides], kind="stable")
    inverse = np.argsort(order)
    return base.permute(tuple(order)).contiguous().permute(tuple(inverse))
