"""No kernel of the page on attention by tensor cores beats the arithmetic, and its ratios are the measured ones."""

from book_paths import BOOK

from book.figures import attention_times
from book.figures.attention_times import CUDNN, OURS

PAGE = " ".join((BOOK / "src" / "puzzle_23" / "tensor_cores.md").read_text().split())
TIMES = attention_times.read()


def test_no_kernel_is_faster_than_the_products_that_it_makes():
    for size in TIMES.sizes("graph"):
        if size[3] == "bfloat16":
            taken = TIMES.microseconds(size, "graph", OURS)
            assert taken is not None and taken > attention_times.predicted(TIMES, size)["done"]


def test_what_the_page_says_of_cudnn_and_flash_is_what_was_measured():
    over: dict[tuple[int, bool], list[float]] = {}
    for size in TIMES.sizes("graph"):
        S, d, causal, _ = size
        taken = {who: TIMES.microseconds(size, "graph", who) or 0 for who in (OURS, CUDNN, "flash")}
        assert taken[OURS] < taken["flash"]
        if S % 64 == 0:
            over.setdefault((d, causal), []).append(taken[OURS] / taken[CUDNN])
    said = {
        (64, False): (0.93, 1.01, "0.93 to 1.01 with heads of 64"),
        (64, True): (0.87, 0.97, "0.87 to 0.97 under a causal mask"),
        (128, False): (1.10, 1.14, "1.10 to 1.14 with heads of 128"),
    }
    for kind, (least, most, words) in said.items():
        assert (round(min(over[kind]), 2), round(max(over[kind]), 2)) == (least, most) and words in PAGE


def test_what_the_exponentials_take_of_the_products_time():
    for size in TIMES.sizes("graph"):
        made = attention_times.predicted(TIMES, size)
        share = made["exponentials"] / made["done"]
        if size[3] == "bfloat16":
            assert (0.5 < share < 0.6) if size[1] == 64 else (0.25 < share < 0.3), size
    assert (
        "a little over half of that time for heads of 64 elements" in PAGE
        and "a little over a quarter for heads of 128" in PAGE
    )
