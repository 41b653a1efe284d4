"""Attention in a window of a grid: the function, on the CPU and on a GPU, and what it refuses. The kernels themselves run on the
virtual GPU in tests/p23/test_p23_extension.py."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from typed import loosely, three

from harness.nn import GridWindow, attention_direct, window, window_attention
from harness.puzzles.p24 import orders

HEIGHT, WIDTH, RADIUS = 5, 7, 2


def grid_window(order="hilbert"):
    return GridWindow(orders.ORDERS[order](HEIGHT, WIDTH), WIDTH, RADIUS)


def tensors(dtype=torch.float64, length=HEIGHT * WIDTH, d=8):
    generator = torch.Generator().manual_seed(0)
    return three(
        torch.randn(2, 3, length, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(3)
    )


def seen_by_hand(order):
    """Which pairs see each other, cell by cell."""
    cells = [divmod(int(cell), WIDTH) for cell in orders.ORDERS[order](HEIGHT, WIDTH)]
    return torch.tensor([[abs(r - y) <= RADIUS and abs(c - x) <= RADIUS for y, x in cells] for r, c in cells])


@pytest.mark.parametrize("order", list(orders.ORDERS))
def test_the_mask_is_the_window_whatever_the_order(order):
    assert torch.equal(grid_window(order).mask(torch.device("cpu")), seen_by_hand(order))


@pytest.mark.parametrize("given", [np.arange(6), torch.arange(6)])
def test_an_order_may_be_an_array_or_a_tensor(given):
    assert GridWindow(given, 3, 1).rows == 2


def spread(words, rows, length):
    """Which pairs see each other, and which tiles are visited, as a kernel finds them whose blocks own so many rows."""
    words, tiles = words.view(np.uint32), -(-length // window.TILE)
    seen = np.zeros((-(-length // rows) * rows, tiles * window.TILE), bool)
    visits = []
    own_tiles = rows // window.TILE
    for block in range(-(-length // rows)):
        entries = words[words[block] : words[block + 1]].reshape(-1, 1 + own_tiles)
        visits.append(entries[:, 0].tolist())
        for tile, *patterns in entries.tolist():
            for own, start in enumerate(patterns):
                for place in range(128 if start else 0):
                    group, lane = divmod(place, 32)
                    for bit in range(32):
                        row = block * rows + own * 64 + group * 16 + bit % 4 // 2 * 8 + lane // 4
                        column = tile * 64 + bit // 4 * 8 + lane % 4 * 2 + bit % 2
                        seen[row, column] = words[start + place] >> bit & 1
    return seen, visits


@pytest.mark.parametrize("blocks", [1, 2])
def test_what_the_kernels_read(blocks):
    """Bit by bit the window, none past the end; lists of the tiles that are needed, in order."""
    made = GridWindow(orders.hilbert(13, 17), 17, 3)
    length = 13 * 17
    seen, visits = spread(made.words(blocks), 64 * blocks, length)
    assert np.array_equal(seen[:length, :length], made.mask(torch.device("cpu")).numpy())
    assert not seen[length:].any() and not seen[:, length:].any()
    needed = np.pad(made.tiles, ((0, -len(made.tiles) % blocks), (0, 0)))
    needed = needed.reshape(-1, blocks, len(made.tiles))
    assert visits == [np.flatnonzero(rows.any(axis=0)).tolist() for rows in needed]


def test_a_grid_has_few_patterns():
    """Of squares, one for itself and each of its eight neighbours; of whole rows, one."""
    numbers, patterns = GridWindow(orders.tiled(32, 32), 32, 2).patterns
    assert patterns.shape == (9, 128) and numbers.max() == 8 and (numbers >= 0).sum() == 10 * 10
    assert len(GridWindow(orders.row_major(64, 64), 64, 4).patterns[1]) == 1


@pytest.mark.compiler
@pytest.mark.usefixtures("attention_graphs")
def test_it_is_dense_attention_with_the_window_as_a_mask():
    given = tensors()
    grad = torch.randn(given[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for scale in (None, 0.7):
        got = window_attention(*given, grid_window(), scale=scale)
        right = F.scaled_dot_product_attention(*given, attn_mask=seen_by_hand("hilbert"), scale=scale)
        torch.testing.assert_close(got, right)
        for one, other in zip(*(torch.autograd.grad(out, given, grad) for out in (got, right)), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.compiler
@pytest.mark.usefixtures("attention_graphs")
def test_the_book_s_example_runs():
    runpy.run_path(str(Path(__file__).parents[2] / "book" / "examples" / "window.py"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: GridWindow(np.arange(6), 4, 1), "order: expected every cell of a grid of 4 columns once"),
        (lambda: GridWindow(np.array([0, 0, 1, 2]), 2, 1), "order: expected every cell"),
        (lambda: GridWindow(np.arange(4).reshape(2, 2), 2, 1), "order: expected every cell"),
        (lambda: GridWindow(np.arange(0), 2, 1), "order: expected every cell"),
        (lambda: GridWindow(np.arange(4), 2, -1), "radius: expected at least 0, got -1"),
        (
            lambda: window_attention(*tensors(length=34), grid_window()),
            r"query: expected \[B, N, 35, d\], got \[2, 3, 34, 8\]",
        ),
        (
            lambda: window_attention(*tensors()[:2], tensors(d=4)[2], grid_window()),
            "query, key, value: expected one shape",
        ),
        (lambda: window_attention(*tensors(), grid_window(), blocks=3), "blocks: expected 1 or 2, got 3"),
        (lambda: GridWindow(np.arange(4), 0, 1), "width: expected at least 1, got 0"),
    ],
)
def test_what_does_not_go_together_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


NO_WHOLE_NUMBERS = [float("nan"), 1.5, 4.0, "2", None, True, torch.tensor(2.0)]


@pytest.mark.parametrize("given", NO_WHOLE_NUMBERS, ids=repr)
@pytest.mark.parametrize("name", ["width", "radius"])
def test_what_is_no_whole_number_is_named(name, given):
    with pytest.raises(TypeError) as raised:
        GridWindow(np.arange(8), **{"width": 4, "radius": 1, name: given})
    assert str(raised.value) == f"{name}: expected a whole number, got {given!r}"


@pytest.mark.parametrize("number", [np.int64(4), torch.tensor(4)], ids=repr)
def test_whole_numbers_may_be_numpy_s_or_torch_s(number):
    assert GridWindow(np.arange(8), number, number).radius == 3


def bad_call(**changed):
    """window_attention with some arguments changed."""
    query, key, value = tensors()
    return window_attention(
        **{"query": query, "key": key, "value": value, "window": grid_window(), **changed}
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: loosely(GridWindow)(None, 4, 1), "order: expected a tensor or an array, got NoneType"),
        (lambda: GridWindow(np.arange(4.0), 4, 1), "order: expected whole numbers, got float64"),
        (lambda: bad_call(window=None), "window: expected a GridWindow, got NoneType"),
        (lambda: bad_call(query=None), "query: expected a torch tensor, got NoneType"),
        (lambda: bad_call(value=tensors(torch.float32)[2]), "value: expected float64, as query, got float32"),
        (
            lambda: bad_call(query=tensors()[0].long()),
            "query: expected float32, float64, bfloat16, float16, got int64",
        ),
        (lambda: bad_call(blocks=1.0), "blocks: expected a whole number, got 1.0"),
        (lambda: bad_call(scale="x"), "scale: expected a number or None, got str"),
    ],
)
def test_the_wrong_kind_of_argument_is_named(call, words):
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == words


def test_a_radius_beyond_the_grid_is_the_whole_grid():
    assert GridWindow(orders.row_major(3, 4), 4, 10**9).radius == 3
    assert GridWindow(orders.row_major(3, 4), 4, 10**9).mask(torch.device("cpu")).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize(("order", "d"), [("row-major", 64), ("hilbert", 64), ("hilbert", 96)])
def test_gpu_kernels(order, d, blocks, dtype):
    """Both passes, over heads that lie behind one another in each row."""
    made = GridWindow(orders.ORDERS[order](40, 56), 56, 5)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (2, 40 * 56, 3, d)
    grad, *rest = (
        torch.randn(shape, generator=generator, device="cuda").to(dtype).transpose(1, 2).requires_grad_()
        for _ in range(4)
    )
    leaves = three(rest)
    assert attention_direct.kernels(leaves[0].device) is not None
    got = window_attention(*leaves, made, blocks=blocks)
    gradients = torch.autograd.grad(got, leaves, grad)
    doubles = three(leaf.detach().double().requires_grad_() for leaf in leaves)
    right = F.scaled_dot_product_attention(*doubles, attn_mask=made.mask(leaves[0].device))
    expected = torch.autograd.grad(right, doubles, grad.double())
    limit = 2 * torch.finfo(dtype).eps
    for one, other in zip((got, *gradients), (right, *expected), strict=True):
        assert (one.double() - other).abs().max() < limit * other.abs().max()
    again = torch.autograd.grad(window_attention(*leaves, made, blocks=blocks), leaves, grad)
    assert all(torch.equal(one, other) for one, other in zip(gradients, again, strict=True))
