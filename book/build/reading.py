"""How long pages take, and which ones the two tracks leave out.

A page says below its heading how many minutes it takes, from its words, and how many gates it has; `{{#time PAGE ...}}` adds several
up. `{{#skip}}` below a page's heading says that it is a deep dive, with a link to the puzzle that it belongs to.
"""

import functools
import html
import os
import re
from collections.abc import Iterable
from pathlib import Path

from harness.spec.catalogue import find_puzzle

SKIP = "{{#skip}}"
PAGE = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
FENCE = re.compile(r"^[ >]*(`{3,})[^\n]*\n(.*?)^[ >]*\1[ ]*$", re.S | re.M)
UNREAD = re.compile(r"<!--.*?-->|<[^>]+>|\{\{.*?\}\}|\]\([^)]*\)", re.S)
GATE = re.compile(r"\{\{#(?:hints|step) \w+:[\w-]+\}\}")
ALL_GATES = re.compile(r"\{\{#gates (\w+)\}\}")
WORDS_A_MINUTE, LINES_A_MINUTE = 200, 15
"""Of prose, and of code."""


@functools.cache
def pages(src: Path) -> dict[str, str]:
    """Every page of the contents in their order, with its title there."""
    contents = (src / "SUMMARY.md").read_text(encoding="utf-8")
    return {page: title for title, page in PAGE.findall(contents)}


@functools.cache
def path(src: Path) -> list[str]:
    """The pages that are no deep dives, in their order."""
    return [page for page in pages(src) if SKIP not in (src / page).read_text(encoding="utf-8")]


def minutes(text: str) -> float:
    """How long a page's text takes to read: its words, and the lines of its code."""
    lines = sum(len(fence[2].splitlines()) for fence in FENCE.finditer(text))
    words = re.findall(r"[\w’'-]+", UNREAD.sub(" ", FENCE.sub(" ", text)))
    return len(words) / WORDS_A_MINUTE + lines / LINES_A_MINUTE


def counted(number: int, what: str) -> str:
    """`1 gate`, `2 gates`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def gates(text: str) -> int:
    """How many gates a page has: one for each hint ladder, and all of a puzzle where it counts them."""
    every = (len(rung.gates) for name in ALL_GATES.findall(text) for rung in find_puzzle(name).rungs)
    return len(GATE.findall(text)) + sum(every)


def length(texts: Iterable[str]) -> str:
    """How long some pages take together: `12 minutes, 3 gates`, `3 hours, 24 gates`."""
    texts = list(texts)
    total, checked = sum(map(minutes, texts)), sum(map(gates, texts))
    time = counted(max(1, round(total)), "minute") if total < 90 else counted(round(total / 60), "hour")
    return f"{time}, {counted(checked, 'gate')}" if checked else time


def length_line(text: str) -> str:
    """The line below a page's heading."""
    time, _, checked = length([text]).partition(", ")
    return f'<p class="reading-time">To read: {time}.{f" To pass: {checked}." if checked else ""}</p>'


def skip_note(src: Path, page: str) -> str:
    """The line of a deep dive: the page that it belongs to, or else the tracks."""
    folder = page.partition("/")[0]
    home = next((each for each in (f"{folder}/{folder}.md", "introduction.md") if each in pages(src)), None)
    if home is None:
        raise LookupError(f"no page that {page} belongs to")
    place = "It belongs to" if home.startswith(folder) else "See the tracks in the"
    target = os.path.relpath(Path(home).with_suffix(".html"), Path(page).parent)
    link = f'<a href="{target}">{html.escape(pages(src)[home])}</a>'
    return f'<p class="skip"><strong>Deep dive:</strong> you can skip this page on a first reading. {place} {link}.</p>'
