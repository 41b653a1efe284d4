"""Names and docstrings of the harness and its tests use the words of CONTRIBUTING.md."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from harness.toolchain.roots import CHECKOUT

PRIVATE_WORDS = {
    "anew", "asked", "beside", "exhibit", "exhibits", "floors", "found", "given", "gone", "judge", "judged",
    "judges", "kept", "knows", "lent", "lies", "made", "museum", "nobody", "noting", "ran", "room", "rooms",
    "said", "seen", "somebody", "stands", "taking", "tells", "told", "verdict", "verdicts", "wanted", "way",
    "ways", "who", "whose",
}  # fmt: skip
PRINTED = {"_unsupported", "batched", "compiled", "seen", "shifted"}
"""Names that a command prints, that a page of the book quotes, or that a protocol requires."""
NOUN_CLAUSES = set(["How", "That", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"])
CONTINUATIONS = {"Against", "Also", "As", "Besides", "By", "Its", "Of", "So", "Their", "Those"}
"""First words of docstrings that continue the name above."""
NOT_A_VERB = NOUN_CLAUSES | {
    "A", "All", "An", "As", "Both", "Each", "Every", "One", "Some", "The", "These", "This", "Those",
    "Three", "Two",
}  # fmt: skip
THIRD_PERSON = re.compile(r"[A-Z][a-z]*[a-rt-z]s")
DECORATED_AS_VALUES = {"property", "opcode", "cached_property", "cached", "fixture"}


def iterate_names_and_docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str, str]]:
    """Yield line, kind, name and docstring of every module, class, function, property and attribute."""
    yield 1, "module", "", ast.get_docstring(tree) or ""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for named, text in itertools.pairwise(body if isinstance(body, list) else []):
            if isinstance(named, ast.Assign | ast.AnnAssign) and (attribute := get_string(text)):
                yield text.lineno, "attribute", "", attribute
        if isinstance(node, ast.ClassDef):
            yield node.lineno, "class", node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {
                ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list
            }
            kind = "property" if decorators & DECORATED_AS_VALUES else "function"
            kind = "test" if node.name.startswith("test_") else kind  # a test's docstring may be a statement
            yield node.lineno, kind, node.name, ast.get_docstring(node) or ""


def get_string(statement: ast.stmt) -> str:
    """Return the value of a string-expression statement, or ""."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def find_private_words(name: str) -> set[str]:
    return {
        word.lower() for word in re.findall(r"[a-z0-9]+|[A-Z]+[a-z0-9]*", name.replace("NotFound", ""))
    } & PRIVATE_WORDS


def find_faults(kind: str, name: str, docstring: str) -> Iterator[str]:
    """Yield the faults of one name and its docstring."""
    if name not in PRINTED and (private := find_private_words(name)):
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
    if opening in NOUN_CLAUSES | CONTINUATIONS or (kind == "function" and not_a_verb):
        yield f"{name or kind}: begin the docstring with a verb in the imperative, not {opening!r}"


def test_names_and_docstrings_follow_the_word_list():
    paths = [*(CHECKOUT / "harness").rglob("*.py")]
    assert paths
    assert [text for path in paths for text in find_faults_in_file(path)] == []


def test_tests_follow_the_word_list():
    """Check variables too."""
    paths = [*(CHECKOUT / "tests").rglob("*.py")]
    assert paths
    faults = [text for path in paths for text in (*find_faults_in_file(path), *find_variable_faults(path))]
    assert faults == []


def find_faults_in_file(path: Path) -> list[str]:
    file = path.relative_to(CHECKOUT)
    faults = [f"{file}: rename the module" for _ in find_private_words(path.stem)]
    for line, kind, name, docstring in iterate_names_and_docstrings(ast.parse(path.read_text("utf-8"))):
        faults += [f"{file}:{line}: {fault}" for fault in find_faults(kind, name, docstring)]
    return faults


def find_variable_faults(path: Path) -> list[str]:
    names = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node.lineno
        elif isinstance(node, ast.arg):
            names[node.arg] = node.lineno
    file = path.relative_to(CHECKOUT)
    return [f"{file}:{line}: rename {name}" for name, line in names.items() if find_private_words(name)]
