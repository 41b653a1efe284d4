"""Rungs: the ways to solve a puzzle's gates, each a file of the learner's with blanks and its checker.

A checker is a class with this protocol; a puzzle may bring its own, ".checker:Checker" of its folder:

    class Checker:
        def __init__(self, puzzle: Puzzle, rung: Rung, *, seed: int = 0): ...

        def check(
            self, path: Path, gates: GateIds = None, cases: Cases = None, *, on_first: OnFirst = None
        ) -> list[GateResult]: ...

`path` is the learner's file (of a Mojo rung its op package), read again at every call; `gates` are ids and `cases` the
puzzle's own if they are None. A checker that checks case after case calls `on_first` with the results of the first
case before it runs the others; any other checker leaves it alone. `check` returns one `harness.check.results.GateResult` for each gate, in the order of
the rung: "unsolved" where the blank is untouched, else "correct" or "wrong", with a diagnosis in lines and the id of the
known mistake. It raises a WorkbookError where the file cannot be checked at all: DamagedFile, CompileFailed. Whatever the
learner's code raises is a result, not an error. One checker serves many checks, so that it may keep truth and baseline.
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
"""Rung id -> what people call it, in the order in which rungs are taken."""


def name_of(id: str) -> str:
    """Return the printed name of a rung."""
    return NAMES.get(id, id)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to solve gates of a puzzle.

    Attributes:
        id: A key of NAMES: what `--rung` takes.
        file: The file with the blanks, relative to the puzzle's folder.
        gates: The ids of the gates whose blanks it holds, in the order in which they are taken.
        checker: "module:Class" of what checks it, imported on first use; of the puzzle's folder ".module:Class".
        title: What lists call it, "NumPy rung".
        about: A remark after the title in lists.
        needs: Gate -> the gates before it whose code its own result runs: where one of them is wrong, it is to be mended
            first. Where every gate is given right values for what it needs, nothing.
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

    A function asks for steps of the puzzle's derivation by the names of its arguments.

    Attributes:
        names: Argument, or "gate.argument" for one gate alone -> step of the derivation, where they differ.
        returns: Gate -> the quantities that its function returns, in order, if they are not the gate's own.
        pack: Quantity -> what makes one array of everything its function returns.
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
        name: What the file defines: a subclass of `torch.autograd.Function`, called through `apply`, or a function.
        takes: The puzzle's inputs that it is called with, in order.
        returns: The quantities that it returns, in order.
        gradients: Input -> quantity that its gradient is; empty for a function that is checked by its values alone.
            Where it is not, `torch.autograd.gradcheck` is run as well, in float64.
        grad_outputs: The puzzle's inputs that are the gradients coming in, one for each of `returns`.
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
        functions: Gate -> what it asks of the file.
    """

    id: str = "torch"
    checker: str = "harness.check.torch_rung:TorchChecker"
    functions: Mapping[str, TorchFunction]


@dataclass(frozen=True, kw_only=True)
class MojoRung(Rung):
    """The kernels of an op package: `file` is "op/NAME.mojo".

    Attributes:
        sizes: Name -> Mojo expression of what shapes and launches use beyond the sizes of a case, in order; a recording
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
