"""`record.mojo` is what the ops of the spec say; a program that is out of step, and a launch that nothing defines, are named."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness.dev import check, recording
from harness.dev.command import main
from harness.errors import DamagedFile
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]
SAID = "solutions/p20/record.mojo is out of step with the ops of the spec; `workbook dev generate`"


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A checkout of one op package, p20's, whose recording program names a tensor that the spec does not."""
    shutil.copytree(ROOT / "solutions" / "p20", tmp_path / "solutions" / "p20", symlinks=True)
    shutil.copytree(ROOT / "problems" / "p20", tmp_path / "problems" / "p20", symlinks=True)
    shutil.copy(ROOT / "pixi.toml", tmp_path)
    (tmp_path / "book" / "src").mkdir(parents=True)
    (tmp_path / "book" / "src" / "SUMMARY.md").touch()
    path = tmp_path / "solutions" / "p20" / "record.mojo"
    path.write_text(path.read_text("utf-8").replace('("logits"', '("scores"'), encoding="utf-8")
    monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
    return tmp_path


def test_the_committed_programs_follow_the_specs():
    assert recording.out_of_step(ROOT, map(find_puzzle, puzzle_names())) == {}


def test_a_program_out_of_step_is_named_and_written_anew(checkout, capsys):
    assert SAID in list(check.faults(checkout, find_puzzle("p20")))
    assert main(["generate", "--check"]) == 1
    assert SAID in capsys.readouterr().out
    assert main(["generate"]) == 0
    assert "wrote solutions/p20/record.mojo\n" in capsys.readouterr().out
    path = Path("solutions", "p20", "record.mojo")
    assert (checkout / path).read_text("utf-8") == (ROOT / path).read_text("utf-8")


def test_a_launch_that_no_file_defines_is_named():
    puzzle = find_puzzle("p21")
    (variant, (first, *rest)), *_ = puzzle.variants.items()
    wrong = replace(puzzle, variants={variant: (replace(first, launch="launch_nothing(...)"), *rest)})
    with pytest.raises(DamagedFile, match="p21: no file of its op package defines launch_nothing"):
        recording.program(wrong, ROOT / "solutions" / "p21" / "op")
