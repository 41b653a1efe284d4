"""What the compiler computes with: numbers that are known when the code runs, their kinds, and what it refuses."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.vgpu.memory.access import DTYPE

KINDS = {"p": "i1", "f2": "half", "f4": "float", "f8": "double"}
KINDS |= {f"{sign}{size}": f"i{8 * size}" for sign in "ui" for size in (1, 2, 4, 8)}
TYPES = {v: k for k, v in DTYPE.items()}


class Refused(Exception):
    """Something that this engine does not translate; the message says what."""


class Value:
    """A number that is known when the code runs: its NumPy kind, and its name in the IR."""

    __slots__ = ("kind", "text")

    def __init__(self, kind: str, text: str):
        self.kind, self.text = kind, text

    @property
    def size(self) -> int:
        """Bytes."""
        return 1 if self.kind == "p" else int(self.kind[1])

    @property
    def typed(self) -> str:
        """With its LLVM type, as an operand."""
        return f"{KINDS[self.kind]} {self.text}"


class Slot:
    """A variable of a function with branches or loops: a place on the stack, which LLVM makes a register
    again."""

    __slots__ = ("kind", "place")

    def __init__(self, kind: str, place: str):
        self.kind, self.place = kind, place


class Turns(NamedTuple):
    """What a loop goes over that is known when the code runs: the numbers below one, those of the bits set in a mask."""

    count: Value
    mask: Value | None = None


def kind_of(x) -> str | None:
    """The kind of a NumPy number or Value, None for what has no type of its own."""
    if isinstance(x, Value):
        return x.kind
    return TYPES.get(type(x)) if isinstance(x, np.generic) else None


def kind_named(x) -> str:
    """The kind that a dtype, a NumPy type or a string names."""
    d = np.dtype(x)
    return "p" if d.kind == "b" else f"{d.kind}{d.itemsize}"
