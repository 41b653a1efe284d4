"""The book's programs run as printed, and its recorded outputs are what the commands print."""

import re
import subprocess
import sys

import pytest
from conftest import BOOK, ROOT


def test_usage_example_of_the_overview_runs():
    """It compares itself with PyTorch; what it prints last says that it got there."""
    run = subprocess.run(
        [sys.executable, BOOK / "examples" / "usage.py"], cwd=ROOT, text=True, capture_output=True
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "all three agree with PyTorch"


def shown_outputs() -> set[str]:
    pages = (page.read_text() for page in (BOOK / "src").rglob("*.md"))
    return {name for page in pages for name in re.findall(r"^```output (\S+)$", page, re.M)}


def test_every_shown_output_has_a_command_and_none_is_left_over():
    import outputs

    assert shown_outputs() == set(outputs.COMMANDS)
    assert {file.stem for file in outputs.FOLDER.iterdir()} == set(outputs.COMMANDS)


@pytest.mark.parametrize("name", sorted(shown_outputs()))
def test_recorded_output_is_what_the_command_prints(name):
    import outputs

    assert outputs.difference(name) == []


def test_a_changed_line_is_noticed(monkeypatch):
    import outputs

    text = outputs.load("diagonal_formula").text
    monkeypatch.setattr(outputs, "run", lambda command: text.replace("autograd", "autodiff"))
    assert any("autodiff" in line for line in outputs.difference("diagonal_formula"))
    monkeypatch.setattr(outputs, "run", lambda command: text.replace("0.871769", "0.871768"))
    assert outputs.difference("diagonal_formula") != []


def test_numbers_times_and_hashes_may_differ_but_words_may_not():
    import outputs

    assert outputs.machine_free("dx: 2.98e-08 in 1.23 s (a1b2c3d4)") == outputs.machine_free(
        "dx:  3.01e-08 in 10.5 s (0123abcd)"
    )
    assert outputs.machine_free("dx: 2.98e-08 ok") != outputs.machine_free("dx: 2.98e-08 wrong")


def test_unknown_output_is_refused(capsys):
    import outputs

    with pytest.raises(SystemExit) as exit:
        outputs.main(["nothing"])
    assert exit.value.code == 2
    assert "no such output: nothing" in capsys.readouterr().err


def test_wrong_exit_code_is_not_recorded():
    import outputs

    with pytest.raises(RuntimeError, match="exit code 3"):
        outputs.run(outputs.Command("x", ("-c", "raise SystemExit(3)")))
