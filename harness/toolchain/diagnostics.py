"""Messages of the Mojo compiler as data, and the parser of its JSON output."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnostic:
    """One message of the Mojo compiler, with the line of code it is about. Lines and columns count from 1."""

    file: str
    line: int
    column: int
    kind: str
    message: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.kind}: {self.message}"


def parse_diagnostics(output: str) -> list[Diagnostic]:
    """Return the located messages of a compiler run with `--diagnostic-format json`; anything else is passed over."""
    messages: list[Diagnostic] = []
    for line in output.splitlines():
        try:
            entry = json.loads(line)
            place = entry["diagnostic"]
            where = place["location"]
            messages.append(
                Diagnostic(
                    place["file"],
                    where["line"],
                    where["column"],
                    entry["kind"],
                    entry["message"],
                    place.get("text", ""),
                )
            )
        except (ValueError, KeyError, TypeError):
            continue
    return messages
