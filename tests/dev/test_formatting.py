"""`dev format` rewrites files; `dev format --check` only reports differences and fails."""

import pytest

from harness.dev import formatting

UNFORMATTED = '"""A file."""\n\n\ndef  f( x:Int )->Int :\n  return x+1\n'


@pytest.fixture
def tree(tmp_path):
    """A small project."""
    for folder in ("solutions/p1/op", "problems/p1/op", "harness", "book/build"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "solutions/p1/op/a.mojo").write_text(UNFORMATTED)
    (tmp_path / "problems/p1/op/a.mojo").write_text(UNFORMATTED)
    (tmp_path / "harness/b.py").write_text('"""A file."""\n\nx = 1\n')
    return tmp_path


def test_check_prints_the_diff_and_writes_nothing(tree, capfd):
    assert formatting.check(tree) == 1
    out = capfd.readouterr().out
    assert "-def  f( x:Int )->Int :" in out and "solutions/p1/op/a.mojo (formatted)" in out
    assert (tree / "solutions/p1/op/a.mojo").read_text() == UNFORMATTED


def test_format_then_check_is_clean(tree, capfd):
    (tree / "harness/b.py").write_text('"""A file."""\nimport sys\nimport os\nx = [ os,sys ]\n')
    assert formatting.write(tree) == 0
    assert "def f(x: Int) -> Int:" in (tree / "solutions/p1/op/a.mojo").read_text()
    assert (tree / "problems/p1/op/a.mojo").read_text() == UNFORMATTED
    assert (tree / "harness/b.py").read_text().endswith("x = [os, sys]\n")
    capfd.readouterr()
    assert formatting.check(tree) == 0
    assert capfd.readouterr().out == ""
    (tree / "harness/b.py").write_text('"""A file."""\n\nx = [ 1,2 ]\n')
    assert formatting.check(tree) == 1


def test_unparsable_file_is_reported(tree):
    (tree / "solutions/p1/op/a.mojo").write_text("def f(:\n")
    with pytest.raises(SystemExit) as raised:
        formatting.check(tree)
    assert "mojo format failed" in str(raised.value)
