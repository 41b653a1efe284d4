"""Helpers for tests with process groups."""

import os
import time


def has_processes(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def assert_exited(group: int) -> None:
    """Assert that all processes of a group exit within twenty seconds."""
    deadline = time.monotonic() + 20
    while has_processes(group) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not has_processes(group)
