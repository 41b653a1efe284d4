"""Parse the top-level items of Mojo files and find their dependencies, without the compiler.

An item is assumed to depend on every item whose name it contains. This may include too many items, but misses
none, so a kernel must be recompiled only if the digest of its dependencies changes, and a package of only
these items compiles to the same kernel.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

ITEM_START = re.compile(r"(?:@|def |struct |trait |comptime |from |import )")
"""Start of an item, in the first column; it ends an unclosed bracket of the previous item."""
ITEM_NAME = re.compile(r"^(?:def|struct|trait|comptime)\s+(\w+)", re.MULTILINE)
"""An item's name, after decorators that may span several lines."""
IMPORT = re.compile(r"from\s+(?P<module>[\w.]+)\s+import\s+(?P<names>.*)|import\s+(?P<whole>\w+)", re.DOTALL)
WORD = re.compile(r"[A-Za-z_]\w*")
NOT_CODE = re.compile(
    r'"""(?:.|\n)*?"""|\'\'\'(?:.|\n)*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*'
)
"""String literals and comments."""


@dataclass(frozen=True)
class Item:
    """A top-level item: its file, name or "", lines, and the number of its first line."""

    file: str
    name: str
    lines: tuple[str, ...]
    line: int

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @cached_property
    def identifiers(self) -> frozenset[str]:
        return frozenset(WORD.findall(NOT_CODE.sub(" ", self.text)))


@dataclass(frozen=True)
class Import:
    """A top-level import: the module with its leading dots, and pairs (name, local name)."""

    file: str
    module: str
    names: tuple[tuple[str, str], ...]
    line: int
    num_lines: int

    def restrict_to(self, names: Iterable[str]) -> str:
        """Return an import statement of only these local names, or "" if there are none."""
        used = [(name, local_name) for name, local_name in self.names if local_name in names]
        if not used:
            return ""
        if not self.module:
            return f"import {used[0][0]}"
        return f"from {self.module} import {', '.join(n if n == h else f'{n} as {h}' for n, h in used)}"


@dataclass
class Source:
    """A parsed file: items and imports in order, and the number of lines."""

    items: list[Item] = field(default_factory=list)
    imports: list[Import] = field(default_factory=list)
    lines: int = 0


@lru_cache(maxsize=256)
def parse_source(file: str, text: str) -> Source:
    """Parse a file into items and imports. Results are cached, because packages share most files."""
    lines = text.split("\n")
    starts = [*find_statements(lines), len(lines)]
    source = Source(lines=len(lines))
    for start, end in pairwise(starts):
        body = tuple(lines[start:end])
        code = NOT_CODE.sub(" ", "\n".join(body)).strip()
        match = IMPORT.match(code)
        if match:
            source.imports.append(parse_import(file, match, start + 1, end - start))
        else:
            name_match = ITEM_NAME.search(code)
            source.items.append(Item(file, name_match[1] if name_match else "", body, start + 1))
    return source


def find_statements(lines: list[str]) -> Iterator[int]:
    """Yield the index of the first line of each top-level statement, including decorators."""
    depth, closing_quotes, is_decorated = 0, "", False
    for number, line in enumerate(lines):
        is_code = not closing_quotes
        if is_code and ITEM_START.match(line):
            depth = 0
        if is_code and depth == 0 and line[:1].strip() and not line.startswith("#"):
            if not is_decorated:
                yield number
            is_decorated = line.startswith("@")
        position = 0
        while position < len(line):
            if closing_quotes:
                end = line.find(closing_quotes, position)
                position = len(line) if end < 0 else end + len(closing_quotes)
                closing_quotes = closing_quotes if end < 0 else ""
            elif line.startswith(('"""', "'''"), position):
                closing_quotes, position = line[position : position + 3], position + 3
            elif line[position] in "\"'":
                match = NOT_CODE.match(line, position)
                position = match.end() if match else len(line)
            elif line[position] == "#":
                break
            else:
                depth = max(0, depth + (line[position] in "([{") - (line[position] in ")]}"))
                position += 1


def parse_import(file: str, match: re.Match[str], line: int, length: int) -> Import:
    if match["whole"]:
        return Import(file, "", ((match["whole"], match["whole"]),), line, length)
    names: list[tuple[str, str]] = []
    for part in re.sub(r"[()]", " ", match["names"]).split(","):
        tokens = part.split()
        if tokens:
            names.append((tokens[0], tokens[-1]))
    return Import(file, match["module"], tuple(names), line, length)


class Items:
    """The items of all files of a package; `texts` maps files, relative to the package, to their texts."""

    def __init__(self, texts: Mapping[str, str]):
        self.sources = {file: parse_source(file, text) for file, text in texts.items()}
        self.by_name: dict[str, list[Item]] = {}
        self.import_aliases: dict[str, set[str]] = {}
        for source in self.sources.values():
            for item in source.items:
                if item.name:
                    self.by_name.setdefault(item.name, []).append(item)
            for statement in source.imports:
                for name, local_name in statement.names:
                    if name != local_name:
                        self.import_aliases.setdefault(local_name, set()).add(name)

    def find_dependencies(self, names: Iterable[str], exclude: Iterable[str] = ()) -> list[Item]:
        """Return the items with these names and their dependencies, except those named in `exclude`."""
        worklist, visited = list(names), set(exclude)
        items: list[Item] = []
        while worklist:
            name = worklist.pop()
            if name in visited:
                continue
            visited.add(name)
            worklist += self.import_aliases.get(name, ())
            for item in self.by_name.get(name, ()):
                items.append(item)
                worklist += item.identifiers - visited
        return sorted(items, key=lambda item: (item.file, item.line))

    def find_imports(self, items: Iterable[Item]) -> dict[str, list[str]]:
        """Return file -> lines of the imports that its items use."""
        words: dict[str, set[str]] = {}
        for item in items:
            words.setdefault(item.file, set()).update(item.identifiers)
        return {
            file: [text for statement in self.sources[file].imports if (text := statement.restrict_to(used))]
            for file, used in words.items()
        }

    def find_enclosing(self, file: str, line: int) -> Item | None:
        for item in self.sources[file].items if file in self.sources else ():
            if item.line <= line < item.line + len(item.lines):
                return item
        return None

    def extract_items(self, items: Iterable[Item]) -> dict[str, str]:
        """Map each file to a text with only these items and the imports they use, at unchanged line numbers.

        Imports from other files of the package are restricted to the names of these items.
        """
        items = list(items)
        item_names = {item.name for item in items}
        extracted: dict[str, str] = {}
        for file in dict.fromkeys(item.file for item in items):
            source = self.sources[file]
            file_items = [item for item in items if item.file == file]
            used_words = {word for item in file_items for word in item.identifiers}
            lines = [""] * source.lines
            for statement in source.imports:
                is_local = statement.module.startswith(".")
                used = {
                    h for n, h in statement.names if h in used_words and (not is_local or n in item_names)
                }
                lines[statement.line - 1] = statement.restrict_to(used)
            for item in file_items:
                lines[item.line - 1 : item.line - 1 + len(item.lines)] = item.lines
            extracted[file] = "\n".join(lines)
        return extracted


def split_arguments(text: str) -> list[str]:
    """Split at commas outside brackets, as in "dtype, accum_type[a, b]"; collapse spaces."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [" ".join(part.split()) for part in parts if part.strip()]
