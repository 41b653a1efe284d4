"""The score of a puzzle: what counts as a try, as time and as a hint, the lines, the card, and the command."""

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from harness import cli
from harness.learner import blanks, progress
from harness.learner.blanks import Blank
from harness.learner.progress import IDLE, Progress
from harness.learner.score import GateScore, Score, duration
from harness.screens import score as screen
from harness.spec.catalogue import find_puzzle
from harness.toolchain import roots

ROOT = Path(__file__).resolve().parents[2]

PUZZLE = find_puzzle("p19")
COUNTS = {"bytes moved": (2000, 1000), "transactions of 32 bytes": (90, 90)}


def blank(code: str) -> Blank:
    return Blank("dx", "task", "", (code,), 3)


@pytest.fixture
def clock(monkeypatch):
    """Seconds since 1970 that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "time", lambda: now[0])
    return now


def test_every_other_text_is_a_try_until_one_passes(tmp_path):
    noted = Progress.load(tmp_path)
    for code, right in [
        ("# x", False),
        ("x = 1", False),
        ("x = 1", False),
        ("x = 2", False),
        ("x = 3", True),
    ]:
        noted.note("p22 dx", blank(code), right)
    noted.note("p22 dx", blank("x = 4"), True)
    assert Progress.load(tmp_path).tries == {"p22 dx": 3}


def test_pauses_are_no_time_spent(tmp_path, clock):
    noted = Progress.load(tmp_path)
    for seconds, step in [
        (0, lambda: noted.note("p22 dx", blank("x = 1"), False)),
        (50, lambda: noted.read_hint("p22 dx", 1)),
        (10_000, lambda: noted.note("p22 dx", blank("x = 2"), True)),
        (20_000, lambda: noted.note("p20 dx", blank("x = 2"), True)),
    ]:
        clock[0] = 1000.0 + seconds
        step()
    assert Progress.load(tmp_path).spent == {"p22": 50 + IDLE, "p20": 0}


def test_a_file_of_an_earlier_version_keeps_what_it_has(tmp_path):
    (tmp_path / progress.FILE).write_text('{"passed": {"p22 dx": "ab"}, "hints": {"p22 dx": 2}}')
    noted = Progress.load(tmp_path)
    assert (noted.passed, noted.hints, noted.tries) == ({"p22 dx": "ab"}, {"p22 dx": 2}, {})


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(59, "less than a minute"), (60, "1 min"), (3600, "1 h"), (3600 * 2 + 61, "2 h 1 min")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


SCORE = Score((GateScore("map", True, 14, 2, 3), GateScore("a<b", False, 0, 0, 3)), 125)


def test_the_lines_say_tries_hints_and_counts():
    said = [line.plain.strip() for line in screen.score_lines(SCORE, COUNTS)]
    assert said == [
        "14 tries at 2 gates, 2 min, 2 of 6 hints",
        "✅ map  ■■■■■■■■■■…  14 tries, 2 hints ••",
        "·  a<b               not tried",
        "bytes moved               2,000, the solution 1,000 (2.00 times as many)",
        "transactions of 32 bytes  90, as the solution",
    ]


def test_the_card_is_an_svg_of_the_score():
    root = ET.fromstring(screen.card(PUZZLE, SCORE, COUNTS, "2026-11-26"))
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{name}text")]
    assert {"Puzzle 19: The ramp", "14 tries at 2 gates, 2 min, 2 of 6 hints", "a<b"} <= {*texts}
    bars = [
        float(rect.get("width", 0))
        for rect in root.iter(f"{name}rect")
        if rect.get("class") in ("yours", "ours")
    ]
    assert bars == [screen.BAR, screen.BAR / 2, screen.BAR, screen.BAR]
    peaks = [(c.get("class"), float(c.get("cy", 0))) for c in root.iter(f"{name}circle")]
    assert [kind for kind, _ in peaks] == ["hinted", "stop"] and peaks[0][1] < peaks[1][1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A workbook with the files of p26, whose rungs have no kernels to count."""
    (tmp_path / "solutions").symlink_to(ROOT / "solutions")
    shutil.copytree(ROOT / "problems", tmp_path / "problems", symlinks=True)
    monkeypatch.setattr(roots, "CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_draws_a_card_of_a_solved_puzzle(folder, capsys):
    assert cli.main(["score", "p26"]) == 3
    said = capsys.readouterr().out
    assert "not tried" in said and "next: " in said and not list(folder.glob("*.svg"))
    from harness.screens.work import next_step, works

    noted = Progress.load()
    for work in works(find_puzzle("p26")):
        work.path.write_text(blanks.fill(work.path.read_text(), work.solution.read_text()))
        for gate in work.gates:
            noted.note(work.key(gate.id), work.blanks()[gate.id], True)
    words = next_step(works(find_puzzle("p26"))[-1], noted)
    assert "Your path: 2" in words and "score p26` draws it. What now: " in words
    assert cli.main(["score", "p26", "--svg", "card.svg"]) == 0
    assert "a card to keep and to share: card.svg" in capsys.readouterr().out
    ET.parse(folder / "card.svg")


def test_a_card_that_cannot_be_written_is_a_line(folder, capsys):
    test_the_command_draws_a_card_of_a_solved_puzzle(folder, capsys)
    assert cli.main(["score", "p26", "--svg", "nowhere/card.svg"]) == 2
    assert "nowhere" in capsys.readouterr().err
