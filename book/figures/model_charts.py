"""Charts and tables of training steps and of a model's head: the records `gpt2_step`, `step_by_hand`,
`cross_entropy` and `training_by_hand`."""

import html
import math
import re
from functools import partial

from book.figures.charts import Axis, Series, compared, plot
from book.figures.markdown_table import table
from book.measure import record
from book.measure.record import Rows


def samples() -> dict[str, tuple[float, str]]:
    """Step of that run -> its loss and what the model wrote, a dot for bytes that are not printable."""
    return {
        row["step"]: (
            float(row["loss"]),
            re.sub(r"(\\x[0-9a-f]{2}|[^ -~])+", "·", row["wrote"]).replace("`", "'"),
        )
        for row in record.rows("training_by_hand")
        if row["wrote"]
    }


def samples_list() -> str:
    """List the samples with their steps and losses. It is no table, which would not let code wrap."""
    return "".join(
        f"- after {step} step{'s' * (step != '1')}, at a loss of {loss:.2f}: `{wrote}`\n"
        for step, (loss, wrote) in samples().items()
    )


def samples_choice() -> str:
    """Ask which of three samples was written first."""
    replies = {
        "300": "No. It has whole short words; here the loss is",
        "30": "Yes. The model knows how often each letter occurs, and a little about which letter follows which. The loss is",
        "600": "No. It has syllables, short words and bits of formula notation; this is the last step, and the loss is",
    }
    written = samples()
    answers = "".join(
        f"<li><code>{html.escape(written[step][1][:86]).replace('$', '&#36;')}</code> <span>{reply} {written[step][0]:.2f}.</span></li>\n"
        for step, reply in replies.items()
    )
    question = "The model wrote one of these samples after 30 of its 600 steps, the others later. Which one?"
    return f'<div class="choice"><p>{question}</p><ul>\n{answers}</ul></div>\n'


def loss_by_hand() -> str:
    """The curve of that run, beside what a model knows that knows nothing."""
    curve, nothing = Rows("training_by_hand").all("loss"), math.log(256)
    first, last = (sum(part) / 10 for part in (curve[:10], curve[-10:]))
    return plot(
        f"The loss falls from {first:.3f} in the first ten steps to {last:.3f} in the last ten of {len(curve)}; "
        f"an untrained model has log 256, {nothing:.3f}.",
        [Series("", enumerate(curve, 1))],
        Axis("step", log=False),
        Axis("loss", False, (0, 1.15 * max(*curve, nothing))),
        level=nothing,
        notes=[
            ((len(curve) / 2, nothing), f"untrained: log 256 = {nothing:.3f}"),
            ((16, 4.4), "step 15"),
        ],
    )


def by_hand_beside() -> str:
    """A step of GPT-2 by hand beside PyTorch's two, in time and in memory, as recorded."""
    ways = {"autograd": "eager PyTorch", "torch.compile": "torch.compile", "by hand": "by hand"}
    steps = Rows("step_by_hand")
    measures = [
        ("A step of GPT-2 (124M)", {way: steps("median_us", what=way) / 1e3 for way in ways}, "ms"),
        ("its peak memory", {way: steps("peak_bytes", what=way) / 2**30 for way in ways}, "GiB"),
    ]
    return compared("", measures, ways)


def swap_gains() -> str:
    """A step of GPT-2 before and after the swap, in memory and in time, by the record."""
    ways = {"torch.compile": "Inductor alone", "mojo_workbook, LayerNorms alone": "with the swaps"}
    steps = partial(Rows("gpt2_step"), setting="autocast")
    measures = [
        ("peak memory of a step", {way: steps("peak_mib", way=way) / 1024 for way in ways}, "GiB"),
        ("time of a step", {way: steps("median_ms", way=way) for way in ways}, "ms"),
    ]
    return compared("A step of GPT-2 (124M): ", measures, ways)


def cross_entropy_chart() -> str:
    """Time over memory of GPT-2's head, with a curve through the chunks."""
    rows = Rows("cross_entropy").select(H=768, V=50304)
    places = {row["way"]: (float(row["peak_mib"]), float(row["ms"])) for row in rows}
    chunks = sorted((int(way.removeprefix("chunks of ")), way) for way in places if way.startswith("chunks"))
    told = "; ".join(f"{way} {ms:.1f} ms, {mib:,.0f} MiB" for way, (mib, ms) in places.items())
    ends = {f"{rows:,} rows": way for rows, way in (chunks[0], chunks[-1])}
    others = {"three products alone": "products", "eager PyTorch": "eager", "torch.compile": "compile"}
    return plot(
        f"Both passes of GPT-2's head with its loss: {told}",
        [
            Series("this layer", [places[way] for _, way in chunks], "-", "s"),
            *(Series("", [places[way]], "", "o", True) for way in others.values()),
        ],
        Axis(
            "peak memory (MiB)",
            ends=(150, 20000),
            ticks={mib: f"{mib:,}" for mib in (200, 500, 1000, 2000, 5000)},
        ),
        Axis("time (ms)", ticks={ms: str(ms) for ms in (2, 3, 4, 6, 8)}),
        notes=[
            ((mib, ms * (0.93 if way == chunks[-1][1] else 1)), name)  # lower, clear of torch.compile's point
            for name, way in {**ends, **others}.items()
            for mib, ms in [places[way]]
        ],
    )


def model_table() -> str:
    """A training step of GPT-2 under torch.compile, and under the workbook's backend."""
    steps = record.rows("gpt2_step")
    compiled = {row["setting"]: float(row["median_ms"]) for row in steps if row["way"] == "torch.compile"}
    rows = [
        [
            f"{row['setting']}, {row['batch']} × 1,024",
            f"`{row['way']}`" if row["way"] != "eager" else "eager",
            f"{float(row['median_ms']):.2f} ms",
            f"{float(row['median_ms']) / compiled[row['setting']]:.3f}",
            f"{int(row['peak_mib']):,} MiB",
            f"{float(row['first_s']):.0f} s",
            row["loss"],
        ]
        for row in steps
    ]
    head = [
        "setting",
        "candidate",
        "time of a step",
        "relative to `torch.compile`",
        "peak memory",
        "first three steps",
        "loss",
    ]
    return table(head, rows, "llrrrrr")


def step_table() -> str:
    """GPT-2's step by hand: its kinds of kernels with their floors, then the whole."""
    milliseconds = lambda us: f"{float(us) / 1e3:.{2 + (float(us) < 100)}f} ms" if us else ""  # noqa: E731
    of = {
        row["what"]: [milliseconds(row["median_us"]), milliseconds(row["floor_us"])]
        for row in record.rows("step_by_hand")
    }
    whole = {"by hand": "the whole step, median", "autograd": "", "torch.compile": ""}
    rows = [[kind, *times] for kind, times in of.items() if kind not in whole]
    return table(["kind of kernel", "time", "floor"], [*rows, [whole["by hand"], *of["by hand"]]], "lrr")


FILES = {
    "loss_by_hand.svg": loss_by_hand, "samples_by_hand.md": samples_list, "samples_choice.html": samples_choice, "by_hand_beside.svg": by_hand_beside,
    "swap_gains.svg": swap_gains, "cross_entropy.svg": cross_entropy_chart,
    "gpt2_compile.md": model_table, "step_by_hand.md": step_table,
}  # fmt: skip
