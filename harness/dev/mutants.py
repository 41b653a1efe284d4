"""Generate mutants of a solution, each with one small, typical mistake in a blank.

Python code is edited through its syntax tree, Mojo code by regular expressions, for lack of a parser.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from harness.check.zoo import WrongSolution
from harness.learner import blanks
from harness.learner.blanks import Blank
from harness.learner.exercise import Exercise
from harness.spec.rungs import MojoRung

Edit = tuple[int, int, str]
"""(start, end, new): replace the characters from `start` to `end` by `new`."""
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "%", "%": "//", "**": "*", "@": "*"}
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
WORD_OPERATORS = {"is not": "is", "is": "is not", "not in": "in", "in": "not in"}
FUNCTION_SWAPS = {"max": "min", "min": "max", "all": "any", "any": "all", "mean": "sum", "sum": "mean"}
SYMMETRIC_FUNCTIONS = (
    "max",
    "min",
    "maximum",
    "minimum",
    "logaddexp",
    "transpose",
    "swapaxes",
    "promote_types",
)
"""Functions for which the order of arguments does not matter."""
CHECKING_KEYWORDS = ("strict",)
"""Keyword arguments that only enable a check."""
MOJO_NAME_SWAPS = {"max": "min", "min": "max", "rsqrt": "sqrt", "exp": "log", "x": "y", "y": "x"}
ARITHMETIC = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**", ast.MatMult: "@",
}  # fmt: skip
RELATIONS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is", ast.IsNot: "is not",
    ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
SIMPLE_STATEMENTS = (ast.Assign, ast.AugAssign, ast.Expr)


@dataclass(frozen=True)
class Mutant:
    """A mutant: its gate and line, the changed lines before and after (stripped), and the file's new text."""

    gate: str
    line: int
    old: str
    new: str
    text: str

    def make_wrong_kernel(self, exercise: Exercise) -> WrongSolution:
        rung = exercise.rung
        file = rung.source if isinstance(rung, MojoRung) else rung.file
        text = blanks.read_source(exercise.solution)
        return WrongSolution(
            exercise.puzzle.name, "mutant", self.gate, "", file, text, self.text, rung=rung.id
        )


def list_mutants(exercise: Exercise) -> list[Mutant]:
    """Return all mutants of a rung's blanks, in file order."""
    text = blanks.read_source(exercise.solution)
    edits = list_python_edits if exercise.rung.language == "Python" else list_mojo_edits
    by_text: dict[str, Mutant] = {}
    for blank in blanks.find_blanks(text).values():
        for edit in sorted(edits(text, blank)):
            mutant = make_mutant(text, blank, edit)
            if mutant.text != text and (exercise.rung.language == "Mojo" or is_python(mutant.text)):
                by_text.setdefault(mutant.text, mutant)
    return list(by_text.values())


def make_mutant(text: str, blank: Blank, edit: Edit) -> Mutant:
    """Return the mutant of a file with one edit."""
    start, end, new = edit
    changed = text[:start] + new + text[end:]
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", end)
    old_lines, new_lines = text[first:last], changed[first : last + len(changed) - len(text)]
    return Mutant(
        blank.id, text.count("\n", 0, start) + 1, join_words(old_lines), join_words(new_lines), changed
    )


def join_words(lines: str) -> str:
    return " ".join(lines.split())


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


# ---- Python ------------------------------------------------------------------------------------------------


def list_python_edits(text: str, blank: Blank) -> Iterator[Edit]:
    """Yield the edits of a blank, using its file's syntax tree."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.split("\n")

    def get_offset(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def get_span(node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno and node.end_col_offset is not None  # nodes of a parsed file
        return get_offset(node.lineno, node.col_offset), get_offset(node.end_lineno, node.end_col_offset)

    inside = range(blank.line, blank.line + len(blank.body))
    tree = ast.parse(text)
    checking_values = {
        k.value for k in ast.walk(tree) if isinstance(k, ast.keyword) and k.arg in CHECKING_KEYWORDS
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.expr | ast.stmt) and node.lineno in inside and node not in checking_values:
            yield from list_node_edits(node, text, get_span)
            for name in ("body", "orelse"):
                statements = getattr(node, name, None)
                yield from list_order_edits(
                    statements if isinstance(statements, list) else [], text, get_span
                )
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.lineno not in inside]
    for function in functions:
        yield from list_order_edits([n for n in function.body if n.lineno in inside], text, get_span)


def list_node_edits(
    node: ast.expr | ast.stmt, text: str, get_span: Callable[..., tuple[int, int]]
) -> Iterator[Edit]:
    start, end = get_span(node)

    def replace_between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Edit]:
        first, last = get_span(left)[1], get_span(right)[0]
        yield first, last, text[first:last].replace(old, new, 1)

    def wrap(inner: ast.expr) -> Edit:
        first, last = get_span(inner)
        return first, last, f"(not ({text[first:last]}))"

    match node:
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            old = ARITHMETIC[type(op)]
            yield from replace_between(left, right, old, OPERATORS[old])
        case ast.Compare(left, [op, *_], [right, *_]):
            old = RELATIONS[type(op)]
            yield from replace_between(left, right, old, (COMPARISONS | WORD_OPERATORS)[old])
        case ast.BoolOp(op, values):
            old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            for left, right in pairwise(values):
                yield from replace_between(left, right, old, new)
            for k in range(len(values)):  # leave out one condition
                rest = [text[slice(*get_span(v))] for i, v in enumerate(values) if i != k]
                yield start, end, f" {old} ".join(rest)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield start, end, text[slice(*get_span(operand))]
        case ast.Constant(bool() as value):
            yield start, end, str(not value)
        case ast.Constant(int() as value):
            yield start, end, str(value + 1)
        case ast.Constant(float() as value):
            yield start, end, repr(2 * value or 1.0)
        case ast.IfExp(test=test) | ast.If(test=test) | ast.While(test=test):
            yield wrap(test)
        case ast.AugAssign(target, op, value) if type(op) in ARITHMETIC:
            old = ARITHMETIC[type(op)]
            yield from replace_between(target, value, f"{old}=", f"{OPERATORS[old]}=")
            yield from replace_between(target, value, f"{old}=", "=")
        case ast.Call():
            yield from list_call_edits(node, text, get_span)
    removable = isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break)
    if removable and not is_constant_statement(node):
        yield start, end, "pass"
    for clause in getattr(node, "generators", ()):
        for test in clause.ifs:
            yield wrap(test)


def list_call_edits(node: ast.Call, text: str, get_span: Callable[..., tuple[int, int]]) -> Iterator[Edit]:
    """Yield the edits of a call: drop a keyword, swap two arguments, replace or drop the function."""
    for keyword in (argument for argument in node.keywords if argument.arg not in CHECKING_KEYWORDS):
        first, last = get_span(keyword)
        before = re.search(r",\s*$", text[:first])
        after = re.match(r",\s*", text[last:])
        yield before.start() if before else first, last + (after.end() if after and not before else 0), ""
    for left, right in pairwise(node.args if get_function_name(node.func) not in SYMMETRIC_FUNCTIONS else ()):
        yield swap_spans(get_span(left), get_span(right), text)
    match node.func:
        case ast.Name(id=name) if name in FUNCTION_SWAPS:
            yield *get_span(node.func), FUNCTION_SWAPS[name]
        case ast.Attribute(value, name):
            end = get_span(node.func)[1]
            if name in FUNCTION_SWAPS:
                yield end - len(name), end, FUNCTION_SWAPS[name]
            if not node.args and not node.keywords and not isinstance(value, ast.Name):
                yield *get_span(node), text[slice(*get_span(value))]
            elif not node.args and not node.keywords:
                yield *get_span(node), value.id if isinstance(value, ast.Name) else ""


def swap_spans(left: tuple[int, int], right: tuple[int, int], text: str) -> Edit:
    between = text[left[1] : right[0]]
    return left[0], right[1], text[slice(*right)] + between + text[slice(*left)]


def get_function_name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def list_order_edits(
    body: list[ast.stmt], text: str, get_span: Callable[..., tuple[int, int]]
) -> Iterator[Edit]:
    """Yield the edits that swap two adjacent simple statements."""
    for first, second in pairwise(body):
        if (
            isinstance(first, SIMPLE_STATEMENTS)
            and isinstance(second, SIMPLE_STATEMENTS)
            and does_order_matter(first, second)
        ):
            yield swap_spans(get_span(first), get_span(second), text)


def does_order_matter(first_statement: ast.stmt, second_statement: ast.stmt) -> bool:
    """Check whether the order of two statements may matter.

    It does if one assigns a name that the other uses, or is an expression statement. A call does not depend
    on a counter that it does not use.
    """
    if is_constant_statement(first_statement):
        return False
    statements = (first_statement, second_statement)
    counter = any(
        isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant) for node in statements
    )
    if not counter and any(isinstance(node, ast.Expr) for node in statements):
        return True
    assigned, used = zip(*(find_names(node) for node in statements), strict=True)
    return bool(assigned[0] & used[1] or assigned[1] & used[0])


def find_names(node: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names that a statement assigns (or an element of them), and all names in it."""
    targets = [node.target] if isinstance(node, ast.AugAssign) else getattr(node, "targets", [])
    assigned = set()
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        assigned |= {ast.unparse(part).partition("[")[0] for part in parts}
    names = (child for child in ast.walk(node) if isinstance(child, ast.Name | ast.Attribute))
    return assigned, set(map(ast.unparse, names))


def is_constant_statement(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# ---- Mojo --------------------------------------------------------------------------------------------------

OPERATOR = re.compile(r"(?<= )(<=|>=|==|!=|\+=|-=|//|[-+*/%<>])(?= )")
NUMBER = re.compile(r"(?<![\w.])\d+(\.\d+)?(?![\w.])")
NAME = re.compile(r"\b(" + "|".join(MOJO_NAME_SWAPS) + r")\b(?=[\[(]|$|[^\w(])")
ARGUMENT_PAIR = re.compile(r"[\[(]([\w.]+), ([\w.]+)[\])]")
GUARD = re.compile(r"^\s*(?:el)?(?:if|while) (?P<test>.+):$")
STATEMENT = re.compile(
    r"^\s*(?!var |ref |return|if |for |elif |else|while |comptime |def |@|\))[\w.]+.*[^:,(\[]$"
)


def list_mojo_edits(text: str, blank: Blank) -> Iterator[Edit]:
    """Yield the edits of a blank, line by line."""
    offset = sum(len(line) + 1 for line in text.split("\n")[: blank.line - 1])
    previous, depth = "", 0
    for line in blank.body:
        code = line.split("#")[0].rstrip()
        if code and '"""' not in code:
            for start, end, new in list_line_edits(code):
                if not depth or new != "pass":  # inside brackets a line is only part of a statement
                    yield offset + start, offset + end, new
            if STATEMENT.match(code) and STATEMENT.match(previous) and does_line_order_matter(previous, code):
                yield offset - len(previous) - 1, offset + len(code), f"{code}\n{previous}"
        previous = code if code == line else ""
        depth += len(re.findall(r"[(\[]", code)) - len(re.findall(r"[)\]]", code))
        offset += len(line) + 1


def does_line_order_matter(first_statement: str, second_statement: str) -> bool:
    """Check whether two lines' order may matter: one assigns a name that the other uses, or is a call."""
    if count_indent(first_statement) != count_indent(second_statement):
        return False
    sides = [
        re.split(r"(?<![=<>!])[-+*/]?=(?!=)", line, maxsplit=1)
        for line in (first_statement, second_statement)
    ]
    if any(len(side) == 1 for side in sides):
        return True
    assigned = [re.findall(r"\w+", side[0])[0] for side in sides]
    used = [re.findall(r"\w+", " ".join(side)) for side in sides]
    return assigned[0] in used[1] or assigned[1] in used[0]


def count_indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def list_line_edits(code: str) -> Iterator[Edit]:
    for match in OPERATOR.finditer(code):
        old = match[1]
        if old in ("+=", "-="):
            yield *match.span(), {"+=": "-=", "-=": "+="}[old]
            yield *match.span(), "="
        else:
            yield *match.span(), (OPERATORS | COMPARISONS)[old]
    for match in NUMBER.finditer(code):
        value = match[0]
        yield *match.span(), repr(2 * float(value) or 1.0) if "." in value else str(int(value) + 1)
    for match in NAME.finditer(code):
        if match[1] not in "xy" or code[: match.start()].endswith(("_idx.", "_dim.")):
            yield *match.span(), MOJO_NAME_SWAPS[match[1]]
    for match in ARGUMENT_PAIR.finditer(code):
        yield match.start(1), match.end(2), f"{match[2]}, {match[1]}"
    for old, new in ((" and ", " or "), (" or ", " and "), ("True", "False"), ("False", "True")):
        for match in re.finditer(rf"(?<!\w){old}(?!\w)" if old.strip() == old else old, code):
            yield *match.span(), new
    if guard := GUARD.match(code):
        yield *guard.span("test"), f"not ({guard['test']})"
        yield *guard.span("test"), "True" if " while " not in f" {code.strip()}" else "False"
    elif STATEMENT.match(code):
        yield count_indent(code), len(code), "pass"
