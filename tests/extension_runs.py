"""Programs that load an extension module, run by `vgpu exec`: what they report, what they launched, what was found.

A program begins each part of its work with `part(NAME)` and ends with one line of JSON on standard output.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINE = re.compile(
    r"part: (?P<part>.*)|virtual GPU: ran (?P<name>.+) grid=\((?P<grid>[\d, ]+)\) .*: (?P<instructions>\d+) thread"
    r" instructions|virtual GPU: (?P<map>encoded a tensor map)"
)


@dataclass
class Launch:
    """One launch, from the log."""

    name: str
    grid: tuple[int, ...]
    instructions: int


@dataclass
class Run:
    """What a program printed last; by part what it launched and how many tensor maps it had encoded; the findings."""

    report: Any
    findings: list[dict]
    by_part: dict[str, list[Launch]] = field(default_factory=lambda: defaultdict(list))
    maps: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def launches(self) -> list[Launch]:
        """All launches, in their order."""
        return [launch for launches in self.by_part.values() for launch in launches]

    def names(self, part: str) -> list[str]:
        """The kernels of a part, each once."""
        return sorted({launch.name for launch in self.by_part[part]})


def part(name: str) -> None:
    """Begin a part of the program: what it launches from now on counts there."""
    print(f"part: {name}", file=sys.stderr, flush=True)


def on_virtual_gpu(program: Path, *arguments: str | Path, arch: str, blocks: str = "natural") -> Run:
    """Run a program with a virtual GPU whose blocks run in this order. Skips where its driver cannot be had."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the virtual GPU's driver is for Linux")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        options = ["--verbose", "--arch", arch, "--blocks", blocks, "--json", str(found)]
        command = [sys.executable, "-m", "harness.vgpu.cli", "exec", *options, "--", sys.executable]
        done = subprocess.run(
            [*command, str(program), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=550,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))},
        )
        assert done.returncode in (0, 1) and done.stdout, done.stderr
        run = Run(json.loads(done.stdout.splitlines()[-1]), json.loads(found.read_text())["findings"])
    now = ""
    for line in filter(None, map(LINE.match, done.stderr.splitlines())):
        if line["map"]:
            run.maps[now] += 1
        elif line["name"]:
            grid = tuple(map(int, line["grid"].split(",")))
            run.by_part[now].append(Launch(line["name"], grid, int(line["instructions"])))
        else:
            now = line["part"]
    return run
