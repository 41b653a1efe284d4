"""Explain diagnostics of the Mojo compiler to a learner, each in a sentence.

The rules match the wording of Mojo 1.2; other diagnostics are printed without an explanation.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from harness.invocation import format_command
from harness.toolchain.diagnostics import Diagnostic
from harness.toolchain.mojo_items import NOT_CODE, Items

CONVERSION = re.compile(
    r"(?:cannot be converted from '(?P<got>[^']+)' to '(?P<wanted>[^']+)'"
    r"|cannot implicitly convert '(?P<got2>[^']+)' value to '(?P<wanted2>[^']+)')"
)
INTEGER = re.compile(r"(U?Int\d*|Scalar\[\.u?int\d+\])")
FLOAT = re.compile(r"(B?Float\d+|Scalar\[.*\]|SIMD\[.*, 1\]|.*ElementType)")

# Explanations as (pattern, sentence); the first pattern that matches the message or the line of code is used.
# {0}, {1}, ... are the groups of the pattern.
NAME_EXPLANATIONS = {
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
MAX_SHOWN = 3
"""Maximum number of errors shown after the first, one line each."""
MESSAGE_RULES: tuple[tuple[str, str], ...] = (
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
# Mistakes for which the compiler reports only consequential errors; the pattern matches the line of code.
CODE_RULES: tuple[tuple[str, str], ...] = (
    (r"^\s*alias\s", NAME_EXPLANATIONS["alias"]),
    (r"^\s*let\s", NAME_EXPLANATIONS["let"]),
    (r"\b(inout|owned|borrowed)\s+\w+\s*:", "Argument conventions are now `mut x: T` (was inout) and `var x: T` (was owned)."),
    (r"\bf(['\"]).*\{.*\1", 'Mojo\'s formatted text is `t"n = {n}"`, with a t.'),
    (r"UnsafePointer", "`UnsafePointer` is now `Pointer`, with an origin: `ImmPtr[dtype]`, `MutPtr[dtype]` of shared/common.mojo."),
)  # fmt: skip


# (pattern of the message or note, pattern of the code, sentence); {0}, ... are groups of the code's pattern.
MESSAGE_AND_CODE_RULES: tuple[tuple[str, str, str], ...] = (
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
    """Explain an error and its notes in a sentence; return None if no rule matches."""
    sentence = find_explanation([diagnostic.message, *notes], diagnostic)
    if sentence and sentence.startswith(SIZES_SENTENCE):
        sentence = sentence.replace(SIZES_SENTENCE, describe_sizes(diagnostic.file, diagnostic.line), 1)
    return sentence and fill_in_commands(sentence, diagnostic.file)


SIZES_SENTENCE = "A kernel's sizes arrive as Int32"


def describe_sizes(file: str, line: int) -> str:
    """Return a sentence about the Int32 sizes of the kernel at a line, with their names if it has any."""
    try:
        item = Items({file: Path(file).read_text(encoding="utf-8")}).find_enclosing(file, line)
    except (OSError, UnicodeDecodeError):
        return SIZES_SENTENCE
    code = NOT_CODE.sub(" ", item.text) if item else ""
    head = code[: code.find("):")]  # the arguments
    names = re.findall(r"\b(\w+): Int32\b", head)
    converted = re.search(rf"\bvar (\w+) = Int\(({'|'.join(names)})\)", code) if names else None
    subject = f"This kernel's sizes ({', '.join(names)}) arrive as Int32" if names else SIZES_SENTENCE
    return f"{subject}{f' (`{converted[1]}` is `{converted[2]}` as an Int)' if converted else ''}"


def find_explanation(texts: Sequence[str], diagnostic: Diagnostic) -> str | None:
    """Look up the explanation; `texts` are the error's message and its notes."""
    unknown_name = re.match(r"use of unknown declaration '(\w+)'", diagnostic.message)
    if unknown_name and unknown_name[1] in NAME_EXPLANATIONS:
        return NAME_EXPLANATIONS[unknown_name[1]]
    if re.search(r"^(expected|unexpected|expressions must not|statements must|failed to infer)", texts[0]):
        for pattern, sentence in CODE_RULES:
            if re.search(pattern, diagnostic.text):
                return sentence
    for pattern, code, sentence in MESSAGE_AND_CODE_RULES:
        if re.search(pattern, "\n".join(texts)) and (match := re.search(code, diagnostic.text)):
            return sentence.format(*match.groups())
    if not is_vague(diagnostic.message):
        return explain_conversion(diagnostic.message) or explain_message(diagnostic.message)
    # The cause is in a note; an immutable left side takes precedence over mismatched types.
    for rule in (explain_message, explain_conversion):
        for text in texts:
            if sentence := rule(text):
                return sentence
    return None


def is_vague(message: str) -> bool:
    """Return whether a message only states that a call failed; the cause is in a note."""
    return message.startswith(("function instantiation failed", "no matching", "call expansion failed"))


def explain_message(text: str) -> str | None:
    for pattern, sentence in MESSAGE_RULES:
        if match := re.search(pattern, text):
            return sentence.format(*match.groups())
    return None


def fill_in_commands(sentence: str, file: str) -> str:
    """Replace the workbook's commands in a sentence with the command lines that the user must type.

    `reset pNN` is completed with the puzzle of a file in problems/.
    """
    puzzle = next((name for folder, name in pairwise(Path(file).parts) if folder == "problems"), "pNN")
    command = re.compile(r"\bworkbook ((?:doctor|reset pNN)\b)")
    return command.sub(lambda match: format_command(match[1].replace("pNN", puzzle)), sentence)


def explain_conversion(text: str) -> str | None:
    """Explain a type mismatch: integers, floats of two dtypes, generic vectors."""
    match = CONVERSION.search(text)
    if not match or "unresolved parameter" in text:
        return None
    got, expected = match["got"] or match["got2"], match["wanted"] or match["wanted2"]
    floats = (explain_float_from_integer, explain_integer_from_float)
    for describe in (explain_integers, *floats, explain_generic_dtype, explain_dtypes):
        if sentence := describe(got, expected):
            return sentence
    return f"A `{expected}` is expected here, and this is a `{got}`; Mojo converts nothing implicitly."


def explain_integers(got: str, expected: str) -> str | None:
    if INTEGER.fullmatch(got) and INTEGER.fullmatch(expected):
        return f"{SIZES_SENTENCE} while indices are Int, and Mojo converts neither implicitly: `{expected}(...)`."
    return None


def explain_float_from_integer(got: str, expected: str) -> str | None:
    if INTEGER.fullmatch(got) and FLOAT.fullmatch(expected):
        return f"An integer is not converted to a float implicitly: `{format_type(expected)}(...)`, as in `Scalar[accum](columns)`."
    return None


def explain_integer_from_float(got: str, expected: str) -> str | None:
    """Explain a float where an Int is expected, such as a sum that starts with 0."""
    if FLOAT.fullmatch(got) and INTEGER.fullmatch(expected):
        return (
            f"This is a float where `{expected}` is expected. If this is a sum: `var total = 0` is an Int and stays one, and a sum of "
            f"floats begins as `var total = Scalar[accum](0)`. Else a float becomes an integer by `{expected}(...)`."
        )
    return None


def explain_generic_dtype(got: str, expected: str) -> str | None:
    """Explain a vector of a parametric dtype where a fixed dtype is expected, or the reverse."""
    have, want = (re.fullmatch(r"SIMD\[(.+), (.+)\]", name) for name in (got, expected))
    if have and want and have[1] != want[1]:
        return (
            f"The compiler does not know that `{have[1]}` is `{want[1]}` here, even inside `comptime if`: "
            f"`.cast[...]()` converts the value, `rebind[{expected}](...)` states that the types are the same."
        )
    return None


def explain_dtypes(got: str, expected: str) -> str | None:
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


def format_type(name: str) -> str:
    """Return a scalar type as written in code; a tensor's element type becomes Scalar[dtype]."""
    return "Scalar[dtype]" if name.endswith("ElementType") else name


def describe_failure(diagnostics: Sequence[Diagnostic], output: str, path: Path) -> str:
    """Describe a failed compilation of the package `path`: the first error, its cause, and an explanation."""
    errors = [diagnostic for diagnostic in diagnostics if diagnostic.kind == "error"]
    if not errors:
        return output.strip()
    first = errors[0]
    following = list(diagnostics)[list(diagnostics).index(first) + 1 :]
    notes = [diagnostic.message for diagnostic in following if diagnostic.kind == "note"]
    constraints = re.findall(r"note: (constraint failed: .*)", output)
    lines = [str(first), *format_code(first)]
    if is_vague(first.message):
        # The innermost note in the package has the learner's line; notes of the standard library have no
        # location. The last constraint in the chain is the cause.
        inner_notes = [
            note for note in following if note.kind == "note" and Path(note.file).is_relative_to(path)
        ][-1:]
        if inner_notes and not Path(first.file).is_relative_to(
            path
        ):  # the learner did not write the calling program
            lines = []
        lines += [line for note in inner_notes for line in (str(note), *(() if lines else format_code(note)))]
        lines += [f"   {constraints[-1]}"] if constraints else []
    if sentence := explain(first, [*constraints[::-1], *notes]):
        lines.append(f"   -> {sentence}")
    other_errors = [
        f"also {error}" for error in errors[1:] if error.line != first.line or error.file != first.file
    ]
    lines += other_errors[:MAX_SHOWN]
    lines += [f"(and {len(other_errors) - MAX_SHOWN} more)"] if len(other_errors) > MAX_SHOWN else []
    return "\n".join(lines)


def format_code(diagnostic: Diagnostic) -> list[str]:
    """Return a diagnostic's line of code and a caret below its column, or [] if unknown."""
    code = diagnostic.text.rstrip()
    if not code.strip():
        return []
    indent = len(code) - len(code.lstrip())
    return [f"    {code.lstrip()}", f"    {' ' * max(0, diagnostic.column - 1 - indent)}^"]
