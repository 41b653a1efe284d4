"""What each rank of a ring does when: recorded around the functions of the learner's file, and drawn as an SVG."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from harness.toolchain.disk import write_target

KINDS = {
    "block_forward": ("attends", 0.75),
    "block_backward": ("attends, backward", 0.45),
    "exchange": ("begins a transfer", 1.0),
    "finish": ("waits", 0.15),
}
"""Function -> what a rank does in it, and how dark its bar is: a drawing has one colour, that of the page's text."""
WIDTH, ROW, LEFT = 900, 34, 70


@dataclass(frozen=True)
class Event:
    """One call: a key of KINDS, and when it began and ended, in seconds of a clock that all processes share."""

    kind: str
    start: float
    end: float


def watch(module: dict[str, Any]) -> list[Event]:
    """Records every call of the functions of a module from now on; the list grows."""
    events: list[Event] = []

    def recorded(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments, **keywords):
            start = time.monotonic()
            try:
                return function(*arguments, **keywords)
            finally:
                events.append(Event(kind, start, time.monotonic()))

        return call

    for kind in KINDS:
        module[kind] = recorded(kind, module[kind])
    return events


def draw(ranks: list[list[Event]]) -> str:
    """A row for each rank, a bar for each call."""
    first = min(event.start for events in ranks for event in events)
    last = max(event.end for events in ranks for event in events)
    scale = (WIDTH - LEFT - 10) / max(last - first, 1e-9)
    height = ROW * (len(ranks) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="sans-serif" font-size="13" fill="currentColor">',
        f"<title>What each of {len(ranks)} ranks does within {1e3 * (last - first):.1f} ms</title>",
    ]
    for rank, events in enumerate(ranks):
        y = ROW * rank + 8
        parts.append(f'<text x="8" y="{y + 17}">rank {rank}</text>')
        for event in events:
            words, dark = KINDS[event.kind]
            x, width = LEFT + scale * (event.start - first), max(scale * (event.end - event.start), 0.7)
            said = escape(f"{words}: {1e3 * (event.end - event.start):.2f} ms")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill-opacity="{dark}"><title>{said}</title></rect>'
            )
    y = ROW * len(ranks) + 12
    for number, (words, dark) in enumerate(KINDS.values()):
        x = LEFT + 190 * number
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill-opacity="{dark}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{words}</text>')
    parts.append(f'<text x="{LEFT}" y="{y + 38}">0 to {1e3 * (last - first):.1f} ms</text></svg>')
    return "\n".join(parts) + "\n"


def write(path: Path, ranks: list[list[Event]]) -> None:
    """Writes the drawing. Raises BadUse where the file cannot be written."""
    write_target("--timeline", str(path), draw(ranks))
