"""What the page on fusion says of the roof is what follows from the sizes and the measurements; no point lies above it."""

import re

from book_paths import ROOT

PAGE = " ".join((ROOT / "book" / "src" / "fusion.md").read_text().split())
GPT2 = (8, 1024, 768, 3072)


def test_what_the_page_says_of_the_roof():
    from book.build import generate
    from book.figures import roofline

    work = {dtype: roofline.pair(GPT2, dtype, "forward") for dtype in roofline.PEAKS}
    assert f"{work['float32'].intensity:.0f} operations for each byte" in PAGE
    norm = {dtype: max(roofline.layernorm(GPT2, dtype).least_seconds(dtype)) * 1e6 for dtype in work}
    product = {dtype: max(work[dtype].least_seconds(dtype)) * 1e6 for dtype in work}
    assert (
        f"{norm['float32']:.1f} µs in float32, and the product costs arithmetic {product['float32']:.0f} µs"
        in PAGE
    )
    assert f"perfect fusion could save {100 * norm['float32'] / product['float32']:.0f} %" in PAGE
    assert f"it is {norm['bfloat16']:.1f} µs beside {product['bfloat16']:.0f} µs" in PAGE
    times = generate.measured("float32")[GPT2, "forward"]
    reached = {
        who: 100 * work["float32"].operations / (t * 1e-6) / work["float32"].ceiling("float32")
        for who, t in times.items()
    }
    said = re.search(
        r"PyTorch reaches (\d+) % of the float32 roof, the unfused kernels (\d+) %, the one-thread fused kernel ([\d.]+) %",
        PAGE,
    ).groups()
    assert said == (f"{reached['PyTorch']:.0f}", f"{reached['unfused']:.0f}", f"{reached['fused']:.2f}")
    single, half = (
        min(generate.measured(dtype)[(4, 4, 8, 16), "forward"].values()) for dtype in roofline.PEAKS
    )
    assert f"The fastest one took {single:.1f} µs in float32, and {half:.1f} µs in bfloat16" in PAGE
    assert max(roofline.pair((4, 4, 8, 16), "float32", "forward").least_seconds("float32")) < 1e-9


def test_no_measured_point_lies_above_the_roof():
    from book.build import generate
    from book.figures import roofline

    for dtype in roofline.PEAKS:
        for (dims, direction), times in generate.measured(dtype).items():
            work = roofline.pair(dims, dtype, direction)
            assert work.operations / (min(times.values()) * 1e-6) < work.ceiling(dtype)
