"""Puzzle 28's worklog in numbers: each step's counters and times, before and after, all of them in one table, and the climb that moves.

Counters come from the recorded report of the solution, times from the record `fast_steps`.
"""

import html
import json
import math
import re
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from book.figures import bench_results
from book.figures.bench_results import time_text
from book.figures.charts import bars
from book.figures.figures import Drawing
from book.figures.markdown_table import table
from book.figures.worklog import FILES as PICTURES
from book.measure import outputs, record
from harness.puzzles.p28.spec import DESCRIPTIONS

COUNTER = re.compile(r"^   (\w+) +(\S.*?) {2,}([\d.,]+) +([\d.,]+) +([\d.,]+)  \S", re.M)
STEPS = tuple(DESCRIPTIONS)
FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NAMES, SHARED_BYTES, PRODUCTS = (FACTS[name] for name in ("names", "shared_bytes", "products"))
SEVERAL = ("dgamma", "layouts", "epilogue")
"""Steps that are timed with more than one launch."""


def measured(form: str, step: str, dtype: str = "bfloat16") -> record.Row:
    """The record's row of a step's form ("first" or "solution"), of both passes ("pass") or of bare products ("bare")."""
    (row,) = record.Rows("fast_steps").select(dtype=dtype, form=form, step=step)
    return row


def median(form: str, step: str, dtype: str = "bfloat16") -> float:
    """The microseconds of such a row."""
    return float(measured(form, step, dtype)["median_us"])


def passes() -> list[float]:
    """The microseconds of both passes, before any step and after each."""
    return [median("pass", str(number)) for number in range(len(STEPS) + 1)]


def peer(name: str) -> float:
    """The microseconds of both passes of PyTorch's own LayerNorm and Linear ("eager" or "compile"), as a CUDA graph."""
    return median("pytorch", name)


def counters(step: str) -> list[tuple[str, str, str, str]]:
    """What the step brings down: each counter in words, before, after and its limit."""
    number = lambda text: float(text.replace(",", ""))  # noqa: E731
    found = COUNTER.findall(outputs.load("fast_steps").text)
    return [
        (FACTS["counters"].get(name, name), given, own, limit)
        for of, name, given, own, limit in found
        if of == step and number(given) > number(own)
    ]


def times(ratio: float) -> str:
    """A ratio with the digits that count."""
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"


SHARED_PEAK, TENSOR_PEAK = 132 * 128 * 1_980, 989e6
"""What an H200 can do in a microsecond: bytes that its multiprocessors read from shared memory, operations of its tensor cores."""
SAME = "no change in time"


def change(before: float, after: float) -> str:
    """A change of a time in words, from the one that is left."""
    ratio = before / after
    if ratio >= 1.95:
        return f"{times(ratio)} times as fast"
    if abs(1 - after / before) < 0.03:
        return SAME
    return f"{abs(1 - after / before):.0%} {'less' if ratio > 1 else 'more'} time"


def change_of(step: str, dtype: str = "bfloat16") -> str:
    """How a step changes the time of its own kernels, without a verb and without the word "time"."""
    words = change(median("first", step, dtype), median("solution", step, dtype))
    return "as long as before" if words == SAME else words.removesuffix(" time")


def of_step(step: str, dtype: str = "bfloat16") -> str:
    """How a step changes the time of its own kernels, as the rest of a sentence."""
    words = change_of(step, dtype)
    faster, taking = ("are", "take") if step in SEVERAL else ("is", "takes")
    if words.endswith("as fast"):
        return f"{faster} {words} as before"
    return f"{taking} {words}{' time than before' * words.endswith(('less', 'more'))}"


def share_of_memory(form: str, step: str, dtype: str = "bfloat16") -> float:
    """The share of memory's peak that a step's form reaches."""
    return float(measured(form, step, dtype)["of_memory"])


def sum_products(form: str, step: str) -> float:
    """The microseconds of the three products with the kernel of step 8 or 9 in a form."""
    return sum(median(form + product, step) for product in ("", " dln", " dW"))


def time_workbook_layer() -> float:
    """The microseconds of both passes of the workbook's own layer, as a CUDA graph."""
    at = bench_results.select(record.rows("bench"), "both", "graph")
    rows, hidden, outputs = (int(measured("pass", "0")[side]) for side in ("rows", "hidden", "outputs"))
    return float(at[rows, hidden, outputs]["fast"]["median_us"])


def step_table(step: str) -> str:
    """A step's counters and times, before and after."""
    return table([f"{STEPS.index(step) + 1}. {NAMES[step]}", "before", "after"], step_lines(step), "lrr")


def step_lines(step: str) -> list[list[str]]:
    """The lines of that table: what it is, before, after."""
    number = STEPS.index(step) + 1
    forms = [measured(form, step) for form in ("first", "solution")]
    body = [[f"{name} (at most {limit})", before, after] for name, before, after, limit in counters(step)]
    done = f"steps 1 to {number}" if number > 1 else "step 1"
    own = [time_text(float(form["median_us"])) for form in forms]
    timed = "these kernels" if step in SEVERAL else "this kernel"
    body.append([f"time of {timed}, {int(forms[0]['rows']):,} rows", *own])
    if forms[0]["of_memory"]:
        body.append(["share of memory's peak", *(f"{float(form['of_memory']):.0%}" for form in forms)])
    else:
        products = PRODUCTS.get(step, (1, "forward product"))[1]
        body.append([f"times PyTorch's {products}", *(times(float(form["of_products"])) for form in forms)])
    if step in SHARED_BYTES or step in PRODUCTS:
        body.append(share_of_peak(step, forms))
    if number in range(2, 6):  # both passes take as long as before
        return body
    return [*body, [f"time of both passes after {done}", *map(time_text, passes()[number - 1 : number + 1])]]


def share_of_peak(step: str, forms: list[record.Row]) -> list[str]:
    """The line of a table that compares with the rate of shared memory or of the tensor cores; empty where a form does not use it."""
    multiply_adds = math.prod(int(forms[0][side]) for side in ("rows", "hidden", "outputs"))
    if step in SHARED_BYTES:
        name, least = "shared memory's", SHARED_BYTES[step] * multiply_adds / SHARED_PEAK
    else:
        name, least = "the tensor cores'", PRODUCTS[step][0] * 2 * multiply_adds / TENSOR_PEAK
    shares = [f"{least / float(form['median_us']):.0%}" for form in forms]
    measured = " (bytes of the machine code)" if step in SHARED_BYTES else ""
    return [f"share of {name} peak{measured}", "" if step in ("tiled", "tensor") else shares[0], shares[1]]


def key() -> str:
    """The table of the first step, and what each of its lines is."""
    meanings = (
        "counted by the virtual GPU, in a small case (LayerNorm in float32); in brackets, the limit",
        "on the H200, in bfloat16",
        "of 4.8 TB/s; steps 7 to 12 compare with PyTorch's products", "with all steps up to this one",
    )  # fmt: skip
    lines = step_lines(STEPS[0])
    body = [
        [f"{name}<br><small>↑ {what}</small>", *values]
        for (name, *values), what in zip(lines, meanings, strict=True)
    ]
    return table(["", "before", "after"], body, "lrr")


def all_steps() -> str:
    """A line for each step: its kernel's times, and both passes over PyTorch's bare products."""
    bare, taken = median("bare", "all"), passes()
    body = [["as given", "", "", time_text(taken[0]), times(taken[0] / bare)]]
    for number, (step, whole) in enumerate(zip(STEPS, taken[1:], strict=True), 1):
        own = (time_text(median(form, step)) for form in ("first", "solution"))
        body.append([f"{number} {NAMES[step]}", *own, time_text(whole), times(whole / bare)])
    return table(["step", "kernel before", "after", "both passes", "times bare"], body, "lrrrr")


LEFT, RIGHT, TOP, BOTTOM = 58, 470, 20, 262
"""The frame of the climb."""


def place(number: float, time: float) -> tuple[float, float]:
    """Where a step's time stands in the climb."""
    low, high = 50, 200_000
    x = LEFT + (RIGHT - LEFT) * (number + 0.4) / (len(STEPS) + 0.8)
    return x, BOTTOM - (BOTTOM - TOP) * math.log(time / low) / math.log(high / low)


def launches(of: str, *numbers: int) -> float:
    """The microseconds of some launches, as they take them inside both passes; of all without numbers."""
    rows = record.Rows("fast_launches").select(of=of)
    return sum(float(row["median_us"]) for row in rows if not numbers or int(row["launch"]) in numbers)


def last_launches() -> str:
    """Where the time of both passes goes at the end, and in PyTorch's layers."""
    groups, spoken = {}, []
    for job, numbers in FACTS["launches"].items():
        forms = ("pass 12", "eager", "compile")
        times_us = [launches(of, *some) if some else 0 for of, some in zip(forms, numbers, strict=True)]
        if job in ("dW", "db"):  # one launch after step 12: db is what it takes longer than in step 11
            dw = launches("pass 11", 6)
            times_us[0] = dw if job == "dW" else launches("pass 12", 3) - dw
        names = ("this log", "PyTorch", "torch.compile")
        groups[job] = [
            (name, us, time_text(us), not place)
            for place, (name, us) in enumerate(zip(names, times_us, strict=True))
        ]
        spoken.append(f"{job} {', '.join(map(time_text, times_us))}")
    return bars(
        "Launches of both passes, here, in PyTorch's layers and in the same compiled: " + "; ".join(spoken),
        groups,
    )


def draw_kernels(drawing: Drawing) -> None:
    """Draw below the climb, on an axis of its own, how many times as fast each step makes its own kernels."""
    height = lambda ratio: 438 - 64 * math.log10(ratio)  # noqa: E731
    drawing.text(LEFT, 324, "each step's own kernels: time before ÷ time after", anchor="start", size=14)
    for ratio in (1, 10):
        drawing.segment(LEFT, height(ratio), RIGHT, height(ratio), opacity=0.5 if ratio == 1 else 0.2)
        drawing.text(LEFT - 6, height(ratio) + 5, f"{ratio} ×", anchor="end")
    for number, step in enumerate(STEPS, 1):
        x, ratio = place(number, 1)[0], median("first", step) / median("solution", step)
        top, bottom = sorted((height(ratio), height(1)))
        drawing.parts.append(
            f'<rect x="{x - 9:.1f}" y="{top:.1f}" width="18" height="{bottom - top:.1f}" fill="currentColor" fill-opacity="0.5"/>'
        )
        drawing.text(x, top - 5, f"{ratio:.2g}")
        drawing.text(x, 457, str(number))
    for first, last in ((1, 6), (7, 12)):
        rows = int(measured("first", STEPS[first - 1])["rows"])
        drawing.text(place((first + last) / 2, 1)[0], 476, f"{rows:,} rows")
    between = place(6.5, 1)[0]
    drawing.segment(between, 342, between, 480, dash="5 4", opacity=0.6)


def climb() -> str:
    """Both passes after each step, on a logarithmic axis: a still picture, and the data of the moving one."""
    taken, bare = passes(), median("bare", "all")
    drawing = Drawing(486, "Time of both passes after each step: " + ", ".join(map(time_text, taken)))
    for power, words in ((100, "100 µs"), (1_000, "1 ms"), (10_000, "10 ms"), (100_000, "100 ms")):
        y = place(0, power)[1]
        drawing.segment(LEFT, y, RIGHT, y, opacity=0.2)
        drawing.text(LEFT - 6, y + 5, words, anchor="end")
    lines = (("PyTorch, eager", peer("eager"), "2 3"), ("torch.compile", peer("compile"), "2 3"), ("three bare products", bare, "5 4"))  # fmt: skip
    for number, (name, time, dash) in enumerate(lines):
        y, x, words_y = place(0, time)[1], LEFT + 10 + 14 * number, 168 + 20 * number
        drawing.segment(LEFT, y, RIGHT, y, dash=dash, thick=1.5)
        drawing.segment(x, words_y - 10, x, y, opacity=0.6)
        drawing.text(x + 5, words_y, f"{name}, {time_text(time)}", anchor="start")
    points = [place(number, time) for number, time in enumerate(taken)]
    drawing.polyline(points, opacity=0.6, thick=2)
    for number, (x, y) in enumerate(points):
        drawing.parts.append(f'<circle class="stop" cx="{x:.1f}" cy="{y:.1f}" r="5" fill="currentColor"/>')
        drawing.text(x, BOTTOM + 18, str(number))
    drawing.text((LEFT + RIGHT) / 2, BOTTOM + 36, "steps done")
    draw_kernels(drawing)
    stops = [{"title": "as given", "time": time_text(taken[0]), "change": "", "counter": ""}]
    for number, step in enumerate(STEPS, 1):
        name, before, after, _ = counters(step)[0]
        stops.append(
            {
                "title": f"{number}. {NAMES[step]}",
                "time": time_text(taken[number]),
                "change": f"This step's kernel{'s' * (step in SEVERAL)} {of_step(step)}",
                "counter": f"{name[0].upper()}{name[1:]}: from {before} to {after}",
            }
        )
    data = html.escape(json.dumps(stops, ensure_ascii=False), quote=False)
    return f'{drawing.svg().strip()}\n<script type="application/json" class="climb-data">{data}</script>\n'


FILES: dict[str, Callable[[], str]] = {
    **PICTURES,
    **{f"worklog_{step}.md": partial(step_table, step) for step in STEPS},
    "worklog_all.md": all_steps,
    "worklog_climb.html": climb,
    "worklog_key.md": key,
    "worklog_last.svg": last_launches,
}
