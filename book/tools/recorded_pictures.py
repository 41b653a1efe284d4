"""The recorded runs that the book's access pictures are drawn from; access_pictures.py records them."""

import json
import sys
from pathlib import Path

BOOK = Path(__file__).absolute().parent.parent
sys.path.insert(0, str(BOOK.parent))  # the harness of this checkout, wherever an installed one lies

from harness.screens.picture_html import page_from  # noqa: E402

FOLDER = BOOK / "pictures"
PAGE = "bug.html"
"""The page of the wrong kernel, in the folder of the built book."""


def load(name: str) -> dict:
    """A record."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write_page(site: Path) -> None:
    """Writes the page of the wrong kernel into the built book."""
    (site / PAGE).write_text(page_from(load("bug")), encoding="utf-8")
