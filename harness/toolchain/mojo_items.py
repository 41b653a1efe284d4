"""Parse the top-level items of Mojo files, and which items one of them needs, without the compiler.

An item is a function, a struct, a trait or a compile-time constant. An item needs every item whose name it
contains, and so on: sometimes too many, but none is missed, since Mojo can refer to an item of another file
only by its name. So the digest of a kernel's items tells whether it must be recompiled, and a package of
these items alone compiles to the same kernel, faster.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

OPENS = re.compile(r"(?:@|def |struct |trait |comptime |from |import )")
"""Start of an item in the first column; an unclosed bracket before it is the learner's mistake."""
NAMED = re.compile(r"^(?:def|struct|trait|comptime)\s+(\w+)", re.MULTILINE)
"""Finds the name of an item, after its decorators, which may have several lines each."""
IMPORT = re.compile(r"from\s+(?P<module>[\w.]+)\s+import\s+(?P<names>.*)|import\s+(?P<whole>\w+)", re.DOTALL)
WORD = re.compile(r"[A-Za-z_]\w*")
NOT_CODE = re.compile(
    r'"""(?:.|\n)*?"""|\'\'\'(?:.|\n)*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*'
)
"""Text and comments."""


@dataclass(frozen=True)
class Item:
    """A top-level item: its name ("" for what has none), its lines, and the number of the first (from 1)."""

    file: str
    name: str
    lines: tuple[str, ...]
    line: int

    @property
    def text(self) -> str:
        """Its lines as one."""
        return "\n".join(self.lines)

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name in its code."""
        return frozenset(WORD.findall(NOT_CODE.sub(" ", self.text)))


@dataclass(frozen=True)
class Import:
    """An import at the top of a file: the module, dots included, and the names as (name, name here)."""

    file: str
    module: str
    names: tuple[tuple[str, str], ...]
    line: int
    length: int

    def of(self, expected: Iterable[str]) -> str:
        """Return an import with only the names that are used here; "" if none is."""
        kept = [(name, here) for name, here in self.names if here in expected]
        if not kept:
            return ""
        if not self.module:
            return f"import {kept[0][0]}"
        return f"from {self.module} import {', '.join(n if n == h else f'{n} as {h}' for n, h in kept)}"


@dataclass
class Source:
    """One file: its items and imports in order, and how many lines it has."""

    items: list[Item] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    lines: int = 0


@lru_cache(maxsize=256)
def read(file: str, text: str) -> Source:
    """Cut the text of a file into items; packages that are all but equal share those of the files that are equal."""
    lines = text.split("\n")
    starts = [*statements(lines), len(lines)]
    source = Source(lines=len(lines))
    for start, end in pairwise(starts):
        body = tuple(lines[start:end])
        code = NOT_CODE.sub(" ", "\n".join(body)).strip()
        match = IMPORT.match(code)
        if match:
            source.imports.append(make_import(file, match, start + 1, end - start))
        else:
            named = NAMED.search(code)
            source.items.append(Item(file, named[1] if named else "", body, start + 1))
    return source


def statements(lines: list[str]) -> Iterator[int]:
    """Return the indices of the lines where a top-level statement starts; a decorator's is that of its
    function."""
    depth, text_ends, decorated = 0, "", False
    for number, line in enumerate(lines):
        outside = not text_ends
        if outside and OPENS.match(line):
            depth = 0
        if outside and depth == 0 and line[:1].strip() and not line.startswith("#"):
            if not decorated:
                yield number
            decorated = line.startswith("@")
        at = 0
        while at < len(line):
            if text_ends:
                end = line.find(text_ends, at)
                at = len(line) if end < 0 else end + len(text_ends)
                text_ends = text_ends if end < 0 else ""
            elif line.startswith(('"""', "'''"), at):
                text_ends, at = line[at : at + 3], at + 3
            elif line[at] in "\"'":
                match = NOT_CODE.match(line, at)
                at = match.end() if match else len(line)
            elif line[at] == "#":
                break
            else:
                depth = max(0, depth + (line[at] in "([{") - (line[at] in ")]}"))
                at += 1


def make_import(file: str, match: re.Match[str], line: int, length: int) -> Import:
    """Return the import that IMPORT has matched."""
    if match["whole"]:
        return Import(file, "", ((match["whole"], match["whole"]),), line, length)
    names: list[tuple[str, str]] = []
    for part in re.sub(r"[()]", " ", match["names"]).split(","):
        words = part.split()
        if words:
            names.append((words[0], words[-1]))
    return Import(file, match["module"], tuple(names), line, length)


class Items:
    """The items of all files of a package; `texts` maps a file, relative to the package, to its text."""

    def __init__(self, texts: Mapping[str, str]):
        self.sources = {file: read(file, text) for file, text in texts.items()}
        self.by_name: dict[str, list[Item]] = {}
        self.renamed: dict[str, set[str]] = {}
        for source in self.sources.values():
            for item in source.items:
                if item.name:
                    self.by_name.setdefault(item.name, []).append(item)
            for statement in source.imports:
                for name, here in statement.names:
                    if name != here:
                        self.renamed.setdefault(here, set()).add(name)

    def find_needed(self, names: Iterable[str], but: Iterable[str] = ()) -> list[Item]:
        """Return the items of these names and all that they need, in the order of the files, those called `but` left out."""
        waiting, taken = list(names), set(but)
        items: list[Item] = []
        while waiting:
            name = waiting.pop()
            if name in taken:
                continue
            taken.add(name)
            waiting += self.renamed.get(name, ())
            for item in self.by_name.get(name, ()):
                items.append(item)
                waiting += item.words - taken
        return sorted(items, key=lambda item: (item.file, item.line))

    def imports_of(self, items: Iterable[Item]) -> dict[str, list[str]]:
        """File -> the imports that these items of it use, each in one line."""
        words: dict[str, set[str]] = {}
        for item in items:
            words.setdefault(item.file, set()).update(item.words)
        return {
            file: [text for statement in self.sources[file].imports if (text := statement.of(used))]
            for file, used in words.items()
        }

    def enclosing(self, file: str, line: int) -> Item | None:
        """Return the item that holds a line of a file."""
        for item in self.sources[file].items if file in self.sources else ():
            if item.line <= line < item.line + len(item.lines):
                return item
        return None

    def cut_out(self, items: Iterable[Item]) -> dict[str, str]:
        """Return file -> its text with only these items and the imports that they use, with unchanged line
        numbers.

        An import from another file of the package has only the names that are among the items.
        """
        items = list(items)
        there = {item.name for item in items}
        cut: dict[str, str] = {}
        for file in dict.fromkeys(item.file for item in items):
            source = self.sources[file]
            own = [item for item in items if item.file == file]
            words = {word for item in own for word in item.words}
            lines = [""] * source.lines
            for statement in source.imports:
                local = statement.module.startswith(".")
                used = {h for n, h in statement.names if h in words and (not local or n in there)}
                lines[statement.line - 1] = statement.of(used)
            for item in own:
                lines[item.line - 1 : item.line - 1 + len(item.lines)] = item.lines
            cut[file] = "\n".join(lines)
        return cut


def parts(text: str) -> list[str]:
    """Split at commas outside of brackets, as in "dtype, accum_type[a, b]"; runs of spaces become one."""
    pieces, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += sign
    return [" ".join(part.split()) for part in pieces if part.strip()]
