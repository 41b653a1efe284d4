"""Messages show commands in the form that started this process."""

import pytest

from harness import invocation
from harness.learner.progress import Progress
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.rungs import MojoRung

PIXI, UV = {"PIXI_PROJECT_ROOT": "/somewhere"}, {"UV_RUN_RECURSION_DEPTH": "1"}


@pytest.mark.parametrize(
    ("environment", "runner"), [({}, ""), (UV, "uv run "), (PIXI, "pixi run "), (PIXI | UV, "pixi run ")]
)
def test_command_has_the_prefix_of_its_runner(environment, runner):
    assert invocation.format_command("hint p22 dx-2", environment) == f"{runner}workbook hint p22 dx-2"


@pytest.mark.parametrize("name", list_puzzle_names())
def test_help_describes_the_demonstration(name, command_line):
    """The help shows the docstring without the sections Returns and Raises."""
    for demo in find_puzzle(name).demos:
        if demo.options:
            text = command_line(name, f"--{demo.flag}", "--help").out
            assert f"usage: {name} --{demo.flag}" in text and not {"Raises", "Returns"} & {*text.split()}, (
                text
            )


@pytest.mark.parametrize("name", list_puzzle_names())
def test_printed_commands_can_be_pasted(name, command_line, monkeypatch):
    """Run every rung's commands that need no compiler, as printed for a pixi user."""
    monkeypatch.setattr(Progress, "set_value", lambda *change: None)
    monkeypatch.setenv("PIXI_PROJECT_ROOT", "/somewhere")
    rungs = [rung.id for rung in find_puzzle(name).rungs if not isinstance(rung, MojoRung)]
    calls = [("list", name), ("hint", name), ("diff", name), (name, "--gate", "nope"), (name, "--dims", "x")]
    calls += [(name, "--rung", rung) for rung in rungs] + [("hint", name, "--rung", rung) for rung in rungs]
    calls += [("reset", name), ("watch", name, "--gate", "nope")]
    finished = [command_line(*arguments) for arguments in calls]
    text = "\n".join(result.out + result.err for result in finished)
    assert "pixi run workbook" in text and "python -m" not in text
