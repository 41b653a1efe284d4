"""Helpers for tests with several processes."""

import os
import time


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def assert_exited(group: int) -> None:
    """Assert that no process of a group is alive, within twenty seconds."""
    deadline = time.monotonic() + 20
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive(group)
