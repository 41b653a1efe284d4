"""What a puzzle is about stands in its own folder, in the formulas that puzzles share, and in what models import; the rest of
the harness knows no puzzle.
"""

import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAP = "harness/check/__init__.py"
"""Its table follows one gate as an example."""
OWN = re.compile(r"p22|layer_?norm|ln_weight|gamma|rstd|hidden_dim", re.IGNORECASE)
HOMES = ("harness/puzzles/p", "harness/puzzles/formulas.py", "harness/nn/", "harness/__init__.py", MAP)
FILES = [
    path
    for path in sorted((ROOT / "harness").rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(HOMES)
]


def spoken_in(files: Iterable[Path]) -> list[str]:
    """A line for each line of the files that speaks of a puzzle."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if OWN.search(line)
    ]


def test_no_other_module_speaks_of_a_puzzle():
    assert spoken_in(FILES) == []
