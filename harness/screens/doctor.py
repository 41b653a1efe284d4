"""Check this machine against the workbook's requirements; print a line for each, with a remedy on failure."""

import operator
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.text import Text

from harness import invocation
from harness.console import report_progress, show_progress, wrap_hanging
from harness.errors import UsageError, WorkbookError
from harness.learner import workspace
from harness.toolchain import roots
from harness.toolchain.cache import CACHE_VARIABLE, get_cache_folder

INSTALL = "run `uv sync` or `pixi install`, and start through `uv run workbook ...` or `pixi run ...`"
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*(?P<versions>.*)")
COMPARISONS = {"==": operator.eq, ">=": operator.ge, "<": operator.lt}
TEXT_COLUMN = 19
"""Column of a finding's text and of its continuation lines."""
MARKS = {"good": "✅", "note": "·", "broken": "❌"}


@dataclass(frozen=True)
class Finding:
    """A line of the report: the part, its state ("good", "note" or "broken"), a description and a remedy."""

    part: str
    state: str
    description: str
    remedy: str = ""


def make_finding(
    part: str, is_good: bool, description: str, remedy: str = "", failed_state: str = "broken"
) -> Finding:
    """Return a finding in state "good" or, with the remedy, in state `otherwise`."""
    return Finding(part, "good", description) if is_good else Finding(part, failed_state, description, remedy)


def print_findings(console: Console) -> int:
    """Print a line for each part; return the exit code, 5 if one is broken."""
    broken = False
    with show_progress(console):
        for finding in collect_findings():
            broken |= finding.state == "broken"
            print_finding(console, finding)
    return 5 if broken else 0


def print_finding(console: Console, finding: Finding) -> None:
    """Print a finding in one line, wrapped on a narrow terminal."""
    line = f"{MARKS[finding.state]} {finding.part:<16} {finding.description}"
    line += f" -> {finding.remedy}" if finding.remedy else ""
    text = Text(line, style={"broken": "red", "note": "dim"}.get(finding.state, ""))
    for row in wrap_hanging(console, text, TEXT_COLUMN) if console.is_terminal else [text]:
        console.print(row, soft_wrap=True)


def collect_findings() -> Iterator[Finding]:
    """Yield the findings of all checks; an exception counts as "broken"."""
    for part, check in PARTS.items():
        report_progress(part)
        try:
            yield from check()
        except WorkbookError as error:
            yield Finding(part, "broken", str(error))
        except Exception as error:  # the doctor reports any exception of an incomplete installation
            yield Finding(part, "broken", f"{type(error).__name__}: {error}", INSTALL)


def read_required_versions() -> dict[str, str]:
    """Map each distribution to its required versions, e.g. ">=2,<3", from pyproject.toml or the metadata."""
    project = roots.PACKAGE_ROOT.parent / "pyproject.toml"
    if project.is_file():
        lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        requirements = metadata.requires(workspace.DISTRIBUTION) or []
        lines = [line.split(";")[0].strip() for line in requirements if "extra" not in line]
    matches = (REQUIREMENT.fullmatch(line) for line in lines)
    return {match["name"]: match["versions"] for match in matches if match}


def parse_version(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: "2.15.0+cpu" is (2, 15, 0)."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def is_satisfied(version: str, versions: str) -> bool:
    """Check whether a version satisfies a requirement; missing parts count as zeros."""

    def pad(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return (*numbers, 0, 0, 0, 0)[:4]

    installed = pad(parse_version(version))
    bounds = [re.fullmatch(r"(==|>=|<)\s*(.+)", part.strip()) for part in versions.split(",")]
    return all(COMPARISONS[bound[1]](installed, pad(parse_version(bound[2]))) for bound in bounds if bound)


def check_python() -> Iterator[Finding]:
    is_good, description = (
        (3, 11) <= sys.version_info[:2] <= (3, 13),
        f"{platform.python_version()}, {sys.executable}",
    )
    yield make_finding("Python", is_good, description, f"Python 3.11 to 3.13 is required; {INSTALL}")


def check_packages() -> Iterator[Finding]:
    for name, versions in read_required_versions().items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, "broken", f"not installed, {versions} is required", INSTALL)
        else:
            is_good = is_satisfied(installed, versions)
            yield make_finding(name, is_good, installed, f"{versions} is required: {INSTALL}")


def check_mojo() -> Iterator[Finding]:
    from harness.toolchain.packages import run_mojo

    result = run_mojo("--version")
    version = " ".join(result.stdout.split()) or " ".join(result.stderr.split())
    yield make_finding("Mojo compiler", result.returncode == 0, version, INSTALL)


def check_gpu() -> Iterator[Finding]:
    from harness.devices import targets

    if not targets.may_have_gpu():
        description = "none: no NVIDIA or AMD driver on this machine; kernels run on the virtual GPU"
        yield Finding("GPU", "note", description)
        return
    device = targets.find_gpu_target()
    unusable = "a driver is there, but MAX sees no GPU it can use; kernels run on the virtual GPU"
    remedy = "`nvidia-smi` or `rocm-smi` should list it; Apple GPUs need Xcode"
    yield make_finding("GPU", device is not None, device.device_name if device else unusable, remedy, "note")
    import torch

    cuda = torch.cuda.is_available()
    description = "seen" if cuda else "none: the baseline runs on the CPU"
    yield make_finding("PyTorch's GPU", cuda, description, failed_state="note")


def check_layers() -> Iterator[Finding]:
    """Check whether the layers' libraries are built for this machine's GPUs and PyTorch."""
    import torch

    from harness.nn import host
    from harness.toolchain import architectures, libraries

    part, command = "layers", invocation.format_command("build-ext")
    if torch.version.hip or sys.platform == "darwin":
        yield Finding(part, "note", f"{architectures.NVIDIA_ONLY_MESSAGE}: PyTorch's own operations run here")
        return
    try:
        required = host.select_libraries([], architectures.list_gpu_architectures(), [None])
    except WorkbookError as error:
        yield Finding(part, "note", f"{error}: PyTorch's own operations run")
        return
    missing = [library.name for library in required if library.find() is None]
    if not missing:
        yield Finding(part, "good", f"all {len(required)} libraries are built")
    elif libraries.find_compiler() is None and any("_torch" in name for name in missing):
        description = "no C++ compiler: PyTorch's own operations run, not the kernels"
        yield Finding(part, "broken", description, "install g++, or set CXX")
    else:
        description = f"{len(required) - len(missing)} of {len(required)} libraries are built; the first call builds what it needs"
        yield Finding(part, "note", f"{description}: {', '.join(missing)}", f"`{command}`")


def check_virtual_gpu() -> Iterator[Finding]:
    """Check the virtual GPU: replay works on every system, the driver for MAX only on Linux."""
    from harness.vgpu import VirtualGPU

    VirtualGPU()
    linux = platform.system() == "Linux"
    uses = "for gates and for whole runs" if linux else "for gates; whole runs need Linux"
    description = f"sm_90a, {uses}; 2 to 3 billion thread instructions a minute"
    yield make_finding("virtual GPU", linux, description, failed_state="note")


def check_caches() -> Iterator[Finding]:
    size = describe_size(get_cache_folder())
    yield Finding(
        "workbook cache", "good", f"{size}; {CACHE_VARIABLE} puts it elsewhere; all of it can be deleted"
    )
    compiler = Path.home() / ".cache" / "modular"
    if compiler.is_dir():
        size = f"{describe_size(compiler)}; all of it can be deleted"
        yield make_finding("compiler cache", os.access(compiler, os.W_OK), size, f"make {compiler} writable")


def describe_size(folder: Path) -> str:
    files = [entry for entry in folder.rglob("*") if entry.is_file() and not entry.is_symlink()]
    size = sum(entry.stat().st_size for entry in files)
    return f"{folder}: {size / 2**20:,.0f} MiB in {len(files)} files"


def check_c_compiler() -> Iterator[Finding]:
    """Look for a C compiler, which only torch.compile on the CPU and `mojo build` need."""
    compiler = next((path for name in ("cc", "clang", "gcc") if (path := shutil.which(name))), None)
    cpp = next((path for name in ("c++", "clang++", "g++") if (path := shutil.which(name))), None)
    if compiler:
        yield Finding("C compiler", "good", f"{compiler}" + (f", C++: {cpp}" if cpp else ", no C++"))
    else:
        description = "none; puzzles, gates and the virtual GPU do without, torch.compile on the CPU and `mojo build` do not"
        yield Finding("C compiler", "note", description, "install gcc or clang")


def check_workbook() -> Iterator[Finding]:
    """Look for the learner's folder, check its version, and look for the book."""
    folder = roots.CHECKOUT
    if not ((folder / "problems").is_dir() and (folder / "solutions").is_dir()):
        description = "not in this folder: the solutions inside the package are used"
        remedy = f"`{invocation.format_command('init')}` makes a folder to solve puzzles in"
        yield Finding("workbook", "note", description, remedy)
        return
    outdated = workspace.describe_outdated(folder)
    yield Finding(
        "workbook", "note" if outdated else "good", f"{folder}: {outdated}" if outdated else str(folder)
    )
    page = folder / "book" / "html" / "index.html"
    if page.is_file():
        yield Finding("book", "good", str(page))
    else:
        try:
            workspace.find_built_book()
            remedy = f"`{invocation.format_command('update --book')}` puts it there"
        except UsageError as error:
            remedy = str(error).partition("; ")[2].removesuffix("; leave out --book")
        yield Finding("book", "note", "not built here", remedy)


PARTS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": check_python,
    "packages": check_packages,
    "Mojo compiler": check_mojo,
    "GPU": check_gpu,
    "layers": check_layers,
    "virtual GPU": check_virtual_gpu,
    "caches": check_caches,
    "C compiler": check_c_compiler,
    "workbook": check_workbook,
}
