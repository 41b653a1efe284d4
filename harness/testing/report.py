"""Format the results of the tries on one screen."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["right", "wrong", "refused", "dropped", "not here"]
WIDTH, LINES, SHOWN = 100, 3, 6  # characters per line, lines per try, further wrong tries with a line


@dataclass(frozen=True)
class Tried:
    """The result of one try; `said` is the error, the refusal's message, or why the try was dropped."""

    name: str
    state: State
    said: str = ""


def part(count: int, made: int) -> str:
    """Describe `count` of the `made` tries."""
    return f"{count} of {made} tries" if made > 1 else ("no try", "the only try")[count]


@dataclass(frozen=True)
class Report:
    """The result of `check_backward`; prints as one screen.

    Attributes:
        tries: The results of all tries, in order.
        where: The dtype and device of most tries.
        mistake: What the wrong gradient equals instead; "" if no known mistake fits, or several do.
        notes: Observations that are reported but not required.
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
        return [tried for tried in self.tries if tried.state == state]

    def raise_if_wrong(self) -> None:
        """Raise AssertionError, with the report as its message, if any try is wrong."""
        __tracebackhide__ = True  # pytest then shows the caller's line
        if self.wrong:
            raise AssertionError(f"\n{self}")

    def __str__(self) -> str:
        count, where = len(self.tries) - len(self.of("not here")), f"{self.where}, {self.seconds:.1f} s"
        if self.wrong:
            head, *others = self.wrong
            lines = [f"WRONG: {head.said}", f"   in the try '{head.name}'"]
            lines += [f"   {self.mistake}"] * bool(self.mistake)
            only = "; no other was made: they would say the same" * (head.name == "plain")
            lines.append(f"wrong in {part(len(self.wrong), count)}, {where}{only}")
            lines += [f"   {tried.name}: {tried.said}" for tried in others[:SHOWN]]
            lines += [f"   and {', '.join(tried.name for tried in others[SHOWN:])}"] * bool(others[SHOWN:])
        else:
            lines = [f"right in {part(len(self.of('right')), count)}, {where}"]
        unjudged = (*self.of("refused"), *self.of("dropped"))
        lines += [f"{tried.state}: {tried.name}: {tried.said}" for tried in unjudged]
        lines += [f"noted: {'; '.join(dict.fromkeys(self.notes))}"] * bool(self.notes)
        filled = [textwrap.fill(line, WIDTH, subsequent_indent="   ", max_lines=LINES) for line in lines]
        right = f"right: {', '.join(tried.name for tried in self.of('right')) or 'nothing'}"
        return "\n".join([*filled, textwrap.fill(right, WIDTH, subsequent_indent="   ")])
