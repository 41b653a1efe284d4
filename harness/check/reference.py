"""Inputs, truth and baseline of a run: what goes into the kernels, and what PyTorch makes of the same.

Needs torch, and not MAX.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from harness.check.compare import Repeats, Verdict, allowance, compare, spread_in_ulps
from harness.check.diagnose import Evidence
from harness.devices.poison import unwritten
from harness.devices.targets import Target
from harness.spec.puzzle import Arrays, Case, Puzzle

Tensors = dict[str, torch.Tensor]
SMALL = 2**16
"""Elements of all inputs of a case up to which PyTorch is asked with one thread."""


@contextmanager
def few_threads(tensors: Tensors) -> Generator[None, None, None]:
    """One thread of PyTorch for small tensors: on a busy machine more of them take thirty times as long, waiting."""
    before = torch.get_num_threads()
    if sum(tensor.numel() for tensor in tensors.values()) <= SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def torch_device(target: Target) -> torch.device:
    """Where PyTorch computes the baseline: on the same device where torch has it."""
    return torch.device("cuda" if target.kind == "gpu" and torch.cuda.is_available() else "cpu")


@dataclass
class Reference:
    """Inputs, truth and baseline of the cases of one run, each made once."""

    puzzle: Puzzle
    dtype: str
    seed: int
    _inputs: dict[Case, Arrays] = field(default_factory=dict)
    _truth: dict[Case, Arrays] = field(default_factory=dict)
    _baseline: dict[tuple[Case, str], Arrays] = field(default_factory=dict)
    _terms: dict[Case, dict[str, float]] = field(default_factory=dict)

    def inputs(self, case: Case) -> Tensors:
        """The input tensors of a case on the CPU, contiguous, each in the dtype that it has in this run."""
        return {
            name: torch.tensor(array).to(self._kind(name, array, self.dtype)).contiguous()
            for name, array in self.arrays(case).items()
        }

    def strided_inputs(self, case: Case) -> Tensors:
        """The same with the strides of the arrays, for code that has to take every tensor as it comes."""
        arrays = self.arrays(case)
        return {name: strided(array, self._kind(name, array, self.dtype)) for name, array in arrays.items()}

    def arrays(self, case: Case) -> Arrays:
        """The input arrays of a case: numbers in float64, index maps and masks as they are."""
        if case not in self._inputs:
            self._inputs[case] = self.puzzle.inputs(case, self.dtype, self.seed)
        return self._inputs[case]

    def truth(self, case: Case, target: Target) -> Arrays:
        """The same function in float64 by autograd; for float64 kernels in longdouble."""
        if case not in self._truth:
            arrays = self.arrays(case)
            if self.dtype == "float64":
                self._truth[case] = self.puzzle.exact(arrays)
            else:
                self._truth[case] = self._autograd(arrays, "float64", torch_device(target))
        return self._truth[case]

    def baseline(self, case: Case, target: Target) -> Arrays:
        """PyTorch in the dtype of the run, on the device of the kernels where torch has it; in float64."""
        device = torch_device(target)
        key = case, device.type
        if key not in self._baseline:
            self._baseline[key] = self._autograd(self.arrays(case), self.dtype, device)
        return self._baseline[key]

    def terms(self, case: Case) -> dict[str, float]:
        """The size of the terms that cancel in a quantity, for those that have any."""
        if case not in self._terms:
            self._terms[case] = self.puzzle.terms(self.arrays(case))
        return self._terms[case]

    def saved(self, case: Case, target: Target, variant: str) -> Tensors:
        """What a variant's forward pass hands to its backward pass, as it should be, in the dtypes of the run."""
        truth = self.truth(case, target)
        kinds = {name: self.puzzle.written_dtype(name, self.dtype) for name in self.puzzle.saved(variant)}
        return {name: torch.tensor(truth[name]).to(getattr(torch, kind)) for name, kind in kinds.items()}

    # ---- What a device has written, beside this ----------------------------------------------------------------

    def verdict(
        self,
        case: Case,
        target: Target,
        quantity: str,
        got: torch.Tensor,
        allowance: float = 1.0,
        variant: str = "",
        propagated: float = 0.0,
    ) -> Verdict:
        """The verdict on one quantity of a case, on the CPU; `allowance` and `propagated` are those of
        `harness.check.compare.compare`.

        A `variant` that the puzzle's reference answers by itself is measured by that answer.
        """
        baseline = self.baseline(case, target)
        return compare(
            values(got),
            self.truth(case, target)[quantity],
            baseline.get(f"{variant}.{quantity}", baseline[quantity]),
            self.puzzle.written_dtype(quantity, self.dtype),
            allowance=allowance,
            poison=unwritten(got).numpy(),
            terms=self.terms(case).get(quantity, 0.0),
            propagated=propagated,
        )

    def compared(
        self, case: Case, target: Target, variant: str, outputs: Tensors, quantities: Sequence[str]
    ) -> dict[str, Verdict]:
        """The verdict on each of some quantities that a variant writes; `outputs` holds what it has written.

        One that is off is judged again with what the rounding of the saved quantities, where these are right, makes of it.
        """
        puzzle = self.puzzle

        def verdict(quantity: str, propagated: float = 0.0) -> Verdict:
            atomic = target.kind != "cpu" and (variant, quantity) in puzzle.atomic
            s = allowance(atomic, puzzle.summands(case.dims))
            return self.verdict(case, target, quantity, outputs[quantity], s, variant, propagated)

        verdicts = {quantity: verdict(quantity) for quantity in quantities if quantity in outputs}
        wrong = [quantity for quantity, each in verdicts.items() if not each.ok and not each.nonfinite]
        if wrong:
            kept = {q: values(outputs[q]) for q in puzzle.saved(variant) if verdict(q).ok}
            moved = puzzle.propagated(self.arrays(case), kept)
            verdicts |= {q: verdict(q, moved[q]) for q in wrong if q in moved}
        return verdicts

    def repeated(
        self,
        run: Callable[[], Tensors],
        case: Case,
        target: Target,
        variant: str,
        quantities: Sequence[str],
        runs: int,
    ) -> dict[str, Repeats]:
        """Runs one case again and again: per quantity, bit-equal or the spread in ulps, and how many runs were wrong.

        `run` gives what the variant writes, by quantity.
        """
        low: Arrays = {}
        high: Arrays = {}
        wrong = dict.fromkeys(quantities, 0)
        for _ in range(runs):
            outputs = run()
            verdicts = self.compared(case, target, variant, outputs, quantities)
            for quantity in quantities:
                got = values(outputs[quantity])
                low[quantity] = np.minimum(low.get(quantity, got), got)
                high[quantity] = np.maximum(high.get(quantity, got), got)
                wrong[quantity] += not verdicts[quantity].ok
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
        self, case: Case, target: Target, quantity: str, got: torch.Tensor, verdict: Verdict
    ) -> Evidence:
        """What the diagnosis of a wrong quantity needs to know about one case."""
        truth = np.asarray(self.truth(case, target)[quantity], np.float64)
        kind = self.puzzle.written_dtype(quantity, self.dtype)
        return Evidence(case, self.arrays(case), values(got), truth, unwritten(got).numpy(), verdict, kind)

    def _autograd(self, arrays: Arrays, dtype: str, device: torch.device) -> Arrays:
        tensors = {
            name: strided(array, self._kind(name, array, dtype), device) for name, array in arrays.items()
        }
        with few_threads(tensors):
            outputs = self.puzzle.reference(tensors)
        return {name: tensor.to("cpu", torch.float64).numpy() for name, tensor in outputs.items()}

    def _kind(self, name: str, array: np.ndarray, dtype: str) -> torch.dtype:
        """What an input is in a run of `dtype`; the truth takes every number as float64."""
        kind = self.puzzle.input_dtype(name, array, dtype)
        return getattr(torch, "float64" if dtype == "float64" and array.dtype.kind == "f" else kind)


def strided(
    array: np.ndarray, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A tensor with the array's strides, stride 0 included, so that PyTorch sees an expanded tensor as such.

    It shares no memory with the array.
    """
    base = torch.tensor(array).to(device, dtype)  # contiguous
    if 0 in array.strides:
        return base[tuple(slice(0, 1) if s == 0 else slice(None) for s in array.strides)].expand(array.shape)
    order = np.argsort([-s for s in array.strides], kind="stable")
    back = np.argsort(order)
    return base.permute(tuple(order)).contiguous().permute(tuple(back))


def values(tensor: torch.Tensor) -> np.ndarray:
    """The values of a tensor on the CPU, in float64."""
    return tensor.to(torch.float64).numpy()
