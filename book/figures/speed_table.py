"""The table of speed on the README and on the page of the layers: eight rows of four records, none of them typed by hand.

`python -m book.figures.speed_table` writes it into the README, between its two marks.
"""

import re

from book.figures import attention_times, bench_results
from book.figures.bench_results import bold_ratio, table, time_text
from book.measure import record

README = record.ROOT / "README.md"
MARKED = re.compile(r"(?<=<!-- speed -->\n).*(?=<!-- /speed -->)", re.DOTALL)
HEAD = ["what", "time", "eager PyTorch", "torch.compile", "the fastest other"]
WIDTHS = (64, 128)
"""Of attention's heads."""


def elsewhere(name: str) -> str:
    """A comma and the GPU, H100 for example, where a record is of another NVIDIA GPU than that of the layers; else nothing."""
    machine = record.read(name).machine
    return "" if machine == record.read("bench").machine else f", {machine.split()[1]}"


def layer_rows() -> list[list[str]]:
    """LayerNorm + Linear, forward and backward as a CUDA graph, at four sizes."""
    measured, rows = record.rows("bench"), []
    best = {
        dims: at["fast"]["fastest_peer"]
        for dims, at in bench_results.select(measured, "both", "graph").items()
    }
    for dims, direction, at in bench_results.passes(measured, "graph"):
        if direction == "both":
            ratios = [bold_ratio(at["fast"].over(at[name])) for name in ("eager", "compile", best[dims])]
            what = "LayerNorm + Linear, {:,}:\u00a0{:,}→{:,}".format(*dims)
            fastest = f"{ratios.pop()} {bench_results.SHORT[best[dims]]}"
            rows.append([what, time_text(at["fast"].time), *ratios, fastest])
    return rows


def attention_row(d: int) -> list[str]:
    """Attention, forward and backward as a CUDA graph; eager is PyTorch's flash attention."""
    times = attention_times.read()
    size = 2048, d, False, "bfloat16"
    ours, flash, cudnn = (times.microseconds(size, "graph", who)
                          for who in ("attention", "flash", "cuDNN"))  # fmt: skip
    batch, heads = attention_times.HEADS
    what = f"attention, {batch} x {heads} heads of {d}, 2,048 positions{elsewhere('attention')}"
    return [what, time_text(ours), bold_ratio(ours / flash), "–", f"{bold_ratio(ours / cudnn)} cuDNN"]


def gpt2_row() -> list[str]:
    """A training step of GPT-2 (124M) under the backend, float32 parameters under autocast, all ways as a CUDA graph."""
    ms = {
        row["way"]: float(row["median_ms"])
        for row in record.rows("gpt2_step")
        if row["setting"] == "autocast"
    }
    ours = ms["mojo_workbook"]
    compiled = bold_ratio(ours / ms["torch.compile"])
    eager = bold_ratio(ours / ms["eager"])
    return [
        "GPT-2 (124M), both passes, 16 x 1,024 tokens" + elsewhere("gpt2_step"),
        f"{ours:.1f} ms",
        eager,
        compiled,
        f"{compiled} compile",
    ]


def step_by_hand_row() -> list[str]:
    """A whole training step of GPT-2 (124M) by hand, AdamW included, beside PyTorch's."""
    us = {row["what"]: float(row["median_us"]) for row in record.rows("step_by_hand")}
    ours = us["by hand"]
    compiled = bold_ratio(ours / us["torch.compile"])
    return [
        "GPT-2 (124M), a whole step by hand (`p27`)" + elsewhere("step_by_hand"),
        f"{ours / 1e3:.1f} ms",
        bold_ratio(ours / us["autograd"]),
        compiled,
        f"{compiled} compile",
    ]


def speed_table() -> str:
    """The table in Markdown."""
    return table(HEAD, [*layer_rows(), *map(attention_row, WIDTHS), gpt2_row(), step_by_hand_row()])


def pages() -> dict[str, str]:
    """What the book's pages can include."""
    return {"speed.md": speed_table()}


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(MARKED.sub(lambda _: speed_table(), text), encoding="utf-8")
