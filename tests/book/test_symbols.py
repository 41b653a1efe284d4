"""A letter with more than one meaning has a line in the table of symbols for every puzzle that uses it."""

import re
from collections.abc import Iterator

from book_paths import BOOK

from book.build import reading

SRC = BOOK / "src"
MATHS = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", re.S)
WORDS = re.compile(r"\\(?:mathrm|mathbf|text)\{[^}]*\}|\{#[\w-]+\}|\\odot|\\top")
LETTER = re.compile(r"\\(?:ell|delta|varepsilon)(?![a-z])|(?<![A-Za-z\\])[A-Z](?![A-Za-z])")
ROW = re.compile(r"^\| (\$.+?\$) \| (\[.+?) \| (\S.+) \|$", re.M)


def puzzle(page: str) -> str:
    """The puzzle whose letters a page uses, as a folder's name."""
    folder = page.split("/")[0]
    if page == "essays/flash_attention_backward.md":
        return "puzzle_23"
    return folder if folder.startswith("puzzle_") else "puzzle_22"


def letters(text: str) -> set[str]:
    """The letters that stand alone in the formulas of a text."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    return {
        letter
        for formula in MATHS.finditer(text)
        for letter in LETTER.findall(WORDS.sub(" ", formula[1] or formula[2]))
    }


def lines() -> Iterator[tuple[str, str]]:
    """Each letter of the table with each of its puzzles."""
    for symbols, puzzles, _ in ROW.findall((SRC / "glossary.md").read_text().split("## Symbols")[1]):
        for symbol in re.findall(r"\$(.+?)\$", symbols):
            yield from ((symbol, puzzle(link)) for link in re.findall(r"\((\S+?)\)", puzzles))


def used() -> set[tuple[str, str]]:
    """Each letter with each puzzle that uses it."""
    return {
        (letter, puzzle(page))
        for page in reading.pages(SRC).keys() - {"glossary.md"}
        for letter in letters((SRC / page).read_text(encoding="utf-8"))
    }


def test_every_use_of_a_listed_letter_has_its_line_and_every_line_its_use():
    listed = list(lines())
    assert len(listed) == len(set(listed)) > 40, "one meaning of a letter in a puzzle"
    names = {letter for letter, _ in listed}
    assert {use for use in used() if use[0] in names} == set(listed)


def test_a_page_links_what_it_defines():
    for symbols, puzzles, _ in ROW.findall((SRC / "glossary.md").read_text()):
        for link in re.findall(r"\((\S+?)\)", puzzles):
            assert set(re.findall(r"\$(.+?)\$", symbols)) <= letters((SRC / link).read_text()), (
                symbols,
                link,
            )


def test_letters_are_found_in_formulas_alone():
    assert letters(r"S of $P_{st}$ and $\mathrm{dS} \ell' + \mathrm{K}$, `T`, $$e^{L - m}$$ {#lse}") == {
        "P",
        r"\ell",
        "L",
    }
