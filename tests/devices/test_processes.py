"""Communicating processes: errors report the failed rank."""

import time

import pytest

from harness.devices.processes import RankFailed, run_ranks


def test_hanging_rank_is_reported():
    with pytest.raises(RankFailed, match="rank 1 of 2 hangs"):
        run_ranks(time.sleep, [(0,), (60,)], seconds=2.0)
