"""Spell a command of the workbook: `workbook ...`, after `uv run` or `pixi run` if this process was started
by one of them."""

import os
from collections.abc import Mapping


def command(words: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the command line for a sub-command or puzzle with its arguments, such as "hint pNN dx-2"."""
    if "PIXI_PROJECT_ROOT" in environment:
        return f"pixi run workbook {words}"
    return f"{'uv run ' if 'UV_RUN_RECURSION_DEPTH' in environment else ''}workbook {words}"
