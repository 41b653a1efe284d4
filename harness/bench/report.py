"""What `pNN --bench` prints: tables for people, the progress of long steps, and the same rows as JSON."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from harness.bench.benchmark import Sizes

Row = dict[str, str | int | float]
"""A row of the CSV, by the names of its columns."""

PASS_NAMES = {
    "": "all passes",
    "inference": "forward without gradients",
    "forward": "forward",
    "backward": "backward",
    "both": "forward + backward",
}


@dataclass
class Show:
    """Prints tables and, on a terminal, what is going on now; in a pipe, a line for each step."""

    console: Console

    def line(self, text: str = "", style: str = "") -> None:
        """One line as it is."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    @contextmanager
    def step(self, words: str) -> Iterator:
        """Shows a step while it lasts; yields what to call with the part that is done, 0 to 1."""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        if not self.console.is_terminal:
            self.line(f"{words} ...")
            yield lambda part: None
            return
        with Progress(*columns, console=self.console, transient=True) as bars:
            task = bars.add_task(words, total=1.0)
            yield lambda part: bars.update(task, completed=part)

    def table(self, where: str, dtype: str, rows: list[Row]) -> None:
        """The candidates of one pass in one column, fastest first."""
        host = rows[0]["column"] == "host"
        self.line()
        self.line(f"{where}, {dtype}: {rows[0]['protocol']}", style="bold")
        head = f"   {'candidate':<20}{'median us':>12}{'p20':>12}{'p80':>12}"
        if not host:
            head += f"{'/ floor':>10}{'/ best peer':>13}{'TFLOP/s':>10}{'of max':>8}{'GB/s':>8}{'of max':>8}"
        self.line(f"{head}{'error':>11}")
        for row in sorted(rows, key=lambda row: float(row["median_us"])):
            self.line(table_line(row, host), style="bold" if row["role"] == "ours" else "")
        bound = [row for row in rows if str(row.get("note", "")).startswith("launch-bound")]
        if bound:
            self.line(f"   {bound[0]['note']}: {', '.join(str(row['candidate']) for row in bound)}")

    def memory(self, sizes: Sizes, rows: list[Row]) -> None:
        """What every candidate keeps."""
        self.line()
        self.line(f"{sizes}, memory in MiB, without parameters and output", style="bold")
        self.line(f"   {'candidate':<20}{'saved':>12}{'grown':>12}{'peak':>12}")
        for row in rows:
            cells = (row.get(name, "") for name in ("saved_bytes", "grown_bytes", "peak_bytes"))
            words = (f"{float(cell) / 2**20:,.2f}" if cell != "" else "-" for cell in cells)
            self.line(f"   {row['candidate']:<20}" + "".join(f"{word:>12}" for word in words))


def table_line(row: Row, host: bool) -> str:
    """One candidate of a table."""
    times = (float(row[f"{name}_us"]) for name in ("median", "p20", "p80"))
    words = (f"{time:,.1f}" if time < 1e5 else f"{time:,.0f}" for time in times)
    line = f"   {row['candidate']:<20}" + "".join(f"{word:>12}" for word in words)
    if not host:
        percents = [
            f"{row[name]}%" if row.get(name) else "-" for name in ("percent_of_matmul", "percent_of_copy")
        ]
        ratios_ = [
            f"{float(row[name]):.3f}" if row.get(name) else "-"
            for name in ("ratio_to_floor", "ratio_to_fastest_peer")
        ]
        line += f"{ratios_[0]:>10}{ratios_[1]:>13}{row['tflops']:>10}{percents[0]:>8}{row['gbs']:>8}{percents[1]:>8}"
    return f"{line}{row['error'] or '-':>11}"
