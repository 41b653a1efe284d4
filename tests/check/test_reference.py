"""What is right is kept in the cache: a change of anything that decides it misses, a damaged entry is computed anew."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.check import reference
from harness.check.reference import Reference, code_of
from harness.devices.targets import VIRTUAL
from harness.puzzles.p19.spec import PUZZLE
from harness.spec.catalogue import find_puzzle
from harness.toolchain import roots

CASE = PUZZLE.cases(None)[1]
NO_MATHEMATICS = {"__init__.py", "errors.py"}
LOADED = """
import json, sys
import torch
from harness.spec.catalogue import puzzle_names
files = {}
for name in puzzle_names():
    for module in [module for module in sys.modules if module.startswith("harness")]:
        del sys.modules[module]
    from harness.spec.catalogue import find_puzzle
    puzzle = find_puzzle(name)
    if puzzle.mojo_rung:
        arrays = puzzle.inputs(puzzle.cases(None)[1], "float32", 0)
        puzzle.reference({name: torch.tensor(array) for name, array in arrays.items()})
        puzzle.terms(arrays)
        files[name] = [module.__file__ for key, module in sys.modules.items() if key.startswith("harness")]
print(json.dumps(files))
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))


def answers(dtype: str = "float32", seed: int = 0, puzzle=PUZZLE, kept: bool = True):
    """Truth and baseline of a case, and whether PyTorch was asked for them."""
    asked = []
    reference.code_digest.cache_clear()

    class Asking(Reference):
        def _autograd(self, *arguments):
            asked.append(arguments)
            return super()._autograd(*arguments)

    known = Asking(puzzle, dtype, seed, kept)
    return known.truth(CASE, VIRTUAL), known.baseline(CASE, VIRTUAL), bool(asked)


def test_pytorch_is_asked_once():
    (truth, baseline, asked), (same_truth, same_baseline, again) = answers(), answers()
    assert asked and not again
    for first, second in ((truth, same_truth), (baseline, same_baseline)):
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name], equal_nan=True) for name in first)


def test_an_edit_of_anything_that_decides_what_is_right_misses(tmp_path, monkeypatch):
    files = [tmp_path / f"{number}.py" for number, _ in enumerate(code_of("p19"))]
    for file, source in zip(files, code_of("p19"), strict=True):
        file.write_bytes(source.read_bytes())
    monkeypatch.setattr(reference, "code_of", lambda puzzle: files)
    assert answers()[2] and answers()[2], "what this process has loaded is older"
    monkeypatch.setattr(reference, "STARTED", np.inf)
    assert answers()[2] and not answers()[2]
    for file in files:
        file.write_text(f"{file.read_text()}\n")
        assert answers()[2] and not answers()[2]
    assert answers("bfloat16")[2] and answers(seed=1)[2]
    for name, value in (("OMP_NUM_THREADS", "3"), ("MKL_NUM_THREADS", "3")):
        monkeypatch.setenv(name, value)
        assert answers()[2]
    monkeypatch.setattr(np, "__version__", "another")
    assert answers()[2]
    monkeypatch.setattr(reference, "find_spec", lambda name: None)  # of another torch, none
    assert answers()[2]


def test_the_key_holds_all_that_decides_what_is_right():
    done = subprocess.run([sys.executable, "-c", LOADED], cwd=roots.CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, files in json.loads(done.stdout).items():
        find_puzzle(name)
        code = code_of(name)
        others = {Path(file) for file in files} - {*code}
        assert {other.name for other in others} <= NO_MATHEMATICS, others
        assert Path(reference.__file__) in code


def test_a_damaged_entry_is_computed_anew(tmp_path):
    truth = answers()[0]
    (file,) = (path for path in tmp_path.rglob("answers/p19/*/*") if path.stat().st_size > 1000)
    for damaged in (file.read_bytes()[:-1], b"", file.read_bytes()[:-1] + b"?"):
        file.write_bytes(damaged)
        again, _, asked = answers()
        assert asked and all(np.array_equal(truth[name], again[name], equal_nan=True) for name in truth)
        assert not answers()[2]


def test_a_made_up_puzzle_and_a_learner_s_process_keep_nothing(tmp_path):
    for puzzle, kept in ((replace(PUZZLE, title="another"), True), (PUZZLE, False)):
        assert answers(puzzle=puzzle, kept=kept)[2] and answers(puzzle=puzzle, kept=kept)[2]
    assert not list(tmp_path.rglob("answers/p19/*"))


def test_answers_of_other_code_go_after_a_day(tmp_path):
    folder = tmp_path / "cache" / "answers" / "p19"
    for name, age in (("old", 2 * reference.STALE), ("young", 0)):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - age, time.time() - age))
    answers()
    assert (folder / "young").is_dir() and not (folder / "old").exists()
