"""The template of a page with tasks: why; the tasks; what goes wrong; what was measured; a question.

A page has tasks where it has a hint ladder, or counts the gates of a puzzle that keeps its hints to the command line.
"""

import re
from collections.abc import Iterator

from book.build.reading import ALL_GATES

LADDER = re.compile(r"\{\{#(?:hints|step) [\w:-]+\}\}")
SECTION = re.compile(r"^(?=##+ )", re.M)
EVIDENCE = re.compile(r"^```output |generated/|pictures/|\{\{= ", re.M)
SECTIONS = {
    "What goes wrong": re.compile(r"\{\{#wrong \w+\}\}|museum\.md"),
    "Measured": EVIDENCE,
    "A question": re.compile(r'<details class="reveal">\n<summary>\S'),
}
"""The sections after the last task, in their order (a heading may go on after a colon), and what each must hold."""


def missing(path: str, text: str) -> Iterator[str]:
    """What a page of a puzzle lacks of the template; nothing for a page without tasks."""
    ladders = list(LADDER.finditer(text))
    if not path.startswith("puzzle_") or not (ladders or ALL_GATES.search(text)):
        return
    last = ladders[-1].end() if ladders else 0
    for section in SECTION.split(text):
        tasks = LADDER.findall(section)
        if tasks and "```run" not in section and not tasks[-1].startswith("{{#step"):  # which has its command
            yield f"no command in the section of {tasks[-1]} that checks it"
    for name, holds in SECTIONS.items():
        heading = re.compile(rf"^## {name}(?::.*| \{{#.*)?$", re.M).search(text, last)
        if heading is None:
            yield f'no section "{name}" in its place: after the tasks come {", ".join(SECTIONS)}'
            continue
        end = text.find("\n## ", heading.end())
        if not holds.search(text, heading.end(), end if end >= 0 else len(text)):
            yield f'its section "{name}" holds nothing of {holds.pattern}'
        last = heading.end()
