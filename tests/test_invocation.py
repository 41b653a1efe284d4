"""The commands in messages: in the form in which this process was started, and nowhere else than in one place."""

import re
from pathlib import Path

import pytest

import harness
from harness import invocation
from harness.learner.progress import Progress
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.rungs import MojoRung

POE, PIXI, UV = {"POE_ACTIVE": "simple"}, {"PIXI_PROJECT_ROOT": "/somewhere"}, {"UV_RUN_RECURSION_DEPTH": "1"}


@pytest.mark.parametrize(
    ("environment", "program", "typed"),
    [
        (UV | POE, "__main__.py", "uv run poe hint p22 dx-2"),
        (POE, "__main__.py", "poe hint p22 dx-2"),
        (PIXI, "__main__.py", "pixi run hint p22 dx-2"),
        (PIXI | UV | POE, "__main__.py", "pixi run hint p22 dx-2"),
        (UV, "__main__.py", "uv run python -m harness hint p22 dx-2"),
        ({}, "__main__.py", "python -m harness hint p22 dx-2"),
        ({}, "/venv/bin/workbook", "workbook hint p22 dx-2"),
        (UV, "workbook", "uv run workbook hint p22 dx-2"),
    ],
)
def test_a_command_has_the_form_that_the_user_started_with(environment, program, typed):
    assert invocation.command("hint p22 dx-2", environment, program) == typed


def test_uv_is_told_of_the_project_in_a_folder_elsewhere(tmp_path):
    project, mine = tmp_path / "pro ject", tmp_path / "mine"
    project.mkdir()
    (project / "pyproject.toml").touch()

    def typed(folder):
        return invocation.command("list", UV, "workbook", str(project / ".venv"), folder)

    assert typed(mine) == f"uv run --project '{project}' workbook list"
    assert typed(project / "mine") == typed(project) == "uv run workbook list"


def test_a_task_of_another_name_and_a_command_without_one():
    assert invocation.command("build-ext --arch sm_90a", UV | POE) == "uv run poe extension --arch sm_90a"
    assert invocation.command("vgpu exec", PIXI, "x") == "pixi run python -m harness vgpu exec"


def test_every_task_that_a_message_may_name_is_there():
    import tomllib

    from harness.commands import COMMANDS

    root = Path(harness.__file__).parents[1]
    poe = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["poe"]["tasks"]
    pixi = tomllib.loads((root / "pixi.toml").read_text())["tasks"]
    for name in COMMANDS:
        task = invocation.TASK_NAMES.get(name, name)
        assert poe[task]["cmd"] == pixi[task]["cmd"] == f"python -m harness {name}"


@pytest.mark.parametrize("name", puzzle_names())
def test_the_help_of_a_demonstration_tells_users_what_it_does(name, command_line):
    """And not a caller of the function what it returns and raises."""
    for demo in find_puzzle(name).demos:
        if demo.options:
            text = command_line(name, f"--{demo.flag}", "--help").out
            assert f"usage: {name} --{demo.flag}" in text and not {"Raises", "Returns"} & {*text.split()}, (
                text
            )


@pytest.mark.parametrize("name", puzzle_names())
def test_what_the_commands_of_a_puzzle_print_can_be_pasted(name, command_line, monkeypatch):
    """Those that need no compiler, of every rung in Python too, as somebody who came by pixi sees them."""
    monkeypatch.setattr(Progress, "save", lambda self: None)
    monkeypatch.setenv("PIXI_PROJECT_ROOT", "/somewhere")
    rungs = [rung.id for rung in find_puzzle(name).rungs if not isinstance(rung, MojoRung)]
    calls = [("list", name), ("hint", name), ("diff", name), (name, "--gate", "nope"), (name, "--dims", "x")]
    calls += [(name, "--rung", rung) for rung in rungs] + [("hint", name, "--rung", rung) for rung in rungs]
    calls += [("reset", name), ("watch", name, "--gate", "nope")]
    said = [command_line(*arguments) for arguments in calls]
    text = "\n".join(each.out + each.err for each in said)
    assert "pixi run" in text and "python -m" not in text and "poe " not in text


SPELLED_OUT = ("invocation.py", "dev", "vgpu", "puzzles", "translate.py")
"""Where the words may stand: tools for developers, and what `translate.pasteable` rewrites."""


def test_no_message_spells_a_command_out():
    folder = Path(harness.__file__).parent
    spelled = [
        f"{path.relative_to(folder)}: {line.strip()}"
        for path in folder.rglob("*.py")
        if path.relative_to(folder).parts[0] not in SPELLED_OUT and path.name not in SPELLED_OUT
        for line in path.read_text().splitlines()
        if re.search(r"python -m harness", line) and not re.search(r"^\s*\w.*\. |^\w", line)
        and not line.strip().startswith(("`", '"""', ">>>"))
    ]  # fmt: skip
    assert [line for line in spelled if '"' in line] == []


def test_uvx_is_named_with_what_it_was_given(monkeypatch):
    cache = "/home/me/.cache/uv/archive-v0/hiRBvEoNb3"
    asked = invocation.command("list", {}, "workbook", cache)
    assert asked.startswith("uvx --from ") and asked.endswith(" workbook list")

    def missing(name):
        raise invocation.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(invocation.metadata, "distribution", missing)
    assert invocation.command("list", {}, "workbook", cache) == "uvx --from mojo-gpu-workbook workbook list"
    assert invocation.command("list", {}, "workbook", "/home/me/.local/share/uv/tools/x") == "workbook list"
