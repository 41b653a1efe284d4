"""Generate the Mojo program that records a puzzle's launches from the ops of its spec.

`Call.launch` is the Mojo text of a call with two abbreviations: `...` for the recorder and the op's tensors
in order, and `=` for the tensors as named arguments. Both omit tensors that the text names elsewhere.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.errors import DamagedFile
from harness.spec.catalogue import find_puzzle
from harness.spec.ops import ACCUM_DTYPE, RUN_DTYPE, Argument, Call
from harness.spec.puzzle import Puzzle
from harness.spec.rungs import MojoRung

STANDARD_NAMES = {"ceildiv": "std.math", "next_power_of_two": "std.bit", "accum_type": "op.shared.common"}
"""Names from outside the op package that expressions may use, and the modules that define them."""


@functools.cache
def generate_program_for(puzzle: str, package: Path) -> str:
    return generate_program(find_puzzle(puzzle), package)


def generate_program(puzzle: Puzzle, package: Path) -> str:
    """Return the text of the program, which imports the launch functions from the modules of `package`.

    Dtype and variants are compile-time definitions, `-D DTYPE=float32 -D VARIANT_fused`. Raises DamagedFile
    if a launch or a size uses an undefined name.
    """
    rung = puzzle.mojo_rung
    assert rung, puzzle.name
    bodies = {variant: generate_body(puzzle, rung, variant) for variant in puzzle.variants}
    flags = {variant: f"VARIANT_{variant}" for variant in puzzle.variants}
    constants = [
        'comptime dtype = get_defined_dtype["DTYPE", DType.float32]()',
        "comptime accum = accum_type[dtype]",
        *(f'comptime {variant.upper()} = is_defined["{flag}"]()' for variant, flag in flags.items()),
        f"comptime DEFAULT = {' and '.join(f'not {variant.upper()}' for variant in bodies)}",
    ]
    if "accum" not in find_identifiers(str(bodies)):
        del constants[1]
    calls = [
        line
        for variant in bodies
        for line in (
            f"    comptime if {variant.upper()}{'' if variant in puzzle.optional_variants else ' or DEFAULT'}:",
            f"        record_{variant}(recorder, dims)",
        )
    ]
    functions = [
        line
        for variant, lines in bodies.items()
        for line in ("", "", *declare_function(f"record_{variant}"), *lines)
    ]
    text = [
        *generate_imports(
            package, rung, {*find_identifiers("\n".join([*constants, *functions]))} - {"dtype", "accum"}
        ),
        "from recorder import Recorder",
        "",
        *constants,
        "",
        "",
        *declare_function("record_launches"),
        *calls,
        *functions,
    ]
    return "\n".join(text) + "\n"


def declare_function(name: str) -> list[str]:
    return [f"def {name}(mut recorder: Recorder, dims: List[Int]) raises:"]


def find_identifiers(text: str) -> set[str]:
    """Return the identifiers in Mojo text, except after a dot or in quotes."""
    return set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", text)))


def generate_body(puzzle: Puzzle, rung: MojoRung, variant: str) -> list[str]:
    """Return the statements that record one variant: its sizes, tensors and launches."""
    calls = puzzle.variants[variant]
    written = {name: shape for call in calls for name, shape in call.op.writes.items()}
    read = {n: shape for call in calls for n, shape in call.op.reads.items() if n not in written}
    tensors = [
        f"    var {name} = {declare_tensor(name, argument)}.as_imm()" for name, argument in read.items()
    ]
    tensors += [f"    var {name} = {declare_tensor(name, argument)}" for name, argument in written.items()]
    launches = [f"    {expand_launch(call, written)}" for call in calls]
    return [
        f'    recorder.case("{variant}", dims)',
        *declare_sizes(puzzle, rung, "\n".join([*tensors, *launches])),
        *tensors,
        *launches,
    ]


def declare_tensor(name: str, argument: Argument) -> str:
    kind = {RUN_DTYPE: "dtype", ACCUM_DTYPE: "accum"}.get(argument.dtype, f"DType.{argument.dtype}")
    return f'recorder.tensor[{kind}]("{name}", {" * ".join(map(str, argument.shape))})'


def declare_sizes(puzzle: Puzzle, rung: MojoRung, text: str) -> Iterator[str]:
    """Yield the declarations of the sizes that `text` uses, directly or through other sizes."""
    definitions = {name: f"dims[{i}]" for i, name in enumerate(puzzle.dim_names)} | dict(rung.sizes)
    used_names = find_identifiers(text)
    for name in reversed(definitions):
        used_names |= find_identifiers(definitions[name]) if name in used_names else set()
    yield from (f"    var {name} = {value}" for name, value in definitions.items() if name in used_names)


def expand_launch(call: Call, written: Mapping[str, Argument]) -> str:
    identifiers = find_identifiers(call.launch)
    read = {name: f"{name}.as_imm()" if name in written else name for name in call.op.reads}
    tensors = {n: text for n, text in ({n: n for n in call.op.writes} | read).items() if n not in identifiers}
    text = call.launch.replace("...", ", ".join(["recorder", *tensors.values()]))
    return text.replace("(=", "(" + ", ".join(f"{name}={text}" for name, text in tensors.items()))


def generate_imports(package: Path, rung: MojoRung, names: set[str]) -> list[str]:
    """Return imports from the package and STANDARD_NAMES. Raises DamagedFile for a missing launch."""
    modules: dict[str, set[str]] = {"std.sys": {"get_defined_dtype", "is_defined"}}
    for name in names & STANDARD_NAMES.keys():
        modules.setdefault(STANDARD_NAMES[name], set()).add(name)
    # If several modules define a name, the one with the blanks takes precedence.
    source = Path(rung.file).name
    files = sorted(package.glob("*.mojo"), key=lambda p: (p.name != source, p.name))
    missing = {name for name in names if name.startswith("launch_")}
    undefined = set(names)
    for path in files:
        defined = re.findall(r"^(?:def|struct|comptime) (\w+)", path.read_text("utf-8"), re.MULTILINE)
        if defined_here := undefined & set(defined):
            modules.setdefault(f"op.{path.stem}", set()).update(defined_here)
            undefined -= defined_here
    if missing := sorted(missing & undefined):
        raise DamagedFile(f"{package.parent.name}: no file of its op package defines {', '.join(missing)}")
    return [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(modules.items())]
