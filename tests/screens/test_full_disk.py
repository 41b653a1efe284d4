"""Every command on a disk of 100 kB: each ends in one line with exit code 5, or does its work, and leaves nothing half-made.

The disk is real, a tmpfs, which only root can mount; the compilers are played by what they would write.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from max.engine import CompiledModel

from harness.devices import graphs, recorder, targets
from harness.toolchain import extension, packages
from harness.vgpu.driver import build

SIZE = 100_000


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A file system of 100 kB that holds the cache and temporary files."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs, and only on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs to be had here: {mounted.stderr.decode().strip()}")
    monkeypatch.setenv("WORKBOOK_CACHE", str(folder / "cache"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv(extension.VARIABLE, raising=False)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def compilers(monkeypatch):
    """In the place of the compilers: each writes what it is asked for, ten times as much as there is room for."""

    def written(target: Path) -> None:
        with open(target, "wb") as file:
            for _ in range(10):
                file.write(bytes(SIZE))

    def run_mojo(*arguments, **options):
        """As `mojo precompile` does it: by LLVM's words, and with nothing left; `mojo run` prints."""
        if "-o" not in arguments:
            return subprocess.CompletedProcess(arguments, 0, "//@ package\n" + "x" * SIZE * 10, "")
        target = Path(arguments[arguments.index("-o") + 1])
        try:
            written(target)
        except OSError as error:
            target.unlink()
            said = f"LLVM ERROR: IO failure on output stream: {error.strerror}\n"
            return subprocess.CompletedProcess(arguments, 1, "", said)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    def compile_module(architecture, staging, puzzle):
        written(staging / "module.so")
        return staging / "module.so"

    monkeypatch.setattr(packages, "run_mojo", run_mojo)
    monkeypatch.setattr(recorder, "run_mojo", run_mojo)
    monkeypatch.setattr(build, "compile_library", lambda target, source, mojo, env: written(target))
    monkeypatch.setattr(extension, "compile_module", compile_module)
    monkeypatch.setattr(targets, "gpu_may_exist", lambda: False)


# What a command wants to keep; None where it keeps nothing, and so does its work.
COMMANDS = {
    ("list",): None,
    ("hint", "p22", "dx-1"): None,
    ("diff", "p22", "--spoil"): None,
    ("p22", "--numpy"): None,
    ("p22", "--help"): None,
    ("vgpu", "--help"): None,
    ("doctor",): None,
    ("p22", "--solution", "--device", "cpu"): "the Mojo compiler",
    ("p22", "--solution", "--profile"): "the recorded launches",
    ("p22", "--solution", "--show", "ln"): "the recorded launches",
    ("build-ext", "--arch", "sm_80"): "the extension module",
    ("build-ext", "--arch", "sm_80", "--output", "DISK/modules"): "the extension module",
    ("vgpu", "info"): "the virtual GPU's driver",
    ("vgpu", "exec", "--", "true"): "the virtual GPU's driver",
}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_on_a_full_disk(disk, compilers, command_line, command):
    done = command_line(*(word.replace("DISK", str(disk)) for word in command))
    wanted = COMMANDS[command]
    assert "Traceback" not in done.out + done.err
    if wanted is None:
        assert done.code in (0, 3) and not done.err
    else:
        assert done.code == 5, done.out + done.err
        (line,) = done.err.splitlines()
        assert f"disk full: no room for {wanted} in {disk}" in line and ".making-" not in line
        assert "bytes are free there); make room there" in line
    assert not [path for path in disk.rglob("*") if path.is_file()], "nothing half-made is left"


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_target_that_does_not_fit(disk, command_line, monkeypatch, flag):
    """What a run came to, larger than the disk."""
    from harness.screens import show
    from harness.toolchain.disk import write_target

    def run_puzzle(options):
        write_target(flag, getattr(options, flag.removeprefix("--")), "x" * 2 * SIZE)

    monkeypatch.setattr("harness.cli.run_puzzle", run_puzzle)
    done = command_line("p22", flag, disk / "result.json")
    assert done.code == 5
    assert f"disk full: no room for {flag} {disk}/result.json, 200,000 bytes in {disk} (" in done.err
    assert not list(disk.iterdir())
    assert show.write_target is write_target, "the writer of a page is this one"


def test_a_graph_that_does_not_fit(disk):
    """MAX says it in words of its own."""

    class Compiled(CompiledModel):
        def __init__(self):
            pass

        def export_mef(self, path):
            raise ValueError("available space in disk less than requested size")

    with pytest.raises(OSError) as raised:
        graphs.export(Compiled(), disk / "x.mef")
    assert raised.value.errno == errno.ENOSPC
