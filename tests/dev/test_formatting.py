"""`dev format`: which files it takes, and that its check changes nothing and fails on a difference."""

import pytest

from harness.dev import formatting

UGLY = '"""A file."""\n\n\ndef  f( x:Int )->Int :\n  return x+1\n'


@pytest.fixture
def tree(tmp_path):
    """A small project."""
    for folder in ("solutions/p1/op", "problems/p1/op", "harness", "book/build"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "solutions/p1/op/a.mojo").write_text(UGLY)
    (tmp_path / "problems/p1/op/a.mojo").write_text(UGLY)
    (tmp_path / "harness/b.py").write_text('"""A file."""\n\nx = 1\n')
    return tmp_path


def test_problems_are_left_to_the_generator(tree):
    assert formatting.mojo_files(tree) == [tree / "solutions/p1/op/a.mojo"]


def test_check_prints_the_difference_and_changes_nothing(tree, capfd):
    assert formatting.check(tree) == 1
    out = capfd.readouterr().out
    assert "-def  f( x:Int )->Int :" in out and "solutions/p1/op/a.mojo (formatted)" in out
    assert (tree / "solutions/p1/op/a.mojo").read_text() == UGLY


def test_format_then_check_is_clean(tree, capfd):
    (tree / "harness/b.py").write_text('"""A file."""\nimport sys\nimport os\nx = [ os,sys ]\n')
    assert formatting.write(tree) == 0
    assert "def f(x: Int) -> Int:" in (tree / "solutions/p1/op/a.mojo").read_text()
    assert (tree / "problems/p1/op/a.mojo").read_text() == UGLY
    assert (tree / "harness/b.py").read_text().endswith("x = [os, sys]\n")
    capfd.readouterr()
    assert formatting.check(tree) == 0
    assert capfd.readouterr().out == ""


def test_check_sees_python_too(tree):
    formatting.write(tree)
    (tree / "harness/b.py").write_text('"""A file."""\n\nx = [ 1,2 ]\n')
    assert formatting.check(tree) == 1


def test_a_file_that_cannot_be_parsed_is_named(tree):
    (tree / "solutions/p1/op/a.mojo").write_text("def f(:\n")
    with pytest.raises(SystemExit) as stop:
        formatting.check(tree)
    assert "mojo format failed" in str(stop.value)
