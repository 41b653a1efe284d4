"""The warm process that judges kernels: who asks it, what it answers, and that a command without it comes to the same."""

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness import server
from harness.check import warm
from harness.check.results import GateResult
from harness.console import listening, tell
from harness.errors import CompileFailed
from harness.spec.catalogue import find_puzzle

MAP = ["p19", "--gate", "map", "--solution"]
GATE = next(gate for gate in find_puzzle("p19").gates if gate.id == "map")


class Told:
    """A checker that answers what it was made with, and notes what it was asked."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    def check(self, path, gates=None, cases=None, *, on_first=None):
        self.asked.append((path, gates, cases))
        tell("compiling the kernels")
        if isinstance(self.answer, Exception):
            raise self.answer
        if on_first:
            on_first([GateResult(GATE, self.answer)])
        return [GateResult(GATE, self.answer)]


@pytest.fixture(autouse=True)
def nobody_asked(monkeypatch):
    """A command that has asked nobody yet, with an address of its own, and a short one: pytest's folders have long names."""
    monkeypatch.setattr(warm, "ASKED", warm.Asked())
    monkeypatch.setenv(warm.VARIABLE, "on")
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(warm, "cache_folder", lambda name: Path(folder))
        yield


@pytest.fixture
def serving(monkeypatch, tmp_path):
    """Starts a server in a process, whose checkers are those of a function; another state of the code is a file."""
    listener, processes = socket.socket(socket.AF_UNIX), []
    monkeypatch.setattr(server, "state_of_the_code", (tmp_path / "changed").exists)

    def start(make):
        monkeypatch.setattr(server, "make_checker", make)
        listener.bind(str(warm.address()))
        listener.listen()
        listener.settimeout(60)
        process = multiprocessing.get_context("fork").Process(target=server.Server().serve, args=(listener,))
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()
    listener.close()


def own():
    """What a command makes where nobody answers."""
    return Told("wrong")


def test_the_answer_of_the_warm_process_is_the_verdict(serving):
    words, first = [], []
    serving(lambda work, **options: Told(f"{work.rung.id} {options}"))
    warm.ask(MAP)
    with listening(words.append):
        results = warm.WarmFirst(own).check(Path("op"), ["map"], on_first=first.extend)
    assert [result.state for result in (*results, *first)] == ["mojo {'seed': 0}"] * 2
    assert words == ["compiling the kernels"]


def test_what_the_checker_raises_there_is_raised_here(serving):
    serving(lambda work, **options: Told(CompileFailed("line 3", "all of it")))
    warm.ask(MAP)
    with pytest.raises(CompileFailed, match="line 3") as caught:
        warm.WarmFirst(own).check(Path("op"), ["map"])
    assert caught.value.details == "all of it"


def test_a_checker_is_kept_for_the_same_file_and_options(serving):
    made, states = [], []

    def make(work, **options):
        made.append(options["seed"])
        return Told(f"made {len(made)}")

    serving(make)
    for seed in ("3", "3", "4", "3"):
        warm.ASKED = warm.Asked()
        warm.ask([*MAP, "--seed", seed])
        states += [result.state for result in warm.WarmFirst(own).check(Path("op"), ["map"])]
    assert states == ["made 1", "made 1", "made 2", "made 1"]


@pytest.mark.parametrize(
    "arguments",
    [["p19", "--gate", "map", "--device", "gpu"], ["p23", "--gate", "dQ", "--rung", "numpy"], ["p19", "--gate", "mop"]],
    ids=["on a GPU", "in NumPy", "no gate"],
)  # fmt: skip
def test_what_is_no_gate_of_recorded_kernels_is_judged_by_the_command(serving, arguments):
    serving(lambda work, **options: Told("correct"))
    warm.ask(arguments)
    if arguments[-1] == "mop":  # which the command's own parser has refused before
        with pytest.raises(Exception, match="mop"):
            warm.WarmFirst(own).check(Path("op"))
    else:
        assert warm.WarmFirst(own).check(Path("op"))[0].state == "wrong"


def test_a_process_older_than_the_code_answers_nothing_and_ends(serving, tmp_path):
    process = serving(lambda work, **options: Told("correct"))
    (tmp_path / "changed").touch()
    warm.ask(MAP)
    assert warm.WarmFirst(own).check(Path("op"))[0].state == "wrong"
    process.join(20)
    assert process.exitcode == 0


def test_it_ends_when_nobody_asks():
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(warm.address()))
        listener.listen()
        listener.settimeout(0.05)
        server.Server().serve(listener)


def test_a_command_that_has_gone_ends_its_check_and_not_the_process(serving):
    class Long:
        def check(self, path, gates=None, cases=None, *, on_first=None):
            for _ in range(200):
                tell("another case")
                time.sleep(0.1)
            os._exit(1)  # the check went on to its end

    checkers = [Long(), Told("correct")]
    serving(lambda work, **options: checkers.pop(0))
    warm.ASKED = warm.Asked()  # of whose socket the process has no copy
    warm.ask(MAP)
    answer = warm.ASKED.answer
    assert answer
    assert pickle.load(answer) == ("told", "another case")
    answer.close()
    warm.ASKED.connection.close()
    warm.ASKED = warm.Asked()
    warm.ask([*MAP, "--seed", "1"])
    assert warm.WarmFirst(own).check(Path("op"))[0].state == "correct"


# ---- Without it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [b"", b"no pickle", pickle.dumps(("told", "case 1"))])
def test_a_process_that_is_lost_costs_no_verdict(last):
    ours, theirs = socket.socketpair()
    warm.ASKED.connection, warm.ASKED.answer = ours, ours.makefile("rwb")
    theirs.sendall(last)
    theirs.close()
    assert warm.WarmFirst(own).check(Path("op"))[0].state == "wrong"
    ours.close()


def test_a_process_that_says_nothing_is_not_waited_for():
    ours, theirs = socket.socketpair()
    ours.settimeout(0.05)
    warm.ASKED.connection, warm.ASKED.answer = ours, ours.makefile("rwb")
    assert warm.WarmFirst(own).check(Path("op"))[0].state == "wrong"
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    "arguments",
    [
        ["p19"],
        ["hint", "p19", "map"],
        ["p19", "--gate", "map", "--show"],
        ["p19", "--gate", "map", "--no-server"],
        ["--help"],
        [],
    ],
)
def test_only_a_command_about_one_gate_asks(arguments):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(warm.address()))
        listener.listen()
        warm.ask(arguments)
        assert warm.ASKED.answer is None and warm.ASKED.place is None


def test_a_variable_turns_it_off_for_every_command(monkeypatch):
    monkeypatch.setenv(warm.VARIABLE, "off")
    warm.ask(MAP)
    assert warm.ASKED.place is None


def test_another_users_socket_is_left_alone(monkeypatch):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(warm.address()))
        listener.listen()
        monkeypatch.setattr(warm.os, "getuid", lambda: os.geteuid() + 1)
        warm.ask(MAP)
        assert warm.ASKED.answer is None


def test_an_address_too_long_for_a_socket_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(warm, "cache_folder", lambda name: tmp_path / ("a" * 100))
    with pytest.raises(OSError, match="too long"):
        warm.address()
    warm.ask(MAP)
    assert warm.ASKED.place is None


def test_another_environment_has_another_process(monkeypatch):
    here = warm.address()
    monkeypatch.setenv("COLUMNS", "60")
    assert warm.address() == here
    monkeypatch.setenv("MODULAR_X", "1")
    assert warm.address() != here


# ---- The whole way ------------------------------------------------------------------------------------------


def test_a_command_that_found_none_starts_one(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **options: started.append(words))
    monkeypatch.setattr("harness.check.checker.checker_of", lambda work, **options: Told("correct"))
    from harness.cli import run

    warm.ask(MAP)
    assert run(MAP) == 0
    assert started == [[sys.executable, "-m", "harness.server", str(warm.address()), sys.argv[0], *MAP]]
    started.clear()
    warm.ASKED = warm.Asked()  # as --no-server leaves it
    assert run([*MAP, "--no-server"]) == 0 and started == []


@pytest.mark.compiles
def test_two_commands_and_a_process(tmp_path):
    """The second command imports no torch, says the same, and the process goes when it is asked to."""
    environment = os.environ | {warm.VARIABLE: "on"}
    words = [sys.executable, "-X", "importtime", "-m", "harness", *MAP]
    place = subprocess.run(
        [sys.executable, "-c", "from harness.check.warm import address; print(address())"],
        env=environment, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "harness.server", place, "harness", *MAP], env=environment
    ) as process:
        try:
            until = time.monotonic() + 300
            while not Path(place).exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.1)
            warmly = subprocess.run(words, env=environment, capture_output=True, text=True)
            alone = subprocess.run([*words, warm.FLAG], env=environment, capture_output=True, text=True)
        finally:
            process.terminate()
    assert warmly.returncode == alone.returncode == 0
    assert warmly.stdout == alone.stdout and "correct" in warmly.stdout
    assert "torch" not in warmly.stderr and "torch" in alone.stderr
