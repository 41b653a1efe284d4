"""What came of the tries, on one screen."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

State = Literal["right", "wrong", "refused", "dropped", "not here"]
WIDTH = 100
"""Characters of a line."""
LINES = 3
"""Of which what is said of a try has so many at most."""
WRONG_SHOWN = 6
"""How many further wrong tries have a line of their own."""


@dataclass(frozen=True)
class Tried:
    """One try.

    Attributes:
        name: Its own.
        state: Right, wrong, refused (raised before there was a result), dropped (PyTorch itself is no better), or not here (of no use
            for this function or machine).
        said: What is wrong, the words of the refusal, or why it was dropped.
    """

    name: str
    state: State
    said: str = ""


@dataclass(frozen=True)
class Report:
    """What `check_backward` found; printed, it is one screen.

    Attributes:
        tries: All that were made, in their order.
        where: The dtype and the device of most of them.
        mistake: What a wrong gradient is instead, in words; "" where nothing fits, or more than one thing.
        notes: What is said and not demanded.
        seconds: How long it took.
    """

    tries: Sequence[Tried]
    where: str
    mistake: str = ""
    notes: Sequence[str] = field(default_factory=tuple)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong

    @property
    def wrong(self) -> list[Tried]:
        """The tries that found something."""
        return self.of("wrong")

    def of(self, state: State) -> list[Tried]:
        """The tries that ended in a state."""
        return [tried for tried in self.tries if tried.state == state]

    def raise_if_wrong(self) -> None:
        """Raises AssertionError, with the report as its text, where something is wrong."""
        __tracebackhide__ = True  # pytest then shows the caller's line
        if self.wrong:
            raise AssertionError(f"\n{self}")

    def __str__(self) -> str:
        count = len(self.tries) - len(self.of("not here"))
        lines: list[str] = []
        if self.wrong:
            head, *others = self.wrong
            lines = [f"WRONG: {head.said}", f"   in the try '{head.name}'"]
            lines += [f"   {self.mistake}"] * bool(self.mistake)
            only = "; no other was made: they would say the same" if head.name == "plain" else ""
            lines.append(
                f"wrong in {len(self.wrong)} of {count} tries, {self.where}, {self.seconds:.1f} s{only}"
            )
            lines += [f"   {tried.name}: {tried.said}" for tried in others[:WRONG_SHOWN]]
            if more := others[WRONG_SHOWN:]:
                lines.append(f"   and {', '.join(tried.name for tried in more)}")
        else:
            lines = [f"right in {len(self.of('right'))} of {count} tries, {self.where}, {self.seconds:.1f} s"]
        lines += [f"refused: {tried.name}: {tried.said}" for tried in self.of("refused")]
        lines += [f"dropped: {tried.name}: {tried.said}" for tried in self.of("dropped")]
        lines += [f"said: {'; '.join(dict.fromkeys(self.notes))}"] * bool(self.notes)
        lines.append(f"right: {', '.join(tried.name for tried in self.of('right')) or 'nothing'}")
        return "\n".join(
            textwrap.fill(
                line,
                WIDTH,
                subsequent_indent="   ",
                break_long_words=False,
                max_lines=None if line.startswith("right: ") else LINES,
            )
            for line in lines
        )
