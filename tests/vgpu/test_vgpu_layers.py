"""The layers of the virtual GPU: every file imports from its own folder and from below, and a light import stays light."""

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
"""From the bottom up; what lies in no folder is a layer of its own."""
OUTSIDE = ("harness.errors", "harness.toolchain.")
"""What the virtual GPU may import of the rest of the harness."""


def layer_of(module: str) -> int:
    """The number of the layer that a module stands on, given from the package downwards: `checks.races`."""
    path = module.replace(".", "/")
    standing = [layer for layer in LAYERS if path == layer or path.startswith(f"{layer}/")]
    return LAYERS.index(max(standing, key=len))


def imported(tree: ast.AST, package: str) -> list[str]:
    """The modules of the harness that a file imports anywhere, also inside of functions and for types alone."""
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


def climbs(text: str, module: str) -> list[str]:
    """The imports of a module, `checks.races`, that its layer does not allow."""
    package = ".".join(["harness.vgpu", *module.split(".")[:-1]])

    def is_allowed(name: str) -> bool:
        inside = name.removeprefix("harness.vgpu.")
        return name.startswith(OUTSIDE) if inside == name else layer_of(inside) <= layer_of(module)

    return [name for name in imported(ast.parse(text), package) if not is_allowed(name)]


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_file_imports_from_above(path):
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    assert climbs(path.read_text(), module) == []


def test_the_package_s_docstring_is_the_map_of_its_floors():
    shown = re.findall(r"^- (\w+)(?:/|\.py):", harness.vgpu.__doc__ or "", re.MULTILINE)
    assert shown == [layer for layer in reversed(LAYERS) if "/" not in layer]
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {*folders, *(path.stem for path in PACKAGE.glob("*.py"))} == {*shown, "__init__"}


def test_the_public_names():
    assert len(harness.vgpu.__all__) == 8
    assert all(getattr(harness.vgpu, name).__name__ == name for name in harness.vgpu.__all__)
    with pytest.raises(AttributeError, match=r"module 'harness\.vgpu' has no attribute 'Arena'"):
        _ = harness.vgpu.Arena  # pyright: ignore[reportAttributeAccessIssue]  (that is what is tried)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import harness.vgpu", ("numpy", "harness.errors")),
        ("from harness.vgpu import Finding", ("numpy", "harness.vgpu.machine")),
        ("from harness.vgpu import VirtualGPU", ("torch", "max", "harness.vgpu.driver")),
    ],
)
def test_a_name_loads_what_it_needs_and_no_more(code, absent):
    code += f"; import sys; print(*(name for name in {absent} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parents[1], capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"
