"""Shared by the tests of puzzle 22: its public ops, each compiled once for all."""

import pytest

from harness.toolchain.roots import CHECKOUT


@pytest.fixture(scope="session")
def public_ops():
    """The solution's package as MAX's own PyTorch binding loads it."""
    from max.experimental.torch import CustomOpLibrary

    return CustomOpLibrary(CHECKOUT / "solutions" / "p22" / "op")
