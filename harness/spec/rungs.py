"""Rungs of a puzzle: tracks that solve its gates, each a file of the learner's with blanks and its checker.

A checker is a class with this protocol; a puzzle may bring its own, ".checker:Checker" of its folder:

    class Checker:
        def __init__(self, puzzle: Puzzle, rung: Rung, *, seed: int = 0): ...

        def check(
            self, path: Path, gates: GateIds = None, cases: Cases = None, *, on_first: OnFirst = None
        ) -> list[GateResult]: ...

`path` is the learner's file (of a Mojo rung its op package), read again at every call; `gates` are ids and
`cases` the puzzle's own by default. A checker that goes case by case calls `on_first` with the results of the
first case before it runs the others; other checkers ignore it. `check` returns one
`harness.check.results.GateResult` for each gate, in the order of the rung: "unsolved" if the blank is
untouched, else "correct" or "wrong", with a diagnosis in lines and the id of the known mistake. It raises a
WorkbookError if the file cannot be checked at all: DamagedFile, CompileFailed. An exception of the learner's
code is a result, not an error. One checker serves many checks, so it may cache truth and baseline.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

NAMES = {
    "derive": "derivation",
    "numpy": "NumPy",
    "torch": "PyTorch",
    "mojo": "Mojo",
    "register": "registration",
}
"""Names of the rungs by id, in order."""


def name_of(id: str) -> str:
    """Return the printed name of a rung."""
    return NAMES.get(id, id)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One track that solves gates of a puzzle.

    Attributes:
        id: A key of NAMES: the value of `--rung`.
        file: The file with the blanks, relative to the puzzle's folder.
        gates: The ids of the gates of its blanks, in order.
        checker: "module:Class" of its checker, imported on first use; of the puzzle's folder ".module:Class".
        title: Its name in lists, "NumPy rung".
        about: A remark after the title in lists.
        needs: Gate -> earlier gates whose code its own check runs: if one of them is wrong, it is to be fixed
            first. Empty if every gate gets correct inputs.
        optional: The puzzle counts as solved without it.
    """

    id: str
    file: str
    gates: tuple[str, ...]
    checker: str
    title: str = ""
    about: str = ""
    needs: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    optional: bool = False

    @property
    def language(self) -> str:
        """ "Mojo" or "Python", by the name of the file."""
        return "Mojo" if self.file.endswith(".mojo") else "Python"

    @property
    def words(self) -> str:
        """Name in lists."""
        return self.title or f"{name_of(self.id)} rung"


@dataclass(frozen=True, kw_only=True)
class NumpyRung(Rung):
    """A Python file with a function for each gate, of the gate's name, checked on arrays.

    The names of a function's arguments are steps of the puzzle's derivation.

    Attributes:
        names: Argument, or "gate.argument" for one gate -> step of the derivation, if they differ.
        returns: Gate -> the quantities that its function returns, in order, if they are not the gate's own.
        pack: Quantity -> a function that makes one array of the function's results.
    """

    id: str = "numpy"
    checker: str = "harness.check.numpy_rung:NumpyChecker"
    returns: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    pack: Mapping[str, Callable[..., np.ndarray]] = field(
        default_factory=dict[str, Callable[..., np.ndarray]]
    )


@dataclass(frozen=True)
class TorchFunction:
    """Interface of one gate's function in a PyTorch rung's file.

    Attributes:
        name: The name in the file: of a subclass of `torch.autograd.Function`, called through `apply`, or of
            a function.
        takes: The puzzle's inputs that are its arguments, in order.
        returns: The quantities that it returns, in order.
        gradients: Input -> quantity that is its gradient; empty for a function that is checked by its values
            alone. Otherwise `torch.autograd.gradcheck` runs too, in float64.
        grad_outputs: The puzzle's inputs that are the incoming gradients, one for each of `returns`.
    """

    name: str
    takes: tuple[str, ...]
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
        sizes: Name -> Mojo expression for further sizes of shapes and launches, in order; a recording
            evaluates them. `dims` is the list of the sizes.
    """

    id: str = "mojo"
    checker: str = "harness.check.checker:Checker"
    title: str = "Mojo kernels"
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def source(self) -> str:
        """The file with the blanks, relative to the op package."""
        return self.file.removeprefix("op/")
