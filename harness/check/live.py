"""What a check is at, told to what shows it: the line that moves while a check takes longer than a second."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

Listener = Callable[[str], None]
_listeners: list[Listener] = []


def tell(words: str) -> None:
    """Says what is being done, "case 3 of 18 (wide)". The newest listener hears it, in the thread that says it."""
    if _listeners:
        _listeners[-1](words)


@contextmanager
def listening(listener: Listener) -> Generator[None, None, None]:
    """Hears what is told, from any thread, until the block ends."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
