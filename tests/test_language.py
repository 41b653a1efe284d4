"""Names and docstrings use the words of CONTRIBUTING.md."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.toolchain.roots import CHECKOUT

PRIVATE_WORDS = {
    "anew", "asked", "beside", "exhibit", "exhibits", "floors", "found", "given", "gone", "judge", "judged",
    "judges", "kept", "knows", "lent", "lies", "made", "museum", "nobody", "noting", "ran", "room", "rooms",
    "said", "seen", "somebody", "stands", "taking", "tells", "told", "verdict", "verdicts", "wanted", "way",
    "ways", "who", "whose",
}  # fmt: skip
PRINTED = {"_unsupported", "batched", "compiled"}
"""Names that a command prints, or a protocol has."""
NOUN_CLAUSES = set(["How", "That", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"])
NOT_A_VERB = NOUN_CLAUSES | {
    "A", "All", "An", "As", "Both", "Each", "Every", "One", "Some", "The", "These", "This", "Those",
    "Three", "Two",
}  # fmt: skip
THIRD_PERSON = re.compile(r"[A-Z][a-z]*[a-rt-z]s")
DECORATED_AS_VALUES = {"property", "opcode", "cached_property", "cached", "fixture"}


def names_and_docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str, str]]:
    """Yield line, kind, name and docstring of every module, class, function, property and attribute."""
    yield 1, "module", "", ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for named, text in itertools.pairwise(body if isinstance(body, list) else []):
            if isinstance(named, ast.Assign | ast.AnnAssign) and (attribute := text_of(text)):
                yield text.lineno, "attribute", "", attribute
        if isinstance(node, ast.ClassDef):
            yield node.lineno, "class", node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(each).split("(")[0].split(".")[-1] for each in node.decorator_list}
            kind = "property" if decorators & DECORATED_AS_VALUES else "function"
            yield node.lineno, kind, node.name, ast.get_docstring(node) or ""


def text_of(statement: ast.stmt) -> str:
    """Return the text of a statement that is a string alone, or ""."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def private_words(name: str) -> set[str]:
    return {
        word.lower() for word in re.findall(r"[a-z0-9]+|[A-Z]+[a-z0-9]*", name.replace("NotFound", ""))
    } & PRIVATE_WORDS


def faults(kind: str, name: str, docstring: str) -> Iterator[str]:
    """Yield the faults of one name and its docstring."""
    if private := private_words(name):
        yield f"rename {name}: {', '.join(sorted(private))} is a private word"
    if (
        kind == "function"
        and re.fullmatch(r"_*[a-z]+ed", name)
        and not name.endswith("eed")
        and name not in PRINTED
    ):
        yield f"rename {name}: a function's name begins with a verb"
    opening = docstring.split(maxsplit=1)[0].rstrip(".,:;") if docstring else ""
    not_a_verb = opening in NOT_A_VERB or THIRD_PERSON.fullmatch(opening)
    if opening in NOUN_CLAUSES or (kind == "function" and not_a_verb):
        yield f"{name or kind}: begin the docstring with a verb in the imperative, not {opening!r}"


def test_words():
    paths = [path for path in (CHECKOUT / "harness").rglob("*.py")]
    assert paths
    assert [text for path in paths for text in faults_of(path)] == []


def faults_of(path: Path) -> list[str]:
    place = path.relative_to(CHECKOUT)
    found = [f"{place}: rename the module" for _ in private_words(path.stem)]
    for line, kind, name, docstring in names_and_docstrings(ast.parse(path.read_text("utf-8"))):
        found += [f"{place}:{line}: {fault}" for fault in faults(kind, name, docstring)]
    return found


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def moved(): ...", "rename moved: a function's name begins with a verb"),
        ("class JudgeOfRows: ...", "rename JudgeOfRows: judge is a private word"),
        (
            "def f():\n    'What a row is.'",
            "f: begin the docstring with a verb in the imperative, not 'What'",
        ),
        (
            "def f():\n    'Returns a row.'",
            "f: begin the docstring with a verb in the imperative, not 'Returns'",
        ),
        ("class Row:\n    'A row.'", None),
        ("def read():\n    'Pass a row on.'", None),
        ("class A:\n    @property\n    def shared(self):\n        'The shared rows.'", None),
        (
            "N = 3\n'How many rows.'",
            "attribute: begin the docstring with a verb in the imperative, not 'How'",
        ),
    ],
)
def test_faults_are_reported(source, fault):
    _, *places = names_and_docstrings(ast.parse(source))
    assert [text for _, *place in places for text in faults(*place)] == ([fault] if fault else [])
