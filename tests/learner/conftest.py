"""What the tests of a learner's commands share."""

import pytest
from checkouts import Checkout


@pytest.fixture
def checkout(tmp_path, monkeypatch, capsys):
    """A fresh copy."""
    return Checkout(tmp_path, monkeypatch, capsys)
