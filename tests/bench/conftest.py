"""What the tests of `--bench` share."""

import gc

import pytest

from harness.bench import timing


@pytest.fixture
def short_bursts(monkeypatch):
    """A few calls a turn, and garbage looked for among new objects alone: no time is judged here."""
    monkeypatch.setattr(timing, "MOST_REPEATS", 3)
    gc.freeze()
    yield
    gc.unfreeze()
