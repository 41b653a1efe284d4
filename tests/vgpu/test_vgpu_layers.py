"""The virtual GPU's layers: files import only from their layer and lower ones, and imports stay lazy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import harness.vgpu

PACKAGE = Path(harness.vgpu.__file__).parent
LAYERS = (
    "ptx", "errors", "memory", "checks", "engine/opcodes", "engine/interpreter", "engine", "machine",
    "driver", "cli",
)  # fmt: skip
"""Layers from lowest to highest; a top-level file is a separate layer."""
ALLOWED_IMPORTS = ("harness.errors", "harness.toolchain.")
"""Modules of the harness that the virtual GPU may import."""


def find_layer(module: str) -> int:
    """Return the index of a module's layer; the name is relative to the package: `checks.races`."""
    path = module.replace(".", "/")
    matches = [layer for layer in LAYERS if path == layer or path.startswith(f"{layer}/")]
    return LAYERS.index(max(matches, key=len))


def list_imports(tree: ast.AST, package: str) -> list[str]:
    """Return all harness modules that a file imports, including in functions and under TYPE_CHECKING."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            is_package = (PACKAGE.parents[1] / module.replace(".", "/")).is_dir()
            names += [f"{module}.{alias.name}" for alias in node.names] if is_package else [module]
    return [name for name in names if name.split(".")[0] == "harness"]


def find_forbidden_imports(text: str, module: str) -> list[str]:
    """Return the imports of a module (`checks.races`) from higher layers."""
    package = ".".join(["harness.vgpu", *module.split(".")[:-1]])

    def is_allowed(name: str) -> bool:
        inside = name.removeprefix("harness.vgpu.")
        return (
            name.startswith(ALLOWED_IMPORTS) if inside == name else find_layer(inside) <= find_layer(module)
        )

    return [name for name in list_imports(ast.parse(text), package) if not is_allowed(name)]


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_files_import_only_from_lower_layers(path):
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    assert find_forbidden_imports(path.read_text(), module) == []


def test_package_docstring_lists_its_layers():
    listed = re.findall(r"^- (\w+)(?:/|\.py):", harness.vgpu.__doc__ or "", re.MULTILINE)
    assert listed == [layer for layer in reversed(LAYERS) if "/" not in layer]
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {*folders, *(path.stem for path in PACKAGE.glob("*.py"))} == {*listed, "__init__"}


def test_public_names_are_exported():
    assert len(harness.vgpu.__all__) == 8
    assert all(getattr(harness.vgpu, name).__name__ == name for name in harness.vgpu.__all__)
    with pytest.raises(AttributeError, match=r"module 'harness\.vgpu' has no attribute 'Arena'"):
        _ = harness.vgpu.Arena  # pyright: ignore[reportAttributeAccessIssue]  (the error is tested)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import harness.vgpu", ("numpy", "harness.errors")),
        ("from harness.vgpu import Finding", ("numpy", "harness.vgpu.machine")),
        ("from harness.vgpu import VirtualGPU", ("torch", "max", "harness.vgpu.driver")),
    ],
)
def test_import_of_a_name_loads_only_its_dependencies(code, absent):
    code += f"; import sys; print(*(name for name in {absent} if name in sys.modules))"
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parents[1], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "\n"
