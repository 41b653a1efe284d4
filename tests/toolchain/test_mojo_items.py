"""The items of a Mojo file: where they begin and end, what they need, and a package of what one of them needs."""

from harness.toolchain.mojo_items import Items, parts, read

KERNELS = '''"""A file.
def not_code(): it is text
"""

from std.math import exp, sqrt as root
from max.gpu import (
    barrier,
    thread_idx,
)

from .helpers import helper, other

comptime SIZE = 16
"""How many."""


@always_inline
def inner(x: Int) -> Int:
    return helper(x)  # not other


# ANCHOR: kernel
def kernel[
    dtype: DType
](
    y: Int,
):
    """Calls other() in its text."""
    barrier()
    _ = inner(SIZE)
    _ = "root"


def apart():
    _ = root(other(2))
'''
HELPERS = "from .deep import depth as deeper\ndef helper(x: Int) -> Int:\n    return deeper(x)\n\ndef other(): pass\n"
DEEP = "def depth(x: Int) -> Int:\n    return x\n"
FILES = {"kernels.mojo": KERNELS, "helpers.mojo": HELPERS, "deep.mojo": DEEP}


def names(items) -> list[str]:
    return [item.name for item in items if item.name]


def test_a_file_is_cut_where_its_items_begin():
    source = read("kernels.mojo", KERNELS)
    assert names(source.items) == ["SIZE", "inner", "kernel", "apart"]
    for item in source.items:
        assert KERNELS.split("\n")[item.line - 1 : item.line - 1 + len(item.lines)] == list(item.lines)
    inner = source.items[names(source.items).index("inner") + 2]  # two texts without a name
    assert inner.lines[0] == "@always_inline", "a decorator belongs to its function"
    assert [i.names for i in source.imports] == [
        (("exp", "exp"), ("sqrt", "root")),
        (("barrier", "barrier"), ("thread_idx", "thread_idx")),
        (("helper", "helper"), ("other", "other")),
    ]


def test_decorators_of_several_lines_belong_to_their_function():
    text = (
        "@inline\n@limits(\n    threads=128,\n)\ndef kernel(x: Int):\n    pass\n\n\ndef other():\n    pass\n"
    )
    source = read("kernels.mojo", text)
    assert [(item.name, item.line) for item in source.items] == [("kernel", 1), ("other", 9)]


def test_what_an_item_needs_is_found_by_name_through_files_and_renamings_and_not_in_comments():
    assert names(Items(FILES).find_needed(["kernel"])) == ["depth", "helper", "SIZE", "inner", "kernel"]
    assert names(Items(FILES).find_needed(["kernel"], but=["helper"])) == ["SIZE", "inner", "kernel"]
    assert "other" in names(Items(FILES).find_needed(["apart"]))


def test_a_package_of_what_is_needed_keeps_every_line_in_its_place():
    items = Items(FILES)
    cut = items.cut_out(items.find_needed(["kernel"]))
    lines = cut["kernels.mojo"].split("\n")
    assert len(lines) == len(KERNELS.split("\n"))
    assert [line for line in lines if "import" in line] == [
        "from max.gpu import barrier",
        "from .helpers import helper",
    ]
    assert lines[KERNELS.split("\n").index("    barrier()")] == "    barrier()"
    assert "apart" not in cut["kernels.mojo"] and "other" not in cut["helpers.mojo"]
    assert cut["helpers.mojo"].startswith("from .deep import depth as deeper\n")
    assert set(cut) == set(FILES)


def test_a_bracket_that_somebody_leaves_open_does_not_swallow_the_next_item():
    broken = KERNELS.replace("inner(SIZE)", "inner(SIZE")
    assert names(read("kernels.mojo", broken).items) == ["SIZE", "inner", "kernel", "apart"]


def test_the_line_of_an_item_is_told_by_its_place():
    items = Items(FILES)
    item = items.enclosing("deep.mojo", 2)
    assert item is not None and item.name == "depth"
    assert items.enclosing("deep.mojo", 99) is None and items.enclosing("no.mojo", 1) is None


def test_parts_are_parted_at_their_outer_commas():
    assert parts("dtype, accum_type[a, b],\n  32") == ["dtype", "accum_type[a, b]", "32"]
    assert parts("") == []
