"""Runs Python programs, each in a process of its own that has PyTorch, its compiler and MAX imported when it starts.

The imports take seconds, and the book's commands are many. The processes are forks of one that has imported them and done
nothing else; a program finds what a fresh interpreter would give it: its arguments, its environment, its import path, its
name `__main__`, and an ordinary end.
"""

import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

PRELOADED = (
    "numpy", "rich.console", "torch", "torch._dynamo", "torch._inductor.compile_fx",
    "torch.autograd.gradcheck", "max.engine", "max.experimental.torch",
)  # fmt: skip


class Forks:
    """The process that has imported everything. It starts with the first program, and ends with the `with` block."""

    def __init__(self, preloaded: Sequence[str] = PRELOADED):
        self.preloaded = preloaded
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Forks":
        return self

    def __exit__(self, *error) -> None:
        if self._server:
            self._server.communicate()

    def run(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """What `python ARGUMENTS` comes to in a folder, with both its streams in `stdout`.

        Args:
            arguments: A file or `-m` and a module, and the program's own.

        Raises RuntimeError where the process that forks has died.
        """
        if (
            self._server is None
        ):  # with the first program's environment: OpenMP reads its own when it is loaded
            command = [sys.executable, str(Path(__file__).absolute()), *self.preloaded]
            self._server = subprocess.Popen(
                command, env={**environment}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert self._server.stdin and self._server.stdout  # they are pipes
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
            request = [output.name, str(folder), {**environment}, [*arguments]]
            print(json.dumps(request), file=self._server.stdin, flush=True)
            answer = self._server.stdout.readline()
            if not answer:
                raise RuntimeError(f"{' '.join(arguments)}: the process that should run it has ended")
            return subprocess.CompletedProcess([*arguments], int(answer), output.read())


def serve(modules: Sequence[str]) -> list[str]:
    """Imports the modules and forks for each request on standard input, answering with the exit code of the fork.

    Returns in the forks alone, with the arguments of the program that each is to run.
    """
    before = {**os.environ}
    for name in modules:
        import_module(name)
    set_by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    for line in sys.stdin:
        output, folder, environment, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            become(output, folder, {**set_by_imports, **environment})
            return arguments
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.exit()


def become(output: str, folder: str, environment: dict[str, str]) -> None:
    """Gives the process the streams, the folder and the environment of a program."""
    with open(os.devnull) as nothing, open(output, "w") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


def run_as_main(arguments: list[str]) -> None:
    """Runs a file, or after `-m` a module, as the interpreter would."""
    if arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(arguments[0]).absolute().parent)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run_as_main(serve(sys.argv[1:]))
