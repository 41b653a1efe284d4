"""Times each step of puzzle 28 in the form that its blank is given with and in the solution's, both passes after each step, and
the launches of the last passes: `python -m book.measure fast_steps fast_launches`, some minutes on a GPU.

Each as a CUDA graph, in shuffled turns, the median; every step's values are compared with PyTorch's first. Single launches are
timed by PyTorch's profiler while such a graph runs. On a machine without Mojo $WORKBOOK_FAST_STEPS names the folder with the libraries.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from book.measure.kernel_times import CALLS, profiled
from book.measure.shared import write
from harness.learner import blanks
from harness.puzzles.p28.bench import HIDDEN, OUTPUTS, ROWS, capture_calls, capture_pytorch, measure_dtype
from harness.puzzles.p28.timing import Problem, StepLibrary, build_library
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


def measure_launches() -> Iterator[dict[str, object]]:
    """Yield a row for each launch of both passes after steps 10, 11 and 12, and of PyTorch's layers, in order."""
    problem = Problem(ROWS, HIDDEN, OUTPUTS, torch.bfloat16)
    forms = load_forms("bfloat16")
    graphs = {
        f"pass {last}": capture_calls(partial(problem.enqueue_both_passes, *forms.values(), last))
        for last in (10, 11, 12)
    } | {name: capture_pytorch(problem, name == "compile") for name in ("eager", "compile")}
    for name, graph in graphs.items():
        for number, (kernel, us) in enumerate(profiled(graph), 1):
            yield {
                "of": name, "launch": number, "kernel": kernel[:60], "median_us": f"{us:.2f}", "rows": ROWS, "hidden": HIDDEN,
                "outputs": OUTPUTS, "protocol": f"PyTorch's profiler, {CALLS} CUDA graphs, 20 ms idle before each, the median",
            }  # fmt: skip


def load_forms(dtype: str) -> dict[str, StepLibrary]:
    """Load the kernels of a dtype as given ("first") and as the solution has them."""
    solution = roots.get_solutions() / "p28" / "op"
    with tempfile.TemporaryDirectory() as folder:
        packages = {"first": first_forms(solution, Path(folder)), "solution": solution}
        return {form: StepLibrary(build_library(package, form, dtype)) for form, package in packages.items()}


def measure() -> Iterator[dict[str, object]]:
    """A row for each step, form and dtype, for the bare products, and for both passes after each step."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in ("bfloat16", "float32"):
        yield from measure_dtype(dtype, load_forms(dtype))


if __name__ == "__main__":
    write(measure_launches() if "launches" in sys.argv else measure())
