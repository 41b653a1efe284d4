"""What the fusion page says about measured times is what the measurements say."""

import re

import pytest
from book_paths import ROOT

PAGE = (ROOT / "book" / "src" / "fusion.md").read_text()
CHAPTER, GPT2 = (4, 4, 8, 16), (8, 1024, 768, 3072)


@pytest.mark.parametrize(
    ("words", "dims", "direction", "slower", "faster"),
    [
        (r"the fused forward pass is ([\d.]+) times faster", CHAPTER, "forward", "unfused", "fused"),
        (r"the backward pass ([\d.]+) times\. That", CHAPTER, "backward", "unfused", "fused"),
        (r"they are (\d+) times slower forward", GPT2, "forward", "fused", "unfused"),
        (r"and (\d+) times\s+backward", GPT2, "backward", "fused", "unfused"),
        (r"are ([\d.]+) times slower than PyTorch forward", GPT2, "forward", "unfused", "PyTorch"),
        (r"and ([\d.]+) times backward\. PyTorch", GPT2, "backward", "unfused", "PyTorch"),
    ],
)
def test_ratios_in_the_text(words, dims, direction, slower, faster):
    import generate

    said = re.search(words, PAGE)[1]
    times = generate.measured("float32")[dims, direction]
    digits = len(said.partition(".")[2])
    assert f"{times[slower] / times[faster]:.{digits}f}" == said


def test_fused_is_slower_from_64_columns_on():
    import generate

    for (dims, _), times in generate.measured("float32").items():
        assert (times["fused"] > times["unfused"]) == (dims[2] >= 64)
