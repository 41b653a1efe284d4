"""How a command of the workbook is typed here: through poe, through pixi, or plainly, as this process was started.

A learner who came by `uv run poe pNN` has no `python` that knows the harness; a command that a message names must be one that can
be pasted.
"""

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

TASK_NAMES = {"build-ext": "extension"}
"""Sub-command -> the task of poe and pixi, where the names differ."""
WITHOUT_TASK = ("vgpu",)
UVX = re.compile(r"[/\\](archive|environments)-v\d+[/\\]")
"""What a path inside uv's cache holds: there lies the environment that `uvx` makes for one command."""


def command(
    words: str,
    environment: Mapping[str, str] = os.environ,
    program: str | None = None,
    prefix: str = sys.prefix,
    folder: Path | None = None,
) -> str:
    """The whole command line for a sub-command or puzzle with its arguments, as "hint pNN dx-2".

    Args:
        words: What follows `python -m harness`.
        environment: Tells who started this process: `uv run`, poe and pixi each leave their mark.
        program: What this process was started as; `sys.argv[0]` unless given.
        prefix: The folder of this Python's environment.
        folder: Where the command will be typed; here unless given.
    """
    name, *rest = words.split(" ")
    program = Path(sys.argv[0] if program is None else program).name
    runner = "pixi run " if "PIXI_PROJECT_ROOT" in environment else ""
    runner = runner or ("uv run " if "UV_RUN_RECURSION_DEPTH" in environment else "")
    if name not in WITHOUT_TASK and runner == "pixi run ":
        return " ".join([f"pixi run {TASK_NAMES.get(name, name)}", *rest])
    if name not in WITHOUT_TASK and "POE_ACTIVE" in environment:
        return " ".join([f"{runner}poe {TASK_NAMES.get(name, name)}", *rest])
    if program == "workbook":
        runner = uv_run(prefix, folder or Path.cwd()) if runner == "uv run " else runner
        return f"{uvx(prefix) or runner}workbook {words}"
    return f"{runner}python -m harness {words}"


def uv_run(prefix: str, folder: Path) -> str:
    """What stands before `workbook` in a folder: `uv run` looks for the project there and above, and is told of one elsewhere."""
    project = Path(prefix).absolute().parent
    if not (project / "pyproject.toml").is_file() or folder.absolute().is_relative_to(project):
        return "uv run "
    return f"uv run --project {shlex.quote(str(project))} "


def uvx(prefix: str) -> str:
    """What stands before `workbook` where uvx started this process, with the package or the address it was given; else ""."""
    if not UVX.search(f"{prefix}{os.sep}"):
        return ""
    name = "mojo-gpu-workbook"
    try:
        address = json.loads(metadata.distribution(name).read_text("direct_url.json") or "{}").get(
            "url", name
        )
    except (metadata.PackageNotFoundError, ValueError, AttributeError):
        address = name
    return f"uvx --from {address} "
