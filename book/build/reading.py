"""The path of a first reading: the pages of the contents, without those that say on their first line that they may wait.

`{{#skip}}` below a page's heading becomes that line, with a link to the next page of the path.
"""

import functools
import html
import os
import re
from pathlib import Path

SKIP = "{{#skip}}"
PAGE = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


@functools.cache
def pages(src: Path) -> dict[str, str]:
    """Every page of the contents in their order, with its title there."""
    contents = (src / "SUMMARY.md").read_text(encoding="utf-8")
    return {page: title for title, page in PAGE.findall(contents)}


@functools.cache
def path(src: Path) -> list[str]:
    """The pages of a first reading, in their order."""
    return [page for page in pages(src) if SKIP not in (src / page).read_text(encoding="utf-8")]


def skip_note(src: Path, page: str) -> str:
    """The line of a page that may wait. Raises LookupError where no page of the path comes after it."""
    titles = pages(src)
    order, first = list(titles), set(path(src))
    following = next((later for later in order[order.index(page) + 1 :] if later in first), None)
    if following is None:
        raise LookupError(f"no page of the path comes after {page}")
    target = os.path.relpath(Path(following).with_suffix(".html"), Path(page).parent)
    link = f'<a href="{target}">{html.escape(titles[following])}</a>'
    return f'<p class="skip"><strong>Skip on a first reading.</strong> The path goes on with {link}.</p>'
