"""Cache launches and each kernel's PTX separately, so that an edit recompiles only the edited kernel.

A variant's plan (its tensors and launches) depends only on the host code, and a kernel's PTX only on the
top-level items that it uses (`harness.toolchain.mojo_items`). If the plan is cached, missing kernels are
compiled from a package of these items only. Packages that cannot be parsed, or whose kernels have parameters
other than dtypes, integers and booleans, are recorded as a whole.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from harness.toolchain.cache import (
    cache_text,
    compute_digest,
    create_staging_folder,
    get_cache_folder,
    read_cached_text,
)
from harness.toolchain.diagnostics import Diagnostic, parse_diagnostics
from harness.toolchain.mojo_items import Item, Items, split_arguments
from harness.toolchain.packages import OpPackage, get_mojo_version, make_compile_error, run_mojo
from harness.vgpu.ptx.parser import decode_file_names

CACHE_CONTENTS = "the recorded launches"
LINE_PREFIX = "//@ "
LAUNCH_CALL = re.compile(
    r"^(?P<indent>[ \t]*)(?P<call>[\w.]+\.launch\[(?P<function>\w+)"
    r"(?:\[(?P<parameters>(?:[^\[\]=]|\[[^\[\]=]*\])*)\])?\]\()",
    re.MULTILINE,
)
LAUNCHED_FUNCTION = re.compile(r"\.launch\[\s*(\w+)")
DTYPE_PATTERN = re.compile(r"b?float\d+\w*|u?int\d+|bool")
NUMBER_PATTERN = re.compile(r"-?\d+|True|False")
PACKAGE_PLACEHOLDER = "{package}"
"""Placeholder for the op package's folder in cached PTX."""


@dataclass(frozen=True)
class KernelInstance:
    """A kernel: its function, and the values of its compile-time parameters as Mojo text."""

    function: str
    parameters: tuple[str, ...] = ()

    @property
    def source_text(self) -> str:
        values = (f"DType.{value}" if DTYPE_PATTERN.fullmatch(value) else value for value in self.parameters)
        return f"{self.function}[{', '.join(values)}]" if self.parameters else self.function

    @property
    def has_source_text(self) -> bool:
        """True if every parameter is a dtype, integer or boolean, which can be written as source text."""
        return all(
            DTYPE_PATTERN.fullmatch(value) or NUMBER_PATTERN.fullmatch(value) for value in self.parameters
        )


def mark_launches(text: str) -> str:
    """Insert a print of the kernel and parameter values before each launch; keep all line numbers."""

    def mark(match: re.Match) -> str:
        values = "".join(f", {part}" for part in split_arguments(match["parameters"] or ""))
        return (
            f'{match["indent"]}print("{LINE_PREFIX}instance", "{match["function"]}"{values}); {match["call"]}'
        )

    return LAUNCH_CALL.sub(mark, text)


@lru_cache(maxsize=8)
def parse_items(texts: tuple[tuple[str, str], ...]) -> Items:
    return Items(dict(texts))


@dataclass
class KernelCache:
    """The kernels of one package for given compiler flags, loaded from the cache or compiled."""

    package: OpPackage
    flags: tuple[str, ...]
    items: Items = field(init=False)

    def __post_init__(self):
        names = {str(path.relative_to(self.package.path)): path for path in self.package.files}
        texts = ((name, path.read_text("utf-8", errors="replace")) for name, path in names.items())
        self.items = parse_items(tuple(texts))

    # ---- Plans ---------------------------------------------------------------------------------------------

    def compute_host_digest(self, program: Sequence[str]) -> str:
        """Return a digest of all host code that determines the launches recorded by `program`."""
        launched_functions = {name for source in self.items.sources.values() for item in source.items
                    for name in LAUNCHED_FUNCTION.findall(item.text)}  # fmt: skip
        needed = self.items.find_dependencies(find_identifiers(program), exclude=launched_functions)
        return compute_digest([get_mojo_version(), *program, *self.flags, *self.list_source_texts(needed)])

    def extract_launch_code(self, program: Iterable[str]) -> dict[str, str]:
        """Return file -> the part of its text that the launches recorded by `program` need."""
        return self.items.extract_items(self.items.find_dependencies(find_identifiers(program)))

    def cache_plan(self, file: Path, lines: Iterable[str], kernels: dict[str, KernelInstance]) -> None:
        """Cache the recorded lines of a variant's case, and the kernel of each symbol in them."""
        symbols = sorted({line.split(" ")[3] for line in lines if line.startswith(f"{LINE_PREFIX}launch ")})
        if not kernels.keys() >= {*symbols}:
            return
        header_lines = [
            " ".join([f"{LINE_PREFIX}kernel", s, kernels[s].function, *kernels[s].parameters])
            for s in symbols
        ]
        text = "\n".join([*header_lines, *lines, ""])
        cache_text(file, lambda: text, CACHE_CONTENTS)

    def list_source_texts(self, items: Iterable[Item]) -> list[str]:
        """Return the texts of items and of the imports they use, for a digest."""
        items = list(items)
        imports = self.items.find_imports(items)
        lines = [line for file in imports for line in (file, *imports[file])]
        return [*(item.text for item in items), *lines]

    # ---- PTX -----------------------------------------------------------------------------------------------

    def get_cache_file(self, kernel: KernelInstance) -> Path | None:
        """Return the cache file of a kernel's PTX; None if its function is missing or ambiguous."""
        if len(self.items.by_name.get(kernel.function, ())) != 1:
            return None
        needed = self.list_source_texts(self.items.find_dependencies([kernel.function]))
        parts = [get_mojo_version(), *self.flags, kernel.source_text, *needed]
        return get_cache_folder("kernels") / f"{compute_digest(parts)}.txt"

    def cache_ptx(self, kernel: KernelInstance, symbol: str, ptx: str, folder: Path) -> None:
        """Cache the PTX of a kernel whose package was compiled in `folder`."""
        file = self.get_cache_file(kernel)
        if file is None:
            return
        needed = self.items.find_dependencies([kernel.function])
        locations = [(item.file, item.line, len(item.lines)) for item in needed]
        head = json.dumps({"symbol": symbol, "items": locations})
        text = ptx.replace(f'"{folder}/', f'"{PACKAGE_PLACEHOLDER}/')
        cache_text(file, lambda: f"{head}\n{text}", CACHE_CONTENTS)

    def read_ptx(self, kernel: KernelInstance, symbol: str) -> str | None:
        """Return a kernel's cached PTX with the package's current line numbers; None if it is not cached."""
        file = self.get_cache_file(kernel)
        entry = read_cached_text(file) if file else None
        if entry is None:
            return None
        head, _, text = entry.partition("\n")
        entry_head = json.loads(head)
        text = text.replace(entry_head["symbol"], symbol)
        current_items = self.items.find_dependencies([kernel.function])
        new_lines = {
            (old_item[0], number): number - old_item[1] + item.line
            for old_item, item in zip(entry_head["items"], current_items, strict=True)
            if old_item[1] != item.line
            for number in range(old_item[1], old_item[1] + old_item[2])
        }
        text = update_line_table(text, new_lines) if new_lines else text
        return text.replace(f'"{PACKAGE_PLACEHOLDER}/', f'"{self.package.path.resolve()}/')

    def compile(self, kernels: Sequence[KernelInstance]) -> bool:
        """Compile kernels and cache their PTX; return False if the package must be compiled as a whole.

        Raises CompileFailed with the compiler's diagnostics if one of them does not compile.
        """
        if not all(map(self.get_cache_file, kernels)):
            return False
        output = compile_together([(self, kernels)])
        if output:
            self.raise_package_error(kernels, output)
        return not output

    def raise_package_error(self, kernels: Sequence[KernelInstance], output: str) -> None:
        """Raise CompileFailed if this package caused the compiler's errors."""
        if self._is_package_error(parse_diagnostics(output), self.find_needed(kernels)):
            raise make_compile_error(self.package.path, output)

    def find_needed(self, kernels: Iterable[KernelInstance]) -> list[Item]:
        return self.items.find_dependencies({kernel.function for kernel in kernels})

    def write_package(self, folder: Path, kernels: Sequence[KernelInstance]) -> None:
        """Write a package `op` to a new folder, with only the items that the kernels need."""
        for file, text in self.items.extract_items(self.find_needed(kernels)).items():
            path = folder / "op" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            for parent in [path.parent, *path.parent.parents]:
                (parent / "__init__.mojo").touch()
                if parent == folder:
                    break

    def _is_package_error(self, diagnostics: Sequence[Diagnostic], needed: Sequence[Item]) -> bool:
        """Return whether the whole package would fail in the same way: the first error is in one of its lines
        and mentions no omitted name."""
        first = next((diagnostic for diagnostic in diagnostics if diagnostic.kind == "error"), None)
        if first is None or not first.file.startswith(f"{self.package.path.resolve()}/"):
            return False
        statements = (i for source in self.items.sources.values() for i in source.imports)
        imported = {local_name for i in statements if i.module.startswith(".") for _, local_name in i.names}
        omitted_names = ({*self.items.by_name} | imported) - {item.name for item in needed}
        return not omitted_names & set(re.findall(r"'(\w+)'", first.message))


def compile_together(requests: Sequence[tuple[KernelCache, Sequence[KernelInstance]]]) -> str:
    """Compile the kernels of packages with the same flags as one program, and cache their PTX.

    Returns "" or the compiler's error output, with the packages' own paths.
    """
    with create_staging_folder(get_cache_folder("kernels"), CACHE_CONTENTS) as folder:
        folder = folder.resolve()
        copies = [folder / f"copy_{number}" for number in range(len(requests))]
        instances = [
            (copy, package, kernel)
            for copy, (package, kernels) in zip(copies, requests, strict=True)
            for kernel in kernels
        ]
        for copy, (package, kernels) in zip(copies, requests, strict=True):
            package.write_package(copy, kernels)
        main = folder / "main.mojo"
        main.write_text(_generate_program(instances), encoding="utf-8")
        result = run_mojo(
            "run", "-g1", "--diagnostic-format", "json", "--target-accelerator", "sm_90a",
            *requests[0][0].flags, str(main),
        )  # fmt: skip
        if result.returncode != 0:
            output = result.stdout + result.stderr
            for copy, (package, _) in zip(copies, requests, strict=True):
                output = output.replace(f"{copy}/op/", f"{package.package.path.resolve()}/")
            return output
        texts = re.split(
            rf"^{LINE_PREFIX}ptx (\S+)\n",
            strip_copy_prefixes(decode_file_names(result.stdout)),
            flags=re.MULTILINE,
        )[1:]
        for (copy, package, kernel), symbol, ptx in zip(instances, texts[::2], texts[1::2], strict=True):
            package.cache_ptx(kernel, symbol, ptx.rstrip("\n"), copy / "op")
    return ""


def find_identifiers(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"\w+", text)}


def _generate_program(instances: Sequence[tuple[Path, KernelCache, KernelInstance]]) -> str:
    """Return a program that prints the kernels' PTX and imports each from its package's copy."""
    imports, calls = [], []
    for number, (copy, package, kernel) in enumerate(instances):
        module = package.items.by_name[kernel.function][0].file.removesuffix(".mojo").replace("/", ".")
        name = f"{copy.name}_{kernel.function}"
        imports.append(f"from {copy.name}.op.{module} import {kernel.function} as {name}")
        expression = name + kernel.source_text.removeprefix(kernel.function)
        calls += [
            f'    var k{number} = compile_info[{expression}, emission_kind="asm", target=TARGET]()',
            f'    print("{LINE_PREFIX}ptx", k{number}.function_name)',
            f"    print(k{number}.asm)",
        ]
    head = ["from std.compile import compile_info", "from max.gpu.host.compile import get_gpu_target"]
    target = ['comptime TARGET = get_gpu_target["sm_90a"]()', "def main():"]
    return "\n".join([*head, *dict.fromkeys(imports), *target, *calls, ""])


def strip_copy_prefixes(text: str) -> str:
    """Remove the prefix `copy_N_` from symbols, which they have only in a program of several packages."""
    return re.sub(r"\bcopy_\d+_op_", "op_", text)


def update_line_table(ptx: str, new_lines: dict[tuple[str, int], int]) -> str:
    """Return PTX with its line table updated for moved code; `new_lines` is (file, old line) -> new line."""
    files = {
        number: path.removeprefix(f"{PACKAGE_PLACEHOLDER}/")
        for number, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', ptx, re.MULTILINE)
    }

    def update_line(match: re.Match) -> str:
        line = new_lines.get((files.get(match[2], ""), int(match[3])))
        return f"{match[1]}{match[2]} {line if line else match[3]}"

    text = re.sub(r"(\.loc\s+)(\d+) (\d+)", update_line, ptx)
    return re.sub(r"(inlined_at )(\d+) (\d+)", update_line, text)
