"""The recorded run of a wrong kernel, of which the build makes a page; access_pictures.py records it."""

import json
from pathlib import Path

from harness.screens.picture_html import fill_template

BOOK = Path(__file__).absolute().parent.parent

FOLDER = BOOK / "pictures"
PAGE = "bug.html"
"""The page of the wrong kernel, in the folder of the built book."""


def load(name: str) -> dict:
    """A record."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write_page(site: Path) -> None:
    """Writes the page of the wrong kernel into the built book."""
    page = fill_template(load("bug"))
    assert "<body>" in page  # harness/screens/picture_page.html
    back = '<p><a href="index.html">Back to the book</a></p>'
    (site / PAGE).write_text(page.replace("<body>", f"<body>\n{back}", 1), encoding="utf-8")
