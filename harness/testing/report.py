"""The results of the tries, on one screen."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["right", "wrong", "refused", "dropped", "not here"]
WIDTH = 100
"""Characters of a line."""
LINES = 3
"""Largest number of lines about one try."""
SHOWN = 6
"""Further wrong tries that have a line of their own."""


@dataclass(frozen=True)
class Tried:
    """The result of one try: the error, the message of a refusal, or why it was dropped (PyTorch's own error
    is as large)."""

    name: str
    state: State
    said: str = ""


@dataclass(frozen=True)
class Report:
    """The result of `check_backward`; printed, it is one screen.

    Attributes:
        tries: All that were made, in their order.
        where: The dtype and the device of most of them.
        mistake: What a wrong gradient is instead; "" if nothing fits, or more than one thing.
        notes: What is reported and not demanded.
    """

    tries: Sequence[Tried]
    where: str
    mistake: str = ""
    notes: Sequence[str] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.wrong

    @property
    def wrong(self) -> list[Tried]:
        return self.of("wrong")

    def of(self, state: State) -> list[Tried]:
        """Return the tries that ended in a state."""
        return [tried for tried in self.tries if tried.state == state]

    def raise_if_wrong(self) -> None:
        """Raise AssertionError, with the report as its text, if something is wrong."""
        __tracebackhide__ = True  # pytest then shows the caller's line
        if self.wrong:
            raise AssertionError(f"\n{self}")

    def __str__(self) -> str:
        tries = f"{len(self.tries) - len(self.of('not here'))} tries, {self.where}, {self.seconds:.1f} s"
        if self.wrong:
            head, *others = self.wrong
            lines = [f"WRONG: {head.said}", f"   in the try '{head.name}'"]
            lines += [f"   {self.mistake}"] * bool(self.mistake)
            only = "; no other was made: they would say the same" * (head.name == "plain")
            lines.append(f"wrong in {len(self.wrong)} of {tries}{only}")
            lines += [f"   {tried.name}: {tried.said}" for tried in others[:SHOWN]]
            lines += [f"   and {', '.join(tried.name for tried in others[SHOWN:])}"] * bool(others[SHOWN:])
        else:
            lines = [f"right in {len(self.of('right'))} of {tries}"]
        states: tuple[State, ...] = ("refused", "dropped")
        lines += [f"{state}: {tried.name}: {tried.said}" for state in states for tried in self.of(state)]
        lines += [f"noted: {'; '.join(dict.fromkeys(self.notes))}"] * bool(self.notes)
        filled = [textwrap.fill(line, WIDTH, subsequent_indent="   ", max_lines=LINES) for line in lines]
        right = f"right: {', '.join(tried.name for tried in self.of('right')) or 'nothing'}"
        return "\n".join([*filled, textwrap.fill(right, WIDTH, subsequent_indent="   ")])
