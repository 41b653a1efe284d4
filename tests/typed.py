"""Typed helpers for tests: stubs, values that must not be None, consoles and tensors."""

import io
from collections.abc import Callable, Iterable
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")


def make_stub(kind: type[T], /, **attributes: object) -> T:
    """Create an instance with only these attributes, without calling `__init__`.

    Raise AttributeError for a name that the class does not declare.
    """
    instance = object.__new__(kind)
    for name, value in attributes.items():
        if not any(name in vars(base) or name in base.__annotations__ for base in kind.__mro__[:-1]):
            raise AttributeError(f"a {kind.__name__} has no {name}")
        object.__setattr__(instance, name, value)
    return instance


def unwrap(value: T | None) -> T:
    """Return a value after asserting that it is not None."""
    assert value is not None
    return value


def erase_types(function: Callable[..., T]) -> Callable[..., T]:
    """Return the function with untyped parameters, for unpacked lists or deliberately wrong arguments."""
    return function


def make_text_console(width: int = 200) -> Console:
    """Create a console without colors that records its output, for `read_output`."""
    return Console(file=io.StringIO(), width=width, highlight=False, emoji=False)


def read_output(console: Console) -> str:
    """Return the output of a console on a StringIO."""
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def as_triple(values: Iterable[T]) -> tuple[T, T, T]:
    """Return exactly three values, such as query, key and value, as a tuple."""
    first, second, third = values
    return first, second, third
