"""Records what commands really print, for the book: `python -m book.measure.outputs [NAME ...]`.

Every output block of the book comes from book/outputs/NAME.txt, written here together with the machine, the date and
the versions (NAME.json); `outputs.toml` has the commands. `--check` runs the commands again and compares all that does not depend on the machine.
"""

import argparse
import datetime
import difflib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from book.measure.forks import Forks

ROOT = Path(__file__).absolute().parents[2]
FOLDER = ROOT / "book" / "outputs"
PACKAGES = ("mojo", "max", "torch", "numpy")
PROGRESS = re.compile(r"(Compiling|Recording) .*\.\.\.$")  # said only while somebody waits
WIDTH = 100  # columns that a command believes its terminal has


@dataclass(frozen=True)
class Command:
    """One recorded command, as `outputs.toml` has it: how the book shows it, what Python is given, and what holds of its output."""

    shown: str
    arguments: tuple[str, ...]
    exit_code: int = 0
    exact: bool = False
    timed: bool = False
    virtual: bool = False


def read_commands() -> dict[str, Command]:
    """Return the recorded commands by the names of their outputs."""
    commands = {}
    for name, known in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        shown = known.pop("run")
        program, *words = shown.removeprefix("workbook ").split()
        arguments = words if program == "python" else ["-m", "harness", program, *words]
        commands[name] = Command(shown, tuple(arguments), **known)
    return commands


COMMANDS = read_commands()


@dataclass(frozen=True)
class Record:
    """What a command printed, and when, where and with what."""

    text: str
    command: str
    date: str
    machine: str
    versions: dict[str, str]

    def source(self) -> str:
        """One line for below the block."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return f"Printed by {self.command} on {self.date}, {self.machine}, {versions}."


def load(name: str) -> Record:
    """A recorded output. Raises FileNotFoundError."""
    facts = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return Record(text=(FOLDER / f"{name}.txt").read_text(encoding="utf-8"), **facts)


Start = Callable[[Sequence[str], Path, Mapping[str, str]], subprocess.CompletedProcess[str]]
"""Arguments of Python, folder and environment -> the finished program, with both its streams in `stdout`."""


def fresh(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Starts a program in an interpreter of its own."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(command: Command, start: Start = fresh) -> str:
    """What the command prints on both streams, with paths from the checkout's root.

    Raises RuntimeError for another exit code than the recorded one.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT)}
    done = start(command.arguments, ROOT, environment)
    if done.returncode != command.exit_code:
        raise RuntimeError(f"{command.shown}: exit code {done.returncode}\n{done.stdout}")
    text = done.stdout.replace(f"{ROOT}/", "")
    lines = [line.rstrip() for line in text.splitlines() if not PROGRESS.match(line)]
    return "\n".join(lines).strip("\n") + "\n"


def record(name: str, start: Start = fresh) -> None:
    """Runs a command and writes its two files."""
    command = COMMANDS[name]
    text = run(command, start)
    facts = {
        "command": command.shown,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, {accelerator()}",
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")
    (FOLDER / f"{name}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def accelerator() -> str:
    """The GPU of this machine, or that it has none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def machine_free(text: str) -> list[str]:
    """The lines of an output without what differs from machine to machine: measured numbers, hashes, cache notes."""
    text = re.sub(r"-?\d+\.\d+(e[+-]?\d+)?", "#", text)
    text = re.sub(r"\b[0-9a-f]{7,}\b", "#", text)
    text = text.replace("compiled in # s", "cached")
    text = re.sub(r"\n {3}(?=\S)", " ", text)  # where a line wraps depends on the numbers in it
    text = re.sub(r"^( *#? *│)[ xo*+]*$", r"\1", text, flags=re.M)  # a plot: numbers too
    # Which case is the hardest depends on PyTorch's rounding.
    text = re.sub(r"(#x +# +)\S.*", r"\1(case)", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def rows(text: str) -> list[str]:
    """The first words of every line: what is in a table, and not what was measured."""
    return [" ".join(re.findall(r"[A-Za-z]+", line)[:2]) for line in text.splitlines() if "->" not in line]


def difference(name: str, start: Start = fresh) -> list[str]:
    """How a fresh run of a command differs from its record, in the lines that should be the same everywhere."""
    command = COMMANDS[name]
    comparable = str.splitlines if command.exact else rows if command.timed else machine_free
    recorded, fresh = comparable(load(name).text), comparable(run(command, start))
    return list(difflib.unified_diff(recorded, fresh, f"outputs/{name}.txt", "now", lineterm="", n=1))


def main(arguments: list[str] | None = None) -> int:
    """Records the outputs of the book, all or those named; with --check only says what would change (exit 1)."""
    parser = argparse.ArgumentParser(prog="python -m book.measure.outputs", description=main.__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(COMMANDS)}")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(COMMANDS)
    if unknown:
        parser.error(f"no such output: {', '.join(sorted(unknown))}")
    different = 0
    with Forks() as forks:
        for name in options.names or COMMANDS:
            if options.check:
                lines = difference(name, forks.run)
                different += bool(lines)
                print(*lines, sep="\n", end="\n" if lines else "")
            else:
                record(name, forks.run)
                print(f"recorded {name}")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
