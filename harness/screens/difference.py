"""A learner's blanks beside those of the solution, region by region."""

import difflib
from collections.abc import Iterator
from textwrap import dedent

from rich.console import Group
from rich.text import Text

from harness.learner.blanks import Blank

SIDE_BY_SIDE = 150
"""Columns of a terminal from which both versions stand beside each other; below, one stands under the other."""


def region(yours: Blank, ours: Blank, width: int) -> Group:
    """One blank in both versions; lines that only one of them has are marked."""
    mine, theirs = lines(yours), lines(ours)
    left, right = marked(mine, theirs, "red"), marked(theirs, mine, "green")
    heading = Text(f"{ours.id}: {ours.task}", style="bold")
    if mine == theirs:
        return Group(heading, Text("  the same as the solution", style="green"))
    if width >= SIDE_BY_SIDE:
        from rich.table import Table  # takes longer to import than a list to print

        table = Table(expand=True, show_lines=False)
        table.add_column("yours", ratio=1)
        table.add_column("the solution's", ratio=1)
        table.add_row(Text("\n").join(left), Text("\n").join(right))
        return Group(heading, table)
    return Group(
        heading,
        Text("  yours", style="underline"),
        *left,
        Text("  the solution's", style="underline"),
        *right,
    )


def lines(blank: Blank) -> list[str]:
    """The body of a blank without its indentation and without spaces at line ends."""
    return dedent("\n".join(line.rstrip() for line in blank.body)).strip("\n").split("\n")


def marked(these: list[str], others: list[str], style: str) -> list[Text]:
    """Lines for the terminal; those that the other side lacks get a mark."""
    same = set(matching(these, others))
    return [
        Text(f"{'  ' if number in same else '> '}{line}", style="" if number in same else style)
        for number, line in enumerate(these)
    ]


def matching(these: list[str], others: list[str]) -> Iterator[int]:
    """The numbers of the lines that both sides have, in an order that fits both."""
    for block in difflib.SequenceMatcher(None, these, others, autojunk=False).get_matching_blocks():
        yield from range(block.a, block.a + block.size)
