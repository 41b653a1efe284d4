"""The README's pictures show a run's output and do not load anything from the network."""

import importlib
import re

import pytest
from book_paths import BOOK, ROOT

TOOLS = sorted(
    f"book.{folder}.{file.stem}"
    for folder in ("build", "figures", "measure")
    for file in (BOOK / folder).glob("*.py")
)
PICTURES = {
    "wrong_gate": [
        "❌ dx",
        "grad_input[0, 0, 0] got",
        "without the mean term",
        "problems/p22/op/layernorm_linear.mojo",
    ]
}


@pytest.mark.parametrize("name", PICTURES)
def test_picture_has_source_lines_and_no_addresses(name):
    text = (ROOT / "docs" / f"{name}.svg").read_text()
    words = re.sub(r"<[^>]*>", "", text).replace("&#160;", " ").replace("&#x27;", "'")
    for line in PICTURES[name]:
        assert line in words
    assert "checking:" not in words, "a progress line"
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+", re.sub(r"<!--.*?-->", "", text)))
    assert addresses == {"http://www.w3.org"}, "the XML namespace, which is not loaded"
    assert "@font-face" not in text and "/tmp/" not in text


@pytest.mark.parametrize("name", TOOLS)
def test_all_tools_can_be_imported(name):
    """Include tools that are only run manually."""
    importlib.import_module(name)
