"""What the layers import of the workbook: what MAX graphs and extension modules want, and nothing that judges or teaches."""

import ast

from typed import present

from harness.toolchain.roots import CHECKOUT

ALLOWED = ("harness.nn", "harness.devices.graphs", "harness.errors", "harness.spec.ops", "harness.toolchain")


def imported(path):
    """The harness's modules that a file names in an import, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = present(node.module)  # imports are absolute
            yield f"{module}.{node.names[0].name}" if module == "harness" else module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_layers_import_nothing_that_judges():
    paths = sorted((CHECKOUT / "harness" / "nn").rglob("*.py"))
    names = {name for path in paths for name in imported(path) if name.startswith("harness")}
    assert "harness.nn.ring" in names
    assert {name for name in names if not name.startswith(ALLOWED)} == set()
