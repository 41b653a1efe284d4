"""What the page about torch.compile says in words is what its recorded run and its measurements say."""

import re

from book_paths import BOOK

PAGE = (BOOK / "src" / "torch_compile.md").read_text()
SMALL, LARGE = "8", "256"  # the hidden dimensions of the two sizes


def cpu(way: str, hidden: str, column: str) -> float:
    """A number of the CPU's table."""
    import generate

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


def test_what_the_settings_do_is_what_the_page_says():
    import outputs

    lines = outputs.load("compile_settings").text.splitlines()
    numbers = {line[:34].strip(): line[34:].split() for line in lines[1:7]}
    assert numbers["batch sizes, dynamic=False"] == ["8", "8", "4"], "a graph for each size, up to the limit"
    assert numbers["batch sizes, default"] == ["2", "12", "0"]
    assert numbers["batch sizes, dynamic=True"] == ["1", "12", "0"]
    assert numbers["constants, limit 8 (the default)"] == ["8", "8", "4"]
    assert numbers["constants, limit 8, fullgraph=True"][0] == "FailOnRecompileLimitHit"
    assert numbers["constants, limit 64"] == ["12", "12", "0"]
    assert "suppress_errors=False: TorchRuntimeError" in lines
    assert lines[-1] == "suppress_errors=True: (4, 1), calls of a compiled graph: 0"
