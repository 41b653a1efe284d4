"""Insert a picture's data into its HTML page. The book's build imports this without PyTorch and MAX."""

import html
import json
from pathlib import Path

TEMPLATE = Path(__file__).with_name("picture_page.html")


def fill_template(data: dict) -> str:
    values = {
        "TITLE": html.escape(data["title"]),
        "ABOUT": html.escape(data["about"]),
        "STATE": "right" if data["right"] else "wrong",
        "STORY": "".join(map(render_sentence, data["story"])),
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def render_sentence(sentence: dict) -> str:
    source = sentence["source"]
    code = f"<code><b>{html.escape(source[0])}</b> {html.escape(source[1])}</code>" if source else ""
    return f'<li class="{sentence["kind"]}"><span>{html.escape(sentence["text"])}</span>{code}</li>'
