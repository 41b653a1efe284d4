"""Implement `watch`: check the current gate each time one of its files is saved, in one warm process.

`Watch` is the loop and its keys, `Terminal` owns the keyboard and the screen, `Files` detects saves by
content, which works with every editor and network folder. Each check runs in a thread.
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
from harness.learner.progress import BEGUN, Progress, hash_blank
from harness.learner.work import Work
from harness.screens import report
from harness.screens.work import (
    describe_next_step,
    describe_unsaved,
    find_next_work,
    format_gates,
    format_progress_bar,
    read_next_hint,
    show_difference,
)
from harness.spec.puzzle import Gate
from harness.spec.rungs import get_rung_name
from harness.toolchain.cache import compute_digest

POLL = 0.05
"""Seconds between polls of the files and the keyboard."""
DEBOUNCE = 0.2
"""Seconds that a file must stay unchanged before it is checked, since editors write in several steps."""
END_OF_INPUT = "\x04"
KEYS = "n next · t stay · r run · h hint · s show · d diff · l list · q quit"


class Files:
    """A detector of changes to the watched files."""

    def __init__(self, work: Work):
        self.work = work
        self.reported = self.hash_files()
        self.changed_at: float | None = None
        self.settled = self.reported

    def hash_files(self) -> str:
        """Return a hash of the names and contents; a file that cannot be read counts as empty."""
        parts: list[str | bytes] = []
        for path in self.work.files:
            parts.append(path.name)
            try:
                parts.append(path.read_bytes())
            except OSError:
                parts.append(b"")
        return compute_digest(parts)

    def has_changed(self) -> bool:
        """Check whether the contents have changed, and have then stayed the same for DEBOUNCE seconds."""
        now = self.hash_files()
        if now != self.reported:
            self.reported, self.changed_at = now, time.monotonic()
        rested = self.changed_at is None or time.monotonic() - self.changed_at >= DEBOUNCE
        if now == self.settled or not rested:
            return False
        self.settled = now
        return True


class Terminal:
    """The keyboard, read one key at a time without Enter, and the screen. Without a terminal, lines are
    printed and no keys are read."""

    def __init__(self, console: Console):
        self.console = console
        self.keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        self.before = None

    def __enter__(self) -> "Terminal":
        if self.keyboard is not None:
            self.before = termios.tcgetattr(self.keyboard)
            tty.setcbreak(self.keyboard)
        return self

    def __exit__(self, kind: type | None, *_) -> None:
        if kind is KeyboardInterrupt and self.console.is_terminal:
            self.console.print()  # so that the message does not follow the keys on their line
        if self.before is not None and self.keyboard is not None:
            termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self.before)

    def read_key(self, seconds: float) -> str:
        """Return the key pressed within some seconds, or ""; "q" if the keyboard is closed."""
        if self.keyboard is None:
            time.sleep(seconds)
            return ""
        if not select.select([self.keyboard], [], [], seconds)[0]:
            return ""
        try:
            key = os.read(self.keyboard, 1).decode(errors="replace")
        except OSError:
            key = ""
        return "q" if key in ("", END_OF_INPUT) else key

    def show(self, lines: Iterable[RenderableType], footer: str, page: int = 0) -> None:
        """Show a new screen: the first line, one page of the others, and the footer."""
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

    def overwrite_row(self, words: str, row: int) -> None:
        """Overwrite one row of the screen, counted from 1, and leave the cursor where it is."""
        if self.console.is_terminal:
            with self.console.capture() as captured:
                # print joins its arguments and drops a Text's own no_wrap.
                self.console.print(Text(words, style="dim"), end="", no_wrap=True, overflow="ellipsis")
            self.console.file.write(f"\x1b7\x1b[{row};1H\x1b[2K{captured.get()}\x1b8")
            self.console.file.flush()


@dataclass
class Check:
    """One check, running or done: the gate, its blanks at the start, the results, and the time.

    `first` are the results of the first case, at time `first_at`, if the checker reports them; `step` is its
    current step.
    """

    gate: str
    started: float
    blanks: dict[str, Blank] = field(default_factory=dict)
    first: list = field(default_factory=list)
    results: list = field(default_factory=list)
    error: str = ""
    step: str = ""
    first_at: float = 0.0
    seconds: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_correct(self) -> bool:
        return bool(self.results) and all(result.state == "correct" for result in self.results)

    def report_step(self, words: str) -> None:
        """Receive the checker's current step, in the check's thread."""
        self.step = words

    @property
    def status(self) -> str:
        """The elapsed time, then the current step, since a narrow screen cuts off the end."""
        seconds = int(time.monotonic() - self.started)
        elapsed = f", {seconds} s: {self.step or 'starting'}" if seconds else " ..."
        return f"checking {self.gate}{elapsed}"

    def find_unread_hint(self, progress: Progress, key: str) -> int | None:
        """Return the number of the hint that the diagnosis names, unless it has been read."""
        suggested = next((result.hint for result in self.results if result.hint), None)
        number = int(suggested.rpartition("-")[2]) if suggested else 0
        return number if number > progress.hints.get(key, 0) else None


class Watch:
    """The loop: one current gate, at most one check at a time."""

    def __init__(self, work: Work, gate: str | None = None, console: Console | None = None):
        self.work = work
        self.progress = Progress.load()
        self.gate = gate or ""
        self.console = console or make_console(sys.stdout)
        self.check: Check | None = None
        self.checker: RungChecker | None = None
        self.notes: list[RenderableType] = []
        self.passed: list[Text] = []  # the result of the gate that has just passed
        self.last = self.gate
        self.bodies: dict[str, str] = {}
        self.edited: list[str] = []  # gates whose blanks changed in the last save that edited any
        self.staying = self.skipping = False
        self.page = 0
        self.again = False

    def run(self) -> int:
        """Watch until q is pressed, and return 0; Ctrl-C also ends the loop."""
        self.choose_first_gate()
        self.follow_edits()
        self.files = Files(self.work)
        with Terminal(self.console) as terminal:
            self.terminal = terminal
            self.start_check()
            shown: Check | None = None  # the check whose first result is on the screen
            while True:
                if self.files.has_changed():
                    self.follow_edits()
                    self.start_check()
                if self.check and self.check.done.is_set() and not self.check.seconds:
                    self.finish_check()
                if self.check and self.check.first_at and self.is_running() and shown is not self.check:
                    shown = self.check
                    self.draw()
                if self.is_running() and self.current.status != self.status:
                    self.status = self.current.status
                    terminal.overwrite_row(self.status, self.status_row)
                key = terminal.read_key(POLL)
                if key == "q":
                    terminal.show([], "")
                    return 0
                if key in ACTIONS:
                    ACTIONS[key](self)

    def choose_first_gate(self) -> None:
        """Choose the first gate; if the file is damaged, the next check reports that."""
        if not self.gate:
            try:
                upcoming = self.work.find_next_gate(self.progress)
            except DamagedFile:
                upcoming = None
            self.gate = (upcoming or self.work.gates[0]).id

    def follow_edits(self) -> None:
        """Switch to the blank edited last; if the file is damaged, the next check reports that."""
        try:
            bodies = {id: hash_blank(blank) for id, blank in self.work.read_blanks().items()}
        except DamagedFile:
            return
        ids = [gate.id for gate in self.work.gates]
        edited = [id for id in ids if self.bodies.get(id, bodies[id]) != bodies[id]]
        self.bodies = bodies
        self.edited = edited or self.edited
        if edited and self.gate not in edited:
            self.gate = edited[0]

    # ---- Checking --------------------------------------------------------------------------------------------

    def start_check(self, passed: Sequence[Text] = ()) -> None:
        """Start a check of the current gate, shown below `passed`; if one is running, start when it ends."""
        if self.check and not self.check.done.is_set():
            self.again = True
            return
        self.notes, self.skipping, self.again, self.page = [], False, False, 0
        self.passed = [*passed]
        self.progress.refresh()  # another terminal may have passed a gate
        self.check = Check(self.gate, time.monotonic())
        self.status = self.check.status
        threading.Thread(target=self.run_check, args=(self.check,), daemon=True).start()
        self.draw()

    def run_check(self, check: Check) -> None:
        """Run a check, in its thread; exceptions become its error."""
        try:
            self.checker = self.checker or create_checker(self.work)
            check.blanks = self.work.read_blanks()
            with receive_progress(check.report_step):
                check.results = self.checker.check(
                    self.work.target, [check.gate], on_first=lambda results: self.show_first(check, results)
                )
            self.again |= self.work.read_blanks() != check.blanks  # either version may have been checked
        except WorkbookError as error:
            check.error = str(error)
        except Exception as error:  # for example a file that vanishes, which must not end the loop
            check.error = f"{type(error).__name__}: {error}"
        check.done.set()

    def show_first(self, check: Check, results: list) -> None:
        """Receive the results of the first case, in the check's thread, for the loop to show."""
        check.first, check.first_at = results, time.monotonic()

    def finish_check(self) -> None:
        check = self.current
        check.seconds = time.monotonic() - check.started
        if self.again:
            self.start_check()
            return
        for result in check.results:
            key, blank = self.work.get_progress_key(result.gate.id), check.blanks[result.gate.id]
            self.progress.record_result(key, blank, result.state == "correct")
        upcoming = None if self.staying or not check.is_correct else self.find_upcoming()
        if upcoming:
            passed, self.last, self.gate = [*self.format_result()], self.gate, upcoming.id
            self.start_check(passed)
        else:
            self.draw()

    def find_upcoming(self) -> Gate | None:
        """Return the next gate that has not passed, preferably one edited in the same save, or None."""
        try:
            states = self.work.get_states(self.progress)
            in_progress = [gate for gate in self.edited if gate != self.gate and states[gate] in BEGUN]
            if in_progress:
                return self.work.find_gate(in_progress[0])
            return self.work.find_next_gate(self.progress, after=self.gate)
        except DamagedFile:
            return None

    # ---- Keys ------------------------------------------------------------------------------------------------

    def go_to_next(self) -> None:
        """Advance to the next unpassed gate; if the current gate has not passed, require a second press."""
        if self.is_running():
            return
        self.staying = False
        if not self.current.is_correct and not self.skipping:
            self.skipping = True
            message = f"{self.gate} has not passed; press n again to go on anyway"
            self.show_notes([Text(message, style="yellow")])
            return
        try:
            upcoming = self.work.find_next_gate(self.progress, after=self.gate)
        except DamagedFile as error:
            self.show_notes([Text(make_relative(str(error)), style="red")])
            return
        step = None if upcoming else find_next_work(self.work, self.progress)
        if step and step.puzzle is self.work.puzzle:
            self.switch_file(step)
        elif upcoming is None:  # the result already names the next step
            self.show_notes([Text("nothing is left in this puzzle: q ends the watch", style="green")])
        else:
            self.gate = upcoming.id
            self.start_check()

    def switch_file(self, work: Work) -> None:
        """Switch to another file of the puzzle, once every gate of this one has passed."""
        if isinstance(self.checker, SubprocessChecker):
            self.checker.close()
        self.work, self.checker, self.gate, self.bodies, self.edited = work, None, "", {}, []
        self.files = Files(work)
        self.choose_first_gate()
        self.follow_edits()
        self.start_check()

    def toggle_staying(self) -> None:
        """Toggle between staying at a gate that passes, until n is pressed, and going on automatically."""
        self.staying = not self.staying
        stays, continues = "stays at a gate that passes, until n", "continues automatically after a pass"
        self.show_notes([Text(stays if self.staying else continues, style="dim")])

    def show_more(self) -> None:
        self.page += 1
        self.draw()

    def show_hint(self) -> None:
        """Show the hint that the diagnosis names or, if that has been read, the next one of the ladder."""
        key = self.work.get_progress_key(self.gate)
        suggested = None if self.is_running() else self.current.find_unread_hint(self.progress, key)
        width = self.console.width if self.console.is_terminal else 0
        self.show_safely(lambda: read_next_hint(self.work, self.gate, self.progress, suggested, width))

    def show_diff(self) -> None:
        """Show the gate's blank next to the solution's or, right after a pass, the passed gate's."""
        gate = self.last if self.passed and not self.current.is_correct else self.gate

        def draw_lines() -> list[RenderableType]:
            with self.console.capture() as captured:
                show_difference(self.console, self.work, self.progress, [gate])
            return [Text.from_ansi(captured.get())]

        self.show_safely(draw_lines)

    def show_picture(self) -> None:
        """Draw a picture of the current gate's run, and write the page that steps through it."""
        if self.is_running():
            return
        from harness.screens.show import show_in_watch

        self.show_notes([Text("drawing the picture ...", style="dim")])
        if self.current.results:
            result = self.current.results[0]
            self.show_safely(lambda: show_in_watch(self.work, self.gate, result, self.checker))
        else:
            self.show_notes([Text("nothing to show: there is no result yet", style="dim")])

    def show_list(self) -> None:
        self.progress.refresh()
        self.show_notes(list(format_gates(self.work, self.progress)))

    def show_safely(self, make_lines: Callable[[], Sequence[RenderableType]]) -> None:
        try:
            self.show_notes(make_lines())
        except WorkbookError as error:
            self.show_notes([Text(make_relative(str(error)), style="red")])

    def show_notes(self, lines: Sequence[RenderableType]) -> None:
        """Show lines below the first line of the result until the next check or key."""
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
        """The row of the status line, below the result of a gate that has just passed."""
        above = len(self.terminal.render_rows([self.format_heading(), *self.passed]))
        return above + 1 if above < self.console.height - 1 else 2

    def draw(self) -> None:
        first, *rest = self.format_result()
        notes = [Text(""), *self.notes, Text("")] if self.notes else []
        self.terminal.show([self.format_heading(), *self.passed, first, *notes, *rest], KEYS, self.page)

    def format_heading(self) -> Text:
        try:
            states = self.work.get_states(self.progress)
            done = format_progress_bar(sum(s == "passed" for s in states.values()), len(states))
        except DamagedFile:
            done = ""
        gate = self.work.find_gate(self.gate)
        rung = self.work.rung.id
        main = rung == self.work.puzzle.main_rung.id
        name = self.work.puzzle.name if main else f"{self.work.puzzle.name} in {get_rung_name(rung)}"
        heading = f"{name} · {gate.id}   {done}   {gate.about}"
        return Text(heading, style="bold", no_wrap=True, overflow="ellipsis")

    def format_result(self) -> Iterable[Text]:
        check = self.current
        if self.is_running() or not check.seconds:
            yield Text(check.status, style="dim", no_wrap=True, overflow="ellipsis")
            yield from report.format_first_results(check.first)
            return
        if check.error:
            yield from (Text(line, style="red") for line in make_relative(check.error).splitlines())
        else:
            for result in check.results:
                yield from report.format_gate(result, self.work.puzzle, self.work.path, check.blanks)
        yield from describe_unsaved(self.progress)
        yield Text(f"{check.seconds:.1f} s after the save", style="dim")
        if check.is_correct and self.find_upcoming() is None:
            yield Text(describe_next_step(self.work, self.progress), style="green")
            step = find_next_work(self.work, self.progress)
            if step and step.puzzle is self.work.puzzle:
                yield Text(f"n goes on with {format_path(step.path)}", style="green")
        elif check.is_correct and self.staying:
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
