"""Parse the Mojo compiler's messages from its JSON output."""

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Diagnostic:
    """One message of the Mojo compiler; `text` is the line of code. Lines and columns start at 1."""

    file: str
    line: int
    column: int
    kind: str
    message: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.kind}: {self.message}"


def parse_diagnostics(output: str) -> list[Diagnostic]:
    """Parse the messages with a location from the output of `--diagnostic-format json`; skip the rest."""
    messages: list[Diagnostic] = []
    for line in output.splitlines():
        try:
            entry = json.loads(line)
            source = entry["diagnostic"]
            location = source["location"]
            position, text = (source["file"], location["line"], location["column"]), source.get("text", "")
            messages.append(Diagnostic(*position, entry["kind"], entry["message"], text))
        except (ValueError, KeyError, TypeError):
            continue
    return messages
