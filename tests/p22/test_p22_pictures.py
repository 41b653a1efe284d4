"""Pictures of the zoo's wrong kernels show the wrong element, thread and line.

The expectations are derived by hand from each kernel's edit.
"""

import functools
import re
from dataclasses import dataclass

import pytest
from recordings import make_order

from harness.check import picture, zoo
from harness.check.checker import Checker
from harness.puzzles.p22.spec import PUZZLE
from harness.screens import story

ZOO = {kernel.name: kernel for kernel in zoo.load_wrong_solutions("p22")}
DEFAULT_CASES = ("hard values", "odd sizes")


@dataclass(frozen=True)
class Expected:
    """Expected contents of a picture.

    Args:
        element: The wrong element, or "" if no value is wrong.
        kind: The kind of the fault, or of the finding.
        block: The thread's block; None if any block may be named.
        thread: The thread within its block.
        line: A part of the faulty line.
        words: Words of the story.
    """

    element: str
    kind: str
    block: tuple[int, int, int] | None
    thread: int
    line: str
    message: str


EXPECTED = {
    # The block of the second batch is the first that does not add.
    "db_first_batch_only": Expected("grad_bias[0]", "missing write", (1, 0, 0), 0,
        "atomic_add(grad_bias, o, dy[row, o]", "never writes"),
    "db_last_row_twice": Expected("grad_bias[0]", "count", (3, 3, 0), 0,
        "atomic_add(grad_bias, o, dy[row, o]", "another number of times"),
    "db_one_too_far": Expected("", "out-of-bounds load", (3, 3, 0), 0, "atomic_add(grad_bias, o, dy[row, o]",
        "past the end of grad_output"),
    "db_missing_atomic": Expected("grad_bias[0]", "global race", None, 0, "grad_bias[unsafe_offset=o]",
        "nothing orders the blocks"),
    # Row b * S + s is read as s * B + b: block (1, 0) should read row 4 of grad_output, and reads row 1.
    "dw_batch_sequence_swapped": Expected("grad_weight[0, 0]", "element", (1, 0, 0), 0,
        "atomic_add(grad_weight,", "it never reads grad_output[1, 0, 0]"),
    "dw_beta_forgotten": Expected("grad_weight[0, 0]", "element", (0, 0, 0), 0, "atomic_add(grad_weight,",
        "it never reads ln_bias[0]"),
    "dw_from_x_hat": Expected("grad_weight[0, 0]", "element", (0, 0, 0), 0, "atomic_add(grad_weight,",
        "it never reads ln_weight[0], ln_bias[0]"),
    # Element (o, h) is written to h * O + o: (0, 1), flat element 1, gets the value of (1, 0).
    "dw_strides_swapped": Expected("grad_weight[0, 1]", "place", (0, 0, 0), 0,
        "atomic_add(grad_weight, h * O + o", "puts this value into sums_weight[1, 0]"),
    "dgamma_first_position_only": Expected("grad_ln_weight[0]", "missing write", (0, 1, 0), 0,
        "atomic_add(grad_ln_weight, h, dln * x_hat)", "never writes"),
    "dx_variance_term_dropped": Expected("grad_input[0, 0, 0]", "element", (0, 0, 0), 0, "dx[row, h] =",
        "it never reads input[0, 0, 0]"),
    "dx_mean_term_doubled": Expected("grad_input[0, 0, 0]", "value", (0, 0, 0), 0, "dx[row, h] =",
        "the same elements and values"),
    # With an odd H the last column belongs to thread H - 1 = 6, which never reads it.
    "row_sums_odd_column": Expected("row_sums[0, 0]", "element", (0, 0, 0), 6, "var x_hat = deviation",
        "it never reads mean[0, 0], rstd[0, 0], input[0, 0, 6]"),
    # gamma is read at row % H: thread 1 of row 0 reads element 0.
    "ln_gamma_by_row": Expected("output[0, 0, 0]", "element", (0, 0, 0), 1, "",
        "it reads ln_weight[0], ln_bias[0], which the solution's thread does not"),
}  # fmt: skip


def find_gate(puzzle, kernel):
    return next(gate for gate in puzzle.gates if gate.id == kernel.gate)


def list_cases(puzzle, kernel):
    """Return the cases that a kernel lists, else the default cases."""
    return [case for case in puzzle.list_cases(None) if case.name in (kernel.cases or DEFAULT_CASES)]


def list_orders(folder, tests):
    orders = {}
    for name in EXPECTED:
        kernel = ZOO[name]
        variants = [find_gate(PUZZLE, kernel).variant]
        for package in (kernel.build_package(), None):
            orders[name, package] = make_order("p22", list_cases(PUZZLE, kernel), variants, package)
    return orders


@pytest.fixture(scope="module")
def draw(puzzle, recorded):
    """Return a function that takes a wrong kernel's picture."""
    checker = Checker(puzzle)

    @functools.cache
    def make_picture(name: str) -> picture.Picture:
        kernel = ZOO[name]
        gate = find_gate(puzzle, kernel)
        return picture.make_picture(
            puzzle, kernel.build_package(), gate, cases=list_cases(puzzle, kernel), checker=checker
        )

    return make_picture


@pytest.mark.compiles
@pytest.mark.parametrize("name", EXPECTED)
def test_picture_shows_the_bug(name, draw):
    picture, expected = draw(name), EXPECTED[name]
    sentences = story.tell_story(picture)
    text = "\n".join(sentence.text for sentence in sentences)
    if expected.element:
        assert sentences[0].text.startswith(f"{expected.element} "), text
    else:
        assert not picture.wrong, text
    assert (picture.finding.kind if picture.finding else picture.root_cause.kind) == expected.kind, text
    launch = picture.learner.accesses.launches[picture.thread.launch]
    if expected.block:
        assert launch.get_block_index(picture.thread.block) == expected.block, text
    assert picture.thread.thread == expected.thread, text
    assert expected.message in text
    if expected.line:
        kernel = ZOO[name]
        assert picture.line.blank == kernel.gate and expected.line in story.read_line(picture.line), (
            story.read_line(picture.line)
        )


@pytest.mark.compiles
def test_reported_line_is_in_the_edit(draw):
    """The reported line is within the zoo's edit."""
    wrong_lines = []
    for name in EXPECTED:
        kernel = ZOO[name]
        text = (kernel.build_package().path / kernel.file).read_text()
        first = text[: text.index(kernel.new)].count("\n") + 1
        if not first <= draw(name).line.number <= first + kernel.new.count("\n"):
            wrong_lines.append(name)
    # Code hoisted out of a loop has the loop's line.
    assert wrong_lines == ["ln_gamma_by_row"]


@pytest.mark.compiles
def test_cause_is_traced_through_the_workspace(draw):
    picture = draw("dw_from_x_hat")
    (link,) = picture.root_cause.chain
    assert (link.write.element.tensor, link.read.element.tensor) == ("grad_weight", "sums_weight")
    assert picture.shapes["sums_weight"] == (16, 8)


@pytest.mark.compiles
def test_shuffle_is_traced_to_the_wrong_thread(draw):
    picture = draw("row_sums_odd_column")
    assert picture.root_cause.element.tensor == "row_sums" or re.match(
        "shared", picture.root_cause.element.tensor
    )
    assert {element.index % 7 for element in picture.root_cause.missing if element.tensor == "input"} == {6}
