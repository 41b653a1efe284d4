"""What tests of several processes share: whether a group of processes is gone."""

import os
import time


def alive(group: int) -> bool:
    """Whether a process of a group is there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def assert_gone(group: int) -> None:
    """No process of a group is there, or will be within twenty seconds."""
    deadline = time.monotonic() + 20
    while alive(group) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not alive(group)
