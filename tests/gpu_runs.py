"""Plugin and script for tests on a real GPU: the mark `gpu`, and a record of the last GPU run.

Continuous integration has no GPU. On a machine with one, `python3 tests/gpu_runs.py` runs the marked tests
and writes `tests/gpu_record.json`, to be committed: the date, device and commit, how many tests passed, were
skipped and failed, and a hash of each covered file, by which `test_gpu_record.py` detects changes.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_record.json"
COVERED = (
    "solutions/*/op/**/*.mojo",
    "solutions/shared/**/*.mojo",
    "solutions/*/*.mojo",
    "harness/nn/**/*.*",
)
"""Files that these tests run on a GPU; the record covers the test files, too."""
MAX_PARALLEL_FILES = 6
"""Test files that run in parallel, since they are mostly CPU-bound."""
MARK = re.compile(r"pytest\.mark\.(gpu|on_virtual_gpu)\b")


def list_marked_files() -> list[str]:
    """List the files with tests for a GPU."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if MARK.search(path.read_text(encoding="utf-8"))
    )


def hash_covered_files() -> dict[str, str]:
    """Return file -> hash for all files that a record covers."""
    files = {path for pattern in COVERED for path in ROOT.glob(pattern) if "__pycache__" not in path.parts}
    files |= {ROOT / path for path in list_marked_files()}
    return {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(files)
    }


def list_changes_since(record: dict) -> list[str]:
    """List files that were changed, added or removed since a record."""
    now, before = hash_covered_files(), record["files"]
    return sorted(path for path in now.keys() | before.keys() if now.get(path) != before.get(path))


def list_gpus() -> list[str]:
    """Return the names of the available GPUs."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def get_commit() -> str:
    """Return the current commit, with "and changes" if the work tree is dirty."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---- pytest hooks --------------------------------------------------------------------------------------------------


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu(count=1): needs real GPUs that torch sees")


def pytest_collection_modifyitems(items):
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marked:
        return
    num_gpus = len(list_gpus())
    for item, mark in marked:
        required = mark.kwargs.get("count", 1)
        if num_gpus < required:
            reason = "no GPU that torch sees" if not num_gpus else f"torch sees {num_gpus} of {required} GPUs"
            item.add_marker(pytest.mark.skip(reason=reason))


def run_file(path: str, folder: Path, arguments: list[str]) -> dict[str, str]:
    """Run the marked tests of one file in a separate process and return each test's outcome."""
    report = folder / f"{path.replace('/', '.')}.xml"
    command = [sys.executable, "-m", "pytest", path, "-m", "gpu or on_virtual_gpu", f"--junitxml={report}"]
    command += ["-o", "addopts=-q", "-p", "no:cacheprovider", *arguments]
    # Tests for the virtual GPU run on this GPU too (virtual_runs.py).
    environment = {**os.environ, "WORKBOOK_TEST_GPU": "1"}
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    outcomes = parse_outcomes(path, report) if report.exists() else {}
    if completed.returncode not in (0, 1, 5) or (completed.returncode == 1) != (
        "failed" in outcomes.values()
    ):
        outcomes[path] = "failed"
    if "failed" in outcomes.values():
        print(f"{completed.stdout}{completed.stderr}", flush=True)
    return outcomes


def parse_outcomes(path: str, report: Path) -> dict[str, str]:
    """Parse a JUnit report into a mapping test -> passed, skipped or failed."""
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return {
        f"{path}::{case.get('name')}": min(
            (kinds[child.tag] for child in case if child.tag in kinds), default="passed"
        )
        for case in ElementTree.parse(report).iter("testcase")
    }


def main(arguments: list[str]) -> int:
    """Run the marked tests, several files in parallel, and write the record; return 1 if any test fails."""
    names = list_gpus()
    if not names:
        print("error: torch sees no GPU: no test was run, the record is unchanged", file=sys.stderr)
        return 2
    import torch

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(MAX_PARALLEL_FILES) as pool:
        runs = pool.map(lambda path: run_file(path, Path(folder), arguments), list_marked_files())
        outcomes = {name: outcome for run in runs for name, outcome in run.items()}
    counts = Counter(outcomes.values())
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": ", ".join(names),
        "torch": torch.__version__,
        "commit": get_commit(),
        **{outcome: counts[outcome] for outcome in ("passed", "skipped", "failed")},
        "which_failed": sorted(name for name, outcome in outcomes.items() if outcome == "failed"),
        "files": hash_covered_files(),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(
        f"{RECORD.relative_to(ROOT)}: {counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed"
    )
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
