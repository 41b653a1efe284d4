"""What the fusion page says about measured times is what the measurements say."""

import re

import pytest
from book_paths import ROOT

PAGE = " ".join((ROOT / "book" / "src" / "fusion.md").read_text().split())
CHAPTER, GPT2 = (4, 4, 8, 16), (8, 1024, 768, 3072)


@pytest.mark.parametrize(
    ("words", "dtype", "dims", "direction", "slower", "faster"),
    [
        (
            r"the fused forward pass is ([\d.]+) times faster",
            "float32",
            CHAPTER,
            "forward",
            "unfused",
            "fused",
        ),
        (r"the backward pass ([\d.]+) times; in", "float32", CHAPTER, "backward", "unfused", "fused"),
        (r"are ([\d.]+) and [\d.]+ times faster", "bfloat16", CHAPTER, "forward", "unfused", "fused"),
        (r"are [\d.]+ and ([\d.]+) times faster", "bfloat16", CHAPTER, "backward", "unfused", "fused"),
        (r"they are (\d+) times slower forward", "float32", GPT2, "forward", "fused", "unfused"),
        (r"forward and (\d+) times backward\. The", "float32", GPT2, "backward", "fused", "unfused"),
        (r"are ([\d.]+) times slower than PyTorch forward", "float32", GPT2, "forward", "unfused", "PyTorch"),
        (r"and ([\d.]+) times backward\. In", "float32", GPT2, "backward", "unfused", "PyTorch"),
        (r"In bfloat16 they are (\d+) times slower", "bfloat16", GPT2, "forward", "unfused", "PyTorch"),
        (r"and (\d+) times backward: PyTorch's", "bfloat16", GPT2, "backward", "unfused", "PyTorch"),
    ],
)
def test_ratios_in_the_text(words, dtype, dims, direction, slower, faster):
    from book.build import generate

    said = re.search(words, PAGE)[1]
    times = generate.measured(dtype)[dims, direction]
    digits = len(said.partition(".")[2])
    assert f"{times[slower] / times[faster]:.{digits}f}" == said


def test_how_far_times_at_the_chapters_sizes_lie_apart():
    from book.build import generate

    said = re.search(
        r"PyTorch's forward pass took (\d+) µs in float32 and (\d+) µs in bfloat16", PAGE
    ).groups()
    times = [generate.measured(dtype)[CHAPTER, "forward"]["PyTorch"] for dtype in ("float32", "bfloat16")]
    assert said == tuple(f"{time:.0f}" for time in times)


def test_every_marker_of_the_roofline_stands_in_the_table_of_times():
    from book.build import generate

    lines = generate.times_table().splitlines()[2:]
    for dtype in ("float32", "bfloat16"):
        for dims in (CHAPTER, GPT2):
            (line,) = (x for x in lines if f"| {dtype} | {generate.short_dims(dims)} | forward |" in x)
            for time in generate.measured(dtype)[dims, "forward"].values():
                assert generate.duration(time) in line


def test_fused_is_slower_from_64_columns_on():
    from book.build import generate

    for dtype in ("float32", "bfloat16"):
        for (dims, _), times in generate.measured(dtype).items():
            assert (times["fused"] > times["unfused"]) == (dims[2] >= 64)
