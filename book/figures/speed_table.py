"""The table of speed on the README and on the page of the layers: eight rows of four records, none of them typed by hand.

`python -m book.figures.speed_table` writes it into the README, between its two marks.
"""

import re

from book.figures import attention_times, bench_results
from book.figures.bench_results import bold_ratio, time_text
from book.figures.markdown_table import table
from book.measure import record
from book.measure.record import Rows

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
    rows = []
    for dims, at in bench_results.select(record.rows("bench"), "both", "graph").items():
        ours = at[bench_results.OURS]
        peers = ("eager", "compile", ours["fastest_peer"])
        ratios = [
            bold_ratio(float(ours["ratio_to_floor"]) / float(at[name]["ratio_to_floor"])) for name in peers
        ]
        what = "LayerNorm + Linear, {:,}:\u00a0{:,}→{:,}".format(*dims)
        fastest = f"{ratios.pop()} {bench_results.SHORT[ours['fastest_peer']]}"
        rows.append([what, time_text(float(ours["median_us"])), *ratios, fastest])
    return rows


def attention_row(d: int) -> list[str]:
    """Attention, forward and backward as a CUDA graph; eager is PyTorch's flash attention."""
    size = 2048, d, False
    ours, flash, cudnn = (attention_times.microseconds(size, who) for who in ("attention", "flash", "cuDNN"))
    what = f"attention, 8 x 12 heads of {d}, 2,048 positions{elsewhere('attention')}"
    return [what, time_text(ours), bold_ratio(ours / flash), "–", f"{bold_ratio(ours / cudnn)} cuDNN"]


def step_row(what: str, name: str, ours: float, eager: float, compiled: float) -> list[str]:
    """A training step of GPT-2 (124M) from a record, in milliseconds, beside PyTorch's."""
    ratio = bold_ratio(ours / compiled)
    cells = [f"{ours:.1f} ms", bold_ratio(ours / eager), ratio, f"{ratio} compile"]
    return [f"GPT-2 (124M), {what}{elsewhere(name)}", *cells]


def gpt2_row() -> list[str]:
    """A step under the backend, float32 parameters under autocast, all ways as a CUDA graph."""
    ways = ("mojo_workbook", "eager", "torch.compile")
    times = (Rows("gpt2_step")("median_ms", setting="autocast", way=way) for way in ways)
    return step_row("both passes, 16 x 1,024 tokens", "gpt2_step", *times)


def step_by_hand_row() -> list[str]:
    """A whole step by hand, AdamW included."""
    ways = ("by hand", "autograd", "torch.compile")
    times = (Rows("step_by_hand")("median_us", what=way) / 1e3 for way in ways)
    return step_row("a whole step by hand (`p27`)", "step_by_hand", *times)


def speed_table() -> str:
    """The table in Markdown."""
    rows = [*layer_rows(), *map(attention_row, WIDTHS), gpt2_row(), step_by_hand_row()]
    return table(HEAD, rows, "lrrrr")


FILES = {"speed.md": speed_table}

if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(MARKED.sub(lambda _: speed_table(), text), encoding="utf-8")
