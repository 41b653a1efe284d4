"""Fixtures for the tests of `--bench`."""

import gc

import pytest

from harness.bench import timing


@pytest.fixture
def short_bursts(monkeypatch):
    """Shorten measurements and garbage collections, since no test depends on times."""
    monkeypatch.setattr(timing, "MAX_REPEATS", 3)
    gc.freeze()
    yield
    gc.unfreeze()
