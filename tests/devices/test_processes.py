"""Processes that talk to each other: the one that goes wrong is named."""

import time

import pytest

from harness.devices.processes import RankFailed, run_ranks


def test_a_rank_that_hangs_is_named():
    with pytest.raises(RankFailed, match="rank 1 of 2 hangs"):
        run_ranks(time.sleep, [(0,), (60,)], seconds=2.0)
