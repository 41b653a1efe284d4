"""Writing files: writes are atomic, and targets are checked before use."""

import errno
import os
import stat
import threading

import pytest

from harness.errors import EnvironmentProblem, UsageError
from harness.toolchain import disk
from harness.toolchain.disk import check_target, write_atomically, write_target


def raise_disk_full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_write_leaves_no_temporary_file(tmp_path):
    for text in ("one ✅\n", "two\r\n"):
        write_atomically(tmp_path / "file", text)
        assert (tmp_path / "file").read_bytes() == text.encode()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_write_preserves_permissions_and_links(tmp_path):
    (tmp_path / "file").write_text("before")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "after"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_failed_write_preserves_the_old_content(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("before")
    monkeypatch.setattr(disk.os, "fsync", raise_disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "file", "after")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "before"}


def test_pipe_is_written_in_place(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_atomically(tmp_path / "pipe", "text")
    reader.join(10)
    assert received == ["text"]


def test_target_on_a_full_disk_is_an_environment_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.os, "fsync", raise_disk_full)
    with pytest.raises(EnvironmentProblem) as raised:
        write_target("--json", tmp_path / "run.json", "x" * 1234)
    assert str(raised.value) == f"--json {tmp_path}/run.json: No space left on device"
    assert not list(tmp_path.iterdir())


def test_missing_folder_of_a_target_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match=r"--html .*/no/file: No such file or directory"):
        write_target("--html", tmp_path / "no" / "file", "")


def test_writable_target_is_not_changed(tmp_path):
    (tmp_path / "file").write_text("before")
    check_target("--json", tmp_path / "file")
    check_target("--json", tmp_path / "new")
    check_target("--json", "/dev/null")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "before"}


def test_target_without_write_access_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o400)
    if os.access(tmp_path / "file", os.W_OK):
        pytest.skip("this user may write everywhere")
    with pytest.raises(UsageError, match=r"--json .*/file: Permission denied"):
        check_target("--json", tmp_path / "file")
