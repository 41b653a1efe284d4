"""A learner's code that leaves the process, crashes or never ends costs a verdict, and never the judge."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from typed import present

from harness.check.checker import create_checker, make_checker
from harness.check.results import GateResult, exit_code
from harness.check.subprocess_checker import SubprocessChecker
from harness.errors import DamagedFile
from harness.learner import blanks
from harness.learner.work import Work
from harness.puzzles.p24.spec import PUZZLE
from harness.spec.catalogue import find_puzzle, puzzle_names
from harness.spec.rungs import MojoRung
from harness.toolchain import roots

PYTHON = [
    (name, rung.id)
    for name in puzzle_names()
    for rung in find_puzzle(name).rungs
    if not isinstance(rung, MojoRung)
]
LEFT = "the code exited the process, so it was not checked"
WAYS = {
    "raise SystemExit(0)": f"SystemExit: 0: {LEFT}",
    "__import__('sys').exit()": f"SystemExit: {LEFT}",
    "__import__('os')._exit(0)": f"os._exit(0): {LEFT}",
    "raise GeneratorExit": f"GeneratorExit: {LEFT}",
    "raise KeyboardInterrupt": f"KeyboardInterrupt: {LEFT}",
    "__import__('os').abort()": "the process ended by SIGABRT, so it was not checked",
    "while True: pass": "timed out after 2 s",
}
"""A statement -> what is said of it after file and line."""


@pytest.fixture
def work(tmp_path):
    """The solved NumPy rung of puzzle 24, in a file that a test may change."""
    return copy_of(tmp_path, "p24", "numpy")


def copy_of(folder, puzzle, rung):
    """A puzzle's solved file of a rung in another folder."""
    it = Work(find_puzzle(puzzle), find_puzzle(puzzle).rung(rung), folder)
    it.path.parent.mkdir(parents=True)
    it.path.write_text(it.solution.read_text())
    return it


def with_first(work, statement):
    """Puts a statement before what stands in the first blank; returns its line."""
    text = work.solution.read_text()
    blank = blanks.find(text)[work.gates[0].id]
    first = next(line for line in blank.body if line.strip())
    indent = first[: len(first) - len(first.lstrip())]
    changed = blanks.join(blanks.split(text), {work.gates[0].id: (f"{indent}{statement}", *blank.body)})
    work.path.write_text(changed)
    return 1 + [line.strip() for line in changed.splitlines()].index(statement)


def on_top(work, statement):
    """Puts a statement before the whole file."""
    work.path.write_text(f"{statement}\n{work.solution.read_text()}")


@pytest.mark.parametrize("statement", WAYS)
def test_a_blank_that_leaves_is_wrong_and_the_other_gates_are_judged(work, statement, monkeypatch):
    monkeypatch.setenv("WORKBOOK_GATE_SECONDS", "2")
    line = with_first(work, statement)
    first, *others = create_checker(work).check(work.path)
    assert first.state == "wrong" and first.hint == "numpy-index-1"
    assert first.diagnosis == [f"{work.path}:{line}: {WAYS[statement]}"]
    assert [result.state for result in others] == ["correct"] * 3


@pytest.mark.parametrize("statement", WAYS)
def test_a_file_that_leaves_before_any_gate_is_damaged(work, statement, monkeypatch):
    monkeypatch.setenv("WORKBOOK_GATE_SECONDS", "2")
    on_top(work, statement)
    with pytest.raises(DamagedFile) as error:
        create_checker(work).check(work.path)
    assert str(error.value) == f"{work.path}:1: {WAYS[statement]}"


def test_a_killed_process_is_named_with_what_may_have_killed_it(work):
    with_first(work, "__import__('os').kill(__import__('os').getpid(), 9)")
    (result,) = create_checker(work).check(work.path, ["index"])
    said = "the process ended by SIGKILL (probably out of memory), so it was not checked"
    assert result.diagnosis == [f"{work.path}: {said}"]


def test_a_file_that_closes_every_connection_is_wrong(work):
    with_first(work, "__import__('os').closerange(3, 99) or __import__('time').sleep(99)")
    (result,) = create_checker(work).check(work.path, ["index"])
    assert result.diagnosis == [
        f"{work.path}: the connection of the process was closed, so it was not checked"
    ]


def test_a_copy_of_the_process_answers_nothing(work):
    """`os.fork` in a blank: one of the two speaks."""
    # Once: a fork in a loop doubles with every turn.
    with_first(
        work,
        "__import__('os').environ.setdefault('FORKED', str(__import__('os').environ.get('FORKED') or __import__('os').fork()))",
    )
    assert [result.state for result in create_checker(work).check(work.path)] == ["correct"] * 4


def test_where_torch_is_here_the_server_of_a_numpy_judge_has_it_too(work):
    """In a process of its own: here another test may have started the server. Each rank imported torch by itself."""
    program = """\
import multiprocessing, sys
from pathlib import Path

def main():
    if sys.argv[2] == "torch":
        import torch
    from harness.check.subprocess_checker import SubprocessChecker, can_fork
    from harness.learner.work import Work
    from harness.puzzles.p24.spec import PUZZLE

    can_fork.__code__ = (lambda: False).__code__
    judge = SubprocessChecker(Work(PUZZLE, PUZZLE.rung("numpy"), Path(sys.argv[1])))
    judge.check(judge.work.path, ["index"])
    imported = "__import__('os')._exit('torch' in __import__('sys').modules)"
    later = multiprocessing.get_context("forkserver").Process(target=eval, args=(imported,))
    later.start()
    later.join()
    print(later.exitcode)
    judge.close()

if __name__ == "__main__":
    main()
"""
    script = work.root / "program.py"
    script.write_text(program)
    for word, expected in (("torch", "1"), ("none", "0")):
        done = subprocess.run(
            [sys.executable, str(script), str(work.root), word], capture_output=True, text=True, cwd=roots.CHECKOUT,
            env=os.environ | {"PYTHONPATH": str(roots.CHECKOUT)},
        )  # fmt: skip
        assert done.stdout.split() == [expected], done.stderr


def test_the_process_is_kept_and_comes_back_after_a_fall(work):
    judge = SubprocessChecker(work)
    assert [result.state for result in judge.check(work.path, ["index"])] == ["correct"]
    first = present(judge._process).process.pid
    assert [result.state for result in judge.check(work.path, ["tiles"])] == ["correct"]
    assert present(judge._process).process.pid == first
    with_first(work, "__import__('os')._exit(0)")
    assert [result.state for result in judge.check(work.path, ["index"])] == ["wrong"]
    work.path.write_text(work.solution.read_text())
    assert [result.state for result in judge.check(work.path)] == ["correct"] * 4
    last = present(judge._process).process
    judge.close()
    assert not last.is_alive()


def test_what_is_computed_from_a_gate_that_ended_the_process_is_put_down_to_it(work):
    """The verdicts come from two processes, neither of which has both."""
    first, second, *_ = (gate.id for gate in work.gates)
    with_first(work, "__import__('os')._exit(0)")
    text = work.path.read_text()
    body = blanks.find(text)[second].body
    line = next(line for line in body if line.strip())
    indent = line[: len(line) - len(line.lstrip())]
    broken = {second: (f"{indent}raise ValueError('of its own')", *body)}
    work.path.write_text(blanks.join(blanks.split(text), broken))
    needs = Work(work.puzzle, replace(work.rung, needs={second: (first,)}), work.root)
    alone = {result.gate.id: result for result in create_checker(work).check(work.path)}
    assert "of its own" in alone[second].diagnosis[0]
    blamed = {result.gate.id: result for result in create_checker(needs).check(work.path)}
    assert blamed[second].diagnosis == [f"computed from {first}, which is wrong: fix that first"]
    assert "os._exit(0)" in blamed[first].diagnosis[0]


def on_file_in(folder, *flags, **pipes) -> subprocess.Popen:
    """Start `p24 --rung numpy` on the file in a folder, in a process of its own."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom harness import cli\nfrom harness.learner.work import Work\n"
        f"root = Path({str(folder)!r})\nhonest = Work.__init__\n"
        "def here(self, puzzle, rung, _=None): honest(self, puzzle, rung, root)\n"
        f"Work.__init__ = here\nsys.exit(cli.main({['p24', '--rung', 'numpy', *flags]}))\n"
    )
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, cwd=roots.CHECKOUT, stdout=subprocess.PIPE, text=True, **pipes)


def test_a_blank_may_read_from_the_terminal(work, tmp_path):
    """`input()` and `breakpoint()` reach who sits there; without a terminal there is nothing to read."""
    with_first(work, "assert input('typed? ') == 'yes'")
    ours, theirs = os.openpty()
    with on_file_in(tmp_path, "--gate", "index", stdin=theirs, stderr=subprocess.STDOUT) as run:
        os.write(ours, b"yes\n" * 100)  # one for each case
        out, _ = run.communicate(timeout=120)
    os.close(ours)
    os.close(theirs)
    assert "✅ index" in out and "typed? " in out
    (result,) = create_checker(work).check(work.path, ["index"])
    assert result.state == "wrong" and "EOFError" in result.diagnosis[0]


def test_an_exception_is_what_it_is_in_this_process(work):
    with_first(work, "1 / 0")
    here, apart = (judge.check(work.path) for judge in (make_checker(work), create_checker(work)))
    assert [(r.state, r.diagnosis, r.hint) for r in here] == [(r.state, r.diagnosis, r.hint) for r in apart]
    on_top(work, "1 / 0")
    with pytest.raises(DamagedFile, match=":1: ZeroDivisionError: division by zero"):
        create_checker(work).check(work.path)


def test_a_checker_that_fails_says_where(work):
    """A defect of the workbook is no verdict: the traceback of the other process is shown."""
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*unexpected keyword argument 'nonsense'"):
        SubprocessChecker(work, nonsense=1).check(work.path)


def test_a_checker_that_passes_a_gate_over_in_silence_is_an_error(work, monkeypatch):
    from harness.check.python_files import PythonChecker

    monkeypatch.setattr("harness.check.subprocess_checker.can_fork", lambda: True)
    monkeypatch.setattr(PythonChecker, "check", lambda self, path, gates, cases: [])
    with pytest.raises(RuntimeError, match="the checker returned no result for index, tiles"):
        SubprocessChecker(work).check(work.path, ["index", "tiles"])


def test_the_judge_ends_with_who_asks(work, tmp_path):
    """Killed, and so without a word to its judge, who sleeps in a blank."""
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid()))"
    with_first(work, f"{note} and __import__('time').sleep(999)")
    asks = (
        "from pathlib import Path\nfrom harness.check.subprocess_checker import SubprocessChecker\nfrom harness.learner.work import Work\n"
        "from harness.puzzles.p24.spec import PUZZLE\n"
        f"work = Work(PUZZLE, PUZZLE.rung('numpy'), Path({str(tmp_path)!r}))\nSubprocessChecker(work).check(work.path)\n"
    )
    asker = subprocess.Popen([sys.executable, "-c", asks], cwd=roots.CHECKOUT)
    pid = tmp_path / "pid"
    wait_for(lambda: pid.exists() and pid.read_text())
    asker.kill()
    asker.wait()
    wait_for(lambda: not alive(int(pid.read_text())))


def wait_for(condition):
    """Until something is so, or a minute."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(pid):
    """Whether a process runs; one that nobody has asked about since it ended does not."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(("puzzle", "rung"), PYTHON)
def test_no_rung_in_python_takes_leaving_for_success(puzzle, rung, tmp_path):
    work = copy_of(tmp_path, puzzle, rung)
    gate = work.gates[0].id
    here = make_checker(work)
    on_top(work, "raise SystemExit(0)")
    with pytest.raises(DamagedFile, match=":1: SystemExit: 0: the code exited the process"):
        here.check(work.path, [gate])
    for judge, statement in (
        (here, "raise SystemExit(0)"),
        (create_checker(work), "__import__('os')._exit(0)"),
    ):
        with_first(work, statement)
        assert said_of(judge, work, gate), statement


def said_of(judge, work, gate):
    """What a judge has against a gate."""
    try:
        (result,) = judge.check(work.path, [gate])
    except DamagedFile as error:  # the blank is run with the file
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
def test_nothing_is_right_that_no_verdict_says(states, code):
    gates = PUZZLE.gates_of(PUZZLE.rung("numpy"))[:2]
    results = [GateResult(gate, state) for gate, state in zip(gates, states, strict=False)]
    assert exit_code(results, [gate.id for gate in gates]) == code


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit("a word")])
def test_a_run_that_is_left_is_no_success(command_line, monkeypatch, error):
    def leave(*arguments):
        raise error

    monkeypatch.setattr("harness.cli.run_puzzle", leave)
    finished = command_line("p24", "--rung", "numpy")
    assert finished.code == 1
    assert finished.err == f"error: {type(error).__name__} before the end of the run: {error}\n"


def test_ctrl_c_while_a_blank_never_ends(work, tmp_path):
    with_first(work, "print('begun', flush=True); __import__('time').sleep(999)")
    run = on_file_in(tmp_path, stderr=subprocess.PIPE)
    assert present(run.stdout).readline() == "begun\n"
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (130, "", "interrupted\n")
