"""Checks the spelling of the book, the README and the sources: `python -m book.build.spelling`; exit 1 lists what is found.

codespell knows common mistakes, not all words, so it has little to say about code. book/words.txt holds the words of
this project that it takes for mistakes; book/british.txt the American forms that the prose avoids.
"""

import contextlib
import io
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
BOOK = ROOT / "book"
PROSE = ("book/src/**/*.md", "book/STYLE.md", "*.md", "solutions/*/hints.toml", "solutions/*/wrong/*.toml")
SOURCES = ("book/*/*.py", "harness/**/*.py", "harness/**/*.md", "solutions/**/*.mojo", "tests/**/*.py")
# In a line of prose: code, formulas, links and titles of papers, which are no words of ours.
CODE = r"`[^`]*`|\$[^$]*\$|\]\([^)]*\)|\{[^}]*\}|(?<!\*)\*[A-Z][^*]*\*(?!\*)"


def installed() -> bool:
    """Whether codespell can be imported."""
    return find_spec("codespell_lib") is not None


def files(patterns: tuple[str, ...], root: Path = ROOT) -> list[str]:
    """The files of some patterns, each once."""
    return sorted({str(file.relative_to(root)) for pattern in patterns for file in root.glob(pattern)})


def mistakes(names: list[str], *options: str) -> list[str]:
    """What codespell finds in some files: lines `FILE:LINE: word ==> suggestion`."""
    import codespell_lib

    said = io.StringIO()
    words = ("--ignore-words", str(BOOK / "words.txt"))
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        codespell_lib.main(*words, *options, *names)
    return said.getvalue().splitlines()


def check() -> list[str]:
    """Every mistake in the project, from its root."""
    with contextlib.chdir(ROOT):
        english = ("--builtin", "clear,rare")
        british = ("--dictionary", str(BOOK / "british.txt"), "--ignore-regex", CODE)
        return mistakes(files(PROSE + SOURCES), *english) + mistakes(files(PROSE), *british)


if __name__ == "__main__":
    found = check()
    print("\n".join(found) or "no spelling mistakes")
    sys.exit(1 if found else 0)
