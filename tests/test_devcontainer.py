"""The devcontainer and its tasks use existing commands, one port and the built book."""

import json
import re
import tomllib

from harness.check.options import COMMANDS
from harness.spec.catalogue import list_puzzle_names
from harness.toolchain.roots import CHECKOUT


def test_devcontainer_commands_exist():
    container = json.loads((CHECKOUT / ".devcontainer" / "devcontainer.json").read_text())
    tasks = json.loads((CHECKOUT / ".vscode" / "tasks.json").read_text())["tasks"]
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    commands = [container["postCreateCommand"], *(task["command"] for task in tasks)]
    named = re.findall(r"\bworkbook (\w+)(?: (p\d+))?", "\n".join(commands))
    assert {command for command, _ in named} == {"doctor", "watch"} <= set(COMMANDS)
    assert {puzzle for _, puzzle in named if puzzle} <= set(list_puzzle_names())
    assert (
        "uv sync" in container["postCreateCommand"]
        and "book.build --no-open" in container["postCreateCommand"]
    )
    served = next(task["command"] for task in tasks if task["label"] == "book")
    (port,) = container["forwardPorts"]
    assert f"http.server {port} " in served and container["portsAttributes"][str(port)]["onAutoForward"]
    assert all(task["runOptions"] == {"runOn": "folderOpen"} for task in tasks)
    python = container["image"].rsplit(":", 1)[1]
    assert f"<{project['project']['requires-python'].split('<')[1]}" > f"<{python}"
