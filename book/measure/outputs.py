"""Records what commands really print, for the book: `python -m book.measure.outputs [NAME ...]`.

Every output block of the book comes from book/outputs/NAME.txt, written here together with the machine, the date and
the versions (NAME.json). `--check` runs the commands again and compares all that does not depend on the machine.
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
    """One recorded command: how the book shows it, what is run, and which exit code is right."""

    shown: str
    arguments: tuple[str, ...]
    exit_code: int = 0
    exact: bool = False  # the same on every machine, numbers and all
    anywhere: bool = False  # also where there is no virtual GPU, which needs Linux
    timed: bool = False  # numbers and conclusions are this machine's; the same everywhere are the rows alone


def example(name: str, *arguments: str, exact: bool = True, anywhere: bool = True, **options) -> Command:
    """The command that runs a program of book/examples."""
    words = (f"book/examples/{name}.py", *arguments)
    return Command(f"python {' '.join(words)}", words, exact=exact, anywhere=anywhere, **options)


def virtual(program: str, exit_code: int = 0, options: str = "", define: str = "") -> Command:
    """A Mojo program of book/examples on the virtual GPU, which needs Linux."""
    run = f"vgpu exec {options}-- mojo run --debug-level=line-tables {define}book/examples/{program}.mojo"
    return Command(f"workbook {run}", ("-m", "harness", *run.split()), exit_code, exact=True)


def task(command: str, exact: bool = False, anywhere: bool = True, **options) -> Command:
    """A task of the workbook."""
    return Command(command, ("-m", "harness", *command.split()), exact=exact, anywhere=anywhere, **options)


EXAMPLES = (
    "one_row row_descent rms_row flash_rows "
    "gather_twice parameter_gradients backend_levels inductor_kernels inductor_residual "
    "compile_saved what_is_kept"
)
"""Programs of book/examples without arguments, whose output has their name and is the same everywhere."""
COMMANDS = {
    **{name: example(name) for name in EXAMPLES.split()},
    "gradcheck_float32": example("gradcheck_blind", "in_float32"),
    "gradcheck_flat": example("gradcheck_blind", "at_flat_points"),
    "gradcheck_kink": example("gradcheck_blind", "at_kinks"),
    "algebra": example("algebra", exact=False),
    "hunt_matrix": task("p21 --matrix", exact=True),
    "hunt_wrong": example("hunted", "attention", exact=False, exit_code=3),
    "hunt_dq": example("hunted", "dq", exact=False),
    "catch_first": example("hunted", "check", exact=False, exit_code=1),
    "own_backward": example("own_backward", exact=False),
    "own_ops": example("own_ops", exact=False, anywhere=False),
    "backend_report": example("backend_report", exact=False),
    "backend_rewrites": task("p26 --rewrites", exact=True),
    "one_path": example("one_path", exit_code=1),
    "first_functions": task("p20 --rung torch --solution", exact=True),
    "first_registration": task("p20 --rung register --solution", exact=True),
    "saving_less": example("saving_less", exact=False),
    "first_backward": task("p20 --backward --solution --device virtual", anywhere=False),
    "worth_it": example("worth_it", exact=False, timed=True),
    "row_largest": virtual("row_largest"),
    "mirrored_race": virtual("mirrored_row", 1),
    "mirrored_mended": virtual("mirrored_row", define="-D MENDED "),
    "race_natural": virtual("zero_race", 1, "--blocks natural "),
    "race_reversed": virtual("zero_race", 1, "--blocks reversed "),
    "brightest_race": virtual("brightest", 99, "--error-exitcode 99 "),
    "brightest_mended": virtual("brightest", 0, "--blocks shuffled:7 ", "-D MENDED "),
    "wrong_kernels": example(
        "wrong_kernel", "dw_from_x_hat", "dx_diagonal_jacobian", exact=False, anywhere=False
    ),
    "picture_of_a_bug": example("picture_of_a_bug", "dw_batch_sequence_swapped", anywhere=False),
    "ring_backward": task("p25 --backward --solution --ranks 2"),
    "ring_broken": task("p25 --backward --solution --seconds 3 --break 2:1:dies", exit_code=5),
    "tape_gates": task("p27 --rung tape --solution", exact=True),
    "order_draw": task("p24 --draw --size 6 10", exact=True),
    "order_numbers": task("p24 --draw --size 4 4 --numbers", exact=True),
    "order_z_numbers": task("p24 --draw --order z-order --size 4 4 --numbers", exact=True),
    "order_radius": task("p24 --count --sides 64 --radii 8 9", exact=True),
    "fast_steps": task("p28 --backward --solution --device virtual", anywhere=False),
    "backward_solution": task("p22 --backward --solution --device virtual", anywhere=False),
}


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
