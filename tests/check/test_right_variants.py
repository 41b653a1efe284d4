"""Correct solutions that differ from the book's pass for all seeds."""

import shutil
import tomllib
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from changed_solutions import write_edited_solution

from harness.check.checker import Checker, load_checker
from harness.learner.exercise import Exercise
from harness.spec.catalogue import find_puzzle
from harness.toolchain import roots

VARIANTS = tomllib.loads((Path(__file__).parent / "right_variants.toml").read_text("utf-8"))
PYTHON_RUNGS = [(puzzle, rung) for puzzle, rungs in VARIANTS.items() for rung in rungs if rung != "mojo"]
SEED_INDEPENDENT = {("p20", "register"), ("p21", "torch"), *(("p26", rung) for rung in VARIANTS["p26"])}
"""Rungs with checks that do not depend on the seed."""
PACKAGES = [
    pytest.param(puzzle, [edit for edits in variants if edits for edit in edits], id=f"{puzzle}-{number}")
    for puzzle, rungs in VARIANTS.items()
    for number, variants in enumerate(
        zip_longest(*(edits_by_name.values() for edits_by_name in rungs.get("mojo", {}).values()))
    )
]
"""Mojo packages with one variant of each gate."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rung"), PYTHON_RUNGS)
def test_python_variants_pass_with_every_seed(name, rung, tmp_path):
    puzzle, failures, files = find_puzzle(name), [], []
    for gate, edits_by_name in VARIANTS[name][rung].items():
        for description, edits in edits_by_name.items():
            folder = tmp_path / str(len(files))
            folder.mkdir()
            files.append((gate, description, write_edited_solution(puzzle, rung, folder, *edits)))
    for seed in range(1 if (name, rung) in SEED_INDEPENDENT else 20):
        checker = load_checker(Exercise(puzzle, puzzle.find_rung(rung), roots.get_solutions()), seed=seed)
        for gate, description, path in files:
            (result,) = checker.check(path, [gate])
            if result.state != "correct":
                failures.append((gate, description, seed, result.diagnosis))
    assert not failures


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(("name", "edits"), PACKAGES)
def test_mojo_variants_pass_with_every_seed(name, edits, tmp_path):
    """Use small cases only."""
    puzzle = find_puzzle(name)
    package = shutil.copytree(roots.make_op_package(roots.get_solutions(), name).path, tmp_path / "op")
    text = (package / puzzle.source).read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (package / puzzle.source).write_text(text)
    small = [case for case in (*puzzle.list_cases(None), *puzzle.gate_cases) if np.prod(case.dims) <= 2000]
    for seed in range(20):
        results = Checker(puzzle, seed=seed).check(package, cases=small)
        failures = [result for result in results if result.state != "correct"]
        assert not failures, (seed, [(result.gate.id, result.diagnosis) for result in failures])
