"""Packaging: tasks of pixi, pinned versions, commands in the README, and tracked files."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from harness.spec.catalogue import find_puzzle, list_puzzle_names

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIXI = tomllib.loads((ROOT / "pixi.toml").read_text())
EXTRA = PROJECT["project"]["optional-dependencies"]["dev"]
LIBRARIES = PROJECT["project"]["dependencies"]
"""Runtime requirements, installed next to a user's model; only these may be ranges."""
SUPPORTED_RANGES = {"torch": ("2.11.0", "2.15.0", "2.16.0"), "numpy": ("2.0.0", "2.4.6", "3.0.0")}
"""Package -> oldest tested version, pinned version, and first unsupported version."""


def test_pixi_tasks_cover_puzzles_and_tests():
    tasks = {name: f"workbook {name}" for name in list_puzzle_names()}
    assert PIXI["tasks"] == {"workbook": "workbook", **tasks, "tests": "pytest"}


def test_pixi_installs_the_dev_extra():
    name = PROJECT["project"]["name"]
    assert PIXI["pypi-dependencies"] == {name: {"path": ".", "editable": True, "extras": ["dev"]}}
    assert PROJECT["dependency-groups"]["dev"] == [f"{name}[dev]"], "a bare `uv run` has the extra too"


def test_pixi_toml_has_only_valid_tables():
    """Validate against pixi's schema if PIXI_SCHEMA is set to its path."""
    assert set(PIXI) == {"workspace", "dependencies", "tasks", "pypi-dependencies"}
    assert set(PIXI["workspace"]) == {"name", "channels", "requires-pixi", "platforms"}
    if schema := os.environ.get("PIXI_SCHEMA"):
        import jsonschema

        jsonschema.validate(PIXI, json.loads(Path(schema).read_text()))


def list_requirements() -> list[str]:
    """List the requirements of the project, its extras and its build system."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    return [*LIBRARIES, *(line for extra in extras for line in extra), *PROJECT["build-system"]["requires"]]


def get_package(requirement: str) -> str:
    """Return a requirement's package name."""
    return re.split(r"[=<>;\[ ]", requirement)[0].lower()


@pytest.mark.parametrize("requirement", list_requirements())
def test_requirements_are_pinned_or_ranges(requirement):
    """Users may have a range of torch versions; developers have the measured ones."""
    if re.fullmatch(r"[\w.-]+==\d+(\.\w+)*", requirement.split(";")[0].strip()):
        return
    name = get_package(requirement)
    assert requirement in LIBRARIES and name not in ("max", "mojo")
    (pinned,) = [line for line in EXTRA if get_package(line) == name]
    allowed = SpecifierSet(requirement.removeprefix(name))
    assert pinned.removeprefix(f"{name}==") in allowed
    for oldest, newest, refused in [SUPPORTED_RANGES[name]] if name in SUPPORTED_RANGES else []:
        assert oldest in allowed and newest in allowed and refused not in allowed


def test_dependencies_are_not_repeated():
    names = [get_package(r) for r in list_requirements() if not r.startswith("hatchling")]
    ranges = {get_package(r) for r in LIBRARIES if "==" not in r}
    assert len(names) - len(ranges) == len(set(names))
    assert set(PIXI["dependencies"]) == {"python"}, "the other packages come with the project"


def test_book_build_uses_pinned_versions_without_torch():
    group = PROJECT["dependency-groups"]["book"]
    assert set(group) <= set(EXTRA)
    assert not {"torch", "max", "mojo"} & {get_package(requirement) for requirement in group}


@pytest.mark.parametrize("requirement", [r for r in EXTRA if get_package(r) in ("torch", "numpy", "rich")])
def test_installed_versions_are_pinned(requirement):
    name, pinned = requirement.split("==")
    assert version(name).split("+")[0] == pinned


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "max", "mojo"):
            raise ImportError(f"the light build imports {name}")

sys.meta_path.insert(0, Refuse())
from book.build import site as build
from book.build import preprocess
build.generate.main()
print("generated")
"""


def test_book_needs_neither_torch_nor_max():
    completed = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True
    )
    assert completed.stdout.endswith("generated\n"), completed.stderr


def test_workflow_passes_actionlint():
    """actionlint is installed from a wheel, so nothing is downloaded."""
    program = shutil.which("actionlint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("actionlint is not installed (its wheel is for Linux)")
    completed = subprocess.run(
        [program, "-no-color", "-shellcheck=", "-pyflakes="], cwd=ROOT, capture_output=True, text=True
    )
    assert completed.returncode == 0 and not completed.stdout, completed.stdout + completed.stderr


def test_workflow_runs_ci_and_publishes_the_book():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "- run: .ci/run\n" in workflow and "path: book/html\n" in workflow
    command = "uv run --only-group book python -m book.build"
    assert command in workflow and command in (ROOT / "book" / "src" / "install.md").read_text()


def test_readme_commands_are_on_their_own_lines():
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index("python3 -m pip install -q uv && uv run workbook p22 --backward --solution")
    assert lines[first + 1] == "uv run pytest"
    pixi = lines.index("pixi run p22 --backward --solution")
    assert lines[pixi + 1] == "pixi run tests"
    assert first < 20, "near the top"
    assert len(lines) <= 120, "one page"


def test_readme_table_lists_puzzles_and_rungs():
    row = re.compile(r"^\| `(p\d\d)` .* \| ([^|]+) \|$", re.MULTILINE)
    printed = {
        name: re.findall(r"`(\w+)`", rungs) for name, rungs in row.findall((ROOT / "README.md").read_text())
    }
    assert printed == {name: [rung.id for rung in find_puzzle(name).rungs] for name in list_puzzle_names()}


def test_ci_uses_the_readme_commands():
    script = (ROOT / ".ci" / "run").read_text()
    assert "python3 -m pip install -q uv && uv run workbook p22 --backward --solution" in script
    assert "uv run pytest ||" in script and "uv run pytest -m slow ||" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def list_tracked_files() -> list[Path]:
    """List the files that git tracks; skip the test outside a repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this folder is not in a git repository")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_tracked_files_name_no_machine_or_registry():
    """Search for paths of a developer's machine, and hosts of package registries and mirrors."""
    place = re.compile(
        r"(?<![\w.~])/(root|work|Users/\w+|home/(?!(user|me)\b)\w+)/"
        r"|https?://[\w.-]*(py"
        r"pi|python"
        r"hosted|cra"
        r"tes|npm"
        r"js|ana"
        r"conda|prefix\.dev|artifactory|nexus)[\w./-]*"
        r"|index-url"
    )
    this_file = Path(__file__).resolve()
    lines = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file in list_tracked_files()
        if file.is_file() and file != this_file
        for match in place.finditer(file.read_bytes().decode(errors="ignore"))
    ]
    assert not lines


def test_built_and_private_files_are_not_tracked():
    names = {str(file.relative_to(ROOT)) for file in list_tracked_files()}
    built = re.compile(r"(^|/)(__pycache__|\.venv|\.pixi|html)/|\.(pyc|mojoc|mef)$")
    assert not [*filter(built.search, names)]
    assert "uv.lock" not in names and "LICENSE" in names


def test_source_files_begin_with_a_docstring():
    for file in list_tracked_files():
        if file.suffix in (".py", ".mojo") and file.is_file() and file.read_text().strip():
            head = file.read_text().lstrip()
            assert re.match(r'(#!.*\n)?(r?"""\S)', head), file.relative_to(ROOT)
