"""Communicating processes: errors report the failed rank."""

import time

import pytest

from harness.devices.processes import RankError, run_ranks


def test_hanging_rank_is_reported():
    with pytest.raises(RankError, match="rank 1 of 2 hangs"):
        run_ranks(time.sleep, [(0,), (60,)], timeout_s=2.0)
