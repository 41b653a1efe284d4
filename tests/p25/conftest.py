"""Fixtures for the ring's tests: a group of one rank, and a check for leftover processes."""

import multiprocessing

import pytest
import torch


@pytest.fixture
def group_of_one(tmp_path):
    """A default process group with only this process."""
    store = (tmp_path / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def no_processes_left():
    """Assert that all processes of a ring exit before the test ends."""
    yield
    assert not multiprocessing.active_children()
