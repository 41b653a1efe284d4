"""Times each step of puzzle 28 in the form that its blank is given with and in the solution's, and both passes after each step:
`python -m book.measure fast_steps`, some minutes on a GPU.

Each as a CUDA graph, in shuffled turns, the median; every step's values are compared with PyTorch's first. On a machine without
Mojo $WORKBOOK_FAST_STEPS names the folder with the libraries.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from book.measure.shared import write
from harness.learner import blanks
from harness.puzzles.p28.bench import measure_dtype
from harness.puzzles.p28.timing import StepLibrary, build_library
from harness.toolchain import roots


def first_forms(solution: Path, folder: Path) -> Path:
    """A copy of the solution's package in which every blank holds the code that it is given with."""
    package = folder / "op"
    shutil.copytree(solution, package, symlinks=False)
    file = package / "fast.mojo"
    text = file.read_text("utf-8")
    given = {id: blank.provided for id, blank in blanks.find_blanks(text).items()}
    file.write_text(blanks.join_segments(blanks.split_blanks(text), given), "utf-8")
    return package


def measure() -> Iterator[dict[str, object]]:
    """A row for each step, form and dtype, for the bare products, and for both passes after each step."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    solution = roots.get_solutions() / "p28" / "op"
    with tempfile.TemporaryDirectory() as folder:
        packages = {"first": first_forms(solution, Path(folder)), "solution": solution}
        for dtype in ("bfloat16", "float32"):
            forms = {
                form: StepLibrary(build_library(package, form, dtype)) for form, package in packages.items()
            }
            yield from measure_dtype(dtype, forms)


if __name__ == "__main__":
    write(measure())
