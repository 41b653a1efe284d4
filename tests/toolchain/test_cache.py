"""The cache folder: where it is, what happens where it cannot be written, and the hash that names what is in it."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import EnvironmentProblem
from harness.toolchain.cache import cache_folder, digest


def test_the_variable_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "here"))
    assert cache_folder("a", "b") == tmp_path / "here" / "a" / "b"
    assert (tmp_path / "here" / "a" / "b").is_dir()


@pytest.mark.parametrize("value", [None, ""])
def test_without_it_the_home_folder_has_the_cache(monkeypatch, tmp_path, value):
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("WORKBOOK_CACHE", raising=False)
    else:
        monkeypatch.setenv("WORKBOOK_CACHE", value)
    assert cache_folder("x") == tmp_path / ".cache" / "mojo-gpu-workbook" / "x"


def test_a_file_in_the_way_is_an_environment_problem(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(EnvironmentProblem, match=r"cannot make the cache folder .*; set WORKBOOK_CACHE to a"):
        cache_folder("graphs")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="this system has no /proc")
def test_even_root_cannot_make_a_folder_in_proc(monkeypatch):
    monkeypatch.setenv("WORKBOOK_CACHE", "/proc/self")
    with pytest.raises(EnvironmentProblem, match="cannot make the cache folder /proc/self/graphs"):
        cache_folder("graphs")


def test_a_folder_without_write_access_is_an_environment_problem(monkeypatch, tmp_path):
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("this user may write everywhere")
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    with pytest.raises(EnvironmentProblem, match="no write access to the cache folder"):
        cache_folder()


def test_digest_is_short_and_fixed():
    assert digest(["a", b"b"]) == digest(["a", "b"])
    assert len(digest([])) == 16 and int(digest([]), 16) >= 0


@given(st.lists(st.text()), st.lists(st.text()))
def test_different_parts_have_different_digests(one, other):
    """Also where the parts run together to the same text: ["ab", "c"] and ["a", "bc"]."""
    assert (digest(one) == digest(other)) == (one == other)


def test_digest_sees_where_parts_end():
    assert digest(["ab", "c"]) != digest(["a", "bc"])
    assert digest(["", "a"]) != digest(["a", ""])
