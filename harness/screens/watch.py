"""Implement `watch`: check the current gate each time one of its files is saved, in one warm process.

The current gate is the one whose blank was edited; after a pass it is the next that has not passed.

Three parts: `Watch` is the loop and its keys, `Terminal` owns the keyboard and the screen, `Files` notices
saves. A check runs in a thread, so that keys work while a kernel compiles. Files are compared by content,
many times a second, which works for every editor and network folder, including saves by renaming.
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
from harness.console import hanging, listening, make_console, relative, shown
from harness.errors import DamagedFile, WorkbookError
from harness.learner.blanks import Blank
from harness.learner.progress import BEGUN, Progress, fingerprint
from harness.learner.work import Work
from harness.screens import report
from harness.screens.work import (
    following,
    list_lines,
    next_hint,
    next_step,
    progress_bar,
    show_difference,
    unsaved_lines,
)
from harness.spec.puzzle import Gate
from harness.spec.rungs import name_of
from harness.toolchain.cache import digest

POLL = 0.05
"""Seconds between two looks at the files and the keyboard."""
DEBOUNCE = 0.2
"""Seconds without a change before a file is checked: editors write in several steps."""
END_OF_INPUT = "\x04"
KEYS = "n next · t stay · r run · h hint · s show · d diff · l list · q quit"


class Files:
    """Detects changes of the watched files."""

    def __init__(self, work: Work):
        self.work = work
        self.reported = self.fingerprint()
        self.changed_at: float | None = None
        self.settled = self.reported

    def fingerprint(self) -> str:
        """Return a hash of the names and contents; a file that cannot be read at the moment counts as empty."""
        parts: list[str | bytes] = []
        for path in self.work.files:
            parts.append(path.name)
            try:
                parts.append(path.read_bytes())
            except OSError:
                parts.append(b"")
        return digest(parts)

    def has_changed(self) -> bool:
        """Check whether the contents differ from those last reported, and are unchanged for DEBOUNCE
        seconds."""
        now = self.fingerprint()
        if now != self.reported:
            self.reported, self.changed_at = now, time.monotonic()
        rested = self.changed_at is None or time.monotonic() - self.changed_at >= DEBOUNCE
        if now == self.settled or not rested:
            return False
        self.settled = now
        return True


class Terminal:
    """The keyboard, one key at a time without Enter, and the screen. Without a terminal, lines are printed
    and no keys read."""

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
            self.console.print()  # the message does not appear next to the keys
        if self.before is not None and self.keyboard is not None:
            termios.tcsetattr(self.keyboard, termios.TCSADRAIN, self.before)

    def key(self, seconds: float) -> str:
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
        """Show a new screen: the first line, as many of the others as fit on a page, and the footer."""
        if not self.console.is_terminal:
            for line in lines:
                self.console.print(line, soft_wrap=True)
            return
        rows = self.rows(lines)
        room = self.console.height - 1
        if len(rows) > room:
            size = room - 2
            first = page % -(-(len(rows) - 1) // size) * size
            shown = rows[1 + first :][:size]
            words = f"... lines {first + 1} to {first + len(shown)} of {len(rows) - 1}; m shows more"
            rows = [rows[0], *shown, [Segment(words, Style(dim=True))]]
        self.console.clear()
        self.console.print(Segments([part for row in rows for part in (*row, Segment.line())]), end="")
        self.console.print(Text(footer, style="reverse"), end="")

    def rows(self, lines: Iterable[RenderableType]) -> list[list[Segment]]:
        """Return lines as the rows of the screen that they take."""
        parts = [
            part
            for line in lines
            for part in (hanging(self.console, line) if isinstance(line, Text) else [line])
        ]
        return [row for part in parts for row in self.console.render_lines(part, pad=False)]

    def say(self, words: str, row: int) -> None:
        """Write a line over one of the screen, the first is row 1; everything else, and the cursor, stays."""
        if self.console.is_terminal:
            with self.console.capture() as captured:
                # print joins its arguments and drops a Text's own no_wrap.
                self.console.print(Text(words, style="dim"), end="", no_wrap=True, overflow="ellipsis")
            self.console.file.write(f"\x1b7\x1b[{row};1H\x1b[2K{captured.get()}\x1b8")
            self.console.file.flush()


@dataclass
class Check:
    """One check, running or done: the gate, its blanks at the start, the results, and the time.

    `first` are the results of the first case, at time `first_at`, if the checker reports them; `doing` is its
    current step.
    """

    gate: str
    started: float
    blanks: dict[str, Blank] = field(default_factory=dict)
    first: list = field(default_factory=list)
    results: list = field(default_factory=list)
    error: str = ""
    doing: str = ""
    first_at: float = 0.0
    seconds: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def correct(self) -> bool:
        """Check whether the gate has passed."""
        return bool(self.results) and all(result.state == "correct" for result in self.results)

    def report_step(self, words: str) -> None:
        """Receive the checker's current step, in the thread of the check."""
        self.doing = words

    @property
    def status(self) -> str:
        """Return the current step and, after a second, its time: first, since a narrow screen cuts the end
        off."""
        seconds = int(time.monotonic() - self.started)
        return (
            f"checking {self.gate}, {seconds} s: {self.doing or 'starting'}"
            if seconds
            else f"checking {self.gate} ..."
        )

    def unread_hint(self, progress: Progress, key: str) -> int | None:
        """Return the number of the rung that the diagnosis names, unless it was read."""
        named = next((result.hint for result in self.results if result.hint), None)
        number = int(named.rpartition("-")[2]) if named else 0
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
        self.edited: list[str] = []  # in the last save that edited any blank
        self.staying = self.skipping = False
        self.page = 0
        self.again = False

    def run(self) -> int:
        """Watch until q is pressed. Returns 0; Ctrl-C ends it too."""
        self.choose_first_gate()
        self.follow()
        self.files = Files(self.work)
        with Terminal(self.console) as terminal:
            self.terminal = terminal
            self.start()
            shown: Check | None = None  # the check whose first result is on the screen
            while True:
                if self.files.has_changed():
                    self.follow()
                    self.start()
                if self.check and self.check.done.is_set() and not self.check.seconds:
                    self.finish()
                if self.check and self.check.first_at and self.running() and shown is not self.check:
                    shown = self.check
                    self.draw()
                if self.running() and self.current.status != self.status:
                    self.status = self.current.status
                    terminal.say(self.status, self.status_row)
                key = terminal.key(POLL)
                if key == "q":
                    terminal.show([], "")
                    return 0
                if key in ACTIONS:
                    ACTIONS[key](self)

    def choose_first_gate(self) -> None:
        """Choose the gate to begin with; a damaged file is reported by the check that follows."""
        if not self.gate:
            try:
                upcoming = self.work.next_gate(self.progress)
            except DamagedFile:
                upcoming = None
            self.gate = (upcoming or self.work.gates[0]).id

    def follow(self) -> None:
        """Go to the blank that was edited since the last look; a damaged file is reported by the check that
        follows."""
        try:
            bodies = {id: fingerprint(blank) for id, blank in self.work.blanks().items()}
        except DamagedFile:
            return
        edited = [
            gate.id
            for gate in self.work.gates
            if self.bodies.get(gate.id, bodies[gate.id]) != bodies[gate.id]
        ]
        self.bodies = bodies
        self.edited = edited or self.edited
        if edited and self.gate not in edited:
            self.gate = edited[0]

    # ---- Checking --------------------------------------------------------------------------------------------

    def start(self, passed: Sequence[Text] = ()) -> None:
        """Start a check of the current gate, below the result of one that has passed; if one is running,
        start later."""
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
        """Run the check in a thread; exceptions become its error."""
        try:
            self.checker = self.checker or create_checker(self.work)
            check.blanks = self.work.blanks()
            with listening(check.report_step):
                check.results = self.checker.check(
                    self.work.target, [check.gate], on_first=lambda results: self.show_first(check, results)
                )
            self.again |= self.work.blanks() != check.blanks  # either of the two may have been checked
        except WorkbookError as error:
            check.error = str(error)
        except Exception as error:  # a file that vanishes between two looks must not end the loop
            check.error = f"{type(error).__name__}: {error}"
        check.done.set()

    def show_first(self, check: Check, results: list) -> None:
        """Receive the result of the first case, in the thread of the check; the loop shows it."""
        check.first, check.first_at = results, time.monotonic()

    def finish(self) -> None:
        """Record and show a result; start again if the file was saved meanwhile."""
        check = self.current
        check.seconds = time.monotonic() - check.started
        if self.again:
            self.start()
            return
        for result in check.results:
            id = result.gate.id
            self.progress.note(self.work.key(id), check.blanks[id], result.state == "correct")
        upcoming = None if self.staying or not check.correct else self.upcoming()
        if upcoming:
            passed, self.last, self.gate = [*self.result_lines()], self.gate, upcoming.id
            self.start(passed)
        else:
            self.draw()

    def upcoming(self) -> Gate | None:
        """Return the next gate that has not passed, preferably one edited in the same save; None if all
        have, or the file cannot be read."""
        try:
            states = self.work.states(self.progress)
            begun = [gate for gate in self.edited if gate != self.gate and states[gate] in BEGUN]
            return self.work.gate(begun[0]) if begun else self.work.next_gate(self.progress, after=self.gate)
        except DamagedFile:
            return None

    # ---- Keys ------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Go on to the next gate that has not passed; from one that has not passed only on a second press."""
        if self.running():
            return
        self.staying = False
        if not self.current.correct and not self.skipping:
            self.skipping = True
            self.note([Text(f"{self.gate} has not passed; press n again to go on anyway", style="yellow")])
            return
        try:
            upcoming = self.work.next_gate(self.progress, after=self.gate)
        except DamagedFile as error:
            self.note([Text(relative(str(error)), style="red")])
            return
        step = None if upcoming else following(self.work, self.progress)
        if step and step.puzzle is self.work.puzzle:
            self.take(step)
        elif upcoming is None:  # the result names the next step
            self.note([Text("nothing is left in this puzzle: q ends the watch", style="green")])
        else:
            self.gate = upcoming.id
            self.start()

    def take(self, work: Work) -> None:
        """Go on in another file of the puzzle, once every gate of this one has passed."""
        if isinstance(self.checker, SubprocessChecker):
            self.checker.close()
        self.work, self.checker, self.gate, self.bodies, self.edited = work, None, "", {}, []
        self.files = Files(work)
        self.choose_first_gate()
        self.follow()
        self.start()

    def stay(self) -> None:
        """Stay at a gate that passes, until n is pressed; pressed again, go on automatically."""
        self.staying = not self.staying
        words = (
            "stays at a gate that passes, until n" if self.staying else "continues automatically after a pass"
        )
        self.note([Text(words, style="dim")])

    def more(self) -> None:
        """Show the next page of a screen that is too long."""
        self.page += 1
        self.draw()

    def hint(self) -> None:
        """Show the rung that the diagnosis names, once, and then the next rung of the gate's ladder."""
        named = None if self.running() else self.current.unread_hint(self.progress, self.work.key(self.gate))
        width = self.console.width if self.console.is_terminal else 0
        self.note(self.safely(lambda: next_hint(self.work, self.gate, self.progress, named, width)))

    def diff(self) -> None:
        """Show the blank next to the solution's, once it has passed; of a gate that has not, that of the one
        before."""
        gate = self.last if self.passed and not self.current.correct else self.gate

        def lines() -> list[RenderableType]:
            with self.console.capture() as captured:
                show_difference(self.console, self.work, self.progress, [gate])
            return [Text.from_ansi(captured.get())]

        self.note(self.safely(lines))

    def show(self) -> None:
        """Draw a picture of the current gate's run, and write the page that steps through it."""
        if self.running():
            return
        from harness.screens.show import lines_for_watch

        self.note([Text("drawing the picture ...", style="dim")])
        result = next(iter(self.current.results), None)
        self.note(
            self.safely(lambda: lines_for_watch(self.work, self.gate, result, self.checker))
            if result
            else [Text("nothing to show: there is no result yet", style="dim")]
        )

    def overview(self) -> None:
        """Show all gates of the file."""
        self.progress.refresh()
        self.note(list(list_lines(self.work, self.progress)))

    def safely(self, lines: Callable[[], Sequence[RenderableType]]) -> list[RenderableType]:
        """Return lines, or one error line if they cannot be computed."""
        try:
            return list(lines())
        except WorkbookError as error:
            return [Text(relative(str(error)), style="red")]

    def note(self, lines: Sequence[RenderableType]) -> None:
        """Show lines below the first line of the result until the next check or key."""
        self.notes, self.page = list(lines), 0
        self.draw()

    @property
    def current(self) -> Check:
        """The check that was started last; `start` creates one before anything is shown."""
        assert self.check is not None
        return self.check

    def running(self) -> bool:
        """Return whether a check is under way."""
        return self.check is not None and not self.check.done.is_set()

    # ---- The screen ------------------------------------------------------------------------------------------

    @property
    def status_row(self) -> int:
        """Return the row of the status line: below the result of a gate that has just passed."""
        above = len(self.terminal.rows([self.heading(), *self.passed]))
        return above + 1 if above < self.console.height - 1 else 2

    def draw(self) -> None:
        """Draw the gate, the result or the status, the lines of the last key, and the keys."""
        first, *rest = self.result_lines()
        notes = [Text(""), *self.notes, Text("")] if self.notes else []
        self.terminal.show([self.heading(), *self.passed, first, *notes, *rest], KEYS, self.page)

    def heading(self) -> Text:
        """Return puzzle, gate and progress, in one line of the screen."""
        try:
            states = self.work.states(self.progress)
            done = progress_bar(sum(s == "passed" for s in states.values()), len(states))
        except DamagedFile:
            done = ""
        gate = self.work.gate(self.gate)
        rung = self.work.rung.id
        main = rung == self.work.puzzle.main_rung.id
        name = self.work.puzzle.name if main else f"{self.work.puzzle.name} in {name_of(rung)}"
        words = f"{name} · {gate.id}   {done}   {gate.about}"
        return Text(words, style="bold", no_wrap=True, overflow="ellipsis")

    def result_lines(self) -> Iterable[Text]:
        """Return the lines of the current gate's result."""
        check = self.current
        if self.running() or not check.seconds:
            yield Text(check.status, style="dim", no_wrap=True, overflow="ellipsis")
            yield from report.first_lines(check.first)
            return
        if check.error:
            yield from (Text(line, style="red") for line in relative(check.error).splitlines())
        else:
            for result in check.results:
                yield from report.result_lines(result, self.work.puzzle, self.work.path, check.blanks)
        yield from unsaved_lines(self.progress)
        yield Text(f"{check.seconds:.1f} s after the save", style="dim")
        if check.correct and self.upcoming() is None:
            yield Text(next_step(self.work, self.progress), style="green")
            step = following(self.work, self.progress)
            if step and step.puzzle is self.work.puzzle:
                yield Text(f"n goes on with {shown(step.path)}", style="green")
        elif check.correct and self.staying:
            yield Text(f"{check.gate} has passed: n goes on to the next gate", style="green")


ACTIONS: dict[str, Callable[[Watch], None]] = {
    "n": Watch.go_on,
    "t": Watch.stay,
    "m": Watch.more,
    "r": Watch.start,
    "h": Watch.hint,
    "s": Watch.show,
    "d": Watch.diff,
    "l": Watch.overview,
}
