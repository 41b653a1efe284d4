"""What an order of positions buys on a GPU: attention in a window by this project's kernels on tensor cores and by PyTorch's compiled
FlexAttention, in each order and tile.

    python -m book.measure.orders --csv orders.csv

Every candidate computes the same function of the same cells, forward and backward, in bfloat16; each gets its tensors in
its own order, so that no gather is timed with it. Before it is timed, its output and gradients are compared with those of
masked dense attention in float64. The kernels are `harness.nn.window_attention`, whose blocks own 64 or 128
positions and look at tiles of 64. Beside them and FlexAttention with a block mask made from the order stand
scaled_dot_product_attention, dense with the window as a mask, and dense without one, which is another function; and
FlexAttention with NATTEN's window (Hassani et al., "Neighborhood Attention Transformer", 2023), row by row and along the
Z-order, as the attention-gym of PyTorch's makers has them: at the grid's edge it moves inward, which is another function too. The
gathers of query, key and value into an order are timed by themselves. The tiles that a block mask holds are counted and
compared with those of `harness.nn.orders`. Times are by CUDA events; candidates take turns in shuffled rounds. MAX is needed only to
build the kernels' extension module.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

from book.measure.shared import write_to
from harness.bench.timing import CudaClock, Protocol, WallClock, summary, take_turns
from harness.nn.window import TILE, GridWindow, window_attention
from harness.puzzles.p24 import orders

SIZES = ((64, 4), (64, 8), (128, 4), (128, 8))
"""Side of the grid and radius of the window."""
TILES = (128,)
DIM = 64
ALIKE = 2.0**-5
"""How far two computations in bfloat16 may be apart, of the largest element."""
EXACT = 2.0**-7
"""How far one may be from float64, of the norm of a head's tensor."""
CHUNK = 1024
"""Queries whose scores are in memory at a time where float64 is computed."""
BITS = ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF))
"""How every other bit of a word moves together: shifts, and what is kept after each."""
Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Candidate:
    """One way to compute the window.

    Attributes:
        order: The order of its positions, "" where it has none.
        tile: Positions in a tile of queries; 0 without a mask of tiles.
        pairs: Pairs of tiles that are computed, a tile of queries of this size with one of keys: of 64 positions for this
            project's kernels, of the same size for FlexAttention; 0 without a mask of tiles.
        run: Tensors in the order of the positions -> the output.
        same: Whether it is the same function as the others.
    """

    order: str
    tile: int
    pairs: int
    run: Callable[..., torch.Tensor]
    same: bool = True


class Problem:
    """Query, key, value and the gradient of the output, [B, N, side * side, d], in any order."""

    def __init__(self, batch: int, heads: int, side: int, radius: int, device: torch.device):
        generator = torch.Generator(device).manual_seed(side + radius)
        shape = (batch, heads, side * side, DIM)
        dtype = torch.bfloat16
        self.side, self.radius, self.device = side, radius, device
        self.cells = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)]
        self.orders = {
            name: torch.tensor(make(side, side), device=device) for name, make in orders.ORDERS.items()
        }
        self._ordered: dict[str, Tensors] = {"": self.cells}

    def ordered(self, order: str) -> Tensors:
        """The four tensors in an order, the same ones at every call."""
        if order not in self._ordered:
            self._ordered[order] = [t.index_select(2, self.orders[order]) for t in self.cells]
        return self._ordered[order]

    def placed(self, tensors: Tensors, order: str) -> Tensors:
        """Tensors in an order with their rows where the cells are."""
        return [t if not order else t.index_select(2, self.orders[order].argsort()) for t in tensors]

    def window(self, order: str) -> Callable[..., torch.Tensor]:
        """FlexAttention's mask: whether position q sees position k."""
        rows, columns = (t.int() for t in (self.orders[order] // self.side, self.orders[order] % self.side))
        radius = torch.tensor(self.radius, device=self.device, dtype=torch.int32)

        def near(b, h, q, k):
            down, right = (rows[q] - rows[k]).abs(), (columns[q] - columns[k]).abs()
            return (down <= radius) & (right <= radius)

        return near

    def by_arithmetic(self, order: str, inward: bool = False) -> Callable[..., torch.Tensor]:
        """The same without a table, from the position itself, as masks for images are usually written.

        With `inward` a window that would reach over the grid's edge moves inward, as NATTEN's does: all have one size.
        """
        side, radius, squares = self.side, self.radius, self.side // orders.SQUARE

        def row_major(i):
            return i // side, i % side

        def tiled(i):
            square, inside = i // orders.SQUARE**2, i % orders.SQUARE**2
            row = square // squares * orders.SQUARE + inside // orders.SQUARE
            return row, square % squares * orders.SQUARE + inside % orders.SQUARE

        def even_bits(i):
            i = i & 0x55555555
            for shift, kept in BITS:
                i = (i | i >> shift) & kept
            return i

        def z_order(i):
            return even_bits(i >> 1), even_bits(i)

        place = {"row-major": row_major, "tiled": tiled, "z-order": z_order}[order]

        def near(b, h, q, k):
            middle, key = place(q), place(k)
            if inward:
                middle = [at.clamp(radius, side - 1 - radius) for at in middle]
            return ((middle[0] - key[0]).abs() <= radius) & ((middle[1] - key[1]).abs() <= radius)

        return near

    def dense_mask(self) -> torch.Tensor:
        """The window as a mask of cells, bool [L, L]."""
        rows, columns = (
            torch.arange(self.side**2, device=self.device).int().div(self.side, rounding_mode="floor"),
            (torch.arange(self.side**2, device=self.device).int() % self.side),
        )
        return ((rows[:, None] - rows).abs() <= self.radius) & (
            (columns[:, None] - columns).abs() <= self.radius
        )

    def exact(self) -> Tensors:
        """Output and gradients of the first head by masked dense attention in float64, [side * side, d] each."""
        *leaves, grad = (t[0, 0].double() for t in self.cells)
        query, key, value = (t.requires_grad_() for t in leaves)
        mask, outputs = self.dense_mask(), []
        gradients = [torch.zeros_like(t) for t in leaves]
        for part in torch.arange(len(query), device=self.device).split(CHUNK):
            scores = (query[part] @ key.T * DIM**-0.5).masked_fill(~mask[part], -torch.inf)
            output = scores.softmax(-1) @ value
            outputs.append(output.detach())
            for total, more in zip(gradients, torch.autograd.grad(output, leaves, grad[part]), strict=True):
                total += more
        return [torch.cat(outputs), *gradients]


# ---- Candidates ---------------------------------------------------------------------------------------------


def block_mask(problem: Problem, mask: Callable, tile: int) -> tuple[BlockMask, int]:
    """FlexAttention's block mask of a window, and how many tiles it holds, partial ones and whole ones."""
    length = problem.side**2
    blocks = create_block_mask(mask, None, None, length, length, device=problem.device, BLOCK_SIZE=tile)
    whole = blocks.full_kv_num_blocks
    return blocks, int(blocks.kv_num_blocks.sum() + (whole.sum() if whole is not None else 0))


def flex(problem: Problem, order: str, tile: int, compiled: Callable, by_table: bool = True) -> Candidate:
    """FlexAttention in an order. Raises AssertionError where its block mask holds other tiles than are counted."""
    mask = problem.window(order) if by_table else problem.by_arithmetic(order)
    blocks, pairs = block_mask(problem, mask, tile)
    counted = orders.window_tiles(
        orders.ORDERS[order](problem.side, problem.side), problem.side, problem.radius, tile
    )
    assert pairs == counted.sum(), (
        f"{order}, tiles of {tile}: {pairs} in the block mask, {counted.sum()} counted"
    )
    return Candidate(order, tile, pairs, partial(compiled, block_mask=blocks))


def natten(problem: Problem, order: str, tile: int, compiled: Callable) -> Candidate:
    """FlexAttention with NATTEN's window, which is another function at the grid's edge."""
    blocks, pairs = block_mask(problem, problem.by_arithmetic(order, inward=True), tile)
    return Candidate(order, tile, pairs, partial(compiled, block_mask=blocks), same=False)


def ours(problem: Problem, order: str, blocks: int, attend: Callable) -> Candidate:
    """This project's kernels in an order; a block of threads owns so many tiles of queries and walks over what any of them needs."""
    window = GridWindow(orders.ORDERS[order](problem.side, problem.side), problem.side, problem.radius)
    count = len(window.tiles)
    needed = np.pad(window.tiles, ((0, -count % blocks), (0, 0))).reshape(-1, blocks, count).any(axis=1)
    return Candidate(order, TILE * blocks, int(needed.sum()), partial(attend, window=window, blocks=blocks))


def makers(
    problem: Problem, tiles: tuple[int, ...], compiled: Callable
) -> dict[str, Callable[[], Candidate]]:
    """What makes each candidate, by name."""
    attend = window_attention if problem.device.type == "cuda" else window_on_cpu
    mask = problem.dense_mask()
    by_name: dict[str, Callable[[], Candidate]] = {
        "SDPA, masked": lambda: Candidate("", 0, 0, partial(F.scaled_dot_product_attention, attn_mask=mask)),
        "SDPA, every key": lambda: Candidate("", 0, 0, F.scaled_dot_product_attention, same=False),
    }
    for blocks, order in itertools.product((1, 2), orders.ORDERS):
        by_name[f"Mojo, {order}, {TILE * blocks}"] = partial(ours, problem, order, blocks, attend)
    for tile in tiles:
        for order in orders.ORDERS:
            by_name[f"Flex, {order}, {tile}"] = partial(flex, problem, order, tile, compiled)
        for order in ("row-major", "z-order", "tiled"):
            by_name[f"Flex, {order} by arithmetic, {tile}"] = partial(
                flex, problem, order, tile, compiled, False
            )
        for order in ("row-major", "z-order"):
            by_name[f"Flex, NATTEN {order}, {tile}"] = partial(natten, problem, order, tile, compiled)
    return by_name


def on_cpu(q, k, v, *, block_mask: BlockMask) -> torch.Tensor:
    """Stands for compiled FlexAttention, which has no backward pass on a CPU: so this program can be tried without a GPU."""
    length = q.shape[2]
    mask = create_mask(block_mask.mask_mod, None, None, length, length, device=q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def window_on_cpu(q, k, v, window: GridWindow, blocks: int) -> torch.Tensor:
    """Stands for the kernels, likewise."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=window.mask(q.device))


def calls(problem: Problem, candidate: Candidate) -> dict[str, Callable[[], Tensors]]:
    """What is timed of a candidate: the forward pass, as training runs it, and it with the backward pass."""
    *leaves, grad = problem.ordered(candidate.order)
    leaves = [t.detach().requires_grad_() for t in leaves]

    def forward() -> Tensors:
        return [candidate.run(*leaves)]

    def both() -> Tensors:
        output = candidate.run(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

    return {"forward": forward, "both": both}


def apart(got: Tensors, expected: Tensors) -> float:
    """The largest difference, relative to the largest element of each tensor."""
    return max(
        float((one.float() - other.float()).abs().max() / other.float().abs().max())
        for one, other in zip(got, expected, strict=True)
    )


def off(got: Tensors, exact: Tensors) -> float:
    """The largest error of the first head's tensors, relative to the norm of each."""
    return max(
        float((one[0, 0] - other).norm() / other.norm()) for one, other in zip(got, exact, strict=True)
    )


# ---- The run ------------------------------------------------------------------------------------------------


def gather(tensors: Tensors, index: torch.Tensor) -> Tensors:
    """Tensors brought into an order."""
    return [t.index_select(2, index) for t in tensors]


def scatter(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """A tensor brought back."""
    return torch.empty_like(tensor).index_copy_(2, index, tensor)


def measure(
    problem: Problem, tiles: tuple[int, ...], compiled: Callable, clock, protocol: Protocol
) -> list[dict]:
    """A row for each candidate and pass, and for the gathers. One that cannot be run has a note, and no time."""
    candidates: dict[str, Candidate] = {}
    timed: dict[tuple[str, str], Callable[[], object]] = {}
    rows, expected, exact = [], None, problem.exact()
    errors: dict[str, float] = {}
    for name, make in makers(problem, tiles, compiled).items():
        try:
            candidate = make()
            passes = calls(problem, candidate)
            got = problem.placed(passes["both"](), candidate.order)
        except Exception as error:  # a candidate that this PyTorch lacks is a line of the table
            rows.append(
                {"candidate": name, "note": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
            )
            continue
        if candidate.same:
            expected = expected or got
            distance = apart(got, expected)
            errors[name] = off(got, exact)
            if not (distance <= ALIKE and errors[name] <= EXACT):
                note = f"WRONG: {distance:.1e} from the first, {errors[name]:.1e} from float64"
                rows.append({"candidate": name, "note": note})
                continue
        candidates[name] = candidate
        timed.update({(name, part): call for part, call in passes.items()})
    for order in orders.ORDERS:
        index = problem.orders[order]
        timed[f"gather of Q, K and V, {order}", "forward"] = partial(gather, problem.cells[:3], index)
        timed[f"scatter of O, {order}", "forward"] = partial(scatter, problem.cells[0], index)
    timed["copy of Q, K and V", "forward"] = lambda: [t.clone() for t in problem.cells[:3]]
    for (name, part), times in take_turns(timed, clock, protocol).items():
        summed_up, candidate = summary(times), candidates.get(name)
        rows.append(
            {
                "candidate": name,
                "pass": part,
                "tile_pairs": candidate.pairs if candidate else "",
                "error": f"{errors[name]:.1e}" if name in errors else "",
                "median_us": f"{summed_up.median:.1f}",
                "p20_us": f"{summed_up.p20:.1f}",
                "p80_us": f"{summed_up.p80:.1f}",
                "samples": len(times),
            }
        )
    return rows


COLUMNS = (
    *("B", "N", "d", "dtype", "side", "radius"),
    *("candidate", "pass", "tile_pairs", "error", "median_us", "p20_us", "p80_us", "samples", "note"),
)


def main(arguments: list[str] | None = None) -> int:
    """Measures every size, prints a line for each candidate, and writes a CSV. 1 where a candidate is wrong."""
    parser = argparse.ArgumentParser(prog="book.measure.orders", description=main.__doc__)
    add = parser.add_argument
    add("--sizes", nargs="+", default=[f"{side}:{radius}" for side, radius in SIZES], metavar="S:R")
    add("--tiles", type=int, nargs="+", default=TILES)
    add("--batch", type=int, default=8)
    add("--heads", type=int, default=12)
    add("--rounds", type=int, default=9)
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--csv", type=Path)
    flags = parser.parse_args(arguments)
    device = torch.device(flags.device)
    on_gpu = device.type == "cuda"
    torch._dynamo.config.recompile_limit = 64  # pyright: ignore[reportAttributeAccessIssue]
    compiled = torch.compile(flex_attention, dynamic=False) if on_gpu else on_cpu
    clock = CudaClock() if on_gpu else WallClock()
    wrong = []

    def rows() -> Iterator[dict]:
        for side, radius in (map(int, size.split(":")) for size in flags.sizes):
            problem = Problem(flags.batch, flags.heads, side, radius, device)
            protocol = Protocol(flags.rounds, 10_000.0, (0.01, 0.02) if on_gpu else (0.0, 0.0))
            known = {"B": flags.batch, "N": flags.heads, "d": DIM, "dtype": "bfloat16", "side": side}
            for row in measure(problem, tuple(flags.tiles), compiled, clock, protocol):
                wrong.extend(
                    each for each in ("WRONG", "AssertionError") if row.get("note", "").startswith(each)
                )
                yield known | {"radius": radius} | row

    write_to(flags.csv, rows(), COLUMNS)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
