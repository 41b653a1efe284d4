"""Watch in a pseudo-terminal: keys, and files saved like several editors do."""

import contextlib
import io
import os
import pty
import re
import select
import shutil
import signal
import struct
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from typed import read_output

from harness.check.results import GateResult
from harness.console import receive_progress, report_progress
from harness.learner import blanks
from harness.learner.exercise import Exercise
from harness.learner.progress import Progress
from harness.screens.watch import Check, Terminal, Watch
from harness.spec.catalogue import find_puzzle
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]
KEYS = "n next · t stay · r run · h hint · s show · d diff · l list · q quit"
START_SCRIPT = "import sys, pathlib; from harness.toolchain import roots; roots.CHECKOUT = pathlib.Path.cwd(); from harness.cli import main; sys.exit(main())"


class Session:
    """A watch process in a pseudo-terminal of `size` = (rows, columns)."""

    def __init__(self, folder: Path, *arguments: str, size: tuple[int, int] = (50, 120)):
        self.path = folder
        shutil.copytree(ROOT / "solutions" / "p22", folder / "solutions" / "p22")
        blanks.generate_problems(folder / "solutions", folder / "problems")
        self.numpy = folder / "problems" / "p22" / "backward.py"
        self.kernels = folder / "problems" / "p22" / "op" / "layernorm_linear.mojo"
        self.arguments, self.size = arguments, size
        self.pid = self.terminal = 0  # until `start`
        self.received = ""

    def start(self) -> None:
        """Start the watch process."""
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(self.path)
            environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)}
            environment.pop("COLUMNS", None)
            os.execve(sys.executable, [sys.executable, "-c", START_SCRIPT, *self.arguments], environment)
        ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", *self.size, 0, 0))

    def press(self, key: str) -> None:
        """Discard received output and press a key."""
        self.clear()
        os.write(self.terminal, key.encode())

    def clear(self) -> None:
        """Discard received output."""
        self.read(0.1)
        self.received = ""

    def read(self, seconds: float) -> bool:
        """Read available output; return False if the process has exited."""
        end = time.monotonic() + seconds
        while (remaining_s := end - time.monotonic()) > 0:
            if select.select([self.terminal], [], [], remaining_s)[0]:
                try:
                    data = os.read(self.terminal, 65536)
                except OSError:
                    return False
                if not data:
                    return False
                self.received += data.decode(errors="replace")
        return True

    @property
    def screen(self) -> str:
        """Text of the last complete screen."""
        screens = self.received.split("\x1b[2J\x1b[H")
        screens[-1] = re.sub(r"\x1b7.*?\x1b8", "", screens[-1])  # the status line
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screens[-1])

    def wait(self, text: str, seconds: float = 60) -> str:
        """Wait until the screen contains `words` and ends with the key line; return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            is_running = self.read(0.05)
            if text in self.screen and self.screen.rstrip().endswith(KEYS):
                return self.screen
            assert is_running, f"ended while waiting for {text!r}:\n{self.received}"
        raise AssertionError(f"no {text!r} on the screen:\n{self.screen}")

    def save(self, file: Path, **bodies: str) -> None:
        """Save a file with some blanks replaced."""
        segments = blanks.split_blanks(file.read_text())
        file.write_text(
            blanks.join_segments(segments, {id: tuple(body.splitlines()) for id, body in bodies.items()})
        )

    def wait_for_exit(self) -> int:
        """Wait for the process to exit; return its exit code."""
        while self.read(0.2):
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        """Kill the process if it is still running."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        if self.terminal:
            os.close(self.terminal)


@pytest.fixture
def watch(tmp_path):
    """A watch on the NumPy rung, which is fast to check."""
    session = Session(tmp_path, "watch", "p22", "--rung", "numpy")
    session.start()
    session.wait("⏳ db")
    yield session
    session.close()


WRONG_DB = "    return dy.mean((0, 1))"
RIGHT_DB = "    return dy.sum((0, 1))"
RIGHT_DW = '    return np.einsum("bso,bsh->oh", dy, x_hat * gamma + beta)'


def test_save_is_checked_and_advances_only_after_a_pass(watch):
    watch.save(watch.numpy, db=WRONG_DB)
    screen = watch.wait("❌ db")
    assert "got " in screen and "expected " in screen and "hint p22 numpy-db-2" in screen
    watch.press("h")
    watch.wait("Hint numpy-db-2 (2 of 3)")  # named in the diagnosis
    watch.press("n")
    assert "p22 in NumPy · db" in watch.wait("db has not passed")
    watch.save(watch.numpy, db=RIGHT_DB)
    screen = watch.wait("⏳ dW")
    heading, passed = screen.splitlines()[:2]
    assert "p22 in NumPy · dW" in heading and "1/5" in heading and passed.startswith("✅ db")
    watch.press("d")
    watch.wait("the same as the solution")
    watch.save(watch.numpy, db=RIGHT_DB, dW=RIGHT_DW)
    assert "✅ dW" in watch.wait("⏳ dgamma")


def test_t_stays_at_a_passed_gate_until_n(watch):
    watch.press("t")
    watch.wait("stays at a gate that passes")
    watch.save(watch.numpy, db=RIGHT_DB)
    screen = watch.wait("✅ db")
    assert "p22 in NumPy · db" in screen and "n goes on to the next gate" in screen
    watch.press("n")
    watch.wait("⏳ dW")
    watch.save(watch.numpy, db=RIGHT_DB, dW=RIGHT_DW)
    assert "✅ dW" in watch.wait("⏳ dgamma"), "n leaves the gate"


def test_edited_blank_is_checked(watch):
    watch.save(watch.numpy, dW="    return dy")
    assert "p22 in NumPy · dW" in watch.wait("❌ dW").splitlines()[0]
    watch.save(watch.numpy, db=WRONG_DB, dW="    return dy")
    assert "p22 in NumPy · db" in watch.wait("❌ db").splitlines()[0]
    watch.save(watch.numpy, db=WRONG_DB, dW=RIGHT_DW)
    watch.wait("✅ dW")
    watch.wait("⏳ dgamma")


def test_last_gate_suggests_the_next_step(watch):
    body = {
        id: blank.body
        for id, blank in blanks.find_blanks((ROOT / "solutions/p22/backward.py").read_text()).items()
    }
    watch.save(watch.numpy, **{id: "\n".join(lines) for id, lines in body.items()})
    assert "5/5" in watch.wait("n goes on with problems/p22/op/layernorm_linear.mojo")
    assert "NumPy rung: 5 of 5, solved. What now: p22, Mojo kernels" in watch.screen
    watch.press("n")
    watch.wait("⏳ ln")
    assert "p22 · ln" in watch.screen


def test_screen_fits_80_by_24(tmp_path):
    with contextlib.closing(Session(tmp_path, "watch", "p22", "--rung", "numpy", size=(24, 80))) as session:
        session.start()
        session.wait("⏳ db")
        session.save(session.numpy, db=WRONG_DB)
        session.wait("❌ db")
        for _ in range(4):
            session.press("h")
            screen = session.wait("Hint numpy-db-")
            assert len(screen.splitlines()) <= 24 and max(map(len, screen.splitlines())) <= 80
            assert screen.splitlines()[1].startswith("❌ db"), "the result is still shown"
        session.press("l")
        session.wait("NumPy rung")
        session.save(session.numpy, db="    print('a line')\n" * 40 + RIGHT_DB.replace("dy", "missing"))
        session.wait("missing")


@pytest.mark.parametrize(
    ("is_terminal", "is_interrupted", "end"),
    [(True, True, "q quit\n"), (True, False, "q quit"), (False, True, "result\n")],
)
def test_interrupt_ends_the_key_line_of_a_terminal(is_terminal, is_interrupted, end):
    """The following message "interrupted" is on a separate line."""
    console = Console(file=io.StringIO(), force_terminal=is_terminal, color_system=None, width=40, height=10)
    with contextlib.suppress(KeyboardInterrupt), Terminal(console) as terminal:
        terminal.show([Text("result")], "q quit")
        if is_interrupted:
            raise KeyboardInterrupt
    assert read_output(console).endswith(end) and (is_terminal or read_output(console) == end)


def test_long_screen_is_paged_by_m():
    console = Console(file=io.StringIO(), force_terminal=True, width=40, height=10)
    terminal = Terminal(console)
    lines = [Text(f"line {number}") for number in range(20)]

    def page(number: int) -> list[str]:
        console.file = io.StringIO()
        terminal.show(lines, "keys", number)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).splitlines()

    assert page(0) == [*(f"line {n}" for n in range(8)), "... lines 1 to 7 of 19; m shows more", "keys"]
    assert page(1)[:2] == ["line 0", "line 8"] and "8 to 14" in page(1)[-2]
    assert page(2)[1:] == [
        *(f"line {n}" for n in range(15, 20)),
        "... lines 15 to 19 of 19; m shows more",
        "keys",
    ]
    assert page(3) == page(0)


def test_progress_line_shows_activity_and_time():
    check = Check("dx", time.monotonic() - 75.5)
    with receive_progress(check.report_step):
        assert check.status == "checking dx, 75 s: starting"
        report_progress("fused on the virtual GPU: case 3 of 18 (wide)")
    assert check.status == "checking dx, 75 s: fused on the virtual GPU: case 3 of 18 (wide)"
    assert Check("dx", time.monotonic()).status == "checking dx ..."
    report_progress("without a listener")
    assert "case 3" in check.status


def make_watch(stream: io.StringIO) -> Watch:
    """Create a watch on a 40 x 10 terminal that writes to `stream`."""
    exercise = Exercise(find_puzzle("p22"), find_puzzle("p22").find_rung("numpy"))
    watch = Watch(exercise, "db", Console(file=stream, force_terminal=True, width=40, height=10))
    watch.terminal = Terminal(watch.console)
    return watch


def test_progress_line_keeps_the_previous_result():
    stream = io.StringIO()
    watch = make_watch(stream)
    assert watch.status_row == 2
    watch.passed_lines = [Text("✅ db correct"), Text("a line that takes more than one row of the screen")]
    assert watch.status_row == 5
    watch.terminal.overwrite_row("checking dW: 1 s", watch.status_row)
    assert "\x1b[5;1H" in stream.getvalue()
    watch.passed_lines *= 5
    assert watch.status_row == 2, "a screen with pages has the status at the top"


def test_progress_line_is_one_row():
    stream = io.StringIO()
    watch = make_watch(stream)
    watch.check = Check("db", time.monotonic() - 96, step="fused on the virtual GPU: case 13 of 30 (sums)")
    (row,) = watch.terminal.render_rows(watch.format_result())
    watch.terminal.overwrite_row(watch.check.status, watch.status_row)
    output = stream.getvalue()
    assert "\n" not in output and "checking db, 96 s: fused on the virtual…" in output
    assert "".join(part.text for part in row).rstrip() == "checking db, 96 s: fused on the virtual…"


@pytest.fixture
def start_watch(tmp_path, monkeypatch):
    """Return a function that starts an in-process watch whose checker calls `change` and accepts all gates."""

    def start(change=lambda: None) -> Watch:
        class Checker:
            def check(self, path, gates, *, on_first_case):
                change()
                return [GateResult(watch.exercise.find_gate(gates[0]), "correct")]

        monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
        watch = make_watch(io.StringIO())
        monkeypatch.setattr(watch, "checker", Checker())
        return watch

    return start


def test_save_during_a_check_is_checked_again(tmp_path, start_watch):
    """If a formatter rewrites the file during a check, the result is discarded."""
    session = Session(tmp_path)
    watch = start_watch(lambda: session.save(session.numpy, db=RIGHT_DB))
    watch.start_check()
    first = watch.current
    assert first.done.wait(20)
    watch.finish_check()
    assert watch.current is not first and not watch.progress.passed
    assert watch.current.done.wait(20)
    watch.finish_check()
    assert len(watch.progress.passed) == 1


def test_pass_advances_to_the_other_edited_blank(tmp_path, start_watch):
    session = Session(tmp_path)
    watch = start_watch()
    watch.follow_edits()
    first, *_, last = (gate.id for gate in watch.exercise.gates)
    session.save(session.numpy, **{first: RIGHT_DB, last: "    return dy"})
    watch.follow_edits()
    watch.start_check()
    assert watch.gate == first and watch.current.done.wait(20)
    Progress.load().record_hint("p20 relu", 1)
    watch.finish_check()
    assert watch.gate == last, "the gates between them are untouched"
    assert watch.current.done.wait(20)
    saved = Progress.load()
    assert saved.hints == {"p20 relu": 1} and len(saved.passed) == 1


def test_keys_trigger_their_actions(watch):
    watch.press("h")
    watch.wait("Hint numpy-db-1 (1 of 3)")
    watch.press("h")
    watch.wait("Hint numpy-db-2 (2 of 3)")
    watch.press("d")
    assert "dy.sum" not in watch.wait("--spoil shows the solution")
    watch.press("l")
    assert "· dx" in watch.wait("NumPy rung")
    watch.press("x")
    watch.save(watch.numpy, db=RIGHT_DB)
    watch.wait("✅ db")
    watch.press("d")
    watch.wait("the same as the solution")
    watch.press("s")
    assert "dW: the NumPy rung has no kernel to show" in watch.wait("no kernel to show")
    watch.press("r")
    watch.wait("⏳ dW")
    assert "checking dW ..." in watch.received
    watch.press("n")
    watch.wait("dW has not passed")
    watch.press("n")
    watch.wait("⏳ dgamma")
    watch.press("q")
    assert watch.wait_for_exit() == 0


def test_each_changed_save_is_checked_once(watch):
    """Vim replaces the file by a new one; other editors write in several steps."""
    text = watch.numpy.read_text()
    watch.clear()
    watch.numpy.touch()
    watch.read(1.0)
    assert watch.received == "", "an unchanged save is ignored"
    temporary = watch.numpy.with_suffix(".tmp")
    temporary.write_text(text.replace("    # FILL IN (about 1 line)", WRONG_DB, 1))
    os.replace(temporary, watch.numpy)
    watch.wait("❌ db")
    text = text.replace("    # FILL IN (about 1 line)", RIGHT_DB, 1)
    watch.clear()
    with watch.numpy.open("w") as file:
        for start in range(0, len(text), len(text) // 10):
            file.write(text[start : start + len(text) // 10])
            file.flush()
            time.sleep(0.05)
    watch.wait("✅ db")
    assert watch.received.count("checking db ...") == 1


def test_broken_file_is_reported_and_watching_continues(watch):
    text = watch.numpy.read_text()
    watch.numpy.write_text(text[: text.index("# BLANK-END dW")])
    watch.wait("blank dW has no BLANK-END")
    watch.numpy.write_text(text.replace("def dW(", "def dW(("))
    watch.wait("backward.py:")
    watch.numpy.unlink()
    watch.wait("the file is missing")
    watch.numpy.mkdir()
    (watch.numpy / "mine").write_text("mine")
    watch.press("r")
    watch.wait("there is a folder in place of the file")
    watch.press("l")
    watch.wait("there is a folder in place of the file")
    watch.press("n")
    watch.press("n")
    watch.press("h")
    watch.wait("Hint numpy-db-1")
    watch.numpy.rename(watch.numpy.with_suffix(".folder"))
    watch.numpy.write_text(text.replace("    # FILL IN (about 1 line)", RIGHT_DB, 1))
    watch.wait("✅ db")
    assert "Traceback" not in watch.received


@pytest.mark.parametrize(("key", "code"), [("\x04", 0), ("\x03", 130)], ids=["Ctrl-D", "Ctrl-C"])
def test_exit_restores_the_terminal(watch, key, code):
    assert not termios.tcgetattr(watch.terminal)[3] & termios.ICANON, "unbuffered input"
    watch.press(key)
    os.waitid(os.P_PID, watch.pid, os.WEXITED | os.WNOWAIT)
    assert termios.tcgetattr(watch.terminal)[3] & termios.ICANON, "line-buffered input"
    assert watch.wait_for_exit() == code


@pytest.mark.compiles
def test_keys_work_while_a_kernel_compiles(tmp_path):
    with contextlib.closing(Session(tmp_path, "watch", "p22", "--gate", "db")) as session:
        session.start()
        session.wait("⏳ db")
        session.save(
            session.kernels,
            db="        for o in range(O):\n            atomic_add(grad_bias, o, dyy[row, o])",
        )
        assert "Nothing called `dyy`" in session.wait("use of unknown declaration 'dyy'", 240)
        expected = (
            "        for o in range(O):\n            atomic_add(grad_bias, o, dy[row, o].cast[accum]())"
        )
        session.save(session.kernels, db=expected)
        session.wait("checking db ...")
        session.press("h")
        assert "checking db ..." in session.wait("Hint db-1 (1 of 3)", 5)
        session.wait("✅ db", 240)
        session.wait("1/8", 240)  # after the other cases
