"""What follows from the shapes and the dtype of a call of LayerNorm + Linear, worked out once: who multiplies, and in what memory.

The three products are Y = ln_out W^T, dln = dY W and dW = dY^T ln_out. The choice compares estimates, whose constants come
from an H200 (book/records/products.csv holds the times of both ways, and every kernel's):

- This project's kernel for Hopper cuts a product into tiles that its multiprocessors take in rounds; `own_cost` counts them
  as `plan_tiles` in `kernels/common/gemm_hopper_launches.mojo` does. Few tiles leave most of the GPU idle. Its products make the
  column sums of dY, dgamma and dbeta on the side, which are launches of their own beside the library's.
- The library splits the sums of few tiles among blocks, and is a little faster in the largest products.
- Rows of a 16-bit matrix that are no multiple of 16 bytes keep both from tensor cores' wide loads: the library falls to a
  fifth. Copies with padded rows then pay from some size on; on Hopper this project's path makes them by itself.

A plain loop of small calls waits for the host, to whom this project's path is the cheaper one; a CUDA graph waits for the
GPU. So where they disagree, both choices are kept.

In a graph the backward pass may also be two branches, dln with what follows from it and dW from an ln_out of its own
(book/records/branches.csv): dW then waits for nobody, and each fills the multiprocessors that the other leaves
idle, for the price of reading the input once more.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from harness.nn.arguments import wide
from harness.nn.extension_kernels import contiguous_strides, padded

LINE = 128
"""Bytes: rows that the module copies begin at multiples of so many (`pitch_of` in `kernels/common/tensor_maps.mojo`)."""
PAIR_ELEMENTS = 8
"""Of which the rows of a matrix that is split into a pair must be a multiple."""
LARGEST = 2**31 - 1
AUTO, LEAST = "auto", "least"
MEMORY = (AUTO, LEAST)
"""What both passes are made for: time, and the least memory only where there is no room otherwise; or the least memory."""
OWN, LIBRARY, PADDED = "own", "library", "library on padded rows"

LIBRARY_FROM = 2**24
"""From this many multiply-adds on, the products of float32 and float64 are torch's own, between this project's row
kernels: the vendor's library is faster in them, and follows torch's flag for TF32 by itself."""
LIBRARY_FROM_IN_A_LOOP = 3 * 2**27
"""The same for plain calls, of which smaller ones wait for the host."""
SHORT_SUM = 8192
"""Rows up to which they do so: over more of them the library's sums, which it splits, lose fewer digits."""
ALONG_SUMS_FROM, ALONG_SUMS_ELEMENTS = 2**33, 2**21
"""Multiply-adds, and elements of dW, from which on dW in TF32 reads ln_out transposed on Hopper. There it has the bits that it has
without, at four sizes on an H100; at 8192 rows, 768 -> 1024 a result was more than twice as far off as PyTorch's on an H200."""
LIBRARY_FROM_UNALIGNED = 2**16
"""The same for the 16-bit types where rows of a factor begin at any address, and neither wide loads nor tensor cores' tiles
fit."""

PROCESSORS = 132
TILE_ROWS, TILE_COLUMNS, DEPTH = 128, (256, 192, 128), 64
TILE_COST, HANDING_COST, NARROW = 650, 1200, 9 / 8
"""Of this project's product: its tiles, what a tile and what handing over unfinished sums cost beside the steps, in steps
of one column, and how much dearer a step of the narrowest tile is."""
EMPTY_COLUMNS, EMPTY_ROWS = TILE_COLUMNS[-1] // 2, 8 * TILE_ROWS * PROCESSORS
"""Columns below which most of every tile is empty, and rows above which there are so many of them, eight rounds, that reading and
writing come on top."""
NARROW_ROWS = 2**16
"""Rows of fewer columns than that from which on both products may be the library's on branches of their own."""
STEP = 0.0023 * 1.15
"""Microseconds of a step of one column: as planned, and by how much the measured products are above."""
LARGE, LARGE_COST = 2**37, 1.05
"""From so many multiply-adds on the GPU is at its power limit, and this project's product slower by so much."""
SMALL = 2**15
"""Multiply-adds up to which this project has a kernel for each whole pass."""
MOST_FEW_ROWS = 64
"""The most rows that are few: of more, adding columns row by row takes longer than a launch."""
FEW_WORK = 2**24
"""Multiply-adds of few rows up to which the library's products of unaligned ones cost less than the copies for others."""
LAUNCH = 3.0
"""Microseconds that a product of the library takes beside its work, and that a further launch costs."""
OWN_LAUNCH = 1.0
"""The same for this project's product, which starts early."""
LIBRARY_RATE, UNALIGNED_RATE = 780e6, 130e6
"""Floating-point operations of the library in a microsecond."""
UNALIGNED_LAUNCH, UNALIGNED_BIAS = 10.0, 25.0
"""Microseconds that a product of unaligned rows takes beside its work, and that adding a bias to it takes."""
BANDWIDTH = 3.6e6
"""Bytes in a microsecond of a product that waits for memory."""
COPY_BANDWIDTH, OWN_COPY_BANDWIDTH = 1.2e6, 4e6
"""Bytes in a microsecond of a copy of unaligned rows: torch's, and this project's on Hopper."""
ROWS, SUMS = 2.5, 2.0
"""Microseconds of a row kernel beside its reading and writing, and of adding what several blocks have summed."""
BESIDE_ROWS, BESIDE, BESIDE_LIBRARY = 1.2, 4.0, 2.5
"""Two branches: how much longer row kernels take for what they read and write beside products, and microseconds that both
branches, and a dW of the library there, take beside their work."""
BRANCH_GAIN = 0.98
"""What two branches must take of one for them to be chosen."""
MANY_SUMS = 2**19
"""Elements of dY from which on summing its columns is a branch of its own, where dln is the library's."""
UNALIGNED_BRANCHES, UNALIGNED_WIDTH = 2**19, 1024
"""Elements of the input, and of a row, up to which the backward pass over unaligned rows is two branches: their row kernels
take element after element, and each branch makes its copies."""
UNALIGNED_ROWS, UNALIGNED_WORK = 512, 2**25
"""Rows and multiply-adds up to which those branches are the library's."""
LOOSE = 1.15
"""By how much this project's product is slower where it writes rows that begin at any address."""
PADDED_GAIN = 0.9
"""What the library on padded rows must take of this project's time on Hopper to be chosen."""
HOST, COPYING_HOST = 350.0, 1000.0
"""Microseconds of GPU time of both passes below which a loop of calls waits for the host: for this project's path, and
for the one that makes padded copies of torch's."""


class Products(NamedTuple):
    """What multiplies each product: OWN, LIBRARY or PADDED."""

    output: str
    dln: str
    dW: str


ALL_OWN = Products(OWN, OWN, OWN)
ALL_LIBRARY = Products(LIBRARY, LIBRARY, LIBRARY)


@dataclass(frozen=True)
class Choice:
    """The products of plain calls, those of calls that a CUDA graph captures, and whether the backward pass in a graph is
    two branches."""

    plain: Products
    captured: Products
    forked: bool = False

    @functools.cached_property
    def differs(self) -> bool:
        """Whether a graph's calls are made otherwise than plain ones."""
        return self.forked or self.plain is not self.captured


@dataclass(frozen=True)
class Plan:
    """What follows from the shapes and the dtype of a call."""

    rows: int
    H: int
    O: int
    dtype: torch.dtype
    wide: torch.dtype
    """Of the statistics."""
    choice: Choice
    """What multiplies."""
    pairs: bool
    """Whether this project's products of float32 are made of pairs of float16 matrices."""
    transposed: bool
    """Whether linear_weight lies in memory as [H, O], as in GPT-2; then so does its gradient."""
    weight_room: int
    """Elements that the memory of dW must have for the module, which first puts a copy of linear_weight there; 0: no more
    than dW itself."""
    input_size: tuple[int, ...]
    input_strides: tuple[int, ...]
    output_size: tuple[int, ...]
    output_strides: tuple[int, ...]
    statistics_size: tuple[int, ...]
    statistics_strides: tuple[int, ...]
    lean: bool = False
    """Whether memory counts more than time: the backward pass makes dW first and gives its ln_out back before it makes dln, sums over
    rows have few shares, and no factor of 16 bits is copied."""


@functools.lru_cache(maxsize=4096)
def make_plan(
    shape: torch.Size,
    output_dim: int,
    dtype: torch.dtype,
    transposed: bool = False,
    hopper: bool = False,
    algorithm: str = "fast",
    memory: str = AUTO,
) -> Plan:
    """The plan for x of a shape [..., H] and linear_weight [O, H], which may lie transposed, on a GPU that may be a Hopper;
    by pairs of float16, or with the least memory, where that is asked for and suits.

    Raises ValueError where a size is beyond the 32-bit integers that the kernels take.
    """
    rows, H = math.prod(shape[:-1]), shape[-1]
    for name, size in (("rows", rows), ("H", H), ("O", output_dim)):
        if size > LARGEST:
            raise ValueError(f"{name}: the kernels take at most {LARGEST:,}, got {size:,}")
    whole = H % PAIR_ELEMENTS == 0 == output_dim % PAIR_ELEMENTS
    pairs = algorithm == "pairs" and hopper and whole and not transposed and dtype == torch.float32
    lean = memory == LEAST
    if pairs:
        choice = same(ALL_OWN)
    else:
        choice = choose(rows, H, output_dim, dtype, transposed=transposed, hopper=hopper, lean=lean)
    output_size = (*shape[:-1], output_dim)
    statistics_size = (2, *shape[:-1])
    return Plan(
        rows,
        H,
        output_dim,
        dtype,
        wide(dtype),
        choice,
        pairs,
        transposed,
        weight_room(H, output_dim, dtype) if hopper and not lean else 0,
        tuple(shape),
        contiguous_strides(shape),
        output_size,
        contiguous_strides(output_size),
        statistics_size,
        contiguous_strides(statistics_size),
        lean,
    )


def weight_room(H: int, output_dim: int, dtype: torch.dtype) -> int:
    """The elements of linear_weight on Hopper where its rows must be copied to begin at multiples of LINE bytes; else 0."""
    copied = dtype.itemsize == 2 and padded(H, dtype) != H
    step = LINE // dtype.itemsize
    return output_dim * -(-H // step) * step if copied else 0


# ---- Who multiplies -----------------------------------------------------------------------------------------


def choose(
    rows: int,
    H: int,
    O: int,
    dtype: torch.dtype,
    *,
    transposed: bool = False,
    hopper: bool = False,
    lean: bool = False,
) -> Choice:
    """What multiplies x [rows, H] and linear_weight [O, H].

    Args:
        rows: Of x.
        H: Input features.
        O: Output features.
        dtype: Of every factor.
        transposed: Whether linear_weight lies as [H, O], which this project's products do not read.
        hopper: Whether the GPU has the kernels for Hopper; elsewhere only what `dtype` and alignment say is known.
        lean: Whether memory counts more than time.
    """
    if not rows:
        return same(ALL_OWN)
    if transposed:
        return same(ALL_LIBRARY)
    work = rows * H * O
    if dtype.itemsize >= 4:
        if work >= LIBRARY_FROM_IN_A_LOOP or (work >= LIBRARY_FROM and rows > SHORT_SUM):
            return same(ALL_LIBRARY)
        return Choice(ALL_OWN, ALL_LIBRARY if work >= LIBRARY_FROM else ALL_OWN)
    if padded(H, dtype) != H or padded(O, dtype) != O:
        if work < LIBRARY_FROM_UNALIGNED:
            return same(ALL_OWN)
        if lean:
            return without_copies(H, dtype, hopper)
        return (unaligned_on_hopper if hopper else unaligned_choice)(rows, H, O, dtype)
    return hopper_choice(rows, H, O) if hopper and work > SMALL else same(ALL_OWN)


def same(products: Products) -> Choice:
    """One choice for both."""
    return Choice(products, products)


# ---- Aligned rows of 16 bits, on Hopper ---------------------------------------------------------------------


def hopper_choice(rows: int, H: int, O: int) -> Choice:
    """By the estimated times of each pass."""
    forward = {OWN: own_cost(rows, O, H).time, LIBRARY: library_cost(rows, O, H).time}
    output = min(forward, key=forward.__getitem__)
    one, two = chain_times(rows, H, O), branch_times(rows, H, O)
    chain, branches = min(one, key=one.__getitem__), min(two, key=two.__getitem__)
    forked = two[branches] < BRANCH_GAIN * one[chain]
    captured = Products(output, *(branches if forked else chain))
    own = forward[OWN] + own_cost(rows, H, O).time + own_cost(O, H, rows, shared=True).time
    plain = ALL_OWN if own < HOST else Products(output, *chain) if forked else captured
    return Choice(plain, captured, forked)


Times = dict[tuple[str, str], float]
"""Microseconds of a backward pass by who multiplies dln and dW."""


def chain_times(rows: int, H: int, O: int) -> Times:
    """One launch after the other: dln, the row kernel, dW; an own dW adds the sums on its way."""
    row_kernel = ROWS + 8 * rows * H / BANDWIDTH
    # Column sums of dY: two more launches where its rows are many, and dY read once more; else within another's.
    sums = 2 * rows * O / BANDWIDTH + 2 * LAUNCH if rows > 1024 else 1.0
    sums += 0 if rows <= MOST_FEW_ROWS else SUMS
    own, library = own_cost(rows, H, O).time, library_cost(rows, H, O).time
    own_dW, library_dW = own_cost(O, H, rows, shared=True).time, library_cost(O, H, rows).time
    return {
        (OWN, OWN): own + row_kernel + SUMS + own_dW,
        (OWN, LIBRARY): own + row_kernel + SUMS + library_dW,
        (LIBRARY, LIBRARY): library + row_kernel + sums + library_dW,
    }


def branch_times(rows: int, H: int, O: int) -> Times:
    """The longer branch, or the work of both where that fills the GPU. The library on both wants two workspaces, which only many
    narrow rows are worth."""
    apart = rows * O >= MANY_SUMS
    found = {}
    ways = [(OWN, OWN), (OWN, LIBRARY), (LIBRARY, OWN)]
    if H < EMPTY_COLUMNS and rows >= NARROW_ROWS:
        ways.append((LIBRARY, LIBRARY))
    for dln, dW in ways:
        mine = own_cost(rows, H, O) if dln == OWN else library_cost(rows, H, O)
        other = own_cost(O, H, rows, shared=True) if dW == OWN else library_cost(O, H, rows)
        behind = 0 if dln == LIBRARY and rows <= MOST_FEW_ROWS else SUMS
        first = mine.time + ROWS + 6 * rows * H / BANDWIDTH + behind
        late = BESIDE_LIBRARY if dW == LIBRARY else 0
        second = ROWS + 4 * rows * H / BANDWIDTH + other.time + late
        read = 10 * rows * H + (2 * rows * O if dln == LIBRARY and apart else 0)
        both = mine.work + other.work + late + BESIDE_ROWS * read / BANDWIDTH + BESIDE
        found[dln, dW] = max(first, second, both) + (LAUNCH / 2 if dln == LIBRARY and apart else 0)
    return found


class Cost(NamedTuple):
    """What a product takes."""

    time: float
    """Microseconds until it is done."""
    work: float
    """Microseconds of the whole GPU: less, where it leaves multiprocessors idle."""


def own_cost(m: int, n: int, k: int, *, shared: bool = False) -> Cost:
    """This project's product for Hopper, [m, n] with sums of k; `shared`: blocks may share tiles."""
    steps = math.ceil(k / DEPTH)
    costs = []
    for columns in TILE_COLUMNS:
        step = columns * (NARROW if columns == TILE_COLUMNS[-1] else 1)
        tiles = math.ceil(m / TILE_ROWS) * math.ceil(n / columns)
        tile = steps * step + TILE_COST
        costs.append((math.ceil(tiles / PROCESSORS) * tile, tiles * tile))
        shares = min(PROCESSORS // tiles, steps // 8) if shared else 0
        if shares >= 2:
            tile = math.ceil(steps / shares) * step + TILE_COST + (shares - 1) * HANDING_COST
            costs.append((tile, tiles * shares * tile))
    time, work = min(costs)
    step = STEP * (LARGE_COST if m * n * k >= LARGE else 1)
    waits = 2 * (m * k + k * n + m * n) / BANDWIDTH if n < EMPTY_COLUMNS and m > EMPTY_ROWS else 0
    return Cost(OWN_LAUNCH + waits + step * time, waits + step * work / PROCESSORS)


def library_cost(m: int, n: int, k: int) -> Cost:
    """The library's product of aligned rows: half of its writing is in nobody's shadow."""
    work = 2 * m * n * k / LIBRARY_RATE + m * n / BANDWIDTH
    return Cost(LAUNCH + max(work, 2 * (m * k + k * n + m * n) / BANDWIDTH), work)


# ---- Rows of 16 bits that are not aligned -------------------------------------------------------------------


def unaligned_choice(rows: int, H: int, O: int, dtype: torch.dtype) -> Choice:
    """Padded where the copies cost less than they win; never in a loop that waits for the host, for each is a call."""
    wide, tall = padded(H, dtype), padded(O, dtype)
    unaligned = UNALIGNED_LAUNCH + 2 * rows * H * O / UNALIGNED_RATE
    aligned = library_cost(rows, tall, wide).time
    weight = copy_time(tall, wide)
    output = aligned + weight + (copy_time(rows, O) if tall != O else 0)
    backward = 2 * aligned + 2 * weight + (copy_time(rows, tall) if tall != O else 0)
    captured = Products(
        PADDED if output < unaligned + UNALIGNED_BIAS else LIBRARY,
        *[PADDED if backward < 2 * unaligned else LIBRARY] * 2,
    )
    return Choice(ALL_LIBRARY if 3 * unaligned < COPYING_HOST else captured, captured)


def unaligned_on_hopper(rows: int, H: int, O: int, dtype: torch.dtype) -> Choice:
    """This project's products, which copy what they must; but the library's where the first has few tiles or long sums, and
    where all are so small that they take no longer than the copies."""
    work = rows * H * O
    small = rows <= MOST_FEW_ROWS and work <= FEW_WORK
    forked = H <= UNALIGNED_WIDTH and rows * H <= UNALIGNED_BRANCHES
    if small:
        return Choice(ALL_OWN, ALL_LIBRARY, forked)
    wide, tall = padded(H, dtype), padded(O, dtype)
    own = own_cost(rows, O, H).time * (LOOSE if tall != O else 1)
    own += 4 * O * H / OWN_COPY_BANDWIDTH if wide != H else 0
    library = library_cost(rows, tall, wide).time + copy_time(tall, wide)
    library += copy_time(rows, O) if tall != O else 0
    output = PADDED if library < PADDED_GAIN * own else OWN
    backward = own_cost(rows, H, O).time + own_cost(O, H, rows, shared=True).time
    plain = ALL_OWN if output == OWN or own + backward < HOST else Products(output, OWN, OWN)
    gradients = LIBRARY if forked and rows <= UNALIGNED_ROWS and work <= UNALIGNED_WORK else OWN
    return Choice(plain, Products(output, gradients, gradients), forked)


def without_copies(H: int, dtype: torch.dtype, hopper: bool) -> Choice:
    """Where memory counts: the library reads every factor as it lies, which takes longer. This project's product on Hopper
    copies no factor either where only the rows that it writes are unaligned."""
    output = OWN if hopper and padded(H, dtype) == H else LIBRARY
    return same(Products(output, LIBRARY, LIBRARY))


def copy_time(rows: int, columns: int) -> float:
    """Microseconds of torch's copy of a matrix whose rows are not aligned."""
    return LAUNCH + 4 * rows * columns / COPY_BANDWIDTH
