"""The roofline's numbers by hand; the logarithmic axes of the charts."""

import pytest

GPT2 = (8, 1024, 768, 3072)


def test_one_element_by_hand():
    """One row, one column, one output: every tensor is a single element."""
    from book.figures import roofline

    work = roofline.pair((1, 1, 1, 1), "float32", "forward")
    assert work == roofline.Work(2 + 8, 4 * 6 + 8)  # x, W, gamma, beta, bias, y; mean and rstd
    work = roofline.pair((1, 1, 1, 1), "bfloat16", "backward")
    assert work == roofline.Work(2 * (2 + 8), 2 * 10 + 8)  # dy, x, W, gamma, beta; dx, dW, dgamma, dbeta, db
    assert roofline.layernorm((1, 1, 1, 1), "float32") == roofline.Work(8, 4 * 4)


def test_bytes_agree_with_the_ledger():
    """The same tensors as in the ledger of a single fused launch, where nothing is left over."""
    from book.figures import roofline
    from book.measure import ledger

    for dims in ((4, 4, 8, 16), GPT2):
        assert roofline.pair(dims, "float32", "forward").bytes == ledger.moved("forward", "fused", dims)


def test_ceiling_is_the_lower_roof():
    from book.figures import roofline

    memory_bound = roofline.Work(operations=1e6, bytes=1e6)
    assert memory_bound.ceiling("float32") == pytest.approx(4.8e12)
    arithmetic_bound = roofline.Work(operations=1e12, bytes=1e6)
    assert arithmetic_bound.ceiling("float32") == pytest.approx(67e12)
    assert arithmetic_bound.ceiling("bfloat16") == pytest.approx(989e12)


def test_logarithmic_axes():
    from book.figures.charts import BOTTOM, LEFT, RIGHT, TOP, Axis, LogChart, powers

    chart = LogChart(300, "words", Axis("across", 1, 100), Axis("up", 1e-2, 1e2), width=400)
    assert chart.place(1, 1e-2) == (LEFT, 300 - BOTTOM)
    assert chart.place(100, 1e2) == (400 - RIGHT, TOP)
    assert chart.place(10, 1) == pytest.approx(((LEFT + 400 - RIGHT) / 2, (TOP + 300 - BOTTOM) / 2))
    assert list(powers(0.5, 200).values()) == ["1", "10", "100"]
    svg = chart.svg()
    assert svg.count("\n") == 1 and 'aria-label="words"' in svg and ">across<" in svg
