"""Run the command line in this process."""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Lines of standard output."""
        return self.out.splitlines()


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> CommandResult:
    """Run a command in the current directory."""
    from harness.cli import main

    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:  # --help
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    out, err = capsys.readouterr()
    return CommandResult(code, out, err)
