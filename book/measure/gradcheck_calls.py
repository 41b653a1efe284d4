"""What gradcheck finds in other calls: in the wrong backward passes of puzzle 21 and of public reports, and in correct ones of each.

`python -m book.measure gradcheck_calls`; a CPU is enough. A row says which common checks object to a function, and in which of the
calls of `book/examples/gradcheck_calls.py` gradcheck does, if it accepts the plain one. "gradgradcheck strided" is PyTorch's own call with
gradients that are not contiguous. A check that objects to the correct function finds nothing in its wrong ones.
"""

import warnings
from collections.abc import Iterator

import torch

from book.examples.gradcheck_calls import list_calls
from book.measure.check_backward import opcheck
from book.measure.shared import import_cases, write
from harness.check.gradients import DTYPES, Function, compute_outputs
from harness.puzzles.p21.hunt import USUAL_CHECKS
from harness.testing.problem import MANY_ROWS, Problem, make_problem

LARGEST = 40_000
"""Elements of the inputs with many rows: if gradcheck fails, it builds the whole Jacobian, so larger inputs get fewer rows."""


def with_edges(problem: Problem) -> list[torch.Tensor]:
    """The first input with a gradient ends in 0, 800 and -800; a masked one stays as it is."""
    inputs = problem.inputs()
    first = next(t for t in inputs if t.requires_grad)
    if first.isfinite().all():
        with torch.no_grad():
            first.view(-1)[-3:] = torch.tensor([0.0, 800.0, -800.0])
    return inputs


def list_rejecting(problem: Problem, function: Function) -> list[str]:
    """The calls in which gradcheck rejects a function, or which raise another error."""

    def accepts(name: str) -> bool:
        many = problem.inputs("tall")
        if (count := sum(t.numel() for t in many)) > LARGEST:
            many = problem.inputs(f"{LARGEST * MANY_ROWS // count} for {problem.size_names[0]}")
        inputs = problem.inputs(), with_edges(problem), problem.inputs("deep"), many
        try:
            return list_calls(lambda *t: compute_outputs(function, [*t])[0], *inputs)[name]()
        except Exception:
            return False

    return [name for name in list_calls(len, *[problem.inputs()] * 4) if not accepts(name)]


def find_calls(problem: Problem) -> str:
    """The calls in which gradcheck rejects the function and accepts its reference."""
    calls = list_rejecting(problem, problem.function)
    unfit = list_rejecting(problem, problem.reference) if calls else []
    return "; ".join(name for name in calls if name not in unfit)


def accepts_strided(problem: Problem) -> bool:
    """Whether gradgradcheck accepts a function when the gradients that it passes to `backward` are not contiguous."""

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return compute_outputs(problem.function, [*inputs])[0]

    torch.manual_seed(0)
    try:
        return torch.autograd.gradgradcheck(run, problem.inputs(), gen_non_contig_grad_outputs=True)
    except Exception:
        return False


def rows() -> Iterator[dict]:
    """A row for each function."""
    cases, faults = import_cases("zoo_cases"), import_cases("faults")
    right = [*cases.list_p21_solutions(), *faults.list_corrected()]
    for asked in [*right, *cases.list_p21(), *faults.list_faults()]:
        problem = make_problem(asked.make(), asked.reference, asked.inputs, DTYPES, "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            usual = {
                name: int(check(problem) is not None)
                for name, check in USUAL_CHECKS.items()
                if name != "opcheck"
            }
            yield {
                "version": asked.name,
                **usual,
                "opcheck": int(opcheck(asked.make(), problem.inputs())),
                "gradgradcheck strided": int(not accepts_strided(problem)),
                "calls": "" if usual["gradcheck float64"] else find_calls(problem),
            }


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(rows())
