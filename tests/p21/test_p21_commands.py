"""The learner's commands on puzzle 21: they begin with the first file, and know all three."""

import re
import shutil

import pytest

from harness import cli
from harness.learner import blanks
from harness.toolchain import roots


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkout with this puzzle's files alone, as they are given."""
    for name in ("p21", "shared"):
        shutil.copytree(roots.solutions() / name, tmp_path / "solutions" / name, symlinks=True)
    blanks.generate(tmp_path / "solutions", tmp_path / "problems")
    monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mend(folder, gate: str) -> None:
    """Writes the solution into one blank of the first file."""
    path, solution = (folder / room / "p21" / "hunt.py" for room in ("problems", "solutions"))
    body = blanks.find(solution.read_text())[gate].body
    path.write_text(blanks.join(blanks.split(path.read_text()), {gate: body}))


def test_it_is_listed_as_unsolved(folder, capsys):
    assert cli.main(["list", "p21"]) == 0
    said = capsys.readouterr().out
    assert said.count(" unsolved ") == 18 and "0/13  Fix it, in PyTorch" in said
    assert all(words in said for words in ("0/1  Catch it", "0/4  Fix it, in Mojo"))


def test_a_hint_is_for_the_first_gate_that_is_left(folder, capsys):
    assert cli.main(["hint", "p21"]) == 0 and "Hint softmax-1 (1 of 3)" in capsys.readouterr().out
    mend(folder, "softmax")
    assert cli.main(["p21", "--gate", "softmax"]) == 0
    assert cli.main(["hint", "p21"]) == 0 and "Hint logsoftmax-1 (1 of 3)" in capsys.readouterr().out
    assert cli.main(["diff", "p21", "softmax"]) == 0 and "the same as the solution" in capsys.readouterr().out
    assert cli.main(["hint", "p21", "--rung", "mojo"]) == 0 and "Hint dbias-1" in capsys.readouterr().out


def test_a_damaged_file_comes_first(folder, capsys):
    path = folder / "problems" / "p21" / "hunt.py"
    path.write_text(re.sub(r"# BLANK-END softmax\b.*\n", "", path.read_text(), count=1))
    assert cli.main(["hint", "p21"]) == 2 and "blank logsoftmax starts inside" in capsys.readouterr().err


def test_reset_puts_every_file_back(folder, capsys):
    mend(folder, "sigmoid")
    catch = folder / "problems" / "p21" / "catch.py"
    catch.write_text(catch.read_text().replace("# FILL IN", "return None  # FILL IN"))
    assert cli.main(["reset", "p21", "--yes"]) == 0
    said = capsys.readouterr().out
    assert said.count("wrote ") == 2 and "hunt.py" in said and "catch.py" in said
    assert cli.main(["reset", "p21"]) == 0 and "Nothing to reset" in capsys.readouterr().out


def test_what_is_given_is_unsolved_with_exit_code_3(folder, capsys):
    assert cli.main(["p21", "--gate", "dropout"]) == 3
    said = capsys.readouterr().out
    assert "⏳ dropout" in said and "mend what is kept, and the gradient of x" in said
    assert cli.main(["p21", "--gate", "check"]) == 3
    assert cli.main(["p21", "--rung", "torch"]) == 3
