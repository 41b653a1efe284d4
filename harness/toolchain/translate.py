"""Explain a message of the Mojo compiler to a learner: one sentence, and a place to look.

The input is the compiler's JSON diagnostics and, for errors that it only prints as text (a failed constraint
deep in the standard library), the lines of its output. The rules match the wording of Mojo 1.2; other
messages get no sentence, and only the compiler's own line is printed.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from harness.invocation import command
from harness.toolchain.diagnostics import Diagnostic
from harness.toolchain.mojo_items import NOT_CODE, Items

CONVERSION = re.compile(
    r"(?:cannot be converted from '(?P<got>[^']+)' to '(?P<wanted>[^']+)'"
    r"|cannot implicitly convert '(?P<got2>[^']+)' value to '(?P<wanted2>[^']+)')"
)
INTEGER = re.compile(r"(U?Int\d*|Scalar\[\.u?int\d+\])")
FLOAT = re.compile(r"(B?Float\d+|Scalar\[.*\]|SIMD\[.*, 1\]|.*ElementType)")

# The whole meaning of a message, as (pattern, sentence); the first that matches the message or the line of code counts.
# {0}, {1}, ... are the pattern's groups. A pointer follows after " See ".
NAMES = {
    "alias": "`alias` was removed: a compile-time constant is written `comptime N = 8`.",
    "let": "`let` was removed: a local name is declared by `var`.",
    "value": "`@value` was removed: write `@fieldwise_init` and `struct S(Copyable, Movable)`.",
    "InlineArray": "`InlineArray` is now `Array[T, n](fill=0)`.",
    "__syncthreads": "CUDA's `__syncthreads()` is `barrier()` here, from `max.gpu`.",
    **{
        name: f"CUDA's `{name}` is `{name.removesuffix('Idx').removesuffix('Dim')}_{name[-3:].lower()}` here: "
        f"`{name.removesuffix('Idx').removesuffix('Dim')}_{name[-3:].lower()}.x`."
        for name in ("threadIdx", "blockIdx", "blockDim", "gridDim")
    },
    "atomicAdd": "CUDA's `atomicAdd` is `atomic_add(sums, index, value)` here, from shared/common.mojo.",
}
SHOWN = 3
"""So many errors after the first are shown, in a line each."""
MESSAGES: tuple[tuple[str, str], ...] = (
    (r"use of unknown declaration '(\w+)'; did you mean to import it from '([\w.]+)'",
     "`{0}` is not imported here: add `from {1} import {0}` to the imports at the top of the file."),
    (r"use of unknown declaration '(\w+)'",
     "Nothing called `{0}` is visible at this line: a typo, a name that another blank declares, or one declared "
     "inside a loop that has ended. See the lines above the blank for the names that you are given."),
    (r"implicit declaration of '(\w+)' is not allowed",
     "The first assignment declares a name, and says so: `var {0} = ...`; after that `{0} = ...` and `{0} += ...`."),
    (r"Int and UInt do not conform to DevicePassable",
     "A launch passes no Int to a kernel: the size goes in as `Int32(width)`, as the kernel's own argument has it."),
    (r"'fn' has been removed", "Functions are written `def`; one that can raise says `raises`."),
    (r"unable to locate module '(gpu|algorithm|nn|linalg)",
     "The GPU and kernel modules moved below `max`: `from max.{0} import ...`. "
     "See the imports at the top of the file."),
    (r"unable to locate module '([\w.]+)'",
     "There is no module `{0}`: standard modules begin with `std.` (`from std.math import sqrt`), GPU modules "
     "with `max.gpu`, files of this package with a dot (`from .shared.common import atomic_add`)."),
    (r"(?:package|module) '([\w.]+)' does not contain '(\w+)'",
     "`{1}` is not in `{0}`: it is spelled otherwise, has moved, or was removed from a file that others import it "
     "from. See `git diff`, or put the file back with `workbook reset pNN`."),
    (r"expression must be mutable in assignment|evaluated to False, expected 'mut'",
     "The left side may only be read: an input tensor, or an argument. Write to the output tensor, or copy the "
     "value first: `var copy = ...`."),
    (r"'(if|for)' statement does not support decorators",
     "A compile-time `{0}` is written `comptime {0} ...:`, without a decorator."),
    (r"negative indexing is not supported", "Mojo has no `x[-1]`: the last element is `x[len(x) - 1]`."),
    (r"[Ii]nequality is only defined for `Scalar`s|[Ee]quality is only defined for `Scalar`s",
     "`a > b` on vectors is not one truth value: `a.gt(b)`, `.lt`, `.eq` give a mask, `mask.select(x, y)` uses it."),
    (r"GPU architecture '?[\w.]*'? ?(?:is not supported|detected)|[Uu]nknown GPU architecture"
     r"|target '\w*' is not supported by this build|target architecture '\w*' is not valid",
     "The kernel was compiled for a GPU that this compiler does not know, or where none is seen; nothing is wrong "
     "with the kernel. See `workbook doctor`; `--device virtual` needs no GPU."),
    (r"unsupported atomic synchronization scope",
     "The scope of an atomic differs between makers: use `atomic_add` of shared/common.mojo, which chooses it."),
    (r"'([^']+)' value has no attribute '(sqrt|exp|log|tanh|rsqrt|max|min|abs)'",
     "`{1}` is a function, not a method: `{1}(x)`, imported by `from std.math import {1}` unless it is built in."),
    (r"'([^']+)' value has no attribute '(\w+)'",
     "A `{0}` has nothing called `{1}`: check the spelling, and whether it is the tensor or an element of it "
     "(`x` or `x[row, h]`)."),
    (r"invalid call to 'cast': unexpected argument",
     "The dtype is a parameter, in square brackets: `x.cast[DType.float32]()`."),
    (r"missing required argument: '(\w+)'",
     "The call leaves out `{0}`. See the declaration that the compiler names in its note (--verbose)."),
    (r"failed to infer parameter 'origin'",
     "A pointer type names what it points into: `ImmPtr[dtype]` for what is read, `MutPtr[dtype]` for what is "
     "written, both from shared/common.mojo."),
    (r"cannot call function that may raise",
     "The called function may raise, so that the one around it must say `raises`; a GPU kernel cannot."),
    (r"invalid redefinition of '(\w+)'", "`{0}` is declared already: assign to it without `var`."),
    (r"indentation must not mix tabs and spaces",
     "The file indents by spaces (four of them), this line by tabs. See your editor's setting for .mojo files."),
    (r"statement indentation must match|unexpected indentation|expected an indented block",
     "The indentation of this line does not match the block around it."),
    (r"body must not be empty",
     "A loop, an `if` or a function needs at least one statement; a comment is not one. `pass` does nothing."),
    (r"unexpected token in expression",
     "Something here, or at the end of the line before, cannot be part of an expression: a stray or missing bracket or "
     "operator, or `i++`, which is `i += 1`."),
    (r"expected ':'", "A line that opens a block (`for`, `if`, `def`) ends in a colon."),
    (r"expected 'else' clause in ternary",
     "A conditional value always has both sides: `a if condition else b`."),
    (r"registers no op '(\w+)'",
     'No struct carries `@extensibility.register("{0}")`: the line was removed or renamed. '
     "See `git diff`, or put the file back with `workbook reset pNN`."),
)  # fmt: skip
# Mistakes for which the compiler reports only consequences; the line of code shows the intention.
CODE: tuple[tuple[str, str], ...] = (
    (r"^\s*alias\s", NAMES["alias"]),
    (r"^\s*let\s", NAMES["let"]),
    (r"\b(inout|owned|borrowed)\s+\w+\s*:", "Argument conventions are now `mut x: T` (was inout) and `var x: T` (was owned)."),
    (r"\bf(['\"]).*\{.*\1", 'Mojo\'s formatted text is `t"n = {n}"`, with a t.'),
    (r"UnsafePointer", "`UnsafePointer` is now `Pointer`, with an origin: `ImmPtr[dtype]`, `MutPtr[dtype]` of shared/common.mojo."),
)  # fmt: skip


# The message together with the line of code: (message or note, code, sentence); the code's groups are {0}, {1}, ...
BY_CODE: tuple[tuple[str, str, str], ...] = (
    (r"'__[gs]etitem__'|Slice'|value to 'TileTensor\[", r"\b(\w+\[[^\[\]:]*:[^\[\]]*\])",
     "`{0}` is a slice, and nothing is computed with slices: a loop takes one element at a time, as `x[row, c]` for c in "
     "`range(columns)`."),
    (r"'__[gs]etitem__'(?:.|\n)*unsafe_offset", r"(\w+)\[([^\[\],]+), *([^\[\]]+)\]",
     "`{0}` is an address, not a tensor with axes: it takes one index, computed from both and named, "
     "`{0}[unsafe_offset={1} * COLUMNS + {2}]`; what several blocks add to goes through `atomic_add({0}, index, value)`."),
    (r"'CompensatedSum\[[^']*'", r"",
     "A `CompensatedSum` is added to with `+=`; what it holds is its `.total`."),
    (r"does not implement the '__call__' method", r"\b(\w+_(?:idx|dim)\.[xyz])\(\)",
     "`{0}` is a value, not a function: it goes without `()`."),
    (r"does not implement the '__call__' method", r"^[^()]*\b(\w+)\(([^()]*)\)[^()]*$",
     "An element is taken with square brackets: `{0}[{1}]`."),
    (r"in call to 'sum'", r"\bblock\.(sum|max|min)\(",
     "The number of threads is a parameter: `block.{0}[block_size=...](value)`, the launch's own. "
     "Every thread of the block must call it."),
    (r"convert(?:ed)? .*'Int'|in call to '(?:min|max)'", r"\b(min|max)\((-?\d+), ",
     "Both arguments of `{0}` need one type, and `{1}` alone is an Int: `{0}(Scalar[accum]({1}), ...)`."),
    (r"", r"\S\s*(&&|\|\|)", "Conditions are joined by `and` and `or`, and turned by `not`."),
)  # fmt: skip


def explain(diagnostic: Diagnostic, notes: Sequence[str] = ()) -> str | None:
    """Return one sentence on an error, or None if no rule matches.

    Args:
        diagnostic: The compiler's first error, with its line of code.
        notes: The messages and lines that the compiler printed after it.
    """
    sentence = explanation([diagnostic.message, *notes], diagnostic)
    if sentence and sentence.startswith(SIZES):
        sentence = sentence.replace(SIZES, sizes_at(diagnostic.file, diagnostic.line), 1)
    return sentence and pasteable(sentence, diagnostic.file)


SIZES = "A kernel's sizes arrive as Int32"


def sizes_at(file: str, line: int) -> str:
    """Return a remark on Int32 with the names of the kernel's sizes, for the kernel of a line of a file, if
    it has any."""
    try:
        item = Items({file: Path(file).read_text(encoding="utf-8")}).enclosing(file, line)
    except (OSError, UnicodeDecodeError):
        return SIZES
    code = NOT_CODE.sub(" ", item.text) if item else ""
    head = code[: code.find("):")]  # the arguments
    names = re.findall(r"\b(\w+): Int32\b", head)
    converted = re.search(rf"\bvar (\w+) = Int\(({'|'.join(names)})\)", code) if names else None
    which = f"This kernel's sizes ({', '.join(names)}) arrive as Int32" if names else SIZES
    return f"{which}{f' (`{converted[1]}` is `{converted[2]}` as an Int)' if converted else ''}"


def explanation(texts: Sequence[str], diagnostic: Diagnostic) -> str | None:
    """Return the sentence as the tables have it; `texts` are the error's message and the notes."""
    named = re.match(r"use of unknown declaration '(\w+)'", diagnostic.message)
    if named and named[1] in NAMES:
        return NAMES[named[1]]
    if re.search(r"^(expected|unexpected|expressions must not|statements must|failed to infer)", texts[0]):
        for pattern, sentence in CODE:
            if re.search(pattern, diagnostic.text):
                return sentence
    for pattern, code, sentence in BY_CODE:
        if re.search(pattern, "\n".join(texts)) and (match := re.search(code, diagnostic.text)):
            return sentence.format(*match.groups())
    if not vague(diagnostic.message):
        return conversion(diagnostic.message) or by_message(diagnostic.message)
    # The reason is in a note: that the left side may not be written beats a type that does not fit.
    for rule in (by_message, conversion):
        for text in texts:
            if sentence := rule(text):
                return sentence
    return None


def vague(message: str) -> bool:
    """Check whether a message only says that something failed; the reason is in a note."""
    return message.startswith(("function instantiation failed", "no matching", "call expansion failed"))


def by_message(text: str) -> str | None:
    """Return the sentence of the first rule that matches the message."""
    for pattern, sentence in MESSAGES:
        if match := re.search(pattern, text):
            return sentence.format(*match.groups())
    return None


def pasteable(sentence: str, file: str) -> str:
    """Return the sentence with the workbook's commands as they are typed here.

    `reset` gets the puzzle of the error's file; for another file it stays `reset pNN`.
    """
    puzzle = next((inside for folder, inside in pairwise(Path(file).parts) if folder == "problems"), "pNN")
    return re.sub(
        r"\bworkbook ((?:doctor|reset pNN)\b)",
        lambda match: command(match[1].replace("pNN", puzzle)),
        sentence,
    )


def conversion(text: str) -> str | None:
    """Explain two types that do not match: integers, floats of two dtypes, generic vectors."""
    match = CONVERSION.search(text)
    if not match or "unresolved parameter" in text:
        return None
    got, expected = match["got"] or match["got2"], match["wanted"] or match["wanted2"]
    for describe in (integers, float_from_integer, integer_from_float, generic_dtype, dtypes):
        if sentence := describe(got, expected):
            return sentence
    return f"A `{expected}` is expected here, and this is a `{got}`; Mojo converts nothing implicitly."


def integers(got: str, expected: str) -> str | None:
    """Explain Int against Int32 and the like."""
    if INTEGER.fullmatch(got) and INTEGER.fullmatch(expected):
        return f"{SIZES} while indices are Int, and Mojo converts neither implicitly: `{expected}(...)`."
    return None


def float_from_integer(got: str, expected: str) -> str | None:
    """Explain an Int in place of a float."""
    if INTEGER.fullmatch(got) and FLOAT.fullmatch(expected):
        return f"An integer is not converted to a float implicitly: `{spell_type(expected)}(...)`, as in `Scalar[accum](columns)`."
    return None


def integer_from_float(got: str, expected: str) -> str | None:
    """Explain a float in place of an Int, as in a sum that starts with 0."""
    if FLOAT.fullmatch(got) and INTEGER.fullmatch(expected):
        return (
            f"This is a float where `{expected}` is expected. If this is a sum: `var total = 0` is an Int and stays one, and a sum of "
            f"floats begins as `var total = Scalar[accum](0)`. Else a float becomes an integer by `{expected}(...)`."
        )
    return None


def generic_dtype(got: str, expected: str) -> str | None:
    """Explain a vector with a parametric dtype in place of a fixed dtype, or the reverse."""
    have, want = (re.fullmatch(r"SIMD\[(.+), (.+)\]", side) for side in (got, expected))
    if have and want and have[1] != want[1]:
        return (
            f"The compiler does not know that `{have[1]}` is `{want[1]}` here, even inside `comptime if`: "
            f"`.cast[...]()` converts the value, `rebind[{expected}](...)` states that the types are the same."
        )
    return None


def dtypes(got: str, expected: str) -> str | None:
    """Explain two floats of different dtype."""
    if "Float64" in (got, expected):
        return (
            "A number with a point, as in `var total = 0.0`, is a Float64, and Mojo converts nothing implicitly: "
            "a sum begins in its own dtype, `var total = Scalar[accum](0)`."
        )
    if expected == "Scalar[sum_dtype]":
        return (
            "The sums that all blocks share have a dtype of their own, and a plain `+=` would lose additions: "
            "`atomic_add(sums, index, value)` converts and adds. See shared/common.mojo."
        )
    if FLOAT.fullmatch(got) and FLOAT.fullmatch(expected):
        return (
            "Two dtypes meet, and Mojo converts neither implicitly. Read with `x[row, h].cast[accum]()`, compute in "
            "accum, and write with `.cast[dtype]()`. See `row_statistics` in shared/common.mojo."
        )
    return None


def spell_type(name: str) -> str:
    """Return a scalar type as it is written in code; the element type of a tensor by its dtype."""
    return "Scalar[dtype]" if name.endswith("ElementType") else name


def failure_text(diagnostics: Sequence[Diagnostic], output: str, path: Path) -> str:
    """Describe a failed compilation in a few lines: the compiler's first error, its reason, and an
    explanation.

    Args:
        diagnostics: The located messages of the compiler.
        output: Everything that it printed.
        path: The package or file that was compiled; other files in a message were generated.
    """
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.kind == "error"]
    if not errors:
        return output.strip()
    first = errors[0]
    after = list(diagnostics)[list(diagnostics).index(first) + 1 :]
    notes = [diagnostic.message for diagnostic in after if diagnostic.kind == "note"]
    constraints = re.findall(r"note: (constraint failed: .*)", output)
    lines = [str(first), *shown_code(first)]
    if vague(first.message):
        # The innermost note in the package is the learner's line; the standard library's come as plain text. The
        # reason is at the bottom of the chain.
        inner = [note for note in after if note.kind == "note" and Path(note.file).is_relative_to(path)][-1:]
        if inner and not Path(first.file).is_relative_to(
            path
        ):  # the program that calls it is not the learner's
            lines = []
        lines += [line for note in inner for line in (str(note), *(() if lines else shown_code(note)))]
        lines += [f"   {constraints[-1]}"] if constraints else []
    if sentence := explain(first, [*constraints[::-1], *notes]):
        lines.append(f"   -> {sentence}")
    others = [f"also {error}" for error in errors[1:] if error.line != first.line or error.file != first.file]
    lines += others[:SHOWN] + ([f"(and {len(others) - SHOWN} more)"] if len(others) > SHOWN else [])
    return "\n".join(lines)


def shown_code(diagnostic: Diagnostic) -> list[str]:
    """Return the line of code of a message, and a caret below its column; empty if unknown."""
    code = diagnostic.text.rstrip()
    if not code.strip():
        return []
    indent = len(code) - len(code.lstrip())
    return [f"    {code.lstrip()}", f"    {' ' * max(0, diagnostic.column - 1 - indent)}^"]
