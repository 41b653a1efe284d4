"""Checks the built book: links and anchors lead somewhere, nothing comes from the network, pages stay small.

It reads the HTML that readers get, so it also catches what mdBook itself lets pass. Where a fault comes from a
chapter, the message names the Markdown file and the line.
"""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

MAX_PAGE_BYTES = 1 << 20
MAX_PRINT_BYTES = 8 << 20  # all pages in one, for a printer
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "image": "href"}
IMAGES = ("img", "image", "source")
PAINT = ("fill", "stroke", "stop-color", "flood-color", "lighting-color", "color")
INCLUDED = re.compile(r"\{\{#include +([^}:\s]+)")
COLOUR_KEYWORDS = ("none", "currentcolor", "inherit", "transparent", "var(", "url(#")
# mdBook's own pages: without chapters behind them, and with links that only its server understands.
GENERATED = {"404.html", "toc.html"}


class Page(HTMLParser):
    """What one page holds: ids, links and loads, each with the line of the HTML, and colours set inside SVG."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.images: list[str] = []
        self.colours: list[str] = []
        self._svg_depth = 0
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        if "id" in values:
            self.ids.append(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and values.get(LOADED[tag]) and values.get("rel") != "canonical":
            self.loads.append(values[LOADED[tag]])
            self.images += [values[LOADED[tag]]] if tag in IMAGES else []
        self._svg_depth += tag == "svg"
        if self._svg_depth:
            self.colours += fixed_colours(values)
            self._in_style = tag == "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.colours += fixed_colours({"style": data})

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        self._svg_depth -= tag == "svg"
        self._in_style = False


def fixed_colours(attributes: dict[str, str]) -> list[str]:
    """Paint of one SVG element, or of its style, that does not follow the theme."""
    painted = [attributes[name] for name in PAINT if name in attributes]
    painted += re.findall(rf"(?<![\w-])(?:{'|'.join(PAINT)})\s*:\s*([^;}}]+)", attributes.get("style", ""))
    return [colour for colour in painted if not colour.strip().lower().startswith(COLOUR_KEYWORDS)]


def is_remote(url: str) -> bool:
    """Whether a browser would go to the network for it."""
    return bool(urlsplit(url).netloc)


def link_fault(site: Path, file: Path, url: str, pages: dict[Path, Page]) -> str | None:
    """What is wrong with a link on a page, or None."""
    parts = urlsplit(url)
    if parts.scheme or parts.netloc:
        return None
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return f"dead link: {url}"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].ids:
        return f"dead link: {url}: no such heading or anchor"
    return None


def source_of(site: Path, file: Path, src: Path, needle: str) -> str:
    """The Markdown file and line that a fault comes from, as far as they can be found."""
    chapter = src / file.relative_to(site).with_suffix(".md")
    if not chapter.is_file():
        return str(file.relative_to(site))
    name = f"{src.name}/{chapter.relative_to(src)}"
    lines = chapter.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if needle in line or needle.replace(".html", ".md") in line:
            return f"{name}:{number}"
    for number, line in enumerate(lines, start=1):
        for path in INCLUDED.findall(line):
            included = chapter.parent / path
            if included.is_file() and needle in included.read_text(encoding="utf-8"):
                return f"{name}:{number}"
    return f"{name}:1"


def image_colours(file: Path, url: str) -> list[str]:
    """Fixed colours in an SVG that a page shows as an image. There even `currentColor` is black in every theme."""
    image = file.parent / unquote(urlsplit(url).path)
    if image.suffix != ".svg" or not image.is_file():
        return []
    return Page(image.read_text(encoding="utf-8")).colours or [
        "black: an image does not see the page's colour"
    ]


def page_faults(site: Path, file: Path, src: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Everything wrong with one page."""
    text, page = file.read_text(encoding="utf-8"), pages[file]
    name = file.relative_to(site)
    limit = MAX_PRINT_BYTES if file.name == "print.html" else MAX_PAGE_BYTES
    if len(text.encode()) > limit:
        yield f"{source_of(site, file, src, '')}: the page has {len(text.encode())} bytes, limit {limit}"
    if "{{#" in text:
        yield f"{source_of(site, file, src, '{{#')}: an mdBook directive was left as it is"
    for url in page.loads:
        if is_remote(url):
            yield f"{source_of(site, file, src, url)}: loads {url} from the network"
        elif not (file.parent / unquote(urlsplit(url).path)).is_file() and urlsplit(url).scheme != "data":
            yield f"{source_of(site, file, src, url)}: {url} is missing"
    for url in page.images:
        for colour in image_colours(file, url):
            yield f"{source_of(site, file, src, url)}: an SVG has the fixed colour {colour}"
    for colour in page.colours:
        yield f"{source_of(site, file, src, colour)}: an SVG has the fixed colour {colour}"
    if name.name == "print.html":
        return  # all chapters once more: their links have been checked, their ids collide
    for id in sorted({id for id in page.ids if page.ids.count(id) > 1}):
        yield f"{source_of(site, file, src, id)}: the id {id} occurs twice on one page"
    for url in page.links:
        if fault := link_fault(site, file, url, pages):
            yield f"{source_of(site, file, src, url)}: {fault}"


def site_faults(site: Path, src: Path) -> list[str]:
    """Everything wrong with a built book.

    Args:
        site: The folder with the HTML.
        src: The folder with the chapters, to name the places.
    """
    site = site.resolve()
    files = sorted(file for file in site.rglob("*.html") if file.name not in GENERATED)
    pages = {file: Page(file.read_text(encoding="utf-8")) for file in files}
    # Copies of chapters, index.html and print.html, come last: the first lines name a file and a line.
    files.sort(key=lambda file: not (src / file.relative_to(site)).with_suffix(".md").is_file())
    faults = [fault for file in files for fault in page_faults(site, file, src, pages)]
    for sheet in sorted(site.rglob("*.css")):
        for url in re.findall(r"(?:url\(|@import\s+)['\"]?([^'\")\s]+)", sheet.read_text(encoding="utf-8")):
            if is_remote(url):
                faults.append(f"{sheet.relative_to(site)}: loads {url} from the network")
    return faults
