"""The wrong backends of puzzle 26 by what somebody sees of them: a chart, a fold for each kind of sight, and three to guess."""

import re
from functools import cache

from book.figures.charts import bars
from book.measure import outputs
from harness.check import zoo
from harness.puzzles.p26.mistakes import FIXES
from harness.spec.catalogue import find_puzzle

STOPS = "it stops"
SEEN = (
    (STOPS, "read the first exception, not the last", r"Error: |NoneType|Inductor refuses|after one that uses it"),
    (
        "wrong dtype or shape",
        "compare both before and after each rewrite",
        r"is \w+\d+, expected \w+\d|has shape|returns a Tensor|example_value",
    ),
    ("wrong gradient", "compare every gradient, those of parameters too", r"gradient|is_backward"),
    (
        "it takes too much",
        "ask what makes the place different that it should have left alone",
        r"no objection|found, expected 0|expected None|goes through|of which it does not depend|is true, and",
    ),
    (
        "wrong numbers",
        "run the case alone, and divide and subtract what came out and what is right",
        r"other bits|its error is|another order|away from|is another after|values\(",
    ),
    (
        "nothing happens",
        "print `gm.code` and count the operations in it",
        r"found, expected [1-9]|is 0, expected|has not$|not in the graph|the code of|expected silu|expected x and",
    ),
    (
        "it does not compile as asked",
        "count the compilations, and print the settings that Inductor gets",
        r"two shapes|another compilation|cannot record|config_patches",
    ),
    ("all right, for now", "the next pass or the next caller stumbles: look at the graph, not at the result", ""),
)  # fmt: skip
"""What one sees, where to look, and the verdicts of which it is true; the first that fits."""
GUESSED = {
    "chain_last_constant_alone": "Every element is half of what is right, so a factor of 2 is missing.",
    "sweep_by_fx": "Every element is 1 less than it should be, so the addition never ran.",
    "neutral_ignores_writes": "Every element is 1 more: x was written to, and a result that should have been a copy changed with it.",
}
"""Wrong backends whose numbers give them away, and how."""


@cache
def verdicts() -> dict[str, str]:
    """Wrong backend -> what its gate says in the recorded run, without the mistake's name."""
    lines = outputs.load("backend_symptoms").text.splitlines()
    return {
        name: words.strip().partition(": ")[2] for name, words in (line.split(maxsplit=1) for line in lines)
    }


def seen(verdict: str) -> str:
    """Which of SEEN a verdict is."""
    return next(what for what, _, words in SEEN if re.search(words, verdict))


def by_sight() -> dict[str, list[zoo.WrongKernel]]:
    """What one sees -> the wrong backends of which it is true, in the order of the gates."""
    order = [gate.id for gate in find_puzzle("p26").gates]
    every = sorted(zoo.load("p26"), key=lambda wrong: order.index(wrong.gate))
    return {what: [wrong for wrong in every if seen(verdicts()[wrong.name]) == what] for what, _, _ in SEEN}


def chart() -> str:
    """How many show in which way; dark are those that stop."""
    counts = {what: len(wrong) for what, wrong in by_sight().items()}
    label = f"{sum(counts.values())} wrong backends by what one sees: " + ", ".join(
        f"{what} {count}" for what, count in counts.items()
    )
    return bars(label, {"": [(what, count, str(count), what == STOPS) for what, count in counts.items()]})


def escaped(words: str) -> str:
    """A text as Markdown prints it; what stands in backticks is code already."""
    return re.sub(
        r"`.+?`|[|*_\[\]<>$]", lambda found: found[0] if found[0][0] == "`" else "\\" + found[0], words
    )


def folds() -> str:
    """A fold for each thing to see: where to look, and by mistake what to do and which backends did it."""
    texts = []
    for what, where, _ in SEEN:
        kinds: dict[str, list[zoo.WrongKernel]] = {}
        for wrong in by_sight()[what]:
            kinds.setdefault(wrong.mistake, []).append(wrong)
        where = re.sub("`(.+?)`", r"<code>\1</code>", where)
        texts.append(f"<details>\n<summary><strong>{what.capitalize()}</strong>: {where}</summary>\n")
        for kind, found in kinds.items():
            texts.append(f"**`{kind}`**: {escaped(FIXES[kind])}.\n")
            texts += [
                f"- [{escaped(wrong.story.rstrip('.'))}](museum.md#{wrong.name}): *{escaped(verdicts()[wrong.name])}*"
                for wrong in found
            ]
            texts.append("")
        texts.append("</details>\n")
    return "\n".join(texts)


def quiz() -> str:
    """Three verdicts whose numbers give the mistake away, each with its answer folded."""
    named = {wrong.name: wrong for wrong in zoo.load("p26")}
    texts = []
    for number, (name, clue) in enumerate(GUESSED.items(), 1):
        wrong = named[name]
        texts += [
            f"**{number}.** {escaped(verdicts()[name])}\n",
            '<details class="reveal">\n<summary>Reveal</summary>\n',
            f"{clue} {escaped(wrong.story)} Its gate calls it `{wrong.mistake}`. [The lines](museum.md#{name}).\n",
            "</details>\n",
        ]
    return "\n".join(texts)


def stopped() -> str:
    """How few stop, in a sentence."""
    counts = {what: len(wrong) for what, wrong in by_sight().items()}
    return f"**The surprise:** of the {sum(counts.values())}, only {counts[STOPS]} stop. The others run, and most of them give a result.\n"


FILES = {
    "symptom_kinds.svg": chart,
    "backend_folds.md": folds,
    "backend_quiz.md": quiz,
    "backend_stopped.md": stopped,
}
