"""Fixtures for the tests of a learner's commands."""

import pytest
from checkouts import Checkout


@pytest.fixture
def checkout(tmp_path, monkeypatch, capsys):
    """A new copy of a learner's checkout."""
    return Checkout(tmp_path, monkeypatch, capsys)
