"""What finds each wrong backward pass of the puzzles and of public reports: gradcheck, opcheck, `check_backward`.

`python -m book.measure check_backward`; a CPU is enough. A row names the wrong one, whether gradcheck and opcheck see something, the
first check of `check_backward` that does, by what name, and the others. The check `compile` is left out: it takes long, and found none of
them while it was in.
"""

import warnings
from itertools import count
from typing import Any

import torch

from book.measure.shared import import_cases, write
from harness.check.gradient_checks import gradcheck_float64
from harness.check.gradients import DTYPES
from harness.testing import check_backward
from harness.testing.problem import make_problem

COLUMNS = ("wrong", "gradcheck", "opcheck", "check_backward", "named", "also")
NUMBERS = count()


def opcheck(function: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether torch.library.opcheck finds something in an operator, or in a class with setup_context, registered as one."""
    owner: Any = getattr(function, "__self__", None)
    try:
        if hasattr(owner, "setup_context"):
            function = torch.library.custom_op(f"checked::op{next(NUMBERS)}", mutates_args=())(owner.forward)
            function.register_fake(owner.forward)
            function.register_autograd(owner.backward, setup_context=owner.setup_context)
        results = torch.library.opcheck(function, tuple(inputs), raise_exception=False)
    except Exception:
        return False  # it is not an operator, and cannot be one
    return any(words != "SUCCESS" for words in results.values())


def rows():
    """A row for each wrong one."""
    wrong, faults = import_cases("zoo_cases").list_wrong_ops(), import_cases("faults").list_faults()
    for asked in [*wrong, *faults]:
        made, options = asked.make(), asked.options
        problem = make_problem(made, asked.reference, asked.inputs, DTYPES, "cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen = {
                "gradcheck": gradcheck_float64(problem) is not None,
                "opcheck": opcheck(made, problem.inputs()),
            }
        call = {"reference": asked.reference, "inputs": asked.inputs, "leave_out": ["compile"], **options}
        report = check_backward(asked.make(), **call)
        names = [tried.name for tried in report.wrong] or [""]
        numbers = {key: int(value) for key, value in seen.items()}
        yield {
            "wrong": asked.name,
            **numbers,
            "check_backward": names[0],
            "named": report.mistake,
            "also": " ".join(names[1:]),
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(rows(), COLUMNS)
