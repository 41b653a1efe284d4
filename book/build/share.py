"""What other sites show of a page when somebody passes it on: its own description, and an image of its title, drawn here.

The image is a PNG of 1200 x 630 in greys, since the sites take no SVG. Letters are filled from the outlines of ziafont's font, so
nothing is fetched and no drawing library is needed. Sites want the image's whole address: BOOK_URL is where the book will stand.
"""

import hashlib
import html
import os
import re
import struct
import zlib
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from ziafont.font import Font

WIDTH, HEIGHT, MARGIN = 1200, 630, 80
PAPER, INK = 24, 235
LONGEST = 200
"""Characters of a description: sites cut what is longer."""
FINE = 4
"""Samples for each side of a pixel."""
FOLDER = "share"


# ---- Letters ------------------------------------------------------------------------------------------------


@cache
def font() -> Font:
    """The font inside ziafont, DejaVu Sans."""
    return Font()


def outline(operators) -> list[list[np.ndarray]]:
    """The closed lines of a glyph, [x, y] points in font units; curves become eight pieces."""
    contours: list[list[np.ndarray]] = []
    for step in operators:
        points = [
            np.array([p.x, p.y], float)
            for p in (getattr(step, name, None) for name in ("p1", "p2", "p3", "p"))
            if p is not None
        ]
        kind = type(step).__name__
        if kind == "Moveto":
            contours.append(points)
        elif kind == "Lineto":
            contours[-1].append(points[-1])
        elif len(points) > 1:
            along, control = np.linspace(0, 1, 9)[1:, None], [contours[-1][-1], *points]
            while len(control) > 1:  # De Casteljau
                control = [a + along * (b - a) for a, b in pairwise(control)]
            contours[-1].extend(control[0])
    return contours


@cache
def letter(char: str, size: int) -> tuple[np.ndarray, float]:
    """How much of each pixel a letter covers, [2 size, 2 size] with the baseline at 1.5 size, and how far it moves on."""
    glyph = font().glyph(char)
    scale = size / font().info.layout.unitsperem
    side = 2 * size * FINE
    turns = np.zeros((side, side + 1), np.int32)
    for contour in outline(glyph.operators):
        points = np.array(contour) * scale * FINE
        x, y = points[:, 0] + 0.25 * size * FINE, 1.5 * size * FINE - points[:, 1]
        for x0, y0, x1, y1 in zip(x, y, np.roll(x, -1), np.roll(y, -1), strict=True):
            low, high = sorted((y0, y1))
            rows = np.arange(max(int(np.ceil(low - 0.5)), 0), min(int(np.ceil(high - 0.5)), side))
            if len(rows):
                across = x0 + (rows + 0.5 - y0) / (y1 - y0) * (x1 - x0)
                np.add.at(
                    turns, (rows, np.clip(np.ceil(across - 0.5).astype(int), 0, side)), 1 if y1 > y0 else -1
                )
    inside = np.cumsum(turns, 1)[:, :side] != 0
    return inside.reshape(2 * size, FINE, 2 * size, FINE).mean((1, 3)), glyph.advance() * scale


def write(image: np.ndarray, words: str, x: float, baseline: int, size: int, ink: int = INK) -> None:
    """Puts a line of words into an image; what would leave it on the right is left out."""
    for char in words:
        covered, advance = letter(char, size)
        left, top = round(x - 0.25 * size), baseline - round(1.5 * size)
        if left + 2 * size > image.shape[1]:
            return
        part = image[top : top + 2 * size, left : left + 2 * size]
        part += covered[: part.shape[0]] * (ink - part)
        x += advance


def broken(words: str, size: int, width: int, most: int) -> list[str]:
    """Words in lines no wider than `width`, at most so many; an ellipsis says that there is more."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and sum(letter(char, size)[1] for char in longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines if len(lines) <= most else [*lines[: most - 1], lines[most - 1].rstrip(".,;:") + " …"]


# ---- The image ----------------------------------------------------------------------------------------------


def bars(image: np.ndarray, values: list[float]) -> None:
    """A row of numbers as bars around a line, along the lower edge."""
    middle, step = HEIGHT - 105, (WIDTH - 2 * MARGIN) // len(values)
    image[middle : middle + 2, MARGIN : WIDTH - MARGIN] = 110
    for number, value in enumerate(values):
        end = middle - round(60 * value / max(map(abs, values)))
        left = MARGIN + step * number + step // 6
        image[min(middle, end) : max(middle, end), left : left + 2 * step // 3] = 190 if value > 0 else 100


def picture(title: str, description: str, book: str, values: list[float]) -> np.ndarray:
    """The image of a page, [HEIGHT, WIDTH] greys: its title, what it is about, the book, and eight numbers."""
    image = np.full((HEIGHT, WIDTH), float(PAPER))
    write(image, book, MARGIN, 80, 26, 150)
    baseline = 165
    for line in broken(title, 58, WIDTH - 2 * MARGIN, 3):
        write(image, line, MARGIN, baseline, 58)
        baseline += 72
    for line in broken(description, 26, WIDTH - 2 * MARGIN, 3 if baseline < 320 else 1):
        write(image, line, MARGIN, baseline - 10, 26, 190)
        baseline += 38
    bars(image, values)
    return image.round().astype(np.uint8)


def png(image: np.ndarray) -> bytes:
    """A greyscale image as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = image.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image], 1)  # 0: the row is not filtered
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + chunk(b"IEND", b"")
    )


# ---- The pages ----------------------------------------------------------------------------------------------

TITLE = re.compile(r"<title>(.*?)</title>", re.S)
HEADING = re.compile(r"<main>.*?<h1[^>]*>(.*?)</h1>", re.S)
PARAGRAPH = re.compile(r"</h1>.*?<p>(.*?)</p>", re.S)
DESCRIPTION = re.compile(r'<meta name="description" content="[^"]*">')


def plain(text: str) -> str:
    """The words of a piece of HTML; a formula's are those of its TeX label, without the marks."""
    text = re.sub(
        r'<span class="math[^>]*aria-label="([^"]*)".*?</span>',
        lambda found: re.sub(r"[\\{}$]|mathrm|hat", "", found[1]),
        text,
    )
    return " ".join(html.unescape(re.sub(r"<svg.*?</svg>|<[^>]+>", "", text, flags=re.S)).split())


def shortened(text: str) -> str:
    """Whole sentences of a text, LONGEST characters at most; a first sentence that is longer is cut at a word."""
    kept = ""
    for sentence in re.split(r"(?<=[.?!])\s+", text):
        if len(kept) + len(sentence) >= LONGEST:
            break
        kept = f"{kept} {sentence}".strip()
    return kept or text[: LONGEST - 2].rsplit(" ", 1)[0] + " …"


def write_cards(site: Path, cache_folder: Path, values: list[float]) -> None:
    """Gives every page of a built book its description and its image.

    Args:
        site: The built book; the images go to its folder `share`.
        cache_folder: Where images wait for the next build, by what is on them.
        values: The eight numbers at the lower edge.
    """
    (site / FOLDER).mkdir()
    cache_folder.mkdir(parents=True, exist_ok=True)
    made_by = Path(__file__).read_bytes()
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        heading, paragraph, whole = (pattern.search(text) for pattern in (HEADING, PARAGRAPH, TITLE))
        if not (heading and paragraph and whole and DESCRIPTION.search(text)) or page.name in (
            "print.html",
            "404.html",
        ):
            continue
        title, description = plain(heading[1]), shortened(plain(paragraph[1]))
        book = plain(whole[1]).rsplit(" - ", 1)[-1]
        key = hashlib.sha256(made_by + repr((title, description, book, values)).encode()).hexdigest()[:16]
        kept = cache_folder / f"{key}.png"
        if not kept.is_file():
            kept.write_bytes(png(picture(title, description, book, values)))
        name = f"{FOLDER}/{page.relative_to(site).with_suffix('').as_posix().replace('/', '-')}.png"
        (site / name).write_bytes(kept.read_bytes())
        base = os.environ.get("BOOK_URL", "").rstrip("/") or os.path.relpath(site, page.parent)
        told = {"og:type": "article", "og:site_name": book, "og:title": title, "og:description": description,
                "og:image": f"{base}/{name}", "og:image:width": str(WIDTH), "og:image:height": str(HEIGHT),
                "og:image:alt": title, "twitter:card": "summary_large_image"}  # fmt: skip
        tags = [f'<meta name="description" content="{html.escape(description)}">']
        tags += [f'<meta property="{what}" content="{html.escape(said)}">' for what, said in told.items()]
        page.write_text(
            DESCRIPTION.sub(lambda _, tags=tags: "\n".join(tags), text, count=1), encoding="utf-8"
        )
