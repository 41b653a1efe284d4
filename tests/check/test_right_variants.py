"""Right solutions that are written another way than the book's are right, whatever the seed."""

import shutil
import tomllib
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from changed_solutions import write_changed

from harness.check.checker import Checker, make_checker
from harness.learner.work import Work
from harness.spec.catalogue import find_puzzle
from harness.toolchain import roots

VARIANTS = tomllib.loads((Path(__file__).parent / "right_variants.toml").read_text("utf-8"))
IN_PYTHON = [
    pytest.param(puzzle, rung, gate, edits, id=f"{puzzle}-{rung}-{gate}-{about}")
    for puzzle, rungs in VARIANTS.items()
    for rung, gates in rungs.items()
    if rung != "mojo"
    for gate, named in gates.items()
    for about, edits in named.items()
]
PACKAGES = [
    pytest.param(puzzle, [edit for edits in variants if edits for edit in edits], id=f"{puzzle}-{number}")
    for puzzle, rungs in VARIANTS.items()
    for number, variants in enumerate(
        zip_longest(*(named.values() for named in rungs.get("mojo", {}).values()))
    )
]
"""Of Mojo a package has one variant of each gate."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rung", "gate", "edits"), IN_PYTHON)
def test_another_answer_in_python_is_right_whatever_the_seed(name, rung, gate, edits, tmp_path):
    puzzle = find_puzzle(name)
    path = write_changed(puzzle, rung, tmp_path, *edits)
    for seed in range(20):
        checker = make_checker(Work(puzzle, puzzle.rung(rung), roots.solutions()), seed=seed)
        (result,) = checker.check(path, [gate])
        assert result.state == "correct", (seed, result.diagnosis)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(("name", "edits"), PACKAGES)
def test_other_kernels_are_right_whatever_the_seed(name, edits, tmp_path):
    """In the small cases of each gate."""
    puzzle = find_puzzle(name)
    package = shutil.copytree(roots.op_package(roots.solutions(), name).path, tmp_path / "op")
    text = (package / puzzle.source).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (package / puzzle.source).write_text(text)
    small = [case for case in (*puzzle.cases(None), *puzzle.gate_cases) if np.prod(case.dims) <= 2000]
    for seed in range(20):
        results = Checker(puzzle, seed=seed).check(package, cases=small)
        wrong = [result for result in results if result.state != "correct"]
        assert not wrong, (seed, [(result.gate.id, result.diagnosis) for result in wrong])
