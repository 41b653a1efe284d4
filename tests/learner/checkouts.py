"""A copy of what a learner has, in which tests call the command line as a learner does."""

import io
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from harness.cli import main
from harness.learner import blanks
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Finished:
    """The outcome of a command."""

    returncode: int
    stdout: str
    stderr: str


class Checkout:
    """A copy of what a learner has, with the untouched problem; commands run in this process, which takes it for its own."""

    def __init__(self, path: Path, monkeypatch, capsys):
        self.path, self.monkeypatch, self.capsys = path, monkeypatch, capsys
        for name in ("p22", "shared"):
            shutil.copytree(ROOT / "solutions" / name, path / "solutions" / name, symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", path)
        self.kernels = path / "problems" / "p22" / "op" / "layernorm_linear.mojo"
        self.numpy = path / "problems" / "p22" / "backward.py"
        blanks.generate(path / "solutions", path / "problems")
        monkeypatch.setattr(roots, "CHECKOUT", path)
        monkeypatch.chdir(path)

    def run(self, *arguments: str, say: str = "") -> Finished:
        """Call the command line as a learner does; `say` is what is typed."""
        self.monkeypatch.setattr("sys.stdin", io.StringIO(say))
        self.capsys.readouterr()
        try:
            code = main(list(arguments))
        except SystemExit as stop:  # --help
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return Finished(code, *self.capsys.readouterr())

    def fill(self, file: Path, *ids: str, change=lambda body: body) -> None:
        """Write the solution's lines into some blanks, changed by a function."""
        solution = blanks.find(
            (self.path / "solutions" / file.relative_to(self.path / "problems")).read_text()
        )
        bodies = {id: tuple(change(line) for line in solution[id].body) for id in ids}
        file.write_text(blanks.join(blanks.split(file.read_text()), bodies))


def one_line(finished: Finished) -> str:
    """Return the one line of a bad use, without a traceback."""
    assert finished.returncode == 2, finished.stdout + finished.stderr
    assert finished.stderr.count("\n") == 1 and finished.stderr.startswith("error: ")
    return finished.stderr


def damage(path: Path, how: str) -> None:
    """Damage a file in a way that happens to files."""
    text = path.read_text()
    if how == "one marker deleted":
        path.write_text(text.replace("# BLANK-END dx\n", ""))
    elif how == "both markers deleted":
        path.write_text(re.sub(r".*BLANK-(START|END) dx\b.*\n", "", text))
    elif how == "every marker deleted":
        path.write_text(re.sub(r".*BLANK-(START|END).*\n", "", text))
    elif how == "duplicated":
        path.write_text(text + text)
    elif how == "half-written":
        path.write_text(text[: text.index("# BLANK-START dx") + 40])
    elif how == "empty":
        path.write_text("")
    elif how == "not text":
        path.write_bytes(b"\xff\xfe\x00" * 9)
    elif how == "folder":
        path.rename(path.with_suffix(".mine"))
        path.mkdir()
        (path / "notes").write_text("mine")
    elif how == "byte order mark":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    elif how == "NUL":
        path.write_bytes(path.read_bytes().replace(b"# FILL IN", b"\0", 1))
    elif how == "huge":
        with path.open("ab") as file:
            file.truncate(2**40)
    else:
        path.unlink()
        if how == "link to nowhere":
            path.symlink_to("nowhere")
        elif how == "link to itself":
            path.symlink_to(path.name)
        elif how == "pipe":
            os.mkfifo(path)
        elif how == "device":
            path.symlink_to("/dev/zero")
