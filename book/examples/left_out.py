"""Puzzle 20's registration with one line left out, or written as one writes it first: which check sees it, and its words."""

import logging
import tempfile
import textwrap
import warnings
from pathlib import Path

from harness.check import zoo
from harness.puzzles.p20.registration import RegistrationChecker
from harness.puzzles.p20.spec import PUZZLE

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
rung = PUZZLE.rung("register")
for wrong in zoo.load("p20"):
    if wrong.rung != rung.id:
        continue
    path = Path(tempfile.mkdtemp()) / rung.file
    path.write_text(wrong.target().read_text(encoding="utf-8"), encoding="utf-8")
    results = {
        result.gate.id: result for result in RegistrationChecker(PUZZLE, rung).check(path, [wrong.gate])
    }
    seen, model, *_ = results[wrong.gate].diagnosis
    check, _, words = seen.replace(f"{path.parent}/", "").partition(": ")
    print(f"{wrong.story}\n   {check}")
    for line in (words, model.strip()):
        print(textwrap.indent(textwrap.fill(line, 84), "      "))
