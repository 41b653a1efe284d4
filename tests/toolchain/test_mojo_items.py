"""Items of a Mojo file: lines, dependencies, and packages of an item with its dependencies."""

from harness.toolchain.mojo_items import Items, parse_source, split_arguments

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


def get_names(items) -> list[str]:
    return [item.name for item in items if item.name]


def test_file_is_split_into_items():
    source = parse_source("kernels.mojo", KERNELS)
    assert get_names(source.items) == ["SIZE", "inner", "kernel", "apart"]
    for item in source.items:
        assert KERNELS.split("\n")[item.line - 1 : item.line - 1 + len(item.lines)] == list(item.lines)
    inner = source.items[get_names(source.items).index("inner") + 2]  # two docstrings have no name
    assert inner.lines[0] == "@always_inline", "a decorator belongs to its function"
    assert [i.names for i in source.imports] == [
        (("exp", "exp"), ("sqrt", "root")),
        (("barrier", "barrier"), ("thread_idx", "thread_idx")),
        (("helper", "helper"), ("other", "other")),
    ]


def test_multiline_decorators_belong_to_their_function():
    text = (
        "@inline\n@limits(\n    threads=128,\n)\ndef kernel(x: Int):\n    pass\n\n\ndef other():\n    pass\n"
    )
    source = parse_source("kernels.mojo", text)
    assert [(item.name, item.line) for item in source.items] == [("kernel", 1), ("other", 9)]


def test_dependencies_include_imports_but_not_comments():
    assert get_names(Items(FILES).find_dependencies(["kernel"])) == [
        "depth",
        "helper",
        "SIZE",
        "inner",
        "kernel",
    ]
    assert get_names(Items(FILES).find_dependencies(["kernel"], exclude=["helper"])) == [
        "SIZE",
        "inner",
        "kernel",
    ]
    assert "other" in get_names(Items(FILES).find_dependencies(["apart"]))


def test_package_of_dependencies_keeps_line_numbers():
    items = Items(FILES)
    reduced = items.extract_items(items.find_dependencies(["kernel"]))
    lines = reduced["kernels.mojo"].split("\n")
    assert len(lines) == len(KERNELS.split("\n"))
    assert [line for line in lines if "import" in line] == [
        "from max.gpu import barrier",
        "from .helpers import helper",
    ]
    assert lines[KERNELS.split("\n").index("    barrier()")] == "    barrier()"
    assert "apart" not in reduced["kernels.mojo"] and "other" not in reduced["helpers.mojo"]
    assert reduced["helpers.mojo"].startswith("from .deep import depth as deeper\n")
    assert set(reduced) == set(FILES)


def test_unclosed_bracket_does_not_include_the_next_item():
    broken = KERNELS.replace("inner(SIZE)", "inner(SIZE")
    assert get_names(parse_source("kernels.mojo", broken).items) == ["SIZE", "inner", "kernel", "apart"]


def test_item_is_selected_by_line():
    items = Items(FILES)
    item = items.find_enclosing("deep.mojo", 2)
    assert item is not None and item.name == "depth"
    assert items.find_enclosing("deep.mojo", 99) is None and items.find_enclosing("no.mojo", 1) is None


def test_parts_are_split_at_outer_commas():
    assert split_arguments("dtype, accum_type[a, b],\n  32") == ["dtype", "accum_type[a, b]", "32"]
    assert split_arguments("") == []
