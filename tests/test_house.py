"""Imports between the project's layers, and words of puzzle 22 outside its folder."""

import ast
import re
from pathlib import Path

import pytest

from harness.toolchain.roots import CHECKOUT

HARNESS, KERNELS = CHECKOUT / "harness", CHECKOUT / "harness" / "nn" / "kernels"
GROUND = ("harness.toolchain", "harness.errors", "harness.invocation")
MAY = {"toolchain": GROUND, "vgpu": (*GROUND, "harness.vgpu"), "nn": (*GROUND, "harness.nn")}
LIBRARIES = {"std", "max", "layout", "extensibility"}


def list_imports(path: Path) -> set[str]:
    """Return all modules that a Python file imports."""
    nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {
        f"{node.module}.{node.names[0].name}" for node in nodes if isinstance(node, ast.ImportFrom)
    }


def list_packages(folder: Path) -> set[str]:
    """Return the packages that the Mojo files in a folder import by absolute name."""
    texts = [path.read_text("utf-8") for path in folder.rglob("*.mojo")]
    return {
        name
        for text in texts
        for name in re.findall(r"^(?:from|import) (\w+)\S*(?: import .*)?$", text, re.M)
    }


PUZZLE_22_WORDS = re.compile(r"p22|layer_?norm|ln_weight|gamma|rstd|hidden_dim", re.IGNORECASE)
"""Words specific to puzzle 22."""
FILES_THAT_NAME_PUZZLES = ("puzzles/p", "puzzles/formulas.py", "nn/", "__init__.py", "check/__init__.py")
"""Files of the harness that may name a puzzle; the table in check/__init__.py follows one gate as an example."""


def test_other_modules_do_not_mention_puzzles():
    files = {path.relative_to(HARNESS).as_posix(): path for path in HARNESS.rglob("*.py")}
    assert not [
        f"{name}:{number}: {line.strip()}"
        for name, path in sorted(files.items())
        if not name.startswith(FILES_THAT_NAME_PUZZLES)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if PUZZLE_22_WORDS.search(line)
    ]


@pytest.mark.parametrize("product", MAY)
def test_layers_import_only_lower_layers(product):
    files = [*(HARNESS / product).rglob("*.py")]
    names = {name for path in files for name in list_imports(path) if name.startswith("harness")}
    assert names and {name for name in names if not name.startswith(MAY[product])} == set()


def test_layer_kernels_import_no_puzzle():
    (link,) = [path for path in KERNELS.rglob("*") if path.is_symlink()]
    assert link.resolve() == CHECKOUT / "solutions" / "shared"
    kernel_folders = {path.name for path in KERNELS.iterdir()}
    assert {
        package
        for folder in KERNELS.iterdir()
        for package in list_packages(folder)
        if not package.startswith(".")
    } <= (kernel_folders | LIBRARIES)


def test_puzzles_do_not_import_layer_kernels():
    kernels = {path.name for path in KERNELS.iterdir()}
    for root in ("solutions", "problems"):
        assert list_packages(CHECKOUT / root) & kernels == set()
        assert all(len([*op.iterdir()]) <= 9 for op in (CHECKOUT / root).glob("*/op"))
