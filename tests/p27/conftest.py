"""Fixtures for puzzle 27's tests: a training text."""

import pytest


@pytest.fixture
def text(tmp_path):
    """Folder with a chapter to train on."""
    (tmp_path / "chapter.md").write_text("the gradient of the loss comes back through every part. " * 40)
    return tmp_path
