"""The cache of reference results: any changed input is a miss, and damaged entries are recomputed."""

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
from harness.check.reference import Reference, list_code_files
from harness.devices.targets import VIRTUAL
from harness.puzzles.p19.spec import PUZZLE
from harness.spec.catalogue import find_puzzle
from harness.toolchain import roots

CASE = PUZZLE.list_cases(None)[1]
EXCLUDED_FILES = {"__init__.py", "errors.py"}
LIST_MODULES = """
import json, sys
import torch
from harness.spec.catalogue import list_puzzle_names
files = {}
for name in list_puzzle_names():
    for module in [module for module in sys.modules if module.startswith("harness")]:
        del sys.modules[module]
    from harness.spec.catalogue import find_puzzle
    puzzle = find_puzzle(name)
    if puzzle.mojo_rung:
        arrays = puzzle.make_inputs(puzzle.list_cases(None)[1], "float32", 0)
        puzzle.compute_reference({name: torch.tensor(array) for name, array in arrays.items()})
        puzzle.compute_term_magnitudes(arrays)
        files[name] = [module.__file__ for key, module in sys.modules.items() if key.startswith("harness")]
print(json.dumps(files))
"""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))


def get_results(dtype: str = "float32", seed: int = 0, puzzle=PUZZLE, is_cached: bool = True):
    """Return truth and baseline of a case, and whether they were computed instead of read from the cache."""
    calls = []
    reference.compute_code_digest.cache_clear()

    class CountingReference(Reference):
        def _run_autograd(self, *arguments):
            calls.append(arguments)
            return super()._run_autograd(*arguments)

    results = CountingReference(puzzle, dtype, seed, is_cached)
    return results.get_truth(CASE, VIRTUAL), results.get_baseline(CASE, VIRTUAL), bool(calls)


def test_pytorch_computes_results_once():
    (truth, baseline, is_computed), (same_truth, same_baseline, is_recomputed) = get_results(), get_results()
    assert is_computed and not is_recomputed
    for first, second in ((truth, same_truth), (baseline, same_baseline)):
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[name], second[name], equal_nan=True) for name in first)


def test_any_relevant_change_is_a_cache_miss(tmp_path, monkeypatch):
    files = [tmp_path / f"{number}.py" for number, _ in enumerate(list_code_files("p19"))]
    for file, source in zip(files, list_code_files("p19"), strict=True):
        file.write_bytes(source.read_bytes())
    monkeypatch.setattr(reference, "list_code_files", lambda puzzle: files)
    assert get_results()[2] and get_results()[2], "this process loaded older code"
    monkeypatch.setattr(reference, "START_TIME", np.inf)
    assert get_results()[2] and not get_results()[2]
    for file in files:
        file.write_text(f"{file.read_text()}\n")
        assert get_results()[2] and not get_results()[2]
    assert get_results("bfloat16")[2] and get_results(seed=1)[2]
    for name, value in (("OMP_NUM_THREADS", "3"), ("MKL_NUM_THREADS", "3")):
        monkeypatch.setenv(name, value)
        assert get_results()[2]
    monkeypatch.setattr(np, "__version__", "another")
    assert get_results()[2]
    monkeypatch.setattr(reference, "find_spec", lambda name: None)  # another torch
    assert get_results()[2]


def test_cache_key_covers_all_relevant_code():
    completed = subprocess.run(
        [sys.executable, "-c", LIST_MODULES], cwd=roots.CHECKOUT, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    for name, files in json.loads(completed.stdout).items():
        find_puzzle(name)
        code = list_code_files(name)
        others = {Path(file) for file in files} - {*code}
        assert {other.name for other in others} <= EXCLUDED_FILES, others
        assert Path(reference.__file__) in code


def test_damaged_entry_is_recomputed(tmp_path):
    truth = get_results()[0]
    (file,) = (path for path in tmp_path.rglob("answers/p19/*/*") if path.stat().st_size > 1000)
    for damaged in (file.read_bytes()[:-1], b"", file.read_bytes()[:-1] + b"?"):
        file.write_bytes(damaged)
        recomputed, _, is_computed = get_results()
        assert is_computed and all(
            np.array_equal(truth[name], recomputed[name], equal_nan=True) for name in truth
        )
        assert not get_results()[2]


def test_unregistered_puzzles_and_learner_processes_are_not_cached(tmp_path):
    for puzzle, is_cached in ((replace(PUZZLE, title="another"), True), (PUZZLE, False)):
        assert get_results(puzzle=puzzle, is_cached=is_cached)[2]
        assert get_results(puzzle=puzzle, is_cached=is_cached)[2]
    assert not list(tmp_path.rglob("answers/p19/*"))


def test_stale_entries_are_removed(tmp_path):
    folder = tmp_path / "cache" / "answers" / "p19"
    for name, age in (("old", 2 * reference.STALE_AFTER_S), ("young", 0)):
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - age, time.time() - age))
    get_results()
    assert (folder / "young").is_dir() and not (folder / "old").exists()
