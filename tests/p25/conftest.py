"""What the tests of the ring share: a group of one rank."""

import pytest
import torch


@pytest.fixture
def group_of_one(tmp_path):
    """A default process group of this process alone."""
    store = (tmp_path / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
