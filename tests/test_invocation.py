"""The commands in messages: in the form in which this process was started."""

import pytest

from harness import invocation
from harness.learner.progress import Progress
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.rungs import MojoRung

PIXI, UV = {"PIXI_PROJECT_ROOT": "/somewhere"}, {"UV_RUN_RECURSION_DEPTH": "1"}


@pytest.mark.parametrize(
    ("environment", "runner"), [({}, ""), (UV, "uv run "), (PIXI, "pixi run "), (PIXI | UV, "pixi run ")]
)
def test_a_command_has_the_form_that_the_user_started_with(environment, runner):
    assert invocation.command("hint p22 dx-2", environment) == f"{runner}workbook hint p22 dx-2"


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
    monkeypatch.setattr(Progress, "change", lambda *change: None)
    monkeypatch.setenv("PIXI_PROJECT_ROOT", "/somewhere")
    rungs = [rung.id for rung in find_puzzle(name).rungs if not isinstance(rung, MojoRung)]
    calls = [("list", name), ("hint", name), ("diff", name), (name, "--gate", "nope"), (name, "--dims", "x")]
    calls += [(name, "--rung", rung) for rung in rungs] + [("hint", name, "--rung", rung) for rung in rungs]
    calls += [("reset", name), ("watch", name, "--gate", "nope")]
    said = [command_line(*arguments) for arguments in calls]
    text = "\n".join(each.out + each.err for each in said)
    assert "pixi run workbook" in text and "python -m" not in text
