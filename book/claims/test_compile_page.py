"""What the pages on torch.compile and on the backend say of measured times is what was measured."""

import csv
import re

from book_paths import BOOK

PAGE = " ".join((BOOK / "src" / "torch_compile.md").read_text().split())
SMALL, LARGE = "8", "256"  # the hidden dimensions of the two sizes


def cpu(way: str, hidden: str, column: str) -> float:
    """A number of the CPU's table."""
    from book.build import generate

    (row,) = (
        row
        for row in generate.compile_rows()
        if "thread" in row["machine"] and row["way"] == way and row["H"] == hidden
    )
    return float(row[column])


def test_costs_in_the_text_are_measured():
    first, second = re.search(r"(\d+) s for the\s+first function, (\d+) s for the next", PAGE).groups()
    assert f"{cpu('compile', SMALL, 'first_s'):.0f}" == first
    assert f"{cpu('compile', LARGE, 'first_s'):.0f}" == second
    slower = re.search(r"the compiled pass is ([\d.]+) times slower", PAGE)[1]
    assert f"{cpu('compile', SMALL, 'median_us') / cpu('eager', SMALL, 'median_us'):.1f}" == slower
    differ = re.search(r"the two differ by (\d+) %", PAGE)[1]
    assert (
        f"{100 * (cpu('eager', LARGE, 'median_us') / cpu('compile', LARGE, 'median_us') - 1):.0f}" == differ
    )


def test_no_cuda_graph_was_recorded_on_the_cpu():
    assert all(cpu("reduce-overhead", hidden, "cudagraph_skips") == 1 for hidden in (SMALL, LARGE))


def gpt2() -> dict[str, dict[str, str]]:
    """The measured training steps of GPT-2, by way."""
    with (BOOK / "measurements" / "h200_gpt2_compile.csv").open(newline="") as file:
        return {row["way"]: row for row in csv.DictReader(file)}


def test_what_the_backend_s_page_says_of_its_gain_is_measured():
    rows = gpt2()
    page = (BOOK / "src" / "puzzle_26" / "real_one.md").read_text()
    ours, theirs = (float(rows[way]["median_ms"]) for way in ("mojo_workbook", "torch.compile"))
    assert "\nOne percent. " in page and round(100 * (1 - ours / theirs)) == 1
    assert int(rows["mojo_workbook"]["peak_MiB"]) < int(rows["torch.compile"]["peak_MiB"])
    assert abs(float(rows["mojo_workbook"]["loss"]) - float(rows["torch.compile"]["loss"])) < 1e-3
    assert f"H200, {rows['eager']['date']}, PyTorch {rows['eager']['torch'][:4]}." in page
