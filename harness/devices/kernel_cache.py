"""Compile kernels one by one: launches are cached apart from the PTX, so an edit compiles only the changed
kernel.

A recording is cached in two parts. The plan of a variant, its tensors and launches with geometry and argument
bytes, depends on the host code only; each kernel's PTX depends on the items that the kernel needs, its own
text included (`harness.toolchain.mojo_items`). If the plan is cached, missing kernels are compiled by a
program of their own, from a package with nothing else: no launch code, no CPU path, no other kernel. Other
packages are recorded as a whole: kernels with parameters other than dtypes and numbers, or a package that is
not parsed.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from harness.toolchain.cache import cache_folder, digest, keep_text, read_text, staging
from harness.toolchain.diagnostics import Diagnostic, parse_diagnostics
from harness.toolchain.mojo_items import Item, Items, parts
from harness.toolchain.packages import OpPackage, compile_failed, mojo_version, run_mojo
from harness.vgpu.ptx.parser import plain_files

WHAT = "the recorded launches"
MARK = "//@ "
LAUNCH = re.compile(
    r"^(?P<indent>[ \t]*)(?P<call>[\w.]+\.launch\[(?P<function>\w+)"
    r"(?:\[(?P<parameters>(?:[^\[\]=]|\[[^\[\]=]*\])*)\])?\]\()",
    re.MULTILINE,
)
LAUNCHED = re.compile(r"\.launch\[\s*(\w+)")
DTYPE = re.compile(r"b?float\d+\w*|u?int\d+|bool")
NUMBER = re.compile(r"-?\d+|True|False")
PACKAGE = "{package}"
"""Placeholder of the op package's folder in cached PTX."""


@dataclass(frozen=True)
class Instance:
    """A kernel: its function, and the values of its parameters as they are written."""

    function: str
    parameters: tuple[str, ...] = ()

    @property
    def spelled(self) -> str:
        """The kernel's spelling in Mojo."""
        values = (f"DType.{value}" if DTYPE.fullmatch(value) else value for value in self.parameters)
        return f"{self.function}[{', '.join(values)}]" if self.parameters else self.function

    @property
    def is_plain(self) -> bool:
        """Check whether every parameter can be written down: a dtype, a whole number, a truth value."""
        return all(DTYPE.fullmatch(value) or NUMBER.fullmatch(value) for value in self.parameters)


def mark_launches(text: str) -> str:
    """Make launch code print which kernel it launches, with the values of its parameters; lines stay in place."""

    def mark(match: re.Match) -> str:
        values = "".join(f", {part}" for part in parts(match["parameters"] or ""))
        return f'{match["indent"]}print("{MARK}instance", "{match["function"]}"{values}); {match["call"]}'

    return LAUNCH.sub(mark, text)


@lru_cache(maxsize=8)
def items_of(texts: tuple[tuple[str, str], ...]) -> Items:
    """Return the items of a package's files."""
    return Items(dict(texts))


@dataclass
class Kernels:
    """The kernels of one package under some compile-time values, cached or to be compiled.

    Args:
        package: The op package, read once.
        flags: Compiler flags that its code may query.
    """

    package: OpPackage
    flags: tuple[str, ...]
    items: Items = field(init=False)

    def __post_init__(self):
        files = ((str(path.relative_to(self.package.path)), path) for path in self.package.files)
        self.items = items_of(
            tuple((name, path.read_text("utf-8", errors="replace")) for name, path in files)
        )

    # ---- Plans ----------------------------------------------------------------------------------------------

    def host(self, program: Sequence[str]) -> str:
        """Return a digest of everything that determines the launches and their arguments; `program` are the
        texts that record them."""
        launched = {name for source in self.items.sources.values() for item in source.items
                    for name in LAUNCHED.findall(item.text)}  # fmt: skip
        needed = self.items.find_needed(words_of(program), but=launched)
        return digest([mojo_version(), *program, *self.flags, *self.describe(needed)])

    def launching(self, program: Iterable[str]) -> dict[str, str]:
        """Return file -> the part of its text that launches what `program` records: less work for the
        compiler."""
        return self.items.cut_out(self.items.find_needed(words_of(program)))

    def keep_plan(self, file: Path, lines: Iterable[str], kernels: dict[str, Instance]) -> None:
        """Cache the lines of a variant's case, and which kernel each symbol is."""
        used = {line.split(" ")[3] for line in lines if line.startswith(f"{MARK}launch ")}
        if not used <= kernels.keys():
            return
        heads = [
            " ".join([f"{MARK}kernel", s, kernels[s].function, *kernels[s].parameters]) for s in sorted(used)
        ]
        text = "\n".join([*heads, *lines, ""])
        keep_text(file, lambda: text, WHAT)

    def describe(self, items: Iterable[Item]) -> list[str]:
        """Return the texts of items and the imports that they use, by which a change is noticed."""
        items = list(items)
        imports = self.items.imports_of(items)
        return [
            *(item.text for item in items),
            *(line for file in imports for line in (file, *imports[file])),
        ]

    # ---- PTX ------------------------------------------------------------------------------------------------

    def file_of(self, kernel: Instance) -> Path | None:
        """Return the cache file of a kernel's PTX; None if its text is missing or ambiguous."""
        if len(self.items.by_name.get(kernel.function, ())) != 1:
            return None
        parts = [
            mojo_version(),
            *self.flags,
            kernel.spelled,
            *self.describe(self.items.find_needed([kernel.function])),
        ]
        return cache_folder("kernels") / f"{digest(parts)}.txt"

    def keep_ptx(self, kernel: Instance, symbol: str, ptx: str, folder: Path) -> None:
        """Cache the PTX of a kernel; `folder` is where its package was when it was compiled."""
        file = self.file_of(kernel)
        if file is None:
            return
        places = [
            (item.file, item.line, len(item.lines)) for item in self.items.find_needed([kernel.function])
        ]
        head = json.dumps({"symbol": symbol, "items": places})
        text = ptx.replace(f'"{folder}/', f'"{PACKAGE}/')
        keep_text(file, lambda: f"{head}\n{text}", WHAT)

    def ptx(self, kernel: Instance, symbol: str) -> str | None:
        """Return the cached PTX of a kernel under this symbol, with the package's line numbers; None if it
        is not cached."""
        file = self.file_of(kernel)
        entry = read_text(file) if file else None
        if entry is None:
            return None
        head, _, text = entry.partition("\n")
        kept = json.loads(head)
        text = text.replace(kept["symbol"], symbol)
        now = self.items.find_needed([kernel.function])
        moved = {
            (then[0], number): number - then[1] + item.line
            for then, item in zip(kept["items"], now, strict=True)
            if then[1] != item.line
            for number in range(then[1], then[1] + then[2])
        }
        text = moved_lines(text, moved) if moved else text
        return text.replace(f'"{PACKAGE}/', f'"{self.package.path.resolve()}/')

    def compile(self, kernels: Sequence[Instance]) -> bool:
        """Compile kernels and cache their PTX; False if the package must be compiled as a whole.

        Raises CompileFailed with the compiler's diagnostics where one of them does not compile.
        """
        if not all(map(self.file_of, kernels)):
            return False
        output = compile_together([(self, kernels)])
        if output:
            self.refuse(kernels, output)
        return not output

    def refuse(self, kernels: Sequence[Instance], output: str) -> None:
        """Raise CompileFailed if this package caused the compiler's errors."""
        if self._speaks_of_the_package(parse_diagnostics(output), self.find_needed(kernels)):
            raise compile_failed(self.package.path, output)

    def find_needed(self, kernels: Iterable[Instance]) -> list[Item]:
        """Return the items that kernels need."""
        return self.items.find_needed({kernel.function for kernel in kernels})

    def write(self, folder: Path, kernels: Sequence[Instance]) -> None:
        """Write a package `op` of what the kernels need, into a new folder."""
        for file, text in self.items.cut_out(self.find_needed(kernels)).items():
            path = folder / "op" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            for parent in [path.parent, *path.parent.parents]:
                (parent / "__init__.mojo").touch()
                if parent == folder:
                    break

    def _speaks_of_the_package(self, diagnostics: Sequence[Diagnostic], needed: Sequence[Item]) -> bool:
        """Check whether a compile that failed would fail alike with the whole package: an error in a line of it, about no name
        that is not there only because it was left out."""
        first = next((diagnostic for diagnostic in diagnostics if diagnostic.kind == "error"), None)
        if first is None or not first.file.startswith(f"{self.package.path.resolve()}/"):
            return False
        statements = (i for source in self.items.sources.values() for i in source.imports)
        own = {here for i in statements if i.module.startswith(".") for _, here in i.names}
        left_out = ({*self.items.by_name} | own) - {item.name for item in needed}
        return not left_out & set(re.findall(r"'(\w+)'", first.message))


def compile_together(expected: Sequence[tuple[Kernels, Sequence[Instance]]]) -> str:
    """Compile kernels of some packages, all with the same flags, as one program, and cache their PTX.

    Returns "" or the compiler's error message, with the packages' own paths.
    """
    with staging(cache_folder("kernels"), WHAT) as folder:
        folder = folder.resolve()
        copies = [folder / f"copy_{number}" for number in range(len(expected))]
        flat = [
            (copy, package, kernel)
            for copy, (package, kernels) in zip(copies, expected, strict=True)
            for kernel in kernels
        ]
        for copy, (package, kernels) in zip(copies, expected, strict=True):
            package.write(copy, kernels)
        main = folder / "main.mojo"
        main.write_text(_program(flat), encoding="utf-8")
        result = run_mojo(
            "run", "-g1", "--diagnostic-format", "json", "--target-accelerator", "sm_90a",
            *expected[0][0].flags, str(main),
        )  # fmt: skip
        if result.returncode != 0:
            output = result.stdout + result.stderr
            for copy, (package, _) in zip(copies, expected, strict=True):
                output = output.replace(f"{copy}/op/", f"{package.package.path.resolve()}/")
            return output
        texts = re.split(
            rf"^{MARK}ptx (\S+)\n", plain_symbols(plain_files(result.stdout)), flags=re.MULTILINE
        )[1:]
        for (copy, package, kernel), symbol, ptx in zip(flat, texts[::2], texts[1::2], strict=True):
            package.keep_ptx(kernel, symbol, ptx.rstrip("\n"), copy / "op")
    return ""


def words_of(texts: Iterable[str]) -> set[str]:
    """Return every word in some texts."""
    return {word for text in texts for word in re.findall(r"\w+", text)}


def _program(flat: Sequence[tuple[Path, Kernels, Instance]]) -> str:
    """Return the program that prints the PTX of kernels, each from the copy of its package next to it."""
    imports, calls = [], []
    for number, (copy, package, kernel) in enumerate(flat):
        module = package.items.by_name[kernel.function][0].file.removesuffix(".mojo").replace("/", ".")
        name = f"{copy.name}_{kernel.function}"
        imports.append(f"from {copy.name}.op.{module} import {kernel.function} as {name}")
        spelled = name + kernel.spelled.removeprefix(kernel.function)
        calls += [
            f'    var k{number} = compile_info[{spelled}, emission_kind="asm", target=TARGET]()',
            f'    print("{MARK}ptx", k{number}.function_name)',
            f"    print(k{number}.asm)",
        ]
    head = ["from std.compile import compile_info", "from max.gpu.host.compile import get_gpu_target"]
    target = ['comptime TARGET = get_gpu_target["sm_90a"]()', "def main():"]
    return "\n".join([*head, *dict.fromkeys(imports), *target, *calls, ""])


def plain_symbols(text: str) -> str:
    """Return the symbols as compiled from the package alone, without the folder of its copy."""
    return re.sub(r"\bcopy_\d+_op_", "op_", text)


def moved_lines(ptx: str, moved: dict[tuple[str, int], int]) -> str:
    """Return PTX with a line table for moved code; `moved` is (file, line) -> line, with files as they are
    cached."""
    files = {
        number: path.removeprefix(f"{PACKAGE}/")
        for number, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.MULTILINE)
    }

    def place(match: re.Match) -> str:
        line = moved.get((files.get(match[2], ""), int(match[3])))
        return f"{match[1]}{match[2]} {line if line else match[3]}"

    text = re.sub(r"(\.loc\s+)(\d+) (\d+)", place, ptx)
    return re.sub(r"(inlined_at )(\d+) (\d+)", place, text)
