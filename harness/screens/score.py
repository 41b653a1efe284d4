"""`score pNN`: the path that somebody took through a puzzle, what the kernels move beside the solution's, and both as a card.

The card is an SVG of 600 x 315, what other sites show of a page; letters are the viewer's own.
"""

from collections.abc import Mapping
from html import escape

from rich.text import Text

from harness.learner.score import Score
from harness.learner.work import Work
from harness.spec.puzzle import Puzzle
from harness.toolchain import roots

Counts = Mapping[str, tuple[int, int]]
"""What is counted -> how often the learner's kernels do it, and the solution's."""
COUNTED = {"bytes moved": "bytes moved", "32-byte sectors": "transactions of 32 bytes"}
"""Which totals of a profile stand beside the solution's, and in which words."""
WIDTH, HEIGHT, MARGIN = 600, 315, 30
TRAIL = (150, 90)
"""Where the trail's ground is, and how high its highest peak stands above it."""
MOST = 10
"""Tries from which a peak grows no more."""
BAR = 240
"""The length of the longer one of two bars."""
LABEL = 13
"""Characters of a gate's name under the trail."""
STYLE = """
    text { font-family: system-ui, sans-serif; fill: #24292f } .small { font-size: 11px; fill: #57606a }
    .card { fill: #ffffff; stroke: #d0d7de } .trail { fill: #ddf4ff; stroke: #0969da; stroke-width: 2; stroke-linejoin: round }
    .stop { fill: #0969da } .hinted { fill: #bf8700 } .ours { fill: #8c959f } .yours { fill: #0969da }
    @media (prefers-color-scheme: dark) {
        text { fill: #e6edf3 } .small { fill: #9198a1 } .card { fill: #0d1117; stroke: #3d444d } .trail { fill: #121d2f }
    }
"""


def score_lines(score: Score, counts: Counts) -> list[Text]:
    """The path gate by gate, a square for each try and a dot for each hint; then the counts beside the solution's."""
    width = max(len(gate.id) for gate in score.gates)
    lines = [Text(f"   {score.words}", style="bold")]
    for gate in score.gates:
        marks = "■" * min(gate.tries, MOST) + ("…" if gate.tries > MOST else "")
        words = f"{gate.tries} {'try' if gate.tries == 1 else 'tries'}" if gate.tries else "not tried"
        hints = f", {gate.hints} hint{'s' * (gate.hints != 1)} {'•' * gate.hints}" if gate.hints else ""
        mark = "✅" if gate.passed else "· "
        lines.append(Text(f"   {mark} {gate.id:<{width}}  {marks:<{MOST + 1}}  {words}{hints}"))
    size = max(map(len, counts), default=0)
    for what, (yours, ours) in counts.items():
        lines.append(Text(f"   {what:<{size}}  {beside(yours, ours)}"))
    return lines


def beside(yours: int, ours: int) -> str:
    """ "1,680, as the solution", "2,000, the solution 1,680 (1.19 times as many)"."""
    if yours == ours:
        return f"{yours:,}, as the solution"
    times = f" ({yours / ours:.2f} times as many)" if ours else ""
    return f"{yours:,}, the solution {ours:,}{times}"


def card(puzzle: Puzzle, score: Score, counts: Counts, day: str) -> str:
    """The card as SVG: the title, the trail over the gates, the score in words, a pair of bars for each count."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(puzzle.title)}: {escape(score.words)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12"/>',
        text(MARGIN, 38, f"Puzzle {puzzle.name[1:]}: {puzzle.subject or puzzle.title}", size=20),
        *trail(score),
        text(MARGIN, 195, score.words, size=15),
        *bars(counts),
        text(
            MARGIN,
            HEIGHT - 14,
            f"Mojo GPU workbook, {day}. A peak is a gate, as high as it took tries.",
            "small",
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def trail(score: Score) -> list[str]:
    """A mountain trail: a peak for each gate, as high as it took tries; a peak with hints on the way has another colour."""
    ground, height = TRAIL
    most = min(MOST, max(4, *(gate.tries for gate in score.gates), 0))
    step = (WIDTH - 2 * MARGIN) / max(len(score.gates), 1)
    points, stops = [f"{MARGIN},{ground}"], []
    for number, gate in enumerate(score.gates):
        x = MARGIN + (number + 0.5) * step
        y = ground - height * min(gate.tries, most) / most
        points += [f"{x:.1f},{y:.1f}", f"{MARGIN + (number + 1) * step:.1f},{ground}"]
        kind = "hinted" if gate.hints else "stop"
        stops.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        if len(score.gates) <= WIDTH // 60:
            stops.append(text(x, ground + 16, gate.id[:LABEL], "small", middle=True))
    return [f'<polygon class="trail" points="{" ".join(points)}"/>', *stops]


def bars(counts: Counts) -> list[str]:
    """For each count two bars, the learner's over the solution's, to the scale of the larger one."""
    parts = []
    for row, (what, (yours, ours)) in enumerate(counts.items()):
        y = 216 + 30 * row
        parts.append(text(MARGIN, y + 12, what, "small"))
        for line, (kind, value) in enumerate((("yours", yours), ("ours", ours))):
            width = BAR * value / max(yours, ours, 1)
            parts.append(
                f'<rect class="{kind}" x="170" y="{y + 9 * line}" width="{width:.1f}" height="7" rx="2"/>'
            )
        parts.append(text(170 + BAR + 14, y + 12, f"{yours:,} | solution {ours:,}", "small"))
    return parts


def text(x: float, y: float, words: str, kind: str = "", *, size: int = 0, middle: bool = False) -> str:
    """A line of letters."""
    more = f' class="{kind}"' * bool(kind) + f' font-size="{size}"' * bool(size)
    more += ' text-anchor="middle"' * middle
    return f'<text x="{x:.1f}" y="{y}"{more}>{escape(words)}</text>'


def counts_of(puzzle: Puzzle) -> Counts:
    """What the first case of the kernels that have gates moves, the learner's and the solution's, on the virtual GPU.

    Raises what a run of the kernels raises.
    """
    from harness.check.profile import TOTALS, Counting

    rung = puzzle.main_rung
    variants = tuple(dict.fromkeys(gate.variant for gate in puzzle.kernel_gates))
    yours, ours = (
        [each for launches in Counting(work, variants).profile().values() for each in launches]
        for work in (Work(puzzle, rung), Work(puzzle, rung, roots.solutions()))
    )
    return {words: (TOTALS[what](yours), TOTALS[what](ours)) for what, words in COUNTED.items()}
