"""What a puzzle is about stands in its own folder, in the formulas that puzzles share, and in what models import; the rest of
the harness knows no puzzle.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWN = re.compile(r"p22|layer_?norm|ln_weight|gamma|rstd|hidden_dim", re.IGNORECASE)
HOMES = ("harness/puzzles/p", "harness/puzzles/formulas.py", "harness/nn/", "harness/__init__.py")
FILES = [
    path
    for path in sorted((ROOT / "harness").rglob("*.py"))
    if not path.relative_to(ROOT).as_posix().startswith(HOMES)
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_other_module_speaks_of_a_puzzle(path):
    lines = path.read_text().splitlines()
    found = [f"{number}: {line.strip()}" for number, line in enumerate(lines, start=1) if OWN.search(line)]
    assert not found, "\n".join(found)


def test_the_words_are_looked_for_where_they_are():
    assert OWN.search((ROOT / "harness" / "puzzles" / "p22" / "spec.py").read_text())
    assert len(FILES) > 50
