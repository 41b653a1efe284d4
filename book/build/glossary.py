"""Links the words of the glossary where the running text of a page first uses them.

It works on the built pages, behind mdBook: what a link is made of then stands there, whatever wrote it.
"""

import os
import re
from pathlib import Path

PAGE = "glossary.html"
HEADING = re.compile(r'<h3 id="([\w-]+)"><a [^>]*>([^<]+)</a>')
AMBIGUOUS = {"block", "grid", "launch", "stream", "synchronise", "tile"}
"""Entries whose words have other senses too."""
LEFT_ALONE = (
    "a",
    "code",
    "pre",
    "h1",
    "h2",
    "h3",
    "h4",
    "svg",
    "figure",
    "summary",
    "button",
    "script",
    "style",
    "math",
    "th",
)
TAG = re.compile(r"(<!--.*?-->|<[^>]+>)", re.S)
MAIN = re.compile(r"(?<=<main>).*?(?=</main>)", re.S)


def link(site: Path) -> None:
    """Put the links on every page of a built book but the glossary and the page for printing."""
    if not (site / PAGE).is_file():
        return
    entries = HEADING.findall((site / PAGE).read_text(encoding="utf-8"))
    uses = {
        term: re.compile(rf"(?<![\w-]){re.escape(name)}s?(?![\w-])", re.I)
        for term, name in entries
        if term not in AMBIGUOUS
    }
    for page in site.rglob("*.html"):
        if page.name not in (PAGE, "print.html", "toc.html", "404.html"):
            text = page.read_text(encoding="utf-8")
            to = os.path.relpath(site / PAGE, page.parent).replace(os.sep, "/")
            page.write_text(
                MAIN.sub(lambda main, to=to: with_links(main[0], to, uses), text), encoding="utf-8"
            )


def with_links(main: str, to: str, uses: dict[str, re.Pattern[str]]) -> str:
    """Return the content of a page with the first use of each word linked; `to` is the glossary's address."""
    missing, inside = dict(uses), []
    parts = TAG.split(main)
    for at, part in enumerate(parts):
        if at % 2:
            name = re.match(r"</?(\w+)", part)
            if name and name[1].lower() in LEFT_ALONE and not part.endswith("/>"):
                inside.append(name[1]) if part[1] != "/" else inside.remove(name[1])
        elif not inside:
            for term, use in list(missing.items()):
                # One link for each stretch of text: what an earlier word made is no text any more.
                if "<" not in parts[at] and (found := use.search(part)):
                    parts[at] = (
                        f'{part[: found.start()]}<a class="term" href="{to}#{term}">{found[0]}</a>{part[found.end() :]}'
                    )
                    del missing[term]
    return "".join(parts)
