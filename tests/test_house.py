"""The house: three products on one ground floor, and no arrow upwards."""

import ast
import re
from pathlib import Path

import pytest

from harness.toolchain.roots import CHECKOUT

HARNESS, KERNELS = CHECKOUT / "harness", CHECKOUT / "harness" / "nn" / "kernels"
GROUND = ("harness.toolchain", "harness.errors", "harness.invocation")
MAY = {"toolchain": GROUND, "vgpu": (*GROUND, "harness.vgpu"), "nn": (*GROUND, "harness.nn")}
LIBRARIES = {"std", "max", "layout", "extensibility"}


def imported(path: Path) -> set[str]:
    """The modules that a Python file names in an import, wherever it stands."""
    nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {
        f"{node.module}.{node.names[0].name}" for node in nodes if isinstance(node, ast.ImportFrom)
    }


def packages(folder: Path) -> set[str]:
    """The packages from which the Mojo files below a folder import, by absolute names."""
    texts = [path.read_text("utf-8") for path in folder.rglob("*.mojo")]
    return {
        name
        for text in texts
        for name in re.findall(r"^(?:from|import) (\w+)\S*(?: import .*)?$", text, re.M)
    }


@pytest.mark.parametrize("product", MAY)
def test_a_product_imports_what_is_under_it(product):
    files = [*(HARNESS / product).rglob("*.py")]
    names = {name for path in files for name in imported(path) if name.startswith("harness")}
    assert names and {name for name in names if not name.startswith(MAY[product])} == set()


def test_the_layers_kernels_have_one_link_and_import_no_puzzle():
    (link,) = [path for path in KERNELS.rglob("*") if path.is_symlink()]
    assert link.resolve() == CHECKOUT / "solutions" / "shared"
    own = {path.name for path in KERNELS.iterdir()}
    assert {
        each for folder in KERNELS.iterdir() for each in packages(folder) if not each.startswith(".")
    } <= (own | LIBRARIES)


def test_no_puzzle_imports_the_layers_kernels():
    own = {path.name for path in KERNELS.iterdir()}
    for root in ("solutions", "problems"):
        assert packages(CHECKOUT / root) & own == set()
        assert all(len([*op.iterdir()]) <= 9 for op in (CHECKOUT / root).glob("*/op"))
