"""Generate the Mojo program that records a puzzle's launches from the ops of its spec: sizes, tensors, one
launch per call.

`Call.launch` is the Mojo text of a call, with two abbreviations: `...` stands for the recorder and the op's
tensors in order, `=` for the tensors as named arguments. Tensors that the text names itself are omitted from
both.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.errors import DamagedFile
from harness.spec.catalogue import find_puzzle
from harness.spec.ops import ACCUM, RUN, Argument, Call
from harness.spec.puzzle import Puzzle
from harness.spec.rungs import MojoRung

STANDARD = {"ceildiv": "std.math", "next_power_of_two": "std.bit", "accum_type": "op.shared.common"}
"""Names that an expression may use in addition to those of the op package, and the modules that define them."""


@functools.cache
def program_of(puzzle: str, package: Path) -> str:
    """Return the recording program of a puzzle by its name, as `program` does."""
    return program(find_puzzle(puzzle), package)


def program(puzzle: Puzzle, package: Path) -> str:
    """Return the text of the program; `package` holds the modules that the launches are imported from.

    Its dtype and its variants are compile-time names, as in `-D DTYPE=float32 -D VARIANT_fused`; without a VARIANT_ name it
    records the default variants.

    Raises DamagedFile for a launch or a size that uses a name which nothing defines.
    """
    rung = puzzle.mojo_rung
    assert rung, puzzle.name
    bodies = {variant: body(puzzle, rung, variant) for variant in puzzle.variants}
    flags = {variant: f"VARIANT_{variant}" for variant in puzzle.variants}
    constants = [
        'comptime dtype = get_defined_dtype["DTYPE", DType.float32]()',
        "comptime accum = accum_type[dtype]",
        *(f'comptime {variant.upper()} = is_defined["{flag}"]()' for variant, flag in flags.items()),
        f"comptime DEFAULT = {' and '.join(f'not {variant.upper()}' for variant in bodies)}",
    ]
    if "accum" not in words(str(bodies)):
        del constants[1]
    calls = [
        line
        for variant in bodies
        for line in (
            f"    comptime if {variant.upper()}{'' if variant in puzzle.on_request else ' or DEFAULT'}:",
            f"        record_{variant}(recorder, dims)",
        )
    ]
    functions = [
        line for variant, lines in bodies.items() for line in ("", "", *head(f"record_{variant}"), *lines)
    ]
    text = [
        *imports(package, rung, {*words("\n".join([*constants, *functions]))} - {"dtype", "accum"}),
        "from recorder import Recorder",
        "",
        *constants,
        "",
        "",
        *head("record_launches"),
        *calls,
        *functions,
    ]
    return "\n".join(text) + "\n"


def head(name: str) -> list[str]:
    """Return the first line of a function."""
    return [f"def {name}(mut recorder: Recorder, dims: List[Int]) raises:"]


def words(text: str) -> set[str]:
    """Return the identifiers of a Mojo text, without those that follow a dot and those in quotes."""
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", text)))


def body(puzzle: Puzzle, rung: MojoRung, variant: str) -> list[str]:
    """Return the statements that record one variant: its sizes, its tensors, its launches."""
    calls = puzzle.variants[variant]
    written = {name: shape for call in calls for name, shape in call.op.writes.items()}
    read = {n: shape for call in calls for n, shape in call.op.reads.items() if n not in written}
    tensors = [f"    var {name} = {tensor(name, argument)}.as_imm()" for name, argument in read.items()]
    tensors += [f"    var {name} = {tensor(name, argument)}" for name, argument in written.items()]
    launches = [f"    {expand(call, written)}" for call in calls]
    return [
        f'    recorder.case("{variant}", dims)',
        *sizes(puzzle, rung, "\n".join([*tensors, *launches])),
        *tensors,
        *launches,
    ]


def tensor(name: str, argument: Argument) -> str:
    """Return a tensor of as many elements as its shape has."""
    kind = {RUN: "dtype", ACCUM: "accum"}.get(argument.dtype, f"DType.{argument.dtype}")
    return f'recorder.tensor[{kind}]("{name}", {" * ".join(map(str, argument.shape))})'


def sizes(puzzle: Puzzle, rung: MojoRung, text: str) -> Iterator[str]:
    """Return the sizes that a text uses, and those that these use."""
    known = {name: f"dims[{i}]" for i, name in enumerate(puzzle.dim_names)} | dict(rung.sizes)
    used = words(text)
    for name in reversed(known):
        used |= words(known[name]) if name in used else set()
    yield from (f"    var {name} = {value}" for name, value in known.items() if name in used)


def expand(call: Call, written: Mapping[str, Argument]) -> str:
    """Return the launch of a call, its abbreviations written out."""
    named = words(call.launch)
    read = {name: f"{name}.as_imm()" if name in written else name for name in call.op.reads}
    tensors = {n: text for n, text in ({n: n for n in call.op.writes} | read).items() if n not in named}
    text = call.launch.replace("...", ", ".join(["recorder", *tensors.values()]))
    return text.replace("(=", "(" + ", ".join(f"{name}={text}" for name, text in tensors.items()))


def imports(package: Path, rung: MojoRung, names: set[str]) -> list[str]:
    """Return the imports of names of the package and the standard library."""
    modules: dict[str, set[str]] = {"std.sys": {"get_defined_dtype", "is_defined"}}
    for name in names & STANDARD.keys():
        modules.setdefault(STANDARD[name], set()).add(name)
    # Of modules that define the same name, the one with the blanks comes first.
    source = Path(rung.file).name
    files = sorted(package.glob("*.mojo"), key=lambda p: (p.name != source, p.name))
    missing = {name for name in names if name.startswith("launch_")}
    left = set(names)
    for path in files:
        defined = re.findall(r"^(?:def|struct|comptime) (\w+)", path.read_text("utf-8"), re.MULTILINE)
        if here := left & set(defined):
            modules.setdefault(f"op.{path.stem}", set()).update(here)
            left -= here
    if missing := sorted(missing & left):
        raise DamagedFile(f"{package.parent.name}: no file of its op package defines {', '.join(missing)}")
    return [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(modules.items())]
