"""What the page about torch.compile says in words is what its recorded run and its measurements say."""

import csv
import re
import shutil

import pytest
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


def test_half_the_budget_keeps_what_the_layer_keeps():
    """The recorded run against the shapes: x and two numbers for each row, and the LayerNorm output without a budget."""
    import outputs
    from ledger import GPT2_SMALL

    from harness.puzzles.p22 import spec as p22

    account = p22.ledger(GPT2_SMALL, "float32")
    eager, ours = (f"{sum(kept.values()) / 1e6:.1f} MB" for kept in (account.saved_eager, account.saved_ours))
    plain, default, half = outputs.load("compile_saved").text.splitlines()
    assert eager in plain and eager in default and ours in half
    assert half.endswith("(8, 1024, 1) (8, 1024, 1) (8, 1024, 768)")


@pytest.mark.compiler
@pytest.mark.skipif(
    not shutil.which("g++") and not shutil.which("c++"), reason="no C++ compiler for torch.compile"
)
def test_the_compilers_own_backend_keeps_as_little():
    import torch
    from torch._functorch import config

    pair, x = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 96)), torch.randn(512, 64)
    parameters = {parameter.data_ptr() for parameter in pair.parameters()}

    def kept(budget: float) -> list[int]:
        found = {}

        def pack(tensor):
            found[tensor.data_ptr()] = tensor
            return tensor

        torch.compiler.reset()
        with config.patch(activation_memory_budget=budget):
            compiled = torch.compile(pair)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                compiled(x)
        return sorted(tensor.numel() for at, tensor in found.items() if at not in parameters)

    assert kept(1.0) == [512, 512, 512 * 64, 512 * 64]
    assert kept(0.5) == [512, 512, 512 * 64]


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
