"""A copy of a learner's checkout in which tests run commands."""

import io
import os
import re
import shutil
from pathlib import Path

from command_lines import CommandResult, run_command

from harness.learner import blanks
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]


class Checkout:
    """A copy of a learner's checkout with unsolved problems; commands run in this process."""

    def __init__(self, path: Path, monkeypatch, capsys):
        self.path, self.monkeypatch, self.capsys = path, monkeypatch, capsys
        for name in ("p22", "shared"):
            shutil.copytree(ROOT / "solutions" / name, path / "solutions" / name, symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", path)
        self.kernels = path / "problems" / "p22" / "op" / "layernorm_linear.mojo"
        self.numpy = path / "problems" / "p22" / "backward.py"
        blanks.generate_problems(path / "solutions", path / "problems")
        monkeypatch.setattr(roots, "CHECKOUT", path)
        monkeypatch.chdir(path)

    def run(self, *arguments: str, say: str = "") -> CommandResult:
        """Run a command with `say` as standard input."""
        self.monkeypatch.setattr("sys.stdin", io.StringIO(say))
        return run_command(self.capsys, *arguments)

    def fill(self, file: Path, *ids: str, change=lambda body: body) -> None:
        """Fill some blanks with the solution's lines, transformed by `change`."""
        solution = blanks.find_blanks(
            (self.path / "solutions" / file.relative_to(self.path / "problems")).read_text()
        )
        bodies = {id: tuple(change(line) for line in solution[id].body) for id in ids}
        file.write_text(blanks.join_segments(blanks.split_blanks(file.read_text()), bodies))


def get_single_error_line(result: CommandResult) -> str:
    """Return a usage error's only line after asserting that there is no traceback."""
    assert result.code == 2, result.out + result.err
    assert result.err.count("\n") == 1 and result.err.startswith("error: ")
    return result.err


def damage(path: Path, kind: str) -> None:
    """Damage a file as described by `kind`, a key of DAMAGE in test_reset.py or "missing"."""
    text = path.read_text()
    if kind == "one marker deleted":
        path.write_text(text.replace("# BLANK-END dx\n", ""))
    elif kind == "both markers deleted":
        path.write_text(re.sub(r".*BLANK-(START|END) dx\b.*\n", "", text))
    elif kind == "every marker deleted":
        path.write_text(re.sub(r".*BLANK-(START|END).*\n", "", text))
    elif kind == "duplicated":
        path.write_text(text + text)
    elif kind == "half-written":
        path.write_text(text[: text.index("# BLANK-START dx") + 40])
    elif kind == "empty":
        path.write_text("")
    elif kind == "not text":
        path.write_bytes(b"\xff\xfe\x00" * 9)
    elif kind == "folder":
        path.rename(path.with_suffix(".mine"))
        path.mkdir()
        (path / "notes").write_text("mine")
    elif kind == "byte order mark":
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    elif kind == "NUL":
        path.write_bytes(path.read_bytes().replace(b"# FILL IN", b"\0", 1))
    elif kind == "huge":
        with path.open("ab") as file:
            file.truncate(2**40)
    else:
        path.unlink()
        if kind == "link to nowhere":
            path.symlink_to("nowhere")
        elif kind == "link to itself":
            path.symlink_to(path.name)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "device":
            path.symlink_to("/dev/zero")
