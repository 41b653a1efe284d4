"""Fixtures for puzzle 27's tests: a text to train on."""

import pytest


@pytest.fixture
def text(tmp_path):
    """A folder with a chapter."""
    (tmp_path / "chapter.md").write_text("the gradient of the loss comes back through every part. " * 40)
    return tmp_path
