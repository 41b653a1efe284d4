"""Runs command lines in this process."""

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Finished:
    """The outcome of a command line."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """The lines of standard output."""
        return self.out.splitlines()


def run_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    """Call the command line in the current directory."""
    from harness.cli import main

    capsys.readouterr()
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:  # --help
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    out, err = capsys.readouterr()
    return Finished(code, out, err)
