"""Tests on a real GPU: the mark `gpu`, which skips tests without one, and a record of the last run with one.

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
"""Files whose code these tests run on a GPU; the test files are covered too."""
AT_ONCE = 6
"""Test files that run at a time: they spend most of their time on the CPU."""
MARK = re.compile(r"pytest\.mark\.(gpu|on_virtual_gpu)\b")


def marked_files() -> list[str]:
    """List the files with tests for a GPU."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if MARK.search(path.read_text(encoding="utf-8"))
    )


def hash_covered_files() -> dict[str, str]:
    """Map every file that a record covers to its hash."""
    files = {path for pattern in COVERED for path in ROOT.glob(pattern) if "__pycache__" not in path.parts}
    files |= {ROOT / path for path in marked_files()}
    return {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(files)
    }


def changed_since(record: dict) -> list[str]:
    """List the files changed, added or removed since a record."""
    now, then = hash_covered_files(), record["files"]
    return sorted(path for path in now.keys() | then.keys() if now.get(path) != then.get(path))


def gpus() -> list[str]:
    """List the names of the GPUs that torch sees."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def commit() -> str:
    """Return the checked-out commit, with "and changes" if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" and changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---- pytest's side --------------------------------------------------------------------------------------------------


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu(count=1): needs real GPUs that torch sees")


def pytest_collection_modifyitems(items):
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marked:
        return
    present = len(gpus())
    for item, mark in marked:
        needed = mark.kwargs.get("count", 1)
        if present < needed:
            reason = "no GPU that torch sees" if not present else f"torch sees {present} of {needed} GPUs"
            item.add_marker(pytest.mark.skip(reason=reason))


def run_file(path: str, folder: Path, arguments: list[str]) -> dict[str, str]:
    """Run the marked tests of one file in a separate process and return each test's outcome."""
    report = folder / f"{path.replace('/', '.')}.xml"
    command = [sys.executable, "-m", "pytest", path, "-m", "gpu or on_virtual_gpu", f"--junitxml={report}"]
    command += ["-o", "addopts=-q", "-p", "no:cacheprovider", *arguments]
    # Tests for the virtual GPU run on this GPU too (virtual_runs.py).
    environment = {**os.environ, "WORKBOOK_TEST_GPU": "1"}
    completed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    outcomes = outcomes_of(path, report) if report.exists() else {}
    if completed.returncode not in (0, 1, 5) or (completed.returncode == 1) != (
        "failed" in outcomes.values()
    ):
        outcomes[path] = "failed"
    if "failed" in outcomes.values():
        print(f"{completed.stdout}{completed.stderr}", flush=True)
    return outcomes


def outcomes_of(path: str, report: Path) -> dict[str, str]:
    """Return test -> passed, skipped or failed, from a JUnit report."""
    kinds = {"failure": "failed", "error": "failed", "skipped": "skipped"}
    return {
        f"{path}::{case.get('name')}": min(
            (kinds[child.tag] for child in case if child.tag in kinds), default="passed"
        )
        for case in ElementTree.parse(report).iter("testcase")
    }


def main(arguments: list[str]) -> int:
    """Run the marked tests, some files at a time, and write the record; return 1 if any fails."""
    names = gpus()
    if not names:
        print("error: torch sees no GPU: no test was run, the record is unchanged", file=sys.stderr)
        return 2
    import torch

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as pool:
        runs = pool.map(lambda path: run_file(path, Path(folder), arguments), marked_files())
        outcomes = {name: outcome for run in runs for name, outcome in run.items()}
    counts = Counter(outcomes.values())
    record = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": ", ".join(names),
        "torch": torch.__version__,
        "commit": commit(),
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
