"""A learner's code that exits, crashes or hangs fails only its gate; the checker keeps running."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from typed import unwrap

from harness.check.checker import create_checker, load_checker
from harness.check.results import GateResult, compute_exit_code
from harness.check.subprocess_checker import SubprocessChecker
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.puzzles.p24.spec import PUZZLE
from harness.spec.catalogue import find_puzzle, list_puzzle_names
from harness.spec.rungs import MojoRung
from harness.toolchain import roots

PYTHON_RUNGS = [
    (name, rung.id)
    for name in list_puzzle_names()
    for rung in find_puzzle(name).rungs
    if not isinstance(rung, MojoRung)
]
EXIT_MESSAGE = "the code exited the process, so it was not checked"
MESSAGES = {
    "raise SystemExit(0)": f"SystemExit: 0: {EXIT_MESSAGE}",
    "__import__('sys').exit()": f"SystemExit: {EXIT_MESSAGE}",
    "__import__('os')._exit(0)": f"os._exit(0): {EXIT_MESSAGE}",
    "raise GeneratorExit": f"GeneratorExit: {EXIT_MESSAGE}",
    "raise KeyboardInterrupt": f"KeyboardInterrupt: {EXIT_MESSAGE}",
    "__import__('os').abort()": "the process ended by SIGABRT, so it was not checked",
    "while True: pass": "timed out after 5 s",
}
"""Statement -> expected message after file and line."""


@pytest.fixture
def short_timeout(statement, monkeypatch):
    """Shorten the timeout for the endless loop only, since correct code may be slow on a busy machine."""
    if statement == "while True: pass":
        monkeypatch.setenv("WORKBOOK_GATE_SECONDS", "5")


@pytest.fixture
def exercise(tmp_path):
    """Exercise with a modifiable copy of puzzle 24's solved NumPy file."""
    return copy_solution(tmp_path, "p24", "numpy")


def copy_solution(folder, puzzle, rung):
    exercise = Exercise(find_puzzle(puzzle), find_puzzle(puzzle).find_rung(rung), folder)
    exercise.path.parent.mkdir(parents=True)
    exercise.path.write_text(exercise.solution.read_text())
    return exercise


def insert_into_first_blanks(exercise, *statements):
    """Insert statements at the starts of the first blanks; return the first one's line number."""
    text, bodies = exercise.solution.read_text(), {}
    for gate, statement in zip(exercise.gates, statements, strict=False):
        body = blanks.find_blanks(text)[gate.id].body
        first = next(line for line in body if line.strip())
        bodies[gate.id] = (first[: len(first) - len(first.lstrip())] + statement, *body)
    exercise.path.write_text(blanks.join_segments(blanks.split_blanks(text), bodies))
    return 1 + [line.strip() for line in exercise.path.read_text().splitlines()].index(statements[0])


def prepend_statement(exercise, statement):
    exercise.path.write_text(f"{statement}\n{exercise.solution.read_text()}")


@pytest.mark.parametrize("statement", MESSAGES)
@pytest.mark.usefixtures("short_timeout")
def test_blank_that_exits_is_wrong_and_other_gates_are_checked(exercise, statement):
    line = insert_into_first_blanks(exercise, statement)
    first, *others = create_checker(exercise).check(exercise.path)
    assert first.state == "wrong" and first.hint == "numpy-index-1"
    assert first.diagnosis == [f"{exercise.path}:{line}: {MESSAGES[statement]}"]
    assert [result.state for result in others] == ["correct"] * 3


@pytest.mark.parametrize("statement", MESSAGES)
@pytest.mark.usefixtures("short_timeout")
def test_file_that_exits_at_import_is_damaged(exercise, statement):
    prepend_statement(exercise, statement)
    with pytest.raises(DamagedFile) as error:
        create_checker(exercise).check(exercise.path)
    assert str(error.value) == f"{exercise.path}:1: {MESSAGES[statement]}"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("__import__('os').kill(__import__('os').getpid(), 9)", "the process ended by SIGKILL (probably out of memory)"),
        (
            "__import__('os').closerange(3, 99) or __import__('time').sleep(99)",
            "the connection of the process was closed",
        ),
    ],
    ids=["SIGKILL", "closed connection"],
)  # fmt: skip
def test_killed_process_is_reported(exercise, statement, message):
    insert_into_first_blanks(exercise, statement)
    (result,) = create_checker(exercise).check(exercise.path, ["index"])
    assert result.diagnosis == [f"{exercise.path}: {message}, so it was not checked"]


def test_forked_process_sends_no_result(exercise):
    """A blank calls `os.fork`; only one process sends results."""
    # Fork only once: a loop would double the processes in each iteration.
    insert_into_first_blanks(
        exercise,
        "__import__('os').environ.setdefault('FORKED', str(__import__('os').environ.get('FORKED') or __import__('os').fork()))",
    )
    assert [result.state for result in create_checker(exercise).check(exercise.path)] == ["correct"] * 4


def test_fork_server_preloads_torch_only_if_parent_imported_it(exercise):
    """Use a new process, since another test may have started the fork server."""
    program = """\
import multiprocessing, sys
from pathlib import Path

def main():
    if sys.argv[2] == "torch":
        import torch
    from harness.check.subprocess_checker import SubprocessChecker, can_fork
    from harness.learner.exercise import Exercise
    from harness.puzzles.p24.spec import PUZZLE

    can_fork.__code__ = (lambda: False).__code__
    checker = SubprocessChecker(Exercise(PUZZLE, PUZZLE.find_rung("numpy"), Path(sys.argv[1])))
    checker.check(checker.exercise.path, ["index"])
    imported = "__import__('os')._exit('torch' in __import__('sys').modules)"
    later = multiprocessing.get_context("forkserver").Process(target=eval, args=(imported,))
    later.start()
    later.join()
    print(later.exitcode)
    checker.close()

if __name__ == "__main__":
    main()
"""
    script = exercise.root / "program.py"
    script.write_text(program)
    for module, expected in (("torch", "1"), ("none", "0")):
        completed = subprocess.run(
            [sys.executable, str(script), str(exercise.root), module], capture_output=True, text=True, cwd=roots.CHECKOUT,
            env=os.environ | {"PYTHONPATH": str(roots.CHECKOUT)},
        )  # fmt: skip
        assert completed.stdout.split() == [expected], completed.stderr


def test_process_is_reused_and_restarted_after_a_crash(exercise):
    checker = SubprocessChecker(exercise)
    assert [result.state for result in checker.check(exercise.path, ["index"])] == ["correct"]
    first = unwrap(checker._process).process.pid
    assert [result.state for result in checker.check(exercise.path, ["tiles"])] == ["correct"]
    assert unwrap(checker._process).process.pid == first
    insert_into_first_blanks(exercise, "__import__('os')._exit(0)")
    assert [result.state for result in checker.check(exercise.path, ["index"])] == ["wrong"]
    exercise.path.write_text(exercise.solution.read_text())
    assert [result.state for result in checker.check(exercise.path)] == ["correct"] * 4
    last = unwrap(checker._process).process
    checker.close()
    assert not last.is_alive()


def test_gate_that_depends_on_a_crashed_gate_blames_it(exercise):
    """The gates run in different processes."""
    first, second, *_ = (gate.id for gate in exercise.gates)
    insert_into_first_blanks(exercise, "__import__('os')._exit(0)", "raise ValueError('own error')")
    dependent = Exercise(
        exercise.puzzle, replace(exercise.rung, dependencies={second: (first,)}), exercise.root
    )
    independent = {result.gate.id: result for result in create_checker(exercise).check(exercise.path)}
    assert "own error" in independent[second].diagnosis[0]
    blamed = {result.gate.id: result for result in create_checker(dependent).check(exercise.path)}
    assert blamed[second].diagnosis == [f"computed from {first}, which is wrong: fix that first"]
    assert "os._exit(0)" in blamed[first].diagnosis[0]


def start_run(folder, *flags, **pipes) -> subprocess.Popen:
    """Start `p24 --rung numpy` on the file in a folder, in a new process."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom harness import cli\nfrom harness.learner.exercise import Exercise\n"
        f"root = Path({str(folder)!r})\ninit = Exercise.__init__\n"
        "def replacement(self, puzzle, rung, _=None): init(self, puzzle, rung, root)\n"
        f"Exercise.__init__ = replacement\nsys.exit(cli.main({['p24', '--rung', 'numpy', *flags]}))\n"
    )
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=roots.CHECKOUT, stdout=subprocess.PIPE, text=True, **pipes)


def test_blank_can_read_from_the_terminal(exercise, tmp_path):
    """Without a terminal, `input()` raises EOFError."""
    insert_into_first_blanks(exercise, "assert input('typed? ') == 'yes'")
    parent_end, child_end = os.openpty()
    with start_run(tmp_path, "--gate", "index", stdin=child_end, stderr=subprocess.STDOUT) as run:
        os.write(parent_end, b"yes\n" * 100)  # one for each case
        out, _ = run.communicate(timeout=120)
    os.close(parent_end)
    os.close(child_end)
    assert "✅ index" in out and "typed? " in out
    (result,) = create_checker(exercise).check(exercise.path, ["index"])
    assert result.state == "wrong" and "EOFError" in result.diagnosis[0]


def test_exception_is_reported_as_without_a_subprocess(exercise):
    insert_into_first_blanks(exercise, "1 / 0")
    in_process, in_subprocess = (
        checker.check(exercise.path) for checker in (load_checker(exercise), create_checker(exercise))
    )
    assert [(r.state, r.diagnosis, r.hint) for r in in_process] == [
        (r.state, r.diagnosis, r.hint) for r in in_subprocess
    ]
    prepend_statement(exercise, "1 / 0")
    with pytest.raises(DamagedFile, match=":1: ZeroDivisionError: division by zero"):
        create_checker(exercise).check(exercise.path)


def test_checker_error_shows_its_traceback(exercise):
    """An internal error of the workbook shows the subprocess's traceback and is not a result."""
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*unexpected keyword argument 'nonsense'"):
        SubprocessChecker(exercise, nonsense=1).check(exercise.path)


def test_checker_that_omits_a_gate_is_an_error(exercise, monkeypatch):
    from harness.check.python_files import PythonChecker

    monkeypatch.setattr("harness.check.subprocess_checker.can_fork", lambda: True)
    monkeypatch.setattr(PythonChecker, "check", lambda self, path, gates, cases: [])
    with pytest.raises(RuntimeError, match="the checker returned no result for index, tiles"):
        SubprocessChecker(exercise).check(exercise.path, ["index", "tiles"])


def test_checker_process_ends_with_its_parent(exercise, tmp_path):
    """Kill the parent while the learner's code sleeps in a blank."""
    write_pid = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))"
    insert_into_first_blanks(exercise, f"{write_pid} and __import__('time').sleep(999)")
    program = (
        "from pathlib import Path\nfrom harness.check.subprocess_checker import SubprocessChecker\nfrom harness.learner.exercise import Exercise\n"
        "from harness.puzzles.p24.spec import PUZZLE\n"
        f"work = Exercise(PUZZLE, PUZZLE.find_rung('numpy'), Path({str(tmp_path)!r}))\nSubprocessChecker(work).check(work.path)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=roots.CHECKOUT)
    pid = tmp_path / "pid"
    wait_for(lambda: pid.exists() and pid.read_text())
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_running(int(pid.read_text())))


def wait_for(condition):
    """Wait until condition() is true, for at most a minute."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def is_running(pid):
    """Return whether a process runs and is not a zombie."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(("puzzle", "rung"), PYTHON_RUNGS)
def test_exiting_code_passes_on_no_python_rung(puzzle, rung, tmp_path):
    exercise = copy_solution(tmp_path, puzzle, rung)
    gate = exercise.gates[0].id
    in_process = load_checker(exercise)
    prepend_statement(exercise, "raise SystemExit(0)")
    with pytest.raises(DamagedFile, match=":1: SystemExit: 0: the code exited the process"):
        in_process.check(exercise.path, [gate])
    for checker, statement in (
        (in_process, "raise SystemExit(0)"),
        (create_checker(exercise), "__import__('os')._exit(0)"),
    ):
        insert_into_first_blanks(exercise, statement)
        assert get_errors(checker, exercise, gate), statement


def get_errors(checker, exercise, gate):
    try:
        (result,) = checker.check(exercise.path, [gate])
    except DamagedFile as error:  # the file's import runs the blank
        return [str(error)]
    return result.diagnosis if result.state == "wrong" else []


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["correct", "correct"], 0),
        (["correct"], 1),
        ([], 1),
        (["unsolved"], 1),
        (["correct", "unsolved"], 3),
        (["unsolved", "wrong"], 1),
        (["correct", "nonsense"], 1),
    ],
)
def test_exit_code_requires_a_result_for_every_gate(states, code):
    gates = PUZZLE.list_gates(PUZZLE.find_rung("numpy"))[:2]
    results = [GateResult(gate, state) for gate, state in zip(gates, states, strict=False)]
    assert compute_exit_code(results, [gate.id for gate in gates]) == code


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit("reason")])
def test_run_that_exits_early_fails(command_line, monkeypatch, error):
    def exit_early(*arguments):
        raise error

    monkeypatch.setattr("harness.cli.run_puzzle", exit_early)
    result = command_line("p24", "--rung", "numpy")
    assert result.code == 1
    assert result.err == f"error: {type(error).__name__} before the end of the run: {error}\n"


def test_ctrl_c_during_an_endless_blank_ends_the_run(exercise, tmp_path):
    insert_into_first_blanks(exercise, "print('started', flush=True); __import__('time').sleep(999)")
    run = start_run(tmp_path, stderr=subprocess.PIPE)
    assert unwrap(run.stdout).readline() == "started\n"
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (130, "", "interrupted\n")
