"""The README's pictures: they are what a run prints, and showing them fetches nothing."""

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
def test_a_picture_holds_the_lines_of_its_run_and_no_address(name):
    text = (ROOT / "docs" / f"{name}.svg").read_text()
    words = re.sub(r"<[^>]*>", "", text).replace("&#160;", " ").replace("&#x27;", "'")
    for line in PICTURES[name]:
        assert line in words
    assert "checking:" not in words, "the line that moves"
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+", re.sub(r"<!--.*?-->", "", text)))
    assert addresses == {"http://www.w3.org"}, "the name of the format, which nothing fetches"
    assert "@font-face" not in text and "/tmp/" not in text


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_finds_what_it_imports(name):
    """The tools that are run by hand, now and then, too."""
    importlib.import_module(name)
