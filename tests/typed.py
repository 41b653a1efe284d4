"""Typed helpers for tests: stand-ins for a class, values that must not be None, consoles and tensors."""

import io
from collections.abc import Callable, Iterable
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")


def stand_in(kind: type[T], /, **attributes: object) -> T:
    """Make an object of a class with only these attributes, without calling its `__init__`.

    Raise AttributeError for a name that the class does not declare.
    """
    instance = object.__new__(kind)
    for name, value in attributes.items():
        if not any(name in vars(base) or name in base.__annotations__ for base in kind.__mro__[:-1]):
            raise AttributeError(f"a {kind.__name__} has no {name}")
        object.__setattr__(instance, name, value)
    return instance


def present(value: T | None) -> T:
    """Return a value, which must not be None."""
    assert value is not None
    return value


def loosely(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function untyped, for calls with unpacked lists or deliberately wrong arguments."""
    return function


def text_console(width: int = 200) -> Console:
    """Make a console without colours that records its output, for `text_of`."""
    return Console(file=io.StringIO(), width=width, highlight=False, emoji=False)


def text_of(console: Console) -> str:
    """Return the output recorded by a console on a StringIO."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def three(values: Iterable[T]) -> tuple[T, T, T]:
    """Return exactly three values, such as query, key and value, to pass by position."""
    first, second, third = values
    return first, second, third
