"""Describe a puzzle's rungs: ways to solve its gates, each with a learner's file of blanks and a checker.

A checker is a class with this protocol; a puzzle may define one in its folder, ".checker:Checker":

    class Checker:
        def __init__(self, puzzle: Puzzle, rung: Rung, *, seed: int = 0): ...

        def check(
            self, path: Path, gates: GateIds = None, cases: Cases = None,
            *, on_first_case: FirstCaseCallback = None,
        ) -> list[GateResult]: ...

`path` is the learner's file (for a Mojo rung, the op package), read again at every call; `gates` are ids, and
`cases` default to the puzzle's own. A checker that runs case by case calls `on_first_case` with the results of the
first case before it runs the others; other checkers ignore it. `check` returns one
`harness.check.results.GateResult` for each gate, in the rung's order: "unsolved" if the blank is untouched,
else "correct" or "wrong", with the lines of a diagnosis and the id of the known mistake. It raises a
WorkbookError, DamagedFile or CompileFailed, only if the file cannot be checked at all; an exception in the
learner's code is a result. A checker is reused for many checks, so it may cache truth and baseline.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

RUNG_NAMES = {
    "derive": "derivation",
    "numpy": "NumPy",
    "torch": "PyTorch",
    "mojo": "Mojo",
    "register": "registration",
}
"""Names of the rungs by id, in order."""


def get_rung_name(id: str) -> str:
    return RUNG_NAMES.get(id, id)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to solve gates of a puzzle.

    Attributes:
        id: A key of NAMES, and the value of `--rung`.
        file: The file with the blanks, relative to the puzzle's folder.
        gates: The ids of the gates whose blanks it contains, in order.
        checker: "module:Class", imported on first use; ".module:Class" is relative to the puzzle's package.
        title: Its name in lists, by default such as "NumPy rung".
        note: A remark after the title in lists.
        dependencies: Gate -> earlier gates whose code its check runs; a wrong one must be fixed first. Empty
            if every gate gets correct inputs.
        optional: Whether the puzzle counts as solved without it.
    """

    id: str
    file: str
    gates: tuple[str, ...]
    checker: str
    title: str = ""
    note: str = ""
    dependencies: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    optional: bool = False

    @property
    def language(self) -> str:
        return "Mojo" if self.file.endswith(".mojo") else "Python"

    @property
    def label(self) -> str:
        return self.title or f"{get_rung_name(self.id)} rung"


@dataclass(frozen=True, kw_only=True)
class NumpyRung(Rung):
    """A Python file with a function for each gate, named after it and checked on arrays.

    The names of a function's arguments are steps of the puzzle's derivation.

    Attributes:
        step_names: Argument, or "gate.argument" for one gate -> step of the derivation, if the names differ.
        returns: Gate -> the quantities that its function returns, in order, if they are not the gate's own.
        packers: Quantity -> a function that combines the gate function's results into one array.
    """

    id: str = "numpy"
    checker: str = "harness.check.numpy_rung:NumpyChecker"
    returns: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    step_names: Mapping[str, str] = field(default_factory=dict[str, str])
    packers: Mapping[str, Callable[..., np.ndarray]] = field(
        default_factory=dict[str, Callable[..., np.ndarray]]
    )


@dataclass(frozen=True)
class TorchFunction:
    """Interface of one gate's function in a PyTorch rung's file.

    Attributes:
        name: Its name in the file, where it is a subclass of `torch.autograd.Function`, called through
            `apply`, or a function.
        arguments: The puzzle's inputs that are its arguments, in order.
        returns: The quantities that it returns, in order.
        gradients: Input -> the quantity that is its gradient. If empty, only values are checked; otherwise
            `torch.autograd.gradcheck` also runs, in float64.
        grad_outputs: The puzzle's inputs that are the incoming gradients, one for each of `returns`.
    """

    name: str
    arguments: tuple[str, ...]
    returns: tuple[str, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict[str, str])
    grad_outputs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TorchRung(Rung):
    """A Python file with an `autograd.Function`, or a function, for each gate, checked on torch tensors.

    Attributes:
        functions: Gate -> the interface of its function.
    """

    id: str = "torch"
    checker: str = "harness.check.torch_rung:TorchChecker"
    functions: Mapping[str, TorchFunction]


@dataclass(frozen=True, kw_only=True)
class MojoRung(Rung):
    """The kernels of an op package: `file` is "op/NAME.mojo".

    Attributes:
        sizes: Additional sizes for shapes and launches: name -> Mojo expression of `dims`, the list of a case's
            sizes. A recording evaluates them in order.
    """

    id: str = "mojo"
    checker: str = "harness.check.checker:Checker"
    title: str = "Mojo kernels"
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def source(self) -> str:
        """The file with the blanks, relative to the op package."""
        return self.file.removeprefix("op/")
