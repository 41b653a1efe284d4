"""Packaging: uv and pixi offer the same tasks, versions are pinned, and what the texts tell people to type exists."""

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIXI = tomllib.loads((ROOT / "pixi.toml").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "book" / "src").rglob("*.md"))]


def test_both_task_tables_are_equal():
    poe = {name: (task["cmd"], task["help"]) for name, task in PROJECT["tool"]["poe"]["tasks"].items()}
    pixi = {name: (task["cmd"], task["description"]) for name, task in PIXI["tasks"].items()}
    assert poe == pixi
    assert {"p22", "tests", "book", "format"} <= set(poe)


def test_pixi_installs_this_project_with_the_extra_that_the_tasks_need():
    (entry,) = PIXI["pypi-dependencies"].items()
    name, options = entry
    assert name == PROJECT["project"]["name"]
    assert options == {"path": ".", "editable": True, "extras": ["dev"]}
    assert PROJECT["dependency-groups"]["dev"] == [f"{name}[dev]"], "a bare `uv run` has the extra too"


def test_pixi_toml_fits_the_schema():
    if not (schema := os.environ.get("PIXI_SCHEMA")):
        pytest.skip("PIXI_SCHEMA does not name a schema file")
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


@pytest.mark.parametrize("requirement", requirements())
def test_every_requirement_is_pinned_exactly(requirement):
    assert re.fullmatch(r"[\w.-]+==\d+(\.\w+)*", requirement.split(";")[0].strip())


def test_a_dependency_stands_once():
    names = [re.split(r"[=<>\[ ]", r)[0].lower() for r in requirements() if not r.startswith("hatchling")]
    assert len(names) == len(set(names))
    assert set(PIXI["dependencies"]) == {"python"}, "everything else comes with the project"


@pytest.mark.parametrize("requirement", PROJECT["project"]["dependencies"])
def test_the_installed_versions_are_the_pinned_ones(requirement):
    from importlib.metadata import version

    name, pinned = requirement.split("==")
    assert version(name).split("+")[0] == pinned


def printed_tasks() -> list[tuple[str, str, str]]:
    """(page, runner, task) of every command in the texts that calls a task.

    The book writes a command once, in a fence with the language `run`, and shows it for both runners.
    """
    command = re.compile(r"(uv run(?: --no-sync)? poe|pixi run) ([a-z]\w*)")
    fence = re.compile(r"^```run$(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = set()
    for page in PAGES:
        text, name = page.read_text(), str(page.relative_to(ROOT))
        found |= {(name, runner.split()[0], task) for runner, task in command.findall(text)}
        for line in "\n".join(fence.findall(text)).split("\n"):
            if line.strip():
                found |= {(name, runner, line.split()[0]) for runner in ("uv", "pixi")}
    return sorted(found)


@pytest.mark.parametrize(("page", "runner", "task"), printed_tasks())
def test_every_printed_task_exists(page, runner, task):
    assert task in (PROJECT["tool"]["poe"]["tasks"] if runner == "uv" else PIXI["tasks"])


def test_the_texts_print_tasks_at_all():
    assert ("README.md", "uv", "p22") in printed_tasks() and ("README.md", "pixi", "tests") in printed_tasks()
    assert any(page.startswith("book/") for page, _, _ in printed_tasks())


def test_readme_has_its_two_commands_and_their_twins_on_lines_of_their_own():
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index("python3 -m pip install -q uv && uv run poe p22 --backward --solution")
    assert lines[first + 1] == "uv run poe tests"
    twin = lines.index("pixi run p22 --backward --solution")
    assert lines[twin + 1] == "pixi run tests"
    assert first < 20, "they stand near the top"


def test_continuous_integration_uses_the_readme_s_commands():
    script = (ROOT / ".ci" / "run").read_text()
    assert "python3 -m pip install -q uv && uv run poe p22 --backward --solution" in script
    assert "\nuv run poe tests\n" in script
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
    found = [
        f"{file.relative_to(ROOT)}: {match.group()}"
        for file in tracked_files()
        if file.is_file() and file != own
        for match in place.finditer(file.read_bytes().decode(errors="ignore"))
    ]
    assert not found


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
