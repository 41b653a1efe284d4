"""Check every version of puzzle 21's backward passes: the solution, the 46 wrong ones, and the edits of `edits.toml`.

`python -m book.measure gradient_edits`; a CPU is enough. A row says which common checks object to a version, the first try of
`check_backward` that does, and what that says. The page "What gradcheck misses" takes its matrix and its verdicts from here.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from book.measure.hunt_versions import Version, versions
from book.measure.shared import import_cases, write
from harness.check.python_files import load_module
from harness.puzzles.p21.hunt import USUAL_CHECKS, find_function, run_usual_checks
from harness.puzzles.p21.subjects import REFERENCES
from harness.testing import check_backward

NOT_ASKED = ("compile", "autocast", "size 0", "infinity", "negative infinity")
"""Tries that the puzzle does not ask for."""


def row(version: Version, folder: Path) -> dict:
    """What the checks make of a version."""
    path = folder / f"{version.gate}_{version.name}.py"
    path.write_text(version.text, encoding="utf-8")
    function = find_function(version.gate, load_module(path)).apply
    usual = run_usual_checks(REFERENCES[version.gate].make_subject(function))
    reference, inputs = REFERENCES[version.gate].function, import_cases("zoo_cases").P21[version.gate]
    report = check_backward(function, reference=reference, inputs=inputs, leave_out=NOT_ASKED)
    first = report.wrong[0] if report.wrong else None
    return {
        "gate": version.gate,
        "version": version.name,
        "kind": version.kind,
        **{name: int(usual[name]) for name in USUAL_CHECKS},
        "check_backward": int(first is not None),
        "try": first.name if first else "",
        "said": " ".join(first.message.split()) if first else "",
        "named": report.mistake,
    }


def rows() -> Iterator[dict]:
    """A row for each version."""
    with tempfile.TemporaryDirectory() as folder:
        for version in versions():
            yield row(version, Path(folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(rows())
