"""Implement `watch`: check the current gate each time one of its files is saved.

`Watch` runs the loop and handles keys, `Terminal` reads the keyboard and draws the screen, `FileWatcher`
detects saves by comparing contents, which works with every editor and network folder. Each check runs in a
thread.
"""

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from harness.check.checker import RungChecker, create_checker
from harness.check.subprocess_checker import SubprocessChecker
from harness.console import format_path, make_console, make_relative, receive_progress, wrap_hanging
from harness.errors import DamagedFile, WorkbookError
from harness.learner.blanks import Blank
from harness.learner.exercise import Exercise
from harness.learner.progress import IN_PROGRESS, Progress, hash_blank
from harness.screens import report
from harness.screens.exercise import (
    describe_next_step,
    describe_unsaved,
    find_next_exercise,
    format_gates,
    format_progress_bar,
    read_next_hint,
    show_difference,
)
from harness.spec.puzzle import Gate
from harness.spec.rungs import get_rung_name
from harness.toolchain.cache import compute_digest

POLL_INTERVAL_S = 0.05
"""Interval between polls of the files and the keyboard."""
DEBOUNCE_S = 0.2
"""Time that files must be unchanged before a check, because editors may write a file in several steps."""
END_OF_INPUT = "\x04"
KEYS = "n next · t stay · r run · h hint · s show · d diff · l list · q quit"


class FileWatcher:
    """Detects changes of an exercise's files."""

    def __init__(self, exercise: Exercise):
        self.exercise = exercise
        self.last_digest = self.hash_files()
        self.changed_at: float | None = None
        self.last_stable_digest = self.last_digest

    def hash_files(self) -> str:
        """Return a hash of all names and contents; a file that cannot be read counts as empty."""
        parts: list[str | bytes] = []
        for path in self.exercise.files:
            parts.append(path.name)
            try:
                parts.append(path.read_bytes())
            except OSError:
                parts.append(b"")
        return compute_digest(parts)

    def has_changed(self) -> bool:
        """Check whether the contents have changed, and have then stayed the same for DEBOUNCE_S."""
        digest = self.hash_files()
        if digest != self.last_digest:
            self.last_digest, self.changed_at = digest, time.monotonic()
        is_stable = self.changed_at is None or time.monotonic() - self.changed_at >= DEBOUNCE_S
        if digest == self.last_stable_digest or not is_stable:
            return False
        self.last_stable_digest = digest
        return True


class Terminal:
    """Reads single keys and draws the screen; without a terminal, only prints lines."""

    def __init__(self, console: Console):
        self.console = console
        self.keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        self.saved_attributes = None

    def __enter__(self) -> "Terminal":
        if self.keyboard is not None:
            self.saved_attributes = termios.tcgetattr(self.keyboard)
            tty.setcbreak(self.keyboard)
        return self

    def __exit__(self, exception_type: type | None, *_) -> None:
        if exception_type is KeyboardInterrupt and self.console.is_terminal:
            self.console.print()  # so that the message does not follow the keys on their line
        if self.saved_attributes is not None and self.keyboard is not None:
            termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self.saved_attributes)

    def read_key(self, timeout_s: float) -> str:
        """Return the key pressed before the timeout, "" if none, or "q" if the keyboard is closed."""
        if self.keyboard is None:
            time.sleep(timeout_s)
            return ""
        if not select.select([self.keyboard], [], [], timeout_s)[0]:
            return ""
        try:
            key = os.read(self.keyboard, 1).decode(errors="replace")
        except OSError:
            key = ""
        return "q" if key in ("", END_OF_INPUT) else key

    def show(self, lines: Iterable[RenderableType], footer: str, page: int = 0) -> None:
        """Show the first line, one page of the other lines, and the footer."""
        if not self.console.is_terminal:
            for line in lines:
                self.console.print(line, soft_wrap=True)
            return
        rows = self.render_rows(lines)
        available_rows = self.console.height - 1
        if len(rows) > available_rows:
            size = available_rows - 2
            first = page % -(-(len(rows) - 1) // size) * size
            shown = rows[1 + first :][:size]
            position = f"... lines {first + 1} to {first + len(shown)} of {len(rows) - 1}; m shows more"
            rows = [rows[0], *shown, [Segment(position, Style(dim=True))]]
        self.console.clear()
        self.console.print(Segments([part for row in rows for part in (*row, Segment.line())]), end="")
        self.console.print(Text(footer, style="reverse"), end="")

    def render_rows(self, lines: Iterable[RenderableType]) -> list[list[Segment]]:
        """Wrap lines into screen rows."""
        rows: list[list[Segment]] = []
        for line in lines:
            for part in wrap_hanging(self.console, line) if isinstance(line, Text) else [line]:
                rows += self.console.render_lines(part, pad=False)
        return rows

    def overwrite_row(self, text: str, row: int) -> None:
        """Overwrite one row of the screen, counted from 1, without moving the cursor."""
        if self.console.is_terminal:
            with self.console.capture() as captured:
                # print joins its arguments and drops a Text's own no_wrap.
                self.console.print(Text(text, style="dim"), end="", no_wrap=True, overflow="ellipsis")
            self.console.file.write(f"\x1b7\x1b[{row};1H\x1b[2K{captured.get()}\x1b8")
            self.console.file.flush()


@dataclass
class Check:
    """A running or finished check: the gate, its blanks at the start, the results, and the times.

    `first_results` are the results of the first case, if the checker reports them; `step` is its current
    step.
    """

    gate: str
    started_at: float
    blanks: dict[str, Blank] = field(default_factory=dict)
    first_results: list = field(default_factory=list)
    results: list = field(default_factory=list)
    error: str = ""
    step: str = ""
    first_results_at: float = 0.0
    duration_s: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_correct(self) -> bool:
        return bool(self.results) and all(result.state == "correct" for result in self.results)

    def report_step(self, step: str) -> None:
        """Store the checker's current step; called from the check's thread."""
        self.step = step

    @property
    def status(self) -> str:
        """Elapsed time, then current step, because a narrow screen cuts off the end."""
        seconds = int(time.monotonic() - self.started_at)
        elapsed = f", {seconds} s: {self.step or 'starting'}" if seconds else " ..."
        return f"checking {self.gate}{elapsed}"

    def find_unread_hint(self, progress: Progress, key: str) -> int | None:
        """Return the number of the hint that the diagnosis suggests, unless it has been read."""
        suggested = next((result.hint for result in self.results if result.hint), None)
        number = int(suggested.rpartition("-")[2]) if suggested else 0
        return number if number > progress.hints.get(key, 0) else None


class Watch:
    """The watch loop, with one current gate and at most one check at a time."""

    def __init__(self, exercise: Exercise, gate: str | None = None, console: Console | None = None):
        self.exercise = exercise
        self.progress = Progress.load()
        self.gate = gate or ""
        self.console = console or make_console(sys.stdout)
        self.check: Check | None = None
        self.checker: RungChecker | None = None
        self.notes: list[RenderableType] = []
        self.passed_lines: list[Text] = []  # the result of the gate that has just passed
        self.previous_gate = self.gate
        self.blank_hashes: dict[str, str] = {}
        self.edited_gates: list[str] = []  # gates whose blanks changed in the last save that edited any
        self.stays_after_pass = self.awaits_skip_confirmation = False
        self.page = 0
        self.needs_rerun = False

    def run(self) -> int:
        """Watch until q is pressed, and return the exit code."""
        self.choose_first_gate()
        self.follow_edits()
        self.files = FileWatcher(self.exercise)
        with Terminal(self.console) as terminal:
            self.terminal = terminal
            self.start_check()
            shown: Check | None = None  # the check whose first result is on the screen
            while True:
                if self.files.has_changed():
                    self.follow_edits()
                    self.start_check()
                if self.check and self.check.done.is_set() and not self.check.duration_s:
                    self.finish_check()
                if (
                    self.check
                    and self.check.first_results_at
                    and self.is_running()
                    and shown is not self.check
                ):
                    shown = self.check
                    self.draw()
                if self.is_running() and self.current.status != self.status:
                    self.status = self.current.status
                    terminal.overwrite_row(self.status, self.status_row)
                key = terminal.read_key(POLL_INTERVAL_S)
                if key == "q":
                    terminal.show([], "")
                    return 0
                if key in ACTIONS:
                    ACTIONS[key](self)

    def choose_first_gate(self) -> None:
        """Select the first gate that has not passed; if the file is damaged, the next check reports it."""
        if not self.gate:
            try:
                next_gate = self.exercise.find_next_gate(self.progress)
            except DamagedFile:
                next_gate = None
            self.gate = (next_gate or self.exercise.gates[0]).id

    def follow_edits(self) -> None:
        """Switch to the gate whose blank was edited; if the file is damaged, the next check reports it."""
        try:
            hashes = {id: hash_blank(blank) for id, blank in self.exercise.read_blanks().items()}
        except DamagedFile:
            return
        ids = [gate.id for gate in self.exercise.gates]
        changed_gates = [id for id in ids if self.blank_hashes.get(id, hashes[id]) != hashes[id]]
        self.blank_hashes = hashes
        self.edited_gates = changed_gates or self.edited_gates
        if changed_gates and self.gate not in changed_gates:
            self.gate = changed_gates[0]

    # ---- Checking --------------------------------------------------------------------------------------------

    def start_check(self, passed_lines: Sequence[Text] = ()) -> None:
        """Start a check of the current gate, or request one if a check is running; show `passed_lines` above it."""
        if self.check and not self.check.done.is_set():
            self.needs_rerun = True
            return
        self.notes, self.awaits_skip_confirmation, self.needs_rerun, self.page = [], False, False, 0
        self.passed_lines = [*passed_lines]
        self.progress.refresh()  # another terminal may have passed a gate
        self.check = Check(self.gate, time.monotonic())
        self.status = self.check.status
        threading.Thread(target=self.run_check, args=(self.check,), daemon=True).start()
        self.draw()

    def run_check(self, check: Check) -> None:
        """Run a check in its own thread; store exceptions as its error."""
        try:
            self.checker = self.checker or create_checker(self.exercise)
            check.blanks = self.exercise.read_blanks()
            with receive_progress(check.report_step):
                check.results = self.checker.check(
                    self.exercise.target,
                    [check.gate],
                    on_first_case=lambda results: self.receive_first_results(check, results),
                )
            self.needs_rerun |= (
                self.exercise.read_blanks() != check.blanks
            )  # either version may have been checked
        except WorkbookError as error:
            check.error = str(error)
        except Exception as error:  # for example a file that vanishes, which must not end the loop
            check.error = f"{type(error).__name__}: {error}"
        check.done.set()

    def receive_first_results(self, check: Check, results: list) -> None:
        """Store the results of the first case for the loop to show; called from the check's thread."""
        check.first_results, check.first_results_at = results, time.monotonic()

    def finish_check(self) -> None:
        check = self.current
        check.duration_s = time.monotonic() - check.started_at
        if self.needs_rerun:
            self.start_check()
            return
        for result in check.results:
            key, blank = self.exercise.get_progress_key(result.gate.id), check.blanks[result.gate.id]
            self.progress.record_result(key, blank, result.state == "correct")
        next_gate = None if self.stays_after_pass or not check.is_correct else self.find_next_gate()
        if next_gate:
            passed, self.previous_gate, self.gate = [*self.format_result()], self.gate, next_gate.id
            self.start_check(passed)
        else:
            self.draw()

    def find_next_gate(self) -> Gate | None:
        """Return the next gate that has not passed, first among those edited in the last save, or None."""
        try:
            states = self.exercise.get_states(self.progress)
            in_progress = [
                gate for gate in self.edited_gates if gate != self.gate and states[gate] in IN_PROGRESS
            ]
            if in_progress:
                return self.exercise.find_gate(in_progress[0])
            return self.exercise.find_next_gate(self.progress, previous=self.gate)
        except DamagedFile:
            return None

    # ---- Keys ------------------------------------------------------------------------------------------------

    def go_to_next(self) -> None:
        """Advance to the next unpassed gate; if the current gate has not passed, require a second press."""
        if self.is_running():
            return
        self.stays_after_pass = False
        if not self.current.is_correct and not self.awaits_skip_confirmation:
            self.awaits_skip_confirmation = True
            message = f"{self.gate} has not passed; press n again to go on anyway"
            self.show_notes([Text(message, style="yellow")])
            return
        try:
            next_gate = self.exercise.find_next_gate(self.progress, previous=self.gate)
        except DamagedFile as error:
            self.show_notes([Text(make_relative(str(error)), style="red")])
            return
        step = None if next_gate else find_next_exercise(self.exercise, self.progress)
        if step and step.puzzle is self.exercise.puzzle:
            self.switch_file(step)
        elif next_gate is None:  # the result already names the next step
            self.show_notes([Text("nothing is left in this puzzle: q ends the watch", style="green")])
        else:
            self.gate = next_gate.id
            self.start_check()

    def switch_file(self, exercise: Exercise) -> None:
        """Switch to another file of the puzzle, once every gate of this one has passed."""
        if isinstance(self.checker, SubprocessChecker):
            self.checker.close()
        self.exercise, self.checker, self.gate, self.blank_hashes, self.edited_gates = (
            exercise,
            None,
            "",
            {},
            [],
        )
        self.files = FileWatcher(exercise)
        self.choose_first_gate()
        self.follow_edits()
        self.start_check()

    def toggle_staying(self) -> None:
        """Toggle whether to stay at a gate that has passed, until n is pressed."""
        self.stays_after_pass = not self.stays_after_pass
        stays, continues = "stays at a gate that passes, until n", "continues automatically after a pass"
        self.show_notes([Text(stays if self.stays_after_pass else continues, style="dim")])

    def show_more(self) -> None:
        self.page += 1
        self.draw()

    def show_hint(self) -> None:
        """Show the hint that the diagnosis suggests or, if it has been read, the next one of the ladder."""
        key = self.exercise.get_progress_key(self.gate)
        suggested = None if self.is_running() else self.current.find_unread_hint(self.progress, key)
        width = self.console.width if self.console.is_terminal else 0
        self.show_lines(lambda: read_next_hint(self.exercise, self.gate, self.progress, suggested, width))

    def show_diff(self) -> None:
        """Show the blank of the current gate (right after a pass, the passed one) next to the solution's."""
        gate = self.previous_gate if self.passed_lines and not self.current.is_correct else self.gate

        def draw_lines() -> list[RenderableType]:
            with self.console.capture() as captured:
                show_difference(self.console, self.exercise, self.progress, [gate])
            return [Text.from_ansi(captured.get())]

        self.show_lines(draw_lines)

    def show_picture(self) -> None:
        """Describe the current gate's run, and write the page that steps through it."""
        if self.is_running():
            return
        from harness.screens.show import show_in_watch

        self.show_notes([Text("drawing the picture ...", style="dim")])
        if self.current.results:
            result = self.current.results[0]
            self.show_lines(lambda: show_in_watch(self.exercise, self.gate, result, self.checker))
        else:
            self.show_notes([Text("nothing to show: there is no result yet", style="dim")])

    def show_list(self) -> None:
        self.progress.refresh()
        self.show_notes(list(format_gates(self.exercise, self.progress)))

    def show_lines(self, make_lines: Callable[[], Sequence[RenderableType]]) -> None:
        try:
            self.show_notes(make_lines())
        except WorkbookError as error:
            self.show_notes([Text(make_relative(str(error)), style="red")])

    def show_notes(self, lines: Sequence[RenderableType]) -> None:
        """Show lines below the first line of the result, until the next check or key press."""
        self.notes, self.page = list(lines), 0
        self.draw()

    @property
    def current(self) -> Check:
        assert self.check is not None
        return self.check

    def is_running(self) -> bool:
        return self.check is not None and not self.check.done.is_set()

    # ---- The screen ------------------------------------------------------------------------------------------

    @property
    def status_row(self) -> int:
        """Row of the status line, below the result of a gate that has just passed."""
        num_rows = len(self.terminal.render_rows([self.format_heading(), *self.passed_lines]))
        return num_rows + 1 if num_rows < self.console.height - 1 else 2

    def draw(self) -> None:
        first, *rest = self.format_result()
        notes = [Text(""), *self.notes, Text("")] if self.notes else []
        self.terminal.show([self.format_heading(), *self.passed_lines, first, *notes, *rest], KEYS, self.page)

    def format_heading(self) -> Text:
        try:
            states = self.exercise.get_states(self.progress)
            progress_bar = format_progress_bar(sum(s == "passed" for s in states.values()), len(states))
        except DamagedFile:
            progress_bar = ""
        gate = self.exercise.find_gate(self.gate)
        rung = self.exercise.rung.id
        is_main = rung == self.exercise.puzzle.main_rung.id
        name = (
            self.exercise.puzzle.name if is_main else f"{self.exercise.puzzle.name} in {get_rung_name(rung)}"
        )
        heading = f"{name} · {gate.id}   {progress_bar}   {gate.description}"
        return Text(heading, style="bold", no_wrap=True, overflow="ellipsis")

    def format_result(self) -> Iterable[Text]:
        check = self.current
        if self.is_running() or not check.duration_s:
            yield Text(check.status, style="dim", no_wrap=True, overflow="ellipsis")
            yield from report.format_first_results(check.first_results)
            return
        if check.error:
            yield from (Text(line, style="red") for line in make_relative(check.error).splitlines())
        else:
            for result in check.results:
                yield from report.format_gate(result, self.exercise.puzzle, self.exercise.path, check.blanks)
        yield from describe_unsaved(self.progress)
        yield Text(f"{check.duration_s:.1f} s after the save", style="dim")
        if check.is_correct and self.find_next_gate() is None:
            yield Text(describe_next_step(self.exercise, self.progress), style="green")
            step = find_next_exercise(self.exercise, self.progress)
            if step and step.puzzle is self.exercise.puzzle:
                yield Text(f"n goes on with {format_path(step.path)}", style="green")
        elif check.is_correct and self.stays_after_pass:
            yield Text(f"{check.gate} has passed: n goes on to the next gate", style="green")


ACTIONS: dict[str, Callable[[Watch], None]] = {
    "n": Watch.go_to_next,
    "t": Watch.toggle_staying,
    "m": Watch.show_more,
    "r": Watch.start_check,
    "h": Watch.show_hint,
    "s": Watch.show_picture,
    "d": Watch.show_diff,
    "l": Watch.show_list,
}
