"""Format the results of `check_backward` on one screen."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["right", "wrong", "refused", "dropped", "not here"]
MAX_WIDTH, MAX_LINES, MAX_SHOWN = 100, 3, 6  # characters a line, lines a check, further failures with a line


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; `message` is the error, the refusal, or the reason why it was dropped."""

    name: str
    state: State
    message: str = ""


def format_part(count: int, total: int) -> str:
    return f"{count} of {total} checks" if total > 1 else ("no check", "the only check")[count]


@dataclass(frozen=True)
class Report:
    """The result of `check_backward`; prints as one screen.

    Attributes:
        results: The results of all checks, in order.
        where: The dtype and device of most checks.
        mistake: What the wrong gradient equals instead; "" if no known mistake fits, or several do.
        notes: Observations that are reported but not required.
    """

    results: Sequence[CheckResult]
    where: str
    mistake: str = ""
    notes: Sequence[str] = ()
    duration_s: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.wrong

    @property
    def wrong(self) -> list[CheckResult]:
        return self.select("wrong")

    def select(self, state: State) -> list[CheckResult]:
        return [result for result in self.results if result.state == state]

    def raise_if_wrong(self) -> None:
        """Raise AssertionError, with the report as its message, if any check fails."""
        __tracebackhide__ = True  # pytest then shows the caller's line
        if self.wrong:
            raise AssertionError(f"\n{self}")

    def __str__(self) -> str:
        count = len(self.results) - len(self.select("not here"))
        where = f"{self.where}, {self.duration_s:.1f} s"
        if self.wrong:
            first, *further = self.wrong
            lines = [f"WRONG: {first.message}", f"   in the check '{first.name}'"]
            lines += [f"   {self.mistake}"] * bool(self.mistake)
            note = "; no other was made: they would say the same" * (first.name == "plain")
            lines.append(f"wrong in {format_part(len(self.wrong), count)}, {where}{note}")
            lines += [f"   {tried.name}: {tried.message}" for tried in further[:MAX_SHOWN]]
            lines += [f"   and {', '.join(tried.name for tried in further[MAX_SHOWN:])}"] * bool(
                further[MAX_SHOWN:]
            )
        else:
            lines = [f"right in {format_part(len(self.select('right')), count)}, {where}"]
        undecided = (*self.select("refused"), *self.select("dropped"))
        lines += [f"{tried.state}: {tried.name}: {tried.message}" for tried in undecided]
        lines += [f"noted: {'; '.join(dict.fromkeys(self.notes))}"] * bool(self.notes)
        filled = [
            textwrap.fill(line, MAX_WIDTH, subsequent_indent="   ", max_lines=MAX_LINES) for line in lines
        ]
        right = f"right: {', '.join(tried.name for tried in self.select('right')) or 'nothing'}"
        return "\n".join([*filled, textwrap.fill(right, MAX_WIDTH, subsequent_indent="   ")])
