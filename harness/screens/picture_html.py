"""Insert a picture's data into its page, without PyTorch or MAX, which the book's build lacks."""

import html
import json
from pathlib import Path

TEMPLATE = Path(__file__).with_name("picture_page.html")


def page_from(data: dict) -> str:
    """Return the page of a picture's data."""
    values = {
        "TITLE": html.escape(data["title"]),
        "ABOUT": html.escape(data["about"]),
        "STATE": "right" if data["right"] else "wrong",
        "STORY": "".join(map(sentence_html, data["story"])),
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def sentence_html(sentence: dict) -> str:
    """Return a sentence of the story, and below it the line of source that it speaks of."""
    source = sentence["source"]
    code = f"<code><b>{html.escape(source[0])}</b> {html.escape(source[1])}</code>" if source else ""
    return f'<li class="{sentence["kind"]}"><span>{html.escape(sentence["text"])}</span>{code}</li>'
