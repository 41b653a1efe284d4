"""Pictures of wrong kernels from the zoo: the element, the thread and the line that they name are those at fault.

What is expected of each kernel is read off its edit by hand. The kernels are recorded like those of tests/check/test_zoo.py,
so that a run of both compiles each once.
"""

import functools
import re
from dataclasses import dataclass

import pytest

from harness.check import picture, zoo
from harness.check.checker import Checker
from harness.devices.recorder import Order, record_many
from harness.screens import story

ZOO = {kernel.name: kernel for kernel in zoo.load("p22")}
USUAL = ("hard values", "odd sizes", "wide", "many rows", "expanded")


@dataclass(frozen=True)
class Expected:
    """What a picture must name: `block` and `thread` of the thread, a part of the line, words of the story.

    `kind` is that of the fault, or of the finding.
    """

    element: str
    kind: str
    block: tuple[int, int, int] | None
    thread: int
    line: str
    words: str


EXPECTED = {
    # The block of the second batch is the first that adds nothing.
    "db_first_batch_only": Expected("grad_bias[0]", "missing write", (1, 0, 0), 0,
        "atomic_add(grad_bias, o, dy[row, o]", "never writes"),
    "db_last_row_twice": Expected("grad_bias[0]", "count", (3, 3, 0), 0,
        "atomic_add(grad_bias, o, dy[row, o]", "another number of times"),
    "db_one_too_far": Expected("", "out-of-bounds load", (3, 3, 0), 0, "atomic_add(grad_bias, o, dy[row, o]",
        "past the end of grad_output"),
    "db_missing_atomic": Expected("grad_bias[0]", "global race", None, 0, "grad_bias[unsafe_offset=o]",
        "nothing orders the blocks"),
    # Row b * S + s is read as s * B + b: block (1, 0) has row 4 of grad_output, and takes row 1.
    "dw_batch_sequence_swapped": Expected("grad_weight[0, 0]", "element", (1, 0, 0), 0,
        "atomic_add(grad_weight,", "it never reads grad_output[1, 0, 0]"),
    "dw_beta_forgotten": Expected("grad_weight[0, 0]", "element", (0, 0, 0), 0, "atomic_add(grad_weight,",
        "it never reads ln_bias[0]"),
    "dw_from_x_hat": Expected("grad_weight[0, 0]", "element", (0, 0, 0), 0, "atomic_add(grad_weight,",
        "it never reads ln_weight[0], ln_bias[0]"),
    # Element (o, h) goes to h * O + o: (0, 1), which is flat element 1, gets what belongs into o = 1, h = 0.
    "dw_strides_swapped": Expected("grad_weight[0, 1]", "place", (0, 0, 0), 0,
        "atomic_add(grad_weight, h * O + o", "puts this value into sums_weight[1, 0]"),
    "dgamma_first_position_only": Expected("grad_ln_weight[0]", "missing write", (0, 1, 0), 0,
        "atomic_add(grad_ln_weight, h, dln * x_hat)", "never writes"),
    "dx_variance_term_dropped": Expected("grad_input[0, 0, 0]", "element", (0, 0, 0), 0, "dx[row, h] =",
        "it never reads input[0, 0, 0]"),
    "dx_mean_term_doubled": Expected("grad_input[0, 0, 0]", "value", (0, 0, 0), 0, "dx[row, h] =",
        "the same elements and values"),
    # With an odd H the last column belongs to thread H - 1 = 6, which never gets to it.
    "row_sums_odd_column": Expected("row_sums[0, 0]", "element", (0, 0, 0), 6, "var x_hat = deviation",
        "it never reads mean[0, 0], rstd[0, 0], input[0, 0, 6]"),
    # gamma is read at row % H: thread 1 of row 0 takes element 0.
    "ln_gamma_by_row": Expected("output[0, 0, 0]", "element", (0, 0, 0), 1, "",
        "it reads ln_weight[0], ln_bias[0], which the solution's thread does not"),
}  # fmt: skip


def gate_of(puzzle, kernel):
    """The gate that a kernel gets wrong."""
    return next(gate for gate in puzzle.gates if gate.id == kernel.gate)


def cases_for(puzzle, kernel):
    """The cases of tests/check/test_zoo.py."""
    return [case for case in puzzle.cases(None) if case.name in (kernel.cases or USUAL)]


@pytest.fixture(scope="module")
def taken(puzzle, solution):
    """name -> the picture of a wrong kernel; all kernels are recorded together."""
    orders = []
    for name in EXPECTED:
        kernel = ZOO[name]
        variant = gate_of(puzzle, kernel).variant
        dims = tuple(dict.fromkeys(case.dims for case in cases_for(puzzle, kernel)))
        for package in (kernel.package(), solution):
            orders.append(Order(package, dims, (variant,), small_grid=True))
    record_many(list(dict.fromkeys(orders)), puzzle.name, "float32")
    checker = Checker(puzzle)

    @functools.cache
    def take(name: str) -> picture.Picture:
        kernel = ZOO[name]
        gate = gate_of(puzzle, kernel)
        return picture.take(puzzle, kernel.package(), gate, cases=cases_for(puzzle, kernel), checker=checker)

    return take


@pytest.mark.compiles
@pytest.mark.parametrize("name", EXPECTED)
def test_the_picture_names_what_is_at_fault(name, taken):
    picture, expected = taken(name), EXPECTED[name]
    told = story.tell(picture)
    said = "\n".join(sentence.text for sentence in told)
    if expected.element:
        assert told[0].text.startswith(f"{expected.element} "), said
    else:
        assert not picture.wrong, said
    assert (picture.finding.kind if picture.finding else picture.fault.kind) == expected.kind, said
    launch = picture.mine.accesses.launches[picture.thread.launch]
    if expected.block:
        assert launch.block_index(picture.thread.block) == expected.block, said
    assert picture.thread.thread == expected.thread, said
    assert expected.words in said
    if expected.line:
        kernel = ZOO[name]
        assert picture.line.blank == kernel.gate and expected.line in story.code(picture.line), story.code(
            picture.line
        )


@pytest.mark.compiles
def test_the_line_at_fault_lies_in_the_edit(taken):
    """The edit of the zoo's file, found in the package, holds the line that the picture names."""
    missed = []
    for name in EXPECTED:
        kernel = ZOO[name]
        text = (kernel.package().path / kernel.file).read_text()
        first = text[: text.index(kernel.new)].count("\n") + 1
        if not first <= taken(name).line.number <= first + kernel.new.count("\n"):
            missed.append(name)
    # What the compiler has moved out of a loop has the line of the loop.
    assert missed == ["ln_gamma_by_row"]


@pytest.mark.compiles
def test_the_way_back_leads_through_scratch_memory(taken):
    picture = taken("dw_from_x_hat")
    (hop,) = picture.fault.hops
    assert (hop.write.place.tensor, hop.read.place.tensor) == ("grad_weight", "sums_weight")
    assert picture.shapes["sums_weight"] == (16, 8)


@pytest.mark.compiles
def test_a_shuffle_leads_to_the_thread_that_reads_too_little(taken):
    picture = taken("row_sums_odd_column")
    assert picture.fault.place.tensor == "row_sums" or re.match("shared", picture.fault.place.tensor)
    assert {place.element % 7 for place in picture.fault.missing if place.tensor == "input"} == {6}
