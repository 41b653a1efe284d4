"""Format workbook commands for messages, with `uv run` or `pixi run` if one of these started this process."""

import os
from collections.abc import Mapping


def format_command(arguments: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the full command line for a sub-command or puzzle and its arguments, such as "hint pNN dx-2"."""
    if "PIXI_PROJECT_ROOT" in environment:
        return f"pixi run workbook {arguments}"
    return f"{'uv run ' if 'UV_RUN_RECURSION_DEPTH' in environment else ''}workbook {arguments}"
